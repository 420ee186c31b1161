# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""vLLM's plugin: ``quantization="moe_jax"`` runs the experts of a model with the kernels of this library.

The entry point ``moe_jax`` of the group ``vllm.general_plugins`` is ``register``. It adds names to vLLM's list of
quantization methods and changes nothing else. See docs/torch.md.
"""

__all__ = ["NAME", "register"]

NAME = "moe_jax"


def register() -> None:
    """Make ``moe_jax``, and ``moe_jax_fp8_per_channel`` and its like, known to vLLM. May be called several times."""
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config

    if NAME in QUANTIZATION_METHODS:
        return
    from torch_bridge.vllm._config import CONFIGS

    for name, config in CONFIGS.items():
        register_quantization_config(name)(config)
