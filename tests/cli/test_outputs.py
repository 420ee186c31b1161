"""What commands write: whole or not at all, with the mode of the umask, into devices and pipes, never through links."""

import contextlib
import errno
import io
import json
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from moe_jax import cli
from moe_jax._output import check_output, write_output
from moe_jax.cli import _demo
from tests.cli.test_main import model_dir  # noqa: F401  (a fixture)
from tests.support.refusals import refuses


def mode(path):
    return path.stat().st_mode & 0o777


def test_a_new_file_and_a_replaced_one(tmp_path):
    path = tmp_path / "out.json"
    umask = os.umask(0o027)
    try:
        write_output(path, [b"one ", np.array([2, 3], np.uint8).data])
    finally:
        os.umask(umask)
    assert path.read_bytes() == b"one \2\3" and mode(path) == 0o640
    path.chmod(0o600)
    write_output(path, [b"two"])
    assert path.read_bytes() == b"two" and mode(path) == 0o600, "a private file stays private"
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.json"]


def test_a_failure_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "out.json"
    path.write_text("old")

    def full(fd, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    refuses(OSError, "No space", write_output, path, [b"new"])
    assert path.read_text() == "old" and [entry.name for entry in tmp_path.iterdir()] == ["out.json"]


def test_temporary_names_are_new_files(tmp_path, monkeypatch):
    """Whoever guesses the name and puts a link there gains nothing."""
    (tmp_path / "victim").write_text("victim")
    monkeypatch.setattr(os, "urandom", lambda n: bytes(n))
    (tmp_path / f".moe-jax-{'00' * 8}.partial").symlink_to(tmp_path / "victim")
    with pytest.raises(FileExistsError):
        write_output(tmp_path / "out", [b"new"])
    assert (tmp_path / "victim").read_text() == "victim"


def test_links_are_refused(tmp_path):
    (tmp_path / "victim").write_text("victim")
    for name, target in (("link", "victim"), ("dangling", "nothing")):
        (tmp_path / name).symlink_to(target)
        for call in (lambda path: write_output(path, [b"new"], "--json"), lambda path: check_output(path, "--json")):
            with pytest.raises(ValueError, match=f"--json .*{name} is a link to {target}; give the path of the file"):
                call(tmp_path / name)
    assert (tmp_path / "victim").read_text() == "victim" and not (tmp_path / "nothing").exists()


def test_devices_and_pipes_are_written_into(tmp_path):
    node = os.lstat("/dev/null")
    write_output(Path("/dev/null"), [b"x" * 100_000])
    assert os.lstat("/dev/null").st_ino == node.st_ino and os.lstat("/dev/null").st_rdev == node.st_rdev
    pipe, link, found = tmp_path / "pipe", tmp_path / "link", []
    os.mkfifo(pipe)
    link.symlink_to(pipe)  # as /dev/stdout is one
    for path in (pipe, link):
        check_output(path, "--json")
        reader = threading.Thread(target=lambda: found.append(pipe.read_bytes()))
        reader.start()
        write_output(path, [b"x" * 100_000, b"end"])
        reader.join(10)
    assert found == [b"x" * 100_000 + b"end"] * 2 and pipe.is_fifo() and link.is_symlink()


def test_what_no_file_is_written_to(tmp_path, monkeypatch, capsys):
    refuses(ValueError, "is a directory", check_output, tmp_path, "--png")
    for option, command in (("--json", ["bench"]), ("--logits-out", ["run", "--model", "m", "--input-ids", "1"])):
        for end in ("/", "/."):
            assert cli.main([*command, option, f"{tmp_path}/new{end}"]) == 2
            assert f"argument {option}: {tmp_path}/new{end} is the name of a directory" in capsys.readouterr().err
    refuses(ValueError, "the directory .*gone does not exist", check_output, tmp_path / "gone" / "x.png", "--png")
    real = os.lstat
    monkeypatch.setattr(os, "lstat", lambda path: os.stat_result((0o060660, *real(path)[1:])))
    (tmp_path / "disk").touch()
    refuses(ValueError, "disk is a block device or a socket", check_output, tmp_path / "disk", "--png")


def test_logits_into_a_device_and_a_pipe(model_dir, tmp_path):  # noqa: F811
    pipe, found = tmp_path / "pipe", []
    os.mkfifo(pipe)
    command = ["run", "--model", str(model_dir), "--input-ids", "3,1,4", "--max-new-tokens", "0", "--logits-out"]
    reader = threading.Thread(target=lambda: found.append(pipe.read_bytes()))
    reader.start()
    assert cli.main([*command, str(pipe)]) == 0
    reader.join(10)
    assert np.load(io.BytesIO(found[0])).shape == (3, 32) and pipe.is_fifo()
    assert cli.main([*command, "/dev/null"]) == 0 and not os.path.isfile("/dev/null")
    assert cli.main([*command, str(tmp_path / "logits.npy")]) == 0
    np.testing.assert_array_equal(np.load(tmp_path / "logits.npy"), np.load(io.BytesIO(found[0])))


@pytest.mark.parametrize("option", ["--json", "--png"])
def test_bench_refuses_links_before_it_measures(tmp_path, capsys, option):
    (tmp_path / "link").symlink_to("elsewhere")
    assert cli.main(["bench", "--model", "4,2,64,64", "--scheme", "bf16", option, str(tmp_path / "link")]) == 2
    captured = capsys.readouterr()
    assert f"{option} {tmp_path / 'link'} is a link to elsewhere" in captured.err and captured.out == ""


def test_no_output_replaces_an_input_or_another_output(model_dir, tmp_path, capsys):  # noqa: F811
    model, ids, both = tmp_path / "model", tmp_path / "ids.npy", tmp_path / "both"
    shutil.copytree(model_dir, model)
    np.save(ids, np.array([3, 1, 4]))
    os.link(ids, tmp_path / "same.npy")
    before = {path: path.read_bytes() for path in (ids, *model.iterdir())}
    (tmp_path / "link").symlink_to(model)
    command = ["run", "--model", str(tmp_path / "link"), "--input-ids", str(ids), "--max-new-tokens", "0"]
    for path, text in (
        (ids, "is the file of --input-ids"),
        (tmp_path / "same.npy", "is the file of --input-ids"),
        (model / "model.safetensors", "is a file of the checkpoint"),
        (tmp_path / "link" / "config.json", "is a file of the checkpoint"),
    ):
        assert cli.main([*command, "--logits-out", str(path)]) == 2
        assert f"--logits-out {path}: {text}" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in before} == before
    bench = ["bench", "--model", "4,2,64,64", "--scheme", "bf16", "--json", str(both), "--png"]
    assert cli.main([*bench, f"{tmp_path}/model/../both"]) == 2 and not both.exists()
    assert f"--json and --png are both {both}" in capsys.readouterr().err


