"""generate against transformers' greedy search; end tokens, padding, sampling, and what is compiled when."""

from inspect import unwrap  # the tests' own checks of annotations would speak first

import jax
import numpy as np
import pytest

import moe_jax
from moe_jax.models import SamplingParams, generate, generate_stream
from moe_jax.models._compiled import bucket
from moe_jax.models._decoder import CausalLM
from tests.support.cases.models import VOCAB, slow
from tests.support.refusals import refuses


@pytest.mark.parametrize(
    "name",
    [
        *("mixtral", "mixtral_tied_window", "qwen3_dense_bias", "qwen3_dynamic", "qwen3_longrope"),
        *("gpt_oss", *slow("qwen2", "olmoe_clipped", "deepseek_v2_lite", "deepseek_v3")),
    ],
)
@pytest.mark.sample(3)
def test_greedy_equals_transformers(case, prompt, name):
    """Token by token; dynamic and longrope change their frequencies on the way, past 24 and 16 tokens."""
    case, ids = case(name), prompt(2, 12)
    actual = generate(case.model, ids, max_new_tokens=20)
    assert actual.shape == (2, 32) and actual.dtype == np.int32
    np.testing.assert_array_equal(actual, case.torch_greedy(ids, 20, pad_token_id=0))


def test_is_the_public_function():
    assert moe_jax.generate is generate


@pytest.mark.parametrize("name", ["mixtral_tied_window", "qwen3_next", *slow("gpt_oss", "deepseek_v3", "qwen2")])
def test_padded_prompts_equal_single_ones(case, prompt, name):
    """One row padded left, one right."""
    model, ids = case(name).model, prompt(2, 12)
    mask = np.ones((2, 12), bool)
    mask[0, :5], mask[1, 7:] = False, False
    together = np.asarray(generate(model, np.where(mask, ids, -1), max_new_tokens=20, attention_mask=mask))
    np.testing.assert_array_equal(together[:, :12], np.where(mask, ids, -1))
    for row in range(2):
        alone = np.asarray(generate(model, np.tile(ids[row][mask[row]], (2, 1)), max_new_tokens=20))
        np.testing.assert_array_equal(together[row, 12:], alone[0, -20:])


def test_end_tokens(case, prompt):
    """A row ends at its own end token and is filled; the others go on unchanged."""
    model, ids = case("mixtral").model, prompt(2, 12)
    free = np.asarray(generate(model, ids, max_new_tokens=20))[:, 12:]
    stop = int(free[0, 4])
    ended = np.asarray(generate(model, ids, max_new_tokens=20, eos_token_id=stop))[:, 12:]
    for before, after in zip(free, ended, strict=True):
        at = int(np.argmax(before == stop)) if (before == stop).any() else len(before)
        np.testing.assert_array_equal(after[: at + 1], before[: at + 1])
        assert (after[at + 1 :] == stop).all()
    two = np.asarray(generate(model, ids, max_new_tokens=20, eos_token_id=[VOCAB - 1, int(free[0, 2])]))[0, 12:]
    at = int(np.argmax((free[0] == free[0, 2]) | (free[0] == VOCAB - 1)))
    np.testing.assert_array_equal(two[: at + 1], free[0, : at + 1])
    assert (two[at + 1 :] == VOCAB - 1).all()


def test_second_call_traces_nothing(case, prompt, monkeypatch):
    """Same batch and buckets: other prompts, lengths, temperatures and seeds reuse the program; a reload does too."""
    model, traces = case("qwen3_linear").model, []
    forward = CausalLM.hidden_states
    monkeypatch.setattr(CausalLM, "hidden_states", lambda *a, **k: traces.append(1) or forward(*a, **k))

    def count(**options):
        before = len(traces)
        generate(model, prompt(2, 20)[:, : options.pop("length", 9)], **(dict(max_new_tokens=6) | options))
        return len(traces) - before

    assert count() == 2  # prefill and the turn of the loop
    assert count() == count(length=16) == count(max_new_tokens=16) == count(eos_token_id=[3, 5]) == 0
    model.reload_weights(case("qwen3_linear").directory)
    assert count() == 0
    sampled = dict(temperature=0.7, top_p=0.9, rng=jax.random.key(0))
    assert count(**sampled) == 2
    assert count(**dict(sampled, temperature=1.3, top_k=4, rng=jax.random.key(1))) == 0


