"""Attention over a key-value cache."""

from pallas_kernels.attention.api import prefill
from pallas_kernels.attention.config import PrefillConfig, PrefillDesc, choose_config, config_error
from pallas_kernels.attention.reference import prefill_ref

__all__ = ["PrefillConfig", "PrefillDesc", "choose_config", "config_error", "prefill", "prefill_ref"]
