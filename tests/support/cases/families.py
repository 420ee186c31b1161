"""Tiny checkpoints of every family with experts, saved by transformers, and transformers' own blocks as the judge."""

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

import moe_jax
from tests.support.checkpoints import writers
from tests.support.checkpoints.writers import fused

# One set of shapes for all families, so that few programs are compiled.
H, I, E = 48, 32, 8  # noqa: E741
SIZES = dict(
    vocab_size=32,
    hidden_size=H,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=64,
    num_experts_per_tok=2,
    bos_token_id=None,
    eos_token_id=None,
    pad_token_id=None,
)
MLA = dict(
    kv_lora_rank=16,
    q_lora_rank=16,
    qk_rope_head_dim=8,
    v_head_dim=8,
    qk_nope_head_dim=8,
    head_dim=8,
    num_key_value_heads=4,
    n_routed_experts=E,
    moe_intermediate_size=I,
    intermediate_size=80,
)
# So many heads that no token's scores are zero in all of them, since transformers does not say which of equal tokens it
# selects.
INDEXER = dict(index_topk=8, index_n_heads=16, index_head_dim=16)
LOCAL = dict(num_local_experts=E, intermediate_size=I, num_hidden_layers=2)
QWEN = dict(num_experts=E, moe_intermediate_size=I, intermediate_size=40)
DOTS = dict(
    n_routed_experts=E,
    n_shared_experts=1,
    moe_intermediate_size=I,
    intermediate_size=40,
    first_k_dense_replace=1,
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    sliding_window=None,
)
ERNIE = dict(moe_num_experts=E, moe_num_shared_experts=2, moe_intermediate_size=I, intermediate_size=40)
SHARED = dict(shared_expert_intermediate_size=I)
LINEAR_ATTENTION = dict(
    linear_key_head_dim=8, linear_value_head_dim=12, linear_num_key_heads=2, linear_num_value_heads=4
)
LINEAR_ATTENTION |= dict(layer_types=["linear_attention", "full_attention"])
QWEN3_5 = SHARED | LINEAR_ATTENTION | dict(num_experts=E, moe_intermediate_size=I, num_hidden_layers=2)
LLAMA4 = dict(
    num_local_experts=E,
    intermediate_size=I,
    intermediate_size_mlp=40,
    num_experts_per_tok=1,
    interleave_moe_layer_step=2,
    num_hidden_layers=4,
)


@dataclasses.dataclass(frozen=True)
class Family:
    """A family's classes in transformers, what sets its config apart, and which of its layers then have experts."""

    name: str
    options: dict[str, Any]
    moe_layers: tuple[int, ...]
    block: str = "mlp"
    router: str = "router."
    is_fused: bool = False

    def write(self, directory: Path, seed: int = 0, **options: Any) -> Any:
        """Save a random float32 model and return it."""
        return writers.save_random(self.name, directory, seed=seed, **SIZES | self.options | options)

    def with_tensors(self, layer: Any, index: int, tensors: dict[str, torch.Tensor]) -> Any:
        """The layer with the weights of its block taken from per-expert tensors, (out, in) each."""
        layer = copy.deepcopy(layer)
        prefix = f"model.layers.{index}.{self.block}."
        for name, parameter in getattr(layer, self.block).named_parameters():
            if not name.startswith("experts."):
                parameter.data = tensors[prefix + name.replace("router.", self.router)]
                continue
            suffix = "bias" if name.endswith("_bias") else "weight"
            roles = ("gate_proj", "up_proj") if "gate_up" in name else ("down_proj",)
            parts = [
                torch.stack([tensors[f"{prefix}experts.{e}.{role}.{suffix}"] for e in range(len(parameter))])
                for role in roles
            ]
            value = torch.stack(parts, 2).flatten(1, 2) if self.name == "GptOss" else torch.cat(parts, 1)
            parameter.data = value.transpose(1, 2) if value.shape != parameter.shape else value
        return layer

    def output(self, layer: Any, x: np.ndarray) -> np.ndarray:
        """What transformers' block gives for x (..., H), as (T, H)."""
        with torch.no_grad():
            y = getattr(layer, self.block)(torch.tensor(x)[None])
        return (y[0] if isinstance(y, tuple) else y).reshape(-1, x.shape[-1]).numpy()


