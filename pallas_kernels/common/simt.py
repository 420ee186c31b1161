"""One int32 a thread: indexed loads, stores and counters that Pallas has no word for, in inline PTX.

Every vector here is (128,) int32 in layout ``LANES``, element i held by thread i of the warpgroup. A masked element
touches no memory. Accesses are volatile and in program order within a thread; between threads the caller places
``barrier`` (all warpgroups of the block). The interpreter cannot run these.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.common.mosaic import WARPGROUP

LANES = plgpu.Layout.WG_STRIDED((WARPGROUP,), vec_size=1)
_RESULT = plgpu.ShapeDtypeStruct((WARPGROUP,), jnp.int32, LANES)


def _inline(*arguments: Any, result: Any = None) -> Any:
    return plgpu.inline_mgpu(arg_types=arguments, return_type=result)


def thread_index() -> Any:
    """Index of each thread in its block: warpgroup * 128 + lane."""

    @_inline(result=_RESULT)
    def read(ctx):
        del ctx
        return _wrap(_asm([], "mov.u32 $0, %tid.x;", "=r", has_result=True))

    return read()


def constant(value: int) -> Any:
    """``value`` in every thread. (A constant of jnp has no layout of its own and cannot be handed to inline code.)"""

    @_inline(result=_RESULT)
    def make(ctx):
        del ctx
        return _wrap(_asm([], f"mov.b32 $0, {value};", "=r", has_result=True))

    return make()


def barrier() -> None:
    """Wait for all threads of the block; their memory accesses before it are visible after it."""

    @_inline()
    def wait(ctx):
        del ctx
        _asm([], "bar.sync 0;", "~{memory}")

    wait()


def load(ref: Any, index: Any, mask: Any, default: int) -> Any:
    """ref[index] where mask, else default. ref: (n,) int32 in shared or global memory."""

    @_inline(plgpu.RefType(), LANES, LANES, result=_RESULT)
    def read(ctx, ref, index, mask):
        del ctx
        space, address, constraint = _address(ref, index)
        text = f"{{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.b32 $0, {default}; @p ld.{space}.b32 $0, [$1]; }}"
        return _wrap(_asm([address, _value(mask)], text, f"=&r,{constraint},r,~{{memory}}", has_result=True))

    return read(ref, index, _as_int(mask))


def store(ref: Any, index: Any, value: Any, mask: Any) -> None:
    """ref[index] = value where mask."""

    @_inline(plgpu.RefType(), LANES, LANES, LANES)
    def write(ctx, ref, index, value, mask):
        del ctx
        space, address, constraint = _address(ref, index)
        text = f"{{ .reg .pred p; setp.ne.s32 p, $2, 0; @p st.{space}.b32 [$0], $1; }}"
        _asm([address, _value(value), _value(mask)], text, f"{constraint},r,r,~{{memory}}")

    write(ref, index, value, _as_int(mask))


def count(ref: Any, index: Any, mask: Any) -> Any:
    """Add 1 to ref[index] where mask and return what it held before, each thread's own; 0 where not. ref: shared
    memory.
    """

    @_inline(plgpu.RefType(), LANES, LANES, result=_RESULT)
    def add(ctx, ref, index, mask):
        del ctx
        space, address, constraint = _address(ref, index)
        text = f"{{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.b32 $0, 0; @p atom.{space}.add.u32 $0, [$1], 1; }}"
        return _wrap(_asm([address, _value(mask)], text, f"=&r,{constraint},r,~{{memory}}", has_result=True))

    return add(ref, index, _as_int(mask))


def _as_int(mask: Any) -> Any:
    return jnp.where(mask, jnp.ones(mask.shape, jnp.int32), jnp.zeros(mask.shape, jnp.int32))


def _asm(operands: list[Any], text: str, constraints: str, *, has_result: bool = False) -> Any:
    kind = ir.IntegerType.get_signless(32) if has_result else ir.Type.parse("!llvm.void")
    return llvm.inline_asm(kind, operands, text, constraints, has_side_effects=True, asm_dialect=0)


def _value(array: Any) -> Any:
    (register,) = array.registers.flat
    return vector.extract(register, [], [0])


def _wrap(value: Any) -> Any:
    register = vector.broadcast(ir.VectorType.get((1,), value.type), value)
    layout = mgpu.WGStridedFragLayout((WARPGROUP,), 1)
    return mgpu.FragmentedArray(_registers=np.array([register], dtype=object), _layout=layout, _is_signed=True)


def _address(ref: Any, index: Any) -> tuple[str, Any, str]:
    """(PTX state space, byte address of ref[index], its constraint)."""
    is_shared = mgpu.utils.is_smem_ref(ref)
    width = ir.IntegerType.get_signless(32 if is_shared else 64)
    base = llvm.ptrtoint(width, mgpu.utils.memref_ptr(ref))
    offset = _value(index)
    if not is_shared:
        offset = arith.extsi(width, offset)
    four = arith.constant(width, ir.IntegerAttr.get(width, 4))
    return ("shared" if is_shared else "global"), arith.addi(base, arith.muli(offset, four)), "r" if is_shared else "l"
