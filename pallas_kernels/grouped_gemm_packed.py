"""The name that ``pallas_kernels.grouped_gemm.packed`` had before."""

from pallas_kernels.grouped_gemm.packed import (
    BLOCK_MS,
    PackedConfig,
    PackedDesc,
    PackedFormat,
    PackedWeights,
    candidates,
    choose_block_m,
    choose_config,
    config_error,
    describe,
    describe_call,
    grouped_gemm_packed,
    grouped_gemm_packed_ref,
)
from pallas_kernels.grouped_gemm.packed import from_kernel_layout as unpack
from pallas_kernels.grouped_gemm.packed import to_kernel_layout as pack

__all__ = [
    "BLOCK_MS",
    "PackedConfig",
    "PackedDesc",
    "PackedFormat",
    "PackedWeights",
    "candidates",
    "choose_block_m",
    "choose_config",
    "config_error",
    "describe",
    "describe_call",
    "grouped_gemm_packed",
    "grouped_gemm_packed_ref",
    "pack",
    "unpack",
]
