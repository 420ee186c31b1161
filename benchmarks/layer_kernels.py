"""Time kernels of a layer one by one on a GPU: products, kernels that move rows, or all of a layer in their order.

    python benchmarks/layer_kernels.py layer [--models ...] [--tokens 1,16,64] [--schemes fp8_channel,...]
    python benchmarks/layer_kernels.py products [--models ...] [--tokens ...] [--formats fp8_block,int4_g128,...]
        [--one-row]
    python benchmarks/layer_kernels.py rows [--models ...] [--tokens ...] [--formats none,e4m3_row,...]
        [--rows-at-once 1,4] [--align-blocks 1,16,32,64]

layer: calls of one program, command buffers off (their kernels are not traced one by one): the median duration of each
kernel by JAX's profiler, and the median gap in front of it. Random weights, each call routed anew.

products: both grouped GEMMs by the tuning table, or by the first candidate, timed as autotune does. TFLOP/s over the
routed rows, GB/s over weights of the experts that uniform routing hits, rows in and out, and the larger of the two as a
fraction of the machine's measured limit. --one-row: one token alone, each way to multiply its tiles of one row.

rows: quantize_and_permute, combine and align, beside the bytes they must move. --rows-at-once and --align-blocks time
the kernels' forms side by side, where they can run, instead of the one chosen. Of microscaling formats also "by XLA":
rounded by XLA, then moved by the kernel (tokens) or left in place. Microseconds that the GPU's kernels of a call take
by JAX's profiler, and how many they are; launches and the gaps between kernels are not in them.
"""

import argparse
import functools
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _sweep_space import rows_per_expert
from _timing import DENSE_TFLOPS, READ_GBPS, header
from _trace import NO_COMMAND_BUFFERS, per_call, traced
from moe_layer import scheme_named
from tuning_table import key_of

import moe_jax
from moe_jax.benchmarking import MODELS, layer_shape, random_weights
from pallas_kernels.align import AlignConfig, align
from pallas_kernels.autotune import GpuTimer
from pallas_kernels.combine import combine
from pallas_kernels.common.device import device_kind, hopper_sms
from pallas_kernels.grouped_gemm import GemmDesc, choose_block_m
from pallas_kernels.quantize_and_permute import PermuteConfig, PermuteDesc, config_error, quantize_and_permute
from pallas_kernels.quantize_and_permute.config import MICROSCALING
from pallas_kernels.tuning import FORMATS, PACKED_FORMATS, table_for
from pallas_kernels.tuning.layer import AnyConfig, AnyDesc, AnyKey
from pallas_kernels.tuning.operands import random_operands

CALLS = 10


def time_layer(model: str, tokens: int, options: argparse.Namespace) -> None:
    shape = layer_shape(model)
    for name in options.schemes.split(","):
        config = moe_jax.MoEConfig(*shape, scheme=scheme_named(name), implementation=("hopper",))
        weights = jax.block_until_ready(random_weights(config))
        kx, kz = jax.random.split(jax.random.key(tokens))
        x = jax.random.normal(kx, (tokens, config.hidden_size), jnp.bfloat16)
        logits = list(jax.random.normal(kz, (CALLS, tokens, config.num_experts), jnp.float32))
        layer = jax.jit(lambda w, x, z, config=config: moe_jax.fused_moe(x, z, w, config))
        program = jax.jit(lambda w, x, logits, layer=layer: [layer(w, x, z) for z in logits])
        compiled = program.lower(weights, x, logits).compile(compiler_options=NO_COMMAND_BUFFERS)
        for _ in range(2):
            jax.block_until_ready(compiled(weights, x, logits))
        with traced() as found:
            jax.block_until_ready(compiled(weights, x, logits))
        total = found[-1].start + found[-1].duration - found[0].start if found else float("nan")
        print(f"{model} {name} T={tokens}: {len(found)} kernels, {total / CALLS:.1f} us a call", flush=True)
        each = per_call(found, CALLS)
        if "gaps" not in each:
            print("  ", each["kernels"], flush=True)
            continue
        for us, gap, kernel in zip(each["kernels"], each["gaps"], each["names"], strict=True):
            print(f"   {us:8.1f} us (gap {gap:5.1f})  {kernel}", flush=True)


