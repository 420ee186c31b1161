"""Low-rank addends (LoRA) beside the products of the experts: two more grouped GEMMs for each matrix, by A and by B.

    rows of x, not quantized -> A x -> times scale and choice -> B (...) -> added to the product of the matrix

Rows, tiles and experts are those of the matrix. Operands are bfloat16, sums float32; A x is scaled in float32 and
rounded once. The ranks of all projections lie side by side and are padded with zeros to whole 128 bytes, so that the
gradient can read both factors transposed as they lie.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from moe_jax._config import MoEConfig
from moe_jax._typing import Array
from moe_jax.quantization import ExpertWeights, LowRank
from pallas_kernels.align import TileMap
from pallas_kernels.grouped_gemm import grouped_gemm
from pallas_kernels.grouped_gemm.problem import SCALE_GROUP, TRANSPOSED_UNIT
from pallas_kernels.grouped_gemm.wgrad import grouped_wgrad


def adapter_refusal(config: MoEConfig, weights: ExpertWeights) -> str | None:
    """Why the kernels cannot add the adapters of these weights, or None; also where there are none."""
    if not weights.has_adapters:
        return None
    if config.dtype.name != "bfloat16":
        return f"multiplies adapters (LoRA) in bfloat16, the layer computes in {config.dtype.name}"
    if weights.w13.g_idx is not None:
        return "takes no adapters (LoRA) beside act-order, where columns have an order of each expert"
    fmt, intermediate = weights.scheme.weights, weights.intermediate_size
    is_blocked = weights.w13.layout.is_plain and fmt is not None and fmt.block_shape is not None
    if is_blocked and weights.is_gated and intermediate % SCALE_GROUP:
        return (
            f"takes no adapters (LoRA) beside blocks of {SCALE_GROUP} x {SCALE_GROUP} where "
            f"intermediate_size={intermediate} is not whole blocks: gate and up would share one"
        )
    return None


def arranged(a: Array, b: Array, scale: Array) -> tuple[Array, Array, Array]:
    """The leaves of a ``LowRank`` as grouped GEMMs take them: (E, P, K), (E, N, P) and (E, P).

    N counts the rows of all projections. P counts the ranks of all that have an ``a`` of their own, padded with zeros;
    ``b`` holds zeros between a projection and the ranks of another.
    """
    if b.ndim == 3:
        a, b = a[:, None], b[:, None]
    (experts, projections, n, rank), own = b.shape, a.shape[1]
    if own > 1:
        b = b[..., None, :] * jnp.eye(projections, dtype=b.dtype)[:, None, :, None]
    missing = -own * rank % TRANSPOSED_UNIT
    return (
        jnp.pad(a.reshape(experts, own * rank, a.shape[-1]), ((0, 0), (0, missing), (0, 0))),
        jnp.pad(b.reshape(experts, projections * n, own * rank), ((0, 0), (0, 0), (0, missing))),
        jnp.pad(jnp.tile(scale, (1, own)), ((0, 0), (0, missing))),
    )


@dataclasses.dataclass(frozen=True)
class Addend:
    """One ``LowRank`` for the rows of one call.

    dtype: of operands, and of what is added. kernels: the implementation of every kernel, by name.
    """

    lora: LowRank
    tiles: TileMap
    block_m: int
    kernels: str
    dtype: DTypeLike

    def inner(self, rows: Array) -> Array:
        """A x, (Mp, P) float32, for rows (Mp, K)."""
        a, _, _ = self._factors
        return self._product(rows, a, jnp.float32)

    def outer(self, inner: Array) -> Array:
        """What is added to the products of the rows that ``inner`` is of, (Mp, N)."""
        _, b, _ = self._factors
        return self._product(self._scaled(inner), b, self.dtype)

    def pulled(self, out_bar: Array) -> "Cotangents":
        """The way back from out_bar, (Mp, N), cotangents of the products' rows; zeros in gaps."""
        _, b, _ = self._factors
        return Cotangents(self, out_bar, self._product(out_bar, b, jnp.float32, transposes_w=True))

    @functools.cached_property
    def _factors(self) -> tuple[Array, Array, Array]:
        a, b, scale = arranged(self.lora.a, self.lora.b, self.lora.scale)
        return a.astype(self.dtype), b.astype(self.dtype), scale.astype(jnp.float32)

    def _product(self, rows: Array, w: Array, out_dtype: DTypeLike, *, transposes_w: bool = False) -> Array:
        return grouped_gemm(
            rows,
            w,
            tile_expert=self.tiles.tile_expert,
            num_tiles=self.tiles.num_tiles,
            out_dtype=out_dtype,
            transposes_w=transposes_w,
            implementation=self.kernels,
        )

    @functools.cached_property
    def _chosen(self) -> Array | None:
        """(Mp, P) float32, 1 for the ranks that a row's token has chosen; None where every token takes all."""
        chosen, row_of = self.lora.chosen, self.tiles.row_of
        if chosen is None:
            return None
        _, _, scale = self._factors
        own = 1 if self.lora.b.ndim == 3 else self.lora.a.shape[1]
        of_tokens = jnp.tile(chosen.astype(jnp.float32), (1, own))
        of_tokens = jnp.pad(of_tokens, ((0, 0), (0, scale.shape[1] - of_tokens.shape[1])))
        count = self.tiles.tile_expert.size * self.block_m
        token = jnp.broadcast_to(jnp.arange(row_of.shape[0], dtype=jnp.int32)[:, None], row_of.shape)
        token_of = jnp.zeros(count, jnp.int32).at[jnp.where(row_of < 0, count, row_of)].set(token, mode="drop")
        return of_tokens[token_of]

    def _scaled(self, inner: Array) -> Array:
        _, _, scale = self._factors
        of_tiles = scale[jnp.maximum(self.tiles.tile_expert, 0)]
        inner = inner * jnp.repeat(of_tiles, self.block_m, axis=0)
        return (inner if self._chosen is None else inner * self._chosen).astype(self.dtype)


