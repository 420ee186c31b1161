"""generate with a pool of pages: the answers of rows with slots of their own, in as many pages as tokens ask."""

from typing import Any

import jax
import numpy as np
import pytest

import moe_jax
from moe_jax.models import SamplingParams, _batches, _packs, generate, load_pretrained
from moe_jax.models._generate import generate_each
from moe_jax.models._pages import PagePool, checked_num_pages
from moe_jax.models._sampling import Sampler
from tests.models.test_packs import prompts_of
from tests.models.test_partition import mesh_of
from tests.support.cases.models import VOCAB, slow, write_checkpoint
from tests.support.refusals import refuses

OPTIONS: Any = dict(max_new_tokens=6, batch_size=3, eos_token_id=None)


@pytest.fixture
def pools(monkeypatch):
    """Pools of the calls, with the tokens that every table of a pack named; a prefix of 64 tokens is shared."""
    made = []

    class Watched(PagePool):
        def __init__(self, first, end):
            super().__init__(first, end)
            made.append(self)
            self.num_pages, self.fewest, self.most_holders = end, self.num_free, 0

        def take(self, count):
            pages = super().take(count)
            self.fewest = min(self.fewest, self.num_free)
            return pages

        def hold(self, pages):
            super().hold(pages)
            self.most_holders = max(self.most_holders, int(self._holders.max()))

    monkeypatch.setattr(_batches, "PagePool", Watched)
    monkeypatch.setattr(_packs, "LEAST_SAVED", 64)
    return made


def mixed():
    """Prompts of one page and of several, one that is read in parts, and three that begin alike."""
    shared = np.random.default_rng(9).integers(0, VOCAB, 70).tolist()
    return [*prompts_of(3, 200, 1, 70, 5), *prompts_of(2, 9, 4, prefix=shared)]


def wide(name, directory, longest=256, sizes: Any = None, **options):
    write_checkpoint(name, directory, max_position_embeddings=longest, **sizes or {})
    return load_pretrained(directory, dtype="float32", **dict(max_num_batched_tokens=128) | options)


@pytest.mark.parametrize("kind", ["qwen3_tied_window", *slow("deepseek_v3", "llama4", "fp8")], ids=str)
def test_answers_are_those_of_contiguous_rows(tmp_path, pools, kind):
    """In so few pages that prompts wait. All pages come back, and those that prompts share are held by all of them.
    test_growing_rows.py shares pages of several layers."""
    name, cache = ("mixtral", "fp8") if kind == "fp8" else (kind, None)
    sizes = dict(num_hidden_layers=1) if kind.startswith("qwen3") else {}  # half the time to compile
    model, prompts = wide(name, tmp_path, sizes=sizes, kv_cache_dtype=cache), mixed()
    expected = generate(model, prompts, **OPTIONS)
    with pytest.raises(ValueError, match="expected at least ") as refusal:
        generate(model, prompts, num_pages=1, **OPTIONS)
    fewest = int(str(refusal.value).split("expected at least ")[1].split(",")[0])
    assert "num_pages=1: prompt 1 of 200 tokens and 6 new ones take 4 pages of 64 slots" in str(refusal.value)
    refuses(ValueError, f"expected at least {fewest}", generate, model, prompts, num_pages=fewest - 1, **OPTIONS)
    assert generate(model, prompts, num_pages=fewest, **OPTIONS) == expected
    pool = pools[-1]
    assert pool.fewest == 0 and pool.num_pages == fewest
    assert pool.num_free == pool.num_pages - 2  # of 128 tokens that a call reads
    assert not pool._holders.any() and pool.most_holders > 2  # rows, and those that still wait
    assert generate(model, prompts, num_pages=1 << 31, **OPTIONS) == expected
    assert pools[-1].num_pages < 4 * fewest  # no more than find use


@pytest.mark.slow
def test_no_prompt_waits(tmp_path, pools):
    """In packs of more tokens than the model takes in a row."""
    model, prompts = wide("mixtral", tmp_path, 206, max_num_batched_tokens=256), mixed()
    assert generate(model, prompts, num_pages="auto", **OPTIONS) == generate(model, prompts, **OPTIONS)
    assert pools[0].fewest > 0 and pools[0].most_holders > 2


