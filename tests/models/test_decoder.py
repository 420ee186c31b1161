"""Logits against transformers in float32, family by family and option by option; cache, padding, positions, errors."""

import copy
import dataclasses
from inspect import unwrap  # the tests' own checks of annotations would speak first

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from moe_jax.models import MLAConfig
from moe_jax.models.attention import _attention
from moe_jax.models.attention._mla import is_cheaper_absorbed
from moe_jax.models.families.qwen3_moe import Qwen3MoeForCausalLM
from tests.support.cases.models import CASES, FAMILY_CASES, ROPES, SLOW, VOCAB, assert_logits_close, run, slow
from tests.support.refusals import refuses

# Frequencies that change with the length leave earlier keys in the cache as they were, in transformers too.
STATIC = [name for name in CASES if name not in ("qwen3_dynamic", "qwen3_longrope")]


@pytest.mark.parametrize("name", [*(name for name in CASES if name not in SLOW), *slow(*SLOW)])
@pytest.mark.sample(5)
def test_logits(case, prompt, name):
    """40 tokens: longer than the windows and than what dynamic and longrope switch at."""
    case, ids = case(name), prompt(2, 40)
    assert_logits_close(case.model.score(ids), case.torch_logits(ids))


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
@pytest.mark.sample(2)
def test_short_prompts_keep_the_original_frequencies(case, prompt, kind):
    case, ids = case(f"qwen3_{kind}"), prompt(2, 12)
    assert_logits_close(case.model.score(ids), case.torch_logits(ids))


def test_rope_variants_matter(case, prompt):
    """Each variant changes the logits, so that agreement above says something about it."""
    ids = prompt(1, 40)
    plain = case("qwen3_linear").torch_logits(ids)
    for kind in ROPES.keys() - {"linear"}:
        assert np.abs(case(f"qwen3_{kind}").torch_logits(ids) - plain).max() > 0.01


@pytest.mark.slow
def test_prompts_shorter_than_the_window(case, prompt):
    case, ids = case("gpt_oss"), prompt(2, 4)
    assert case.model.config.sliding_window > 4
    assert_logits_close(case.model.score(ids), case.torch_logits(ids))


@pytest.mark.parametrize(
    "name",
    [
        "mixtral_tied_window",
        "qwen3_dense_bias",
        "qwen3_yarn",
        "deepseek_v3",
        "qwen3_next",
        *slow("qwen2", "olmoe_clipped", "gpt_oss", "qwen3_5"),
    ],
)
@pytest.mark.sample(4)
def test_decode_agrees_with_prefill(case, prompt, name):
    assert name in (*STATIC, *FAMILY_CASES)
    model, ids = case(name).model, prompt(2, 40)
    whole = np.asarray(model.score(ids))[:, :20]
    cache = model.init_cache(2, 24)
    logits, cache = run(model, ids[:, :7], cache=cache)
    parts = [logits]
    for t in range(7, 20):
        logits, cache = run(model, ids[:, t : t + 1], cache=cache)
        parts.append(logits)
    assert cache.lengths.tolist() == [20, 20] and cache.num_slots == 24
    assert_logits_close(np.concatenate(parts, axis=1), whole)


def test_plain_call_is_score(case, prompt):
    model, ids = case("qwen3_yarn").model, prompt(2, 40)
    assert_logits_close(run(model, ids), np.asarray(model.score(ids)))


@pytest.mark.parametrize("name", ["mixtral_tied_window", "qwen3_dynamic", "deepseek_v3", "gpt_oss", "qwen3_next"])
def test_padding_changes_nothing(case, prompt, name):
    """Rows padded left, right, and in the middle give what each gives alone."""
    model, ids = case(name).model, prompt(2, 60)
    left, right, middle = np.ones((3, 60), bool)
    left[:24], right[35:], middle[20:43] = False, False, False
    for mask in (np.stack([left, right]), np.stack([right, middle])):
        together = np.asarray(model.score(np.where(mask, ids, -100), mask))
        for row in range(2):
            alone = np.asarray(model.score(np.tile(ids[row][mask[row]], (2, 1))))[0]
            assert_logits_close(together[row][mask[row]], alone)


