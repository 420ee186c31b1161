"""Scales that are searched for instead of taken from the largest value: the least squared error of each extent.

Rounding to nearest with the scale of the largest magnitude spends the grid on outliers. Here each tensor, channel,
block or group tries ranges between half and somewhat more of its own and keeps the one whose dequantized values are
closest to the weights in the sum of squares. The usual range is among them and only a smaller error displaces it, so
no extent gets worse. Global scales of NVFP4 stay those of the largest magnitude.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from moe_jax._typing import AnyArray, Leaf
from moe_jax.quantization._formats import QuantFormat, Strategy
from moe_jax.quantization._method import MoEMethod
from moe_jax.quantization._numerics import _to_blocks, _to_groups, dequantize_tensor, quantize_weight
from moe_jax.quantization._tensors import QuantizedTensor

# Integers gain from clipping outliers. Floats gain mostly from where their uneven grid falls; an exponent alone (MX)
# has three choices, which eighths of a binade contain.
_INTEGER_FACTORS = tuple(np.linspace(0.975, 0.4, 24))
_FLOAT_FACTORS = tuple(2.0 ** (np.arange(-8, 9) / 8))
_LEAST_GAIN = 1e-3  # of the error; far above what float32 sums can lose


@dataclasses.dataclass(frozen=True)
class ScaleSearchMoEMethod(MoEMethod):
    """The method of any quantized scheme, with searched scales when it quantizes; what it stores reads as ever."""

    def quantize_stack(self, w: AnyArray, param_dtype: DTypeLike) -> dict[str, Leaf]:
        fmt = self.weight_format
        parts = [_search(jnp.asarray(expert), fmt) for expert in w]
        stacked = (jnp.stack(leaves) for leaves in zip(*parts, strict=True))
        return dict(zip(fmt.quantized_leaves, stacked, strict=True))


@functools.partial(jax.jit, static_argnames="fmt")
def _search(w: jax.Array, fmt: QuantFormat) -> tuple[jax.Array, ...]:
    """Codes, scale and so on of a stack of matrices (..., N, K), as ``quantize_weight`` returns them."""
    x = w.astype(jnp.float32)
    shape = (*x.shape[:-2], *fmt.scale_shape(*x.shape[-2:]))
    factors = _FLOAT_FACTORS if fmt.element_type.is_float else _INTEGER_FACTORS

    def squared_error(factor):
        parts = quantize_weight(x, fmt, range_factor=jnp.full(shape, factor, jnp.float32))
        return _sum_of_extent((dequantize_tensor(_assembled(parts, fmt, x.shape[-1])) - x) ** 2, fmt)

    def keep_better(best, factor):
        error = squared_error(factor)
        is_better = error < best[0] * (1 - _LEAST_GAIN)
        return (jnp.where(is_better, error, best[0]), jnp.where(is_better, factor, best[1])), None

    start = squared_error(jnp.float32(1)), jnp.ones(shape, jnp.float32)
    (_, chosen), _ = jax.lax.scan(keep_better, start, jnp.asarray(factors, jnp.float32))
    return quantize_weight(x, fmt, range_factor=chosen)


def _assembled(parts: Sequence[jax.Array], fmt: QuantFormat, columns: int) -> QuantizedTensor:
    data, scale, *rest = parts
    third = rest[0] if rest else None
    return QuantizedTensor(
        data=data,
        scale=scale,
        global_scale=third if fmt.global_scale else None,
        zero_point=None if fmt.global_scale else third,
        fmt=fmt,
        num_columns=None if fmt.packing is None else columns,
    )


def _sum_of_extent(x: jax.Array, fmt: QuantFormat) -> jax.Array:
    """Sum over the elements of each scale, in the shape of the scale."""
    match fmt.strategy:
        case Strategy.TENSOR:
            return x.sum((-2, -1))
        case Strategy.BLOCK:
            return _to_blocks(x, fmt.block_shape).sum((-3, -1))
        case Strategy.GROUP:
            return _to_groups(x, fmt.group_size).sum(-1)
    return x.sum(-1)
