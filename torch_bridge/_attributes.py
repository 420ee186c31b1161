"""What vLLM's models and methods read of a layer of experts, under vLLM's names."""

from collections.abc import Callable
from typing import Any

import jax
import torch

from moe_jax.loading import make_expert_params_mapping
from moe_jax.parallel import determine_expert_map
from moe_jax.routing import RoutingParams
from torch_bridge._calls import Experts
from torch_bridge._method_base import FusedMoEMethodBase, MoELayer
from torch_bridge._methods import SchemeMoEMethod
from torch_bridge._tensors import to_torch


class AttributesMixin(MoELayer):
    """Attributes of ``FusedMoE`` beside those that its constructor sets."""

    gate: Any
    quant_method: FusedMoEMethodBase
    _borrowed: list[torch.Tensor | Callable[[], torch.Tensor] | None]
    _routing: RoutingParams
    _experts: Experts | None

    @property
    def correction_bias(self) -> torch.Tensor | None:
        """e_score_correction_bias (E,), as its owner has it now."""
        bias = self._borrowed[0]
        return bias() if callable(bias) and not isinstance(bias, torch.Tensor) else bias

    @property
    def e_score_correction_bias(self) -> torch.Tensor | None:
        return self.correction_bias

    @property
    def routing_params(self) -> RoutingParams:
        """Arrays of the router other than its correction bias."""
        return self._routing

    @property
    def moe_parallel_config(self) -> Any:
        return self.moe_config.moe_parallel_config

    @property
    def global_num_experts(self) -> int:
        return self.rank.num_experts

    @property
    def logical_num_experts(self) -> int:
        return self.config.num_experts

    @property
    def local_num_experts(self) -> int:
        return self.rank.num_local_experts

    @property
    def tp_size(self) -> int:
        return self.rank.tp_size

    @property
    def tp_rank(self) -> int:
        return self.rank.tp_rank

    @property
    def ep_size(self) -> int:
        return self.rank.ep_size

    @property
    def ep_rank(self) -> int:
        return self.rank.ep_rank

    @property
    def dp_size(self) -> int:
        return 1

    @property
    def use_ep(self) -> bool:
        return self.rank.ep_size > 1

    @property
    def expert_placement_strategy(self) -> str:
        return self.rank.strategy

    @property
    def expert_map(self) -> torch.Tensor | None:
        """(P,) int32, global to local expert, -1 where not local; None when all experts are local."""
        return None if self.rank.expert_map is None else torch.from_numpy(self.rank.expert_map)

    @property
    def is_internal_router(self) -> bool:
        return self.gate is not None

    def update_expert_map(self) -> None:
        """Check the expert map against ``ep_size`` and ``ep_rank``. Raises ValueError for a layer without a map."""
        if self.rank.expert_map is None:
            raise ValueError(
                f"{self.layer_name}: ep_size=1, all experts are local and there is no expert map to update"
            )
        determine_expert_map(self.ep_size, self.ep_rank, self.global_num_experts, self.rank.strategy)

    def get_expert_weights(self) -> list[torch.Tensor]:
        """What moves with an expert: every array that calls read, as (local experts, -1), over the same memory.

        Whoever writes rows of them moves experts. A write on a GPU has to be complete, ``torch.cuda.synchronize()``,
        before a call through JAX's runtime. Input scales, which all experts share, stay. Raises RuntimeError when
        nothing is processed.
        """
        if isinstance(self.quant_method, SchemeMoEMethod):
            if self._experts is None:
                raise RuntimeError(f"{self.layer_name} has no processed weights: call process_weights_after_loading()")
            leaves = [to_torch(leaf) for leaf in jax.tree.leaves(self._experts.weights) if leaf.ndim]
        else:
            named = self.named_parameters(recurse=False)
            leaves = [p.data for name, p in named if name.startswith(("w13_", "w2_")) and "input_scale" not in name]
            leaves = [leaf if leaf.is_contiguous() or leaf.ndim < 3 else leaf.mT for leaf in leaves]
        return [leaf.view(self.local_num_experts, -1) for leaf in leaves]

    def set_eplb_state(
        self,
        moe_layer_idx: int,
        expert_load_view: torch.Tensor,
        logical_to_physical_map: torch.Tensor,
        logical_replica_count: torch.Tensor,
    ) -> None:
        """Take the maps of copies that calls read, and the load that they count into, as vLLM hands them over.

        Args:
            moe_layer_idx: the place of this layer in the others.
            expert_load_view: (layers, P) integers.
            logical_to_physical_map: (layers, L, R) integers, padded with -1.
            logical_replica_count: (layers, L) integers.

        Raises ValueError for a layer without enable_eplb, or for tensors of other counts of experts or another device.
        """
        if self.eplb_state is None:
            raise ValueError(f"{self.layer_name}: set_eplb_state needs enable_eplb=True; build the layer with it")
        logical, physical = self.logical_num_experts, self.global_num_experts
        for name, tensor, size in (
            ("expert_load_view", expert_load_view, physical),
            ("logical_to_physical_map", logical_to_physical_map, logical),
            ("logical_replica_count", logical_replica_count, logical),
        ):
            if tensor.ndim < 2 or tensor.shape[1] != size or tensor.device != self.device or tensor.is_floating_point():
                raise ValueError(
                    f"{self.layer_name}: {name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, expected "
                    f"integers (layers, {size}, ...) on {self.device}"
                )
        self.eplb_state.set_layer_state(moe_layer_idx, expert_load_view, logical_to_physical_map, logical_replica_count)

    @classmethod
    def make_expert_params_mapping(
        cls,
        model: Any,
        ckpt_gate_proj_name: str,
        ckpt_down_proj_name: str,
        ckpt_up_proj_name: str,
        num_experts: int,
        num_redundant_experts: int = 0,
        routed_experts_prefix: str = "",
    ) -> list[tuple[str, str, int, str]]:
        """Rows (parameter prefix, checkpoint fragment, physical expert, shard) that translate names of experts.

        Arguments mean what they mean for ``moe_jax.loading.make_expert_params_mapping``. routed_experts_prefix: the
        module with the parameters inside "experts"; none by default, since this layer has its parameters itself.
        """
        words = ckpt_gate_proj_name, ckpt_down_proj_name, ckpt_up_proj_name
        rows = make_expert_params_mapping(model, *words, num_experts, num_redundant_experts)
        inner = f"experts.{routed_experts_prefix}." if routed_experts_prefix else "experts."
        return [(inner + name.removeprefix("experts."), text, expert, shard) for name, text, expert, shard in rows]
