"""Experts on Pallas kernels for Hopper GPUs (compute capability 9.0)."""

from moe_jax.experts.hopper._hopper import Hopper

__all__ = ["Hopper"]
