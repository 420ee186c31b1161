"""Functions and leaves without a gradient, functions that stand in where one is needed, and gradients on a mesh."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero

from moe_jax._typing import Array
from moe_jax.quantization import QuantizedTensor


class NoGradient(NotImplementedError):
    """Somebody differentiates what has no gradient, which only shows while it is called."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def with_gradient_of(function: Callable[..., Any], other: Callable[..., Any], *arguments: Any) -> Any:
    """``function(*arguments)``; where that is differentiated, ``other(*arguments)`` takes its place, value and all.

    Both are given the same pytrees of arrays, must close over none, and return the same shapes and dtypes. Nothing is
    computed for arguments of which nobody asked for a gradient. In reverse mode alone, as the xla backend has it:
    ``jax.grad`` and ``jax.vjp`` around and inside ``jax.jit``, ``jax.vmap``, ``jax.lax.scan`` and ``jax.checkpoint``.
    """
    del other
    return function(*arguments)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Pullback:
    """From a result's cotangents to those of the arguments' leaves ``moved``. structure: of all arguments."""

    function: Any
    moved: tuple[int, ...] = dataclasses.field(metadata=dict(static=True))
    structure: Any = dataclasses.field(metadata=dict(static=True))


def _save_for_backward(function, other, *arguments):
    del function
    primals, structure = jax.tree.flatten(arguments, is_leaf=lambda leaf: isinstance(leaf, CustomVJPPrimal))
    moved = tuple(index for index, primal in enumerate(primals) if primal.perturbed)

    def of_moved(*values):
        found = dict(zip(moved, values, strict=True))
        return other(*structure.unflatten([found.get(index, primal.value) for index, primal in enumerate(primals)]))

    out, pullback = jax.vjp(of_moved, *(primals[index].value for index in moved))
    return out, _Pullback(pullback, moved, structure)


def _backward(function, other, pullback, out_bar):
    del function, other
    found = dict(zip(pullback.moved, pullback.function(jax.tree.map(_whole, out_bar)), strict=True))
    return pullback.structure.unflatten([found.get(index) for index in range(pullback.structure.num_leaves)])


def _whole(cotangent):
    if not isinstance(cotangent, SymbolicZero):
        return cotangent
    zeros: Any = np.zeros if cotangent.dtype == jax.dtypes.float0 else jnp.zeros
    return zeros(cotangent.shape, cotangent.dtype)


with_gradient_of.defvjp(_save_for_backward, _backward, symbolic_zeros=True)


def constant(name: str, tensor: QuantizedTensor) -> QuantizedTensor:
    """The same weights; asking for the gradient of a quantized leaf, of its scales or of an input scale is an error."""
    if tensor.fmt is None:
        return tensor
    leaves = {
        field: None if (leaf := getattr(tensor, field)) is None else _constant(f"{name}.{field}", leaf)
        for field in ("data", "scale", "global_scale", "input_scale", "zero_point", "g_idx")
    }
    return dataclasses.replace(tensor, **leaves)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _constant(name: str, leaf: Array) -> Array:
    return leaf


@functools.partial(_constant.defjvp, symbolic_zeros=True)
def _refuse_tangent(name, primals, tangents):
    (leaf,), (tangent,) = primals, tangents
    if not isinstance(tangent, SymbolicZero):
        raise TypeError(
            f"gradient requested for weights.{name} ({leaf.dtype.name}), a leaf of quantized weights, which have none; "
            "differentiate with respect to x, router_logits or biases, or use unquantized weights"
        )
    return leaf, tangent


def vary_together(tree: Any) -> Any:
    """Inside ``jax.shard_map``, let all leaves vary over the mesh axes over which any of them does; else the identity.

    A loop's carry must vary as its body's result does, and a cotangent as its primal. One cast up front settles both;
    its transpose is the sum over the mesh.
    """
    axes = frozenset().union(*(jax.typeof(leaf).manual_axis_type.varying for leaf in jax.tree.leaves(tree)))

    def cast(leaf):
        missing = axes - jax.typeof(leaf).manual_axis_type.varying
        return lax.pcast(leaf, tuple(sorted(missing)), to="varying") if missing else leaf

    return jax.tree.map(cast, tree) if axes else tree
