"""Families as whole models: logits, greedy tokens and the report of ``inspect`` against transformers in float32."""

import copy
import functools
import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from moe_jax import checkpointing
from moe_jax.inspection import inspect_checkpoint
from moe_jax.loading import CheckpointError
from moe_jax.models import DecoderConfig, generate, load_pretrained
from moe_jax.models.families.deepseek_v3 import DeepseekV3ForCausalLM
from tests.support.cases.families import WRAPPED, add_predictor, edit, write_llama4, write_qwen3_5
from tests.support.cases.models import FAMILY_CASES, MORE_FAMILY_CASES, SIZES, VOCAB, Case, assert_logits_close, slow
from tests.support.refusals import refuses

CASES = [*(name for name in FAMILY_CASES if name not in MORE_FAMILY_CASES), *slow(*MORE_FAMILY_CASES)]


@pytest.mark.parametrize("name", CASES)
def test_logits(case, prompt, name):
    """40 tokens: longer than the windows."""
    case, ids = case(name), prompt(2, 40)
    assert_logits_close(case.model.score(ids), case.torch_logits(ids))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sample(5)
def test_greedy(case, prompt, name):
    """12 tokens, and then 6 by way of the cache."""
    case, ids = case(name), prompt(2, 12)
    made = generate(case.model, ids, max_new_tokens=6)
    np.testing.assert_array_equal(made, case.torch_greedy(ids, 6, pad_token_id=0))


@pytest.mark.parametrize("name", CASES)
def test_inspection(case, name):
    report = inspect_checkpoint(case(name).directory)
    assert report.problems == () and isinstance(report.config, DecoderConfig)
    assert "other" not in {part.name for part in report.parts}


@pytest.mark.parametrize("length", [65, pytest.param(200, marks=pytest.mark.slow)])
def test_long_prompts_of_linear_attention(case, prompt, length):
    """Several chunks of 64 tokens, and then decode steps on the state behind them."""
    case, ids = case("qwen3_5"), prompt(2, length)
    assert_logits_close(case.model.score(ids), case.torch_logits(ids))
    np.testing.assert_array_equal(
        generate(case.model, ids, max_new_tokens=4), case.torch_greedy(ids, 4, pad_token_id=0)
    )


def without_gates(model):
    """The gates of attention give 1/2, and the next projection doubles that."""
    for layer in model.model.layers:
        if hasattr(layer, "self_attn"):
            width = layer.self_attn.head_dim
            rows = layer.self_attn.q_proj.weight.data.unflatten(0, (-1, 2 * width))
            rows[:, width:] = 0
            layer.self_attn.o_proj.weight.data *= 2


def without_convolution(model):
    """A token alone passes it."""
    for layer in model.model.layers:
        if hasattr(layer, "linear_attn"):
            layer.linear_attn.conv1d.weight.data[..., :-1] = 0


def without_memory(model):
    for layer in model.model.layers:
        if hasattr(layer, "linear_attn"):
            layer.linear_attn.A_log.data[:] = 10


@pytest.mark.parametrize("change", [without_gates, without_convolution, without_memory])
def test_parts_of_the_hybrid_matter(case, prompt, change):
    """So that agreement above says something about each of them."""
    case, ids = case("qwen3_next"), prompt(2, 40)
    changed = copy.deepcopy(case.torch_model)
    change(changed)
    with torch.no_grad():
        other = changed(torch.tensor(ids)).logits.numpy()
    expected = case.torch_logits(ids)
    assert np.abs(other - expected).max() > 0.01 * np.ptp(expected)


