"""Quantizing a full-precision checkpoint while it is loaded: vLLM's base class and its callback protocol."""

import dataclasses
import warnings
from typing import Any, Protocol, runtime_checkable

import torch

from moe_jax import Scheme
from moe_jax.loading import LayerLoader
from moe_jax.quantization import method_for
from torch_bridge._methods import MoELayer, SchemeMoEMethod, leaf_specs, register_placeholder, replace_parameter
from torch_bridge._state import stored_leaves


class OnlineMoEMethodBase(SchemeMoEMethod):
    """A method whose checkpoints are full precision: placeholders without memory, processed by the last tensor.

    Every expert is quantized as soon as its tensors are there, so that a layer never exists in full precision.
    """

    uses_meta_device = True

    def __init__(self, moe: Any = None, *, scheme: Any = None):
        """scheme: what to quantize to. Raises ValueError for static activation scales, which only a checkpoint has."""
        super().__init__(scheme, moe)
        activations = self.scheme.activations
        if activations is not None and activations.needs_input_scale:
            raise ValueError(
                f"scheme {self.scheme.name!r} needs input scales, which a full-precision checkpoint does not have; "
                "quantize with a scheme of dynamic activations"
            )

    @property
    def quantizes_online(self) -> bool:
        return self.scheme.is_quantized


class SchemeOnlineMoEMethod(OnlineMoEMethodBase):
    """``OnlineMoEMethodBase`` for any scheme with dynamic activations."""

    def __init__(self, scheme: Any, moe: Any = None):
        super().__init__(moe, scheme=scheme)


class Int8OnlineMoEMethod(OnlineMoEMethodBase):
    """int8 rows with one scale each, activations left alone (W8A16, what vLLM computes under this name)."""

    _EXPORTED = {"w13_weight_scale": "w13_scale", "w2_weight_scale": "w2_scale"}

    def __init__(self, *, layer: MoELayer | None = None, scheme: str | Scheme = "int8_w8a16"):
        """layer: the layer it will serve, as in vLLM; only its configuration is kept."""
        super().__init__(getattr(layer, "moe_config", None), scheme=scheme)
        weights = self.scheme.weights
        if weights is None or weights.element != "int8" or weights.strategy.value != "channel":
            raise ValueError(f"Int8OnlineMoEMethod: scheme {self.scheme.name!r}, expected 'int8_w8a16' or 'int8_w8a8'")

    def exported_name(self, leaf: str) -> str:
        return self._EXPORTED.get(leaf, leaf)

    def stored_name(self, exported: str) -> str:
        return {new: old for old, new in self._EXPORTED.items()}.get(exported, exported)


@runtime_checkable
class MoeOnlineQuantizer(Protocol):
    """A number format of one's own, for ``MoeOnlineWeightQuantizer``. Tensors are torch's."""

    def create_scale_tensors(
        self, layer: torch.nn.Module, num_experts: int, intermediate_size_per_partition: int, hidden_size: int
    ) -> tuple[torch.nn.Parameter, torch.nn.Parameter]:
        """The scales of w13 and w2, experts first; kept as w13_weight_scale and w2_weight_scale."""
        ...

    def get_quantized_dtype(self) -> torch.dtype:
        """dtype of both quantized weights."""
        ...

    def quantize_expert(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One matrix (out, in) -> the same shape in the quantized dtype, and what is stored at scale[expert].

        w13 comes with both projections, gate rows first: a scale per tensor is one for both.
        """
        ...

    def setup_kernel(
        self,
        layer: torch.nn.Module,
        w13: torch.Tensor,
        w2: torch.Tensor,
        w13_scale: torch.Tensor,
        w2_scale: torch.Tensor,
    ) -> None:
        """Make the layer ready to run, for instance by ``layer.install`` or by parameters that ``apply`` reads."""
        ...


class MoeOnlineWeightQuantizer:
    """Loads full-precision weights for a method and has callbacks quantize them once they are complete.

    A method composes one: its ``create_weights`` and ``process_weights_after_loading`` call the helper's.
    """

    def __init__(self, callbacks: MoeOnlineQuantizer):
        if not isinstance(callbacks, MoeOnlineQuantizer):
            raise TypeError(
                f"callbacks is a {type(callbacks).__name__}, expected create_scale_tensors, get_quantized_dtype, "
                "quantize_expert and setup_kernel"
            )
        self.callbacks = callbacks

    def create_weights(
        self,
        layer: MoELayer,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Placeholders for w13_weight and w2_weight, biases where the layer has them, and the callbacks' scales."""
        sizes = num_experts, hidden_size, intermediate_size_per_partition
        attributes = extra_weight_attrs | {"weight_loader": self._loader_for(layer)}
        for name, spec in leaf_specs(layer, method_for(None), sizes, params_dtype).items():
            register_placeholder(layer, name, spec, attributes)
        scales = self.callbacks.create_scale_tensors(layer, num_experts, intermediate_size_per_partition, hidden_size)
        for name, scale in zip(("w13_weight_scale", "w2_weight_scale"), scales, strict=True):
            layer.register_parameter(name, scale)
        for name in ("w13_input_scale", "w2_input_scale"):
            layer.register_parameter(name, None)
        self._processed = False
        self._loader: LayerLoader | None = None

    def process_weights_after_loading(self, layer: MoELayer) -> None:
        """Quantize and set up, unless the last tensor did it.

        A layer without any tensor gets dummy values, as in vLLM.
        """
        if self._processed:
            return
        if self._loader is None:
            warnings.warn(f"{layer.layer_name}: nothing was loaded; weights are dummy values", stacklevel=3)
            self._loader = self._new_loader(layer)
            self._loader.fill_dummy()
        self.quantize_and_setup(layer)

    def quantize_and_setup(self, layer: MoELayer) -> None:
        """Expert by expert through the callbacks, then their ``setup_kernel``.

        Raises ValueError for what is missing.
        """
        assert self._loader is not None
        config = dataclasses.replace(layer.local_config, scheme=Scheme.parse(None))
        leaves = stored_leaves(self._loader.finish(), config)
        self._loader = None
        quantized, scales = [], []
        for name in ("w13_weight", "w2_weight"):
            weight, scale = leaves[name], getattr(layer, f"{name}_scale").data
            q = torch.empty(weight.shape, dtype=self.callbacks.get_quantized_dtype(), device=weight.device)
            for expert in range(weight.shape[0]):
                q[expert], scale[expert] = self.callbacks.quantize_expert(weight[expert])
            quantized.append(q)
            scales.append(scale)
        for name in ("w13_bias", "w2_bias"):
            if name in leaves:
                replace_parameter(layer, name, leaves[name])
        self.callbacks.setup_kernel(layer, quantized[0], quantized[1], scales[0], scales[1])
        self._processed = True

    def _new_loader(self, layer: MoELayer) -> LayerLoader:
        return LayerLoader(layer.config, method_for(None), shard=layer.rank.shard, fused_layout="out_in")

    def _loader_for(self, layer: MoELayer) -> Any:
        def weight_loader(param, loaded_weight, weight_name, shard_id, expert_id, return_success=False):
            if self._processed:
                raise ValueError(f"{weight_name}: {layer.layer_name} is already processed")
            self._loader = self._loader or self._new_loader(layer)
            tensor = layer.expert_tensor(param, weight_name, shard_id, expert_id)
            used = layer.accept_into(self._loader, tensor, loaded_weight)
            if not self._loader.missing():
                self.quantize_and_setup(layer)
            return used if return_success else None

        return weight_loader
