"""``FusedMoEMethodBase`` and the method that serves every scheme of moe_jax: vLLM's verbs over ``MoEMethod``."""

import abc
import dataclasses
from typing import Any, ClassVar

import numpy as np
import torch

from moe_jax import ExpertWeights, MoEConfig, Scheme
from moe_jax.loading import ExpertTensor
from moe_jax.quantization import LeafSpec, MoEMethod, method_for
from torch_bridge import _ops
from torch_bridge._moe_config import FusedMoEConfig
from torch_bridge._rank import Rank
from torch_bridge._tensors import to_torch, torch_dtype


class MoELayer(torch.nn.Module):
    """What a method reads of the layer that it serves: the base of ``torch_bridge.FusedMoE``."""

    moe_config: FusedMoEConfig
    config: MoEConfig
    local_config: MoEConfig
    rank: Rank
    layer_name: str

    @property
    def correction_bias(self) -> torch.Tensor | None:
        """(E,) of the router, None without one."""
        raise NotImplementedError

    @property
    def routes_in_torch(self) -> bool:
        """Whether experts are chosen by a torch function, which no operator contains."""
        raise NotImplementedError

    @property
    def expert_weights(self) -> ExpertWeights:
        """What is processed, as checkpoints store it."""
        raise NotImplementedError

    def finish_loading(self) -> None:
        """Process what is loaded."""
        raise NotImplementedError

    def expert_tensor(
        self, param: torch.Tensor, weight_name: str, shard_id: str | None, expert_id: int | None
    ) -> ExpertTensor:
        """The arguments of ``weight_loader`` as loaders take them."""
        raise NotImplementedError

    def accept_into(self, loader: Any, tensor: ExpertTensor, loaded: torch.Tensor) -> bool:
        """Stage one tensor of the whole layer; whether a part of it was kept."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class FusedMoEQuantConfig:
    """The scales of a processed layer, by vLLM's names; tensors share memory with the layer's weights.

    quant_dtype, weight_dtype: element types of activations and weights, None where unquantized. w1 is w13, a1 and a2
    are the static scales of the activations before w13 and w2, g1 and g2 the global scales of NVFP4 as stored.
    """

    quant_dtype: str | None
    weight_dtype: str | None
    per_act_token_quant: bool
    per_out_ch_quant: bool
    block_shape: tuple[int, int] | None
    w1_scale: torch.Tensor | None = None
    w2_scale: torch.Tensor | None = None
    w1_zp: torch.Tensor | None = None
    w2_zp: torch.Tensor | None = None
    w1_bias: torch.Tensor | None = None
    w2_bias: torch.Tensor | None = None
    a1_scale: torch.Tensor | None = None
    a2_scale: torch.Tensor | None = None
    g1_alphas: torch.Tensor | None = None
    g2_alphas: torch.Tensor | None = None


class FusedMoEMethodBase(abc.ABC):
    """What a layer asks of its quantization method: create, process, apply, under the names of vLLM.

    A subclass of your own may register whatever parameters it likes in ``create_weights`` and compute in torch in
    ``apply``; those of this package keep their weights in moe_jax.
    """

    uses_meta_device: ClassVar[bool] = False

    def __init__(self, moe: Any = None):
        """moe: the layer's configuration, kept for whoever asks for it."""
        self.moe = moe
        self.moe_quant_config: FusedMoEQuantConfig | None = None

    @abc.abstractmethod
    def create_weights(
        self,
        layer: torch.nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Register the parameters of the experts of one rank.

        extra_weight_attrs: set on each, ``weight_loader`` too.
        """

    @abc.abstractmethod
    def apply(
        self,
        layer: MoELayer,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x (T, H), topk_weights and global topk_ids (T, k) -> the routed output (T, H) in x's dtype."""

    @abc.abstractmethod
    def get_fused_moe_quant_config(self, layer: torch.nn.Module) -> FusedMoEQuantConfig | None:
        """The scales of a processed layer, None when it is not quantized."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:  # noqa: B027
        """Turn what was loaded into what ``apply`` reads; nothing to do for one that reads them as loaded."""

    def apply_monolithic(
        self,
        layer: MoELayer,
        x: torch.Tensor,
        router_logits: torch.Tensor,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``apply`` with routing inside. Raises NotImplementedError where a method leaves routing to the layer."""
        raise NotImplementedError(f"{type(self).__name__} is not monolithic; route first, then call apply")

    def maybe_make_prepare_finalize(self, routing_tables: Any = None) -> Any:
        """vLLM's hook for dispatch kernels. Raises ValueError: methods here own their whole computation."""
        raise ValueError(
            f"{type(self).__name__} uses its own kernels from dispatch to combine; there is no prepare/finalize to make"
        )

    def select_gemm_impl(self, prepare_finalize: Any, layer: torch.nn.Module) -> Any:
        """vLLM's older hook. Raises NotImplementedError: the implementation is chosen per call."""
        raise NotImplementedError(
            f"{type(self).__name__} has no GEMM to select; moe_jax chooses an implementation per call, name one with "
            "implementation="
        )

    @property
    def scheme(self) -> Scheme:
        """What moe_jax is told of the weights; unquantized for a method that keeps them by itself."""
        return Scheme.parse(None)

    @property
    def is_monolithic(self) -> bool:
        return False

    @property
    def supports_eplb(self) -> bool:
        return False

    @property
    def supports_internal_mk(self) -> bool:
        """Whether the method owns dispatch, experts and combine."""
        return False

    @property
    def topk_indices_dtype(self) -> torch.dtype | None:
        return None

    @property
    def has_unpadded_output(self) -> bool:
        return False

    @property
    def skip_forward_padding(self) -> bool:
        return False

    @property
    def use_global_sf(self) -> bool:
        """Whether input scales of experts of other ranks are loaded too."""
        return False


class SchemeMoEMethod(FusedMoEMethodBase):
    """Weights as a checkpoint of one scheme stores them, computed by moe_jax."""

    def __init__(self, scheme: Any = None, moe: Any = None):
        """scheme: anything ``Scheme.parse`` accepts, and raising what it raises."""
        super().__init__(moe)
        self.method: MoEMethod = method_for(scheme)

    @property
    def scheme(self) -> Scheme:
        return self.method.scheme

    @property
    def quantizes_online(self) -> bool:
        """Whether checkpoints are full precision and get quantized while they are loaded."""
        return False

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        method = method_for(None) if self.quantizes_online else self.method
        sizes = num_experts, hidden_size, intermediate_size_per_partition
        specs = leaf_specs(layer, method, sizes, params_dtype)
        weights = method.scheme.weights
        if weights is not None and weights.packing is not None and not weights.element_type.is_float:
            lead = (num_experts, 2)
            specs |= {f"{w}_weight_shape": LeafSpec(lead, np.dtype(np.int32), "weight_shape") for w in ("w13", "w2")}
        for name, spec in specs.items():
            register_placeholder(layer, name, spec, {**_kind(spec, weights), **extra_weight_attrs})
        for name in ("w13_input_scale", "w2_input_scale"):
            if name not in specs:  # vLLM's layers have the attribute all the same
                layer.register_parameter(name, None)

    def exported_name(self, leaf: str) -> str:
        """What a state dict calls a leaf; another name than the leaf's where vLLM has one of its own."""
        return leaf

    def stored_name(self, exported: str) -> str:
        """The inverse of ``exported_name``."""
        return exported

    def process_weights_after_loading(self, layer: MoELayer) -> None:
        layer.finish_loading()
        self.moe_quant_config: FusedMoEQuantConfig | None = self.get_fused_moe_quant_config(layer)

    def apply(self, layer: Any, x: Any, topk_weights: Any, topk_ids: Any, shared_experts_input: Any = None) -> Any:
        return _ops.call(_ops.fused_experts_op, x, topk_weights, topk_ids, layer.layer_name)

    def apply_monolithic(self, layer: Any, x: Any, router_logits: Any, shared_experts_input: Any = None) -> Any:
        if layer.routes_in_torch:
            return self.apply(layer, x, *layer.select_experts(x, router_logits))
        return _ops.call(_ops.fused_moe_op, x, router_logits, layer.correction_bias, None, layer.layer_name)

    def get_fused_moe_quant_config(self, layer: MoELayer) -> FusedMoEQuantConfig | None:
        weights, activations = self.scheme.weights, self.scheme.activations
        if weights is None:
            return None
        return FusedMoEQuantConfig(
            quant_dtype=None if activations is None else activations.element,
            weight_dtype=weights.element,
            per_act_token_quant=activations is not None and activations.strategy.value == "token",
            per_out_ch_quant=weights.strategy.value == "channel",
            block_shape=weights.block_shape or (None if weights.group_size is None else (1, weights.group_size)),
            **_scales(layer.expert_weights),
        )

    @property
    def is_monolithic(self) -> bool:
        return True

    @property
    def supports_internal_mk(self) -> bool:
        return True

    @property
    def topk_indices_dtype(self) -> torch.dtype | None:
        return torch.int32

    @property
    def use_global_sf(self) -> bool:
        activations = self.scheme.activations
        return activations is not None and activations.needs_input_scale


class UnquantizedFusedMoEMethod(SchemeMoEMethod):
    """Experts in the parameters' dtype."""

    def __init__(self, moe: Any = None):
        super().__init__(None, moe)


def set_weight_attrs(parameter: torch.Tensor, attributes: dict[str, Any]) -> None:
    """Set what a loader reads on a parameter.

    Raises AssertionError for an attribute that it has already, as in vLLM.
    """
    for name, value in attributes.items():
        if hasattr(parameter, name):
            raise AssertionError(f"Overwriting existing tensor attribute: {name}")
        setattr(parameter, name, value)


def replace_parameter(layer: torch.nn.Module, name: str, tensor: torch.Tensor | None) -> None:
    """Put a tensor in the place of a parameter, with the attributes of the old one; None removes it."""
    old = getattr(layer, name, None)
    if tensor is None:
        layer.register_parameter(name, None)
        return
    parameter = torch.nn.Parameter(tensor, requires_grad=False)
    for key, value in vars(old).items() if old is not None else ():
        setattr(parameter, key, value)
    layer.register_parameter(name, parameter)


def placeholder(spec: LeafSpec) -> torch.nn.Parameter:
    """A parameter of a leaf's shape and dtype on the meta device: no memory."""
    return torch.nn.Parameter(
        torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device="meta"), requires_grad=False
    )


