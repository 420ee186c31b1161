"""The mosaic implementation for packed weights.

    align -> quantize_and_permute -> packed grouped GEMM 1 (scales, bias, activation) -> row requantization
    -> packed grouped GEMM 2 (scales, bias) [-> combine in float32]

Activations are left in 16 bits; or quantized per row to int8 or e4m3 (W4A8); or rounded to the weights' microscaling
grid (NVFP4, MXFP4, MXFP8), or to codes less their zero points, either of which bfloat16 holds exactly.
"""

import functools
from collections.abc import Sequence

import jax.numpy as jnp

from moe_jax._config import MoEConfig
from moe_jax._typing import Array
from moe_jax.activations import resolve_activation
from moe_jax.experts.hopper._activations import of_rows, rounded_by_xla, rows_on_grid
from moe_jax.experts.hopper._kernel_layout import as_packed
from moe_jax.experts.xla._align import row_capacity
from moe_jax.quantization import ExpertWeights
from pallas_kernels.align import TileMap
from pallas_kernels.common.device import hopper_sms
from pallas_kernels.grouped_gemm.packed import (
    BLOCK_MS,
    PackedConfig,
    PackedDesc,
    candidates,
    choose_block_m,
    choose_config,
    describe_call,
    grouped_gemm_packed,
)
from pallas_kernels.grouped_gemm.packed import describe as describe_config
from pallas_kernels.grouped_gemm.packed.format import FOLDED_RANGE
from pallas_kernels.nvlink_dispatch import place_rows
from pallas_kernels.quantize_and_permute import quantize_and_permute
from pallas_kernels.tuning import PackedLayerKey

_ROW_QUANTIZATION = {"int8": "int8_row", "float8_e4m3fn": "e4m3_row"}


def row_quantization(weights: ExpertWeights) -> str:
    """How tokens are quantized by themselves, before they are rows: by row for products of 8 bits, else "none"."""
    fmt = as_packed(weights.w13).fmt
    return _ROW_QUANTIZATION[fmt.operand] if fmt.is_8bit and weights.w13.g_idx is None else "none"


def expert_rows(
    config: MoEConfig,
    x: Array,
    tiles: TileMap,
    tile: int,
    configs: Sequence[PackedConfig | None],
    weights: ExpertWeights,
    kernels: str,
    *,
    x_scale: Array | None = None,
    by_token: bool = False,
) -> Array:
    """From routed tokens to the rows of their experts (Mp, H) in the layer's dtype; arguments as ``_experts_mosaic``
    has them. tile: rows of a tile. configs: of both products, None for their own choice. by_token: row t of every tile
    is token t.
    """
    fmt = weights.scheme.activations
    w13, w2 = as_packed(weights.w13), as_packed(weights.w2)
    gemm = functools.partial(
        grouped_gemm_packed,
        tile_expert=tiles.tile_expert,
        num_tiles=tiles.num_tiles,
        out_dtype=config.dtype,
        implementation=kernels,
    )
    permute = functools.partial(quantize_and_permute, implementation=kernels)
    num_rows = tiles.tile_expert.size * tile
    first = functools.partial(
        gemm, w=w13, bias=weights.w13_bias, activation=resolve_activation(config), config=configs[0]
    )
    to_rows = functools.partial(permute, row_of=tiles.row_of, num_rows=num_rows)
    if weights.w13.g_idx is not None:
        to_rows = functools.partial(to_rows, columns=weights.w13.g_idx, tile_expert=tiles.tile_expert)
    if by_token:
        first = functools.partial(first, block_m=tile)
    if w13.fmt.is_8bit:
        kind = _ROW_QUANTIZATION[w13.fmt.operand]
        if by_token:
            rows, scale = x, x_scale
        elif x_scale is not None:
            rows, scale = place_rows(x, x_scale, tiles.row_of, num_rows, implementation=kernels)
        elif weights.w13.g_idx is None:
            rows, scale = to_rows(x, quantization=kind)
        else:
            rows, scale = permute(to_rows(x, quantization="none")[0], quantization=kind, rows=tiles.row_of.reshape(-1))
        hidden = first(rows, x_scale=scale)
        hidden, scale = permute(hidden, quantization=kind, rows=tiles.row_of.reshape(-1))
    elif by_token:
        hidden, scale = first(x.astype(w13.fmt.operand)), None
    else:
        # Rows that the kernel refuses (short ones, ragged groups) are XLA's business; the products stay in the kernels.
        row_kernels = ("mosaic", "reference") if kernels == "mosaic" else kernels
        quantize = functools.partial(quantize_and_permute, implementation=row_kernels)
        rows, scale = rows_on_grid(
            x,
            fmt,
            weights.w13.input_scale,
            w13.fmt.operand,
            config.scale_axes(fmt, is_hidden=False),
            quantize=functools.partial(quantize, row_of=tiles.row_of, num_rows=num_rows),
            place=lambda x, scale: (to_rows(x, quantization="none")[0], of_rows(scale, tiles.row_of, num_rows)),
        )
        hidden, scale = rows_on_grid(
            first(rows, x_scale=scale),
            fmt,
            weights.w2.input_scale,
            w2.fmt.operand,
            config.scale_axes(fmt, is_hidden=True),
            quantize=functools.partial(quantize, rows=tiles.row_of.reshape(-1)),
            place=lambda x, scale: (x, scale),
        )
    return gemm(hidden, w=w2, x_scale=scale, bias=weights.w2_bias, config=configs[1])


