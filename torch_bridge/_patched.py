"""``PatchedExperts``: what stands where transformers had a block's experts, under the names that transformers knows."""

from typing import Any

import torch

from torch_bridge._layer import FusedMoE

# transformers' name -> leaf. gpt-oss keeps its matrices (in, out), the others (out, in).
_NAMES = {
    "gate_up_proj": "w13_weight",
    "down_proj": "w2_weight",
    "gate_up_proj_bias": "w13_bias",
    "down_proj_bias": "w2_bias",
}


class PatchedExperts(torch.nn.Module):
    """The model's router chooses, our layer computes.

    State dicts of unquantized experts have transformers' names and shapes, so that ``save_pretrained`` writes what
    ``from_pretrained`` reads. Quantized ones keep vLLM's names, which transformers does not know: ``patch`` makes
    ``save_pretrained`` of such a model refuse.
    """

    def __init__(self, experts: FusedMoE, *, is_transposed: bool = False):
        """is_transposed: whether transformers keeps the matrices (in, out)."""
        super().__init__()
        self.experts: FusedMoE = experts
        self._is_transposed = is_transposed
        if not experts.config.scheme.is_quantized:
            self.register_state_dict_post_hook(_to_transformers)
            self.register_load_state_dict_pre_hook(_from_transformers)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """hidden_states (T, H), top_k_index and top_k_weights (T, top_k) -> (T, H)."""
        return self.experts.quant_method.apply(self.experts, hidden_states, top_k_weights, top_k_index)

    def turned(self, leaf: torch.Tensor) -> torch.Tensor:
        """A matrix per expert between transformers' layout and vLLM's."""
        return leaf.transpose(1, 2).contiguous() if self._is_transposed and leaf.ndim == 3 else leaf


def _to_transformers(module: PatchedExperts, state: Any, prefix: str, metadata: Any) -> None:
    for name, leaf in _NAMES.items():
        if f"{prefix}experts.{leaf}" in state:
            state[f"{prefix}{name}"] = module.turned(state.pop(f"{prefix}experts.{leaf}"))


def _from_transformers(module: PatchedExperts, state: Any, prefix: str, *rest: Any) -> None:
    for name, leaf in _NAMES.items():
        if f"{prefix}{name}" in state:
            state[f"{prefix}experts.{leaf}"] = module.turned(state.pop(f"{prefix}{name}"))


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
