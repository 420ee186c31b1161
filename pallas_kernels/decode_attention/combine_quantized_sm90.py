"""``combine_sm90`` that quantizes what it makes, for the product behind attention: one query a row.

Each warpgroup makes the outputs of one key head: a thread has one of its columns, and every (128 / columns)-th value of
it. They are rounded as ``combine_sm90`` rounds them, and quantized as ``quantize_and_permute`` quantizes rows:

    sums of the splits -> rounded outputs -> largest magnitude, by shuffles and shared memory -> codes and scales

A CTA has all key heads of a row where a row has one scale; where 128 columns have one, it has one key head.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common import mosaic, simt
from pallas_kernels.common.row_kernel_sm90 import row_kernel
from pallas_kernels.common.sm90 import WARPS
from pallas_kernels.common.types import Kernel, Ref, Value
from pallas_kernels.decode_attention.combine_sm90 import UNROLL_RUNS, Parts
from pallas_kernels.decode_attention.config import DecodeConfig, DecodeDesc, values_a_thread
from pallas_kernels.decode_attention.outputs_sm90 import FLOOR, Columns, Part, SplitSums, outputs_of
from pallas_kernels.decode_attention.schedule import seen
from pallas_kernels.quantize_and_permute.config import PermuteDesc


def combine_quantized_sm90(desc: DecodeDesc, config: DecodeConfig, rows: PermuteDesc) -> Kernel:
    """The kernel: operands of ``combine_sm90`` -> (codes (B * N * V,), scales of ``rows.scale_shape``, flat).

    rows: how the outputs (B, N * V) are quantized; ``quantizing_error`` is None.
    """
    warpgroups = 1 if rows.is_grouped else desc.num_kv_heads
    return row_kernel(
        functools.partial(_kernel, desc, config, rows, warpgroups),
        outputs_of(desc, rows),
        desc.batch * desc.num_kv_heads // warpgroups,
        "add_splits_and_quantize",
        num_warpgroups=warpgroups,
        scratch_types=dict(maxima=plgpu.SMEM((max(WARPS * config.columns, 32),), jnp.int32)),
    )


def _kernel(
    desc: DecodeDesc, config: DecodeConfig, rows: PermuteDesc, warpgroups: int, *refs: Ref, maxima: Ref
) -> None:
    mosaic.begin()
    sums, tops, totals, starts, lengths, first_slots, *rest, codes, scales_out = refs
    share = rest.pop(0) if config.runs else None
    scales = rest.pop(0) if desc.is_e4m3 else None
    splits, columns, width = config.num_splits(desc), config.columns, desc.value_width
    number = values_a_thread(desc, config)
    unroll = 1 if warpgroups > 4 else 4 if number <= 8 else 2  # twice as many are loaded at once; more spill
    unroll = min(unroll, UNROLL_RUNS) if config.runs else unroll

    warpgroup = lax.axis_index("warpgroup")
    tile = lax.axis_index("cta") * warpgroups + warpgroup
    row, kv_head = lax.div(tile, jnp.int32(desc.num_kv_heads)), lax.rem(tile, jnp.int32(desc.num_kv_heads))
    slots = seen(desc, starts[row], lengths[row], first_slots[row])
    parts = Parts.of(desc, config, share, tile, slots)

    own = Columns(desc, config, row, kv_head)
    nothing = simt.constant(0)

    def load(offset: Any) -> list[Part]:
        found = []
        for j in range(unroll):
            split, is_part = parts.at(offset + j)
            inside, place = own.is_used & (nothing + is_part != 0), nothing + (split + tile * splits)
            stats = [simt.load_float(a, place * columns + own.column, inside, x) for a, x in defaults]
            values = [place * (width * columns) + number for number in own.numbers]
            found.append((*stats, tuple(simt.load_float(sums, index, inside, 0.0) for index in values)))
        return found

    defaults = ((tops, FLOOR), (totals, 0.0))
    added = SplitSums.of_nothing(number).plus_all(load, parts.count, unroll, splits <= unroll)
    results = own.outputs(added, rest[0] if rest else None, None if scales is None else scales[1])
    if rows.is_grouped:
        own.store_codes(rows, codes, scales_out, results, functools.partial(own.largest, maxima, simt.barrier))
    else:
        is_first = (own.thread == 0) & (nothing + warpgroup == 0)
        largest = functools.partial(_largest_of_row, maxima, warpgroups)
        own.store_codes(rows, codes, scales_out, results, largest, is_first)


def _largest_of_row(maxima: Ref, warpgroups: int, value: Value) -> Value:
    """The largest of all values in all threads of the CTA."""
    thread = simt.thread_index()
    lane = thread & 31
    warp = simt.warp_of(thread)
    simt.store(maxima, warp, simt.warp_max(value), lane == 0)
    simt.barrier()
    return simt.warp_max(simt.load(maxima, lane, lane < WARPS * warpgroups, 0))
