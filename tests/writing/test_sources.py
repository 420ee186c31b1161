"""Sources of every container: what is in the right format already keeps its codes, the rest is said to be lossy."""

import json

import ml_dtypes
import numpy as np
import pytest

import moe_jax
from moe_jax.inspection import inspect_checkpoint
from moe_jax.loading import Checkpoint
from tests.fuzz import bases
from tests.fuzz.decoder import decode_layer, read
from tests.support.cases.families import add_predictor, write_qwen3_5

E, H, I = bases.E, bases.H, bases.I  # noqa: E741
EXACT = {
    "native_fp8": ("fp8_block", "copied"),
    "autofp8": ("fp8_tensor_static", "copied"),
    "fbgemm": ("fp8_channel", "copied"),
    "gptq": ("w4a16_g16", "copied"),
    "gptq_asym": ("w4a16_g16_asym", "copied"),
    "awq": ("w4a16_g16_asym", "copied"),
    "modelopt_fp8": ("fp8_tensor_static", "copied"),
    "modelopt_nvfp4": ("nvfp4", "repacked"),
    "gptq/bytes": ("w4a8_int8_g16", "repacked"),
    "awq/bytes": ("w4a8_int8_g16_asym", "repacked"),
    "gpt_oss": ("mxfp4_a16", "copied"),
}


def write(root, kind):
    directory = root / "source"
    rng = np.random.default_rng(3)
    if kind == "gpt_oss":
        config = {"model_type": "gpt_oss", "num_local_experts": E, "hidden_size": H, "dtype": "bfloat16"}
        bases.write(directory, bases.gpt_oss(rng), {"quant_method": "mxfp4"}, config)
    else:
        make, stated = bases.LAID_OUT[kind]
        bases.write(directory, make(rng), stated)
    return directory


def decode(directory):
    return decode_layer(*read(directory), 0, E, H, I)


def assert_same_meaning(source, out, tolerance=0.0):
    """Every expert, by the decoder that knows neither of the two programs."""
    before, after = decode(source), decode(out)
    assert before.keys() == after.keys()
    for key in before:
        if isinstance(key, tuple):
            np.testing.assert_allclose(after[key], before[key], rtol=tolerance, atol=0, strict=True)
    for key, bias in before["bias"].items():
        np.testing.assert_array_equal(after["bias"][key], bias)
    return before, after


@pytest.mark.parametrize("case", EXACT)
@pytest.mark.sample(2)
def test_the_same_format_in_another_container(tmp_path, case):
    kind, (scheme, how) = case.partition("/")[0], EXACT[case]
    source = write(tmp_path, kind)
    written = moe_jax.quantize_checkpoint(source, tmp_path / "out", scheme=scheme)
    assert written.experts == {how: 1} and not written.is_lossy_twice
    # ModelOpt's global scale is turned over, which rounds
    assert_same_meaning(source, tmp_path / "out", 2.0**-22 if kind == "modelopt_nvfp4" else 0.0)
    with Checkpoint(source) as a, Checkpoint(tmp_path / "out") as b:
        inputs = [{n: np.asarray(c.read(n)) for n in c.names if "input" in n} for c in (a, b)]
    if scheme == "fp8_tensor_static":  # the activations of a layer share the largest
        largest = {w: max(v.item() for n, v in inputs[0].items() if (".down_proj." in n) == w) for w in (True, False)}
        assert all(v.item() == largest[".down_proj." in n] for n, v in inputs[1].items()) and len(inputs[1]) == 3 * E
    if scheme == "nvfp4":
        smallest = 1 / max(v.item() for n, v in inputs[0].items() if ".down_proj." in n)
        assert inputs[1]["model.layers.0.mlp.experts.0.down_proj.input_global_scale"] == pytest.approx(
            smallest, rel=1e-6
        )


