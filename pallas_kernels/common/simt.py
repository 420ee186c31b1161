"""One value a thread: indexed loads, stores, counters and warp reductions that Pallas has no word for, in inline PTX.

Every vector is (128,) in layout ``LANES``: thread i of the warpgroup holds element i. Vectors are int32 unless a
docstring says float32. A masked element touches no memory. Accesses are volatile and in program order within a thread.
Between threads the caller places ``barrier``, which all warpgroups of the CTA reach. The interpreter cannot run these.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from pallas_kernels.common import sm90
from pallas_kernels.common.types import Dtype, Layout, Ref, Value

LANES = plgpu.Layout.WG_STRIDED((sm90.WARPGROUP,), vec_size=1)
_RESULT = plgpu.ShapeDtypeStruct((sm90.WARPGROUP,), jnp.int32, LANES)
# Shape and element type of ``mma.sync``.
_MMA = {
    "bfloat16": ("m16n8k16", "bf16"),
    "float16": ("m16n8k16", "f16"),
    "int8": ("m16n8k32", "s8"),
    "float8_e4m3fn": ("m16n8k32", "e4m3"),
}
# How an element of a narrower type becomes the bits of a float32: PTX of the load, and from its register to $0.
_FLOAT_LOADS = {
    "float32": ("b32 $0, [$1]", ""),
    "bfloat16": ("u16 h, [$1]", "@p cvt.u32.u16 $0, h; @p shl.b32 $0, $0, 16;"),
    "float16": ("b16 h, [$1]", "@p cvt.f32.f16 $0, h;"),
}


def inline(*arguments: Any, result: Any = None) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """``plgpu.inline_mgpu`` of functions (ctx, *arguments). arguments: layouts or ``plgpu.RefType``."""
    return plgpu.inline_mgpu(arg_types=arguments, return_type=result)


def map_registers(
    function: Callable[..., ir.Value], layout: Layout, *arrays: Value, dtype: Dtype = jnp.float32
) -> Value:
    """Apply ``function`` to the registers of arrays of one shape in ``layout``; each register is an MLIR vector.

    The function returns a vector of as many elements of ``dtype``.
    """
    result = plgpu.ShapeDtypeStruct(arrays[0].shape, jnp.dtype(dtype), layout)
    is_signed = True if jnp.issubdtype(dtype, jnp.integer) else None

    @inline(*[layout] * len(arrays), result=result)
    def apply(ctx, first, *others):
        del ctx
        registers = np.empty_like(first.registers)
        for index, register in enumerate(first.registers.flat):
            registers.flat[index] = function(register, *(other.registers.flat[index] for other in others))
        return mgpu.FragmentedArray(_registers=registers, _layout=first.layout, _is_signed=is_signed)

    return apply(*arrays)


def thread_index() -> Value:
    """Index of each thread in its CTA: warpgroup * 128 + lane."""

    @inline(result=_RESULT)
    def read(ctx):
        del ctx
        return wrap(asm([], "mov.u32 $0, %tid.x;", "=r", has_result=True))

    return read()


def warp_of(thread: Value) -> Value:
    """Warp of each thread index, or of what else is counted so."""
    return lax.shift_right_logical(thread, jnp.full_like(thread, sm90.LANES.bit_length() - 1))


def constant(value: int) -> Value:
    """``value`` in every thread. (A constant of jnp has no layout of its own and cannot be handed to inline code.)"""

    @inline(result=_RESULT)
    def make(ctx):
        del ctx
        return wrap(asm([], f"mov.b32 $0, {value};", "=r", has_result=True))

    return make()


def barrier() -> None:
    """Wait for all threads of the CTA; their memory accesses before it are visible after it."""

    _emit("bar.sync 0;")


def _emit(text: str) -> None:
    @inline()
    def emit(ctx):
        del ctx
        asm([], text, "~{memory}")

    emit()


def load(ref: Ref, index: Value, mask: Value, default: int) -> Value:
    """ref[index] where mask, else default. ref: (n,) int32 in shared or global memory."""
    text = "{{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.b32 $0, {default}; @p ld.{space}.b32 $0, [$1]; }}"
    return _masked_read(ref, index, mask, text, default=default)


def load_float(ref: Ref, index: Value, mask: Value, default: float) -> Value:
    """ref[index] as float32 where mask, else default. ref: (n,) float32, bfloat16 or float16."""
    dtype = jnp.dtype(ref.dtype)
    fetch, widen = _FLOAT_LOADS[dtype.name]
    text = f"mov.b32 $0, {{default}}; @p ld.{{space}}.{fetch}; {widen}"
    text = "{{ .reg .pred p; .reg .b16 h; setp.ne.s32 p, $2, 0; " + text + " }}"
    bits = _masked_read(ref, index, mask, text, int(np.float32(default).view(np.uint32)), dtype.itemsize)
    return lax.bitcast_convert_type(bits, jnp.float32)


def load_bits(ref: Ref, index: Value, mask: Value, itemsize: int) -> Value:
    """The 1, 2 or 4 bytes of ref[index], zeros above, where mask; else 0. ref: (n,)."""
    fetch = {1: "ld.{space}.u8 h, [$1]; @p cvt.u32.u16 $0, h;"}
    fetch |= {2: "ld.{space}.u16 h, [$1]; @p cvt.u32.u16 $0, h;", 4: "ld.{space}.b32 $0, [$1];"}
    text = "{{ .reg .pred p; .reg .b16 h; setp.ne.s32 p, $2, 0; mov.b32 $0, {default}; @p " + fetch[itemsize] + " }}"
    return _masked_read(ref, index, mask, text, 0, itemsize)


def count(ref: Ref, index: Value, mask: Value) -> Value:
    """Add 1 to ref[index] where mask and return what it held before, each thread's own; 0 where not.

    ref: (n,) int32 in shared memory.
    """
    text = "{{ .reg .pred p; setp.ne.s32 p, $2, 0; mov.b32 $0, {default}; @p atom.{space}.add.u32 $0, [$1], 1; }}"
    return _masked_read(ref, index, mask, text)


def _masked_read(ref: Ref, index: Value, mask: Value, text: str, default: int = 0, itemsize: int = 4) -> Value:
    """text: PTX of $0 from the address $1 under the mask $2, with {space} and {default} to be filled in."""

    @inline(plgpu.RefType(), LANES, LANES, result=_RESULT)
    def read(ctx, ref, index, mask):
        del ctx
        space, address, constraint = _address(ref, index, itemsize)
        ptx = text.format(space=space, default=default)
        return wrap(asm([address, value_of(mask)], ptx, f"=&r,{constraint},r,~{{memory}}", has_result=True))

    return read(ref, index, _as_int(mask))


def load_words(ref: Ref, index: Value, count: int, mask: Value | None = None) -> tuple[Value, ...]:
    """ref[index : index + count] where mask, else 0: 1, 2 or 4 words in one load. None: everywhere.

    ref: (n,) int32 or float32, whose bits are returned; index: a multiple of count.
    """
    given = () if mask is None else (_as_int(mask),)
    targets = [f"${i}" for i in range(count)]
    begin = "".join(f" mov.b32 {target}, 0;" for target in targets)
    begin = "" if mask is None else f".reg .pred p; setp.ne.s32 p, ${count + 1}, 0;{begin} @p "
    vector, target = ("", targets[0]) if count == 1 else (f".v{count}", f"{{{', '.join(targets)}}}")

    @inline(plgpu.RefType(), LANES, *[LANES] * len(given), result=(_RESULT,) * count)
    def read(ctx, ref, index, *given):
        del ctx
        space, address, constraint = _address(ref, index, 4)
        text = f"{{ {begin}ld.{space}{vector}.b32 {target}, [${count}]; }}"
        operands = [address, *map(value_of, given)]
        constraints = f"{constraint}{',r' * len(given)},~{{memory}}"
        return tuple(map(wrap, asm_of_several(operands, text, constraints, count, is_early=mask is not None)))

    return read(ref, index, *given)


def load_floats(ref: Ref, index: Value, mask: Value, count: int) -> tuple[Value, ...]:
    """ref[index : index + count] where mask, else 0: 1, 2 or 4 in one load. ref: (n,) float32; index: a multiple of
    count."""
    words = load_words(ref, index, count, mask)
    return tuple(lax.bitcast_convert_type(word, jnp.float32) for word in words)


CHUNK = 16  # bytes of a copy


def copy(
    source: Ref,
    index: Value,
    target: Ref,
    place: Value,
    is_inside: Value | None = None,
    mask: Value | None = None,
    *,
    ahead: tuple[int, int] = (0, 0),
    l1: bool = False,
) -> None:
    """Start to copy 16 bytes from global to shared memory where mask; zeros where not ``is_inside``. None: everywhere.

    index, place: in 16 bytes, ``ahead`` being added to them. l1: the source is kept in the first cache, for other
    warps. The copies of a thread since the last ``end_copies`` are a group.
    """
    begin, given = "", [_as_int(value) for value in (is_inside, mask) if value is not None]
    if is_inside is not None:
        begin += " .reg .b32 n; setp.ne.s32 p, $2, 0; selp.b32 n, 16, 0, p;"
    if mask is not None:
        begin += f" setp.ne.s32 p, ${1 + len(given)}, 0; @p"
    from_byte, to_byte = (CHUNK * count for count in ahead)
    size = ", n" if is_inside is not None else ""
    op = "cp.async." + ("ca.shared.global" if l1 else "cg.shared.global.L2::128B")
    text = f"{{ .reg .pred p;{begin} {op} [$0 + {to_byte}], [$1 + {from_byte}], {CHUNK}{size}; }}"

    @inline(plgpu.RefType(), LANES, plgpu.RefType(), LANES, *[LANES] * len(given))
    def start(ctx, source, index, target, place, *given):
        del ctx
        _, address, _ = _address(source, index, CHUNK)
        _, own, _ = _address(target, place, CHUNK)
        asm([own, address, *map(value_of, given)], text, "r,l" + ",r" * len(given) + ",~{memory}")

    start(source, index, target, place, *given)


def end_copies() -> None:
    """End a group of copies, which may be empty."""
    _emit("cp.async.commit_group;")


def wait_for_copies(newest: int) -> None:
    """Until all groups of copies of a warp's threads, but for the ``newest`` ones, are complete and visible to it."""
    _emit(f"cp.async.wait_group {newest}; bar.warp.sync 0xffffffff;")


