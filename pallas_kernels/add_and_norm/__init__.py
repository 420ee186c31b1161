"""A residual sum, its RMSNorm and the router's logits of that, in one launch."""

from pallas_kernels.add_and_norm.api import add_and_norm
from pallas_kernels.add_and_norm.config import (
    FEW_TOKENS,
    AddNormConfig,
    AddNormDesc,
    choose_config,
    config_error,
    most_routed,
)
from pallas_kernels.add_and_norm.reference import add_and_norm_ref

__all__ = [
    "FEW_TOKENS",
    "AddNormConfig",
    "AddNormDesc",
    "add_and_norm",
    "add_and_norm_ref",
    "choose_config",
    "config_error",
    "most_routed",
]
