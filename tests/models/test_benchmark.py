"""benchmarks/generate.py at toy size: every cell is timed, or named when there is no time left."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def generate(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])
    spec = importlib.util.spec_from_file_location("benchmarks_generate", BENCHMARKS / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "_SAMPLES", 1)
    return module


@pytest.mark.slow
def test_toy_size(generate, tmp_path, capsys):
    out = tmp_path / "cells.json"
    args = ["--tiny", "--layers", "1", "--models", "qwen3-30b-a3b", "--json", str(out)]
    assert generate.main(args) == 0
    cells = json.loads(out.read_text())["cells"]
    assert [(cell["kind"], cell["rows"], cell["tokens"]) for cell in cells] == [("decode", 2, 1), ("prefill", 1, 9)]
    assert all(cell["us"] > 0 and cell["outside_us"] > 0 for cell in cells)
    assert "us a token" in capsys.readouterr().out


def test_no_time_left(generate, capsys):
    assert generate.main(["--tiny", "--models", "mixtral-8x7b", "--seconds", "-1"]) == 0
    assert "left out: no time left" in capsys.readouterr().out