FAMILIES = {
    "mixtral": Family("Mixtral", LOCAL, (0, 1)),
    "qwen2_moe": Family("Qwen2Moe", QWEN | SHARED | dict(mlp_only_layers=[1]), (0, 2)),
    "qwen3_moe": Family("Qwen3Moe", QWEN | dict(decoder_sparse_step=2, norm_topk_prob=True), (1,)),
    "qwen3_next": Family("Qwen3Next", QWEN | SHARED | LINEAR_ATTENTION | dict(num_hidden_layers=2), (0, 1)),
    "qwen3_5_moe_text": Family("Qwen3_5Moe", QWEN3_5, (0, 1)),
    "olmoe": Family(
        "Olmoe",
        dict(num_experts=E, intermediate_size=I, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=3),
        (0, 1),
    ),
    "deepseek_v2": Family(
        "DeepseekV2",
        MLA
        | dict(n_shared_experts=2, first_k_dense_replace=1, topk_method="group_limited_greedy", n_group=4)
        | dict(topk_group=2, routed_scaling_factor=2.5),
        (1, 2),
    ),
    "deepseek_v3": Family(
        "DeepseekV3", MLA | dict(n_shared_experts=1, first_k_dense_replace=2, n_group=4, topk_group=2), (2,)
    ),
    "glm4_moe": Family("Glm4Moe", MLA | dict(head_dim=16, first_k_dense_replace=1, routed_scaling_factor=1.5), (1, 2)),
    "gpt_oss": Family("GptOss", LOCAL | dict(swiglu_limit=1.5), (0, 1), is_fused=True),
    "granitemoe": Family(
        "GraniteMoe",
        LOCAL | dict(residual_multiplier=0.3),
        (0, 1),
        block="block_sparse_moe",
        router="router.layer.",
        is_fused=True,
    ),
    "minimax_m2": Family("MiniMaxM2", dict(num_local_experts=E, intermediate_size=I, num_hidden_layers=2), (0, 1)),
    "dots1": Family("Dots1", DOTS, (1, 2)),
    "phimoe": Family("Phimoe", dict(num_local_experts=E, intermediate_size=I, num_hidden_layers=2), (0, 1)),
    "ernie4_5_moe": Family("Ernie4_5_Moe", ERNIE, (1, 2)),
    "hunyuan_v1_moe": Family("HunYuanMoEV1", dict(num_experts=E, intermediate_size=I, num_hidden_layers=2), (0, 1)),
    "flex_olmo": Family("FlexOlmo", dict(num_experts=E, intermediate_size=I, num_hidden_layers=2), (0, 1)),
    "glm4_moe_lite": Family("Glm4MoeLite", MLA | dict(n_shared_experts=1, n_group=4, topk_group=2), (1, 2)),
    "deepseek_v32": Family(
        "DeepseekV32",
        MLA | INDEXER | dict(n_shared_experts=1, first_k_dense_replace=1, n_group=4, topk_group=2),
        (1, 2),
    ),
    "glm_moe_dsa": Family("GlmMoeDsa", MLA | INDEXER | dict(n_shared_experts=1, first_k_dense_replace=1), (1, 2)),
    "llama4_text": Family("Llama4", LLAMA4, (1, 3), block="feed_forward", is_fused=True),
}


def load(directory: Path, layer: int, **options: Any) -> moe_jax.MoEBlock:
    """The block of a layer in float32, judged without kernels."""
    return moe_jax.load_moe(directory, layer, dtype=jnp.float32, implementation="reference", **options)


def tokens(count: int = 9, width: int = H) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((count, width)).astype(np.float32)


def write_llama4(directory: Path, **options: Any) -> Any:
    """The published form, with a vision model; returns its language model."""
    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
    vision = transformers.Llama4VisionConfig(
        **sizes, vision_output_dim=16, image_size=28, patch_size=14, projector_input_dim=16, projector_output_dim=16
    )
    text = transformers.Llama4TextConfig(**SIZES | LLAMA4 | options)
    model = writers.save_random(
        "Llama4", directory, seed=3, architecture="ConditionalGeneration", text_config=text, vision_config=vision
    )
    return model.language_model


def write_kimi_k25(directory: Path, **options: Any) -> Any:
    """DeepSeek-V3 as the language model of the published form, beside tensors of a vision model; returns it."""
    model = FAMILIES["deepseek_v3"].write(directory, **options)
    edit(
        directory,
        lambda tensors: (
            {f"language_model.{name}": value for name, value in tensors.items()}
            | {
                "vision_tower.encoder.blocks.0.wo.weight": torch.zeros(4, 4),
                "vision_tower.patch_embed.proj.bias": torch.zeros(4),
                "mm_projector.proj.0.weight": torch.zeros(8, 4),
            }
        ),
    )
    text = json.loads((directory / "config.json").read_text()) | {"model_type": "kimi_k2"}
    config = dict(architectures=["KimiK25ForConditionalGeneration"], model_type="kimi_k25", text_config=text)
    (directory / "config.json").write_text(json.dumps(config | dict(vision_config={"model_type": "kimi_k25_vision"})))
    return model


def write_qwen3_5(directory: Path, **options: Any) -> Any:
    """The published form, with a vision model; returns it. options: of the language model."""
    text = transformers.Qwen3_5MoeTextConfig(**SIZES | QWEN3_5 | options)
    sizes = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, patch_size=4, num_position_embeddings=16)
    vision = dict(sizes, model_type="qwen3_5_moe_vision", out_hidden_size=text.hidden_size)
    return writers.save_random(
        "Qwen3_5Moe",
        directory,
        architecture="ConditionalGeneration",
        text_config=text.to_dict(),
        vision_config=vision,
        tie_word_embeddings=text.tie_word_embeddings,
    )


