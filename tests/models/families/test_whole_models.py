"""Families as whole models: logits, greedy tokens and the report of ``inspect`` against transformers in float32."""

import functools
import json
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from moe_jax.inspection import inspect_checkpoint
from moe_jax.models import DecoderConfig, generate, load_pretrained
from moe_jax.models.families.deepseek_v3 import DeepseekV3ForCausalLM
from tests.support.cases.models import FAMILY_CASES, MORE_FAMILY_CASES, assert_logits_close, slow

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
