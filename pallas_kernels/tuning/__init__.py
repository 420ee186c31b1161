"""Which configurations the two products of a layer run with: measured ones where a table has them."""

from pallas_kernels.tuning.layer import FORMATS, PACKED_FORMATS, LayerConfig, LayerKey, PackedLayerKey
from pallas_kernels.tuning.search import tune
from pallas_kernels.tuning.table import Entry, Table, load_table, table_for, update, user_cache, user_path

__all__ = [
    "FORMATS",
    "PACKED_FORMATS",
    "Entry",
    "LayerConfig",
    "LayerKey",
    "PackedLayerKey",
    "Table",
    "load_table",
    "table_for",
    "tune",
    "update",
    "user_cache",
    "user_path",
]
