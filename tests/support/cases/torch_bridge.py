"""Checkpoints of one small expert layer as torch tensors, and the layers of moe_jax and of the bridge for them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import torch

import moe_jax
import torch_bridge
from moe_jax import MoEConfig, Scheme
from moe_jax.quantization import SCHEMES, method_for

E, H, I, K = 4, 128, 256, 2  # noqa: E741
WORDS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
PREFIX = "model.layers.0.mlp.experts."
BITS = {np.dtype(ml_dtypes.bfloat16): torch.bfloat16, np.dtype(ml_dtypes.float8_e4m3fn): torch.float8_e4m3fn}
ONE_OF_EACH = (
    "bf16",
    "fp8_tensor_static",
    "fp8_block",
    "int8_w8a16",
    "nvfp4",
    "mxfp4_a16",
    "w4a16_g32_asym",
    "w4a8_int8",
)


def as_torch(array):
    """By bytes, so that the bridge's own conversion has no part in it."""
    array = np.ascontiguousarray(array)
    if array.dtype in BITS:
        integers = {1: np.uint8, 2: np.int16}[array.dtype.itemsize]
        return torch.from_numpy(array.view(integers).copy()).view(BITS[array.dtype])
    return torch.from_numpy(array.copy())


def bits(tensor):
    """Any torch tensor or array as its bytes, with its shape."""
    if isinstance(tensor, torch.Tensor):
        return tuple(tensor.shape), tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    array = np.asarray(tensor)
    return array.shape, array.tobytes()


def config(scheme="bf16", **changes):
    sizes = dict(num_experts=E, top_k=K, hidden_size=H, intermediate_size=I)
    return MoEConfig(**(sizes | changes), scheme=Scheme.parse(scheme))


def plain_arrays(seed=0, bias=False):
    """{(expert, shard, suffix): array}, bfloat16, (out, in)."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for expert in range(E):
        for shard in WORDS:
            shape = (H, I) if shard == "w2" else (I, H)
            tensors[expert, shard, "weight"] = (rng.standard_normal(shape) * 0.1).astype(ml_dtypes.bfloat16)
            if bias:
                tensors[expert, shard, "bias"] = rng.standard_normal(shape[0]).astype(ml_dtypes.bfloat16)
    return tensors


@functools.cache
def stored_arrays(scheme, seed=0):
    """{(expert, shard, suffix): array} as a checkpoint of the scheme stores one layer: random codes and scales."""
    rng, parsed = np.random.default_rng(seed), Scheme.parse(scheme)
    tensors = {}
    for name, spec in method_for(scheme).create_weights(config(scheme)).items():
        leaf = random_leaf(rng, name, spec, parsed.weights)
        parts = (
            {"w2": leaf} if name.startswith("w2") else dict(zip(("w1", "w3"), np.split(leaf, 2, axis=1), strict=True))
        )
        for shard, part in parts.items():
            for expert in range(E):
                one = part[expert]
                tensors[expert, shard, name.partition("_")[2]] = one.reshape(()) if one.size == 1 else one
    return tensors


def random_leaf(rng, name, spec, fmt):
    if spec.kind == "input_scale":
        return rng.uniform(2, 9, spec.shape).astype(np.float32)
    if name.endswith(("global_scale", "scale_2")):
        return rng.uniform(100, 200, spec.shape).astype(np.float32) ** (-1 if name.endswith("2") else 1)
    if "scale" in name:
        if spec.dtype == np.uint8:
            return rng.integers(110, 125, spec.shape, np.uint8)
        return rng.uniform(0.5, 4, spec.shape).astype(spec.dtype)
    if fmt is None or fmt.element_type.is_float and fmt.packing is None:
        return (rng.standard_normal(spec.shape) * 0.1).astype(spec.dtype)
    if spec.dtype == np.int8:
        limit = 1 << (fmt.element_type.bits - 1)
        return rng.integers(-limit, limit, spec.shape, np.int8)
    info = np.iinfo(spec.dtype)
    return rng.integers(info.min, info.max, spec.shape, spec.dtype, endpoint=True)


def named(arrays, prefix=PREFIX):
    return [(f"{prefix}{e}.{WORDS[shard]}.{suffix}", array) for (e, shard, suffix), array in arrays.items()]


def torch_pairs(arrays, prefix=PREFIX):
    return [(name, as_torch(array)) for name, array in named(arrays, prefix)]


def nnx_layer(scheme, arrays, **options):
    layer = moe_jax.FusedMoE(E, H, I, top_k=K, scheme=scheme, **options)
    layer.load_weights(named(arrays))
    layer.process_weights_after_loading()
    return layer


def bridge_layer(scheme, **options):
    return torch_bridge.FusedMoE(E, K, H, I, torch.bfloat16, quant_config=scheme, **options)


def loaded_bridge(scheme, arrays, **options):
    layer = bridge_layer(scheme, **options)
    layer.load_weights(torch_pairs(arrays))
    layer.process_weights_after_loading()
    return layer


def assert_same_weights(a, b):
    """Two ExpertWeights, bit for bit."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for path, leaf in jax.tree_util.tree_leaves_with_path(a):
        other = dict(jax.tree_util.tree_leaves_with_path(b))[path]
        assert leaf.dtype == other.dtype and bits(leaf) == bits(other), jax.tree_util.keystr(path)


