"""The shared tolerance table and the row-wise comparison used by every numerical test.

    assert_rows_close(y, expected, tolerance("fp8_block", y.dtype))

A layer's output is compared row by row, since one wrong expert vanishes in a global norm. A row's bound is

    ulps * ulp(dtype, m) + fraction * m     with m = the row's magnitude: max |expected| unless ``row_scale`` is given

How the table is derived:

- float32: reordering a float32 sum of K terms moves it by about sqrt(K) * 2^-24 of the row's magnitude; two chained
  products and the combine of K <= 1024 stay below 64 ulp, a bug does not.
- bfloat16, float16: one rounding of the output (half an ulp) plus the roundings of the intermediate and of the gate,
  half an ulp each, which average over I: 4 ulp cover the largest element of a row.
- quantized activations: where two implementations differ in the last bit before quantization, a value may land on the
  neighbouring grid point. One step of e4m3 is up to 1/8 of the value, one step of int8 1/127 of its row's largest.
  In a sum over I >= 64 values the largest such flip moves an output by about step * 3 / sqrt(I) of the row's magnitude:
  1/32 (e4m3) and 1/128 (int8) when intermediates are float32 and flips are rare. With 16-bit intermediates some 5%
  (e4m3) or 25% (int8) of the values flip; their sum stays within 1/32 and 1/64.
- "exact": integer accumulators, routing ids, bytes: equal, bit for bit.
"""

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np

from moe_jax.quantization import SCHEMES


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """Bound of one row: ``ulps`` of ``dtype`` at the row's magnitude plus ``fraction`` of that magnitude."""

    dtype: Any
    ulps: float
    fraction: float = 0.0

    def bound(self, magnitude: np.ndarray) -> np.ndarray:
        """Largest allowed |actual - expected| for rows of this magnitude (float64, elementwise)."""
        return self.ulps * ulp(self.dtype, magnitude) + self.fraction * magnitude


def ulp(dtype: Any, magnitude: Any) -> np.ndarray:
    """Spacing of ``dtype`` at ``magnitude``; 0 at 0, so that a row that must be zero is compared exactly."""
    magnitude = np.abs(np.asarray(magnitude, np.float64))
    info = ml_dtypes.finfo(dtype)
    binade = np.exp2(np.floor(np.log2(np.maximum(magnitude, float(info.tiny)))))
    return np.where(magnitude == 0, 0.0, binade * float(info.eps))


_ULPS = {"float32": 64.0, "bfloat16": 4.0, "float16": 4.0}
_FLIP = {
    ("e4m3", "float32"): 1 / 32,
    ("e4m3", "bfloat16"): 1 / 32,
    ("e4m3", "float16"): 1 / 32,
    ("int8", "float32"): 1 / 128,
    ("int8", "bfloat16"): 1 / 64,
    ("int8", "float16"): 1 / 64,
}


def tolerance(scheme: Any, dtype: Any) -> Tolerance:
    """The table. scheme: a canonical scheme name, a ``moe_jax.Scheme``, or "exact"; dtype: the output's dtype."""
    name = np.dtype(dtype).name
    if scheme == "exact":
        return Tolerance(dtype, 0.0)
    activations = (SCHEMES[scheme] if isinstance(scheme, str) else scheme).activations
    return Tolerance(dtype, _ULPS[name], _FLIP[activations.element, name] if activations else 0.0)


def assert_rows_close(actual, expected, tol: Tolerance, *, row_scale=None, experts=None):
    """Fail unless every row of ``actual`` is within ``tol`` of ``expected``, each row judged by its own magnitude.

    actual, expected: (..., N), same shape; the last axis is the row. row_scale: magnitude per row, a scalar or
    broadcastable to (...), for rows that cancel (default max |expected| of the row). experts: (...) or (..., top_k)
    labels shown for the worst row. NaN or infinity on either side never passes. The report names how many rows fail and
    the worst one, relative to its bound, with coordinate and both values.
    """
    actual, expected = (np.asarray(x).astype(np.float64) for x in (actual, expected))
    if actual.shape != expected.shape:
        raise AssertionError(f"shape {actual.shape}, expected {expected.shape}")
    if actual.size == 0:
        return
    for name, array in (("actual", actual), ("expected", expected)):
        bad = np.argwhere(~np.isfinite(array))
        if bad.size:
            at = tuple(int(i) for i in bad[0])
            rows = len(np.unique(bad[:, :-1], axis=0))
            raise AssertionError(
                f"{name} holds {array[at]} at {at}{_label(experts, at)}; {rows} row(s) with non-finite values "
                f"(actual {actual[at]}, expected {expected[at]})"
            )
    magnitude = np.abs(expected).max(axis=-1) if row_scale is None else np.abs(np.asarray(row_scale, np.float64))
    magnitude = np.broadcast_to(magnitude, expected.shape[:-1])
    error = np.abs(actual - expected)
    row_error, bound = error.max(axis=-1), tol.bound(magnitude)
    failed = row_error > bound
    if not failed.any():
        return
    excess = np.where(failed, row_error / np.maximum(bound, np.finfo(np.float64).tiny), -1.0)
    row = np.unravel_index(np.argmax(excess), excess.shape)
    at = tuple(int(i) for i in (*row, np.argmax(error[row])))
    raise AssertionError(
        f"{int(failed.sum())} of {failed.size} row(s) differ; worst at {at}{_label(experts, at)}: "
        f"actual {actual[at]:.9g}, expected {expected[at]:.9g}, |difference| {error[at]:.3g} > bound {bound[row]:.3g} "
        f"(row magnitude {magnitude[row]:.3g}, {tol})"
    )


def _label(experts, at) -> str:
    return "" if experts is None else f" (experts {np.asarray(experts)[at[:-1]].tolist()})"