def store(ref: Ref, index: Value, value: Value, mask: Value | bool) -> None:
    """ref[index] = value where mask. ref: 32 bits an element; a float32 is given as its bits."""
    _masked_write(ref, index, value, mask, "{{ .reg .pred p; setp.ne.s32 p, $2, 0; @p st.{space}.b32 [$0], $1; }}", 4)


def store_bits(ref: Ref, index: Value, value: Value, mask: Value, itemsize: int) -> None:
    """The lower 1 or 2, or all 4 bytes of value to ref[index] where mask. ref: (n,) in global memory."""
    put = {1: "cvt.u16.u32 h, $1; @p st.{space}.u8 [$0], h;"}
    put |= {2: "cvt.u16.u32 h, $1; @p st.{space}.u16 [$0], h;", 4: "@p st.{space}.b32 [$0], $1;"}
    text = "{{ .reg .pred p; .reg .b16 h; setp.ne.s32 p, $2, 0; " + put[itemsize] + " }}"
    _masked_write(ref, index, value, mask, text, itemsize)


def set_bits(ref: Ref, index: Value, bits: Value, mask: Value) -> None:
    """Set these bits of ref[index] where mask, whatever other threads set. ref: (n,) int32."""
    text = "{{ .reg .pred p; setp.ne.s32 p, $2, 0; @p red.{space}.or.b32 [$0], $1; }}"
    _masked_write(ref, index, bits, mask, text, 4)


