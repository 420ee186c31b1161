"""Rounding and scale rules of FP8 e4m3 and of integers, elementwise, for use inside and outside a kernel body.

A rule takes float32 values and the largest magnitude of each extent and returns ``(codes, scale)``: ``x`` is float32,
``amax``, the maximum of ``magnitude(x)``, float32 and broadcastable against ``x`` (who reduces it decides the extent);
``scale`` has amax's shape and multiplies the codes to give the values back. The floors, and whether a rule divides by
the scale or multiplies by its reciprocal, follow vLLM's CUDA and Triton quantizers, so that codes agree bit for bit.

A NaN or an infinity makes the scale of its extent infinite and every dequantized value of that extent NaN.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.common.types import Dtype

E4M3_MAX = 448.0
INT8_MAX = 127.0

Rounding = Literal["half_even", "half_away"]

TINY = float(np.finfo(np.float32).tiny)
_E4M3_ROW_FLOOR = 1.0 / (448.0 * 512.0)
_E4M3_BLOCK_AMAX_FLOOR = 1e-4
_GROUP_AMAX_FLOOR = 1e-10


def magnitude(x: jax.Array) -> jax.Array:
    """``|x|`` with NaN as infinity, so that a maximum over it never hides a NaN.

    Maxima do: XLA's on the CPU (jax 0.10.2) lose NaN once an array has some thousand elements, as does a GPU's fmax.
    """
    return jnp.where(x == x, jnp.abs(x), jnp.inf)


def divide(x: jax.Array, divisor: jax.Array | float) -> jax.Array:
    """Correctly rounded ``x / divisor``, on a GPU as far as XLA's own division is (2 ulp); the divisor broadcasts.

    Under jit XLA turns a division by a constant or by a broadcast operand into a multiplication by the reciprocal, one
    ulp off for a quarter to half of all quotients. A divisor selected per element is neither, under vmap as well.
    """
    return x / jnp.where(x == x, divisor, 1.0)


def reciprocal(scale: jax.Array) -> jax.Array:
    """``1 / scale`` for scale >= 0, always finite: 0 for scale 0, subnormal scales count as the smallest normal.

    The maximum has a second use: XLA turns ``1 / (amax / 448)`` into ``448 / amax``, which rounds only once.
    """
    return jnp.where(scale == 0.0, 0.0, 1.0 / jnp.maximum(scale, TINY))


def cast_e4m3(x: jax.Array) -> jax.Array:
    """Round float32 to float8_e4m3fn, ties to even, saturating at +-448 (infinities too); NaN stays NaN.

    The clip is needed: XLA's conversion makes everything from 465 on NaN.
    """
    return jnp.clip(x, -E4M3_MAX, E4M3_MAX).astype(jnp.float8_e4m3fn)


def widen(codes: jax.Array, dtype: Dtype) -> jax.Array:
    """``codes.astype(dtype)``, for a dtype that holds every code; e4m3 to float32 or bfloat16 goes by its bits.

    XLA drops a cast to e4m3 and the one back from a GPU program, and what was quantized there would not be. On the CPU
    a cast of 16.8 million codes to float32 takes 4.0 ms, and this 2.1. Codes have no derivative.
    """
    if codes.dtype != jnp.float8_e4m3fn:
        return codes.astype(dtype)
    bits = lax.bitcast_convert_type(codes, jnp.uint8).astype(jnp.uint16)
    # Sign, exponent and mantissa in the fields of a float16, whose exponent bias is larger by 8; subnormals included.
    half = lax.bitcast_convert_type(((bits & 0x80) << 8) | ((bits & 0x7F) << 7), jnp.float16)
    return jnp.where((bits & 0x7F) == 0x7F, jnp.nan, half.astype(jnp.float32) * 256.0).astype(dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def round_to_float(x: jax.Array, dtype: Dtype) -> jax.Array:
    """float32 values rounded to float32, float16 or bfloat16, in float32; a derivative passes straight through.

    For two casts, which XLA may drop.
    """
    info = jnp.finfo(dtype)
    rounded = lax.reduce_precision(x, info.nexp, info.nmant)
    if info.nexp == 8:
        return rounded
    step = float(info.smallest_subnormal)  # of float16, whose subnormals reduce_precision makes zero
    return jnp.where(jnp.abs(x) < float(info.smallest_normal), jnp.round(x * (1 / step)) * step, rounded)


@round_to_float.defjvp
def _round_to_float_jvp(dtype, primals, tangents):
    return round_to_float(*primals, dtype), tangents[0]


def round_to_int(x: jax.Array, rounding: Rounding = "half_even") -> jax.Array:
    """Round to an integer-valued float: ties to even (RTNE) or away from zero (RHAZ)."""
    if rounding == "half_even":
        return jnp.round(x)
    # trunc(|x| + 0.5) would round the float32 just below 0.5 up; comparing the exact remainder does not.
    whole = jnp.floor(jnp.abs(x))
    return jnp.sign(x) * (whole + jnp.where(jnp.abs(x) - whole >= 0.5, 1.0, 0.0))


def cast_int8(x: jax.Array, rounding: Rounding = "half_even") -> jax.Array:
    """Round to int8, saturating at +-127 (-128 is never produced); NaN becomes 0."""
    rounded = jnp.clip(round_to_int(x, rounding), -INT8_MAX, INT8_MAX)
    return jnp.where(rounded == rounded, rounded, 0.0).astype(jnp.int8)


def quantize_e4m3_tensor(x: jax.Array, amax: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One scale per tensor: ``s = amax / 448``, ``q = x * (1 / s)``. An all-zero tensor has the smallest normal s."""
    scale = jnp.maximum(divide(amax, E4M3_MAX), TINY)
    return cast_e4m3(x * reciprocal(scale)), scale


