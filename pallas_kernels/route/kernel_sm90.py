"""Top-k of router scores: one warp a token, its logits in registers, top_k rounds of maximum and lowest index.

    load the row (four logits a thread), columns past E as -inf
    scores; with groups: what each is worth, and which are kept
    top_k times:  maximum -> lowest column that holds it -> its weight -> take it out
    renormalize, scale, store

A round is two reductions over the warp (five shuffles each). Tokens past the end are computed from -inf and not stored.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common import mosaic, simt
from pallas_kernels.common.rows import GROUP_LAYOUT
from pallas_kernels.route.config import TOKENS_PER_BLOCK, RouteDesc


def route_sm90(desc: RouteDesc) -> Callable[..., Any]:
    """The kernel: (logits (T, E), [bias (E,)]) -> (weights (T, top_k) f32, ids (T, top_k) i32). For descs without error."""
    shape = (desc.num_tokens, desc.top_k)
    return plgpu.kernel(
        functools.partial(_kernel, desc),
        out_type=[jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct(shape, jnp.int32)],
        grid=(-(-desc.num_tokens // TOKENS_PER_BLOCK),),
        grid_names=("block",),
        num_threads=1,
        thread_name="warpgroup",
        compiler_params=mosaic.compiler_params(),
    )


def _kernel(desc: RouteDesc, logits: Any, *rest: Any) -> None:
    *bias, weights_out, ids_out = rest
    rows = Rows(desc)
    z = simt.load_rows(logits, rows.shape, desc.num_experts, desc.num_tokens, -jnp.inf)
    takes_logits = desc.scoring == "softmax" and desc.renormalize and not desc.has_bias and not desc.num_groups
    if desc.scoring == "softmax":
        largest = rows.max(jnp.where(z == z, z, jnp.full_like(z, jnp.inf)))
        is_valid = jnp.where((largest < jnp.inf) & (largest > -jnp.inf), 1.0, jnp.zeros_like(largest))
        is_inside = jnp.where(rows.is_inside, jnp.zeros_like(z), jnp.full_like(z, -jnp.inf))
        z = jnp.where(rows.spread(is_valid) > 0.0, z, is_inside)
        largest = jnp.where(is_valid > 0.0, largest, jnp.zeros_like(largest))
        powers = jnp.exp(z - rows.spread(largest))
        score = powers * rows.spread(is_valid / rows.sum(powers))
    else:
        is_valid = None
        score = jnp.where(z == z, lax.logistic(z), jnp.zeros_like(z))
    choice = z if takes_logits else score
    if bias:
        choice = choice + simt.load_rows(bias[0], rows.shape, desc.num_experts, None, -jnp.inf)
    choice = jnp.where(rows.is_inside, choice, jnp.full_like(choice, -jnp.inf))
    if desc.num_groups:
        choice = _in_best_groups(desc, rows, choice)

    ids, weights = [], []
    is_free = jnp.where(rows.is_inside, jnp.ones_like(choice), jnp.zeros_like(choice))
    nowhere = jnp.full_like(rows.column, rows.shape[1])
    for _ in range(desc.top_k):
        best = rows.max(jnp.where(is_free > 0.0, choice, jnp.full_like(choice, -jnp.inf)))
        holds = (choice == rows.spread(best)) & (is_free > 0.0)
        index = rows.min(jnp.where(holds, rows.column, nowhere))
        is_taken = rows.column == rows.spread(index)
        ids.append(index)
        weights.append(best if takes_logits else rows.sum(jnp.where(is_taken, score, jnp.zeros_like(score))))
        is_free = jnp.where(is_taken, jnp.zeros_like(is_free), is_free)

    if takes_logits:
        weights = [jnp.exp(w - weights[0]) for w in weights]
        factor = is_valid * (desc.scale / functools.reduce(lambda a, b: a + b, weights))
        weights = [w * factor for w in weights]
    elif desc.renormalize:
        total = functools.reduce(lambda a, b: a + b, weights)
        factor = desc.scale / jnp.maximum(total, desc.floor)
        weights = [w * factor for w in weights]
    elif desc.scale != 1.0:
        weights = [w * desc.scale for w in weights]
    for slot, (weight, index) in enumerate(zip(weights, ids, strict=True)):
        simt.store_rows(weights_out, slot, weight, desc.num_tokens)
        simt.store_rows(ids_out, slot, index, desc.num_tokens)


class Rows:
    """Reductions over the columns of (4, C) arrays in GROUP_LAYOUT, and back."""

    def __init__(self, desc: RouteDesc):
        self.shape = (TOKENS_PER_BLOCK, -(-desc.num_experts // 128) * 128)
        self.column = plgpu.broadcasted_iota(jnp.int32, self.shape, 1, layout=GROUP_LAYOUT)
        self.is_inside = self.column < desc.num_experts

    def spread(self, values: Any) -> Any:
        return lax.broadcast_in_dim(values, self.shape, [0])

    def max(self, values: Any) -> Any:
        return jnp.max(values, axis=1)

    def min(self, values: Any) -> Any:
        return jnp.min(values, axis=1)

    def sum(self, values: Any) -> Any:
        return jnp.sum(values, axis=1)


def _in_best_groups(desc: RouteDesc, rows: Rows, choice: Any) -> Any:
    """choice with -inf in all groups but the ``groups_kept`` that are worth most; ties go to the lower group."""
    size = desc.num_experts // desc.num_groups
    group = lax.div(rows.column, jnp.full_like(rows.column, size))
    nothing = jnp.full_like(choice, -jnp.inf)
    worth = []
    for g in range(desc.num_groups):
        own = jnp.where(group == g, choice, nothing)
        largest = rows.max(own)
        if not desc.has_bias:
            worth.append(largest)
            continue
        first = rows.min(jnp.where(own == rows.spread(largest), rows.column, jnp.full_like(rows.column, 1 << 20)))
        worth.append(largest + rows.max(jnp.where(rows.column == rows.spread(first), nothing, own)))
    kept = jnp.zeros_like(choice)
    for g, own in enumerate(worth):
        better = jnp.zeros_like(own)
        for h, other in enumerate(worth):
            if h != g:
                wins = (other > own) | (other == own) if h < g else other > own
                better = better + jnp.where(wins, jnp.ones_like(own), jnp.zeros_like(own))
        is_kept = jnp.where(better < desc.groups_kept, jnp.ones_like(own), jnp.zeros_like(own))
        kept = jnp.where(group == g, rows.spread(is_kept), kept)
    return jnp.where(kept > 0.0, choice, nothing)
