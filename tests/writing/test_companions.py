"""Files beside the weights: what is copied, what is left and why, and that no link leads out of the source."""

import json
import os
import shutil

import numpy as np
import pytest

import moe_jax
from moe_jax import cli
from moe_jax.loading import CheckpointError, SafetensorsFile
from moe_jax.writing import _companions
from tests.fuzz import bases
from tests.support.refusals import refuses


@pytest.fixture
def model(tmp_path):
    directory = tmp_path / "repository" / "model"
    bases.write(directory, bases.plain(np.random.default_rng(0)))
    return directory


def quantize(model, **options):
    return moe_jax.quantize_checkpoint(model, model.parent.parent / "out", scheme="bf16", **options)


WEIGHTS = {"config.json", "model.safetensors"}


def test_what_is_copied_and_what_is_left(model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(_companions, "MAX_FILE_BYTES", 1000)
    for name in ("tokenizer.json", "chat_template.jinja", "README.md", "LICENSE-MODEL", "vocab.txt", "merges.tiktoken"):
        (model / name).write_text(name)
    (model / "most.txt").write_text("x" * 1000)
    (model / "large.txt").write_text("x" * 1001)
    (model / "modeling_x.py").write_text("import os")
    (model / "original.bin").write_text("")
    (model / "quantization_config.json").write_text("{}")  # says what the old weights are
    (model / "original").mkdir()
    os.mkfifo(model / "pipe.txt")
    written = quantize(model)
    copied = {"tokenizer.json", "chat_template.jinja", "README.md", "LICENSE-MODEL", "vocab.txt", "merges.tiktoken"}
    assert set(written.copied) == copied | {"most.txt"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == WEIGHTS | set(written.copied)
    assert all((tmp_path / "out" / name).read_text() == name for name in copied)
    assert written.left == {
        "large.txt": "1001 bytes, more than 1000",
        "modeling_x.py": "code",
        "original.bin": "not known to belong to a checkpoint",
        "original": "a directory",
        "pipe.txt": "no file",
        "quantization_config.json": "describes the weights of the source",
    }
    (model / "a\x1b[31m.bin").write_text("")
    assert cli.main(["quantize", str(model), str(tmp_path / "again"), "--scheme", "bf16"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"copied: {', '.join(sorted(written.copied))}" in lines
    assert {f"not copied: {name} ({reason})" for name, reason in written.left.items()} <= set(lines)
    assert r"not copied: a\x1b[31m.bin (not known to belong to a checkpoint)" in lines


@pytest.mark.parametrize("place", ["beside", "above", "proc"])
def test_links_out_of_the_source_are_left(model, tmp_path, place):
    """A private file would come out readable by all, and what the system makes up would too."""
    secret = tmp_path / "secret.json"
    secret.write_text('"secret"')
    secret.chmod(0o600)
    target = {"beside": secret, "above": "../../secret.json", "proc": "/proc/self/environ"}[place]
    (model / "tokenizer.json").symlink_to(target)
    (model / "loop.json").symlink_to("loop.json")
    (model / "gone.json").symlink_to("nothing")
    written = quantize(model)
    assert written.copied == () and {path.name for path in (tmp_path / "out").iterdir()} == WEIGHTS
    assert "outside of the source" in written.left["tokenizer.json"]
    assert written.left["loop.json"] == written.left["gone.json"] == "no file"


def test_a_config_behind_a_link_out_of_the_source_is_refused(model, tmp_path):
    """Its contents become those of the new config.json, keys that nobody knows included."""
    shutil.move(model / "config.json", tmp_path / "settings.json")
    (model / "config.json").symlink_to(tmp_path / "settings.json")
    refuses(CheckpointError, "config.json: is a link to .*settings.json, outside of the source", quantize, model)
    assert not (tmp_path / "out").exists()


def test_links_inside_the_source_and_into_the_blobs_of_a_cache(model, tmp_path):
    """As huggingface_hub lays it out; blobs that are a link to somewhere else are none."""
    (model / "real.txt").write_text("inside")
    (model / "link.txt").symlink_to("real.txt")
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    blobs = snapshot.parents[1] / "blobs"
    shutil.copytree(model, snapshot, symlinks=True)
    blobs.mkdir()
    shutil.move(snapshot / "config.json", blobs / "c0")
    (snapshot / "config.json").symlink_to("../../blobs/c0")
    (blobs / "f00").write_text("tokenizer")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/f00")
    written = quantize(snapshot.parent / "0123")
    assert set(written.copied) == {"real.txt", "link.txt", "tokenizer.json"} and not written.left
    assert (written.directory / "tokenizer.json").read_text() == "tokenizer"
    assert not (written.directory / "link.txt").is_symlink()
    shutil.move(blobs, tmp_path / "elsewhere")
    blobs.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="config.json: is a link to .*outside of the source"):
        _companions.Companions(snapshot, WEIGHTS)


def test_permissions_stay_those_of_the_file(model, tmp_path):
    (model / "private.json").write_text("{}")
    (model / "private.json").chmod(0o600)
    (model / "program.txt").write_text("")
    (model / "program.txt").chmod(0o777)
    umask = os.umask(0o022)
    try:
        quantize(model)
    finally:
        os.umask(umask)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()}
    assert modes == {"private.json": 0o600, "program.txt": 0o644} | dict.fromkeys(WEIGHTS, 0o644)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o755


def test_the_copies_count_in_the_check_of_space(model, tmp_path, monkeypatch):
    (model / "tokenizer.json").write_text("x" * 5000)
    size = sum(SafetensorsFile(model / "model.safetensors").infos[name].nbytes for name in _names(model))
    for free, fits in ((size + 4999, False), (size + 5000, True)):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: shutil._ntuple_diskusage(10**9, 0, free))
        if fits:
            quantize(model)
        else:
            refuses(CheckpointError, "its disk has", quantize, model)


def _names(model):
    return SafetensorsFile(model / "model.safetensors").names


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
@pytest.mark.parametrize("change", ["rewritten", "cut", "gone"])
def test_a_source_that_changes_meanwhile(model, tmp_path, monkeypatch, name, change):
    """Said about the source, and nothing is left."""
    (model / "tokenizer.json").write_text(json.dumps({"tokenizer": 1}))
    path, done = model / name, []

    def meddle(count, total):
        if not done:
            done.append(1)
            if change == "gone":
                path.unlink()
            elif change == "cut":
                os.truncate(path, path.stat().st_size - 9)
            else:
                os.utime(path, ns=(1, path.stat().st_mtime_ns + 1))

    if (name, change) == ("model.safetensors", "gone"):  # it is still open, whole
        assert quantize(model, progress=meddle).files == ("model.safetensors",)
        return
    with pytest.raises(CheckpointError, match=f"{model}/{name}: ") as error:
        quantize(model, progress=meddle)
    assert str(tmp_path / "out") not in str(error.value)
    assert [entry.name for entry in tmp_path.iterdir()] == ["repository"]


def test_a_directory_that_only_looks_like_a_leftover(model, tmp_path):
    """Without the marker, or with one that is no file: it is the user's."""
    for name in (".out.partial-notes", ".out.partial-link"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.txt").write_text("years of work")
    (tmp_path / ".out.partial-link" / ".moe-jax-partial").symlink_to("thesis.txt")
    (tmp_path / ".out.partial-elsewhere").symlink_to(".out.partial-ours")
    (tmp_path / ".out.partial-ours").mkdir()
    (tmp_path / ".out.partial-ours" / ".moe-jax-partial").touch()
    (tmp_path / ".out.partial-ours" / "model.safetensors").touch()
    quantize(model)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"repository", "out", ".out.partial-notes", ".out.partial-link", ".out.partial-elsewhere"}
    assert (tmp_path / ".out.partial-link" / "thesis.txt").read_text() == "years of work"
