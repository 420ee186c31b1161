"""``PatchedExperts``: what stands where transformers had a block's experts, under the names that transformers knows."""

from typing import Any

import torch

from torch_bridge._experts_modules import ExpertsModule, names_of, turned
from torch_bridge._layer import FusedMoE


class PatchedExperts(torch.nn.Module):
    """The model's router chooses, our layer computes.

    State dicts of unquantized experts have transformers' names and shapes, so that ``save_pretrained`` writes what
    ``from_pretrained`` reads. Quantized ones keep vLLM's names, which transformers does not know: ``patch`` makes
    ``save_pretrained`` of such a model refuse.
    """

    def __init__(self, experts: FusedMoE, replaced: ExpertsModule):
        """replaced: the module of transformers, of which names and layout are kept."""
        super().__init__()
        self.experts: FusedMoE = experts
        self.is_transposed = bool(replaced.is_transposed)
        self.names: dict[str, str] = names_of(replaced)
        if not experts.config.scheme.is_quantized:
            self.register_state_dict_post_hook(_to_transformers)
            self.register_load_state_dict_pre_hook(_from_transformers)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden_states (T, H), top_k_index and top_k_weights (T, top_k) -> (T, H)."""
        experts = self.experts
        return experts.quant_method.apply(experts, hidden_states, top_k_weights, top_k_index)


def _to_transformers(module: PatchedExperts, state: Any, prefix: str, metadata: Any) -> None:
    for leaf, name in module.names.items():
        state[f"{prefix}{name}"] = turned(module, state.pop(f"{prefix}experts.{leaf}")).contiguous()


def _from_transformers(module: PatchedExperts, state: Any, prefix: str, *rest: Any) -> None:
    for leaf, name in module.names.items():
        if f"{prefix}{name}" in state:
            state[f"{prefix}experts.{leaf}"] = turned(module, state.pop(f"{prefix}{name}")).contiguous()


def refuse_saving(model: Any, scheme: str) -> None:
    """Make ``save_pretrained`` of a model with quantized experts say what to do instead."""

    def save_pretrained(*args: Any, **named: Any) -> None:
        raise NotImplementedError(
            f"{type(model).__name__} has experts of scheme {scheme!r}, put there by torch_bridge.patch, which "
            "transformers cannot read back; save the model before patching, or write a quantized checkpoint with "
            "moe_jax's quantize_checkpoint"
        )

    if hasattr(model, "save_pretrained"):
        model.save_pretrained = save_pretrained
