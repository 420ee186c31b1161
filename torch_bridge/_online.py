"""Quantizing a full-precision checkpoint while it is loaded: vLLM's base class, and its callback protocol."""

from typing import Any, Protocol, runtime_checkable

import torch

from moe_jax import Scheme
from moe_jax.quantization import LeafSpec, method_for
from torch_bridge._hosted import ModuleLoader, described, shape_of
from torch_bridge._just_in_time import JustInTime
from torch_bridge._leaf_layout import LeafLayout
from torch_bridge._method_base import MoELayer
from torch_bridge._methods import SchemeMoEMethod, note, register_leaf
from torch_bridge._moe_config import FusedMoEConfig


class OnlineMoEMethodBase(SchemeMoEMethod):
    """A method whose checkpoints are full precision: placeholders without memory, processed by the last tensor.

    In ``FusedMoE`` every expert is quantized as soon as its tensors are there, so that a layer never exists in full
    precision. Other modules get memory with the first tensor, and are quantized expert by expert after the last.
    """

    uses_meta_device = True

    def __init__(self, moe: FusedMoEConfig | None = None, *, scheme: Any = None):
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

    def before_parameters(
        self, layer: torch.nn.Module, specs: dict[str, LeafSpec], device: torch.device, attributes: dict[str, Any]
    ) -> torch.device:
        """On the meta device: memory comes with the first tensor."""
        if not isinstance(layer, MoELayer):
            note(layer, _load_device=device)
            self._incoming = JustInTime(layer, specs, device, lambda: self.process_weights_after_loading(layer))
            attributes |= {"weight_loader": self._incoming.tracked(attributes["weight_loader"])}
        return torch.device("meta")

    def process_module(self, module: torch.nn.Module) -> None:
        """Quantize what was loaded; dummy values where nothing was. Does nothing for a module that is processed."""
        if getattr(module, "_already_called_process_weights_after_loading", False):
            return
        self._incoming.fill(type(module).__name__)
        super().process_module(module)
        module._already_called_process_weights_after_loading = True  # pyright: ignore[reportArgumentType]


class SchemeOnlineMoEMethod(OnlineMoEMethodBase):
    """``OnlineMoEMethodBase`` for any scheme with dynamic activations."""

    def __init__(self, scheme: Any, moe: FusedMoEConfig | None = None):
        super().__init__(moe, scheme=scheme)


class Int8OnlineMoEMethod(OnlineMoEMethodBase):
    """int8 rows with one scale each, activations left alone (W8A16, what vLLM computes under this name)."""

    def __init__(self, *, layer: Any = None, scheme: str | Scheme = "int8_w8a16"):
        """layer: the layer it will serve, as in vLLM; only its ``moe_config`` is kept."""
        super().__init__(getattr(layer, "moe_config", None), scheme=scheme)
        weights = self.scheme.weights
        if weights is None or weights.element != "int8" or weights.strategy.value != "channel":
            raise ValueError(f"Int8OnlineMoEMethod: scheme {self.scheme.name!r}, expected 'int8_w8a16' or 'int8_w8a8'")

    def layout(self, leaf: str, params_dtype: torch.dtype | None = None) -> LeafLayout:
        """w13_scale (E, 2I) and w2_scale (E, H), as vLLM has them."""
        if leaf.endswith("_weight_scale"):
            return LeafLayout(leaf.replace("_weight_scale", "_scale"), is_flat=True)
        return super().layout(leaf, params_dtype)


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

    A method composes one: its ``create_weights`` and ``process_weights_after_loading`` call the helper's. The layer is
    ``FusedMoE`` or any other module. Callbacks may have a ``moe`` whose ``has_bias`` says that there are biases.
    """

    def __init__(self, moe_quant_callbacks: MoeOnlineQuantizer):
        if not isinstance(moe_quant_callbacks, MoeOnlineQuantizer):
            raise TypeError(
                f"moe_quant_callbacks is a {type(moe_quant_callbacks).__name__}, expected create_scale_tensors, "
                "get_quantized_dtype, quantize_expert and setup_kernel"
            )
        self.moe_quant_callbacks = moe_quant_callbacks

    def create_weights(
        self,
        layer: torch.nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Placeholders for w13_weight and w2_weight, biases where the layer has them, and the callbacks' scales.

        extra_weight_attrs: without a ``weight_loader`` among them parameters get one of their own.
        """
        sizes = num_experts, hidden_size, intermediate_size_per_partition
        device = getattr(layer, "device", None) or torch.get_default_device()
        moe = described(layer, sizes, params_dtype)
        has_bias = moe.has_bias or getattr(getattr(self.moe_quant_callbacks, "moe", None), "has_bias", False)
        specs = method_for(None).create_weights(shape_of(layer, moe, sizes, params_dtype, has_bias=has_bias))
        note(
            layer,
            num_experts=num_experts,
            hidden_size=hidden_size,
            intermediate_size_per_partition=intermediate_size_per_partition,
            orig_dtype=params_dtype,
            local_num_experts=num_experts,
            _load_device=device,
        )
        self._incoming = JustInTime(layer, specs, device, lambda: self._complete(layer))
        loader = extra_weight_attrs.get("weight_loader") or ModuleLoader(layer, self, moe)
        attributes = extra_weight_attrs | {"weight_loader": self._incoming.tracked(loader)}
        for name, spec in specs.items():
            register_leaf(layer, name, spec, LeafLayout(name), torch.device("meta"), attributes)
        scales = self.moe_quant_callbacks.create_scale_tensors(
            layer, num_experts, intermediate_size_per_partition, hidden_size
        )
        for name, scale in zip(("w13_weight_scale", "w2_weight_scale"), scales, strict=True):
            layer.register_parameter(name, scale)
        for name in ("w13_input_scale", "w2_input_scale"):
            layer.register_parameter(name, None)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Quantize and set up, unless the last tensor did it.

        A layer without any tensor gets dummy values, as in vLLM. Raises ValueError for what is missing.
        """
        if getattr(layer, "_already_called_process_weights_after_loading", False):
            return
        self._incoming.fill(getattr(layer, "layer_name", type(layer).__name__))
        self._complete(layer)

    def quantize_and_setup_kernel(self, layer: torch.nn.Module) -> None:
        """Expert by expert through the callbacks, then their ``setup_kernel``."""
        callbacks, quantized, scales = self.moe_quant_callbacks, [], []
        for name in ("w13_weight", "w2_weight"):
            weight, scale = getattr(layer, name).data, getattr(layer, f"{name}_scale").data
            q = torch.empty(weight.shape, dtype=callbacks.get_quantized_dtype(), device=weight.device)
            for expert in range(weight.shape[0]):
                q[expert], scale[expert] = callbacks.quantize_expert(weight[expert])
            quantized.append(q)
            scales.append(scale)
        callbacks.setup_kernel(layer, quantized[0], quantized[1], scales[0], scales[1])

    def _complete(self, layer: torch.nn.Module) -> None:
        self.quantize_and_setup_kernel(layer)
        layer._already_called_process_weights_after_loading = True  # pyright: ignore[reportArgumentType]
