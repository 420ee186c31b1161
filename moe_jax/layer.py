"""Another name of ``moe_jax.nn`` for code that imports ``moe_jax.layer``."""

from moe_jax.experts import MoEStats
from moe_jax.nn import FusedMoE, MoEBlock, QuantizedParam, RoutingParam, WeightsVersion

__all__ = ["FusedMoE", "MoEBlock", "MoEStats", "QuantizedParam", "RoutingParam", "WeightsVersion"]
