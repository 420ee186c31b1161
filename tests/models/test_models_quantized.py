"""Whole models in bfloat16 and in the quantizations their users have: logits against transformers in float32, running
on what compressed-tensors makes of the same files."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import moe_jax
from moe_jax.models import load_pretrained
from tests.support.cases.families import as_mxfp4, fused_again
from tests.support.cases.models import (
    FAMILY_CASES,
    MORE_FAMILY_CASES,
    assert_logits_close,
    slow,
    write_checkpoint,
)
from tests.support.checkpoints import writers
from tests.support.oracles.compressed_tensors import decompressed

run = jax.jit(lambda model, ids, cache: model(ids, cache=cache))
# A file's own activation quantization is left out: the comparison is one of weights.
WEIGHTS_ONLY = {"fp8_channel": "fp8_channel_a16", "fp8_block": "fp8_block_a16", "int8_w8a8": "int8_w8a16"}
MULTIPLES_OF_32 = {
    **dict.fromkeys(
        ("glm4", "glm4_lite", "deepseek_v32", "glm_dsa"), dict(intermediate_size=64, kv_lora_rank=32, q_lora_rank=32)
    ),
    "llama4": dict(intermediate_size_mlp=64),
    **dict.fromkeys(("dots1", "ernie"), dict(intermediate_size=64)),
    "qwen2": dict(intermediate_size=64),
    "deepseek_v2_lite": dict(intermediate_size=64, kv_lora_rank=32),
}


def torch_logits(model, ids):
    with torch.no_grad():
        return model(torch.tensor(ids)).logits.numpy()


def check_steps(model, ids, expected, fraction):
    """A prefill with a cache and two decode steps behind it."""
    cache, parts = model.init_cache(2, 40), []
    assert {leaf.dtype for leaf in jax.tree.leaves(cache.layers)} == {model.dtype}
    for start, stop in ((0, 34), (34, 35), (35, 36)):
        logits, cache = run(model, ids[:, start:stop], cache)
        parts.append(logits)
    assert_logits_close(np.concatenate(parts, axis=1), expected[:, :36], fraction)


def check(directory, judge, ids, scheme, has_steps):
    model = load_pretrained(directory, dtype=jnp.float32, quantize=WEIGHTS_ONLY.get(scheme))
    assert load_pretrained(directory).moe_blocks()[0].experts.config.scheme.name == scheme
    expected = torch_logits(judge, ids)
    assert_logits_close(model.score(ids), expected, 1e-4)
    if has_steps:
        check_steps(model, ids, expected, 1e-4)


# By default only the prompt's logits; with decode steps in the slow run.
STEPS = pytest.mark.parametrize("has_steps", [False, pytest.param(True, marks=pytest.mark.slow)])


FAMILIES = [name for name in FAMILY_CASES if name not in MORE_FAMILY_CASES]
# Writers store experts one by one; of these families transformers reads them only as one tensor.
FUSED = {"granite": "granitemoe", "llama4": "llama4_text"}


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["fp8_channel", "int8_w8a8", "w4a16_g32"])
@pytest.mark.parametrize("name", ["qwen2", "olmoe", "deepseek_v2_lite", *FAMILIES])
def test_written_by_our_writer(tmp_path, prompt, name, scheme):
    """Experts, shared experts, attention and dense layers all quantized; compressed-tensors reads the file."""
    source, target, plain = (tmp_path / word for word in ("source", "target", "plain"))
    write_checkpoint(name, source, **MULTIPLES_OF_32.get(name, {}))
    moe_jax.quantize_checkpoint(source, target, scheme=scheme, modules="all")
    weights = {f"{module}.weight": torch.tensor(value) for module, value in decompressed(target).items()}
    assert any("self_attn" in key for key in weights) and any(".experts.0." in key for key in weights)
    weights = (
        {key: value.contiguous() for key, value in fused_again(FUSED[name], weights).items()}
        if name in FUSED
        else weights
    )
    plain.mkdir()
    stored = load_file(source / "model.safetensors")
    assert name not in FUSED or weights.keys() <= stored.keys()
    save_file(stored | weights, plain / "model.safetensors", metadata={"format": "pt"})
    (plain / "config.json").write_text((source / "config.json").read_text())
    ids = prompt(2, 40)
    judge = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    check(target, judge, ids, scheme, has_steps=True)


@STEPS
@pytest.mark.parametrize("name", ["deepseek_v3", *slow("deepseek_v2", "deepseek_v32", "glm_dsa")])
def test_deepseek_fp8_as_published(tmp_path, prompt, name, has_steps):
    """Every Linear but routers, head and the weights of index heads in FP8 blocks, scales as weight_scale_inv."""
    source, compressed, target = (tmp_path / word for word in ("source", "compressed", "target"))
    write_checkpoint(name, source)
    groups = {"group_0": writers.preset("FP8_BLOCK")}
    plain = writers.compress(source, compressed, groups, ["re:.*mlp.gate$", "re:.*weights_proj$", "lm_head"])
    writers.as_native_fp8(compressed, target)
    stored = load_file(target / "model.safetensors")
    names = [key for key in stored if key.endswith("weight_scale_inv")]
    assert any("kv_b_proj" in key for key in names) and any("shared_experts" in key for key in names)
    assert sum(".indexer.w" in key for key in names) == 2 * sum(key.endswith("weights_proj.weight") for key in stored)
    ids = prompt(2, 40)
    judge = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    check(target, judge, ids, "fp8_block", has_steps)


@STEPS
def test_gpt_oss_mxfp4_as_published(tmp_path, prompt, has_steps):
    judge, ids = write_checkpoint("gpt_oss", tmp_path), prompt(2, 40)
    as_mxfp4(tmp_path, judge)
    assert json.loads((tmp_path / "config.json").read_text())["quantization_config"]["quant_method"] == "mxfp4"
    check(tmp_path, judge, ids, "mxfp4_a16", has_steps)


@STEPS
@pytest.mark.parametrize("name", ["deepseek_v3", *slow("deepseek_v2", "gpt_oss", "qwen2", "olmoe")])
def test_bfloat16(tmp_path, prompt, name, has_steps):
    """Rounded weights and activations stay near float32; prefill and decode steps agree with each other.

    Every token takes all experts here: where some are chosen, a rounded score now and then chooses others.
    """
    judge, ids = write_checkpoint(name, tmp_path, num_experts_per_tok=8, topk_group=4), prompt(2, 40)
    model = load_pretrained(tmp_path)
    whole = np.asarray(model.score(ids))
    assert_logits_close(whole, torch_logits(judge, ids), 0.03)
    if has_steps:
        check_steps(model, ids, whole, 0.03)
