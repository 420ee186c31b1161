"""Routed experts of a run, recorded and replayed: the choice is taken over, the weights follow the logits at hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax._arguments import check_array, integer
from moe_jax._pytrees import pytree
from moe_jax._typing import AnyArray, Array, Float, Int, Leaf
from moe_jax.routing._config import RoutingConfig
from moe_jax.routing._scores import BIASED_FLOOR, PLAIN_FLOOR, divide_by_sum, is_finite_row, scores

_MOST_EXPERTS_IN_INT16 = np.iinfo(np.int16).max + 1


@pytree
@dataclasses.dataclass(frozen=True, repr=False)
class RoutedExperts:
    """The logical experts of every token in every layer, a pytree that the caller threads through ``jax.jit``.

    Record ``MoEStats.topk_ids`` of a run, then give ``replayed_ids=`` to the same layers: they send every token to the
    same experts, whatever their logits say now. With the same logits the output is the same, bit for bit; with those of
    a model in training the weights are the training model's.

    Example:
        >>> import jax.numpy as jnp
        >>> from moe_jax.routing import RoutedExperts
        >>> routed = RoutedExperts.create(num_tokens=3, num_layers=1, num_experts=8, top_k=2)
        >>> routed = routed.record(jnp.array([[5, 1], [0, 7]]), layer=0, first_token=1)
        >>> routed.of_layer(0).tolist()
        [[-1, -1], [5, 1], [0, 7]]

    Attributes:
        ids: (tokens, layers, top_k) int16, with more than 32768 experts int32; -1 where nothing was recorded.
    """

    ids: Leaf

    @classmethod
    def create(cls, num_tokens: int, num_layers: int, num_experts: int, top_k: int) -> "RoutedExperts":
        """Room for ``num_tokens`` tokens, in which nothing is recorded."""
        sizes = dict(num_tokens=num_tokens, num_layers=num_layers, top_k=top_k)
        shape = tuple(integer(name, size, minimum=1) for name, size in sizes.items())
        is_small = integer("num_experts", num_experts, minimum=1) <= _MOST_EXPERTS_IN_INT16
        return cls(jnp.full(shape, -1, jnp.int16 if is_small else jnp.int32))

    def record(
        self, topk_ids: Int[Array, "T top_k"], layer: int | AnyArray, first_token: int | AnyArray = 0
    ) -> "RoutedExperts":
        """Write one layer's ids of the tokens from ``first_token`` on; what lies past the end is dropped.

        topk_ids: (T, top_k) int. layer, first_token: int or () int32. Raises ValueError for another top_k.
        """
        check_array("topk_ids", topk_ids, jnp.integer, f"(T, {self.ids.shape[2]})")
        if topk_ids.ndim != 2 or topk_ids.shape[1] != self.ids.shape[2]:
            raise ValueError(f"topk_ids has shape {topk_ids.shape}, expected (T, {self.ids.shape[2]})")
        tokens = first_token + jnp.arange(topk_ids.shape[0])
        return RoutedExperts(self.ids.at[tokens, layer].set(jnp.asarray(topk_ids).astype(self.ids.dtype), mode="drop"))

    def of_layer(self, layer: int | AnyArray) -> Int[Array, "tokens top_k"]:
        """(tokens, top_k) int32: what ``replayed_ids`` takes; slice it for a part of the tokens."""
        return self.ids[:, layer].astype(jnp.int32)


def replayed_top_k(
    logits: Float[Array, "T E"], ids: Int[Array, "T top_k"], config: RoutingConfig, *, is_plain: bool
) -> tuple[Array, Array]:
    """Weights of given experts as the router of ``config`` computes them for experts that it chose itself.

    logits: (T, E) float32. ids: (T, top_k); those outside [0, E) get weight 0. is_plain: no groups, no bias and no hash
    table take part in the choice. Returns (weights (T, top_k) float32, ids int32).
    """
    is_expert = (ids >= 0) & (ids < logits.shape[-1])
    ids = jnp.where(is_expert, ids, -1).astype(jnp.int32)
    at = jnp.where(is_expert, ids, 0)
    if is_plain and config.renormalize and config.scoring_func == "softmax":
        is_valid = is_finite_row(logits)
        chosen = jnp.take_along_axis(jnp.where(is_valid, logits, 0.0), at, axis=-1, mode="promise_in_bounds")
        has_expert = is_expert.any(axis=-1, keepdims=True)
        chosen = jnp.where(is_expert, chosen, jnp.where(has_expert, -jnp.inf, 0.0))
        return jnp.where(is_valid & is_expert, jax.nn.softmax(chosen, axis=-1), 0.0), ids
    score = scores(logits, config.scoring_func)
    weights = jnp.where(is_expert, jnp.take_along_axis(score, at, axis=-1, mode="promise_in_bounds"), 0.0)
    if config.renormalize:
        weights = divide_by_sum(weights, PLAIN_FLOOR if is_plain else BIASED_FLOOR)
    return weights, ids


def check_replay(ids: AnyArray, num_tokens: int, config: RoutingConfig) -> None:
    """Raise unless ids are (T, top_k) integers and the router's weights are a function of logits and ids."""
    if config.custom_routing_function is not None or config.zero_expert_type is not None:
        other = "custom_routing_function" if config.custom_routing_function is not None else "zero_expert_type"
        raise ValueError(
            f"replayed_ids with {other}: the weights do not follow from logits and ids; record the weights too and "
            "call fused_experts(x, topk_weights, topk_ids, ...)"
        )
    expected = (num_tokens, config.top_k)
    check_array("replayed_ids", ids, jnp.integer, f"{expected}")
    if ids.shape != expected:
        raise ValueError(f"replayed_ids has shape {ids.shape}, expected {expected}")
