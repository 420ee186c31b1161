"""A call whose gradient kernels compute: its tokens aligned, their rows, and the products of these with its weights.

The backward pass works on it, and so does the forward pass that keeps rows for the backward pass: tiles, products,
biases and adapters are the same in both.
"""

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from moe_jax._config import MoEConfig
from moe_jax._typing import Array
from moe_jax.activations import apply_activation
from moe_jax.experts.hopper._adapters import Addend, sum_of_experts
from moe_jax.experts.hopper._gradient_products import (
    DenseProducts,
    PackedOperands,
    PackedProducts,
    PlainOperands,
    PlainProducts,
    packed_block_m,
    quantized_operands,
)
from moe_jax.experts.hopper._plan import tile_of_any_product
from moe_jax.quantization import ExpertWeights, LowRank
from pallas_kernels.align import TileMap, align
from pallas_kernels.align.config import row_capacity
from pallas_kernels.combine import combine
from pallas_kernels.grouped_gemm.dgrad import PlainWeights
from pallas_kernels.grouped_gemm.wgrad.config import STEP
from pallas_kernels.quantize_and_permute import quantize_and_permute

Operands = PackedOperands | PlainOperands | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Kept:
    """What a forward pass keeps beside its arguments where the layer asks (``MoEConfig.keep_hidden``).

    tiles: where the rows lie. Without a gradient of weights or adapters the rows of an expert are in the order in which
        threads reached a counter, so that no other alignment of the same ids fits them.
    before: (Mp, G * I) in the layer's dtype, gate and up with their bias, before adapters and activation, in the
        columns of the products.
    """

    tiles: TileMap
    before: Array


def kept_bytes(config: MoEConfig, weights: ExpertWeights, operands: Operands, num_pairs: int) -> int:
    """Of ``Kept.before``; num_pairs: of tokens and their experts."""
    rows = row_capacity(num_pairs, weights.num_experts, _block_m(config, weights, operands, num_pairs))
    return rows * config.num_projections * weights.intermediate_size * config.dtype.itemsize


def _block_m(config: MoEConfig, weights: ExpertWeights, operands: Operands, num_pairs: int) -> int:
    block_m = tile_of_any_product(num_pairs, weights.num_experts)
    if operands is None or isinstance(operands[0], PlainWeights):
        return block_m
    return packed_block_m(config, operands[0], block_m)


