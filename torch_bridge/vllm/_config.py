# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""A quantization config that leaves everything to the checkpoint's own, but for routed experts."""

import logging
from typing import Any

import torch
import vllm
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

logger = logging.getLogger("vllm.moe_jax")

# Versions whose layers and methods are known here.
KNOWN = ("0.24.",)
# vLLM's names of what it does to full-precision checkpoints while it loads them.
ONLINE = ("fp8", "fp8_per_tensor", "fp8_per_channel", "fp8_per_block", "int8_per_channel_weight_only", "mxfp8")


class MoeJaxConfig(QuantizationConfig):
    """vLLM's config of a checkpoint, with another method for the routed experts that our kernels take.

    inner: the config of the checkpoint; None for an unquantized model. A version of vLLM that is not known keeps all
    layers, which is logged in one line.
    """

    online: str | None = None  # of ``ONLINE``, in subclasses

    def __init__(self, inner: QuantizationConfig | None = None):
        self.inner = self._online_config() if inner is None and self.online is not None else inner
        self.is_known = vllm.__version__.startswith(KNOWN)
        if not self.is_known:
            known = ", ".join(f"{version}x" for version in KNOWN)
            logger.warning("moe_jax leaves all layers to vLLM %s, which is not known; %s is", vllm.__version__, known)
        super().__init__()

    @classmethod
    def _online_config(cls) -> QuantizationConfig:
        from vllm.config.quantization import resolve_quantization_config
        from vllm.model_executor.layers.quantization import get_quantization_config
        from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig

        assert cls.online is not None
        arguments = resolve_quantization_config(cls.online, None)
        return get_quantization_config(cls.online)() if arguments is None else OnlineQuantizationConfig(arguments)

    # vLLM writes this one while it builds the model; what decides is the inner config.
    @property
    def packed_modules_mapping(self) -> dict[str, list[str]]:
        return self.__dict__.setdefault("_mapping", {}) if self.inner is None else self.inner.packed_modules_mapping

    @packed_modules_mapping.setter
    def packed_modules_mapping(self, mapping: dict[str, list[str]]) -> None:
        if mapping and self.inner is not None:
            self.inner.packed_modules_mapping = mapping

    def __getattr__(self, name: str) -> Any:  # ignore, target_scheme_map, weight_block_size, ...
        if name == "inner" or self.inner is None:
            raise AttributeError(f"{type(self).__name__} has no {name}")
        return getattr(self.inner, name)

    def get_name(self) -> Any:
        """The checkpoint's, by which vLLM's loader goes."""
        return "moe_jax" if self.inner is None else self.inner.get_name()

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16] if self.inner is None else self.inner.get_supported_act_dtypes()

    @classmethod
    def get_min_capability(cls) -> int:
        return 0  # what our kernels do not take is left to vLLM

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "MoeJaxConfig":
        from vllm.model_executor.layers.quantization import get_quantization_config

        if cls.online is not None:
            raise ValueError(
                f"quantization={cls.__name__!r} is for full-precision checkpoints, this one is quantized "
                f"({config.get('quant_method')}); use quantization='moe_jax'"
            )
        return cls(get_quantization_config(_method_of(config)).from_config(config))

    @classmethod
    def override_quantization_method(cls, hf_quant_cfg: Any, user_quant: str | None, hf_config: Any = None) -> Any:
        return user_quant if user_quant == cls.__name__ else None

    def get_quant_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        if not self.is_known:
            return self._vllms_method(layer, prefix)
        from vllm.model_executor.layers.fused_moe import RoutedExperts
        from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

        if not isinstance(layer, RoutedExperts):
            return self._vllms_method(layer, prefix)
        from torch_bridge.vllm._int4 import int4_method
        from torch_bridge.vllm._method import taken

        method = int4_method(self.inner, layer, prefix)
        if method is not None:
            ours = taken(method, layer, prefix, vllm_runs_it=False)
            return self._vllms_method(layer, prefix) if ours is method else ours
        method = self._vllms_method(layer, prefix)
        return taken(method or UnquantizedFusedMoEMethod(layer.moe_config), layer, prefix)

    def _vllms_method(self, layer: torch.nn.Module, prefix: str) -> Any:
        if self.inner is not None:
            return self.inner.get_quant_method(layer, prefix)
        from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

        return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        if self.inner is not None:
            self.inner.apply_vllm_mapper(hf_to_vllm_mapper)

    def get_cache_scale_mapper(self) -> Any:
        return super().get_cache_scale_mapper() if self.inner is None else self.inner.get_cache_scale_mapper()

    def is_mxfp4_quant(self, prefix: str, layer: torch.nn.Module) -> bool:
        return self.inner is not None and self.inner.is_mxfp4_quant(prefix, layer)

    def maybe_update_config(self, *args: Any, **kwargs: Any) -> None:
        if self.inner is not None:
            self.inner.maybe_update_config(*args, **kwargs)


def _named(name: str, **members: Any) -> type[MoeJaxConfig]:
    return type(name, (MoeJaxConfig,), {"__module__": __name__, **members})


# By the names under which vLLM knows them, which are the classes' own: workers get configs by way of pickles.
CONFIGS = {"moe_jax": _named("moe_jax")} | {
    f"moe_jax_{online}": _named(f"moe_jax_{online}", online=online) for online in ONLINE
}
globals().update(CONFIGS)


def _method_of(config: dict[str, Any]) -> str:
    """vLLM's own name of a checkpoint's method: several of its configs claim checkpoints of one "quant_method"."""
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, get_quantization_config

    for name in QUANTIZATION_METHODS:
        known = get_quantization_config(name)
        if not issubclass(known, MoeJaxConfig):
            found = known.override_quantization_method(config, None)
            if found is not None:
                return str(found)
    return str(config["quant_method"])
