"""Quantized formats, schemes and tensors, and ``MoEMethod``, which makes them. No I/O and no routing here."""

from moe_jax.quantization._code_checks import check_codes, check_groups
from moe_jax.quantization._config_formats import container_of
from moe_jax.quantization._formats import ELEMENTS, ElementType, Packing, QuantFormat, Strategy
from moe_jax.quantization._integers import repack_integers
from moe_jax.quantization._method import ExpertShape, LeafSpec, MoEMethod, method_for
from moe_jax.quantization._numerics import (
    dequantize,
    dequantize_tensor,
    fake_quantize,
    quantize_activations,
    quantize_weight,
    stored_codes,
)
from moe_jax.quantization._scale_checks import check_scale_values, common_input_scale
from moe_jax.quantization._scale_search import ScaleSearchMoEMethod
from moe_jax.quantization._schemes import (
    ALIASES,
    SCHEMES,
    Scheme,
    SchemeLike,
    online_scheme,
    parse_scheme,
    scheme_per_token,
)
from moe_jax.quantization._tensors import AdaptedWeights, ExpertWeights, LowRank, QuantizedMatrix, QuantizedTensor

__all__ = [
    "ALIASES",
    "ELEMENTS",
    "SCHEMES",
    "AdaptedWeights",
    "ElementType",
    "ExpertShape",
    "ExpertWeights",
    "LeafSpec",
    "LowRank",
    "MoEMethod",
    "Packing",
    "QuantFormat",
    "QuantizedMatrix",
    "QuantizedTensor",
    "ScaleSearchMoEMethod",
    "Scheme",
    "SchemeLike",
    "Strategy",
    "check_codes",
    "check_groups",
    "check_scale_values",
    "common_input_scale",
    "container_of",
    "dequantize",
    "dequantize_tensor",
    "fake_quantize",
    "method_for",
    "online_scheme",
    "parse_scheme",
    "quantize_activations",
    "quantize_weight",
    "repack_integers",
    "scheme_per_token",
    "stored_codes",
]
