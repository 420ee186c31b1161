"""The tolerance table of everything that runs kernels, by kind of operand; helpers.py has the one of whole layers on
other implementations, and the comparison of rows.

One product (``gemm_tolerance``, ``packed_tolerance``), a row by its largest value, against float64:

- Operands are what is stored, so products are exact: e4m3 by e4m3 and bf16 by bf16 have at most 16 significant bits,
  int8 by int8 goes into int32. Sums are float32: 64 ulp, as in helpers; the output is rounded once, half an ulp and
  half of one more where the float32 sum lies beside a border: 2 ulp of a 16-bit output.
- The fp8 tensor core keeps about 14 bits between the adds of one accumulator: 2**-14 of a partial sum for each of up to
  K / 32 adds, a random walk of sqrt(64) steps at K = 2048, 2**-11 of a row; twice that is allowed, for fewer bits kept
  than reported: 1/1024, and again twice for sums that pass through larger ones: 1/512. Promotion every 128 of K does
  not have it, but its first 128 do.
- Scales folded into operands round each weight to the operand's dtype, 2**-9 of it in bfloat16: over a sum of random
  signs that is 2**-9 of a typical value of the row, 2**-8 of its largest at most.

A layer (``LAYER_ERROR``), the root mean square of a row's error by that of the row, against float64:

- 16-bit activations: hidden values and the output are rounded to bfloat16, 2**-9 / sqrt(3) of each value; with folded
  scales the weights as well. In quadrature under 0.003, some three times that allowed.
- Quantized activations: rounding to bfloat16 first moves a value across a border of its grid now and then, and then
  by a whole step. e4m3: one value in 32 by 1/8 to 1/16 of itself, 0.016 of a row on average; a row whose largest hidden
  value moves has 1/16 and its like: 0.06 was the worst row seen on an H200. int8: a step is 1/127 of the row's largest,
  which is up to 8 times its typical value; a quarter of the large values move: 0.01. e2m1: one in 128 by up to half of
  itself: 0.05 on average, and rows that hang on few values 1/4, one step of theirs.
- The second figure is for rows as the references of the kernels compute them, where no tensor core shortens sums.
"""

from typing import Any

import numpy as np

from tests.support.oracles.tolerances import Tolerance

_ULPS = {"float32": 64.0, "bfloat16": 2.0, "float16": 2.0}
_FP8_CORE = 1 / 512
_FOLDED_SCALES = 2.0**-8

# Element of the activations -> error of a row: on a GPU, on the references of the kernels.
LAYER_ERROR = {None: (0.01, 0.01), "int8": (0.03, 0.02), "e4m3": (0.09, 0.06), "e2m1": (0.25, 0.25)}


def product_tolerance(operand: Any, out_dtype: Any, *, tensor_core: bool = False, folded: bool = False) -> Tolerance:
    """Bound of one row of a grouped GEMM. operand: dtype of both operands. folded: group scales rounded into them."""
    fraction = _FP8_CORE if tensor_core and np.dtype(operand).name == "float8_e4m3fn" else 0.0
    return Tolerance(out_dtype, _ULPS[np.dtype(out_dtype).name], _FOLDED_SCALES if folded else fraction)


def assert_layer_close(actual: Any, expected: np.ndarray, activations: Any, *, on_gpu: bool) -> None:
    """Fail unless every row (T, H) is within ``LAYER_ERROR`` of float64. activations: of the scheme, or None."""
    bound = LAYER_ERROR[activations and activations.element][0 if on_gpu else 1]
    actual = np.asarray(actual, np.float64)
    norm = np.sqrt((expected**2).mean(1))
    error = np.sqrt(((actual - expected) ** 2).mean(1))
    failed = ~(error <= bound * norm)
    if failed.any():
        worst = int(np.argmax(np.where(np.isfinite(error), error / np.maximum(norm, 1e-30), np.inf)))
        raise AssertionError(
            f"{int(failed.sum())} of {len(norm)} row(s) differ; worst is row {worst}: error {error[worst]:.3g} of norm "
            f"{norm[worst]:.3g}, allowed {bound} of it"
        )
