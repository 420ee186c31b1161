"""Experts of modules that are not ``FusedMoE``: what a method keeps of a module of vLLM, or of one's own."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from moe_jax import ExpertWeights, MoEConfig, Scheme
from moe_jax.activations import parse_activation
from moe_jax.experts._choice import in_best_layout, plain_layout
from moe_jax.loading import LayerLoader
from moe_jax.quantization import ExpertShape, MoEMethod
from moe_jax.routing import RoutingParams
from torch_bridge import _ops
from torch_bridge._calls import Experts, JaxCalls, configured_for
from torch_bridge._moe_config import FusedMoEConfig, FusedMoEParallelConfig, MoEActivation, RoutingMethodType
from torch_bridge._own_parameters import load_into
from torch_bridge._state import interleaved, is_interleaved, stored_leaves
from torch_bridge._tensors import jax_device, numpy_dtype, to_numpy
from torch_bridge.launch._calls import calls_on

_ATTRIBUTE = "_hosted_experts"
_NOTHING = "the module has no processed experts: call process_weights_after_loading(module)"
# Settings of a router that vLLM keeps on the module, with moe_jax's names and defaults.
_ROUTING = {
    "renormalize": True,
    "scoring_func": "softmax",
    "use_grouped_topk": False,
    "num_expert_group": None,
    "topk_group": None,
    "routed_scaling_factor": 1.0,
    "apply_router_weight_on_input": False,
}
_CLAMPS = ("swiglu_limit", "swiglu_alpha", "swiglu_beta")


class HostedExperts:
    """The processed experts of one module and their calls; ``hosted`` finds them.

    shape: of the rank's experts. device: where the module's parameters are.
    """

    def __init__(self, shape: ExpertShape, device: torch.device):
        self.shape: ExpertShape = shape
        self.device: torch.device = device
        self.layer_name: str = _ops.register(self, "")
        self._experts: Experts | None = None
        self._calls: JaxCalls | None = None

    @property
    def is_processed(self) -> bool:
        return self._experts is not None

    @property
    def expert_weights(self) -> ExpertWeights:
        """What is processed, in the plain layout. Raises RuntimeError when nothing is."""
        return plain_layout(self._processed.weights)

    @property
    def local_config(self) -> MoEConfig:
        """Of the rank's experts. Raises RuntimeError when nothing is processed."""
        return self._processed.config

    @property
    def _processed(self) -> Experts:
        if self._experts is None:
            raise RuntimeError(_NOTHING)
        return self._experts

    def process(
        self,
        module: torch.nn.Module,
        moe: FusedMoEConfig | None,
        method: MoEMethod,
        leaves: Mapping[str, torch.Tensor],
        *,
        quantizes: bool,
    ) -> dict[str, torch.Tensor] | None:
        """Take leaves as the module's experts: those of the scheme, or full-precision ones to be quantized.

        Returns the leaves of the processed weights, None where a kernel's own layout holds them. Raises ValueError for
        values that cannot be.
        """
        local, whole = self._configs(module, moe, method.scheme)
        loader = LayerLoader(local, method, quantize=quantizes, fused_layout="out_in")
        is_mixed = is_interleaved(local)
        for name, leaf in leaves.items():
            loader.accept_leaf(name, to_numpy(leaf), is_interleaved=is_mixed)
        device = jax_device(self.device)
        with jax.default_device(device):
            weights = loader.finish()
        packed = in_best_layout(local, weights)
        experts = jax.device_put(Experts(packed, local, whole, RoutingParams(), _map_of(module)), device)
        self._calls = calls_on(experts, self.layer_name, self.device, None)
        self._experts = experts
        if not packed.w13.layout.is_plain:
            return None
        shown = stored_leaves(weights, local)
        return interleaved(shown) if is_mixed else shown

    def calls_for(self, method: str) -> JaxCalls:
        """What runs a method of ``Experts``. Raises RuntimeError when nothing is processed."""
        if self._calls is None:
            raise RuntimeError(_NOTHING)
        return self._calls

    def _configs(
        self, module: torch.nn.Module, moe: FusedMoEConfig | None, scheme: Scheme
    ) -> tuple[MoEConfig, MoEConfig]:
        """Of the rank's experts, and of the whole layer; from what the module says, or else its ``moe_config``."""
        shape = self.shape
        activation = MoEActivation.from_str(_said(module, moe, "activation", "silu")).value
        is_gated = shape.num_projections == 2
        local = MoEConfig(
            num_experts=shape.num_experts,
            top_k=_said(module, moe, "top_k", None) or _said(module, moe, "experts_per_token", 1),
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            scheme=scheme,
            activation=parse_activation(activation, is_gated=is_gated),
            is_act_and_mul=is_gated,
            has_bias=shape.has_bias,
            intermediate_size_full=shape.intermediate_size_full,
            dtype=shape.param_dtype,
            param_dtype=shape.param_dtype,
            **{name: _said(module, moe, name, default) for name, default in _ROUTING.items()},
            **{name: _said(module, moe, name, None) for name in _CLAMPS},
        )
        local = configured_for(local, self.device)
        experts = _said(module, moe, "global_num_experts", None) or getattr(moe, "num_experts", shape.num_experts)
        return local, dataclasses.replace(local, num_experts=experts)


