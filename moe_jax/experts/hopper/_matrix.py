"""Quantized matrices outside the experts as a grouped GEMM with E = 1: its tiles, its rows, and its kernel layout.

    quantize rows -> grouped GEMM (scales, bias)

All rows belong to the one matrix, so nothing is aligned, moved or combined. Rows past the last token fill its tile.
Several matrices, as of queries, keys and values, are read by one launch where they lie.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from moe_jax._typing import Array
from moe_jax.experts._backend import Biases, Matrices
from moe_jax.experts.hopper._kernel_layout import is_kernel_layout, kernel_operand, kernel_tensor, plain_tensor
from moe_jax.experts.hopper._rows import row_kind, rows_on_grid, tensor_scale
from moe_jax.quantization import QuantizedMatrix
from pallas_kernels.common.rows import unpermuted_rows_error
from pallas_kernels.grouped_gemm import grouped_gemm
from pallas_kernels.grouped_gemm import packed as packed_gemm
from pallas_kernels.grouped_gemm.api import side_by_side
from pallas_kernels.grouped_gemm.config import BLOCK_MS, SMALL_M, SWAP_AB_BLOCK_MS
from pallas_kernels.grouped_gemm.packed import grouped_gemm_packed
from pallas_kernels.grouped_gemm.vector import VectorConfig, single_rows_refusal
from pallas_kernels.quantize_and_permute import quantize_and_permute

_TMA_ROWS = 8  # rows of a box
_PART_ROWS, _PART_COLUMNS = 64, 64  # of a tile of products with a part of K
_LEAST_DEPTH = 512  # of such a part
_SMS = 132  # of most Hopper GPUs; bits should not depend on the one at hand


def each(matrix: Matrices) -> tuple[QuantizedMatrix, ...]:
    """Of one matrix or several."""
    return matrix if isinstance(matrix, tuple) else (matrix,)


def multiply(
    x: Array, matrix: Matrices, bias: Biases, out_dtype: DTypeLike, *, parts: int = 1, kernels: str = "hopper"
) -> Array:
    """``Backend.multiply`` with the implementation of every kernel given by name; "reference" runs anywhere.

    Returns all rows of all tiles: to cut some off would be a copy. parts: of ``multiply_in_parts``.
    """
    first = each(matrix)[0]
    tensor, fmt = first.tensor, first.scheme.activations
    tiles = _tiles(matrix, x.shape[0], out_dtype, parts)
    x = tiles.padded(x)
    # Rows that are short, or whose last group is neither 128 nor 64 columns wide, are XLA's business.
    by = ("hopper", "reference") if kernels == "hopper" else kernels
    scaled = tiles.scaled_rows
    quantize = functools.partial(quantize_and_permute, scale_rows=scaled, implementation=by)
    if not is_kernel_layout(tensor.layout):
        scale = tensor_scale(fmt, tensor.input_scale, x, None, ())
        kind = row_kind(first.scheme)
        assert kind is not None, "refusal has said so"
        rows, row_scale = quantize(x, quantization=kind, scale=scale)
        return _plain_product(rows, row_scale if scale is None else scale, tiles, matrix, bias, out_dtype, kernels)
    operands = tuple(kernel_operand(one.tensor) for one in each(matrix))
    operand = operands[0]
    if tensor.g_idx is not None:
        x = x[:, tensor.g_idx[0]]
    kind = {"int8": "int8_row", "float8_e4m3fn": "e4m3_row"}.get(operand.fmt.operand)
    if kind is not None:
        rows, row_scale = quantize(x, quantization=kind, implementation=kernels)
    else:
        place = functools.partial(_with_scales_of_a_tile, rows=scaled)
        rows, row_scale = rows_on_grid(
            x, fmt, tensor.input_scale, operand.fmt.operand, (), quantize=quantize, place=place
        )
    options = tiles.arguments(bias, out_dtype, kernels)
    weights = operands if isinstance(matrix, tuple) else operand
    return grouped_gemm_packed(rows, weights, x_scale=row_scale, **options)


def choose_parts(matrix: Matrices, num_tokens: int) -> int:
    """``Backend.matrix_parts``: of plain weights and few tokens, whose column tiles leave half of the SMs idle."""
    several = each(matrix)
    n, k = sum(one.shape[0] for one in several), several[0].shape[1]
    parts = 1
    if not is_kernel_layout(several[0].tensor.layout) and 1 < num_tokens <= _PART_ROWS:
        tiles = -(-n // _PART_COLUMNS)
        while 2 * parts * tiles <= _SMS and k % (2 * parts * _LEAST_DEPTH) == 0:
            parts *= 2
    return parts


def multiply_in_parts(x: Array, matrix: Matrices, parts: int, *, kernels: str = "hopper") -> Array:
    """``Backend.multiply_in_parts`` with the implementation of every kernel given by name."""
    return multiply(x, matrix, None, jnp.float32, parts=parts, kernels=kernels)


def rows_of_tiles(matrix: Matrices, num_tokens: int, out_dtype: DTypeLike, parts: int = 1) -> tuple[str, int] | None:
    """``Backend.matrix_rows``: of plain weights whose rows have scales of their own."""
    first = each(matrix)[0]
    kind = None if is_kernel_layout(first.tensor.layout) else row_kind(first.scheme)
    if kind in (None, "none", "e4m3_tensor"):
        return None
    return kind, _tiles(matrix, num_tokens, out_dtype, parts).scaled_rows


def multiply_rows(
    codes: Array,
    scales: Array,
    num_tokens: int,
    matrix: Matrices,
    bias: Biases,
    out_dtype: DTypeLike,
    parts: int = 1,
    *,
    kernels: str = "hopper",
) -> Array:
    """``Backend.multiply_rows`` with the implementation of every kernel given by name."""
    tiles = _tiles(matrix, num_tokens, out_dtype, parts)
    return _plain_product(tiles.padded(codes), scales, tiles, matrix, bias, out_dtype, kernels)


def _plain_product(
    rows: Array,
    row_scale: Array | None,
    tiles: "_Tiles",
    matrix: Matrices,
    bias: Biases,
    out_dtype: DTypeLike,
    kernels: str,
) -> Array:
    """Of rows that fill their tiles, with weights in layout "plain"."""
    options = tiles.arguments(bias, out_dtype, kernels)
    w, w_scale = (tuple(getattr(one.tensor, leaf) for one in each(matrix)) for leaf in ("data", "scale"))
    if not isinstance(matrix, tuple):
        w, w_scale = w[0], w_scale[0]
    options |= dict(w=w, w_scale=w_scale, tile_rows=tiles.rows_in_use())
    return grouped_gemm(rows, x_scale=row_scale, **options)


@dataclasses.dataclass(frozen=True)
class _Tiles:
    """num_tokens rows of one matrix in tiles of block_m; parts: of K, each with a tile of all rows."""

    num_tokens: int
    block_m: int
    parts: int = 1

    @property
    def number(self) -> int:
        """Tiles of different rows."""
        return -(-self.num_tokens // self.block_m)

    @property
    def num_rows(self) -> int:
        """Rows as the product takes them."""
        unit = self.block_m if self.number > 1 else _TMA_ROWS if self.num_tokens > _TMA_ROWS else 1
        return -(-self.num_tokens // unit) * unit

    @property
    def is_one(self) -> bool:
        """Whether rows are the first ones of a tile that has more."""
        return self.number == 1 and unpermuted_rows_error(self.num_rows, self.block_m) is None

    @property
    def scaled_rows(self) -> int:
        """Rows that scales have room for."""
        return self.block_m if self.is_one else self.num_rows

    def padded(self, x: Array) -> Array:
        return jnp.pad(x, ((0, self.num_rows - x.shape[0]), (0, 0)))

    def rows_in_use(self) -> Array:
        rows = self.num_tokens - self.block_m * jnp.arange(self.number, dtype=jnp.int32)
        return jnp.tile(jnp.minimum(rows, self.block_m), self.parts)

    def arguments(self, bias: Biases, out_dtype: DTypeLike, kernels: str) -> dict[str, Any]:
        """Of both products."""
        found: dict[str, Any] = dict(
            tile_expert=jnp.zeros(self.parts * self.number, jnp.int32),
            num_tiles=jnp.full((1,), self.parts * self.number, jnp.int32),
            bias=jax.tree.map(lambda one: one[None], bias),
            out_dtype=out_dtype,
            implementation=kernels,
        )
        found |= dict(k_parts=self.parts) if self.parts > 1 else {}
        return found | (dict(block_m=self.block_m) if self.is_one else {})


def _tiles(matrix: Matrices, num_tokens: int, out_dtype: DTypeLike, parts: int) -> _Tiles:
    block_m = choose_block_m(matrix, num_tokens, out_dtype) if parts == 1 else _PART_ROWS
    return _Tiles(num_tokens, block_m, parts)


def choose_block_m(matrix: Matrices, num_tokens: int, out_dtype: DTypeLike) -> int:
    """Rows of a tile: the lowest that holds all tokens, else the height of the least work."""
    first = each(matrix)[0]
    if not is_kernel_layout(first.tensor.layout):
        widths = [one.shape[0] for one in each(matrix)]
        if num_tokens == 1 and not single_rows_refusal(first.shape[1], widths, first.tensor.data.dtype):
            return VectorConfig.block_m
        may_swap = jnp.dtype(out_dtype).itemsize == 2
        heights = [height for height in SWAP_AB_BLOCK_MS if height <= SMALL_M] if may_swap else [BLOCK_MS[0]]
        return next((height for height in heights if height >= num_tokens), BLOCK_MS[-1])
    few = next((height for height in packed_gemm.HEIGHTS if height >= num_tokens), None)
    if few is not None:
        operands = [kernel_operand(one.tensor) for one in each(matrix)]
        descs = [packed_gemm.describe_call(few, operand, out_dtype, "row", None, None) for operand in operands]
        desc = side_by_side(descs, is_one=not isinstance(matrix, tuple))
        if next(packed_gemm.candidates(desc, few, 1), None) is not None:
            return few
    heights, operand = packed_gemm.BLOCK_MS, kernel_operand(first.tensor)
    wanted = next((h for h in heights if SMALL_M >= h >= num_tokens), packed_gemm.choose_block_m(float(num_tokens)))
    for block_m in reversed([height for height in heights if height <= wanted]):  # fewer where no kernel takes so many
        desc = packed_gemm.describe_call(block_m, operand, out_dtype, "row", None, None)
        if next(packed_gemm.candidates(desc, block_m, 1), None) is not None:
            return block_m
    return heights[0]


def refusal(matrix: Matrices, dtype: DTypeLike) -> str | None:
    """Why the kernels cannot read the matrix in a layer that computes in ``dtype``, or None."""
    if isinstance(matrix, tuple):
        if reason := _unlike(matrix):
            return f"matrices side by side {reason}"
        matrix = matrix[0]
    if jnp.dtype(dtype).name not in ("bfloat16", "float16"):
        return f"computes in bfloat16 or float16, the layer in {jnp.dtype(dtype).name}"
    if is_kernel_layout(matrix.tensor.layout) or row_kind(matrix.scheme) is not None:
        return None
    return f"weights of scheme {matrix.scheme.name!r} are in layout 'plain'; the kernel reads matrix_layout's"


def _unlike(matrices: tuple[QuantizedMatrix, ...]) -> str | None:
    """Why one launch cannot read all of them with one quantization of the rows, or None."""
    kinds = {
        (one.scheme, one.shape[1], one.tensor.layout.name, *((leaf.dtype, leaf.ndim) for leaf in jax.tree.leaves(one)))
        for one in matrices
    }
    if len(kinds) > 1:
        return "differ in scheme, columns or layout"
    if any(one.tensor.g_idx is not None for one in matrices):
        return "have each an order of columns"
    if any(one.tensor.input_scale is not None for one in matrices):
        return "have each a scale for rows"
    return None


def to_kernel_layout(matrix: QuantizedMatrix, dtype: DTypeLike) -> QuantizedMatrix:
    """``Backend.matrix_layout``: schemes whose stored form the plain kernel multiplies stay as they are."""
    if row_kind(matrix.scheme) is not None or is_kernel_layout(matrix.tensor.layout):
        return matrix
    return dataclasses.replace(matrix, tensor=kernel_tensor(matrix.tensor, matrix.scheme, dtype))


def to_plain_layout(matrix: QuantizedMatrix) -> QuantizedMatrix:
    """Inverse of ``to_kernel_layout``."""
    is_plain = not is_kernel_layout(matrix.tensor.layout)
    return matrix if is_plain else dataclasses.replace(matrix, tensor=plain_tensor(matrix.tensor))


def _with_scales_of_a_tile(x: Array, scale: Array | None, *, rows: int) -> tuple[Array, Array | None]:
    if scale is None or not scale.ndim:
        return x, scale
    return x, jnp.pad(scale, (0, rows - scale.shape[0]))
