"""Trying the implementations of an op in order."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax


def first_that_runs(op: str, runs: Mapping[str, Callable[[], Any]], wanted: str | Sequence[str] | None) -> Any:
    """Result of the first implementation that does not refuse with NotImplementedError.

    runs: name -> call, in the order of preference. wanted: a name, names in order, or None for all. When every one
    refuses, NotImplementedError holds each one's reason; an unknown name is a ValueError.
    """
    names = tuple(runs) if wanted is None else (wanted,) if isinstance(wanted, str) else tuple(wanted)
    for name in names:
        if name not in runs:
            raise ValueError(f"implementation {name!r} of {op} is not one of {tuple(runs)}")
    reasons = []
    for name in names:
        try:
            with jax.named_scope(f"{op}_{name}"):
                return runs[name]()
        except NotImplementedError as error:
            reasons.append(f"{name}: {error}")
    raise NotImplementedError(f"{op} cannot run this call. " + "; ".join(reasons))
