"""Rows of activations as the products take them: quantized to 8 bits, rounded to their format's grid, or left alone.

The kernel that moves rows quantizes them to 8 bits and rounds them to microscaling grids; other codes, which the
product's 16-bit dtype holds, are XLA's business.
"""

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax._config import MoEConfig
from moe_jax._typing import Array
from moe_jax.experts.hopper._kernel_layout import in_kernel_layout, kernel_operand
from moe_jax.quantization import ExpertWeights, QuantFormat, Scheme, Strategy, quantize_activations
from pallas_kernels.align import TileMap
from pallas_kernels.common import microscaling, numerics
from pallas_kernels.quantize_and_permute import PermuteConfig, PermuteDesc, config_error


def row_kind(scheme: Scheme) -> str | None:
    """The kind of ``quantize_and_permute`` for plain weights of a scheme; None where no kernel fits the scheme."""
    weights, activations = scheme.weights, scheme.activations
    if weights is None:
        return "none"
    if activations is None:
        return None
    is_plain = weights.symmetric and weights.packing is None and weights.scale == "float32"
    if (
        not is_plain
        or not activations.symmetric
        or activations.scale not in ("float32", "ue8m0")
        or activations.amax_bound is not None
    ):
        return None
    kinds = {
        ("e4m3", Strategy.TENSOR, "e4m3", Strategy.TENSOR): "e4m3_tensor",
        ("e4m3", Strategy.TENSOR, "e4m3", Strategy.TOKEN): "e4m3_row",
        ("e4m3", Strategy.CHANNEL, "e4m3", Strategy.TOKEN): "e4m3_row",
        ("e4m3", Strategy.BLOCK, "e4m3", Strategy.GROUP): "e4m3_group",
        ("int8", Strategy.CHANNEL, "int8", Strategy.TOKEN): "int8_row",
    }
    kind = kinds.get((weights.element, weights.strategy, activations.element, activations.strategy))
    if kind == "e4m3_group" and (weights.block_shape, activations.group_size) != ((128, 128), 128):
        return None
    return "e4m3_group_ue8m0" if kind == "e4m3_group" and activations.scale == "ue8m0" else kind


def kind_of(weights: ExpertWeights) -> str | None:
    """The kind of ``quantize_and_permute`` for the rows of both products; None for rows on a grid of 16 bits."""
    if not in_kernel_layout(weights):
        return row_kind(weights.scheme)
    return {"int8": "int8_row", "float8_e4m3fn": "e4m3_row"}.get(kernel_operand(weights.w13).fmt.operand)


def kind_of_tokens(weights: ExpertWeights) -> str:
    """The kind in which tokens are quantized before anybody knows their rows; "none" where that takes the rows."""
    kind = kind_of(weights) or "none"
    return "none" if weights.w13.g_idx is not None else kind


def tensor_scale(
    fmt: QuantFormat | None, static: Array | None, values: Array, tiles: TileMap | None, axes: tuple[str, ...]
) -> Array | None:
    """The one scale () of per-tensor activations: the checkpoint's, or amax / 448 over the rows in use.

    axes: mesh axes over whose devices the call is spread.
    """
    if fmt is None or fmt.strategy is not Strategy.TENSOR:
        return None
    if not fmt.dynamic:
        return static
    values = numerics.magnitude(values.astype(jnp.float32))
    if tiles is not None:
        in_tiles = values.reshape(tiles.tile_rows.size, -1, values.shape[1])
        rank = jnp.arange(in_tiles.shape[1], dtype=jnp.int32)
        values = jnp.where((rank < tiles.tile_rows[:, None])[..., None], in_tiles, 0.0)
    amax = jnp.max(values)
    amax = jax.lax.pmax(amax, axes) if axes else amax
    return jnp.maximum(numerics.divide(amax, numerics.E4M3_MAX), np.finfo(np.float32).tiny)


def rows_on_grid(
    x: Array,
    fmt: QuantFormat | None,
    input_scale: Array | None,
    operand: str,
    axes: tuple[str, ...],
    *,
    quantize: Callable[..., tuple[Array, Array | None]],
    place: Callable[[Array, Array | None], tuple[Array, Array | None]],
) -> tuple[Array, Array | None]:
    """The product's rows, and what multiplies them: () or one a row, None for 1.

    axes: mesh axes over which a row is split. quantize: ``quantize_and_permute`` to where the rows belong. place:
    brings rounded values, and a scale for each of x's rows, there.
    """
    moving = _moving_on_grid(x, fmt, input_scale, axes)
    return place(*_on_grid(x, fmt, operand, axes)) if moving is None else moving.by(quantize)


@dataclasses.dataclass(frozen=True)
class Moving:
    """What ``quantize_and_permute`` is asked for some rows.

    x, quantization, scale: its arguments. factor: () what multiplies the rows; None for the scales that it returns.
    """

    x: Array
    quantization: str
    scale: Array | None = None
    factor: Array | None = None

    def by(self, quantize: Callable[..., tuple[Array, Array | None]]) -> tuple[Array, Array | None]:
        """The product's rows, and what multiplies them. quantize: ``quantize_and_permute``."""
        rows, scales = quantize(self.x, quantization=self.quantization, scale=self.scale)
        return rows, self.multiplier(scales)

    def multiplier(self, scales: Array | None) -> Array | None:
        """What multiplies the rows. scales: that ``quantize_and_permute`` returned."""
        return scales if self.factor is None else self.factor


