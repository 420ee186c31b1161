"""The shell of kernels that work on rows: persistent CTAs, each of which takes every num_ctas-th item."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
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


def in_place_row_kernel(body: Callable[..., None], num_changed: int, out_type: Any, num_ctas: int) -> Kernel:
    """``row_kernel`` of one warpgroup for a kernel that changes its first ``num_changed`` operands where they lie.

    body: function of ``num_ctas`` and the refs of operands and of one output of ``out_type``. The kernel returns the
    operands that it changes and the output. They are copied where the caller goes on using what they held.
    """

    def run(*operands):
        def with_refs(refs):
            mesh = plgpu.Mesh(grid=(num_ctas,), grid_names=("cta",), num_threads=1, thread_name="warpgroup")
            pl.core_map(mesh, compiler_params=mosaic.compiler_params())(lambda: body(num_ctas, *refs))

        state = (*operands, jax.lax.empty(out_type.shape, out_type.dtype))
        changed = pl.run_state(with_refs)(state)
        return *changed[:num_changed], changed[-1]

    return run


def items_of(cta: Scalar, total: int, num_ctas: int) -> Value:
    """How many of ``total`` items fall to a CTA that takes every num_ctas-th, from its own index on."""
    return lax.div(total - cta + (num_ctas - 1), jnp.int32(num_ctas))


def for_items_of(cta: Scalar, total: int, num_ctas: int, body: Callable[[Value], None]) -> None:
    """Call ``body(item)`` for each item of a CTA."""

    def step(i, _):
        body(cta + i * num_ctas)
        return 0

    lax.fori_loop(0, items_of(cta, total, num_ctas), step, 0)
