"""What a layer keeps of the tokens seen so far. Each kind of layer has a kind of cache of its own.

A kind is two small classes: ``LayerCacheSpec`` says what an empty one looks like, ``LayerCache`` holds the arrays. The
model threads caches through its layers without a look inside; only the layer that fills a cache reads it.
"""

import dataclasses
from typing import Any, ClassVar, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from moe_jax._pytrees import pytree
from moe_jax._typing import Array, Bool, DTypeLike, Int, Leaf
from pallas_kernels.common.pages import PAGE_SLOTS


@runtime_checkable
class LayerCache(Protocol):
    """A pytree of arrays whose first axis is the rows, B."""

    def cleared(self, rows: Bool[Array, " B"]) -> Any:
        """With these rows as in an empty cache, so that nothing of an old row, not even a NaN, reaches a new one."""
        ...

    def with_rows(self, rows: Int[Array, " R"], new: Any) -> Any:
        """With the R rows of ``new`` in place of these; an index of B or more drops its row. ``new`` may have been made
        for fewer tokens."""
        ...


@runtime_checkable
class LayerCacheSpec(Protocol):
    """Static and hashable: what a layer's cache looks like.

    holds_slots: whether a token has a slot of its own, so that one row can hold several sequences, and a sequence can
    be copied out of it (``with_sequences``).
    """

    holds_slots: ClassVar[bool]

    def zeros(self, batch: int, num_slots: int, dtype: DTypeLike) -> LayerCache:
        """An empty cache for up to ``num_slots`` tokens per row. dtype: of the model's computation."""
        ...


