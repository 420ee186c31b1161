"""Checks of plain arguments: each gives the value in one known type, or one error that shows what was passed."""

import dataclasses
import operator
from reprlib import repr as brief
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer


def integer(name: str, value: Any, *, minimum: int, maximum: int | None = None, why: str = "") -> int:
    """``value`` as an int. bool and float are no integers (TypeError); outside [minimum, maximum] is a ValueError.

    why: added to the error, for the reader who wonders where the bounds come from.
    """
    bounds = f">= {minimum}" if maximum is None else f"from {minimum} to {maximum}"
    wrong = f"{name}={shown(value)}, expected an integer {bounds}{why}"
    if isinstance(value, bool | np.bool_):
        raise TypeError(wrong)
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(wrong) from None
    if number < minimum or (maximum is not None and number > maximum):
        raise ValueError(wrong)
    return number


def boolean(name: str, value: Any) -> bool:
    """``value`` as a bool: a Python or NumPy bool. Nothing else counts as true or false (TypeError)."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name}={shown(value)}, expected True or False")
    return bool(value)


def check_booleans(config: Any) -> None:
    """TypeError for a field of a frozen dataclass that is declared as bool and holds something else."""
    for field in dataclasses.fields(config):
        if field.type is bool:
            object.__setattr__(config, field.name, boolean(field.name, getattr(config, field.name)))


def check_callables(**modules: Any) -> None:
    """TypeError for a module or function that is neither None nor can be called."""
    for name, module in modules.items():
        if module is not None and not callable(module):
            raise TypeError(f"{name}={shown(module)}, expected None, or a module or function that can be called")


def check_numbers(config: Any, *names: str) -> None:
    """TypeError for a field of a frozen dataclass that is no number; arrays become floats, since configs are hashed."""
    for name in names:
        value = getattr(config, name)
        found = number(name, value, "that is finite")
        if not isinstance(value, int | float):
            object.__setattr__(config, name, found)


def number(name: str, value: Any, expected: str) -> float:
    """``value`` as a float: a Python, NumPy or JAX scalar that is no bool. expected: its range, for the error."""
    try:
        array = np.asarray(value)
    except Exception:  # a tracer, for one
        array = np.asarray(None)
    if array.ndim or not jnp.issubdtype(array.dtype, jnp.number) or jnp.issubdtype(array.dtype, jnp.complexfloating):
        raise TypeError(f"{name}={shown(value)}, expected a number {expected}")
    return float(array)


def check_array(name: str, value: Any, kind: Any, expected: str) -> None:
    """TypeError unless ``value`` is an array whose dtype is a ``kind``, jnp.integer or jnp.floating.

    expected: the shape, for the error.
    """
    if not isinstance(value, jax.Array | np.ndarray | nnx.Variable):
        raise TypeError(f"{name} has type {type(value).__name__}, expected a JAX or NumPy array {expected}")
    if not jnp.issubdtype(value.dtype, kind):
        raise TypeError(f"{name} has dtype {value.dtype}, expected {kind.__name__} values {expected}")


def check_is_kept(name: str, value: Any) -> None:
    """TypeError for an array whose dtype JAX replaces by a narrower one: NumPy's float64 without jax_enable_x64."""
    kept = jax.dtypes.canonicalize_dtype(value.dtype)
    if kept != value.dtype:
        raise TypeError(f"{name} has dtype {value.dtype}, which JAX makes {kept} unless jax_enable_x64 is set; cast it")


def check_rngs(rngs: Any) -> None:
    """TypeError unless ``rngs`` is None or ``nnx.Rngs``."""
    if rngs is not None and not isinstance(rngs, nnx.Rngs):
        raise TypeError(f"rngs has type {type(rngs).__name__}, expected flax.nnx.Rngs, as in rngs=nnx.Rngs(0)")


def check_not_traced(call: str, module: nnx.Module) -> None:
    """TypeError inside ``jax.jit`` and its like, where a module's Variables hold tracers."""
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(nnx.state(module))):
        raise TypeError(f"{call} inside jax.jit or another transform, where no values are known; call it outside")


def shown(value: Any) -> str:
    """The value on one line, shortened, for an error."""
    return " ".join(brief(value).split())
