"""Time many configurations of the grouped GEMMs on a GPU, in several processes that compile at the same time.

    python benchmarks/sweep_products.py --cells qwen3-30b-a3b:int4_g128,mixtral-8x7b/tp2:fp8_channel:brief,...
        [--tokens 64,256,...] [--jobs 15] [--seconds 300] [--earlier FILE FILE ...] [--sustained 0.4] --out FILE

A cell is shape:format (sweep_space.py), with ":brief" behind it for few configurations instead of all, ":tall" for the
table's and tall tiles, ":pairs" for tall tiles in clusters, ":near1.1" for the table's and those that the files of
--earlier hold with at most 1.1 times the least time; @16;64 behind that for tokens of its own.
Processes take (cell, GEMM) in the order given, keep its weights, and append a JSON line per configuration: the
microseconds of one product with what is fused around it; the first line, or two that started together, say on what and
when. They hold a lock while they time: the least of five bursts, or
with --sustained calls without a pause for so many seconds, the median of the later half, when power has settled. What
FILE holds already is not timed again; its lines do not say which of both they are, so each takes a FILE of its own. A
process that takes longer than --stuck seconds over one configuration is ended and its work taken, without that
configuration, by another.
"""

import argparse
import contextlib
import dataclasses
import fcntl
import functools
import json
import math
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from _timing import header
from grouped_gemm import SILU, route
from sweep_space import (
    PACKED,
    beside_table,
    of_table,
    packed_space,
    pairs_space,
    rows_per_expert,
    shape,
    unpacked_space,
)
from table_from_sweep import Times, read

from pallas_kernels.grouped_gemm import grouped_gemm
from pallas_kernels.grouped_gemm.packed import describe_call, grouped_gemm_packed
from pallas_kernels.tuning import FORMATS, PACKED_FORMATS, LayerKey, PackedLayerKey
from pallas_kernels.tuning.operands import random_operands, random_packed_weights
from pallas_kernels.tuning.timing import burst_length, calls_of, least_of_bursts, other_experts, seconds

_MODE = re.compile(r"brief|tall|pairs|near\d+(\.\d+)?")


