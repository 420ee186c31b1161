"""Time the portable grouped GEMMs alone on a GPU, in several configurations.

    python benchmarks/portable_products.py --out FILE [--cells bf16:mix1:1024,...] [--jobs 8] [--seconds 100]

A cell is a form of weights, a product (first or second of Mixtral 8x7B, mix1 and mix2, and of Qwen3-30B-A3B, qw1 and
qw2) and the rows of each expert. First products are gated. Each cell runs in a process of its own, which ends after
--seconds; several compile at the same time and take turns on the GPU. One JSON line for each configuration:
microseconds of a call, TFLOP/s (TOP/s for int8), GB/s over weights, rows and results, and the largest error beside the
reference in the first tile, relative to its largest value.
"""

import argparse
import dataclasses
import functools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _locks import locked
from _timing import header, time_in_jit
from _workers import run_all

from pallas_kernels.common.activations import Activation
from pallas_kernels.common.device import portable_target
from pallas_kernels.grouped_gemm import grouped_gemm
from pallas_kernels.grouped_gemm import packed as packed_gemm
from pallas_kernels.grouped_gemm.portable import MmaConfig, choose_block_m, choose_config
from pallas_kernels.grouped_gemm.problem import GemmDesc

# Experts, projections, N, K.
PRODUCTS = dict(mix1=(8, 2, 14336, 4096), mix2=(8, 1, 4096, 14336), qw1=(128, 2, 768, 2048), qw2=(128, 1, 2048, 768))
PACKED = dict(
    int4=packed_gemm.PackedFormat("int4", "bfloat16", "group", 128),
    mxfp4=packed_gemm.PackedFormat("e2m1", "bfloat16", "e8m0", 32),
)
PREFILL: tuple[dict[str, Any], ...] = ({}, dict(raster_group_m=16), dict(num_stages=2), dict(num_stages=4))
PREFILL_PACKED: tuple[dict[str, Any], ...] = (*PREFILL, dict(step_blocks=2, num_stages=2))
DECODE: tuple[dict[str, Any], ...] = (
    *({}, dict(num_stages=2), dict(num_stages=4), dict(num_stages=6)),
    dict(raster_group_m=1),
)
DECODE_PACKED: tuple[dict[str, Any], ...] = (
    *({}, dict(num_stages=3), dict(num_stages=4), dict(num_stages=8)),
    *(dict(step_blocks=2, num_stages=count) for count in (2, 3, 4, 6)),
    *(dict(step_blocks=4, num_stages=count) for count in (2, 3)),
)
CELLS = (
    *("bf16:mix1:1024", "int4:mix1:1024", "int8:mix1:1024", "bf16:mix1:16", "int4:mix1:16", "int8:mix1:16"),
    *("bf16:qw1:256", "int4:qw1:256", "int8:qw1:256", "bf16:qw1:16", "int4:qw1:16", "int8:qw1:16"),
    *("bf16:mix2:1024", "int4:mix2:1024", "int4:mix2:16", "int4:qw2:256", "int4:qw2:16", "bf16:qw2:256"),
    *("fp8:mix1:1024", "mxfp4:mix1:1024", "mxfp4:mix1:16", "fp8:mix1:16"),
)


