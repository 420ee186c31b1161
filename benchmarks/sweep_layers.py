"""Time whole layers in several configurations on a GPU, kernel by kernel, in processes that compile at the same time.

    python benchmarks/sweep_layers.py --cells qwen3-30b-a3b:int8_w8a8:1,mixtral-8x7b:bf16:64,... [--jobs 14]
        [--seconds 220] [--only HEIGHT/G1/G2;...] --out FILE

A cell is model:scheme:tokens (16- and 8-bit schemes). Each is run by one process: the present choice, then layers over
the spread of ``spread_of``; ":brief" behind a cell leaves the spread out, --only gives it, a configuration of a product
written as "n128,s6,b8,c16,k2" (block_n, num_stages, band, row_chunk, step_blocks; "sw" for swapped operands, "p264" for
num_sms). A cell's layers are compiled first, then timed one after another with the GPU locked, in three rounds, and
traced once. A JSON line per layer: microseconds of a call in each round, without command buffers, and the median
microseconds of each of its kernels by JAX's profiler; of the present choice also with command buffers ("graph_us").
"""

import argparse
import dataclasses
import functools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _trace import NO_COMMAND_BUFFERS, PAUSE, Kernel, split, traced
from moe_layer import locked, making, scheme_named
from sweep_space import H200_SMS, rows_per_expert

import moe_jax
from moe_jax.benchmarking import layer_shape, random_weights
from moe_jax.experts.hopper import _plan as _mosaic_plan
from pallas_kernels.common.sm90 import SMEM_BYTES
from pallas_kernels.grouped_gemm import GemmConfig, GemmDesc
from pallas_kernels.grouped_gemm.config import SWAPPED_BLOCK_MS, config_error, shared_memory
from pallas_kernels.tuning import Entry, LayerConfig, LayerKey, Table, table_for

ROUNDS = 3


def calls_of(tokens: int) -> int:
    """Calls in a program, each routed anew."""
    return 20 if tokens == 1 else 10 if tokens <= 256 else 5 if tokens <= 1024 else 3


def deepest(desc: GemmDesc, config: GemmConfig) -> GemmConfig | None:
    """config with as many stages as fit, in half of the memory with two blocks a multiprocessor; None: cannot run."""
    room = SMEM_BYTES if config.num_sms <= H200_SMS else SMEM_BYTES // 2 - 1024
    for stages in range(12 if config.swap_ab else 8, 2, -1):
        deeper = dataclasses.replace(config, num_stages=stages)
        if config_error(desc, deeper) is None and shared_memory(desc, deeper) <= room:
            return deeper
    return None


def spread_of(key: LayerKey, tokens: int) -> Iterator[LayerConfig]:
    """Layers of every height worth a look; both products change from one to the next, each through its own list."""
    mean = rows_per_expert(tokens, key.num_experts, key.top_k)
    fits = [next((h for h in SWAPPED_BLOCK_MS if h >= mean + s * mean**0.5), None) for s in (0.9, 1.9, 3.0)]
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
    bands = (8, 16, 32) if mean > 150 else (8,)
    for chunk in chunks:
        for band in bands if chunk == chunks[0] else (8,):
            for block_n in (128, 256, 64, 192) if band == 8 and chunk == chunks[0] else (128, 256):
                for blocks in (H200_SMS, 2 * H200_SMS) if swap_ab and block_n <= 128 and mean < 80 else (H200_SMS,):
                    config = deepest(desc, GemmConfig(block_m, block_n, 3, band, chunk, blocks, swap_ab))
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


def per_call(part: list[Kernel], calls: int) -> dict[str, Any]:
    """Median microseconds of each kernel of a call, and of the gap before it."""
    each, rest = divmod(len(part), calls)
    if rest or not each:
        return dict(kernels=f"{len(part)} kernels in {calls} calls: {sorted({k.name[:40] for k in part})[:8]}")
    starts, durations = (np.array([k[i] for k in part]).reshape(calls, each) for i in (0, 1))
    flat = starts.ravel()[1:] - (starts + durations).ravel()[:-1]
    gaps = np.append(np.nan, flat).reshape(calls, each)
    names = [kernel.name[:24] for kernel in part[:each]]
    return dict(
        kernels=[round(float(value), 2) for value in np.median(durations, axis=0)],
        gaps=[round(float(value), 2) for value in np.nanmedian(gaps, axis=0)],
        names=names,
    )


