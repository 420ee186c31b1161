"""What a tuning table is keyed by (``LayerKey``, ``PackedLayerKey``) and what it holds (``LayerConfig``)."""

import dataclasses
from collections.abc import Iterable
from typing import Any, Literal

from pallas_kernels.align.config import row_capacity
from pallas_kernels.common.activations import Activation
from pallas_kernels.grouped_gemm import GemmConfig, GemmDesc
from pallas_kernels.grouped_gemm import candidates as gemm_candidates
from pallas_kernels.grouped_gemm import config_error as gemm_error
from pallas_kernels.grouped_gemm.config import BLOCK_MS
from pallas_kernels.grouped_gemm.heuristics import in_clusters, large_m_heights
from pallas_kernels.grouped_gemm.packed import BLOCK_MS as PACKED_BLOCK_MS
from pallas_kernels.grouped_gemm.packed import PackedConfig, PackedDesc, PackedFormat
from pallas_kernels.grouped_gemm.packed import candidates as packed_candidates
from pallas_kernels.grouped_gemm.packed import config_error as packed_error
from pallas_kernels.quantize_and_permute.config import PermuteConfig, PermuteDesc
from pallas_kernels.quantize_and_permute.config import config_error as permute_error

SIZES = ("num_experts", "top_k", "hidden_size", "intermediate_size", "projections")  # fields of either key
AnyDesc = GemmDesc | PackedDesc
AnyConfig = GemmConfig | PackedConfig
# name: fields of a LayerKey that say how the operands are stored and scaled
FORMATS: dict[str, dict[str, Any]] = {
    "bf16": dict(dtype="bfloat16"),
    "fp8_tensor": dict(dtype="float8_e4m3fn", lhs_scale="tensor", rhs_scale="tensor", requantize="tensor"),
    "fp8_tensor_dynamic": dict(dtype="float8_e4m3fn", lhs_scale="tensor", rhs_scale="tensor"),
    "fp8_channel": dict(dtype="float8_e4m3fn", lhs_scale="row", rhs_scale="channel"),
    "fp8_block": dict(dtype="float8_e4m3fn", lhs_scale="group", rhs_scale="block", requantize="group"),
    "int8": dict(dtype="int8", lhs_scale="row", rhs_scale="channel"),
}
# name: fields of a PackedLayerKey that say how the weights are stored and what they are multiplied with
PACKED_FORMATS: dict[str, dict[str, Any]] = {
    "int4_g128": dict(element="int4", scale="group", group_size=128, scale_dtype="bfloat16"),
    "int4_g128_f16": dict(element="int4", scale="group", group_size=128, scale_dtype="float16"),
    "int4_g128_f32": dict(element="int4", scale="group", group_size=128),
    "int4_g128_asym": dict(element="int4", scale="group", group_size=128, has_zero_point=True, scale_dtype="bfloat16"),
    "int4_g128_asym_f16": dict(
        element="int4", scale="group", group_size=128, has_zero_point=True, scale_dtype="float16"
    ),
    "int4_g128_asym_f32": dict(element="int4", scale="group", group_size=128, has_zero_point=True),
    "int4_g32": dict(element="int4", scale="group", group_size=32, scale_dtype="bfloat16"),
    "int4_g64": dict(element="int4", scale="group", group_size=64, scale_dtype="bfloat16"),
    "int4_g32_f32": dict(element="int4", scale="group", group_size=32),
    "int4_g64_f32": dict(element="int4", scale="group", group_size=64),
    "int4_g32_asym": dict(element="int4", scale="group", group_size=32, has_zero_point=True, scale_dtype="bfloat16"),
    "int4_g64_asym": dict(element="int4", scale="group", group_size=64, has_zero_point=True, scale_dtype="bfloat16"),
    "int4_g32_asym_f32": dict(element="int4", scale="group", group_size=32, has_zero_point=True),
    "int4_g64_asym_f32": dict(element="int4", scale="group", group_size=64, has_zero_point=True),
    "int4_channel": dict(element="int4"),
    "int4_channel_asym": dict(element="int4", has_zero_point=True),
    "nvfp4": dict(element="e2m1", scale="e4m3", group_size=16),
    "mxfp4": dict(element="e2m1", scale="e8m0", group_size=32),
    "mxfp4_fp8": dict(element="e2m1", operand="float8_e4m3fn", scale="e8m0", group_size=32),
    "int4_int8": dict(element="int4", operand="int8", scale="group", group_size=128, scale_dtype="bfloat16"),
    "int4_int8_f32": dict(element="int4", operand="int8", scale="group", group_size=128),
    "int4_int8_channel": dict(element="int4", operand="int8"),
    "int4_fp8": dict(element="int4", operand="float8_e4m3fn", scale="group", group_size=128, scale_dtype="bfloat16"),
    "int8_a16": dict(element="int8"),
    "int8_g128_a16": dict(element="int8", scale="group", group_size=128, scale_dtype="bfloat16"),
    "int8_g128_a16_f32": dict(element="int8", scale="group", group_size=128),
    "fp8_a16": dict(element="e4m3"),
    "fp8_g128_a16": dict(element="e4m3", scale="group", group_size=128),
    "mxfp8": dict(element="e4m3", scale="e8m0", group_size=32),
}


