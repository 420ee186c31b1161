"""Grouped GEMMs by ``mma.sync`` and ``cp.async``, for every NVIDIA GPU from compute capability 8.0 on; needs jax 0.11."""

from pallas_kernels.grouped_gemm.portable.config import MmaConfig, choose_block_m, choose_config, config_error

__all__ = ["MmaConfig", "choose_block_m", "choose_config", "config_error"]
