"""From the lines of ``sweep_products.py`` to a tuning table.

    python benchmarks/table_from_sweep.py --device "NVIDIA H200" FILE [FILE ...] [--at-least 2] [--out FILE] [--print]

Times of a configuration are averaged over all files, at one token, where a launch takes as long as a kernel, the least
counts; those taken fewer than --at-least times are left out. For each
layer, format and number of tokens: the tile height with the least sum of both products, and the fastest configuration
of each at that height. int8 borrows the times of fp8_channel, whose bytes and rates are the same, beside its own.
Packed weights have no table; --print shows their fastest ones too.
"""

import argparse
import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from sweep_products import MODELS

from pallas_kernels.grouped_gemm import GemmConfig, config_error
from pallas_kernels.tuning import FORMATS, Entry, LayerConfig, LayerKey, Table
from pallas_kernels.tuning.table import path_for

TWINS = {"int8": "fp8_channel"}
# cell (model, format, tokens, GEMM) -> configuration as JSON -> microseconds
Times = dict[tuple[str, str, int, int], dict[str, list[float]]]


def read(paths: list[Path]) -> Times:
    times: Times = defaultdict(lambda: defaultdict(list))
    for path in paths:
        for record in map(json.loads, path.read_text().splitlines()):
            if "us" in record:
                cell = (record["model"], record["format"], record["tokens"], record["gemm"])
                times[cell][json.dumps(record["config"], sort_keys=True)].append(record["us"])
    return times


def fastest(times: Times, model: str, fmt: str, tokens: int, at_least: int) -> tuple[float, list[dict]] | None:
    """(sum of both products, their configurations) at the best tile height, or None without enough times."""
    best: dict[int, dict[int, tuple[float, dict[str, Any]]]] = defaultdict(dict)
    for gemm in (1, 2):
        for text, own in times.get((model, fmt, tokens, gemm), {}).items():
            twin = times.get((model, TWINS.get(fmt, ""), tokens, gemm), {}).get(text, [])
            if len(own) + len(twin) < at_least:
                continue
            config, micros = json.loads(text), (min if tokens == 1 else statistics.mean)(own + twin)
            held = best[config["block_m"]]
            if gemm not in held or micros < held[gemm][0]:
                held[gemm] = (micros, config)
    sums = {height: sum(time for time, _ in held.values()) for height, held in best.items() if len(held) == 2}
    if not sums:
        return None
    height = min(sums, key=lambda height: sums[height])
    return sums[height], [best[height][gemm][1] for gemm in (1, 2)]


def entry(model: str, fmt: str, tokens: int, micros: float, configs: list[dict]) -> Entry:
    how: Any = FORMATS[fmt]
    key = LayerKey(*MODELS[model], **how)
    gemm1, gemm2 = (GemmConfig(**config) for config in configs)
    for desc, config in zip(key.products(tokens, gemm1.block_m), (gemm1, gemm2), strict=True):
        if reason := config_error(desc, config):
            raise ValueError(f"{model} {fmt} tokens={tokens}: {config} cannot run: {reason}")
    return Entry(key, tokens, LayerConfig(gemm1.block_m, gemm1, gemm2), micros)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--device", required=True)
    parser.add_argument("--at-least", type=int, default=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--print", action="store_true")
    options = parser.parse_args()
    times, entries = read(options.files), []
    for model, fmt, tokens in sorted({cell[:3] for cell in times}):
        found = fastest(times, model, fmt, tokens, options.at_least if fmt in FORMATS else 1)
        if found is None:
            continue
        if fmt in FORMATS:
            entries.append(entry(model, fmt, tokens, *found))
        if options.print:
            print(f"{model:14s} {fmt:11s} T={tokens:5d} {found[0]:8.1f} us {found[1]}")
    Table(options.device, tuple(entries)).save(options.out or path_for(options.device))
    print(f"{len(entries)} entries")
    return 0


if __name__ == "__main__":
    sys.exit(main())
