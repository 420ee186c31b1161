"""Experts on Pallas kernels for every NVIDIA GPU from compute capability 8.0 on; needs jax 0.11."""

from moe_jax.experts.portable._portable import Portable

__all__ = ["Portable"]