@pytest.mark.parametrize("scheme", ["int8_w8a8", "bf16"])
def test_another_format(tmp_path, scheme):
    """Dequantized exactly; to bf16 rounded once, to int8 within half a step of each row."""
    source = write(tmp_path, "native_fp8")
    written = moe_jax.quantize_checkpoint(source, tmp_path / "out", scheme=scheme)
    assert written.experts == {"dequantized" if scheme == "bf16" else "requantized": 1}
    assert written.is_lossy_twice == (scheme != "bf16")
    before, after = decode(source), decode(tmp_path / "out")
    for expert in range(E):
        for shard in ("w1", "w3", "w2"):
            a, b = before[expert, shard], after[expert, shard]
            if scheme == "bf16":
                assert (b == a.astype(ml_dtypes.bfloat16).astype(np.float32)).all() and (a != b).any()
            else:
                step = np.abs(a).max(1, keepdims=True) / 127
                assert (np.abs(a - b) <= step * 0.5001).all() and (a != b).any()
    stated = json.loads((tmp_path / "out" / "config.json").read_text()).get("quantization_config")
    assert (stated is None) == (scheme == "bf16")


def test_quantized_attention_of_the_source(tmp_path):
    """Outside the scheme it is dequantized to the checkpoint's dtype; inside it keeps its codes. KV scales stay."""
    rng = np.random.default_rng(4)
    tensors = bases.native_blocks(rng)
    weight, scale = rng.standard_normal((96, H)).astype(bases.E4M3), rng.uniform(0.01, 1, (1, 1)).astype(np.float32)
    tensors |= {"model.layers.0.self_attn.q_proj.weight": weight, "model.layers.0.self_attn.k_scale": scale[0]}
    tensors["model.layers.0.self_attn.q_proj.weight_scale_inv"] = scale
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.ones(96, bases.BF16)
    bases.write(tmp_path / "source", tensors, bases.LAID_OUT["native_fp8"][1])
    for modules, kind in (("experts", "dequantized"), ("all", "copied")):
        out = tmp_path / modules
        written = moe_jax.quantize_checkpoint(tmp_path / "source", out, scheme="fp8_block", modules=modules)
        assert written.linears == {kind: 1}
        ignored = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
        assert ("model.layers.0.self_attn.q_proj" in ignored) == (modules == "experts")
        with Checkpoint(out) as checkpoint:
            stored = checkpoint.read("model.layers.0.self_attn.q_proj.weight")
            assert "model.layers.0.self_attn.k_scale" in checkpoint
            assert checkpoint.read("model.layers.0.self_attn.q_proj.bias").tolist() == [1] * 96
            if modules == "experts":
                expected = (weight.astype(np.float32) * scale).astype(bases.BF16)
                assert stored.dtype == bases.BF16 and (stored == expected).all()
            else:
                assert stored.tobytes() == weight.tobytes()


def test_experts_in_one_tensor_are_written_one_by_one(tmp_path):
    """gpt-oss in bf16: (in, out), gate and up interleaved, with biases; the names are llm-compressor's."""
    rng = np.random.default_rng(5)
    prefix, bf16 = "model.layers.0.mlp.experts.", bases.BF16
    stored = {
        f"{prefix}gate_up_proj": rng.standard_normal((E, H, 2 * I)).astype(bf16),
        f"{prefix}gate_up_proj_bias": rng.standard_normal((E, 2 * I)).astype(bf16),
        f"{prefix}down_proj": rng.standard_normal((E, I, H)).astype(bf16),
        f"{prefix}down_proj_bias": rng.standard_normal((E, H)).astype(bf16),
        "model.layers.0.mlp.router.weight": rng.standard_normal((E, H)).astype(bf16),
    }
    config = {"model_type": "gpt_oss", "num_local_experts": E, "hidden_size": H}
    bases.write(tmp_path / "source", stored, None, config)
    moe_jax.quantize_checkpoint(tmp_path / "source", tmp_path / "out", scheme="w8a16_channel")
    found = decode(tmp_path / "out")
    gate_up = stored[f"{prefix}gate_up_proj"].astype(np.float32)
    for expert in range(E):
        expected = {"w1": gate_up[expert][:, 0::2].T, "w3": gate_up[expert][:, 1::2].T}
        expected["w2"] = stored[f"{prefix}down_proj"][expert].astype(np.float32).T
        for shard, weight in expected.items():
            step = np.abs(weight).max(1, keepdims=True) / 127.5
            assert (np.abs(found[expert, shard] - weight) <= 0.5001 * step).all()
        bias = stored[f"{prefix}gate_up_proj_bias"][expert].astype(np.float32)
        assert (found["bias"][expert, "w3"] == bias[1::2]).all() and (found["bias"][expert, "w1"] == bias[0::2]).all()
    ignored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    assert ignored == ["lm_head", "model.layers.0.mlp.router"]


