"""INT8 experts: one scale per output channel; activations int8 per token (W8A8) or unquantized (W8A16)."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp

from moe_jax.quantization._methods import MoEMethod
from moe_jax.quantization._numerics import quantize_experts


@dataclasses.dataclass(frozen=True)
class Int8MoEMethod(MoEMethod):
    """Symmetric int8 weights.

    arithmetic_dtype: in which online quantization computes scale and quotient. float32 is the accurate default; the
    weights' own 16-bit dtype reproduces vLLM's Int8OnlineMoEMethod bit for bit. The scale is amax / 127 and codes lie
    within +-127; compressed-tensors' own quantizer uses amax / 127.5 and may write -128, which loads unchanged.
    """

    arithmetic_dtype: Any = jnp.float32

    allows_negative_scales: ClassVar[bool] = True

    def quantize_stack(self, w: Any, param_dtype: Any) -> dict[str, Any]:
        data, scale = quantize_experts(w, self.weight_format, jnp.dtype(self.arithmetic_dtype))
        return {"weight": data, "weight_scale": scale}
