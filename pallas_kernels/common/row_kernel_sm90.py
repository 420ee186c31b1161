"""The shell of kernels that work on rows: persistent CTAs, each of which takes every num_ctas-th item."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common import mosaic
from pallas_kernels.common.shapes import or_shapes
from pallas_kernels.common.types import Kernel, Scalar, Value


def row_kernel(
    body: Callable[..., None],
    out_type: Any,
    num_ctas: int,
    name: str,
    *,
    num_warpgroups: int = 1,
    scratch_types: Any = (),
) -> Kernel:
    """A kernel of ``num_ctas`` CTAs of ``num_warpgroups`` warpgroups.

    body: function of the refs of operands, outputs and scratch memory. Its axes are "cta" and "warpgroup". name: in
    profiles.
    """
    kernel = plgpu.kernel(
        body,
        out_type=out_type,
        grid=(num_ctas,),
        grid_names=("cta",),
        num_threads=num_warpgroups,
        thread_name="warpgroup",
        scratch_types=scratch_types,
        compiler_params=mosaic.compiler_params(),
        kernel_name=name,
    )
    return or_shapes(kernel, out_type)


def in_place_row_kernel(
    body: Callable[..., None], num_changed: int, out_types: Sequence[Any], num_ctas: int, name: str
) -> Kernel:
    """``row_kernel`` of one warpgroup for a kernel that changes its first ``num_changed`` operands where they lie.

    body: function of ``num_ctas`` and the refs of operands and of outputs of ``out_types``. The kernel returns the
    operands that it changes and the outputs. They are copied where the caller goes on using what they held.
    """

    mesh = plgpu.Mesh(grid=(num_ctas,), grid_names=("cta",), num_threads=1, thread_name="warpgroup")
    params = mosaic.compiler_params()
    kernel: Any = pl.kernel(functools.partial(body, num_ctas), mesh=mesh, compiler_params=params, name=name)

    def run(*operands):
        # The kernel writes into refs. Every ref of a call becomes an output that lies where its operand does, so
        # operands that it only reads are none.
        changed, read = operands[:num_changed], operands[num_changed:]
        state = (*changed, *(jax.lax.empty(one.shape, one.dtype) for one in out_types))
        return pl.run_state(lambda refs: kernel(*refs[:num_changed], *read, *refs[num_changed:]))(state)

    return or_shapes(run, out_types, num_changed)


def items_of(cta: Scalar, total: int, num_ctas: int) -> Value:
    """How many of ``total`` items fall to a CTA that takes every num_ctas-th, from its own index on."""
    return lax.div(total - cta + (num_ctas - 1), jnp.int32(num_ctas))


def for_items_of(cta: Scalar, total: int, num_ctas: int, body: Callable[[Value], None]) -> None:
    """Call ``body(item)`` for each item of a CTA."""

    def step(i, _):
        body(cta + i * num_ctas)
        return 0

    lax.fori_loop(0, items_of(cta, total, num_ctas), step, 0)
