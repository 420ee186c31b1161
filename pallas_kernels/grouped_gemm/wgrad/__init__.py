"""Grouped products over the rows of each expert: gradients of weights."""

from pallas_kernels.grouped_gemm.wgrad.api import grouped_wgrad
from pallas_kernels.grouped_gemm.wgrad.config import WgradConfig, WgradDesc, candidates, choose_config, config_error
from pallas_kernels.grouped_gemm.wgrad.reference import grouped_wgrad_ref

__all__ = [
    "WgradConfig",
    "WgradDesc",
    "candidates",
    "choose_config",
    "config_error",
    "grouped_wgrad",
    "grouped_wgrad_ref",
]
