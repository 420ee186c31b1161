"""Flax definitions of language models with Mixture-of-Experts layers, loading them, and generating with them."""

from moe_jax.models._cache import KVCache
from moe_jax.models._config import DecoderConfig, IndexerConfig, MLAConfig, MoEBlockConfig
from moe_jax.models._decoder import CausalLM
from moe_jax.models._generate import generate, generate_stream
from moe_jax.models._loading import load_moe, load_pretrained
from moe_jax.models._sampling_params import SamplingParams
from moe_jax.models.attention._rope import RopeConfig
from moe_jax.models.families._moe_family import MoEFamily
from moe_jax.models.families._registry import FAMILIES, read_family
from moe_jax.models.families.mixtral import MixtralForCausalLM
from moe_jax.models.families.qwen3_moe import Qwen3MoeForCausalLM

__all__ = [
    "FAMILIES",
    "CausalLM",
    "DecoderConfig",
    "IndexerConfig",
    "KVCache",
    "MLAConfig",
    "MixtralForCausalLM",
    "MoEBlockConfig",
    "MoEFamily",
    "Qwen3MoeForCausalLM",
    "RopeConfig",
    "SamplingParams",
    "generate",
    "generate_stream",
    "load_moe",
    "load_pretrained",
    "read_family",
]
