"""What a method of vLLM keeps in its parameters, in moe_jax's words: a scheme, and where each checkpoint leaf is.

On Hopper GPUs vLLM leaves activations in 16 bits where a checkpoint's are in 4 bits, or MXFP8; so do we. Activations
with one dynamic scale for the whole call get one for each token, which loses less.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from moe_jax import Scheme
from torch_bridge._compressed_tensors import quantization_arguments

# Order of AWQ's codes within a word: the code of output n is at place _AWQ_PLACES[n % 8].
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


def _as_it_is(part: torch.Tensor) -> torch.Tensor:
    return part


def _transposed(part: torch.Tensor) -> torch.Tensor:
    return part.transpose(1, 2)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """Where a checkpoint leaf is. parameter: without "w13_" or "w2_". to_leaf: its (E, ...) part -> the leaf's."""

    parameter: str
    to_leaf: Callable[[torch.Tensor], torch.Tensor] = _as_it_is


@dataclasses.dataclass(frozen=True)
class Format:
    """What vLLM's parameters hold.

    Args:
        scheme: of the checkpoint, as the kernels run it.
        leaves: by moe_jax's names without "w13_" or "w2_".
        unused: parameters that are made empty, since the kernels need none.
        online: parameters are full-precision weights, which we quantize.
    """

    scheme: Scheme
    leaves: dict[str, Leaf]
    unused: tuple[str, ...] = ()
    online: bool = False


def format_of(method: Any, params_dtype: torch.dtype) -> Format:
    """The format of vLLM's method of an expert layer. params_dtype: of the layer, in which vLLM keeps group scales.

    Raises NotImplementedError or ValueError, in one line, for a method or a scheme that has none here.
    """
    name = type(method).__name__
    if name not in FORMATS:
        raise NotImplementedError("no kernel is known to read its parameters")
    return FORMATS[name](method, params_dtype)


def _of_arguments(method: Any, stored_as: str, scales: torch.dtype | None = None) -> Scheme:
    """The scheme of compressed-tensors' arguments. scales: the dtype of group scales, None for float32."""
    weights, activations = quantization_arguments(method.weight_quant), quantization_arguments(method.input_quant)
    scheme = Scheme.parse(dict(weights=weights, input_activations=activations, format=stored_as))
    return scheme if scales is None else _with_group_scales(scheme, scales)


def _with_group_scales(scheme: Scheme, dtype: torch.dtype) -> Scheme:
    """Group scales as vLLM keeps them, in the dtype of the layer."""
    assert scheme.weights is not None
    held = dataclasses.replace(scheme.weights, group_scale_dtype=str(dtype).removeprefix("torch."))
    return dataclasses.replace(scheme, weights=held)


def _plain(*names: str, **renamed: str) -> dict[str, Leaf]:
    return {name: Leaf(name) for name in names} | {name: Leaf(parameter) for name, parameter in renamed.items()}


def _unquantized(method: Any, params_dtype: torch.dtype) -> Format:
    return Format(Scheme.parse("bf16"), _plain("weight"))


def _static(leaves: dict[str, Leaf]) -> dict[str, Leaf]:
    return leaves | _plain("input_scale")


def _ct_fp8(method: Any, params_dtype: torch.dtype) -> Format:
    leaves = _plain("weight", "weight_scale")
    if str(getattr(method.weight_quant.strategy, "value", method.weight_quant.strategy)) == "tensor":
        if method.static_input_scales:
            return Format(Scheme.parse("fp8_tensor_static"), _static(leaves))
        return Format(Scheme.parse("fp8_tensor_token"), leaves)
    return Format(_of_arguments(method, "float-quantized"), leaves)


def _ct_int8(method: Any, params_dtype: torch.dtype) -> Format:
    return Format(Scheme.parse("int8_w8a8"), _plain("weight", "weight_scale"))


