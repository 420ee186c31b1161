"""Types in the signatures of kernels. Without Pallas, so that modules that only describe a call may use them."""

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp

Array: TypeAlias = jax.Array
Scalar: TypeAlias = jax.Array | int  # a number known when a kernel is built, or only while it runs
Dtype: TypeAlias = str | type | jnp.dtype
Index: TypeAlias = Any  # integers, slices and ``pl.ds``, one for each dimension
Kernel: TypeAlias = Callable[..., Any]  # arrays -> an array, or a tuple or list of arrays, as its docstring says


class RefIndexer(Protocol):
    def __getitem__(self, index: Index) -> "Ref": ...


@runtime_checkable
class Ref(Protocol):
    """A kernel's view of global or shared memory: a whole array, or the part that ``at`` names."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> jnp.dtype: ...

    @property
    def at(self) -> RefIndexer: ...

    def __getitem__(self, index: Index) -> Array: ...

    def __setitem__(self, index: Index, value: Array | float) -> None: ...