def test_other_families(tmp_path):
    """Granite's two stacked tensors; layers for multi-token prediction keep their names and bits."""
    rng = np.random.default_rng(6)
    prefix = "model.layers.0.block_sparse_moe."
    stored = {
        f"{prefix}input_linear.weight": rng.standard_normal((E, 2 * I, H)).astype(bases.BF16),
        f"{prefix}output_linear.weight": rng.standard_normal((E, H, I)).astype(bases.BF16),
        f"{prefix}router.layer.weight": rng.standard_normal((E, H)).astype(bases.BF16),
        "mtp.layers.0.mlp.experts.0.up_proj.weight": rng.standard_normal((I, H)).astype(bases.BF16),
    }
    config = {"model_type": "granitemoe", "num_local_experts": E, "hidden_size": H}
    bases.write(tmp_path / "source", stored, None, config)
    moe_jax.quantize_checkpoint(tmp_path / "source", tmp_path / "out", scheme="w8a16_channel")
    found = decode(tmp_path / "out")
    weights = stored[f"{prefix}input_linear.weight"].astype(np.float32)
    for expert in range(E):
        for shard, weight in (("w1", weights[expert, :I]), ("w3", weights[expert, I:])):
            step = np.abs(weight).max(1, keepdims=True) / 127.5
            assert (np.abs(found[expert, shard] - weight) <= 0.5001 * step).all()
    name = "mtp.layers.0.mlp.experts.0.up_proj"
    with Checkpoint(tmp_path / "out") as checkpoint:
        assert checkpoint.read(f"{name}.weight").tobytes() == stored[f"{name}.weight"].tobytes()
    ignored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    assert ignored == ["lm_head", "model.layers.0.block_sparse_moe.router.layer", name]


def test_other_models_stay_as_they_are(tmp_path):
    """Qwen3.5 as published: its vision model and its predictor keep their tensors, which config.json names one by one:
    readers hold what it does not name for quantized."""
    sizes = dict(hidden_size=64, moe_intermediate_size=32, shared_expert_intermediate_size=32, linear_value_head_dim=16)
    (tmp_path / "source").mkdir()
    write_qwen3_5(tmp_path / "source", **sizes)
    add_predictor(tmp_path / "source")
    with Checkpoint(tmp_path / "source") as source:
        others = {name: source.read(name) for name in source.names if name.startswith(("model.visual.", "mtp."))}
    written = moe_jax.quantize_checkpoint(tmp_path / "source", tmp_path / "out", scheme="w4a16_g32", modules="all")
    assert written.linears == {"quantized": 15}
    with Checkpoint(tmp_path / "out") as out:
        assert {name for name in out.names if name.startswith(("model.visual.", "mtp."))} == others.keys()
        for name, tensor in others.items():
            np.testing.assert_array_equal(out.read(name), tensor)
        ignored = {*out.config["quantization_config"]["ignore"]}
    words = ("gate_proj", "up_proj", "down_proj")
    assert ignored >= {f"mtp.layers.0.mlp.experts.{expert}.{word}" for expert in range(8) for word in words}
    assert ignored >= {"mtp.fc", "mtp.layers.0.self_attn.q_proj", "model.visual.blocks.0.attn.qkv"}
    assert inspect_checkpoint(tmp_path / "out").problems == ()
