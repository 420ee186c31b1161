"""Time many configurations of the kernels on a GPU, in several processes that compile at the same time.

    python benchmarks/sweep.py products --cells qwen3-30b-a3b:int4_g128,mixtral-8x7b/tp2:fp8_channel:brief,...
        --out FILE [--tokens 64,256,...] [--jobs 15] [--seconds 300] [--earlier FILE ...] [--sustained 0.4] [--list]
    python benchmarks/sweep.py layers --cells qwen3-30b-a3b:int8_w8a8:1,mixtral-8x7b:bf16:64,... --out FILE
        [--only HEIGHT/G1/G2;...] [--jobs 14] [--seconds 220]

tuning_table.py makes a table of the lines that FILE gets. Processes take cells in the order given and hold a lock while
they time. What takes longer than --stuck seconds without a word is ended and written down as failed.

products: single products with what is fused around them. A cell is shape:format (_sweep_space.py), with ":brief" behind
it for few configurations instead of all, ":pairs" for tiles of 80, 96, 128 and more rows in clusters, ":rasters" for
that of the H200's table and others in raster groups of several sizes, ":lent" for those of the tables of H200 and
H100, the heuristic's and few beside them (lent_table.py), ":near1.1" for the table's and those that the files of
--earlier hold with at most 1.1 times the least time; @16;64 behind that for tokens of its own. A JSON line per
configuration: the least of five bursts, or with --sustained calls without a pause for so many seconds, the median of
the later half, when power has settled; the first line, or two that started together, say on what and when. What FILE
holds already is not timed again; its lines do not say which of both ways they are, so each takes a FILE of its own.

layers: whole layers, kernel by kernel. A cell is model:scheme:tokens (16- and 8-bit schemes): the present choice, then
layers over the spread of ``spread_of``; ":brief" behind a cell leaves the spread out, --only gives it, a configuration
of a product written as "n128,s6,b8,c16,k2" (block_n, num_stages, raster_group_m, row_chunk, step_blocks; "sw" for
swap_ab, "p264" for num_sms). A cell's layers are compiled first, then timed one after another with the GPU locked, in
three rounds, and traced once. A JSON line per layer: microseconds of a call in each round, without command buffers, and
the median microseconds of each of its kernels by JAX's profiler; of the present choice also with command buffers
("graph_us").
"""

import argparse
import contextlib
import dataclasses
import fcntl
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _locks import locked, making
from _sweep_space import (
    H200_SMS,
    of_heuristic,
    of_table,
    packed_space,
    pairs_space,
    rasters_space,
    rows_per_expert,
    unpacked_space,
)
from _timing import header
from _trace import NO_COMMAND_BUFFERS, PAUSE, per_call, split, traced
from _workers import ENVIRONMENT
from moe_layer import scheme_named
from tuning_table import Times, key_of, read

import moe_jax
from moe_jax.benchmarking import layer_shape, random_weights
from moe_jax.experts.hopper import _plan
from pallas_kernels.autotune import products_of
from pallas_kernels.common.sm90 import SMEM_BYTES
from pallas_kernels.grouped_gemm import GemmConfig, GemmDesc
from pallas_kernels.grouped_gemm.config import SWAP_AB_BLOCK_MS, config_error, shared_memory
from pallas_kernels.tuning import FORMATS, PACKED_FORMATS, Entry, LayerConfig, LayerKey, Table, table_for
from pallas_kernels.tuning.operands import random_operands, random_routings
from pallas_kernels.tuning.timing import burst_length, calls_of, least_of_bursts, seconds

ROUNDS = 3
_MODE = re.compile(r"brief|pairs|rasters|lent|near\d+(\.\d+)?")


