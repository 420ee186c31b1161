"""vLLM's method for checkpoints of ``quant_method`` "fp8", DeepSeek's and AutoFP8's, by its name and parameters."""

from collections.abc import Mapping
from typing import Any

import torch

from moe_jax import Scheme
from torch_bridge._leaf_layout import LeafLayout
from torch_bridge._methods import SchemeMoEMethod


class Fp8MoEMethod(SchemeMoEMethod):
    """FP8 weights per tensor or block. Scales of blocks are called ``weight_scale_inv``, and multiply all the same."""

    def __init__(self, quant_config: Any, layer: Any = None):
        """quant_config: a ``quantization_config`` dict, or an object with vLLM's ``weight_block_size`` and
        ``activation_scheme``. layer: the layer it will serve; only its ``moe_config`` is kept.

        Raises ValueError for a config that contradicts itself.
        """
        config = quant_config
        if not isinstance(quant_config, Mapping):
            config = {
                "quant_method": "fp8",
                "activation_scheme": quant_config.activation_scheme,
                "weight_block_size": quant_config.weight_block_size,
            }
        super().__init__(Scheme.parse(config), getattr(layer, "moe_config", None))
        self.quant_config: Any = quant_config

    @property
    def use_global_sf(self) -> bool:
        """No: vLLM's loader brings input scales of the rank's experts."""
        return False

    @property
    def weight_block_size(self) -> list[int] | None:
        """[rows, columns] under one scale, None per tensor."""
        block = self.scheme.weight_format.block_shape
        return None if block is None else list(block)

    @property
    def block_quant(self) -> bool:
        return self.weight_block_size is not None

    @property
    def weight_scale_name(self) -> str:
        """How scales are called after their weight."""
        return "weight_scale_inv" if self.block_quant else "weight_scale"

    def layout(self, leaf: str, params_dtype: torch.dtype | None = None) -> LeafLayout:
        """Scales under ``weight_scale_name``."""
        if leaf.endswith("_weight_scale"):
            return LeafLayout(leaf.replace("weight_scale", self.weight_scale_name))
        return super().layout(leaf, params_dtype)
