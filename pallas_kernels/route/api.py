"""``route``: router scores to the experts and weights of tokens; ``route_and_align``: and to rows in expert order."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.align import TileMap, align
from pallas_kernels.align.api import as_operands
from pallas_kernels.align.api import describe as describe_align
from pallas_kernels.align.config import AlignConfig
from pallas_kernels.align.config import config_error as align_error
from pallas_kernels.common.device import hopper_sms, portable_sms
from pallas_kernels.common.implementations import first_that_runs
from pallas_kernels.common.types import Leaf
from pallas_kernels.quantize_and_permute import quantize_and_permute
from pallas_kernels.quantize_and_permute.api import describe as describe_rows
from pallas_kernels.route.config import (
    RouteConfig,
    RouteDesc,
    choose_config,
    config_error,
    fused_tokens,
    quantizes_beside,
)
from pallas_kernels.route.reference import route_ref


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routed:
    """Where tokens go.

    Args:
        weights: (T, top_k) float32.
        ids: (T, top_k) int32, -1 for a masked token.
        tiles: where their rows lie.
        codes, scales: of tokens that were quantized as well, as ``quantize_and_permute`` gives them, else None.
    """

    weights: Leaf
    ids: Leaf
    tiles: TileMap
    codes: Leaf | None = None
    scales: Leaf | None = None


def route(
    logits: jax.Array,
    top_k: int,
    *,
    scoring: str = "softmax",
    renormalize: bool = True,
    scale: float = 1.0,
    bias: jax.Array | None = None,
    num_groups: int = 0,
    groups_kept: int = 0,
    token_mask: jax.Array | None = None,
    config: RouteConfig | None = None,
    implementation: str | Sequence[str] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The top_k experts of each token and their weights; ties go to the lower expert, a score that is NaN counts as 0.

    Args:
        logits: (T, E) float32, bfloat16 or float16; or (P, T, E) float32, partial sums that are added in their order.
        top_k: experts of a token.
        scoring: "softmax" over all experts (all 0 where a logit is NaN or +inf) or "sigmoid".
        renormalize: divide a token's weights by their sum.
        scale: multiplies the weights.
        bias: (E,) float32, added to the scores for the choice only.
        num_groups: contiguous groups of experts, of which the groups_kept best stay; 0 for none. A group is worth its
            largest score, or with a bias the sum of its two largest.
        groups_kept: groups that stay.
        token_mask: (T,) bool, False for tokens that get ids -1 and weights 0.
        config: of the Hopper kernel; None for its own choice.
        implementation: "hopper", "portable", "reference", or several in the order to try; None for this order.

    Returns:
        (weights (T, top_k) float32, ids (T, top_k) int32), best first.

    Raises:
        ValueError, TypeError: a wrong call. NotImplementedError: no implementation can run it.
    """
    desc, operands = _describe(logits, top_k, scoring, renormalize, scale, bias, num_groups, groups_kept, token_mask)

    def kernel(num_sms: int) -> tuple[jax.Array, jax.Array]:
        del num_sms  # asked for whether the device runs it
        chosen = config or choose_config(desc)
        if reason := config_error(desc, chosen):
            raise NotImplementedError(reason)

        from pallas_kernels.route.kernel_sm90 import route_sm90  # here: importing it loads Pallas

        weights, ids = route_sm90(desc, chosen)(*operands)
        return weights.reshape(-1, top_k), ids.reshape(-1, top_k)

    runs = dict(
        hopper=lambda: kernel(hopper_sms()),
        portable=lambda: kernel(portable_sms()),
        reference=lambda: route_ref(desc, logits if logits.ndim == 2 else logits.sum(0), bias, token_mask),
    )
    return first_that_runs("route", runs, implementation)


