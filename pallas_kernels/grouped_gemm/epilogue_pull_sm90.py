"""The derivative of an activation behind a product whose sums are cotangents of its values.

    producer     behind the K steps of a tile, for each 64 columns and projection: wait empty[slot] -> TMA copy of what
                 the activation was given, in the place of x -> full[slot]
    consumers    for each 64 columns: wait full[slot] -> registers -> empty[slot], for each projection; then cotangents
                 of what the activation was given -> staged TMA stores

The copies run ahead as those of K do, while the last products of the tile are computed; the next tile's follow them.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common import mosaic
from pallas_kernels.common.activations import Activation, with_slopes
from pallas_kernels.common.types import Value
from pallas_kernels.grouped_gemm import smem_operands_sm90 as smem
from pallas_kernels.grouped_gemm.config import GemmConfig
from pallas_kernels.grouped_gemm.epilogue_sm90 import store_in_turn
from pallas_kernels.grouped_gemm.pipeline_sm90 import CtaContext, LoadStep
from pallas_kernels.grouped_gemm.problem import TRANSPOSED_UNIT, GemmDesc
from pallas_kernels.grouped_gemm.scheduler_sm90 import Tile

PIECE = TRANSPOSED_UNIT  # columns of one ring slot, and of one store


def ring_steps(desc: GemmDesc, config: GemmConfig) -> int:
    """Ring slots that the epilogue of a tile reads."""
    return config.block_n // PIECE * desc.pulled_projections


def load_step(cta: CtaContext, tile: Tile) -> LoadStep:
    """The function that issues the copies of one ring slot of the epilogue: of a piece of one projection."""
    desc, config, scratch = cta.desc, cta.config, cta.scratch
    half = config.block_m // 2  # A slot is full after two copies, which in the main loop are those of x and of w.

    def load(step, slot):
        projections = jnp.int32(desc.pulled_projections)
        piece, projection = lax.div(step, projections), lax.rem(step, projections)
        columns = pl.ds(projection * desc.n + tile.column * config.block_n + piece * PIECE, PIECE)
        for start in (0, half):
            rows = pl.ds(tile.row * config.block_m + start, half)
            source = cta.operands["before"].at[rows, columns]
            plgpu.copy_gmem_to_smem(source, scratch.x.at[slot, pl.ds(start, half)], scratch.full.at[slot])

    return lambda step: lambda slot: load(step, slot)


def store(cta: CtaContext, tile: Tile, sums: Value) -> None:
    """Write the cotangent of what the activation was given, its values times the weights of their rows where they are
    asked for, and the sums over columns of value times product.

    sums: (64, block_n), the product.
    """
    desc, config, scratch = cta.desc, cta.config, cta.scratch
    own, rows = (pl.ds(first + cta.warpgroup * 64, 64) for first in (0, tile.row * config.block_m))
    weights = mosaic.load(cta.operands["row_weights"].at[rows], layout=mosaic.ROWS, optimized=False)
    total, pieces, projections = None, config.block_n // PIECE, desc.pulled_projections

    def given(piece: int, projection: int) -> Value:
        slot = cta.slot(tile.first_step + cta.steps + (piece * projections + projection))
        plgpu.barrier_wait(scratch.full.at[slot])
        value = mosaic.load(scratch.x.at[slot, own], layout=mosaic.WGMMA).astype(jnp.float32)
        mosaic.release(scratch.empty.at[slot])
        return value

    for piece in range(pieces):
        start = piece * PIECE
        product = sums if pieces == 1 else sums[:, start : start + PIECE]
        arguments = [given(piece, projection) for projection in range(projections)]
        assert desc.pulls is not None
        of_piece, weighted, bars = pulled(desc.pulls, arguments, product, weights, smem.sigmoid(config))
        total = of_piece if total is None else total + of_piece
        first_column = tile.column * config.block_n + start
        # In this order, after which the fewest numbers live: with the weighted values last, 128 x 256 tiles spill.
        values = [(bar, cta.outputs[0], projection * desc.n) for projection, bar in enumerate(bars)]
        values[1:1] = [(weighted, cta.outputs[2], 0)] if desc.has_weighted else []
        store_in_turn(cta, tile, first_column, values, piece, pieces)
    cta.outputs[1].at[tile.column, rows][...] = total


def pulled(
    activation: Activation,
    given: list[Value],
    product: Value,
    row_weights: Value | None,
    sigmoid: Callable[[Value], Value],
) -> tuple[Value, Value, list[Value]]:
    """Of a piece (64, columns), in layout WGMMA: the sum over columns of the activation's value times ``product``, its
    value times ``row_weights``, and the cotangents of what it was ``given``, all float32.

    product: cotangent of the value, before it is multiplied with the weights of the rows. row_weights: None for ones.
    """
    weights = None if row_weights is None else lax.broadcast_in_dim(row_weights, product.shape, [0])

    def weighted(values: Value) -> Value:
        return values if weights is None else values * weights

    value, slopes = with_slopes(activation, *given, sigmoid=sigmoid)
    # Products with weights that no two results share: fewer numbers live, and 128 x 256 tiles do not spill.
    return jnp.sum(value * product, axis=1), weighted(value), [weighted(slope * product) for slope in slopes]
