"""Grouped GEMM over rows in expert order with weights of few bits, in the order of the registers of wgmma."""

from pallas_kernels.grouped_gemm.packed.api import describe_call, grouped_gemm_packed
from pallas_kernels.grouped_gemm.packed.config import BLOCK_MS, PackedConfig, config_error
from pallas_kernels.grouped_gemm.packed.dense import dequantize_packed
from pallas_kernels.grouped_gemm.packed.format import BLOCK_N, PackedFormat
from pallas_kernels.grouped_gemm.packed.heuristics import candidates, choose_block_m, choose_config, describe
from pallas_kernels.grouped_gemm.packed.layout import (
    PackedWeights,
    from_kernel_layout,
    stacked_projections,
    to_kernel_layout,
)
from pallas_kernels.grouped_gemm.packed.problem import PackedDesc
from pallas_kernels.grouped_gemm.packed.reference import grouped_gemm_packed_ref
from pallas_kernels.grouped_gemm.packed.vector import HEIGHTS, PackedVectorConfig, adds_up_at_once

__all__ = [
    "BLOCK_MS",
    "BLOCK_N",
    "HEIGHTS",
    "PackedConfig",
    "PackedDesc",
    "PackedFormat",
    "PackedVectorConfig",
    "PackedWeights",
    "adds_up_at_once",
    "candidates",
    "choose_block_m",
    "choose_config",
    "config_error",
    "dequantize_packed",
    "describe",
    "describe_call",
    "from_kernel_layout",
    "grouped_gemm_packed",
    "grouped_gemm_packed_ref",
    "stacked_projections",
    "to_kernel_layout",
]
