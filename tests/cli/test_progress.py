"""What a terminal shows while a command works, in a pseudo-terminal; and that no other stderr gets any of it."""

import json
import re
import time

import numpy as np
import pytest

from moe_jax import cli
from moe_jax.cli import _progress
from tests.cli.test_main import model_dir, run  # noqa: F401
from tests.fuzz import bases
from tests.loading.files.test_hub import point_at
from tests.support.hub import NAME, serving
from tests.support.terminal import Screen, terminal

F32 = ("--dtype", "float32", "--max-new-tokens", "4")
CHOICE = "choosing tokens: greedy, at most 4 tokens"


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    directory = tmp_path_factory.mktemp("plain") / "model"
    bases.write(directory, bases.plain(np.random.default_rng(0)))
    return directory


def test_the_screen_of_these_tests():
    screen = Screen()
    screen.written = "bar 1\r\nbar 2\x1b[A\rnew\r\nline\r     \r\x1b[Kxy\b\bz"
    assert screen.lines() == ["new 1", "zy"]


def test_a_notice_waits_for_a_second_and_goes(monkeypatch):
    with terminal(monkeypatch, "stderr") as screen:
        quick = _progress.Notice("quick ...", seconds=60.0)
        slow = _progress.Notice("slow ...", seconds=0.01)
        time.sleep(0.2)
        assert "slow ..." in screen.written
        slow.end()
        quick.end()
        slow.end()
    assert "quick" not in screen.written and screen.lines() == [""]
    assert _progress.SILENCE == 1


def test_nothing_but_a_terminal_gets_a_notice(capsys):
    with _progress.notice("never") as shown:
        assert not hasattr(shown, "_clock")
    assert capsys.readouterr().err == ""


def test_the_first_parts_are_announced(monkeypatch):
    seen = []
    monkeypatch.setattr(_progress, "SILENCE", 0.01)

    def parts():
        for part in range(3):
            before = screen.written.count("making")
            time.sleep(0.1)
            seen.append(screen.written.count("making") - before)
            yield part

    with terminal(monkeypatch, "stderr") as screen:
        assert list(_progress.announced(parts(), "making", count=2)) == [0, 1, 2]
        assert list(_progress.announced(iter([7]), "making", count=2)) == [7]
    assert seen == [1, 1, 0] and screen.lines() == [""]


def test_load_and_compilation(model_dir, monkeypatch, capsys):  # noqa: F811
    """A bar of layers, then a notice until the first token; none is left, and stdout has the answer alone."""
    monkeypatch.setattr(_progress, "SILENCE", 0.01)
    with terminal(monkeypatch, "stderr") as screen:
        assert run(model_dir, "--input-ids", "3,1,4", *F32) == 0
    assert re.search(r"loading: +50%\|.*\| 1/2 \[", screen.written)
    assert "compiling ..." in screen.written[screen.written.index("loading:") :]
    last = screen.lines()
    assert len(last) == 3 and last[0] == CHOICE and last[1].startswith("3 prompt tokens") and last[2] == ""
    assert re.fullmatch(r"\d+(,\d+){3}\n", capsys.readouterr().out)


def test_a_long_prompt(model_dir, monkeypatch, capsys):  # noqa: F811
    """A bar of its tokens while it is read in chunks, gone before the first token is shown; the notice behind that
    token leaves it as it is."""
    monkeypatch.setattr(_progress, "SILENCE", 0.01)
    words = " ".join(["w3 w1 w4"] * 20)
    flags = ("--max-num-batched-tokens", "32", *F32)
    assert run(model_dir, "--prompt", words, *F32) == 0
    expected = capsys.readouterr().out
    with terminal(monkeypatch, "stderr", "stdout") as screen:
        assert run(model_dir, "--prompt", words, *flags) == 0
    assert re.search(r"reading: +53%\|.*\| 32/60 \[", screen.written)
    assert screen.written.count("compiling ...") == 2
    assert screen.lines()[:2] == [CHOICE, expected.rstrip("\n")]
    assert run(model_dir, "--prompt", words, *flags) == 0
    assert capsys.readouterr().out == expected
    assert run(model_dir, "--prompt", words, "--max-num-batched-tokens", "0") == 2
    assert "--max-num-batched-tokens is 0, expected 1 or more" in capsys.readouterr().err


def test_answers_of_a_file(model_dir, tmp_path, monkeypatch):  # noqa: F811
    """The bar counts answers and makes way for those that are written to the same terminal."""
    (tmp_path / "prompts.txt").write_text("w3 w1\nw5\nw7 w7\n")
    monkeypatch.setattr(_progress, "SILENCE", 0.01)
    with terminal(monkeypatch, "stderr", "stdout") as screen:
        assert run(model_dir, "--prompts", str(tmp_path / "prompts.txt"), "--batch-size", "1", *F32) == 0
    bars = re.findall(r"answers: +\d+%\|.*?\| (\d)/3 \[", screen.written)
    assert bars and bars == sorted(bars) and "compiling ..." in screen.written
    choice, *answers, speed, rest = screen.lines()
    assert choice == CHOICE
    assert [json.loads(line)["prompt"] for line in answers] == ["w3 w1", "w5", "w7 w7"]
    assert speed.startswith("5 prompt tokens") and rest == ""


def test_quantize(plain, tmp_path, monkeypatch, capsys):
    with terminal(monkeypatch, "stderr") as screen:
        assert cli.main(["quantize", str(plain), str(tmp_path / "out"), "--scheme", "bf16"]) == 0
    assert re.search(r"writing: +\d+%\|.*\| \d+/[\d.]+k \[.*B/s\]", screen.written) and screen.lines() == [""]
    assert capsys.readouterr().out.startswith("wrote ")


def test_a_download(plain, tmp_path, monkeypatch, capsys):
    """Its own bar, of bytes, and no other meanwhile; from a cache nothing is downloaded."""
    with serving({path.name: path.read_bytes() for path in plain.iterdir()}) as hub:
        point_at(hub.url, monkeypatch, tmp_path / "cache")
        for name in ("first", "second"):
            with terminal(monkeypatch, "stderr") as screen:
                assert cli.main(["quantize", NAME, str(tmp_path / name), "--scheme", "bf16"]) == 0
            assert (f"downloading {NAME}: " in screen.written) == (name == "first")
            assert "writing: " in screen.written and not any(screen.lines())
        assert capsys.readouterr().err == ""


def test_an_error_stands_on_a_line_of_its_own(model_dir, monkeypatch):  # noqa: F811
    monkeypatch.setattr(_progress, "SILENCE", 0.0)
    with terminal(monkeypatch, "stderr") as screen:
        assert run(model_dir, "--input-ids", "99", *F32) == 2
    assert screen.lines()[0].startswith("moe-jax run: input id 99 is outside the vocabulary")