@pytest.mark.parametrize("options", [{}, dict(temperature=2.0, rng=jax.random.key(7))])
@pytest.mark.sample(2)
def test_stream_is_generate(case, prompt, options):
    """Token by token what generate makes in one go: first one, then up to five at once; it ends with the last row."""
    model, ids = case("mixtral").model, prompt(2, 12)
    whole = np.asarray(generate(model, ids, max_new_tokens=20, **options))[:, 12:]
    parts = list(generate_stream(model, ids, max_new_tokens=20, tokens_at_once=5, **options))
    assert [part.shape for part in parts] == [(2, 1), (2, 5), (2, 5), (2, 5), (2, 4)]
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole)
    stop = [int(whole[0, 3]), int(whole[1, 4])]
    ended = np.asarray(generate(model, ids, max_new_tokens=20, eos_token_id=stop, **options))[:, 12:]
    early = np.concatenate(list(generate_stream(model, ids, max_new_tokens=20, eos_token_id=stop, **options)), axis=1)
    assert early.shape[1] <= 5
    np.testing.assert_array_equal(early, ended[:, : early.shape[1]])
    assert list(generate_stream(model, ids, max_new_tokens=0)) == []


def test_stream_refuses_before_the_first_token(case):
    with pytest.raises(ValueError, match="tokens_at_once=0"):
        generate_stream(case("mixtral").model, [[1, 2]], max_new_tokens=4, tokens_at_once=0)
    with pytest.raises(ValueError, match="needs rng"):
        generate_stream(case("mixtral").model, [[1, 2]], max_new_tokens=4, temperature=1.0)


def test_sampling_obeys_top_k(case, prompt):
    """Each sampled token is among the k likeliest of the model's own distribution, and seeds decide."""
    model, ids = case("qwen3_linear").model, np.tile(prompt(1, 9), (2, 1))
    options = dict(max_new_tokens=30, temperature=5.0, top_k=3)
    out = np.asarray(generate(model, ids, rng=jax.random.key(3), **options))
    logits = np.asarray(model.score(out))[:, 8:-1]
    rank = (logits > np.take_along_axis(logits, out[:, 9:, None], axis=2)).sum(axis=2)
    assert rank.max() < 3 and rank.max() > 0
    assert len({tuple(row) for row in out}) > 1
    np.testing.assert_array_equal(out, generate(model, ids, rng=jax.random.key(3), **options))
    assert not np.array_equal(out, generate(model, ids, rng=jax.random.key(4), **options))


def test_penalty_equals_transformers(case, prompt):
    """The prompt counts, and so do tokens that were made; a penalty that changes nothing would not be seen."""
    case, ids = case("mixtral"), prompt(2, 12)
    params = SamplingParams(temperature=0.0, repetition_penalty=1.5)
    actual = generate(case.model, ids, max_new_tokens=20, sampling_params=params)
    np.testing.assert_array_equal(actual, case.torch_greedy(ids, 20, pad_token_id=0, repetition_penalty=1.5))
    assert not np.array_equal(actual, generate(case.model, ids, max_new_tokens=20))


