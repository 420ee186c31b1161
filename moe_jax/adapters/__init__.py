"""Low-rank adapters (LoRA): made for layers and models whose own weights stay as they are."""

from moe_jax.adapters._lora import lora
from moe_jax.adapters._merge import MergedWeight, merge_lora
from moe_jax.adapters._peft import load_lora, save_lora
from moe_jax.adapters._select import select_lora

__all__ = ["MergedWeight", "load_lora", "lora", "merge_lora", "save_lora", "select_lora"]
