"""Time whole layers of the xla backend on a GPU in each of its ways to run them, beside another copy of the packages.

    XLA_FLAGS=--xla_gpu_autotune_level=0 python benchmarks/xla_layers.py --out FILE [--old DIR] [--jobs 10]
        [--seconds 280] [--models qwen3-30b-a3b,mixtral-8x7b] [--schemes bf16,...] [--tokens 1,64,8192] [--chosen]

DIR holds another moe_jax and pallas_kernels, such as those of an earlier commit. A process takes a model and a scheme
in one copy; several compile at the same time and hold a lock while they time. FILE gets a JSON line per layer as soon
as it is measured: "way" is "old" in DIR, else "chosen" (as the backend plans it), or one that is forced: "tiles" (one
after another), "pairs", "experts", and "experts/256M" (with temporaries of so many MiB). "kernels" are the longest of
a call by JAX's profiler: name, launches, microseconds in all. Which ways are forced depends on the number of tokens;
--chosen forces none.
"""

import argparse
import collections
import functools
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from _locks import locked, making
from _timing import header, limits_here
from _trace import NO_COMMAND_BUFFERS, traced
from _workers import run_all
from moe_layer import scheme_named, timing_of

import moe_jax
from moe_jax.benchmarking import layer_shape, measure_layer, random_weights

SCHEMES = "bf16,fp8_channel,fp8_block,int8_w8a8,w4a16_g128,nvfp4,mxfp4_a16"
_TRACED = 3  # calls


def ways_of(tokens: int, is_chosen: bool) -> Iterator[str]:
    yield "chosen"
    if is_chosen:
        return
    if tokens <= 64:
        yield from ("pairs", "experts")
    if tokens >= 1024:
        yield from ("tiles", "experts/256M", "experts/4096M")


def force(way: str) -> None:
    """Let the backend plan its calls as ``way`` says."""
    from moe_jax.experts.xla import _batches, _experts

    def planned(config: Any, scheme: Any, num_tokens: int, top_k: int, operand_bytes: int) -> Any:
        if way == "chosen":
            return _batches.plan_batches(config, scheme, num_tokens, top_k, operand_bytes)
        if way == "tiles":
            return None
        if way == "pairs":
            return _batches.Batches("pairs")
        return _batches.plan_experts(config, scheme, num_tokens * top_k, operand_bytes)

    size = way.partition("/")[2].removesuffix("M")
    _batches.TEMPORARY_BYTES = int(size or 1024) << 20
    _experts.plan_batches = planned


def kernels_of(config: Any, weights: Any, tokens: int, lock: str) -> list[tuple[str, float, float]]:
    """(name, launches, microseconds) a call, the longest in all first."""
    x = jax.random.normal(jax.random.key(0), (tokens, config.hidden_size), config.dtype)
    logits = jax.random.normal(jax.random.key(1), (tokens, config.num_experts), jnp.float32)
    layer = jax.jit(lambda w, x, z: moe_jax.fused_moe(x, z, w, config))
    compiled = layer.lower(weights, x, logits).compile(compiler_options=NO_COMMAND_BUFFERS)
    found: dict[str, list[float]] = collections.defaultdict(list)
    with locked(lock):
        jax.block_until_ready(compiled(weights, x, logits))
        with traced() as kernels:
            for _ in range(_TRACED):
                jax.block_until_ready(compiled(weights, x, logits))
    for kernel in kernels:
        found[kernel.name[:60]].append(kernel.duration)
    rows = [(name, len(each) / _TRACED, round(sum(each) / _TRACED, 1)) for name, each in found.items()]
    return sorted(rows, key=lambda row: -row[2])[:12]


def work(options: argparse.Namespace) -> None:
    model, name = options.pair.split(":")
    config = moe_jax.MoEConfig(*layer_shape(model), scheme=scheme_named(name), implementation=("xla",))
    with making(options.lock):
        weights = jax.block_until_ready(random_weights(config))
    for tokens in map(int, options.tokens.split(",")):
        for way in ["old"] if options.is_old else ways_of(tokens, options.chosen):
            cell: dict[str, Any] = dict(model=model, scheme=name, tokens=tokens, way=way)
            try:
                if way != "old":
                    force(way)
                turn = functools.partial(locked, options.lock)
                cell |= measure_layer(config, model, weights, tokens, limits_here(), turn=turn, **timing_of(tokens))
                cell["scheme"] = name
                if way in ("old", "chosen"):
                    cell["kernels"] = kernels_of(config, weights, tokens, options.lock)
            except Exception as error:  # one way that fails must not hide the others
                cell["error"] = f"{type(error).__name__}: {str(error)[:300]}"
            print(json.dumps(cell)[:160], flush=True)
            with Path(options.out).open("a") as file:
                file.write(json.dumps(cell) + "\n")


def summary(path: Path) -> Iterator[str]:
    """A line per layer: microseconds of each way, and the old ones by those that are chosen."""
    cells: dict[tuple[str, str, int], dict[str, float]] = collections.defaultdict(dict)
    for record in map(json.loads, path.read_text().splitlines()):
        if "us" in record:
            cells[record["model"], record["scheme"], record["tokens"]][record["way"]] = record["us"]
    for (model, scheme, tokens), found in sorted(cells.items()):
        ratio = f"{found['old'] / found['chosen']:6.2f}x" if {"old", "chosen"} <= found.keys() else ""
        times = " ".join(f"{way} {micros:.1f}" for way, micros in found.items())
        yield f"{model:14s} {scheme:12s} T={tokens:5d} {ratio} {times}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--old", type=Path, metavar="DIR")
    parser.add_argument("--models", default="qwen3-30b-a3b,mixtral-8x7b")
    parser.add_argument("--schemes", default=SCHEMES)
    parser.add_argument("--tokens", default="1,64,8192")
    parser.add_argument("--chosen", action="store_true")
    parser.add_argument("--jobs", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=280)
    parser.add_argument("--lock", default=f"{tempfile.gettempdir()}/gpu_lock")
    parser.add_argument("--pair", help=argparse.SUPPRESS)
    parser.add_argument("--is-old", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.pair:
        work(options)
        return 0
    print(header(), flush=True)
    pairs = [f"{model}:{name}" for name in options.schemes.split(",") for model in options.models.split(",")]
    shared = [sys.executable, __file__, "--out", options.out, "--tokens", options.tokens, "--lock", options.lock]
    shared += ["--chosen"] * options.chosen
    here, jobs = Path(__file__).resolve().parent.parent, []
    for pair in pairs:
        jobs.append(([*shared, "--pair", pair], {"PYTHONPATH": str(here)}))
        if options.old:
            jobs.append(([*shared, "--pair", pair, "--is-old"], {"PYTHONPATH": str(options.old.resolve())}))
    run_all(jobs, options.jobs, seconds=options.seconds)
    print(*summary(Path(options.out)), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
