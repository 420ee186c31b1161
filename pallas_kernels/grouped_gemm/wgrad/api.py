"""``grouped_wgrad``: for each expert the product of its rows of one matrix with its rows of another."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.common.device import hopper_sms
from pallas_kernels.common.implementations import first_that_runs
from pallas_kernels.grouped_gemm.wgrad.config import WgradConfig, WgradDesc, choose_config, config_error
from pallas_kernels.grouped_gemm.wgrad.reference import grouped_wgrad_ref


def grouped_wgrad(
    dy: jax.Array,
    x: jax.Array,
    first_row: jax.Array,
    num_rows: jax.Array,
    *,
    out_dtype: DTypeLike = jnp.bfloat16,
    config: WgradConfig | None = None,
    implementation: str | Sequence[str] | None = None,
) -> jax.Array:
    """The gradient of the weights of a grouped GEMM: out[e] = dy_e^T x_e over the rows of expert e, summed in float32.

    An expert's rows start at a multiple of 64. From its last row up to the next multiple of 64 one of both operands
    holds zeros and the other finite values.

    Args:
        dy: (Mp, N) bfloat16 or float16, gradients of the product's rows.
        x: (Mp, K) of dy's dtype, its rows.
        first_row: (E,) int32, the first row of each expert.
        num_rows: (E,) int32; an expert without rows gets zeros.
        out_dtype: of the result.
        config: of the Hopper kernel; None for its own choice.
        implementation: "hopper" or "reference", or several in the order to try; None tries them in this order.

    Returns (E, N, K), as the weights of the product are stored.

    Raises:
        ValueError, TypeError: a wrong call. NotImplementedError: no implementation can run it.
    """
    if dy.ndim != 2 or x.ndim != 2 or dy.shape[0] != x.shape[0]:
        raise ValueError(f"dy has shape {dy.shape} and x {x.shape}, expected (Mp, N) and (Mp, K)")
    if dy.dtype != x.dtype:
        raise TypeError(f"dy is {dy.dtype} and x is {x.dtype}; both operands have one dtype")
    for name, value in (("first_row", first_row), ("num_rows", num_rows)):
        if value.dtype != jnp.int32 or value.ndim != 1 or value.shape != num_rows.shape:
            raise ValueError(f"{name} is {value.dtype}{value.shape}, expected int32 (E,)")
    desc = WgradDesc(
        rows=x.shape[0],
        n=dy.shape[1],
        k=x.shape[1],
        num_experts=num_rows.shape[0],
        dtype=jnp.dtype(x.dtype).name,
        out_dtype=jnp.dtype(out_dtype).name,
    )

    def hopper():
        chosen = config or choose_config(desc, hopper_sms())
        if reason := config_error(desc, chosen):
            raise NotImplementedError(reason)

        from pallas_kernels.grouped_gemm.wgrad.kernel_sm90 import grouped_wgrad_sm90  # here: importing it loads Pallas

        return grouped_wgrad_sm90(desc, chosen)(dy, x, first_row, num_rows)

    runs = dict(hopper=hopper, reference=lambda: grouped_wgrad_ref(desc, dy, x, first_row, num_rows))
    return first_that_runs("grouped_wgrad", runs, implementation)
