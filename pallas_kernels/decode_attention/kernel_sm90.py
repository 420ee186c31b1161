"""Decode attention on Hopper: split-K over the cache, a producer warpgroup and a consumer in each persistent CTA.

A work item is one split of the cache of one key head of one row: ``split`` slots, of which those in use are walked in
steps of block_kv. Products are transposed: keys are the rows of wgmma, the queries of the key head's heads its columns,
so few heads fill it. What has no slot in use is not loaded: steps, and pieces of COPIED slots of the others.

    producer      for each item: queries, then for each step: keys, values
    consumer      for each item, for each step
                      S^T = K Q^T, masked; keys handed back
                      m = max(m, S), P = exp2(S - m), l = l exp2(m before - m) + P -> P in shared memory
                      O^T = O^T exp2(m before - m) + V^T P^T; values handed back
                  after the last step: O, m, l -> partial sums of the item

Keys and values have a ring each, with a step in a stage. Steps of 64 slots let two CTAs fit in an SM, where one loads
while the other multiplies. How long steps are is part of a row's bits.

wgmma knows no product of 16-bit numbers and e4m3. Of a cache in e4m3 the producer loads the codes into rings of their
own, and a third warpgroup writes them as 16-bit numbers into the rings that the consumer reads.
The scale of keys goes into that of the scores, the one of values into the output.

A second launch adds the partial sums of a tile's splits, in their order (combine_sm90.py). A split's slots do not
depend on the batch, so neither do the bits of a token. A CTA that takes a tile's first splits one after the other adds
them up itself, as the second launch would (schedule.py). Where it takes all of them it makes the outputs, too, and
there is no second launch.

Softmax runs in float32, with scores scaled by log2(e). m starts at a finite floor, so a query that sees nothing has
l = 0.
"""

import functools
import itertools
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common import mosaic
from pallas_kernels.common.pages import PAGE_SLOTS
from pallas_kernels.common.shapes import or_shapes
from pallas_kernels.common.sm90 import WARPS
from pallas_kernels.common.types import Kernel, Scalar, TileRef, Value
from pallas_kernels.decode_attention.config import WIDE_STAGES, DecodeConfig, DecodeDesc
from pallas_kernels.decode_attention.items_sm90 import Item, Items
from pallas_kernels.decode_attention.outputs_sm90 import FLOOR, LOG2_E, Columns, added, outputs_of, store_tile
from pallas_kernels.decode_attention.schedule import Schedule, seen
from pallas_kernels.decode_attention.widen_sm90 import widen_tile
from pallas_kernels.quantize_and_permute.config import PermuteDesc

PART = 128  # of a value's elements, multiplied at once
COPIED = 32  # slots of a TMA copy
REGISTERS = 240, 24, 240  # of a thread with codes: consumer, producer, converter

Part: TypeAlias = tuple[tuple[Value, ...], Value, Value]  # sums of values, the largest score, the sum of weights