def pages_of(num_tokens: int) -> int:
    """Pages that hold so many tokens."""
    return -(-num_tokens // PAGE_SLOTS)


def put_rows(old: Array, rows: Int[Array, " R"], fresh: Array, sources: Int[Array, "R L"] | None = None) -> Array:
    """``old`` (B, ...) with the rows of ``fresh`` (R, ...) in place of these, laid out like ``old``; an index of B or
    more drops its row. sources: for ``old`` (B, heads, L, width) the slots of each row in ``fresh`` (P, heads, S,
    width), counted over its rows; -1 gives zeros."""

    def put(old: Array, fresh: Array, rows: Array, sources: Array | None) -> Array:
        if sources is not None:
            flat = fresh.swapaxes(0, 1).reshape(fresh.shape[1], -1, fresh.shape[3])
            taken = jnp.take(flat, jnp.maximum(sources, 0), axis=1).swapaxes(0, 1)
            fresh = jnp.where((sources >= 0)[:, None, :, None], taken, 0)
        return old.at[rows].set(fresh, mode="drop")

    sharding = jax.typeof(old).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return put(old, fresh, rows, sources)
    in_auto: Any = jax.sharding.auto_axes(put, out_sharding=sharding)
    return in_auto(old, fresh, rows, sources)


def _zeros_in(array: Array, rows: Bool[Array, " B"]) -> Array:
    return jnp.where(rows.reshape(-1, *[1] * (array.ndim - 1)), 0, array)


@dataclasses.dataclass(frozen=True)
class SlotCacheSpec:
    """widths: (heads, width) of each array. dtype: of the arrays, None for that of the model's computation."""

    widths: tuple[tuple[int, int], ...]
    dtype: str | None = None
    holds_slots: ClassVar[bool] = True

    def zeros(self, batch: int, num_slots: int, dtype: DTypeLike) -> "SlotCache":
        own = dtype if self.dtype is None else self.dtype
        return SlotCache(tuple(jnp.zeros((batch, heads, num_slots, width), own) for heads, width in self.widths))


@pytree
@dataclasses.dataclass(frozen=True, repr=False)
class SlotCache:
    """One slot per token. arrays: (B, heads, slots, width) each: keys, rotated, and values, or their e4m3 codes; under
    MLA one array, the normalised latent and then the rotated key that all heads share. In pages (``KVCache``) an array
    is (pages, heads, PAGE_SLOTS, width): rows have their slots where their table says."""

    arrays: tuple[Leaf, ...]

    def cleared(self, rows: Bool[Array, " B"]) -> "SlotCache":
        return SlotCache(tuple(_zeros_in(array, rows) for array in self.arrays))

    def with_rows(self, rows: Int[Array, " R"], new: "SlotCache") -> "SlotCache":
        """Slots behind those of ``new`` become zero: a NaN that an old row left there would be seen."""

        def put(old: Array, fresh: Array) -> Array:
            tail = old.shape[2] - fresh.shape[2]
            return put_rows(old, rows, jnp.pad(fresh, ((0, 0), (0, 0), (0, tail), (0, 0))))

        return SlotCache(tuple(map(put, self.arrays, new.arrays)))

    def with_pages(self, targets: Int[Array, "R C"], sources: Int[Array, "R C"], new: "SlotCache") -> "SlotCache":
        """With the pages ``sources`` of ``new`` in place of ``targets``; a target behind the last page drops its."""

        def put(old: Array, fresh: Array) -> Array:
            return old.at[targets].set(fresh[sources], mode="drop")

        return SlotCache(tuple(map(put, self.arrays, new.arrays)))

    def with_sequences(self, rows: Int[Array, " R"], new: "SlotCache", sources: Int[Array, "R L"]) -> "SlotCache":
        """With the slots ``sources`` of ``new``, counted over its rows, in place of these rows; -1 gives zeros.

        An index of B or more drops its row."""

        def put(old: Array, fresh: Array) -> Array:
            return put_rows(old, rows, fresh, sources)

        return SlotCache(tuple(map(put, self.arrays, new.arrays)))


@dataclasses.dataclass(frozen=True)
class RecurrentCacheSpec:
    """conv: (heads, steps, channels) and state: (heads, key width, value width), as ``RecurrentCache`` has them."""

    conv: tuple[int, int, int]
    state: tuple[int, int, int]
    holds_slots: ClassVar[bool] = False

    def zeros(self, batch: int, num_slots: int, dtype: DTypeLike) -> "RecurrentCache":
        """Of one size, however many tokens come."""
        return RecurrentCache(jnp.zeros((batch, *self.conv), dtype), jnp.zeros((batch, *self.state), jnp.float32))


@pytree
@dataclasses.dataclass(frozen=True, repr=False)
class RecurrentCache:
    """What linear attention keeps of a row, the same for any number of tokens.

    conv: (B, key heads, steps, channels), the latest inputs of the causal convolution, zeros before the first token.
    state: (B, value heads, Dk, Dv) f32, the recurrent state.
    """

    conv: Leaf
    state: Leaf

    def cleared(self, rows: Bool[Array, " B"]) -> "RecurrentCache":
        return RecurrentCache(_zeros_in(self.conv, rows), _zeros_in(self.state, rows))

    def with_rows(self, rows: Int[Array, " R"], new: "RecurrentCache") -> "RecurrentCache":
        return RecurrentCache(put_rows(self.conv, rows, new.conv), put_rows(self.state, rows, new.state))


def extended(
    cached: SlotCache | None,
    new: tuple[Array, ...],
    starts: Int[Array, " B"],
    lengths: Int[Array, " B"],
    first_slots: Int[Array, " B"],
    page_table: Int[Array, "B T"] | None = None,
) -> SlotCache:
    """A layer's slots with this call's tokens in them, or these alone without a cache.

    new: (B, heads, S, width) each; column j of row b belongs to slot first_slots[b] + j. starts, lengths: the row's
    tokens, those of this call included; columns outside are padding and change nothing. page_table: of a cache in
    pages.
    """
    if cached is None:
        return SlotCache(new)
    begins, both = jnp.maximum(starts, first_slots), zip(cached.arrays, new, strict=True)
    if page_table is None:
        return SlotCache(tuple(written(old, fresh, begins, lengths, first_slots) for old, fresh in both))
    return SlotCache(tuple(_in_pages(old, fresh, begins, lengths, first_slots, page_table) for old, fresh in both))


def by_rows(
    kept: SlotCache, starts: Int[Array, " B"], lengths: Int[Array, " B"], page_table: Int[Array, "B T"] | None
) -> tuple[Array, ...]:
    """The arrays (B, heads, slots, width). Of pages copies, with zeros outside of a row's tokens: a page may hold what
    another row left."""
    if page_table is None:
        return kept.arrays
    slots = jnp.arange(page_table.shape[1] * PAGE_SLOTS, dtype=jnp.int32)
    is_own = ((slots >= starts[:, None]) & (slots < lengths[:, None]))[:, None, :, None]

    def rows(pool: Array) -> Array:
        found = jnp.moveaxis(jnp.take(pool, page_table, axis=0, mode="clip"), 2, 1)
        found = found.reshape(found.shape[0], pool.shape[1], -1, pool.shape[3])
        return jnp.where(is_own, found, jnp.zeros((), pool.dtype))

    return tuple(map(rows, kept.arrays))


def _in_pages(
    pool: Array,
    new: Array,
    begin: Int[Array, " B"],
    end: Int[Array, " B"],
    first: Int[Array, " B"],
    page_table: Int[Array, "B T"],
) -> Array:
    """``written`` through a table; an entry that is no page drops what goes there."""
    slots = first[:, None] + jnp.arange(new.shape[2], dtype=jnp.int32)
    columns = jnp.clip(slots // PAGE_SLOTS, 0, page_table.shape[1] - 1)
    pages = jnp.take_along_axis(page_table, columns, axis=1)
    is_new = (begin[:, None] <= slots) & (slots < end[:, None]) & (pages >= 0)
    pages = jnp.where(is_new, pages, pool.shape[0])  # which is none
    return pool.at[pages, :, slots % PAGE_SLOTS].set(new.swapaxes(1, 2), mode="drop")


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
