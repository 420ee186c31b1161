"""``KVCache``: what the layers keep of the tokens seen so far, and in which slots each row has its tokens.

Row b holds its tokens in slots [starts[b], lengths[b]), one after the other; slot order decides causality. Each row has
its own length: a row may end, be cleared and be filled again while the others go on. Padding on the left of a row's
first call stands before ``starts``, unless the model has ``pinned_tokens``; no other padding occupies slots.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from moe_jax._pytrees import pytree
from moe_jax._typing import Array, Bool, DTypeLike, Int, Leaf
from moe_jax.models._config import DecoderConfig
from moe_jax.models._layer_cache import (
    PAGE_SLOTS,
    LayerCache,
    LayerCacheSpec,
    SlotCache,
    SlotCacheSpec,
    pages_of,
    put_rows,
    written,
)


@pytree
@dataclasses.dataclass(frozen=True, repr=False)
class KVCache:
    """A pytree that the caller threads through calls.

    layers: of each layer its ``LayerCache``, of the kind that ``DecoderConfig.layer_caches`` says. starts, lengths:
    (B,) int32, first slot of a row and the one behind its last. positions: (B, slots) int32, or None where every slot
    has the position slot - start: until a call states its own. is_damaged: (B,) bool, rows whose logits are NaN from
    now on, see ``CausalLM``. num_slots: of each row.

    page_table: (B, num_slots / PAGE_SLOTS) int32, or None where each row has slots of its own. Slot s of row b lies in
    page page_table[b, s // PAGE_SLOTS]. Rows may share pages that all of them have filled; who changes the table
    (``dataclasses.replace``) keeps it so. Of two rows that write to one page one loses its tokens: calls outside of
    ``jax.jit`` refuse that, under it nobody sees it. num_pages: of each layer, 0 without a table. Recurrent states have
    no pages.
    """

    layers: tuple[LayerCache, ...]
    starts: Leaf
    lengths: Leaf
    positions: Leaf | None
    is_damaged: Leaf
    num_slots: int = dataclasses.field(metadata=dict(static=True))
    page_table: Leaf | None = None
    num_pages: int = dataclasses.field(default=0, metadata=dict(static=True))

    @classmethod
    def zeros(
        cls,
        config: DecoderConfig,
        batch: int,
        num_slots: int,
        dtype: DTypeLike,
        page_table: Int[Array, "B T"] | None = None,
        num_pages: int = 0,
    ) -> "KVCache":
        """An empty cache: nothing filled. Without a table of its own a model with ``pinned_tokens`` gets one by which
        every row has its own pages, since its tokens are rows of their own while they pass the layers."""
        if config.pinned_tokens is not None:
            if page_table is None:
                columns = pages_of(num_slots)
                num_slots, num_pages = columns * PAGE_SLOTS, batch * columns
                page_table = jnp.arange(num_pages, dtype=jnp.int32).reshape(batch, columns)
            num_pages = max(2, num_pages)  # of one XLA would know which page a row has

        def of_layer(spec: LayerCacheSpec) -> LayerCache:
            if page_table is not None and isinstance(spec, SlotCacheSpec):
                return spec.zeros(num_pages, PAGE_SLOTS, dtype)
            return spec.zeros(batch, num_slots, dtype)

        return cls(
            layers=tuple(map(of_layer, config.layer_caches)),
            starts=jnp.zeros((batch,), jnp.int32),
            lengths=jnp.zeros((batch,), jnp.int32),
            positions=None,
            is_damaged=jnp.zeros((batch,), jnp.bool),
            num_slots=num_slots,
            page_table=page_table,
            num_pages=num_pages,
        )

    @property
    def num_tokens(self) -> Array:
        """(B,) int32, tokens of each row."""
        return self.lengths - self.starts

    def cleared(self, rows: Bool[Array, " B"]) -> "KVCache":
        """The cache with these rows empty, so that nothing of an old row, not even a NaN, reaches a new one. Pages keep
        what they hold, which nobody sees."""
        is_kept = self.page_table is not None
        layers = tuple(
            layer if is_kept and isinstance(layer, SlotCache) else layer.cleared(rows) for layer in self.layers
        )
        starts, lengths = (jnp.where(rows, 0, a) for a in (self.starts, self.lengths))
        return dataclasses.replace(
            self, layers=layers, starts=starts, lengths=lengths, is_damaged=self.is_damaged & ~rows
        )

    def with_rows(self, rows: Int[Array, " R"], new: "KVCache") -> "KVCache":
        """With the rows of ``new`` in place of these; an index of B or more drops its row. ``new`` may have fewer
        slots; neither may have positions that a call stated. Where both are in pages, these rows keep theirs, which
        nobody else may hold, and what lies in those of ``new`` is copied into them."""
        if self.positions is not None or new.positions is not None:
            raise ValueError("rows with positions of their own do not change hands")
        table, fresh_table = self.page_table, new.page_table
        if new.num_slots > self.num_slots:
            raise ValueError(
                f"new has {new.num_slots} slots a row, expected at most {self.num_slots}, those of this cache"
            )
        if (table is None) != (fresh_table is None):
            raise ValueError("one of the caches is in pages: rows change hands between caches of one kind")
        places = ((self.starts, new.starts), (self.lengths, new.lengths), (self.is_damaged, new.is_damaged))
        starts, lengths, is_damaged = (put_rows(old, rows, fresh) for old, fresh in places)
        both: Any = zip(self.layers, new.layers, strict=True)
        if table is None or fresh_table is None:
            layers = tuple(old.with_rows(rows, fresh) for old, fresh in both)
        else:
            held = jnp.take(table, rows, axis=0, mode="fill", fill_value=-1)[:, : fresh_table.shape[1]]
            pages = jnp.where(held < 0, self.num_pages, held), fresh_table
            layers = tuple(
                old.with_pages(*pages, fresh) if isinstance(old, SlotCache) else old.with_rows(rows, fresh)
                for old, fresh in both
            )
        return dataclasses.replace(self, layers=layers, starts=starts, lengths=lengths, is_damaged=is_damaged)

    def with_sequences(
        self,
        rows: Int[Array, " R"],
        new: "KVCache",
        first: Int[Array, " R"],
        lengths: Int[Array, " R"],
        shared: Int[Array, ""],
    ) -> "KVCache":
        """With sequences of ``new``, whose rows hold several, in place of these rows; an index of B or more drops its
        row.

        first: the slot of ``new``, counted over its rows, where a sequence begins. lengths: its tokens, of which the
        first ``shared`` lie in the first slots of the only row of ``new`` instead.
        """
        slots = jnp.arange(self.num_slots, dtype=jnp.int32)
        sources = jnp.where(slots < shared, slots, first[:, None] + slots - shared)
        sources = jnp.where(slots < lengths[:, None], sources, -1)
        layers: Any = zip(self.layers, new.layers, strict=True)
        layers = tuple(old.with_sequences(rows, fresh, sources) for old, fresh in layers)
        is_damaged = put_rows(self.is_damaged, rows, new.is_damaged[first // new.num_slots])
        places = (put_rows(self.starts, rows, jnp.zeros_like(lengths)), put_rows(self.lengths, rows, lengths))
        return KVCache(layers, *places, None, is_damaged, self.num_slots)

    def with_sequences_in_pages(
        self,
        rows: Int[Array, " R"],
        new: "KVCache",
        lengths: Int[Array, " R"],
        first_slot: Int[Array, ""],
        targets: Int[Array, "P C"],
        is_damaged: Bool[Array, " R"],
    ) -> "KVCache":
        """As ``with_sequences`` where ``new`` has P rows of the same pages: its layers are what both hold from now on.

        Rows get these lengths and flags; callers change ``page_table``. targets: the slot of all pages, counted from
        the first page on, that the token at slot first_slot + c of row p is copied to; one behind the last drops it.
        """
        assert self.page_table is not None and new.page_table is not None
        slots = first_slot + jnp.arange(targets.shape[1], dtype=jnp.int32)
        pages = jnp.take(new.page_table, slots // PAGE_SLOTS, axis=1, mode="clip")

        def copied(pool: Array) -> Array:
            tokens = pool[pages, :, (slots % PAGE_SLOTS)[None]]
            return pool.at[targets // PAGE_SLOTS, :, targets % PAGE_SLOTS].set(tokens, mode="drop")

        held: Any = new.layers
        layers = tuple(SlotCache(tuple(map(copied, layer.arrays))) for layer in held)
        return dataclasses.replace(
            self,
            layers=layers,
            starts=put_rows(self.starts, rows, jnp.zeros_like(lengths)),
            lengths=put_rows(self.lengths, rows, lengths),
            is_damaged=put_rows(self.is_damaged, rows, is_damaged),
        )


def are_pages_missing(cache: KVCache, lengths: Int[Array, " B"]) -> Bool[Array, " B"]:
    """Whether the table of a row names no page where its tokens lie. lengths: with those of this call."""
    if cache.page_table is None:
        return jnp.zeros_like(cache.is_damaged)
    first = jnp.arange(cache.page_table.shape[1], dtype=jnp.int32) * PAGE_SLOTS
    is_page = (cache.page_table >= 0) & (cache.page_table < cache.num_pages)
    return jnp.any(~is_page & (first < lengths[:, None]), axis=1)


def slot_order(
    mask: Bool[Array, "B S"], lengths: Int[Array, " B"] | None, *, is_left_kept: bool = True
) -> tuple[Array, Array]:
    """(columns in the order of slots, and back): padding goes behind a row's tokens, but before the first token of an
    empty row it stays, unless is_left_kept is False. lengths: of the cache's rows, None without a cache. Both (B, S)
    int32.
    """
    is_before = jnp.cumsum(mask, axis=1) == 0
    if lengths is not None:
        is_before &= lengths[:, None] == 0
    is_before &= jnp.any(mask, axis=1, keepdims=True) & is_left_kept
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
