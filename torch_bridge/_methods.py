"""Methods for every scheme of moe_jax: vLLM's verbs over ``MoEMethod``, for ``FusedMoE`` and other modules."""

import dataclasses
from typing import Any

import torch

from moe_jax import Scheme
from moe_jax.quantization import LeafSpec, MoEMethod, method_for
from torch_bridge import _ops
from torch_bridge._hosted import HostedExperts, ModuleLoader, described, host, hosted, shape_of
from torch_bridge._leaf_layout import LeafLayout
from torch_bridge._method_base import FusedMoEMethodBase, MoELayer, replace_parameter, set_weight_attrs
from torch_bridge._moe_config import FusedMoEConfig
from torch_bridge._quant_config import FusedMoEQuantConfig, quant_config_of
from torch_bridge._state import stored_leaves
from torch_bridge._tensors import torch_dtype

_PREFIXES = ("w13_", "w2_")
_UNREAD = {"is_transposed": False, "load_full_w2": False}  # what loaders read on every parameter


class SchemeMoEMethod(FusedMoEMethodBase):
    """Weights as a checkpoint of one scheme stores them, computed by moe_jax.

    It serves ``FusedMoE``, whose parameters are placeholders until they are loaded, and any other module: there
    parameters have memory on torch's default device, and the attributes that vLLM's loader reads. A module says what
    its layer is by attributes of vLLM's names (``activation``, ``top_k``, ``renormalize``, ``expert_map``,
    ``e_score_correction_bias``, ...), or else by the method's ``moe``. They are read while weights are processed.
    """

    def __init__(self, scheme: Any = None, moe: FusedMoEConfig | None = None):
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

    @property
    def stored_method(self) -> MoEMethod:
        """What checkpoints store."""
        return method_for(None) if self.quantizes_online else self.method

    def layout(self, leaf: str, params_dtype: torch.dtype | None = None) -> LeafLayout:
        """How this method's parameter keeps a leaf. params_dtype: of the layer, while parameters are created."""
        weights, inputs = self.scheme.weights, self.scheme.activations
        is_fp8 = weights is not None and weights.element == "e4m3" and inputs is not None
        return LeafLayout(leaf, is_common=is_fp8 and leaf.endswith("_input_scale"))

    def create_weights(
        self,
        layer: torch.nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        sizes, device = (num_experts, hidden_size, intermediate_size_per_partition), torch.device("meta")
        if isinstance(layer, MoELayer):
            specs = layer_specs(layer, self.stored_method, sizes, params_dtype)
        else:
            self.moe = moe = self.moe or described(layer, sizes, params_dtype)
            full = extra_weight_attrs.get("intermediate_size_full")
            experts = host(layer, shape_of(layer, moe, sizes, params_dtype, intermediate_size_full=full))
            specs, device = self._rows_of_all(experts, extra_weight_attrs), experts.device
            extra_weight_attrs.setdefault("weight_loader", ModuleLoader(layer, self, moe))
        note(layer, num_experts=num_experts, orig_dtype=params_dtype, weight_block_size=self._block_size)
        device = self.before_parameters(layer, specs, device, extra_weight_attrs)
        weights = self.stored_method.scheme.weights
        for name, spec in specs.items():
            layout = self.layout(name, params_dtype)
            attributes = {**_kind(name, spec, weights, layout), **extra_weight_attrs}
            register_leaf(layer, name, spec, layout, device, attributes)
        for name, (shape, dtype) in self.unread_parameters(sizes).items():
            if name not in specs:
                data = torch.zeros(shape, dtype=dtype, device=device)
                layer.register_parameter(name, torch.nn.Parameter(data, requires_grad=False))
                set_weight_attrs(getattr(layer, name), {"leaf_name": name, **_UNREAD, **extra_weight_attrs})
        for name in ("w13_input_scale", "w2_input_scale"):
            if name not in specs:  # vLLM's layers have the attribute all the same
                layer.register_parameter(name, None)

    def before_parameters(
        self, layer: torch.nn.Module, specs: dict[str, LeafSpec], device: torch.device, attributes: dict[str, Any]
    ) -> torch.device:
        """Where parameters of these leaves begin; device: where they will be. May change their attributes."""
        return device

    def _rows_of_all(self, experts: HostedExperts, attributes: dict[str, Any]) -> dict[str, LeafSpec]:
        """The leaves of a module; input scales have rows for experts of other ranks too, where loaders bring them."""
        specs = self.stored_method.create_weights(experts.shape)
        rows = self.use_global_sf and attributes.get("global_num_experts") or experts.shape.num_experts
        return {
            name: dataclasses.replace(spec, shape=(rows, *spec.shape[1:])) if name.endswith("_input_scale") else spec
            for name, spec in specs.items()
        }

    @property
    def _block_size(self) -> list[int] | None:
        weights = self.scheme.weights
        return None if weights is None or weights.block_shape is None else list(weights.block_shape)

    def unread_parameters(self, sizes: tuple[int, int, int]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """{name: (shape, dtype)} of what vLLM's loaders fill beside the leaves, and processing drops.

        sizes: (experts, hidden, intermediate) of the rank.
        """
        weights = self.stored_method.scheme.weights
        if weights is None or weights.packing is None or weights.element_type.is_float:
            return {}
        return {f"{prefix}_weight_shape": ((sizes[0], 2), torch.int32) for prefix in ("w13", "w2")}

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        if isinstance(layer, MoELayer):
            layer.finish_loading()
        else:
            self.process_module(layer)
        self.moe_quant_config: FusedMoEQuantConfig | None = self.get_fused_moe_quant_config(layer)

    def process_module(self, module: torch.nn.Module) -> None:
        """Process what the parameters of a module hold, which may be what an earlier call left there."""
        experts, specs = hosted(module), self.stored_method.create_weights(hosted(module).shape)
        leaves = {name: getattr(module, self.layout(name).name) for name in specs}
        if all(leaf.is_meta for leaf in leaves.values()) and experts.is_processed:
            return
        for name, leaf in leaves.items():
            if len(leaf) != specs[name].shape[0]:  # one input scale serves the experts of all ranks
                leaves[name] = leaf.max().expand(self.layout(name).shape(specs[name].shape))
        stored = {name: self.layout(name).stored(leaf.data, specs[name].shape) for name, leaf in leaves.items()}
        shown = experts.process(module, self.moe, self.method, stored, quantizes=self.quantizes_online)
        self.show(module, self.method.create_weights(experts.shape), shown)

    def show(self, module: torch.nn.Module, specs: dict[str, LeafSpec], leaves: dict[str, torch.Tensor] | None) -> None:
        """Parameters of processed experts: views of them, or placeholders where a kernel's layout allows none."""
        layouts = {name: self.layout(name) for name in specs}
        kept = {layout.name for layout in layouts.values()}
        for name, _ in list(module.named_parameters(recurse=False)):
            if name.startswith(_PREFIXES) and name not in kept:
                delattr(module, name)
        for name, layout in layouts.items():
            shown = meta_leaf(specs[name], layout) if leaves is None else layout.shown(leaves[name])
            replace_parameter(module, layout.name, shown)
            if not hasattr(getattr(module, layout.name), "leaf_name"):
                loader = getattr(module, "weight_loader", None)
                attributes = {"leaf_name": name} | ({} if loader is None else {"weight_loader": loader})
                set_weight_attrs(getattr(module, layout.name), attributes)

    def apply(
        self,
        layer: torch.nn.Module,
        x: Any,
        topk_weights: Any,
        topk_ids: Any,
        shared_experts: Any = None,
        shared_experts_input: Any = None,
    ) -> Any:
        return _ops.call(_ops.fused_experts_op, x, topk_weights, topk_ids, _experts_of(layer).layer_name)

    def apply_monolithic(self, layer: torch.nn.Module, x: Any, router_logits: Any, input_ids: Any = None) -> Any:
        if isinstance(layer, MoELayer):
            if layer.routes_in_torch:
                return self.apply(layer, x, *layer.select_experts(x, router_logits, input_ids=input_ids))
            bias = layer.correction_bias
        else:
            bias = getattr(layer, "e_score_correction_bias", None)
            if not self.is_monolithic:
                raise NotImplementedError(
                    f"{type(layer).__name__} has enable_eplb, and copies of experts are chosen outside of this method; "
                    "route first, then call apply"
                )
            if getattr(layer, "custom_routing_function", None) is not None:
                raise NotImplementedError(
                    f"{type(layer).__name__} has a custom_routing_function, which moe_jax does not call; route first, "
                    "then call apply"
                )
        return _ops.call(_ops.fused_moe_op, x, router_logits, bias, input_ids, _experts_of(layer).layer_name)

    def get_fused_moe_quant_config(self, layer: torch.nn.Module) -> FusedMoEQuantConfig | None:
        experts = _experts_of(layer)
        weights, config = experts.expert_weights, experts.local_config
        leaves = stored_leaves(weights, config)
        return quant_config_of(config, {name: self.layout(name).shown(leaf) for name, leaf in leaves.items()})

    @property
    def is_monolithic(self) -> bool:
        """Not under EPLB: between router and experts a copy of each expert is chosen."""
        return self.moe is None or not self.moe.moe_parallel_config.enable_eplb

    @property
    def supports_eplb(self) -> bool:
        return True

    @property
    def supports_internal_mk(self) -> bool:
        """Not under data parallelism: the module's owner brings tokens of other ranks, as vLLM's runner then does."""
        return self.moe is None or self.moe.dp_size == 1

    @property
    def topk_indices_dtype(self) -> torch.dtype | None:
        return torch.int32

    @property
    def use_global_sf(self) -> bool:
        """Whether input scales of experts of other ranks are loaded too."""
        activations = self.scheme.activations
        return activations is not None and activations.needs_input_scale


class UnquantizedFusedMoEMethod(SchemeMoEMethod):
    """Experts in the parameters' dtype."""

    def __init__(self, moe: FusedMoEConfig | None = None):
        super().__init__(None, moe)


def _experts_of(layer: torch.nn.Module) -> MoELayer | HostedExperts:
    return layer if isinstance(layer, MoELayer) else hosted(layer)


def note(layer: torch.nn.Module, **attributes: Any) -> None:
    """Set what vLLM's methods leave on a layer while they create weights, where the layer has it not by itself."""
    for name, value in attributes.items():
        if not hasattr(layer, name):
            setattr(layer, name, value)


def layer_specs(
    layer: MoELayer, method: MoEMethod, sizes: tuple[int, int, int], params_dtype: torch.dtype
) -> dict[str, LeafSpec]:
    """The leaves of one rank of ``FusedMoE`` under a method; sizes: (experts, hidden, intermediate) of the rank."""
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


def meta_leaf(spec: LeafSpec, layout: LeafLayout) -> torch.Tensor:
    """A leaf without memory, as its parameter has it."""
    return layout.shown(torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device="meta"))


def register_leaf(
    layer: torch.nn.Module,
    name: str,
    spec: LeafSpec,
    layout: LeafLayout,
    device: torch.device,
    attributes: dict[str, Any],
) -> None:
    """Give a layer the parameter of a leaf with what loaders read on it; scales begin as vLLM's do."""
    dtype = layout.dtype or torch_dtype(spec.dtype)
    data = torch.empty(layout.shape(spec.shape), dtype=dtype, device=device)
    if spec.init is not None:
        data.fill_(spec.init)
    parameter = torch.nn.Parameter(data, requires_grad=False)
    layer.register_parameter(layout.name, parameter)
    set_weight_attrs(parameter, {"leaf_name": name, **attributes})


def _kind(name: str, spec: LeafSpec, weights: Any, layout: LeafLayout) -> dict[str, Any]:
    kind: str | None = "tensor" if name.endswith("_input_global_scale") else spec.kind
    if weights is not None and weights.packing is not None and not weights.element_type.is_float:
        kind = weights.strategy.value if kind in ("weight", "zero_point", "channel_zero_point") else kind
    if kind in ("weight", "bias", "g_idx", "input_scale"):
        kind = None
    is_of_all = spec.kind in ("group", "zero_point") and weights is not None and weights.actorder
    read = {"is_transposed": layout.is_transposed, "load_full_w2": is_of_all and name.startswith("w2_")}
    return read | ({} if kind is None else {"quant_method": kind})
