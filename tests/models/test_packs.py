"""Prompts read several to a row, and prefixes read once: each answer is the one that its prompt gets alone."""

import itertools

import numpy as np
import pytest
from flax import nnx

from moe_jax.models import SamplingParams, _batches, _packs, _shared_prefixes, generate
from moe_jax.models._compiled import bucket
from moe_jax.models._generate import generate_each
from moe_jax.models._packs import Packs
from moe_jax.models._shared_prefixes import shared_prefixes
from tests.support.cases.models import VOCAB, slow

MIXED = [*np.random.default_rng(3).integers(1, 300, 510).tolist(), 1900, 2500]


def prompts_of(*lengths, prefix=()):
    rng = np.random.default_rng(len(lengths))
    return [[*prefix, *rng.integers(0, VOCAB, length).tolist()] for length in lengths]


def packed(prompts, batch=64, most_free=64, **options):
    """All packs of prompts, when up to ``most_free`` rows get free before each."""
    options = dict(batch=batch, max_num_batched_tokens=8192, is_shared=True, most_shapes=6) | options
    packs, made = Packs([np.asarray(p, np.int32) for p in prompts], range(len(prompts)), **options), []
    while packs:
        free = range(max(most_free, packs.fewest()))
        made.append(packs.next(list(free)[:batch], None))
    return packs, made


@pytest.mark.parametrize("most_free", [64, 3])
@pytest.mark.parametrize("most_shapes, longest", [(6, 8192), (2, 1024)])
def test_packs_hold_each_prompt_once(most_free, most_shapes, longest):
    """In the columns that the pack says, behind what is shared; with few shapes and little padding."""
    shared = np.random.default_rng(0).integers(0, VOCAB, 1000).tolist()
    prompts = [*prompts_of(*MIXED[-300:]), *prompts_of(*range(1, 9), prefix=shared)]
    packs, made = packed(prompts, most_free=most_free, most_shapes=most_shapes, max_num_batched_tokens=longest)
    row, found = np.zeros(packs.row_slots, np.int32), []
    for pack, has_row, indices in made:
        columns = pack.ids.shape[1]
        if has_row:
            assert pack.ids.shape[0] == 1
            count = (pack.segments > 0).sum()
            row[pack.held : pack.held + count] = pack.ids[0, :count]
        else:
            assert pack.shared == pack.held == 0
        slots = row if has_row else pack.ids.ravel()
        for at, index in enumerate(indices):
            assert pack.rows[at] < 64 and pack.lengths[at] == len(prompts[index])
            own = slice(pack.first[at], pack.first[at] + pack.lengths[at] - pack.shared)
            assert [*row[: pack.shared], *slots[own]] == prompts[index]
            segments = pack.segments.ravel()[own.start - pack.held : own.stop - pack.held]
            assert (segments == segments[0]).all() and (pack.segments == segments[0]).sum() == len(segments)
            assert has_row or own.start // columns == (own.stop - 1) // columns
        assert (pack.rows[len(indices) :] == 64).all()
        found += indices
    assert sorted(found) == list(range(len(prompts)))
    assert len({(pack.ids.shape, len(pack.rows), has_row) for pack, has_row, _ in made}) <= most_shapes
    assert packs.num_read == sum(map(len, prompts)) - 7 * 960


def test_padding_is_little():
    """Slots that prefills compute beside tokens of the prompts. With one row a prompt it was more than 1.35, whatever
    the buckets: these are the powers of two."""
    prompts = prompts_of(*MIXED)
    assert sum(map(bucket, MIXED)) > 1.35 * sum(MIXED)
    for batch, most_free, limit in ((64, 64, 1.02), (64, 16, 1.05), (64, 0, 1.05), (16, 16, 1.05), (16, 2, 1.1)):
        packs, _ = packed(prompts, batch=batch, most_free=most_free)
        assert packs.num_read == sum(MIXED)
        assert packs.num_read <= packs.num_slots <= limit * packs.num_read


def test_shared_prefixes(monkeypatch):
    """Against all ways to divide the prompts."""
    monkeypatch.setattr(_shared_prefixes, "BLOCK", 2)
    rng = np.random.default_rng(5)
    for _ in range(60):
        prompts = [rng.integers(0, 2, rng.integers(1, 10)) for _ in range(5)]

        def alike(members, prompts=prompts):
            length = min(len(prompts[m]) for m in members) - 1
            while any((prompts[m][:length] != prompts[members[0]][:length]).any() for m in members):
                length -= 1
            return length // 2 * 2

        found = shared_prefixes(prompts, 0)
        members = [member for _, group in found for member in group]
        assert len(members) == len(set(members))
        assert all(length <= alike(group) for length, group in found)
        saved = sum(length * (len(group) - 1) for length, group in found)
        best = 0
        for labels in itertools.product(range(3), repeat=5):
            groups = [[m for m in range(5) if labels[m] == label] for label in range(3)]
            best = max(best, sum(alike(group) * (len(group) - 1) for group in groups if group))
        assert saved == best
        assert all(length * (len(group) - 1) >= 5 for length, group in shared_prefixes(prompts, 5))


