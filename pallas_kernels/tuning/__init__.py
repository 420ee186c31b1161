"""Which configurations the two products of a layer run with: measured ones where a table has them."""

from pallas_kernels.tuning.layer import FORMATS, LayerConfig, LayerKey
from pallas_kernels.tuning.search import tune
from pallas_kernels.tuning.table import Entry, Table, load_table, table_for

__all__ = ["FORMATS", "Entry", "LayerConfig", "LayerKey", "Table", "load_table", "table_for", "tune"]
