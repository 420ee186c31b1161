"""``multiply_heads``: each head's rows times a part of the head's own matrix."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.common.device import hopper_sms
from pallas_kernels.common.implementations import first_that_runs
from pallas_kernels.multiply_heads.config import HeadsConfig, HeadsDesc, choose_config, config_error
from pallas_kernels.multiply_heads.reference import multiply_heads_ref


def multiply_heads(
    x: jax.Array,
    w: jax.Array,
    *,
    rows: tuple[int, int],
    transposes_w: bool = False,
    config: HeadsConfig | None = None,
    implementation: str | Sequence[str] | None = None,
) -> jax.Array:
    """y[t, n] = x[t, n, :K] W_n, or x[t, n, :K] W_n^T: W_n is the rows ``rows`` of w[n], read where they lie.

    Summed in float32, rounded once to x's dtype.

    Args:
        x: (T, N, K or more) bfloat16 or float16; K is the number of these rows, with transposes_w that of columns, C.
        w: (N, R, C) of the same dtype.
        rows: [first, end) of each head's matrix.
        transposes_w: whether the columns are added up over.
        config: of the Hopper kernel; None for its own choice.
        implementation: "hopper" or "reference", or several in the order to try; None tries them in this order.

    Returns:
        (T, N, C), with transposes_w (T, N, end - first), of x's dtype.

    Raises:
        ValueError, TypeError: a wrong call. NotImplementedError: no implementation can run it.
    """
    desc = describe(x, w, rows=rows, transposes_w=transposes_w)

    def hopper():
        hopper_sms()
        chosen = config or choose_config(desc)
        if reason := config_error(desc, chosen):
            raise NotImplementedError(reason)

        # here: importing it loads Pallas
        from pallas_kernels.multiply_heads.kernel_sm90 import multiply_heads_sm90

        # TMA copies of swizzled tiles want fewer than eight rows, or whole eights.
        missing = -desc.num_tokens % 8 if desc.num_tokens > 8 else 0
        padded = dataclasses.replace(desc, num_tokens=desc.num_tokens + missing)
        rows_of_x = jnp.pad(x, ((0, missing), (0, 0), (0, 0))) if missing else x
        return multiply_heads_sm90(padded, chosen)(rows_of_x, w)[: desc.num_tokens]

    runs = dict(hopper=hopper, reference=lambda: multiply_heads_ref(desc, x, w))
    return first_that_runs("multiply_heads", runs, implementation)


def describe(x: jax.Array, w: jax.Array, *, rows: tuple[int, int], transposes_w: bool) -> HeadsDesc:
    """The description of a call, checked."""
    first, end = rows
    if w.ndim != 3 or not 0 <= first < end <= w.shape[1]:
        raise ValueError(f"w {w.shape}, rows {rows}; expected (N, R, C) and 0 <= first < end <= R")
    heads, _, columns = w.shape
    depth = columns if transposes_w else end - first
    if x.ndim != 3 or x.shape[1] != heads or x.shape[2] < depth:
        raise ValueError(f"x {x.shape}, w {w.shape}, rows {rows}; expected x (T, {heads}, {depth} or more)")
    if x.dtype != w.dtype or not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"x is {x.dtype} and w is {w.dtype}, expected one floating dtype")
    sizes = x.shape[0], heads, first, end - first, w.shape[1], columns
    return HeadsDesc(*sizes, jnp.dtype(x.dtype).name, transposes_w, x.shape[2])
