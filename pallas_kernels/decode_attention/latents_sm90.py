"""Decode attention over MLA's latents on Hopper: a producer warpgroup and two consumers in each persistent CTA.

A work item is one split of the cache of 64 queries of a row: 64 query heads all see one key head, so they fill the rows
of wgmma. Keys have 576 elements, values are their first 512. 64 x 512 sums are more than the registers of one
warpgroup hold, so each consumer has half of their columns. The first one makes the scores and their softmax, and hands
the weights over in shared memory; the products of the second run beside its scores.

    producer          for each item: queries, then for each step of 64 slots: latents
    first consumer    for each item, for each step
                          S = Q K^T, masked
                          m = max(m, S), shrink = exp2(m before - m), P = exp2(S - m), l = l shrink + sum(P)
                          P, shrink -> shared memory
                          O = O shrink + P K[:, first half]
    second consumer       O = O shrink + P K[:, second half]
                      after the last step: O, m, l -> partial sums of the item, which a second launch adds

Where the queries of a row are an even number of tiles, the two CTAs of a cluster take two of them: each loads half of
a step's latents for both. Slots outside of those in use may hold anything: scores are masked, and values are
overwritten by zeros.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common import mosaic
from pallas_kernels.common.clear_rows_sm90 import clear_rows
from pallas_kernels.common.types import Kernel, Scalar, TileRef, Value
from pallas_kernels.decode_attention.config import DecodeConfig, DecodeDesc
from pallas_kernels.decode_attention.items_sm90 import Item, Items, seen
from pallas_kernels.decode_attention.kernel_sm90 import FLOOR, LOG2_E

REGISTERS = 240, 24  # of a thread: consumer, producer
PAIR = "pair"  # axis over the CTAs of a cluster
Q_FULL, Q_EMPTY, WEIGHTS_FULL, WEIGHTS_EMPTY = range(4)  # barriers behind those of the stages


def latents_sm90(desc: DecodeDesc, config: DecodeConfig) -> Kernel:
    """The kernel: (q, k, starts, lengths, first_slots) -> (sums, tops, totals) of each (tile, split).

    config must pass config_error, with swap_ab=False. q (B, M, T * 64, D) for T tiles of 64 queries, k (B, M, L, D);
    starts, lengths, first_slots (B,) int32. sums (B * M * T * splits, 64, V) float32, tops and totals
    (B * M * T * splits, 64) float32: those of splits that no query sees are not written.
    """
    dtype, queries, stages = jnp.dtype(desc.dtype), config.columns, config.num_stages
    tiled = mosaic.tiled(dtype, 128)
    items = config.all_tiles(desc) * config.num_splits(desc)
    stats = jax.ShapeDtypeStruct((items, queries), jnp.float32)
    if config.cluster > 1:
        clusters: dict[str, Any] = dict(cluster=(config.cluster,), cluster_names=(PAIR,))
        empty: Any = plgpu.ClusterBarrier(collective_axes=(PAIR,), num_arrivals=2, num_barriers=stages)
    else:
        clusters, empty = {}, plgpu.Barrier(num_arrivals=2, num_barriers=stages)
    return plgpu.kernel(
        functools.partial(_kernel, desc, config),
        out_type=(jax.ShapeDtypeStruct((items, queries, desc.value_width), jnp.float32), stats, stats),
        grid=(config.num_ctas // config.cluster,),
        grid_names=("block",),
        **clusters,
        num_threads=3,
        thread_name="warpgroup",
        scratch_types=dict(
            q=plgpu.SMEM((queries, desc.width), dtype, transforms=tiled),
            k=plgpu.SMEM((stages, config.block_kv, desc.width), dtype, transforms=tiled),
            weights=plgpu.SMEM((queries, config.block_kv), dtype, transforms=tiled),
            shrink=plgpu.SMEM((queries,), jnp.float32),
            # One array, since each takes registers of its own: that a stage is full, then Q_FULL to WEIGHTS_EMPTY.
            full=plgpu.Barrier(num_barriers=stages + 4),
            empty=empty,
        ),
        compiler_params=mosaic.compiler_params(reduction_scratch_bytes=512),  # rows are reduced by shuffles alone
        kernel_name="decode_attention_of_latents",
    )


def _kernel(desc: DecodeDesc, config: DecodeConfig, *refs: TileRef, **scratch: TileRef) -> None:
    mosaic.begin()
    q, k, starts, lengths, first_slots, *outputs = refs
    warpgroup = lax.axis_index("warpgroup")
    rank = lax.axis_index(PAIR) if config.cluster > 1 else jnp.int32(0)
    work = Items(desc, config, lax.axis_index("block"), starts, lengths, first_slots, rank)

    @pl.when(warpgroup == 2)
    def _():
        plgpu.set_max_registers(REGISTERS[1], action="decrease")
        _produce(config, work, q, k, scratch)

    @pl.when(warpgroup == 0)
    def _():
        plgpu.set_max_registers(REGISTERS[0], action="increase")
        _, steps = work.for_each(functools.partial(_score, desc, config, scratch, outputs))

        @pl.when(steps >= 1)
        def _():
            plgpu.barrier_wait(scratch["full"].at[config.num_stages + WEIGHTS_EMPTY])

    @pl.when(warpgroup == 1)
    def _():
        plgpu.set_max_registers(REGISTERS[0], action="increase")
        work.for_each(functools.partial(_follow, desc, config, scratch, outputs))


def _produce(config: DecodeConfig, work: Items, q: TileRef, k: TileRef, scratch: dict[str, TileRef]) -> None:
    stages, block_kv = config.num_stages, config.block_kv
    to_all: dict[str, Any] = dict(collective_axes=PAIR) if config.cluster > 1 else {}

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
            plgpu.copy_gmem_to_smem(latents, scratch["k"].at[stage], scratch["full"].at[stage], **to_all)
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
    """One item of the first consumer: scores, weights, and the first half of the columns of the values."""
    del items
    shape, width = (config.columns, config.block_kv), desc.value_width // 2
    factor = jnp.float32(desc.scale * LOG2_E)
    begin, end = seen(desc, item.start, item.length, item.slot)
    plgpu.barrier_wait(scratch["full"].at[config.num_stages + Q_FULL])

    def attend(out: TileRef) -> tuple[Value, Value, Value]:
        def one_step(i, carry):
            top, total = carry
            stage, first = lax.rem(steps + i, jnp.int32(config.num_stages)), (item.first_step + i) * config.block_kv
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

            @pl.when(steps + i >= 1)
            def _():
                plgpu.barrier_wait(scratch["full"].at[config.num_stages + WEIGHTS_EMPTY])

            scratch["weights"][...] = weights.astype(desc.dtype)
            scratch["shrink"][...] = shrink
            plgpu.commit_smem()
            plgpu.barrier_arrive(scratch["full"].at[config.num_stages + WEIGHTS_FULL])
            total = total * shrink + jnp.sum(weights, axis=1)
            _shrink(out, shrink)
            plgpu.wgmma(out, scratch["weights"], latents.at[:, pl.ds(0, width)])
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(scratch["empty"].at[stage])
            return new_top, total

        top = plgpu.layout_cast(jnp.full((config.columns,), FLOOR, jnp.float32), mosaic.ROWS)
        total = plgpu.layout_cast(jnp.zeros((config.columns,), jnp.float32), mosaic.ROWS)
        top, total = lax.fori_loop(0, item.num_steps, one_step, (top, total))
        return _loaded(out), top, total

    sums, top, total = pl.run_scoped(attend, mosaic.Accumulator((config.columns, width), jnp.float32))
    plgpu.barrier_arrive(scratch["full"].at[config.num_stages + Q_EMPTY])
    _store(outputs[0].at[item.index], sums, 0)
    outputs[1].at[item.index][...] = top
    outputs[2].at[item.index][...] = total


def _follow(
    desc: DecodeDesc,
    config: DecodeConfig,
    scratch: dict[str, TileRef],
    outputs: list[TileRef],
    item: Item,
    items: Scalar,
    steps: Scalar,
) -> None:
    """One item of the second consumer: the second half of the columns, with the weights of the first one."""
    del items
    width = desc.value_width // 2

    def attend(out: TileRef) -> Value:
        def one_step(i, _):
            stage = lax.rem(steps + i, jnp.int32(config.num_stages))
            plgpu.barrier_wait(scratch["full"].at[stage])
            plgpu.barrier_wait(scratch["full"].at[config.num_stages + WEIGHTS_FULL])
            _shrink(out, mosaic.load(scratch["shrink"], layout=mosaic.ROWS, optimized=False))
            plgpu.wgmma(out, scratch["weights"], scratch["k"].at[stage, :, pl.ds(width, width)])
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(scratch["full"].at[config.num_stages + WEIGHTS_EMPTY])
            plgpu.barrier_arrive(scratch["empty"].at[stage])
            return 0

        lax.fori_loop(0, item.num_steps, one_step, 0)
        return _loaded(out)

    sums = pl.run_scoped(attend, mosaic.Accumulator((config.columns, width), jnp.float32))
    _store(outputs[0].at[item.index], sums, width)


def _loaded(out: TileRef) -> Value:
    """The values of an accumulator that goes on being used."""
    return lax.optimization_barrier(plgpu.wgmma_accumulator_load(out, wait_n=0))


def _shrink(out: TileRef, shrink: Value) -> None:
    """Multiply each row of an accumulator."""
    sums = _loaded(out)
    out[...] = sums * lax.broadcast_in_dim(shrink, sums.shape, [0])


def _store(target: TileRef, sums: Value, first_column: int) -> None:
    for column in range(0, sums.shape[1], 64):  # few addresses at once
        target.at[:, pl.ds(first_column + column, 64)][...] = sums[:, column : column + 64]


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
