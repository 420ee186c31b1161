"""Tokens to rows in expert order, quantized on the way."""

from pallas_kernels.quantize_and_permute.api import quantize_and_permute
from pallas_kernels.quantize_and_permute.config import PermuteConfig, PermuteDesc, config_error
from pallas_kernels.quantize_and_permute.reference import quantize_and_permute_ref

__all__ = ["PermuteConfig", "PermuteDesc", "config_error", "quantize_and_permute", "quantize_and_permute_ref"]