@dataclasses.dataclass(frozen=True)
class Cotangents:
    """What cotangents of an addend's rows give: those of its argument's rows, and those of its factors.

    inner_bar: (Mp, P) float32, B^T out_bar.
    """

    addend: Addend
    out_bar: Array
    inner_bar: Array

    def rows(self) -> Array:
        """(Mp, K)."""
        a, _, _ = self.addend._factors
        return self.addend._product(self._scaled_bar, a, self.addend.dtype, transposes_w=True)

    @functools.cached_property
    def _scaled_bar(self) -> Array:
        return self.addend._scaled(self.inner_bar)

    def leaves(self, rows: Array, first_row: Array, wants: LowRank) -> LowRank:
        """Cotangents of the leaves that ``wants`` has True for; others are None.

        rows: (Mp, K), arguments of the addend. first_row: (E,) int32, the first row of each expert.
        """
        addend, lora = self.addend, self.addend.lora
        (a, b, scale), pull = jax.vjp(arranged, lora.a, lora.b, lora.scale)
        contract = functools.partial(
            grouped_wgrad,
            first_row=first_row,
            num_rows=addend.tiles.group_sizes,
            implementation=addend.kernels,
        )
        a_bar, b_bar, scale_bar = (jnp.zeros_like(leaf) for leaf in (a, b, scale))
        inner = addend.inner(rows) if wants.b or wants.scale else jnp.zeros_like(self.inner_bar)
        if wants.a:
            a_bar = contract(self._scaled_bar, rows, out_dtype=a.dtype)
        if wants.b:
            b_bar = contract(self.out_bar, addend._scaled(inner), out_dtype=b.dtype)
        if wants.scale:
            of_rows = inner * self.inner_bar
            of_rows = of_rows if addend._chosen is None else of_rows * addend._chosen
            scale_bar = sum_of_experts(of_rows, addend.tiles, addend.block_m).astype(scale.dtype)
        bars = dict(zip(("a", "b", "scale"), pull((a_bar, b_bar, scale_bar)), strict=True))
        found: Any = {name: bar if getattr(wants, name) else None for name, bar in bars.items()}
        return LowRank(**found)


def sum_of_experts(rows: Array, tiles: TileMap, block_m: int) -> Array:
    """(Mp, N) float32 -> (E, N): the sum over the rows of each expert, gaps included.

    A reduction, whose order is always the same; a scatter on a GPU would add in the order in which threads come.
    """
    of_tiles = rows.reshape(-1, block_m, rows.shape[1]).sum(axis=1)
    is_own = tiles.tile_expert == jnp.arange(tiles.group_sizes.shape[0], dtype=jnp.int32)[:, None]
    return jnp.where(is_own[:, :, None], of_tiles, 0.0).sum(axis=1)