@pytest.mark.parametrize("name", ["mixtral_tied_window", *slow("deepseek_v3", "gpt_oss", "qwen3_next", "qwen3_5")])
def test_padding_in_the_cache(case, prompt, name):
    """A left-padded and a right-padded row go on as if they were alone."""
    model, ids = case(name).model, prompt(2, 44)
    mask = np.ones((2, 40), bool)
    mask[0, :3], mask[1, 35:] = False, False
    _, cache = run(model, ids[:, :40], attention_mask=mask, cache=model.init_cache(2, 44))
    np.testing.assert_array_equal(cache.num_tokens, [37, 35])
    together, _ = run(model, ids[:, 40:], cache=cache)
    for row in range(2):
        alone = np.concatenate([ids[row, :40][mask[row]], ids[row, 40:]])
        assert_logits_close(together[row], np.asarray(model.score(np.tile(alone, (2, 1))))[0, -4:])


@pytest.mark.parametrize(
    "name", ["mixtral_tied_window", "qwen3_next", *slow("deepseek_v3", "gpt_oss", "qwen3_yarn", "qwen3_5")]
)
def test_rows_have_their_own_lengths(case, prompt, name):
    """Chunks of other sizes per row, padded left, right and in between; the slots are just enough for the longest."""
    model, ids = case(name).model, prompt(3, 24)
    alone = np.asarray(model.score(ids))
    cache, done, got = model.init_cache(3, 24), np.zeros(3, int), [[], [], []]
    chunks = [(9, 4, 0), (0, 1, 8), (7, 8, 3), (8, 3, 8)]  # 24, 16 and 19 tokens
    for turn, counts in enumerate(chunks):
        mask = np.zeros((3, 9), bool)
        mask[0, : counts[0]] = mask[1, 9 - counts[1] :] = True
        mask[2, np.sort(np.random.default_rng(turn).permutation(9)[: counts[2]])] = True
        tokens = np.full((3, 9), -7, np.int32)
        for row, count in enumerate(counts):
            tokens[row, mask[row]] = ids[row, done[row] : done[row] + count]
        logits, cache = run(model, tokens, attention_mask=mask, cache=cache)
        done += counts
        for row in range(3):
            got[row].append(np.asarray(logits)[row, mask[row]])
        np.testing.assert_array_equal(cache.num_tokens, done)
    for row in range(3):
        assert_logits_close(np.concatenate(got[row]), alone[row, : done[row]])


@pytest.mark.parametrize("name", ["mixtral_tied_window", "qwen3_next"])
def test_a_row_is_cleared_and_filled_again(case, prompt, name):
    """The other rows go on to the bit; a NaN of the old row, also in slots that the new one does not reach, is gone."""
    model, ids = case(name).model, prompt(3, 20)
    _, cache = run(model, ids[:, :12], cache=model.init_cache(3, 20))
    spoiled = jax.tree.map(lambda a: a.at[1].set(jnp.nan), cache.layers)
    spoiled = dataclasses.replace(cache, layers=spoiled, is_damaged=jnp.array([False, True, False]))
    fresh = spoiled.cleared(jnp.array([False, True, False]))
    np.testing.assert_array_equal(fresh.num_tokens, [12, 0, 12])
    new = prompt(1, 20)[0, ::-1]
    tokens, mask = ids[:, 12:18].copy(), np.ones((3, 6), bool)
    tokens[1, :5], mask[1, 5] = new[:5], False
    logits, after = run(model, tokens, attention_mask=mask, cache=fresh)
    np.testing.assert_array_equal(after.num_tokens, [18, 5, 18])
    undisturbed, _ = run(model, ids[:, 12:18], attention_mask=np.ones((3, 6), bool), cache=cache)
    np.testing.assert_array_equal(np.asarray(logits)[[0, 2]], np.asarray(undisturbed)[[0, 2]])
    assert_logits_close(np.asarray(logits)[1, :5], np.asarray(model.score(np.tile(new[:5], (2, 1))))[0])


