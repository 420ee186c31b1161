"""FP8 (e4m3fn) experts: a scale per tensor, output channel or 2-D block; activations static, dynamic or unquantized.

Deviations from vLLM, each exact where vLLM is lossy: gate and up keep a scale of their own (vLLM requantizes both to
the larger one, and online quantizes both with one scale); a dynamic per-tensor activation scale is really used;
intermediate sizes that are no multiple of the block are allowed, each half having a shorter last row of blocks.
"""

import dataclasses
from typing import Any

from moe_jax.quantization._methods import MoEMethod
from moe_jax.quantization._numerics import quantize_experts


@dataclasses.dataclass(frozen=True)
class Fp8MoEMethod(MoEMethod):
    """Weights stay float8_e4m3fn from file to product; scales are float32."""

    def quantize_stack(self, w: Any, param_dtype: Any) -> dict[str, Any]:
        data, scale = quantize_experts(w, self.weight_format)
        return {"weight": data, "weight_scale": scale}
