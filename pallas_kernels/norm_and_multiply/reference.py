"""norm_and_multiply in plain jnp."""

from typing import Any

import jax

from pallas_kernels.add_and_norm.reference import add_and_norm_ref
from pallas_kernels.grouped_gemm import grouped_gemm
from pallas_kernels.grouped_gemm.api import of_one_expert
from pallas_kernels.norm_and_multiply.config import NormProductDesc


def norm_and_multiply_ref(
    desc: NormProductDesc, of_norm: tuple[Any, ...], product: dict[str, Any]
) -> tuple[jax.Array, jax.Array]:
    """product: arguments of ``grouped_gemm`` but for its rows."""
    total, row = add_and_norm_ref(desc.norm, *of_norm)
    return total, grouped_gemm(row, **product, **of_one_expert(1, 1), implementation="reference")
