"""The experts of a call as a sequence of Pallas kernels for Hopper GPUs.

    [route] -> align -> quantize_and_permute (of few tokens one launch with align) -> grouped GEMM 1 (scales, bias,
    activation; where the scale of the hidden rows is local and a tile has its columns, their requantization) -> else
    requantization of the rows -> grouped GEMM 2 (scales, bias) -> combine in float32

A token by itself has tiles of one row: grouped GEMM 2 then may add up the rows that it makes, or, of plain weights,
quantize those that it takes.

Few tokens are not moved: each expert's tile has all of them as its rows, and grouped GEMM 1 takes the tokens
themselves, quantized in the launch that routes and aligns them where the layer quantizes them.

Group sizes stay on the device. Hidden activations are rounded to bfloat16 before rows are requantized, whoever does it,
as the rounding points of vLLM's kernels have it. Those of float16 layers might overflow: GEMM 1 requantizes them itself
where the scale is local, without rounding first. From the router logits on (``forward_layer``) routing and alignment
are one launch for few tokens, and combine writes the layer's output, shared experts included.

The ``portable`` kernels are the same sequence: their own products, and the kernels for rows, which need neither TMA nor
wgmma. Requantization is always apart, and XLA does to rows what no kernel can (``beside_products``).

Plain weights go to ``grouped_gemm``. Weights in kernel layout go to ``grouped_gemm_packed``: activations are left in 16
bits; or quantized per row to int8 or e4m3 (W4A8); or rounded to the weights' microscaling grid (NVFP4, MXFP4, MXFP8),
or to codes less their zero points, either of which bfloat16 holds exactly.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from moe_jax._config import MoEConfig
from moe_jax._typing import Array
from moe_jax.activations import apply_activation, resolve_activation
from moe_jax.experts._backend import whole_logits
from moe_jax.experts.hopper._adapters import Addend
from moe_jax.experts.hopper._kernel_layout import in_kernel_layout, kernel_operand
from moe_jax.experts.hopper._plan import Plan, make_plan
from moe_jax.experts.hopper._rows import how_tokens_move, kind_of, moving_tokens, of_rows, rows_on_grid, tensor_scale
from moe_jax.quantization import ExpertWeights, LowRank
from moe_jax.routing import Routing, RoutingParams, validate_routing
from moe_jax.routing._route import groups_of
from pallas_kernels.align import TileMap, align
from pallas_kernels.align.api import describe as describe_tiles
from pallas_kernels.align_and_permute import align_and_permute
from pallas_kernels.align_and_permute import config_error as together_error
from pallas_kernels.combine import RoutedRows, combine
from pallas_kernels.grouped_gemm import grouped_gemm
from pallas_kernels.grouped_gemm import packed as packed_gemm
from pallas_kernels.grouped_gemm.packed import grouped_gemm_packed
from pallas_kernels.nvlink_dispatch import DispatchedRows, place_rows
from pallas_kernels.quantize_and_permute import PermuteDesc, quantize_and_permute
from pallas_kernels.route import route, route_and_align
from pallas_kernels.route.config import MAX_EXPERTS, MAX_GROUPS, MAX_TOP_K, fused_tokens

# -- from tokens and their experts, from router logits, from rows that arrived ----------------------------------------


def forward(
    config: MoEConfig,
    x: Array,
    topk_weights: Array,
    topk_ids: Array,
    weights: ExpertWeights,
    *,
    kernels: str = "hopper",
    out_dtype: DTypeLike = jnp.float32,
    plan: Plan | None = None,
) -> Array:
    """``Backend.run`` with the implementation of every kernel given by name; "reference" runs anywhere."""
    plan = plan or make_plan(config, weights, x.shape[0], kernels)
    beside = beside_products(kernels)
    if aligns_and_moves(config, weights, plan, x, topk_ids.shape, kernels):
        experts = _with_rows(config, weights, plan, x, topk_ids, kernels)
        return experts.summed(x, None, topk_weights, None, out_dtype)
    tiles = align(topk_ids, weights.num_experts, plan.block_m, unpermuted=plan.unpermuted, implementation=beside)
    if weights.has_adapters:
        of_tokens = functools.partial(
            combine, row_of=tiles.row_of, weights=topk_weights, out_dtype=jnp.float32, implementation=beside
        )
        rows, addend = Experts(config, weights, plan, tiles, kernels).adapted(x)
        y = of_tokens(rows) if addend is None else of_tokens(rows) + of_tokens(addend)
        return y.astype(out_dtype)
    x, x_scale = _quantized(x, plan, weights, kernels)
    return Experts(config, weights, plan, tiles, kernels).summed(x, x_scale, topk_weights, None, out_dtype)


def forward_layer(
    config: MoEConfig,
    x: Array,
    router_logits: Array,
    weights: ExpertWeights,
    params: RoutingParams | None = None,
    token_mask: Array | None = None,
    shared: Array | None = None,
    *,
    kernels: str = "hopper",
    plan: Plan | None = None,
    is_combined: bool = True,
) -> tuple[Array | RoutedRows, Array, Array]:
    """``Backend.run_layer`` with the implementation of every kernel given by name."""
    bias = None if params is None else params.correction_bias
    validate_routing(config, router_logits.shape[-1], has_correction_bias=bias is not None, has_hash_table=False)
    if config.router_logits_dtype is not None:
        router_logits = whole_logits(router_logits).astype(config.router_logits_dtype)
    plan = plan or make_plan(config, weights, x.shape[0], kernels)
    slots, is_fused = (x.shape[0], config.top_k), x.shape[0] <= fused_tokens(config.num_experts)
    if not is_fused and aligns_and_moves(config, weights, plan, x, slots, kernels):
        topk_weights, ids = route(
            router_logits,
            config.top_k,
            **router_arguments(config, params),
            token_mask=token_mask,
            implementation=kernels,
        )
        experts, tokens = _with_rows(config, weights, plan, x, ids, kernels), (x, None)
    else:
        routed = route_and_align(
            router_logits,
            config.top_k,
            plan.block_m,
            **router_arguments(config, params),
            token_mask=token_mask,
            unpermuted=plan.unpermuted,
            tokens=_to_quantize(x, plan, weights),
            implementation=beside_products(kernels),
        )
        topk_weights, ids = routed.weights, routed.ids
        experts = Experts(config, weights, plan, routed.tiles, kernels)
        tokens = (x if routed.codes is None else routed.codes), routed.scales
    if is_combined or plan.adds_up:
        y = experts.summed(*tokens, topk_weights, shared, x.dtype)
    else:
        y = RoutedRows(experts(*tokens), experts.tiles.row_of, topk_weights, shared)
    return y, ids, experts.tiles.group_sizes


def forward_arrived(
    config: MoEConfig,
    arrived: DispatchedRows,
    first_slot: Array,
    weights: ExpertWeights,
    send_back: Callable[[Array, Array], Array],
    *,
    kernels: str = "hopper",
) -> Array:
    """``Backend.serve_arrived`` with the implementation of every kernel given by name."""
    if config.has_call_scale:  # rows that nobody sent must not raise the scale
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
        unpermuted=plan.unpermuted,
        implementation=beside_products(kernels),
    )
    x, scale = (arrived.codes, arrived.scales) if are_quantized else _quantized(arrived.codes, plan, weights, kernels)
    return send_back(Experts(config, weights, plan, tiles, kernels)(x, scale), tiles.row_of)


def beside_products(kernels: str) -> str | tuple[str, ...]:
    """Implementations of what routes, aligns, moves and combines rows beside products by ``kernels``."""
    return ("portable", "reference") if kernels == "portable" else kernels


def routing_refusal(config: MoEConfig, params: RoutingParams | None, *, has_mask: bool) -> str | None:
    """``Backend.routing_refusal`` of the kernel that routes."""
    if config.custom_routing_function is not None:
        return "custom_routing_function"
    if params is not None and params.hash_indices_table is not None:
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
    if has_mask and config.has_call_scale:
        return "one activation scale for the call, which masked tokens must not raise"
    return None


def route_alone(
    config: MoEConfig,
    router_logits: Array,
    params: RoutingParams | None,
    token_mask: Array | None,
    kernels: str | Sequence[str],
) -> Routing:
    """``Backend.route`` with the implementations of the kernel given by name, in the order to try."""
    if config.router_logits_dtype is not None:
        router_logits = router_logits.astype(config.router_logits_dtype)
    options = router_arguments(config, params)
    if config.apply_routed_scale_to_output:  # which ``finish`` multiplies with
        options["scale"] = 1.0
    return Routing(*route(router_logits, config.top_k, token_mask=token_mask, implementation=kernels, **options))


def router_arguments(config: MoEConfig, params: RoutingParams | None) -> dict[str, Any]:
    """The router of ``config`` in the words of ``pallas_kernels.route``; for calls without a ``routing_refusal``."""
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


def aligns_and_moves(
    config: MoEConfig, weights: ExpertWeights, plan: Plan, x: Any, slots: tuple[int, ...], kernels: str
) -> bool:
    """Whether one launch aligns the tokens of a call and moves them to their rows.

    x: (T, H), or its shape. slots: shape of their ids, (T, top_k), or (T, top_k, 2) of words, which ``align`` takes.
    """
    how = how_tokens_move(config, weights)
    if plan.unpermuted or weights.has_adapters or how is None or kernels == "portable" or len(slots) != 2:
        return False
    (num_tokens, width), top_k = x.shape, slots[1]
    tiles = describe_tiles(num_tokens, top_k, weights.num_experts, plan.block_m, has_offset=False, unpermuted=False)
    rows = PermuteDesc(num_tokens, width, top_k, tiles.num_rows, jnp.dtype(x.dtype).name, how)
    return together_error(tiles, rows) is None


def _with_rows(
    config: MoEConfig, weights: ExpertWeights, plan: Plan, x: Array, topk_ids: Array, kernels: str
) -> "Experts":
    """Of a call that ``aligns_and_moves``."""
    moving = moving_tokens(config, weights, x)
    assert moving is not None
    tiles, rows, scales = align_and_permute(
        topk_ids,
        weights.num_experts,
        plan.block_m,
        moving.x,
        quantization=moving.quantization,
        scale=moving.scale,
        implementation=kernels,
    )
    return Experts(config, weights, plan, tiles, kernels, (rows, moving.multiplier(scales)))


def _quantized(x: Array, plan: Plan, weights: ExpertWeights, kernels: str) -> tuple[Array, Array | None]:
    """x and no scales; or where tokens are quantized where they are, its codes and their scales."""
    tokens = _to_quantize(x, plan, weights)
    return (x, None) if tokens is None else quantize_and_permute(**tokens, implementation=beside_products(kernels))


def _to_quantize(x: Array, plan: Plan, weights: ExpertWeights) -> dict[str, Any] | None:
    """Arguments of ``quantize_and_permute`` for tokens that are quantized where they are; None for others."""
    if plan.quantization == "none":
        return None
    scale = weights.w13.input_scale if plan.quantization == "e4m3_tensor" else None
    return dict(x=x, quantization=plan.quantization, scale=scale, scale_rows=plan.scale_rows)


# -- from aligned tokens to the rows of their experts -----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Experts:
    """The experts of one call: tokens that have been aligned -> the rows of their experts.

    kernels: the implementation of every kernel, by name. moved: what grouped GEMM 1 takes, and what multiplies it,
    where the tokens have been moved while they were aligned.
    """

    config: MoEConfig
    weights: ExpertWeights
    plan: Plan
    tiles: TileMap
    kernels: str
    moved: tuple[Array, Array | None] | None = None

    def __call__(self, x: Array, x_scale: Array | None, **options: Any) -> Array:
        """x: tokens (T, H), or with ``x_scale`` their codes. Returns (Mp, H) in the layer's dtype. options: of grouped
        GEMM 2."""
        rows, row_scale = self._input_rows(x, x_scale)
        hidden, hidden_scale = self._hidden_rows(rows, row_scale)
        return self._product(1)(hidden, x_scale=hidden_scale, **options)

    def summed(
        self, x: Array, x_scale: Array | None, weights: Array, shared: Array | None, out_dtype: DTypeLike
    ) -> Array:
        """(T, H): the rows of each token times its ``weights`` (T, top_k), and ``shared`` (T, H), added up in float32.

        Where GEMM 2 adds them up, they are not rounded in between.
        """
        row_of = self.tiles.row_of
        if self.plan.adds_up:
            return self(x, x_scale, row_of=row_of, slot_weights=weights, shared=shared, out_dtype=out_dtype)
        rows, beside = self(x, x_scale), beside_products(self.kernels)
        return combine(rows, row_of, weights, shared=shared, out_dtype=jnp.dtype(out_dtype), implementation=beside)

    def adapted(self, x: Array) -> tuple[Array, Array | None]:
        """Tokens (T, H) -> the rows of the experts (Mp, H), and what the adapter of w2 adds to them, or None.

        GEMM 1 is stored before its activation, rounded to the layer's dtype as its addend is. Both meet in float32.
        """
        config, weights = self.config, self.weights
        rows, row_scale = self._input_rows(x, None)
        with jax.named_scope("gate_and_up"):
            wide = self._before_activation(rows, row_scale).astype(jnp.float32)
        if (addend := self._addend(weights.w13_lora)) is not None:
            with jax.named_scope("w13_adapter"):
                own = addend.outer(addend.inner(self._unquantized_rows(x, rows)))
            wide = wide + own.astype(jnp.float32).reshape(wide.shape)
        hidden = apply_activation(wide, config).astype(config.dtype)
        codes, scale = self._requantized(hidden)
        y = self._product(1)(codes, x_scale=scale)
        if (addend := self._addend(weights.w2_lora)) is None:
            return y, None
        with jax.named_scope("w2_adapter"):
            return y, addend.outer(addend.inner(hidden))

    def _addend(self, lora: LowRank | None) -> Addend | None:
        return None if lora is None else Addend(lora, self.tiles, self.plan.block_m, self.kernels, self.config.dtype)

    def _before_activation(self, rows: Array, row_scale: Array | None) -> Array:
        """(Mp, G, I) in the layer's dtype: grouped GEMM 1 over the rows of all projections, and its bias."""
        weights, tiles, config = self.weights, self.tiles, self.config
        lead, intermediate = weights.w13.shape[:2], weights.intermediate_size
        options: dict[str, Any] = dict(
            x_scale=row_scale,
            tile_expert=tiles.tile_expert,
            num_tiles=tiles.num_tiles,
            tile_rows=tiles.tile_rows,
            out_dtype=config.dtype,
            implementation=self.kernels,
        )
        if in_kernel_layout(weights):
            stacked = packed_gemm.stacked_projections(kernel_operand(weights.w13))
            wide = grouped_gemm_packed(rows, stacked, **options)
            wide = wide.reshape(wide.shape[0], -1, lead[1], packed_gemm.BLOCK_N).swapaxes(1, 2)
            wide = wide.reshape(wide.shape[0], lead[1], -1)[..., :intermediate]
        else:
            w, scale = weights.w13.data, weights.w13.scale
            if scale is not None and scale.shape == lead:
                scale = jnp.broadcast_to(scale[..., None], (*lead, intermediate))
            if scale is not None:
                scale = scale.reshape(lead[0], -1, *scale.shape[3:])
            stacked = w.reshape(lead[0], -1, w.shape[-1])
            wide = grouped_gemm(rows, stacked, w_scale=scale, **options)
            wide = wide.reshape(wide.shape[0], lead[1], intermediate)
        if weights.w13_bias is None:
            return wide
        bias = weights.w13_bias[jnp.maximum(tiles.tile_expert, 0)].astype(jnp.float32)
        return wide.astype(jnp.float32) + jnp.repeat(bias, self.plan.block_m, axis=0)

    def _unquantized_rows(self, x: Array, rows: Array) -> Array:
        """Tokens as the rows of their experts in the layer's dtype; ``rows`` where these are that already."""
        if self.weights.scheme.activations is None:
            return rows
        row_of, num_rows = self.tiles.row_of, self.tiles.tile_expert.size * self.plan.block_m
        moved, _ = quantize_and_permute(
            x.astype(self.config.dtype), row_of, num_rows, quantization="none", implementation=self._row_kernels
        )
        return moved

    @property
    def _kind(self) -> str | None:
        return kind_of(self.weights)

    @property
    def _operand(self) -> str:
        """dtype of rows that nobody quantizes to 8 bits."""
        return (
            kernel_operand(self.weights.w13).fmt.operand if in_kernel_layout(self.weights) else self.config.dtype.name
        )

    def _product(self, index: int) -> Callable[..., Any]:
        """Grouped GEMM 1 with its activation (0), or grouped GEMM 2 (1), as a function of rows."""
        weights, tiles = self.weights, self.tiles
        tensor, bias = ((weights.w13, weights.w13_bias), (weights.w2, weights.w2_bias))[index]
        options: dict[str, Any] = dict(
            tile_expert=tiles.tile_expert,
            num_tiles=tiles.num_tiles,
            tile_rows=tiles.tile_rows,
            bias=bias,
            out_dtype=self.config.dtype,
            config=self.plan.configs[index],
            implementation=self.kernels,
        )
        if index == 0:
            options["activation"] = resolve_activation(self.config)
            if self.plan.unpermuted:
                options["block_m"] = self.plan.block_m
        if in_kernel_layout(weights):
            return functools.partial(grouped_gemm_packed, w=kernel_operand(tensor), **options)
        options["tile_bits"] = tiles.tile_bits
        if index == 1:
            options["quantization"] = self.plan.hidden_quantization
        return functools.partial(grouped_gemm, w=tensor.data, w_scale=tensor.scale, **options)

    @property
    def _movers(self) -> str | tuple[str, ...]:
        """Implementation of what moves rows and leaves their values."""
        return beside_products(self.kernels)

    @property
    def _row_kernels(self) -> str | tuple[str, ...]:
        """Implementations of what happens to rows between products.

        Rows that are short, or whose last group is neither 128 nor 64 columns wide, are XLA's business; the products
        stay in the kernels.
        """
        is_8bit = in_kernel_layout(self.weights) and self._kind is not None
        return ("hopper", "reference") if self.kernels == "hopper" and not is_8bit else beside_products(self.kernels)

    def _input_rows(self, x: Array, x_scale: Array | None) -> tuple[Array, Array | None]:
        """What grouped GEMM 1 takes, and what multiplies it."""
        config, weights, plan, kind = self.config, self.weights, self.plan, self._kind
        if self.moved is not None:
            return self.moved
        if plan.unpermuted:
            if kind in (None, "none"):
                return x.astype(self._operand), None
            if kind == "e4m3_tensor":
                return x, weights.w13.input_scale if x_scale is None else x_scale[:1].reshape(())
            return x, x_scale
        row_of, num_rows = self.tiles.row_of, self.tiles.tile_expert.size * plan.block_m
        if x_scale is not None:
            return place_rows(x, x_scale, row_of, num_rows, implementation=self._row_kernels)
        permute = functools.partial(quantize_and_permute, implementation=self._row_kernels)
        place = functools.partial(permute, row_of=row_of, num_rows=num_rows)
        if kind is None and weights.scheme.activations is None:  # they are moved alone
            place = functools.partial(place, implementation=self._movers)
        if (moving := moving_tokens(config, weights, x)) is not None:
            return moving.by(place)
        orders = weights.w13.g_idx
        ordered: dict[str, Any] = {} if orders is None else dict(columns=orders, tile_expert=self.tiles.tile_expert)
        move = functools.partial(
            quantize_and_permute,
            row_of=row_of,
            num_rows=num_rows,
            quantization="none",
            implementation=self._movers,
            **ordered,
        )
        if kind is None:
            fmt = weights.scheme.activations
            return rows_on_grid(
                x,
                fmt,
                weights.w13.input_scale,
                self._operand,
                config.scale_axes(fmt, is_hidden=False),
                quantize=place,
                place=lambda x, scale: (move(x)[0], of_rows(scale, row_of, num_rows)),
            )
        # Columns have an order of each expert: rows are moved, then quantized.
        return permute(move(x)[0], quantization=kind, rows=row_of.reshape(-1))

    def _hidden_rows(self, rows: Array, row_scale: Array | None) -> tuple[Array, Array | None]:
        """Grouped GEMM 1 with its activation -> what grouped GEMM 2 takes, and what multiplies it."""
        first = functools.partial(self._product(0), rows, x_scale=row_scale)
        if self.plan.requantize == "tensor":
            static = self.weights.w2.input_scale
            return first(requantize="tensor", out_scale=static), static
        if self.plan.requantize != "none":
            return first(requantize=self.plan.requantize)
        if self.plan.hidden_quantization != "none":
            return first(out_dtype=self.plan.hidden_dtype or self.config.dtype), None
        return self._requantized(first(out_dtype=self.plan.hidden_dtype or self.config.dtype))

    def _requantized(self, hidden: Array) -> tuple[Array, Array | None]:
        """Hidden rows (Mp, I) as grouped GEMM 2 takes them, and what multiplies them."""
        config, weights, kind = self.config, self.weights, self._kind
        static, fmt = weights.w2.input_scale, weights.scheme.activations
        if kind == "none":
            return hidden, None
        scale = None if kind is None else tensor_scale(fmt, static, hidden, self.tiles, config.call_axes)
        permute = functools.partial(
            quantize_and_permute, rows=self.tiles.row_of.reshape(-1), implementation=self._row_kernels
        )
        if kind is None:
            return rows_on_grid(
                hidden,
                fmt,
                static,
                kernel_operand(weights.w2).fmt.operand,
                config.scale_axes(fmt, is_hidden=True),
                quantize=permute,
                place=lambda x, scale: (x, scale),
            )
        codes, code_scale = permute(hidden, quantization=kind, scale=scale)
        return codes, code_scale if scale is None else scale
