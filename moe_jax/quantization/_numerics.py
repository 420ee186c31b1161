"""Quantize and dequantize whole arrays: reductions and broadcasting around the rules of pallas_kernels.common.numerics.

Scale shapes are those of ``QuantFormat.scale_shape``: for values ``lead + (N, K)`` a scale is ``lead`` per tensor,
``lead + (N,)`` per channel or token, ``lead + (N, ceil(K/g))`` per group and ``lead + (ceil(N/bn), ceil(K/bk))`` per
block; a global scale (NVFP4) is ``lead``. Activations are one matrix whose rows are all leading dimensions together, so
their per-tensor scale is (). All arithmetic is float32.
"""

import functools

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.typing import ArrayLike, DTypeLike

from moe_jax._typing import AnyArray, Array, Float, Shaped
from moe_jax.quantization._formats import Packing, QuantFormat, Strategy
from moe_jax.quantization._integers import (
    dequantize_integers,
    integer_codes,
    quantize_integers,
    quantize_tokens_asymmetric,
)
from moe_jax.quantization._tensors import QuantizedTensor
from pallas_kernels.common import microscaling, numerics, packing


def quantize_weight(
    w: Float[Array, "*lead N K"],
    fmt: QuantFormat,
    *,
    arithmetic_dtype: DTypeLike = jnp.float32,
    range_factor: Float[Array, "..."] | None = None,
) -> tuple[Shaped[Array, "..."], ...]:
    """Round a stack of weight matrices to ``fmt``; each matrix (channel, block, group) gets its own scale.

    w: lead + (N, K), any float dtype. arithmetic_dtype: int8 only, see ``numerics.quantize_int8_channel``.
    range_factor: float32 in the shape of the scale, None for 1: the range that a scale is made for is this times the
    range of its values; below 1 the largest ones saturate and the others get a finer grid.
    Returns data and scale in the dtypes they are stored in, and for NVFP4 each matrix' global scale as the third.
    Ragged edge blocks and groups use the elements they have.
    """
    x = w.astype(jnp.float32)
    if fmt.scale != "float32":
        return _quantize_weight_groups(x, fmt, range_factor)
    match fmt.element, fmt.strategy:
        case "e4m3", Strategy.TENSOR:
            data, scale = numerics.quantize_e4m3_tensor(x, _range(x, (-2, -1), range_factor))
            return data, scale[..., 0, 0]
        case "e4m3", Strategy.CHANNEL:
            data, scale = numerics.quantize_e4m3_row(x, _range(x, -1, range_factor))
            return data, scale[..., 0]
        case "e4m3", Strategy.BLOCK:
            blocks = _to_blocks(x, fmt.block_shape)
            data, scale = numerics.quantize_e4m3_block(blocks, _range(blocks, (-3, -1), range_factor))
            return _from_blocks(data, x.shape), scale[..., 0, :, 0]
        case "int8", Strategy.CHANNEL if fmt.symmetric and fmt.packing is None:
            data, scale = numerics.quantize_int8_channel(x, _range(x, -1, range_factor), jnp.dtype(arithmetic_dtype))
            return data, scale[..., 0]
        case _, Strategy.CHANNEL | Strategy.GROUP if not fmt.element_type.is_float:
            data, scale, zero_point = quantize_integers(w, fmt, range_factor=range_factor)
            return (data, scale) if zero_point is None else (data, scale, zero_point)
    raise NotImplementedError(f"quantizing weights to {fmt.element} with strategy {fmt.strategy.value!r} is not built")


def quantize_experts(w: AnyArray, fmt: QuantFormat, arithmetic_dtype: DTypeLike = jnp.float32) -> tuple[Array, ...]:
    """``quantize_weight`` expert after expert, so that float32 temporaries are those of one expert.

    w: (E, ..., N, K), a NumPy or JAX array; a NumPy one (possibly a view of a file) is read one expert at a time. A
    tracer is quantized as a whole: XLA widens the whole stack before any loop over experts, and on the CPU writes FP8
    slices element by element.
    """
    if isinstance(w, Tracer):
        return quantize_weight(w, fmt, arithmetic_dtype=arithmetic_dtype)
    quantized = [_quantize_expert(expert, fmt, arithmetic_dtype) for expert in w]
    return tuple(jnp.stack(parts) for parts in zip(*quantized, strict=True))


