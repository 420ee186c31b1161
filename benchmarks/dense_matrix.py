"""Quantized matrices outside the experts on a Hopper GPU: are they right, how fast beside bfloat16 in XLA. 3 minutes.

    python benchmarks/dense_matrix.py --out FILE [--schemes fp8_block ...] [--tokens 1 64 2048] [--tiles]

For each scheme, matrix and number of tokens one line of JSON: the largest error beside the float32 reference relative
to its largest entry, microseconds of the kernels and of XLA's form of the same product, of a bfloat16 product by XLA,
and of reading the stored bytes at the machine's rate. ``--tiles`` times the product alone instead, in FP8 blocks or
bfloat16, in each candidate for a tile of all tokens, by JAX's profiler, over matrices that are together larger than an
L2.
"""

import argparse
import functools
import itertools
import json
import math
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _timing import READ_GBPS, header, time_in_jit
from _trace import NO_COMMAND_BUFFERS, medians_alone, traced
from _workers import say

from moe_jax.experts._matrix import in_best_matrix_layout, multiply
from moe_jax.quantization import QuantizedMatrix, Scheme, method_for, scheme_per_token
from pallas_kernels.grouped_gemm import grouped_gemm
from pallas_kernels.grouped_gemm.heuristics import candidates, describe
from pallas_kernels.grouped_gemm.problem import GemmDesc

# (N, K): of Qwen3-30B-A3B q, k or v, o; of DeepSeek-V3 kv_a, q_b, o; of a shared expert.
SHAPES = ((4096, 2048), (512, 2048), (2048, 4096), (576, 7168), (24576, 1536), (7168, 16384), (2048, 7168))
SCHEMES = ("fp8_block", "fp8_channel", "int8_w8a8", "w4a16_g128", "nvfp4_dynamic", "mxfp4")


def shape_of(text: str) -> tuple[int, int]:
    n, k = map(int, text.split("x"))
    return n, k


def random_matrix(scheme: Scheme, n: int, k: int, key: Any) -> QuantizedMatrix:
    """(n, k) of variance 1/K, of this scheme as matrices outside the experts have it."""
    scheme = scheme_per_token(scheme)
    w = jax.random.normal(key, (n, k), jnp.float32) * k**-0.5
    return QuantizedMatrix(method_for(scheme).quantize_matrix(w), scheme)


def measured(name: str, shape: tuple[int, int], num_tokens: int) -> dict[str, Any]:
    plain = random_matrix(Scheme.parse(name), *shape, jax.random.key(0))
    held = in_best_matrix_layout(plain, jnp.bfloat16)
    x = jax.random.normal(jax.random.key(1), (num_tokens, shape[1]), jnp.bfloat16)
    by = functools.partial(multiply, out_dtype=jnp.bfloat16)
    expected = np.asarray(jax.jit(functools.partial(by, implementation=("reference",)))(x, plain), np.float32)
    found = np.asarray(jax.jit(functools.partial(by, implementation=("hopper",)))(x, held), np.float32)
    weight = jnp.zeros(shape, jnp.bfloat16)
    times = dict(
        kernels=time_in_jit(functools.partial(by, implementation=("hopper",)), (x, held), 0),
        xla=time_in_jit(functools.partial(by, implementation=("xla",)), (x, plain), 0),
        bfloat16=time_in_jit(lambda x, w: x @ w.T, (x, weight), 0),
    )
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(plain))
    return dict(
        scheme=name,
        shape=list(shape),
        tokens=num_tokens,
        error=float(np.abs(found - expected).max() / np.abs(expected).max()),
        **{f"{key}_us": round(value, 2) for key, value in times.items()},
        read_us=round(nbytes / READ_GBPS / 1e3, 2),
    )


def of_tiles(shape: tuple[int, int], num_tokens: int, dtype: str, parts: int) -> list[dict[str, Any]]:
    """Microseconds of the product in FP8 blocks or bfloat16, num_tokens in one tile, for each candidate; in several
    parts of K without what adds them."""
    (n, k), number = shape, max(2, round(150e6 / math.prod(shape)))
    block_m = num_tokens if parts == 1 else 64
    sizes: dict[str, Any] = dict(rows=parts * block_m, n=n, k=k, num_experts=1, unpermuted_rows=num_tokens)
    scaled: dict[str, Any] = dict(lhs_scale="group", rhs_scale="block") if dtype != "bfloat16" else {}
    out_dtype = jnp.bfloat16 if parts == 1 else jnp.float32
    sizes |= dict(has_tile_rows=True, dtype=dtype, k_parts=parts, out_dtype=jnp.dtype(out_dtype).name)
    desc = GemmDesc(**sizes, **scaled)
    x = jnp.ones((num_tokens, k), dtype)
    ws = [jax.random.normal(key, (1, n, k)).astype(x.dtype) for key in jax.random.split(jax.random.key(0), number)]
    options: dict[str, Any] = dict(block_m=block_m, out_dtype=out_dtype, k_parts=parts, implementation="hopper")
    if scaled:
        options |= dict(x_scale=jnp.ones((k // 128, block_m)), w_scale=jnp.ones((1, -(-n // 128), k // 128)))
    found = []
    for config in candidates(desc, block_m, 132):

        @jax.jit  # which is lowered once for all matrices
        def product(x, w, config=config):
            experts, rows = jnp.zeros(parts, jnp.int32), jnp.full((parts,), num_tokens, jnp.int32)
            tiles = jnp.full((1,), parts, jnp.int32)
            return grouped_gemm(x, w, experts, tiles, tile_rows=rows, config=config, **options)

        run = jax.jit(lambda x, ws, product=product: [product(x, w) for w in ws])
        program = run.lower(x, ws).compile(compiler_options=NO_COMMAND_BUFFERS)
        jax.block_until_ready(program(x, ws))
        with traced() as kernels:
            jax.block_until_ready([program(x, ws) for _ in range(4)])
        us = medians_alone(kernels, 4 * number)["grouped_gemm"]
        cell = dict(shape=list(shape), tokens=num_tokens, dtype=dtype, parts=parts, us=round(us, 2))
        found.append(cell | dict(tile=describe(desc, config)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--schemes", nargs="+", default=SCHEMES)
    parser.add_argument("--tokens", nargs="+", type=int, default=(1, 16, 64, 2048))
    parser.add_argument("--tiles", action="store_true", help="time candidates for the tile of a product")
    parser.add_argument("--dtypes", nargs="+", default=("float8_e4m3fn",), help="of --tiles: float8_e4m3fn, bfloat16")
    parser.add_argument("--parts", nargs="+", type=int, default=(1,), help="of --tiles: of K")
    parser.add_argument("--shapes", nargs="+", type=shape_of, default=SHAPES, metavar="NxK")
    options = parser.parse_args()
    with open(options.out, "a") as file:
        say(header(), file)
        if options.tiles:
            for shape in options.shapes:
                ways = itertools.product(options.tokens, options.dtypes, options.parts)
                for num_tokens, dtype, parts in ways:
                    if shape[1] % (parts * 128) == 0:
                        for cell in of_tiles(shape, num_tokens, dtype, parts):
                            say(json.dumps(cell), file)
            return
        for name in options.schemes:
            for shape in options.shapes:
                for num_tokens in options.tokens:
                    try:
                        cell = measured(name, shape, num_tokens)
                    except Exception as error:  # one failure must not end the run
                        cell = dict(scheme=name, shape=list(shape), tokens=num_tokens, failed=str(error)[:300])
                    say(json.dumps(cell), file)


if __name__ == "__main__":
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    main()