def route_and_align(
    logits: jax.Array,
    top_k: int,
    block_m: int,
    *,
    scoring: str = "softmax",
    renormalize: bool = True,
    scale: float = 1.0,
    bias: jax.Array | None = None,
    num_groups: int = 0,
    groups_kept: int = 0,
    token_mask: jax.Array | None = None,
    num_local_experts: int | None = None,
    group_offset: jax.Array | int | None = None,
    unpermuted: bool = False,
    tokens: Mapping[str, Any] | None = None,
    implementation: str | Sequence[str] | None = None,
) -> Routed:
    """``route`` followed by ``align`` in tiles of block_m rows: one launch for few tokens (``fused_tokens``), else two.

    Arguments and errors as there, and those below. Masked tokens get no row. Ids stay global.

    Args:
        num_local_experts, group_offset: the experts that get rows are this many from the offset on, where the others
            live on other shards; None for all.
        unpermuted: as in ``align``.
        tokens: arguments of a ``quantize_and_permute`` of the T tokens that leaves them in place: x, quantization, and
            where needed scale and scale_rows. For few tokens it takes no launch of its own (``quantizes_beside``).
    """
    options = (scoring, renormalize, scale, bias, num_groups, groups_kept, token_mask)
    desc, operands = _describe(logits, top_k, *options)
    num_tokens = desc.num_tokens
    if tokens is not None and tokens["x"].shape[0] != num_tokens:
        raise ValueError(f"tokens has x{tokens['x'].shape}, logits are of {num_tokens} tokens; expected as many")
    if (num_local_experts is None) != (group_offset is None):
        raise ValueError("num_local_experts and group_offset go together")
    num_experts = num_local_experts or desc.num_experts

    def apart(implementation: str) -> Routed:
        names = ("scoring", "renormalize", "scale", "bias", "num_groups", "groups_kept", "token_mask")
        chosen: dict[str, Any] = dict(zip(names, options, strict=True))
        weights, ids = route(logits, top_k, implementation=implementation, **chosen)
        tiles = align(
            ids, num_experts, block_m, group_offset=group_offset, unpermuted=unpermuted, implementation=implementation
        )
        return Routed(weights, ids, tiles, *quantized(implementation))

    def quantized(implementation: str) -> tuple[jax.Array | None, jax.Array | None]:
        return (None, None) if tokens is None else quantize_and_permute(**tokens, implementation=implementation)

    def kernel(num_sms: int, name: str) -> Routed:
        del num_sms  # asked for whether the device runs it
        has_offset = group_offset is not None
        tiles = describe_align(num_tokens, top_k, num_experts, block_m, has_offset=has_offset, unpermuted=unpermuted)
        config = choose_config(desc, in_one_cta=True)
        if reason := config_error(desc, config) or align_error(tiles, AlignConfig(config.num_warpgroups)):
            raise NotImplementedError(reason)
        if num_tokens > fused_tokens(desc.num_experts):
            return apart(name)

        from pallas_kernels.route.kernel_sm90 import route_and_align_sm90  # here: importing it loads Pallas

        rows, row_operands = (None, []) if tokens is None else describe_rows(**tokens)
        if rows is not None and not quantizes_beside(rows):
            rows, row_operands = None, []
        kernel = route_and_align_sm90(desc, config, tiles, rows)
        weights, ids, *found = kernel(*operands, *as_operands(group_offset), *row_operands)
        found, codes_and_scales = dict(zip(tiles.outputs, found, strict=False)), found[len(tiles.outputs) :]
        weights, ids, found["row_of"] = (a.reshape(-1, top_k) for a in (weights, ids, found["row_of"]))
        return Routed(weights, ids, TileMap(**found), *(codes_and_scales if rows else quantized(name)))

    runs = dict(
        hopper=lambda: kernel(hopper_sms(), "hopper"),
        portable=lambda: kernel(portable_sms(), "portable"),
        reference=lambda: apart("reference"),
    )
    return first_that_runs("route_and_align", runs, implementation)


def _describe(
    logits: jax.Array,
    top_k: int,
    scoring: str,
    renormalize: bool,
    scale: float,
    bias: jax.Array | None,
    num_groups: int,
    groups_kept: int,
    token_mask: jax.Array | None,
) -> tuple[RouteDesc, list[jax.Array]]:
    """Check the call once; operands come flat, as the kernel takes them."""
    is_sum = logits.ndim == 3 and logits.dtype == jnp.float32 and logits.shape[0] > 0
    if not is_sum and (logits.ndim != 2 or not jnp.issubdtype(logits.dtype, jnp.floating)):
        expected = "a float dtype and (T, E), or float32 and (P, T, E)"
        raise ValueError(f"logits is {logits.dtype}{logits.shape}, expected {expected}")
    num_tokens, num_experts = logits.shape[-2:]
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k={top_k}, expected 1 to {num_experts}, the number of experts")
    if scoring not in ("softmax", "sigmoid"):
        raise ValueError(f"scoring={scoring!r} is not one of 'softmax', 'sigmoid'")
    if bias is not None and (bias.shape != (num_experts,) or bias.dtype != jnp.float32):
        raise ValueError(f"bias is {bias.dtype}{bias.shape}, expected float32{(num_experts,)}")
    if token_mask is not None and (token_mask.shape != (num_tokens,) or token_mask.dtype != jnp.bool_):
        raise ValueError(f"token_mask is {token_mask.dtype}{token_mask.shape}, expected bool{(num_tokens,)}")
    if num_groups:
        if num_experts % num_groups or num_experts == num_groups:
            raise ValueError(f"num_groups={num_groups}: {num_experts} experts make no equal groups of two or more")
        if not 1 <= groups_kept <= num_groups or groups_kept * (num_experts // num_groups) < top_k:
            raise ValueError(
                f"groups_kept={groups_kept} of {num_groups} groups hold "
                f"{groups_kept * (num_experts // num_groups)} experts, top_k is {top_k}"
            )
    desc = RouteDesc(
        num_tokens=num_tokens,
        num_experts=num_experts,
        top_k=top_k,
        dtype=jnp.dtype(logits.dtype).name,
        scoring=scoring,
        renormalize=renormalize,
        scale=float(scale),
        has_bias=bias is not None,
        num_groups=num_groups,
        groups_kept=groups_kept,
        has_mask=token_mask is not None,
        num_parts=logits.shape[0] if is_sum else 1,
    )
    operands = [logits.reshape(-1)]
    operands += [] if bias is None else [bias]
    operands += [] if token_mask is None else [token_mask.astype(jnp.int32)]
    return desc, operands