@functools.partial(jax.jit, static_argnames=("fmt", "arithmetic_dtype"))
def _quantize_expert(w, fmt, arithmetic_dtype):
    return quantize_weight(w, fmt, arithmetic_dtype=arithmetic_dtype)


def stored_codes(tensor: QuantizedTensor) -> Array:
    """lead + (N, K): what scales multiply, for integers unpacked and less their zero points."""
    is_float = tensor.fmt is not None and tensor.fmt.element_type.is_float
    return tensor.data if is_float else integer_codes(tensor)


def quantize_activations(
    x: Float[Array, "*rows K"],
    fmt: QuantFormat,
    input_scale: ArrayLike | None = None,
    *,
    rounding: numerics.Rounding = "half_even",
    axes: tuple[str, ...] = (),
) -> tuple[Shaped[Array, "*rows K"], Float[Array, "..."]]:
    """Round activations to ``fmt``. Returns codes of x's shape and float32 scales (``dequantize`` undoes it).

    Codes of an asymmetric format come with their zero point subtracted, as int16.

    x: (..., K), any float dtype. input_scale: () float32, exactly when ``fmt.needs_input_scale``: the scale, or the
    global scale of NVFP4 in the words of ``fmt.global_scale``. rounding: int8 only. e2m1 codes are one to a byte.
    A dynamic per-tensor scale is the maximum over every element of x: rows that must not count have to be zero.
    axes: inside ``jax.shard_map``, mesh axes over which rows (per tensor: the call) are spread: scales of tokens and
    tensors come from all of a row or call. Groups must lie whole on one device.
    A NaN or infinity spoils its own token (its group; the whole call when the scale is per tensor) and nothing else.
    """
    if fmt.needs_input_scale != (input_scale is not None):
        found, way_out = ("none", "pass the checkpoint's") if input_scale is None else ("one", "leave it out")
        raise ValueError(
            f"{'static' if fmt.needs_input_scale else 'dynamic'} activations: input_scale expected exactly when static,"
            f" found {found}; {way_out}"
        )
    x = x.astype(jnp.float32)
    if fmt.scale in ("e4m3", "e8m0"):
        global_scale = _inverse_global_scale(x, fmt, input_scale, axes)
        codes, scale = _quantize_groups(x, fmt, global_scale)
        if global_scale is None:
            return codes, real_scale(scale, fmt)
        return codes, numerics.divide(numerics.widen(scale, jnp.float32), global_scale[..., None])
    match fmt.element, fmt.strategy:
        case "e4m3", Strategy.TENSOR if not fmt.dynamic:
            scale = jnp.asarray(input_scale, jnp.float32)
            return numerics.quantize_e4m3_static(x, scale), scale
        case "e4m3", Strategy.TENSOR:
            return numerics.quantize_e4m3_tensor(x, _over(axes, jnp.max(numerics.magnitude(x), initial=0.0)))
        case "e4m3", Strategy.TOKEN:
            amax = _over(axes, _amax(x, -1))
            if fmt.amax_bound is not None:  # an infinity still spoils its row
                amax = jnp.where(amax < jnp.inf, jnp.minimum(amax, fmt.amax_bound), amax)
            codes, scale = numerics.quantize_e4m3_row(x, amax)
            return codes, scale[..., 0]
        case "e4m3", Strategy.GROUP:
            groups = _to_groups(x, fmt.group_size)
            codes, scale = numerics.quantize_e4m3_group(groups, _amax(groups, -1), fmt.scale == "ue8m0")
            return _from_groups(codes, x.shape[-1]), scale[..., 0]
        case "int8", Strategy.TOKEN if not fmt.symmetric:
            return quantize_tokens_asymmetric(x, axes)
        case "int8", Strategy.TOKEN:
            codes, scale = numerics.quantize_int8_token(x, _over(axes, _amax(x, -1)), rounding)
            return codes, scale[..., 0]
    raise NotImplementedError(f"quantizing activations to {fmt.element} per {fmt.strategy.value} is not built")


