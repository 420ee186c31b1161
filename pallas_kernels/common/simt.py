"""One value a thread: indexed loads, stores, counters and warp reductions that Pallas has no word for, in inline PTX.

Every vector here is (128,) in layout ``LANES``, int32 unless float32 is said, element i held by thread i of the
warpgroup. A masked element
touches no memory. Accesses are volatile and in program order within a thread; between threads the caller places
``barrier`` (all warpgroups of the block). The interpreter cannot run these.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.common.sm90 import WARPGROUP

LANES = plgpu.Layout.WG_STRIDED((WARPGROUP,), vec_size=1)
_RESULT = plgpu.ShapeDtypeStruct((WARPGROUP,), jnp.int32, LANES)
# How an element of a narrower type becomes the bits of a float32: PTX of the load, and from its register to $0.
_FLOAT_LOADS = {
    "float32": ("b32 $0, [$1]", ""),
    "bfloat16": ("u16 h, [$1]", "@p cvt.u32.u16 $0, h; @p shl.b32 $0, $0, 16;"),
    "float16": ("b16 h, [$1]", "@p cvt.f32.f16 $0, h;"),
}


def inline(*arguments: Any, result: Any = None) -> Any:
    """``plgpu.inline_mgpu`` of functions (ctx, *arguments)."""
    return plgpu.inline_mgpu(arg_types=arguments, return_type=result)


def thread_index() -> Any:
    """Index of each thread in its block: warpgroup * 128 + lane."""

    @inline(result=_RESULT)
    def read(ctx):
        del ctx
        return wrap(asm([], "mov.u32 $0, %tid.x;", "=r", has_result=True))

    return read()


def constant(value: int) -> Any:
    """``value`` in every thread. (A constant of jnp has no layout of its own and cannot be handed to inline code.)"""

    @inline(result=_RESULT)
    def make(ctx):
        del ctx
        return wrap(asm([], f"mov.b32 $0, {value};", "=r", has_result=True))

    return make()


def barrier() -> None:
    """Wait for all threads of the block; their memory accesses before it are visible after it."""

    @inline()
    def wait(ctx):
        del ctx
        asm([], "bar.sync 0;", "~{memory}")

    wait()


def load(ref: Any, index: Any, mask: Any, default: int) -> Any:
    """ref[index] where mask, else default. ref: (n,) int32 in shared or global memory."""

    @inline(plgpu.RefType(), LANES, LANES, result=_RESULT)
    def read(ctx, ref, index, mask):
        del ctx
        space, address, constraint = _address(ref, index)
        text = f"{{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.b32 $0, {default}; @p ld.{space}.b32 $0, [$1]; }}"
        return wrap(asm([address, value_of(mask)], text, f"=&r,{constraint},r,~{{memory}}", has_result=True))

    return read(ref, index, _as_int(mask))


def load_float(ref: Any, index: Any, mask: Any, dtype: Any, default: float) -> Any:
    """ref[index] as float32 where mask, else default. ref: (n,) float32, bfloat16 or float16 in global memory."""
    dtype = jnp.dtype(dtype)
    fetch, widen = _FLOAT_LOADS[dtype.name]
    bits = int(np.float32(default).view(np.uint32))

    @inline(plgpu.RefType(), LANES, LANES, result=_RESULT)
    def read(ctx, ref, index, mask):
        del ctx
        space, address, constraint = _address(ref, index, dtype.itemsize)
        text = (
            f"{{ .reg .pred p; .reg .b16 h; setp.ne.s32 p, $2, 0; mov.b32 $0, {bits}; @p ld.{space}.{fetch}; {widen} }}"
        )
        return wrap(asm([address, value_of(mask)], text, f"=&r,{constraint},r,~{{memory}}", has_result=True))

    return lax.bitcast_convert_type(read(ref, index, _as_int(mask)), jnp.float32)


def load_bits(ref: Any, index: Any, mask: Any, itemsize: int) -> Any:
    """The 2 or 4 bytes of ref[index], zeros above, where mask; else 0. ref: (n,) in global memory."""
    fetch = {2: "ld.{}.u16 h, [$1]; @p cvt.u32.u16 $0, h;", 4: "ld.{}.b32 $0, [$1];"}[itemsize]

    @inline(plgpu.RefType(), LANES, LANES, result=_RESULT)
    def read(ctx, ref, index, mask):
        del ctx
        space, address, constraint = _address(ref, index, itemsize)
        text = f"{{ .reg .pred p; .reg .b16 h; setp.ne.s32 p, $2, 0; mov.b32 $0, 0; @p {fetch.format(space)} }}"
        return wrap(asm([address, value_of(mask)], text, f"=&r,{constraint},r,~{{memory}}", has_result=True))

    return read(ref, index, _as_int(mask))


def store_bits(ref: Any, index: Any, value: Any, mask: Any, itemsize: int) -> None:
    """The lower 2 or all 4 bytes of value to ref[index] where mask. ref: (n,) in global memory."""
    put = {2: "cvt.u16.u32 h, $1; @p st.{}.u16 [$0], h;", 4: "@p st.{}.b32 [$0], $1;"}[itemsize]

    @inline(plgpu.RefType(), LANES, LANES, LANES)
    def write(ctx, ref, index, value, mask):
        del ctx
        space, address, constraint = _address(ref, index, itemsize)
        text = f"{{ .reg .pred p; .reg .b16 h; setp.ne.s32 p, $2, 0; {put.format(space)} }}"
        asm([address, value_of(value), value_of(mask)], text, f"{constraint},r,r,~{{memory}}")

    write(ref, index, value, _as_int(mask))


def warp_max(value: Any) -> Any:
    """Largest of the 32 values of each warp, in all its threads."""
    return _warp_reduce(value, "max")


def warp_min(value: Any) -> Any:
    """Least of the 32 values of each warp, in all its threads."""
    return _warp_reduce(value, "min")


def _warp_reduce(value: Any, op: str) -> Any:
    @inline(LANES, result=_RESULT)
    def reduce(ctx, value):
        del ctx
        return wrap(asm([value_of(value)], f"redux.sync.{op}.s32 $0, $1, 0xffffffff;", "=r,r", has_result=True))

    return reduce(value)


def warp_sum(value: Any) -> Any:
    """Sum of the 32 float32 values of each warp, in all its threads, always in the same order."""

    for distance in (16, 8, 4, 2, 1):

        @inline(LANES, result=_RESULT)
        def other(ctx, value, distance=distance):
            del ctx
            text = f"shfl.sync.bfly.b32 $0, $1, {distance}, 31, 0xffffffff;"
            return wrap(asm([value_of(value)], text, "=r,r", has_result=True))

        value = value + lax.bitcast_convert_type(other(lax.bitcast_convert_type(value, jnp.int32)), jnp.float32)
    return value


def store(ref: Any, index: Any, value: Any, mask: Any) -> None:
    """ref[index] = value where mask. ref: 32 bits an element; a float32 is given as its bits."""

    @inline(plgpu.RefType(), LANES, LANES, LANES)
    def write(ctx, ref, index, value, mask):
        del ctx
        space, address, constraint = _address(ref, index)
        text = f"{{ .reg .pred p; setp.ne.s32 p, $2, 0; @p st.{space}.b32 [$0], $1; }}"
        asm([address, value_of(value), value_of(mask)], text, f"{constraint},r,r,~{{memory}}")

    write(ref, index, value, _as_int(mask))


def count(ref: Any, index: Any, mask: Any) -> Any:
    """Add 1 to ref[index] where mask and return what it held before, each thread's own; 0 where not. ref: shared
    memory.
    """

    @inline(plgpu.RefType(), LANES, LANES, result=_RESULT)
    def add(ctx, ref, index, mask):
        del ctx
        space, address, constraint = _address(ref, index)
        text = f"{{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.b32 $0, 0; @p atom.{space}.add.u32 $0, [$1], 1; }}"
        return wrap(asm([address, value_of(mask)], text, f"=&r,{constraint},r,~{{memory}}", has_result=True))

    return add(ref, index, _as_int(mask))


def _as_int(mask: Any) -> Any:
    return jnp.where(mask, jnp.ones(mask.shape, jnp.int32), jnp.zeros(mask.shape, jnp.int32))


def asm(operands: list[Any], text: str, constraints: str, *, has_result: bool = False, bits: int = 32) -> Any:
    """Inline PTX that is neither dropped nor moved past another. bits: of its result."""
    kind = ir.IntegerType.get_signless(bits) if has_result else ir.Type.parse("!llvm.void")
    return llvm.inline_asm(kind, operands, text, constraints, has_side_effects=True, asm_dialect=0)


def value_of(array: Any) -> Any:
    """Each thread's value of an array of one element a thread."""
    (register,) = array.registers.flat
    return vector.extract(register, [], [0])


def wrap(value: Any) -> Any:
    """A result in layout ``LANES`` of each thread's value."""
    register = vector.broadcast(ir.VectorType.get((1,), value.type), value)
    layout = mgpu.WGStridedFragLayout((WARPGROUP,), 1)
    return mgpu.FragmentedArray(_registers=np.array([register], dtype=object), _layout=layout, _is_signed=True)


def _address(ref: Any, index: Any, itemsize: int = 4) -> tuple[str, Any, str]:
    """(PTX state space, byte address of ref[index], its constraint)."""
    is_shared = mgpu.utils.is_smem_ref(ref)
    width = ir.IntegerType.get_signless(32 if is_shared else 64)
    base = llvm.ptrtoint(width, mgpu.utils.memref_ptr(ref))
    offset = value_of(index)
    if not is_shared:
        offset = arith.extsi(width, offset)
    size = arith.constant(width, ir.IntegerAttr.get(width, itemsize))
    return ("shared" if is_shared else "global"), arith.addi(base, arith.muli(offset, size)), "r" if is_shared else "l"