def products_to_time(key: AnyKey, tokens: int, one_row: bool) -> Iterator[tuple[int, AnyDesc, AnyConfig]]:
    """(1 or 2, the product, how it runs), by the table or the heuristic; one_row: each candidate for tiles of a row."""
    if one_row:
        for number, desc in enumerate(key.products(tokens, 1), 1):
            yield from ((number, desc, config) for config in key.candidates(desc, 1, hopper_sms()))
        return
    entry = table_for(device_kind()).lookup(key, tokens)
    block_m = entry.config.block_m if entry else key.heights(tokens)[0]
    gemms = (entry.config.gemm1, entry.config.gemm2) if entry else (None, None)
    for number, (desc, config) in enumerate(zip(key.products(tokens, block_m), gemms, strict=True), 1):
        yield number, desc, config or key.candidates(desc, block_m, hopper_sms())[0]


def time_products(model: str, tokens: int, options: argparse.Namespace) -> None:
    timer = GpuTimer()
    for fmt in options.formats.split(","):
        key = key_of(model, fmt)
        rows = tokens * key.top_k
        hit = rows / rows_per_expert(tokens, key.num_experts, key.top_k)
        for number, desc, config in products_to_time(key, tokens, options.one_row):
            us = timer(desc, config, key, tokens)
            x, w, _ = jax.eval_shape(functools.partial(random_operands, desc, config.block_m, key))
            weights = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(w)) * hit / key.num_experts
            moved = weights + rows * (desc.k * x.dtype.itemsize + desc.n * 2)
            tflops, gbps = 2 * rows * desc.n * desc.k * desc.projections / us / 1e6, moved / us / 1e3
            operand = desc.dtype if isinstance(desc, GemmDesc) else desc.fmt.operand
            share = max(tflops / DENSE_TFLOPS[operand], gbps / READ_GBPS)
            print(
                f"{model:13s} T={tokens:5d} {fmt:18s} GEMM {number} {us:9.1f} us {tflops:7.1f} TFLOP/s "
                f"{gbps:6.0f} GB/s {share:6.1%} of limit  {config}",
                flush=True,
            )


