"""Rows for (token, slot) pairs, grouped by expert and padded to tiles, by one CTA.

    clear one counter per expert
    for every 128 pairs a warpgroup:   rank[pair] = counter[expert of pair]++          (shared-memory atomics)
    sum the experts' tiles up:         end[e] = tiles of experts 0 .. e               (by shuffles, and the warps' sums)
    for every pair:                    row_of = first row of its expert + rank
    for every tile:                    its expert is the first whose end lies behind it (binary search)

Where tokens stay unpermuted, the rank of a pair is its token, and an expert in use has one tile, with a bit for each of
its tokens.

One SM reads and writes too slowly for many pairs. Several CTAs share them in two launches:

    first, each CTA its pairs:         rank among those of the CTA, and its counters to memory
    then, each CTA:                    every expert's pairs in all CTAs, and in those before it
                                       tiles, rows of the CTA's pairs, a share of the tiles as above

An expert's rows are in the order in which threads reach its counter, which may differ from call to call. Results do not
differ: a row's values do not depend on its place, and ``combine`` adds by slot. Sums over an expert's rows do. They
take ``align(stable=True)``.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.align.config import LAST_BIT, AlignConfig, AlignDesc
from pallas_kernels.common import mosaic, simt, sm90
from pallas_kernels.common.row_kernel_sm90 import row_kernel
from pallas_kernels.common.types import Kernel, Ref, Scalar, Value

_TOGETHER = 8  # pairs a thread has in flight

Scratch: TypeAlias = dict[str, Any]  # shared memory by the name of its argument


def align_sm90(desc: AlignDesc, config: AlignConfig) -> Kernel:
    """The kernel, or both: (ids (P,) int32, [offset (1,) int32]) -> ``desc.outputs``, flat. For configs without error.

    Wide ids are their words, (2 * P,) int32.
    """
    if config.num_ctas == 1:
        return _kernel(_align, desc, config, align_outputs(desc), align_scratch(desc))
    rank, place = ranks_sm90(desc, config), rows_sm90(desc, config)
    return lambda *operands: place(*rank(*operands), *operands)


def ranks_sm90(desc: AlignDesc, config: AlignConfig) -> Kernel:
    """The first of two kernels: operands of ``align_sm90`` -> (ranks (P,), pairs of each expert in each CTA
    (num_ctas * E,)), both int32. A pair's rank is among the pairs of its expert in its CTA.
    """
    lengths = (desc.num_pairs, config.num_ctas * desc.num_experts)
    outputs = [jax.ShapeDtypeStruct((n,), jnp.int32) for n in lengths]
    return _kernel(_ranks, desc, config, outputs, dict(counts=align_scratch(desc)["counts"]))


def rows_sm90(desc: AlignDesc, config: AlignConfig) -> Kernel:
    """The second: (outputs of ``ranks_sm90``, operands of ``align_sm90``) -> ``desc.outputs``."""
    scratch = align_scratch(desc)
    return _kernel(_rows, desc, config, align_outputs(desc), dict(scratch, before=scratch["counts"]))


def align_outputs(desc: AlignDesc) -> list[jax.ShapeDtypeStruct]:
    """``desc.outputs`` as the kernel writes them."""
    return [jax.ShapeDtypeStruct((n,), jnp.int32) for n in desc.outputs.values()]


def align_scratch(desc: AlignDesc) -> Scratch:
    """Shared memory of ``align_pairs``, by argument."""
    experts = -(-desc.num_experts // sm90.WARPGROUP) * sm90.WARPGROUP
    sums = -(-desc.num_experts // sm90.LANES)
    lengths = dict(counts=experts, ends=experts, sums=sums) | (dict(bits=experts) if desc.top_k else {})
    return {name: plgpu.SMEM((length,), jnp.int32) for name, length in lengths.items()}


def _kernel(
    body: Callable[..., None],
    desc: AlignDesc,
    config: AlignConfig,
    outputs: list[jax.ShapeDtypeStruct],
    scratch: Scratch,
) -> Kernel:
    return row_kernel(
        functools.partial(body, desc, config),
        outputs,
        config.num_ctas,
        "align",
        num_warpgroups=config.num_warpgroups,
        scratch_types=scratch,
    )


def _align(desc: AlignDesc, config: AlignConfig, ids: Ref, *refs: Ref, **scratch: Ref) -> None:
    mosaic.begin()
    offset, outputs = (refs[0], refs[1:]) if desc.has_offset else (None, refs)
    align_pairs(desc, config, ids, offset, *outputs, **scratch)


def _ranks(desc: AlignDesc, config: AlignConfig, ids: Ref, *refs: Ref, counts: Ref) -> None:
    mosaic.begin()
    *offset, ranks, by_cta = refs
    cta = AlignCta(desc, config, ids, *offset, index=lax.axis_index("cta"))
    cta.take_ranks(counts, ranks)

    def publish(e, is_expert):
        simt.store(by_cta, cta.index * desc.num_experts + e, simt.load(counts, e, is_expert, 0), is_expert)

    cta.each_expert(publish)


def _rows(
    desc: AlignDesc, config: AlignConfig, ranks: Ref, by_cta: Ref, ids: Ref, *refs: Ref, before: Ref, **scratch: Ref
) -> None:
    mosaic.begin()
    offset, outputs = (refs[:1], refs[1:]) if desc.has_offset else ((), refs)
    cta = AlignCta(desc, config, ids, *offset, index=lax.axis_index("cta"))

    def add_up(e, is_expert):
        total = own = simt.constant(0)
        found = [simt.load(by_cta, e + b * desc.num_experts, is_expert, 0) for b in range(config.num_ctas)]
        for b, count in enumerate(found):
            own = own + count * jnp.where(b < cta.index, 1, 0)
            total = total + count
        simt.store(scratch["counts"], e, total, is_expert)
        simt.store(before, e, own, is_expert)

    cta.each_expert(add_up)
    simt.barrier()
    cta.finish(ranks, before, outputs, **scratch)


def align_pairs(
    desc: AlignDesc, config: AlignConfig, ids: Ref, offset: Ref | None, *outputs: Ref, **scratch: Ref
) -> None:
    """The work of one CTA. ids as of ``align_sm90``, offset: (1,) int32 or None, both in global memory."""
    cta = AlignCta(desc, config, ids, offset)
    cta.take_ranks(scratch["counts"], outputs[0], scratch.get("bits"))
    cta.finish(outputs[0], None, outputs, **scratch)


class AlignCta:
    """A CTA's share of the work, all of its threads: pairs and tiles by turns with the other CTAs, every expert."""

    def __init__(self, desc: AlignDesc, config: AlignConfig, ids: Ref, offset: Ref | None = None, index: Scalar = 0):
        self.desc, self.ids, self.index, self.is_alone = desc, ids, index, config.num_ctas == 1
        self.first_expert = None if offset is None else offset[0]
        self.thread = simt.thread_index()
        self.threads = config.num_warpgroups * sm90.WARPGROUP
        self.first = self.thread if self.is_alone else self.thread + index * self.threads  # pair and tile
        self.stride = config.num_ctas * self.threads

    def each_expert(self, body: Callable[[Value, Value], None]) -> None:
        """body(index, is in range) for every expert, one a thread at a time."""
        _each(self.desc.num_experts, self.thread, self.threads, body)

    def each_pair(self, body: Callable[[list[Value], list[Value], list[Value]], None]) -> None:
        """body(pairs, experts, are routed), a few at a time, so that their ids are fetched together."""
        together = min(_TOGETHER, -(-self.desc.num_pairs // self.stride))

        def step(i, _):
            pairs = [self.first + (i * together + j) * self.stride for j in range(together)]
            body(pairs, *self.owners(pairs))
            return 0

        lax.fori_loop(0, -(-self.desc.num_pairs // (self.stride * together)), step, 0)

    def owners(self, pairs: list[Value]) -> tuple[list[Value], list[Value]]:
        """(the expert of each pair, whether it is routed); pairs past the last are not."""
        owners = [self._id(pair) for pair in pairs]
        if self.first_expert is not None:
            owners = [owner - self.first_expert for owner in owners]
        return owners, [(owner >= 0) & (owner < self.desc.num_experts) for owner in owners]

    def _id(self, pair: Value) -> Value:
        """What a pair is routed to, negative past the last pair and for an id beyond 32 bits."""
        is_pair = pair < self.desc.num_pairs
        if not self.desc.are_wide:
            return simt.load(self.ids, pair, is_pair, -1)
        low, high = (simt.load(self.ids, 2 * pair + word, is_pair, -1) for word in range(2))
        return jnp.where(high == 0, low, -1)

    def take_ranks(self, counts: Ref, ranks: Ref, bits: Ref | None = None) -> None:
        """Count the CTA's pairs by expert; the rank of each, in the order of arrival, to ``ranks``. Where tokens stay
        unpermuted, those of each expert to ``bits`` instead."""

        def clear(e, is_expert):
            for ref in (counts, bits):
                if ref is not None:
                    simt.store(ref, e, simt.constant(0), is_expert)

        self.each_expert(clear)
        simt.barrier()

        def take(pairs, owners, are_routed):
            taken = [simt.count(counts, owner, routed) for owner, routed in zip(owners, are_routed, strict=True)]
            if bits is not None:
                for token, owner, routed in zip(self._tokens(pairs), owners, are_routed, strict=True):
                    bit = lax.shift_left(jnp.ones_like(token), jnp.minimum(token, LAST_BIT))
                    simt.set_bits(bits, owner, bit, routed)
                return
            for pair, rank in zip(pairs, taken, strict=True):
                simt.store(ranks, pair, rank, pair < self.desc.num_pairs)

        self.each_pair(take)
        simt.barrier()

    def _tokens(self, pairs: list[Value]) -> list[Value]:
        """Where they stay unpermuted."""
        return [lax.div(pair, jnp.full_like(pair, self.desc.top_k)) for pair in pairs]

    def finish(
        self,
        ranks: Ref,
        before: Ref | None,
        outputs: tuple[Ref, ...],
        counts: Ref,
        ends: Ref,
        sums: Ref,
        bits: Ref | None = None,
    ) -> None:
        """Write ``desc.outputs``. counts: pairs of each expert; before: those of them in CTAs before this one, or None.
        bits: of ``take_ranks``."""
        desc, row_of = self.desc, outputs[0]
        self.sum_tiles(counts, ends, sums)

        def place(pairs, owners, are_routed):
            if desc.top_k:
                own = self._tokens(pairs)
            else:
                own = [simt.load(ranks, pair, routed, 0) for pair, routed in zip(pairs, are_routed, strict=True)]
            for pair, owner, routed, rank in zip(pairs, owners, are_routed, own, strict=True):
                row = self._first_tile(owner, routed, counts, ends) * desc.block_m + rank
                if before is not None and not desc.top_k:
                    row = row + simt.load(before, owner, routed, 0)
                simt.store(row_of, pair, jnp.where(routed, row, simt.constant(-1)), pair < desc.num_pairs)

        self.each_pair(place)
        self.describe_tiles(outputs, counts, ends, bits)

    def sum_tiles(self, counts: Ref, ends: Ref, sums: Ref) -> None:
        """``ends``: tiles of each expert and those before it, of ``counts``."""

        def to_tiles(e, is_expert):
            simt.store(ends, e, tiles_of(self.desc, simt.load(counts, e, is_expert, 0)), is_expert)

        self.each_expert(to_tiles)
        _sum_up(ends, sums, self.thread, self.threads, self.desc.num_experts)

    def describe_tiles(self, outputs: tuple[Ref, ...], counts: Ref, ends: Ref, bits: Ref | None = None) -> None:
        """Write this CTA's share of the tiles, of ``counts`` and their ``ends``. The first CTA writes the counts."""
        desc, experts = self.desc, self.desc.num_experts
        _, group_sizes, tile_expert, tile_rows, num_tiles, *tile_bits = outputs

        def publish(e, is_expert):
            is_mine = is_expert if self.is_alone else is_expert & (self.first < self.threads)
            simt.store(group_sizes, e, simt.load(counts, e, is_mine, 0), is_mine)

        def describe(tile, is_tile):
            expert = _first_end_behind(ends, tile, is_tile, experts)
            in_use = is_tile & (expert < experts)
            if desc.top_k:
                rows = simt.constant(desc.num_tokens)
            else:
                past = (tile - self._first_tile(expert, in_use, counts, ends)) * desc.block_m
                rows = jnp.minimum(simt.load(counts, expert, in_use, 0) - past, desc.block_m)
            simt.store(tile_expert, tile, jnp.where(in_use, expert, simt.constant(-1)), is_tile)
            simt.store(tile_rows, tile, jnp.where(in_use, rows, simt.constant(0)), is_tile)
            if bits is not None:
                simt.store(tile_bits[0], tile, simt.load(bits, expert, in_use, 0), is_tile)

        self.each_expert(publish)
        _each(desc.num_tiles, self.first, self.stride, describe)
        is_it = self.first == 0
        simt.store(num_tiles, simt.constant(0), simt.load(ends, simt.constant(experts - 1), is_it, 0), is_it)

    def _first_tile(self, expert: Value, mask: Value, counts: Ref, ends: Ref) -> Value:
        return simt.load(ends, expert, mask, 0) - tiles_of(self.desc, simt.load(counts, expert, mask, 0))


def _each(total: int, first: Value, stride: int, body: Callable[[Value, Value], None]) -> None:
    """body(index, is in range) for the indices first, first + stride, ..., as many steps in every thread."""

    def step(i, _):
        index = first + i * stride
        body(index, index < total)
        return 0

    lax.fori_loop(0, -(-total // stride), step, 0)


def tiles_of(desc: AlignDesc, size: Value) -> Value:
    """Of an expert with so many pairs."""
    if desc.top_k:
        return jnp.minimum(size, 1)
    return lax.div(size + (desc.block_m - 1), jnp.full_like(size, desc.block_m))


def _sum_up(values: Ref, sums: Ref, thread: Value, threads: int, length: int) -> None:
    """Inclusive prefix sums of values[:length] in place, of which a thread has written every threads-th itself. length
    <= 1024: at most eight elements a thread, and 32 warps of elements, whose ``sums`` a warp adds up at once.
    """
    lane, through = thread & (sm90.LANES - 1), []
    held = [thread + i * threads for i in range(-(-length // threads))]
    for index in held:
        total, distance = simt.load(values, index, index < length, 0), 1
        while distance < sm90.LANES:
            total = total + jnp.where(lane >= distance, simt.of_lower_lane(total, distance), 0)
            distance *= 2
        through.append(total)
        is_last = (lane == sm90.LANES - 1) | (index == length - 1)
        simt.store(sums, simt.warp_of(index), total, is_last & (index < length))
    simt.barrier()
    for index, total in zip(held, through, strict=True):
        is_before = (lane < simt.warp_of(index)) & (lane < -(-length // sm90.LANES))
        before = simt.warp_add(simt.load(sums, lane, is_before, 0))
        simt.store(values, index, total + before, index < length)
    simt.barrier()


def _first_end_behind(ends: Ref, tile: Value, mask: Value, experts: int) -> Value:
    """Number of experts whose tiles all lie before ``tile`` or at it: its owner, ``experts`` past the last one."""
    found = simt.constant(0)
    step = 1 << (experts.bit_length() - 1)
    while step:
        candidate = found + step
        is_expert = mask & (candidate <= experts)
        end = simt.load(ends, candidate - 1, is_expert, 0)
        found = jnp.where(is_expert & (end <= tile), candidate, found)
        step //= 2
    return found
