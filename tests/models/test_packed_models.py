"""Whole models whose matrices are packed by GPTQ or AWQ, or as early compressed-tensors packed them: logits and values.

transformers runs on what is dequantized here, code by code."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from moe_jax.models import load_pretrained
from moe_jax.parallel._mesh import parse_mesh
from pallas_kernels.common import packing
from tests.loading.files.test_gptq_awq import AWQ, awq_words, gptq, stream
from tests.support.cases.models import assert_logits_close, real_weight

GROUP = 16


def is_packed(name, weight):
    """What the tools pack: every Linear but routers, their gates, and the head, where its sizes are whole words."""
    is_linear = weight.ndim == 2 and not name.endswith((".gate.weight", "lm_head.weight", "embed_tokens.weight"))
    return is_linear and weight.shape[0] % 8 == 0 and weight.shape[1] % GROUP == 0


def quantized(case, directory, config):
    """The checkpoint in 4 bits; returns {name: dequantized weight}."""
    rng, tensors, plain, orders = np.random.default_rng(0), {}, {}, {}
    is_awq = config["quant_method"] == "awq"
    for name, weight in load_file(case.directory / "model.safetensors").items():
        if not is_packed(name, weight):
            tensors[name] = weight
            continue
        module, k = name.removesuffix(".weight"), weight.shape[1]
        g_idx = (np.arange(k) // GROUP).astype(np.int32)
        if config.get("desc_act"):  # gate and up see the same columns, in one order
            g_idx = orders.setdefault((module.rpartition(".")[0], k, "down" in module), rng.permutation(g_idx))
        low = np.stack([weight[:, g_idx == g].min(1) for g in range(k // GROUP)])
        high = np.stack([weight[:, g_idx == g].max(1) for g in range(k // GROUP)])
        scales = ((high - low) / 15).astype(np.float16)
        zeros = np.clip(np.round(-low / scales.astype(np.float32)), 1, 15).astype(int)
        q = np.clip(np.round(weight.T / scales[g_idx].astype(np.float32)) + zeros[g_idx], 0, 15).astype(int)
        if is_awq:
            stored = dict(qweight=awq_words(q), qzeros=awq_words(zeros), scales=scales)
        else:
            stored = dict(qweight=stream(q, 4), qzeros=stream((zeros - 1).T, 4).T, scales=scales, g_idx=g_idx)
        tensors |= {f"{module}.{suffix}": np.ascontiguousarray(array) for suffix, array in stored.items()}
        plain[name] = ((q - zeros[g_idx]) * scales[g_idx].astype(np.float32)).T.astype(np.float32)
    raw = json.loads((case.directory / "config.json").read_text()) | dict(quantization_config=config)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(raw))
    return plain


def judge(case, plain, ids):
    """Logits of transformers' model with the dequantized weights in place of its own, which are put back."""
    model, kept = case.torch_model, {k: v.clone() for k, v in case.torch_model.state_dict().items()}
    state = {k: v.clone() for k, v in kept.items()}
    for name, weight in plain.items():
        if ".experts." not in name:
            state[name] = torch.tensor(weight)
            continue
        prefix, _, rest = name.partition(".experts.")
        expert, projection = rest.split(".")[:2]
        target = state[f"{prefix}.experts.{'down_proj' if projection == 'down_proj' else 'gate_up_proj'}"]
        rows = weight.shape[0] if projection != "down_proj" else 0
        start = rows if projection == "up_proj" else 0
        target[int(expert), start : start + (rows or weight.shape[0])] = torch.tensor(weight)
    model.load_state_dict(state)
    try:
        return case.torch_logits(ids)
    finally:
        model.load_state_dict(kept)


CONFIGS = {
    "gptq": gptq(sym=False, group_size=GROUP),
    "gptq desc_act": gptq(sym=False, group_size=GROUP, desc_act=True),
    "awq": AWQ | {"group_size": GROUP},
}
FAMILIES = [("qwen2", "gptq"), ("olmoe_clipped", "awq"), ("deepseek_v2_lite", "gptq"), ("deepseek_v3", "awq")]