@dataclasses.dataclass(frozen=True)
class AlignedCall:
    """One call. Each part is computed when it is first asked for.

    kernels: the implementation of every kernel, by name.
    reads_packed: quantized weights are read as they are; else dequantized first.
    has_sums: the gradient of a leaf of the weights is asked for, which sums over the rows of an expert by whole tiles.
        The rows of an expert are then in the order of their pairs, so that sums repeat to the bit.
    kept: of the forward pass of the same call; None computes it again.
    """

    config: MoEConfig
    kernels: str
    reads_packed: bool
    x: Array
    topk_ids: Array
    weights: ExpertWeights
    has_sums: bool
    kept: Kept | None = None

    @functools.cached_property
    def operands(self) -> Operands:
        """Of the kernels that read quantized weights, or None."""
        return quantized_operands(self.config, self.weights) if self.reads_packed else None

    @property
    def is_dequantized(self) -> bool:
        """Whether the weights are dequantized as a whole first."""
        return self.weights.scheme.is_quantized and self.operands is None

    @functools.cached_property
    def rows(self) -> "Rows":
        weights = self.weights
        block_m = _block_m(self.config, weights, self.operands, self.topk_ids.size)
        if self.kept is not None:
            return Rows(self.kept.tiles, block_m, self.kernels)
        tiles = align(self.topk_ids, weights.num_experts, block_m, stable=self.has_sums, implementation=self.kernels)
        return Rows(tiles, block_m, self.kernels)

    @functools.cached_property
    def x_rows(self) -> Array:
        return self.moved(self.x)

    def moved(self, tokens: Array) -> Array:
        """(T, H) -> (Mp, H) in the layer's dtype; zeros in gaps where sums run over them."""
        return self.rows.of_tokens(tokens.astype(self.config.dtype), fills_gaps=self.has_sums)

    @functools.cached_property
    def products(self) -> DenseProducts | PackedProducts | PlainProducts:
        tiles = self.rows.tiles
        tile_rows = None if self.has_sums else tiles.tile_rows
        if self.operands is None:
            if self.has_sums and not self.weights.has_adapters and self.weights.w13_bias is None:
                # Sums run over steps of 64 rows: whole ones are computed, others may be left out.
                tile_rows = -(-tiles.tile_rows // STEP) * STEP
            return DenseProducts(self.config, self.weights, tiles, tile_rows, self.kernels)
        kind = PlainProducts if isinstance(self.operands[0], PlainWeights) else PackedProducts
        return kind(self.config, self.weights, self.operands, tiles, tile_rows, self.kernels)

    @property
    def weighs_rows(self) -> bool:
        """Whether cotangents of rows are multiplied with their router weights before products: where these sum up the
        rows of an expert, and beside matrices of 16 bits. Else ``combine`` does it, as in the forward pass.
        """
        return self.has_sums or self.operands is None

    @functools.cached_property
    def before(self) -> Array:
        """``Kept.before``."""
        if self.kept is not None:
            return self.kept.before
        with jax.named_scope("gate_and_up"):
            return self.products.before(self.x_rows)

    @functools.cached_property
    def w13_addend(self) -> Addend | None:
        return self.rows.addend(self.weights.w13_lora, self.config.dtype)

    @functools.cached_property
    def w2_addend(self) -> Addend | None:
        return self.rows.addend(self.weights.w2_lora, self.config.dtype)

    @functools.cached_property
    def wide(self) -> Array:
        """(Mp, G, I) float32, what the activation is of: gate and up, and what an adapter adds to them."""
        wide = self.products.by_projection(self.before).astype(jnp.float32)
        if self.w13_addend is None:
            return wide
        with jax.named_scope("w13_adapter"):
            own = self.w13_addend.outer(self.w13_addend.inner(self.x_rows))
        return wide + own.astype(jnp.float32).reshape(wide.shape)

    def forward(self, topk_weights: Array, out_dtype: DTypeLike) -> tuple[Array, Kept]:
        """The sum over the experts of each token, (T, H), and what the backward pass may start from.

        XLA takes the activation of gate and up in the layer's dtype, as the backward pass has them: beside adapters and
        for quantized weights that are read as they are. Elsewhere it follows the product in its kernel, of float32
        sums.
        """
        if isinstance(self.products, DenseProducts) and not self.weights.has_adapters:
            with jax.named_scope("gate_and_up"):
                before, hidden = self.products.before_and_hidden(self.x_rows)
        else:
            with jax.named_scope("activation"):
                before, hidden = self.before, apply_activation(self.wide, self.config).astype(self.config.dtype)
        with jax.named_scope("w2"):
            parts = [self.products.output(hidden)]
        if self.w2_addend is not None:
            with jax.named_scope("w2_adapter"):
                parts.append(self.w2_addend.outer(self.w2_addend.inner(hidden)))
        y = self.rows.sum_of_tokens(parts, topk_weights, out_dtype)
        return y, Kept(self.rows.tiles, before)


@dataclasses.dataclass(frozen=True)
class Rows:
    """Tokens to rows in expert order, and back."""

    tiles: TileMap
    block_m: int
    kernels: str

    @property
    def count(self) -> int:
        return self.tiles.tile_expert.size * self.block_m

    @property
    def _implementations(self) -> str | tuple[str, ...]:
        return ("hopper", "reference") if self.kernels == "hopper" else self.kernels

    @functools.cached_property
    def _padded(self) -> Array:
        """(E,) rows of each expert with those of the gap behind them."""
        return -(-self.tiles.group_sizes // self.block_m) * self.block_m

    @functools.cached_property
    def first(self) -> Array:
        """(E,) int32, the first row of each expert."""
        return (jnp.cumsum(self._padded) - self._padded).astype(jnp.int32)

    def of_tokens(self, tokens: Array, *, fills_gaps: bool) -> Array:
        """(T, H) -> (Mp, H): anything in tiles that are not in use, zeros in the gap behind the rows of each expert, or
        anything there as well.

        Gaps are filled as if tokens of zeros had been routed to them.
        """
        row_of = self.tiles.row_of
        if fills_gaps:
            tokens, row_of = self._with_zeros(tokens)
        rows, _ = quantize_and_permute(
            tokens, row_of, self.count, quantization="none", implementation=self._implementations
        )
        return rows

    def _with_zeros(self, tokens: Array) -> tuple[Array, Array]:
        """Tokens, with zeros behind them, and the rows of both."""
        top_k = self.tiles.row_of.shape[1]
        offset = jnp.arange(self.block_m - 1, dtype=jnp.int32)
        gap = (self.first + self.tiles.group_sizes)[:, None] + offset
        gap = jnp.where(gap < (self.first + self._padded)[:, None], gap, -1).reshape(-1)
        row_of_zeros = jnp.pad(gap, (0, -gap.size % top_k), constant_values=-1).reshape(-1, top_k)
        zeros = jnp.zeros((row_of_zeros.shape[0], tokens.shape[1]), tokens.dtype)
        return jnp.concatenate([tokens, zeros]), jnp.concatenate([self.tiles.row_of, row_of_zeros])

    def of_pairs(self, values: Array) -> Array:
        """(T, top_k) float32 -> (Mp,), zeros in rows of no token."""
        target = jnp.where(self.tiles.row_of < 0, self.count, self.tiles.row_of)
        return jnp.zeros(self.count, jnp.float32).at[target].set(values, mode="drop")

    def of_experts(self, values: Array) -> Array:
        """(E, N) -> (Mp, N), the values of each row's expert."""
        return jnp.repeat(values[jnp.maximum(self.tiles.tile_expert, 0)], self.block_m, axis=0)

    def addend(self, lora: LowRank | None, dtype: DTypeLike) -> Addend | None:
        return None if lora is None else Addend(lora, self.tiles, self.block_m, self.kernels, dtype)

    def sum_of_tokens(self, parts: Sequence[Array], weights: Array, out_dtype: DTypeLike) -> Array:
        """One or two (Mp, H) -> (T, H): the sum of these over the rows of each token, times its ``weights`` (T, top_k),
        in float32, rounded once.
        """
        wide = jnp.dtype(out_dtype) if len(parts) == 1 else jnp.dtype(jnp.float32)
        given: Any = dict(out_dtype=wide, implementation=self.kernels)
        sums = [combine(rows, self.tiles.row_of, weights, **given) for rows in parts]
        return functools.reduce(operator.add, sums).astype(out_dtype)

    def sum_of_experts(self, rows: Array) -> Array:
        """(Mp, N) float32 -> (E, N): the sum over the rows of each expert, gaps included."""
        return sum_of_experts(rows, self.tiles, self.block_m)
