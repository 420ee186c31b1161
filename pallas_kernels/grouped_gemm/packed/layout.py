"""``PackedWeights``: expert matrices in blocks, made from stored codes by ``to_kernel_layout`` and taken back by
``from_kernel_layout``.

Codes are what the format stores, unsigned: int4 and int8 as value + 8 and value + 128, e2m1 and e4m3 as their bits.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.common.types import Leaf
from pallas_kernels.grouped_gemm.packed import format as blocks
from pallas_kernels.grouped_gemm.packed.format import (
    BLOCK_N,
    PackedFormat,
    Stored,
    interleave,
    namespace,
    pad_to,
    separate,
    zero_point_of,
    zero_term,
)

# What an e4m3 scale is inside a block: e5m3, exponents -9 to 8 as 0 to 17; normal numbers keep their bits.
_E5M3 = np.zeros(256, np.uint8)
_E5M3[8:127] = np.arange(8, 127) + 16
_E5M3[1:8] = [0, 8, 12, 16, 18, 20, 22]
_ZERO_SCALE = 18 << 3  # any other number: the codes beside it are zeros
_E5M3[0] = _E5M3[128] = _ZERO_SCALE
_E4M3 = np.zeros(256, np.uint8)
_E4M3[_E5M3[1:127]] = np.arange(1, 127)

# An operand of a block with scales is the real value times this power of two; under "e8m0" where the scale is the
# largest of its matrix, for operands of e4m3 of its channel (see dequantize_sm90).
_SHIFT = {("e2m1", "e4m3"): -20, ("e2m1", "e8m0"): 1, ("e4m3", "e8m0"): 7}
_SHIFT_8BIT = 6


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedWeights:
    """Matrices (E, G, N, K), or (E, N, K) with G = 1, in blocks of 64 channels; NB = ceil(N / 64), KB blocks of K.

    Args:
        words: (E, NB, G, KB, *fmt.block_shape) int32.
        scale: (E, NB, G, groups, 64) float32, bfloat16 or float16, the scales of groups; None without.
        zero: same shape, fmt.operand, see ``zero_term``; None without.
        channel_scale: (E, NB, G, 64) float32, multiplies the sum; None without.
        fmt: what the words mean.
        n, k: of the real matrix.
    """

    words: Leaf
    scale: Leaf | None
    zero: Leaf | None
    channel_scale: Leaf | None
    fmt: PackedFormat = dataclasses.field(metadata=dict(static=True))
    n: int = dataclasses.field(metadata=dict(static=True))
    k: int = dataclasses.field(metadata=dict(static=True))

    @property
    def num_experts(self) -> int:
        return self.words.shape[0]

    @property
    def projections(self) -> int:
        return self.words.shape[2]


def to_kernel_layout(
    fmt: PackedFormat,
    codes: Stored,
    *,
    scale: Stored | None = None,
    zero_point: Stored | None = None,
    channel_scale: Stored | None = None,
) -> PackedWeights:
    """Arrange stored weights for the kernel; exact, and undone by ``from_kernel_layout``.

    Under a zero scale in e4m3 codes become zeros; powers of two below 2**-253 of a matrix' (operands of e4m3: a
    channel's) largest become zero.

    Args:
        fmt: of the result.
        codes: (E, G, N, K) uint8, NumPy or JAX as all arguments are.
        scale: (E, G, N, ceil(K / group)): floats for groups, bytes for "e4m3" and "e8m0".
        zero_point: int8 (E, G, N, groups), or (E, G, N, 1) for one a channel.
        channel_scale: (E, G, N) float32.
    """
    xp = namespace(codes)
    n, k = codes.shape[-2:]
    if fmt.scale == "e4m3":
        codes, scale = _sign_into_codes(codes, scale, fmt)
        ones = xp.ones((*codes.shape[:-1],), xp.float32) if channel_scale is None else channel_scale
        channel_scale = ones * xp.float32(2.0 ** -_shift(fmt))
    filler = 8 if fmt.element == "int4" else 0
    if _is_signed(fmt):
        codes, filler = codes ^ xp.uint8(8), 0
    padded = pad_to(pad_to(codes, -1, fmt.block_k, filler), -2, BLOCK_N, filler)
    words = blocks.to_words(padded, fmt)
    if fmt.scale == "e8m0":
        scale, channel_scale = _normalized(scale, _shift(fmt), (-1,) if fmt.is_8bit else (-2, -1))
    if fmt.scale_words:
        per_block = fmt.block_k // (fmt.group_size or 1)
        block_scale = blocks.to_scale_words(pad_to(pad_to(scale, -1, per_block), -2, BLOCK_N), fmt)
        words = xp.concatenate([words, block_scale], axis=-1)
        scale = None
    words = words.reshape(*words.shape[:-1], *fmt.block_shape)
    moved = words.transpose(0, 2, 1, *range(3, words.ndim))
    if zero_point is not None:
        zero_point = zero_term(fmt, zero_point.astype(xp.float32)).astype(fmt.operand)
    return PackedWeights(
        moved,
        _by_group(scale),
        _by_group(zero_point),
        None if channel_scale is None else interleave(pad_to(channel_scale, -1, BLOCK_N)),
        fmt,
        n,
        k,
    )


def from_kernel_layout(weights: PackedWeights) -> dict[str, Stored]:
    """What ``to_kernel_layout`` was given: codes, and scale, zero_point and channel_scale where the format has them.

    For "e8m0" channel_scale is gone into the scales again.
    """
    fmt, xp = weights.fmt, namespace(weights.words)
    flat = weights.words.transpose(0, 2, 1, *range(3, weights.words.ndim))
    flat = flat.reshape(*flat.shape[:4], -1)
    split = flat.shape[-1] - fmt.scale_words
    codes = blocks.from_words(flat[..., :split], fmt)[..., : weights.n, : weights.k]
    if _is_signed(fmt):
        codes = codes ^ xp.uint8(8)
    channel_scale = None if weights.channel_scale is None else separate(weights.channel_scale)[..., : weights.n]
    found = dict(codes=codes, channel_scale=channel_scale)
    if fmt.scale_words:
        groups = -(-weights.k // (fmt.group_size or 1))
        scale = blocks.from_scale_words(flat[..., split:], fmt)[..., : weights.n, :groups]
        assert channel_scale is not None
        if fmt.scale == "e8m0":
            top = _exponent(channel_scale[..., None]) + _shift(fmt)
            found["scale"] = xp.clip(scale.astype(xp.int32) + top - 254, 0, 254).astype(xp.uint8)
            found["channel_scale"] = None
        else:
            found["scale"] = xp.asarray(_E4M3)[scale].view(jnp.float8_e4m3fn)
            found["channel_scale"] = channel_scale * xp.float32(2.0 ** _shift(fmt))
    elif weights.scale is not None:
        found["scale"] = _from_groups(weights.scale)[..., : weights.n, :]
    if weights.zero is not None:
        zero = _from_groups(weights.zero)[..., : weights.n, :].astype(xp.float32)
        found["zero_point"] = zero_point_of(fmt, zero).astype(xp.int8)
    return {name: value for name, value in found.items() if value is not None}


def stacked_projections(weights: PackedWeights) -> PackedWeights:
    """The same blocks as matrices (E, 1, NB * G * 64, K), for products whose activation is not the kernel's.

    Nothing is moved: columns of the product are (NB, G, 64), blocks of 64 channels of all projections in turn, those
    past N included.
    """

    def stacked(leaf):
        return leaf.reshape(leaf.shape[0], -1, 1, *leaf.shape[3:])

    scale, zero, channel_scale = (
        None if leaf is None else stacked(leaf) for leaf in (weights.scale, weights.zero, weights.channel_scale)
    )
    words = stacked(weights.words)
    return PackedWeights(words, scale, zero, channel_scale, weights.fmt, words.shape[1] * BLOCK_N, weights.k)


def _is_signed(fmt: PackedFormat) -> bool:
    """Whether words hold two's complement, which operands of 8 bits are made of."""
    return fmt.is_8bit and fmt.element == "int4" and not fmt.has_zero_point


