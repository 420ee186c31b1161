"""Rounding of activations in NumPy, from spec 8.3 to 8.9: which grid the rows of a call have, and what lies on it.

Every rule is float32 arithmetic in the order of the spec, since a quotient on the border of two codes is decided by it.
"""

import dataclasses

import ml_dtypes
import numpy as np

from moe_jax.quantization import QuantFormat, Strategy

F32 = np.float32
TINY = np.finfo(F32).tiny


@dataclasses.dataclass(frozen=True)
class Grid:
    """For rows (R, K): a value v has the code ``round(v * factor)``, or ``round(v / factor)`` where ``divides``, and
    the code c the value ``c * scale``. factor, scale: float32 and float64, they broadcast against (R, K). zero: (R, 1)
    zero points, or None.
    """

    element: str
    factor: np.ndarray
    scale: np.ndarray
    divides: bool = False
    zero: np.ndarray | None = None

    def values(self, rows: np.ndarray) -> np.ndarray:
        """rows (R, K) rounded to the grid, float64."""
        rows = rows.astype(F32)
        codes = rows / self.factor if self.divides else rows * self.factor
        if self.zero is not None:
            away = np.sign(codes) * np.floor(np.abs(codes.astype(np.float64)) + 0.5)
            return (np.clip(away + self.zero, -128, 127) - self.zero) * self.scale
        if self.element == "int8":
            return np.clip(np.round(codes), -127, 127).astype(np.float64) * self.scale
        limit, dtype = (6, ml_dtypes.float4_e2m1fn) if self.element == "e2m1" else (448, ml_dtypes.float8_e4m3fn)
        return np.clip(codes, -limit, limit).astype(dtype).astype(np.float64) * self.scale

    def nudged(self, ulps: int) -> "Grid":
        """The same grid, where a value beside a border falls as it does when the factor is off by some ulp."""
        return dataclasses.replace(self, factor=(self.factor * (1 + ulps * 2.0**-23)).astype(F32))

    def rows(self, index: np.ndarray) -> "Grid":
        """The grid of some of the rows."""
        pick = lambda a: a[index] if isinstance(a, np.ndarray) and a.ndim == 2 and len(a) > 1 else a  # noqa: E731
        return dataclasses.replace(self, factor=pick(self.factor), scale=pick(self.scale), zero=pick(self.zero))


def grid_of(rows: np.ndarray, fmt: QuantFormat, stored: float | None) -> Grid:
    """The grid of rows (R, K), which are all rows of the call. stored: the checkpoint's scale, or global scale."""
    rows = rows.astype(F32)
    if fmt.scale in ("e4m3", "e8m0"):
        return _microscaling(rows, fmt, stored)
    if not fmt.symmetric:
        return _asymmetric(rows)
    amax = np.abs(rows).max(1, keepdims=True, initial=0)
    if fmt.element == "int8":
        amax = np.maximum(amax, F32(1e-10))
        return Grid("int8", F32(127) / amax, (amax / F32(127)).astype(np.float64))
    if fmt.strategy is Strategy.TENSOR:
        scale = np.maximum(np.abs(rows).max(initial=0) / F32(448), TINY) if fmt.dynamic else F32(stored)
        return Grid("e4m3", np.full((1, 1), F32(1) / scale), np.full((1, 1), scale, np.float64))
    if fmt.strategy is Strategy.TOKEN:
        amax = amax if fmt.amax_bound is None else np.minimum(amax, F32(fmt.amax_bound))
        scale = np.maximum(amax / F32(448), F32(1 / (448 * 512)))
    else:
        scale = np.maximum(_group_amax(rows, fmt.group_size), F32(1e-10)) * F32(1 / 448)
        if fmt.scale == "ue8m0":
            fraction, exponent = np.frexp(scale)
            scale = np.exp2(exponent - (fraction == 0.5)).astype(F32)
        scale = _spread(scale, fmt.group_size, rows.shape[1])
    return Grid("e4m3", scale, scale.astype(np.float64), divides=True)


def _microscaling(rows, fmt, stored):
    amax, k = _group_amax(rows, fmt.group_size), rows.shape[1]
    if fmt.scale == "e8m0":
        fraction, exponent = np.frexp(np.where(amax == 0, F32(1), amax))  # fraction * 2**exponent, in [0.5, 1)
        scale = np.exp2(exponent - (fraction < 0.875) - (2 if fmt.element == "e2m1" else 8.0))
        scale = _spread(scale, fmt.group_size, k)
        return Grid(fmt.element, (1 / scale).astype(F32), scale)
    if fmt.global_scale == "token":
        largest = np.abs(rows).max(1, keepdims=True, initial=0)
        large = F32(2688) / np.where(largest == 0, F32(2688), largest)
    else:
        large = F32(1) / F32(stored) if fmt.global_scale == "multiplies" else F32(stored)
    block = np.clip(large * (amax * F32(1 / 6)), 0, 448).astype(ml_dtypes.float8_e4m3fn).astype(F32)
    inverse = np.where(block == 0, F32(0), large / np.where(block == 0, F32(1), block))
    scale = block.astype(np.float64) / np.float64(large)
    return Grid(fmt.element, _spread(inverse, fmt.group_size, k), _spread(scale, fmt.group_size, k))


def _asymmetric(rows):
    low, high = np.minimum(rows.min(1, keepdims=True), 0), np.maximum(rows.max(1, keepdims=True), 0)
    span = high - low
    ratio = np.where(span == 0, F32(1), F32(255) / np.where(span == 0, F32(1), span))
    low, high = low * ratio, high * ratio
    zero = np.where((low - F32(128)) + (high + F32(127)) > 0, F32(-128) - low, F32(127) - high)
    zero = np.round(np.clip(zero, -128, 127))
    return Grid("int8", ratio, 1 / ratio.astype(np.float64), zero=zero)


def _group_amax(rows, size):
    padded = np.pad(rows, ((0, 0), (0, -rows.shape[1] % size)))
    return np.abs(padded).reshape(len(rows), -1, size).max(2)


def _spread(scale, size, k):
    return np.repeat(scale, size, axis=1)[:, :k]