def test_the_row_that_overflows_is_nan_alone(case, prompt):
    model, ids = case("qwen3_linear").model, prompt(2, 8)
    cache = dataclasses.replace(model.init_cache(2, 6), lengths=jnp.array([4, 0], jnp.int32))
    logits, cache = run(model, ids[:, :4], cache=cache)
    assert np.isnan(logits[0]).all() and np.isfinite(logits[1]).all()
    mask = np.array([[False], [True]])
    logits, cache = run(model, ids[:, 4:5], attention_mask=mask, cache=cache)
    np.testing.assert_array_equal(cache.lengths, [6, 5])
    assert_logits_close(logits[1], np.asarray(model.score(ids[1:, :5]))[0, 4:])


def test_explicit_positions_in_the_cache(case, prompt):
    """A window reaches by positions: they are kept from call to call, and tokens without count on."""
    case, ids = case("mixtral_tied_window"), prompt(2, 10)
    positions = np.array([np.arange(10) * 3, np.arange(10) // 2 + 20])
    whole = np.asarray(run(case.model, ids, positions=positions))
    logits, cache = run(case.model, ids[:, :4], positions=positions[:, :4], cache=case.model.init_cache(2, 12))
    assert_logits_close(logits, whole[:, :4])
    logits, cache = run(case.model, ids[:, 4:], positions=positions[:, 4:], cache=cache)
    assert_logits_close(logits, whole[:, 4:])
    _, cache = run(case.model, ids[:, :1], cache=cache)
    np.testing.assert_array_equal(np.asarray(cache.positions)[:, :11], np.c_[positions, [10, 10]])


def test_explicit_positions(case, prompt):
    case, ids = case("qwen3_yarn"), prompt(2, 10)
    positions = np.array([np.arange(10) * 3, np.arange(10) + 20])
    expected = case.torch_logits(ids, position_ids=torch.tensor(positions))
    assert_logits_close(run(case.model, ids, positions=positions), expected)


@pytest.mark.parametrize("name", ["qwen3_tied_window", *slow("deepseek_v3", "gpt_oss")])
def test_long_prefill_in_blocks(case, prompt, monkeypatch, name):
    """Blocks of queries, the last one ragged, see what all queries at once see."""
    model, ids = case(name).model, prompt(2, 43)
    mask = np.ones((2, 43), bool)
    mask[1, :4] = False
    expected = np.asarray(model.score(ids, mask))
    monkeypatch.setattr(_attention, "QUERY_BLOCK", 5)
    blocks = jax.jit(lambda model, ids, mask: model(ids, attention_mask=mask))  # traced anew, with the small block
    actual = np.asarray(blocks(model, ids, mask))
    assert_logits_close(actual[mask], expected[mask])


def test_latent_cache(case, prompt):
    """MLA caches one row of latent and rotated key per token and layer, whatever the number of heads."""
    model = case("deepseek_v3").model
    cache = model.init_cache(2, 24)
    assert [[array.shape for array in layer.arrays] for layer in cache.layers] == [[(2, 1, 24, 16 + 8)]] * 2
    assert [len(layer.arrays) for layer in case("gpt_oss").model.init_cache(1, 8).layers] == [2, 2]


def test_absorbing_is_for_few_queries():
    """DeepSeek-V3's sizes: a decode step absorbs, a prefill expands; equal costs lie between."""
    config = MLAConfig(q_lora_rank=None, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    assert is_cheaper_absorbed(config, 1, 4096) and is_cheaper_absorbed(config, 64, 4096)
    assert not is_cheaper_absorbed(config, 1024, 4096) and not is_cheaper_absorbed(config, 4096, 4096)


def without_sinks(model):
    for layer in model.model.layers:
        layer.self_attn.sinks.data.fill_(-1e9)


def scale_of_scores(model):
    for layer in model.model.layers:
        layer.self_attn.scaling = layer.self_attn.qk_head_dim**-0.5


@pytest.mark.parametrize(
    "name, change",
    [
        ("gpt_oss", without_sinks),
        ("gpt_oss", lambda model: setattr(model.config, "layer_types", ["sliding_attention"] * 2)),
        ("deepseek_v3", scale_of_scores),
        ("deepseek_v3", lambda model: setattr(model.config, "rope_interleave", False)),
        ("olmoe_clipped", lambda model: setattr(model.config, "clip_qkv", None)),
    ],
)
def test_attention_variants_matter(case, prompt, name, change):
    """Each one changes transformers' logits, so that agreement above says something about it."""
    case, ids = case(name), prompt(2, 40)
    expected, other = case.torch_logits(ids), copy.deepcopy(case.torch_model)
    change(other)
    difference = dataclasses.replace(case, torch_model=other).torch_logits(ids) - expected
    assert np.abs(difference).max() > 1e-2 * np.ptp(expected)


def test_batch_rows_are_independent(case, prompt):
    model, ids = case("qwen3_dynamic").model, prompt(2, 40)
    assert_logits_close(model.score(ids)[1], np.asarray(model.score(ids[[1, 1]]))[0])


def test_random_initialisation(case, prompt):
    """A model built with rngs runs, in bfloat16, and has the parameters of a loaded one."""
    loaded = case("qwen3_linear").model
    model = Qwen3MoeForCausalLM(loaded.config, rngs=nnx.Rngs(0))
    logits = model.score(prompt(2, 40))
    assert logits.dtype == jnp.float32 and bool(jnp.isfinite(logits).all())
    shapes = [jax.tree.map(jnp.shape, nnx.to_pure_dict(nnx.state(m))) for m in (model, loaded)]
    assert shapes[0] == shapes[1]
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))} == {jnp.dtype(jnp.bfloat16)}


