"""Quantize rows of few columns, one a warp: four at a time in a warpgroup, whose warps never wait for each other.

Each block is one warpgroup and takes every num_blocks-th four of the rows:

    each warp loads its row (16 bytes a thread at a time) -> largest magnitude, by shuffles -> codes and scale
    for each place of its row: store codes and scale

Rows come from and go to any place, a place of their own for each warp, which a layout cannot say; so inline PTX moves
them between memory and an array (4, columns) with a row a warp. The codes are those of kernel_sm90.py, bit for bit.
"""

import functools
from collections.abc import Callable
from typing import Any

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
from pallas_kernels.common.e4m3_sm90 import e4m3_of_rows
from pallas_kernels.common.int8_sm90 import cast_int8_in
from pallas_kernels.common.numerics import int8_token_factors
from pallas_kernels.common.sm90 import WARPGROUP
from pallas_kernels.quantize_and_permute.config import LANES, WARPS, PermuteConfig, PermuteDesc, narrow_vector


def quantize_narrow_rows_sm90(desc: PermuteDesc, config: PermuteConfig) -> Callable[..., Any]:
    """The kernel: (x, [row_of], [rows (n,)]) -> (codes, scales). For configs of four rows at once, without error."""
    call = plgpu.kernel(
        functools.partial(_kernel, desc, config),
        out_type=[
            jax.ShapeDtypeStruct((desc.num_rows * desc.width,), desc.out_dtype),
            jax.ShapeDtypeStruct(desc.scale_shape, jnp.float32),
        ],
        grid=(config.num_blocks,),
        grid_names=("block",),
        num_threads=1,
        thread_name="warpgroup",
        compiler_params=mosaic.compiler_params(),
    )

    def run(x, *places):
        codes, scales = call(x.reshape(-1), *(p.reshape(-1) for p in places))
        return codes.reshape(desc.num_rows, desc.width), scales

    return run


def _kernel(desc: PermuteDesc, config: PermuteConfig, x: Any, *refs: Any) -> None:
    mosaic.begin()
    *places, codes, scales = refs
    thread = simt.thread_index()
    warp = lax.shift_right_logical(thread, jnp.full_like(thread, 5))
    is_first = (thread & (LANES - 1)) == 0
    block = lax.axis_index("block")

    def by_warp(rows):
        """Each warp's of four numbers, in all of its threads."""
        found, *others = [plgpu.layout_cast(jnp.full(thread.shape, row), simt.LANES) for row in rows]
        for number, row in enumerate(others, 1):
            found = jnp.where(warp == number, row, found)
        return found

    def four(i):
        """The block's i-th four rows of x; -1 where there is none."""
        items = [(block + i * config.num_blocks) * WARPS + warp for warp in range(WARPS)]
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

    fours = -(-desc.num_items // WARPS)
    mine = lax.div(fours - block + (config.num_blocks - 1), jnp.int32(config.num_blocks))
    lax.fori_loop(0, mine, step, four(0))


def row_layout(desc: PermuteDesc) -> Any:
    """Of an array (4, width): a row a warp, ``narrow_vector`` neighbouring columns a thread."""
    length = narrow_vector(desc)
    tiling = plgpu.Tiling(((WARPS, LANES * length), (length,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


def _load(x: Any, row: Any, thread: Any, desc: PermuteDesc) -> Any:
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


def _store(codes: Any, quantized: Any, row: Any, thread: Any, desc: PermuteDesc) -> None:
    """Codes (4, width) in ``row_layout`` to the rows of the flat ``codes`` that each warp names; -1: nowhere."""
    size = 8 * narrow_vector(desc)
    constraint = {16: "h", 32: "r", 64: "l"}[size]

    @simt.inline(plgpu.RefType(), row_layout(desc), simt.LANES, simt.LANES)
    def write(ctx, codes, quantized, row, thread):
        del ctx
        bits, own = ir.IntegerType.get_signless(size), simt.value_of(row)
        text = f"{{ .reg .pred p; setp.ge.s32 p, $2, 0; @p st.global.b{size} [$0], $1; }}"
        for register, address in zip(quantized.registers.flat, _addresses(codes, row, thread, desc), strict=True):
            simt.asm([address, mgpu.utils.bitcast(register, bits), own], text, f"l,{constraint},r,~{{memory}}")

    write(codes, quantized, row, thread)


def _addresses(ref: Any, row: Any, thread: Any, desc: PermuteDesc) -> list[Any]:
    """Of what a thread has of its warp's row, in the order of its registers."""
    i64 = ir.IntegerType.get_signless(64)
    size, length = mgpu.utils.bitwidth(ir.MemRefType(ref.type).element_type) // 8, narrow_vector(desc)

    def constant(value):
        return arith.constant(i64, ir.IntegerAttr.get(i64, value))

    lane = arith.andi(arith.extui(i64, simt.value_of(thread)), constant(LANES - 1))
    start = arith.addi(
        arith.muli(arith.extsi(i64, simt.value_of(row)), constant(desc.width * size)),
        arith.muli(lane, constant(length * size)),
    )
    start = arith.addi(llvm.ptrtoint(i64, mgpu.utils.memref_ptr(ref)), start)
    return [arith.addi(start, constant(place * size)) for place in range(0, desc.width, LANES * length)]


def _by_thread(values: Any, desc: PermuteDesc) -> Any:
    """The bits of float32 values (4,), a warp each, in its threads."""

    @simt.inline(row_layout(desc).reduce(1), result=plgpu.ShapeDtypeStruct((WARPGROUP,), jnp.int32, simt.LANES))
    def spread(ctx, values):
        del ctx
        return simt.wrap(arith.bitcast(ir.IntegerType.get_signless(32), simt.value_of(values)))

    return spread(values)
