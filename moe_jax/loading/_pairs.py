"""``checked_pairs``: weights as callers hand them over, name by name."""

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
