"""Qwen3-MoE checkpoints of a chosen size with random weights, written fast and in a hostile order of tensors."""

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from moe_jax.loading.files._safetensors import DTYPES
from moe_jax.quantization import method_for

BF16 = np.dtype(ml_dtypes.bfloat16)
Make = Callable[[np.random.Generator], np.ndarray]
_WORDS = {dtype: word for word, dtype in DTYPES.items()}
_POOL = np.random.default_rng(1).standard_normal(1 << 20, np.float32)


def qwen3_config(*, layers: int, hidden: int, intermediate: int, experts: int) -> dict[str, Any]:
    """config.json of a model whose experts hold nearly all of its weights."""
    return dict(
        architectures=["Qwen3MoeForCausalLM"],
        model_type="qwen3_moe",
        vocab_size=512,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=hidden,
        moe_intermediate_size=intermediate,
        num_experts=experts,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=128,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        hidden_act="silu",
        decoder_sparse_step=1,
        mlp_only_layers=[],
        tie_word_embeddings=False,
        attention_bias=False,
    )


def dense_tensors(config: dict[str, Any]) -> list[tuple[str, Make]]:
    """Everything but the experts, in bfloat16."""
    hidden, width = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    shapes: dict[str, tuple[int, ...]] = {
        "model.norm": (hidden,),
        "model.embed_tokens": (config["vocab_size"], hidden),
        "lm_head": (config["vocab_size"], hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        of_layer = {
            "self_attn.q_proj": (queries, hidden),
            "self_attn.k_proj": (keys, hidden),
            "self_attn.v_proj": (keys, hidden),
            "self_attn.o_proj": (hidden, queries),
            "self_attn.q_norm": (width,),
            "self_attn.k_norm": (width,),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "mlp.gate": (config["num_experts"], hidden),
        }
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in of_layer.items()}
    return [(f"{name}.weight", functools.partial(_random, BF16, shape)) for name, shape in shapes.items()]


def expert_tensors(config: dict[str, Any], scheme: Any = None) -> list[tuple[str, Make]]:
    """Experts in bfloat16, or as a scheme stores them: random codes, and scales between 0.5 and 1.5."""
    hidden, intermediate = config["hidden_size"], config["moe_intermediate_size"]
    shapes = {
        "gate_proj": (intermediate, hidden),
        "up_proj": (intermediate, hidden),
        "down_proj": (hidden, intermediate),
    }
    method = method_for(scheme)
    pairs = []
    for layer, expert in np.ndindex(config["num_hidden_layers"], config["num_experts"]):
        for name, shape in shapes.items():
            module = f"model.layers.{layer}.mlp.experts.{expert}.{name}"
            for leaf, spec in method.matrix_specs(*shape).items():
                dtype = spec.dtype if method.scheme.is_quantized else BF16
                pairs.append(
                    (f"{module}.{leaf}", functools.partial(_random, dtype, spec.shape[1:], is_scale="scale" in leaf))
                )
    return pairs


def _random(dtype: np.dtype, shape: tuple[int, ...], rng: np.random.Generator, is_scale: bool = False) -> np.ndarray:
    """Normal matrices or integers of all bits; vectors and scales from 0.5 to 1.5 (e8m0: exponents around 1)."""
    if is_scale and dtype == np.uint8:
        return rng.integers(120, 130, shape, np.uint8)
    if dtype.kind in "iu":
        return rng.integers(0, 256, (*shape[:-1], shape[-1] * dtype.itemsize), np.uint8).view(dtype)
    if is_scale or len(shape) < 2:
        return (0.5 + rng.random(shape)).astype(dtype)
    start = int(rng.integers(0, _POOL.size - 1))
    values = np.resize(np.roll(_POOL, start), shape)  # repeats: what is drawn costs more than what is written
    return (values * (shape[-1] ** -0.5 if dtype == BF16 else 60.0)).astype(dtype)  # below 448


def write_shuffled(
    directory: Path, config: dict[str, Any], pairs: list[tuple[str, Make]], *, shards: int, seed: int
) -> int:
    """config.json, an index and shards; each tensor lies in a random shard at a random place. Returns bytes of data."""
    rng = np.random.default_rng(seed)
    directory.mkdir(parents=True)
    names = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    index, total = {}, 0
    order = rng.permutation(len(pairs))
    for part, file_name in zip(np.array_split(order, shards), names, strict=True):
        header: dict[str, Any] = {}
        end = 0
        with open(directory / "data", "wb") as data:
            for i in part:
                name, make = pairs[i]
                array = make(rng)
                start, end = end, end + array.nbytes
                data.write(np.ascontiguousarray(array).view(np.uint8))
                header[name] = dict(dtype=_WORDS[array.dtype], shape=list(array.shape), data_offsets=[start, end])
                index[name] = file_name
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(directory / file_name, "wb") as target, open(directory / "data", "rb") as source:
            target.write(len(text).to_bytes(8, "little") + text)
            shutil.copyfileobj(source, target, 1 << 24)
        (directory / "data").unlink()
        total += end
    (directory / "model.safetensors.index.json").write_text(json.dumps(dict(metadata={}, weight_map=index)))
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    return total
