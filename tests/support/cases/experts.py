"""Layers of experts for tests: configs, random weights in any scheme, routing that visits every expert."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax import MoEConfig, Scheme
from moe_jax.quantization import SCHEMES, method_for

# Just off multiples of 8 and 128: two ragged blocks along H and along I.
E, K, H, I = 5, 2, 152, 136  # noqa: E741


def make_config(scheme="bf16", *, dtype="float32", **options):
    defaults = dict(num_experts=E, top_k=K, hidden_size=H, intermediate_size=I, param_dtype="float32")
    return MoEConfig(**(defaults | options), scheme=Scheme.parse(scheme), dtype=dtype)


@functools.cache
def make_weights(config, seed=0):
    """Random ``ExpertWeights``: every expert, half and row has a scale of its own, so that no mix-up stays unseen."""
    rng = np.random.default_rng(seed)
    e, g, i, h = config.num_experts, config.num_projections, config.intermediate_size, config.hidden_size

    def matrices(shape):
        w = rng.standard_normal(shape) * rng.uniform(0.5, 2.0, (*shape[:-1], 1)) / np.sqrt(shape[-1])
        return jnp.asarray(w * rng.uniform(0.5, 2.0, (e,) + (1,) * (len(shape) - 1)), config.param_dtype)

    biases = None
    if config.has_bias:
        biases = tuple(jnp.asarray(rng.standard_normal(s) * 0.3, config.param_dtype) for s in ((e, g, i), (e, h)))
    scheme = config.scheme
    method = method_for(scheme)
    acts = scheme.activations
    is_static = acts is not None and not acts.dynamic
    online = method_for("fp8_tensor") if is_static else method
    leaves = online.quantize_leaves(matrices((e, g, i, h)), matrices((e, h, i)), biases, config)
    if is_static:
        # Small enough that the largest activations are clipped.
        leaves["w13_input_scale"] = jnp.asarray(rng.uniform(1.5, 2.5, (e, g)) / 448, jnp.float32)
        leaves["w2_input_scale"] = jnp.asarray(rng.uniform(2.0, 4.0, (e,)) / 448, jnp.float32)
    return method.process_weights_after_loading(leaves, config)


def make_stored_weights(config):
    """``make_weights``, for schemes that only checkpoints have too: calibrated global scales (NVFP4), act-order."""
    acts = config.scheme.activations
    if config.scheme.weights is not None and config.scheme.weights.actorder:
        return _in_an_order(config)
    if acts is not None and acts.global_scale in ("divides", "multiplies"):
        return _calibrated(config)
    return make_weights(config)


def with_nan(weights, name, expert=0):
    """One e4m3 code of an expert's w13 or w2 replaced by NaN."""
    tensor = getattr(weights, name)
    bits = jax.lax.bitcast_convert_type(tensor.data, jnp.uint8)
    at = (expert, *[0] * (bits.ndim - 3), 5, 7)
    data = jax.lax.bitcast_convert_type(bits.at[at].set(0x7F), tensor.data.dtype)
    return dataclasses.replace(weights, **{name: dataclasses.replace(tensor, data=data)})


def _in_an_order(config):
    """The codes of the scheme without act-order, their columns given to the groups at random."""
    scheme = config.scheme
    by_position = dataclasses.replace(scheme, weights=dataclasses.replace(scheme.weights, actorder=False))
    weights = make_weights(dataclasses.replace(config, scheme=Scheme.parse(by_position)))
    rng, changes = np.random.default_rng(3), {}
    for name in ("w13", "w2"):
        tensor = getattr(weights, name)
        g_idx = np.tile(np.arange(tensor.shape[-1]) // scheme.weights.group_size, (config.num_experts, 1))
        g_idx = jnp.asarray(rng.permuted(g_idx, axis=1), jnp.int32)
        changes[name] = dataclasses.replace(tensor, fmt=scheme.weights, g_idx=g_idx)
    return dataclasses.replace(weights, scheme=scheme, **changes)


def _calibrated(config):
    """The weights of the dynamic scheme with stored global scales for inputs; ranges that clip nothing."""
    acts = config.scheme.activations
    weights = make_weights(dataclasses.replace(config, scheme=SCHEMES["nvfp4_dynamic"]))
    divides = acts.global_scale == "divides"
    scale = jnp.float32(2688.0 / 40.0 if divides else 40.0 / 2688.0)
    changes = {}
    for name in ("w13", "w2"):
        tensor = getattr(weights, name)
        global_scale = tensor.global_scale if divides else 1.0 / tensor.global_scale
        changes[name] = dataclasses.replace(
            tensor, fmt=config.scheme.weights, global_scale=global_scale, input_scale=scale
        )
    return dataclasses.replace(weights, scheme=config.scheme, **changes)


def make_routing(num_tokens, top_k=K, num_experts=E, seed=1):
    """(topk_weights, topk_ids): expert e alone serves token e; expert 1 takes most of the rest, the last expert nothing
    else; some slots hold -1 or ids past the end, with weights that must not count."""
    rng = np.random.default_rng(seed)
    ids = rng.choice([0, 1, 1, 1, 1, 1, *range(2, num_experts - 1)], (num_tokens, top_k)).astype(np.int32)
    ids[rng.random(ids.shape) < 0.15] = -1
    ids[rng.random(ids.shape) < 0.05] = num_experts + 2
    ids[:num_experts] = -1
    for expert in range(min(num_experts, num_tokens)):
        ids[expert, expert % top_k] = expert
    weights = rng.uniform(0.1, 1.0, ids.shape).astype(np.float32)
    weights[(ids < 0) | (ids >= num_experts)] = np.nan
    return jnp.asarray(weights), jnp.asarray(ids)


def make_tokens(num_tokens, config, seed=2, dtype="float32"):
    """x (T, H): rows of very different magnitude, one of zeros."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((num_tokens, config.hidden_size)) * 2.0 ** rng.integers(-3, 2, (num_tokens, 1))
    x[num_tokens // 2] = 0.0
    return jnp.asarray(x, dtype)


def make_call(config, num_tokens, *, dtype="float32"):
    """(x, topk_weights, topk_ids, weights) for ``fused_experts``."""
    x = make_tokens(num_tokens, config, dtype=dtype)
    return x, *make_routing(num_tokens, config.top_k, config.num_experts), make_stored_weights(config)


def jitted(function, config):
    """``jax.jit`` of ``function`` with its config bound."""
    return jax.jit(functools.partial(function, config=config))
