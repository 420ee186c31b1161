"""``FusedMoEMethodBase``: vLLM's verbs of a quantization method, and what a method reads of its layer."""

import abc
from typing import Any

import torch

from moe_jax import ExpertWeights, MoEConfig, Scheme
from moe_jax.loading import ExpertTensor
from torch_bridge._eplb import EplbLayerState
from torch_bridge._moe_config import FusedMoEConfig, FusedMoEParallelConfig
from torch_bridge._quant_config import FusedMoEQuantConfig
from torch_bridge._rank import Rank


class MoELayer(torch.nn.Module):
    """What a method reads of the layer that it serves: the base of ``torch_bridge.FusedMoE``."""

    moe_config: FusedMoEConfig
    config: MoEConfig
    local_config: MoEConfig
    rank: Rank
    layer_name: str
    eplb_state: EplbLayerState | None

    @property
    def correction_bias(self) -> torch.Tensor | None:
        """(E,) of the router, None without one."""
        raise NotImplementedError

    @property
    def routes_in_torch(self) -> bool:
        """Whether torch chooses experts, or one of their copies, which no operator contains."""
        raise NotImplementedError

    def select_experts(
        self, hidden_states: torch.Tensor, router_logits: torch.Tensor, *, input_ids: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's router alone: topk_weights and topk_ids."""
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


class FusedMoEMethodBase(abc.ABC):
    """What a layer asks of its quantization method: create, process, apply, under the names of vLLM.

    A subclass of your own may register whatever parameters it likes in ``create_weights`` and compute in torch in
    ``apply``; those of this package compute in moe_jax.
    """

    uses_meta_device: bool = False

    def __init__(self, moe: FusedMoEConfig | None = None):
        """moe: the layer's configuration; a layer that is given a method without one sets it."""
        self.moe = moe
        self.moe_quant_config: FusedMoEQuantConfig | None = None
        self.moe_kernel: Any = None

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
    def get_fused_moe_quant_config(self, layer: torch.nn.Module) -> FusedMoEQuantConfig | None:
        """The scales of a processed layer, None when nobody needs them."""

    def apply(
        self,
        layer: torch.nn.Module,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Experts alone: the routed output (T, H) in x's dtype.

        x (T, H), topk_weights (T, k), topk_ids (T, k) global. shared_experts, shared_experts_input: for methods that
        run shared experts beside their own (``mk_can_overlap_shared_experts``). All others leave them to the caller:
        the layer here passes None, vLLM's runner passes them and runs them itself. Raises NotImplementedError where a
        method routes by itself.
        """
        raise NotImplementedError(f"{type(self).__name__} has no apply()")

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:  # noqa: B027
        """Turn what was loaded into what ``apply`` reads; nothing to do for one that reads them as loaded."""

    def apply_monolithic(
        self,
        layer: torch.nn.Module,
        x: torch.Tensor,
        router_logits: torch.Tensor,
        input_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Routing and experts: x (T, H), router_logits (T, E) -> (T, H). input_ids: (T,) of tokens, for hash routing.

        Raises NotImplementedError where a method leaves routing to the layer.
        """
        raise NotImplementedError(f"{type(self).__name__} is not monolithic; route first, then call apply")

    def maybe_make_prepare_finalize(self, routing_tables: Any = None) -> Any:
        """vLLM's hook for dispatch kernels. Raises ValueError: methods here own their whole computation."""
        raise ValueError(
            f"{type(self).__name__} uses its own kernels from dispatch to combine; there is no prepare/finalize to make"
        )

    def select_gemm_impl(self, prepare_finalize: Any, layer: torch.nn.Module) -> Any:
        """vLLM's older hook. Raises ValueError: the implementation is chosen per call."""
        raise ValueError(
            f"{type(self).__name__} has no GEMM to select; moe_jax chooses an implementation per call, name one with "
            "implementation="
        )

    def maybe_roundup_sizes(
        self,
        hidden_size: int,
        intermediate_size_per_partition: int,
        act_dtype: torch.dtype,
        moe_parallel_config: FusedMoEParallelConfig,
    ) -> tuple[int, int]:
        """(hidden, intermediate) sizes of the parameters; those of the layer unless a method needs larger ones."""
        return hidden_size, intermediate_size_per_partition

    def uses_weight_scale_2_pattern(self) -> bool:
        """Whether scales per tensor are called ``weight_scale_2``."""
        return False

    @property
    def scheme(self) -> Scheme:
        """What moe_jax is told of the weights; unquantized for a method that keeps them by itself."""
        return Scheme.parse(None)

    @property
    def method_name(self) -> str:
        return type(self).__name__

    @property
    def is_monolithic(self) -> bool:
        """Whether the layer calls ``apply_monolithic`` instead of ``apply``."""
        return False

    @property
    def mk_can_overlap_shared_experts(self) -> bool:
        """Whether ``apply`` runs the shared experts that it is given."""
        return False

    @property
    def supports_eplb(self) -> bool:
        """Whether ``apply`` takes ids of copies of experts, whose parameters others move."""
        return False

    @property
    def supports_internal_mk(self) -> bool:
        """Whether the method owns dispatch, experts and combine."""
        return self.moe_kernel is not None

    @property
    def topk_indices_dtype(self) -> torch.dtype | None:
        return None

    @property
    def has_unpadded_output(self) -> bool:
        return False

    @property
    def skip_forward_padding(self) -> bool:
        return False


def set_weight_attrs(weight: torch.Tensor, weight_attrs: dict[str, Any] | None) -> None:
    """Set what a loader reads on a parameter.

    Raises AssertionError for an attribute that it has already, as in vLLM.
    """
    for name, value in (weight_attrs or {}).items():
        if hasattr(weight, name):
            raise AssertionError(f"Overwriting existing tensor attribute: {name}")
        setattr(weight, name, value)


def replace_parameter(
    layer: torch.nn.Module, param_name: str, new_data: torch.Tensor | None, prefer_copy: bool = False
) -> None:
    """Put a tensor in the place of a parameter, with the attributes of the old one; None removes it.

    prefer_copy: write into the old one where shape, dtype and device are the same, so that its address stays.
    """
    old = getattr(layer, param_name, None)
    if new_data is None:
        layer.register_parameter(param_name, None)
        return
    new_data = new_data.detach()
    if prefer_copy and old is not None:
        if (old.shape, old.dtype, old.device) == (new_data.shape, new_data.dtype, new_data.device):
            old.data.copy_(new_data)
            return
    parameter = torch.nn.Parameter(new_data, requires_grad=False)
    for key, value in vars(old).items() if old is not None else ():
        setattr(parameter, key, value)
    layer.register_parameter(param_name, parameter)
