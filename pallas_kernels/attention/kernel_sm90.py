"""Flash attention of a prefill on Hopper: one persistent CTA per SM, a producer warpgroup and two consumers.

A tile is 128 queries of one head of one row of the batch. Its keys are walked from the last step of block_kv slots that
any of its queries sees to the first; steps that none sees are not loaded. Where a row holds several sequences, the walk
goes over the tile's own sequences, and then over the slots that all share. Keys and values lie in a ring of stages.

    producer      for each tile: queries, then per step i: keys i, values i - 1
    consumers     64 queries of the tile each
        step i        S = Q K[i]^T, and beside it O += P V[i - 1]
                      mask S where a query does not see all slots of the step
                      m = max(m, S), P = exp2(S - m), l = l exp2(m before - m) + sum(P), while O += P V[i - 1] runs
                      O = O exp2(m before - m)
        after the last step
                      O += P V[last], O / l -> staged TMA stores

Softmax runs in float32, with scores scaled by log2(e). m starts at a finite floor, so a query that sees nothing ends
with l = 0 and gets zeros. A sink is a key of value zero: m starts with its logit and l with 1. Slots of a step outside
[start, length) may hold anything: their scores are masked, and the consumers overwrite their values by zeros in shared
memory, since 0 * NaN is NaN.

Of a cache in pages a step is a copy of each of its pages; the producer reads the table.

The consumers issue their products alternately, so that one's softmax runs beside the other's products.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.config import BLOCK_Q, ROWS, STORE_COLUMNS, PrefillConfig, PrefillDesc
from pallas_kernels.attention.schedule import Tile, num_tiles_of, tile_of, unmasked_steps
from pallas_kernels.common import mosaic
from pallas_kernels.common.clear_rows_sm90 import clear_rows
from pallas_kernels.common.pages import PAGE_SLOTS
from pallas_kernels.common.shapes import or_shapes
from pallas_kernels.common.types import Kernel, Scalar, TileRef, Value

_FLOOR = -(2.0**100)  # below every score in use, and finite
_LOG2_E = math.log2(math.e)
REGISTERS = 240, 24  # of a thread: consumer, producer


def prefill_sm90(desc: PrefillDesc, config: PrefillConfig) -> Kernel:
    """The kernel: (q, k, v, starts, lengths, first_slots, [pages], [first_keys], [shared], [sinks], [k_scale, v_scale])
    -> (B, S, N, V). config must pass config_error.

    q (B, S, N, D), k (B, M, L, D), v (B, M, L, V); starts, lengths, first_slots, shared (B,) int32; first_keys (B, S)
    int32, with S in whole tiles; sinks (N,) float32; k_scale, v_scale (1,) float32. shared is there with first_keys and
    without a window. pages (B, L / 64) int32 where there are ``num_pages``, which k and v have in place of rows, with
    64 slots each.
    """
    dtype = jnp.dtype(desc.dtype)
    tiled = mosaic.tiled(dtype, 128)

    def buffer(*shape: int) -> Any:
        return plgpu.SMEM(shape, dtype, transforms=tiled)

    stages = config.num_stages
    scratch: dict[str, Any] = dict(
        q=buffer(config.query_stages, BLOCK_Q, desc.width),
        k=buffer(stages, config.block_kv, desc.width),
        v=buffer(stages, config.block_kv, desc.value_width),
        staging=buffer(2, ROWS, STORE_COLUMNS),
        full=plgpu.Barrier(
            num_arrivals=num_copies(desc, config),
            num_barriers=2 * stages + config.query_stages + 2,
        ),
        empty=plgpu.Barrier(num_arrivals=2, num_barriers=2 * stages + config.query_stages),
    )
    out_type = jax.ShapeDtypeStruct((desc.batch, desc.num_queries, desc.num_heads, desc.value_width), dtype)
    kernel = plgpu.kernel(
        functools.partial(_kernel, desc, config),
        out_type=out_type,
        grid=(config.num_sms,),
        grid_names=("block",),
        num_threads=3,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=mosaic.compiler_params(),
        kernel_name="prefill_attention",
    )
    return or_shapes(kernel, out_type)


def num_copies(desc: PrefillDesc, config: PrefillConfig) -> int:
    """By which the keys of a step come: one, or one for each page."""
    return config.block_kv // PAGE_SLOTS if desc.num_pages else 1


@dataclasses.dataclass(frozen=True)
class _Cta:
    desc: PrefillDesc
    config: PrefillConfig
    operands: dict[str, TileRef]
    out: TileRef
    scratch: dict[str, TileRef]

    def num_tiles(self) -> Scalar:
        return num_tiles_of(self.desc, self.config, lax.axis_index("block"))

    def tile(self, t: Scalar) -> Tile:
        return tile_of(self.desc, self.config, self.operands, lax.axis_index("block"), t)

    def stage(self, step: Scalar) -> Scalar:
        """The stage of a step, counted over all tiles."""
        return lax.rem(step, jnp.int32(self.config.num_stages))

    def query_stage(self, tile: Scalar) -> Scalar:
        """The stage of the queries of this CTA's tile of that number."""
        return lax.rem(tile, jnp.int32(self.config.query_stages))

    @property
    def num_copies(self) -> int:
        return num_copies(self.desc, self.config)

    # Two arrays hold all barriers: each array takes registers of its own. Those of one array wait for equally many
    # arrivals.

    def full(self, name: str, stage: Scalar) -> TileRef:
        return self.scratch["full"].at[self._first_barrier(name) + stage]

    def empty(self, name: str, stage: Scalar) -> TileRef:
        return self.scratch["empty"].at[self._first_barrier(name) + stage]

    def turn(self, warpgroup: Scalar) -> TileRef:
        """Arrived at, by ``give_turn``, when it is this consumer's turn to issue products."""
        return self.scratch["full"].at[self._first_barrier("turn") + warpgroup]

    def give_turn(self, warpgroup: Scalar) -> None:
        for _ in range(self.num_copies):
            plgpu.barrier_arrive(self.turn(warpgroup))

    def _first_barrier(self, name: str) -> int:
        stages = self.config.num_stages
        return dict(k=0, v=stages, q=2 * stages, turn=2 * stages + self.config.query_stages)[name]