class Group:
    """One (cell, GEMM): its weights, and what there is to time. earlier: times of ``read``."""

    def __init__(self, text: str, earlier: Times | None = None):
        cell, _, own = text.partition("@")
        self.name, self.fmt, *self.modes, gemm = cell.split(":")
        if self.fmt not in PACKED_FORMATS and self.fmt not in FORMATS:
            raise SystemExit(f"cell {text!r}: format {self.fmt!r}, not one of {', '.join((*FORMATS, *PACKED_FORMATS))}")
        if unknown := [word for word in self.modes if not _MODE.fullmatch(word)]:
            raise SystemExit(
                f"cell {text!r}: {unknown[0]!r}, expected brief, pairs, rasters, lent or near and a factor"
            )
        self.gemm = int(gemm)
        self.tokens = [int(count) for count in own.split(";")] if own else None
        self.key = key_of(self.name, self.fmt)
        self.earlier = earlier or {}
        self.weights: Any = None
        self.held: tuple[Any, Any] = (None, None)

    def configs(self, tokens: int) -> list[Any]:
        if "lent" in self.modes:
            where = self.key, self.gemm, tokens
            others = of_heuristic(*where, H200_SMS) + of_table(*where, "NVIDIA H100 80GB HBM3")
            return list(dict.fromkeys(of_table(*where) + others + self._all_configs(tokens)))
        near = next((float(word[4:]) for word in self.modes if word.startswith("near")), None)
        if near is None:
            return self._all_configs(tokens)
        found = self.earlier.get((self.name, self.fmt, tokens, self.gemm), {})
        known = {label: min(times) for label, times in found.items()}
        bound = near * min(known.values(), default=0)
        others = [one for one in self._all_configs(tokens) if known.get(config_label(one), math.inf) <= bound]
        return list(dict.fromkeys(of_table(self.key, self.gemm, tokens) + others))

    def _all_configs(self, tokens: int) -> list[Any]:
        is_brief = not {"brief", "lent"}.isdisjoint(self.modes)
        if self.fmt in PACKED_FORMATS:
            mean = rows_per_expert(tokens, self.key.num_experts, self.key.top_k)
            return packed_space(self._desc(tokens, 128), mean, tokens, is_brief)
        if "pairs" in self.modes:
            return pairs_space(self.key, self.gemm, tokens)
        if "rasters" in self.modes:
            here = of_table(self.key, self.gemm, tokens)
            return list(dict.fromkeys(here + rasters_space(self.key, self.gemm, tokens)))
        return unpacked_space(self.key, self.gemm, tokens, is_brief)

    def _desc(self, tokens: int, block_m: int) -> Any:
        return self.key.products(tokens, block_m)[self.gemm - 1]

    def program(self, tokens: int, config: Any, lock: str) -> tuple[Any, Any]:
        """(compiled program of ``calls_of`` calls, its arguments)."""
        desc = self._desc(tokens, config.block_m)
        desc = self.key.as_it_runs(desc, config) if self.gemm == 1 else desc
        if self.held[0] != (tokens, desc):
            self.held = (None, None)  # before the new ones are made: both may not fit
            make_weights = None
            if self.weights is None:
                small = self._desc(1, 64)
                make_weights = jax.jit(lambda: random_operands(small, 64, self.key)[1]).lower().compile()

            def others() -> Any:
                x, _, scales = random_operands(desc, config.block_m, self.key)
                return random_routings(desc, config.block_m, self.key, tokens, calls_of(tokens)), x, scales

            make = jax.jit(others).lower().compile()
            with locked(lock, fcntl.LOCK_SH):  # beside others that make operands, while nobody is timed
                if make_weights is not None:
                    self.weights = jax.block_until_ready(make_weights())
                self.held = ((tokens, desc), jax.block_until_ready(make()))
        routings, x, scales = self.held[1]
        args = (routings, x, self.weights, scales)
        return jax.jit(products_of(desc, config)).lower(*args).compile(), args


