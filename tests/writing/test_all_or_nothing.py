"""A destination is complete or absent: refusals, full disks, killed runs; and what the command prints."""

import errno
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

import moe_jax
from moe_jax import cli
from moe_jax.loading import Checkpoint, CheckpointError
from tests.fuzz import bases
from tests.support.checkpoints import mutations
from tests.support.refusals import refuses


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("plain") / "model"
    bases.write(directory, bases.plain(np.random.default_rng(0)))
    return directory


EXPERTS = r"re:model\.layers\.0\.mlp\.experts\."
REFUSED = {
    "unknown scheme": (dict(scheme="fp9"), "unknown scheme 'fp9'"),
    "no form": (dict(scheme="nvfp4_dynamic"), "no form for scheme 'nvfp4_dynamic'; use 'nvfp4'"),
    "act-order": (dict(scheme="w4a16_g32_actorder"), "no form for scheme 'w4a16_g32_actorder'"),
    "static": (dict(scheme="fp8_tensor_static"), "needs input scales from calibration"),
    "groups": (dict(scheme="w4a16_g128"), "gate_proj: 64 columns do not divide into groups of 128"),
    "modules": (dict(scheme="fp8_block", modules="some"), "modules='some', expected one of experts, all"),
    "search": (dict(scheme="fp8_block", scale_search="best"), "scale_search='best'"),
    "ignore typo": (dict(scheme="fp8_block", ignore=["q_proj"]), "'?q_proj'? matches no module"),
    "ignore regex": (dict(scheme="fp8_block", ignore=["re:("]), "not a valid regular expression"),
    "ignore some": (dict(scheme="fp8_block", ignore=[EXPERTS + "1"]), "covers 3 of 6 modules of the experts"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_leave_nothing(model, tmp_path, case):
    arguments, message = REFUSED[case]
    with pytest.raises((ValueError, NotImplementedError), match=message.replace("(", r"\(").replace(r"\(", "[(]")):
        moe_jax.quantize_checkpoint(model, tmp_path / "out", **arguments)
    assert not list(tmp_path.iterdir())


def test_all_experts_of_a_layer_may_be_ignored(model, tmp_path):
    written = moe_jax.quantize_checkpoint(model, tmp_path / "out", scheme="fp8_block", ignore=[EXPERTS])
    assert written.experts == {"copied": 1}
    assert moe_jax.load_moe(tmp_path / "out", layer=0).experts.config.scheme.name == "bf16"


@pytest.mark.parametrize("name", ["lm_head", "model.layers.0.mlp.gate"])
def test_what_is_never_quantized_may_be_ignored_by_name(model, tmp_path, name):
    written = moe_jax.quantize_checkpoint(model, tmp_path / "out", scheme="fp8_block", ignore=[name])
    assert written.experts == {"quantized": 1}


def test_destinations(model, tmp_path):
    (tmp_path / "link").symlink_to("somewhere")
    with pytest.raises(ValueError, match="link: is a link to somewhere; choose a destination that is no link"):
        moe_jax.quantize_checkpoint(model, tmp_path / "link", scheme="bf16")
    (tmp_path / "link").unlink()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    (tmp_path / "file").write_text("")
    for name, message in (
        ("full", "is not empty"),
        ("file", "is no directory"),
        ("file/a/b", "file is no directory; choose another destination"),
    ):
        refuses(ValueError, message, moe_jax.quantize_checkpoint, model, tmp_path / name, scheme="bf16")
    refuses(ValueError, "is not empty", moe_jax.quantize_checkpoint, model, model, scheme="bf16")
    (tmp_path / "empty").mkdir()
    moe_jax.quantize_checkpoint(model, tmp_path / "empty", scheme="bf16")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file", "full"]
    Checkpoint(tmp_path / "empty").close()


def test_directories_above_the_destination_are_made_and_removed(model, tmp_path, monkeypatch):
    moe_jax.quantize_checkpoint(model, tmp_path / "a" / "b" / "out", scheme="bf16")
    Checkpoint(tmp_path / "a" / "b" / "out").close()

    def fail(*args):
        if (tmp_path / "a" / "c" / "d").is_dir():
            (tmp_path / "a" / "c" / "mine").touch()
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "pwrite", fail)
    for name in ("new/deep/out", "a/new/out", "a/b/new", "a/c/d/out"):
        with pytest.raises(CheckpointError, match="broken; nothing was left behind"):
            moe_jax.quantize_checkpoint(model, tmp_path / name, scheme="bf16")
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.parent.name != "out"}
    assert left == {"a", "a/b", "a/b/out", "a/c", "a/c/mine"}, "what others have put a file into stays"


