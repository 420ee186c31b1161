"""Residual sum and RMSNorm of rows, which may be quantized, or of few rows multiplied with a router's weight.

Each CTA is one warpgroup and takes every num_ctas-th row. It reads the row once, a vector a thread and piece, keeps the
sum in registers while its squares are added up, and writes sum and norm, or the codes of the norm and their scales.
With a scale for each 128 columns a warp holds such a group, as in quantize_and_permute.

With a router a CTA takes a row and some experts. It reads their weights first, makes the norm of the row as if it were
alone, and adds up its own logits. CTAs exchange nothing; the one with the first experts writes sum and norm.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.add_and_norm.config import AddNormConfig, AddNormDesc
from pallas_kernels.common import mosaic, sm90
from pallas_kernels.common.numerics import quantize_int8_token
from pallas_kernels.common.numerics_sm90 import e4m3_in_groups, e4m3_of_row
from pallas_kernels.common.row_kernel_sm90 import for_items_of, row_kernel
from pallas_kernels.common.rows import pieces, vector_length
from pallas_kernels.common.types import Kernel, Ref, Scalar, Value
from pallas_kernels.quantize_and_permute.kernel_sm90 import GROUP_LAYOUT, quantized_outputs, split_columns


def add_and_norm_sm90(desc: AddNormDesc, config: AddNormConfig) -> Kernel:
    """The kernel: (x, weight, [parts (P, R, H), [bias (H,)]], [router (E, H), [router_bias (E,)]]) -> [sum, norm,
    logits], without the sum where nothing is added, and without logits where there is no router.

    With top_k the fields of ``RoutedRows`` take the place of parts and bias. With a quantization codes and scales take
    the place of the norm.
    """
    columns, width = split_columns(desc.rows), desc.width
    total = jax.ShapeDtypeStruct((desc.num_tokens, *columns), desc.dtype)
    out = [total] * desc.has_addend + quantized_outputs(desc.rows)
    out += [jax.ShapeDtypeStruct((desc.num_tokens, desc.num_experts), jnp.float32)] * bool(desc.num_experts)
    call = row_kernel(functools.partial(_kernel, desc, config), out, config.num_ctas)

    def split_rows(array):
        return array.reshape(*array.shape[:-1], *columns) if array.shape[-1] == width else array

    def whole_rows(array):
        return array.reshape(desc.num_tokens, width) if array.shape[1:] == columns else array

    return lambda *operands: [*map(whole_rows, call(*map(split_rows, operands)))]


def _kernel(desc: AddNormDesc, config: AddNormConfig, x: Ref, weight: Ref, *rest: Ref) -> None:
    mosaic.begin()
    operands = list(rest)
    parts = operands.pop(0) if desc.num_parts else None
    bias = operands.pop(0) if desc.has_bias else None
    of_experts: list[Any] = [operands.pop(0) if desc.top_k else None for _ in range(3)]
    rows_of_experts, row_of, row_weights = of_experts
    shared = operands.pop(0) if desc.shared_dtype else None
    router = operands.pop(0) if desc.num_experts else None
    router_bias = operands.pop(0) if desc.has_router_bias else None
    total_out = operands.pop(0) if desc.has_addend else None
    outputs = operands
    counted_twice = 0
    columns: list[Any]
    if desc.rows.is_grouped:
        layout, columns = GROUP_LAYOUT, [pl.ds(0, split_columns(desc.rows)[0])]
    else:
        vector = vector_length(desc.width, 2)
        piece = sm90.WARPGROUP * vector
        layout = plgpu.Layout.WG_STRIDED((piece,), vec_size=vector)
        starts = pieces(desc.width, piece)
        columns = [pl.ds(start, piece) for start in starts]
        counted_twice = len(starts) * piece - desc.width

    def load_rounded(ref, *index):
        return mosaic.load(ref.at[*index], layout=layout, optimized=False)

    def load(ref, *index):
        return load_rounded(ref, *index).astype(jnp.float32)

    def added_up(values):
        """The sum of all columns of a row, of which ``values`` holds some twice."""
        if counted_twice:
            column = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, values[-1].shape, 0), layout)
            values = [*values[:-1], jnp.where(column >= counted_twice, values[-1], 0.0)]
        total = functools.reduce(jnp.add, values)
        return jnp.sum(jnp.sum(total, axis=1) if desc.rows.is_grouped else total)

    def routed(place, own, part):
        """A row of an expert times its weight, as combine adds it; zeros for a slot without one, whatever was read."""
        values = load(rows_of_experts, lax.max(place, jnp.int32(0)), part) * own
        return jnp.where(lax.broadcast_in_dim(place >= 0, values.shape, ()), values, 0.0)

    def summed(row):
        values = [load(x, row, part) for part in columns]
        slots = [(row_of[row, j], row_weights[row, j].astype(jnp.float32)) for j in range(desc.top_k)]
        for i, part in enumerate(columns if desc.has_addend else ()):
            added = [] if parts is None else [load(parts, index, row, part) for index in range(desc.num_parts)]
            added += [] if bias is None else [load(bias, part)]
            added += [routed(place, own, part) for place, own in slots]
            added += [] if shared is None else [load(shared, row, part)]
            values[i] = values[i] + functools.reduce(jnp.add, added)
        return values

    def store_sum(row, values):
        if total_out is not None:
            _store(total_out, row, columns, [value.astype(desc.dtype) for value in values])

    def normed(values):
        weights = [load_rounded(weight, part) for part in columns]  # on its way while the squares are added up
        total = added_up([value * value for value in values])
        inverse = lax.rsqrt(total * (1.0 / desc.width) + desc.eps)
        return [
            (value * inverse * own.astype(jnp.float32)).astype(desc.dtype)
            for value, own in zip(values, weights, strict=True)
        ]

    def one_row(row):
        values = summed(row)
        store_sum(row, values)
        normal = normed(values)
        if desc.quantization == "none":
            _store(outputs[0], row, columns, normal)
        else:
            _quantize(desc, row, columns, [value.astype(jnp.float32) for value in normal], *outputs)

    cta = lax.axis_index("cta")
    if router is None:
        for_items_of(cta, desc.num_tokens, config.num_ctas, one_row)
        return
    slices = -(-desc.num_experts // config.experts)
    normal_out, logits = outputs

    def one_slice(item):
        row = lax.div(item, jnp.int32(slices))
        first = lax.min(lax.rem(item, jnp.int32(slices)) * config.experts, jnp.int32(desc.num_experts - config.experts))
        experts = [first + index for index in range(config.experts)]
        weights = [[load_rounded(router, expert, part) for part in columns] for expert in experts]
        biases = [0.0 if router_bias is None else router_bias[expert].astype(jnp.float32) for expert in experts]
        values = summed(row)
        normal = normed(values)

        @pl.when(first == 0)
        def _():
            store_sum(row, values)
            _store(normal_out, row, columns, normal)

        wide = [value.astype(jnp.float32) for value in normal]
        for expert, of_expert, own in zip(experts, weights, biases, strict=True):
            products = [a * b.astype(jnp.float32) for a, b in zip(wide, of_expert, strict=True)]
            logits[row, expert] = added_up(products) + own

    for_items_of(cta, desc.num_tokens * slices, config.num_ctas, one_slice)


def _quantize(desc: AddNormDesc, row: Scalar, columns: list[Any], normal: list[Value], codes: Ref, scales: Ref) -> None:
    """By the arithmetic of quantize_and_permute."""
    if desc.rows.is_grouped:
        (part,), (values,) = columns, normal
        amax = jnp.max(jnp.abs(values), axis=1)
        quantized, scale = e4m3_in_groups(values, amax, desc.rows.has_power_of_two_scales)
        scales.at[part, row][...] = scale
        _store(codes, row, columns, [quantized])
        return
    amax = jnp.max(functools.reduce(jnp.maximum, map(jnp.abs, normal)))
    rule = e4m3_of_row if desc.quantization == "e4m3_row" else quantize_int8_token
    quantized, all_scales = zip(*(rule(values, amax) for values in normal), strict=True)
    _store(codes, row, columns, quantized)
    scales[row] = all_scales[0]


def _store(out: Ref, row: Scalar, columns: list[Any], values: Any) -> None:
    for part, value in zip(columns, values, strict=True):
        out.at[row, part][...] = value