def _masked_write(ref: Ref, index: Value, value: Value, mask: Value | bool, text: str, itemsize: int) -> None:
    """text: PTX of a store of $1 to the address $0 under the mask $2, with {space} to be filled in."""

    @inline(plgpu.RefType(), LANES, LANES, LANES)
    def write(ctx, ref, index, value, mask):
        del ctx
        space, address, constraint = _address(ref, index, itemsize)
        operands = [address, value_of(value), value_of(mask)]
        asm(operands, text.format(space=space), f"{constraint},r,r,~{{memory}}")

    write(ref, index, value, _as_int(mask))


def store_words(ref: Ref, index: Value, words: Sequence[Value], mask: Value) -> None:
    """2 or 4 words in one store to ref[index], and what lies behind it, where mask. ref: (n,) in global memory."""
    itemsize, count = jnp.dtype(ref.dtype).itemsize, len(words)
    values = ", ".join(f"${i + 1}" for i in range(count))
    text = f"{{ .reg .pred p; setp.ne.s32 p, ${count + 1}, 0; @p st.global.v{count}.b32 [$0], {{{values}}}; }}"

    @inline(plgpu.RefType(), *[LANES] * (count + 2))
    def write(ctx, ref, index, *given):
        del ctx
        _, address, constraint = _address(ref, index, itemsize)
        asm([address, *map(value_of, given)], text, constraint + ",r" * (count + 1) + ",~{memory}")

    write(ref, index, *words, _as_int(mask))


