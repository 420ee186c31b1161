"""Rows in expert order for routed (token, slot) pairs."""

from pallas_kernels.align.api import TileMap, align
from pallas_kernels.align.config import AlignConfig, AlignDesc, config_error, row_capacity
from pallas_kernels.align.reference import align_ref

__all__ = ["AlignConfig", "AlignDesc", "TileMap", "align", "align_ref", "config_error", "row_capacity"]
