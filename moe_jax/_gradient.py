"""Functions without a gradient, beside others that compute the same and have one."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero


class NoGradient(NotImplementedError):
    """Somebody differentiates what has no gradient, which only shows while it is called."""


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def with_gradient_of(function: Callable[..., Any], other: Callable[..., Any], *arguments: Any) -> Any:
    """``function(*arguments)``; where that is differentiated, ``other(*arguments)`` takes its place, value and all.

    Both are given the same pytrees of arrays, must close over none, and return the same shapes and dtypes. Also under
    ``jax.jit``, ``jax.vmap`` and ``jax.lax.scan`` inside ``jax.grad``. Nothing is computed for arguments of which
    nobody asked for a gradient.
    """
    del other
    return function(*arguments)


@functools.partial(with_gradient_of.defjvp, symbolic_zeros=True)
def _differentiate(function, other, primals, tangents):
    del function
    leaves, structure = jax.tree.flatten(primals)
    directions = jax.tree.leaves(tangents)
    moved = [index for index, direction in enumerate(directions) if not isinstance(direction, SymbolicZero)]

    def of_moved(*values):
        found = dict(zip(moved, values, strict=True))
        return other(*structure.unflatten([found.get(index, leaf) for index, leaf in enumerate(leaves)]))

    return jax.jvp(of_moved, [leaves[i] for i in moved], [directions[i] for i in moved])