@pytest.mark.parametrize("is_tied", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_qwen3_5_as_published(prompt, tmp_path, is_tied):
    """Its text keys lie in text_config, all experts of a layer in one tensor; a vision model and a whole layer for
    multi-token prediction stand beside: left out, and named in the report."""
    torch_model = write_qwen3_5(tmp_path, vocab_size=VOCAB, tie_word_embeddings=is_tied)
    extra = add_predictor(tmp_path)
    model, ids = load_pretrained(tmp_path, dtype=jnp.float32), prompt(2, 40)
    with torch.no_grad():
        expected = torch_model(input_ids=torch.tensor(ids)).logits.numpy()
    assert_logits_close(model.score(ids), expected)
    report = inspect_checkpoint(tmp_path)
    assert report.problems == () and isinstance(report.config, DecoderConfig)
    parts = {part.name: part.num_tensors for part in report.parts}
    vision = sum(name.startswith("model.visual.") for name in load_file(tmp_path / "model.safetensors"))
    assert parts["left out"] == vision + len(extra) and "other" not in parts
    assert "linear attention (gated delta rule) in 1 of 2 layers" in report.render()
    if is_tied:  # the file may hold the head as well
        table = "model.language_model.embed_tokens.weight"
        edit(tmp_path, lambda tensors: tensors | {"lm_head.weight": tensors[table]})
        assert_logits_close(load_pretrained(tmp_path, dtype=jnp.float32).score(ids), expected)
    edit(tmp_path, lambda tensors: tensors | {"model.unknown.weight": torch.zeros(2)})
    refuses(CheckpointError, "1 tensors unexpected: model.unknown.weight", load_pretrained, tmp_path)


def test_hybrid_through_orbax_and_reload(case, prompt, tmp_path):
    """Decay, time steps and convolution are weights like all others."""
    case, ids = case("qwen3_next"), prompt(2, 40)
    expected = np.asarray(case.model.score(ids))
    checkpointing.save(case.model, tmp_path / "saved")
    other = load_pretrained(case.directory, dtype=jnp.float32)
    for name in ("conv_weight", "A_log", "dt_bias"):
        parameter = getattr(other.layers[0].self_attn, name)
        parameter.set_value(parameter.get_value() * 0)
    assert np.abs(np.asarray(other.score(ids)) - expected).max() > 0.01 * np.ptp(expected)
    checkpointing.restore(other, tmp_path / "saved")
    np.testing.assert_array_equal(other.score(ids), expected)
    pairs = load_file(case.directory / "model.safetensors")
    name = "model.layers.0.linear_attn.A_log"
    other.reload_weights((key, (value + (key == name)).numpy()) for key, value in pairs.items())
    np.testing.assert_array_equal(other.layers[0].self_attn.A_log.get_value(), pairs[name].numpy() + 1)


def test_long_rows_of_phi(case, prompt, monkeypatch):
    """Rows longer than 48 take the long factors and the amplitude for long rows. transformers 5 leaves the length out
    when it asks its own rule for the factors; here it says it."""
    case, ids = case("phimoe"), prompt(2, 56)
    told = functools.partial(ROPE_INIT_FUNCTIONS["longrope"], seq_len=56)
    rotary = case.torch_model.model.rotary_emb
    short = case.torch_logits(ids)
    monkeypatch.setattr(rotary, "rope_init_fn", told)
    long = case.torch_logits(ids)
    assert np.abs(long - short).max() > 0.01 * np.ptp(long)
    assert_logits_close(case.model.score(ids), long)


@pytest.mark.slow
def test_kimi_k2_is_deepseek_v3(case, prompt, tmp_path):
    """Another model_type above the same architecture and tensors."""
    case, ids = case("deepseek_v3"), prompt(2, 40)
    directory = shutil.copytree(case.directory, tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"model_type": "kimi_k2"}))
    model = load_pretrained(directory, dtype=jnp.float32)
    assert isinstance(model, DeepseekV3ForCausalLM) and inspect_checkpoint(directory).problems == ()
    assert_logits_close(model.score(ids), case.torch_logits(ids))


CHUNKS = dict(attention_chunk_size=8, no_rope_layers=[1, 0], floor_scale=4, attn_scale=0.5, num_hidden_layers=2)
LEFT_OUT = {
    "llama4": (
        CHUNKS,
        r"vision_model \(\d+ tensors\), multi_modal_projector \(1 tensors\) left out: the language model",
    ),
    "kimi_k25": (
        dict(first_k_dense_replace=1, num_hidden_layers=2),
        r"vision_tower \(2 tensors\), mm_projector \(1 tensors\) left out: the language model alone is built",
    ),
}


@pytest.mark.parametrize("name", ["llama4", *slow("kimi_k25")])
def test_published_beside_a_vision_model(tmp_path, prompt, name):
    """Names with a prefix, a text_config, tensors of other models: logits, greedy tokens and a reload of the text's."""
    options, words = LEFT_OUT[name]
    judge = WRAPPED[name][0](tmp_path, **SIZES | options)
    config = json.loads((tmp_path / "config.json").read_text())
    if name == "llama4":
        config["text_config"]["attn_temperature_tuning"] = 4  # as published
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.warns(UserWarning, match=words):
        model = load_pretrained(tmp_path, dtype=jnp.float32)
    one, ids = Case(tmp_path, judge, model), prompt(2, 40)
    assert_logits_close(model.score(ids), one.torch_logits(ids))
    made = generate(model, ids[:, :12], max_new_tokens=6)
    np.testing.assert_array_equal(made, one.torch_greedy(ids[:, :12], 6, pad_token_id=0))
    report = inspect_checkpoint(tmp_path)
    assert report.problems == () and "left out" in report.render()
    edit(tmp_path, lambda tensors: {key: value * 2 if "lm_head" in key else value for key, value in tensors.items()})
    model.reload_weights(tmp_path)
    assert_logits_close(model.score(ids), 2 * one.torch_logits(ids))


def test_what_belongs_to_no_part_is_refused(tmp_path):
    """A prefix says nothing of other tensors; a head that is missing is named as the file would have it."""
    write_llama4(tmp_path, **SIZES | CHUNKS)
    edit(tmp_path, lambda tensors: tensors | {"audio_model.conv.weight": tensors["language_model.lm_head.weight"]})
    with pytest.warns(UserWarning, match="left out"):
        refuses(CheckpointError, "1 tensors unexpected: audio_model.conv.weight", load_pretrained, tmp_path)
    edit(tmp_path, lambda tensors: {name: value for name, value in tensors.items() if "lm_head" not in name})
    with pytest.warns(UserWarning, match="left out"):
        refuses(CheckpointError, "missing: language_model.lm_head.weight", load_pretrained, tmp_path)