def inputs(tokens, seed=0, dtype=torch.bfloat16):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, H, generator=g).to(dtype), torch.randn(tokens, E, generator=g)


call = jax.jit(lambda layer, x, z, mask: layer(x, z, token_mask=mask))


def expected_bits(layer, x, z):
    """The nnx layer on the same tokens, padded as the bridge documents it: beyond 16 to powers of two."""
    count = len(x)
    size = count if count <= 16 else 1 << (count - 1).bit_length()
    pad = lambda t: np.pad(t.float().cpu().numpy(), ((0, size - count), (0, 0)))  # noqa: E731
    mask = None if size == count else jnp.arange(size) < count
    y = call(layer, jnp.asarray(pad(x)).astype(jnp.bfloat16), jnp.asarray(pad(z)), mask)
    return bits(np.asarray(y)[:count])


def of_rank(weights, rank):
    """The part of a whole layer's ExpertWeights that a rank should hold, cut with plain NumPy."""
    own = np.arange(E) if rank.expert_map is None else np.flatnonzero(rank.expert_map >= 0)
    size, at = rank.tp_size, rank.tp_rank

    def cut(array, axis):
        if array is None or size == 1:
            return array
        return np.split(np.asarray(array), size, axis=axis)[at]

    def product(tensor, axes):
        fields = {}
        for name, axis in axes.items():
            value = getattr(tensor, name)
            value = value if axis is None else cut(value, axis)
            fields[name] = value if value is None or name == "input_scale" else np.asarray(value)[own]
        return dataclasses.replace(tensor, **fields)

    fmt = weights.w13.fmt
    rows = dict(data=2, scale=None if fmt is None or fmt.strategy.value == "tensor" else 2, zero_point=2)
    is_cut = fmt is not None and fmt.strategy.value in ("group", "block")
    columns = dict(data=2, scale=2 if is_cut else None, zero_point=2 if is_cut else None)
    rest = dict(global_scale=None, input_scale=None)
    w2 = product(weights.w2, columns | rest)
    if weights.w2.num_columns is not None:
        w2 = dataclasses.replace(w2, num_columns=weights.w2.num_columns // size)
    return dataclasses.replace(
        weights,
        w13=product(weights.w13, rows | rest),
        w2=w2,
        w13_bias=None if weights.w13_bias is None else cut(weights.w13_bias, 2)[own],
        w2_bias=None if weights.w2_bias is None else np.asarray(weights.w2_bias)[own],
    )


ALL_SCHEMES = tuple(SCHEMES)