class Group:
    """One (cell, GEMM): its weights, and what there is to time. earlier: times of ``read``."""

    def __init__(self, text: str, earlier: Times | None = None):
        cell, _, own = text.partition("@")
        self.name, self.fmt, *rest, gemm = cell.split(":")
        if self.fmt not in PACKED and self.fmt not in FORMATS:
            raise SystemExit(f"cell {text!r}: format {self.fmt!r}, expected one of {', '.join((*FORMATS, *PACKED))}")
        if unknown := [word for word in rest if not _MODE.fullmatch(word)]:
            raise SystemExit(f"cell {text!r}: {unknown[0]!r}, expected brief, tall, pairs or near and a factor")
        self.gemm, self.rest = int(gemm), rest
        self.is_brief = "brief" in rest
        self.tokens = [int(count) for count in own.split(";")] if own else None
        self.experts, self.top_k, self.hidden, self.inner = shape(self.name)
        self.earlier = earlier or {}
        self.w: Any = None
        self.held: tuple[Any, Any] = (None, None)

    def problems(self, tokens: int) -> list[Any]:
        """Configurations."""
        near = next((float(word[4:]) for word in self.rest if word.startswith("near")), None)
        if near is None:
            return self._all_problems(tokens)
        found = self.earlier.get((self.name, self.fmt, tokens, self.gemm), {})
        known = {label: min(times) for label, times in found.items()}
        bound = near * min(known.values(), default=0)
        others = [one for one in self._all_problems(tokens) if known.get(config_label(one), math.inf) <= bound]
        return list(dict.fromkeys(of_table(self.key(), self.gemm, tokens) + others))

    def _all_problems(self, tokens: int) -> list[Any]:
        if self.fmt in PACKED:
            desc = self.packed_desc(tokens, 128)
            mean = rows_per_expert(tokens, self.experts, self.top_k)
            return packed_space(desc, mean, tokens, self.is_brief)
        for name, configs in (("tall", beside_table), ("pairs", pairs_space)):
            if name in self.rest:
                return configs(self.key(), self.gemm, tokens)
        return unpacked_space(self.key(), self.gemm, tokens, self.is_brief)

    def key(self) -> Any:
        if self.fmt in PACKED:
            return PackedLayerKey(self.experts, self.top_k, self.hidden, self.inner, **PACKED_FORMATS[self.fmt])
        how: Any = FORMATS[self.fmt]
        return LayerKey(self.experts, self.top_k, self.hidden, self.inner, **how)

    def packed_desc(self, tokens: int, block_m: int) -> Any:
        w = jax.eval_shape(self._make_packed)
        lhs = "row" if PACKED[self.fmt][0].is_8bit else "none"
        rows = self._rows(tokens, block_m).count
        return describe_call(rows, w, "bfloat16", lhs, None, SILU if self.gemm == 1 else None)

    def _rows(self, tokens: int, block_m: int) -> Any:
        return route(tokens, self.experts, self.top_k, lambda mean: block_m)

    def _sizes(self) -> tuple[int, int, int]:
        return (self.inner, self.hidden, 2) if self.gemm == 1 else (self.hidden, self.inner, 1)

    def _make_packed(self) -> Any:
        (fmt, scale_dtype), (n, k, halves) = PACKED[self.fmt], self._sizes()
        return random_packed_weights(fmt, (self.experts, halves, n, k), scale_dtype)

    def program(self, tokens: int, config: Any, lock: str) -> tuple[Any, Any]:
        """(compiled program of ``calls_of`` calls, its arguments)."""
        if self.held[0] != (tokens, config.block_m):
            self.held = (None, None)  # before the new ones are made: both may not fit
            make_w = None if self.w is not None else jax.jit(self._weights).lower().compile()
            make = jax.jit(functools.partial(self._rest, tokens, config.block_m)).lower().compile()
            with locked(lock, fcntl.LOCK_SH):  # beside others that make operands, while nobody is timed
                self.w = self.w if make_w is None else jax.block_until_ready(make_w())
                self.held = ((tokens, config.block_m), jax.block_until_ready(make()))
        x, moved, num_tiles, rest = self.held[1]
        if self.fmt in PACKED:
            call: Any = functools.partial(grouped_gemm_packed, activation=SILU if self.gemm == 1 else None)
        else:
            desc = self.key().products(tokens, config.block_m)[self.gemm - 1]
            call = functools.partial(grouped_gemm, activation=desc.activation, requantize=desc.requantize)
        call = functools.partial(call, config=config, implementation="mosaic")
        inner = jax.jit(lambda x, w, experts, num, rest: call(x, w, experts, num, **rest))
        program = jax.jit(lambda x, w, moved, num, rest: [inner(x, w, one, num, rest) for one in moved])
        args = (x, self.w, moved, num_tiles, rest)
        return program.lower(*args).compile(), args

    def _weights(self) -> Any:
        if self.fmt in PACKED:
            return self._make_packed()
        return random_operands(self.key().products(1, 64)[self.gemm - 1], 64, self.key(), 1)[0][1]

    def _rest(self, tokens: int, block_m: int) -> tuple[Any, ...]:
        """(x, tile_expert of each call, num_tiles, what goes by name)."""
        if self.fmt in PACKED:
            rows, fmt, k = self._rows(tokens, block_m), PACKED[self.fmt][0], self._sizes()[1]
            x = jax.random.normal(jax.random.key(1), (rows.count, k), jnp.bfloat16)
            x = (x * 40).astype(jnp.int8) if fmt.operand == "int8" else x.astype(fmt.operand)
            rest = {"x_scale": jnp.full((rows.count,), 0.01, jnp.float32)} if fmt.is_8bit else {}
            tile_expert, num_tiles = jnp.asarray(rows.tile_expert), jnp.int32(len(rows.tile_expert))
        else:
            desc = self.key().products(tokens, block_m)[self.gemm - 1]
            (x, _, tile_expert, num_tiles), rest = random_operands(desc, block_m, self.key(), tokens)
        moved = other_experts(tile_expert, self.experts, calls_of(tokens))
        return x, moved, num_tiles, rest


@contextlib.contextmanager
def locked(path: str, mode: int = fcntl.LOCK_EX):
    with open(path, "w") as file:
        fcntl.flock(file, mode)
        yield


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


def claim(folder: Path, groups: list[str]) -> str | None:
    """The first group that nobody has taken."""
    for group in groups:
        with contextlib.suppress(FileExistsError):
            (folder / group.replace("/", "+")).touch(exist_ok=False)
            return group
    return None


