"""From ``quant_config`` to the method that serves a layer."""

from collections.abc import Mapping
from typing import Any

from moe_jax import Scheme
from torch_bridge._fp8 import Fp8MoEMethod
from torch_bridge._method_base import FusedMoEMethodBase
from torch_bridge._methods import SchemeMoEMethod, UnquantizedFusedMoEMethod
from torch_bridge._online import SchemeOnlineMoEMethod


def resolve_method(quant_config: Any, layer: Any, prefix: str, *, online: bool) -> FusedMoEMethodBase:
    """The method for ``FusedMoE(quant_config=, online=)``.

    Raises what ``Scheme.parse`` raises for a name or config, TypeError for an object that yields no method of experts.
    """
    if isinstance(quant_config, FusedMoEMethodBase):
        method = quant_config
    elif quant_config is None or isinstance(quant_config, str | Scheme | Mapping):
        scheme = Scheme.parse(quant_config)
        if online:
            return SchemeOnlineMoEMethod(scheme, layer.moe_config)
        moe = layer.moe_config
        if isinstance(quant_config, Mapping) and quant_config.get("quant_method") == "fp8":
            return Fp8MoEMethod(quant_config, layer)
        return SchemeMoEMethod(scheme, moe) if scheme.is_quantized else UnquantizedFusedMoEMethod(moe)
    elif hasattr(quant_config, "get_quant_method"):
        method = quant_config.get_quant_method(layer, prefix)
        method = UnquantizedFusedMoEMethod(layer.moe_config) if method is None else method
    else:
        raise TypeError(
            f"quant_config is a {type(quant_config).__name__}, expected None, a scheme's name, a Scheme, a dict, a "
            "FusedMoEMethodBase or an object with get_quant_method"
        )
    if not isinstance(method, FusedMoEMethodBase):
        raise TypeError(f"quant_config gave a {type(method).__name__} for {prefix!r}, expected a FusedMoEMethodBase")
    if online:
        raise ValueError("online=True is for a scheme; a method object says by itself whether it quantizes")
    return _told(method, layer)


def _told(method: FusedMoEMethodBase, layer: Any) -> FusedMoEMethodBase:
    """The method, with the layer's configuration where it has none of its own."""
    if getattr(method, "moe", None) is None:
        method.moe = layer.moe_config
    return method
