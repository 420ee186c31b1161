"""Integer experts as compressed-tensors stores them: 2 to 8 bits, in words or bytes, scaled per channel or group.

Weights stay packed; zero points (packed along the output axis) and act-order indices are leaves of their own.
Activations are unquantized (WNA16), int8 per token or e4m3 per token (W4A8).

Deviations from vLLM, each exact where vLLM is not: w4a8_fp8 multiplies group scales in float32, where vLLM's kernel
rounds code times scale to e4m3; int4 weights with int8 activations stay integers on every platform; every width takes
zero points; columns of an act-order matrix find their scale by g_idx instead of by a permutation.
"""

import dataclasses
from typing import Any, ClassVar

from moe_jax.quantization._methods import MoEMethod
from moe_jax.quantization._numerics import quantize_experts


@dataclasses.dataclass(frozen=True)
class WNA16MoEMethod(MoEMethod):
    """Integers with a scale, and if asymmetric a zero point, per channel or group; scales may be negative."""

    allows_negative_scales: ClassVar[bool] = True

    def quantize_stack(self, w: Any, param_dtype: Any) -> dict[str, Any]:
        fmt = self.weight_format
        names = ("weight" if fmt.packing is None else "weight_packed", "weight_scale", "weight_zero_point")
        return dict(zip(names, quantize_experts(w, fmt), strict=False))