@dataclasses.dataclass(frozen=True)
class LayerKey:
    """Sizes and formats of a layer of experts, as far as its products' speed depends on them.

    intermediate_size: I of one expert, or of one shard of it.
    requantize: what GEMM 1 does to its result where its configuration can.
    projections: of GEMM 1; 2 (gate and up) when gated, else 1.
    The rest as in ``GemmDesc``.
    """

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    dtype: str
    lhs_scale: str = "none"
    rhs_scale: str = "none"
    requantize: Literal["none", "group", "tensor"] = "none"
    projections: int = 2

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
            activation = Activation("silu" if self.projections == 2 else "silu_no_mul")
        # With swap_ab not every configuration requantizes: the others store 16 bits, which a launch of its own reads.
        # float16 would overflow there.
        swap_ab = block_m not in BLOCK_MS and out_dtype != "float16"
        requantize = "none" if swap_ab else self.requantize
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
        first = GemmDesc(
            n=self.intermediate_size,
            k=self.hidden_size,
            projections=self.projections,
            activation=activation,
            requantize=requantize,
            **common,
        )
        return first, GemmDesc(n=self.hidden_size, k=self.intermediate_size, **common)

    @staticmethod
    def config_error(desc: Any, config: Any) -> str | None:
        """Why ``config`` cannot run a product of ``products``, or None."""
        return gemm_error(desc, config)

    @staticmethod
    def candidates(desc: Any, block_m: int, num_sms: int) -> list[GemmConfig]:
        """Configurations worth timing."""
        found = gemm_candidates(desc, block_m, num_sms)
        return found + in_clusters(desc, found)

    def as_it_runs(self, first: GemmDesc, gemm1: AnyConfig) -> GemmDesc:
        """GEMM 1 as a layer runs it with a configuration: it requantizes its rows where that can."""
        together = dataclasses.replace(first, requantize=self.requantize)
        return together if self.config_error(together, gemm1) is None else first

    def requantize_micros(self, num_tokens: int, gemm1: AnyConfig) -> float:
        """Microseconds of the launch that requantizes hidden rows; 0 where GEMM 1 does it.

        An estimate: the launch, and three bytes a value at the speed of 65536 rows of 768 on an H200
        (row_kernels_narrow_h200.txt).
        """
        first, _ = self.products(num_tokens, gemm1.block_m)
        if self.as_it_runs(first, gemm1).requantize == self.requantize:
            return 0.0
        return 2.5 + num_tokens * self.top_k * self.intermediate_size * 3 / 3.3e6

    def heights(self, num_tokens: int) -> list[int]:
        """Tile heights worth a look: a token has an expert at most once, so none has more rows than tokens."""
        swapped = [h for h in (8, 16, 32) if h < 2 * num_tokens or h == 8] if self.may_swap else []
        average = num_tokens * self.top_k / self.num_experts
        large_m = large_m_heights(average)[:2] if self.may_be_large_m and average > 96 else []
        return [h for h in swapped if average <= 2 * h] + [64] + ([128] if num_tokens > 64 else []) + large_m

    @property
    def may_swap(self) -> bool:
        """Whether ``swap_ab`` can run: nothing is requantized, or a kernel can requantize the hidden rows."""
        if self.requantize == "none":
            return True
        rows = PermuteDesc(1, self.intermediate_size, 0, 1, "bfloat16", f"e4m3_{self.requantize}")
        return permute_error(rows, PermuteConfig(1)) is None

    @property
    def may_be_large_m(self) -> bool:
        """Whether tiles of ``swap_ab`` may have more than 96 rows."""
        return self.may_swap and self.rhs_scale != "block"

    @property
    def lender(self) -> "LayerKey | None":
        """The same layer in another format, whose entries serve this one too; None without such a format.

        Its products read as many bytes and multiply at the same rate. For 8-bit operands it is the format with channel
        scales, if the scales of this one are applied after the sum.
        """
        if self.dtype == "float16":
            return dataclasses.replace(self, dtype="bfloat16")
        channels = dataclasses.replace(
            self, dtype="float8_e4m3fn", lhs_scale="row", rhs_scale="channel", requantize="none"
        )
        scales_follow = self.lhs_scale in ("row", "tensor") and self.rhs_scale in ("channel", "tensor")
        return channels if scales_follow and self != channels else None

    @property
    def format_name(self) -> str | None:
        """The key's format in ``FORMATS``."""
        return _name_among(FORMATS, self)