def test_abstract_model_says_so(case, prompt):
    model = Qwen3MoeForCausalLM(case("qwen3").model.config)
    refuses(ValueError, "no weights yet", model.score, prompt(1, 4))


def test_id_outside_the_vocabulary_is_not_another_token(case):
    rows = case("qwen3").model.embed_tokens(jnp.array([[VOCAB, 3, -1]]))
    assert bool(jnp.isnan(rows[0, ::2]).all()) and bool(jnp.isfinite(rows[0, 1]).all())


@pytest.mark.parametrize("bad", [VOCAB, -1, -100, 2**30])
@pytest.mark.sample(4)
def test_an_id_outside_the_vocabulary_under_jit(case, prompt, bad):
    """Its row is NaN, in later calls with the cache too; the other row and what stands in padding are as ever."""
    model, ids = case("qwen3_linear").model, prompt(2, 4)
    mask = np.ones((2, 3), bool)
    mask[1, 0] = False
    good, _ = run(model, ids[:, :3], attention_mask=mask, cache=model.init_cache(2, 4))
    wrong = ids.copy()
    wrong[:, 0] = bad  # a token of row 0, padding in row 1
    logits, cache = run(model, wrong[:, :3], attention_mask=mask, cache=model.init_cache(2, 4))
    assert np.isnan(logits[0]).all()
    np.testing.assert_array_equal(logits[1], good[1])
    logits, _ = run(model, ids[:, 3:], attention_mask=np.ones((2, 1), bool), cache=cache)
    assert np.isnan(logits[0]).all() and np.isfinite(logits[1]).all()


def test_tokens_that_overflow_the_cache_under_jit(case, prompt):
    """NaN for all, from then on; more tokens than the cache has slots are an error already when traced."""
    model, ids = case("qwen3_linear").model, prompt(2, 4)
    cache, finite = model.init_cache(2, 4), []
    for _ in range(3):  # the second call lacks two slots
        logits, cache = run(model, ids[:, :3], attention_mask=np.ones((2, 3), bool), cache=cache)
        finite.append(bool(np.isfinite(logits).all()))
        assert finite[-1] or np.isnan(logits).all()
    assert finite == [True, False, False]
    with pytest.raises(ValueError, match="4 slots, 0 used; 5 more tokens do not fit"):
        run(model, prompt(2, 5), cache=model.init_cache(2, 4))


