"""Layers with kernels on a GPU against NumPy float64: hostile routings, memory full of NaN, the same bits twice."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax import fused_experts
from moe_jax.experts.hopper._kernel_layout import kernel_format, to_kernel_layout
from moe_jax.experts.hopper._rows import row_kind
from moe_jax.quantization import SCHEMES, Scheme
from tests.support.cases import experts as cases
from tests.support.oracles.layer_judge import assert_layer_close

# Beside the named schemes: every bit width, containers, zero points, act-order.
OTHERS = (
    *("w4a16_g32_asym_unpacked", "w3a16_channel_asym", "w5a16_g32", "w8a16_g64_asym", "w4a8_int8_g64_packed"),
    *("w4a16_g64_actorder", "w4a16_g32_asym_actorder", "w4a8_int8_actorder"),
    *("w4a8_int8_asym", "w4a8_int8_channel_asym", "w4a8_int8_g32", "w4a8_fp8_asym"),
    *("w8a8_int8", "w8a8_int8_channel_asym"),
)


def has_kernels(name, dtype="bfloat16"):
    scheme = Scheme.parse(name)
    return kernel_format(scheme, dtype) is not None or row_kind(scheme) is not None


WITH_KERNELS = tuple(name for name in (*SCHEMES, *OTHERS) if has_kernels(name))
# One of every operand of the products and place of scales.
KINDS = (
    *("bf16", "fp8_tensor_static", "fp8_channel", "fp8_block", "int8_w8a8"),
    *("w4a16_g128_asym", "nvfp4_dynamic", "mxfp4_a16", "w4a8_int8", "w4a8_fp8"),
)


def sizes_of(scheme):
    """H and I off every tile; groups of 128 activations take whole ones of H."""
    hidden = 640 if scheme in ("fp8_block", "fp8_block_ue8m0") else 544
    return dict(hidden_size=hidden, intermediate_size=288)


@functools.cache
def layer(scheme, dtype="bfloat16", implementation="hopper", **options):
    """(config, weights, weights as the kernels read them)."""
    stored = "float32" if Scheme.parse(scheme).is_quantized else dtype
    options = sizes_of(scheme) | dict(param_dtype=stored, implementation=(implementation,)) | options
    config = cases.make_config(scheme, dtype=dtype, **options)
    weights = cases.make_stored_weights(config)
    is_packed = kernel_format(config.scheme, config.dtype) is not None
    return config, weights, to_kernel_layout(weights, config) if is_packed else weights


def hostile_routings(tokens, config):
    """Weights and ids: see ``make_routing``; one expert for all; nothing at all."""
    p, ids = cases.make_routing(tokens, config.top_k, config.num_experts)
    yield p, ids
    only = jnp.full_like(ids, -1).at[:, 0].set(config.num_experts - 2)
    yield jnp.where(only >= 0, jnp.float32(0.7), jnp.nan), only
    yield p, jnp.full_like(ids, -1)


def fill_memory_of(call):
    """Bytes of 255, a NaN of every float format and -1 of every integer, where the call's arrays will lie."""
    memory = call.memory_analysis()
    held = [
        jax.device_put(np.full(size, 255, np.uint8))
        for size in (memory.temp_size_in_bytes, memory.output_size_in_bytes)
    ]
    jax.block_until_ready(held)


def check(scheme, tokens, dtype="bfloat16", **options):
    """The layer with given routings, one program for all of them."""
    config, weights, packed = layer(scheme, dtype, **options)
    x = cases.make_tokens(tokens, config, dtype=dtype)
    call = None
    for p, ids in hostile_routings(tokens, config):
        if call is None:
            call = jax.jit(functools.partial(fused_experts, config=config)).lower(x, p, ids, packed).compile()
        fill_memory_of(call)
        y = np.asarray(call(x, p, ids, packed))
        assert_layer_close(y, x, p, ids, weights, config, on_gpu=True)
        fill_memory_of(call)
        np.testing.assert_array_equal(np.asarray(call(x, p, ids, packed)), y)


def check_no_tokens(**options):
    config, _, packed = layer("w4a16_g128", **options)
    x, (p, ids) = cases.make_tokens(1, config, dtype="bfloat16")[:0], cases.make_routing(1)
    y = jax.jit(functools.partial(fused_experts, config=config))(x, p[:0], ids[:0], packed)
    assert y.shape == (0, config.hidden_size)


def check_independence(scheme, **options):
    """A token does not depend on its batch: other tokens, other routings of theirs, the same bits in one program."""
    config, _, packed = layer(scheme, **options)
    x, (p, ids) = cases.make_tokens(300, config, dtype="bfloat16"), cases.make_routing(300)
    call = jax.jit(functools.partial(fused_experts, config=config)).lower(x, p, ids, packed).compile()
    first = np.asarray(call(x, p, ids, packed))
    kept = np.arange(0, 300, 7)
    others = np.setdiff1d(np.arange(300), kept)
    rolled = [np.array(a) for a in (x, p, ids)]
    for array in rolled:
        array[others] = array[np.roll(others, 5)]
    second = np.asarray(call(*(jnp.asarray(a) for a in rolled), packed))
    np.testing.assert_array_equal(second[kept], first[kept])
