"""Decode attention over MLA's latents on Hopper: four warpgroups in each persistent CTA.

A work item is one split of the cache of 64 queries of a row: 64 query heads all see one key head, so they fill the rows
of wgmma. Keys have 576 elements, values are their first 512. 64 x 512 sums are more than the registers of one
warpgroup hold, so two have half of their columns each. A third one makes the scores and their softmax, and hands the
weights over in shared memory: it is at the next step while those two multiply.

    producer     for each item: queries, then for each step of 64 slots: latents
    scorer       for each item, for each step
                     S = Q K^T, masked
                     m = max(m, S), shrink = exp2(m before - m), P = exp2(S - m), l = l shrink + sum(P)
                     P, shrink -> shared memory
                 after the last step: m, l
    consumers    for each item, for each step
                     O = O shrink + P K[:, own half]
                 after the last step: O -> partial sums of the item, which a second launch adds; or where tiles
                     have one split O / l, for which the scorer hands l over as it does shrink

Slots outside of those in use may hold anything: scores are masked, and values are overwritten by zeros.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common import mosaic
from pallas_kernels.common.clear_rows_sm90 import clear_rows
from pallas_kernels.common.shapes import or_shapes
from pallas_kernels.common.types import Kernel, Scalar, TileRef, Value
from pallas_kernels.decode_attention.config import DecodeConfig, DecodeDesc
from pallas_kernels.decode_attention.items_sm90 import Item, Items
from pallas_kernels.decode_attention.outputs_sm90 import FLOOR, LOG2_E
from pallas_kernels.decode_attention.schedule import seen

SCORER, PRODUCER = 2, 3  # warpgroups behind the two consumers
REGISTERS = 160, 168, 24  # of a thread: consumer, scorer, producer; all enter with 128
Q_FULL, Q_EMPTY, WEIGHTS_FULL = range(3)  # barriers behind those of full stages
WEIGHTS_EMPTY = 0  # behind those of empty stages


def latents_sm90(desc: DecodeDesc, config: DecodeConfig) -> Kernel:
    """The kernel: (q, k, starts, lengths, first_slots) -> (sums, tops, totals) of each (tile, split); with
    config.whole_tiles the outputs, [(B, S * N, V)].

    config must pass config_error, with swap_ab=False. q (B, M, T * 64, D) for T tiles of 64 queries, k (B, M, L, D);
    starts, lengths, first_slots (B,) int32. sums (B * M * T * splits, 64, V) float32, tops and totals
    (B * M * T * splits, 64) float32: those of splits that no query sees are not written.
    """
    dtype, queries, stages = jnp.dtype(desc.dtype), config.columns, config.num_stages
    tiled = mosaic.tiled(dtype, 128)
    items = config.all_tiles(desc) * config.num_splits(desc)
    stats = jax.ShapeDtypeStruct((items, queries), jnp.float32)
    out_type = [jax.ShapeDtypeStruct((items, queries, desc.value_width), jnp.float32), stats, stats]
    if config.whole_tiles:
        out_type = [jax.ShapeDtypeStruct((desc.batch, desc.columns, desc.value_width), dtype)]
    kernel = plgpu.kernel(
        functools.partial(_kernel, desc, config),
        out_type=out_type,
        grid=(config.num_ctas,),
        grid_names=("block",),
        num_threads=4,
        thread_name="warpgroup",
        scratch_types=dict(
            q=plgpu.SMEM((queries, desc.width), dtype, transforms=tiled),
            k=plgpu.SMEM((stages, config.block_kv, desc.width), dtype, transforms=tiled),
            weights=plgpu.SMEM((queries, config.block_kv), dtype, transforms=tiled),
            shrink=plgpu.SMEM((queries,), jnp.float32),
            # Few arrays, since each takes registers of its own.
            full=plgpu.Barrier(num_barriers=stages + 3),
            empty=plgpu.Barrier(num_arrivals=2, num_barriers=stages + 1),
        ),
        compiler_params=mosaic.compiler_params(reduction_scratch_bytes=512),  # rows are reduced by shuffles alone
        kernel_name="decode_attention_of_latents",
    )
    return or_shapes(kernel, out_type)


def _kernel(desc: DecodeDesc, config: DecodeConfig, *refs: TileRef, **scratch: TileRef) -> None:
    mosaic.begin()
    q, k, starts, lengths, first_slots, *outputs = refs
    warpgroup = lax.axis_index("warpgroup")
    work = Items(desc, config, lax.axis_index("block"), starts, lengths, first_slots)

    @pl.when(warpgroup == PRODUCER)
    def _():
        plgpu.set_max_registers(REGISTERS[2], action="decrease")
        _produce(config, work, q, k, scratch)

    @pl.when(warpgroup == SCORER)
    def _():
        plgpu.set_max_registers(REGISTERS[1], action="increase")
        items, steps = work.for_each(functools.partial(_score, desc, config, scratch, outputs))

        @pl.when((items if config.whole_tiles else steps) >= 1)
        def _():
            plgpu.barrier_wait(scratch["empty"].at[config.num_stages + WEIGHTS_EMPTY])

    @pl.when(warpgroup < SCORER)
    def _():
        plgpu.set_max_registers(REGISTERS[0], action="increase")
        work.for_each(functools.partial(_consume, desc, config, warpgroup, scratch, outputs))


def _produce(config: DecodeConfig, work: Items, q: TileRef, k: TileRef, scratch: dict[str, TileRef]) -> None:
    stages, block_kv = config.num_stages, config.block_kv

    def load(item: Item, items: Scalar, steps: Scalar) -> None:
        @pl.when(items >= 1)
        def _():
            plgpu.barrier_wait(scratch["full"].at[config.num_stages + Q_EMPTY])

        queries = q.at[item.row, item.head, pl.ds(item.column, config.columns)]
        plgpu.copy_gmem_to_smem(queries, scratch["q"], scratch["full"].at[config.num_stages + Q_FULL])

        def one_step(i, _):
            stage = lax.rem(steps + i, jnp.int32(stages))

            @pl.when(steps + i >= stages)
            def _():
                plgpu.barrier_wait(scratch["empty"].at[stage])

            slots = pl.ds(pl.multiple_of((item.first_step + i) * block_kv, block_kv), block_kv)
            latents = k.at[item.row, item.head, slots]
            plgpu.copy_gmem_to_smem(latents, scratch["k"].at[stage], scratch["full"].at[stage])
            return 0

        lax.fori_loop(0, item.num_steps, one_step, 0)

    items, steps = work.for_each(load)

    # Leave no completed phase unobserved.
    def drain(step, _):
        plgpu.barrier_wait(scratch["empty"].at[lax.rem(step, jnp.int32(stages))])
        return 0

    lax.fori_loop(lax.max(steps - stages, 0), steps, drain, 0)

    @pl.when(items >= 1)
    def _():
        plgpu.barrier_wait(scratch["full"].at[config.num_stages + Q_EMPTY])


def _score(
    desc: DecodeDesc,
    config: DecodeConfig,
    scratch: dict[str, TileRef],
    outputs: list[TileRef],
    item: Item,
    items: Scalar,
    steps: Scalar,
) -> None:
    """One item of the scorer."""
    shape, stages = (config.columns, config.block_kv), config.num_stages
    factor = jnp.float32(desc.scale * LOG2_E)
    begin, end = seen(desc, item.start, item.length, item.slot)
    plgpu.barrier_wait(scratch["full"].at[stages + Q_FULL])

    def await_consumers(before):
        """They have what was handed over last. before: steps before this one."""
        have_something = (before >= 1) | (items >= 1) if config.whole_tiles else before >= 1
        wait = functools.partial(plgpu.barrier_wait, scratch["empty"].at[stages + WEIGHTS_EMPTY])
        pl.when(have_something)(wait)

    def one_step(i, carry):
        top, total = carry
        stage, first = lax.rem(steps + i, jnp.int32(stages)), (item.first_step + i) * config.block_kv
        latents = scratch["k"].at[stage]
        plgpu.barrier_wait(scratch["full"].at[stage])

        def product(scores):
            plgpu.wgmma(scores, scratch["q"], latents.transpose((1, 0)))
            return scores[...]

        scores = pl.run_scoped(product, mosaic.Accumulator(shape, jnp.float32))
        scores = _masked(desc, item, first, begin, end, scores)
        new_top = lax.max(top, jnp.max(scores, axis=1) * factor)
        weights = jnp.exp2(scores * factor - lax.broadcast_in_dim(new_top, shape, [0]))
        shrink = jnp.exp2(top - new_top)

        @pl.when((first < begin) | (first + config.block_kv > end))
        def _():
            clear_rows(latents, begin - first, end - first)

        await_consumers(steps + i)
        scratch["weights"][...] = weights.astype(desc.dtype)
        scratch["shrink"][...] = shrink
        plgpu.commit_smem()
        plgpu.barrier_arrive(scratch["full"].at[stages + WEIGHTS_FULL])
        return new_top, total * shrink + jnp.sum(weights, axis=1)

    top = plgpu.layout_cast(jnp.full((config.columns,), FLOOR, jnp.float32), mosaic.ROWS)
    total = plgpu.layout_cast(jnp.zeros((config.columns,), jnp.float32), mosaic.ROWS)
    top, total = lax.fori_loop(0, item.num_steps, one_step, (top, total))
    plgpu.barrier_arrive(scratch["full"].at[stages + Q_EMPTY])
    if config.whole_tiles:
        await_consumers(steps + item.num_steps)
        scratch["shrink"][...] = total
        plgpu.commit_smem()
        plgpu.barrier_arrive(scratch["full"].at[stages + WEIGHTS_FULL])
        return
    outputs[1].at[item.index][...] = top
    outputs[2].at[item.index][...] = total


def _consume(
    desc: DecodeDesc,
    config: DecodeConfig,
    half: Any,
    scratch: dict[str, TileRef],
    outputs: list[TileRef],
    item: Item,
    items: Scalar,
    steps: Scalar,
) -> None:
    """One item of a consumer, which has half of the columns of the values."""
    del items
    width, stages = desc.value_width // 2, config.num_stages
    # With 512 threads ptxas has 128 registers for an instruction: those of 256 columns take more.
    size = width if width <= 128 else 64 * math.gcd(width // 64, 2)
    columns = [pl.multiple_of(half * width + start, size) for start in range(0, width, size)]

    def attend(*outs: TileRef) -> list[Value]:
        def one_step(i, _):
            stage = lax.rem(steps + i, jnp.int32(stages))
            plgpu.barrier_wait(scratch["full"].at[stage])
            plgpu.barrier_wait(scratch["full"].at[stages + WEIGHTS_FULL])
            shrink = mosaic.load(scratch["shrink"], layout=mosaic.ROWS, optimized=False)
            for out in outs:
                _shrink(out, shrink)
            for out, column in zip(outs, columns, strict=True):
                plgpu.wgmma(out, scratch["weights"], scratch["k"].at[stage, :, pl.ds(column, size)])
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(scratch["empty"].at[stages + WEIGHTS_EMPTY])
            plgpu.barrier_arrive(scratch["empty"].at[stage])
            return 0

        lax.fori_loop(0, item.num_steps, one_step, 0)
        return [_loaded(out) for out in outs]

    parts = pl.run_scoped(attend, *[mosaic.Accumulator((config.columns, size), jnp.float32)] * len(columns))
    if config.whole_tiles:
        plgpu.barrier_wait(scratch["full"].at[stages + WEIGHTS_FULL])
        total = mosaic.load(scratch["shrink"], layout=mosaic.ROWS, optimized=False)
        plgpu.barrier_arrive(scratch["empty"].at[stages + WEIGHTS_EMPTY])
        out = outputs[0].at[item.row, pl.ds(item.column, config.columns)]
        for part, first in zip(parts, columns, strict=True):
            divisor = lax.broadcast_in_dim(total, part.shape, [0])
            mean = jnp.where(divisor == 0, 0.0, part / divisor).astype(desc.dtype)
            for start in range(0, size, 64):  # few addresses at once
                out.at[:, pl.ds(pl.multiple_of(first + start, 64), 64)][...] = mean[:, start : start + 64]
        return
    for part, first in zip(parts, columns, strict=True):
        for start in range(0, size, 64):  # few addresses at once
            place = pl.ds(pl.multiple_of(first + start, 64), 64)
            outputs[0].at[item.index, :, place][...] = part[:, start : start + 64]


def _loaded(out: TileRef) -> Value:
    """The values of an accumulator that goes on being used."""
    return lax.optimization_barrier(plgpu.wgmma_accumulator_load(out, wait_n=0))


def _shrink(out: TileRef, factor: Value) -> None:
    """Multiply each row of an accumulator."""
    sums = _loaded(out)
    out[...] = sums * lax.broadcast_in_dim(factor, sums.shape, [0])


def _masked(desc: DecodeDesc, item: Item, first: Scalar, begin: Scalar, end: Scalar, scores: Value) -> Value:
    """-inf where a query (row) does not see a slot (column).

    first: slot of the first column. [begin, end): the slots that any query of the row sees.
    """
    columns = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=mosaic.WGMMA)
    if desc.num_queries == 1:
        return jnp.where((columns >= begin - first) & (columns < end - first), scores, -jnp.inf)
    rows = plgpu.broadcasted_iota(jnp.int32, scores.shape, 0, layout=mosaic.WGMMA) + item.column
    own = lax.div(rows, jnp.full_like(rows, desc.group)) + (item.slot - first)  # the column of a query's own slot
    is_seen = (columns >= begin - first) & (columns < end - first) & (columns <= own)
    if desc.window is not None:
        is_seen &= columns > own - desc.window
    return jnp.where(is_seen, scores, -jnp.inf)
