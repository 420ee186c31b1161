"""What a tuning table is keyed by (``LayerKey``) and what it holds (``LayerConfig``)."""

import dataclasses
from typing import Any

from pallas_kernels.align.config import row_capacity
from pallas_kernels.common.activations import Activation
from pallas_kernels.grouped_gemm import GemmConfig, GemmDesc

# name: fields of a LayerKey that say how the operands are stored and scaled
FORMATS: dict[str, dict[str, str]] = {
    "bf16": dict(dtype="bfloat16"),
    "fp8_tensor": dict(dtype="float8_e4m3fn", lhs_scale="tensor", rhs_scale="tensor", requantize="tensor"),
    "fp8_channel": dict(dtype="float8_e4m3fn", lhs_scale="row", rhs_scale="channel"),
    "fp8_block": dict(dtype="float8_e4m3fn", lhs_scale="group", rhs_scale="block", requantize="group"),
    "int8": dict(dtype="int8", lhs_scale="row", rhs_scale="channel"),
}


@dataclasses.dataclass(frozen=True)
class LayerKey:
    """Sizes and formats of a layer of experts, as far as its products' speed depends on them.

    inner: intermediate size I of one expert (of one shard). halves: 2 when gated. The rest as in ``GemmDesc``;
    requantize: what GEMM 1 does to its result.
    """

    num_experts: int
    top_k: int
    hidden: int
    inner: int
    dtype: str
    lhs_scale: Any = "none"
    rhs_scale: Any = "none"
    requantize: Any = "none"
    halves: int = 2

    def products(
        self,
        num_tokens: int,
        block_m: int,
        *,
        activation: Activation | None = None,
        bias_dtype: str | None = None,
        out_dtype: str = "bfloat16",
    ) -> tuple[GemmDesc, GemmDesc]:
        """GEMM 1 and GEMM 2 for a number of tokens in tiles of block_m rows. activation: None for silu."""
        if activation is None:
            activation = Activation("silu" if self.halves == 2 else "silu_no_mul")
        common: dict[str, Any] = dict(
            rows=row_capacity(max(num_tokens, 1) * self.top_k, self.num_experts, block_m),
            num_experts=self.num_experts,
            dtype=self.dtype,
            out_dtype=out_dtype,
            lhs_scale=self.lhs_scale,
            rhs_scale=self.rhs_scale,
            bias_dtype=bias_dtype,
            has_tile_rows=True,
        )
        first = dict(n=self.inner, k=self.hidden, halves=self.halves, activation=activation, requantize=self.requantize)
        return GemmDesc(**first, **common), GemmDesc(n=self.hidden, k=self.inner, **common)

    @property
    def may_swap(self) -> bool:
        """Both products can run with swapped operands."""
        return self.rhs_scale != "block" and self.requantize == "none"


@dataclasses.dataclass(frozen=True)
class LayerConfig:
    """Rows of a tile, which both products share, and how each runs."""

    block_m: int
    gemm1: GemmConfig
    gemm2: GemmConfig
