"""The weighted sum of a token's expert rows."""

from pallas_kernels.combine.api import combine
from pallas_kernels.combine.config import CombineConfig, CombineDesc, config_error
from pallas_kernels.combine.reference import combine_ref
from pallas_kernels.combine.routed_rows import RoutedRows

__all__ = ["CombineConfig", "CombineDesc", "RoutedRows", "combine", "combine_ref", "config_error"]
