"""Grouped products with transposed quantized weights: gradients of rows."""

from pallas_kernels.grouped_gemm.dgrad.api import describe_dgrad, grouped_dgrad, grouped_gemm_widened
from pallas_kernels.grouped_gemm.dgrad.config import DgradConfig, DgradDesc, candidates, choose_config, config_error
from pallas_kernels.grouped_gemm.dgrad.plain import PlainWeights, plain_weights

__all__ = [
    "DgradConfig",
    "DgradDesc",
    "PlainWeights",
    "candidates",
    "choose_config",
    "config_error",
    "describe_dgrad",
    "grouped_dgrad",
    "grouped_gemm_widened",
    "plain_weights",
]
