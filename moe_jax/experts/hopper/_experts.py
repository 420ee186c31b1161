"""The mosaic implementation: Pallas kernels for Hopper GPUs.

    [route] -> align -> quantize_and_permute -> grouped GEMM 1 (scales, bias, activation, in tiles of 64 and 128 rows
    requantization where the scale is local) -> else row requantization -> grouped GEMM 2 (scales, bias) -> combine in
    float32

Few tokens are not moved: each expert's tile has all of them as its rows, and grouped GEMM 1 takes the tokens
themselves, quantized in the launch that routes and aligns them where the layer quantizes them.

Group sizes stay on the device. Hidden activations are rounded to bfloat16 before rows are requantized, whoever does it,
as the rounding points of vLLM's kernels have it. Those of float16 layers might overflow: GEMM 1 requantizes them itself
where the scale is local, without rounding first. From the router logits on (``forward_layer``) routing and alignment
are one launch for few tokens, and combine writes the layer's output, shared experts included.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax._config import MoEConfig
from moe_jax._typing import Array
from moe_jax.activations import resolve_activation
from moe_jax.experts.hopper import _packed_experts
from moe_jax.experts.hopper._kernel_layout import is_packed, packed_format, uneven_groups
from moe_jax.experts.hopper._plan import Plan, make_plan, row_kind
from moe_jax.quantization import ExpertWeights, QuantFormat, Scheme, Strategy
from moe_jax.routing import RoutingParams, validate_routing
from moe_jax.routing._route import groups_of
from pallas_kernels.align import TileMap, align
from pallas_kernels.combine import combine
from pallas_kernels.common.device import hopper_sms
from pallas_kernels.common.numerics import E4M3_MAX, divide, magnitude
from pallas_kernels.grouped_gemm import choose_config, grouped_gemm
from pallas_kernels.grouped_gemm.heuristics import describe as describe_config
from pallas_kernels.nvlink_dispatch import DispatchedRows, place_rows
from pallas_kernels.nvlink_dispatch.config import GROUPED_WIDTH
from pallas_kernels.quantize_and_permute import PermuteConfig, PermuteDesc, quantize_and_permute
from pallas_kernels.quantize_and_permute import config_error as permute_error
from pallas_kernels.route import route_and_align
from pallas_kernels.route.config import MAX_EXPERTS, MAX_GROUPS, MAX_TOP_K

_16_BIT = ("bfloat16", "float16")


def why_not(config: MoEConfig, weights: ExpertWeights, num_tokens: int) -> str | None:
    """Why the kernels cannot run this layer on this device, or None."""
    if config.dtype.name not in _16_BIT:
        return f"computes in bfloat16 or float16, the layer in {config.dtype.name}"
    if row_kind(weights.scheme) is None and not is_packed(weights.w13):
        if packed_format(weights.scheme, config.dtype) is None:
            name = f"scheme {weights.scheme.name!r}"
            if packed_format(weights.scheme, "bfloat16") is not None:
                return f"the kernel for {name} multiplies in bfloat16, the layer in {config.dtype.name}"
            return f"there is no kernel for {name} yet"
        if (reason := uneven_groups(weights)) is not None:
            return reason
        return (
            f"weights of scheme {weights.scheme.name!r} are in layout 'plain'; the kernel reads what pack_experts makes"
        )
    if not weights.scheme.is_quantized and weights.w13.data.dtype != config.dtype:
        return f"unquantized weights are {weights.w13.data.dtype}, expected the layer's dtype {config.dtype.name}"
    try:
        num_sms = hopper_sms()
    except NotImplementedError as error:
        return str(error)
    leaves, structure = jax.tree.flatten(weights)
    shapes = tuple((leaf.shape, jnp.dtype(leaf.dtype)) for leaf in leaves)
    return _refusal(_shared(config), structure, shapes, num_tokens, num_sms)


def _shared(config: MoEConfig) -> MoEConfig:
    """What layers have in common that differ by name, or in a routing function of their own, which XLA runs; caches
    would also keep alive what it holds.
    """
    return dataclasses.replace(config, name="", custom_routing_function=None)


@functools.lru_cache(maxsize=256)
def _refusal(config: MoEConfig, structure: Any, shapes: tuple[Any, ...], num_tokens: int, num_sms: int) -> str | None:
    """The first kernel that refuses, found by tracing; the layers of a model share one answer."""
    del num_sms  # part of the key: the answer depends on the device
    weights = structure.unflatten([jax.ShapeDtypeStruct(*shape) for shape in shapes])
    x = jax.ShapeDtypeStruct((num_tokens, weights.hidden_size), config.dtype)
    slots = (num_tokens, config.top_k)
    args = (x, jax.ShapeDtypeStruct(slots, jnp.float32), jax.ShapeDtypeStruct(slots, jnp.int32), weights)
    try:
        jax.eval_shape(functools.partial(forward, config), *args)
    except NotImplementedError as error:
        return str(error)
    return None


def describe(config: MoEConfig, weights: ExpertWeights, num_tokens: int) -> list[str]:
    """Who routes, and the configuration of both products with where it comes from, for ``explain``."""
    reason = why_not_layer(config, weights, None, has_mask=False)
    lines = ["routing: by the kernel" if reason is None else f"routing: by XLA, since the kernel has no {reason}"]
    plan = make_plan(config, weights, num_tokens)
    if plan.by_token:
        quantized = "" if plan.quantization == "none" else "tokens are quantized where they are, "
        lines.append(f"rows: none are moved, {quantized}GEMM 1 takes all tokens as the rows of every tile")
    if is_packed(weights.w13):
        return [*lines, *_packed_experts.describe(plan.products, plan.configs, plan.block_m, plan.source, weights)]
    for number, (desc, chosen) in enumerate(zip(plan.products, plan.configs, strict=True), 1):
        chosen = chosen or choose_config(desc, plan.block_m, hopper_sms())
        lines.append(f"GEMM {number}: {describe_config(desc, chosen)}, {plan.source}")
    kind, hidden = row_kind(weights.scheme), plan.products[1]
    rows = {} if plan.by_token else {"input": (num_tokens, weights.hidden_size, config.top_k)}
    if plan.products[0].requantize == "none" and kind != "none":
        rows["hidden"] = (hidden.rows, weights.intermediate_size, 0)
    for name, (count, width, top_k) in rows.items():
        desc = PermuteDesc(count, width, top_k, hidden.rows, config.dtype.name, str(kind))
        if reason := permute_error(desc, PermuteConfig(1)):
            lines.append(f"{name} rows: quantized and moved by XLA, since the kernel refuses {reason}")
    return lines


def run(x: Array, topk_weights: Array, topk_ids: Array, weights: ExpertWeights, config: MoEConfig) -> Array:
    """Routed output in float32, before any rounding. Arguments as ``Implementation.run`` states them. It has no
    gradient.
    """
    return _forward(_shared(config), x, topk_weights, topk_ids, weights)


def forward(
    config: MoEConfig,
    x: Array,
    topk_weights: Array,
    topk_ids: Array,
    weights: ExpertWeights,
    *,
    kernels: str = "mosaic",
    out_dtype: Any = jnp.float32,
) -> Array:
    """``run`` with the implementation of every kernel given by name; "reference" runs anywhere. Rounds to out_dtype."""
    plan = make_plan(config, weights, x.shape[0], kernels)
    tiles = align(topk_ids, weights.num_experts, plan.block_m, unpermuted=plan.by_token, implementation=kernels)
    x, x_scale = _quantized(x, plan, weights, kernels)
    return _experts(config, x, topk_weights, tiles, plan, weights, kernels, out_dtype=out_dtype, x_scale=x_scale)


def _quantized(x: Array, plan: Plan, weights: ExpertWeights, kernels: str) -> tuple[Array, Array | None]:
    """x and no scales; or where tokens are quantized where they are, its codes and their scales."""
    tokens = _to_quantize(x, plan, weights)
    return (x, None) if tokens is None else quantize_and_permute(**tokens, implementation=kernels)


def _to_quantize(x: Array, plan: Plan, weights: ExpertWeights) -> dict[str, Any] | None:
    """Arguments of ``quantize_and_permute`` for tokens that are quantized where they are; None for others."""
    if plan.quantization == "none":
        return None
    scale = weights.w13.input_scale if plan.quantization == "e4m3_tensor" else None
    return dict(x=x, quantization=plan.quantization, scale=scale, scale_rows=plan.scale_rows)


def arriving_quantization(weights: ExpertWeights) -> str:
    """How tokens are quantized before they travel to another device's experts: by row or group, where their scales come
    from themselves, else "none", and where no kernel quantizes rows of this length in groups.
    """
    if is_packed(weights.w13):
        return _packed_experts.row_quantization(weights)
    kind = row_kind(weights.scheme) or "none"
    if kind.startswith("e4m3_group") and weights.hidden_size % GROUPED_WIDTH:
        return "none"
    return "none" if kind == "e4m3_tensor" else kind


def forward_arrived(
    config: MoEConfig,
    arrived: DispatchedRows,
    first_slot: Array,
    weights: ExpertWeights,
    send_back: Callable[[Array, Array], Array],
    *,
    kernels: str = "mosaic",
) -> Array:
    """The experts of this device, slots from first_slot () int32 on, for tokens that came from several devices.

    arrived: quantized as ``arriving_quantization`` says. send_back: ``(rows (Mp, H), row_of (N, top_k)) -> (T, H)``,
    done in place of the sum over top_k. Raises NotImplementedError where a kernel refuses.
    """
    if _is_scaled_per_call(weights.scheme):  # rows that nobody sent must not raise the scale
        index = arrived.slots - first_slot
        is_here = ((index >= 0) & (index < weights.num_experts)).any(axis=1, keepdims=True)
        arrived = dataclasses.replace(arrived, codes=jnp.where(is_here, arrived.codes, jnp.zeros_like(arrived.codes)))
    are_quantized = arrived.scales is not None
    plan = make_plan(config, weights, arrived.slots.shape[0], kernels, are_quantized=are_quantized)
    tiles = align(
        arrived.slots,
        weights.num_experts,
        plan.block_m,
        group_offset=first_slot,
        unpermuted=plan.by_token,
        implementation=kernels,
    )
    x, scale = (arrived.codes, arrived.scales) if are_quantized else _quantized(arrived.codes, plan, weights, kernels)
    return _experts(config, x, None, tiles, plan, weights, kernels, out_dtype=None, x_scale=scale, send_back=send_back)


def _is_scaled_per_call(scheme: Scheme) -> bool:
    fmt = scheme.activations
    return fmt is not None and fmt.dynamic and fmt.strategy is Strategy.TENSOR


def why_not_layer(
    config: MoEConfig, weights: ExpertWeights, params: RoutingParams | None, has_mask: bool
) -> str | None:
    """Why routing stays with XLA, although the experts run here; or None."""
    params = params or RoutingParams()
    activations = weights.scheme.activations
    if config.custom_routing_function is not None:
        return "custom_routing_function"
    if params.hash_indices_table is not None:
        return "hash_indices_table"
    if config.zero_expert_type is not None:
        return "zero experts"
    if config.scoring_func not in ("softmax", "sigmoid"):
        return f"scoring_func={config.scoring_func!r}"
    if config.apply_router_weight_on_input:
        return "apply_router_weight_on_input"
    sizes = dict(num_experts=config.num_experts, top_k=config.top_k, num_expert_group=config.num_expert_group or 0)
    for (name, size), most in zip(sizes.items(), (MAX_EXPERTS, MAX_TOP_K, MAX_GROUPS), strict=True):
        if size > most:
            return f"room for {name}={size}, at most {most}"
    if has_mask and activations is not None and activations.dynamic and activations.strategy is Strategy.TENSOR:
        return "one activation scale for the call, which masked tokens must not raise"
    return None


def why_not_call(
    config: MoEConfig,
    x: Array,
    router_logits: Array,
    weights: ExpertWeights,
    params: RoutingParams | None,
    token_mask: Array | None,
    shared: Array | None,
) -> str | None:
    """Why ``run_layer`` cannot run these arguments although ``why_not`` has no reason; or None."""
    reason = why_not_layer(config, weights, params, token_mask is not None)
    if reason is not None:
        return reason
    leaves, structure = jax.tree.flatten((x, router_logits, weights, params, token_mask, shared))
    shapes = tuple((leaf.shape, jnp.dtype(leaf.dtype)) for leaf in leaves)
    return _call_refusal(_shared(config), structure, shapes, hopper_sms())


@functools.lru_cache(maxsize=256)
def _call_refusal(config: MoEConfig, structure: Any, shapes: tuple[Any, ...], num_sms: int) -> str | None:
    """As ``_refusal``, for ``forward_layer``."""
    del num_sms
    arguments = structure.unflatten([jax.ShapeDtypeStruct(*shape) for shape in shapes])
    try:
        jax.eval_shape(functools.partial(forward_layer, config), *arguments)
    except NotImplementedError as error:
        return str(error)
    return None


def router_arguments(config: MoEConfig, params: RoutingParams | None) -> dict[str, Any]:
    """The router of ``config`` in the words of ``pallas_kernels.route``; for calls without a reason from
    ``why_not_layer``.
    """
    bias = None if params is None else params.correction_bias
    groups, kept = groups_of(config) or (0, 0)
    return dict(
        scoring=config.scoring_func,
        renormalize=config.renormalize,
        scale=config.routed_scaling_factor,
        bias=None if bias is None else bias.astype(jnp.float32),
        num_groups=groups,
        groups_kept=kept,
    )


def forward_layer(
    config: MoEConfig,
    x: Array,
    router_logits: Array,
    weights: ExpertWeights,
    params: RoutingParams | None = None,
    token_mask: Array | None = None,
    shared: Array | None = None,
    *,
    kernels: str = "mosaic",
) -> tuple[Array, Array, Array]:
    """The layer from its router logits on: (y (T, H) in x's dtype, topk_ids (T, top_k), rows per expert (E,)).

    shared: (T, H) float, added before the one rounding. For calls without a reason from ``why_not_call``.
    """
    bias = None if params is None else params.correction_bias
    validate_routing(config, router_logits.shape[1], has_correction_bias=bias is not None, has_hash_table=False)
    if config.router_logits_dtype is not None:
        router_logits = router_logits.astype(config.router_logits_dtype)
    plan = make_plan(config, weights, x.shape[0], kernels)
    routed = route_and_align(
        router_logits,
        config.top_k,
        plan.block_m,
        **router_arguments(config, params),
        token_mask=token_mask,
        unpermuted=plan.by_token,
        tokens=_to_quantize(x, plan, weights),
        implementation=kernels,
    )
    y = _experts(
        config,
        x if routed.codes is None else routed.codes,
        routed.weights,
        routed.tiles,
        plan,
        weights,
        kernels,
        shared=shared,
        out_dtype=x.dtype,
        x_scale=routed.scales,
    )
    return y, routed.ids, routed.tiles.group_sizes


def run_layer(config: MoEConfig, *arguments: Any) -> tuple[Array, Array, Array]:
    """``forward_layer``, which has no gradient."""
    return _forward_layer(_shared(config), *arguments)


def _experts(
    config: MoEConfig,
    x: Array,
    topk_weights: Array | None,
    tiles: TileMap,
    plan: Plan,
    weights: ExpertWeights,
    kernels: str,
    *,
    out_dtype: Any,
    shared: Array | None = None,
    x_scale: Array | None = None,
    send_back: Callable[[Array, Array], Array] | None = None,
) -> Array:
    """x_scale: of x that is quantized already. send_back: in place of ``combine``."""
    if is_packed(weights.w13):
        out = _packed_experts.expert_rows(
            config, x, tiles, plan.block_m, plan.configs, weights, kernels, x_scale=x_scale, by_token=plan.by_token
        )
    else:
        out = _expert_rows(config, x, tiles, plan, weights, kernels, x_scale)
    if send_back is not None:
        return send_back(out, tiles.row_of)
    return combine(out, tiles.row_of, topk_weights, shared=shared, out_dtype=out_dtype, implementation=kernels)


def _expert_rows(
    config: MoEConfig,
    x: Array,
    tiles: TileMap,
    plan: Plan,
    weights: ExpertWeights,
    kernels: str,
    x_scale: Array | None,
) -> Array:
    """Both products: (Mp, H) in the layer's dtype."""
    gemm = functools.partial(
        grouped_gemm,
        tile_expert=tiles.tile_expert,
        num_tiles=tiles.num_tiles,
        tile_rows=tiles.tile_rows,
        out_dtype=config.dtype,
        implementation=kernels,
    )
    # Rows that are short, or hold no whole groups of 128, are XLA's business; the products stay in the kernels.
    row_kernels = ("mosaic", "reference") if kernels == "mosaic" else kernels
    permute = functools.partial(quantize_and_permute, implementation=row_kernels)

    kind = row_kind(weights.scheme)
    if kind is None:
        raise NotImplementedError(f"there is no kernel for scheme {weights.scheme.name!r} yet")
    num_rows = tiles.tile_expert.size * plan.block_m
    first = functools.partial(gemm, config=plan.configs[0])
    if plan.by_token:
        scale, row_scale = weights.w13.input_scale, x_scale
        rows = x.astype(config.dtype) if kind == "none" else x
        first = functools.partial(first, block_m=plan.block_m)
    elif x_scale is not None:
        scale = None
        rows, row_scale = place_rows(x, x_scale, tiles.row_of, num_rows, implementation=row_kernels)
    else:
        operand = x if weights.scheme.is_quantized else x.astype(config.dtype)
        scale = _tensor_scale(weights.scheme.activations, weights.w13.input_scale, operand, None, config.call_axes)
        rows, row_scale = permute(operand, tiles.row_of, num_rows, quantization=kind, scale=scale)
    hidden, hidden_scale = _hidden(
        config,
        weights,
        first,
        permute,
        kind,
        rows,
        scale if kind == "e4m3_tensor" else row_scale,
        tiles,
        plan.products[0].requantize != "none",
    )
    gemm = functools.partial(gemm, config=plan.configs[1])
    return gemm(hidden, weights.w2.data, x_scale=hidden_scale, w_scale=weights.w2.scale, bias=weights.w2_bias)


def _hidden(
    config: MoEConfig,
    weights: ExpertWeights,
    gemm: Any,
    permute: Any,
    kind: str,
    rows: Array,
    row_scale: Array | None,
    tiles: TileMap,
    requantizes: bool,
) -> tuple[Array, Array | None]:
    """GEMM 1 with its activation, and the operand of GEMM 2: (codes or values (Mp, I), scale). requantizes: GEMM 1 does
    so itself.
    """
    first = functools.partial(
        gemm,
        rows,
        weights.w13.data,
        x_scale=row_scale,
        w_scale=weights.w13.scale,
        bias=weights.w13_bias,
        activation=resolve_activation(config),
    )
    fmt = weights.scheme.activations
    if requantizes and kind == "e4m3_tensor":
        return first(requantize="tensor", out_scale=weights.w2.input_scale), weights.w2.input_scale
    if requantizes:
        return first(requantize=kind.removeprefix("e4m3_"))
    hidden = first()
    if kind == "none":
        return hidden, None
    scale = _tensor_scale(fmt, weights.w2.input_scale, hidden, tiles, config.call_axes)
    codes, code_scale = permute(hidden, quantization=kind, scale=scale, rows=tiles.row_of.reshape(-1))
    return codes, code_scale if scale is None else scale


def _tensor_scale(
    fmt: QuantFormat | None, static: Array | None, values: Array, tiles: TileMap | None, axes: tuple[str, ...]
) -> Array | None:
    """The one scale () of per-tensor activations: the checkpoint's, or amax / 448 over the rows in use.

    axes: mesh axes over whose devices the call is spread.
    """
    if fmt is None or fmt.strategy is not Strategy.TENSOR:
        return None
    if not fmt.dynamic:
        return static
    values = magnitude(values.astype(jnp.float32))
    if tiles is not None:
        in_tiles = values.reshape(tiles.tile_rows.size, -1, values.shape[1])
        rank = jnp.arange(in_tiles.shape[1], dtype=jnp.int32)
        values = jnp.where((rank < tiles.tile_rows[:, None])[..., None], in_tiles, 0.0)
    amax = jnp.max(values)
    amax = jax.lax.pmax(amax, axes) if axes else amax
    return jnp.maximum(divide(amax, E4M3_MAX), np.finfo(np.float32).tiny)


# Jitted, so that a program has equal layers of a model once: 24 layers of Qwen3 lowered in 2 s instead of 96.
_forward = jax.jit(forward, static_argnums=0)
_forward_layer = jax.jit(forward_layer, static_argnums=0)
