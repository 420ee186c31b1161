"""Tiny checkpoints of both families, saved by transformers, and how logits are compared."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

VOCAB = 96
SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=48,
    max_position_embeddings=64,
    num_experts_per_tok=2,
    bos_token_id=None,
    eos_token_id=None,
)
MIXTRAL = (MixtralForCausalLM, MixtralConfig, dict(num_local_experts=4))
QWEN3 = (Qwen3MoeForCausalLM, Qwen3MoeConfig, dict(num_experts=8, moe_intermediate_size=32))

# One variant of the rotary embedding per type; dynamic and longrope change within a prompt of 40 tokens.
ROPES = {
    "linear": dict(factor=2.0),
    "dynamic": dict(factor=2.0),
    "yarn": dict(factor=4.0, original_max_position_embeddings=16),
    "llama3": dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16),
    "longrope": dict(
        short_factor=[1 + 0.1 * i for i in range(8)],
        long_factor=[2 + 0.3 * i for i in range(8)],
        original_max_position_embeddings=16,
    ),
}

CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "mixtral": (MIXTRAL, {}),
    "mixtral_tied_window": (MIXTRAL, dict(tie_word_embeddings=True, sliding_window=5)),
    "mixtral_no_groups": (MIXTRAL, dict(num_key_value_heads=4, head_dim=None)),
    "qwen3": (QWEN3, dict(norm_topk_prob=True)),
    "qwen3_dense_bias": (
        QWEN3,
        dict(num_hidden_layers=3, mlp_only_layers=[0], decoder_sparse_step=2, attention_bias=True),
    ),
    "qwen3_tied_window": (
        QWEN3,
        dict(norm_topk_prob=True, tie_word_embeddings=True, use_sliding_window=True, sliding_window=4),
    ),
} | {
    f"qwen3_{kind}": (
        QWEN3,
        dict(
            num_hidden_layers=1,
            rope_parameters=dict(rope_type=kind, rope_theta=1e4, **parameters),
            max_position_embeddings=24 if kind == "dynamic" else 64,
        ),
    )
    for kind, parameters in ROPES.items()
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One checkpoint on disk, transformers' float32 model of it, and ours."""

    directory: Path
    torch_model: Any
    model: Any

    def torch_logits(self, ids: np.ndarray, **inputs: Any) -> np.ndarray:
        with torch.no_grad():
            return self.torch_model(torch.tensor(ids), **inputs).logits.numpy()


def write_checkpoint(name: str, directory: Path) -> Any:
    """Save a random model of the case and return it. Norms and biases are random too, so that none can be forgotten."""
    (cls, config, family), options = CASES[name]
    torch.manual_seed(0)
    model = cls(config(**{**SIZES, **family, **options})).eval()
    with torch.no_grad():
        for key, value in model.named_parameters():
            if value.ndim > 1:
                value.normal_(0, value.shape[-1] ** -0.5)
            elif "norm" in key:
                value.uniform_(0.5, 1.5)
            else:
                value.normal_(0, 0.3)
    model.save_pretrained(directory)
    return model


def assert_logits_close(actual: Any, expected: np.ndarray, fraction: float = 1e-5) -> None:
    """Largest difference within ``fraction`` of the range of the expected logits."""
    actual = np.asarray(actual)
    assert actual.shape == expected.shape and actual.dtype == np.float32
    spread = expected.max() - expected.min()
    worst = np.abs(actual - expected).max() / spread
    assert worst <= fraction, f"max abs difference is {worst:.2e} of the logit range, allowed {fraction:.0e}"