def dequantize(q: Shaped[Array, "..."], scale: Shaped[Array, "..."], fmt: QuantFormat) -> Float[Array, "..."]:
    """``q * scale`` in float32, the scale spread over the extent ``fmt`` names; a ragged last block is cut off.

    q: one element each, e2m1 as codes. scale: of real numbers, see ``real_scale``.
    """
    scale = scale.astype(jnp.float32)
    match fmt.strategy:
        case Strategy.GROUP:
            scale = _spread(scale, -1, fmt.group_size, q.shape[-1])
        case Strategy.BLOCK:
            scale = _spread(scale, -2, fmt.block[0], q.shape[-2])
            scale = _spread(scale, -1, fmt.block[1], q.shape[-1])
        case _:
            # The scale's shape is a prefix of q's: () or lead per tensor, all but K per row.
            scale = scale.reshape(scale.shape + (1,) * (q.ndim - scale.ndim))
    values = microscaling.decode_e2m1(q) if fmt.element == "e2m1" else numerics.widen(q, jnp.float32)
    return values * scale


def real_scale(scale: Shaped[Array, "..."], fmt: QuantFormat, global_scale: Array | None = None) -> Float[Array, "..."]:
    """A scale as stored -> the float32 numbers that multiply the elements. global_scale broadcasts against scale."""
    if fmt.scale == "e8m0":
        return microscaling.decode_e8m0(scale)
    if fmt.scale != "e4m3" or global_scale is None:
        return scale.astype(jnp.float32)
    wide = numerics.widen(scale, jnp.float32)
    return wide * global_scale if fmt.global_scale == "multiplies" else numerics.divide(wide, global_scale)


def dequantize_tensor(tensor: QuantizedTensor, dtype: DTypeLike = jnp.float32) -> Float[Array, "*lead N K"]:
    """The real values of a stored tensor, lead + (N, K): multiplied in float32, then rounded once to ``dtype``."""
    if not tensor.layout.is_plain:
        raise ValueError(f"data is in layout {tensor.layout.name!r}, expected 'plain'; unpack it first")
    if tensor.fmt is None:
        return jnp.asarray(tensor.data).astype(dtype)
    if not tensor.fmt.element_type.is_float:
        return dequantize_integers(tensor).astype(dtype)
    fmt, data, global_scale = tensor.fmt, jnp.asarray(tensor.data), tensor.global_scale
    if global_scale is not None:
        global_scale = jnp.asarray(global_scale)[..., None, None]
    if fmt.packing is Packing.NIBBLES:
        data = packing.unpack_nibbles(data)
    return dequantize(data, real_scale(jnp.asarray(tensor.scale), fmt, global_scale), fmt).astype(dtype)


def fake_quantize(
    x: Float[Array, "*rows K"], fmt: QuantFormat, input_scale: ArrayLike | None = None, axes: tuple[str, ...] = ()
) -> Float[Array, "*rows K"]:
    """Activations rounded to the grid of ``fmt``, in float32, with a straight-through gradient.

    Equals ``dequantize(*quantize_activations(x, fmt, input_scale, axes=axes), fmt)``. Its derivative treats rounding as
    the identity and the scale as a constant: 1 everywhere for dynamic scales (nothing saturates), and for a static
    scale 1 inside the representable range and 0 where the value was clipped. No gradient reaches ``input_scale``.
    """
    return _fake_quantize(x, None if input_scale is None else jnp.asarray(input_scale, jnp.float32), fmt, axes)


@functools.partial(jax.custom_jvp, nondiff_argnums=(2, 3))
def _fake_quantize(x, input_scale, fmt, axes):
    return dequantize(*quantize_activations(x, fmt, input_scale, axes=axes), fmt)


@_fake_quantize.defjvp
def _fake_quantize_jvp(fmt, axes, primals, tangents):
    x, input_scale = primals
    tangent = tangents[0].astype(jnp.float32)
    if not fmt.dynamic:
        inside = jnp.abs(x.astype(jnp.float32)) <= input_scale * fmt.element_type.max
        tangent = jnp.where(inside, tangent, 0.0)
    return _fake_quantize(x, input_scale, fmt, axes), tangent


