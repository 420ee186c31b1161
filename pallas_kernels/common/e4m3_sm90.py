"""The e4m3 rules of common/numerics.py for kernel bodies, in five operations an element where those take sixteen."""

from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels.common.numerics import e4m3_group_scale, e4m3_row_scale, power_of_two_scale


def e4m3_of_row(x: Any, amax: Any) -> tuple[Any, Any]:
    """``quantize_e4m3_row``: (codes, scale) of float32 values; amax: () float32, of their whole row."""
    scale = e4m3_row_scale(amax)
    return _codes(x, *_divisor(scale)), scale


def e4m3_of_rows(x: Any, amax: Any) -> tuple[Any, Any]:
    """``quantize_e4m3_row`` of several rows: codes of float32 x (rows, columns) and their scales; amax: (rows,)."""
    return _codes_by_group(x, e4m3_row_scale(amax))


def e4m3_in_groups(x: Any, amax: Any, is_power_of_two: bool) -> tuple[Any, Any]:
    """``quantize_e4m3_group``: codes of float32 x (groups, columns) and their scales; amax: (groups,) float32."""
    scale = e4m3_group_scale(amax)
    if is_power_of_two:
        scale = power_of_two_scale(scale)
    return _codes_by_group(x, scale)


def _codes_by_group(x: Any, scale: Any) -> tuple[Any, Any]:
    return _codes(x, *(lax.broadcast_in_dim(one, x.shape, [0]) for one in _divisor(scale))), scale


def _divisor(scale: Any) -> tuple[Any, Any]:
    """(1 / scale, scale); an infinite scale becomes 0, so that its finite values get code 0 and the others NaN."""
    return 1.0 / scale, jnp.where(scale < jnp.inf, scale, 0.0)


def _codes(x: Any, inverse: Any, scale: Any) -> Any:
    """x / scale in e4m3. The product with the inverse is corrected once by its remainder, which is exact where the
    compiler fuses a product and a sum (Markstein): then only a quotient within 2**-20 ulp of a tie may be one ulp off.
    The remainder is subtracted, not added, which keeps -0. No quotient comes near 465, from where the conversion would
    have to saturate: |x| is at most 448 scales.
    """
    quotient = x * inverse
    return (quotient - (quotient * scale - x) * inverse).astype(jnp.float8_e4m3fn)
