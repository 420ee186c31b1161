"""Quantized formats, schemes and tensors; one file per method. No I/O and no routing here."""

from moe_jax.quantization._format import ELEMENTS, ElementType, Packing, QuantFormat, Scheme, Strategy
from moe_jax.quantization._integers import repack_integers
from moe_jax.quantization._methods import LeafSpec, MoEMethod
from moe_jax.quantization._microscaling_schemes import online_scheme
from moe_jax.quantization._numerics import (
    dequantize,
    dequantize_tensor,
    fake_quantize,
    quantize_activations,
    quantize_weight,
    stored_codes,
)
from moe_jax.quantization._registry import method_for
from moe_jax.quantization._scale_search import ScaleSearchMoEMethod
from moe_jax.quantization._schemes import ALIASES, SCHEMES, parse_scheme
from moe_jax.quantization._tensors import ExpertWeights, QuantizedTensor

__all__ = [
    "ALIASES",
    "ELEMENTS",
    "SCHEMES",
    "ElementType",
    "ExpertWeights",
    "LeafSpec",
    "MoEMethod",
    "Packing",
    "QuantFormat",
    "QuantizedTensor",
    "ScaleSearchMoEMethod",
    "Scheme",
    "Strategy",
    "dequantize",
    "dequantize_tensor",
    "fake_quantize",
    "method_for",
    "online_scheme",
    "parse_scheme",
    "quantize_activations",
    "quantize_weight",
    "repack_integers",
    "stored_codes",
]
