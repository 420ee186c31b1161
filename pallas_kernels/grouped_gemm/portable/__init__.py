"""Grouped GEMMs by ``mma.sync`` and ``cp.async``, for NVIDIA GPUs from sm_80 on; needs jax 0.11."""

from pallas_kernels.grouped_gemm.portable.api import run
from pallas_kernels.grouped_gemm.portable.config import (
    MmaConfig,
    choose_block_m,
    choose_config,
    config_error,
    describe,
    largest_block_m,
    unsupported,
)

__all__ = [
    "MmaConfig",
    "choose_block_m",
    "choose_config",
    "config_error",
    "describe",
    "largest_block_m",
    "run",
    "unsupported",
]
