"""Time the Hopper grouped GEMM at the sizes of four models: both GEMMs of a layer, every operand format.

    python benchmarks/grouped_gemm.py [--models qwen3-30b-a3b,...] [--tokens 16,1024] [--formats fp8_block,...]
    [--check] [--json FILE]

Random values, random routing (top_k distinct experts a token, uniform), rows in expert order. GEMM 1 is gated: its
product, silu(gate) * up, and for fp8_block the requantization to e4m3 with 1x128 scales, in one kernel. Reported:
microseconds of one call inside jit, TFLOP/s over the rows in use, GB/s over the bytes that must move (weights of the
experts in use, rows in use), and the larger of the two as a fraction of the machine's measured limit. --check compares
one expert with float32. Formats of few bits run in the packed kernel; int4_* with int8 or fp8 rows are W4A8.
"""

import argparse
import dataclasses
import functools
import json
import math
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from _timing import DENSE_TFLOPS, READ_GBPS, header, time_in_jit

from moe_jax.benchmarking import MODELS
from pallas_kernels.common.activations import Activation
from pallas_kernels.grouped_gemm import choose_block_m, grouped_gemm
from pallas_kernels.grouped_gemm.packed import PackedFormat, grouped_gemm_packed
from pallas_kernels.grouped_gemm.packed import choose_block_m as choose_packed_block_m
from pallas_kernels.tuning.operands import random_packed_weights

FORMATS = {
    "bf16": ("bfloat16", None),
    "fp8_channel": ("float8_e4m3fn", "row"),
    "fp8_block": ("float8_e4m3fn", "group"),
    "int8": ("int8", "row"),
}
PACKED = {
    "int4_g128": PackedFormat("int4", scale="group", group_size=128),
    "int4_channel": PackedFormat("int4"),
    "nvfp4": PackedFormat("e2m1", scale="e4m3", group_size=16),
    "mxfp4": PackedFormat("e2m1", scale="e8m0", group_size=32),
    "int8_a16": PackedFormat("int8"),
    "fp8_a16": PackedFormat("e4m3"),
    "mxfp8": PackedFormat("e4m3", scale="e8m0", group_size=32),
    "int4_int8": PackedFormat("int4", "int8", "group", 128),
    "int4_fp8": PackedFormat("int4", "float8_e4m3fn", "group", 128),
}
SILU = Activation("silu")


@dataclasses.dataclass
class Rows:
    """Where the rows of a routing lie. All arrays are NumPy."""

    sizes: np.ndarray
    block_m: int
    tile_expert: np.ndarray
    tile_rows: np.ndarray

    @property
    def count(self) -> int:
        return len(self.tile_expert) * self.block_m