@dataclasses.dataclass(frozen=True)
class PackedLayerKey:
    """Sizes and format of a layer with packed weights, as far as its products' speed depends on them.

    Sizes as in ``LayerKey``.
    element, operand, scale, group_size, has_zero_point: as in ``PackedFormat``.
    scale_dtype: of group scales, "float32" without them.
    """

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    element: Literal["int4", "int8", "e2m1", "e4m3"]
    operand: Literal["bfloat16", "float16", "int8", "float8_e4m3fn"] = "bfloat16"
    scale: Literal["none", "group", "e4m3", "e8m0"] = "none"
    group_size: int | None = None
    has_zero_point: bool = False
    scale_dtype: str = "float32"
    projections: int = 2

    def products(
        self,
        num_tokens: int,
        block_m: int,
        *,
        activation: Activation | None = None,
        bias_dtype: str | None = None,
        out_dtype: str = "bfloat16",
    ) -> tuple[PackedDesc, PackedDesc]:
        """GEMM 1 and GEMM 2 for a number of tokens in tiles of block_m rows. activation: None for silu."""
        if activation is None:
            activation = Activation("silu" if self.projections == 2 else "silu_no_mul")
        fmt = PackedFormat(self.element, self.operand, self.scale, self.group_size, self.has_zero_point)
        common: dict[str, Any] = dict(
            rows=row_capacity(max(num_tokens, 1) * self.top_k, self.num_experts, block_m),
            num_experts=self.num_experts,
            fmt=fmt,
            out_dtype=out_dtype,
            scale_dtype=self.scale_dtype,
            has_channel_scale=self.scale != "group",
            lhs_scale="row" if fmt.is_8bit else "none",
            bias_dtype=bias_dtype,
            has_tile_rows=True,
        )
        k1, k2 = (-(-k // fmt.block_k) * fmt.block_k for k in (self.hidden_size, self.intermediate_size))
        first = PackedDesc(
            n=self.intermediate_size, k=k1, projections=self.projections, activation=activation, **common
        )
        return first, PackedDesc(n=self.hidden_size, k=k2, **common)

    @staticmethod
    def config_error(desc: Any, config: Any) -> str | None:
        """Why ``config`` cannot run a product of ``products``, or None."""
        return packed_error(desc, config)

    @staticmethod
    def candidates(desc: Any, block_m: int, num_sms: int) -> list[PackedConfig]:
        """Configurations worth timing."""
        return list(packed_candidates(desc, block_m, num_sms))

    @staticmethod
    def as_it_runs(first: PackedDesc, gemm1: AnyConfig) -> PackedDesc:
        """GEMM 1 itself, which requantizes nothing."""
        del gemm1
        return first

    def requantize_micros(self, num_tokens: int, gemm1: AnyConfig) -> float:
        """0: the same launch requantizes hidden rows whatever the configuration."""
        return 0.0

    def heights(self, num_tokens: int) -> list[int]:
        """Tile heights worth a look: the first three that hold an average expert, the taller ones where none does; or,
        where none of those runs, the tallest that does.
        """
        average = num_tokens * self.top_k / self.num_experts
        wanted = [h for h in PACKED_BLOCK_MS if average <= h <= 128][:3] or [128, 144, 160, 176]

        def runs(height: int) -> bool:
            return all(self.candidates(desc, height, 1) for desc in self.products(num_tokens, height))

        return [h for h in wanted if runs(h)] or [h for h in reversed(PACKED_BLOCK_MS) if runs(h)][:1] or wanted

    @property
    def lender(self) -> "PackedLayerKey | None":
        """As ``LayerKey.lender``: float16 from bfloat16, operands of 16 bits from those without zero points, which the
        same instructions subtract, and group scales of integers from bfloat16 ones.
        """
        if self.operand == "float16":
            scale_dtype = {"float16": "bfloat16", "bfloat16": "float16"}.get(self.scale_dtype, self.scale_dtype)
            return dataclasses.replace(self, operand="bfloat16", scale_dtype=scale_dtype)
        if self.has_zero_point and self.operand == "bfloat16":
            return dataclasses.replace(self, has_zero_point=False)
        if self.scale == "group" and self.scale_dtype != "bfloat16" and self.element != "e4m3":
            return dataclasses.replace(self, scale_dtype="bfloat16")
        return None

    @property
    def format_name(self) -> str | None:
        """The key's format in ``PACKED_FORMATS``."""
        return _name_among(PACKED_FORMATS, self)


AnyKey = LayerKey | PackedLayerKey


def key_of(
    name: str, num_experts: int, top_k: int, hidden_size: int, intermediate_size: int, projections: int = 2
) -> AnyKey:
    """The key of a layer in a format of ``FORMATS`` or ``PACKED_FORMATS``."""
    sizes = (num_experts, top_k, hidden_size, intermediate_size)
    if name in FORMATS:
        return LayerKey(*sizes, **FORMATS[name], projections=projections)
    return PackedLayerKey(*sizes, **PACKED_FORMATS[name], projections=projections)


def _name_among(formats: Iterable[str], key: AnyKey) -> str | None:
    sizes = [getattr(key, name) for name in SIZES]
    return next((name for name in formats if key_of(name, *sizes) == key), None)


@dataclasses.dataclass(frozen=True)
class LayerConfig:
    """How both products of a layer run.

    block_m: rows of a tile, which both share.
    gemm1, gemm2: two ``GemmConfig``, or two ``PackedConfig``.
    """

    block_m: int
    gemm1: AnyConfig
    gemm2: AnyConfig
