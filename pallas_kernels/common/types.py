"""Types in the signatures of kernels. Without Pallas, so that modules that only describe a call may use them.

``Value``, ``Scalar`` and ``Ref`` are for the bodies of kernels, ``Leaf`` for dataclasses that are pytrees. They are
precise for a type checker and ``object`` at run time: tests also run bodies on NumPy arrays and stand-ins for memory.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp

Dtype: TypeAlias = str | type | jnp.dtype
Layout: TypeAlias = Any  # of ``plgpu``, which exports no type for all of its layouts
TileRef: TypeAlias = Any  # a Ref that TMA copies, wgmma and barriers take: Pallas annotates them with internal classes
Kernel: TypeAlias = Callable[..., Any]  # arrays -> an array, or a tuple or list of arrays, as its docstring says

if TYPE_CHECKING:
    Index: TypeAlias = Any  # integers, slices and ``pl.ds``, one for each dimension
    Value: TypeAlias = jax.Array  # an array in registers
    Leaf: TypeAlias = jax.Array  # a field of a pytree, in whose place JAX also puts shapes, shardings and others
    Scalar: TypeAlias = jax.Array | int  # a number known when a kernel is built, or only while it runs

    class RefIndexer(Protocol):
        def __getitem__(self, index: Index) -> "Ref": ...

    class Ref(Protocol):
        """A kernel's view of global or shared memory: a whole array, or the part that ``at`` names."""

        @property
        def shape(self) -> tuple[int, ...]: ...

        @property
        def dtype(self) -> jnp.dtype: ...

        @property
        def at(self) -> RefIndexer: ...

        def __getitem__(self, index: Index) -> Value: ...

        def __setitem__(self, index: Index, value: Value | float) -> None: ...

        def reshape(self, *shape: int | tuple[int, ...]) -> "Ref": ...

else:
    Leaf = Value = Scalar = Ref = object