def test_a_full_device_is_named():
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        write_output(Path("/dev/full"), [b"x"])


def test_a_destination_of_any_name(model_dir, tmp_path):  # noqa: F811
    """What is printed is UTF-8 and harmless; a name need not be either."""
    for name, shown in ((b"\xff", rb"\udcff"), (b"a\x1b[2J\nb", rb"a\x1b[2J\nb")):
        out = io.TextIOWrapper(io.BytesIO(), "utf-8")
        with contextlib.redirect_stdout(out):
            path = os.path.join(str(tmp_path), os.fsdecode(name))
            assert cli.main(["quantize", str(model_dir), path, "--scheme", "int8_w8a16"]) == 0
        out.flush()
        assert out.buffer.getvalue().startswith(f"wrote {tmp_path}/".encode() + shown + b": int8_w8a16")


def test_demo_leaves_files_of_others_alone(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(_demo, "measure", None)  # nothing gets that far
    for name in ("tiny-qwen3-moe/config.json", "tiny-qwen3-moe/model.safetensors", "demo.json", "demo.png"):
        path = tmp_path / "out" / name
        path.parent.mkdir(parents=True)
        path.write_text('{"model_type": "mine"}')
        assert cli.main(["demo", "--out", str(tmp_path / "out")]) == 2
        assert "exists and is not what the demo wrote; choose another --out" in capsys.readouterr().err
        assert path.read_text() == '{"model_type": "mine"}'
        shutil.rmtree(tmp_path / "out")


def test_demo_prints_names_that_do_no_harm(tmp_path, capsys):
    small = dict(num_hidden_layers=1, num_experts=4, hidden_size=64, moe_intermediate_size=48, vocab_size=64)
    out = tmp_path / "a\x1b[2J"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_demo, "CONFIG", _demo.CONFIG | small)
        patch.setattr(_demo, "ONE_OF_EACH", ())
        for _ in range(2):  # wrote it, found it
            _demo.run_demo(out)
    printed = capsys.readouterr().out
    assert printed.count(r"a\x1b[2J/") >= 6 and "\x1b" not in printed


def test_demo_uses_the_checkpoint_of_an_earlier_one(tmp_path):
    small = dict(num_hidden_layers=1, num_experts=4, hidden_size=64, moe_intermediate_size=48, vocab_size=64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_demo, "CONFIG", _demo.CONFIG | small)
        checkpoint = _demo._checkpoint_in(tmp_path)
        written = {path.name: (path.stat().st_mtime_ns, path.stat().st_ino) for path in checkpoint.iterdir()}
        assert written.keys() == {"config.json", "model.safetensors", "tokenizer.json"}
        (tmp_path / "demo.json").write_text(json.dumps({}))
        assert _demo._checkpoint_in(tmp_path) == checkpoint
        assert written == {path.name: (path.stat().st_mtime_ns, path.stat().st_ino) for path in checkpoint.iterdir()}
        refuses(ValueError, "not empty", _demo.write_checkpoint, checkpoint)
