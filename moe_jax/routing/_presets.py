"""Custom routing functions of known models, by name, with vLLM's calling convention.

Each takes ``(hidden_states, gating_output, topk, renormalize)``: gating_output (T, E) float logits; hidden_states is
not looked at. Each returns weights (T, topk) float32 and ids (T, topk) int32, ties to the lower index. A NaN logit
scores 0.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from moe_jax._typing import AnyArray, Array, Float
from moe_jax.routing._scores import PLAIN_FLOOR, divide_by_sum, is_finite_row, scores, top_k
from moe_jax.routing._select import plain_top_k

# Phi's router drops experts whose relative distance to the best logit exceeds twice this.
_PHI_JITTER = 0.01


def check_phi_sparsemixer(topk: int, renormalize: bool) -> None:
    if topk != 2 or renormalize:
        raise ValueError(
            f"phi_sparsemixer needs top_k=2 and renormalize=False, found top_k={topk} and renormalize={renormalize}"
        )


def check_interns1_pro(num_experts: int, topk: int, groups: int) -> None:
    if num_experts % groups or topk % groups:
        raise ValueError(
            f"interns1_pro needs num_experts and top_k to be multiples of num_expert_group={groups}, "
            f"found num_experts={num_experts}, top_k={topk}"
        )


def llama4(
    hidden_states: AnyArray | None, gating_output: Float[Array, "T E"], topk: int, renormalize: bool
) -> tuple[Array, Array]:
    """Top-k of the logits, weight sigmoid(logit). Never renormalizes, whatever ``renormalize`` says."""
    logits = gating_output.astype(jnp.float32)
    chosen, ids = top_k(jnp.where(jnp.isnan(logits), -jnp.inf, logits), topk)
    return jax.nn.sigmoid(chosen), ids


def cohere2(
    hidden_states: AnyArray | None, gating_output: Float[Array, "T E"], topk: int, renormalize: bool
) -> tuple[Array, Array]:
    """Cohere2-MoE: top-k of sigmoid scores, optionally renormalized."""
    return plain_top_k(gating_output.astype(jnp.float32), topk, "sigmoid", renormalize)


def phi_sparsemixer(
    hidden_states: AnyArray | None, gating_output: Float[Array, "T E"], topk: int, renormalize: bool
) -> tuple[Array, Array]:
    """Phi-MoE: two picks, each weighed by a softmax over the experts close to the pick.

    An expert is close to the pick m when ``(m - z) / max(|z|, m) <= 2 * 0.01``; the second pick and its softmax leave
    the first pick out. Raises ValueError unless topk is 2 and renormalize False.
    """
    check_phi_sparsemixer(topk, renormalize)
    logits = gating_output.astype(jnp.float32)
    is_valid = is_finite_row(logits)
    logits = jnp.where(is_valid, logits, 0.0)
    experts = lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)

    weights, ids, candidates = [], [], logits
    for _ in range(2):
        fixed = lax.stop_gradient(candidates)
        _, pick = top_k(fixed, 1)
        largest = jnp.take_along_axis(fixed, pick, axis=-1)
        # The ratio above, multiplied out: a row whose largest logit is 0 would divide 0 by 0.
        is_far = largest - logits > 2.0 * _PHI_JITTER * jnp.maximum(jnp.abs(logits), largest)
        share = scores(jnp.where(lax.stop_gradient(is_far), -jnp.inf, candidates), "softmax")
        weights.append(jnp.take_along_axis(share, pick, axis=-1))
        ids.append(pick)
        candidates = jnp.where(experts == pick, -jnp.inf, candidates)
    return jnp.where(is_valid, jnp.concatenate(weights, axis=-1), 0.0), jnp.concatenate(ids, axis=-1)


def gemma4(
    hidden_states: AnyArray | None,
    gating_output: Float[Array, "T E"],
    topk: int,
    renormalize: bool,
    per_expert_scale: Float[Array, "E"] | None = None,
) -> tuple[Array, Array]:
    """Gemma-4: softmax, top-k, always renormalized, times a learned scale per expert, (E,), read as 1 when None."""
    weights, ids = plain_top_k(gating_output.astype(jnp.float32), topk, "softmax", renormalize=True)
    if per_expert_scale is not None:
        weights = weights * per_expert_scale.astype(jnp.float32)[ids]
    return weights, ids


def interns1_pro(
    hidden_states: AnyArray | None,
    gating_output: Float[Array, "T E"],
    topk: int,
    renormalize: bool,
    num_expert_group: int | None = None,
) -> tuple[Array, Array]:
    """InternS1-Pro: softmax over all, then the best topk / G of each of G contiguous groups, group by group.

    num_expert_group: G, 1 when None; E and topk must be multiples of it (ValueError).
    """
    groups = num_expert_group or 1
    num_experts = gating_output.shape[-1]
    check_interns1_pro(num_experts, topk, groups)
    score = scores(gating_output.astype(jnp.float32), "softmax")
    weights, ids = top_k(score.reshape(*score.shape[:-1], groups, num_experts // groups), topk // groups)
    ids = ids + jnp.arange(groups, dtype=jnp.int32)[:, None] * (num_experts // groups)
    weights, ids = (a.reshape(*score.shape[:-1], topk) for a in (weights, ids))
    return (divide_by_sum(weights, PLAIN_FLOOR) if renormalize else weights), ids


ROUTING_PRESETS: dict[str, Callable[..., tuple[Array, Array]]] = {
    f.__name__: f for f in (llama4, cohere2, phi_sparsemixer, gemma4, interns1_pro)
}
