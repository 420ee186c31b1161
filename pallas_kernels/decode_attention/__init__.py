"""Attention of a few queries a row over a long key-value cache."""

from pallas_kernels.decode_attention.api import decode_attention, rows_of
from pallas_kernels.decode_attention.config import (
    DecodeConfig,
    DecodeDesc,
    choose_config,
    config_error,
    quantizing_error,
)
from pallas_kernels.decode_attention.reference import decode_attention_ref

__all__ = [
    "DecodeConfig",
    "DecodeDesc",
    "choose_config",
    "config_error",
    "decode_attention",
    "decode_attention_ref",
    "quantizing_error",
    "rows_of",
]