def config_label(config: Any) -> str:
    return json.dumps(dataclasses.asdict(config), sort_keys=True)


def label_of(record: dict[str, Any]) -> str:
    return json.dumps([record[name] for name in ("model", "format", "gemm", "tokens", "config")], sort_keys=True)


def work(options: argparse.Namespace) -> None:
    folder, deadline = Path(options.claims), float(options.until)
    out, earlier = Path(options.out), read(options.earlier)
    while time.time() < deadline and (text := claim(folder, options.cells.split(","))) is not None:
        print("group", text, flush=True)
        group = Group(text, earlier)
        if not out.exists():
            append(out, {"about": header()})
        lines = map(json.loads, out.read_text().splitlines())
        known = {label_of(record) for record in lines if "about" not in record}
        for tokens in group.tokens or map(int, options.tokens.split(",")):
            for config in group.problems(tokens):
                record: dict[str, Any] = dict(model=group.name, format=group.fmt, gemm=group.gemm, tokens=tokens)
                record["config"] = dataclasses.asdict(config)
                if label_of(record) in known:
                    continue
                if time.time() > deadline:
                    return
                print("at", json.dumps(record), flush=True)
                compiled = args = None
                try:
                    compiled, args = group.program(tokens, config, options.lock)
                    micros = time_program(compiled, args, calls_of(tokens), options.lock, options.sustained)
                    record["us"] = round(micros, 2)
                except Exception as error:
                    record["error"] = f"{type(error).__name__}: {str(error)[:200]}"
                append(out, record)


def append(path: Path, record: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", required=True)
    parser.add_argument("--tokens", default="64,256,16,1024,1,8192")
    parser.add_argument("--jobs", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--stuck", type=float, default=60)
    parser.add_argument("--out", required=True)
    parser.add_argument("--sustained", type=float, default=0.0)
    parser.add_argument("--earlier", nargs="+", type=Path, default=[])
    parser.add_argument("--lock", default="/tmp/gpu_lock")
    parser.add_argument("--list", action="store_true", help="print how many configurations each cell has, time nothing")
    parser.add_argument("--claims", help=argparse.SUPPRESS)
    parser.add_argument("--until", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.claims:
        work(options)
        return 0
    groups = []
    for cell in options.cells.split(","):
        head, at, own = cell.partition("@")
        groups += [f"{head}:{gemm}{at}{own}" for gemm in (1, 2)]
    if options.list:
        earlier = read(options.earlier)
        for text in groups:
            group = Group(text, earlier)
            counts = {t: len(group.problems(t)) for t in group.tokens or map(int, options.tokens.split(","))}
            print(text, sum(counts.values()), counts)
        return 0
    run(options, groups)
    return 0


def run(options: argparse.Namespace, groups: list[str]) -> None:
    """Keep --jobs processes at work until nothing is left or the time is over."""
    until, claims = time.time() + options.seconds, Path(f"{options.out}.claims")
    claims.mkdir(exist_ok=True)
    for left in claims.iterdir():
        left.unlink()
    command = [sys.executable, __file__, "--cells", ",".join(groups), "--tokens", options.tokens, "--out", options.out]
    if options.earlier:
        command += ["--earlier", *map(str, options.earlier)]
    command += ["--sustained", str(options.sustained), "--lock", options.lock]
    command += ["--claims", str(claims), "--until", str(until)]
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    running: list[tuple[Any, Any]] = []
    started = 0
    while time.time() < until + 30:
        while len(running) < options.jobs and time.time() < until and len(list(claims.iterdir())) < len(groups):
            log = Path(f"{claims}.{started}.log").open("w+")
            started += 1
            running.append((subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment), log))
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
            group = next((line[6:] for line in reversed(lines) if line.startswith("group ")), None)
            last = next((line[3:] for line in reversed(lines) if line.startswith("at ")), None)
            print("gave up", last, "exit", code, *lines[-12:], sep="\n  ", flush=True)
            if last is not None:
                append(Path(options.out), json.loads(last) | {"error": f"no answer, exit {code}"})
            if group is not None and last is not None:
                (claims / group.replace("/", "+")).unlink(missing_ok=True)
    for process, _ in running:
        process.kill()


if __name__ == "__main__":
    sys.exit(main())
