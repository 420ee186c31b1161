"""Shape-typed annotations: jaxtyping when it is installed, plain aliases otherwise.

Annotations read ``Float[Array, "T H"]``. The library never checks them at run time; the test run does, by installing
jaxtyping's import hook before the packages are imported (tests/conftest.py).
"""

from typing import TYPE_CHECKING, Any

import jax

Array = jax.Array

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int, Num, Shaped
else:
    try:
        from jaxtyping import Bool, Float, Int, Num, Shaped
    except ImportError:

        class _Alias:
            """Stands in for a jaxtyping dtype: ``_Alias[Array, "T H"]`` is ``Any``."""

            def __class_getitem__(cls, item: Any) -> Any:
                return Any

        Bool = Float = Int = Num = Shaped = _Alias

__all__ = ["Array", "Bool", "Float", "Int", "Num", "Shaped"]
