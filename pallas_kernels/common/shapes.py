"""Calls of which only the shapes are asked for: their kernels' bodies are not traced.

Before a layer is traced it is asked whether its kernels take the call, by tracing them for nobody.
"""

from collections.abc import Callable
from typing import Any

import jax

# A part of the key under which JAX keeps what it has traced: nobody runs what was traced for its shapes.
_ALONE: Any = jax.make_user_context(default_value=False)


def shapes_of(function: Callable[..., Any], *arguments: Any) -> Any:
    """``jax.eval_shape(function, *arguments)``, in which no kernel's body is traced."""
    with _ALONE(True):
        return jax.eval_shape(function, *arguments)


def or_shapes(kernel: Callable[..., Any], results: Any, num_changed: int = 0) -> Callable[..., Any]:
    """``kernel``, or in ``shapes_of`` what has the shapes of ``results``, behind the operands that it changes."""

    def run(*operands):
        if not _ALONE.value:
            return kernel(*operands)
        found = jax.tree.map(lambda one: jax.lax.empty(one.shape, one.dtype), results)
        return (*operands[:num_changed], *found) if num_changed else found

    return run
