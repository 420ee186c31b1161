"""Experts in plain JAX: a loop over tiles of grouped rows that XLA compiles for any device."""

from moe_jax.experts.xla._experts import Xla

__all__ = ["Xla"]
