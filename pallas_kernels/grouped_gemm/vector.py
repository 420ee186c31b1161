"""How tiles of one row are run on Hopper (``VectorConfig``): matrix times vector (GEMV), without TMA and wgmma."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import jax.numpy as jnp

from pallas_kernels.common.sm90 import LANES, WARPS
from pallas_kernels.common.types import Dtype
from pallas_kernels.grouped_gemm.problem import GemmDesc

CHUNK = 4  # loads of a weight row that are under way together where a row takes more than ``MOST_PIECES``
MOST_PIECES = 8  # of a row that a warp holds at once
MOST_LOADS = 12  # of a warp's weight rows that are under way together: 48 registers a thread
MOST_ROWS = 32  # of a token that are added up: the code has each of them apart and grows with their square
_CHANNELS = (4, 2, 1)  # the most first


@dataclasses.dataclass(frozen=True)
class VectorConfig:
    """A CTA is one warpgroup; each of its warps makes ``channels`` columns of one row of the output."""

    channels: int
    block_m: ClassVar[int] = 1

    @property
    def block_n(self) -> int:
        """Columns of a CTA."""
        return WARPS * self.channels


@dataclasses.dataclass(frozen=True)
class Piece:
    """Columns of K that a warp loads at once, ``vector`` neighbouring ones a lane."""

    start: int
    vector: int

    @property
    def width(self) -> int:
        return LANES * self.vector


def pieces_of_row(k: int, dtype: Dtype) -> list[Piece]:
    """A row of K in loads of 16 bytes a lane, and of fewer behind the last of those. Those do not cover K where K is no
    multiple of the narrowest."""
    itemsize = jnp.dtype(dtype).itemsize
    found, start, vector = [], 0, 16 // itemsize
    while vector * itemsize >= 2:
        if start + LANES * vector <= k:
            found.append(Piece(start, vector))
            start += LANES * vector
        else:
            vector //= 2
    return found


def single_rows_refusal(k: int, widths: Sequence[int], dtype: Dtype, channels: int = 1) -> str | None:
    """Why warps of ``channels`` columns cannot multiply single rows with weights of these widths, or None."""
    if sum(piece.width for piece in pieces_of_row(k, dtype)) != k:
        return f"K={k} of {jnp.dtype(dtype).name}: a multiple of {LANES * max(1, 2 // jnp.dtype(dtype).itemsize)}"
    block_n = VectorConfig(channels).block_n
    if any(width % block_n for width in widths):
        return f"N={', '.join(map(str, widths))}: a multiple of the {block_n} columns of a CTA"
    return None


def vector_error(desc: GemmDesc, config: VectorConfig) -> str | None:
    """Why ``config`` cannot run ``desc``, or None when it can."""
    if reason := desc.unsupported():
        return reason
    if config.channels not in _CHANNELS:
        return f"channels={config.channels} of a warp: one of {', '.join(map(str, sorted(_CHANNELS)))}"
    if desc.k_parts > 1:
        return f"k_parts={desc.k_parts} of single rows: not built, warps share K already"
    if desc.unpermuted_rows > 1:
        return f"the same {desc.unpermuted_rows} rows in every tile: a tile has 1"
    if reason := single_rows_refusal(desc.k, desc.widths or (desc.n,), desc.dtype, config.channels):
        return reason
    if desc.transposes_w or desc.pulls is not None or desc.keeps_before:
        return "single rows with transposed weights or several outputs: not built"
    if desc.top_k and desc.rows > MOST_ROWS:
        return f"the sum of {desc.rows} rows: at most {MOST_ROWS}"
    if desc.top_k and (desc.num_tokens > 1 or desc.widths or desc.requantize != "none"):
        return "the sum of rows: of one token, neither requantized nor of weights side by side"
    if desc.top_k and desc.quantization != "none":
        return "the sum of rows that are quantized first: every warp would quantize all of them"
    if desc.requantize == "group":
        return "requantize='group' of single rows: the columns of a group lie in several CTAs"
    if desc.quantization != "none" and len(pieces_of_row(desc.k, desc.dtype)) > MOST_PIECES:
        return f"K={desc.k}: a warp that quantizes its row holds {MOST_PIECES} loads of it"
    return None


def vector_candidates(desc: GemmDesc, num_sms: int) -> list[VectorConfig]:
    """Configurations that can run ``desc``, preferred ones first: as many columns a warp as it has room for, where they
    make four CTAs an SM."""
    loads = desc.projections * min(len(pieces_of_row(desc.k, desc.dtype)), MOST_PIECES)
    rows = 1 if desc.top_k else desc.rows
    fitting = [c for c in map(VectorConfig, _CHANNELS) if vector_error(desc, c) is None]

    busy = [c for c in fitting if c.channels * loads <= MOST_LOADS and rows * desc.n >= 4 * num_sms * c.block_n]
    return busy + [config for config in reversed(fitting) if config not in busy]


def describe_vector(desc: GemmDesc, config: VectorConfig) -> str:
    """One line for ``explain``."""
    more = [f"quantize their rows ({desc.quantization})"] if desc.quantization != "none" else []
    more += [f"add up {desc.top_k} rows"] if desc.top_k else []
    ctas = (1 if desc.top_k else desc.rows) * desc.n // config.block_n
    which = f", which {' and '.join(more)}" if more else ""
    return f"matrix times vector, {config.channels} x {desc.projections} channels a warp, {ctas} CTAs{which}"
