"""Tiny checkpoints of whole models, saved by transformers, and how logits are compared."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from flax import nnx

from moe_jax.nn import QuantizedParam
from moe_jax.quantization import QuantizedMatrix, dequantize_tensor
from tests.support.cases.families import FAMILIES

VOCAB = 96
SIZES = dict(vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2)
MIXTRAL = ("mixtral", dict(num_local_experts=4, intermediate_size=48))
QWEN3 = ("qwen3_moe", dict(intermediate_size=48, decoder_sparse_step=1, norm_topk_prob=False))
OLMOE = ("olmoe", dict(num_attention_heads=4, num_key_value_heads=4))
DEEPSEEK_V2 = ("deepseek_v2", dict(first_k_dense_replace=1))
DEEPSEEK_V3 = ("deepseek_v3", dict(first_k_dense_replace=1))

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

YARN = ROPES["yarn"] | dict(rope_type="yarn", rope_theta=1e4)
# Family of families.py, its options for all cases here, and what the case varies. Windows are shorter than a prompt of
# 40 tokens and longer than one of 4.
CASES: dict[str, tuple[tuple[str, dict[str, Any]], dict[str, Any]]] = {
    "mixtral": (MIXTRAL, {}),
    "mixtral_tied_window": (MIXTRAL, dict(tie_word_embeddings=True, sliding_window=5)),
    "mixtral_no_groups": (MIXTRAL, dict(num_key_value_heads=4, head_dim=None)),
    "qwen3": (QWEN3, dict(norm_topk_prob=True)),
    "qwen3_dense_bias": (
        QWEN3,
        dict(mlp_only_layers=[0], decoder_sparse_step=2, attention_bias=True),
    ),
    "qwen3_tied_window": (
        QWEN3,
        dict(norm_topk_prob=True, tie_word_embeddings=True, use_sliding_window=True, sliding_window=4),
    ),
    "qwen2": (
        ("qwen2_moe", {}),
        dict(mlp_only_layers=[0], use_sliding_window=True, sliding_window=5, max_window_layers=2),
    ),
    "olmoe": (OLMOE, {}),
    "olmoe_clipped": (OLMOE, dict(clip_qkv=0.5, attention_bias=True, norm_topk_prob=True, num_key_value_heads=2)),
    "deepseek_v2": (DEEPSEEK_V2, dict(attention_bias=True)),
    "deepseek_v2_lite": (
        DEEPSEEK_V2,
        dict(q_lora_rank=None, topk_method="greedy", rope_parameters=YARN | dict(mscale=0.7, mscale_all_dim=0.7)),
    ),
    "deepseek_v3": (DEEPSEEK_V3, dict(rope_parameters=YARN | dict(mscale=1.0, mscale_all_dim=0.5))),
    "deepseek_v3_halves": (DEEPSEEK_V3, dict(rope_interleave=False, q_lora_rank=None, n_group=1, topk_group=1)),
    "gpt_oss": (("gpt_oss", {}), dict(sliding_window=5, rope_parameters=YARN | dict(truncate=False))),
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

# Both sets of factors, and an amplitude for short rows and one for rows longer than 48.
PHI_ROPE = ROPES["longrope"] | dict(
    rope_type="longrope",
    rope_theta=1e4,
    original_max_position_embeddings=48,
    short_mscale=1.2,
    long_mscale=0.7,
)
# One or two checkpoints of each family that test_whole_models.py judges by itself: a variation is on in one of them.
FAMILY_CASES: dict[str, tuple[tuple[str, dict[str, Any]], dict[str, Any]]] = {
    "glm4": (("glm4_moe", dict(first_k_dense_replace=1)), dict(use_qk_norm=True, attention_bias=True)),
    "glm4_tied": (
        ("glm4_moe", dict(first_k_dense_replace=1)),
        dict(tie_word_embeddings=True, n_group=4, topk_group=2, partial_rotary_factor=0.25),
    ),
    "glm4_lite": (("glm4_moe_lite", {}), dict(attention_bias=True, rms_norm_eps=1e-3)),
    "glm4_lite_tied": (
        ("glm4_moe_lite", {}),
        dict(
            tie_word_embeddings=True,
            mlp_layer_types=["sparse", "dense"],
            rope_interleave=False,
            n_group=1,
            topk_group=1,
        ),
    ),
    "deepseek_v32": (
        ("deepseek_v32", {}),
        dict(rope_parameters=YARN | dict(mscale=1.0, mscale_all_dim=0.5), attention_bias=True),
    ),
    "glm_dsa": (
        ("glm_moe_dsa", {}),
        dict(num_hidden_layers=4, indexer_types=["full", "shared", "full", "shared"], rms_norm_eps=1e-3),
    ),
    "minimax": (("minimax_m2", {}), dict(rotary_dim=8)),
    "minimax_tied": (("minimax_m2", {}), dict(tie_word_embeddings=True)),
    "granite": (
        ("granitemoe", {}),
        dict(embedding_multiplier=12.0, logits_scaling=6.0, residual_multiplier=0.22, attention_multiplier=0.1)
        | dict(attention_bias=True),
    ),
    "granite_tied": (
        ("granitemoe", {}),
        dict(tie_word_embeddings=True, embedding_multiplier=3.0, logits_scaling=2.0, attention_multiplier=0.5),
    ),
    "dots1": (("dots1", {}), dict(sliding_window=5, max_window_layers=1, attention_bias=True)),
    "dots1_tied": (("dots1", {}), dict(tie_word_embeddings=True, norm_topk_prob=False, n_group=4, topk_group=2)),
    "phimoe": (
        ("phimoe", {}),
        dict(attention_bias=True, lm_head_bias=True, router_jitter_noise=0.01, rope_parameters=PHI_ROPE),
    ),
    "phimoe_window": (("phimoe", {}), dict(sliding_window=5, tie_word_embeddings=True)),
    "ernie": (("ernie4_5_moe", {}), dict(tie_word_embeddings=True)),
    "ernie_steps": (
        ("ernie4_5_moe", {}),
        dict(num_hidden_layers=4, moe_layer_interval=2, moe_layer_end_index=2, moe_num_shared_experts=0)
        | dict(tie_word_embeddings=False),
    ),
    "hunyuan": (
        ("hunyuan_v1_moe", {}),
        dict(
            tie_word_embeddings=True, rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=1.0, alpha=100.0)
        ),
    ),
    "hunyuan_bias": (("hunyuan_v1_moe", {}), dict(attention_bias=True)),
    "llama4": (
        ("llama4_text", {}),
        dict(attention_chunk_size=8, no_rope_layers=[1, 0], floor_scale=4, attn_scale=0.5, attention_bias=True),
    ),
    "llama4_tied": (
        ("llama4_text", {}),
        dict(attention_chunk_size=5, no_rope_layer_interval=2, use_qk_norm=False, attn_temperature_tuning=False)
        | dict(tie_word_embeddings=True, interleave_moe_layer_step=1),
    ),
    # In heads of few columns a random key or output may be nearly zero, and norms then scale up its rounding, ours and
    # transformers' alike: where many tokens are compared, heads are wider or eps is larger.
    "qwen3_next": (("qwen3_next", {}), dict(mlp_only_layers=[1], attention_bias=True)),
    "qwen3_next_tied": (
        ("qwen3_next", {}),
        dict(tie_word_embeddings=True, norm_topk_prob=False, linear_num_key_heads=4, linear_conv_kernel_dim=2)
        | dict(
            rms_norm_eps=1e-4,
            num_hidden_layers=3,
            layer_types=["full_attention", "linear_attention", "linear_attention"],
        ),
    ),
    "qwen3_5": (
        ("qwen3_5_moe_text", {}),
        dict(linear_num_value_heads=2, max_position_embeddings=256, linear_key_head_dim=32, rms_norm_eps=1e-3),
    ),
    "qwen3_5_tied": (
        ("qwen3_5_moe_text", {}),
        dict(tie_word_embeddings=True, attention_bias=True, linear_key_head_dim=16)
        | dict(rope_parameters=dict(rope_type="default", rope_theta=1e4, partial_rotary_factor=0.5)),
    ),
    "flex_olmo": (("flex_olmo", {}), dict(norm_topk_prob=True)),
    "flex_olmo_tied": (("flex_olmo", {}), dict(tie_word_embeddings=True, attention_bias=True)),
}

# Those of them that only the slow run takes.
MORE_FAMILY_CASES = ("glm4_tied", "glm4_lite_tied", "minimax_tied", "granite_tied", "dots1_tied", "phimoe_window")
MORE_FAMILY_CASES += ("ernie_steps", "hunyuan_bias", "llama4_tied", "flex_olmo_tied")
MORE_FAMILY_CASES += ("qwen3_next_tied", "qwen3_5_tied")


# One of each family by default, chosen to differ in most.
SLOW = ("olmoe", "deepseek_v2", "deepseek_v2_lite", "deepseek_v3_halves")


# model(ids, ...) as one program for each shape. Outside of jax.jit each operation is a program of its own.
run = jax.jit(lambda model, ids, **inputs: model(ids, **inputs))


def slow(*names: str) -> list[Any]:
    """Parameters that only the slow run takes."""
    return [pytest.param(name, marks=pytest.mark.slow) for name in names]


@dataclasses.dataclass(frozen=True)
class Case:
    """One checkpoint on disk, transformers' float32 model of it, and ours."""

    directory: Path
    torch_model: Any
    model: Any

    def torch_logits(self, ids: np.ndarray, **inputs: Any) -> np.ndarray:
        with torch.no_grad():
            return self.torch_model(torch.tensor(ids), **inputs).logits.numpy()

    def torch_greedy(self, ids: np.ndarray, max_new_tokens: int, **options: Any) -> np.ndarray:
        """(B, S + max_new_tokens), the prompt included."""
        mask = torch.ones(ids.shape, dtype=torch.long)
        with torch.no_grad():
            made = self.torch_model.generate(
                torch.tensor(ids), attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=False, **options
            )
        return made.numpy()


