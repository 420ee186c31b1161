"""The compiled programs of the token loop: prompts into rows, then one token per turn, over a state on the device."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from moe_jax._typing import Array, Int, Leaf
from moe_jax.models._cache import KVCache
from moe_jax.models._compiled import merge_model
from moe_jax.models._partition import on_mesh
from moe_jax.models._sampling import History


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """Of B rows in the loop. step: () int32, turns so far. made: (B,) int32, tokens of each row. token: (B,), its
    latest. is_done: (B,) bool. tokens: (B, room). load: rows that each slot served, (layers, S), or (0, 0) where nobody
    asks. history: ``History``, None where no row has a penalty."""

    step: Leaf
    made: Leaf
    token: Leaf
    is_done: Leaf
    tokens: Leaf
    load: Leaf
    history: Any
    cache: KVCache

    def with_rows(self, rows: Int[Array, " R"], new: "State") -> "State":
        """With the rows of ``new`` in place of these; an index of B or more drops its row. Its cache may be shorter."""

        def put(old: Array, fresh: Array, rows: Array) -> Array:
            if old.ndim == 4:  # slots behind the prompt become zero: a NaN that an old row left there would be seen
                fresh = jnp.pad(fresh, ((0, 0), (0, 0), (0, old.shape[2] - fresh.shape[2]), (0, 0)))
            return old.at[rows].set(fresh, mode="drop")

        def put_as_laid_out(old: Array, fresh: Array) -> Array:
            sharding = jax.typeof(old).sharding
            if AxisType.Explicit not in sharding.mesh.axis_types:
                return put(old, fresh, rows)
            in_auto: Any = jax.sharding.auto_axes(put, out_sharding=sharding)
            return in_auto(old, fresh, rows)

        alike = dataclasses.replace(self, step=(), load=())
        merged = jax.tree.map(put_as_laid_out, alike, dataclasses.replace(new, step=(), load=()))
        return dataclasses.replace(merged, step=self.step, load=new.load)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4, 5))
def empty(config, batch, num_slots, room, dtype, is_penalized, load):
    """A state whose rows are all done."""
    numbers = jnp.zeros((batch,), jnp.int32)
    seen = jnp.zeros((batch, config.vocab_size), jnp.int32)
    history = History(seen.astype(jnp.bool), seen) if is_penalized else None
    cache = KVCache.zeros(config, batch, num_slots, dtype)
    tokens = jnp.zeros((batch, room), jnp.int32)
    return State(jnp.int32(0), numbers, numbers, jnp.ones((batch,), jnp.bool), tokens, load, history, cache)


@functools.partial(jax.jit, static_argnums=(0, 1))
def start(structure, room, leaves, prompt, sampler):
    """The state of these prompts with their first new token. prompt: (ids, mask, load so far)."""
    model, (ids, mask, load) = merge_model(structure, leaves), prompt
    return _prefilled(model, ids, mask, ids.shape[1] + room, room, load, sampler)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def admit(structure, leaves, state, prompt, rows, sampler):
    """The state with prompts, and their first new token, in these rows. prompt: (ids (R, P), mask)."""
    model, (ids, mask) = merge_model(structure, leaves), prompt
    new = _prefilled(model, ids, mask, ids.shape[1], state.tokens.shape[1], state.load, sampler)
    rows, state = on_mesh((rows, state), model.parallel)
    return state.with_rows(rows, new)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def proceed(structure, leaves, state, idle, limit, wanted, sampler):
    """One token per turn of a while loop, until ``limit`` turns are made or ``wanted`` rows are done. idle: (B,) bool,
    rows that are done whatever they have made."""
    model = merge_model(structure, leaves)
    sampler, idle, state = on_mesh((sampler, idle, state), model.parallel)

    def turn(state):
        # Rows that have ended are masked: they reach no expert and cost nothing there.
        ids, mask = state.token[:, None], ~state.is_done[:, None]
        hidden, cache, load = _with_load(model, ids, mask, state.cache, state.load)
        return _chosen(dataclasses.replace(state, cache=cache, load=load), model.next_logits(hidden[:, 0]), sampler)

    def goes_on(state):
        return (state.step < limit) & (jnp.sum(state.is_done, dtype=jnp.int32) < wanted)

    return jax.lax.while_loop(goes_on, turn, dataclasses.replace(state, is_done=state.is_done | idle))


def _prefilled(model, ids, mask, num_slots, room, load, sampler):
    """The state of new rows with their first token."""
    batch, length = ids.shape
    sampler = on_mesh(sampler, model.parallel)
    cache = KVCache.zeros(model.config, batch, num_slots, model.dtype)
    hidden, cache, load = _with_load(model, ids, mask, cache, load)
    last = jnp.max(jnp.where(mask, jnp.arange(length), 0), axis=1)
    logits = model.next_logits(jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0])
    history = History.create(ids, mask, model.config.vocab_size) if sampler.is_penalized else None
    made, is_done = jnp.zeros((batch,), jnp.int32), jnp.zeros((batch,), jnp.bool)
    made, is_done, history = on_mesh((made, is_done, history), model.parallel)
    tokens = jnp.broadcast_to(sampler.stop[:, :1], (batch, room))
    state = State(jnp.int32(0), made, sampler.stop[:, 0], is_done, tokens, load, history, cache)
    return _chosen(state, logits, sampler)


def _with_load(model, ids, mask, cache, load):
    """(hidden states, cache, load with this call's); no load is counted where it has no layers."""
    if not load.size:
        return *model.hidden_states(ids, attention_mask=mask, cache=cache), load
    hidden, cache, stats = model.hidden_states(ids, attention_mask=mask, cache=cache, return_stats=True)
    return hidden, cache, on_mesh(load, model.parallel) + stats.load


def _chosen(state, logits, sampler):
    """The state with the next token of each row that has not ended."""
    token = jnp.where(state.is_done, sampler.stop[:, 0], sampler(logits, state.made, state.history))
    columns = jnp.arange(state.tokens.shape[1])
    is_new = (columns == state.made[:, None]) & ~state.is_done[:, None]
    history = None if state.history is None else state.history.added(token, state.is_done)
    made = state.made + (~state.is_done).astype(jnp.int32)
    return dataclasses.replace(
        state,
        step=state.step + 1,
        made=made,
        token=token,
        is_done=state.is_done | jnp.any(token[:, None] == sampler.stop, axis=1) | (made >= sampler.limits),
        tokens=jnp.where(is_new, token[:, None], state.tokens),
        history=history,
    )
