"""Quantize rows of few columns, one a warp: four at a time in a warpgroup, whose warps never wait for each other.

Each CTA is one warpgroup and takes every num_ctas-th four of the rows:

    each warp loads its row (16 bytes a thread at a time) -> largest magnitude, by shuffles -> codes and scale
    for each place of its row: store codes and scale

Each warp's row comes from and goes to a place of its own, which a layout cannot say. So inline PTX moves rows between
memory and an array (4, columns) with a row a warp. The codes are those of kernel_sm90.py, bit for bit.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.common import mosaic, simt
from pallas_kernels.common.numerics import int8_token_factors
from pallas_kernels.common.numerics_sm90 import cast_int8_in, e4m3_of_rows
from pallas_kernels.common.row_kernel_sm90 import items_of, row_kernel
from pallas_kernels.common.sm90 import LANES, WARPGROUP, WARPS
from pallas_kernels.common.types import Kernel, Layout, Ref, Value
from pallas_kernels.quantize_and_permute.config import PermuteConfig, PermuteDesc, narrow_vector


def quantize_narrow_rows_sm90(desc: PermuteDesc, config: PermuteConfig) -> Kernel:
    """The kernel: (x, [row_of], [rows (n,)]) -> (codes, scales). For configs of four rows at once."""
    assert desc.scale_shape is not None, "config_error refuses rows without a scale"
    out = [
        jax.ShapeDtypeStruct((desc.num_rows * desc.width,), desc.out_dtype),
        jax.ShapeDtypeStruct(desc.scale_shape, jnp.float32),
    ]
    call = row_kernel(functools.partial(_kernel, desc, config), out, config.num_ctas, "quantize_and_permute")

    def run(x, *places):
        codes, scales = call(x.reshape(-1), *(p.reshape(-1) for p in places))
        return codes.reshape(desc.num_rows, desc.width), scales

    return run


def _kernel(desc: PermuteDesc, config: PermuteConfig, x: Ref, *refs: Ref) -> None:
    mosaic.begin()
    *places, codes, scales = refs
    thread = simt.thread_index()
    warp = simt.warp_of(thread)
    is_first = (thread & (LANES - 1)) == 0
    cta = lax.axis_index("cta")

    def by_warp(rows):
        """Each warp's of four numbers, in all of its threads."""
        found, *others = [plgpu.layout_cast(jnp.full(thread.shape, row), simt.LANES) for row in rows]
        for number, row in enumerate(others, 1):
            found = jnp.where(warp == number, row, found)
        return found

    def four(i):
        """The CTA's i-th four rows of x; -1 where there is none."""
        items = [(cta + i * config.num_ctas) * WARPS + warp for warp in range(WARPS)]
        rows = (
            items if desc.num_named is None else [places[0][lax.min(t, jnp.int32(desc.num_items - 1))] for t in items]
        )
        return tuple(jnp.where(t < desc.num_items, row, -1) for t, row in zip(items, rows, strict=True))

    def quantize(rows):
        source = by_warp(rows)
        values = _load(x, lax.max(source, jnp.zeros_like(source)), thread, desc).astype(jnp.float32)
        amax = jnp.max(jnp.abs(values), axis=1)
        if desc.quantization == "e4m3_row":
            quantized, scale = e4m3_of_rows(values, amax)
        else:
            inverse, scale = int8_token_factors(amax)
            quantized = cast_int8_in(values * lax.broadcast_in_dim(inverse, values.shape, [0]), row_layout(desc))
        targets = [source]
        if desc.top_k:
            pairs = [source * desc.top_k + j for j in range(desc.top_k)]
            targets = [simt.load(places[0], pair, source >= 0, -1) for pair in pairs]
        scale = _by_thread(scale, desc)
        for target in targets:
            _store(codes, quantized, target, thread, desc)
            simt.store(scales, target, scale, (target >= 0) & is_first)

    def step(i, rows):
        following = four(i + 1)  # named while this four is worked on
        pl.when(functools.reduce(lax.max, rows) >= 0)(functools.partial(quantize, rows))
        return following

    lax.fori_loop(0, items_of(cta, -(-desc.num_items // WARPS), config.num_ctas), step, four(0))


def row_layout(desc: PermuteDesc) -> Layout:
    """Of an array (4, width): a row a warp, ``narrow_vector`` neighbouring columns a thread."""
    return mosaic.row_a_warp(narrow_vector(desc))


def _load(x: Ref, row: Value, thread: Value, desc: PermuteDesc) -> Value:
    """Rows of x, which is flat: (4, width) in ``row_layout``. row: each warp's, in all of its threads."""
    layout, shape = row_layout(desc), (WARPS, desc.width)
    result = plgpu.ShapeDtypeStruct(shape, jnp.dtype(desc.dtype), layout)

    @simt.inline(plgpu.RefType(), simt.LANES, simt.LANES, result=result)
    def read(ctx, x, row, thread):
        del ctx
        kind = ir.VectorType.get((narrow_vector(desc),), ir.MemRefType(x.type).element_type)
        registers = np.empty(layout.to_mgpu().registers_shape(shape), object)
        for i, address in enumerate(_addresses(x, row, thread, desc)):
            pointer = llvm.inttoptr(ir.Type.parse("!llvm.ptr<1>"), address)
            registers.flat[i] = llvm.load(kind, pointer, alignment=mgpu.utils.bitwidth(kind) // 8)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout.to_mgpu(), _is_signed=None)

    return read(x, row, thread)


def _store(codes: Ref, quantized: Value, row: Value, thread: Value, desc: PermuteDesc) -> None:
    """Codes (4, width) in ``row_layout`` to the rows of the flat ``codes`` that each warp names; -1: nowhere."""
    size = 8 * narrow_vector(desc)
    constraint = {16: "h", 32: "r", 64: "l"}[size]

    @simt.inline(plgpu.RefType(), row_layout(desc), simt.LANES, simt.LANES)
    def write(ctx, codes, quantized, row, thread):
        del ctx
        bits, own = simt.integer(size), simt.value_of(row)
        text = f"{{ .reg .pred p; setp.ge.s32 p, $2, 0; @p st.global.b{size} [$0], $1; }}"
        for register, address in zip(quantized.registers.flat, _addresses(codes, row, thread, desc), strict=True):
            simt.asm([address, mgpu.utils.bitcast(register, bits), own], text, f"l,{constraint},r,~{{memory}}")

    write(codes, quantized, row, thread)


def _addresses(
    ref: ir.Value, row: mgpu.FragmentedArray, thread: mgpu.FragmentedArray, desc: PermuteDesc
) -> list[ir.Value]:
    """Addresses of what a thread has of its warp's row, in the order of its registers."""
    i64, constant = simt.integer(64), simt.integer_constant
    size, length = mgpu.utils.bitwidth(ir.MemRefType(ref.type).element_type) // 8, narrow_vector(desc)

    lane = arith.andi(arith.extui(i64, simt.value_of(thread)), constant(LANES - 1))
    start = arith.addi(
        arith.muli(arith.extsi(i64, simt.value_of(row)), constant(desc.width * size)),
        arith.muli(lane, constant(length * size)),
    )
    start = arith.addi(simt.address_of(ref), start)
    return [arith.addi(start, constant(place * size)) for place in range(0, desc.width, LANES * length)]


def _by_thread(values: Value, desc: PermuteDesc) -> Value:
    """The bits of float32 values (4,), one a warp, in the threads of the warp."""

    @simt.inline(row_layout(desc).reduce(1), result=plgpu.ShapeDtypeStruct((WARPGROUP,), jnp.int32, simt.LANES))
    def spread(ctx, values):
        del ctx
        return simt.wrap(arith.bitcast(simt.integer(32), simt.value_of(values)))

    return spread(values)
