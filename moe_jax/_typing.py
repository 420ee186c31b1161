"""Shape-typed annotations: jaxtyping when it is installed, plain aliases otherwise.

Annotations read ``Float[Array, "T H"]``. The library never checks them at run time; the test run does, by installing
jaxtyping's import hook before the packages are imported (tests/conftest.py).
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.typing import DTypeLike

Array = jax.Array
Json = Mapping[str, Any]  # an object of a JSON file, or a dict like one

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int, Num, Shaped

    HostArray = np.ndarray
    AnyArray = jax.Array | np.ndarray
    Leaf = jax.Array
    ArrayArg = jax.Array | np.ndarray
    Size = int
else:
    HostArray = np.ndarray | np.generic
    AnyArray = jax.Array | HostArray  # of JAX, tracers included, or of NumPy
    # Of a pytree of weights. NumPy arrays take their place; trees of shapes, shardings and axes have the same nodes.
    Leaf = Any
    Size = Any  # of an axis: an int, or symbolic in a program that is exported for any size
    ArrayArg = Any  # an argument that the function checks itself, with an error for its reader
    try:
        from jaxtyping import Bool, Float, Int, Num, Shaped
    except ImportError:

        class _Alias:
            """Stands in for a jaxtyping dtype: ``_Alias[Array, "T H"]`` is ``Any``."""

            def __class_getitem__(cls, item: Any) -> Any:
                return Any

        Bool = Float = Int = Num = Shaped = _Alias

__all__ = [
    "AnyArray",
    "Array",
    "ArrayArg",
    "Bool",
    "DTypeLike",
    "Float",
    "HostArray",
    "Int",
    "Json",
    "Leaf",
    "Num",
    "Shaped",
    "Size",
]
