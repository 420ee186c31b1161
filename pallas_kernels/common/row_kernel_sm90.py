"""The shell of kernels that work on rows: persistent CTAs, each of which takes every num_ctas-th item."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common import mosaic
from pallas_kernels.common.types import Kernel, Scalar, Value


def row_kernel(
    body: Callable[..., None], out_type: Any, num_ctas: int, *, num_warpgroups: int = 1, scratch_types: Any = ()
) -> Kernel:
    """A kernel of ``num_ctas`` CTAs of ``num_warpgroups`` warpgroups.

    body: function of the refs of operands, outputs and scratch memory. Its axes are "cta" and "warpgroup".
    """
    return plgpu.kernel(
        body,
        out_type=out_type,
        grid=(num_ctas,),
        grid_names=("cta",),
        num_threads=num_warpgroups,
        thread_name="warpgroup",
        scratch_types=scratch_types,
        compiler_params=mosaic.compiler_params(),
    )


def items_of(cta: Scalar, total: int, num_ctas: int) -> Value:
    """How many of ``total`` items fall to a CTA that takes every num_ctas-th, from its own index on."""
    return lax.div(total - cta + (num_ctas - 1), jnp.int32(num_ctas))


def for_items_of(cta: Scalar, total: int, num_ctas: int, body: Callable[[Value], None]) -> None:
    """Call ``body(item)`` for each item of a CTA."""

    def step(i, _):
        body(cta + i * num_ctas)
        return 0

    lax.fori_loop(0, items_of(cta, total, num_ctas), step, 0)
