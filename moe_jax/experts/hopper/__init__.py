"""Experts on Pallas kernels for Hopper GPUs (compute capability 9.0)."""
