"""Decode attention over MLA's latents on Hopper: a producer warpgroup and two consumers in each persistent CTA.

A work item is one split of the cache of 64 queries of a row: 64 query heads all see one key head, so they fill the rows
of wgmma. Keys have 576 elements, values are their first 512. Each consumer computes the scores of all 64 queries and
half of the columns of the output: 64 x 512 sums are more than the registers of one hold. So scores are computed twice,
which costs half again as many products. In return the consumers never wait for each other, and the softmax of one runs
beside the products of the other.

    producer      for each item: queries, then for each step of 64 slots: latents
    consumers     for each item, for each step
                      S = Q K^T, masked
                      m = max(m, S), P = exp2(S - m), l = l exp2(m before - m) + sum(P)
                      O = O exp2(m before - m) + P K[:, own half]
                  after the last step: O, m, l -> partial sums of the item, which a second launch adds

Slots outside of those in use may hold anything: scores are masked, and values are overwritten by zeros.
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
    return plgpu.kernel(
        functools.partial(_kernel, desc, config),
        out_type=(jax.ShapeDtypeStruct((items, queries, desc.value_width), jnp.float32), stats, stats),
        grid=(config.num_ctas,),
        grid_names=("block",),
        num_threads=3,
        thread_name="warpgroup",
        scratch_types=dict(
            q=plgpu.SMEM((queries, desc.width), dtype, transforms=tiled),
            k=plgpu.SMEM((stages, config.block_kv, desc.width), dtype, transforms=tiled),
            # The last barrier of each is that of the queries: each array takes registers of its own.
            full=plgpu.Barrier(num_barriers=stages + 1),
            empty=plgpu.Barrier(num_arrivals=2, num_barriers=stages + 1),
        ),
        compiler_params=mosaic.compiler_params(),
        kernel_name="decode_attention_of_latents",
    )


def _kernel(desc: DecodeDesc, config: DecodeConfig, *refs: TileRef, **scratch: TileRef) -> None:
    mosaic.begin()
    q, k, starts, lengths, first_slots, *outputs = refs
    warpgroup = lax.axis_index("warpgroup")
    work = Items(desc, config, lax.axis_index("block"), starts, lengths, first_slots)

    @pl.when(warpgroup == 2)
    def _():
        plgpu.set_max_registers(REGISTERS[1], action="decrease")
        _produce(config, work, q, k, scratch)

    @pl.when(warpgroup < 2)
    def _():
        plgpu.set_max_registers(REGISTERS[0], action="increase")
        work.for_each(functools.partial(_attend, desc, config, warpgroup, scratch, outputs))


def _produce(config: DecodeConfig, work: Items, q: TileRef, k: TileRef, scratch: dict[str, TileRef]) -> None:
    stages, block_kv = config.num_stages, config.block_kv

    def load(item: Item, items: Scalar, steps: Scalar) -> None:
        @pl.when(items >= 1)
        def _():
            plgpu.barrier_wait(scratch["empty"].at[config.num_stages])

        queries = q.at[item.row, item.head, pl.ds(item.column, config.columns)]
        plgpu.copy_gmem_to_smem(queries, scratch["q"], scratch["full"].at[config.num_stages])

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
        plgpu.barrier_wait(scratch["empty"].at[config.num_stages])


def _attend(
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
    shape, width = (config.columns, config.block_kv), desc.value_width // 2
    own, factor = pl.ds(pl.multiple_of(half * width, width), width), jnp.float32(desc.scale * LOG2_E)
    begin, end = seen(desc, item.start, item.length, item.slot)
    plgpu.barrier_wait(scratch["full"].at[config.num_stages])

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
            total = total * shrink + jnp.sum(weights, axis=1)
            sums = lax.optimization_barrier(plgpu.wgmma_accumulator_load(out, wait_n=0))
            out[...] = sums * lax.broadcast_in_dim(shrink, sums.shape, [0])

            @pl.when((first < begin) | (first + config.block_kv > end))
            def _():
                clear_rows(latents, begin - first, end - first)

            plgpu.wgmma(out, weights.astype(desc.dtype), latents.at[:, own])
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(scratch["empty"].at[stage])
            return new_top, total

        top = plgpu.layout_cast(jnp.full((config.columns,), FLOOR, jnp.float32), mosaic.ROWS)
        total = plgpu.layout_cast(jnp.zeros((config.columns,), jnp.float32), mosaic.ROWS)
        top, total = lax.fori_loop(0, item.num_steps, one_step, (top, total))
        return lax.optimization_barrier(plgpu.wgmma_accumulator_load(out, wait_n=0)), top, total

    sums, top, total = pl.run_scoped(attend, mosaic.Accumulator((config.columns, width), jnp.float32))
    plgpu.barrier_arrive(scratch["empty"].at[config.num_stages])
    for column in range(0, width, 64):  # few addresses at once
        outputs[0].at[item.index, :, pl.ds(pl.multiple_of(half * width + column, 64), 64)][...] = sums[
            :, column : column + 64
        ]

    @pl.when(half == 0)
    def _():
        outputs[1].at[item.index][...] = top
        outputs[2].at[item.index][...] = total


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
