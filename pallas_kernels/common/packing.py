"""Sub-byte integers in 32-bit words and bytes: the layouts of checkpoints, packed and unpacked exactly.

Codes are unsigned (uint8, values 0 to 2**bits - 1); which offset makes it a signed value belongs to the format.
Words may be NumPy or JAX arrays; the result is of the same kind. A packed axis is always the last one: checkpoints that
pack along rows (zero points, GPTQ) are swapped by the caller, which keeps every layout here one dimensional.
"""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

Integers = TypeVar("Integers", bound=np.ndarray | jax.Array)

# Output column c of an AWQ word lies in nibble AWQ_ORDER[c], the order its CUDA kernel dequantizes in.
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


def words_per_row(count: int, bits: int, *, is_dense: bool = True) -> int:
    """32-bit words that ``count`` elements take. Dense words straddle; padded ones hold floor(32 / bits) each."""
    return -(-count * bits // 32) if is_dense else -(-count // (32 // bits))


def unpack_words(words: Integers, bits: int, count: int, *, is_dense: bool = True) -> Integers:
    """(..., W) int32 or uint32 -> (..., count) uint8 codes; element i starts at the lowest bits.

    is_dense: element i occupies bits [i * bits, (i + 1) * bits) of the row's little-endian stream (compressed-tensors
    from 0.18 on, GPTQ); otherwise a word holds floor(32 / bits) elements, its top bits unused (up to 0.17). The two
    differ only where bits does not divide 32. Raises ValueError when W does not fit count.
    """
    xp = _namespace(words)
    expected = words_per_row(count, bits, is_dense=is_dense)
    if words.shape[-1] != expected:
        raise ValueError(
            f"packed axis has {words.shape[-1]} words, expected {expected} for {count} elements of {bits} bits"
        )
    if count == 0:
        return xp.zeros((*words.shape[:-1], 0), xp.uint8)
    stream = words.view(xp.uint32)
    mask = xp.uint32((1 << bits) - 1)
    if 32 % bits == 0 or not is_dense:
        shifts = xp.arange(32 // bits, dtype=xp.uint32) * xp.uint32(bits)
        codes = (stream[..., None] >> shifts) & mask
        return codes.reshape(*words.shape[:-1], -1)[..., :count].astype(xp.uint8)
    start = np.arange(count) * bits
    word, shift = start // 32, (start % 32).astype(np.uint32)
    low = stream[..., word] >> shift
    # Bits past the word's end come from the next one; a shift by 32 would be undefined, so those take none.
    straddles = shift + bits > 32
    following = stream[..., np.minimum(word + 1, words.shape[-1] - 1)]
    high = xp.where(straddles, following << np.where(straddles, 32 - shift, 0).astype(np.uint32), xp.uint32(0))
    return ((low | high) & mask).astype(xp.uint8)


def pack_words(codes: Integers, bits: int, *, is_dense: bool = True) -> Integers:
    """Inverse of ``unpack_words``: (..., count) codes -> (..., W) int32; unused bits are zero."""
    xp = _namespace(codes)
    count = codes.shape[-1]
    width = words_per_row(count, bits, is_dense=is_dense)
    if 32 % bits == 0 or not is_dense:
        per_word = 32 // bits
        padding = [(0, 0)] * (codes.ndim - 1) + [(0, width * per_word - count)]
        grouped = xp.pad(codes, padding).reshape(*codes.shape[:-1], width, per_word).astype(xp.uint32)
        shifts = xp.arange(per_word, dtype=xp.uint32) * xp.uint32(bits)
        return (grouped << shifts).sum(-1, dtype=xp.uint32).view(xp.int32)
    positions = xp.arange(bits, dtype=xp.uint8)
    stream = ((codes[..., None].astype(xp.uint8) >> positions) & xp.uint8(1)).reshape(*codes.shape[:-1], -1)
    padding = [(0, 0)] * (codes.ndim - 1) + [(0, width * 32 - count * bits)]
    grouped = xp.pad(stream, padding).reshape(*codes.shape[:-1], width, 32).astype(xp.uint32)
    return (grouped << xp.arange(32, dtype=xp.uint32)).sum(-1, dtype=xp.uint32).view(xp.int32)


def unpack_nibbles(data: Integers) -> Integers:
    """(..., W) uint8 -> (..., 2 W) uint8 codes; the low nibble is the even element."""
    xp = _namespace(data)
    pairs = xp.stack([data & xp.uint8(15), data >> xp.uint8(4)], axis=-1)
    return pairs.reshape(*data.shape[:-1], 2 * data.shape[-1])


def pack_nibbles(codes: Integers) -> Integers:
    """(..., K) uint8 codes below 16 -> (..., K / 2) uint8. Raises ValueError for odd K."""
    if codes.shape[-1] % 2:
        raise ValueError(f"last axis has {codes.shape[-1]} codes, expected an even number")
    xp = _namespace(codes)
    return codes[..., 0::2] | (codes[..., 1::2] << xp.uint8(4))


def unpack_awq(words: Integers, count: int) -> Integers:
    """(..., W) int32 of eight 4-bit columns in AWQ's order -> (..., count) uint8 codes in column order."""
    codes: Any = unpack_words(words, 4, 8 * words.shape[-1])
    ordered = codes.reshape(*words.shape, 8)[..., np.array(AWQ_ORDER)]
    return ordered.reshape(*words.shape[:-1], -1)[..., :count]


def _namespace(array: np.ndarray | jax.Array) -> Any:
    return jnp if isinstance(array, jax.Array) else np
