"""The compiled programs of the token loop: prompts into rows, then one token per turn, over a state on the device."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from moe_jax._pytrees import pytree
from moe_jax._typing import Array, Int, Leaf
from moe_jax.models._cache import KVCache
from moe_jax.models._compiled import merge_model
from moe_jax.models._layer_cache import PAGE_SLOTS, put_rows
from moe_jax.models._logprobs import TokenLogprobs
from moe_jax.models._partition import on_mesh
from moe_jax.models._programs import program
from moe_jax.models._sampling import History, Sampler
from moe_jax.models._tiles import in_tiles


@pytree
@dataclasses.dataclass(frozen=True, repr=False)
class State:
    """Of B rows in the loop. step: () int32, turns so far. made: (B,) int32, tokens of each row. token: (B,), its
    latest. is_done: (B,) bool. tokens: (B, room). load: rows that each slot served, (layers, S), or (0, 0) where nobody
    asks. history: ``History``, None where no row has a penalty. logprobs: ``TokenLogprobs`` (B, room), None where
    nobody asks. cache: ``KVCache``; None of rows that have it beside this."""

    step: Leaf
    made: Leaf
    token: Leaf
    is_done: Leaf
    tokens: Leaf
    load: Leaf
    history: Any
    logprobs: Any
    cache: Any

    def with_rows(self, rows: Int[Array, " R"], new: "State", cache: KVCache) -> "State":
        """With the rows of ``new`` in place of these, and this cache; an index of B or more drops its row."""
        merged = {
            name: jax.tree.map(lambda old, fresh: put_rows(old, rows, fresh), getattr(self, name), getattr(new, name))
            for name in ("made", "token", "is_done", "tokens", "history", "logprobs")
        }
        return dataclasses.replace(self, **merged, load=self.load + new.load, cache=cache)


@pytree
@dataclasses.dataclass(frozen=True, repr=False)
class Reading:
    """Of B prompts of which some tokens were read. hidden: (B, H), of the latest of each row. load: as in ``State``,
    of these tokens. cache: ``KVCache``; None where ``start`` has it beside this."""

    hidden: Leaf
    load: Leaf
    cache: Any


@pytree
@dataclasses.dataclass(frozen=True, repr=False)
class Pack:
    """Prompts that one prefill reads, several to a row.

    ids, segments: (P, C) int32, tokens and the number of the prompt in its row that each belongs to, from 1 on; 0 is
    padding, behind them. Of R prompts whose last token is among them: first (R,) int32, the slot of the first token
    behind what is shared, counted over the rows; lengths (R,), tokens of the whole prompt; rows (R,), of the state that
    it enters, B for none. seen: (R, V) bool, the tokens in the prompt, or None where no row has a penalty. held,
    shared: () int32, slots of a row that earlier calls have filled, and that all prompts begin with. pages: where the
    cache is in pages, else None.
    """

    ids: Leaf
    segments: Leaf
    first: Leaf
    lengths: Leaf
    rows: Leaf
    seen: Leaf | None
    held: Leaf
    shared: Leaf
    pages: "PackPages | None" = None


@pytree
@dataclasses.dataclass(frozen=True, repr=False)
class PackPages:
    """Pages of a ``Pack``. of_pack: (P, T) int32, of its rows while they are read. targets: (P, C), as of
    ``KVCache.with_sequences_in_pages``. is_shared: whether the pack goes on from tokens that its prompts share."""

    of_pack: Leaf
    targets: Leaf
    is_shared: bool = dataclasses.field(metadata=dict(static=True))


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def unread(config, batch, num_slots, dtype, load):
    """``Reading`` before the first token."""
    hidden = jnp.zeros((batch, config.hidden_size), dtype)
    return Reading(hidden, load, KVCache.zeros(config, batch, num_slots, dtype))


@program(num_static=1, donated=[2])
def read(structure, leaves, reading, chunk):
    """``Reading`` after these tokens too. chunk: (ids, mask, tokens in each row's whole prompt)."""
    return _read(merge_model(structure, leaves), reading, *chunk)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4, 5, 6, 7, 8))
