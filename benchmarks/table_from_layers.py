"""From the lines of ``sweep_layers.py`` to a tuning table: where whole layers were faster in other tiles than its own.

    python benchmarks/table_from_layers.py --device "NVIDIA H200" FILE [FILE ...] [--at-least 0.01]

A file holds the table's choice of each cell, and layers in other tiles beside it. The configuration with the least
ratio of the medians, averaged over the files that hold it, replaces the table's if it is faster by --at-least. A call
of fewer than 60 microseconds waits for the host, and there the sum of its kernels counts. The table's choice is also
timed with command buffers, and the faster way counts. The entry keeps the table's microseconds of both products, times
that ratio; entries with the times of such a layer's format follow.
"""

import argparse
import dataclasses
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

from table_from_sweep import key_of

from pallas_kernels.grouped_gemm import GemmConfig
from pallas_kernels.tuning import Entry, LayerConfig, Table
from pallas_kernels.tuning.table import load_table, path_for

FORMAT_OF = {"bf16": "bf16", "fp8_channel": "fp8_channel", "int8_w8a8": "int8", "fp8_block": "fp8_block"}
Cell = tuple[str, str, int]


def micros(record: dict[str, Any]) -> float:
    """Of a layer: the median call, with command buffers or without, or the sum of its kernels."""
    call = min(statistics.median(record[name]) for name in ("us", "graph_us") if name in record)
    return call if statistics.median(record["us"]) >= 60.0 else sum(record["kernels"])


def ratios(path: Path) -> dict[Cell, dict[LayerConfig, float]]:
    """Of a file: microseconds of a layer in other tiles by those of the present choice."""
    present, others = {}, defaultdict(dict)
    for record in map(json.loads, path.read_text().splitlines()):
        if "us" not in record:
            continue
        cell = (record["model"], record["scheme"], record["tokens"])
        if "gemm1" in record:
            pair = (GemmConfig(**record[name]) for name in ("gemm1", "gemm2"))
            others[cell][LayerConfig(record["block_m"], *pair)] = micros(record)
        else:
            present[cell] = micros(record)
    return {cell: {c: us / present[cell] for c, us in held.items()} for cell, held in others.items() if cell in present}


def lent(new: Entry, table: Table) -> list[Entry]:
    """The entries of ``table`` that have the old times of ``new``'s layer, with its configuration."""
    source = f"with times of {new.key.format_name}"
    return [
        dataclasses.replace(new, key=entry.key, source=source)
        for entry in table.entries
        if (entry.key.lender, entry.tokens, entry.source) == (new.key, new.tokens, source)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--device", required=True)
    parser.add_argument("--at-least", type=float, default=0.01)
    options = parser.parse_args()
    path = path_for(options.device)
    table = load_table(path)
    found: dict[Cell, dict[LayerConfig, list[float]]] = defaultdict(lambda: defaultdict(list))
    for file in options.files:
        for cell, held in ratios(file).items():
            for config, ratio in held.items():
                found[cell][config].append(ratio)
    entries = []
    for (model, scheme, tokens), held in sorted(found.items()):
        mean = {config: statistics.mean(each) for config, each in held.items()}
        best = min(mean, key=lambda config: mean[config])
        if mean[best] > 1 - options.at_least:
            print(f"{model} {scheme} T={tokens}: kept, the best other takes {mean[best]:.3f} of its time")
            continue
        key = key_of(model, FORMAT_OF[scheme])
        own = next(entry for entry in table.entries if entry.key == key and entry.tokens == tokens)
        entries.append(Entry(key, tokens, best, round(own.micros * mean[best], 1)))
        print(f"{model} {scheme} T={tokens}: {mean[best]:.3f} {dataclasses.astuple(best)}")
    borrowed = [entry for one in entries for entry in lent(one, table)]
    table.merged(entries + borrowed).save(path)
    print(f"{len(entries)} of {len(found)} cells have other tiles, and {len(borrowed)} entries with their times")


if __name__ == "__main__":
    main()
