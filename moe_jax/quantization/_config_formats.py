"""A ``quantization_config``, or one group of compressed-tensors' config, as formats of weights and activations.

Whether a pair of formats is built is the business of ``Scheme``.
"""

import dataclasses
from collections.abc import Mapping

from moe_jax._typing import Json
from moe_jax.quantization._formats import (
    E4M3_CHANNEL,
    ELEMENTS,
    MXFP4,
    MXFP8,
    NVFP4,
    Formats,
    Packing,
    QuantFormat,
    Strategy,
    e4m3_tokens,
    mx,
    nvfp4,
)

# What an arguments dict of compressed-tensors may hold; the observer keys never change how a tensor is read.
_ARGUMENT_KEYS = frozenset(
    "num_bits type symmetric strategy group_size block_structure dynamic actorder scale_dtype zp_dtype observer "
    "observer_kwargs".split()
)
_ARGUMENT_STRATEGIES = ("tensor", "channel", "token", "group", "block", "tensor_group", "attn_head")
_GROUP_KEYS = frozenset(("targets", "weights", "input_activations", "output_activations", "format"))
_UNPACKED_FORMATS = ("float-quantized", "int-quantized", "naive-quantized")
_PACKED_INTEGERS = "pack-quantized"


def formats_of_config(config: Json) -> Formats:
    """The formats of a whole quantization_config; per-module rules are the loader's business, so one group only.

    Raises:
        ValueError: it contradicts itself or is not understood.
        NotImplementedError: a real format that is not built.
    """
    method = config.get("quant_method", "compressed-tensors")
    if method == "fp8":
        return _native_fp8(config)
    if method == "fbgemm_fp8":
        return _fbgemm_fp8(config)
    if method != "compressed-tensors":
        raise NotImplementedError(
            f"quant_method {method!r} is not supported; supported: 'compressed-tensors', 'fp8', 'fbgemm_fp8'; name the "
            "scheme that its tensors have, or use a compressed-tensors version"
        )
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        found = f"{len(groups)} groups" if isinstance(groups, Mapping) else repr(groups)
        raise ValueError(f"quantization_config: one layer needs exactly one entry in config_groups, found {found}")
    ((name, group),) = groups.items()
    if not isinstance(group, Mapping):
        raise ValueError(f"quantization_config: config_groups[{name!r}] must be a dict, found {group!r}")
    return formats_of_group({**group, "format": group.get("format") or config.get("format")})


def _native_fp8(config: Json) -> Formats:
    """DeepSeek-style ``{"quant_method": "fp8", "activation_scheme": ..., "weight_block_size": [n, k] or absent}``.

    ``scale_fmt: "ue8m0"`` (DeepSeek-V3.1) rounds the scales of activations up to powers of two; stored scales read the
    same.
    """
    scale_fmt = config.get("scale_fmt") or "float"
    if scale_fmt not in ("float", "ue8m0"):
        raise ValueError(f"quantization_config: scale_fmt must be 'float' or 'ue8m0', found {scale_fmt!r}")
    element, when = str(config.get("fmt", "e4m3")), config.get("activation_scheme", "dynamic")
    if when not in ("dynamic", "static"):
        raise ValueError(f"quantization_config: activation_scheme must be 'dynamic' or 'static', found {when!r}")
    is_dynamic = when == "dynamic"
    if config.get("weight_block_size") is None:
        return QuantFormat(element, Strategy.TENSOR), QuantFormat(element, Strategy.TENSOR, dynamic=is_dynamic)
    block = _block_shape(config["weight_block_size"], "weight_block_size")
    if not is_dynamic:
        raise ValueError("quantization_config: activation_scheme 'static' cannot be combined with weight_block_size")
    weights = QuantFormat(element, Strategy.BLOCK, block_shape=block)
    scale = "ue8m0" if scale_fmt == "ue8m0" else "float32"
    return weights, QuantFormat(element, Strategy.GROUP, group_size=block[1], dynamic=True, scale=scale)


def _fbgemm_fp8(config: Json) -> Formats:
    """``{"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}``: per row, activations bounded."""
    bound = config.get("activation_scale_ub")
    if bound is not None and not (isinstance(bound, int | float) and not isinstance(bound, bool) and bound > 0):
        raise ValueError(f"quantization_config: activation_scale_ub must be positive, found {bound!r}")
    return E4M3_CHANNEL, e4m3_tokens(None if bound is None else float(bound))