def empty(config, batch, num_slots, row_slots, num_pages, room, dtype, is_penalized, num_logprobs, load):
    """A state whose rows are all done, and a cache of one row with ``row_slots``, None for 0. num_pages: 0 for rows
    with slots of their own."""
    numbers = jnp.zeros((batch,), jnp.int32)
    seen = jnp.zeros((batch, config.vocab_size), jnp.int32)
    history = History(seen.astype(jnp.bool), seen) if is_penalized else None
    table = jnp.zeros((batch, num_slots // PAGE_SLOTS), jnp.int32) if num_pages else None
    cache = KVCache.zeros(config, batch, num_slots, dtype, table, num_pages)
    tokens = jnp.zeros((batch, room), jnp.int32)
    logprobs = _no_logprobs(batch, room, num_logprobs)
    row = KVCache.zeros(config, 1, row_slots, dtype) if row_slots else None
    is_done = jnp.ones((batch,), jnp.bool)
    return State(jnp.int32(0), numbers, numbers, is_done, tokens, load, history, logprobs, cache), row


@program(num_static=3, donated=[5])
def start(structure, room, chunk, leaves, reading, cache, prompt, sampler):
    """The state of these prompts with their first new token.

    prompt: (ids, mask, zeros of the load). reading, cache: of all but the last ``chunk`` columns, or None before the
    first; the cache, which is used up, stands beside its ``Reading``.
    """
    model, (ids, mask, load) = merge_model(structure, leaves), prompt
    if reading is None:
        reading = unread(model.config, len(ids), ids.shape[1] + room, model.dtype, load)
    else:
        reading = dataclasses.replace(reading, cache=cache)
    return _started(model, reading, ids, mask, chunk, room, sampler)


@program(num_static=2, donated=[4])
def admit(structure, chunk, leaves, reading, state, prompt, rows, sampler):
    """The state with prompts, and their first new token, in these rows. prompt: (ids (R, P), mask). chunk, reading: as
    of ``start``."""
    model, (ids, mask) = merge_model(structure, leaves), prompt
    if reading is None:
        reading = unread(model.config, *ids.shape, model.dtype, jnp.zeros_like(state.load))
    new = _started(model, reading, ids, mask, chunk, state.tokens.shape[1], sampler)
    rows, state = on_mesh((rows, state), model.parallel)
    return state.with_rows(rows, new, state.cache.with_rows(rows, new.cache))


@program(num_static=1, donated=[2, 3])
def admit_pack(structure, leaves, row, state, pack, sampler):
    """The state with the prompts of a ``Pack``, and their first new token, and the row with what all prompts share.

    row: a cache of one row, used up, which holds tokens that earlier calls have read; None where nothing is shared, and
    where the pages of the state hold it. sampler: of the R prompts.
    """
    model = merge_model(structure, leaves)
    pack, sampler, state = on_mesh((pack, sampler, state), model.parallel)
    rows, columns = pack.ids.shape
    is_shared = row is not None if pack.pages is None else pack.pages.is_shared
    shared = pack.shared[None] if is_shared else 0
    if pack.pages is not None:
        cache = _rows_of(state.cache, pack.pages.of_pack, pack.held)
    elif row is None:
        cache = KVCache.zeros(model.config, rows, columns, model.dtype)
    else:
        cache = dataclasses.replace(row, lengths=pack.held[None])
    options = dict(segment_ids=pack.segments, shared=shared)
    no_load = jnp.zeros_like(state.load)
    hidden, cache, load = _with_load(model, pack.ids, pack.segments > 0, cache, no_load, **options)
    cache = dataclasses.replace(cache, positions=None)  # of what is shared they are the slots
    last = pack.first - pack.held + (pack.lengths - pack.shared - 1)
    hidden = jnp.take(hidden.reshape(-1, hidden.shape[-1]), last, axis=0, mode="clip")
    history = None if pack.seen is None else History(pack.seen, jnp.zeros(pack.seen.shape, jnp.int32))
    new = _first(model, hidden, load, history, None, state.tokens.shape[1], sampler)
    if pack.pages is not None:
        is_damaged = cache.is_damaged[(pack.first - pack.held) // columns]
        places = (pack.lengths, pack.held, pack.pages.targets, is_damaged)
        return state.with_rows(pack.rows, new, state.cache.with_sequences_in_pages(pack.rows, cache, *places)), None
    kept = state.cache.with_sequences(pack.rows, cache, pack.first, pack.lengths, pack.shared)
    return state.with_rows(pack.rows, new, kept), None if row is None else cache


@program(num_static=1, donated=[2])
def proceed(structure, leaves, state, idle, waits, limit, wanted, sampler):
    """One token per turn of a while loop, until ``limit`` turns are made or ``wanted`` rows are done or wait.

    idle: (B,) bool, rows that are done whatever they have made. waits: (B,) bool, rows that stay as they are.
    """
    model = merge_model(structure, leaves)
    sampler, idle, waits, state = on_mesh((sampler, idle, waits, state), model.parallel)

    def turn(state):
        # Rows that have ended are masked: they reach no expert and cost nothing there.
        ids, mask = state.token[:, None], ~state.is_done[:, None]
        hidden, cache, load = _with_load(model, ids, mask, state.cache, state.load)
        state = dataclasses.replace(state, cache=cache, load=load)
        return _chosen(state, model.next_logits(hidden[:, 0]), sampler, model.config.pinned_tokens)

    def goes_on(state):
        return (state.step < limit) & (jnp.sum(state.is_done, dtype=jnp.int32) < wanted)

    state = dataclasses.replace(state, is_done=state.is_done | idle)
    new = jax.lax.while_loop(goes_on, turn, dataclasses.replace(state, is_done=state.is_done | waits))
    kept = {name: jnp.where(waits, getattr(state, name), getattr(new, name)) for name in ("token", "is_done")}
    return dataclasses.replace(new, **kept)


def _rows_of(cache, page_table, length):
    """Other rows over the pages of a cache, by this table, which hold so many tokens."""
    rows, columns = page_table.shape
    numbers = jnp.zeros((rows,), jnp.int32)
    places = dict(starts=numbers, lengths=numbers + length, is_damaged=numbers > 0, page_table=page_table)
    return dataclasses.replace(cache, **places, positions=None, num_slots=columns * PAGE_SLOTS)


def _read(model, reading, ids, mask, lengths):
    hidden, cache, load = _with_load(model, ids, mask, reading.cache, reading.load, seq_lens=lengths)
    last = jnp.max(jnp.where(mask, jnp.arange(ids.shape[1]), -1), axis=1)
    latest = jnp.take_along_axis(hidden, jnp.maximum(last, 0)[:, None, None], axis=1)[:, 0]
    last, earlier = on_mesh((last, reading.hidden), model.parallel)
    return Reading(jnp.where((last >= 0)[:, None], latest, earlier), load, cache)


def _started(model, reading, ids, mask, chunk, room, sampler):
    """The state of new rows with their first token, after their last ``chunk`` columns."""
    sampler = on_mesh(sampler, model.parallel)
    reading = _read(model, reading, ids[:, -chunk:], mask[:, -chunk:], jnp.sum(mask, axis=1, dtype=jnp.int32))
    history = History.create(ids, mask, model.config.vocab_size) if sampler.is_penalized else None
    return _first(model, reading.hidden, reading.load, history, reading.cache, room, sampler)


def _first(model, hidden, load, history, cache, room, sampler):
    """The state of rows whose last token has these hidden states, (B, H), with their first new token."""
    batch, logits = len(hidden), model.next_logits(hidden)
    made, is_done = jnp.zeros((batch,), jnp.int32), jnp.zeros((batch,), jnp.bool)
    logprobs = _no_logprobs(batch, room, sampler.num_logprobs)
    made, is_done, history, logprobs = on_mesh((made, is_done, history, logprobs), model.parallel)
    tokens = jnp.broadcast_to(sampler.stop[:, :1], (batch, room))
    state = State(jnp.int32(0), made, sampler.stop[:, 0], is_done, tokens, load, history, logprobs, cache)
    return _chosen(state, logits, sampler, model.config.pinned_tokens)


def _no_logprobs(batch, room, num_logprobs):
    return None if num_logprobs is None else TokenLogprobs.zeros(batch, room, num_logprobs)


def _with_load(model, ids, mask, cache, load, **options):
    """(hidden states, cache, load with this call's); no load is counted where it has no layers. options: of
    ``hidden_states``."""
    options |= dict(attention_mask=mask, cache=cache)
    if not load.size:
        return *model.hidden_states(ids, **options), load
    hidden, cache, stats = model.hidden_states(ids, **options, return_stats=True)
    return hidden, cache, on_mesh(load, model.parallel) + stats.load


def _chosen(state, logits, sampler, pinned_tokens):
    """The state with the next token of each row that has not ended. pinned_tokens: of the model."""
    drawn = _by_rows(pinned_tokens, Sampler.__call__, sampler, logits, state.made, state.history)
    token = jnp.where(state.is_done, sampler.stop[:, 0], drawn)
    columns = jnp.arange(state.tokens.shape[1])
    is_new = (columns == state.made[:, None]) & ~state.is_done[:, None]
    history = None if state.history is None else state.history.added(token, state.is_done)
    logprobs = state.logprobs
    if logprobs is not None:  # in a loop of their own, since all rows decide which steps a sampler has
        logprobs = logprobs.added(_by_rows(pinned_tokens, _logprobs_of, sampler, logits, token), is_new)
    made = state.made + (~state.is_done).astype(jnp.int32)
    return dataclasses.replace(
        state,
        step=state.step + 1,
        made=made,
        token=token,
        is_done=state.is_done | jnp.any(token[:, None] == sampler.stop, axis=1) | (made >= sampler.limits),
        tokens=jnp.where(is_new, token[:, None], state.tokens),
        history=history,
        logprobs=logprobs,
    )


def _by_rows(pinned_tokens, function, sampler, *rows):
    """``function(sampler, *rows)`` for all rows at once, or for so many at a time."""
    if pinned_tokens is None:
        return function(sampler, *rows)

    def take(index):
        return sampler.rows(index), *jax.tree.map(lambda leaf: leaf[index], rows)

    return in_tiles(pinned_tokens, rows[0], take, function)


def _logprobs_of(sampler, logits, token):
    return TokenLogprobs.create(logits, token, sampler.num_logprobs)
