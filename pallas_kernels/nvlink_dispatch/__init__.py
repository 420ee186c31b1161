"""Rows between the GPUs of one NVLink host: to the experts that want them, and back."""

from pallas_kernels.nvlink_dispatch.api import DispatchedRows, combine_rows, dispatch_rows, place_rows
from pallas_kernels.nvlink_dispatch.config import ExchangeConfig, ExchangeDesc, config_error

__all__ = [
    "DispatchedRows",
    "ExchangeConfig",
    "ExchangeDesc",
    "combine_rows",
    "config_error",
    "dispatch_rows",
    "place_rows",
]
