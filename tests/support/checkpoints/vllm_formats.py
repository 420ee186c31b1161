"""Quantized matrices as checkpoints of each format hold them, beside their real values, and the configs that say so.

Codes and scales are drawn and the float32 values computed from them here, with torch alone: nothing of the library.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

Tensors = dict[str, torch.Tensor]
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
IGNORED = ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"]
# For configs that want whole names; models have at most so many layers here.
NOT_CONVERTED = ["lm_head"] + [
    f"model.layers.{layer}.{module}"
    for layer in range(48)
    for module in ("mlp.gate", *(f"self_attn.{part}_proj" for part in "qkvo"))
]
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclasses.dataclass(frozen=True)
class VllmFormat:
    """One format of checkpoints that vLLM reads.

    Args:
        config: quantization_config, or the name of an online method of the plugin, or None.
        write: (generator, N, K, order) -> the tensors of one matrix by suffix, and its values (N, K) float32. order: a
            permutation of K, in which formats with act-order deal columns to groups.
        method: the name of vLLM's method class.
        activations: how far activations are rounded: 16 or 8 bits.
        settings: arguments of the layer that the format needs.
        is_gpt_oss: one tensor for all experts under gpt-oss' names, rows of gate and up in turn, with biases.
        rows: what rounds rows as the checkpoint says, in tests/support/vllm_layers.py, where vLLM leaves them in 16
            bits.
    """

    config: Any
    write: Callable[[torch.Generator, int, int, torch.Tensor], tuple[Tensors, torch.Tensor]]
    method: str
    activations: int = 16
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    is_gpt_oss: bool = False
    rows: str | None = None


class Values(NamedTuple):
    """Real values of experts in float32: w13 (E, 2, I, H), w2 (E, H, I), and w13_bias (E, 2, I), w2_bias (E, H)."""

    w13: torch.Tensor
    w2: torch.Tensor
    w13_bias: torch.Tensor | None = None
    w2_bias: torch.Tensor | None = None


def draw_experts(
    form: VllmFormat, generator: torch.Generator, num_experts: int, hidden: int, intermediate: int
) -> tuple[Tensors, Values]:
    """A layer's experts: the checkpoint's tensors by their names behind "mlp.experts.", and their values."""
    if form.is_gpt_oss:
        return _draw_gpt_oss(form, generator, num_experts, hidden, intermediate)
    tensors, w13, w2 = {}, [], []
    for expert in range(num_experts):
        found, orders = {}, [torch.randperm(k, generator=generator) for k in (hidden, intermediate)]
        for projection, n, k, order in (
            ("gate", intermediate, hidden, orders[0]),
            ("up", intermediate, hidden, orders[0]),
            ("down", hidden, intermediate, orders[1]),
        ):
            parts, found[projection] = form.write(generator, n, k, order)
            tensors |= {f"{expert}.{projection}_proj.{suffix}": tensor for suffix, tensor in parts.items()}
        w13.append(torch.stack([found["gate"], found["up"]]))
        w2.append(found["down"])
    return tensors, Values(torch.stack(w13), torch.stack(w2))


def _draw_gpt_oss(
    form: VllmFormat, generator: torch.Generator, num_experts: int, hidden: int, intermediate: int
) -> tuple[Tensors, Values]:
    tensors, values, biases = {}, {}, {}
    for name, n, k in (("gate_up_proj", 2 * intermediate, hidden), ("down_proj", hidden, intermediate)):
        parts = [form.write(generator, n, k, torch.arange(k)) for _ in range(num_experts)]
        stacked = {suffix: torch.stack([part[suffix] for part, _ in parts]) for suffix in parts[0][0]}
        if "weight" in stacked:
            tensors[name] = stacked["weight"].transpose(1, 2).contiguous()
        else:
            tensors[f"{name}_blocks"] = stacked["weight_packed"].reshape(num_experts, n, k // 32, 16)
            tensors[f"{name}_scales"] = stacked["weight_scale"]
        bias = (0.1 * torch.randn(num_experts, n, generator=generator, dtype=torch.float32)).to(torch.bfloat16)
        tensors[f"{name}_bias"], biases[name] = bias, bias.float()
        values[name] = torch.stack([value for _, value in parts])

    def projections(rows: torch.Tensor) -> torch.Tensor:
        return torch.stack([rows[:, 0::2], rows[:, 1::2]], dim=1)

    gate_up, down = "gate_up_proj", "down_proj"
    return tensors, Values(projections(values[gate_up]), values[down], projections(biases[gate_up]), biases[down])


def _scales(generator: torch.Generator, *shape: int, size: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return ((0.5 + torch.rand(*shape, generator=generator, dtype=torch.float32)) * size).to(dtype)


def _e4m3(generator: torch.Generator, n: int, k: int) -> torch.Tensor:
    return (torch.randn(n, k, generator=generator, dtype=torch.float32) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)


def _unquantized(generator, n, k, order):
    weight = (torch.randn(n, k, generator=generator, dtype=torch.float32) * k**-0.5).to(torch.bfloat16)
    return dict(weight=weight), weight.float()


def _fp8(extent: str, scale_name: str = "weight_scale", *, is_static: bool = False, shape: tuple[int, ...] = ()):
    def write(generator, n, k, order):
        codes, size = _e4m3(generator, n, k), 0.01 * k**-0.5
        if extent == "tensor":
            scale = _scales(generator, *(shape or (1,)), size=size)
            values = codes.float() * scale.reshape(())
        elif extent == "channel":
            scale = _scales(generator, n, 1, size=size)
            values = codes.float() * scale
        else:
            scale = _scales(generator, math.ceil(n / 128), math.ceil(k / 128), size=size)
            values = codes.float() * _spread_blocks(scale, n, k)
        extra = dict(input_scale=torch.full(shape or (1,), 0.05, dtype=torch.float32)) if is_static else {}
        return {"weight": codes, scale_name: scale} | extra, values

    return write


def _spread_blocks(scale: torch.Tensor, n: int, k: int) -> torch.Tensor:
    return scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]


def _int8(generator, n, k, order):
    codes = torch.randint(-127, 128, (n, k), generator=generator, dtype=torch.int8)
    scale = _scales(generator, n, 1, size=0.01 * k**-0.5)
    return dict(weight=codes, weight_scale=scale), codes.float() * scale


def _int4(group: int | None):
    """Codes of 4 bits, each in a byte; scales of groups are bfloat16."""

    def write(generator, n, k, order):
        size, dtype = group or k, torch.float32 if group is None else torch.bfloat16
        codes = torch.randint(-8, 8, (n, k), generator=generator, dtype=torch.int8)
        scale = _scales(generator, n, k // size, size=k**-0.5 / 8, dtype=dtype)
        return dict(weight=codes, weight_scale=scale), codes.float() * scale.float().repeat_interleave(size, 1)

    return write


def _packed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """(..., N) unsigned codes -> (..., N bits / 32) int32, the first code in the lowest bits."""
    parts = codes.to(torch.int64).unflatten(-1, (-1, 32 // bits)) << torch.arange(0, 32, bits)
    words = parts.sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _wna16(bits: int, group: int | None, *, is_asymmetric: bool = False, actorder: bool = False):
    def write(generator, n, k, order):
        size, half = group or k, 1 << (bits - 1)
        codes = torch.randint(0, 1 << bits, (n, k), generator=generator)
        scale = _scales(generator, n, k // size, size=k**-0.5 / half, dtype=torch.bfloat16)
        groups = torch.arange(k) // size
        tensors = {}
        if actorder:
            groups = groups[order]
            tensors["weight_g_idx"] = groups.to(torch.int32)
        zero = torch.full((n, k // size), half)
        if is_asymmetric:
            zero = torch.randint(0, 1 << bits, (n, k // size), generator=generator)
            tensors["weight_zero_point"] = _packed(zero.t().contiguous(), bits).t().contiguous()
        values = (codes - zero[:, groups]).float() * scale.float()[:, groups]
        shape = torch.tensor([n, k])
        return tensors | dict(weight_packed=_packed(codes, bits), weight_scale=scale, weight_shape=shape), values

    return write


def _gptq(bits: int, group: int | None, *, actorder: bool = False):
    def write(generator, n, k, order):
        tensors, values = _wna16(bits, group, actorder=actorder)(generator, n, k, order)
        groups = tensors.get("weight_g_idx", (torch.arange(k) // (group or k)).to(torch.int32))
        zeros = torch.full((k // (group or k), n), (1 << (bits - 1)) - 1)
        return dict(
            qweight=tensors["weight_packed"].t().contiguous(),
            scales=tensors["weight_scale"].t().contiguous(),
            qzeros=_packed(zeros, bits),
            g_idx=groups,
        ), values

    return write


def _awq(group: int):
    def write(generator, n, k, order):
        codes = torch.randint(0, 16, (k, n), generator=generator)
        zero = torch.randint(0, 16, (k // group, n), generator=generator)
        scale = _scales(generator, k // group, n, size=k**-0.5 / 8, dtype=torch.bfloat16)
        rows = torch.arange(k) // group
        values = ((codes - zero[rows]).float() * scale.float()[rows]).t()

        def words(x):
            return _packed(x.unflatten(-1, (-1, 8))[..., _AWQ_ORDER].flatten(-2), 4)

        return dict(qweight=words(codes), qzeros=words(zero), scales=scale), values

    return write


def _e2m1(generator: torch.Generator, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.randint(0, 16, (n, k), generator=generator)
    values = torch.where(codes >= 8, -1.0, 1.0) * E2M1[codes % 8]
    return (codes[:, 0::2] | (codes[:, 1::2] << 4)).to(torch.uint8), values


def _nvfp4(*, is_modelopt: bool = False, has_inputs: bool = True):
    def write(generator, n, k, order):
        packed, values = _e2m1(generator, n, k)
        scale = (1 + 200 * torch.rand(n, k // 16, generator=generator, dtype=torch.float32)).to(torch.float8_e4m3fn)
        overall = torch.tensor([0.004 * k**-0.5], dtype=torch.float32)
        if is_modelopt:
            values = values * (scale.float() * overall).repeat_interleave(16, 1)
            tensors = dict(weight=packed, weight_scale=scale, weight_scale_2=overall.reshape(()))
            return tensors | dict(input_scale=torch.tensor(0.01, dtype=torch.float32)), values
        tensors = dict(weight_packed=packed, weight_scale=scale, weight_global_scale=1 / overall)
        if has_inputs:
            tensors["input_global_scale"] = torch.tensor([100.0], dtype=torch.float32)
        return tensors, values * (scale.float() / tensors["weight_global_scale"]).repeat_interleave(16, 1)

    return write


def _mxfp4(codes: str = "weight_packed"):
    def write(generator, n, k, order):
        packed, values = _e2m1(generator, n, k)
        scale = torch.randint(118, 123, (n, k // 32), generator=generator).to(torch.uint8)
        values = values * (2.0 ** (scale.float() - 127)).repeat_interleave(32, 1)
        return {codes: packed, "weight_scale": scale}, values

    return write


def _mxfp8(generator, n, k, order):
    codes = _e4m3(generator, n, k)
    scale = torch.randint(112, 116, (n, k // 32), generator=generator).to(torch.uint8)
    return dict(weight=codes, weight_scale=scale), codes.float() * (2.0 ** (scale.float() - 127)).repeat_interleave(
        32, 1
    )


_BASE = dict(symmetric=True, observer="minmax", observer_kwargs={}, actorder=None, block_structure=None, dynamic=False)


def _arguments(bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    return _BASE | dict(num_bits=bits, type=kind, strategy=strategy, group_size=None) | more


_FP8_TOKENS = _arguments(8, "float", "token", dynamic=True)
_INT8_TOKENS = _arguments(8, "int", "token", dynamic=True)


def compressed(weights: dict[str, Any], activations: dict[str, Any] | None, stored_as: str) -> dict[str, Any]:
    """A quantization_config of compressed-tensors."""
    group = dict(targets=["Linear"], weights=weights, input_activations=activations, output_activations=None)
    return dict(
        quant_method="compressed-tensors",
        format=stored_as,
        quantization_status="compressed",
        kv_cache_scheme=None,
        global_compression_ratio=None,
        ignore=IGNORED,
        config_groups=dict(group_0=group | dict(format=stored_as)),
    )


def _integers(bits: int, group: int | None, **more: Any) -> dict[str, Any]:
    strategy = "channel" if group is None else "group"
    return compressed(_arguments(bits, "int", strategy, **(dict(group_size=group) | more)), None, "pack-quantized")


def _fp8_config(**more: Any) -> dict[str, Any]:
    return dict(quant_method="fp8", activation_scheme="dynamic", modules_to_not_convert=NOT_CONVERTED) | more


def _modelopt(algorithm: str, **more: Any) -> dict[str, Any]:
    inner = dict(quant_algo=algorithm, kv_cache_quant_algo=None, exclude_modules=["lm_head", "*self_attn*", "*gate"])
    # With a producer named, vLLM 0.24 takes FP8 and NVFP4 alone.
    producer = {} if algorithm == "MXFP8" else dict(producer=dict(name="modelopt"))
    return dict(quant_method="modelopt", **producer, quantization=inner | more)


_GPTQ = dict(quant_method="gptq", lm_head=False, sym=True, dynamic={r"-:.*self_attn.*": {}, r"-:.*mlp\.gate$": {}})
_NVFP4_WEIGHTS = _arguments(4, "float", "tensor_group", scale_dtype="torch.float8_e4m3fn") | dict(group_size=16)
_NVFP4_INPUTS = _NVFP4_WEIGHTS | dict(dynamic="local")
_MX = dict(group_size=32, scale_dtype="torch.uint8", zp_dtype="torch.uint8")
_CT = "CompressedTensors"
_GPT_OSS: dict[str, Any] = dict(has_bias=True, activation="swigluoai")

FORMATS: dict[str, VllmFormat] = {
    "bf16": VllmFormat(None, _unquantized, "UnquantizedFusedMoEMethod"),
    "ct_fp8_tensor_static": VllmFormat(
        compressed(_arguments(8, "float", "tensor"), _arguments(8, "float", "tensor"), "float-quantized"),
        _fp8("tensor", is_static=True),
        _CT + "W8A8Fp8MoEMethod",
        8,
    ),
    "ct_fp8_tensor": VllmFormat(
        compressed(_arguments(8, "float", "tensor"), _arguments(8, "float", "tensor", dynamic=True), "float-quantized"),
        _fp8("tensor"),
        _CT + "W8A8Fp8MoEMethod",
        8,
        rows="fp8_rows",
    ),
    "ct_fp8_channel": VllmFormat(
        compressed(_arguments(8, "float", "channel"), _FP8_TOKENS, "float-quantized"),
        _fp8("channel"),
        _CT + "W8A8Fp8MoEMethod",
        8,
    ),
    "ct_fp8_block": VllmFormat(
        compressed(
            _arguments(8, "float", "block", block_structure=[128, 128]),
            _arguments(8, "float", "group", dynamic=True) | dict(group_size=128),
            "float-quantized",
        ),
        _fp8("block"),
        _CT + "W8A8Fp8MoEMethod",
        8,
    ),
    "ct_int8": VllmFormat(
        compressed(_arguments(8, "int", "channel"), _INT8_TOKENS, "int-quantized"),
        _int8,
        _CT + "W8A8Int8MoEMethod",
        8,
        rows="int8_rows",
    ),
    "ct_w4a16_g128": VllmFormat(_integers(4, 128), _wna16(4, 128), _CT + "WNA16MarlinMoEMethod"),
    "ct_w4a16_g32": VllmFormat(_integers(4, 32), _wna16(4, 32), _CT + "WNA16MarlinMoEMethod"),
    # A group that vLLM's Marlin kernels do not have.
    "ct_w4a16_g256": VllmFormat(_integers(4, 256), _wna16(4, 256), _CT + "WNA16MoEMethod"),
    "ct_w4a16_channel": VllmFormat(_integers(4, None), _wna16(4, None), _CT + "WNA16MarlinMoEMethod"),
    "ct_w4a16_asym": VllmFormat(
        _integers(4, 64, symmetric=False), _wna16(4, 64, is_asymmetric=True), _CT + "WNA16MarlinMoEMethod"
    ),
    "ct_w4a16_actorder": VllmFormat(
        _integers(4, 64, actorder="group"), _wna16(4, 64, actorder=True), _CT + "WNA16MarlinMoEMethod"
    ),
    "ct_w8a16_channel": VllmFormat(_integers(8, None, group_size=-1), _wna16(8, None), _CT + "WNA16MarlinMoEMethod"),
    "ct_nvfp4": VllmFormat(
        compressed(_NVFP4_WEIGHTS, _NVFP4_INPUTS, "nvfp4-pack-quantized"), _nvfp4(), _CT + "W4A4Nvfp4MoEMethod"
    ),
    "ct_nvfp4_a16": VllmFormat(
        compressed(_NVFP4_WEIGHTS, None, "nvfp4-pack-quantized"), _nvfp4(has_inputs=False), _CT + "W4A4Nvfp4MoEMethod"
    ),
    "ct_mxfp4": VllmFormat(
        compressed(
            _arguments(4, "float", "group") | _MX,
            _arguments(4, "float", "group", dynamic=True) | _MX,
            "mxfp4-pack-quantized",
        ),
        _mxfp4(),
        _CT + "W4A4Mxfp4MoEMethod",
    ),
    "ct_mxfp8": VllmFormat(
        compressed(
            _arguments(8, "float", "group") | _MX,
            _arguments(8, "float", "group", dynamic=True) | _MX,
            "mxfp8-quantized",
        ),
        _mxfp8,
        _CT + "W8A8Mxfp8MoEMethod",
    ),
    "ct_w4a8_fp8": VllmFormat(
        compressed(_arguments(4, "int", "group") | dict(group_size=128), _FP8_TOKENS, "pack-quantized"),
        _wna16(4, 128),
        _CT + "W4A8Fp8MoEMethod",
        8,
    ),
    "ct_w4a8_int8_channel": VllmFormat(
        compressed(_arguments(4, "int", "channel"), _INT8_TOKENS, "int-quantized"),
        _int4(None),
        _CT + "W4A8Int8MoEMethod",
        8,
    ),
    "ct_w4a8_int8_g128": VllmFormat(
        compressed(_arguments(4, "int", "group") | dict(group_size=128), _INT8_TOKENS, "int-quantized"),
        _int4(128),
        _CT + "W4A8Int8MoEMethod",
        8,
    ),
    "fp8_block": VllmFormat(
        _fp8_config(weight_block_size=[128, 128]), _fp8("block", "weight_scale_inv"), "Fp8MoEMethod", 8
    ),
    "fp8_static": VllmFormat(
        _fp8_config(activation_scheme="static"), _fp8("tensor", is_static=True), "Fp8MoEMethod", 8
    ),
    "fp8_tensor": VllmFormat(_fp8_config(), _fp8("tensor"), "Fp8MoEMethod", 8),
    "fp8_mxfp4": VllmFormat(_fp8_config(store_dtype="mxfp4"), _mxfp4("weight"), "Mxfp4MoEMethod"),
    "gptq_4": VllmFormat(_GPTQ | dict(bits=4, group_size=128, desc_act=False), _gptq(4, 128), "AutoGPTQMoEMethod"),
    "gptq_8": VllmFormat(_GPTQ | dict(bits=8, group_size=128, desc_act=False), _gptq(8, 128), "AutoGPTQMoEMethod"),
    "gptq_channel": VllmFormat(
        _GPTQ | dict(bits=4, group_size=-1, desc_act=False), _gptq(4, None), "AutoGPTQMoEMethod"
    ),
    "gptq_actorder": VllmFormat(
        _GPTQ | dict(bits=4, group_size=64, desc_act=True), _gptq(4, 64, actorder=True), "AutoGPTQMoEMethod"
    ),
    "awq": VllmFormat(
        dict(
            quant_method="awq",
            bits=4,
            group_size=128,
            zero_point=True,
            version="gemm",
            modules_to_not_convert=NOT_CONVERTED,
        ),
        _awq(128),
        "AutoAWQMoEMethod",
    ),
    "modelopt_fp8": VllmFormat(_modelopt("FP8"), _fp8("tensor", is_static=True), "ModelOptFp8MoEMethod", 8),
    "modelopt_nvfp4": VllmFormat(_modelopt("NVFP4", group_size=16), _nvfp4(is_modelopt=True), "ModelOptNvFp4FusedMoE"),
    "modelopt_mxfp8": VllmFormat(_modelopt("MXFP8"), _mxfp8, "ModelOptMxFp8FusedMoE"),
    # The name that vLLM writes over these checkpoints' "mxfp4".
    "gpt_oss": VllmFormat(
        dict(quant_method="gpt_oss_mxfp4"), _mxfp4(), "GptOssMxfp4MoEMethod", settings=_GPT_OSS, is_gpt_oss=True
    ),
    "gpt_oss_bf16": VllmFormat(None, _unquantized, "UnquantizedFusedMoEMethod", settings=_GPT_OSS, is_gpt_oss=True),
    "online_fp8": VllmFormat("moe_jax_fp8", _unquantized, "Fp8OnlineMoEMethod", 8),
    "online_fp8_tensor": VllmFormat("moe_jax_fp8_per_tensor", _unquantized, "Fp8PerTensorOnlineMoEMethod", 8),
    "online_fp8_channel": VllmFormat("moe_jax_fp8_per_channel", _unquantized, "Fp8PtpcOnlineMoEMethod", 8),
    "online_fp8_block": VllmFormat("moe_jax_fp8_per_block", _unquantized, "Fp8PerBlockOnlineMoEMethod", 8),
    "online_int8": VllmFormat("moe_jax_int8_per_channel_weight_only", _unquantized, "Int8OnlineMoEMethod"),
    "online_mxfp8": VllmFormat("moe_jax_mxfp8", _unquantized, "Mxfp8OnlineMoEMethod"),
}
