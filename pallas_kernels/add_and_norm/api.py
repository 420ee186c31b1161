"""``add_and_norm``: a residual sum and its RMSNorm."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.add_and_norm.config import AddNormConfig, AddNormDesc, choose_config, config_error
from pallas_kernels.add_and_norm.reference import add_and_norm_ref
from pallas_kernels.common.device import hopper_sms
from pallas_kernels.common.implementations import first_that_runs


def add_and_norm(
    x: jax.Array,
    weight: jax.Array,
    addend: jax.Array | None = None,
    *,
    eps: float,
    config: AddNormConfig | None = None,
    implementation: str | Sequence[str] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(x + addend, that / sqrt(mean(that^2) + eps) * weight over the last axis).

    Sum and norm are computed in float32. Each is rounded once, so that the norm is that of the sum before its rounding,
    as it is where XLA fuses the two.

    Args:
        x, addend: (T, H); addend None for zeros: then x is returned as it is.
        weight: (H,), of the same dtype.
        config: of the Hopper kernel; None for its own choice.
        implementation: "hopper" or "reference", or several in the order to try; None tries them in this order.

    Raises:
        ValueError, TypeError: a wrong call. NotImplementedError: no implementation can run it.
    """
    if x.ndim != 2 or weight.shape != x.shape[1:] or (addend is not None and addend.shape != x.shape):
        other = None if addend is None else addend.shape
        raise ValueError(f"x {x.shape}, weight {weight.shape}, addend {other}; expected (T, H), (H,), (T, H)")
    dtypes = {jnp.dtype(a.dtype).name for a in (x, weight, addend) if a is not None}
    if len(dtypes) != 1:
        raise TypeError(f"operands are {', '.join(sorted(dtypes))}; expected one dtype")
    desc = AddNormDesc(*x.shape, dtype=dtypes.pop(), has_addend=addend is not None, eps=float(eps))

    def hopper():
        chosen = config or choose_config(desc, hopper_sms())
        if reason := config_error(desc, chosen):
            raise NotImplementedError(reason)

        from pallas_kernels.add_and_norm.kernel_sm90 import add_and_norm_sm90  # here: importing it loads Pallas

        found = add_and_norm_sm90(desc, chosen)(x, weight, *([] if addend is None else [addend]))
        return (x, found[0]) if addend is None else tuple(found)

    runs = dict(hopper=hopper, reference=lambda: add_and_norm_ref(desc, x, weight, addend))
    return first_that_runs("add_and_norm", runs, implementation)
