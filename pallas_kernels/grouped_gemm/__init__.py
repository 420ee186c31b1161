"""Grouped GEMM over rows in expert order."""

from pallas_kernels.grouped_gemm.api import grouped_gemm
from pallas_kernels.grouped_gemm.columns import FEW_ROWS
from pallas_kernels.grouped_gemm.config import GemmConfig, config_error
from pallas_kernels.grouped_gemm.few_rows import FewRowsConfig
from pallas_kernels.grouped_gemm.heuristics import candidates, choose_block_m, choose_config, describe
from pallas_kernels.grouped_gemm.problem import GemmDesc
from pallas_kernels.grouped_gemm.reference import grouped_gemm_ref
from pallas_kernels.grouped_gemm.vector import VectorConfig

__all__ = [
    "FEW_ROWS",
    "FewRowsConfig",
    "GemmConfig",
    "GemmDesc",
    "VectorConfig",
    "candidates",
    "choose_block_m",
    "choose_config",
    "config_error",
    "describe",
    "grouped_gemm",
    "grouped_gemm_ref",
]
