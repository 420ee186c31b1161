"""What a grouped GEMM is asked: sizes, element types and what surrounds the product."""

import dataclasses
from typing import Literal

import jax.numpy as jnp

from pallas_kernels.common.activations import Activation, slopes_refusal

SCALE_GROUP = 128  # K per activation group, and both sides of a weight block
ROW_BYTES = 32  # A row of K is a multiple of this: the narrowest swizzle of a TMA copy.
TRANSPOSED_UNIT = 64  # elements of 16 bits in the widest swizzle, in which operands without contiguous K lie
_OPERANDS = {"bfloat16": "float32", "float16": "float32", "float8_e4m3fn": "float32", "int8": "int32"}
_OUTPUTS = ("bfloat16", "float16", "float32")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedGemm:
    """Static description of one call, whatever form its weights have; the letters are those of ``grouped_gemm``.

    Args:
        rows: Mp, rows of the output.
        n: columns of the output, which are the weight rows of one projection.
        k: columns of x.
        num_experts: E.
        out_dtype: element type of the product, before any requantization.
        projections: G, 2 where the product feeds a gated activation (gate and up), else 1.
        bias_dtype: None without a bias.
        activation: None without one.
        unpermuted_rows: rows of x where every tile starts with the same ones; 0 where x has a row for each of a tile.
        has_tile_rows: the number of rows in use is known for each tile.
        widths: N of each of several weights that lie apart, whose products stand side by side in the output; () for
            one weight.
        num_tokens, top_k: the output has a row for each token, the weighted sum of its ``top_k`` rows; 0 for the rows
            themselves. shared_dtype: of what is added to the sum, or None.
    """

    rows: int
    n: int
    k: int
    num_experts: int
    out_dtype: str = "bfloat16"
    projections: int = 1
    bias_dtype: str | None = None
    activation: Activation | None = None
    unpermuted_rows: int = 0
    has_tile_rows: bool = False
    widths: tuple[int, ...] = ()
    num_tokens: int = 0
    top_k: int = 0
    shared_dtype: str | None = None

    @property
    def starts(self) -> tuple[int, ...]:
        """First column of each of several weights."""
        return tuple(sum(self.widths[:index]) for index in range(len(self.widths)))

    def of_each_weight(self, name: str) -> list[str]:
        """Names of an operand that every weight has: those behind the first are numbered."""
        return [name, *(f"{name}_{index}" for index in range(1, len(self.widths)))]

    @property
    def names_of_sum(self) -> list[str]:
        """Names of the operands of a sum of rows: row_of (T, top_k) i32, slot_weights (T, top_k) and shared (T, N)."""
        return ["row_of", "slot_weights"] * bool(self.top_k) + ["shared"] * (self.shared_dtype is not None)

    @property
    def stored_dtype(self) -> str:
        """Element type of the array that the kernel writes."""
        return self.out_dtype

    def unsupported_output(self) -> str | None:
        """Why no Hopper kernel can write this output, or None."""
        if self.widths and (self.num_experts > 1 or self.projections > 1):
            return f"{len(self.widths)} weights side by side, {self.num_experts} experts: of one expert, not gated"
        if self.out_dtype not in _OUTPUTS:
            return f"out_dtype {self.out_dtype} is not one of {', '.join(_OUTPUTS)}"
        if self.n % 8 or self.n * jnp.dtype(self.stored_dtype).itemsize % 32:
            return f"N={self.n}: a row of the {self.stored_dtype} output must be a multiple of 32 bytes and N of 8"
        name = "" if self.activation is None else self.activation.name
        if name.startswith("gelu") and "tanh" not in name:
            return f"activation {name}: erf has no layout rule in Mosaic GPU (jax 0.10.2 and 0.11.2)"
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmDesc(GroupedGemm):
    """A call of ``grouped_gemm``: both operands have one element type.

    Args:
        dtype: of both operands.
        lhs_scale: "none", "tensor", "row" or "group" (1 x 128 of K).
        rhs_scale: "none", "tensor" (one per projection), "channel" or "block" (128 x 128).
        has_tile_bits: which of the rows that has_tile_rows counts are in use is known, too.
        requantize: "none", "group" (e4m3 with a scale per row and 128 columns) or "tensor" (e4m3, given scale). With
            out_dtype bfloat16 the product is rounded to it first, as a separate launch would read it.
        has_power_of_two_scales: the scales of requantize "group" are rounded up to powers of two.
        transposes_w: w is (E, K, N), N contiguous: the weights of a product whose K is this one's N, as they lie.
        keeps_before: what the activation is given is an output as well.
        pulls: the activation of the product before, whose derivative follows (``grouped_gemm_pull``); else None.
        has_weighted: that activation's values, times the weights of their rows, are an output as well.
        quantization: how x is quantized first, a kind of ``quantize_and_permute`` with a scale for each row or each 128
            columns of it; "none" where x comes as it is multiplied.
        k_parts: of K. Where they are several, tile t of the unpermuted rows has their products with part t of it.
    """

    dtype: str
    lhs_scale: Literal["none", "tensor", "row", "group"] = "none"
    rhs_scale: Literal["none", "tensor", "channel", "block"] = "none"
    has_tile_bits: bool = False
    requantize: Literal["none", "group", "tensor"] = "none"
    has_power_of_two_scales: bool = False
    transposes_w: bool = False
    keeps_before: bool = False
    pulls: Activation | None = None
    has_weighted: bool = False
    quantization: str = "none"
    k_parts: int = 1

    @property
    def pulled_projections(self) -> int:
        """G of the activation whose derivative follows."""
        return 2 if self.pulls is not None and self.pulls.is_gated else 1

    @property
    def has_outputs_beside(self) -> bool:
        """Whether a piece of the columns is stored in several outputs, and tiles are then moved whole."""
        return self.pulls is not None or self.keeps_before

    @property
    def is_block_scaled(self) -> bool:
        return self.rhs_scale == "block"

    @property
    def itemsize(self) -> int:
        return jnp.dtype(self.dtype).itemsize

    @property
    def accumulator(self) -> str:
        return _OPERANDS.get(self.dtype, "float32")  # of others, which the reference alone multiplies

    @property
    def is_rounded_first(self) -> bool:
        """Whether values are rounded to bfloat16 before they are requantized; float16 would overflow."""
        return self.requantize != "none" and self.out_dtype == "bfloat16"

    @property
    def stored_dtype(self) -> str:
        return self.out_dtype if self.requantize == "none" else "float8_e4m3fn"

    @property
    def operand_names(self) -> list[str]:
        """Names of the arrays the kernel takes, in order.

        x (rows or unpermuted_rows, K), of 16 or 32 bits where it is quantized first; w (E * G, N, K), transposed (E, K,
        N); tile_expert (rows / block_m,) i32; num_tiles (1,) i32; x_scale f32 (1,), (rows,) or (ceil(K / 128), rows),
        with block_m for rows where they are unpermuted; w_scale f32 (E * G,), (E * G, N) or (E * G, ceil(N / 128),
        ceil(K / 128)); bias (E * G, N); out_scale (1,) f32; tile_rows and tile_bits (rows / block_m,) i32; before
        (rows, G * N) of the activation that is pulled; row_weights (rows,) f32; ``names_of_sum``. Of weights that lie
        apart each has a w, w_scale and bias.
        """
        names = ["x", *self.of_each_weight("w"), "tile_expert", "num_tiles"]
        names += ["x_scale"] if self.lhs_scale != "none" and self.quantization == "none" else []
        names += self.of_each_weight("w_scale") if self.rhs_scale != "none" else []
        names += self.of_each_weight("bias") if self.bias_dtype is not None else []
        names += ["out_scale"] if self.requantize == "tensor" else []
        names += ["tile_rows"] * self.has_tile_rows + ["tile_bits"] * self.has_tile_bits
        names += ["before", "row_weights"] if self.pulls is not None else []
        return names + self.names_of_sum

    def unsupported(self) -> str | None:
        """Why no configuration of the Hopper kernels can run this, or None."""
        if self.dtype not in _OPERANDS:
            return f"operands of {self.dtype} have no wgmma here; there are {', '.join(_OPERANDS)}"
        if (self.lhs_scale == "group") != (self.rhs_scale == "block"):
            return f"lhs_scale {self.lhs_scale!r} with rhs_scale {self.rhs_scale!r}: 1x128 goes with 128x128"
        if self.is_block_scaled and self.dtype != "float8_e4m3fn":
            return f"block scales of {self.dtype}; only float8_e4m3fn is promoted every 128 of K"
        if self.k * self.itemsize % ROW_BYTES:
            return f"K={self.k} of {self.dtype}: a row of K must be a multiple of {ROW_BYTES} bytes"
        if self.transposes_w and (reason := self._unsupported_transposed()):
            return reason
        if self.pulls is not None and (reason := slopes_refusal(self.pulls)):
            return reason
        if self.keeps_before and (self.activation is None or self.requantize != "none" or self.widths):
            return "keeps_before without an activation, requantized or of weights side by side: not built"
        if self.k_parts > 1 and self.transposes_w:
            return f"k_parts={self.k_parts} with transposed weights: not built"
        if self.widths and (self.transposes_w or self.requantize != "none"):
            return f"{len(self.widths)} weights side by side, transposed or requantized: not built"
        return self.unsupported_output()

    def _unsupported_transposed(self) -> str | None:
        if self.itemsize != 2:
            return f"transposed weights of {self.dtype}: wgmma takes operands of 8 bits with K contiguous only"
        if self.k % TRANSPOSED_UNIT or self.n % TRANSPOSED_UNIT:
            return f"transposed weights of K={self.k} and N={self.n}: both must be multiples of {TRANSPOSED_UNIT}"
        return None
