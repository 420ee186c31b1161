"""The distribution of sampled tokens against one written out in NumPy."""

import dataclasses
from inspect import unwrap  # the tests' own checks of annotations would speak first

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from moe_jax.models._sampling import History, Sampler, SamplingParams, check_key, kept
from tests.support.refusals import refuses

LOGITS = np.log(np.array([0.05, 0.4, 0.1, 0.25, 0.2]))  # by likelihood: 1, 3, 4, 2, 0


run = jax.jit(lambda sampler, logits, steps, history=None: sampler(logits, steps, history))


def sampler_of(*params, rng=None, vocab_size=5, **options):
    rng = jax.random.key(0) if rng is None else rng
    return Sampler.create(params, rng, vocab_size=vocab_size, max_new_tokens=99, **options)


def choose(logits, *params, step=0, **options):
    """One token for each row of logits, whose settings are the last of ``params`` from there on."""
    logits = jnp.asarray(logits, jnp.float32)
    params = [*params, *[params[-1]] * (len(logits) - len(params))]
    sampler = sampler_of(*params, vocab_size=logits.shape[1], **options)
    return np.asarray(run(sampler, logits, jnp.full(len(logits), step, jnp.int32)))


def draw(n=20000, **options):
    tokens = choose(np.broadcast_to(LOGITS, (n, 5)), SamplingParams(**options))
    assert tokens.dtype == np.int32
    return np.bincount(tokens, minlength=5) / n


def expected(keep, temperature=1.0):
    p = np.exp(LOGITS / temperature) * np.isin(np.arange(5), keep)
    return p / p.sum()


def test_numbers_beyond_float32():
    """As the largest it holds: infinities would make NaN of logits, which every argmax takes."""
    early = SamplingParams(temperature=0, min_tokens=2, logit_bias={3: 1e39})
    assert choose([LOGITS], early, eos_token_ids=[3]).tolist() == [1]
    assert choose([LOGITS], early, eos_token_ids=[3], step=2).tolist() == [3]
    strong = SamplingParams(temperature=0, repetition_penalty=1e45)
    history = History(jnp.asarray([[True] * 3 + [False] * 2]), jnp.zeros((1, 5), jnp.int32))
    assert run(
        sampler_of(strong), jnp.asarray([[0.0, -1.0, 2.0, -3.0, 1.0]]), jnp.zeros(1, jnp.int32), history
    ).tolist() == [4]


@pytest.mark.parametrize(
    "options, keep",
    [
        ({}, [0, 1, 2, 3, 4]),
        (dict(temperature=0.5), [0, 1, 2, 3, 4]),
        (dict(top_k=1), [1]),
        (dict(top_k=3), [1, 3, 4]),
        (dict(top_k=50), [0, 1, 2, 3, 4]),
        (dict(top_k=2**40), [0, 1, 2, 3, 4]),
        (dict(top_p=0.5), [1, 3]),
        (dict(top_p=0.66), [1, 3, 4]),
        (dict(top_p=1e-6), [1]),
        # top-k renormalizes before top-p: 0.4 / 0.85 = 0.47, with the next 0.76
        (dict(top_k=3, top_p=0.7), [1, 3]),
        (dict(top_k=3, top_p=0.9), [1, 3, 4]),
        (dict(temperature=2.0, top_p=0.5), [1, 3]),
    ],
)
@pytest.mark.sample(2)
def test_distribution(options, keep):
    found, wanted = draw(**options), expected(keep, options.get("temperature", 1.0))
    assert (found[wanted == 0] == 0).all()
    np.testing.assert_allclose(found, wanted, atol=4 * np.sqrt(0.25 / 20000))


def test_greedy_takes_the_lower_index_on_ties():
    logits = [[1.0, 3.0, 3.0], [2.0, 0.0, 2.0]]
    np.testing.assert_array_equal(choose(logits, SamplingParams(temperature=0.0)), [1, 0])


@pytest.mark.parametrize("temperature", [1e-30, 1e-45, 1e-300])
def test_the_coldest_is_greedy_and_draws_ties(temperature):
    """Also where float32 has no such number, and for logits whose quotient it cannot hold."""
    plain = SamplingParams(temperature=temperature)
    logits = np.broadcast_to([-1e30, 3e8, 3e8, 2e8, 0.0], (200, 5))
    for each in (SamplingParams(temperature=temperature, top_p=0.9), plain):
        assert set(choose(logits, each).tolist()) == {1, 2}
    assert choose([[0.1, 0.1000001, 0.0]], plain).tolist() == [1]


