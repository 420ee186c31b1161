"""Quantized Mixture-of-Experts for JAX on NVIDIA GPUs."""

from moe_jax import _compat

_compat.check_versions()  # before the imports that a wrong version would break

from moe_jax._config import MoEConfig
from moe_jax._token_buckets import in_token_buckets, token_bucket
from moe_jax._version import __version__
from moe_jax.experts import MoEStats, fused_experts, fused_moe
from moe_jax.layer import FusedMoE, MoEBlock
from moe_jax.loading import make_expert_params_mapping, weight_loader
from moe_jax.models import generate, load_moe, load_pretrained
from moe_jax.quantization import ExpertWeights, QuantFormat, Scheme
from moe_jax.writing import quantize_checkpoint

__all__ = [
    "ExpertWeights",
    "FusedMoE",
    "MoEBlock",
    "MoEConfig",
    "MoEStats",
    "QuantFormat",
    "Scheme",
    "__version__",
    "fused_experts",
    "fused_moe",
    "generate",
    "in_token_buckets",
    "load_moe",
    "load_pretrained",
    "make_expert_params_mapping",
    "quantize_checkpoint",
    "token_bucket",
    "weight_loader",
]
