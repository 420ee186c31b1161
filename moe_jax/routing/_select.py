"""The routers: float32 logits (T, E) in, weights (T, top_k) f32 and ids (T, top_k) int32 out, no scaling factor yet."""

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax._typing import Array, Float, Int
from moe_jax.routing._scores import BIASED_FLOOR, PLAIN_FLOOR, divide_by_sum, is_finite_row, scores, top_k

Selection = tuple[Array, Array]


def plain_top_k(logits: Float[Array, "T E"], k: int, scoring_func: str, renormalize: bool) -> Selection:
    """Top-k of the scores.

    "softmax, top-k, renormalize" and "top-k, softmax over those" are one function of the logits. The second form is
    used: it also orders and weighs experts whose softmax over all of the row underflows.
    """
    if renormalize and scoring_func == "softmax":
        is_valid = is_finite_row(logits)
        chosen, ids = top_k(jnp.where(is_valid, logits, 0.0), k)
        return jnp.where(is_valid, jax.nn.softmax(chosen, axis=-1), 0.0), ids
    weights, ids = top_k(scores(logits, scoring_func), k)
    return (divide_by_sum(weights, PLAIN_FLOOR) if renormalize else weights), ids


def biased_top_k(
    logits: Float[Array, "T E"], bias: Float[Array, "E"], k: int, scoring_func: str, renormalize: bool
) -> Selection:
    """Top-k of score + bias, weighed by the unbiased scores: weights need not descend."""
    score = scores(logits, scoring_func)
    _, ids = top_k(lax.stop_gradient(score + bias), k)
    return _weigh(score, ids, renormalize)


def hashed_top_k(
    logits: Float[Array, "T E"],
    table: Int[Array, "vocab top_k"],
    token_ids: Int[Array, "T"],
    scoring_func: str,
    renormalize: bool,
) -> Selection:
    """Ids from ``table[token_ids]``, weights from the scores. A token id outside the table selects nothing (-1, 0)."""
    score = scores(logits, scoring_func)
    in_table = (token_ids >= 0) & (token_ids < table.shape[0])
    ids = jnp.where(in_table[:, None], table[jnp.where(in_table, token_ids, 0)].astype(jnp.int32), -1)
    is_valid = (ids >= 0) & (ids < logits.shape[-1])
    weights = jnp.where(is_valid, _gather(score, jnp.where(is_valid, ids, 0)), 0.0)
    return (divide_by_sum(weights, BIASED_FLOOR) if renormalize else weights), ids


def is_valid_grouping(num_experts: int, num_groups: int) -> bool:
    """Groups of equal size with more than one expert each; anything else is routed without groups."""
    return num_experts > num_groups and num_experts % num_groups == 0


def grouped_top_k(
    logits: Float[Array, "T E"],
    bias: Float[Array, "E"] | None,
    k: int,
    scoring_func: str,
    renormalize: bool,
    num_groups: int,
    groups_kept: int,
) -> Selection:
    """Top-k inside the ``groups_kept`` best of ``num_groups`` contiguous groups (DeepSeek-V2 and V3).

    A group is worth its largest score, or with a bias the sum of its two largest biased scores. The bias steers both
    choices; weights are the unbiased scores.
    """
    score = scores(logits, scoring_func)
    choice = lax.stop_gradient(score if bias is None else score + bias)
    grouped = choice.reshape(*choice.shape[:-1], num_groups, choice.shape[-1] // num_groups)
    _, kept = top_k(grouped.max(axis=-1) if bias is None else _sum_of_top_two(grouped), groups_kept)
    is_kept = (kept[..., None] == jnp.arange(num_groups, dtype=kept.dtype)).any(axis=-2)
    _, ids = top_k(jnp.where(is_kept[..., None], grouped, -jnp.inf).reshape(choice.shape), k)
    return _weigh(score, ids, renormalize)


def _sum_of_top_two(values: Array) -> Array:
    # Two maxima instead of a top-2: a reduction fuses where a sort does not.
    largest = values.max(axis=-1, keepdims=True)
    is_largest = values == largest
    second = jnp.where(is_largest, -jnp.inf, values).max(axis=-1)
    is_tied = is_largest.sum(axis=-1, dtype=jnp.int32) > 1
    return largest[..., 0] + jnp.where(is_tied, largest[..., 0], second)


def _weigh(score: Array, ids: Array, renormalize: bool) -> Selection:
    weights = _gather(score, ids)
    return (divide_by_sum(weights, BIASED_FLOOR) if renormalize else weights), ids


def _gather(score: Array, ids: Array) -> Array:
    return jnp.take_along_axis(score, ids, axis=-1, mode="promise_in_bounds")
