"""Tiles of a few rows of plain weights, without TMA and wgmma.

A warp's block is 16 weight rows of 128 bytes of K. The pieces of 16 bytes of a row lie in shared memory in an order of
its own, so that eight rows of one piece, a matrix of ``ldmatrix``, lie in banks of their own.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common import mosaic, simt
from pallas_kernels.common.row_kernel_sm90 import row_kernel
from pallas_kernels.common.types import Kernel, Ref, Scalar, Value
from pallas_kernels.grouped_gemm.columns import CHANNELS, ROW_PIECES
from pallas_kernels.grouped_gemm.columns_sm90 import (
    RESULT,
    Columns,
    Copy,
    as_floats,
    for_columns_of_cta,
    load_matrices,
    ring_scratch,
    shifted,
)
from pallas_kernels.grouped_gemm.few_rows import BLOCK_PIECES, FewRowsConfig, blocks_of, ring_of
from pallas_kernels.grouped_gemm.problem import SCALE_GROUP, GemmDesc
from pallas_kernels.grouped_gemm.vector_sm90 import stored_bits

_ROWS_OF_COPY = 4  # of the weights, 128 bytes each, which a warp copies at once


def few_rows_sm90(desc: GemmDesc, config: FewRowsConfig) -> Kernel:
    """The kernel: operands by name (``desc.operand_names``) -> (rows, N).

    config must pass ``few_rows_error``.
    """
    call = row_kernel(
        functools.partial(_kernel, desc, config),
        jax.ShapeDtypeStruct((desc.rows * desc.n,), jnp.dtype(desc.stored_dtype)),
        desc.rows // config.block_m * -(-desc.n // config.block_n),
        "grouped_gemm_of_few_rows",
        scratch_types=ring_scratch(ring_of(desc, config), desc.projections, config.block_m, {}),
    )
    flat = [name for name in desc.operand_names if name.startswith(("w_scale", "bias", "x_scale"))]

    def run(operands):
        given = {name: operands[name].reshape(-1) if name in flat else operands[name] for name in desc.operand_names}
        return call(*given.values()).reshape(desc.rows, desc.n)

    return run


def _kernel(desc: GemmDesc, config: FewRowsConfig, *refs: Ref, **scratch: Ref) -> None:
    mosaic.begin()
    operands, out = dict(zip(desc.operand_names, refs, strict=False)), refs[-1]
    scratch = {name: ref.at[0] for name, ref in scratch.items()}

    def columns(tile: Scalar, expert: Scalar, operands: dict[str, Ref], first: Scalar, n: int, start: int) -> None:
        _PlainColumns(desc, config, operands, scratch, expert, first, n).store(tile, out, start)

    for_columns_of_cta(desc, config, ("w", "w_scale", "bias"), operands, columns)


class _PlainColumns(Columns):
    """``Columns`` of weights that are stored as they are multiplied."""

    def __init__(
        self,
        desc: GemmDesc,
        config: FewRowsConfig,
        operands: dict[str, Ref],
        scratch: dict[str, Ref],
        expert: Scalar,
        first: Scalar,
        n: int,
    ):
        super().__init__(
            desc,
            config,
            ring_of(desc, config),
            operands,
            scratch,
            first,
            n,
            blocks=blocks_of(desc),
            itemsize=desc.itemsize,
            is_scaled=desc.is_block_scaled,
            in_turn=True,
        )
        self.matrices = [expert * desc.projections + g for g in self.projections]
        self.channel = self.group * CHANNELS + first  # the warp's first

    def copy_weights(self, copy: Copy, place: Value, known: int, slot: Value, is_inside: Value | None) -> None:
        of_slot = self.desc.projections * BLOCK_PIECES
        row, piece = shifted(self.lane, ROW_PIECES.bit_length() - 1), self.lane & (ROW_PIECES - 1)
        channel = self.channel + row
        own = channel * self.row_pieces + (place * ROW_PIECES + piece)
        targets = [slot * of_slot + (row * ROW_PIECES + (piece ^ (row + odd))) for odd in (0, _ROWS_OF_COPY)]
        for g, matrix in zip(self.projections, self.matrices, strict=True):
            weight = self.operands["w"].at[matrix]
            for index, start in enumerate(range(0, CHANNELS, _ROWS_OF_COPY)):
                inside = is_inside
                if self.n % self.config.block_n:
                    is_channel = channel < self.n - start
                    inside = is_channel if inside is None else inside & is_channel
                target = targets[index % 2] + (g * BLOCK_PIECES + start * ROW_PIECES)
                copy("words", weight, own + start * self.row_pieces, ROW_PIECES, target, of_slot, is_inside=inside)

    def products(
        self, projection: int, slot: Value, rows: tuple[Value, ...], sums: tuple[Value, ...]
    ) -> tuple[Value, ...]:
        first = (slot * self.desc.projections + projection) * BLOCK_PIECES
        row, half = self.lane & (CHANNELS - 1), shifted(self.lane, CHANNELS.bit_length() - 1)
        first, piece = first + row * ROW_PIECES, half ^ (row & (ROW_PIECES - 1))
        weights: list[Value] = []
        for index in range(0, ROW_PIECES, 2):
            weights += load_matrices(self.scratch["words"], first + (piece ^ index))
        return _products(self.desc.dtype, weights, rows, sums)

    def scales_of_rows(self, step: Scalar, first_row: Scalar) -> list[Value]:
        """Of each of a thread's two rows, then those of each projection's weights."""
        desc, block_m = self.desc, self.config.block_m
        if not self.is_scaled:
            return []
        group, is_inside = self.first_block + step * self.stride, self.own_blocks > step
        room = block_m if desc.unpermuted_rows else desc.rows
        found = []
        for column in range(2):
            row = ((self.lane & 3) * 2 + column) & (block_m - 1)
            found.append(self._number("x_scale", group * room + (row + first_row), is_inside))
        k_groups, n_groups = -(-desc.k // SCALE_GROUP), -(-self.n // SCALE_GROUP)
        block = lax.div(self.first, jnp.int32(SCALE_GROUP))
        for matrix in self.matrices:
            found.append(self._number("w_scale", group + (matrix * n_groups + block) * k_groups, is_inside))
        return found

    def scaled(
        self, projection: int, slot: Value, sums: tuple[Value, ...], products: Any, scales: list[Value]
    ) -> tuple[Value, ...]:
        del slot
        own = [scale * scales[2 + projection] for scale in scales[:2]]
        parts = as_floats(self.desc, products)
        return tuple(total + part * own[i % 2] for i, (total, part) in enumerate(zip(sums, parts, strict=True)))

    def of_channels(self) -> list[tuple[Value | None, Value | None]]:
        desc, column, found = self.desc, self.column + self.first, []
        for matrix in self.matrices:
            scale = bias = None
            if desc.rhs_scale == "tensor":
                scale = self._number("w_scale", self.nothing + matrix, self.is_own)
            if desc.rhs_scale == "channel":
                scale = self._number("w_scale", column + matrix * self.n, self.is_own)
            if desc.bias_dtype is not None:
                bias = self._number("bias", column + matrix * self.n, self.is_own)
            found.append((scale, bias))
        return found

    def _number(self, name: str, index: Value, mask: Value) -> Value:
        return simt.load_float(self.operands[name], index, mask, 0.0)

    def bits(self, value: Value) -> Value:
        return stored_bits(self.desc, self.operands, value)


def _products(dtype: str, weights: list[Value], rows: tuple[Value, ...], sums: tuple[Value, ...]) -> tuple[Value, ...]:
    """The bits of four accumulators of ``mma.sync`` over a block: of a thread's channel with two rows, and of the
    channel 8 further down. sums: what is added, () for nothing.
    """
    given = (*weights, *rows, *sums)

    @simt.inline(*[simt.LANES] * len(given), result=(RESULT,) * 4)
    def multiply(ctx, *given):
        del ctx
        values = [simt.value_of(one) for one in given]
        left, right, total = values[:16], values[16:24], values[24:] or [simt.integer_constant(0, 32)] * 4
        for q in range(4):
            total = simt.mma(dtype, left[4 * q : 4 * q + 4], right[2 * q : 2 * q + 2], total)
        return tuple(map(simt.wrap, total))

    return multiply(*given)