def warp_max(value: Value) -> Value:
    """Largest of the 32 values of each warp, in all its threads."""
    return _warp_reduce(value, "max")


def warp_min(value: Value) -> Value:
    """Least of the 32 values of each warp, in all its threads."""
    return _warp_reduce(value, "min")


def _warp_reduce(value: Value, op: str) -> Value:
    @inline(LANES, result=_RESULT)
    def reduce(ctx, value):
        del ctx
        return wrap(asm([value_of(value)], f"redux.sync.{op}.s32 $0, $1, 0xffffffff;", "=r,r", has_result=True))

    return reduce(value)


def warp_add(value: Value) -> Value:
    """Sum of the 32 values of each warp, in all its threads."""
    return _warp_reduce(value, "add")


def warp_sum(value: Value) -> Value:
    """Sum of the 32 float32 values of each warp, in all its threads, always in the same order."""

    for distance in (16, 8, 4, 2, 1):
        other = of_lane(lax.bitcast_convert_type(value, jnp.int32), distance)
        value = value + lax.bitcast_convert_type(other, jnp.float32)
    return value


def of_lane(value: Value, distance: int) -> Value:
    """The value of the thread of the same warp whose index differs in the bits of ``distance``."""
    return _by_thread(value, f"shfl.sync.bfly.b32 $0, $1, {distance}, 31, 0xffffffff;")


def of_lower_lane(value: Value, distance: int) -> Value:
    """The value of the thread ``distance`` lanes below in the same warp; the lowest lanes keep their own."""
    return _by_thread(value, f"shfl.sync.up.b32 $0, $1, {distance}, 0, 0xffffffff;")


def ballot(mask: Value) -> Value:
    """A word whose bit i is the mask of lane i of the same warp."""
    text = "{ .reg .pred p; setp.ne.s32 p, $1, 0; vote.sync.ballot.b32 $0, p, 0xffffffff; }"
    return _by_thread(_as_int(mask), text)


def count_bits(value: Value) -> Value:
    """How many bits of each thread's word are set."""
    return _by_thread(value, "popc.b32 $0, $1;")


def e4m3_bits(value: Value) -> Value:
    """The byte of each float32 value in e4m3; saturates."""
    text = "{ .reg .b16 h; cvt.rn.satfinite.e4m3x2.f32 h, 0f00000000, $1; cvt.u32.u16 $0, h; }"
    return _by_thread(lax.bitcast_convert_type(value, jnp.int32), text, "=r,f")


def float_bits(value: Value, dtype: Dtype) -> Value:
    """The bits of each float32 value in float32, or rounded to bfloat16 or float16."""
    if jnp.dtype(dtype).name == "float32":
        return lax.bitcast_convert_type(value, jnp.int32)
    kind = {"bfloat16": "bf16", "float16": "f16"}[jnp.dtype(dtype).name]
    text = f"{{ .reg .b16 h; cvt.rn.{kind}.f32 h, $1; cvt.u32.u16 $0, h; }}"
    return _by_thread(lax.bitcast_convert_type(value, jnp.int32), text, "=r,f")


def rounded(value: Value) -> Value:
    """The integer nearest to each float32 value, ties to even; NaN becomes 0."""
    return _by_thread(lax.bitcast_convert_type(value, jnp.int32), "cvt.rni.s32.f32 $0, $1;", "=r,f")


def _by_thread(value: Value, text: str, constraints: str = "=r,r") -> Value:
    """text: PTX of $0 from the bits $1; with "f" in constraints these are taken as a float32."""

    @inline(LANES, result=_RESULT)
    def run(ctx, value):
        del ctx
        operand = value_of(value)
        operand = arith.bitcast(ir.F32Type.get(), operand) if constraints.endswith("f") else operand
        return wrap(asm([operand], text, constraints, has_result=True))

    return run(value)