def decode_sm90(desc: DecodeDesc, config: DecodeConfig, rows: PermuteDesc | None = None) -> Kernel:
    """The kernel; config must pass config_error, and quantizing_error.

    (q, k, [v], [scales], [pages], starts, lengths, first_slots, [schedule]) -> (sums, tops, totals) of each (tile,
    split); of a run in the place of its first split. With config.whole_tiles the sinks (N,) follow where there are
    some, and the results are the outputs: (B * S * N * V,), or as ``rows`` quantizes them codes and scales, flat.

    q (B, M, T * C, D) for T tiles of C columns, k (B, M, L, D), v (B, M, L, V), not there where ``is_latent``; scales
    (2,) float32 where ``is_e4m3``, of keys and of values, of which the second launch takes that of the values; pages
    (B, L / 64) int32 where there are ``num_pages``, which k and v have in place of rows, with 64 slots each; starts,
    lengths, first_slots (B,) int32; with config.runs the arrays of a ``Schedule``. sums (B * M * T * splits, V, C)
    float32, tops and totals (B * M * T * splits, C) float32: those of splits that no query sees are not written.
    """
    dtype, columns, block = jnp.dtype(desc.dtype), config.columns, config.block_kv
    tiled = mosaic.tiled(dtype, 128)
    items, stages = config.all_tiles(desc) * config.num_splits(desc), _stages(desc, config)
    copies = block // COPIED  # of the keys of a step
    scratch: dict[str, Any] = dict(
        q=plgpu.SMEM((2, columns, desc.width), dtype, transforms=tiled),
        k=plgpu.SMEM((stages, block, desc.width), dtype, transforms=tiled),
        weights=plgpu.SMEM((columns, block), dtype, transforms=tiled),
        q_full=plgpu.Barrier(num_barriers=2),
        q_empty=plgpu.Barrier(num_barriers=2),
        k_full=plgpu.Barrier(num_barriers=stages, num_arrivals=1 if desc.is_e4m3 else copies),
        k_empty=plgpu.Barrier(num_barriers=stages),
    )
    if config.adds_up:
        scratch["so_far"] = plgpu.SMEM((desc.value_width, columns), jnp.float32)
        scratch["stats_so_far"] = plgpu.SMEM((2, columns), jnp.float32)
    if config.whole_tiles:
        scratch["maxima"] = plgpu.SMEM((WARPS * columns,), jnp.int32)
    if not desc.is_latent:
        scratch["v"] = plgpu.SMEM((stages, block, desc.value_width), dtype, transforms=tiled)
        scratch["v_full"] = plgpu.Barrier(num_barriers=stages, num_arrivals=1 if desc.is_e4m3 else copies)
        scratch["v_empty"] = plgpu.Barrier(num_barriers=stages)
    if desc.is_e4m3:
        for name, width in (("k", desc.width), ("v", desc.value_width)):
            scratch[f"codes_{name}"] = plgpu.SMEM((config.num_stages, block, width), jnp.float8_e4m3fn)
            scratch[f"codes_{name}_full"] = plgpu.Barrier(num_barriers=config.num_stages, num_arrivals=copies)
            scratch[f"codes_{name}_empty"] = plgpu.Barrier(num_barriers=config.num_stages)
    stats = jax.ShapeDtypeStruct((items, columns), jnp.float32)
    out_type = [jax.ShapeDtypeStruct((items, desc.value_width, columns), jnp.float32), stats, stats]
    if config.whole_tiles:
        out_type = outputs_of(desc, rows)
    kernel = plgpu.kernel(
        functools.partial(_kernel, desc, config, rows),
        out_type=out_type,
        grid=(config.num_ctas,),
        grid_names=("block",),
        num_threads=3 if desc.is_e4m3 else 2,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=mosaic.compiler_params(),
        kernel_name="decode_attention",
    )
    return or_shapes(kernel, out_type)


def _stages(desc: DecodeDesc, config: DecodeConfig) -> int:
    """Of the rings that the consumer reads."""
    return WIDE_STAGES if desc.is_e4m3 else config.num_stages


