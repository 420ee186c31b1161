"""Bases of whole models, of two files with an index, and for meshes: Qwen3-MoE and DeepSeek-V3, two layers each."""

from pathlib import Path

import numpy as np

import moe_jax
from moe_jax.writing._config import quantization_config
from tests.fuzz.bases import (
    BF16,
    CONFIG,
    E4M3,
    F32,
    PROJECTIONS,
    STATIC,
    E,
    H,
    I,
    compressed,
    random_codes,
    random_words,
    static_fp8,
    write,
)

F16 = np.dtype(np.float16)
QWEN = CONFIG | {"num_hidden_layers": 2}
TIED = QWEN | {"tie_word_embeddings": True, "attention_bias": True}
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 32,
    "hidden_size": H,
    "intermediate_size": 48,
    "moe_intermediate_size": I,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "n_routed_experts": E,
    "n_shared_experts": 1,
    "num_experts_per_tok": 1,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
EXPERTS_ONLY = ["re:.*\\.experts\\..*"]


def dense_names(config) -> dict[str, tuple[int, ...]]:
    """{name: shape} of all parameters of a model but those of routed experts."""
    vocab, heads = config["vocab_size"], config["num_attention_heads"]
    is_tied, has_biases = (config.get(key) or False for key in ("tie_word_embeddings", "attention_bias"))
    found = {"model.embed_tokens.weight": (vocab, H), "model.norm.weight": (H,)}
    if not is_tied:
        found["lm_head.weight"] = (vocab, H)
    for layer in range(config["num_hidden_layers"]):
        own = {"input_layernorm.weight": (H,), "post_attention_layernorm.weight": (H,)}
        if config["model_type"] == "deepseek_v3":
            nope, rope, value = (config[f"{name}_head_dim"] for name in ("qk_nope", "qk_rope", "v"))
            ranks = config["q_lora_rank"], config["kv_lora_rank"]
            own |= {
                "self_attn.q_a_proj.weight": (ranks[0], H),
                "self_attn.q_a_layernorm.weight": (ranks[0],),
                "self_attn.q_b_proj.weight": (heads * (nope + rope), ranks[0]),
                "self_attn.kv_a_proj_with_mqa.weight": (ranks[1] + rope, H),
                "self_attn.kv_a_layernorm.weight": (ranks[1],),
                "self_attn.kv_b_proj.weight": (heads * (nope + value), ranks[1]),
                "self_attn.o_proj.weight": (H, heads * value),
            }
        else:
            width = config.get("head_dim") or H // heads
            sizes = {"q": heads * width, "k": (config.get("num_key_value_heads") or heads) * width}
            sizes["v"] = sizes["k"]
            own |= {f"self_attn.{name}_proj.weight": (size, H) for name, size in sizes.items()}
            own |= {"self_attn.o_proj.weight": (H, sizes["q"])}
            own |= {f"self_attn.{name}_norm.weight": (width,) for name in "qk"}
            if has_biases:
                own |= {f"self_attn.{name}_proj.bias": (size,) for name, size in sizes.items()}
                own |= {"self_attn.o_proj.bias": (H,)}
        if layer < (config.get("first_k_dense_replace") or 0):
            wide = config["intermediate_size"]
            own |= {f"mlp.{name}_proj.weight": (wide, H) for name in ("gate", "up")} | {
                "mlp.down_proj.weight": (H, wide)
            }
        else:
            own |= {"mlp.gate.weight": (E, H)}
            if config["model_type"] == "deepseek_v3":
                own |= {"mlp.gate.e_score_correction_bias": (E,)}
                own |= {f"mlp.shared_experts.{name}.weight": shape for name, shape in PROJECTIONS.items()}
        found |= {f"model.layers.{layer}.{name}": shape for name, shape in own.items()}
    return found


def plain_dense(rng, config):
    return {name: rng.standard_normal(shape).astype(BF16) for name, shape in dense_names(config).items()}


def expert_modules(config):
    for layer in range(config.get("first_k_dense_replace", 0), config["num_hidden_layers"]):
        for expert in range(E):
            for name, shape in PROJECTIONS.items():
                yield f"model.layers.{layer}.mlp.experts.{expert}.{name}", shape


def plain_experts(rng, config):
    return {f"{name}.weight": rng.standard_normal(shape).astype(BF16) for name, shape in expert_modules(config)}


def fp8_model(rng):
    """Experts and attention in FP8 with a scale per channel."""
    tensors = plain_dense(rng, QWEN) | plain_experts(rng, QWEN)
    for name in list(tensors):
        if "proj" in name:
            n, k = tensors[name].shape
            tensors[name] = rng.standard_normal((n, k)).astype(E4M3)
            tensors[f"{name}_scale"] = rng.uniform(0.01, 1, (n, 1)).astype(F32)
    return tensors


def deepseek(rng):
    """Experts in 4 bits, all else as it is."""
    tensors = plain_dense(rng, DEEPSEEK)
    for module, (n, k) in expert_modules(DEEPSEEK):
        tensors[f"{module}.weight_packed"] = random_words(rng, (n, k // 8))
        tensors[f"{module}.weight_scale"] = rng.uniform(-1, 1, (n, k // 16)).astype(F16)
        tensors[f"{module}.weight_shape"] = np.array([n, k], np.int64)
    return tensors


GROUPS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16, "symmetric": True}
# One directory each; the kinds that load it in other ways are in ``entries``.
MODEL_KINDS = ("two_shards", "mesh_experts", "mesh_tensor", "model_tied", "model_fp8", "model_mesh", "model_deepseek")
MODEL_KINDS += ("moe_deepseek",)


def write_models(root: Path) -> None:
    """A directory for each of ``MODEL_KINDS``."""
    rng = np.random.default_rng(1)
    channels = quantization_config(moe_jax.Scheme.parse("fp8_channel"), ["lm_head"])
    write(root / "two_shards", random_codes(rng, "fp8_channel"), channels, shards=2)
    write(root / "mesh_experts", static_fp8(rng), compressed("float-quantized", STATIC, STATIC), shards=2)
    ints = quantization_config(moe_jax.Scheme.parse("w8a16_channel"), ["lm_head"])
    write(root / "mesh_tensor", random_codes(rng, "w8a16_channel"), ints)
    write(root / "model_tied", plain_dense(rng, TIED) | plain_experts(rng, TIED), None, TIED, shards=2)
    ignored = channels | {"ignore": ["lm_head", "re:.*mlp\\.gate$"]}
    write(root / "model_fp8", fp8_model(rng), ignored, QWEN)
    write(root / "model_mesh", fp8_model(rng), ignored, QWEN, shards=2)
    stated = compressed("pack-quantized", GROUPS)
    stated["config_groups"]["group_0"]["targets"] = EXPERTS_ONLY
    for kind in ("model_deepseek", "moe_deepseek"):
        write(root / kind, deepseek(rng), stated, DEEPSEEK)