def _ct_wna16(method: Any, params_dtype: torch.dtype) -> Format:
    scheme = _of_arguments(method, "pack-quantized", params_dtype)
    weights = scheme.weight_format
    names = ["weight_packed", "weight_scale"] + (["weight_zero_point"] if not weights.symmetric else [])
    leaves = {name: Leaf(name, _transposed) for name in names}
    unused = ("g_idx_sort_indices",)
    if weights.actorder:
        leaves |= _plain("weight_g_idx")
    else:
        unused += ("weight_g_idx",)
    return Format(scheme, leaves, unused)


def _ct_w4a8_fp8(method: Any, params_dtype: torch.dtype) -> Format:
    scheme = _of_arguments(method, "pack-quantized", params_dtype)
    return Format(scheme, _plain("weight_packed", "weight_scale"), ("weight_chan_scale",))


def _ct_w4a8_int8(method: Any, params_dtype: torch.dtype) -> Format:
    scales = None if method.group_size == -1 else torch.bfloat16
    return Format(_of_arguments(method, "int-quantized", scales), _plain("weight", "weight_scale"))


def _ct_nvfp4(method: Any, params_dtype: torch.dtype) -> Format:
    leaves = _plain("weight_packed", "weight_scale", "weight_global_scale")
    return Format(Scheme.parse("nvfp4_a16"), leaves, ("input_global_scale",))


def _ct_mxfp4(method: Any, params_dtype: torch.dtype) -> Format:
    return Format(Scheme.parse("mxfp4_a16"), _plain("weight_packed", "weight_scale"))


def _mxfp8(method: Any, params_dtype: torch.dtype) -> Format:
    return Format(Scheme.parse("mxfp8_a16"), _plain("weight", "weight_scale"))


def _mxfp4(method: Any, params_dtype: torch.dtype) -> Format:
    return Format(Scheme.parse("mxfp4_a16"), _plain("weight_scale", weight_packed="weight"))


def _fp8(method: Any, params_dtype: torch.dtype) -> Format:
    if method.block_quant:
        if list(method.weight_block_size) != [128, 128]:
            raise NotImplementedError(f"FP8 in blocks of {method.weight_block_size}")
        return Format(Scheme.parse("fp8_block"), _plain("weight", weight_scale="weight_scale_inv"))
    leaves = _plain("weight", "weight_scale")
    if method.quant_config.activation_scheme == "static":
        return Format(Scheme.parse("fp8_tensor_static"), _static(leaves))
    return Format(Scheme.parse("fp8_tensor_token"), leaves)


def _modelopt_fp8(method: Any, params_dtype: torch.dtype) -> Format:
    if not method.quant_config.is_checkpoint_fp8_serialized:
        raise NotImplementedError("ModelOpt's FP8 of a checkpoint that is not in FP8")
    return Format(Scheme.parse("fp8_tensor_static"), _static(_plain("weight", "weight_scale")))


def _modelopt_nvfp4(method: Any, params_dtype: torch.dtype) -> Format:
    leaves = _plain("weight", "weight_scale", "weight_scale_2")
    return Format(Scheme.parse("nvfp4_a16_modelopt"), leaves, ("input_scale",))


def _gptq(method: Any, params_dtype: torch.dtype) -> Format:
    config = method.quant_config
    if not config.is_sym:
        raise NotImplementedError("GPTQ with zero points")
    scheme = _integers(config.weight_bits, config.group_size, config.desc_act, is_symmetric=True)
    leaves = {"weight_packed": Leaf("qweight", _transposed), "weight_scale": Leaf("scales", _transposed)}
    unused = ("qzeros", "g_idx_sort_indices")
    if config.desc_act:
        return Format(_with_group_scales(scheme, params_dtype), leaves | _plain(weight_g_idx="g_idx"), unused)
    return Format(_with_group_scales(scheme, params_dtype), leaves, (*unused, "g_idx"))


