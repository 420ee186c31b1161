"""gpt-oss experts in MXFP4: bytes laid out as formats.md 5.2 states, read row by row in NumPy as the judge."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import moe_jax
from moe_jax import MoEConfig, Scheme
from moe_jax.loading import CheckpointError, load_layer
from moe_jax.quantization import dequantize_tensor, method_for
from tests.support.checkpoints.expert_tensors import assert_same, write_checkpoint
from tests.support.oracles.experts import experts_numpy

E, H, I = 3, 64, 96  # noqa: E741
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
BF16 = ml_dtypes.bfloat16
STATED = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"]}
PREFIX = "model.layers.0.mlp.experts."


def tensors(seed=0):
    rng = np.random.default_rng(seed)
    found = {}
    for name, n, k in (("gate_up_proj", 2 * I, H), ("down_proj", H, I)):
        found[f"{PREFIX}{name}_blocks"] = rng.integers(0, 256, (E, n, k // 32, 16)).astype(np.uint8)
        found[f"{PREFIX}{name}_scales"] = rng.integers(118, 124, (E, n, k // 32)).astype(np.uint8)
        found[f"{PREFIX}{name}_bias"] = rng.standard_normal((E, n)).astype(BF16)
    return found


def write(directory, stored, stated=STATED):
    return write_checkpoint(directory, {"model_type": "gpt_oss", "quantization_config": stated}, stored)


def config():
    return MoEConfig(
        E, 2, H, I, scheme=Scheme.parse("mxfp4_a16"), activation="swigluoai", has_bias=True, dtype="float32"
    )


def row_values(stored, name, expert, row):
    blocks, scales = (stored[f"{PREFIX}{name}_{what}"][expert, row] for what in ("blocks", "scales"))
    out = []
    for block, scale in zip(blocks, scales, strict=True):
        for byte in block:
            out += [E2M1[byte & 15] * 2.0 ** (int(scale) - 127), E2M1[byte >> 4] * 2.0 ** (int(scale) - 127)]
    return np.array(out, np.float32)


def test_rows_are_told_apart_and_bits_kept(tmp_path):
    stored = tensors()
    with write(tmp_path, stored) as checkpoint:
        weights = load_layer(checkpoint, 0, config())
    assert weights.w13.data.dtype == np.uint8 and weights.w13.data.shape == (E, 2, I, H // 2)
    w13, w2 = np.asarray(dequantize_tensor(weights.w13)), np.asarray(dequantize_tensor(weights.w2))
    for expert in range(E):
        for i in (0, 1, 50, I - 1):
            assert (w13[expert, 0, i] == row_values(stored, "gate_up_proj", expert, 2 * i)).all()
            assert (w13[expert, 1, i] == row_values(stored, "gate_up_proj", expert, 2 * i + 1)).all()
        for n in (0, 3, H - 1):
            assert (w2[expert, n] == row_values(stored, "down_proj", expert, n)).all()
    bias = stored[f"{PREFIX}gate_up_proj_bias"]
    assert (np.asarray(weights.w13_bias[:, 0]) == bias[:, 0::2]).all()
    assert (np.asarray(weights.w13_bias[:, 1]) == bias[:, 1::2]).all()
    assert (np.asarray(weights.w2_bias) == stored[f"{PREFIX}down_proj_bias"]).all()


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.sample(2)
def test_layer_output(tmp_path, implementation):
    with write(tmp_path, tensors()) as checkpoint:
        weights = load_layer(checkpoint, 0, config())
    rng = np.random.default_rng(1)
    x = rng.standard_normal((5, H)).astype(np.float32)
    p, ids = (
        rng.uniform(0.1, 1, (5, 2)).astype(np.float32),
        np.array([[0, 1], [2, 0], [1, 2], [-1, 1], [0, 2]], np.int32),
    )
    layer = MoEConfig(**{**vars(config()), "implementation": (implementation,)})
    y = moe_jax.fused_experts(jnp.asarray(x), jnp.asarray(p), jnp.asarray(ids), weights, layer)
    expected = experts_numpy(x, p, ids, weights, config())
    assert np.abs(np.asarray(y) - expected).max() <= 2e-6 * np.abs(expected).max()


@pytest.mark.parametrize("scheme", ["bf16", "nvfp4_a16"])
def test_full_precision_columns_alternate_too(tmp_path, scheme):
    """The bf16 file is (in, out), and its columns and biases alternate; quantized or not (#46641)."""
    rng = np.random.default_rng(2)
    gate_up, down, gate_up_bias, down_bias = (
        rng.standard_normal(shape).astype(BF16) for shape in ((E, H, 2 * I), (E, I, H), (E, 2 * I), (E, H))
    )
    stored = {
        f"{PREFIX}gate_up_proj": gate_up,
        f"{PREFIX}down_proj": down,
        f"{PREFIX}gate_up_proj_bias": gate_up_bias,
        f"{PREFIX}down_proj_bias": down_bias,
    }
    layer = MoEConfig(E, 2, H, I, scheme=Scheme.parse(scheme), activation="swigluoai", has_bias=True)
    with write(tmp_path, stored, stated=None) as checkpoint:
        weights = load_layer(checkpoint, 0, layer)
    w13 = np.stack([gate_up[:, :, half::2].swapaxes(1, 2) for half in (0, 1)], axis=1)
    w13_bias = np.stack([gate_up_bias[:, half::2] for half in (0, 1)], axis=1)
    leaves = method_for(scheme).quantize_leaves(w13, down.swapaxes(1, 2), (w13_bias, down_bias), layer)
    assert_same(weights, method_for(scheme).process_weights_after_loading(leaves, layer))


def test_damage_is_named(tmp_path):
    stored = tensors()
    stored[f"{PREFIX}down_proj_scales"][1, 2, 0] = 255
    with (
        write(tmp_path, stored) as checkpoint,
        pytest.raises(CheckpointError, match=r"w2_weight_scale: expert 1 \(w2\) has scale 255"),
    ):
        load_layer(checkpoint, 0, config())
    del stored[f"{PREFIX}gate_up_proj_scales"]
    (tmp_path / "b").mkdir()
    with (
        write(tmp_path / "b", stored) as checkpoint,
        pytest.raises(CheckpointError, match="missing: gate_proj.weight_scale of all 3"),
    ):
        load_layer(checkpoint, 0, config())