def write_checkpoint(name: str, directory: Path, **options: Any) -> Any:
    """Save a random model of the case and return it."""
    (family, common), varied = (CASES | FAMILY_CASES)[name]
    return FAMILIES[family].write(directory, **SIZES | common | varied | options)


def real_weight(module: Any) -> np.ndarray:
    """The weight of a Linear or Head, dequantized in float32 where it is quantized."""
    value = module.weight.get_value()
    return np.asarray(dequantize_tensor(value.tensor)[0] if isinstance(value, QuantizedMatrix) else value)


def without_quantized_inputs(module: Any) -> Any:
    """The module, whose dense layers no longer quantize activations: for a comparison of weights."""
    for _, part in nnx.iter_modules(module):
        weight = getattr(part, "weight", None)
        if isinstance(weight, QuantizedParam):
            held = weight.get_value()
            scheme = dataclasses.replace(held.scheme, activations=None)
            weight.set_value(QuantizedMatrix(dataclasses.replace(held.tensor, input_scale=None), scheme))
    return module


def assert_logits_close(actual: Any, expected: np.ndarray, fraction: float = 1e-5) -> None:
    """Largest difference within ``fraction`` of the range of the expected logits."""
    actual = np.asarray(actual)
    assert actual.shape == expected.shape and actual.dtype == np.float32
    spread = expected.max() - expected.min()
    worst = np.abs(actual - expected).max() / spread
    assert worst <= fraction, f"max abs difference is {worst:.2e} of the logit range, allowed {fraction:.0e}"
