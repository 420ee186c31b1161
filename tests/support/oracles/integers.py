"""Stored integers in NumPy, bit by bit from spec 8.5: the judge of moe_jax.quantization's packing and zero points."""

import numpy as np


def matrix(data, scale, zero_point, g_idx, fmt, k):
    """lead + (N, stored) and its companions -> lead + (N, K) float64."""
    bits = int(fmt.element.removeprefix("int"))
    n = data.shape[-2]
    q = codes(data, bits, k) if fmt.packing else data.astype(np.int64)
    scale = (scale if scale.ndim == data.ndim else scale[..., None]).astype(np.float64)
    columns = np.zeros(k, int) if fmt.group_size is None else np.arange(k) // fmt.group_size
    columns = columns if g_idx is None else g_idx
    z = np.zeros_like(scale)
    if zero_point is not None:
        z = codes(zero_point.swapaxes(-1, -2), bits, n).swapaxes(-1, -2) if fmt.packing else zero_point
    return (q - z[..., columns]) * scale[..., columns]


def codes(words, bits, count):
    """(..., W) int32 -> (..., count) signed: the words' bits as one stream, lowest first, in pieces of ``bits``."""
    stream = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), axis=-1, bitorder="little")
    pieces = stream[..., : count * bits].reshape(*words.shape[:-1], count, bits).astype(np.int64)
    return pieces @ (1 << np.arange(bits)) - (1 << (bits - 1))
