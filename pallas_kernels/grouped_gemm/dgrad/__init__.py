"""Grouped products with transposed packed weights: gradients of rows."""

from pallas_kernels.grouped_gemm.dgrad.api import describe_dgrad, grouped_dgrad
from pallas_kernels.grouped_gemm.dgrad.config import DgradConfig, DgradDesc, candidates, choose_config, config_error

__all__ = [
    "DgradConfig",
    "DgradDesc",
    "candidates",
    "choose_config",
    "config_error",
    "describe_dgrad",
    "grouped_dgrad",
]
