"""Families as whole models: logits, greedy tokens and the report of ``inspect`` against transformers in float32."""

import functools
import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from moe_jax.inspection import inspect_checkpoint
from moe_jax.loading import CheckpointError
from moe_jax.models import DecoderConfig, generate, load_pretrained
from moe_jax.models.families.deepseek_v3 import DeepseekV3ForCausalLM
from tests.support.cases.families import WRAPPED, edit, write_llama4
from tests.support.cases.models import FAMILY_CASES, MORE_FAMILY_CASES, SIZES, Case, assert_logits_close, slow
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
