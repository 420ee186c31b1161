"""Weights as the packed grouped GEMM reads them: blocks of words that unpack into wgmma fragments without a shuffle.

A block is 64 output channels by 64 of K (128 for 8-bit operands). Thread t of a warpgroup owns words [4t, 4t + 4) of
every 512, one 16-byte load each, and these hold exactly its elements of the fragment that wgmma takes from registers.
Inside a word the bits lie so that few instructions make operands of them, see ``_PLACES``. Blocks of microscaling
formats end in their scales, so that one TMA copy brings both.

Everything here is exact and runs on NumPy and JAX arrays alike.
"""

import dataclasses
import functools
import operator
from types import ModuleType
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

Stored: TypeAlias = Any  # A NumPy or a JAX array; a function that takes one kind returns the same.

BLOCK_N = 64
# Operands of e4m3 hold e2m1 times a power of two exactly while that is at most 2**11 below the largest of its channel;
# groups of smaller scales are multiplied as zeros.
FOLDED_RANGE = 11
_BITS = {"int4": 4, "int8": 8, "e2m1": 4, "e4m3": 8}


@dataclasses.dataclass(frozen=True)
class PackedFormat:
    """What the words of a block mean.

    Args:
        element: of the stored codes. "int4" and "int8" hold any integers of up to 4 and 8 bits.
        operand: dtype of both operands of the product; elements are converted to it exactly.
        scale: "none" (a factor per channel may follow in the epilogue), "group" (float arrays beside the blocks,
            applied to the float32 partial sum of each group), "e4m3" or "e8m0" (bytes inside the blocks, multiplied in
            exactly; see ``FOLDED_RANGE`` for operands of e4m3).
        group_size: elements of K per scale, None without one.
        has_zero_point: integers in groups or channels, subtracted.
    """

    element: Literal["int4", "int8", "e2m1", "e4m3"]
    operand: Literal["bfloat16", "float16", "int8", "float8_e4m3fn"] = "bfloat16"
    scale: Literal["none", "group", "e4m3", "e8m0"] = "none"
    group_size: int | None = None
    has_zero_point: bool = False

    @property
    def bits(self) -> int:
        return _BITS[self.element]

    @property
    def is_8bit(self) -> bool:
        """Whether operands are 8 bits wide."""
        return jnp.dtype(self.operand).itemsize == 1

    @property
    def unit(self) -> float:
        """The operand of a 1, a power of two by which sums are divided; where scales are in the blocks, the factors of
        channels hold it.
        """
        if self.element not in ("int4", "int8"):
            return 1.0
        if self.operand == "bfloat16":
            return 2.0**-6  # bits 7 to 0 of a bfloat16 count 2**-133, which multiplied with 2**127 is 2**-6
        return 16.0 if self.operand == "int8" and not self.has_zero_point else 1.0

    @property
    def scales_integers(self) -> bool:
        """Whether the fma that makes a bfloat16 of an integer can multiply it with its group's scale, too: it takes the
        product of scale and zero point, which rounds unless that is a power of two.
        """
        is_integer = self.element in ("int4", "int8") and self.operand == "bfloat16"
        return is_integer and self.scale == "group" and not self.has_zero_point

    @property
    def folded_unit(self) -> float:
        """As ``unit``, where scales of groups are multiplied into the operands.

        That fma takes 2**127 times ``unit`` and scale, so the operand is made 2**-48 times as large. Then scales of up
        to 2**48 do not overflow, those from 2**-72 on round as they would without, and products with x are normal
        numbers of the accumulator while x times scale is 2**-72 or more.
        """
        return self.unit * 2.0**-48 if self.scales_integers else self.unit

    @property
    def block_k(self) -> int:
        """K of one block: 128 bytes of operands."""
        return 128 // jnp.dtype(self.operand).itemsize

    @property
    def scale_words(self) -> int:
        """Words of scales at the end of a block."""
        if self.scale not in ("e4m3", "e8m0"):
            return 0
        return BLOCK_N * self.block_k // self._group_size() // 4

    @property
    def block_shape(self) -> tuple[int, int]:
        """Words of a block as (rows, columns) of one TMA copy."""
        columns = self.scale_words or 128
        return (BLOCK_N * self.block_k * self.bits // 32 + self.scale_words) // columns, columns

    def _group_size(self) -> int:
        assert self.group_size is not None
        return self.group_size


@dataclasses.dataclass(frozen=True)
class Rotations:
    """By how much the words of a float format are rotated to the left to bring an element's bits to their places.

    Few rotations use every bit of a word once; the bits of one pair of elements lie in place without.

    Args:
        places: where a half word has the bits of an element, lowest first and sign last.
        by: for each pair, by how many bits its word is rotated for each of these bits.
    """

    places: tuple[int, ...]
    by: tuple[tuple[int, ...], ...]

    @property
    def wrap(self) -> int:
        """The least rotation that brings bits around. What rotates less is a shift, more one rotation and a shift."""
        return min((r for pair in self.by for r, at in zip(pair, self.places, strict=True) if r > at), default=32)

    def masks(self, pair: int) -> dict[int, int]:
        """Rotation -> the bits it brings, of both halves of a register."""
        found: dict[int, int] = {}
        for r, at in zip(self.by[pair], self.places, strict=True):
            found[r] = found.get(r, 0) | 0x10001 << at
        return found

    def bits(self) -> np.ndarray:
        """Bit of the word that holds bit b of element (pair, column): (pairs, 2, bits)."""
        columns = [[at + 16 * column for at in self.places] for column in range(2)]
        return np.array([[[(at - r) % 32 for at, r in zip(c, by, strict=True)] for c in columns] for by in self.by])


# With the sign at bit 15 and the magnitude where the exponent ends and the mantissa begins, e2m1 as bfloat16 means
# 2**-126 times its value, e4m3 2**-120 times, as float16 2**-8 times.
_E2M1_ROTATIONS = Rotations((6, 7, 8, 15), ((0,) * 4, (4,) * 4, (10,) * 4, (6, 6, 14, 6)))
_E4M3_ROTATIONS = {
    "bfloat16": Rotations((*range(4, 11), 15), ((0,) * 8, (4,) * 3 + (12,) * 5)),
    "float16": Rotations((*range(7, 14), 15), ((0,) * 8, (7,) * 7 + (1,))),
}


def rotations_of(fmt: PackedFormat) -> Rotations:
    """Of floats with operands of 16 bits."""
    return _E2M1_ROTATIONS if fmt.element == "e2m1" else _E4M3_ROTATIONS[fmt.operand]


def _nibble_places() -> np.ndarray:
    """Pair p in nibbles p and p + 4: pairs 0 and 1, and 2 and 3 after a shift by 8, are masks away from two numbers."""
    return np.array([[[4 * (p + 4 * c) + b for b in range(4)] for c in range(2)] for p in range(4)])


def _byte_places() -> np.ndarray:
    """Pair p in bytes p and p + 2."""
    return np.array([[[8 * (p + 2 * c) + b for b in range(8)] for c in range(2)] for p in range(2)])


def _int8_places() -> np.ndarray:
    """Four int4 in the high nibbles of the bytes, four in the low ones: a mask makes 16 times the value of each."""
    return np.array([[[8 * c + 4 * (1 - p) + b for b in range(4)] for c in range(4)] for p in range(2)])


def _signed_table_places() -> np.ndarray:
    """Magnitudes of four e2m1 in each half word, as PRMT takes its selectors; signs of the first four at the top of
    their bytes, those of the second four nibbles below.
    """
    return np.array(
        [[[16 * p + 4 * c + b for b in range(3)] + [8 * c + 7 - 4 * p] for c in range(4)] for p in range(2)]
    )


def _table_places() -> np.ndarray:
    """Four int4 in each half word, as PRMT takes its selectors."""
    return np.array([[[4 * (4 * p + c) + b for b in range(4)] for c in range(4)] for p in range(2)])


_PLACES = {"int4": _nibble_places(), "int8": _byte_places()}
_PLACES_8BIT = {"int8": _int8_places(), "float8_e4m3fn": _table_places()}


def _places(fmt: PackedFormat) -> np.ndarray:
    """Bit of a word that holds bit b of an element: (register, column, b), registers being 32 bits of operands."""
    if fmt.is_8bit and fmt.element == "e2m1":
        return _signed_table_places()
    if fmt.is_8bit:
        return _PLACES_8BIT[fmt.operand]
    return _PLACES[fmt.element] if fmt.element in _PLACES else rotations_of(fmt).bits()


def to_words(codes: Stored, fmt: PackedFormat) -> Stored:
    """(..., N, K) uint8 codes -> (..., N / 64, K / block_k, words) int32, for N and K whole blocks."""
    xp = namespace(codes)
    lead, (n, k) = codes.shape[:-2], codes.shape[-2:]
    shape, order = _ordering(fmt, len(lead))
    split = codes.reshape(*lead, n // 64, *shape[:3], k // fmt.block_k, *shape[3:])
    places = _places(fmt)
    ordered = split.transpose(*order).reshape(*lead, n // 64, k // fmt.block_k, -1, *places.shape[:2])
    words = xp.zeros(ordered.shape[:-2], xp.uint32)
    for register, column in np.ndindex(*places.shape[:2]):
        code = ordered[..., register, column].astype(xp.uint32)
        for bit, place in enumerate(places[register, column]):
            words = words | ((code >> xp.uint32(bit)) & xp.uint32(1)) << xp.uint32(place)
    return words.view(xp.int32)


def from_words(words: Stored, fmt: PackedFormat) -> Stored:
    """Inverse of ``to_words``."""
    xp = namespace(words)
    lead, (nb, kb) = words.shape[:-3], words.shape[-3:-1]
    places = _places(fmt)
    stream = words.view(xp.uint32)

    def code(field):
        bits = [((stream >> xp.uint32(place)) & xp.uint32(1)) << xp.uint32(bit) for bit, place in enumerate(field)]
        return functools.reduce(operator.or_, bits).astype(xp.uint8)

    codes = xp.stack([code(field) for field in places.reshape(-1, fmt.bits)], axis=-1)
    shape, order = _ordering(fmt, len(lead))
    whole = (*lead, nb, *shape[:3], kb, *shape[3:])
    split = codes.reshape(*(whole[axis] for axis in order))
    return split.transpose(*np.argsort(order)).reshape(*lead, nb * 64, kb * fmt.block_k)


def _ordering(fmt: PackedFormat, lead: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """How the elements of a block split, and the order of the split axes in memory, ``lead`` axes going before.

    Channels split into warp (4), half (2) and row (8). K splits into step of wgmma (4), half (2), lane
    (4) and column (2, of 8 bits 4); where a thread has eight words, steps split once more, into the two loads.
    """
    n = lead
    columns = 4 if fmt.is_8bit else 2
    if fmt.bits == 4 and not fmt.is_8bit:
        warp, row_half, row, k, step, k_half, lane, column = range(n + 1, n + 9)
        order = (n, k, warp, row, lane, step, k_half, row_half, column)
        return (4, 2, 8, 4, 2, 4, columns), (*range(n), *order)
    warp, row_half, row, k, load, step, k_half, lane, column = range(n + 1, n + 10)
    order = (n, k, load, warp, row, lane, step, k_half, row_half, column)
    return (4, 2, 8, 2, 2, 2, 4, columns), (*range(n), *order)


def to_scale_words(scales: Stored, fmt: PackedFormat) -> Stored:
    """(..., N, K / group) uint8 -> (..., N / 64, K / block_k, words) int32: the scales of a block, in the order of its
    rows.

    A thread's scales are 8 bytes (4 groups in a block) or 4 (2): those of its row, then of the row 8 further down; a
    word of them is rotated to the left by ``scale_rotation``.
    """
    xp = namespace(scales)
    lead, (n, groups) = scales.shape[:-2], scales.shape[-2:]
    i, per_block = len(lead), fmt.block_k // fmt._group_size()
    split = scales.reshape(*lead, n // 64, 4, 2, 8, groups // per_block, per_block)
    nb, warp, row_half, row, kb, group = range(i, i + 6)
    ordered = split.transpose(*range(i), nb, kb, warp, row, row_half, group)
    stream = ordered.reshape(*lead, n // 64, groups // per_block, -1, 4).astype(xp.uint32)
    words = (stream << (xp.arange(4, dtype=xp.uint32) * xp.uint32(8))).sum(-1, dtype=xp.uint32)
    return rotated(words, scale_rotation(fmt)).view(xp.int32)


def from_scale_words(words: Stored, fmt: PackedFormat) -> Stored:
    """Inverse of ``to_scale_words``."""
    xp = namespace(words)
    lead, (nb, kb) = words.shape[:-3], words.shape[-3:-1]
    i, per_block = len(lead), fmt.block_k // fmt._group_size()
    shifts = xp.arange(4, dtype=xp.uint32) * xp.uint32(8)
    flat = rotated(words.view(xp.uint32), 32 - scale_rotation(fmt))
    stream = ((flat[..., None] >> shifts) & xp.uint32(255)).astype(xp.uint8)
    split = stream.reshape(*lead, nb, kb, 4, 8, 2, per_block)
    n, k, warp, row, row_half, group = range(i, i + 6)
    ordered = split.transpose(*range(i), n, warp, row_half, row, k, group)
    return ordered.reshape(*lead, nb * 64, kb * per_block)


def scale_rotation(fmt: PackedFormat) -> int:
    """Bits by which a word of four scales is rotated: bytes 0 and 2 then lie as exponents of two bfloat16 numbers, with
    e4m3 as exponents and the three bits after them; bytes 1 and 3 lie eight bits away.
    """
    return 0 if fmt.is_8bit else {"e4m3": 4, "e8m0": 7}[fmt.scale]


def rotated(words: Stored, bits: int) -> Stored:
    """uint32 words rotated to the left."""
    xp = namespace(words)
    return words if bits % 32 == 0 else words << xp.uint32(bits) | words >> xp.uint32(32 - bits)


def pad_to(array: Stored, axis: int, multiple: int, value: int = 0) -> Stored:
    """Fill ``axis`` up to a multiple with ``value``."""
    missing = -array.shape[axis] % multiple
    if not missing:
        return array
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, missing)
    return namespace(array).pad(array, widths, constant_values=value)


def interleave(array: Stored) -> Stored:
    """(E, G, N, ...) -> (E, N / 64, G, 64, ...): the projections of a gated product side by side, 64 channels each."""
    e, g, n = array.shape[:3]
    split = array.reshape(e, g, n // 64, 64, *array.shape[3:])
    return split.transpose(0, 2, 1, *range(3, split.ndim))


def separate(array: Stored) -> Stored:
    """Inverse of ``interleave``."""
    e, nb, g = array.shape[:3]
    moved = array.transpose(0, 2, 1, *range(3, array.ndim))
    return moved.reshape(e, g, nb * 64, *array.shape[4:])


def namespace(array: Stored) -> ModuleType:
    """The module whose functions make arrays of the same kind."""
    return jnp if isinstance(array, jax.Array) else np


def zero_term(fmt: PackedFormat, zero_point: Stored) -> Stored:
    """What the kernel adds to the unpacked bits of an integer, or subtracts from those of 8-bit operands, for a signed
    zero point; exact in ``fmt.operand``.

    Codes u, unsigned, are unpacked as u * fmt.unit (bfloat16), 1024 + u (float16) or u (int8, from which the term is
    subtracted).
    """
    zero = zero_point + (1 << (fmt.bits - 1))
    if fmt.operand == "bfloat16":
        return zero * -fmt.unit
    return zero if fmt.is_8bit else -(zero + 1024)


def zero_point_of(fmt: PackedFormat, term: Stored) -> Stored:
    """Inverse of ``zero_term``."""
    if fmt.operand == "bfloat16":
        zero = term / -fmt.unit
    else:
        zero = term if fmt.is_8bit else -term - 1024
    return zero - (1 << (fmt.bits - 1))
