"""Rows between the devices of one NVLink host: to the experts that want them, and back."""

from pallas_kernels.push.api import Arrived, combine_pushed, place_arrived, push_rows
from pallas_kernels.push.config import PushConfig, PushDesc, config_error

__all__ = ["Arrived", "PushConfig", "PushDesc", "combine_pushed", "config_error", "place_arrived", "push_rows"]
