"""Rows that take pages as they grow, on a memory that holds token ids: what each row finds there, and when it waits."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from moe_jax.models import SamplingParams, _batches, _loop, _packs, generate, load_pretrained
from moe_jax.models._pages import PagePool
from moe_jax.models._sampling import Sampler
from tests.models.test_packs import prompts_of
from tests.support.cases.models import VOCAB, slow, write_checkpoint

SLOTS = 64  # of a page


@dataclasses.dataclass
class _Cache:
    page_table: np.ndarray
    lengths: np.ndarray


def _changed(state, lengths, **changes):
    return dataclasses.replace(state, cache=dataclasses.replace(state.cache, lengths=lengths), **changes)


class _Indices(Sampler):
    """Of rows their prompts."""

    def rows(self, rows):
        return np.asarray(rows)


class Machine:
    """Stands in for the compiled programs. Answer i has answers[i] tokens, of which none depends on what was read.

    running: rows that made tokens in each turn. num_waits: rows that waited, over all looks at the host.
    """

    def __init__(self, model, prompts, answers):
        self.model, self.prompts, self.answers, self.running, self.num_waits = model, prompts, answers, [], 0

    def token(self, index, at):
        return (7 * index + at) % VOCAB

    def empty(self, config, batch, num_slots, row_slots, num_pages, room, *_):
        self.memory = np.full((num_pages, SLOTS), -1)
        zeros = np.zeros(batch, np.int32)
        cache = _Cache(np.zeros((batch, num_slots // SLOTS), np.int32), zeros)
        tokens, load = np.zeros((batch, room), np.int32), np.zeros((0, 0), np.int32)
        arrays: Any = (0, zeros, zeros, zeros == 0, tokens, load, None, None, cache)
        return _loop.State(*arrays), None

    def admit_pack(self, structure, leaves, row, state, pack, picked):
        slots = np.broadcast_to(pack.held + np.arange(pack.ids.shape[1]), pack.ids.shape)
        pages = np.take_along_axis(pack.pages.of_pack, np.minimum(slots // SLOTS, pack.pages.of_pack.shape[1] - 1), 1)
        is_token = pack.segments > 0
        self.memory[pages[is_token], slots[is_token] % SLOTS] = pack.ids[is_token]
        is_copied = pack.pages.targets < self.memory.size
        self.memory.reshape(-1)[pack.pages.targets[is_copied]] = self.memory[pages, slots % SLOTS][is_copied]
        held = (state.made, state.cache.lengths, state.is_done, state.tokens)
        made, lengths, is_done, tokens = (array.copy() for array in held)
        for at in np.flatnonzero(pack.rows < len(made)):
            row = pack.rows[at]
            made[row], lengths[row] = 1, pack.lengths[at]
            tokens[row, 0] = self.token(picked[at], 0)
            is_done[row] = self.answers[picked[at]] == 1
        return _changed(state, lengths, made=made, is_done=is_done, tokens=tokens), None

    def proceed(self, structure, leaves, state, idle, waits, limit, wanted, picked):
        held = (state.made, state.cache.lengths, state.is_done, state.tokens)
        made, lengths, is_done, tokens = (array.copy() for array in held)
        is_done |= idle
        self.num_waits += waits.sum()
        table, step = state.cache.page_table, 0
        while step < limit and (is_done | waits).sum() < wanted:
            rows = np.flatnonzero(~is_done & ~waits)
            assert len(rows), "no row goes on"
            for row in rows:
                index = picked[row]
                self.memory[table[row, lengths[row] // SLOTS], lengths[row] % SLOTS] = tokens[row, made[row] - 1]
                lengths[row] += 1
                found = self.memory[table[row]].reshape(-1)[: lengths[row]]
                assert (found == np.concatenate([self.prompts[index], tokens[row, : made[row]]])).all()
                tokens[row, made[row]] = self.token(index, made[row])
                made[row] += 1
                is_done[row] = made[row] == self.answers[index]
            self.running.append(len(rows))
            step += 1
        return _changed(state, lengths, made=made, is_done=is_done, tokens=tokens)

    def run(self, monkeypatch, limit, *, batch_size, num_pages):
        pools = []

        class Watched(PagePool):
            def __init__(self, first, end):
                super().__init__(first, end)
                pools.append((self, end - first))

        for name in ("empty", "admit_pack", "proceed"):
            monkeypatch.setattr(_batches._loop, name, getattr(self, name))
        monkeypatch.setattr(_batches, "PagePool", Watched)
        ends: Any = dict(vocab_size=VOCAB, max_new_tokens=limit, eos_token_ids=[])
        sampler = Sampler.create([SamplingParams()] * len(self.prompts), jax.random.key(0), **ends)
        sampler = _Indices(**{field.name: getattr(sampler, field.name) for field in dataclasses.fields(sampler)})
        made: dict[int, list[int]] = {}

        def hear(new):
            for index, tokens in new.items():
                made.setdefault(index, []).extend(tokens.tolist())
            return ()

        no_load = np.zeros((0, 0), np.int32)
        options: Any = dict(batch_size=batch_size, max_new_tokens=limit, num_pages=num_pages, no_load=no_load)
        _batches.run(self.model, self.prompts, sampler, hear, **options)
        assert made == {i: [self.token(i, at) for at in range(count)] for i, count in enumerate(self.answers)}
        ((pool, size),) = pools
        assert pool.num_free == size
        return self


@pytest.fixture
def model(case, monkeypatch):
    """What tells the sizes; none of its programs runs."""
    monkeypatch.setattr(case("mixtral").model, "max_num_batched_tokens", 256)
    return case("mixtral").model


@pytest.fixture
def shares(monkeypatch):
    """A prefix of 64 tokens is shared."""
    monkeypatch.setattr(_packs, "LEAST_SAVED", 64)


def lengths_of(kind, limit, count, rng):
    if kind == "all":
        return np.full(count, limit)
    few = np.minimum(limit, rng.integers(1, 12, count))
    return few if kind == "few" else np.where(rng.random(count) < 0.3, limit, few)


@pytest.mark.parametrize("kind", ["all", "few", "mixed"])
def test_each_row_finds_its_tokens(model, monkeypatch, shares, kind):
    """In pools from the smallest that there is, with prompts that begin alike and some that are read in parts."""
    rng = np.random.default_rng(0)
    for limit in (1, 60, 150):
        lengths = rng.integers(1, 400, 12)
        shared = rng.integers(0, VOCAB, 150)
        prompts = [rng.integers(0, VOCAB, n).astype(np.int32) for n in lengths]
        prompts[::3] = [np.concatenate([shared, prompt]).astype(np.int32) for prompt in prompts[::3]]
        machine = Machine(model, prompts, lengths_of(kind, limit, len(prompts), rng))
        with pytest.raises(ValueError, match="expected at least ") as refusal:
            machine.run(monkeypatch, limit, batch_size=5, num_pages=1)
        fewest = int(str(refusal.value).split("expected at least ")[1].split(",")[0])
        for num_pages in (fewest, fewest + 3, 2 * fewest):
            machine.run(monkeypatch, limit, batch_size=5, num_pages=num_pages)


def test_more_rows_where_they_end_early(model, monkeypatch):
    """Rows of up to 5 pages in a pool of 4 + 20: four at once if each held all that it may come to use."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB, 40).astype(np.int32) for _ in range(48)]
    few = Machine(model, prompts, rng.integers(1, 40, 48)).run(monkeypatch, 256, batch_size=16, num_pages=24)
    assert max(few.running) > 7 and np.mean(few.running) > 5
    every = Machine(model, prompts, np.full(48, 256)).run(monkeypatch, 256, batch_size=16, num_pages=24)
    assert np.mean(every.running) == 4 and every.num_waits == 0