def add_predictor(directory: Path) -> dict[str, torch.Tensor]:
    """Lay Qwen3.5 out as published: experts of a layer in two tensors, and its last layer again as one for multi-token
    prediction; returns the tensors of that."""

    def publish(tensors):
        tensors, last = writers.fused(tensors), "model.language_model.layers.1."
        copies = {f"mtp.layers.0.{n.removeprefix(last)}": t for n, t in tensors.items() if n.startswith(last)}
        norm = tensors["model.language_model.norm.weight"]
        extra.update(copies | {"mtp.norm.weight": norm, "mtp.fc.weight": torch.zeros(len(norm), 2 * len(norm))})
        return tensors | extra

    extra: dict[str, torch.Tensor] = {}
    edit(directory, publish)
    return extra


# Families whose language model is one of FAMILIES, within a checkpoint that holds others too.
WRAPPED: dict[str, tuple[Any, str]] = {
    "llama4": (write_llama4, "llama4_text"),
    "kimi_k25": (write_kimi_k25, "deepseek_v3"),
    "qwen3_5_moe": (write_qwen3_5, "qwen3_5_moe_text"),
}


def edit(directory: Path, change: Any = None, **config: Any) -> None:
    """Rewrite the tensors by ``change(tensors) -> tensors`` and keys of config.json; None drops a key."""
    if change is not None:
        path = directory / "model.safetensors"
        tensors = {name: value.clone().contiguous() for name, value in change(load_file(path)).items()}
        save_file(tensors, path, metadata={"format": "pt"})
    path = directory / "config.json"
    merged = json.loads(path.read_text()) | config
    path.write_text(json.dumps({key: value for key, value in merged.items() if value is not None}))


MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def as_mxfp4(directory: Path, model: Any, seed: int = 0) -> None:
    """Rewrite a gpt-oss checkpoint with random MXFP4 experts as OpenAI publishes them, gate and up in alternating rows,
    and give the model their values."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    rng = np.random.default_rng(seed)

    def quantize(tensors):
        result = {key: value for key, value in tensors.items() if not key.endswith("_proj") or "experts" not in key}
        for index, layer in enumerate(model.model.layers):
            for projection in ("gate_up_proj", "down_proj"):
                parameter = getattr(layer.mlp.experts, projection)
                experts, k, n = parameter.shape
                blocks = torch.tensor(rng.integers(0, 256, (experts, n, k // 32, 16)), dtype=torch.uint8)
                scales = torch.tensor(rng.integers(121, 125, (experts, n, k // 32)), dtype=torch.uint8)
                pairs = torch.stack([values[(blocks & 15).int()], values[(blocks >> 4).int()]], -1).flatten(-2)
                parameter.data = (pairs * torch.exp2(scales.float() - 127)[..., None]).flatten(2).transpose(1, 2)
                prefix = f"model.layers.{index}.mlp.experts.{projection}"
                result |= {f"{prefix}_blocks": blocks, f"{prefix}_scales": scales}
        return result

    edit(directory, quantize, quantization_config=MXFP4)


def unfused(family: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Fused experts as one (out, in) matrix per expert and projection, under the names that llm-compressor writes."""
    result = {}
    for name, value in tensors.items():
        head, container, tail = name.partition("block_sparse_moe." if family == "granitemoe" else ".experts.")
        if not container or "router" in tail:
            result[name] = value
            continue
        prefix = f"{head}{container}experts." if family == "granitemoe" else f"{head}{container}"
        is_down = tail.startswith(("down_proj", "output_linear"))
        suffix = "bias" if tail.endswith("_bias") else "weight"
        for expert, matrix in enumerate(value):
            if family != "granitemoe" and suffix == "weight":
                matrix = matrix.T  # stored as (in, out)
            if is_down:
                parts = {"down_proj": matrix}
            elif family == "gpt_oss":
                parts = {"gate_proj": matrix[0::2], "up_proj": matrix[1::2]}
            else:
                parts = dict(zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True))
            result |= {f"{prefix}{expert}.{projection}.{suffix}": part for projection, part in parts.items()}
    return result


def fused_again(family: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """``unfused`` undone, for families whose experts transformers reads as one tensor alone."""
    result = {}
    for name, value in fused(tensors).items():
        head, found, projection = name.partition(".experts.")
        if not found:
            result[name] = value
        elif family == "granitemoe":
            word = {"gate_up_proj": "input_linear", "down_proj": "output_linear"}[projection]
            result[f"{head}.{word}.weight"] = value
        else:
            result[name] = value.transpose(1, 2) if family == "llama4_text" else value
    return result


def assert_rows_close(actual: Any, expected: np.ndarray, fraction: float = 1e-5) -> None:
    """Every row within ``fraction`` of its own largest entry."""
    actual = np.asarray(actual).reshape(expected.shape)
    worst = (np.abs(actual - expected).max(axis=1) / np.abs(expected).max(axis=1)).max()
    assert worst <= fraction, f"a row differs by {worst:.2e} of its largest entry, allowed {fraction:.0e}"
