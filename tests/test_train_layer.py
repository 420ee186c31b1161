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

    monkeypatch.setattr(script, "run_ours", run_ours)
    for side in ("ours", "ours_kept"):
        assert script.child(side, "tiny", [1], tmp_path, seconds=60, traces=False) == 0
    assert asked == [False, True]
    assert [json.loads(line)["side"] for line in capsys.readouterr().out.splitlines()] == ["ours", "ours_kept"]