def eager(monkeypatch):
    """Prompts enter as if all before them had ended at once, so that rows wait."""
    create = _batches._PagedIntake.__init__

    def created(self, *arguments):
        create(self, *arguments)
        self._ended += [0.001] * 999

    monkeypatch.setattr(_batches._PagedIntake, "__init__", created)


def test_rows_that_wait(model, monkeypatch):
    """Some row always goes on; more enter than can all go on."""
    eager(monkeypatch)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB, 40).astype(np.int32) for _ in range(24)]
    machine = Machine(model, prompts, rng.integers(1, 256, 24)).run(monkeypatch, 256, batch_size=16, num_pages=14)
    assert machine.num_waits > 0 and max(machine.running) > 2


# Windows and sinks; codes in FP8; latents.
@pytest.mark.parametrize("kind", ["mixtral_tied_window", *slow("gpt_oss", "fp8", "deepseek_v3", "penalties")])
def test_answers_with_rows_that_wait(tmp_path, monkeypatch, kind):
    """The answers of rows with slots of their own, with draws and prompts that begin alike."""
    eager(monkeypatch)
    monkeypatch.setattr(_packs, "LEAST_SAVED", 64)
    options: Any
    name, options = ("mixtral", dict(kv_cache_dtype="fp8")) if kind == "fp8" else (kind, {})
    write_checkpoint("mixtral" if kind == "penalties" else name, tmp_path, max_position_embeddings=256)
    model = load_pretrained(tmp_path, dtype="float32", max_num_batched_tokens=128, **options)
    prompts = [*prompts_of(60, 61, 3, 62), *prompts_of(2, 9, prefix=list(range(70)))]
    settings: Any = dict(max_new_tokens=70, batch_size=4, eos_token_id=None, temperature=2.0, rng=jax.random.key(0))
    if kind == "penalties":
        params = SamplingParams(temperature=2.0, repetition_penalty=1.3, max_tokens=70)
        settings |= dict(temperature=0.0, sampling_params=params)
    expected, waited = generate(model, prompts, **settings), []
    grow = _batches._PagedIntake.grow

    def watched(self, *arguments):
        found = grow(self, *arguments)
        waited.append(found[1].any())
        return found

    monkeypatch.setattr(_batches._PagedIntake, "grow", watched)
    assert generate(model, prompts, num_pages=6, **settings) == expected
    assert any(waited)
