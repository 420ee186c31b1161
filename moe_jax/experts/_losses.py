"""Auxiliary losses of routers, computed from what a call with ``return_stats=True`` returns."""

from typing import Any

import jax
import jax.numpy as jnp

from moe_jax._arguments import boolean, integer
from moe_jax._typing import Array, Bool, Float, Int
from moe_jax.experts._fused_moe import MoEStats
from moe_jax.routing._scores import scores


def load_balancing_loss(stats: Any, *, per_layer: Any = False) -> Float[Array, ""]:
    """The load-balancing loss of Switch Transformer: E * sum over experts of (rows per token) * (mean probability).

    It is top_k where all experts have as many rows and equal probabilities, and more where they do not. Gradients flow
    through the probabilities, a softmax of the router's logits; the rows of an expert are constants. A token that has
    no expert, as padding has none, counts for nothing. Over a mesh the means are those of all devices.

    Args:
        stats: ``MoEStats`` of a layer or of a model.
        per_layer: False takes the tokens of all layers together, as transformers' ``load_balancing_loss_func`` does:
            then layers may lean towards different experts. True gives the mean of the layers' own losses.

    Returns:
        () float32; 0 without tokens. Add it to the loss times a small factor, ``router_aux_loss_coef`` of config.json.

    Raises:
        ValueError: stats without router logits, or with shapes that contradict each other. TypeError: of another type.
    """
    per_layer = boolean("per_layer", per_layer)
    logits, ids, is_token = _of_layers(stats)
    parts = _sums(scores(logits, "softmax"), ids, is_token)
    if not per_layer:
        parts = tuple(part.sum(axis=0, keepdims=True) for part in parts)
    return _balance(*parts)


def sequence_balance_loss(stats: Any, batch_size: Any, *, scoring_func: str = "sigmoid") -> Float[Array, ""]:
    """The balance loss of DeepSeek-V2 and V3 within each sequence: the mean over layers and sequences of
    E / top_k * sum over experts of (rows per token) * (mean score), where the scores of a token add up to 1.

    It is 1 where all experts have as many rows and equal scores. Otherwise as ``load_balancing_loss``. Sequences that
    are packed into one row of a batch count as one.

    Args:
        stats: ``MoEStats`` of a layer or of a model, whose tokens are those of the rows of a batch, one after another.
        batch_size: rows of that batch.
        scoring_func: of the router, "sigmoid" (V3) or "softmax" (V2).

    Raises:
        ValueError: as ``load_balancing_loss``, tokens that do not divide into rows, or another scoring function.
    """
    logits, ids, is_token = _of_layers(stats)
    batch_size = integer("batch_size", batch_size, minimum=1)
    num_layers, num_tokens, num_experts = logits.shape
    if num_tokens % batch_size:
        raise ValueError(f"batch_size={batch_size} does not divide the {num_tokens} tokens of a layer")
    score = scores(logits, scoring_func)
    total = score.sum(axis=-1, keepdims=True)
    score = jnp.where(total > 0, score / jnp.where(total > 0, total, 1.0), 0.0)
    groups = (num_layers * batch_size, num_tokens // batch_size)
    parts = _sums(score.reshape(*groups, num_experts), ids.reshape(*groups, -1), is_token.reshape(groups))
    return _balance(*parts) / ids.shape[-1]


def router_z_loss(stats: Any) -> Float[Array, ""]:
    """The router z-loss of ST-MoE: the mean over tokens and layers of log(sum over experts of exp(logit)) squared.

    It keeps the logits of routers small. Tokens without an expert count for nothing. Add it to the loss times a small
    factor; ST-MoE takes 0.001.

    Args:
        stats: ``MoEStats`` of a layer or of a model.

    Returns:
        () float32; 0 without tokens. Errors are those of ``load_balancing_loss``.
    """
    logits, _, is_token = _of_layers(stats)
    squares = jax.nn.logsumexp(logits, axis=-1) ** 2
    return jnp.where(is_token, squares, 0.0).sum() / jnp.maximum(is_token.sum(dtype=jnp.float32), 1.0)


def _of_layers(stats: Any) -> tuple[Float[Array, "N T E"], Int[Array, "N T k"], Bool[Array, "N T"]]:
    """(router logits in float32, experts, whether a token has one) of N layers; logits of other tokens are 0."""
    if not isinstance(stats, MoEStats):
        raise TypeError(f"stats has type {type(stats).__name__}, expected MoEStats of a call")
    if stats.router_logits is None:
        raise ValueError("stats has no router_logits, which losses are computed from; take those of a call")
    logits, ids = jnp.asarray(stats.router_logits, jnp.float32), jnp.asarray(stats.topk_ids)
    if logits.ndim not in (2, 3) or logits.shape[:-1] != ids.shape[:-1]:
        raise ValueError(
            f"stats has router_logits {logits.shape} and topk_ids {ids.shape}, expected (T, E) and (T, top_k), or both "
            "with an axis of layers before"
        )
    if logits.ndim == 2:
        logits, ids = logits[None], ids[None]
    is_token = (ids >= 0).any(axis=-1)
    return jnp.where(is_token[..., None], logits, 0.0), ids, is_token


def _sums(score: Array, ids: Array, is_token: Array) -> tuple[Array, Array, Array]:
    """Of each group of tokens: rows per expert and sum of scores per expert, (N, E), and the number of tokens, (N,)."""
    num_groups, _, num_experts = score.shape
    groups = jnp.broadcast_to(jnp.arange(num_groups)[:, None, None], ids.shape)
    index = jnp.where(ids >= 0, ids, num_experts)
    rows = jnp.zeros((num_groups, num_experts), jnp.float32).at[groups, index].add(1.0, mode="drop")
    return rows, jnp.where(is_token[..., None], score, 0.0).sum(axis=1), is_token.sum(axis=1, dtype=jnp.float32)


def _balance(rows: Array, score: Array, count: Array) -> Array:
    """Mean over the groups that have tokens."""
    safe = jnp.maximum(count, 1.0)[:, None]
    losses = rows.shape[1] * ((rows / safe) * (score / safe)).sum(axis=1)
    return losses.sum() / jnp.maximum((count > 0).sum(dtype=jnp.float32), 1.0)