def time_program(compiled: Any, args: Any, calls: int, lock: str, sustained: float) -> float:
    def run():
        return compiled(*args)

    with locked(lock):
        if not sustained:
            return least_of_bursts(run) / calls * 1e6
        repeats, until, found = burst_length(run), time.perf_counter() + sustained, []
        while time.perf_counter() < until:
            found.append(seconds(run, repeats))
        return statistics.median(found[len(found) // 2 :]) / calls * 1e6


def config_label(config: Any) -> str:
    return json.dumps(dataclasses.asdict(config), sort_keys=True)


def label_of(record: dict[str, Any]) -> str:
    return json.dumps([record[name] for name in ("model", "format", "gemm", "tokens", "config")], sort_keys=True)


def time_group(text: str, options: argparse.Namespace) -> None:
    group, out = Group(text, read(options.earlier)), Path(options.out)
    lines = map(json.loads, out.read_text().splitlines()) if out.exists() else ()
    known = {label_of(record) for record in lines if "about" not in record}
    for tokens in group.tokens or map(int, options.tokens.split(",")):
        for config in group.configs(tokens):
            record: dict[str, Any] = dict(model=group.name, format=group.fmt, gemm=group.gemm, tokens=tokens)
            record["config"] = dataclasses.asdict(config)
            if label_of(record) in known:
                continue
            if time.time() > options.until:
                return
            print("at", json.dumps(record), flush=True)
            try:
                compiled, args = group.program(tokens, config, options.lock)
                micros = time_program(compiled, args, calls_of(tokens), options.lock, options.sustained)
                record["us"] = round(micros, 2)
            except Exception as error:
                record["error"] = f"{type(error).__name__}: {str(error)[:200]}"
            append(out, record)


def layers_of(tokens: int) -> int:
    """Calls in a program, each routed anew."""
    return 20 if tokens == 1 else 10 if tokens <= 256 else 5 if tokens <= 1024 else 3


def deepest(desc: GemmDesc, config: GemmConfig) -> GemmConfig | None:
    """config with as many stages as fit, in half of the memory with two CTAs an SM; None: cannot run."""
    room = SMEM_BYTES if config.num_sms <= H200_SMS else SMEM_BYTES // 2 - 1024
    for stages in range(12 if config.swap_ab else 8, 2, -1):
        deeper = dataclasses.replace(config, num_stages=stages)
        if config_error(desc, deeper) is None and shared_memory(desc, deeper) <= room:
            return deeper
    return None


def spread_of(key: LayerKey, tokens: int) -> Iterator[LayerConfig]:
    """Layers of every height worth a look; both products change from one to the next, each through its own list."""
    mean = rows_per_expert(tokens, key.num_experts, key.top_k)
    fits = [next((h for h in SWAP_AB_BLOCK_MS if h >= mean + s * mean**0.5), None) for s in (0.9, 1.9, 3.0)]
    fits += [8, 16] if mean < 6 else [80, 96] if 150 < mean < 600 else []
    heights = [(h, True) for h in dict.fromkeys(fits) if h and key.may_swap]
    heights += [(64, False)] if mean < 100 else []
    heights += [(128, False)] if mean > 24 else []
    for block_m, swap_ab in heights:
        lists = [list(_of_product(d, block_m, swap_ab, mean)) for d in key.products(tokens, block_m)]
        for i in range(max(map(len, lists)) if all(lists) else 0):
            yield LayerConfig(block_m, *(found[i % len(found)] for found in lists))


def _of_product(desc: GemmDesc, block_m: int, swap_ab: bool, mean: float) -> Iterator[GemmConfig]:
    seen = set()
    chunks: tuple[int | None, ...] = (None,) if swap_ab else (16,) if mean < 0.6 * block_m else (None, 64, 16)
    groups = (8, 16, 32) if mean > 150 else (8,)
    for chunk in chunks:
        for group in groups if chunk == chunks[0] else (8,):
            for block_n in (128, 256, 64, 192) if group == 8 and chunk == chunks[0] else (128, 256):
                for blocks in (H200_SMS, 2 * H200_SMS) if swap_ab and block_n <= 128 and mean < 80 else (H200_SMS,):
                    config = deepest(desc, GemmConfig(block_m, block_n, 3, group, chunk, blocks, swap_ab))
                    if config is not None and config not in seen:
                        seen.add(config)
                        yield config


def parse(text: str) -> LayerConfig:
    """One of --only."""
    height, *products = text.split("/")
    found = []
    for product in products:
        fields = dict(re.findall(r"([a-z]+)(\d*)", product))
        chunk = int(fields["c"]) if "c" in fields else None
        sizes = (int(height), int(fields["n"]), int(fields["s"]), int(fields.get("b", 8)))
        blocks, step = int(fields.get("p", H200_SMS)), int(fields.get("k", 1))
        found.append(GemmConfig(*sizes, chunk, blocks, swap_ab="sw" in fields, step_blocks=step))
    return LayerConfig(int(height), *found)


class Cell:
    """Weights and arguments of one model, scheme and number of tokens."""

    def __init__(self, text: str, lock: str):
        self.model, self.scheme, tokens = text.removesuffix(":brief").split(":")
        self.tokens, self.lock = int(tokens), lock
        self.config = moe_jax.MoEConfig(
            *layer_shape(self.model), scheme=scheme_named(self.scheme), implementation=("hopper",)
        )
        with making(lock):
            self.weights = jax.block_until_ready(random_weights(self.config))
        kx, kz = jax.random.split(jax.random.key(self.tokens))
        x = jax.random.normal(kx, (self.tokens, self.config.hidden_size), jnp.bfloat16)
        shape = (layers_of(self.tokens), self.tokens, self.config.num_experts)
        self.args = (self.weights, x, list(jax.random.normal(kz, shape, jnp.float32)))
        self.key = _plan.layer_key(self.config, self.weights)

    def compiled(self, chosen: LayerConfig | None, options: dict[str, str | bool]) -> Any:
        """A program of several calls in the configuration given; None for the table's."""
        table = table_for("NVIDIA H200")
        if chosen is not None:
            table = Table(table.device, (Entry(self.key, self.tokens, chosen, 1.0),))
        _plan.table_for = lambda device: table
        jax.clear_caches()  # the table is read while a layer is traced, and equal layers are traced once
        layer = jax.jit(lambda w, x, z: moe_jax.fused_moe(x, z, w, self.config))
        program = jax.jit(lambda w, x, logits: [layer(w, x, z) for z in logits])
        return program.lower(*self.args).compile(compiler_options=options)

    def measure(self, programs: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """Figures of each program, by its name; with the GPU locked."""
        found: dict[str, dict[str, Any]] = {name: dict(us=[]) for name in programs}
        calls, args = layers_of(self.tokens), self.args

        def micros(program: Any, repeats: int) -> float:
            start = time.perf_counter()
            out = None
            for _ in range(repeats):
                out = program(*args)
            jax.block_until_ready(out)
            return (time.perf_counter() - start) / repeats / calls * 1e6

        repeats = {}
        for name, program in programs.items():
            micros(program, 2)
            repeats[name] = int(np.clip(60e3 / (micros(program, 2) * calls), 2, 20))
        for _ in range(ROUNDS):
            for name, program in programs.items():
                found[name]["us"].append(round(micros(program, repeats[name]), 2))
        apart = [name for name in programs if name != "graph"]
        with traced() as kernels:
            for name in apart:
                jax.block_until_ready(programs[name](*args))
                time.sleep(PAUSE)
        parts = split(kernels)
        if len(parts) == len(apart):
            for name, part in zip(apart, parts, strict=True):
                found[name] |= per_call(part, calls)
        return found


def time_cell(text: str, options: argparse.Namespace) -> None:
    print("at", json.dumps(dict(cell=text)), flush=True)
    cell = Cell(text, options.lock)
    chosen: list[LayerConfig | None] = [None]
    if options.only:
        chosen += [parse(one) for one in options.only.split(";")]
    elif not text.endswith(":brief"):
        chosen += spread_of(cell.key, cell.tokens)
    programs, base = {}, dict(model=cell.model, scheme=cell.scheme, tokens=cell.tokens)
    records: dict[str, dict[str, Any]] = {}
    for number, one in enumerate(chosen):
        if time.time() > options.until - 12:
            break
        record = records[str(number)] = dict(base) if one is None else base | dataclasses.asdict(one)
        try:
            programs[str(number)] = cell.compiled(one, NO_COMMAND_BUFFERS)
            if one is None:
                programs["graph"] = cell.compiled(None, {})
        except Exception as error:
            record["error"] = f"{type(error).__name__}: {str(error)[:200]}"
    with locked(options.lock):
        found = cell.measure(programs)
    for name, record in records.items():
        if name == "0" and "graph" in found:
            record["graph_us"] = found["graph"]["us"]
        append(Path(options.out), record | found.get(name, {}))
    print(text, len(programs), "programs", round(options.until - time.time()), "s left", flush=True)


def append(path: Path, record: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def claim(folder: Path, items: list[str]) -> str | None:
    """The first item that nobody has taken."""
    for item in items:
        with contextlib.suppress(FileExistsError):
            (folder / item.replace("/", "+")).touch(exist_ok=False)
            return item
    return None


def work(options: argparse.Namespace) -> None:
    """What one process does: items until none is left or the time is over."""
    if not Path(options.out).exists() and options.part == "products":
        append(Path(options.out), {"about": header()})
    while time.time() < options.until and (item := claim(Path(options.claims), options.cells.split(","))) is not None:
        print("item", item, flush=True)
        (time_group if options.part == "products" else time_cell)(item, options)


def run(items: list[str], options: argparse.Namespace) -> None:
    """Keep --jobs processes at work until nothing is left or the time is over."""
    until, claims = time.time() + options.seconds, Path(f"{options.out}.claims")
    claims.mkdir(exist_ok=True)
    for left in claims.iterdir():
        left.unlink()
    command = [sys.executable, *sys.argv, "--cells", ",".join(items), "--claims", str(claims), "--until", str(until)]
    running: list[tuple[Any, Any]] = []
    started = 0
    while time.time() < until + 30:
        while len(running) < options.jobs and time.time() < until and len(list(claims.iterdir())) < len(items):
            log = Path(f"{claims}.{started}.log").open("w+")
            started += 1
            running.append((subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=ENVIRONMENT), log))
            if started <= options.jobs:
                time.sleep(0.1)
        if not running:
            return
        time.sleep(0.5)
        for process, log in list(running):
            code, idle = process.poll(), time.time() - os.fstat(log.fileno()).st_mtime
            if code is None and idle < options.stuck:
                continue
            if code is None:
                process.kill()
                process.wait()
            running.remove((process, log))
            log.seek(0)
            lines = log.read().splitlines()
            if code == 0:
                continue
            item = next((line[5:] for line in reversed(lines) if line.startswith("item ")), None)
            last = next((line[3:] for line in reversed(lines) if line.startswith("at ")), None)
            print("gave up", last, "exit", code, *lines[-12:], sep="\n  ", flush=True)
            if last is not None:
                append(Path(options.out), json.loads(last) | {"error": f"no answer, exit {code}"})
            if item is not None and last is not None and options.part == "products":  # the rest of its work
                (claims / item.replace("/", "+")).unlink(missing_ok=True)
    for process, _ in running:
        process.kill()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    for part, jobs, duration, stuck in (("products", 15, 300, 60), ("layers", 14, 220, 600)):
        options = parts.add_parser(part)
        options.add_argument("--cells", required=True)
        options.add_argument("--out", required=True)
        options.add_argument("--jobs", type=int, default=jobs)
        options.add_argument("--seconds", type=float, default=duration)
        options.add_argument("--stuck", type=float, default=stuck)
        options.add_argument("--lock", default=f"{tempfile.gettempdir()}/gpu_lock")
        options.add_argument("--claims", help=argparse.SUPPRESS)
        options.add_argument("--until", type=float, help=argparse.SUPPRESS)
    products, layers = parts.choices["products"], parts.choices["layers"]
    products.add_argument("--tokens", default="64,256,16,1024,1,8192")
    products.add_argument("--sustained", type=float, default=0.0)
    products.add_argument("--earlier", nargs="+", type=Path, default=[])
    products.add_argument("--list", action="store_true", help="print how many configurations each cell has")
    layers.add_argument("--only")
    options = parser.parse_args()
    if options.claims:
        work(options)
        return 0
    items = options.cells.split(",")
    if options.part == "products":
        split_at = [cell.partition("@") for cell in items]
        items = [f"{head}:{gemm}{at}{own}" for head, at, own in split_at for gemm in (1, 2)]
        if options.list:
            earlier = read(options.earlier)
            for text in items:
                group = Group(text, earlier)
                counts = {t: len(group.configs(t)) for t in group.tokens or map(int, options.tokens.split(","))}
                print(text, sum(counts.values()), counts)
            return 0
    run(items, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
