"""From the lines of ``sweep_products.py`` to a tuning table.

    python benchmarks/table_from_sweep.py --device "NVIDIA H200" FILE [FILE ...] [--at-least 2] [--least] [--out FILE]
        [--formats bf16,...] [--print] [--merge]

Times of a configuration are averaged over all files; at one token, where a launch takes as long as a kernel, and with
--least the least counts. Those taken fewer than --at-least times are left out. For each layer, format and number of
tokens: the tile height with the least sum of both products and of what that height leaves to a launch of its own, and
the fastest configuration of each at that height. A product without times of its format's own takes those of its key's
lender, and the entry says so. --merge keeps the entries of the table for which these files have none. FP8 with scales
of tensors is left out unless named: whole layers chose its entries among fp8_channel's and its own
(fp8_swapped_h200.txt).
"""

import argparse
import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from sweep_space import shape

from pallas_kernels.grouped_gemm import GemmConfig
from pallas_kernels.grouped_gemm.packed import PackedConfig
from pallas_kernels.tuning import FORMATS, PACKED_FORMATS, Entry, LayerConfig, LayerKey, PackedLayerKey, Table
from pallas_kernels.tuning.table import load_table, path_for

_CLUSTER_MARGIN = 1.02  # two blocks that wait for one another must be clearly faster than one
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


def key_of(model: str, fmt: str) -> Any:
    if fmt in PACKED_FORMATS:
        return PackedLayerKey(*shape(model), **PACKED_FORMATS[fmt])
    how: Any = FORMATS[fmt]
    return LayerKey(*shape(model), **how)


def lenders_of(model: str, fmt: str) -> list[str]:
    """The formats whose times serve this one too, nearest first."""
    names, key = [], key_of(model, fmt).lender
    while key is not None:
        names.append(key.format_name)
        key = key.lender
    return names


def fastest(times: Times, model: str, fmt: str, tokens: int, at_least: int, typical: Any) -> Entry | None:
    """The best entry of a cell, or None without enough times. typical: of several times of one configuration."""
    key, lenders = key_of(model, fmt), lenders_of(model, fmt)
    kind = PackedConfig if fmt in PACKED_FORMATS else GemmConfig
    best: dict[int, dict[int, tuple[float, float, Any, str | None]]] = defaultdict(dict)
    for gemm in (1, 2):
        own = times.get((model, fmt, tokens, gemm), {})
        held = {fmt: own} | {name: {} if own else times.get((model, name, tokens, gemm), {}) for name in lenders}
        for text in sorted({text for known in held.values() for text in known}):
            # Times of a format itself count alone; a lender's products may do less.
            found = held[fmt].get(text) or [micros for name in lenders for micros in held[name].get(text, [])]
            lender = None if text in held[fmt] else next(name for name in lenders if text in held[name])
            config = kind(**json.loads(text))
            desc = key.products(tokens, config.block_m)[gemm - 1]
            if len(found) < at_least or key.config_error(desc, config) is not None:
                continue
            micros = (min if tokens == 1 else typical)(found)
            rated = micros * _CLUSTER_MARGIN if getattr(config, "cluster", 1) > 1 else micros
            at_height = best[config.block_m]
            if gemm not in at_height or rated < at_height[gemm][0]:
                at_height[gemm] = (rated, micros, config, lender)
    sums = {
        height: sum(rated for rated, *_ in held.values()) + key.apart_micros(tokens, height)
        for height, held in best.items()
        if len(held) == 2
    }
    if not sums:
        return None
    height = min(sums, key=lambda height: sums[height])
    (_, micros1, gemm1, lender1), (_, micros2, gemm2, lender2) = (best[height][gemm] for gemm in (1, 2))
    source = f"with times of {lender1 or lender2}" if lender1 or lender2 else None
    micros = micros1 + micros2 + key.apart_micros(tokens, height)
    return Entry(key, tokens, LayerConfig(height, gemm1, gemm2), round(micros, 1), source)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--device", required=True)
    parser.add_argument("--at-least", type=int, default=2)
    parser.add_argument("--least", action="store_true")
    parser.add_argument("--formats", default=",".join(f for f in (*FORMATS, *PACKED_FORMATS) if f != "fp8_tensor"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--merge", action="store_true")
    parser.add_argument("--print", action="store_true")
    options = parser.parse_args()
    times, entries = read(options.files), []
    cells = {cell[:3] for cell in times}
    formats = options.formats.split(",")
    cells |= {
        (model, fmt, tokens) for model, lender, tokens in cells for fmt in formats if lender in lenders_of(model, fmt)
    }
    for model, fmt, tokens in sorted(cell for cell in cells if cell[1] in formats):
        typical = min if options.least else statistics.mean
        found = fastest(times, model, fmt, tokens, options.at_least, typical)
        if found is None:
            continue
        entries.append(found)
        if options.print:
            gemms = (found.config.gemm1, found.config.gemm2)
            print(
                f"{model:14s} {fmt:13s} T={tokens:5d} {found.micros:8.1f} us {found.source or ''}", *gemms, sep="\n  "
            )
    path = options.out or path_for(options.device)
    held = load_table(path) if options.merge and path.exists() else Table(options.device)
    held.merged(entries).save(path)
    print(f"{len(entries)} entries, {len(held.merged(entries).entries)} in the table")
    return 0


if __name__ == "__main__":
    sys.exit(main())
