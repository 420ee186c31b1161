"""Leaves of a layer that routing reads besides logits, made from what the constructor or a checkpoint brings."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer

from moe_jax._config import MoEConfig
from moe_jax.loading._layer_loader import CORRECTION_BIAS


class RoutingParam(nnx.Variable):
    """Variable for what routing reads besides logits: correction bias and scale (E,), hash table (vocab, top_k)."""


def make_correction_bias(value: Any, config: MoEConfig, *, is_abstract: bool) -> RoutingParam | None:
    """None, or the leaf (E,) f32 for an array or for True, which is to be loaded."""
    num_experts = config.num_experts
    if value is None:
        return None
    if value is True:
        return RoutingParam(
            jax.ShapeDtypeStruct((num_experts,), jnp.float32) if is_abstract else jnp.zeros((num_experts,), jnp.float32)
        )
    return RoutingParam(checked_bias(value, config))


def checked_bias(value: Any, config: MoEConfig) -> jax.Array:
    """A bias as float32: (E,), with zero experts (E + Z,), finite as far as values are known."""
    num_experts, has_zero_experts = config.num_experts, config.zero_expert_type is not None
    bias = jnp.asarray(value).astype(jnp.float32)
    if bias.ndim != 1 or bias.shape[0] < num_experts or (bias.shape[0] > num_experts and not has_zero_experts):
        raise ValueError(f"{CORRECTION_BIAS} has shape {bias.shape}, expected ({num_experts},)")
    if not isinstance(bias, Tracer) and not np.isfinite(np.asarray(bias)).all():
        raise ValueError(f"{CORRECTION_BIAS} holds NaN or infinity; the checkpoint is damaged")
    return bias


def make_hash_table(value: Any, top_k: int) -> RoutingParam | None:
    """None, or the leaf (vocab, top_k), any integer dtype."""
    if value is None:
        return None
    table = jnp.asarray(value)
    if table.ndim != 2 or table.shape[1] != top_k or not jnp.issubdtype(table.dtype, jnp.integer):
        raise ValueError(
            f"hash_indices_table is {table.dtype} {table.shape}, expected integers of shape (vocab, {top_k})"
        )
    return RoutingParam(table)


def make_per_expert_scale(value: Any, num_experts: int) -> RoutingParam | None:
    """None, or the leaf (E,) f32."""
    if value is None:
        return None
    scale = jnp.asarray(value).astype(jnp.float32)
    if scale.shape != (num_experts,):
        raise ValueError(f"per_expert_scale has shape {scale.shape}, expected ({num_experts},)")
    return RoutingParam(scale)