@pytest.mark.parametrize("mesh", [None, pytest.param("expert=2,tensor=2", marks=pytest.mark.slow)])
def test_rows_have_their_own_settings(case, prompt, mesh):
    """What a row gets alone it gets beside rows of other settings: draws, penalties, end tokens, number of tokens."""
    model, ids = case("qwen3_linear").model, prompt(4, 12)
    if mesh is not None:
        axes = jax.make_mesh((2, 2), ("expert", "tensor"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
        model = moe_jax.load_pretrained(case("qwen3_linear").directory, dtype="float32", mesh=axes)
    free = np.asarray(generate(model, ids, max_new_tokens=20))[:, 12:]
    params = [
        SamplingParams(temperature=0.0, stop_token_ids=[int(free[0, 4])]),
        SamplingParams(temperature=1.5, seed=7, top_p=0.9, min_p=0.01, logit_bias={3: 2.0}),
        SamplingParams(temperature=0.0, max_tokens=6),
        SamplingParams(temperature=0.8, seed=1, top_k=20, presence_penalty=1.0, frequency_penalty=0.5),
    ]
    made = np.asarray(generate(model, ids, max_new_tokens=20, sampling_params=params))[:, 12:]
    end = np.flatnonzero(free[0] == free[0, 4])[0]
    np.testing.assert_array_equal(made[0], [*free[0, : end + 1], *[free[0, 4]] * (19 - end)])
    np.testing.assert_array_equal(made[2], [*free[2, :6], *[-1] * 14])
    for row in (1, 3):
        alone = generate(model, ids[[row] * 4], max_new_tokens=20, sampling_params=params[row])
        np.testing.assert_array_equal(np.asarray(alone)[:, 12:], made[[row] * 4])
        assert not np.array_equal(made[row], free[row])


def test_no_new_tokens(case):
    np.testing.assert_array_equal(generate(case("mixtral").model, [[3, 4, 5]], max_new_tokens=0), [[3, 4, 5]])


@pytest.mark.parametrize(
    "ids, options, words",
    [
        ([[1, 2]], dict(max_new_tokens=-1), "max_new_tokens=-1"),
        ([[1, 2]], dict(temperature=0.5), "needs rng"),
        ([[1, 2]], dict(max_new_tokens=63), "make 65 tokens, the model takes max_seq_len=64"),
        ([[1, VOCAB]], {}, rf"input_ids\[0, 1\] is {VOCAB}, expected 0 to {VOCAB - 1}"),
        ([[1, -1]], {}, r"input_ids\[0, 1\] is -1"),
        ([1, 2], {}, r"shape \(2,\)"),
        (np.zeros((0, 3), np.int32), {}, r"shape \(0, 3\)"),
        ([], {}, r"shape \(0,\), expected \(B, S\) with at least one token"),
        ([[1, 2]], dict(attention_mask=[[1]]), r"attention_mask has shape \(1, 1\)"),
        ([[1, 2], [3, 4]], dict(attention_mask=[[1, 1], [0, 0]]), "row 1 of input_ids without tokens"),
        ([[1, 2]], dict(attention_mask=[[1, 2]]), "attention_mask holds 2"),
        ([[1], [2, 3]], dict(attention_mask=[[1, 1], [1, 1]]), "rows of unequal length"),
        ([[1, 2]], dict(eos_token_id=VOCAB), rf"eos_token_id={VOCAB}, expected an integer from 0 to {VOCAB - 1}"),
        ([[1, 2]], dict(eos_token_id=[3, 2**40]), f"eos_token_id={2**40}"),
        ([[1, 2]], dict(eos_token_id=-1), "eos_token_id=-1"),
        ([[1, 2]], dict(temperature=1.0, sampling_params=SamplingParams()), "give one or the other"),
        ([[1, 2]], dict(sampling_params=[SamplingParams()] * 2), "2 entries, expected one for each of 1 prompts"),
        ([[1, 2]], dict(sampling_params=SamplingParams()), "needs rng"),
    ],
)
def test_refusals(case, ids, options, words):
    refuses(ValueError, words, generate, case("mixtral").model, ids, **dict(max_new_tokens=4) | options)


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(input_ids=[[1.0, 2.0]]), "input_ids has dtype float64"),
        (dict(attention_mask=[[0.0, -1e9]]), "attention_mask has dtype float64"),
        (dict(max_new_tokens=True), "max_new_tokens=True"),
        (dict(max_new_tokens=4.0), "max_new_tokens=4.0"),
        (dict(eos_token_id=1.5), "eos_token_id=1.5"),
        (dict(eos_token_id=[1, "2"]), "eos_token_id='2'"),
        (dict(eos_token_id=True), "eos_token_id=True"),
        (dict(model=lambda ids: ids), "model has type function"),
        (dict(sampling_params={"top_k": 1}), "expected SamplingParams"),
        (dict(enable_prefix_caching="no"), "enable_prefix_caching='no', expected True or False"),
    ],
)
def test_wrong_types(case, options, words):
    with pytest.raises(TypeError, match=words):
        unwrap(generate)(**(dict(model=case("mixtral").model, input_ids=[[1, 2]], max_new_tokens=4) | options))


def test_inside_jit(case):
    model = case("mixtral").model
    for call in (lambda ids: generate(model, ids, max_new_tokens=2), model.score):
        refuses(TypeError, "input_ids is traced.*outside jax.jit", jax.eval_shape, call, np.ones((1, 3), np.int32))
    with pytest.raises(TypeError, match="reload_weights inside jax.jit"):
        jax.eval_shape(lambda model: model.reload_weights(case("mixtral").directory), model)


def test_buckets():
    lengths = range(1, 5000)
    assert all(bucket(n) >= n for n in lengths) and all(bucket(n) <= max(2 * n, 16) for n in lengths)
    assert sorted({bucket(n) for n in lengths}) == [16, 32, 64, 128, 256, 512, 1024, 2048, 3072, 4096, 5120]
