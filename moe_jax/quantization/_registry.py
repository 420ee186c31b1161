"""Which method serves which scheme."""

from collections.abc import Mapping
from typing import Any

from moe_jax.quantization._format import Scheme, Strategy
from moe_jax.quantization._fp8 import Fp8MoEMethod
from moe_jax.quantization._int8 import Int8MoEMethod
from moe_jax.quantization._methods import MoEMethod
from moe_jax.quantization._microscaling import MicroscalingMoEMethod
from moe_jax.quantization._unquantized import UnquantizedMoEMethod
from moe_jax.quantization._wna16 import WNA16MoEMethod


def method_for(scheme: str | Scheme | Mapping[str, Any] | None) -> MoEMethod:
    """The method of a scheme, given as anything ``Scheme.parse`` accepts (and raising what it raises)."""
    scheme = Scheme.parse(scheme)
    return _method_class(scheme)(scheme)


def _method_class(scheme: Scheme) -> type[MoEMethod]:
    weights = scheme.weights
    if weights is None:
        return UnquantizedMoEMethod
    if weights.element_type.is_float:
        return Fp8MoEMethod if weights.scale == "float32" else MicroscalingMoEMethod
    is_plain_int8 = weights.element == "int8" and weights.packing is None and weights.symmetric
    return Int8MoEMethod if is_plain_int8 and weights.strategy is Strategy.CHANNEL else WNA16MoEMethod
