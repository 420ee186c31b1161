"""From the lines of ``sweep.py`` to a tuning table.

    python benchmarks/tuning_table.py products --device "NVIDIA H200" FILE [FILE ...] [--at-least 2] [--least]
        [--formats bf16,...] [--merge] [--beside "NVIDIA H200"] [--print] [--out FILE]
    python benchmarks/tuning_table.py layers --device "NVIDIA H200" FILE [FILE ...] [--at-least 0.01]

products: times of a configuration are averaged over all files; at one token, where a launch takes as long as a kernel,
and with --least the least counts. Those taken fewer than --at-least times are left out. For each layer, format and
number of tokens: the tile height with the least sum of both products and of what that height leaves to a launch of its
own, and the fastest configuration of each at that height. A product without times of its format's own takes those of
its key's lender, and the entry says so. --merge keeps the entries of the table for which these files have none.
--beside names the GPU whose table lends where this one has no entry: an entry stays only if it is 2% faster here than
the lent one, whose times these files hold, or where none is lent. FP8
with scales of tensors is left out unless named: whole layers chose its entries among fp8_channel's and its own
(fp8_swapped_h200.txt).

layers: where whole layers were faster in other tiles than the table's. A file holds the table's choice of each cell,
and layers in other tiles beside it. The configuration with the least ratio of the medians, averaged over the files that
hold it, replaces the table's if it is faster by --at-least. A call of fewer than 60 microseconds waits for the host,
and there the sum of its kernels counts. The table's choice is also timed with command buffers, and the faster way
counts. The entry keeps the table's microseconds of both products, times that ratio; entries with the times of such a
layer's format follow.
"""

import argparse
import dataclasses
import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from _sweep_space import shape

from pallas_kernels.grouped_gemm import GemmConfig
from pallas_kernels.grouped_gemm.packed import PackedConfig
from pallas_kernels.tuning import FORMATS, PACKED_FORMATS, Entry, LayerConfig, Table, layer
from pallas_kernels.tuning.layer import AnyKey
from pallas_kernels.tuning.table import load_table, path_for, table_for

_CLUSTER_MARGIN = 1.02  # two blocks that wait for one another must be clearly faster than one
_BESIDE_MARGIN = 1.02  # and so must an entry be beside that of another GPU
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


def key_of(model: str, fmt: str) -> AnyKey:
    return layer.key_of(fmt, *shape(model))


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
            micros += key.requantize_micros(tokens, config) if gemm == 1 else 0.0
            rated = micros * _CLUSTER_MARGIN if getattr(config, "cluster", 1) > 1 else micros
            at_height = best[config.block_m]
            if gemm not in at_height or rated < at_height[gemm][0]:
                at_height[gemm] = (rated, micros, config, lender)
    sums = {height: sum(rated for rated, *_ in held.values()) for height, held in best.items() if len(held) == 2}
    if not sums:
        return None
    height = min(sums, key=lambda height: sums[height])
    (_, micros1, gemm1, lender1), (_, micros2, gemm2, lender2) = (best[height][gemm] for gemm in (1, 2))
    source = f"with times of {lender1 or lender2}" if lender1 or lender2 else None
    return Entry(key, tokens, LayerConfig(height, gemm1, gemm2), round(micros1 + micros2, 1), source)


def gains(entry: Entry, present: Entry | None, times: Times, cell: tuple[str, str, int], typical: Any) -> bool:
    """Whether an entry is clearly faster than the one in whose place it would stand, where both were timed."""
    if present is None:
        return True
    micros = present.key.requantize_micros(entry.tokens, present.config.gemm1)
    for gemm, config in enumerate((present.config.gemm1, present.config.gemm2), 1):
        label = json.dumps(dataclasses.asdict(config), sort_keys=True)
        names = [cell[1], *lenders_of(*cell[:2])]
        found = next((held for name in names if (held := times.get((cell[0], name, cell[2], gemm), {}).get(label))), [])
        if not found:
            return False
        micros += (min if entry.tokens == 1 else typical)(found)
    return entry.micros * _BESIDE_MARGIN <= micros


def of_products(options: argparse.Namespace) -> None:
    times, entries = read(options.files), []
    present = table_for(options.beside) if options.beside else None
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
        cell = (model, fmt, tokens)
        if present is not None and not gains(found, present.lookup(found.key, tokens), times, cell, typical):
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


FORMAT_OF = {"bf16": "bf16", "fp8_channel": "fp8_channel", "int8_w8a8": "int8", "fp8_block": "fp8_block"}
Cell = tuple[str, str, int]  # model, scheme, tokens


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


def of_layers(options: argparse.Namespace) -> None:
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(required=True)
    products, layers = (parts.add_parser(name) for name in ("products", "layers"))
    for part in (products, layers):
        part.add_argument("files", nargs="+", type=Path)
        part.add_argument("--device", required=True)
    products.add_argument("--at-least", type=int, default=2)
    products.add_argument("--least", action="store_true")
    products.add_argument("--formats", default=",".join(f for f in (*FORMATS, *PACKED_FORMATS) if f != "fp8_tensor"))
    products.add_argument("--out", type=Path)
    products.add_argument("--merge", action="store_true")
    products.add_argument("--beside", help="the GPU whose table lends")
    products.add_argument("--print", action="store_true")
    products.set_defaults(make=of_products)
    layers.add_argument("--at-least", type=float, default=0.01)
    layers.set_defaults(make=of_layers)
    options = parser.parse_args()
    options.make(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
