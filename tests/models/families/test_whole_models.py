"""Families as whole models: logits, greedy tokens and the report of ``inspect`` against transformers in float32."""

import numpy as np
import pytest

from moe_jax.inspection import inspect_checkpoint
from moe_jax.models import DecoderConfig, generate
from tests.support.cases.models import FAMILY_CASES, assert_logits_close


@pytest.mark.parametrize("name", FAMILY_CASES)
def test_logits(case, prompt, name):
    case, ids = case(name), prompt(2, 40)
    assert_logits_close(case.model.score(ids), case.torch_logits(ids))


@pytest.mark.parametrize("name", FAMILY_CASES)
@pytest.mark.sample(4)
def test_greedy(case, prompt, name):
    """12 tokens, and then 6 by way of the cache."""
    case, ids = case(name), prompt(2, 12)
    made = generate(case.model, ids, max_new_tokens=6)
    np.testing.assert_array_equal(made, case.torch_greedy(ids, 6, pad_token_id=0))


@pytest.mark.parametrize("name", FAMILY_CASES)
def test_inspection(case, name):
    report = inspect_checkpoint(case(name).directory)
    assert report.problems == () and isinstance(report.config, DecoderConfig)
    assert "other" not in {part.name for part in report.parts}
