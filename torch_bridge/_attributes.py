"""What vLLM's models and methods read of a layer of experts, under vLLM's names."""

from collections.abc import Callable
from typing import Any

import torch

from moe_jax.loading import make_expert_params_mapping
from moe_jax.parallel import determine_expert_map
from moe_jax.routing import RoutingParams
from torch_bridge._calls import Experts
from torch_bridge._method_base import MoELayer


class AttributesMixin(MoELayer):
    """Attributes of ``FusedMoE`` beside those that its constructor sets."""

    gate: Any
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
        """Every leaf with experts as (E, -1), views of the processed weights: what moves with an expert.

        Rows of a parameter that is kept transposed are those of the matrix as it lies in memory.
        """
        experts = self.local_num_experts
        leaves = [p.data for name, p in self.named_parameters(recurse=False) if name.startswith(("w13_", "w2_"))]
        return [(leaf if leaf.is_contiguous() or leaf.ndim < 3 else leaf.mT).reshape(experts, -1) for leaf in leaves]

    def set_eplb_state(self, *state: Any, **named: Any) -> None:
        """vLLM's hook for replicas of experts. Raises NotImplementedError: layers here have none yet."""
        raise NotImplementedError(f"{self.layer_name}: EPLB is not built here; build the layer without enable_eplb")

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
