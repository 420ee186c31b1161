"""Several adapters in one model, chosen by the row of a batch: each row is that of a model with its adapter alone."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moe_jax
from moe_jax.experts import fused_experts
from moe_jax.quantization import LowRank
from tests.adapters.test_lora_of_models import filled, load
from tests.experts.test_adapters import with_adapters
from tests.support.cases import experts as cases
from tests.support.cases.models import assert_logits_close, run
from tests.support.oracles.layer_judge import assert_layer_close
from tests.support.oracles.tolerances import assert_rows_close, tolerance
from tests.support.refusals import refuses

# Of other ranks, scales and targets.
ADAPTERS: dict[str, Any] = {
    "story": dict(rank=4, alpha=8, targets=("w13", "w2", "attention")),
    "code": dict(rank=2, alpha=1, targets=("w2", "q_proj")),
    "chat": dict(rank=3, alpha=6, targets=("w13", "o_proj"), dtype=jnp.bfloat16),
}


@pytest.fixture
def directories(case, tmp_path):
    for seed, (name, options) in enumerate(ADAPTERS.items()):
        model = moe_jax.lora(load(case("qwen3").directory), rngs=nnx.Rngs(seed), **options)
        moe_jax.save_lora(filled(model, seed, size=0.3), tmp_path / name)
    return {name: tmp_path / name for name in ADAPTERS}


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_rows_take_their_own(case, prompt, directories, implementation):
    base = case("qwen3").directory
    model = moe_jax.load_lora(load(base, implementation=implementation), directories)
    ids, rows = prompt(5, 33), ["code", None, "story", "chat", "story"]
    chosen = moe_jax.select_lora(model, rows)
    y = np.asarray(chosen.score(ids))
    for name in (None, *ADAPTERS):
        alone = load(base) if name is None else moe_jax.load_lora(load(base), directories[name])
        own = [row for row, chosen_name in enumerate(rows) if chosen_name == name]
        assert_logits_close(y[own], np.asarray(alone.score(ids))[own], 3e-5)
    plain = np.asarray(load(base).score(ids))
    assert all(
        (np.abs(y[row] - plain[row]).max() > 0.02 * np.ptp(plain)) == (rows[row] is not None) for row in range(5)
    )
    made = moe_jax.generate(chosen, ids[:, :9], max_new_tokens=5)
    alone = moe_jax.load_lora(load(base), directories["story"])
    np.testing.assert_array_equal(made[2], moe_jax.generate(alone, ids[2:3, :9], max_new_tokens=5)[0])
    assert model.layers[0].self_attn.q_proj.lora.choice is None  # the model itself is as it was


def test_another_choice_compiles_nothing(case, prompt, directories):
    model = moe_jax.load_lora(load(case("qwen3").directory), directories)
    ids = jnp.asarray(prompt(3, 16))
    choose: Any = jax.jit(lambda model, choice, ids: moe_jax.select_lora(model, choice)(ids))
    for rows in ([0, 1, -1], [2, 2, 0]):
        names = [None if row < 0 else list(ADAPTERS)[row] for row in rows]
        found = choose(model, np.asarray(rows, np.int32), ids)
        assert_logits_close(found, np.asarray(run(moe_jax.select_lora(model, names), ids)), 1e-5)
    assert choose._cache_size() == 1


def test_tokens_take_their_own(case, prompt, directories):
    """A row that changes its adapter: no token in front of the change sees it, and all behind do."""
    model = moe_jax.load_lora(load(case("qwen3").directory), directories)
    ids, last = jnp.asarray(prompt(3, 16)), [9, 4, 15]
    rows = np.array([[0, 1], [1, 2], [2, -1]], np.int32)  # adapters up to ``last`` and behind it
    choice = np.where(np.arange(16) <= np.array(last)[:, None], rows[:, :1], rows[:, 1:])
    found = np.asarray(run(moe_jax.select_lora(model, choice), ids))
    wholes = [np.asarray(run(moe_jax.select_lora(model, each), ids)) for each in rows.T]
    for row, end in enumerate(last):
        before, behind = slice(end + 1), slice(end + 1, None)
        assert_logits_close(found[row, before], wholes[0][row, before], 1e-6)
        for whole in wholes:
            assert (np.abs(found[row, behind] - whole[row, behind]).max(-1) > 1e-3).all()


def test_choices_for_tokens_move_with_them(case, prompt, directories):
    """Padding on any side moves tokens within a call; ``score`` pads them."""
    model = moe_jax.load_lora(load(case("qwen3").directory), directories)
    ids, choice = jnp.asarray(prompt(2, 9)), np.where(np.arange(9) < 5, 0, 2)[None].repeat(2, 0).astype(np.int32)
    wanted = np.asarray(run(moe_jax.select_lora(model, choice), ids))
    whole = np.asarray(run(moe_jax.select_lora(model, [next(iter(ADAPTERS))] * 2), ids))
    assert (np.abs(wanted - whole)[:, 5:].max(-1) > 1e-3).all() and (np.abs(wanted - whole)[:, :5] < 1e-4).all()
    masked: Any = jax.jit(lambda model, ids, **options: model(ids, **options))
    for place in (np.arange(9), np.arange(7, 16), np.r_[0:4, 8:13]):  # of tokens among padding
        padded, mask = np.zeros((2, 2, 16), np.int32), np.zeros((2, 16), np.int32)
        padded[0][:, place], padded[1][:, place], mask[:, place] = ids, choice, 1
        chosen = moe_jax.select_lora(model, padded[1])
        for found in (
            masked(chosen, jnp.asarray(padded[0]), attention_mask=jnp.asarray(mask)),
            masked(chosen, jnp.asarray(padded[0]), segment_ids=jnp.asarray(mask)),
            chosen.score(padded[0], mask),
        ):
            assert_logits_close(np.asarray(found)[:, place], wanted, 1e-5)
        assert chosen.layers[0].self_attn.q_proj.lora.choice.get_value().shape == (2, 16)
    assert_logits_close(moe_jax.select_lora(model, choice).score(ids), wanted, 1e-5)


@pytest.mark.parametrize("scheme", ["int8_w8a8", "fp8_tensor", "bf16"])
@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.sample(3)
def test_experts_and_their_gradients(scheme, implementation):
    """Tokens of one call against calls that give each token the ranks of its adapter alone."""
    config = cases.make_config(scheme, implementation=(implementation,))
    x, p, ids, weights = cases.make_call(config, 17)
    p, weights = jnp.nan_to_num(p), with_adapters(weights)
    chosen = np.zeros((17, 3), np.float32)
    chosen[np.arange(17), np.arange(17) % 3] = 1.0  # every rank is an adapter of its own
    chosen[4] = 0.0

    def call(loras, chosen):
        with_choice = [LowRank(lora.a, lora.b, lora.scale, chosen) for lora in loras]
        return fused_experts(x, p, ids, weights.adapted(*with_choice), config)

    loras = (weights.w13_lora, weights.w2_lora)
    y = np.asarray(jax.jit(call)(loras, jnp.asarray(chosen)))
    cotangent = jnp.asarray(np.random.default_rng(1).standard_normal(y.shape), jnp.float32)
    gradient = jax.jit(jax.grad(lambda loras, chosen, c: jnp.sum(call(loras, chosen) * c), allow_int=True))
    found = gradient(loras, jnp.asarray(chosen), cotangent)
    total = jax.tree.map(jnp.zeros_like, found)
    for rank in range(3):
        own = np.flatnonzero(chosen[:, rank])
        only = [LowRank(lora.a, lora.b, lora.scale * np.eye(3, dtype=np.float32)[rank]) for lora in loras]
        if not config.has_call_scale:  # with one, a token depends on the adapters of others
            assert_layer_close(y[own], x[own], p[own], ids[own], weights.adapted(*only), config, kernels=False)
        one = gradient(
            loras, jnp.asarray(np.eye(3, dtype=np.float32)[np.full(17, rank)]), cotangent * chosen[:, [rank]]
        )
        total = jax.tree.map(jnp.add, total, one)
    for (name, want), got in zip(jax.tree_util.tree_leaves_with_path(total), jax.tree.leaves(found), strict=True):
        size = float(jnp.abs(want).max())
        assert_rows_close(got, want, tolerance("bf16", "float32"), row_scale=max(size, 1e-6)) if size else None
        assert size > 0 or "scale" in jax.tree_util.keystr(name) or "chosen" in jax.tree_util.keystr(name)


def test_refusals(case, prompt, directories, tmp_path):
    base = case("qwen3").directory
    model, ids = moe_jax.load_lora(load(base), directories), prompt(2, 8)
    refuses(ValueError, "adapters story, code, chat are held; choose by moe_jax.select_lora", model, ids)
    refuses(
        ValueError,
        "adapters has 'poem', expected names or None .* loaded are story, code, chat",
        moe_jax.select_lora,
        model,
        ["poem"],
    )
    refuses(ValueError, r"adapters has \[\], expected names", moe_jax.select_lora, model, [])
    refuses(TypeError, "adapters has type str", moe_jax.select_lora, model, "story")
    refuses(TypeError, "adapters has dtype float32", moe_jax.select_lora, model, jnp.zeros(2))
    refuses(ValueError, "chosen for 3 rows, the call has", moe_jax.select_lora(model, [None] * 3), ids)
    refuses(ValueError, "for 2 x 3 rows and tokens", moe_jax.select_lora(model, np.zeros((2, 3), np.int32)), ids)
    refuses(ValueError, "without named adapters has none to choose", moe_jax.select_lora, load(base), ["story"])
    chosen = moe_jax.select_lora(model, ["story", "code"])
    prompts = [[1, 2], [3, 4, 5]]
    refuses(NotImplementedError, "one array of prompts", lambda: moe_jax.generate(chosen, prompts, max_new_tokens=2))
    for call in (moe_jax.merge_lora, lambda model: moe_jax.save_lora(model, tmp_path / "new")):
        refuses(NotImplementedError, "named adapters, story, code, chat, are for inference; give", call, model)
    refuses(ValueError, "source={}, expected a directory", moe_jax.load_lora, load(base), {})