@pytest.mark.parametrize("after", [0, 3])
def test_a_full_disk(model, tmp_path, monkeypatch, after):
    real, calls = os.pwrite, []

    def pwrite(*args):
        calls.append(1)
        if len(calls) > after:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(CheckpointError, match="cannot be written: No space left on device; nothing was left behind"):
        moe_jax.quantize_checkpoint(model, tmp_path / "out", scheme="bf16")
    assert not list(tmp_path.iterdir())


def test_too_little_space_is_seen_before_writing(model, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9 - 5, 5))
    with pytest.raises(CheckpointError, match="GB will be written, and its disk has 0.0 GB free"):
        moe_jax.quantize_checkpoint(model, tmp_path / "out", scheme="bf16")
    assert not list(tmp_path.iterdir())


def test_a_damaged_source_leaves_nothing(model, tmp_path):
    source = shutil.copytree(model, tmp_path / "source")
    mutations.nan_weight(source, np.random.default_rng(0))
    with pytest.raises(CheckpointError, match="NaN or infinite"):
        moe_jax.quantize_checkpoint(source, tmp_path / "out", scheme="int8_w8a8")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


# Children of one process, each killed at its own place. It imports for all of them: moe_jax imports what a name needs
# when the name is first used. Nothing of JAX runs before the fork, and bf16 needs no program.
KILLED = """
import os, signal, sys
from moe_jax import quantize_checkpoint
source, target, *places = sys.argv[1:]

def kill(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

for place in places:
    pid = os.fork()
    if pid == 0:
        name, _, count = place.partition(":")
        real, calls = getattr(os, name), []
        def patched(*args, **kwargs):
            calls.append(1)
            return kill() if len(calls) == int(count) else real(*args, **kwargs)
        setattr(os, name, patched)
        quantize_checkpoint(source, target, scheme="bf16", max_shard_bytes=9000)
        os._exit(7)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL, place
    assert not os.path.exists(target), place
"""
PLACES = ("pwrite:1", "pwrite:2", "pwrite:6", "fsync:1", "fsync:3", "rename:1")


def test_a_killed_run_leaves_nothing_that_looks_valid(model, tmp_path):
    command = [sys.executable, "-W", "ignore", "-c", KILLED, str(model), str(tmp_path / "out"), *PLACES]
    subprocess.run(command, check=True, timeout=300)
    (left,) = tmp_path.iterdir()  # each run has removed what the one before it left
    assert left.name.startswith(".out.partial-")
    moe_jax.quantize_checkpoint(model, tmp_path / "out", scheme="bf16", max_shard_bytes=9000)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    with Checkpoint(tmp_path / "out") as checkpoint:
        assert len(checkpoint.files) > 1


def test_an_interrupted_command_is_one_line(model, tmp_path, capsys, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "pwrite", interrupt)
    assert cli.main(["quantize", str(model), str(tmp_path / "out"), "--scheme", "bf16"]) == cli.EXIT_INTERRUPTED
    assert capsys.readouterr().err == "moe-jax quantize: interrupted\n"
    assert not list(tmp_path.iterdir())


def test_command(model, tmp_path, capsys):
    arguments = ["quantize", str(model), str(tmp_path / "out"), "--scheme", "int8_w8a8"]
    assert cli.main(arguments) == 0
    out, err = capsys.readouterr()
    assert "int8_w8a8, 1 files" in out and "layers of experts: 1 quantized" in out
    assert err == "", "the progress bar is for terminals"
    assert cli.main(arguments) == cli.EXIT_BAD_INPUT
    assert capsys.readouterr().err.count("\n") == 1
    assert cli.main(["inspect", str(tmp_path / "out")]) in (0, 2)  # the model's other layers are not there
    assert "int8_w8a8" in capsys.readouterr().out
    again = ["quantize", str(tmp_path / "out"), str(tmp_path / "twice"), "--scheme", "w8a16_channel"]
    assert cli.main(again) == 0 and "1 repacked" in capsys.readouterr().out
    lossy = ["quantize", str(tmp_path / "out"), str(tmp_path / "lossy"), "--scheme", "fp8_channel"]
    assert cli.main(lossy) == 0 and "errors of both formats add up" in capsys.readouterr().out
