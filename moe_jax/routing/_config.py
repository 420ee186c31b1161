"""``RoutingConfig``: how router logits become experts and weights, as far as it is static."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from moe_jax._arguments import check_booleans, check_numbers
from moe_jax._typing import DTypeLike


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class RoutingConfig:
    """Static settings of a router. ``MoEConfig`` is one; ``FusedMoE`` takes the same arguments.

    A new setting is a field here and an argument of ``FusedMoE``.

    Args:
        num_experts: logical experts E.
        top_k: experts per token.
        renormalize: weights of a token's experts sum to 1.
        scoring_func: one of ``SCORING_FUNCTIONS``.
        use_grouped_topk: choose among the experts of the best groups.
        num_expert_group: groups of experts.
        topk_group: groups that a token chooses from.
        routed_scaling_factor: multiplies the weights.
        apply_routed_scale_to_output: the factor multiplies the routed output instead.
        apply_router_weight_on_input: x is multiplied by its weight before the first product; requires top_k = 1.
        custom_routing_function: a callable ``(hidden_states, gating_output, topk, renormalize) -> (weights, ids)``, or
            the name of a preset.
        router_logits_dtype: to which logits are rounded first; None keeps what the caller passes.
        zero_expert_type: "identity" where the logits have extra columns for experts that return their input.
    """

    num_experts: int
    top_k: int
    _: dataclasses.KW_ONLY
    renormalize: bool = True
    scoring_func: str = "softmax"
    use_grouped_topk: bool = False
    num_expert_group: int | None = None
    topk_group: int | None = None
    routed_scaling_factor: float = 1.0
    apply_routed_scale_to_output: bool = False
    apply_router_weight_on_input: bool = False
    custom_routing_function: Callable[..., Any] | str | None = None
    router_logits_dtype: DTypeLike | None = None
    zero_expert_type: str | None = None

    def __post_init__(self) -> None:
        check_booleans(self)
        check_numbers(self, "routed_scaling_factor")
