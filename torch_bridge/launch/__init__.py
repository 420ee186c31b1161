"""Kernels on the stream that torch uses, without the runtime of JAX: what CUDA graphs can capture."""

from torch_bridge.launch._kernel_experts import KernelExperts
from torch_bridge.launch._kernels import as_torch_kernels

__all__ = ["KernelExperts", "as_torch_kernels"]
