"""Rows for (token, slot) pairs, grouped by expert and padded to tiles, by one block.

    clear one counter per expert
    for every 128 pairs a warpgroup:   rank[pair] = counter[expert of pair]++          (shared-memory atomics)
    sum the experts' tiles up:         end[e] = tiles of experts 0 .. e               (log2 E steps)
    for every pair:                    row_of = first row of its expert + rank
    for every tile:                    its expert is the first whose end lies behind it (binary search)

By token, rank is the token instead, and an expert in use has one tile.

The order of an expert's rows is the order in which threads reach its counter, so it may differ from call to call; a
row's values do not depend on its place, and ``combine`` adds by slot, so results do not.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.align.config import AlignConfig, AlignDesc
from pallas_kernels.common import mosaic, simt, sm90

_TOGETHER = 8  # pairs a thread has in flight


def align_sm90(desc: AlignDesc, config: AlignConfig) -> Callable[..., list[Any]]:
    """The kernel: (ids (P,) int32, [offset (1,) int32]) -> ``OUTPUTS``, flat. config must pass config_error."""
    return plgpu.kernel(
        functools.partial(_kernel, desc, config),
        out_type=align_outputs(desc),
        grid=(1,),
        grid_names=("block",),
        num_threads=config.num_warpgroups,
        thread_name="warpgroup",
        scratch_types=align_scratch(desc),
        compiler_params=mosaic.compiler_params(),
    )


def align_outputs(desc: AlignDesc) -> list[jax.ShapeDtypeStruct]:
    """``OUTPUTS`` as the kernel writes them."""
    lengths = (desc.num_pairs, desc.num_experts, desc.num_tiles, desc.num_tiles, 1)
    return [jax.ShapeDtypeStruct((n,), jnp.int32) for n in lengths]


def align_scratch(desc: AlignDesc) -> dict[str, Any]:
    """Shared memory of ``align_pairs``, by argument."""
    experts = -(-desc.num_experts // sm90.WARPGROUP) * sm90.WARPGROUP
    return dict(counts=plgpu.SMEM((experts,), jnp.int32), ends=plgpu.SMEM((experts,), jnp.int32))


def _kernel(desc: AlignDesc, config: AlignConfig, ids: Any, *refs: Any, **scratch: Any) -> None:
    mosaic.begin()
    offset, outputs = (refs[0], refs[1:]) if desc.has_offset else (None, refs)
    align_pairs(desc, config, ids, offset, *outputs, **scratch)


def align_pairs(
    desc: AlignDesc, config: AlignConfig, ids: Any, offset: Any, *outputs: Any, counts: Any, ends: Any
) -> None:
    """The work of one block of config.num_warpgroups warpgroups. ids: (P,) int32, offset: (1,) int32 or None, both in
    global memory.
    """
    first_expert = None if offset is None else offset[0]
    row_of, group_sizes, tile_expert, tile_rows, num_tiles = outputs
    thread = simt.thread_index()
    threads = config.num_warpgroups * sm90.WARPGROUP
    experts = desc.num_experts

    def each(total: int, body: Callable[[Any, Any], None]) -> None:
        """body(index, is in range) for every index below total, one a thread at a time."""

        def step(i, _):
            index = thread + i * threads
            body(index, index < total)
            return 0

        lax.fori_loop(0, -(-total // threads), step, 0)

    def each_pair(body: Callable[[list[Any], list[Any], list[Any]], None]) -> None:
        """body(pairs, experts, are routed), a few at a time, so that their ids are fetched together."""
        together = min(_TOGETHER, -(-desc.num_pairs // threads))

        def step(i, _):
            pairs = [thread + (i * together + j) * threads for j in range(together)]
            owners = [simt.load(ids, pair, pair < desc.num_pairs, -1) for pair in pairs]
            if first_expert is not None:
                owners = [owner - first_expert for owner in owners]
            body(pairs, owners, [(owner >= 0) & (owner < experts) for owner in owners])
            return 0

        lax.fori_loop(0, -(-desc.num_pairs // (threads * together)), step, 0)

    each(experts, lambda e, is_expert: simt.store(counts, e, simt.constant(0), is_expert))
    simt.barrier()

    def take_ranks(pairs, owners, are_routed):
        ranks = [simt.count(counts, owner, routed) for owner, routed in zip(owners, are_routed, strict=True)]
        if desc.top_k:
            return
        for pair, rank in zip(pairs, ranks, strict=True):
            simt.store(row_of, pair, rank, pair < desc.num_pairs)

    each_pair(take_ranks)
    simt.barrier()

    def to_tiles(e, is_expert):
        size = simt.load(counts, e, is_expert, 0)
        simt.store(group_sizes, e, size, is_expert)
        simt.store(ends, e, _tiles(desc, size), is_expert)

    each(experts, to_tiles)
    simt.barrier()
    _sum_up(ends, thread, threads, experts)

    def first_tile(e, mask):
        return simt.load(ends, e, mask, 0) - _tiles(desc, simt.load(counts, e, mask, 0))

    def place(pairs, owners, are_routed):
        if desc.top_k:
            ranks = [lax.div(pair, jnp.full_like(pair, desc.top_k)) for pair in pairs]
        else:
            ranks = [simt.load(row_of, pair, routed, 0) for pair, routed in zip(pairs, are_routed, strict=True)]
        for pair, owner, routed, rank in zip(pairs, owners, are_routed, ranks, strict=True):
            row = first_tile(owner, routed) * desc.block_m + rank
            simt.store(row_of, pair, jnp.where(routed, row, simt.constant(-1)), pair < desc.num_pairs)

    each_pair(place)

    def describe(tile, is_tile):
        expert = _first_end_behind(ends, tile, is_tile, experts)
        in_use = is_tile & (expert < experts)
        if desc.top_k:
            rows = simt.constant(desc.num_tokens)
        else:
            past = (tile - first_tile(expert, in_use)) * desc.block_m
            rows = jnp.minimum(simt.load(counts, expert, in_use, 0) - past, desc.block_m)
        simt.store(tile_expert, tile, jnp.where(in_use, expert, simt.constant(-1)), is_tile)
        simt.store(tile_rows, tile, jnp.where(in_use, rows, simt.constant(0)), is_tile)

    each(desc.num_tiles, describe)
    last = simt.load(ends, simt.constant(experts - 1), thread == 0, 0)
    simt.store(num_tiles, simt.constant(0), last, thread == 0)


def _tiles(desc: AlignDesc, size: Any) -> Any:
    if desc.top_k:
        return jnp.minimum(size, 1)
    return lax.div(size + (desc.block_m - 1), jnp.full_like(size, desc.block_m))


def _sum_up(values: Any, thread: Any, threads: int, length: int) -> None:
    """Inclusive prefix sums of values[:length] in place; length <= 1024, so at most eight elements a thread."""
    held = range(-(-length // threads))
    distance = 1
    while distance < length:
        sums = []
        for i in held:
            index = thread + i * threads
            is_inside = index < length
            before = simt.load(values, index - distance, is_inside & (index >= distance), 0)
            sums.append(simt.load(values, index, is_inside, 0) + before)
        simt.barrier()
        for i in held:
            index = thread + i * threads
            simt.store(values, index, sums[i], index < length)
        simt.barrier()
        distance *= 2


def _first_end_behind(ends: Any, tile: Any, mask: Any, experts: int) -> Any:
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
