"""Weights as callers hand them over, name by name, and the ids of the experts that they mean."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from moe_jax.loading._errors import shorten, shown


def checked_pairs(pairs: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
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
