"""Time quantize_and_permute and combine at the sizes of four models, beside the bytes they must move.

python benchmarks/row_kernels.py [--models ...] [--tokens 1,1024,8192] [--implementations mosaic,reference]
"""

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np
from _timing import READ_GBPS, header, time_in_jit
from grouped_gemm import MODELS, route

from pallas_kernels.combine import combine
from pallas_kernels.quantize_and_permute import quantize_and_permute


def rows_of_tokens(tokens: int, experts: int, top_k: int):
    """(T, top_k) row of each slot in padded expert order, and the number of rows."""
    rng = np.random.default_rng(0)
    ids = np.argsort(rng.random((tokens, experts)), axis=1)[:, :top_k]
    rows = route(tokens, experts, top_k)
    first = np.cumsum(-(-rows.sizes // rows.block_m) * rows.block_m) - -(-rows.sizes // rows.block_m) * rows.block_m
    row_of, seen = np.empty((tokens, top_k), np.int32), np.zeros(experts, int)
    for t in range(tokens):
        for j, e in enumerate(ids[t]):
            row_of[t, j] = first[e] + seen[e]
            seen[e] += 1
    return jnp.asarray(row_of), rows.count


def _permute(x, row_of, **static):
    return quantize_and_permute(x, row_of, **static)


def _requantize(h, row_of, **static):
    return quantize_and_permute(h, rows=row_of.reshape(-1), quantization="e4m3_row", **static)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--tokens", default="1,64,1024,8192")
    parser.add_argument("--implementations", default="mosaic")
    options = parser.parse_args()
    print(header(), flush=True)
    for model in options.models.split(","):
        experts, top_k, hidden, inter = MODELS[model]
        for tokens in map(int, options.tokens.split(",")):
            row_of, num_rows = rows_of_tokens(tokens, experts, top_k)
            x = jax.random.normal(jax.random.key(0), (tokens, hidden), jnp.bfloat16)
            rows = jax.random.normal(jax.random.key(1), (num_rows, hidden), jnp.bfloat16)
            h = jax.random.normal(jax.random.key(2), (num_rows, inter), jnp.bfloat16)
            weights = jax.random.uniform(jax.random.key(3), row_of.shape, jnp.float32)
            used = tokens * top_k
            for name in options.implementations.split(","):
                cases = {}
                for fmt, size in (("none", 2), ("e4m3_row", 1), ("e4m3_group", 1), ("int8_row", 1)):
                    if fmt == "e4m3_group" and hidden % 128:
                        continue
                    permute = functools.partial(_permute, num_rows=num_rows, quantization=fmt, implementation=name)
                    cases[f"permute {fmt}"] = (permute, (x, row_of), tokens * hidden * 2 + used * hidden * size)
                requantize = functools.partial(_requantize, implementation=name)
                cases["requantize e4m3_row"] = requantize, (h, row_of), used * inter * 3
                moved = used * hidden * 2 + tokens * hidden * 2
                cases["combine"] = functools.partial(combine, implementation=name), (rows, row_of, weights), moved
                for case, (call, args, moved) in cases.items():
                    us = time_in_jit(call, args, 1)
                    share = moved / us / 1e3 / READ_GBPS
                    print(
                        f"{model:13s} T={tokens:5d} {name:9s} {case:20s} {us:8.1f} us {moved / us / 1e3:6.0f} GB/s "
                        f"{share:6.1%} of read limit",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