def _awq(method: Any, params_dtype: torch.dtype) -> Format:
    config = method.quant_config
    scheme = _integers(4, config.group_size, False, is_symmetric=not config.zero_point)
    leaves = {"weight_packed": Leaf("qweight", _awq_words), "weight_scale": Leaf("scales", _transposed)}
    if not config.zero_point:
        return Format(_with_group_scales(scheme, params_dtype), leaves, ("qzeros",))
    leaves["weight_zero_point"] = Leaf("qzeros", _awq_zeros)
    return Format(_with_group_scales(scheme, params_dtype), leaves)


def _integers(bits: int, group_size: int, actorder: bool, *, is_symmetric: bool) -> Scheme:
    extent = "channel" if group_size == -1 else f"g{group_size}"
    actorder = actorder and group_size != -1
    return Scheme.parse(f"w{bits}a16_{extent}{'' if is_symmetric else '_asym'}{'_actorder' if actorder else ''}")


def _awq_codes(words: torch.Tensor) -> torch.Tensor:
    """(..., N / 8) words in AWQ's order -> (..., N) codes."""
    shifts = torch.tensor([4 * place for place in _AWQ_PLACES], dtype=torch.int32, device=words.device)
    return ((words[..., None] >> shifts) & 15).flatten(-2)


def _words(codes: torch.Tensor) -> torch.Tensor:
    """(..., N) codes of 4 bits -> (..., N / 8) words, the first code in the lowest bits."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=codes.device)
    return (codes.unflatten(-1, (-1, 8)) << shifts).sum(-1, dtype=torch.int32)


def _awq_words(part: torch.Tensor) -> torch.Tensor:
    """(E, K, N / 8) of AWQ -> (E, N, K / 8)."""
    return _words(_awq_codes(part).transpose(1, 2))


def _awq_zeros(part: torch.Tensor) -> torch.Tensor:
    """(E, groups, N / 8) of AWQ -> (E, N / 8, groups)."""
    return _words(_awq_codes(part)).transpose(1, 2)


def _online(scheme: str) -> Callable[[Any, torch.dtype], Format]:
    return lambda method, params_dtype: Format(Scheme.parse(scheme), _plain("weight"), online=True)


# By the names of vLLM's classes. A subclass may have other parameters than its base and is not taken for it.
FORMATS: dict[str, Callable[[Any, torch.dtype], Format]] = {
    "UnquantizedFusedMoEMethod": _unquantized,
    "CompressedTensorsW8A8Fp8MoEMethod": _ct_fp8,
    "CompressedTensorsW8A8Int8MoEMethod": _ct_int8,
    "CompressedTensorsWNA16MoEMethod": _ct_wna16,
    "CompressedTensorsWNA16MarlinMoEMethod": _ct_wna16,
    "CompressedTensorsW4A8Fp8MoEMethod": _ct_w4a8_fp8,
    "CompressedTensorsW4A8Int8MoEMethod": _ct_w4a8_int8,
    "CompressedTensorsW4A4Nvfp4MoEMethod": _ct_nvfp4,
    "CompressedTensorsW4A4Mxfp4MoEMethod": _ct_mxfp4,
    "CompressedTensorsW8A8Mxfp8MoEMethod": _mxfp8,
    "GptOssMxfp4MoEMethod": _mxfp4,
    "Mxfp4MoEMethod": _mxfp4,
    "Fp8OnlineMoEMethod": _online("fp8_tensor_token"),
    "Fp8MoEMethod": _fp8,
    "ModelOptFp8MoEMethod": _modelopt_fp8,
    "ModelOptNvFp4FusedMoE": _modelopt_nvfp4,
    "ModelOptMxFp8FusedMoE": _mxfp8,
    "AutoGPTQMoEMethod": _gptq,
    "AutoAWQMoEMethod": _awq,
    "Fp8PerTensorOnlineMoEMethod": _online("fp8_tensor_token"),
    "Fp8PerBlockOnlineMoEMethod": _online("fp8_block"),
    "Fp8PtpcOnlineMoEMethod": _online("fp8_channel"),
    "Int8OnlineMoEMethod": _online("int8_w8a16"),
    "Mxfp8OnlineMoEMethod": _online("mxfp8_a16"),
}