def leaf_specs(
    layer: Any, method: MoEMethod, sizes: tuple[int, int, int], params_dtype: torch.dtype
) -> dict[str, LeafSpec]:
    """The leaves of one rank under a method; sizes: (experts, hidden, intermediate) of the rank."""
    experts, hidden, intermediate = sizes
    config = dataclasses.replace(
        layer.local_config,
        num_experts=experts,
        hidden_size=hidden,
        intermediate_size=intermediate,
        scheme=method.scheme,
        param_dtype=str(params_dtype).removeprefix("torch."),
    )
    return dict(method.create_weights(config))


def register_placeholder(layer: torch.nn.Module, name: str, spec: LeafSpec, attributes: dict[str, Any]) -> None:
    """Give a layer the parameter of a leaf, without memory, with what loaders read on it."""
    parameter = placeholder(spec)
    layer.register_parameter(name, parameter)
    set_weight_attrs(parameter, {"leaf_name": name, **attributes})


def _kind(spec: LeafSpec, weights: Any) -> dict[str, Any]:
    kind: str | None = spec.kind
    if kind in ("weight", "zero_point", "channel_zero_point") and weights is not None and weights.packing is not None:
        kind = weights.strategy.value
    if kind in ("weight", "bias", "g_idx", "weight_shape", "input_scale"):
        kind = None
    return {"is_transposed": False, "load_full_w2": False} | ({} if kind is None else {"quant_method": kind})


def _scales(weights: ExpertWeights) -> dict[str, torch.Tensor | None]:
    def shown(array: Any) -> torch.Tensor | None:
        return None if array is None else to_torch(array)

    return {
        name: shown(array)
        for number, tensor, bias in ((1, weights.w13, weights.w13_bias), (2, weights.w2, weights.w2_bias))
        for name, array in (
            (f"w{number}_scale", tensor.scale),
            (f"w{number}_zp", tensor.zero_point),
            (f"w{number}_bias", bias),
            (f"a{number}_scale", tensor.input_scale),
            (f"g{number}_alphas", tensor.global_scale),
        )
    }
