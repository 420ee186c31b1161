"""The Variables of ``FusedMoE``: their types, how they are made from arguments, and how new values get into them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer

from moe_jax._config import MoEConfig
from moe_jax._typing import ArrayArg
from moe_jax.quantization import ExpertWeights, method_for

CORRECTION_BIAS = "e_score_correction_bias"


class QuantizedParam(nnx.Variable[Any]):
    """Variable whose value is an ``ExpertWeights``; filter on it to keep an optimizer away from quantized leaves."""


class RoutingParam(nnx.Variable[Any]):
    """Variable for what routing reads besides logits: correction bias and scale (E,), hash table (vocab, top_k)."""


class WeightsVersion(nnx.Variable[Any]):
    """() int32, raised by each reload. A leaf and not an attribute, so a reload never changes the jit cache key."""


def routing_bias(value: ArrayArg | bool | None, config: MoEConfig, *, is_abstract: bool) -> RoutingParam | None:
    num_experts = config.num_experts
    if value is None:
        return None
    if value is True:
        return RoutingParam(
            jax.ShapeDtypeStruct((num_experts,), jnp.float32) if is_abstract else jnp.zeros((num_experts,), jnp.float32)
        )
    return RoutingParam(checked_bias(value, config))


def checked_bias(value: ArrayArg | bool, config: MoEConfig) -> jax.Array:
    num_experts, has_zero_experts = config.num_experts, config.zero_expert_type is not None
    bias = jnp.asarray(value).astype(jnp.float32)
    if bias.ndim != 1 or bias.shape[0] < num_experts or (bias.shape[0] > num_experts and not has_zero_experts):
        raise ValueError(f"{CORRECTION_BIAS} has shape {bias.shape}, expected ({num_experts},)")
    if not isinstance(bias, Tracer) and not np.isfinite(np.asarray(bias)).all():
        raise ValueError(f"{CORRECTION_BIAS} holds NaN or infinity; the checkpoint is damaged")
    return bias


def routing_table(value: ArrayArg | None, top_k: int, num_experts: int) -> RoutingParam | None:
    if value is None:
        return None
    table = jnp.asarray(value)
    is_table = table.ndim == 2 and table.shape[0] > 0 and table.shape[1] == top_k
    if not is_table or not jnp.issubdtype(table.dtype, jnp.integer):
        raise ValueError(
            f"hash_indices_table is {table.dtype} {table.shape}, expected integers of shape (vocab, {top_k}) with a row"
        )
    if not isinstance(table, Tracer):
        bad = (wrong := np.asarray(table))[(wrong < 0) | (wrong >= num_experts)]
        if bad.size:
            raise ValueError(f"hash_indices_table holds {bad[0]}, expected ids of experts from 0 to {num_experts - 1}")
    return RoutingParam(table)


def routing_scale(value: ArrayArg | None, num_experts: int) -> RoutingParam | None:
    if value is None:
        return None
    scale = jnp.asarray(value).astype(jnp.float32)
    if scale.shape != (num_experts,):
        raise ValueError(f"per_expert_scale has shape {scale.shape}, expected ({num_experts},)")
    if not isinstance(scale, Tracer) and not np.isfinite(np.asarray(scale)).all():
        raise ValueError("per_expert_scale holds NaN or infinity, expected finite numbers; the checkpoint is damaged")
    return RoutingParam(scale)


def init_weights(config: MoEConfig, key: jax.Array) -> ExpertWeights:
    """Normal with variance 1/K, quantized by the scheme; biases zero."""
    e, g, h, i = config.num_experts, config.num_projections, config.hidden_size, config.intermediate_size
    key13, key2 = jax.random.split(key)
    w13 = jax.random.normal(key13, (e, g, i, h), jnp.float32) * h**-0.5
    w2 = jax.random.normal(key2, (e, h, i), jnp.float32) * i**-0.5
    method = method_for(config.scheme)
    biases = None
    if config.has_bias:
        biases = (jnp.zeros((e, g, i), config.param_dtype), jnp.zeros((e, h), config.param_dtype))
    return method.process_weights_after_loading(method.quantize_leaves(w13, w2, biases, config), config)


def signature(weights: ExpertWeights) -> ExpertWeights:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), weights)
