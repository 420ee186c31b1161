"""``combine``: the weighted sum of a token's expert rows."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.combine.config import CombineConfig, CombineDesc, choose_config, config_error
from pallas_kernels.combine.reference import combine_ref
from pallas_kernels.common.device import hopper_sms, portable_sms
from pallas_kernels.common.implementations import first_that_runs
from pallas_kernels.common.types import Dtype


def combine(
    rows: jax.Array,
    row_of: jax.Array,
    weights: jax.Array,
    *,
    shared: jax.Array | None = None,
    out_dtype: Dtype = jnp.bfloat16,
    config: CombineConfig | None = None,
    implementation: str | Sequence[str] | None = None,
) -> jax.Array:
    """``out[t] = sum_j weights[t, j] * rows[row_of[t, j]] (+ shared[t])`` in float32, rounded once.

    A token without any slot gives shared, or zero.

    Args:
        rows: (Mp, H) bfloat16, float16 or float32.
        row_of: (T, top_k) int32, -1 for a slot that contributes nothing.
        weights: (T, top_k) float32, bfloat16 or float16.
        shared: (T, H) bfloat16, float16 or float32, or None.
        out_dtype: of the result, (T, H).
        config: of the Hopper kernel; None for its own choice.
        implementation: "hopper", "portable", "reference", or several in the order to try; None for this order.

    Raises:
        ValueError, TypeError: a wrong call. NotImplementedError: no implementation can run it.
    """
    check_operands(rows.shape, row_of, weights, shared)
    (num_rows, width), (num_tokens, top_k) = rows.shape, row_of.shape
    desc = CombineDesc(
        num_tokens=num_tokens,
        width=width,
        top_k=top_k,
        num_rows=num_rows,
        dtype=jnp.dtype(rows.dtype).name,
        out_dtype=jnp.dtype(out_dtype).name,
        shared_dtype=None if shared is None else jnp.dtype(shared.dtype).name,
    )

    def kernel(num_sms: int) -> jax.Array:
        chosen = config or choose_config(desc, num_sms)
        if reason := config_error(desc, chosen):
            raise NotImplementedError(reason)

        from pallas_kernels.combine.kernel_sm90 import combine_sm90  # here: importing it loads Pallas

        return combine_sm90(desc, chosen)(rows, row_of, weights, *([] if shared is None else [shared]))

    runs = dict(
        hopper=lambda: kernel(hopper_sms()),
        portable=lambda: kernel(portable_sms()),
        reference=lambda: combine_ref(desc, rows, row_of, weights, shared),
    )
    return first_that_runs("combine", runs, implementation)


def check_operands(shape: tuple[int, ...], row_of: jax.Array, weights: jax.Array, shared: jax.Array | None) -> None:
    """Raises the ValueError or TypeError of ``combine``. shape: of the rows."""
    if len(shape) != 2 or row_of.ndim != 2 or weights.shape != row_of.shape:
        raise ValueError(
            f"rows {shape}, row_of {row_of.shape}, weights {weights.shape}; expected (Mp, H), (T, top_k), (T, top_k)"
        )
    if row_of.dtype != jnp.int32 or weights.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise TypeError(
            f"row_of is {row_of.dtype} and weights {weights.dtype}; expected int32 and float32, bfloat16 or float16"
        )
    expected = (row_of.shape[0], shape[1])
    if shared is not None and shared.shape != expected:
        raise ValueError(f"shared has shape {shared.shape}, expected {expected}")
    if shared is not None and shared.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise TypeError(f"shared is {shared.dtype}; expected float32, bfloat16 or float16")
