"""Weights that lie apart, whose products stand side by side in the output: which one a tile's columns belong to.

No tile has columns of two (``widths_error``). With one weight nothing is asked, and no code is added.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.common.types import Scalar, TileRef
from pallas_kernels.grouped_gemm.pipeline_sm90 import CtaContext
from pallas_kernels.grouped_gemm.scheduler_sm90 import Tile


def at_own(cta: CtaContext, tile: Tile, name: str, use: Callable[[TileRef, Scalar], None]) -> None:
    """``use(operand, column tile counted from the weight's first)`` of the weight that the tile belongs to.

    Where there are several, ``use`` runs in a branch.
    """
    names, first_tiles = cta.desc.of_each_weight(name), _first_tiles(cta)
    if not first_tiles:
        use(cta.operands[name], tile.column)
        return
    for index, (own, first) in enumerate(zip(names, first_tiles, strict=True)):
        inside = tile.column >= first
        if index + 1 < len(first_tiles):
            inside = inside & (tile.column < first_tiles[index + 1])
        pl.when(inside)(lambda own=own, first=first: use(cta.operands[own], tile.column - first))


def of_own(cta: CtaContext, tile: Tile, name: str, load: Callable[[TileRef, Scalar, int], Any]) -> Any:
    """``load(operand, column tile counted from the weight's first, N of the weight)`` of the tile's weight: a scalar or
    an array.

    ``load`` runs for each of several weights, and must stay inside of its operand where the tile is another's.
    """
    names, first_tiles = cta.desc.of_each_weight(name), _first_tiles(cta)
    if not first_tiles:
        return load(cta.operands[name], tile.column, cta.desc.n)
    columns = [tile.column - first for first in first_tiles]
    found = [
        load(cta.operands[own], column, width)
        for own, column, width in zip(names, columns, cta.desc.widths, strict=True)
    ]
    chosen = found[0]
    for column, value in zip(columns[1:], found[1:], strict=True):
        is_own = column >= 0
        is_own = lax.broadcast_in_dim(is_own, value.shape, ()) if value.ndim else is_own
        chosen = jnp.where(is_own, value, chosen)
    return chosen


def _first_tiles(cta: CtaContext) -> Sequence[int]:
    return [start // cta.config.block_n for start in cta.desc.starts]