def _as_int(mask: Value | bool) -> Value:
    shape = jnp.shape(mask)
    return jnp.where(mask, jnp.ones(shape, jnp.int32), jnp.zeros(shape, jnp.int32))


# Below: inside inline code, where values are MLIR's.


def asm(operands: list[ir.Value], text: str, constraints: str, *, has_result: bool = False, bits: int = 32) -> Any:
    """Inline PTX that is neither dropped nor moved past another. bits: of its result."""
    kind = integer(bits) if has_result else ir.Type.parse("!llvm.void")
    return llvm.inline_asm(kind, operands, text, constraints, has_side_effects=True, asm_dialect=0)


def asm_of_several(
    operands: list[ir.Value],
    text: str,
    constraints: str,
    count: int,
    element: ir.Type | None = None,
    is_early: bool = False,
) -> list[Any]:
    """``asm`` with ``count`` results of one type, $0 and so on; of 32-bit integers where none is given. constraints: of
    the operands. is_early: results are written before all operands are read, so that they share no register."""
    element = element or integer(32)
    letter = "f" if element == ir.F32Type.get() else "r"
    kind = ir.Type.parse(f"!llvm.struct<({', '.join([str(element)] * count)})>")
    results = ",".join([f"={'&' * is_early}{letter}"] * count)
    found: Any = llvm.inline_asm(kind, operands, text, f"{results},{constraints}", has_side_effects=True, asm_dialect=0)
    return [llvm.extractvalue(element, found, [index]) for index in range(count)]


def mma(operand: str, a: list[ir.Value], b: list[ir.Value], c: list[ir.Value]) -> list[ir.Value]:
    """``mma.sync`` of a warp: 16 rows of a by 8 columns of b, words of ``operand``, and the bits of float32 or int32
    accumulators, which are returned."""
    is_int = operand == "int8"
    element, letter = (integer(32), "r") if is_int else (ir.F32Type.get(), "f")
    c = c if is_int else [arith.bitcast(element, value) for value in c]
    constraints = ",".join(["r"] * 6 + [letter] * 4)
    found = asm_of_several([*a, *b, *c], mma_text(operand), constraints, 4, element)
    return found if is_int else [arith.bitcast(integer(32), value) for value in found]


def mma_text(operand: str) -> str:
    """Its PTX: $0 to $3 from $4 to $7, $8 and $9, and $10 to $13."""
    shape, kind = _MMA[operand]
    total = "s32" if operand == "int8" else "f32"
    return (
        f"mma.sync.aligned.{shape}.row.col.{total}.{kind}.{kind}.{total} "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )


def integer(bits: int) -> ir.Type:
    return ir.IntegerType.get_signless(bits)


def integer_constant(value: int, bits: int = 64) -> ir.Value:
    return arith.constant(integer(bits), ir.IntegerAttr.get(integer(bits), value))


def address_of(ref: ir.Value) -> ir.Value:
    """The 64-bit address of a reference to global memory."""
    return llvm.ptrtoint(integer(64), mgpu.utils.memref_ptr(ref))


def value_of(array: mgpu.FragmentedArray) -> ir.Value:
    """Each thread's value of an array of one element a thread."""
    (register,) = array.registers.flat
    return vector.extract(register, [], [0])


def wrap(value: ir.Value) -> mgpu.FragmentedArray:
    """A result in layout ``LANES`` of each thread's value."""
    register = vector.broadcast(ir.VectorType.get((1,), value.type), value)
    layout = mgpu.WGStridedFragLayout((sm90.WARPGROUP,), 1)
    return mgpu.FragmentedArray(_registers=np.array([register], dtype=object), _layout=layout, _is_signed=True)


def _address(ref: ir.Value, index: mgpu.FragmentedArray, itemsize: int) -> tuple[str, ir.Value, str]:
    """(PTX state space, byte address of ref[index], its constraint)."""
    is_shared = mgpu.utils.is_smem_ref(ref)
    width = 32 if is_shared else 64
    base = llvm.ptrtoint(integer(width), mgpu.utils.memref_ptr(ref))
    offset = value_of(index)
    if not is_shared:
        offset = arith.extsi(integer(width), offset)
    size = integer_constant(itemsize, width)
    return ("shared" if is_shared else "global"), arith.addi(base, arith.muli(offset, size)), "r" if is_shared else "l"
