"""Alignment of few tokens, and the tokens at their rows: every CTA aligns all pairs for itself.

    load the ids of all pairs, and a token -> its codes
    count the pairs of each expert, and for each of the token's those of its expert that are before it
    sum the experts' tiles up                                                             (as ``align``)
    first CTA:   describe the tiles
    others:      row of a pair = first row of its expert + pairs before it; the token's codes to its rows

So no CTA waits for another. The pairs before one are counted, not taken from a counter, so that all CTAs agree: rows of
an expert are in the order of their pairs.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.align.config import AlignConfig, AlignDesc
from pallas_kernels.align.kernel_sm90 import AlignCta, align_outputs, align_scratch, tiles_of
from pallas_kernels.common import mosaic, simt
from pallas_kernels.common.row_kernel_sm90 import row_kernel
from pallas_kernels.common.sm90 import LANES, WARPGROUP, WARPS
from pallas_kernels.common.types import Kernel, Ref, Scalar
from pallas_kernels.quantize_and_permute.config import TAKES_SCALE, PermuteDesc
from pallas_kernels.quantize_and_permute.kernel_sm90 import RowQuantizer, quantized_outputs, split_columns


def align_and_permute_sm90(tiles: AlignDesc, rows: PermuteDesc) -> Kernel:
    """The kernel: (ids (P,) int32, x (T, H), [scale (1,)]) -> (*``tiles.outputs``, codes (Mp, H), scales or None)."""
    own = plgpu.SMEM((WARPS * rows.top_k,), jnp.int32)
    outputs = [*align_outputs(tiles), *quantized_outputs(rows)]
    body = functools.partial(_kernel, tiles, rows)
    scratch = dict(align_scratch(tiles), before=own)
    call = row_kernel(body, outputs, 1 + rows.num_tokens, "align_and_permute", scratch_types=scratch)

    def run(ids, x, *scale):
        found = list(call(ids, x.reshape(rows.num_tokens, *split_columns(rows)), *scale))
        codes = len(tiles.outputs)
        found[codes] = found[codes].reshape(rows.num_rows, rows.width)
        return found if rows.scale_shape else [*found, None]

    return run


def _kernel(tiles: AlignDesc, rows: PermuteDesc, *refs: Ref, counts: Ref, ends: Ref, sums: Ref, before: Ref) -> None:
    mosaic.begin()
    pending = list(refs)
    ids, x = pending.pop(0), pending.pop(0)
    given = pending.pop(0) if rows.quantization in TAKES_SCALE else None
    outputs, quantized = tuple(pending[: len(tiles.outputs)]), pending[len(tiles.outputs) :]
    index, cta = lax.axis_index("cta"), AlignCta(tiles, AlignConfig(1), ids)
    token = lax.max(index - 1, jnp.int32(0))

    pairs = [cta.thread + first for first in range(0, tiles.num_pairs, WARPGROUP)]
    owners, are_routed = cta.owners(pairs)
    own = [ids[token * rows.top_k + slot] for slot in range(rows.top_k)]
    cta.each_expert(lambda e, is_expert: simt.store(counts, e, simt.constant(0), is_expert))
    simt.barrier()  # ids are asked for in front of it: they come while the token does
    stores = list(RowQuantizer(rows, x, given, *quantized).stores(token))

    for owner, routed in zip(owners, are_routed, strict=True):
        simt.count(counts, owner, routed)
    lane, warp = cta.thread & (LANES - 1), simt.warp_of(cta.thread)
    for slot, expert in enumerate(own):
        number = simt.constant(0)
        for pair, owner in zip(pairs, owners, strict=True):
            number = number + jnp.where((owner == expert) & (pair < token * rows.top_k + slot), 1, 0)
        simt.store(before, warp * rows.top_k + slot, simt.warp_add(number), lane == 0)
    simt.barrier()
    cta.sum_tiles(counts, ends, sums)
    pl.when(index == 0)(lambda: cta.describe_tiles(outputs, counts, ends))

    def row_of(slot: int, owner: Scalar) -> Scalar:
        expert = lax.clamp(jnp.int32(0), owner, jnp.int32(tiles.num_experts - 1))
        first_tile = ends[expert] - tiles_of(tiles, counts[expert])
        rank = functools.reduce(lambda a, b: a + b, (before[warp * rows.top_k + slot] for warp in range(WARPS)))
        is_routed = (owner >= 0) & (owner < tiles.num_experts)
        return jnp.where(is_routed, first_tile * tiles.block_m + rank, jnp.int32(-1))

    @pl.when(index > 0)
    def _():
        for slot, row in enumerate([row_of(slot, owner) for slot, owner in enumerate(own)]):
            outputs[0][token * rows.top_k + slot] = row
            for store in stores:
                pl.when(row >= 0)(functools.partial(store, row))
