"""Experts in plain JAX: a loop over tiles of grouped rows that XLA compiles for any device."""