class ModuleLoader:
    """The ``weight_loader`` of parameters that were created without one: places as vLLM's does, by their attributes."""

    def __init__(self, module: torch.nn.Module, method: Any, moe: FusedMoEConfig):
        self._module, self._method, self._moe = module, method, moe

    def __call__(
        self,
        param: torch.Tensor,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str | None,
        expert_id: int | None,
        return_success: bool = False,
    ) -> bool | None:
        """Arguments and result as of ``FusedMoE.weight_loader``."""
        expert_map = _map_of(self._module)
        used = load_into(
            dict(self._module.named_parameters(recurse=False)),
            param,
            loaded_weight,
            weight_name,
            shard_id,
            expert_id,
            moe=self._moe,
            expert_map=None if expert_map is None else np.asarray(expert_map),
            method=self._method,
        )
        return used if return_success else None


def described(module: torch.nn.Module, sizes: tuple[int, int, int], params_dtype: torch.dtype) -> FusedMoEConfig:
    """What a module says of its layer: its ``moe_config``, or else one process with all of the experts."""
    given = getattr(module, "moe_config", None)
    if given is not None:
        return given
    experts, hidden, intermediate = sizes
    return FusedMoEConfig(
        num_experts=experts,
        experts_per_token=_said(module, None, "top_k", 1),
        hidden_dim=hidden,
        intermediate_size=intermediate,
        num_local_experts=experts,
        num_logical_experts=experts,
        activation=_said(module, None, "activation", MoEActivation.SILU),
        device=torch.get_default_device(),
        routing_method=RoutingMethodType.Unspecified,
        moe_parallel_config=FusedMoEParallelConfig.make_no_parallel(),
        in_dtype=params_dtype,
        has_bias=bool(_said(module, None, "has_bias", False)),
    )


def shape_of(
    module: torch.nn.Module,
    moe: FusedMoEConfig | None,
    sizes: tuple[int, int, int],
    params_dtype: torch.dtype,
    *,
    has_bias: bool | None = None,
    intermediate_size_full: int | None = None,
) -> ExpertShape:
    """The experts of a rank; sizes: (experts, hidden, intermediate). has_bias: None asks the module.

    intermediate_size_full: of all ranks, see ``ExpertShape``.
    """
    experts, hidden, intermediate = sizes
    is_gated = MoEActivation.from_str(_said(module, moe, "activation", "silu")).is_gated
    return ExpertShape(
        num_experts=experts,
        num_projections=2 if is_gated else 1,
        hidden_size=hidden,
        intermediate_size=intermediate,
        param_dtype=numpy_dtype(params_dtype),
        has_bias=bool(_said(module, moe, "has_bias", False)) if has_bias is None else has_bias,
        intermediate_size_full=intermediate_size_full,
    )


def host(module: torch.nn.Module, shape: ExpertShape) -> HostedExperts:
    """Give a module the place of its experts."""
    found = HostedExperts(shape, torch.get_default_device())
    setattr(module, _ATTRIBUTE, found)
    return found


def hosted(module: torch.nn.Module) -> HostedExperts:
    """The experts of a module. Raises RuntimeError for one that no method created weights for."""
    found = getattr(module, _ATTRIBUTE, None)
    if found is None:
        raise RuntimeError(f"{type(module).__name__} has no experts: call create_weights(module, ...) first")
    return found


def _said(module: torch.nn.Module, moe: FusedMoEConfig | None, name: str, default: Any) -> Any:
    for source in (module, moe):
        value = getattr(source, name, None)
        if value is not None:
            return value
    return default


def _map_of(module: torch.nn.Module) -> Any:
    expert_map = getattr(module, "expert_map", None)
    return None if expert_map is None else jnp.asarray(to_numpy(expert_map).astype(np.int32))