@pytest.fixture
def little(monkeypatch):
    """Prefixes of 8 tokens are shared. Packs that were made."""
    made, next_pack = [], Packs.next

    def next_one(self, *arguments):
        made.append(next_pack(self, *arguments))
        return made[-1]

    monkeypatch.setattr(_shared_prefixes, "BLOCK", 8)
    monkeypatch.setattr(_packs, "LEAST_SAVED", 8)
    monkeypatch.setattr(Packs, "next", next_one)
    return made


@pytest.mark.parametrize(
    "name", ["qwen3_tied_window", *slow("deepseek_v3", "gpt_oss", "llama4", "deepseek_v32", "glm_dsa", "glm4")]
)
def test_greedy_tokens_are_those_of_transformers(case, little, name):
    """A prefix that several prompts share and that takes two calls, a prompt in parts, and short ones; windows and
    chunks end within what is shared."""
    case, model = case(name), case(name).model
    shared = np.random.default_rng(9).integers(0, VOCAB, 20).tolist()
    prompts = [*prompts_of(3, 30, 1, 7, 5), *prompts_of(2, 9, 4, 1, prefix=shared)]
    expected = [case.torch_greedy(np.asarray([prompt]), 5, pad_token_id=0)[0].tolist() for prompt in prompts]
    before = model.max_num_batched_tokens
    model.max_num_batched_tokens = 16
    try:
        made = generate(model, prompts, max_new_tokens=5, batch_size=4, eos_token_id=None)
        assert made == expected
        assert {int(pack.shared) for pack, _, _ in little} == {0, 16}
        assert any(int(pack.held) == 16 and indices == [1] for pack, _, indices in little)
        assert sum((pack.segments > 0).sum() for pack, _, _ in little) == sum(map(len, prompts)) - 3 * 16
        little.clear()
        options = dict(max_new_tokens=5, batch_size=4, eos_token_id=None, enable_prefix_caching=False)
        assert generate(model, prompts, **options) == expected
        assert sum((pack.segments > 0).sum() for pack, _, _ in little) == sum(map(len, prompts))
    finally:
        model.max_num_batched_tokens = before


def test_logits_do_not_depend_on_sharing(case, little):
    """Log-probabilities of the whole vocabulary for every token, and penalties that look at the whole prompt."""
    model = case("mixtral").model
    prompts = prompts_of(2, 9, 4, 1, prefix=range(18))
    params = SamplingParams(temperature=0, repetition_penalty=1.3, logprobs=VOCAB)

    def logprobs(is_shared):
        found, tokens = {}, {}

        def hear(new):
            tokens.update({row: new[row].tolist() for row in new})
            return ()

        settings, hear_one = (0.0, 1.0, 0, params), found.__setitem__
        arguments = (model, prompts, hear, 4, 6, settings, None, None)
        generate_each(*arguments, hear_logprobs=hear_one, is_shared=is_shared)
        order = {row: np.argsort(part.top_ids, axis=-1) for row, part in found.items()}
        return tokens, {row: np.take_along_axis(found[row].top, order[row], -1) for row in order}

    (tokens, shared), (expected_tokens, expected) = logprobs(True), logprobs(False)
    assert {int(pack.shared) for pack, _, _ in little} == {0, 16} and tokens == expected_tokens
    for row in range(4):
        np.testing.assert_allclose(shared[row], expected[row], atol=1e-5)


def test_models_without_slots_read_a_prompt_a_row(case, monkeypatch):
    """Linear attention, and rotary embeddings that change with the length."""
    monkeypatch.setattr(_batches, "_PackedIntake", None)
    for name in ("qwen3_next", "qwen3_dynamic"):
        assert case(name).model.segments_refusal() is not None
    made = generate(case("qwen3_next").model, [[3], [4, 5]], max_new_tokens=1)
    assert [len(answer) for answer in made] == [2, 3]


@pytest.mark.parametrize("name", ["qwen3_tied_window", *slow("gpt_oss", "deepseek_v3")])
@pytest.mark.parametrize("number", [np.nan, *slow(np.inf)])
def test_what_is_not_finite_stays_with_its_prompt(case, little, name, number):
    """A token whose embedding is NaN or infinite, in one prompt of a pack, alone and in a prefix that two share."""
    model = nnx.clone(case(name).model)
    bad = VOCAB - 1
    model.embed_tokens.weight[...] = model.embed_tokens.weight[...].at[bad].set(number)
    good = [[token % bad for token in prompt] for prompt in prompts_of(5, 9, 17, 30)]
    broken = [[*good[1][:3], bad, *good[1][3:]]]
    options = dict(max_new_tokens=4, batch_size=8, eos_token_id=None)
    together = generate(model, [*good[:2], *broken, *good[2:]], **options)
    assert [*together[:2], *together[3:]] == generate(model, good, **options)
