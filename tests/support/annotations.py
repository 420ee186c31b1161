"""What the annotations of a function are checked with: jaxtyping where they speak of arrays, beartype alone elsewhere.

jaxtyping's import hook wraps every function in the binding of its dimensions, which takes ten times what beartype's
check takes; planning a layer calls functions that know integers and names alone thousands of times.
"""

import dataclasses
import functools
import inspect
import typing

import jaxtyping
from beartype import beartype

_jaxtyped = jaxtyping.jaxtyped


def jaxtyped(function=None, *, typechecker):
    """In place of jaxtyping's: the same checks of what the packages have, but for trees of arrays (PyTree), which they
    do not. A function inside another stays as it is: it is made anew at each call, and wrapped in longer than it runs.
    """
    if function is None:
        return functools.partial(jaxtyped, typechecker=typechecker)
    if dataclasses.is_dataclass(function) and "__init__" in vars(function):
        function.__init__ = jaxtyped(function.__init__, typechecker=typechecker)
        return function
    if "<locals>" in getattr(function, "__qualname__", ""):
        return function
    if not inspect.isfunction(function) or any(map(_speaks_of_arrays, function.__annotations__.values())):
        return _jaxtyped(function, typechecker=typechecker)
    return beartype(function)


def _speaks_of_arrays(annotation) -> bool:
    """An annotation in quotes may."""
    if isinstance(annotation, str | typing.ForwardRef):
        return True
    is_array = inspect.isclass(annotation) and issubclass(annotation, jaxtyping.AbstractArray)
    return is_array or any(map(_speaks_of_arrays, typing.get_args(annotation)))
