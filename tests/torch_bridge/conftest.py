# pyright: reportMissingImports=false
"""Where vLLM is installed and no GPU is there, vLLM takes the machine for a CPU: set before its modules bind it."""

import importlib.util

import torch

if importlib.util.find_spec("vllm") is not None and not torch.cuda.is_available():
    import vllm.platforms
    from vllm.platforms.cpu import CpuPlatform

    vllm.platforms._current_platform = CpuPlatform()
