"""``norm_and_multiply``: a residual sum, its RMSNorm and the product of that with weights."""

from collections.abc import Sequence
from typing import Any

import jax
from jax.typing import DTypeLike

from pallas_kernels.add_and_norm.api import Operands as NormOperands
from pallas_kernels.add_and_norm.api import describe_norm, kernel_operands
from pallas_kernels.common.device import hopper_sms
from pallas_kernels.common.implementations import first_that_runs
from pallas_kernels.grouped_gemm.api import Operands, describe_one_expert, flattened
from pallas_kernels.grouped_gemm.vector import VectorConfig
from pallas_kernels.norm_and_multiply.config import NormProductDesc, choose_config, config_error
from pallas_kernels.norm_and_multiply.reference import norm_and_multiply_ref


def norm_and_multiply(
    x: jax.Array,
    weight: jax.Array,
    addend: jax.Array | None,
    w: jax.Array | tuple[jax.Array, ...],
    *,
    eps: float,
    bias: jax.Array | None = None,
    w_bias: jax.Array | tuple[jax.Array, ...] | None = None,
    out_dtype: DTypeLike | None = None,
    config: VectorConfig | None = None,
    implementation: str | Sequence[str] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """(x + addend + bias, W norm of that + b): ``add_and_norm`` of one token, and ``grouped_gemm`` of its norm.

    The norm is rounded to x's dtype in between.

    Args:
        x: (1, H).
        weight: (H,) of the norm, of the same dtype.
        addend: (1, H) of the same dtype, or partial sums (P, R, H), as of ``add_and_norm``; None for zeros.
        w: (1, N, H) of x's dtype; a tuple gives the products of several weights side by side, N being their sum.
        eps, bias: as of ``add_and_norm``.
        w_bias: (1, N) float, a tuple where w is one; None for zeros.
        out_dtype: of the product; None for that of x.
        config: of the Hopper kernel; None for its own choice.
        implementation: "hopper" or "reference", or several in the order to try; None tries them in this order.

    Raises:
        ValueError, TypeError: a wrong call. NotImplementedError: no implementation can run it.
    """
    out_dtype = x.dtype if out_dtype is None else out_dtype
    desc, of_norm, of_product = describe(x, weight, addend, w, eps=eps, bias=bias, w_bias=w_bias, out_dtype=out_dtype)

    def hopper():
        chosen = config or choose_config(desc, hopper_sms())
        if reason := config_error(desc, chosen):
            raise NotImplementedError(reason)

        # here: importing it loads Pallas
        from pallas_kernels.norm_and_multiply.kernel_sm90 import norm_and_multiply_sm90, product_names

        flat = flattened(of_product)
        named = {name: flat[name] for name in product_names(desc)}
        *total, product = norm_and_multiply_sm90(desc, chosen)(kernel_operands(of_norm), named)
        return total[0] if total else x, product

    product: Any = dict(w=w, bias=w_bias, out_dtype=out_dtype)
    runs = dict(hopper=hopper, reference=lambda: norm_and_multiply_ref(desc, of_norm, product))
    return first_that_runs("norm_and_multiply", runs, implementation)


def describe(
    x: jax.Array,
    weight: jax.Array,
    addend: jax.Array | None,
    w: jax.Array | tuple[jax.Array, ...],
    *,
    eps: float,
    bias: jax.Array | None,
    w_bias: jax.Array | tuple[jax.Array, ...] | None,
    out_dtype: DTypeLike,
) -> tuple[NormProductDesc, NormOperands, Operands]:
    """The description of a call, and the operands of its norm and of its product; all are checked here."""
    if x.ndim != 2 or x.shape[0] != 1:
        raise ValueError(f"x has shape {x.shape}, expected (1, H): one token")
    for one in w if isinstance(w, tuple) else (w,):
        if one.ndim != 3 or one.shape[0] != 1:
            raise ValueError(f"w has shape {one.shape}, expected (1, N, {x.shape[1]})")
    norm, of_norm = describe_norm(x, weight, addend, eps=eps, bias=bias)
    gemm, of_product = describe_one_expert(x, 1, w, w_bias, out_dtype)
    return NormProductDesc(norm, gemm), of_norm, of_product
