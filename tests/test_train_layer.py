"""benchmarks/train_layer.py: what becomes of the lines of a process that ends well, late or badly; no GPU, no torch."""

import importlib
import json
import sys
import time

import numpy as np
import pytest

from tests.support.benchmarks import benchmarks_or_skip


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(benchmarks_or_skip()))
    return importlib.import_module("train_layer")


def run(script, code, seconds=60.0):
    """(what ``run_child`` returns, [(seconds after the start, line)])."""
    start, lines = time.time(), []
    found = script.run_child([sys.executable, "-c", code], seconds, lambda line: lines.append((time.time(), line)))
    return found, [(at - start, line) for at, line in lines]


def test_lines_come_at_once_and_outlive_a_process_that_is_late(script):
    code = "import time; print('noise'); print('{\"cell\": 1}', flush=True); time.sleep(60); print('{}')"
    (well, error), lines = run(script, code, 4.0)
    assert not well and error == "ended after 4 s"
    assert [line for _, line in lines] == ['{"cell": 1}'] and lines[0][0] < 3.5


def test_a_process_that_fails_is_one_line_or_has_written_its_own(script):
    assert run(script, "print('{}')") == ((True, ""), [(pytest.approx(0, abs=60), "{}")])
    assert run(script, f"raise SystemExit({script.REPORTED})")[0] == (False, "")
    assert run(script, "import os; os.abort()")[0] == (False, "ended with code -6")


def test_a_side_that_cannot_run_leaves_the_rest_running(script, monkeypatch, capsys, tmp_path):
    """What is not installed ends a side with one line; another error ends its cell alone, and is one line."""
    monkeypatch.setattr(script, "routing_of", lambda model, tokens: {})

    def missing(*args):
        raise ImportError("no torch\nhere")

    def breaks(model, tokens, routing, known):
        if tokens == 1:
            raise ValueError("a\nb")
        return dict(step_ms=2.0), dict(y=np.ones((2, 2)))

    monkeypatch.setattr(script, "run_torch", missing)
    monkeypatch.setattr(script, "run_tokamax", breaks)
    codes = [script.child(side, "tiny", [1, 2], tmp_path, seconds=60, traces=False) for side in ("torch", "tokamax")]
    cells = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert codes == [script.REPORTED] * 2
    assert [cell.get("error", cell.get("step_ms")) for cell in cells] == [
        "ImportError: no torch here",
        "ValueError: a b",
        2.0,
    ]
    assert script.differences(tmp_path, "tiny", 2, "tokamax", "tokamax") == dict(y=0.0)


def test_a_cell_too_long_for_the_time_left_is_not_started(script, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(script, "routing_of", lambda model, tokens: {})
    monkeypatch.setattr(script, "run_frozen", lambda *args, **options: time.sleep(0.5) or {})
    assert script.child("w4a16_g128", "tiny", [1, 2, 3], tmp_path, seconds=1.3, traces=False) == 0
    cells = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert ["left_out" in cell for cell in cells] == [False, False, True]


def test_the_side_that_keeps_rows_asks_for_it(script, monkeypatch, capsys, tmp_path):
    asked = []

    def run_ours(model, tokens, routing, *, traces, keep_hidden=False):
        asked.append(keep_hidden)
        return dict(step_ms=1.0), dict(y=np.ones((2, 2)))

    def run_frozen(scheme, *args, traces, keep_hidden):
        asked.append((scheme, keep_hidden))
        return {}

    monkeypatch.setattr(script, "run_ours", run_ours)
    monkeypatch.setattr(script, "run_frozen", run_frozen)
    sides = ["ours", "ours_kept", "w4a16_g128", "w4a16_g128_kept"]
    for side in sides:
        assert script.child(side, "tiny", [1], tmp_path, seconds=60, traces=False) == 0
    assert asked == [False, True, ("w4a16_g128", False), ("w4a16_g128", True)]
    assert [json.loads(line)["side"] for line in capsys.readouterr().out.splitlines()] == sides


def test_steps_without_a_rest_have_their_clock_and_power(script, monkeypatch, tmp_path):
    """A stand-in for nvidia-smi: the first third of its samples, before the clock has settled, is left out."""
    power, smi = importlib.import_module("_power"), tmp_path / "nvidia-smi"
    rows = ["1980, 300.00, 0x0000000000000000"] * 3 + ["1410, 690.00, 0x0000000000000004"] * 4
    rows += ["1395, 700.00, 0x0000000000000024", "1980, 310.00, 0x0000000000000001", "[N/A]"]
    smi.write_text('#!/bin/sh\necho "$@" > ' + f"{tmp_path}/asked\ncat <<END\n" + "\n".join(rows) + "\nEND\nsleep 60\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    asked = []

    def run(count):
        asked.append(count)
        time.sleep(0.02 * count if len(asked) > 3 else 0.1 * count)  # slow at first, as a cold GPU is

    found = power.sustained(run, 1.2, 0.075)
    assert found | dict(sustained_ms=0) == dict(sustained_ms=0, watts=690, sm_mhz=1410, at_power_cap=0.83)
    assert found["sustained_ms"] == pytest.approx(20, rel=0.3) and set(asked) == {2}
    assert (tmp_path / "asked").read_text().startswith("-i 3 --query-gpu=clocks.sm,power")
    monkeypatch.setenv("PATH", "/nowhere")
    assert power.sustained(run, 0.0, 1.0)["watts"] is None and asked[-1] == 1
