"""``ArraySource``: named arrays in memory, read the way a ``Checkpoint`` is."""

from collections.abc import Iterable
from typing import Any

import numpy as np

from moe_jax._typing import Json
from moe_jax.loading import TensorInfo
from moe_jax.loading.files._pairs import checked_pairs
from moe_jax.loading.files._safetensors import DTYPES


class ArraySource:
    """Arrays under checkpoint names, for reloads from a trainer or another process.

    pairs: (name, NumPy or JAX array in the checkpoint's dtype and shape). A name that occurs twice is a
        ValueError, anything but such pairs a TypeError. config: what config.json would say.
    """

    directory = config_path = "the given arrays"  # where errors say a tensor comes from

    def __init__(self, pairs: Iterable[tuple[str, Any]], config: Json | None = None):
        self._arrays: dict[str, Any] = {}
        self.config = dict(config or {})
        for name, array in checked_pairs(pairs):
            self.add(name, array)

    def add(self, name: str, array: Any) -> None:
        """Keep one more array; one that could still change is copied."""
        if name in self._arrays:
            raise ValueError(f"{name} is given twice; every tensor must come once")
        self._arrays[name] = array.copy() if isinstance(array, np.ndarray) and array.flags.writeable else array

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._arrays)

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    def info(self, name: str) -> TensorInfo:
        array = self._arrays[name]
        dtype = np.dtype(array.dtype)
        stored_as = next((word for word, known in DTYPES.items() if known == dtype), dtype.name)
        return TensorInfo(name, stored_as, dtype, tuple(array.shape), self.directory, 0, array.size * dtype.itemsize)

    def read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> np.ndarray:
        array = np.asarray(self._arrays[name])
        array = array if rows is None else array[rows]
        return array if columns is None else array[:, columns]
