"""benchmarks/train_lora.py: what a step needs with and without a head, and what a line says; no GPU, no torch."""

import importlib
from types import SimpleNamespace

import jax
import pytest

from tests.support.benchmarks import benchmarks_or_skip


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(benchmarks_or_skip()))
    return importlib.import_module("train_lora")


def test_without_a_head_no_logits_are_needed(script):
    """4 rows of 1,024 tokens of two layers of Qwen3-30B-A3B: logits and their cotangent in float32 are 4.6 GiB."""
    sizes = script.sizes_of(SimpleNamespace(model="qwen3-30b-a3b", tiny=False, layers=2))
    whole, headless = (script.needed_activations(sizes, 4, 1024, 16, has_head=has_head) for has_head in (True, False))
    assert whole["head"] == 2 * 4096 * 151936 * 4 and whole["peak"] == whole["inputs"] + whole["head"]
    assert headless["peak"] == headless["inputs"] + headless["attention"] + headless["experts"] < whole["peak"]
    same = ("inputs", "attention", "experts")
    assert [headless[name] for name in same] == [whole[name] for name in same]
    vocabulary = script.needed_activations(sizes | dict(vocab_size=10), 4, 1024, 16, has_head=False)
    assert vocabulary == headless


def test_a_line_has_the_plan_and_the_peak_of_the_device(script):
    gib = 2**30
    plan = dict(arguments=3 * gib, outputs=2 * gib, aliased=2 * gib, temporary=4 * gib)
    cell = dict(side="ours", rows=4, length=1024, has_head=False, seconds=0.5, tokens_per_s=8192.0, peak=7 * gib)
    cell |= dict(weights=gib, trained=2 * gib, activations=4 * gib, needed=dict(peak=2 * gib), ratio=2.0, plan=plan)
    line = script.line(cell | dict(device_peak=9 * gib))
    assert "without head" in line and "peak   7.00 GiB = weights 1.00 + trained 2.00 + 4.00, needed 2.00" in line
    assert line.endswith("plan: arguments 3.00, outputs 2.00, aliased 2.00, temporary 4.00; peak of the device 9.00")
    assert script.line(cell | dict(device_peak=None, has_head=True)).endswith("peak of the device unknown")


@pytest.mark.slow
@pytest.mark.parametrize("no_head", [False, True])
def test_a_cell_runs(script, no_head):
    options = SimpleNamespace(model="qwen3-30b-a3b", tiny=True, layers=2, rows="2", length=64, rank=4, side="ours")
    options.scheme, options.no_head = "w4a16_g128", no_head
    with jax.numpy_dtype_promotion("standard"):  # as the script runs
        cell = script.measured(options)
    assert cell["losses"][1] < cell["losses"][0]
    plan = cell["plan"]
    assert cell["peak"] == plan["arguments"] + plan["outputs"] - plan["aliased"] + plan["temporary"]
    assert plan["arguments"] >= cell["weights"] and cell["activations"] > 0
