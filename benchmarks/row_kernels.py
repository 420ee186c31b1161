"""Time quantize_and_permute, combine and align at the sizes of four models, beside the bytes they must move.

python benchmarks/row_kernels.py [--models ...] [--tokens 1,1024,8192] [--implementations mosaic,reference]
       [--formats none,e4m3_row,...] [--rows-at-once 1,4] [--align-blocks 1,16,32,64]

--rows-at-once and --align-blocks time the kernels' forms side by side, where they can run, instead of the one chosen.

Of microscaling formats also "by XLA": rounded by XLA, then moved by the kernel (tokens) or left in place. Microseconds
that the GPU's kernels of a call take by JAX's profiler, and how many they are; launches, which cost the host more than
these kernels at few tokens, and the gaps between kernels are not in them.
"""

import argparse
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _timing import READ_GBPS, header
from _trace import NO_COMMAND_BUFFERS, traced
from grouped_gemm import MODELS, route

from pallas_kernels.align import AlignConfig, align
from pallas_kernels.combine import combine
from pallas_kernels.common.device import hopper_sms
from pallas_kernels.quantize_and_permute import PermuteConfig, PermuteDesc, config_error, quantize_and_permute
from pallas_kernels.quantize_and_permute.config import MICROSCALING


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
    return quantize_and_permute(h, rows=row_of.reshape(-1), **static)


def _permute_by_xla(x, row_of, *, quantization, num_rows, implementation):
    values, _ = quantize_and_permute(x, quantization=quantization, implementation="reference")
    return quantize_and_permute(values, row_of, num_rows, quantization="none", implementation=implementation)


def _requantize_by_xla(h, row_of, *, quantization, implementation):
    del row_of, implementation
    return quantize_and_permute(h, quantization=quantization, implementation="reference")


def _forms(name: str, width: int, used: int, top_k: int, fmt: str, rows_at_once: str) -> dict[str, Any]:
    """Options by label: the choice, or each of the numbers of rows that a block may take at once."""
    if name != "mosaic" or not rows_at_once:
        return {"": {}}
    desc, found = PermuteDesc(used, width, top_k, used, "bfloat16", fmt), {}
    for rows in map(int, rows_at_once.split(",")):
        config = PermuteConfig(max(1, min(-(-used // rows), 24 * hopper_sms())), rows)
        if not config_error(desc, config):
            found[f" {rows} at once"] = dict(config=config)
    return found


def _align_forms(name: str, blocks: str) -> dict[str, Any]:
    if name != "mosaic" or not blocks:
        return {"": {}}
    return {f" {n} blocks": dict(config=AlignConfig(8 if n == 1 else 4, n)) for n in map(int, blocks.split(","))}


def _vary(values: jax.Array, i: int) -> jax.Array:
    """Other values, the i-th: of expert ids other tokens'."""
    return jnp.roll(values, i, 0) if values.dtype == jnp.int32 else values + i


def device_time(call, args: tuple) -> tuple[float, int]:
    """(microseconds, kernels) of a call on other values of its first argument each time."""
    calls = 10 if args[0].size < 1 << 24 else 3
    inner, values = jax.jit(call), [_vary(args[0], i) for i in range(calls)]
    program = jax.jit(lambda values, rest: [inner(value, *rest) for value in values])
    compiled = program.lower(values, args[1:]).compile(compiler_options=NO_COMMAND_BUFFERS)
    for _ in range(2):
        jax.block_until_ready(compiled(values, args[1:]))
    with traced() as found:
        jax.block_until_ready(compiled(values, args[1:]))
    if not found:
        raise RuntimeError("the profiler saw no kernel of a GPU; this script needs one")
    return sum(kernel.duration for kernel in found) / calls, round(len(found) / calls)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--tokens", default="1,64,1024,8192")
    parser.add_argument("--implementations", default="mosaic")
    parser.add_argument("--formats", default="none,e4m3_row,e4m3_group,int8_row")
    parser.add_argument("--rows-at-once", default="")
    parser.add_argument("--align-blocks", default="")
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
                for fmt in options.formats.split(","):
                    if fmt == "e4m3_group" and hidden % 128:
                        continue
                    size = 1 if fmt.startswith(("e4m3", "int8")) else 2
                    ways: dict[str, Any] = {"": (_permute, _requantize)}
                    if fmt in MICROSCALING:
                        ways[" by XLA"] = (_permute_by_xla, _requantize_by_xla)
                    for way, functions in ways.items():
                        static = dict(quantization=fmt, implementation=name)
                        permute, requantize = (functools.partial(function, **static) for function in functions)
                        permute = functools.partial(permute, num_rows=num_rows)
                        moved = tokens * hidden * 2 + used * hidden * size
                        given = "" if way else options.rows_at_once
                        for form, config in _forms(name, hidden, tokens, top_k, fmt, given).items():
                            case = f"permute {fmt}{way}{form}"
                            cases[case] = functools.partial(permute, **config), (x, row_of), moved
                        if fmt == "none":
                            continue
                        for form, config in _forms(name, inter, used, 0, fmt, given).items():
                            case = f"requantize {fmt}{way}{form}"
                            cases[case] = (
                                functools.partial(requantize, **config),
                                (h, row_of),
                                used * inter * (2 + size),
                            )
                moved = used * hidden * 2 + tokens * hidden * 2
                cases["combine"] = functools.partial(combine, implementation=name), (rows, row_of, weights), moved
                ids = jax.random.randint(jax.random.key(4), row_of.shape, 0, experts)
                for form, config in _align_forms(name, options.align_blocks).items():
                    call = functools.partial(align, num_experts=experts, block_m=128, implementation=name, **config)
                    cases[f"align{form}"] = call, (ids,), 8 * used
                for case, (call, args, moved) in cases.items():
                    us, count = device_time(call, args)
                    share = moved / us / 1e3 / READ_GBPS
                    print(
                        f"{model:13s} T={tokens:5d} {name:9s} {case:27s} {us:8.1f} us {moved / us / 1e3:6.0f} GB/s "
                        f"{share:6.1%} of read limit, {count} kernels",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
