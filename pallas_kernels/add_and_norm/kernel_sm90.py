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
    call = row_kernel(functools.partial(_kernel, desc, config), out, config.num_ctas, "add_and_norm")

    def split_rows(array):
        return array.reshape(*array.shape[:-1], *columns) if array.shape[-1] == width else array

    def whole_rows(array):
        return array.reshape(desc.num_tokens, width) if array.shape[1:] == columns else array

    return lambda *operands: [*map(whole_rows, call(*map(split_rows, operands)))]


class NormedRows:
    """Sums and norms of rows by the warpgroup of a CTA: a row is a list of vectors, one for each piece of its columns.

    refs: the operands of ``add_and_norm_sm90`` in front of the router, which are taken off the list.
    """

    def __init__(self, desc: AddNormDesc, refs: list[Any]):
        self.desc = desc
        self.x, self.weight = refs.pop(0), refs.pop(0)
        self.parts = refs.pop(0) if desc.num_parts else None
        self.bias = refs.pop(0) if desc.has_bias else None
        of_experts: list[Any] = [refs.pop(0) if desc.top_k else None for _ in range(3)]
        self.rows_of_experts, self.row_of, self.row_weights = of_experts
        self.shared = refs.pop(0) if desc.shared_dtype else None
        self._counted_twice = 0
        if desc.rows.is_grouped:
            self.layout: Any = GROUP_LAYOUT
            self.columns: list[Any] = [pl.ds(0, split_columns(desc.rows)[0])]
        else:
            vector = vector_length(desc.width, 2)
            piece = sm90.WARPGROUP * vector
            self.layout = plgpu.Layout.WG_STRIDED((piece,), vec_size=vector)
            starts = pieces(desc.width, piece)
            self.columns = [pl.ds(start, piece) for start in starts]
            self._counted_twice = len(starts) * piece - desc.width

    def load_rounded(self, ref: Ref, *index: Any) -> Value:
        return mosaic.load(ref.at[*index], layout=self.layout, optimized=False)

    def added_up(self, values: list[Value]) -> Value:
        """The sum of all columns of a row, of which ``values`` holds some twice."""
        if self._counted_twice:
            column = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, values[-1].shape, 0), self.layout)
            values = [*values[:-1], jnp.where(column >= self._counted_twice, values[-1], 0.0)]
        total = functools.reduce(jnp.add, values)
        return jnp.sum(jnp.sum(total, axis=1) if self.desc.rows.is_grouped else total)

    def summed(self, row: Scalar) -> list[Value]:
        """x and what is added to it, in float32."""
        desc = self.desc
        values = [self._load(self.x, row, part) for part in self.columns]
        slots = [(self.row_of[row, j], self.row_weights[row, j].astype(jnp.float32)) for j in range(desc.top_k)]
        for i, part in enumerate(self.columns if desc.has_addend else ()):
            parts = self.parts
            added = [] if parts is None else [self._load(parts, index, row, part) for index in range(desc.num_parts)]
            added += [] if self.bias is None else [self._load(self.bias, part)]
            added += [self._routed(place, own, part) for place, own in slots]
            added += [] if self.shared is None else [self._load(self.shared, row, part)]
            values[i] = values[i] + functools.reduce(jnp.add, added)
        return values

    def normed(self, values: list[Value]) -> list[Value]:
        """Of a sum in float32; rounded."""
        weights = [self.load_rounded(self.weight, part) for part in self.columns]  # on its way while squares are added
        total = self.added_up([value * value for value in values])
        inverse = lax.rsqrt(total * (1.0 / self.desc.width) + self.desc.eps)
        return [
            (value * inverse * own.astype(jnp.float32)).astype(self.desc.dtype)
            for value, own in zip(values, weights, strict=True)
        ]

    def store(self, out: Ref, row: Scalar, values: list[Value]) -> None:
        for part, value in zip(self.columns, values, strict=True):
            out.at[row, part][...] = value

    def store_sum(self, out: Ref | None, row: Scalar, values: list[Value]) -> None:
        """out: None where nothing is added."""
        if out is not None:
            self.store(out, row, [value.astype(self.desc.dtype) for value in values])

    def _load(self, ref: Ref, *index: Any) -> Value:
        return self.load_rounded(ref, *index).astype(jnp.float32)

    def _routed(self, place: Scalar, own: Scalar, part: Any) -> Value:
        """A row of an expert times its weight, as combine adds it; zeros for a slot without one, whatever was read."""
        values = self._load(self.rows_of_experts, lax.max(place, jnp.int32(0)), part) * own
        return jnp.where(lax.broadcast_in_dim(place >= 0, values.shape, ()), values, 0.0)


def _kernel(desc: AddNormDesc, config: AddNormConfig, *refs: Ref) -> None:
    mosaic.begin()
    operands = list(refs)
    rows = NormedRows(desc, operands)
    router = operands.pop(0) if desc.num_experts else None
    router_bias = operands.pop(0) if desc.has_router_bias else None
    total_out = operands.pop(0) if desc.has_addend else None
    outputs = operands

    def one_row(row):
        values = rows.summed(row)
        rows.store_sum(total_out, row, values)
        normal = rows.normed(values)
        if desc.quantization == "none":
            rows.store(outputs[0], row, normal)
            return
        codes, scale = _quantized(rows, normal)
        rows.store(outputs[0], row, codes)
        if desc.rows.is_grouped:
            outputs[1].at[rows.columns[0], row][...] = scale
        else:
            outputs[1][row] = scale

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
        weights = [[rows.load_rounded(router, expert, part) for part in rows.columns] for expert in experts]
        biases = [0.0 if router_bias is None else router_bias[expert].astype(jnp.float32) for expert in experts]
        values = rows.summed(row)
        normal = rows.normed(values)

        @pl.when(first == 0)
        def _():
            rows.store_sum(total_out, row, values)
            rows.store(normal_out, row, normal)

        wide = [value.astype(jnp.float32) for value in normal]
        for expert, of_expert, own in zip(experts, weights, biases, strict=True):
            products = [a * b.astype(jnp.float32) for a, b in zip(wide, of_expert, strict=True)]
            logits[row, expert] = rows.added_up(products) + own

    for_items_of(cta, desc.num_tokens * slices, config.num_ctas, one_slice)


def _quantized(rows: NormedRows, normal: list[Value]) -> tuple[list[Value], Value]:
    """A row's codes and its scale, or those of its groups, by the arithmetic of quantize_and_permute."""
    desc, normal = rows.desc, [value.astype(jnp.float32) for value in normal]
    if desc.rows.is_grouped:
        (values,) = normal
        codes, scale = e4m3_in_groups(values, jnp.max(jnp.abs(values), axis=1), desc.rows.has_power_of_two_scales)
        return [codes], scale
    amax = jnp.max(functools.reduce(jnp.maximum, map(jnp.abs, normal)))
    rule = e4m3_of_row if desc.quantization == "e4m3_row" else quantize_int8_token
    codes, scales = zip(*(rule(values, amax) for values in normal), strict=True)
    return [*codes], scales[0]