class Cell:
    """Weights and arguments of one model, scheme and number of tokens."""

    def __init__(self, text: str, lock: str):
        self.model, self.scheme, tokens = text.removesuffix(":brief").split(":")
        self.tokens, self.lock = int(tokens), lock
        self.config = moe_jax.MoEConfig(
            *layer_shape(self.model), scheme=scheme_named(self.scheme), implementation=("mosaic",)
        )
        with making(lock):
            self.weights = jax.block_until_ready(random_weights(self.config))
        kx, kz = jax.random.split(jax.random.key(self.tokens))
        x = jax.random.normal(kx, (self.tokens, self.config.hidden_size), jnp.bfloat16)
        shape = (calls_of(self.tokens), self.tokens, self.config.num_experts)
        self.args = (self.weights, x, list(jax.random.normal(kz, shape, jnp.float32)))
        self.key = _mosaic_plan.layer_key(self.config, self.weights)

    def compiled(self, chosen: LayerConfig | None, options: dict[str, str | bool]) -> Any:
        """A program of several calls in the configuration given; None for the table's."""
        table = table_for("NVIDIA H200")
        if chosen is not None:
            table = Table(table.device, (Entry(self.key, self.tokens, chosen, 1.0),))
        _mosaic_plan.table_for = lambda device: table
        jax.clear_caches()  # the table is read while a layer is traced, and equal layers are traced once
        layer = jax.jit(lambda w, x, z: moe_jax.fused_moe(x, z, w, self.config))
        program = jax.jit(lambda w, x, logits: [layer(w, x, z) for z in logits])
        return program.lower(*self.args).compile(compiler_options=options)

    def measure(self, programs: dict[str, Any]) -> dict[str, dict[str, Any]]:
        """Figures of each program, by its name; with the GPU locked."""
        found: dict[str, dict[str, Any]] = {name: dict(us=[]) for name in programs}
        calls, args = calls_of(self.tokens), self.args

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


def run_cell(text: str, options: argparse.Namespace, until: float) -> None:
    cell = Cell(text, options.lock)
    chosen: list[LayerConfig | None] = [None]
    if options.only:
        chosen += [parse(one) for one in options.only.split(";")]
    elif not text.endswith(":brief"):
        chosen += spread_of(cell.key, cell.tokens)
    programs, base = {}, dict(model=cell.model, scheme=cell.scheme, tokens=cell.tokens)
    records: dict[str, dict[str, Any]] = {}
    for number, one in enumerate(chosen):
        if time.time() > until - 12:
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
        if name == "0":
            record["graph_us"] = found["graph"]["us"]
        with Path(options.out).open("a") as file:
            file.write(json.dumps(record | found.get(name, {})) + "\n")
    print(text, len(programs), "programs", round(until - time.time()), "s left", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", required=True)
    parser.add_argument("--jobs", type=int, default=14)
    parser.add_argument("--seconds", type=float, default=220)
    parser.add_argument("--only")
    parser.add_argument("--out", required=True)
    parser.add_argument("--lock", help="file that processes lock while they use the GPU")
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.until:
        try:
            run_cell(options.cells, options, options.until)
        except Exception:
            traceback.print_exc()
            return 1
        return 0
    cells, running, until = options.cells.split(","), [], time.time() + options.seconds
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-u", __file__, "--out", options.out, "--lock", options.lock or f"{folder}/lock"]
        command += ["--until", str(until), *(["--only", options.only] if options.only else [])]
        start = functools.partial(subprocess.Popen, env=environment)
        while running or (cells and time.time() < until - 40):
            running = [worker for worker in running if worker.poll() is None]
            while cells and len(running) < options.jobs and time.time() < until - 40:  # too late to finish
                running.append(start([*command, "--cells", cells.pop(0)]))
            if time.time() > until:
                for worker in running:
                    worker.kill()
            time.sleep(0.2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