def _kernel(
    desc: DecodeDesc, config: DecodeConfig, rows: PermuteDesc | None, *refs: TileRef, **scratch: TileRef
) -> None:
    mosaic.begin()
    q, k, *rest = refs
    v = None if desc.is_latent else rest.pop(0)
    scales = rest.pop(0) if desc.is_e4m3 else None
    pages = rest.pop(0) if desc.num_pages else None
    starts, lengths, first_slots, *rest = rest
    schedule = [rest.pop(0) for _ in Schedule._fields] if config.runs else []
    sinks = rest.pop(0) if config.whole_tiles and desc.has_sinks else None
    outputs, s = rest, scratch
    parts = [(first, min(PART, desc.value_width - first)) for first in range(0, desc.value_width, PART)]
    block_kv, stages, num_columns = config.block_kv, config.num_stages, desc.num_slots // PAGE_SLOTS
    from_cache = "codes_" if desc.is_e4m3 else ""  # of the rings that the producer fills
    cached = [("k", k)] if v is None else [("k", k), ("v", v)]
    warpgroup, cta = lax.axis_index("warpgroup"), lax.axis_index("block")
    work = Items(desc, config, cta, starts, lengths, first_slots, schedule)

    def stage_of(step: Scalar) -> Scalar:
        """The stage of the consumer's rings that a step takes."""
        return lax.rem(step, jnp.int32(_stages(desc, config)))

    def load(cached: TileRef, item: Item, begin: Any, memory: TileRef, full: TileRef) -> None:
        """The slots of a step from ``begin`` on. What the memory held before stays in pieces outside of the row: keys
        are masked, values cleared."""
        for first in range(0, block_kv, COPIED):
            slot = pl.multiple_of(begin + first, COPIED)
            if pages is None:
                source = cached.at[item.row, item.head, pl.ds(slot, COPIED)]
            else:
                # What a table holds for slots that nobody uses must be memory of the cache.
                page = pages[item.row, lax.min(lax.div(slot, jnp.int32(PAGE_SLOTS)), jnp.int32(num_columns - 1))]
                page = lax.clamp(jnp.int32(0), page, jnp.int32(desc.num_pages - 1))
                source = cached.at[page, item.head, pl.ds(first % PAGE_SLOTS, COPIED)]
            copy = functools.partial(plgpu.copy_gmem_to_smem, source, memory.at[pl.ds(first, COPIED)], full)
            is_used = (slot < item.length) & (slot + COPIED > item.start)
            pl.when(is_used)(copy)
            pl.when(jnp.logical_not(is_used))(functools.partial(plgpu.barrier_arrive, full))

    def produce(item: Item, items: Scalar, steps: Scalar) -> None:
        place = lax.rem(items, jnp.int32(2))

        @pl.when(items >= 2)
        def _():
            plgpu.barrier_wait(s["q_empty"].at[place])

        queries = q.at[item.row, item.head, pl.ds(item.column, config.columns)]
        plgpu.copy_gmem_to_smem(queries, s["q"].at[place], s["q_full"].at[place])

        def one_step(i, _):
            stage = lax.rem(steps + i, jnp.int32(stages))
            for name, source in cached:
                memory, full, empty = (s[f"{from_cache}{name}{end}"].at[stage] for end in ("", "_full", "_empty"))
                pl.when(steps + i >= stages)(functools.partial(plgpu.barrier_wait, empty))
                load(source, item, (item.first_step + i) * block_kv, memory, full)
            return 0

        lax.fori_loop(0, item.num_steps, one_step, 0)

    def drain(barriers: str, size: int, count: Scalar) -> None:
        """Leave no completed phase unobserved."""

        def wait(i, _):
            plgpu.barrier_wait(s[barriers].at[lax.rem(i, jnp.int32(size))])
            return 0

        lax.fori_loop(lax.max(count - size, 0), count, wait, 0)

    def convert(item: Item, items: Scalar, steps: Scalar) -> None:
        del items

        def one_step(i, _):
            stage, codes = stage_of(steps + i), lax.rem(steps + i, jnp.int32(stages))
            for name, _ in cached:
                wait = functools.partial(plgpu.barrier_wait, s[f"{name}_empty"].at[stage])
                pl.when(steps + i >= WIDE_STAGES)(wait)
                plgpu.barrier_wait(s[f"codes_{name}_full"].at[codes])
                widen_tile(s[f"codes_{name}"].at[codes], s[name].at[stage])
                plgpu.commit_smem()
                plgpu.barrier_arrive(s[f"{name}_full"].at[stage])
                mosaic.release(s[f"codes_{name}_empty"].at[codes])
            return 0

        lax.fori_loop(0, item.num_steps, one_step, 0)

    def consume(item: Item, items: Scalar, steps: Scalar) -> None:
        place, shape = lax.rem(items, jnp.int32(2)), (block_kv, config.columns)
        plgpu.barrier_wait(s["q_full"].at[place])
        factor = jnp.float32(desc.scale * LOG2_E)
        factor = factor if scales is None else factor * scales[0]

        def multiply(left: TileRef, right: TileRef) -> Value:
            """left right^T, waited for; left (rows, K) or its transposed view, right (C, K)."""

            def scope(accumulator):
                plgpu.wgmma(accumulator, left, right.transpose((1, 0)))
                return accumulator[...]

            return pl.run_scoped(scope, mosaic.Accumulator((left.shape[0], config.columns), jnp.float32))

        def one_step(i, carry):
            sums, top, total = carry
            stage, first = stage_of(steps + i), (item.first_step + i) * block_kv
            plgpu.barrier_wait(s["k_full"].at[stage])
            scores = multiply(s["k"].at[stage], s["q"].at[place])
            if v is not None:
                plgpu.barrier_arrive(s["k_empty"].at[stage])
            scores = _masked(desc, item, first, scores * factor)
            new_top = lax.max(top, jnp.max(scores, axis=0))
            weights = jnp.exp2(scores - lax.broadcast_in_dim(new_top, shape, [1]))
            shrink = jnp.exp2(top - new_top)
            rounded = plgpu.layout_cast(weights.astype(desc.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
            s["weights"].transpose((1, 0))[...] = rounded
            plgpu.commit_smem()
            total = total * lax.broadcast_in_dim(shrink, shape, [1]) + weights
            if v is None:
                values = s["k"].at[stage, :, pl.ds(0, desc.value_width)]
            else:
                plgpu.barrier_wait(s["v_full"].at[stage])
                values = s["v"].at[stage]
            is_cut = (first < item.start) | (first + block_kv > item.length)
            pl.when(is_cut)(functools.partial(_clear, values, item.start - first, item.length - first))
            added = []
            for (start, size), own in zip(parts, sums, strict=True):
                more = multiply(values.at[:, pl.ds(start, size)].transpose((1, 0)), s["weights"])
                added.append(own * lax.broadcast_in_dim(shrink, own.shape, [1]) + more)
            plgpu.barrier_arrive(s["k_empty" if v is None else "v_empty"].at[stage])
            return tuple(added), new_top, total

        def no_sums() -> tuple[Value, ...]:
            return tuple(zeros((size, config.columns)) for _, size in parts)

        def of_columns(value: float) -> Value:
            return plgpu.layout_cast(jnp.full((config.columns,), value, jnp.float32), mosaic.COLUMNS)

        def one_split(begin, end) -> Part:
            carry = no_sums(), of_columns(FLOOR), zeros(shape)
            sums, top, total = lax.fori_loop(begin, end, one_step, carry)
            return sums, top, jnp.sum(total, axis=0)

        def keep(part: Part) -> None:
            sums, *stats = part
            for own, value in zip(so_far, (*sums, *stats), strict=True):
                own[...] = value

        def kept() -> Part:
            """What ``keep`` was given; each thread reads what it has written."""
            layouts = [mosaic.WGMMA] * len(parts) + [mosaic.COLUMNS] * 2
            *sums, top, total = (
                mosaic.load(own, layout=layout, optimized=False) for own, layout in zip(so_far, layouts, strict=True)
            )
            return tuple(sums), top, total

        def with_one_more(i, _):
            first = (item.split + i) * item.steps_of_split - item.first_step
            end = lax.min(first + item.steps_of_split, item.num_steps)
            part = one_split(lax.max(first, jnp.int32(0)), end)
            keep(_joined(kept(), part))
            return 0

        if config.adds_up:
            so_far = [s["so_far"].at[pl.ds(first, size)] for first, size in parts]
            so_far += [s["stats_so_far"].at[index] for index in range(2)]
            keep((no_sums(), of_columns(FLOOR), of_columns(0.0)))
            lax.fori_loop(0, item.num_splits, with_one_more, 0)
        else:
            sums, top, total = one_split(0, item.num_steps)
        plgpu.barrier_arrive(s["q_empty"].at[place])
        if config.whole_tiles:
            tile = Columns(desc, config, item.row, item.head, item.column)
            memory = dict(sums=s["so_far"], stats=s["stats_so_far"], maxima=s["maxima"])
            of_values = None if scales is None else scales[1]
            store_tile(rows, tile, memory, plgpu.commit_smem, sinks, of_values, outputs)
            return
        if config.runs:
            sums, top, total = kept()
        sums_out, tops_out, totals_out = outputs
        for (first, size), value in zip(parts, sums, strict=True):
            sums_out.at[item.index, pl.ds(first, size)][...] = value
        tops_out.at[item.index][...] = top
        totals_out.at[item.index][...] = total

    if desc.is_e4m3:

        @pl.when(warpgroup == 2)
        def _():
            plgpu.set_max_registers(REGISTERS[2], action="increase")
            _, steps = work.for_each(convert)
            for name, _ in cached:
                drain(f"{name}_empty", WIDE_STAGES, steps)

    @pl.when(warpgroup == 1)
    def _():
        if desc.is_e4m3:
            plgpu.set_max_registers(REGISTERS[1], action="decrease")
        items, steps = work.for_each(produce)
        for name, _ in cached:
            drain(f"{from_cache}{name}_empty", stages, steps)
        drain("q_empty", 2, items)

    @pl.when(warpgroup == 0)
    def _():
        if desc.is_e4m3:
            plgpu.set_max_registers(REGISTERS[0], action="increase")
        work.for_each(consume)


def zeros(shape: tuple[int, int]) -> Value:
    """float32 sums to start from, in the layout of an accumulator."""
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), mosaic.WGMMA)


