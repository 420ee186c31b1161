"""Small checkpoints in every format that is read, for mutation: layers of experts, and whole models (``models``). All
values are positive cases: each base loads, and ``decoder`` agrees with what was loaded."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

import moe_jax
from moe_jax.writing._config import quantization_config
from moe_jax.writing._matrices import module_layout

E, H, I = 2, 64, 32  # noqa: E741
PREFIX = "model.layers.0.mlp."
PROJECTIONS = {"gate_proj": (I, H), "up_proj": (I, H), "down_proj": (H, I)}
CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 32,
    "hidden_size": H,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "num_experts": E,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": I,
    "norm_topk_prob": True,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
BF16, E4M3, F16, F32 = (np.dtype(t) for t in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.float16, np.float32))
# Of compressed-tensors, with random codes in the layout that the writer's tests have judged; the rest is laid out here.
WRITTEN = (
    *("fp8_tensor", "fp8_channel", "fp8_block", "int8_w8a8", "w4a16_g32", "w4a16_g32_asym", "w8a16_channel"),
    *("w3a16_g32_asym", "w4a8_int8_g32", "w4a8_fp8_g32", "nvfp4", "nvfp4_a16", "mxfp4", "mxfp8"),
)


def modules():
    return ((f"{PREFIX}experts.{e}.{name}", shape) for e in range(E) for name, shape in PROJECTIONS.items())


def write(directory: Path, tensors, stated=None, config=CONFIG, shards=1):
    """config.json and one file of weights, or several with an index, to which tensors go in turn."""
    directory.mkdir(parents=True)
    if shards == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    else:
        files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
        weight_map = {name: files[i % shards] for i, name in enumerate(tensors)}
        for file in files:
            own = {name: array for name, array in tensors.items() if weight_map[name] == file}
            save_file(own, directory / file, metadata={"format": "pt"})
        size = sum(array.nbytes for array in tensors.values())
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    config = dict(config) if stated is None else config | {"quantization_config": stated}
    (directory / "config.json").write_text(json.dumps(config))


def router(rng):
    return {f"{PREFIX}gate.weight": rng.standard_normal((E, H)).astype(BF16)}


def plain(rng):
    return router(rng) | {f"{m}.weight": rng.standard_normal(shape).astype(BF16) for m, shape in modules()}


def static_fp8(rng, suffix="weight_scale"):
    tensors = router(rng)
    for module, shape in modules():
        tensors[f"{module}.weight"] = rng.standard_normal(shape).astype(E4M3)
        tensors[f"{module}.{suffix}"] = rng.uniform(0.01, 1, 1).astype(F32)
        tensors[f"{module}.input_scale"] = rng.uniform(0.01, 1, 1).astype(F32)
    return tensors


def native_blocks(rng):
    tensors = router(rng)
    for module, shape in modules():
        tensors[f"{module}.weight"] = rng.standard_normal(shape).astype(E4M3)
        tensors[f"{module}.weight_scale_inv"] = rng.uniform(0.01, 1, (1, 1)).astype(F32)
    return tensors


def rows_fp8(rng):
    tensors = router(rng)
    for module, shape in modules():
        tensors[f"{module}.weight"] = rng.standard_normal(shape).astype(E4M3)
        tensors[f"{module}.weight_scale"] = rng.uniform(0.01, 1, (shape[0], 1)).astype(F32)
    return tensors


def random_words(rng, shape):
    return rng.integers(0, 2**32, shape, dtype=np.uint32).view(np.int32)


def act_order(rng):
    tensors, orders = router(rng), {}
    for module, (n, k) in modules():
        expert = module.split(".")[-2]
        order = orders.setdefault((expert, k), rng.permutation(np.arange(k) // 16).astype(np.int32))
        tensors[f"{module}.weight_packed"] = random_words(rng, (n, k // 8))
        tensors[f"{module}.weight_scale"] = rng.uniform(-1, 1, (n, k // 16)).astype(F16)
        tensors[f"{module}.weight_shape"] = np.array([n, k], np.int64)
        tensors[f"{module}.weight_g_idx"] = order
    return tensors


def gptq(rng, zeros):
    tensors = router(rng)
    for module, (n, k) in modules():
        tensors[f"{module}.qweight"] = random_words(rng, (k // 8, n))
        # nibbles of 0 to 14: a stored 15 means 16 and is refused
        words = random_words(rng, (k // 16, n // 8)) & 0x77777777
        tensors[f"{module}.qzeros"] = words if zeros else np.full_like(words, 0x77777777)
        tensors[f"{module}.scales"] = rng.uniform(0.01, 1, (k // 16, n)).astype(F16)
        tensors[f"{module}.g_idx"] = (np.arange(k) // 16).astype(np.int32)
    return tensors


def awq(rng):
    tensors = router(rng)
    for module, (n, k) in modules():
        tensors[f"{module}.qweight"] = random_words(rng, (k, n // 8))
        tensors[f"{module}.qzeros"] = random_words(rng, (k // 16, n // 8))
        tensors[f"{module}.scales"] = rng.uniform(0.01, 1, (k // 16, n)).astype(F16)
    return tensors


def modelopt_nvfp4(rng):
    tensors = router(rng)
    for module, (n, k) in modules():
        tensors[f"{module}.weight"] = rng.integers(0, 256, (n, k // 2)).astype(np.uint8)
        tensors[f"{module}.weight_scale"] = rng.uniform(1, 448, (n, k // 16)).astype(E4M3)
        tensors[f"{module}.weight_scale_2"] = np.array(rng.uniform(1e-5, 1e-3), F32)
        tensors[f"{module}.input_scale"] = np.array(rng.uniform(1e-4, 1e-2), F32)
    return tensors


def gpt_oss(rng):
    tensors = {}
    for name, n, k in (("gate_up_proj", 2 * I, H), ("down_proj", H, I)):
        tensors[f"{PREFIX}experts.{name}_blocks"] = rng.integers(0, 256, (E, n, k // 32, 16)).astype(np.uint8)
        tensors[f"{PREFIX}experts.{name}_scales"] = rng.integers(118, 124, (E, n, k // 32)).astype(np.uint8)
        tensors[f"{PREFIX}experts.{name}_bias"] = rng.standard_normal((E, n)).astype(BF16)
    return tensors


def random_codes(rng, name):
    """Tensors of a scheme by its layout."""
    scheme, tensors = moe_jax.Scheme.parse(name), router(rng)
    limit = 1 << (scheme.weights.element_type.bits - 1)
    for module, (n, k) in modules():
        for suffix, (shape, dtype) in module_layout(scheme, n, k, BF16).items():
            match suffix, dtype.name:
                case "weight_shape", _:
                    value = np.array([n, k], np.int64)
                case ("weight_packed" | "weight_zero_point", "int32"):
                    value = random_words(rng, shape)
                case "weight_packed", _:
                    value = rng.integers(0, 256, shape).astype(np.uint8)
                case "weight", "int8":
                    value = rng.integers(-limit, limit, shape).astype(np.int8)
                case "weight", _:
                    value = rng.standard_normal(shape).astype(dtype)
                case "weight_scale", "uint8":
                    value = rng.integers(118, 124, shape).astype(np.uint8)
                case "weight_scale", "float8_e4m3fn":
                    value = rng.uniform(1, 448, shape).astype(dtype)
                case _:  # global scales are large
                    value = rng.uniform(*((10, 1000) if "global" in suffix else (0.01, 1)), shape).astype(dtype)
            tensors[f"{module}.{suffix}"] = value
    return tensors


def group(weights, inputs=None):
    return {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}}


def compressed(form, weights, inputs=None):
    top = {"quant_method": "compressed-tensors", "format": form, "version": "0.17.1", "ignore": ["lm_head"]}
    return top | {"config_groups": group(weights, inputs)}


STATIC = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
ACT_ORDER = {
    "num_bits": 4,
    "type": "int",
    "strategy": "group",
    "group_size": 16,
    "symmetric": True,
    "actorder": "group",
}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False}
LAID_OUT = {
    "bf16": (plain, None),
    "fp8_tensor_static": (static_fp8, compressed("float-quantized", STATIC, STATIC)),
    "act_order": (act_order, compressed("pack-quantized", ACT_ORDER)),
    "native_fp8": (
        native_blocks,
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    ),
    "autofp8": (static_fp8, {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}),
    "fbgemm": (rows_fp8, {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}),
    "gptq": (lambda rng: gptq(rng, False), GPTQ | {"sym": True}),
    "gptq_asym": (lambda rng: gptq(rng, True), GPTQ | {"sym": False}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"}),
    "modelopt_fp8": (static_fp8, {"quant_method": "modelopt", "quant_algo": "FP8"}),
    "modelopt_nvfp4": (modelopt_nvfp4, {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}),
}
LAYER_KINDS = (*LAID_OUT, *WRITTEN, "gpt_oss")


def write_layers(root: Path) -> None:
    """A directory for each of ``LAYER_KINDS``. Experts differ from each other, and gate from up, in every tensor."""
    rng = np.random.default_rng(0)
    for kind, (make, stated) in LAID_OUT.items():
        write(root / kind, make(rng), stated)
    for scheme in WRITTEN:
        write(root / scheme, random_codes(rng, scheme), quantization_config(moe_jax.Scheme.parse(scheme), ["lm_head"]))
    stated = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.mlp.router"]}
    write(root / "gpt_oss", gpt_oss(rng), stated, {"model_type": "gpt_oss", "num_local_experts": E, "hidden_size": H})