def _moving_on_grid(
    x: Array, fmt: QuantFormat | None, input_scale: Array | None, axes: tuple[str, ...]
) -> Moving | None:
    rule = kernel_rule(fmt, axes)
    if fmt is None or rule is None:
        return None
    if fmt.global_scale in (None, "token"):
        return Moving(x, rule)
    inverse = _inverse(fmt, input_scale)
    return Moving(x, rule, inverse, numerics.divide(jnp.ones_like(inverse), inverse))


def how_tokens_move(config: MoEConfig, weights: ExpertWeights) -> str | None:
    """The kind of ``quantize_and_permute`` that brings tokens to the rows of grouped GEMM 1; None where XLA rounds them
    first, or columns have an order of each expert."""
    fmt, kind = weights.scheme.activations, kind_of(weights)
    if weights.w13.g_idx is not None:
        return None
    if kind is None and fmt is not None:
        return kernel_rule(fmt, config.scale_axes(fmt, is_hidden=False))
    return kind or "none"


def moving_tokens(config: MoEConfig, weights: ExpertWeights, x: Array) -> Moving | None:
    """Of tokens (T, H) that are to be ``how_tokens_move``."""
    fmt, kind, how = weights.scheme.activations, kind_of(weights), how_tokens_move(config, weights)
    if how is None:
        return None
    if kind is None and fmt is not None:
        return _moving_on_grid(x, fmt, weights.w13.input_scale, config.scale_axes(fmt, is_hidden=False))
    if kind is None:
        return Moving(x.astype(kernel_operand(weights.w13).fmt.operand), how)
    x = x if weights.scheme.is_quantized else x.astype(config.dtype)
    scale = tensor_scale(fmt, weights.w13.input_scale, x, None, config.call_axes)
    return Moving(x, how, scale, scale)


def kernel_rule(fmt: QuantFormat | None, axes: tuple[str, ...]) -> str | None:
    """The kind of ``quantize_and_permute`` for activations of a microscaling format; None where XLA rounds."""
    if fmt is None or fmt.scale not in ("e4m3", "e8m0"):
        return None
    if fmt.scale == "e8m0":
        return "mxfp4" if fmt.element == "e2m1" else "mxfp8"
    if fmt.global_scale != "token":
        return "nvfp4"
    return None if axes else "nvfp4_row"


def rounded_by_xla(fmt: QuantFormat, widths: Mapping[str, int], dtype: str) -> list[str]:
    """What ``explain`` says where rows of one of ``widths`` columns (by name) are not rounded by the row kernel."""
    rule = kernel_rule(fmt, ())
    if rule is None:
        return ["rows: rounded by XLA, since the row kernel has no such codes in 16 bits"]
    reasons = {
        name: config_error(PermuteDesc(1, width, 1, 1, dtype, rule), PermuteConfig(1)) for name, width in widths.items()
    }
    return [
        f"{name} rows: rounded and moved by XLA, since the kernel refuses {reason}"
        for name, reason in reasons.items()
        if reason is not None
    ]


def _inverse(fmt: QuantFormat, input_scale: Array | None) -> Array:
    """The global scale that block scales are multiplied by."""
    stored = jnp.asarray(input_scale, jnp.float32)
    return stored if fmt.global_scale == "divides" else numerics.reciprocal(stored)


def _on_grid(x: Array, fmt: QuantFormat | None, operand: str, axes: tuple[str, ...]) -> tuple[Array, Array | None]:
    if fmt is None:
        return x.astype(operand), None
    if fmt.scale == "float32":
        codes, scale = quantize_activations(x, fmt, axes=axes)
        return numerics.widen(codes, jnp.dtype(operand)), scale
    # NVFP4 with a global scale for each row, which lies on several devices.
    k, size = x.shape[-1], fmt.group_size or x.shape[-1]
    groups = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, -k % size))).reshape(x.shape[0], -1, size)
    amax = jnp.max(numerics.magnitude(groups), axis=-1, keepdims=True, initial=0.0)
    inverse = microscaling.nvfp4_global_scale(jax.lax.pmax(jnp.max(amax, axis=1, keepdims=True), axes))
    values = microscaling.round_groups(groups, amax, "nvfp4", inverse)
    scale = numerics.divide(jnp.ones_like(inverse), inverse)[:, 0, 0]
    return values.reshape(x.shape[0], -1)[:, :k].astype(operand), scale


def of_rows(scale: Array | None, row_of: Array, num_rows: int) -> Array | None:
    """A factor per token -> one per row; rows that no token fills get 1."""
    if scale is None or scale.ndim == 0:
        return scale
    rows = jnp.where(row_of < 0, num_rows, row_of)
    spread = jnp.broadcast_to(scale[:, None], row_of.shape)
    return jnp.ones(num_rows, jnp.float32).at[rows].set(spread, mode="drop")