def _joined(before: Part, part: Part) -> Part:
    """Splits and one more, with the bits of ``SplitSums.plus``."""
    sums, top, total = before
    own_sums, own_top, own_total = part
    shrink = jnp.exp2(-lax.abs(own_top - top))

    def with_own(value: Value, own: Value) -> Value:
        wide = [lax.broadcast_in_dim(x, value.shape, [1]) if value.ndim > 1 else x for x in (own_top, top, shrink)]
        return added(wide[0] > wide[1], wide[2], value, own)

    return tuple(map(with_own, sums, own_sums)), lax.max(top, own_top), with_own(total, own_total)


def _clear(values: TileRef, begin: Scalar, end: Scalar) -> None:
    """Zero the rows of a step's values outside [begin, end): they may hold anything, and 0 * NaN is NaN."""
    rows, width = values.shape
    for first, column in itertools.product(range(0, rows, 64), range(0, width, 64)):
        part = values.at[pl.ds(first, 64), pl.ds(column, 64)]
        row = plgpu.broadcasted_iota(jnp.int32, part.shape, 0, layout=mosaic.WGMMA) + first
        part[...] = jnp.where((row >= begin) & (row < end), part[...], jnp.zeros((), values.dtype))
    plgpu.commit_smem()


def _masked(desc: DecodeDesc, item: Item, first: Scalar, scores: Value) -> Value:
    """-inf where a query (column) does not see a slot (row); first: slot of the first row."""
    slots = plgpu.broadcasted_iota(jnp.int32, scores.shape, 0, layout=mosaic.WGMMA) + first
    if desc.num_queries == 1:
        begin, end = seen(desc, item.start, item.length, item.slot)
    else:
        columns = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=mosaic.WGMMA) + item.column
        own = lax.div(columns, jnp.full_like(columns, desc.group)) + item.slot
        end = lax.min(own + 1, lax.broadcast(item.length, scores.shape))
        begin = item.start
        if desc.window is not None:
            begin = lax.max(own - (desc.window - 1), lax.broadcast(item.start, scores.shape))
    return jnp.where((slots >= begin) & (slots < end), scores, -jnp.inf)