def _shift(fmt: PackedFormat) -> int:
    return _SHIFT_8BIT if fmt.is_8bit else _SHIFT[fmt.element, fmt.scale]


def _by_group(array: Stored | None) -> Stored | None:
    """(E, G, N, groups) -> (E, NB, G, groups, 64)."""
    return None if array is None else interleave(pad_to(array, -2, BLOCK_N)).swapaxes(-1, -2)


def _from_groups(array: Stored) -> Stored:
    return separate(array.swapaxes(-1, -2))


def _sign_into_codes(codes: Stored, scale: Stored, fmt: PackedFormat) -> tuple[Stored, Stored]:
    """e4m3 scales as e5m3 bytes; the sign of a scale goes into its codes, and a zero scale makes them zeros."""
    xp = namespace(codes)
    stored = scale.view(xp.uint8)
    spread = xp.repeat(stored, fmt.group_size, axis=-1)[..., : codes.shape[-1]]
    codes = xp.where(spread & 127 == 0, xp.uint8(0), codes ^ (spread >> 7 << 3))
    return codes, xp.asarray(_E5M3)[stored & 127]


def _normalized(scale: Stored, shift: int, axes: tuple[int, ...]) -> tuple[Stored, Stored]:
    """Exponent bytes (E, G, N, groups) relative to the largest along axes, and the factor (E, G, N) it leaves.

    The largest becomes 254, the top exponent of a bfloat16; an operand is then 2**shift times a value whose scale is
    the largest's.
    """
    xp = namespace(scale)
    wide = scale.astype(xp.int32)
    top = xp.maximum(wide.max(axes, keepdims=True), 1 + shift)
    factor = xp.ldexp(xp.ones(top.shape, xp.float32), top - 127 - shift)
    return (
        xp.clip(wide - top + 254, 0, 254).astype(xp.uint8),
        xp.broadcast_to(factor[..., 0], scale.shape[:-1]).astype(xp.float32),
    )


def _exponent(power: Stored) -> Stored:
    """Biased exponent of a normal float32."""
    xp = namespace(power)
    return (power.view(xp.uint32) >> xp.uint32(23)).astype(xp.int32)
