"""Whole models and blocks whose weights the caller has split over a mesh with Explicit axes, by their logical names."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import moe_jax
from moe_jax.models import generate
from moe_jax.models._logprobs import prompt_logprobs
from tests.models.test_partition import mesh_of
from tests.support.cases.models import assert_logits_close, slow

RULES = (("expert", "ep"), ("mlp", "tp"), ("heads", "tp"), ("kv_heads", "tp"), ("vocab", "tp"))


def split(module):
    """(the module with its arrays split by ``RULES``, the mesh)."""
    mesh = jax.make_mesh((2, 2), ("ep", "tp"), axis_types=(AxisType.Explicit,) * 2)
    graphdef, state = nnx.split(module)
    with nnx.logical_axis_rules(RULES):
        shardings = nnx.get_named_sharding(state, mesh)
    return nnx.merge(graphdef, jax.device_put(state, shardings)), mesh


@pytest.mark.parametrize(
    "name", ["deepseek_v3", "qwen3_next", *slow("mixtral_tied_window", "qwen2", "gpt_oss", "qwen3_5")]
)
@pytest.mark.sample(2)
def test_logits_and_cache(case, prompt, name):
    """Two calls with a cache, rows split over devices; shared experts and dense layers too."""
    model, ids = case(name).model, prompt(2, 6)
    spread, mesh = split(model)
    assert any("tp" in leaf.sharding.spec for leaf in jax.tree.leaves(nnx.state(spread)))
    call = jax.jit(lambda model, ids, cache: model(ids, cache=cache))
    expected, _ = call(model, ids, model.init_cache(2, 8))
    rows = jax.device_put(jnp.asarray(ids), NamedSharding(mesh, P("ep")))
    first, cache = call(spread, rows[:, :4], spread.init_cache(2, 8))
    second, _ = call(spread, rows[:, 4:], cache)
    assert_logits_close(np.concatenate([first, second], axis=1), np.asarray(expected))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3", "qwen3_next"])
def test_answers(case, prompt, name):
    model, ids = case(name).model, prompt(2, 12)
    spread, _ = split(model)
    np.testing.assert_array_equal(generate(spread, ids, max_new_tokens=8), generate(model, ids, max_new_tokens=8))
    ragged = [ids[0].tolist(), ids[1, :3].tolist()]
    assert generate(spread, ragged, max_new_tokens=4) == generate(model, ragged, max_new_tokens=4)


def test_log_probabilities_of_a_prompt(case):
    spread = moe_jax.load_pretrained(
        case("qwen3").directory, dtype="float32", mesh=mesh_of("expert=2,tensor=2", "Explicit")
    )
    found, expected = (prompt_logprobs(model, list(range(3, 40)), 2) for model in (spread, case("qwen3").model))
    np.testing.assert_allclose(found.chosen, expected.chosen, atol=1e-5)


def test_a_block_with_shared_experts(case):
    block = moe_jax.load_moe(case("deepseek_v3").directory, 1, dtype="float32")
    x = jax.random.normal(jax.random.key(0), (2, 5, 64))
    call = jax.jit(lambda block, x: block(x))
    np.testing.assert_allclose(call(split(block)[0], x), call(block, x), rtol=0, atol=1e-5)