def operands_of(form: str, product: str, rows: int, block_m: int) -> tuple[Any, dict[str, Any], dict[str, Any], int]:
    """(function, arrays, options, bytes moved) of a cell."""
    e, g, n, k = PRODUCTS[product]
    keys = jax.random.split(jax.random.key(0), 4)
    total = e * rows
    tiles = dict(
        tile_expert=jnp.asarray(np.repeat(np.arange(e), rows // block_m), jnp.int32),
        num_tiles=jnp.full((1,), total // block_m, jnp.int32),
    )
    options: dict[str, Any] = dict(
        activation=Activation("silu") if g == 2 else None, out_dtype=jnp.bfloat16, implementation="portable"
    )
    if form in PACKED:
        fmt = PACKED[form]
        blocks = (e, n // 64, g)
        words = jax.random.bits(keys[0], (*blocks, k // fmt.block_k, *fmt.block_shape), jnp.uint32)
        if fmt.scale_words:  # scales near the largest of the matrix, as they are stored: 254 a byte
            words = words.at[..., -(fmt.scale_words // fmt.block_shape[1]) :, :].set(jnp.uint32(0x7DFEFDFB))
        scale = None
        if fmt.scale == "group":
            scale = jax.random.uniform(keys[1], (*blocks, k // fmt.group_size, 64), jnp.float32, 0.01, 0.03)
            scale = scale.astype(jnp.bfloat16)
        channel = jnp.full((*blocks, 64), 2.0**-8, jnp.float32) if fmt.scale_words else None
        w = packed_gemm.PackedWeights(jax.lax.bitcast_convert_type(words, jnp.int32), scale, None, channel, fmt, n, k)
        x = jax.random.normal(keys[2], (total, k), jnp.bfloat16)
        arrays: dict[str, Any] = dict(x=x, w=w, **tiles)
        run: Any = packed_gemm.grouped_gemm_packed
    else:
        dtype = dict(bf16=jnp.bfloat16, int8=jnp.int8, fp8=jnp.float8_e4m3fn)[form]
        run = grouped_gemm
        arrays = dict(tiles)
        if form == "int8":
            arrays |= dict(x=jax.random.randint(keys[0], (total, k), -127, 128, jnp.int8))
            arrays |= dict(w=jax.random.randint(keys[1], (e, g, n, k), -127, 128, jnp.int8))
        else:  # in pieces: a matrix of normal numbers in float32 would not fit beside it
            draw = functools.partial(jax.random.normal, shape=(g, n, k), dtype=jnp.bfloat16)
            w = jax.lax.map(lambda key: draw(key).astype(dtype), jax.random.split(keys[1], e))
            arrays |= dict(x=jax.random.normal(keys[0], (total, k), jnp.bfloat16).astype(dtype), w=w)
        if form != "bf16":
            arrays |= dict(x_scale=jnp.full(total, 1e-2, jnp.float32), w_scale=jnp.full((e, g, n), 1e-2, jnp.float32))
    moved = sum(leaf.nbytes for leaf in jax.tree.leaves(arrays)) + 2 * total * n
    return run, arrays, options, moved


def error_of(run: Any, arrays: dict[str, Any], options: dict[str, Any], block_m: int, found: jax.Array) -> float:
    """Of the first tile beside the reference."""
    own = dict(arrays, x=arrays["x"][:block_m], tile_expert=arrays["tile_expert"][:1], num_tiles=jnp.ones(1, jnp.int32))
    if "x_scale" in own:
        own["x_scale"] = own["x_scale"][:block_m]
    own["w"] = jax.tree.map(lambda leaf: leaf[:1], own["w"])
    if "w_scale" in own:
        own["w_scale"] = own["w_scale"][:1]
    expected = run(**own, **dict(options, implementation="reference"))
    expected, first = np.asarray(expected, np.float32), np.asarray(found[:block_m], np.float32)
    return float(np.abs(first - expected).max() / np.abs(expected).max())


def run_cell(cell: str, out: str, lock: str) -> None:
    form, product, count = cell.split(":")
    rows, (e, g, n, k) = int(count), PRODUCTS[product]
    target = portable_target()
    block_m = choose_block_m(rows, 64 if form == "mxfp4" else 32 if form == "fp8" and target.unpacks_e4m3 else 128)
    with locked(lock):
        run, arrays, options, moved = operands_of(form, product, rows, block_m)
        jax.block_until_ready(arrays)
    plain = dict(rows=e * rows, n=n, k=k, num_experts=e, projections=g, activation=options["activation"])
    if form in PACKED:
        desc: Any = packed_gemm.describe_call(e * rows, arrays["w"], jnp.bfloat16, "none", None, options["activation"])
    else:
        scales: dict[str, Any] = {} if form == "bf16" else dict(lhs_scale="row", rhs_scale="channel")
        desc = GemmDesc(dtype=jnp.dtype(arrays["x"].dtype).name, **plain, **scales)
    chosen = choose_config(desc, block_m, target)
    variants = (
        (DECODE_PACKED if form in PACKED else DECODE) if rows <= 16 else (PREFILL_PACKED if form in PACKED else PREFILL)
    )
    seen: set[MmaConfig] = set()
    for variant in variants:
        config = dataclasses.replace(chosen, **variant)
        if config in seen:
            continue
        seen.add(config)
        line: dict[str, Any] = dict(cell=cell, variant=variant, config=str(config))
        names = [name for name in arrays if name != "num_tiles"]
        call = functools.partial(run, **options, config=config)

        def with_names(num_tiles, *values, call=call, names=names):
            return call(num_tiles=num_tiles, **dict(zip(names, values, strict=True)))

        values = (arrays["num_tiles"], *(arrays[name] for name in names))
        try:
            timing: dict[str, Any] = dict(calls=(0, 10), samples=3, budget_s=0.05, rest_s=0.1 if rows > 16 else 0.0)
            us = time_in_jit(with_names, values, 0, turn=functools.partial(locked, lock), **timing)
            error = None
            if not variant:
                with locked(lock):
                    error = error_of(run, arrays, options, block_m, jax.jit(with_names)(*values))
            flops = 2 * e * rows * g * n * k
            line |= dict(us=round(us, 1), tflops=round(flops / us / 1e6, 1), gbps=round(moved / us / 1e3), error=error)
        except Exception as failure:  # one configuration that fails must not hide the others
            line["failed"] = f"{type(failure).__name__}: {str(failure)[:300]}"
        print(json.dumps(line), flush=True)
        with Path(out).open("a") as file:
            file.write(json.dumps(line) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--cells", default=",".join(CELLS))
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--lock", help="file that processes lock while they use the GPU")
    parser.add_argument("--alone", action="store_true", help="run the cells in this process")
    args = parser.parse_args()
    if args.alone:
        for cell in args.cells.split(","):
            run_cell(cell, args.out, args.lock)
        return
    print(header(), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--alone", "--out", args.out, "--lock", args.lock or f"{folder}/lock"]
        jobs = [([*command, "--cells", cell], {}) for cell in args.cells.split(",")]
        run_all(jobs, args.jobs, seconds_each=args.seconds)


if __name__ == "__main__":
    main()
