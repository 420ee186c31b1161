"""The name that ``pallas_kernels.nvlink_dispatch`` had before."""

from pallas_kernels.nvlink_dispatch import DispatchedRows as Arrived
from pallas_kernels.nvlink_dispatch import ExchangeConfig as PushConfig
from pallas_kernels.nvlink_dispatch import ExchangeDesc as PushDesc
from pallas_kernels.nvlink_dispatch import combine_rows as combine_pushed
from pallas_kernels.nvlink_dispatch import config_error
from pallas_kernels.nvlink_dispatch import dispatch_rows as push_rows
from pallas_kernels.nvlink_dispatch import place_rows as place_arrived

__all__ = ["Arrived", "PushConfig", "PushDesc", "combine_pushed", "config_error", "place_arrived", "push_rows"]
