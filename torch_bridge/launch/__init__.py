"""Kernels on the stream that torch uses, without the runtime of JAX: what CUDA graphs can capture."""