def test_the_hottest_is_uniform():
    assert (draw(temperature=1e300) > 0.15).all()


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(temperature="1"), "temperature='1'"),
        (dict(temperature=True), "temperature=True"),
        (dict(temperature=[1.0]), r"temperature=\[1.0\]"),
        (dict(top_p=None), "top_p=None"),
        (dict(top_k=1.0), "top_k=1.0"),
        (dict(top_k=True), "top_k=True"),
        (dict(min_p="0"), "min_p='0'"),
        (dict(presence_penalty=None), "presence_penalty=None"),
        (dict(logit_bias=[1]), "logit_bias has type list"),
        (dict(logit_bias={1.5: 2}), "logit_bias=1.5"),
        (dict(logit_bias={1: "2"}), r"logit_bias\[1\]='2'"),
        (dict(seed=1.0), "seed=1.0"),
        (dict(stop_token_ids=["a"]), "stop_token_ids='a'"),
        (dict(max_tokens=True), "max_tokens=True"),
    ],
)
def test_wrong_types(options, words):
    with pytest.raises(TypeError, match=words):
        made = object.__new__(SamplingParams)
        for field in dataclasses.fields(SamplingParams):
            object.__setattr__(made, field.name, options.get(field.name, field.default))
        unwrap(SamplingParams.__post_init__)(made)


@pytest.mark.parametrize(
    "rng, words",
    [
        (42, "rng has type int"),
        (jnp.zeros(2, jnp.int32), "rng has dtype int32"),
        (jax.random.split(jax.random.key(0)), r"rng has dtype key<fry> and shape \(2,\)"),
    ],
)
def test_wrong_keys(rng, words):
    refuses(TypeError, words, check_key, rng)


def test_top_k_keeps_exactly_k_on_ties():
    assert set(choose(np.zeros((500, 6)), SamplingParams(top_k=2)).tolist()) == {0, 1}


def test_values_do_not_recompile():
    traces = []

    @jax.jit
    def counted(sampler, logits, steps):
        traces.append(1)
        return sampler(logits, steps)

    for temperature, top_p, top_k, bias in (
        (1.0, 0.9, 3, {1: 2}),
        (0.5, 0.8, 2, {3: 1.0, 2: 2}),
        (0.7, 1.0, 1, {0: 1}),
    ):
        params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, logit_bias=bias)
        counted(sampler_of(params, eos_token_ids=range(top_k)), jnp.zeros((1, 5)), jnp.zeros(1, jnp.int32))
    assert len(traces) == 1


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(temperature=-0.1), "temperature=-0.1"),
        (dict(temperature=float("nan")), "temperature=nan"),
        (dict(top_p=0.0), "top_p=0.0"),
        (dict(top_p=1.5), "top_p=1.5"),
        (dict(top_k=-2), "top_k=-2"),
        (dict(min_p=1.5), "min_p=1.5"),
        (dict(repetition_penalty=0), "repetition_penalty=0"),
        (dict(presence_penalty=3), "presence_penalty=3"),
        (dict(frequency_penalty=-2.5), "frequency_penalty=-2.5"),
        (dict(logit_bias={-1: 2}), "logit_bias=-1"),
        (dict(logit_bias={1: float("inf")}), r"logit_bias\[1\]=inf"),
        (dict(seed=-1), "seed=-1"),
        (dict(stop_token_ids=[-1]), "stop_token_ids=-1"),
        (dict(max_tokens=0), "max_tokens=0"),
    ],
)
def test_refusals(options, words):
    refuses(ValueError, words, SamplingParams, **options)


def test_refusals_of_a_batch():
    def create(*params):
        return Sampler.create(params, None, vocab_size=5, max_new_tokens=4)

    refuses(ValueError, "needs rng", create, SamplingParams())
    refuses(ValueError, "of row 1 samples", create, SamplingParams(temperature=0), SamplingParams())
    refuses(ValueError, "row 0 name token 5, expected 0 to 4", create, SamplingParams(seed=1, logit_bias={5: 1}))
    refuses(ValueError, "row 0 name token 7", create, SamplingParams(seed=1, stop_token_ids=[1, 7]))
    every = SamplingParams(seed=1, stop_token_ids=range(5), min_tokens=2)
    refuses(ValueError, "row 0: min_tokens=2 leaves no token to choose, since all 5", create, every)
    create(SamplingParams(seed=1, stop_token_ids=range(4), min_tokens=2))


def sorted_set(logits, min_p, top_k, top_p):
    """What vLLM's order of steps keeps, by a stable descending sort in float64; and how near p came to a sum."""
    weights = np.exp(np.asarray(logits, np.float64) - np.max(logits))
    order = np.argsort(-weights, kind="stable")
    order = order[weights[order] >= np.float32(min_p)]
    order = order[: top_k or len(order)]
    before = np.cumsum(weights[order]) - weights[order]
    target = np.float32(top_p) * weights[order].sum()
    keep = order if top_p == 1 else order[before < target]
    return set(keep.tolist()), np.abs(before - target).min() / target


