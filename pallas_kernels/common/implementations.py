"""Trying the implementations of an op in order."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax

Result = TypeVar("Result")
FORMER_NAMES = {"mosaic": "hopper"}  # still accepted


def first_that_runs(op: str, runs: Mapping[str, Callable[[], Result]], wanted: str | Sequence[str] | None) -> Result:
    """Result of the first implementation that does not refuse with NotImplementedError.

    Args:
        op: name of the operation, for errors and scopes.
        runs: name -> call, in the order of preference.
        wanted: a name, names in order, or None for all.

    Raises:
        ValueError: an unknown name. NotImplementedError: every implementation refuses; it holds each one's reason.
    """
    names = tuple(runs) if wanted is None else (wanted,) if isinstance(wanted, str) else tuple(wanted)
    names = tuple(FORMER_NAMES.get(name, name) for name in names)
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


def check_config(config: Any, *kinds: type) -> None:
    """Raise where a configuration that was given is none of these kinds, so that the next implementation is tried."""
    if config is not None and not isinstance(config, kinds):
        expected = " or ".join(kind.__name__ for kind in kinds)
        raise NotImplementedError(f"config is {type(config).__name__}; these kernels take {expected}")
