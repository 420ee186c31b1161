"""Low-rank adapters (LoRA): made for layers and models whose own weights stay as they are."""

from moe_jax.adapters._lora import lora
from moe_jax.adapters._merge import MergedWeight, merge_lora

__all__ = ["MergedWeight", "lora", "merge_lora"]
