"""Weights as callers hand them over: pairs of names and arrays, ids of experts; ``ArraySource`` reads like a file."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from moe_jax._typing import AnyArray, HostArray, Json
from moe_jax.loading._errors import CheckpointError, shorten, shown
from moe_jax.loading.files._safetensors import DTYPES, TensorInfo


def checked_pairs(pairs: Iterable[tuple[str, AnyArray]]) -> Iterator[tuple[str, AnyArray]]:
    """(name, array) one by one. Raises TypeError at the first item that is no pair of a string and an array."""
    if isinstance(pairs, Mapping):
        raise TypeError(
            f"weights have type {type(pairs).__name__}, expected pairs (name, array); pass its items(), as in w.items()"
        )
    if isinstance(pairs, str | bytes) or not isinstance(pairs, Iterable):
        raise TypeError(f"weights are {shown(pairs)}, expected an iterable of pairs (name, array)")
    for index, pair in enumerate(pairs):
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], str):
            raise TypeError(f"weights: item {index} is {shown(pair)}, expected a pair (name, array)")
        name, array = pair
        if not isinstance(array, np.ndarray | np.generic | jax.Array):
            raise TypeError(f"{shorten(name)}: has type {type(array).__name__}, expected a NumPy or JAX array")
        yield name, array


def checked_experts(experts: Any, num_experts: int) -> list[int]:
    """Ids as integers. Raises TypeError for what is no list of integers, ValueError for ids that do not fit."""
    is_list = isinstance(experts, Iterable) and not isinstance(experts, str | bytes | Mapping)
    ids = list(experts) if is_list and getattr(experts, "ndim", 1) == 1 else None
    if ids is None or not all(isinstance(each, int | np.integer) and not isinstance(each, bool) for each in ids):
        raise TypeError(f"experts={shown(experts)}: expected a list of integers, the ids of experts")
    ids = [int(expert) for expert in ids]
    if not ids or len(set(ids)) < len(ids) or min(ids) < 0 or max(ids) >= num_experts:
        raise ValueError(f"experts={shown(ids)}: expected different ids from 0 to {num_experts - 1}")
    return ids


class ArraySource:
    """Arrays under checkpoint names, for reloads from a trainer or another process.

    Args:
        pairs: (name, NumPy or JAX array in the checkpoint's dtype and shape). A name that occurs twice is a
            CheckpointError, anything but such pairs a TypeError.
        config: what config.json would say.
    """

    directory = config_path = "the given arrays"  # where errors say a tensor comes from

    def __init__(self, pairs: Iterable[tuple[str, AnyArray]], config: Json | None = None):
        self._arrays: dict[str, AnyArray] = {}
        self.config = dict(config or {})
        for name, array in checked_pairs(pairs):
            self.add(name, array)

    def add(self, name: str, array: AnyArray) -> None:
        """Keep one more array; one that could still change is copied."""
        if name in self._arrays:
            raise CheckpointError(f"{shorten(name)} is given twice; every tensor must come once")
        self._arrays[name] = array.copy() if isinstance(array, np.ndarray) and array.flags.writeable else array

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._arrays)

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    def info(self, name: str) -> TensorInfo:
        if name not in self:
            raise CheckpointError(f"{self.directory}: no tensor {shorten(name)}")
        array = self._arrays[name]
        dtype = np.dtype(array.dtype)
        stored_as = next((word for word, known in DTYPES.items() if known == dtype), dtype.name)
        return TensorInfo(name, stored_as, dtype, tuple(array.shape), self.directory, 0, array.size * dtype.itemsize)

    def read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> HostArray:
        array = np.asarray(self._arrays[name])
        array = array if rows is None else array[rows]
        return array if columns is None else array[:, columns]