def e4m3_row_scale(amax: jax.Array) -> jax.Array:
    """Scale of a token or output channel: ``max(amax / 448, 1 / (448 * 512))``."""
    return jnp.maximum(divide(amax, E4M3_MAX), _E4M3_ROW_FLOOR)


def quantize_e4m3_row(x: jax.Array, amax: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One scale per token or output channel: ``s = max(amax / 448, 1 / (448 * 512))``, ``q = x / s``."""
    scale = e4m3_row_scale(amax)
    return cast_e4m3(divide(x, scale)), scale


def quantize_e4m3_block(x: jax.Array, amax: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One scale per 2-D block of a weight: ``s = max(amax, 1e-4) / 448``, ``q = x * (1 / s)``."""
    scale = divide(jnp.maximum(amax, _E4M3_BLOCK_AMAX_FLOOR), E4M3_MAX)
    return cast_e4m3(x * reciprocal(scale)), scale


def e4m3_group_scale(amax: jax.Array, is_power_of_two: bool = False) -> jax.Array:
    """Scale of a run of columns of a token: ``max(amax, 1e-10) * (1 / 448)``, which may be rounded up to a power."""
    scale = jnp.maximum(amax, _GROUP_AMAX_FLOOR) * (1.0 / E4M3_MAX)
    return power_of_two_scale(scale) if is_power_of_two else scale


def power_of_two_scale(scale: jax.Array) -> jax.Array:
    """A positive normal float32 rounded up to a power of two, as "ue8m0" wants activation scales; 2**127 at most."""
    bits = lax.bitcast_convert_type(scale, jnp.int32)
    rounded = lax.bitcast_convert_type(jnp.minimum((bits + 0x7FFFFF) >> 23, 254) << 23, jnp.float32)
    return jnp.where(scale < jnp.inf, rounded, scale)


def quantize_e4m3_group(x: jax.Array, amax: jax.Array, is_power_of_two: bool = False) -> tuple[jax.Array, jax.Array]:
    """One scale per run of columns of a token: ``s = max(amax, 1e-10) * (1 / 448)``, ``q = x / s``.

    is_power_of_two: s is rounded up to one ("ue8m0", DeepSeek-V3.1).
    """
    scale = e4m3_group_scale(amax, is_power_of_two)
    return cast_e4m3(divide(x, scale)), scale


def quantize_e4m3_static(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Codes for a scale known in advance: ``x * (1 / scale)``, saturating; scale 0 gives code 0."""
    return cast_e4m3(x * reciprocal(scale))


def quantize_int8_channel(
    x: jax.Array, amax: jax.Array, arithmetic_dtype: Dtype = jnp.float32
) -> tuple[jax.Array, jax.Array]:
    """One scale per output channel of a weight: ``s = amax / 127``, ``q = round_half_even(x / s)`` within +-127.

    arithmetic_dtype: float32, or the 16-bit dtype of the weights: then scale and quotient are rounded to it, which is
    what vLLM's online quantizer computes. An all-zero row keeps scale 0 and gets code 0.
    """
    scale = round_to_float(divide(amax, INT8_MAX), arithmetic_dtype)
    quotient = round_to_float(divide(x, jnp.where(scale == 0.0, 1.0, scale)), arithmetic_dtype)
    return cast_int8(quotient), scale


def quantize_int8_token(x: jax.Array, amax: jax.Array, rounding: Rounding = "half_even") -> tuple[jax.Array, jax.Array]:
    """One scale per token: ``s = max(amax, 1e-10) / 127``, ``q = round(x * (127 / amax))``.

    Ties to even as in vLLM's CUDA quantizer; its Triton quantizer rounds half away from zero.
    """
    inverse, scale = int8_token_factors(amax)
    return cast_int8(x * inverse, rounding), scale


def int8_token_factors(amax: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What a token's values are multiplied by before they are rounded, and their scale."""
    amax = jnp.maximum(amax, _GROUP_AMAX_FLOOR)
    return INT8_MAX / amax, divide(amax, INT8_MAX)


def quantize_int_min_max(
    x: jax.Array, low: jax.Array, high: jax.Array, bits: int, *, symmetric: bool = True
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Integers of 2 to 8 bits by compressed-tensors' min-max rule, every code of ``[-2**(bits-1), 2**(bits-1) - 1]``.

    low, high: float32, least and greatest x of each extent, kept dimensions; a NaN in x has to show as infinity.
    Symmetric: ``s = max(|low|, |high|) / ((2**bits - 1) / 2)``, ``q = clip(round_half_even(x / s))``, no zero point.
    Otherwise the range is widened to contain 0, ``s = (high - low) / (2**bits - 1)``, ``z = round(qmin - low / s)`` and
    ``q = clip(round(x / s + z))``. A scale of 0 becomes float32's epsilon. Returns int8 codes, scale, int8 zero point.
    """
    q_min, q_max = -(2.0 ** (bits - 1)), 2.0 ** (bits - 1) - 1
    low, high = jnp.minimum(low, 0.0), jnp.maximum(high, 0.0)
    if symmetric:
        scale = divide(jnp.maximum(-low, high), (q_max - q_min) / 2)
    else:
        scale = divide(high - low, q_max - q_min)
    scale = jnp.where(scale == 0.0, np.finfo(np.float32).eps, scale)
    quotient, zero_point = divide(x, scale), None
    if not symmetric:
        zero_point = jnp.round(jnp.clip(q_min - divide(low, scale), q_min, q_max))
        quotient = quotient + zero_point
        zero_point = zero_point.astype(jnp.int8)
    codes = jnp.round(jnp.clip(quotient, q_min, q_max))
    return jnp.where(codes == codes, codes, 0.0).astype(jnp.int8), scale, zero_point


def quantize_int8_token_asymmetric(x: jax.Array, low: jax.Array, high: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One scale and one zero point per token, as vLLM's int4 kernels for CPUs quantize activations.

    low, high: least and greatest x of each token, kept dimensions; both are widened to contain 0.
    ``r = 255 / (high - low)`` (1 for a row of zeros), ``z = round_half_even(clip(t, -128, 127))`` where
    ``t = -128 - low r`` if ``(-128 + low r) + (127 + high r) > 0`` else ``127 - high r``, and
    ``q = clip(round_half_away(x r) + z, -128, 127)``. Returns centred codes ``q - z`` as int16 (-255 to 255) and the
    scale 1 / r, so that ``codes * scale`` are the values.
    """
    low, high = jnp.minimum(low, 0.0), jnp.maximum(high, 0.0)
    span = high - low
    ratio = jnp.where(span == 0.0, 1.0, 255.0 / jnp.where(span == 0.0, 1.0, span))
    low, high = low * ratio, high * ratio
    zero_point = jnp.where((low - 128.0) + (high + 127.0) > 0.0, -128.0 - low, 127.0 - high)
    zero_point = jnp.round(jnp.clip(zero_point, -128.0, 127.0))
    codes = jnp.clip(round_to_int(x * ratio, "half_away") + zero_point, -128.0, 127.0) - zero_point
    scale = jnp.where(span == 0.0, 1.0, divide(span, 255.0))
    return jnp.where(codes == codes, codes, 0.0).astype(jnp.int16), scale
