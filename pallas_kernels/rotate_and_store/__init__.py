"""Query and key heads normalised and rotated, keys and values written to the cache, in one launch."""

from pallas_kernels.rotate_and_store.api import describe, rotate_and_store
from pallas_kernels.rotate_and_store.config import RotateConfig, RotateDesc, choose_config, config_error
from pallas_kernels.rotate_and_store.reference import rotate_and_store_ref

__all__ = [
    "RotateConfig",
    "RotateDesc",
    "choose_config",
    "config_error",
    "describe",
    "rotate_and_store",
    "rotate_and_store_ref",
]
