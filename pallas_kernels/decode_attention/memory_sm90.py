"""Inline PTX of decode attention: stores by element, and counting the CTAs that have ended their part."""

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from pallas_kernels.common import mosaic, simt
from pallas_kernels.common.types import Layout, Ref, Scalar, Value


def scatter(ref: Ref, values: Value, offsets: Value, layout: Layout = mosaic.WGMMA) -> None:
    """ref[offsets] = values where an offset is not negative. ref: (n,) of 16 bits an element, in global memory.

    values, offsets: of one shape, in ``layout``; offsets int32.
    """

    @simt.inline(plgpu.RefType(), layout, layout)
    def write(ctx, ref, values, offsets):
        del ctx
        base = simt.address_of(ref)
        text = "{ .reg .pred p; setp.ge.s32 p, $2, 0; @p st.global.b16 [$0], $1; }"
        for register, places in zip(values.registers.flat, offsets.registers.flat, strict=True):
            (length,) = ir.VectorType(register.type).shape
            halves = mgpu.utils.bitcast(register, ir.VectorType.get((length,), simt.integer(16)))
            for i in range(length):
                half, place = (vector.extract(x, [], [i]) for x in (halves, places))
                wide = arith.extsi(simt.integer(64), place)
                address = arith.addi(base, arith.muli(wide, simt.integer_constant(2)))
                simt.asm([address, half, place], text, "l,h,r,~{memory}")

    write(ref, values, offsets)


def arrive(arrivals: Ref, index: Scalar, expected: Scalar) -> Value:
    """How many CTAs have arrived at arrivals[index] before, () int32; the last of ``expected`` sets it back to zero.

    What this warpgroup stored to global memory before is visible to the CTAs that arrive later.
    """

    @simt.inline(
        plgpu.RefType(),
        simt.LANES,
        simt.LANES,
        result=plgpu.ShapeDtypeStruct((128,), jnp.int32, simt.LANES),
    )
    def count(ctx, ref, index, last):
        del ctx
        base = simt.address_of(ref)
        place = arith.extsi(simt.integer(64), simt.value_of(index))
        address = arith.addi(base, arith.muli(place, simt.integer_constant(4)))
        mgpu.utils.warpgroup_barrier()
        text = (
            "{ .reg .pred p; .reg .b32 t; mov.u32 t, %tid.x; and.b32 t, t, 127; setp.eq.s32 p, t, 0; mov.b32 $0, 0; "
            "@p fence.acq_rel.gpu; @p atom.relaxed.gpu.global.inc.u32 $0, [$1], $2; @p fence.acq_rel.gpu; }"
        )
        before = simt.asm([address, simt.value_of(last)], text, "=&r,l,r,~{memory}", has_result=True)
        mgpu.utils.warpgroup_barrier()
        return simt.wrap(before)

    nothing = simt.constant(0)
    return jnp.max(count(arrivals, nothing + index, nothing + (expected - 1)))
