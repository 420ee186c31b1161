"""What a model says of its attention is what its calls decide by."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax.models import load_pretrained
from moe_jax.models.attention import _attention, _mla
from tests.support.refusals import refuses


def described(q: Any, k: Any, v: Any) -> tuple[Any, ...]:
    return tuple(None if a is None else (a.shape, jnp.dtype(a.dtype)) for a in (q, k, v))


@pytest.mark.parametrize(
    ("name", "kv_cache_dtype"),
    [("gpt_oss", None), ("gpt_oss", "fp8")]
    + [pytest.param(name, None, marks=pytest.mark.slow) for name in ("deepseek_v32", "deepseek_v3", "granite")]
    + [pytest.param(name, "fp8", marks=pytest.mark.slow) for name in ("llama4", "qwen3_next")],
)
def test_the_same_questions_as_in_a_call(case, monkeypatch, name, kv_cache_dtype):
    """Shapes, dtypes and all else that kernels are asked with, layer by layer."""
    model = load_pretrained(case(name).directory, attention="auto", kv_cache_dtype=kv_cache_dtype)
    asked: list[Any] = []

    def spy(implementation, q, k, v, **kind):
        asked.append((implementation, described(q, k, v), kind))
        return None, ["hopper: not today"]

    monkeypatch.setattr(_attention, "choose", spy)
    monkeypatch.setattr(_mla, "choose", spy)
    for tokens, slots in ((1, 16), (5, 16), (5, 8)):
        asked.clear()
        text = model.explain(tokens, batch=2, num_slots=slots)
        said = list(asked)
        asked.clear()
        ids, cache = np.zeros((2, tokens), np.int32), model.init_cache(2, slots)
        jax.eval_shape(lambda ids, cache: model.hidden_states(ids, cache=cache), ids, cache)
        assert said == asked
        assert ("not hopper: not today" in text) == bool(said)


def test_what_it_says(case):
    text = case("deepseek_v32").model.explain(1, batch=2)
    assert text.startswith(
        "attention of 1 tokens in each of 2 rows, over 64 slots\n  layers 0-1: latents over 8 selected "
    )
    assert text.endswith("weights version: 0") and "2 tokens on cpu" in text
    text = case("qwen3_next").model.explain(16, num_slots=32)
    assert "\n  layers 0: linear attention, XLA\n  layers 1: XLA; not hopper: " in text
    assert "no kernel attends in chunks" in case("llama4").model.explain(16)
    refuses(ValueError, "num_slots=4, expected an integer >= 16", case("qwen3_next").model.explain, 16, num_slots=4)
