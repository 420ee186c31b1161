"""A scheme as ``quantization_config`` of compressed-tensors states it, with the keys that its version 0.20 writes."""

from collections.abc import Iterable
from typing import Any

from moe_jax._typing import Json
from moe_jax.quantization import Packing, QuantFormat, Scheme, container_of

# The layout that is written: words of 3, 5, 6 and 7-bit codes have no gaps from 0.18 on.
VERSION = "0.20.0"
_SCALE_DTYPES = {"e4m3": "torch.float8_e4m3fn", "e8m0": "torch.uint8"}
_OTHER_FORM = {
    "nvfp4_dynamic": "nvfp4",
    "nvfp4_modelopt": "nvfp4",
    "nvfp4_a16_modelopt": "nvfp4_a16",
    "fp8_block_ue8m0": "fp8_block",
}


def quantization_config(scheme: Scheme, ignore: Iterable[str], kv_cache_scheme: Json | None = None) -> dict[str, Any]:
    """The whole ``quantization_config``: every Linear follows ``scheme`` but the modules in ``ignore``."""
    group = config_group(scheme)
    return {
        "config_groups": {"group_0": group},
        "format": group["format"],
        "global_compression_ratio": None,
        "ignore": list(ignore),
        "kv_cache_scheme": None if kv_cache_scheme is None else dict(kv_cache_scheme),
        "moe_sparsity_config": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": VERSION,
    }


def config_group(scheme: Scheme) -> dict[str, Any]:
    """One entry of ``config_groups``.

    Raises:
        NotImplementedError: compressed-tensors has no words for the scheme; another name that it has is given.
    """
    weights, activations = scheme.weights, scheme.activations
    if weights is None:
        raise NotImplementedError(f"scheme {scheme.name!r} does not quantize and has no quantization_config")
    group = {
        "format": _container(weights, activations),
        "input_activations": None if activations is None else _arguments(activations, _dynamic(activations)),
        "output_activations": None,
        "targets": ["Linear"],
        "weights": _arguments(weights, False),
    }
    try:
        is_same = not weights.actorder and Scheme.parse(group) == scheme
    except (ValueError, NotImplementedError):
        is_same = False
    if not is_same:
        other = _OTHER_FORM.get(scheme.name)
        hint = f"use {other!r}" if other else "choose another scheme"
        raise NotImplementedError(f"compressed-tensors has no form for scheme {scheme.name!r}; {hint}")
    return group


def _container(weights: QuantFormat, activations: QuantFormat | None) -> str:
    special = container_of(weights)
    if special is not None:
        return special
    if weights.packing is Packing.WORDS:
        return "pack-quantized"
    if activations is None:
        return "naive-quantized"
    return "float-quantized" if weights.element_type.is_float else "int-quantized"


def _dynamic(activations: QuantFormat) -> bool | str:
    return "local" if activations.global_scale == "divides" else activations.dynamic


def _arguments(fmt: QuantFormat, dynamic: bool | str) -> Json:
    strategy = "tensor_group" if fmt.global_scale is not None else fmt.strategy.value
    arguments: dict[str, Any] = {
        "dynamic": dynamic,
        "group_size": fmt.group_size,
        "num_bits": fmt.element_type.bits,
        "strategy": strategy,
        "symmetric": fmt.symmetric,
        "type": "float" if fmt.element_type.is_float else "int",
    }
    if fmt.block_shape is not None:
        arguments["block_structure"] = list(fmt.block_shape)
    if fmt.scale in _SCALE_DTYPES:
        arguments["scale_dtype"] = _SCALE_DTYPES[fmt.scale]
    return arguments