def route(num_tokens: int, num_experts: int, top_k: int, choose=choose_block_m, seed: int = 0) -> Rows:
    rng = np.random.default_rng(seed)
    ids = np.argsort(rng.random((num_tokens, num_experts)), axis=1)[:, :top_k]
    sizes = np.bincount(ids.reshape(-1), minlength=num_experts)
    hit = num_experts * (1 - (1 - top_k / num_experts) ** num_tokens)
    block_m = choose(num_tokens * top_k / hit)
    tiles = -(-sizes // block_m)
    tile_rows = np.concatenate([np.minimum(s - np.arange(0, s, block_m), block_m) for s in sizes])
    return Rows(sizes, block_m, np.repeat(np.arange(num_experts), tiles).astype(np.int32), tile_rows.astype(np.int32))


def operands(fmt: str, rows: Rows, n: int, k: int, halves: int, seed: int = 0):
    """Arguments and keyword arguments of grouped_gemm with random values on the device."""
    dtype, scale = FORMATS[fmt]
    experts = len(rows.sizes)
    keys = jax.random.split(jax.random.key(seed), 4)
    lead = (experts, halves) if halves > 1 else (experts,)

    @jax.jit
    def values(key_x, key_w):
        if dtype == "int8":
            draw = lambda key, shape: jax.random.randint(key, shape, -127, 128, jnp.int8)  # noqa: E731
        else:
            draw = lambda key, shape: jax.random.normal(key, shape, jnp.bfloat16).astype(dtype)  # noqa: E731
        return draw(key_x, (rows.count, k)), draw(key_w, (*lead, n, k))

    x, w = values(keys[0], keys[1])
    kwargs = {}
    if scale is not None:
        x_shape = (-(-k // 128), rows.count) if scale == "group" else (rows.count,)
        w_shape = (*lead, -(-n // 128), -(-k // 128)) if scale == "group" else (*lead, n)
        kwargs["x_scale"] = jax.random.uniform(keys[2], x_shape, jnp.float32, 0.005, 0.015)
        kwargs["w_scale"] = jax.random.uniform(keys[3], w_shape, jnp.float32, 0.005, 0.015)
    tile_expert, num_tiles = jnp.asarray(rows.tile_expert), jnp.int32(len(rows.tile_expert)).reshape(1)
    return (x, w, tile_expert, num_tiles), kwargs


def packed_operands(fmt: PackedFormat, rows: Rows, n: int, k: int, halves: int, seed: int = 0):
    """Arguments and keyword arguments of grouped_gemm_packed; scales of groups are bfloat16."""

    @jax.jit
    def values(key):
        if fmt.operand == "int8":
            x = jax.random.randint(key, (rows.count, k), -127, 128, jnp.int8)
        else:
            x = jax.random.normal(key, (rows.count, k), jnp.bfloat16).astype(fmt.operand)
        return x, random_packed_weights(fmt, (len(rows.sizes), halves, n, k), "bfloat16")

    x, w = values(jax.random.key(seed))
    kwargs = {}
    if fmt.is_8bit:
        kwargs["x_scale"] = jax.random.uniform(jax.random.key(seed + 1), (rows.count,), jnp.float32, 0.005, 0.015)
    tile_expert, num_tiles = jnp.asarray(rows.tile_expert), jnp.int32(len(rows.tile_expert)).reshape(1)
    return (x, w, tile_expert, num_tiles), kwargs


def measure_packed(name: str, rows: Rows, n: int, k: int, gated: bool, check: bool) -> dict:
    halves = 2 if gated else 1
    fmt = PACKED[name]
    args, kwargs = packed_operands(fmt, rows, n, k, halves)

    def call(x, w, tile_expert, num_tiles, kwargs, implementation="mosaic"):
        activation = SILU if gated else None
        return grouped_gemm_packed(
            x, w, tile_expert, num_tiles, activation=activation, **kwargs, implementation=implementation
        )

    error = math.nan
    if check:
        error = compare_packed(jax.jit(call)(*args, kwargs), args, kwargs, rows, call)
    us = time_in_jit(call, (*args, kwargs), 3)
    used, hit = int(rows.sizes.sum()), int((rows.sizes > 0).sum())
    weight_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(args[1]))
    moved = weight_bytes * hit / len(rows.sizes) + used * k * args[0].dtype.itemsize + used * n * 2
    return report(us, 2 * used * n * k * halves, moved, fmt.operand, error)


def compare_packed(out, args, kwargs, rows: Rows, call) -> float:
    """Largest relative error of a row of the busiest expert, against the reference in float32."""
    expert = int(np.argmax(rows.sizes))
    start = int(np.flatnonzero(rows.tile_expert == expert)[0]) * rows.block_m
    own = slice(start, start + rows.block_m)
    used = min(int(rows.sizes[expert]), rows.block_m)
    w = jax.tree.map(lambda leaf: leaf[expert : expert + 1], args[1])
    zero, one = jnp.zeros(1, jnp.int32), jnp.ones(1, jnp.int32)
    scales = {name: value[own] for name, value in kwargs.items()}
    expected = jax.jit(functools.partial(call, implementation="reference"))(args[0][own], w, zero, one, scales)
    out, expected = (a[:used].astype(jnp.float32) for a in (out[own], expected))
    return float(jnp.max(jnp.linalg.norm(out - expected, axis=1) / jnp.linalg.norm(expected, axis=1)))


def report(us: float, flops: float, moved: float, dtype: str, error: float) -> dict:
    tflops, gbps = flops / us / 1e6, moved / us / 1e3
    limit = max(tflops / DENSE_TFLOPS[dtype], gbps / READ_GBPS)
    return dict(us=us, tflops=tflops, gbps=gbps, limit=limit, error=None if math.isnan(error) else error)


def text(found: dict) -> str:
    error = "" if found["error"] is None else f" error {found['error']:.1e}"
    return (
        f"{found['us']:9.1f} us {found['tflops']:7.1f} TFLOP/s {found['gbps']:6.0f} GB/s {found['limit']:6.1%} of limit"
        + error
    )


def measure(fmt: str, rows: Rows, n: int, k: int, gated: bool, check: bool) -> dict:
    halves = 2 if gated else 1
    args, kwargs = operands(fmt, rows, n, k, halves)
    static = dict(activation=SILU) if gated else {}
    if gated and fmt == "fp8_block":
        static["requantize"] = "group"
    arrays = dict(kwargs, tile_rows=jnp.asarray(rows.tile_rows))

    def call(x, w, tile_expert, num_tiles, arrays):
        return grouped_gemm(x, w, tile_expert, num_tiles, **arrays, **static, implementation="mosaic")

    error = compare(jax.jit(call)(*args, arrays), args, kwargs, rows, halves) if check else math.nan
    us = time_in_jit(call, (*args, arrays), 3)
    used, hit = int(rows.sizes.sum()), int((rows.sizes > 0).sum())
    itemsize = args[0].dtype.itemsize
    out_itemsize = 1 if "requantize" in static else 2
    flops = 2 * used * n * k * halves
    moved = hit * halves * n * k * itemsize + used * k * itemsize + used * n * out_itemsize
    return report(us, flops, moved, args[0].dtype.name, error)


def compare(out, args, kwargs, rows: Rows, halves: int) -> float:
    """Largest relative error of a row of the busiest expert, against float32."""
    expert = int(np.argmax(rows.sizes))
    tiles = np.flatnonzero(rows.tile_expert == expert)
    start, size = int(tiles[0]) * rows.block_m, int(min(rows.sizes[expert], 256))
    own = slice(start, start + size)
    x, w = (a.astype(jnp.float32) for a in (args[0][own], args[1][expert].reshape(halves, -1, args[0].shape[1])))
    n, k = w.shape[1:]
    if kwargs and kwargs["x_scale"].ndim == 2:
        x = x * jnp.repeat(kwargs["x_scale"][:, own].T, 128, 1)[:, :k]
        scale = kwargs["w_scale"][expert].reshape(halves, -1, -(-k // 128))
        w = w * jnp.repeat(jnp.repeat(scale, 128, 1), 128, 2)[:, :n, :k]
    elif kwargs:
        x, w = x * kwargs["x_scale"][own, None], w * kwargs["w_scale"][expert].reshape(halves, n, 1)
    h = jnp.einsum("mk,gnk->gmn", x, w, precision="highest")
    h = SILU(h[0], h[1]) if halves == 2 else h[0]
    if isinstance(out, tuple | list):
        out = out[0][own].astype(jnp.float32) * jnp.repeat(out[1][:, own].T, 128, 1)[:, :n]
    else:
        out = out[own].astype(jnp.float32)
    return float(jnp.max(jnp.linalg.norm(out - h, axis=1) / jnp.linalg.norm(h, axis=1)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--tokens", default="1,16,64,256,1024,8192")
    parser.add_argument("--formats", default=",".join((*FORMATS, *PACKED)))
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(header(), flush=True)
    results = []
    for model in options.models.split(","):
        experts, top_k, hidden, inter = MODELS[model]
        for tokens in map(int, options.tokens.split(",")):
            for fmt in options.formats.split(","):
                rows = route(tokens, experts, top_k, choose_packed_block_m if fmt in PACKED else choose_block_m)
                for name, n, k, gated in (("GEMM 1", inter, hidden, True), ("GEMM 2", hidden, inter, False)):
                    label = f"{model:13s} T={tokens:5d} block_m={rows.block_m:3d} {fmt:12s} {name}"
                    try:
                        found = (measure_packed if fmt in PACKED else measure)(fmt, rows, n, k, gated, options.check)
                        print(label, text(found), flush=True)
                        results.append(
                            dict(model=model, tokens=tokens, block_m=rows.block_m, format=fmt, gemm=name, **found)
                        )
                    except Exception as error:
                        print(label, "FAILED", type(error).__name__, str(error)[-300:].replace("\n", " "), flush=True)
                if options.json:
                    options.json.write_text(json.dumps(dict(machine=header(), results=results), indent=1))


if __name__ == "__main__":
    sys.exit(main())