def formats_of_group(group: Json) -> Formats:
    """One group of a compressed-tensors config; ``format`` is looked at when it is there."""
    _reject_unknown_keys(group, _GROUP_KEYS, "quantization group")
    if "weights" not in group and "input_activations" not in group:
        raise ValueError(f"quantization group has no 'weights' entry, found keys {sorted(group)}")
    if group.get("output_activations") is not None:
        raise NotImplementedError("output_activations are not supported")
    weights = _parse_arguments(group.get("weights"), "weights")
    activations = _parse_arguments(group.get("input_activations"), "input_activations")
    stored_as = group.get("format")
    if weights is not None and (container := container_of(weights)) is not None:
        supported = (container,)
    elif weights is not None and not weights.element_type.is_float:
        weights = dataclasses.replace(weights, packing=_integer_packing(weights, activations, stored_as))
        supported = (*_UNPACKED_FORMATS, _PACKED_INTEGERS)
    else:
        supported = _UNPACKED_FORMATS
    if weights is not None and stored_as not in (None, *supported):
        raise NotImplementedError(
            f"format {stored_as!r} is not built for weights {weights}; supported formats: {', '.join(supported)}"
        )
    return weights, activations


def _parse_arguments(args: object, role: str) -> QuantFormat | None:
    """One compressed-tensors QuantizationArgs dict as a QuantFormat. role: "weights" or "input_activations"."""
    if args is None:
        return None
    if not isinstance(args, Mapping):
        raise ValueError(f"{role} must be a dict or null, found {args!r}")
    args = {key: value for key, value in args.items() if value is not None}
    _reject_unknown_keys(args, _ARGUMENT_KEYS, role)
    bits, kind = args.get("num_bits", 8), str(args.get("type", "int")).lower()
    if kind not in ("int", "float") or not _is_int(bits) or not 1 <= bits <= 16:
        raise ValueError(f"{role}: num_bits={bits!r}, type={kind!r}: expected an integer and 'int' or 'float'")
    symmetric, dynamic = args.get("symmetric", True), args.get("dynamic", False)
    if not isinstance(symmetric, bool) or not (isinstance(dynamic, bool) or dynamic == "local"):
        raise ValueError(f"{role}: symmetric={symmetric!r}, dynamic={dynamic!r}: expected booleans")
    strategy, group_size = _strategy_and_group_size(args, role)
    described = f"{role}: {bits}-bit {kind} with strategy {strategy!r}"
    if group_size is not None:
        described += f", group_size {group_size}"
    if kind == "float" and (fmt := _microscaling_format(args | {"num_bits": bits}, strategy, group_size, role)):
        return fmt
    element = "e4m3" if (bits, kind) == (8, "float") else f"int{bits}"
    if element not in ELEMENTS or (kind == "float" and bits != 8):
        raise NotImplementedError(f"{described} is not built; supported: 8-bit float (e4m3) and 2 to 8-bit int")
    if not symmetric and kind == "float":
        raise NotImplementedError(f"{described}, asymmetric (symmetric=false), is not built; only integers are")
    if kind == "int" and str(args.get("scale_dtype") or "").removeprefix("torch.") in ("uint8", "float8_e4m3fn"):
        raise NotImplementedError(f"{described} and {args['scale_dtype']} scales is not built")
    # Quantizing columns in the order "weight" or "static" leaves no trace in how they are stored.
    has_g_idx = args.get("actorder") not in (None, False, "weight", "static")
    if has_g_idx and (kind == "float" or args["actorder"] not in (True, "group", "dynamic")):
        raise NotImplementedError(f"{described} and actorder={args['actorder']!r} is not built")
    if dynamic == "local" or strategy not in [known.value for known in Strategy]:
        raise NotImplementedError(f"{described} and dynamic={dynamic!r} is not built")
    if role == "weights" and dynamic:
        raise ValueError("weights: dynamic must be false, their scales are stored")
    if strategy == "token" and not dynamic:
        raise ValueError(f"{role}: strategy 'token' needs dynamic=true, there is no stored scale per token")
    block = args.get("block_structure")
    block_shape = None if block is None else _block_shape(block, f"{role}: block_structure")
    return QuantFormat(
        element, Strategy(strategy), group_size, block_shape, dynamic, symmetric=symmetric, actorder=has_g_idx
    )


