"""Low-rank adapters (LoRA): made for layers and models whose own weights stay as they are."""

from moe_jax.adapters._lora import lora

__all__ = ["lora"]
