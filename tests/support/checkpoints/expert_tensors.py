"""Tensors of one small expert layer, as a checkpoint names and stores them."""

import json

import jax
import ml_dtypes
import numpy as np

from moe_jax import MoEConfig, Scheme
from moe_jax.loading import Checkpoint, LayerLoader, save_safetensors
from moe_jax.quantization import dequantize_tensor

BF16 = np.dtype(ml_dtypes.bfloat16)
E, H, INTER = 3, 48, 32
PROJECTIONS = {"gate_proj": (INTER, H), "up_proj": (INTER, H), "down_proj": (H, INTER)}


def config(scheme="bf16", **changes):
    sizes = dict(num_experts=E, top_k=2, hidden_size=H, intermediate_size=INTER)
    return MoEConfig(**(sizes | changes), scheme=Scheme.parse(scheme))


def frozen(array):
    array.flags.writeable = False
    return array


def plain_tensors(prefix="model.layers.0.mlp.", dtype=BF16, bias=False, seed=0):
    """Full-precision tensors of one layer under hub names, read-only as a file's are."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for expert in range(E):
        for name, shape in PROJECTIONS.items():
            tensors[f"{prefix}experts.{expert}.{name}.weight"] = frozen(rng.standard_normal(shape).astype(dtype))
            if bias:
                tensors[f"{prefix}experts.{expert}.{name}.bias"] = frozen(rng.standard_normal(shape[0]).astype(dtype))
    return tensors


def static_tensors(prefix=""):
    """fp8_tensor_static: weights, weight scales and input scales, all of them distinct."""
    tensors = {}
    for i, (name, weight) in enumerate(plain_tensors(prefix, np.float32).items()):
        tensors[name] = frozen(weight.astype(ml_dtypes.float8_e4m3fn))
        tensors[f"{name}_scale"] = np.float32([0.5 + i])
        tensors[name.replace(".weight", ".input_scale")] = np.float32([0.01 * (i + 1)])
    return tensors


def fused(tensors, transposed=False):
    """The same layer as (E, 2I, H) and (E, H, I), or (E, H, 2I) and (E, I, H)."""
    of = lambda e, name: tensors[f"model.layers.0.mlp.experts.{e}.{name}.weight"]  # noqa: E731
    gate_up = np.stack([np.concatenate([of(e, "gate_proj"), of(e, "up_proj")]) for e in range(E)])
    down = np.stack([of(e, "down_proj") for e in range(E)])
    pair = [frozen(np.ascontiguousarray(x.swapaxes(1, 2)) if transposed else x) for x in (gate_up, down)]
    return dict(zip(("experts.gate_up_proj", "experts.down_proj"), pair, strict=True))


def write_checkpoint(directory, config, tensors):
    """A directory of config.json and one file of tensors, opened."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_safetensors(directory / "model.safetensors", tensors)
    return Checkpoint(directory)


def filled(layer, tensors, /, *method, **options):
    """A loader that was given tensors, a dict or pairs, whatever it took of them."""
    loader = LayerLoader(layer, *method, **options)
    loader.load(tensors.items() if isinstance(tensors, dict) else tensors)
    return loader


def loaded(layer, tensors, **options):
    loader = LayerLoader(layer, **options)
    assert loader.load(tensors.items()) == set(tensors)
    return loader.finish()


def matrices_of(weights):
    """{(expert, projection): matrix} of a gated layer, dequantized in float32."""
    w13, w2 = (np.asarray(jax.jit(dequantize_tensor)(tensor)) for tensor in (weights.w13, weights.w2))
    parts = {"gate_proj": w13[:, 0], "up_proj": w13[:, 1], "down_proj": w2}
    return {(expert, name): part[expert] for expert in range(len(w2)) for name, part in parts.items()}


def assert_same(a, b):
    """Equal structure, dtypes and bits."""
    flat_a, flat_b = jax.tree.flatten(a), jax.tree.flatten(b)
    assert flat_a[1] == flat_b[1]
    for x, y in zip(flat_a[0], flat_b[0], strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()