def test_sets_are_those_of_a_sort():
    """Gaussian, tied, flat and peaked logits; negative zero is zero, a masked token is never needed."""
    rng, rows, settings = np.random.default_rng(0), [], []
    for turn in range(96):
        logits = rng.standard_normal(1000) * rng.choice([0.1, 1, 5, 30])
        logits = np.round(logits) if turn % 3 == 0 else logits
        if turn % 4 == 1:
            logits[rng.permutation(1000)[: rng.integers(1, 990)]] = -np.inf
        if turn % 8 == 3:
            logits = np.where(rng.random(1000) < 0.5, 0.0, -0.0)
        rows.append(np.asarray(logits - logits.max(), np.float32))
        top_k = rng.choice([0, 1, 2, 37, 999, 1000, 5000])
        settings.append((rng.choice([0, 0, 0.01, 0.3, 1]), top_k, rng.choice([1, 1e-6, 0.1, 0.5, 0.9, 0.999])))
    min_p, top_k, top_p = (np.asarray(column) for column in zip(*settings, strict=True))
    found = jax.jit(kept)(jnp.asarray(rows), jnp.float32(min_p), jnp.int32(top_k), jnp.float32(top_p))
    num_judged = 0
    for row, one, keep in zip(rows, settings, np.asarray(found), strict=True):
        expected, distance = sorted_set(row, *one)
        if distance > 1e-5 or one[2] == 1:  # else float32 sums may fall on the other side of p
            assert set(np.flatnonzero(keep & np.isfinite(row)).tolist()) == {t for t in expected if np.isfinite(row[t])}
            num_judged += 1
    assert num_judged > 80


def test_penalties_bias_and_filters_are_transformers():
    """Each setting against transformers' processor of its name; presence and frequency, which it lacks, in NumPy."""
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((3, 40)).astype(np.float32) * 3
    prompt, answer = rng.integers(0, 40, (3, 7)), rng.integers(0, 40, (3, 5))
    seen = torch.tensor(np.concatenate([prompt, answer], axis=1))
    history = History.create(jnp.asarray(prompt, jnp.int32), jnp.ones((3, 7), bool), 40)
    for column in answer.T:
        history = history.added(jnp.asarray(column, jnp.int32), jnp.zeros(3, bool))
    bias = {3: 5.0, 11: -4.0}
    params = SamplingParams(
        repetition_penalty=1.7, logit_bias=bias, presence_penalty=0.5, frequency_penalty=0.25, seed=0
    )
    found = sampler_of(*[params] * 3, vocab_size=40)._changed(jnp.asarray(logits), jnp.zeros(3, jnp.int32), history)
    counts = np.stack([np.bincount(row, minlength=40) for row in answer])
    biased = transformers.SequenceBiasLogitsProcessor([[[t], b] for t, b in bias.items()])(seen, torch.tensor(logits))
    expected = transformers.RepetitionPenaltyLogitsProcessor(1.7)(seen, biased).numpy()
    np.testing.assert_allclose(found, expected - 0.25 * counts - 0.5 * (counts > 0), rtol=1e-6, atol=1e-6)

    scores = torch.tensor(logits - logits.max(axis=1, keepdims=True))
    for warper, setting in (
        (transformers.TopKLogitsWarper(6), (0, 6, 1)),
        (transformers.TopPLogitsWarper(0.8), (0, 0, 0.8)),
        (transformers.MinPLogitsWarper(0.05), (0.05, 0, 1)),
    ):
        arrays = (
            np.full(3, value, dtype) for value, dtype in zip(setting, ("float32", "int32", "float32"), strict=True)
        )
        keep = kept(jnp.asarray(scores.numpy()), *map(jnp.asarray, arrays))
        np.testing.assert_array_equal(keep, np.isfinite(warper(seen, scores.clone()).numpy()))


def test_rows_have_their_own_settings_and_draws():
    """A row's token is that of its settings, seed and step alone; a greedy row stands beside those that draw."""
    logits = np.random.default_rng(0).standard_normal((1, 50)) / 4
    seeded = SamplingParams(seed=5, top_k=30)
    others = [SamplingParams(temperature=0), SamplingParams(), SamplingParams(temperature=3.0, top_p=0.5)]
    alone = [choose(logits, seeded, step=step)[0] for step in range(8)]
    assert len(set(alone)) > 3
    for step in range(8):
        batch = choose(np.tile(logits, (4, 1)), *others, seeded, step=step, rng=jax.random.key(step))
        assert batch[3] == alone[step] and batch[0] == np.argmax(logits)
    unseeded = {tuple(choose(np.tile(logits, (6, 1)), SamplingParams(), rng=jax.random.key(n))) for n in range(3)}
    assert len(unseeded) == 3 and all(len(set(row)) > 2 for row in unseeded)
    raw = (
        choose(logits, SamplingParams(), rng=jax.random.PRNGKey(3)),
        choose(logits, SamplingParams(), rng=jax.random.key(3)),
    )
    assert raw[0] == raw[1]
