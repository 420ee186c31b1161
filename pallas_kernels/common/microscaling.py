"""FP4 e2m1, power-of-two e8m0 scales, and the rules of NVFP4, MXFP4 and MXFP8, elementwise as in numerics.py.

A rule takes float32 values in groups, ``x`` (..., group), and ``amax`` (..., 1), the maximum of ``magnitude(x)``, and
returns ``(codes, scale)`` as they are stored: e2m1 codes are uint8 below 16, not yet packed; a scale has amax's shape,
float8_e4m3fn for NVFP4 and uint8 exponents (e8m0) for MX. A group that holds a NaN or an infinity gets a NaN scale, so
that every dequantized value of it is NaN; an all-zero group has codes 0 and a finite scale.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.common.numerics import E4M3_MAX, cast_e4m3, divide

E2M1_MAX = 6.0
E8M0_NAN = 255
NVFP4_GROUP, MX_GROUP = 16, 32

Divide = Callable[[jax.Array, jax.Array], jax.Array]

_E2M1_EXPONENT, _E4M3_EXPONENT = 2, 8  # of the largest value: 6 = 1.5 * 2**2, 448 = 1.75 * 2**8


def encode_e2m1(x: jax.Array) -> jax.Array:
    """float32 -> uint8 codes 0-15: nearest of 0, .5, 1, 1.5, 2, 3, 4, 6, ties to the even code, saturating.

    Bit 3 is the sign, also of zero. NaN becomes 0 or -0: its group's scale has to carry it.
    """
    a = jnp.abs(x)
    above = [a > 0.25, a >= 0.75, a > 1.25, a >= 1.75, a > 2.5, a >= 3.5, a > 5.0]
    code = sum((step.astype(jnp.int32) for step in above), jnp.zeros(x.shape, jnp.int32))
    sign = (lax.bitcast_convert_type(x, jnp.uint32) >> 31).astype(jnp.int32)
    return (code | sign << 3).astype(jnp.uint8)


def round_e2m1(x: jax.Array) -> jax.Array:
    """``decode_e2m1(encode_e2m1(x))`` by the bits of x; NaN becomes any number."""
    return _with_sign(_round_magnitude(jnp.minimum(jnp.abs(x), E2M1_MAX), 1, 0), x)


def round_e4m3(x: jax.Array) -> jax.Array:
    """``cast_e4m3(x)`` in float32, by the bits of x; NaN becomes any number."""
    return _with_sign(_round_magnitude(jnp.minimum(jnp.abs(x), E4M3_MAX), 3, -6), x)


def decode_e2m1(code: jax.Array) -> jax.Array:
    """uint8 codes 0-15 -> float32."""
    low = code.astype(jnp.int32) & 7
    # Codes from 2 on are floats with one bit of mantissa and bias 1; 0 and 1 are 0 and 0.5.
    normal = lax.bitcast_convert_type((low << 22) + (126 << 23), jnp.float32)
    value = jnp.where(low < 2, low.astype(jnp.float32) * 0.5, normal)
    return jnp.where(code >= 8, -value, value)


def decode_e8m0(exponent: jax.Array) -> jax.Array:
    """uint8 -> float32 ``2**(exponent - 127)``, 255 -> NaN. XLA counts 2**-127 (exponent 0), a subnormal, as zero."""
    wide = exponent.astype(jnp.int32)
    bits = jnp.where(wide == 0, 1 << 22, jnp.where(wide == E8M0_NAN, 0x7FC00000, wide << 23))
    return lax.bitcast_convert_type(bits, jnp.float32)


def mx_exponent(amax: jax.Array, element_exponent: int) -> jax.Array:
    """The exponent byte of a group: ``127 + floor(log2(P(amax))) - element_exponent`` within 0-254, 255 for infinity.

    P rounds up to the next power of two from a mantissa of 1.75 on (the OCP encoder of compressed-tensors), which keeps
    the largest value within 7/6 of e2m1's range and inside e4m3's.
    """
    return jnp.where(amax < jnp.inf, _finite_exponent(amax, element_exponent), E8M0_NAN).astype(jnp.uint8)


def quantize_mxfp4(x: jax.Array, amax: jax.Array) -> tuple[jax.Array, jax.Array]:
    """e2m1 codes and e8m0 exponents."""
    exponent = mx_exponent(amax, _E2M1_EXPONENT)
    return encode_e2m1(x * _inverse_power(exponent)), exponent


def quantize_mxfp8(x: jax.Array, amax: jax.Array) -> tuple[jax.Array, jax.Array]:
    """e4m3 codes and e8m0 exponents."""
    exponent = mx_exponent(amax, _E4M3_EXPONENT)
    return cast_e4m3(x * _inverse_power(exponent)), exponent


def nvfp4_global_scale(amax: jax.Array, divide: Divide = divide) -> jax.Array:
    """``448 * 6 / amax``, which block scales are multiplied by; 1 where that is not finite (amax 0, infinite, NaN)."""
    scale = divide(jnp.full_like(amax, E4M3_MAX * E2M1_MAX), amax)
    return jnp.where((amax > 0) & (amax < jnp.inf) & (scale < jnp.inf), scale, 1.0)


def quantize_nvfp4(x: jax.Array, amax: jax.Array, global_scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """e2m1 codes and e4m3 scales b: ``b = e4m3(G * (amax * (1 / 6)))``, ``q = e2m1(x * (G / b))``; x = q * b / G.

    global_scale: G, the large (inverse) one, float32, broadcastable against amax.
    """
    scale, inverse = _nvfp4_factors(amax, global_scale, divide)
    return encode_e2m1(x * inverse), scale.astype(jnp.float8_e4m3fn)


def round_groups(x: jax.Array, amax: jax.Array, kind: str, global_scale: jax.Array | None = None) -> jax.Array:
    """float32 groups rounded to ``kind``: "mxfp4", "mxfp8", or "nvfp4", which leaves the global scale in the values.

    They have at most four significant bits, NVFP4's ``q * b`` six.
    """
    scale, inverse = group_factors(amax, kind, global_scale)
    return round_element(x * inverse, kind) * scale


def group_factors(
    amax: jax.Array, kind: str, global_scale: jax.Array | None = None, divide: Divide = divide
) -> tuple[jax.Array, jax.Array]:
    """The scale of each group in float32, and what its values are multiplied by before they are rounded.

    divide: for use inside a kernel, whose own division is not exact.
    """
    if kind == "nvfp4":
        assert global_scale is not None
        return _nvfp4_factors(amax, global_scale, divide)
    exponent = _finite_exponent(amax, _E2M1_EXPONENT if kind == "mxfp4" else _E4M3_EXPONENT)
    # The smallest exponent is zero here, as XLA counts 2**-127.
    scale = jnp.where(amax < jnp.inf, lax.bitcast_convert_type(exponent << 23, jnp.float32), jnp.nan)
    return scale, lax.bitcast_convert_type((254 - exponent) << 23, jnp.float32)


def round_element(x: jax.Array, kind: str) -> jax.Array:
    """To the nearest element of ``kind``, in float32."""
    return round_e4m3(x) if kind == "mxfp8" else round_e2m1(x)


def _nvfp4_factors(amax: jax.Array, global_scale: jax.Array, divide: Divide) -> tuple[jax.Array, jax.Array]:
    # Selected per element, since XLA would multiply global_scale by a constant first: one ulp off, which decides ties.
    sixth = jnp.where(amax == amax, np.float32(1.0 / E2M1_MAX), np.float32(1.0))
    scale = round_e4m3(global_scale * (amax * sixth))
    scale = jnp.where(amax < jnp.inf, scale, jnp.nan)
    spread = jnp.broadcast_to(global_scale, scale.shape)
    return scale, jnp.where(scale == 0.0, 0.0, divide(spread, scale))


def _finite_exponent(amax: jax.Array, element_exponent: int) -> jax.Array:
    """``mx_exponent`` as int32, of whatever for infinity."""
    bits = lax.bitcast_convert_type(amax, jnp.int32)
    return jnp.clip(((bits + (1 << 21)) >> 23) - element_exponent, 0, 254)


def _round_magnitude(a: jax.Array, mantissa: int, exponent: int) -> jax.Array:
    """a >= 0 to the nearest of a float type, ties to even: its bits of mantissa, its least normal exponent."""
    dropped = 23 - mantissa
    bits = lax.bitcast_convert_type(a, jnp.int32)
    half = (1 << (dropped - 1)) - 1
    normal = lax.bitcast_convert_type((bits + half + ((bits >> dropped) & 1)) & -(1 << dropped), jnp.float32)
    step = np.float32(2.0 ** (exponent - mantissa))
    return jnp.where(a < np.float32(2.0**exponent), jnp.round(a * (1 / step)) * step, normal)


def _with_sign(magnitude: jax.Array, x: jax.Array) -> jax.Array:
    sign = lax.bitcast_convert_type(x, jnp.int32) & np.int32(-(1 << 31))
    return lax.bitcast_convert_type(lax.bitcast_convert_type(magnitude, jnp.int32) | sign, jnp.float32)


def _inverse_power(exponent: jax.Array) -> jax.Array:
    """``2**(127 - exponent)``; exact, since exponents of float32 values stay below 254."""
    return decode_e8m0((254 - exponent.astype(jnp.int32)).astype(jnp.uint8))