def _microscaling_format(args: Json, strategy: str, group_size: int | None, role: str) -> QuantFormat | None:
    """The format of float arguments with NVFP4's or MX scales, None for other ones.

    args: without null values. Raises NotImplementedError for what looks like one of them and is not.
    """
    bits, dynamic = args["num_bits"], args.get("dynamic", False)
    scale_dtype = args.get("scale_dtype")
    scale_dtype = None if scale_dtype is None else str(scale_dtype).removeprefix("torch.")
    if bits != 4 and strategy != "tensor_group" and scale_dtype not in ("uint8", "float8_e4m3fn"):
        return None
    is_weight = role == "weights"
    packing = Packing.NIBBLES if is_weight else None
    match bits, strategy, group_size, scale_dtype:
        case 4, "tensor_group", 16, None | "float8_e4m3fn" if dynamic == (False if is_weight else "local"):
            return nvfp4("divides", packing=packing, dynamic=not is_weight)
        case 4, "group", 32, None | "uint8" if dynamic is not is_weight:
            return mx("e2m1", packing=packing, dynamic=not is_weight)
        case 8, "group", 32, "uint8" if dynamic is not is_weight:
            return mx("e4m3", dynamic=not is_weight)
    raise NotImplementedError(
        f"{role}: {bits}-bit float with strategy {strategy!r}, group_size {group_size}, scale_dtype {scale_dtype} and "
        f"dynamic={dynamic!r} is not built; built are NVFP4 (4 bits, tensor_group 16, float8_e4m3fn scales, "
        "activations dynamic='local'), MXFP4 and MXFP8 (group 32, uint8 scales, dynamic activations)"
    )


def container_of(fmt: QuantFormat) -> str | None:
    """The ``format`` in which compressed-tensors stores weights of this format; None for other formats."""
    return {NVFP4: "nvfp4-pack-quantized", MXFP4: "mxfp4-pack-quantized", MXFP8: "mxfp8-quantized"}.get(fmt)


def _integer_packing(weights: QuantFormat, activations: QuantFormat | None, stored_as: str | None) -> Packing | None:
    """How a compressed-tensors group stores integer weights, by its ``format`` or, without one, by what is usual."""
    if stored_as is not None:
        return Packing.WORDS if stored_as == "pack-quantized" else None
    if activations is None:
        is_plain_int8 = weights.element == "int8" and weights.symmetric and weights.strategy is Strategy.CHANNEL
        return None if is_plain_int8 else Packing.WORDS
    return Packing.WORDS if activations.element_type.is_float else None


def _strategy_and_group_size(args: Json, role: str) -> tuple[str, int | None]:
    """The stated strategy, or the one that group_size implies where a hand-written config leaves it out."""
    strategy, group_size = args.get("strategy"), args.get("group_size")
    if group_size is not None and not (_is_int(group_size) and (group_size > 0 or group_size == -1)):
        raise ValueError(f"{role}: group_size must be positive, or -1 for one scale per channel, found {group_size!r}")
    if strategy is None:
        strategy = "tensor" if group_size is None else "channel" if group_size == -1 else "group"
    strategy = str(strategy).lower()
    if strategy not in _ARGUMENT_STRATEGIES:
        raise ValueError(f"{role}: unknown strategy {strategy!r}; known: {', '.join(_ARGUMENT_STRATEGIES)}")
    return strategy, None if group_size == -1 else group_size


def _block_shape(value: object, where: str) -> tuple[int, int]:
    """[128, 128], or "128x128" as files of 2024 spell it."""
    parts = [int(part) if part.isdecimal() else 0 for part in value.split("x")] if isinstance(value, str) else value
    match parts:
        case [int(rows), int(columns)] if _is_int(rows) and _is_int(columns) and rows > 0 and columns > 0:
            return rows, columns
    raise ValueError(f"{where} must be two positive integers, found {value!r}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _reject_unknown_keys(mapping: Json, known: frozenset[str], where: str) -> None:
    unknown = sorted(key for key, value in mapping.items() if key not in known and value is not None)
    if unknown:
        raise ValueError(f"{where} has unknown keys {unknown}; known: {sorted(known)}")
