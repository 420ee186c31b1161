"""Codes and scales of rows of which each thread has single values, for kernels that quantize what they make."""

import functools
from collections.abc import Sequence

import jax.numpy as jnp
from jax import lax

from pallas_kernels.common import simt
from pallas_kernels.common.numerics import e4m3_group_scale, e4m3_row_scale, int8_token_factors
from pallas_kernels.common.numerics_sm90 import divided
from pallas_kernels.common.types import Value
from pallas_kernels.quantize_and_permute.config import PermuteDesc


def magnitude(values: Sequence[Value]) -> Value:
    """The largest magnitude of a thread's float32 values, as the bits of a float32; NaN is the largest."""
    bits = [lax.bitcast_convert_type(jnp.abs(value), jnp.int32) for value in values]
    return functools.reduce(jnp.maximum, bits)


def coded(rows: PermuteDesc, values: Sequence[Value], amax: Value) -> tuple[list[Value], Value]:
    """(codes in the lowest byte, the scale) of a thread's float32 values; amax: of all that share the scale."""
    if rows.quantization == "int8_row":
        inverse, scale = int8_token_factors(amax)
        return [simt.rounded(value * inverse) for value in values], scale
    is_power_of_two = rows.has_power_of_two_scales
    scale = e4m3_group_scale(amax, is_power_of_two) if rows.is_grouped else e4m3_row_scale(amax)
    return [simt.e4m3_bits(divided(value, scale)) for value in values], scale
