"""What a grouped GEMM with packed weights is asked."""

import dataclasses
from typing import Literal

from pallas_kernels.grouped_gemm.packed.format import BLOCK_N, PackedFormat
from pallas_kernels.grouped_gemm.problem import GroupedGemm


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedDesc(GroupedGemm):
    """A call of ``grouped_gemm_packed``; k is in whole blocks of the format.

    Args:
        fmt: of the weights.
        scale_dtype: of group scales.
        has_channel_scale: a float32 factor per channel follows the sum.
        lhs_scale: factors of x, applied to the sum: "none", "tensor" or "row".
    """

    fmt: PackedFormat
    scale_dtype: str = "float32"
    has_channel_scale: bool = False
    lhs_scale: Literal["none", "tensor", "row"] = "none"

    @property
    def accumulator(self) -> str:
        return "int32" if self.fmt.operand == "int8" else "float32"

    @property
    def channel_blocks(self) -> int:
        """Blocks of 64 channels in one projection of an expert."""
        return -(-self.n // BLOCK_N)

    @property
    def operand_names(self) -> list[str]:
        """Names of the arrays the kernel takes, in order; B = E * channel_blocks * G counts blocks of 64 channels.

        x (rows or unpermuted_rows, K); w (B, K / block_k, *block_shape) i32; tile_expert (rows / block_m,) i32;
        num_tiles (1,) i32; scale (B, groups, 64); zero (B, groups, 64) of the operand's dtype; channel_scale (B, 64)
        f32; bias (B, 64), all blocks of a projection together; x_scale (1,), (rows,) or, unpermuted, (block_m,) f32;
        tile_rows (rows / block_m,) i32; ``names_of_sum``. Of weights that lie apart each has all of these but x,
        x_scale and the tiles.
        """
        names = ["x", *self.of_each_weight("w"), "tile_expert", "num_tiles"]
        names += self.of_each_weight("scale") if self.fmt.scale == "group" else []
        names += self.of_each_weight("zero") if self.fmt.has_zero_point else []
        names += self.of_each_weight("channel_scale") if self.has_channel_scale else []
        names += self.of_each_weight("bias") if self.bias_dtype is not None else []
        names += ["x_scale"] if self.lhs_scale != "none" else []
        names += ["tile_rows"] if self.has_tile_rows else []
        return names + self.names_of_sum

    def unsupported(self) -> str | None:
        """Why no configuration of the Hopper kernels can run this, or None."""
        fmt = self.fmt
        if self.k % fmt.block_k:
            return f"K={self.k}: x must come in whole blocks of {fmt.block_k} columns"
        is_folded = (fmt.element, fmt.operand, fmt.scale) == ("e2m1", "float8_e4m3fn", "e8m0")
        if fmt.element == "e2m1" and fmt.operand == "float8_e4m3fn" and not is_folded:
            return (
                f"float8_e4m3fn activations with e2m1 weights and {fmt.scale} scales: one step of that wgmma takes 32 "
                f"of K, groups have {fmt.group_size}, and e4m3 does not hold e2m1 times e4m3"
            )
        if fmt.is_8bit and fmt.element != "int4" and not is_folded:
            return f"{fmt.operand} activations go with int4 weights, found {fmt.element}"
        if fmt.operand == "float8_e4m3fn" and fmt.has_zero_point:
            return "float8_e4m3fn activations go with symmetric int4 weights; zero points with int8 and 16 bits"
        if fmt.operand == "int8" and self.k > 1 << 17:
            return f"K={self.k}: sums of int8 by 16 times int4 stay in 32 bits up to 131072"
        group = fmt.group_size or 0
        if fmt.is_8bit and fmt.scale == "group" and group % 64:
            return f"groups of {fmt.group_size} with {fmt.operand} operands; a multiple of 64"
        if fmt.element == "e2m1" and fmt.operand != "bfloat16" and not is_folded:
            return f"e2m1 weights with {fmt.operand} activations; only bfloat16 holds their scales"
        if fmt.scale == "e8m0" and fmt.operand != "bfloat16" and not is_folded:
            return f"powers of two as scales with {fmt.operand} activations; only bfloat16 holds them"
        if fmt.scale == "group" and group not in (32, 64) and group % 128:
            return f"groups of {fmt.group_size}; 32, 64 or a multiple of 128"
        return self.unsupported_output()
