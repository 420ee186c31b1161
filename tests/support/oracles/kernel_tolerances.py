"""The tolerance table of grouped GEMMs on kernels, by kind of operand; tolerances.py has the one of whole layers on
other implementations, layer_judge.py judges layers on kernels.

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
"""

from typing import Any

import numpy as np

from tests.support.oracles.tolerances import Tolerance

_ULPS = {"float32": 64.0, "bfloat16": 2.0, "float16": 2.0}
_FP8_CORE = 1 / 512
_FOLDED_SCALES = 2.0**-8


def product_tolerance(operand: Any, out_dtype: Any, *, tensor_core: bool = False, folded: bool = False) -> Tolerance:
    """Bound of one row of a grouped GEMM. operand: dtype of both operands. folded: group scales rounded into them."""
    fraction = _FP8_CORE if tensor_core and np.dtype(operand).name == "float8_e4m3fn" else 0.0
    return Tolerance(out_dtype, _ULPS[np.dtype(out_dtype).name], _FOLDED_SCALES if folded else fraction)