@pytest.mark.slow
def test_log_probabilities_and_draws(tmp_path, pools):
    """Of the whole vocabulary for every token, with penalties that look at the prompt, and rows that end early."""
    model, prompts = wide("mixtral", tmp_path), mixed()
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=1 + i, repetition_penalty=1.2) for i in range(8)]
    params = [SamplingParams(**{**vars(one), "logprobs": VOCAB}) for one in params]
    answers = []
    for num_pages in (None, 9):
        tokens, found = {}, {}

        def hear(new, tokens=tokens):
            for row, part in new.items():
                tokens.setdefault(row, []).extend(part.tolist())
            return ()

        def hear_one(row, part, found=found):
            order = np.argsort(part.top_ids, axis=-1)
            found.setdefault(row, []).append(np.take_along_axis(part.top, order, -1))

        settings = (model, prompts, hear, 3, 9, (0.0, 1.0, 0, params), None, None)
        generate_each(*settings, hear_logprobs=hear_one, num_pages=num_pages)
        answers.append((tokens, {row: np.concatenate(parts) for row, parts in found.items()}))
    (expected, logprobs), (tokens, found) = answers
    assert tokens == expected and pools[0].fewest == 0
    for row, one in logprobs.items():
        np.testing.assert_allclose(found[row], one, atol=2e-5)


def intake(model, prompts):
    """As ``generate`` makes it, for 16 rows."""
    prompts = [np.asarray(prompt, np.int32) for prompt in prompts]
    ends: Any = dict(max_new_tokens=6, eos_token_ids=[])
    sampler = Sampler.create([SamplingParams()] * len(prompts), jax.random.key(0), vocab_size=VOCAB, **ends)
    (group,) = _batches.plan([len(prompt) for prompt in prompts], 16, most_groups=1)
    call = _batches._Call(model, None, [], prompts, sampler, np.zeros((0, 0), np.int32))
    return _batches._PagedIntake(call, group, 16, True, 6, "auto")


def test_memory_follows_tokens(case, pools, monkeypatch):
    """One long prompt among short ones: a row for each of 16 would be 272 slots. Prompts that begin alike need the
    pages of one beginning."""
    model = case("mixtral").model
    monkeypatch.setattr(model, "max_num_batched_tokens", 128)
    assert 2 + 15 + 4 <= intake(model, prompts_of(*[5] * 30, 200)).num_pages <= 24 < 16 * 5
    shared = list(range(64)) * 10
    assert 2 + 10 + 16 <= intake(model, prompts_of(*[5] * 16, prefix=shared)).num_pages <= 40 < 16 * 11


def test_pool():
    pool = PagePool(2, 6)
    first, second = pool.take(1), pool.take(2)
    assert {*first, *second} == {2, 3, 4} and pool.num_free == 1
    pool.hold(first)
    pool.give_back(first)
    assert pool.num_free == 1
    refuses(RuntimeError, "2 pages are wanted, 1 are free", pool.take, 2)
    pool.give_back(np.concatenate([first, second]))
    refuses(RuntimeError, f"page {first[0]} is given back, and nobody holds it", pool.give_back, first)
    assert pool.num_free == 4 and {*pool.take(4)} == {2, 3, 4, 5}


def test_wrong_calls(case):
    model, prompts = case("mixtral").model, [[1, 2], [3]]

    def call(model=model, **options):
        return generate(model, prompts, max_new_tokens=2, **options)

    words = "num_pages='all', expected a number of pages, \"auto\" or None"
    refuses(ValueError, words, checked_num_pages, "all", model)
    refuses(ValueError, "num_pages=0", call, num_pages=0)
    refuses(ValueError, "rows that run at once: give batch_size", generate, model, [[1]], max_new_tokens=2, num_pages=9)
    refuses(
        NotImplementedError, "states of linear attention have no pages", call, case("qwen3_next").model, num_pages=9
    )
    before = model.max_num_batched_tokens
    model.max_num_batched_tokens = 32
    try:
        refuses(ValueError, "max_num_batched_tokens is 32, expected at least 64", call, num_pages=9)
    finally:
        model.max_num_batched_tokens = before


@pytest.mark.slow
def test_mesh(tmp_path, pools):
    one, prompts = wide("mixtral", tmp_path), mixed()
    spread = load_pretrained(tmp_path, dtype="float32", max_num_batched_tokens=128, mesh=mesh_of("tensor=2", "Auto"))
    assert generate(spread, prompts, num_pages=9, **OPTIONS) == generate(one, prompts, **OPTIONS)
    explicit = moe_jax.load_pretrained(tmp_path, dtype="float32", mesh=mesh_of("tensor=2", "Explicit"))
    refuses(NotImplementedError, "axes are Explicit", generate, explicit, prompts, num_pages=9, **OPTIONS)
    jax.clear_caches()
