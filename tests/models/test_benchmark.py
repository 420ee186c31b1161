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
    args = ["--tiny", "--layers", "1", "--cases", "qwen3-30b-a3b:fp8_block", "--json", str(out)]
    assert generate.main(args) == 0
    _, *cells = json.loads(out.read_text())["cells"]
    assert [(cell["kind"], cell["rows"], cell["tokens"]) for cell in cells] == [("decode", 2, 1), ("prefill", 1, 9)]
    assert all(cell["us"] > 0 and cell["outside_us"] > 0 for cell in cells)
    assert "us a token" in capsys.readouterr().out


def test_no_time_left(generate, capsys):
    assert generate.main(["--tiny", "--cases", "mixtral-8x7b:bf16", "--seconds", "-1"]) == 0
    assert "left out: no time left" in capsys.readouterr().out


def test_launches_are_those_of_the_loop(generate):
    """Between the experts of two layers, without what launches nothing, with what a command buffer records."""
    import _hlo

    text = """
%buffer (p: f32[2]) -> f32[2] {
  %fusion.7 = f32[2]{0} fusion(%p), kind=kLoop, calls=%f, metadata={op_name="while/body/dot"}
  ROOT %gemm = (f32[2]{0}, s8[4]{0}) custom-call(%fusion.7), custom_call_target="__cublas$gemm"
}
%body (s: (s32[], f32[2])) -> (s32[], f32[2]) {
  %s = (s32[], f32[2]) parameter(0)
  %norm = f32[2]{0} fusion(%s), kind=kLoop, calls=%f
  %experts.1 = f32[2]{0} custom-call(%norm), metadata={op_name="while/body/jit(forward_layer)/gemm"}
  %empty = f32[2]{0} custom-call(), custom_call_target="AllocateBuffer"
  %call = f32[2]{0} call(%experts.1), to_apply=%buffer
  %experts.2 = f32[2]{0} custom-call(%call), metadata={op_name="while/body/jit(forward_layer)/gemm"}
  %head = f32[2]{0} fusion(%experts.2), kind=kLoop, calls=%f
  ROOT %t = (s32[], f32[2]) tuple(%s, %head)
}
ENTRY %main (a: f32[2]) -> f32[2] {
  %w = (s32[], f32[2]) while(%t0), condition=%c, body=%body
}
"""
    found = _hlo.launches(text)
    assert [launch.name for launch in found] == ["norm", "experts.1", "fusion.7", "gemm", "experts.2", "head"]
    assert [[launch.name for launch in layer] for layer in _hlo.outside_the_experts(found)] == [["fusion.7", "gemm"]]
