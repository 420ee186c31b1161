"""NVFP4, MXFP4 and MXFP8 experts: small groups with 8-bit scales, activations in the same format or unquantized.

Weights stay packed, two e2m1 codes to a byte, and block scales in e4m3 or as exponent bytes. NVFP4's global scales stay
in the checkpoint's own convention, so that dequantization rounds as the format states: compressed-tensors divides by
its large ``weight_global_scale``, ModelOpt multiplies by its small ``weight_scale_2``.

Deviations from vLLM, each exact where vLLM is lossy: gate and up keep a global scale of their own (vLLM takes gate's
for both); block scales are never flushed or rescaled; activations are really rounded to FP4 where the scheme says so
(on Hopper vLLM leaves them in 16 bits).
"""

import dataclasses
from typing import Any

from moe_jax.quantization._methods import MoEMethod, data_name, global_scale_name
from moe_jax.quantization._numerics import quantize_experts


@dataclasses.dataclass(frozen=True)
class MicroscalingMoEMethod(MoEMethod):
    """Groups of 16 (NVFP4) or 32 (MX) columns share a scale."""

    def quantize_stack(self, w: Any, param_dtype: Any) -> dict[str, Any]:
        fmt = self.weight_format
        names = (data_name(fmt), "weight_scale", global_scale_name(fmt))
        return dict(zip(names, quantize_experts(w, fmt), strict=False))
