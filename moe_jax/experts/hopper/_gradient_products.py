"""The products of a gradient with the weights of the experts, from matrices of 16 bits or from quantized ones.

    before(x)               gate and up, x W13^T, and their bias
    before_and_hidden(x)    of matrices of 16 bits: the same and the activation's values, in one kernel
    output(hidden)          rows of the experts' outputs, hidden W2^T, and their bias
    pulled_hidden(g)        cotangents of the hidden rows, g W2
    pulled_before(g, ...)   what the derivative of the activation makes of g W2, where ``pulls_activation``
    pulled_rows(before_bar) cotangents of the rows of x, (gate and up's cotangent) W13

Weights in kernel layout, and plain ones of 8 bits, are dequantized inside of the kernels that multiply: no matrix
passes through global memory. Beside weights in kernel layout, columns of ``before`` are blocks of 64 of each projection
in turn, else one projection after the other. ``by_projection`` makes them (Mp, G, I), ``in_columns`` is its inverse,
and ``pull_bias`` the way from a cotangent of w13_bias (E, G, I) to that of the weights' own.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from moe_jax._config import MoEConfig
from moe_jax._typing import Array, DTypeLike
from moe_jax.activations import resolve_activation
from moe_jax.experts.hopper._kernel_layout import in_kernel_layout, kernel_operand, to_plain_layout
from moe_jax.experts.hopper._rows import row_kind
from moe_jax.quantization import ExpertWeights, QuantizedTensor, dequantize_tensor
from pallas_kernels.align import TileMap
from pallas_kernels.common.activations import slopes_refusal
from pallas_kernels.grouped_gemm import grouped_gemm
from pallas_kernels.grouped_gemm.dgrad import (
    PlainWeights,
    describe_dgrad,
    grouped_dgrad,
    grouped_gemm_widened,
    plain_weights,
)
from pallas_kernels.grouped_gemm.packed import (
    BLOCK_N,
    candidates,
    dequantize_packed,
    describe_call,
    grouped_gemm_packed,
    stacked_projections,
)
from pallas_kernels.grouped_gemm.packed.layout import PackedWeights, interleave
from pallas_kernels.grouped_gemm.pull import grouped_gemm_pull

PackedOperands: TypeAlias = tuple[PackedWeights, PackedWeights]
PlainOperands: TypeAlias = tuple[PlainWeights, PlainWeights]


def quantized_operands(config: MoEConfig, weights: ExpertWeights) -> PackedOperands | PlainOperands | None:
    """w13, rows of both projections in one, and w2, where kernels of the gradient read them as they are; else None.
    weights: arrays or ShapeDtypeStructs.
    """
    return packed_operands(config, weights) or plain_operands(config, weights)


def plain_operands(config: MoEConfig, weights: ExpertWeights) -> PlainOperands | None:
    """``quantized_operands`` of weights of 8 bits in layout "plain"."""
    if not weights.scheme.is_quantized or in_kernel_layout(weights) or row_kind(weights.scheme) is None:
        return None
    if any(size % BLOCK_N for size in (weights.hidden_size, weights.intermediate_size)):
        return None
    w13, w2 = (_plain_weights(tensor, config.dtype) for tensor in (weights.w13, weights.w2))
    return w13, w2


def _plain_weights(tensor: QuantizedTensor, dtype: DTypeLike) -> PlainWeights:
    make = functools.partial(plain_weights, operand=dtype)
    if isinstance(tensor.data, jax.ShapeDtypeStruct):
        return jax.eval_shape(make, tensor.data, tensor.scale)
    assert tensor.scale is not None, "row_kind knows schemes with scales alone"
    return make(tensor.data, tensor.scale)


def packed_operands(config: MoEConfig, weights: ExpertWeights) -> PackedOperands | None:
    """``quantized_operands`` of weights in kernel layout."""
    if not in_kernel_layout(weights) or weights.w13.g_idx is not None:
        return None
    w13, w2 = (kernel_operand(tensor) for tensor in (weights.w13, weights.w2))
    operands = _stacked(w13), w2
    for operand in operands:
        if operand.fmt.operand != config.dtype.name or describe_dgrad(BLOCK_N, operand, None).unsupported():
            return None
    return operands


def _stacked(w13: PackedWeights) -> PackedWeights:
    leaves = (w13.words, w13.scale, w13.zero, w13.channel_scale)
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        return jax.eval_shape(stacked_projections, w13)
    return stacked_projections(w13)


def packed_block_m(config: MoEConfig, w13: PackedWeights, block_m: int) -> int:
    """Rows of a tile for ``packed_operands``: 64 where gate and up have no tile of block_m rows."""
    desc = describe_call(block_m, w13, config.dtype, "none", None, None)
    return 64 if next(candidates(desc, block_m, 1), None) is None else block_m


def pulls_activation(config: MoEConfig, weights: ExpertWeights, w2: PackedWeights | PlainWeights | None) -> bool:
    """Whether the derivative of the activation can follow g W2 in its kernel; w2: of ``quantized_operands``, None
    for matrices of 16 bits.
    """
    activation = resolve_activation(config)
    if weights.has_adapters:
        return False
    return (slopes_refusal(activation) if w2 is None else describe_dgrad(BLOCK_N, w2, activation).unsupported()) is None


@dataclasses.dataclass(frozen=True)
class PulledBefore:
    """What the activation's derivative gives; the last two where gradients of weights or adapters need them.

    before_bar: cotangent of gate and up in the columns of the products, times the rows' router weights where these were
    given. row_bar: (Mp,) float32, of the router weights. gate_up_bar: (Mp, G * I), as before_bar, gate, then up.
    weighted: (Mp, I), hidden rows times their router weights.
    """

    before_bar: Array
    row_bar: Array
    gate_up_bar: Any = None
    weighted: Any = None


@dataclasses.dataclass(frozen=True)
class QuantizedProducts:
    """What products of packed and of plain weights share.

    operands: of ``quantized_operands``. tile_rows: of the tiles, where rows past them may be left out; else None.
    """

    config: MoEConfig
    weights: ExpertWeights
    operands: Any
    tiles: TileMap
    tile_rows: Array | None
    kernels: str

    def pulled_hidden(self, g: Array) -> Array:
        return grouped_dgrad(g, self.operands[1], tile_rows=self.tile_rows, **self._of_tiles)

    def pulled_before(self, g: Array, before: Array, row_weights: Array | None, *, has_weighted: bool) -> PulledBefore:
        assert row_weights is None and not has_weighted, "only sums over rows need weighted ones"
        before_bar, row_bar = grouped_dgrad(
            g,
            self.operands[1],
            tile_rows=self.tile_rows,
            activation=resolve_activation(self.config),
            before=before,
            **self._of_tiles,
        )
        return PulledBefore(before_bar, row_bar)

    def pulled_rows(self, before_bar: Array) -> Array:
        return grouped_dgrad(before_bar, self.operands[0], tile_rows=self.tile_rows, **self._of_tiles)

    def pull_bias(self, bias_bar: Array) -> Array:
        return bias_bar

    @property
    def _of_tiles(self) -> dict[str, Any]:
        tiles = self.tiles
        return dict(tile_expert=tiles.tile_expert, num_tiles=tiles.num_tiles, implementation=self.kernels)


class PackedProducts(QuantizedProducts):
    """From packed words."""

    def before(self, x: Array) -> Array:
        bias = self.weights.w13_bias
        if bias is not None:
            bias = interleave(bias).reshape(bias.shape[0], -1)
        options = dict(bias=bias, out_dtype=self.config.dtype, tile_rows=self.tile_rows)
        return grouped_gemm_packed(x, self.operands[0], **options, **self._of_tiles)

    def output(self, hidden: Array) -> Array:
        options = dict(bias=self.weights.w2_bias, out_dtype=self.config.dtype, tile_rows=self.tile_rows)
        return grouped_gemm_packed(hidden, self.operands[1], **options, **self._of_tiles)

    def by_projection(self, before: Array) -> Array:
        blocks = before.reshape(before.shape[0], -1, self.config.num_projections, BLOCK_N)
        return blocks.swapaxes(1, 2).reshape(before.shape[0], self.config.num_projections, -1)

    def in_columns(self, wide: Array) -> Array:
        blocks = wide.reshape(wide.shape[0], self.config.num_projections, -1, BLOCK_N)
        return blocks.swapaxes(1, 2).reshape(wide.shape[0], -1)


class PlainProducts(QuantizedProducts):
    """From weights of 8 bits as they are stored. XLA adds biases."""

    def before(self, x: Array) -> Array:
        return self._product(x, self.operands[0], self.weights.w13_bias)

    def output(self, hidden: Array) -> Array:
        return self._product(hidden, self.operands[1], self.weights.w2_bias)

    def by_projection(self, before: Array) -> Array:
        return before.reshape(before.shape[0], self.config.num_projections, -1)

    def in_columns(self, wide: Array) -> Array:
        return wide.reshape(wide.shape[0], -1)

    def _product(self, rows: Array, w: PlainWeights, bias: Array | None) -> Array:
        found = grouped_gemm_widened(rows, w, tile_rows=self.tile_rows, **self._of_tiles)
        if bias is None:
            return found
        own = bias.reshape(bias.shape[0], 1, -1)[jnp.maximum(self.tiles.tile_expert, 0)].astype(jnp.float32)
        in_tiles = found.reshape(own.shape[0], -1, own.shape[-1]).astype(jnp.float32)
        return (in_tiles + own).astype(found.dtype).reshape(found.shape)


@dataclasses.dataclass(frozen=True)
class DenseProducts:
    """From matrices of 16 bits: unquantized weights, or weights that are dequantized first.

    A kernel converts weights in kernel layout, as far as it can. Under act-order that layout has rows of w13 in another
    order, and its bias with them. tile_rows: as of ``QuantizedProducts``.
    """

    config: MoEConfig
    weights: ExpertWeights
    tiles: TileMap
    tile_rows: Array | None
    kernels: str

    def before(self, x: Array) -> Array:
        bias = self._dense.w13_bias
        bias = None if bias is None else bias.reshape(bias.shape[0], -1)
        return self._product(x, self._stacked, bias=bias)

    def before_and_hidden(self, x: Array) -> tuple[Array, Array]:
        """``before``, and the activation of it (Mp, I)."""
        w13, bias, shape = self._dense.w13.data, self._dense.w13_bias, (self.weights.num_experts, self._projections)
        hidden, before = self._product(
            x,
            w13.reshape(*shape, -1, w13.shape[-1]),
            bias=None if bias is None else bias.reshape(*shape, -1),
            activation=resolve_activation(self.config),
            keeps_before=True,
        )
        return before, hidden

    def output(self, hidden: Array) -> Array:
        return self._product(hidden, self._dense.w2.data, bias=self._dense.w2_bias)

    def pulled_hidden(self, g: Array) -> Array:
        return self._product(g, self._dense.w2.data, transposes_w=True)

    def pulled_before(self, g: Array, before: Array, row_weights: Array | None, *, has_weighted: bool) -> PulledBefore:
        assert row_weights is not None, "as AlignedCall.weighs_rows has it"
        before_bar, row_bar, weighted = grouped_gemm_pull(
            g,
            self._dense.w2.data,
            activation=resolve_activation(self.config),
            before=before,
            row_weights=row_weights,
            has_weighted=has_weighted,
            **self._of_tiles,
        )
        return PulledBefore(before_bar, row_bar, before_bar, weighted)

    def pulled_rows(self, before_bar: Array) -> Array:
        return self._product(before_bar, self._stacked, transposes_w=True)

    def by_projection(self, before: Array) -> Array:
        return before.reshape(before.shape[0], self._projections, -1)

    def in_columns(self, wide: Array) -> Array:
        return wide.reshape(wide.shape[0], -1)

    def pull_bias(self, bias_bar: Array) -> Array:
        return self._dense_and_pull[1](bias_bar)

    @property
    def _dense(self) -> ExpertWeights:
        return self._dense_and_pull[0]

    @property
    def _stacked(self) -> Array:
        """(E, G * I, H): gate and up, one below the other."""
        w13 = self._dense.w13.data
        return w13.reshape(w13.shape[0], -1, w13.shape[-1])

    @functools.cached_property
    def _dense_and_pull(self) -> tuple[ExpertWeights, Callable[[Array], Array]]:
        with jax.named_scope("dequantize"):
            return _dense(self.weights, self.config.dtype, self.kernels)

    @property
    def _projections(self) -> int:
        return self.config.num_projections

    def _product(self, rows: Array, w: Array, **options: Any) -> Any:
        return grouped_gemm(rows, w, out_dtype=self.config.dtype, **options, **self._of_tiles)

    @property
    def _of_tiles(self) -> dict[str, Any]:
        tiles = self.tiles
        own = dict(tile_expert=tiles.tile_expert, num_tiles=tiles.num_tiles, tile_rows=self.tile_rows)
        return dict(own, implementation=self.kernels)


def _dense(weights: ExpertWeights, dtype: DTypeLike, kernels: str) -> tuple[ExpertWeights, Callable[[Array], Array]]:
    """The weights dequantized, in layout "plain", and the way back from a cotangent of their w13_bias to the given
    one.
    """
    if not weights.scheme.is_quantized:
        return weights, lambda bias_bar: bias_bar
    if in_kernel_layout(weights) and weights.w13.g_idx is None:
        by = ("hopper", "reference") if kernels == "hopper" else kernels
        w13, w2 = (dequantize_packed(kernel_operand(t), dtype, implementation=by) for t in (weights.w13, weights.w2))
        w2 = w2.reshape(weights.w2.shape)
        dense = ExpertWeights(QuantizedTensor(w13), QuantizedTensor(w2), weights.w13_bias, weights.w2_bias)
        return dense, lambda bias_bar: bias_bar

    def plain_bias(bias: Array) -> Array:
        plain = to_plain_layout(dataclasses.replace(weights, w13_bias=bias)).w13_bias
        assert plain is not None
        return plain

    plain = to_plain_layout(weights)
    w13, w2 = (QuantizedTensor(dequantize_tensor(tensor, dtype)) for tensor in (plain.w13, plain.w2))
    dense = ExpertWeights(w13, w2, plain.w13_bias, plain.w2_bias)
    return dense, lambda bias_bar: jax.linear_transpose(plain_bias, weights.w13_bias)(bias_bar)[0]