@pytest.mark.parametrize(
    "ids, inputs, words",
    [
        (np.zeros((2, 4), np.int32), dict(positions=np.zeros((2, 3), np.int32)), r"positions has shape \(2, 3\)"),
        (
            np.zeros((1, 2), np.int32),
            dict(positions=np.array([[0, -1]])),
            "positions holds -1, expected 0 to 2147483647",
        ),
        (np.zeros((1, 2), np.int32), dict(positions=np.array([[0, 2**32]])), "positions holds 4294967296, expected"),
        (np.zeros((2, 4), np.int32), dict(attention_mask=np.ones((1, 4))), r"attention_mask has shape \(1, 4\)"),
        (np.zeros((2, 0), np.int32), {}, "at least one token"),
        (np.array([[1, -1]], np.int32), {}, r"input_ids\[0, 1\] is -1, expected 0 to 95"),
        (np.array([[1, 2], [VOCAB, 2]], np.int32), dict(attention_mask=np.ones((2, 2), bool)), rf"\[1, 0\] is {VOCAB}"),
        (np.zeros((1, 65), np.int32), {}, "max_seq_len=64"),
    ],
)
def test_call_errors(case, ids, inputs, words):
    refuses(ValueError, words, case("qwen3").model, ids, **inputs)


def test_positions_of_padding_mean_nothing(case, prompt):
    model, ids, mask = case("qwen3").model, prompt(1, 4), np.array([[False, True, True, True]])
    found = [model(ids, positions=np.array([[first, 0, 1, 2]]), attention_mask=mask) for first in (-1, 0)]
    np.testing.assert_array_equal(found[0][:, 1:], found[1][:, 1:])


def test_cache_errors(case, prompt):
    model = case("qwen3_yarn").model
    refuses(ValueError, "max_len=65", model.init_cache, 1, 65)
    refuses(ValueError, "3 rows", model, prompt(2, 4), cache=model.init_cache(3, 8))
    used = dataclasses.replace(model.init_cache(2, 8), lengths=jnp.array([6, 0], jnp.int32))
    refuses(ValueError, "8 slots, 6 used; 3 more", model, prompt(2, 3), cache=used)
    with pytest.raises(ValueError, match="another model: 1 layers of float32 .*expected 2 layers of float32"):
        case("qwen3").model(prompt(2, 3), cache=model.init_cache(2, 8))
    for options, words in ((dict(batch=0, max_len=8), "batch=0"), (dict(batch=2, max_len=0), "max_len=0")):
        refuses(ValueError, words, model.init_cache, **options)


@pytest.mark.parametrize(
    "method, options, words",
    [
        ("__call__", dict(input_ids=[[1, 2]]), "input_ids has type list"),
        ("__call__", dict(input_ids=np.ones((1, 2))), "input_ids has dtype float64"),
        ("__call__", dict(positions=np.ones((1, 2))), "positions has dtype float64"),
        ("__call__", dict(attention_mask=np.zeros((1, 2))), "attention_mask has dtype float64"),
        ("__call__", dict(attention_mask=[[1, 0]]), "attention_mask has type list"),
        ("__call__", dict(cache={}), "cache has type dict"),
        ("init_cache", dict(batch=1, max_len=8.0), "max_len=8.0"),
    ],
)
def test_wrong_types(case, method, options, words):
    model = case("qwen3").model
    if method == "__call__":
        options = dict(input_ids=np.ones((1, 2), np.int32)) | options
    refuses(TypeError, words, unwrap(getattr(Qwen3MoeForCausalLM, method)), model, **options)


@pytest.mark.parametrize("length", [0, 65])
def test_max_seq_len_errors(case, length):
    refuses(ValueError, "from 1 to 64", Qwen3MoeForCausalLM, case("qwen3").model.config, max_seq_len=length)