def _amax(x, axis):
    return jnp.max(numerics.magnitude(x), axis=axis, keepdims=True, initial=0.0)


def _over(axes, amax):
    """The maximum over the devices of mesh axes."""
    return jax.lax.pmax(amax, axes) if axes else amax


def _range(x, axis, factor):
    """The magnitude that a scale is made for: the largest one, times the factor of its extent where there is one."""
    amax = _amax(x, axis)
    return amax if factor is None else amax * factor.reshape(amax.shape)


def _quantize_groups(x, fmt, global_scale, range_factor=None):
    """Codes of x's shape and stored scales (..., groups); global_scale: the inverse one, over x's leading axes."""
    groups = _to_groups(x, fmt.group_size)
    amax = _range(groups, -1, range_factor)
    match fmt.element, fmt.scale:
        case "e2m1", "e4m3":
            codes, scale = microscaling.quantize_nvfp4(groups, amax, global_scale[..., None, None])
        case "e2m1", "e8m0":
            codes, scale = microscaling.quantize_mxfp4(groups, amax)
        case _:
            codes, scale = microscaling.quantize_mxfp8(groups, amax)
    return _from_groups(codes, x.shape[-1]), scale[..., 0]


def _quantize_weight_groups(x, fmt, range_factor=None):
    """(data, scale) as stored; (data, scale, global scale) for NVFP4."""
    inverse = None
    if fmt.global_scale is not None:
        inverse = microscaling.nvfp4_global_scale(_amax(x, (-2, -1))[..., 0])
    codes, scale = _quantize_groups(x, fmt, inverse, range_factor)
    data = packing.pack_nibbles(codes) if fmt.packing is Packing.NIBBLES else codes
    if inverse is None:
        return data, scale
    stored = numerics.reciprocal(inverse) if fmt.global_scale == "multiplies" else inverse
    return data, scale, stored[..., 0]


def _inverse_global_scale(x, fmt, input_scale, axes):
    """The number that NVFP4 multiplies block scales by: () from the checkpoint, or (...,) one for each row of x."""
    match fmt.global_scale:
        case "divides":
            return jnp.asarray(input_scale, jnp.float32)
        case "multiplies":
            return numerics.reciprocal(jnp.asarray(input_scale, jnp.float32))
        case "token":
            return microscaling.nvfp4_global_scale(_over(axes, _amax(x, -1)[..., 0]))
    return None


def _to_groups(x, size):
    """(..., K) -> (..., ceil(K/size), size), the last group filled up with zeros."""
    k = x.shape[-1]
    groups = -(-k // size)
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, groups * size - k)])
    return x.reshape(*x.shape[:-1], groups, size)


def _from_groups(groups, k):
    """Inverse of ``_to_groups`` for k columns."""
    return groups.reshape(*groups.shape[:-2], groups.shape[-2] * groups.shape[-1])[..., :k]


def _to_blocks(x, block_shape):
    """(..., N, K) -> (..., ceil(N/bn), bn, ceil(K/bk), bk), edges filled up with zeros."""
    (n, k), (bn, bk) = x.shape[-2:], block_shape
    rows, columns = -(-n // bn), -(-k // bk)
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, rows * bn - n), (0, columns * bk - k)])
    return x.reshape(*x.shape[:-2], rows, bn, columns, bk)


def _from_blocks(blocks, shape):
    """Inverse of ``_to_blocks`` for a matrix stack of ``shape``."""
    rows, bn, columns, bk = blocks.shape[-4:]
    return blocks.reshape(*blocks.shape[:-4], rows * bn, columns * bk)[..., : shape[-2], : shape[-1]]


def _spread(scale, axis, times, size):
    """Repeat each entry ``times`` along a negative axis and cut the result to ``size``."""
    return jax.lax.slice_in_dim(jnp.repeat(scale, times, axis=axis), 0, size, axis=scale.ndim + axis)
