"""Flax modules: ``FusedMoE`` (the routed experts of a layer) and ``MoEBlock`` (router, routed and shared experts)."""

from moe_jax.nn._frozen import FrozenExpertsWarning
from moe_jax.nn._fused_moe import FusedMoE
from moe_jax.nn._lora import LoRAParam
from moe_jax.nn._moe_block import MoEBlock
from moe_jax.nn._token_buckets import in_token_buckets, token_bucket
from moe_jax.nn._variables import QuantizedParam, RoutingParam, WeightsVersion

__all__ = [
    "FrozenExpertsWarning",
    "FusedMoE",
    "LoRAParam",
    "MoEBlock",
    "QuantizedParam",
    "RoutingParam",
    "WeightsVersion",
    "in_token_buckets",
    "token_bucket",
]