def _kernel(desc: PrefillDesc, config: PrefillConfig, *refs: TileRef, **scratch: TileRef) -> None:
    mosaic.begin()
    names = ("q", "k", "v", "starts", "lengths", "first_slots")
    names += ("pages",) if desc.num_pages else ()
    names += ("first_keys",) if desc.has_sequences else ()
    names += ("shared",) if desc.has_sequences and desc.window is None else ()
    names += ("sinks",) if desc.has_sinks else ()
    names += ("k_scale", "v_scale") if desc.has_scales else ()
    cta = _Cta(desc, config, dict(zip(names, refs, strict=False)), refs[-1], scratch)
    warpgroup = lax.axis_index("warpgroup")

    @pl.when(warpgroup == 2)
    def _():
        plgpu.set_max_registers(REGISTERS[1], action="decrease")
        _produce(cta)

    @pl.when(warpgroup < 2)
    def _():
        plgpu.set_max_registers(REGISTERS[0], action="increase")
        _consume(cta, warpgroup)


def _produce(cta: _Cta) -> None:
    desc, config, operands, scratch = cta.desc, cta.config, cta.operands, cta.scratch
    count = cta.num_tiles()

    def one_tile(t, first):
        tile, place = cta.tile(t), cta.query_stage(t)
        kv_head = lax.div(tile.head, jnp.int32(desc.group))

        def load(name: str, i: Scalar) -> None:
            step = first + i
            stage = cta.stage(step)

            @pl.when(step >= config.num_stages)
            def _():
                plgpu.barrier_wait(cta.empty(name, stage))

            if not desc.num_pages:
                slots = pl.ds(pl.multiple_of(tile.step(i) * config.block_kv, config.block_kv), config.block_kv)
                source = operands[name].at[tile.row, kv_head, slots]
                plgpu.copy_gmem_to_smem(source, scratch[name].at[stage], cta.full(name, stage))
                return
            for part in range(cta.num_copies):
                # What a table holds behind a row's last slot is masked, but it must be memory of the cache.
                column = lax.min(tile.step(i) * cta.num_copies + part, jnp.int32(desc.num_slots // PAGE_SLOTS - 1))
                page = lax.clamp(jnp.int32(0), operands["pages"][tile.row, column], jnp.int32(desc.num_pages - 1))
                memory = scratch[name].at[stage]
                memory = memory.at[pl.ds(part * PAGE_SLOTS, PAGE_SLOTS)] if cta.num_copies > 1 else memory
                plgpu.copy_gmem_to_smem(operands[name].at[page, kv_head], memory, cta.full(name, stage))

        @pl.when(t >= config.query_stages)
        def _():
            plgpu.barrier_wait(cta.empty("q", place))

        size = BLOCK_Q // cta.num_copies
        for part in range(cta.num_copies):
            queries = operands["q"].at[tile.row, pl.ds(tile.query + part * size, size), tile.head]
            memory = scratch["q"].at[place, pl.ds(part * size, size)] if cta.num_copies > 1 else scratch["q"].at[place]
            plgpu.copy_gmem_to_smem(queries, memory, cta.full("q", place))
        load("k", jnp.int32(0))

        def one_step(i, _):
            load("k", i)
            load("v", i - 1)
            return 0

        lax.fori_loop(1, tile.num_steps, one_step, 0)
        load("v", tile.num_steps - 1)
        return first + tile.num_steps

    end = lax.fori_loop(0, count, one_tile, jnp.int32(0))

    # Leave no completed phase unobserved.
    def drain(step, _):
        plgpu.barrier_wait(cta.empty("k", cta.stage(step)))
        plgpu.barrier_wait(cta.empty("v", cta.stage(step)))
        return 0

    lax.fori_loop(lax.max(end - config.num_stages, 0), end, drain, 0)

    def drain_queries(t, _):
        plgpu.barrier_wait(cta.empty("q", cta.query_stage(t)))
        return 0

    lax.fori_loop(lax.max(count - config.query_stages, 0), count, drain_queries, 0)


def _consume(cta: _Cta, warpgroup: Scalar) -> None:
    count = cta.num_tiles()

    @pl.when(warpgroup == 1)
    def _():
        cta.give_turn(0)

    def one_tile(t, first):
        tile = cta.tile(t)
        pl.run_scoped(
            functools.partial(_attend, cta, warpgroup, tile, cta.query_stage(t), first),
            mosaic.Accumulator((ROWS, cta.desc.value_width), jnp.float32),
        )
        return first + tile.num_steps

    lax.fori_loop(0, count, one_tile, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0)

    @pl.when(warpgroup == 0)
    def _():
        plgpu.barrier_wait(cta.turn(0))


def _attend(cta: _Cta, warpgroup: Scalar, tile: Tile, place: Scalar, first: Scalar, out: TileRef) -> None:
    """One tile of a consumer. out: its accumulator (64, V), zero. first: steps of this CTA's earlier tiles."""
    desc, config, scratch = cta.desc, cta.config, cta.scratch
    block_kv, dtype = config.block_kv, jnp.dtype(desc.dtype)
    shape, factor = (ROWS, block_kv), jnp.float32(desc.scale * _LOG2_E)
    factor = factor * cta.operands["k_scale"][0] if desc.has_scales else factor
    slot = tile.slot + warpgroup * ROWS  # of this consumer's first query
    q = scratch["q"].at[place, pl.ds(warpgroup * ROWS, ROWS)]

    def scores(i: Scalar, beside: Callable[[], None] | None) -> Value:
        """Of step i, not yet waited for where a product is issued ``beside`` it."""
        stage = cta.stage(first + i)
        plgpu.barrier_wait(cta.turn(warpgroup))

        def product(accumulator):
            plgpu.wgmma(accumulator, q, scratch["k"].at[stage].transpose((1, 0)))
            return plgpu.wgmma_accumulator_load(accumulator, wait_n=None)

        found = pl.run_scoped(product, mosaic.Accumulator(shape, jnp.float32))
        if beside is not None:
            beside()
        cta.give_turn(1 - warpgroup)
        plgpu.wgmma_wait(0 if beside is None else 1)
        plgpu.barrier_arrive(cta.empty("k", stage))
        return lax.optimization_barrier(found)

    def masked(found: Value, i: Scalar) -> Value:
        rows = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=mosaic.WGMMA) + slot
        slots = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=mosaic.WGMMA) + tile.step(i) * block_kv
        end = lax.min(rows + 1, lax.broadcast(tile.length, shape)) if desc.is_causal else tile.length
        begin = tile.start
        if desc.window is not None:
            begin = lax.max(rows - (desc.window - 1), lax.broadcast(tile.start, shape))
        if not desc.has_sequences:
            return jnp.where((slots >= begin) & (slots < end), found, -jnp.inf)
        queries = pl.ds(tile.query + warpgroup * ROWS, ROWS)
        keys = mosaic.load(cta.operands["first_keys"].at[tile.row, queries], layout=mosaic.ROWS, optimized=False)
        seen = slots >= lax.broadcast_in_dim(keys, shape, [0])
        seen = seen if tile.shared is None else seen | (slots < tile.shared[0])
        return jnp.where(seen & (slots >= begin) & (slots < end), found, -jnp.inf)

    def softmax(found: Value, top: Value, total: Value) -> tuple[Value, Value, Value, Value]:
        """(weights, largest score so far, sum of weights so far, what earlier sums shrink by)."""
        new_top = lax.max(top, jnp.max(found, axis=1) * factor)
        weights = jnp.exp2(found * factor - lax.broadcast_in_dim(new_top, shape, [0]))
        shrink = jnp.exp2(top - new_top)
        return weights, new_top, total * shrink + jnp.sum(weights, axis=1), shrink

    def wait_values(i: Scalar, is_masked: bool) -> None:
        """Wait for the values of step i, and clear those that lie outside the slots in use."""
        values, begin = scratch["v"].at[cta.stage(first + i)], tile.step(i) * block_kv
        plgpu.barrier_wait(cta.full("v", cta.stage(first + i)))
        if is_masked:

            @pl.when((begin < tile.start) | (begin + block_kv > tile.length))
            def _():
                clear_rows(values, tile.start - begin, tile.length - begin)

    def one_step(i, carry, is_masked):
        weights, top, total = carry
        stage = cta.stage(first + i - 1)
        plgpu.barrier_wait(cta.full("k", cta.stage(first + i)))
        found = scores(i, lambda: plgpu.wgmma(out, weights, scratch["v"].at[stage]))
        found = masked(found, i) if is_masked else found
        weights, top, total, shrink = softmax(found, top, total)
        sums = lax.optimization_barrier(plgpu.wgmma_accumulator_load(out, wait_n=0))
        plgpu.barrier_arrive(cta.empty("v", stage))
        out[...] = sums * lax.broadcast_in_dim(shrink, sums.shape, [0])
        wait_values(i, is_masked)
        return weights.astype(dtype), top, total

    top = jnp.full((ROWS,), _FLOOR, jnp.float32)
    total = jnp.zeros((ROWS,), jnp.float32)
    if desc.has_sinks:
        sink = cta.operands["sinks"][tile.head] * _LOG2_E
        top = lax.broadcast(lax.max(sink, jnp.float32(_FLOOR)), (ROWS,))
        total = jnp.exp2(lax.broadcast(sink, (ROWS,)) - top)
    top, total = (plgpu.layout_cast(value, mosaic.ROWS) for value in (top, total))

    plgpu.barrier_wait(cta.full("q", place))
    plgpu.barrier_wait(cta.full("k", cta.stage(first)))
    weights, top, total, _ = softmax(masked(scores(jnp.int32(0), None), jnp.int32(0)), top, total)
    wait_values(jnp.int32(0), is_masked=True)
    carry = (weights.astype(dtype), top, total)

    whole, tail = unmasked_steps(desc, config, cta.operands, tile, warpgroup)
    steps = tile.num_steps
    carry = lax.fori_loop(1, whole, functools.partial(one_step, is_masked=True), carry)
    carry = lax.fori_loop(whole, tail, functools.partial(one_step, is_masked=False), carry)
    carry = lax.fori_loop(tail, steps, functools.partial(one_step, is_masked=True), carry)
    plgpu.barrier_arrive(cta.empty("q", place))

    weights, _, total = carry
    stage = cta.stage(first + steps - 1)
    plgpu.wgmma(out, weights, scratch["v"].at[stage])
    sums = lax.optimization_barrier(plgpu.wgmma_accumulator_load(out, wait_n=0))
    plgpu.barrier_arrive(cta.empty("v", stage))
    inverse = jnp.where(total == 0, 0.0, 1 / total)
    inverse = inverse * cta.operands["v_scale"][0] if desc.has_scales else inverse
    _store(cta, warpgroup, tile, (sums * lax.broadcast_in_dim(inverse, sums.shape, [0])).astype(dtype))


def _store(cta: _Cta, warpgroup: Scalar, tile: Tile, rounded: Value) -> None:
    """Write a consumer's (64, V) of the output through its staging slot; rows past the last query are dropped."""
    staging, rows = cta.scratch["staging"].at[warpgroup], pl.ds(tile.query + warpgroup * ROWS, ROWS)
    for start in range(0, cta.desc.value_width, STORE_COLUMNS):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        staging[...] = rounded[:, start : start + STORE_COLUMNS]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staging, cta.out.at[tile.row, rows, tile.head, pl.ds(start, STORE_COLUMNS)])
