"""FP8 (e4m3fn) experts: a scale per tensor, output channel or 2-D block; activations static, dynamic or unquantized.

Deviations from vLLM, each exact where vLLM is lossy: gate and up keep a scale of their own (vLLM requantizes both to
the larger one, and online quantizes both with one scale); a dynamic per-tensor activation scale is really used;
intermediate sizes that are no multiple of the block are allowed, each half having a shorter last row of blocks.
"""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from moe_jax.quantization._format import Strategy
from moe_jax.quantization._methods import MoEMethod
from moe_jax.quantization._numerics import quantize_experts
from moe_jax.quantization._tensors import ExpertWeights, QuantizedTensor
from pallas_kernels.common import numerics

if TYPE_CHECKING:
    from moe_jax._config import MoEConfig


@dataclasses.dataclass(frozen=True)
class Fp8MoEMethod(MoEMethod):
    """Weights stay float8_e4m3fn from file to product; scales are float32.

    legacy_fp16_requant: reproduce what vLLM makes of per-tensor scales that differ between gate and up: both halves are
    dequantized to float16 and quantized again with the larger scale. Loses bits, and what exceeds 65504 saturates.
    """

    legacy_fp16_requant: bool = False

    def process_weights_after_loading(self, leaves: Mapping[str, Any], config: "MoEConfig") -> ExpertWeights:
        weights = super().process_weights_after_loading(leaves, config)
        if not self.legacy_fp16_requant or self.weight_format.strategy is not Strategy.TENSOR:
            return weights
        return dataclasses.replace(weights, w13=_requantized(weights.w13))

    def quantize_stack(self, w: Any, param_dtype: Any) -> dict[str, Any]:
        data, scale = quantize_experts(w, self.weight_format)
        return {"weight": data, "weight_scale": scale}


def _requantized(w13: QuantizedTensor) -> QuantizedTensor:
    """Both halves of each expert with the larger of their scales, by way of float16."""
    scale = jnp.asarray(w13.scale)
    common = jnp.broadcast_to(scale.max(axis=1, keepdims=True), scale.shape)
    values = numerics.round_to_float(
        numerics.widen(jnp.asarray(w13.data), jnp.float32) * scale[..., None, None], jnp.float16
    )
    data = numerics.cast_e4m3(values * numerics.reciprocal(common)[..., None, None])
    return dataclasses.replace(w13, data=data, scale=common)