@pytest.mark.parametrize(
    "name, config",
    [*(("qwen3", name) for name in CONFIGS), *(pytest.param(*row, marks=pytest.mark.slow) for row in FAMILIES)],
)
@pytest.mark.sample(3)
def test_logits(case, prompt, tmp_path, name, config):
    """Experts and dense layers stay packed; then the same tensors one by one, shuffled, into the running model."""
    config, source, ids = CONFIGS[config], case(name), prompt(2, 40)
    before = source.torch_logits(ids)
    plain = quantized(source, tmp_path, config)
    modules = {name.split(".")[-2] for name in plain}
    shared = {key for key in load_file(source.directory / "model.safetensors") if "shared" in key and "_proj" in key}
    assert {"o_proj", "up_proj"} <= modules and modules & {"q_proj", "q_b_proj"} and shared <= plain.keys()
    expected = judge(source, plain, ids)
    assert np.abs(expected - before).max() > 1e-2 * np.ptp(before)
    model = load_pretrained(tmp_path, dtype=jnp.float32)
    assert model.moe_blocks()[0].experts.weights.get_value().w13.data.dtype == jnp.int32
    assert model.layers[0].self_attn.o_proj.weight.get_value().tensor.data.dtype == jnp.int32
    assert_logits_close(model.score(ids), expected, 1e-4)
    if config.get("desc_act"):
        return
    tensors = load_file(tmp_path / "model.safetensors")
    names = np.random.default_rng(1).permutation(list(tensors))
    model.reload_weights((name, tensors[name]) for name in names)
    assert_logits_close(model.score(ids), expected, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["expert=2,tensor=2", "tensor=4"])
@pytest.mark.parametrize("config", CONFIGS)
def test_over_a_mesh(case, prompt, tmp_path, config, mesh):
    """Matrices are converted whole, then cut: the same values and logits, and again after a reload."""
    quantized(case("qwen3"), tmp_path, CONFIGS[config])
    alone = load_pretrained(tmp_path, dtype=jnp.float32)
    spread = load_pretrained(tmp_path, dtype=jnp.float32, mesh=parse_mesh(mesh))
    for name, module in alone.dense_modules().items():
        np.testing.assert_array_equal(real_weight(spread.dense_modules()[name]), real_weight(module))
    ids = prompt(2, 40)
    assert_logits_close(spread.score(ids), np.asarray(alone.score(ids)))
    spread.reload_weights(tmp_path)
    assert_logits_close(spread.score(ids), np.asarray(alone.score(ids)))


def test_three_bits_in_padded_words_and_plain_zero_points(case, prompt, tmp_path):
    """compressed-tensors before 0.18 and before 0.7: dense matrices too are read in each of their forms."""
    source, rng = case("qwen3"), np.random.default_rng(0)
    name = "model.layers.0.self_attn.q_proj"
    n, k = 64, 64
    q, z = rng.integers(0, 8, (n, k)), rng.integers(0, 8, (n, 1))
    scale = rng.uniform(0.01, 0.1, (n, 1)).astype(np.float32)
    weights = dict(num_bits=3, type="int", symmetric=False, strategy="channel")
    config = dict(
        quant_method="compressed-tensors",
        format="pack-quantized",
        config_groups=dict(group_0=dict(targets=[f"re:{name}$"], weights=weights)),
    )
    raw = json.loads((source.directory / "config.json").read_text()) | dict(quantization_config=config)
    kept = load_file(source.directory / "model.safetensors")
    del kept[f"{name}.weight"]
    for index, (is_dense, zeros) in enumerate(
        (
            (True, packing.pack_words(z.T.astype(np.uint8), 3).T),
            (False, packing.pack_words(z.T.astype(np.uint8), 3, is_dense=False).T),
            (False, (z - 4).astype(np.int8)),
        )
    ):
        packed = packing.pack_words(q.astype(np.uint8), 3, is_dense=is_dense)
        stored = {"weight_packed": packed, "weight_zero_point": zeros, "weight_scale": scale}
        target = tmp_path / str(index)
        target.mkdir()
        save_file(
            kept | {f"{name}.{s}": np.ascontiguousarray(a) for s, a in stored.items()}, target / "model.safetensors"
        )
        (target / "config.json").write_text(json.dumps(raw))
        model = load_pretrained(target, dtype=jnp.float32)
        np.testing.assert_array_equal(real_weight(model.dense_modules()[name]), (q - z).astype(np.float32) * scale)
