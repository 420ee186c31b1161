"""Quantized Mixture-of-Experts for JAX on NVIDIA GPUs."""

import importlib

from moe_jax import _began as _began  # the time is now
from moe_jax import _compat
from moe_jax._version import __version__

_compat.check_versions()  # before the imports that a wrong version would break

TYPE_CHECKING = False  # as type checkers read it; to load typing would take longer than all of this
if TYPE_CHECKING:
    from moe_jax._config import MoEConfig
    from moe_jax.adapters import load_lora, lora, merge_lora, save_lora, select_lora
    from moe_jax.experts import (
        MoEStats,
        fused_experts,
        fused_moe,
        load_balancing_loss,
        router_z_loss,
        sequence_balance_loss,
    )
    from moe_jax.loading import make_expert_params_mapping, weight_loader
    from moe_jax.models import SamplingParams, generate, generate_stream, load_moe, load_pretrained
    from moe_jax.nn import FusedMoE, LoRAParam, MoEBlock, QuantizedParam, in_token_buckets, token_bucket
    from moe_jax.quantization import ExpertWeights, QuantFormat, Scheme
    from moe_jax.text import LLM, CompletionOutput, RequestOutput
    from moe_jax.writing import quantize_checkpoint

# Where each public name lives; it is imported when it is first asked for.
_HOMES = {
    "LLM": "text",
    "CompletionOutput": "text",
    "ExpertWeights": "quantization",
    "FusedMoE": "nn",
    "LoRAParam": "nn",
    "MoEBlock": "nn",
    "MoEConfig": "_config",
    "MoEStats": "experts",
    "QuantFormat": "quantization",
    "QuantizedParam": "nn",
    "RequestOutput": "text",
    "SamplingParams": "models",
    "Scheme": "quantization",
    "fused_experts": "experts",
    "fused_moe": "experts",
    "generate": "models",
    "generate_stream": "models",
    "in_token_buckets": "nn",
    "load_balancing_loss": "experts",
    "load_lora": "adapters",
    "load_moe": "models",
    "load_pretrained": "models",
    "lora": "adapters",
    "make_expert_params_mapping": "loading",
    "merge_lora": "adapters",
    "quantize_checkpoint": "writing",
    "router_z_loss": "experts",
    "save_lora": "adapters",
    "select_lora": "adapters",
    "sequence_balance_loss": "experts",
    "token_bucket": "nn",
    "weight_loader": "loading",
}
_MODULES = (
    "activations",
    "adapters",
    "checkpointing",
    "experts",
    "layer",
    "loading",
    "models",
    "nn",
    "parallel",
    "quantization",
    "routing",
    "text",
    "writing",
)

__all__ = [
    "LLM",
    "CompletionOutput",
    "ExpertWeights",
    "FusedMoE",
    "LoRAParam",
    "MoEBlock",
    "MoEConfig",
    "MoEStats",
    "QuantFormat",
    "QuantizedParam",
    "RequestOutput",
    "SamplingParams",
    "Scheme",
    "__version__",
    "fused_experts",
    "fused_moe",
    "generate",
    "generate_stream",
    "in_token_buckets",
    "load_balancing_loss",
    "load_lora",
    "load_moe",
    "load_pretrained",
    "lora",
    "make_expert_params_mapping",
    "merge_lora",
    "quantize_checkpoint",
    "router_z_loss",
    "save_lora",
    "select_lora",
    "sequence_balance_loss",
    "token_bucket",
    "weight_loader",
]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        value = getattr(importlib.import_module(f"moe_jax.{_HOMES[name]}"), name)
        globals()[name] = value
        return value
    if name in _MODULES:
        return importlib.import_module(f"moe_jax.{name}")
    raise AttributeError(f"module 'moe_jax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULES})