def rows_of_tokens(tokens: int, experts: int, top_k: int):
    """(T, top_k) row of each slot in padded expert order, and the number of rows."""
    rng = np.random.default_rng(0)
    ids = np.argsort(rng.random((tokens, experts)), axis=1)[:, :top_k]
    block_m = choose_block_m(rows_per_expert(tokens, experts, top_k))
    padded = -(-np.bincount(ids.reshape(-1), minlength=experts) // block_m) * block_m
    next_row, row_of = np.cumsum(padded) - padded, np.empty((tokens, top_k), np.int32)
    for t in range(tokens):
        row_of[t] = next_row[ids[t]]
        next_row[ids[t]] += 1
    return jnp.asarray(row_of), int(padded.sum())


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


def _forms(width: int, used: int, top_k: int, fmt: str, rows_at_once: str) -> dict[str, Any]:
    """Options by label: the choice, or each of the numbers of rows that a CTA may take at once."""
    if not rows_at_once:
        return {"": {}}
    desc, found = PermuteDesc(used, width, top_k, used, "bfloat16", fmt), {}
    for rows in map(int, rows_at_once.split(",")):
        config = PermuteConfig(max(1, min(-(-used // rows), 24 * hopper_sms())), rows)
        if not config_error(desc, config):
            found[f" {rows} at once"] = dict(config=config)
    return found


def _align_forms(blocks: str) -> dict[str, Any]:
    if not blocks:
        return {"": {}}
    return {f" {n} blocks": dict(config=AlignConfig(8 if n == 1 else 4, n)) for n in map(int, blocks.split(","))}


def _vary(values: jax.Array, i: int) -> jax.Array:
    """Other values, the i-th: of expert ids other tokens'."""
    return jnp.roll(values, i, 0) if values.dtype == jnp.int32 else values + i


def device_time(call, args: tuple) -> tuple[float, int]:
    """(microseconds, kernels) of a call on other values of its first argument each time."""
    calls = 10 if args[0].size < 1 << 24 else 3
    one, values = jax.jit(call), [_vary(args[0], i) for i in range(calls)]
    program = jax.jit(lambda values, rest: [one(value, *rest) for value in values])
    compiled = program.lower(values, args[1:]).compile(compiler_options=NO_COMMAND_BUFFERS)
    for _ in range(2):
        jax.block_until_ready(compiled(values, args[1:]))
    with traced() as found:
        jax.block_until_ready(compiled(values, args[1:]))
    if not found:
        raise RuntimeError("the profiler saw no kernel of a GPU; this script needs one")
    return sum(kernel.duration for kernel in found) / calls, round(len(found) / calls)


def time_rows(model: str, tokens: int, options: argparse.Namespace) -> None:
    experts, top_k, hidden, intermediate = layer_shape(model)
    row_of, num_rows = rows_of_tokens(tokens, experts, top_k)
    x = jax.random.normal(jax.random.key(0), (tokens, hidden), jnp.bfloat16)
    rows = jax.random.normal(jax.random.key(1), (num_rows, hidden), jnp.bfloat16)
    h = jax.random.normal(jax.random.key(2), (num_rows, intermediate), jnp.bfloat16)
    weights = jax.random.uniform(jax.random.key(3), row_of.shape, jnp.float32)
    used, kernels, cases = tokens * top_k, dict(implementation="hopper"), {}
    for fmt in options.formats.split(","):
        if fmt == "e4m3_group" and hidden % 128:
            continue
        size = 1 if fmt.startswith(("e4m3", "int8")) else 2
        ways: dict[str, Any] = {"": (_permute, _requantize)}
        if fmt in MICROSCALING:
            ways[" by XLA"] = (_permute_by_xla, _requantize_by_xla)
        for way, functions in ways.items():
            permute, requantize = (functools.partial(one, quantization=fmt, **kernels) for one in functions)
            permute = functools.partial(permute, num_rows=num_rows)
            moved = tokens * hidden * 2 + used * hidden * size
            given = "" if way else options.rows_at_once
            for form, config in _forms(hidden, tokens, top_k, fmt, given).items():
                cases[f"permute {fmt}{way}{form}"] = functools.partial(permute, **config), (x, row_of), moved
            for form, config in _forms(intermediate, used, 0, fmt, given).items() if fmt != "none" else ():
                call = functools.partial(requantize, **config)
                cases[f"requantize {fmt}{way}{form}"] = call, (h, row_of), used * intermediate * (2 + size)
    moved = used * hidden * 2 + tokens * hidden * 2
    cases["combine"] = functools.partial(combine, **kernels), (rows, row_of, weights), moved
    ids = jax.random.randint(jax.random.key(4), row_of.shape, 0, experts)
    for form, config in _align_forms(options.align_blocks).items():
        call = functools.partial(align, num_experts=experts, block_m=128, **kernels, **config)
        cases[f"align{form}"] = call, (ids,), 8 * used
    for case, (call, args, moved) in cases.items():
        us, count = device_time(call, args)
        gbps = moved / us / 1e3
        print(
            f"{model:13s} T={tokens:5d} {case:27s} {us:8.1f} us {gbps:6.0f} GB/s {gbps / READ_GBPS:6.1%} of limit, "
            f"{count} kernels",
            flush=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(required=True)
    layer, products, rows = (parts.add_parser(name) for name in ("layer", "products", "rows"))
    for part, action in ((layer, time_layer), (products, time_products), (rows, time_rows)):
        part.add_argument("--models", default=",".join(MODELS))
        part.add_argument("--tokens", default="1,16,64,256,1024,8192")
        part.set_defaults(action=action)
    layer.add_argument("--schemes", default="fp8_channel")
    products.add_argument("--formats", default=",".join((*FORMATS, *PACKED_FORMATS)))
    products.add_argument("--one-row", action="store_true")
    rows.add_argument("--formats", default="none,e4m3_row,e4m3_group,int8_row")
    rows.add_argument("--rows-at-once", default="")
    rows.add_argument("--align-blocks", default="")
    options = parser.parse_args()
    print(header(), flush=True)
    is_one_token = options.action is time_products and options.one_row
    for model in options.models.split(","):
        for tokens in [1] if is_one_token else map(int, options.tokens.split(",")):
            options.action(model, tokens, options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
