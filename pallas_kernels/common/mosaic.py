"""Pallas Mosaic GPU as our kernels use it: one spelling for jax 0.10.2 and 0.11.2.

Everything here is static or emits code inside a kernel; ``begin`` alone depends on the device. Facts of the chip are in
sm90.py.
"""

import inspect
import os
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import nvvm

from pallas_kernels.common.device import may_overlap
from pallas_kernels.common.sm90 import LANES, WARPS
from pallas_kernels.common.types import Dtype, Layout, Ref, Scalar, TileRef, Value

WGMMA = plgpu.Layout.WGMMA
Accumulator = plgpu.WGMMAAccumulatorRef
ROWS = WGMMA.reduce(1)  # one value per row of an accumulator
COLUMNS = WGMMA.reduce(0)  # one value per column of an accumulator

# Whether inline code may be handed a reference to another device's memory.
INLINE_TAKES_REMOTE = jax.__version_info__ >= (0, 11)
# Whether a kernel may be started while the one before it runs (``begin``). MOE_JAX_PDL=0 in the environment turns it
# off, for measurements; it is read once, at import.
USES_PDL = os.environ.get("MOE_JAX_PDL") != "0"
_LOAD_NEEDS_INDEX = inspect.signature(plgpu.load).parameters["idx"].default is inspect.Parameter.empty


def compiler_params(**overrides: Any) -> plgpu.CompilerParams:
    """The parameters every kernel of ours is built with.

    Warpgroup semantics are named because the default differs (Lane in 0.10, Warpgroup in 0.11). Barriers around shared
    memory accesses are placed by hand: what a warpgroup reads of shared memory that it writes, too, is its own output
    slot, or lies behind a barrier of those who share it. approx_math selects ex2.approx (2 ulp) for exponentials.
    """
    return plgpu.CompilerParams(
        lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        unsafe_no_auto_barriers=True,
        approx_math=True,
        **overrides,
    )


def begin() -> None:
    """Wait for the kernels before this one: the first statement of every kernel body, in all of its warpgroups.

    A kernel with this statement is launched with programmatic stream serialization (programmatic dependent launch,
    PDL). That needs jax 0.11; jax 0.10 emits the instructions alone, which then do nothing. The kernel's CTAs may be
    placed, and its barriers and descriptors set up, while the last CTAs of the kernel before it still run; so nothing
    in front of the statement may read or write global memory. The wait returns when all earlier work of the stream is
    complete and visible. Only then is the next kernel let in: at most two kernels overlap, and all before them are
    complete. A kernel launched as usual, as XLA's are, waits for all of the one before it, and is waited for. In XLA's
    command buffers each call is a graph of its own, and nothing overlaps (jaxlib 0.11.2). torch_bridge launches as XLA
    does without command buffers. GPUs below sm_90 have no such launches: there the statement is nothing.
    """
    if USES_PDL and may_overlap():
        plgpu.griddepcontrol_wait()
        plgpu.griddepcontrol_launch_dependents()


def row_a_warp(vector: int) -> Layout:
    """Of an array (4, 32 * vector) or a multiple of it: a row a warp, ``vector`` neighbouring columns a thread."""
    tiling = plgpu.Tiling(((WARPS, LANES * vector), (vector,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


def load(ref: Ref, *, layout: Layout = None, optimized: bool = True) -> Value:
    """``plgpu.load`` of a whole ref; 0.10 requires an index, 0.11 deprecates it."""
    index = ((),) if _LOAD_NEEDS_INDEX else ()
    load_ref: Any = plgpu.load
    return load_ref(ref, *index, layout=layout, optimized=optimized)


def release(barrier: TileRef) -> None:
    """Arrive on ``barrier`` when this warpgroup has itself read shared memory that a TMA copy overwrites next.

    The arrival alone orders the reads before other threads' accesses, but not before TMA copies, which take another
    path to memory (PTX: the async proxy). A warpgroup whose wgmmas did all the reading needs no fence.
    """
    inline: Any = plgpu.inline_mgpu(arg_types=())
    inline(fence_async_shared_cta)()
    plgpu.barrier_arrive(barrier)


def fence_async_shared_cta(ctx: Any) -> None:
    """The name is the one by which the GPU interpreter of JAX knows it."""
    del ctx
    nvvm.fence_proxy(nvvm.ProxyKind.async_shared, space=nvvm.SharedSpace.shared_cta)


def tiled(dtype: Dtype, swizzle: int | None) -> tuple[plgpu.TilingTransform, plgpu.SwizzleTransform]:
    """Transforms of a shared-memory tile as wgmma and the TMA copies agree on it."""
    assert swizzle is not None, "config_error refuses rows that no swizzle divides"
    return plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(swizzle)


def column_predicate(n: int, tile: int, start: Scalar) -> Any:
    """Whether an output of N columns has those of a TMA store from ``start`` on; None where tiles always lie inside.

    Mosaic itself drops a dimension of one element together with its index, so that a store past an output one swizzled
    tile wide would land in it.
    """
    return None if n % tile == 0 else start < n
