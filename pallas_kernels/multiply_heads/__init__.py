"""Each head's rows times a part of the head's own matrix: what MLA multiplies where it absorbs ``kv_b_proj``."""

from pallas_kernels.multiply_heads.api import describe, multiply_heads
from pallas_kernels.multiply_heads.config import HeadsConfig, HeadsDesc, choose_config, config_error
from pallas_kernels.multiply_heads.reference import multiply_heads_ref

__all__ = [
    "HeadsConfig",
    "HeadsDesc",
    "choose_config",
    "config_error",
    "describe",
    "multiply_heads",
    "multiply_heads_ref",
]
