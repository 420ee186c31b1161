"""config.json of the models that whole-model benchmarks build, but for num_hidden_layers."""

from typing import Any

_COMMON = dict(
    hidden_act="silu",
    max_position_embeddings=32768,
    torch_dtype="bfloat16",
    attention_dropout=0.0,
    initializer_range=0.02,
    use_cache=True,
    tie_word_embeddings=False,
    bos_token_id=1,
    eos_token_id=2,
)
MODELS: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": _COMMON
    | dict(
        architectures=["Qwen3MoeForCausalLM"],
        model_type="qwen3_moe",
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        vocab_size=151936,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        attention_bias=False,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
    ),
    "mixtral-8x7b": _COMMON
    | dict(
        architectures=["MixtralForCausalLM"],
        model_type="mixtral",
        hidden_size=4096,
        intermediate_size=14336,
        num_local_experts=8,
        num_experts_per_tok=2,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=32000,
        rms_norm_eps=1e-5,
        rope_theta=1e6,
    ),
    "gpt-oss-120b": _COMMON
    | dict(
        architectures=["GptOssForCausalLM"],
        model_type="gpt_oss",
        hidden_size=2880,
        intermediate_size=2880,
        num_local_experts=128,
        num_experts_per_tok=4,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=64,
        vocab_size=201088,
        attention_bias=True,
        rms_norm_eps=1e-5,
        rope_theta=150000,
        sliding_window=128,
        swiglu_limit=7.0,
        rope_scaling=dict(
            rope_type="yarn",
            factor=32.0,
            beta_fast=32.0,
            beta_slow=1.0,
            truncate=False,
            original_max_position_embeddings=4096,
        ),
    ),
}
