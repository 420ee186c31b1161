"""Integer tensors of 2 to 8 bits: packing, zero points and act-order around the rules of pallas_kernels.common.

A stored matrix means ``(q[n, k] - z[n, g(k)]) * s[n, g(k)]``: q are signed codes, z is 0 for symmetric formats, and
``g(k)`` is 0 (CHANNEL), ``k // group_size`` or ``g_idx[k]``. Packed codes are unsigned, q + 2**(bits - 1); zero points
are packed in the same way, but along N.
"""

import dataclasses

import jax
import jax.numpy as jnp

from moe_jax._typing import AnyArray, Array, Float, Int, Shaped
from moe_jax.quantization._formats import Packing, QuantFormat, Strategy
from moe_jax.quantization._tensors import QuantizedTensor
from pallas_kernels.common import numerics, packing


def integer_codes(tensor: QuantizedTensor) -> Int[Array, "*lead N K"]:
    """``q - z``: int8, or int16 (-255 to 255) with zero points."""
    fmt, (n, k) = _format(tensor), tensor.shape[-2:]
    codes = _unpack(tensor.data, fmt, k)
    if fmt.symmetric:
        return codes
    zero_point = tensor.zero_point
    assert zero_point is not None
    if fmt.packing is not None:
        zero_point = _unpack(zero_point.swapaxes(-1, -2), fmt, n).swapaxes(-1, -2)
    return codes.astype(jnp.int16) - _per_column(zero_point.astype(jnp.int16), tensor)


def dequantize_integers(tensor: QuantizedTensor) -> Float[Array, "*lead N K"]:
    """``(q - z) * s`` in float32: the difference is exact, the product is rounded once."""
    scale = jnp.asarray(tensor.scale, jnp.float32)
    scale = scale[..., None] if _format(tensor).strategy is Strategy.CHANNEL else scale
    return integer_codes(tensor).astype(jnp.float32) * _per_column(scale, tensor)


def quantize_integers(
    w: Float[Array, "*lead N K"], fmt: QuantFormat, *, range_factor: Float[Array, "..."] | None = None
) -> tuple[Shaped[Array, "*lead N stored"], Float[Array, "..."], Shaped[Array, "*lead stored_n groups"] | None]:
    """Round weights to integers by ``numerics.quantize_int_min_max``. Returns (data, scale, zero point) as stored.

    w: lead + (N, K), any float dtype; ragged last groups use the columns they have. range_factor: in the shape of the
    scale, multiplies least and greatest value before the rule; None for 1. A NaN or infinity makes its scale
    infinite. Formats with ``actorder`` come from calibration (GPTQ) and cannot be made here: NotImplementedError.
    """
    if fmt.actorder:
        raise NotImplementedError("act-order columns are found by calibration; quantize without actorder")
    n, k = w.shape[-2:]
    size = fmt.group_size or k
    groups = -(-k // size)
    x = jnp.pad(w.astype(jnp.float32), [(0, 0)] * (w.ndim - 1) + [(0, groups * size - k)])
    x = x.reshape(*x.shape[:-1], groups, size)
    low, high = x.min(-1, keepdims=True), jnp.where(x == x, x, jnp.inf).max(-1, keepdims=True)
    if range_factor is not None:
        low, high = (bound * range_factor.reshape(bound.shape) for bound in (low, high))
    codes, scale, zero_point = numerics.quantize_int_min_max(
        x, low, high, fmt.element_type.bits, symmetric=fmt.symmetric
    )
    data = _pack(codes.reshape(*codes.shape[:-2], groups * size)[..., :k], fmt)
    scale = scale[..., 0, 0] if fmt.strategy is Strategy.CHANNEL else scale[..., 0]
    if zero_point is None:
        return data, scale, None
    zero_point = zero_point[..., 0]
    if fmt.packing is not None:
        zero_point = _pack(zero_point.swapaxes(-1, -2), fmt).swapaxes(-1, -2)
    return data, scale, zero_point


def repack_integers(tensor: QuantizedTensor, packing: Packing | None) -> QuantizedTensor:
    """The same codes, scales and zero points in words (``Packing.WORDS``) or one to a byte (None)."""
    fmt, (n, k) = _format(tensor), tensor.shape[-2:]
    if fmt.packing is packing:
        return tensor
    to, zero_point = dataclasses.replace(fmt, packing=packing), tensor.zero_point
    if zero_point is not None:
        codes = _unpack(zero_point.swapaxes(-1, -2), fmt, n)
        zero_point = _pack(codes, to).swapaxes(-1, -2)
    return dataclasses.replace(
        tensor,
        data=_pack(_unpack(tensor.data, fmt, k), to),
        zero_point=zero_point,
        fmt=to,
        num_columns=None if packing is None else k,
    )


def quantize_tokens_asymmetric(
    x: Float[Array, "*rows K"], axes: tuple[str, ...] = ()
) -> tuple[Int[Array, "*rows K"], Float[Array, "*rows"]]:
    """Centred int16 codes and a scale per row, see ``numerics.quantize_int8_token_asymmetric``.

    axes: mesh axes over which rows are split, see ``quantize_activations``.
    """
    low, high = x.min(-1, keepdims=True), jnp.where(x == x, x, jnp.inf).max(-1, keepdims=True)
    if axes:
        low, high = jax.lax.pmin(low, axes), jax.lax.pmax(high, axes)
    codes, scale = numerics.quantize_int8_token_asymmetric(x, low, high)
    return codes, scale[..., 0]


def _format(tensor: QuantizedTensor) -> QuantFormat:
    if tensor.fmt is None:
        raise ValueError("the tensor is not quantized, expected integers")
    return tensor.fmt


def _unpack(data: AnyArray, fmt: QuantFormat, count: int) -> Array:
    """Signed int8 codes along the last axis."""
    if fmt.packing is None:
        return jnp.asarray(data)
    bits = fmt.element_type.bits
    # Flipping the top bit of offset binary and extending the sign: q = u - 2**(bits - 1), which int8 holds.
    codes = packing.unpack_words(jnp.asarray(data), bits, count).astype(jnp.int16) - (1 << (bits - 1))
    return codes.astype(jnp.int8)


def _pack(codes: Array, fmt: QuantFormat) -> Array:
    if fmt.packing is None:
        return codes
    bits = fmt.element_type.bits
    return packing.pack_words((codes.astype(jnp.int16) + (1 << (bits - 1))).astype(jnp.uint8), bits)


def _per_column(values: Array, tensor: QuantizedTensor) -> Array:
    """(..., N, groups) -> what broadcasts against (..., N, K)."""
    fmt, k = _format(tensor), tensor.shape[-1]
    if fmt.group_size is None:
        return values
    if not fmt.actorder:
        return jnp.repeat(values, fmt.group_size, axis=-1)[..., :k]
    # g_idx is shared by the axes between the experts' and N.
    index = jnp.asarray(tensor.g_idx)
    index = index.reshape(*index.shape[:-1], *(1,) * (values.ndim - index.ndim), k)
    return jnp.take_along_axis(values, index, axis=-1)
