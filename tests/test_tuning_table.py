"""benchmarks/tuning_table.py: which lines of a sweep become entries beside another GPU's table."""

import dataclasses
import importlib
import json
import sys

import pytest

from pallas_kernels.tuning.table import load_table, table_for
from tests.support.benchmarks import benchmarks_or_skip

MODEL, FORMAT = "qwen3-30b-a3b", "fp8_channel"


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(str(benchmarks_or_skip()))
    return importlib.import_module("tuning_table")


def lines(tool, tokens, ratio, *, times_lent=True):
    """Both products in the H200's configuration, 100 us each, and in another one that takes ``ratio`` of it; twice."""
    config = table_for("NVIDIA H200").lookup(tool.key_of(MODEL, FORMAT), tokens).config
    for gemm, lent in enumerate((config.gemm1, config.gemm2), 1):
        other = dataclasses.replace(lent, num_stages=lent.num_stages - 1)
        for one, micros in ((lent, 100.0), (other, 100.0 * ratio)):
            if one is other or times_lent:
                line = dict(model=MODEL, format=FORMAT, gemm=gemm, tokens=tokens, us=micros)
                yield from [line | dict(config=dataclasses.asdict(one))] * 2


def test_an_entry_stays_where_it_is_clearly_faster_than_the_lent_one(tool, tmp_path, monkeypatch):
    """At 64 tokens by 10%; not at 16, by 1%, nor at 1, where the lent configuration was not timed."""
    found = [*lines(tool, 64, 0.9), *lines(tool, 16, 0.99), *lines(tool, 1, 0.5, times_lent=False)]
    (tmp_path / "sweep.jsonl").write_text("\n".join(map(json.dumps, found)))
    paths = [str(tmp_path / "sweep.jsonl"), "--out", str(tmp_path / "table.json"), "--formats", FORMAT]
    monkeypatch.setattr(
        sys, "argv", ["", "products", "--device", "NVIDIA H99", "--beside", "NVIDIA H200", "--at-least", "1", *paths]
    )
    tool.main()
    (entry,) = load_table(tmp_path / "table.json").entries
    assert (entry.key, entry.tokens, entry.micros) == (tool.key_of(MODEL, FORMAT), 64, 180.0)
