"""``KVCache``: what attention keeps of the tokens seen so far, in a fixed number of slots per row.

Row b holds its tokens in slots [starts[b], lengths[b]), one after the other; slot order decides causality. Each row has
its own length: a row may end, be cleared and be filled again while the others go on. Padding on the left of a row's
first call stands before ``starts``; no other padding occupies slots.
"""

import dataclasses

import jax
import jax.numpy as jnp

from moe_jax._pytrees import pytree
from moe_jax._typing import Array, Bool, DTypeLike, Int, Leaf
from moe_jax.models._config import DecoderConfig


@pytree
@dataclasses.dataclass(frozen=True, repr=False)
class KVCache:
    """A pytree that the caller threads through calls.

    layers: per layer its arrays, each (B, heads, slots, width) with heads and width as ``DecoderConfig.cache_widths``
    has them: keys, rotated, and values; under MLA one array, the normalised latent and then the rotated key that all
    heads share, and in layers with an indexer one more, the rotated index keys. starts, lengths: (B,) int32, first slot
    of a row and the one behind its last. positions: (B, slots) int32, or None where every slot has the position slot -
    start: until a call states its own. is_damaged: (B,) bool, rows whose logits are NaN from now on, see ``CausalLM``.
    """

    layers: tuple[tuple[Leaf, ...], ...]
    starts: Leaf
    lengths: Leaf
    positions: Leaf | None
    is_damaged: Leaf

    @classmethod
    def zeros(cls, config: DecoderConfig, batch: int, num_slots: int, dtype: DTypeLike) -> "KVCache":
        """An empty cache: nothing filled."""

        def of_layer(layer: int) -> tuple[Array, ...]:
            widths = config.cache_widths(layer)
            return tuple(jnp.zeros((batch, heads, num_slots, width), dtype) for heads, width in widths)

        return cls(
            layers=tuple(map(of_layer, range(config.num_layers))),
            starts=jnp.zeros((batch,), jnp.int32),
            lengths=jnp.zeros((batch,), jnp.int32),
            positions=None,
            is_damaged=jnp.zeros((batch,), jnp.bool),
        )

    @property
    def num_slots(self) -> int:
        return self.layers[0][0].shape[2]

    @property
    def num_tokens(self) -> Array:
        """(B,) int32, tokens of each row."""
        return self.lengths - self.starts

    def cleared(self, rows: Bool[Array, " B"]) -> "KVCache":
        """The cache with these rows empty and their slots zero, so that a NaN of an old row reaches no new one."""
        layers = jax.tree.map(lambda a: jnp.where(rows[:, None, None, None], 0, a), self.layers)
        starts, lengths = (jnp.where(rows, 0, a) for a in (self.starts, self.lengths))
        return dataclasses.replace(
            self, layers=layers, starts=starts, lengths=lengths, is_damaged=self.is_damaged & ~rows
        )


def slot_order(mask: Bool[Array, "B S"], lengths: Int[Array, " B"] | None) -> tuple[Array, Array]:
    """(columns in the order of slots, and back): padding goes behind a row's tokens, but before the first token of an
    empty row it stays. lengths: of the cache's rows, None without a cache. Both (B, S) int32.
    """
    is_before = jnp.cumsum(mask, axis=1) == 0
    if lengths is not None:
        is_before &= lengths[:, None] == 0
    is_before &= jnp.any(mask, axis=1, keepdims=True)
    order = jnp.argsort(jnp.where(mask, 1, jnp.where(is_before, 0, 2)), axis=1, stable=True)
    return order, jnp.argsort(order, axis=1)


def starts_of_runs(ids: Int[Array, "B S"]) -> Int[Array, "B S"]:
    """The column where the run of equal ids begins that a column lies in, (B, S) int32."""
    columns = jnp.arange(ids.shape[1], dtype=jnp.int32)
    is_first = jnp.concatenate([jnp.ones_like(ids[:, :1], jnp.bool), ids[:, 1:] != ids[:, :-1]], axis=1)
    return jax.lax.cummax(jnp.where(is_first, columns, 0), axis=1)


def slots_of(mask: Bool[Array, "B S"], cache: KVCache | None) -> tuple[Array, Array, Array]:
    """(slot of column 0, start, length with these tokens) of every row, each (B,) int32. mask: in slot order."""
    count = jnp.sum(mask, axis=1, dtype=jnp.int32)
    starts = jnp.where(count > 0, jnp.argmax(mask, axis=1).astype(jnp.int32), 0)
    if cache is None:
        return jnp.zeros_like(starts), starts, starts + count
    starts = jnp.where(cache.lengths == 0, starts, cache.starts)
    return cache.lengths, starts, jnp.where(cache.lengths == 0, starts, cache.lengths) + count


def key_positions(
    positions: Array | None,
    cache: KVCache | None,
    starts: Int[Array, " B"],
    lengths: Int[Array, " B"],
    first_slots: Int[Array, " B"],
) -> Array | None:
    """(B, slots) int32 as ``KVCache.positions``. positions: those that a call states for its tokens, (B, S) or None."""
    if cache is None or (positions is None and cache.positions is None):
        return positions
    slots = jnp.arange(cache.num_slots, dtype=jnp.int32)
    counted = slots - starts[:, None]
    earlier = counted if cache.positions is None else cache.positions
    if positions is None:
        return jnp.where(slots >= first_slots[:, None], counted, earlier)
    return written(earlier, positions, jnp.maximum(starts, first_slots), lengths, first_slots, axis=0)


def extended(
    cached: tuple[Array, ...] | None,
    new: tuple[Array, ...],
    starts: Int[Array, " B"],
    lengths: Int[Array, " B"],
    first_slots: Int[Array, " B"],
) -> tuple[Array, ...]:
    """A layer's arrays with this call's tokens in them, or these alone without a cache.

    cached: (B, heads, slots, width). new: (B, heads, S, width); column j of row b belongs to slot first_slots[b] + j.
    starts, lengths: the row's tokens, those of this call included; columns outside are padding and change nothing.
    """
    if cached is None:
        return new
    return tuple(
        written(old, fresh, jnp.maximum(starts, first_slots), lengths, first_slots)
        for old, fresh in zip(cached, new, strict=True)
    )


def written(
    old: Array, new: Array, begin: Int[Array, " B"], end: Int[Array, " B"], first: Int[Array, " B"], axis: int = 1
) -> Array:
    """``old`` (B, ...) with slots [begin, end) from ``new``, whose column 0 is slot ``first``. axis: the slots'."""
    num_slots, count = old.shape[axis + 1], new.shape[axis + 1]

    def row(old: Array, new: Array, begin: Array, end: Array, first: Array) -> Array:
        at = jnp.minimum(first, num_slots - count)  # a window that reaches past the end moves left instead
        slots = at + jnp.arange(count, dtype=jnp.int32)
        fresh = new if count == 1 else jnp.take(new, jnp.maximum(slots - first, 0), axis=axis, mode="clip")
        window = jax.lax.dynamic_slice_in_dim(old, at, count, axis)
        is_new = ((begin <= slots) & (slots < end)).reshape([-1 if i == axis else 1 for i in range(new.ndim)])
        return jax.lax.dynamic_update_slice_in_dim(old, jnp.where(is_new, fresh, window), at, axis)

    return jax.vmap(row)(old, new, begin, end, first)
