"""GPTQ and AWQ checkpoints laid out here in NumPy as formats.md states; each weight is decoded element by element."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import moe_jax
from moe_jax import MoEConfig
from moe_jax.loading import Checkpoint, CheckpointError, ExpertReader, as_packed
from moe_jax.quantization import dequantize_tensor
from tests.support.checkpoints.expert_tensors import matrices_of
from tests.support.refusals import refuses

E, H, I, GROUP = 2, 64, 32, 16  # noqa: E741
PROJECTIONS = {"gate_proj": (I, H), "up_proj": (I, H), "down_proj": (H, I)}
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


def stream(codes, bits):
    """(count, columns) codes -> (count * bits / 32, columns) int32 words down the first axis, lowest bits first."""
    count, columns = codes.shape
    out = np.zeros((count * bits // 32, columns), np.uint32)
    for column in range(columns):
        words = sum(int(code) << (i * bits) for i, code in enumerate(codes[:, column]))
        for i in range(out.shape[0]):
            out[i, column] = (words >> (32 * i)) & 0xFFFFFFFF
    return out.view(np.int32)


def awq_words(codes):
    """(rows, columns) -> (rows, columns / 8): column c of a word at bit 4 * AWQ_ORDER[c]."""
    out = np.zeros((codes.shape[0], codes.shape[1] // 8), np.uint32)
    for c in range(codes.shape[1]):
        out[:, c // 8] |= codes[:, c].astype(np.uint32) << np.uint32(4 * AWQ_ORDER[c % 8])
    return out.view(np.int32)


def write(directory, config, bits=4, group=GROUP, middle=False, shuffled=False, change=None):
    """A checkpoint of one layer's experts; change: tensors of one module. Returns {(expert, projection): weight}."""
    rng, tensors, expected = np.random.default_rng(bits), {}, {}
    is_awq, offset = config["quant_method"] == "awq", 0 if config.get("checkpoint_format") == "gptq_v2" else 1
    orders = {}
    for expert, (projection, (n, k)) in ((e, p) for e in range(E) for p in PROJECTIONS.items()):
        module = f"model.layers.0.mlp.experts.{expert}.{projection}"
        groups = 1 if group == -1 else k // group
        q = rng.integers(0, 2**bits, (k, n))
        z = np.full((groups, n), 2 ** (bits - 1)) if middle else rng.integers(1, 2**bits, (groups, n))
        scales = (rng.uniform(0.01, 0.1, (groups, n)) * rng.choice([-1, 1], (groups, n))).astype(np.float16)
        g_idx = np.zeros(k, np.int32) if group == -1 else (np.arange(k) // group).astype(np.int32)
        if shuffled:
            g_idx = orders.setdefault((expert, k, projection == "down_proj"), rng.permutation(g_idx))
        if is_awq:
            stored = {"qweight": awq_words(q), "qzeros": awq_words(z), "scales": scales}
        else:
            qzeros = stream((z - offset).T, bits).T
            stored = {"qweight": stream(q, bits), "qzeros": qzeros, "scales": scales, "g_idx": g_idx}
        tensors |= {f"{module}.{suffix}": np.ascontiguousarray(array) for suffix, array in stored.items()}
        weight = (q - z[g_idx]).astype(np.float32) * scales[g_idx].astype(np.float32)
        expected[expert, projection] = weight.T
    for name, value in (change or {}).items():
        tensors[f"model.layers.0.mlp.experts.1.down_proj.{name}"] = value
    tensors["model.layers.0.mlp.gate.weight"] = np.zeros((E, H), np.float32)
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen3_moe", "quantization_config": config}))
    return expected


def load(directory):
    with Checkpoint(directory) as checkpoint:
        reader = ExpertReader(checkpoint)
        scheme = reader.stored_scheme(0)
        config = MoEConfig(num_experts=E, top_k=1, hidden_size=H, intermediate_size=I, scheme=scheme)
        return reader.load(0, config)


def gptq(**changes):
    return {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True} | changes


AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
CASES = {
    "gptq sym": (gptq(), dict(middle=True), "w4a16_g16"),
    "gptq sym channel": (gptq(group_size=-1), dict(middle=True, group=-1), "w4a16_channel"),
    "gptq asym": (gptq(sym=False), {}, "w4a16_g16_asym"),
    "gptq asym v2": (gptq(sym=False, checkpoint_format="gptq_v2"), {}, "w4a16_g16_asym"),
    "gptq sym v2": (gptq(checkpoint_format="gptq_v2"), dict(middle=True), "w4a16_g16"),
    "gptq desc_act": (gptq(desc_act=True), dict(middle=True, shuffled=True), "w4a16_g16_actorder"),
    "gptq desc_act asym": (gptq(desc_act=True, sym=False), dict(shuffled=True), "w4a16_g16_asym_actorder"),
    "gptq desc_act channel": (gptq(desc_act=True, group_size=-1), dict(middle=True, group=-1), "w4a16_channel"),
    "gptq 8 bits": (gptq(bits=8, sym=False), dict(bits=8), "w8a16_g16_asym"),
    "gptq 3 bits": (gptq(bits=3, sym=False), dict(bits=3), "w3a16_g16_asym"),
    "gptq 2 bits": (gptq(bits=2, sym=False), dict(bits=2), "w2a16_g16_asym"),
    "awq": (AWQ, {}, "w4a16_g16_asym"),
    "awq old keys": ({"quant_method": "awq", "w_bit": 4, "q_group_size": GROUP}, {}, "w4a16_g16_asym"),
    "awq sym": (AWQ | {"zero_point": False}, dict(middle=True), "w4a16_g16"),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.sample(4)
def test_weights_bit_for_bit(tmp_path, case):
    config, options, scheme = CASES[case]
    expected = write(tmp_path / "model", config, **options)
    weights = load(tmp_path / "model")
    assert weights.scheme.name == scheme
    for place, matrix in matrices_of(weights).items():
        np.testing.assert_array_equal(matrix, expected[place])


def test_the_view(tmp_path):
    """Names and headers are those of pack-quantized; what is read fits what info says; other checkpoints stay."""
    for config, options in ((gptq(sym=False, desc_act=True), dict(shuffled=True)), (AWQ, {})):
        write(tmp_path / config["quant_method"], config, **options)
        with Checkpoint(tmp_path / config["quant_method"]) as checkpoint:
            view = as_packed(checkpoint)
            assert as_packed(view) is view and not any("qweight" in name for name in view.names)
            for name in view.names:
                array, info = view.read(name), view.info(name)
                assert name in view and array.shape == info.shape and array.dtype == info.numpy_dtype
            assert view.quantization_config["config_groups"][config["quant_method"]]["weights"]["num_bits"] == 4
            assert view.nbytes == checkpoint.nbytes


REFUSED = [
    (gptq(bits=5), {}, "bits is 5, expected 2, 3, 4 or 8"),
    (gptq(checkpoint_format="marlin"), {}, "checkpoint_format 'marlin' of gptq is not supported"),
    (gptq(dynamic={"+:.*": {"bits": 8}}), {}, "dynamic .* is not supported"),
    (gptq(desc_act="yes"), {}, "desc_act='yes'"),
    (gptq(group_size=0), {}, "group_size is 0"),
    (AWQ | {"version": "gemv"}, {}, "version 'gemv' of awq is not supported, only 'gemm'"),
    (AWQ | {"bits": 8}, {}, "bits is 8, awq has 4"),
    (AWQ | {"zero_point": False}, {}, "experts.0.* expected 8 as config.json says symmetric"),
    (gptq(), {}, "qzeros.* expected 8 as config.json says symmetric"),
    (gptq(), dict(middle=True, shuffled=True), "g_idx: columns are not in order, but config.json says desc_act=false"),
    (
        gptq(sym=False),
        dict(change={"qzeros": np.full((I // GROUP, H // 8), -1, np.int32)}),
        "down_proj.qzeros: holds zero point 15, which format 'gptq' reads as 16 and some tools as 0",
    ),
    (gptq(sym=False), dict(change={"qzeros": np.zeros((I // GROUP, H // 8), np.float32)}), "expected int32 words"),
    (gptq(sym=False), dict(change={"scales": np.ones((1, H), np.float16)}), "expected .*found"),
]


@pytest.mark.parametrize(("config", "options", "message"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_be_converted_is_refused(tmp_path, config, options, message):
    write(tmp_path / "model", config, **options)
    refuses(CheckpointError, message, load, tmp_path / "model")


def test_old_repositories_state_it_in_a_file_of_their_own(tmp_path):
    expected = write(tmp_path / "model", gptq(sym=False))
    stated = json.loads((tmp_path / "model" / "config.json").read_text()).pop("quantization_config")
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))
    del stated["quant_method"]
    (tmp_path / "model" / "quantize_config.json").write_text(json.dumps(stated))
    w2 = np.asarray(dequantize_tensor(load(tmp_path / "model").w2))
    np.testing.assert_array_equal(w2[0], expected[0, "down_proj"])


def test_a_missing_tensor_is_named(tmp_path):
    write(tmp_path / "model", gptq(sym=False))
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.0.mlp.experts.1.up_proj.qzeros"]
    save_file(tensors, path)
    refuses(CheckpointError, "missing: up_proj.weight_zero_point of expert 1", load, tmp_path / "model")


def test_an_unset_order_of_columns_is_their_position(tmp_path):
    expected = write(tmp_path / "model", gptq(), middle=True, change={"g_idx": np.full(I, -1, np.int32)})
    w2 = np.asarray(dequantize_tensor(load(tmp_path / "model").w2))
    np.testing.assert_array_equal(w2[1], expected[1, "down_proj"])
    assert moe_jax.Scheme.parse("w4a16_g16") == load(tmp_path / "model").scheme