def block_m(num_tokens: int, config: MoEConfig, weights: ExpertWeights) -> int:
    """Rows of a tile: by the expected rows of an expert that is hit at all, fewer where no kernel takes so many."""
    num_experts = weights.num_experts
    hit = num_experts * (1 - (1 - min(config.top_k / num_experts, 1.0)) ** max(num_tokens, 1))
    wanted = choose_block_m(num_tokens * config.top_k / hit)
    runs = lambda tile: all(any(candidates(d, tile, 1)) for d in products(num_tokens, config, weights, tile))  # noqa: E731
    return next((tile for tile in reversed(BLOCK_MS) if tile <= wanted and runs(tile)), BLOCK_MS[0])


def describe(
    descs: Sequence[PackedDesc],
    configs: Sequence[PackedConfig | None],
    tile: int,
    source: str,
    weights: ExpertWeights,
) -> list[str]:
    """The configuration of both products, for ``explain``; arguments of their plan."""
    lines = []
    for number, (desc, config) in enumerate(zip(descs, configs, strict=True), 1):
        chosen = config or choose_config(desc, tile, hopper_sms())
        lines.append(f"GEMM {number}: {describe_config(desc, chosen)}, {source}")
    if weights.w13.g_idx is not None:
        lines.append("act-order: columns of each row gathered for its expert, w13's rows in the order of w2's columns")
    activations, fmt = weights.scheme.activations, as_packed(weights.w13).fmt
    if activations is not None and not fmt.is_8bit:
        lines.append("activations rounded to their format's grid and multiplied in bfloat16, which holds it exactly")
        widths = dict(input=weights.hidden_size, hidden=weights.intermediate_size)
        lines += rounded_by_xla(activations, widths, descs[0].out_dtype)
    if fmt.is_8bit and fmt.scale == "e8m0":
        lines.append(
            f"scales of groups folded into e4m3 operands: exact down to 2**-{FOLDED_RANGE} of their channel's largest, "
            "zero below"
        )
    return lines


def layer_key(config: MoEConfig, weights: ExpertWeights) -> PackedLayerKey:
    """The layer as tuning tables know it."""
    w13 = as_packed(weights.w13)
    return PackedLayerKey(
        num_experts=weights.num_experts,
        top_k=config.top_k,
        hidden_size=weights.hidden_size,
        intermediate_size=weights.intermediate_size,
        element=w13.fmt.element,
        operand=w13.fmt.operand,
        scale=w13.fmt.scale,
        group_size=w13.fmt.group_size,
        has_zero_point=w13.fmt.has_zero_point,
        scale_dtype="float32" if w13.scale is None else jnp.dtype(w13.scale.dtype).name,
        projections=config.num_halves,
    )


def products(num_tokens: int, config: MoEConfig, weights: ExpertWeights, tile: int) -> tuple[PackedDesc, PackedDesc]:
    """What both products are asked in tiles of ``tile`` rows."""
    rows = row_capacity(max(num_tokens, 1), config.top_k, weights.num_experts, tile)
    fmt, activation = weights.scheme.activations, resolve_activation(config)
    lhs = "none" if fmt is None or fmt.scale == "e8m0" else "tensor"
    if fmt is not None and (fmt.scale == "float32" or fmt.global_scale == "token"):
        lhs = "row"
    return (
        describe_call(rows, as_packed(weights.w13), config.dtype, lhs, weights.w13_bias, activation),
        describe_call(rows, as_packed(weights.w2), config.dtype, lhs, weights.w2_bias, None),
    )
