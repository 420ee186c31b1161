"""Residual sum and RMSNorm of rows, which may be quantized.

Each CTA is one warpgroup and takes every num_ctas-th row. It reads the row once, a vector a thread and piece, keeps the
sum in registers while its squares are added up, and writes sum and norm, or the codes of the norm and their scales.
With a scale for each 128 columns a warp holds such a group, as in quantize_and_permute.
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
    """The kernel: (x, weight, [parts (P, R, H), [bias (H,)]]) -> [sum, norm], without the sum where nothing is added.

    With a quantization codes and scales take the place of the norm.
    """
    columns, width = split_columns(desc.rows), desc.width
    total = jax.ShapeDtypeStruct((desc.num_tokens, *columns), desc.dtype)
    out = [total] * bool(desc.num_parts) + quantized_outputs(desc.rows)
    call = row_kernel(functools.partial(_kernel, desc, config), out, config.num_ctas)

    def whole_rows(array):
        return array.reshape(desc.num_tokens, width) if array.shape[1:] == columns else array

    return lambda *operands: [*map(whole_rows, call(*(a.reshape(*a.shape[:-1], *columns) for a in operands)))]


def _kernel(desc: AddNormDesc, config: AddNormConfig, x: Ref, weight: Ref, *rest: Ref) -> None:
    mosaic.begin()
    operands = list(rest)
    parts = operands.pop(0) if desc.num_parts else None
    bias = operands.pop(0) if desc.has_bias else None
    total_out = operands.pop(0) if desc.num_parts else None
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

    def load(ref, *index):
        return mosaic.load(ref.at[*index], layout=layout, optimized=False).astype(jnp.float32)

    def one_row(row):
        values = [load(x, row, part) for part in columns]
        if parts is not None and total_out is not None:
            for i, part in enumerate(columns):
                added = [load(parts, index, row, part) for index in range(desc.num_parts)]
                added += [] if bias is None else [load(bias, part)]
                values[i] = values[i] + functools.reduce(jnp.add, added)
            for part, value in zip(columns, values, strict=True):
                total_out.at[row, part][...] = value.astype(desc.dtype)
        squares = [value * value for value in values]
        if counted_twice:
            column = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, squares[-1].shape, 0), layout)
            squares[-1] = jnp.where(column >= counted_twice, squares[-1], 0.0)
        total = functools.reduce(jnp.add, squares)
        total = jnp.sum(jnp.sum(total, axis=1) if desc.rows.is_grouped else total)
        inverse = lax.rsqrt(total * (1.0 / desc.width) + desc.eps)
        normal = [
            (value * inverse * load(weight, part)).astype(desc.dtype)
            for part, value in zip(columns, values, strict=True)
        ]
        if desc.quantization == "none":
            _store(outputs[0], row, columns, normal)
        else:
            _quantize(desc, row, columns, [value.astype(jnp.float32) for value in normal], *outputs)

    for_items_of(lax.axis_index("cta"), desc.num_tokens, config.num_ctas, one_row)


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
