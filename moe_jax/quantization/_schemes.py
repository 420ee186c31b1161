"""The schemes that are built, their names, and how a name or a config dict becomes one of them."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from moe_jax.quantization._approximate import APPROXIMATE_SUFFIX, with_approximate_fp8
from moe_jax.quantization._format import ELEMENTS, QuantFormat, Scheme, Strategy
from moe_jax.quantization._integer_schemes import (
    INTEGER_ALIASES,
    INTEGER_SCHEMES,
    integer_packing,
    integer_scheme,
    integer_scheme_name,
)
from moe_jax.quantization._microscaling_schemes import (
    MICROSCALING_ALIASES,
    MICROSCALING_SCHEMES,
    container_of,
    microscaling_format,
)

_E4M3_TENSOR = QuantFormat("e4m3", Strategy.TENSOR)
_E4M3_CHANNEL = QuantFormat("e4m3", Strategy.CHANNEL)
_E4M3_BLOCK = QuantFormat("e4m3", Strategy.BLOCK, block_shape=(128, 128))
_E4M3_DYNAMIC_TENSOR = QuantFormat("e4m3", Strategy.TENSOR, dynamic=True)
_E4M3_TOKEN = QuantFormat("e4m3", Strategy.TOKEN, dynamic=True)
_E4M3_GROUP = QuantFormat("e4m3", Strategy.GROUP, group_size=128, dynamic=True)
_INT8_CHANNEL = QuantFormat("int8", Strategy.CHANNEL)
_INT8_TOKEN = QuantFormat("int8", Strategy.TOKEN, dynamic=True)

SCHEMES: dict[str, Scheme] = (
    {
        name: Scheme(name, weights, activations)
        for name, weights, activations in (
            ("bf16", None, None),
            ("fp8_tensor", _E4M3_TENSOR, _E4M3_DYNAMIC_TENSOR),
            ("fp8_tensor_static", _E4M3_TENSOR, _E4M3_TENSOR),
            ("fp8_tensor_token", _E4M3_TENSOR, _E4M3_TOKEN),
            ("fp8_tensor_a16", _E4M3_TENSOR, None),
            ("fp8_channel", _E4M3_CHANNEL, _E4M3_TOKEN),
            ("fp8_channel_a16", _E4M3_CHANNEL, None),
            ("fp8_block", _E4M3_BLOCK, _E4M3_GROUP),
            ("fp8_block_a16", _E4M3_BLOCK, None),
            ("fp8_block_ue8m0", _E4M3_BLOCK, dataclasses.replace(_E4M3_GROUP, scale="ue8m0")),
            ("int8_w8a8", _INT8_CHANNEL, _INT8_TOKEN),
            ("int8_w8a16", _INT8_CHANNEL, None),
        )
    }
    | MICROSCALING_SCHEMES
    | INTEGER_SCHEMES
)

# Other people's names for the same schemes: vLLM's --quantization, compressed-tensors' presets, dtype spellings.
ALIASES: dict[str, str] = {
    "none": "bf16",
    "bfloat16": "bf16",
    "unquantized": "bf16",
    "fp8": "fp8_tensor",
    "fp8_per_tensor": "fp8_tensor",
    "fp8_per_channel": "fp8_channel",
    "fp8_per_block": "fp8_block",
    "int8_per_channel_weight_only": "int8_w8a16",
    "UNQUANTIZED": "bf16",
    "FP8": "fp8_tensor_static",
    "FP8_DYNAMIC": "fp8_channel",
    "FP8_BLOCK": "fp8_block",
    "W8A8": "int8_w8a8",
    "INT8": "int8_w8a8",
    **MICROSCALING_ALIASES,
    **INTEGER_ALIASES,
}

# What an arguments dict of compressed-tensors may hold; the observer keys never change how a tensor is read.
_ARGUMENT_KEYS = frozenset(
    "num_bits type symmetric strategy group_size block_structure dynamic actorder scale_dtype zp_dtype observer "
    "observer_kwargs".split()
)
_ARGUMENT_STRATEGIES = ("tensor", "channel", "token", "group", "block", "tensor_group", "attn_head")
_GROUP_KEYS = frozenset(("targets", "weights", "input_activations", "output_activations", "format"))
_UNPACKED_FORMATS = ("float-quantized", "int-quantized", "naive-quantized")
_PACKED_INTEGERS = "pack-quantized"


def parse_scheme(scheme: Any) -> Scheme:
    """See ``Scheme.parse``."""
    if scheme is None:
        return SCHEMES["bf16"]
    if isinstance(scheme, Scheme):
        return check_scheme(scheme)
    if isinstance(scheme, str):
        return _scheme_by_name(scheme)
    if isinstance(scheme, Mapping):
        if "quant_method" in scheme or "config_groups" in scheme:
            return _scheme_of_config(scheme)
        return _scheme_of_group(scheme)
    raise TypeError(f"scheme must be a name, a Scheme, a dict or None, found {type(scheme).__name__}")


def check_scheme(scheme: Scheme) -> Scheme:
    """Return the scheme under its canonical name, or raise because this pair of formats is not built.

    Any (rows, columns) is accepted as a weight block; activations are then quantized in groups of that many columns.
    """
    weights, activations = scheme.weights, scheme.activations
    if activations is not None and activations.approximate:
        approximate = with_approximate_fp8(check_scheme(Scheme("", weights)))
        if approximate == scheme:
            return dataclasses.replace(scheme, name=approximate.name)
    suffix = ""
    if weights is not None and weights.block_shape not in (None, _E4M3_BLOCK.block_shape):
        rows, columns = weights.block_shape
        suffix = f"_{rows}x{columns}"
        weights = dataclasses.replace(weights, block_shape=_E4M3_BLOCK.block_shape)
        if activations is not None and activations.group_size == columns:
            activations = dataclasses.replace(activations, group_size=_E4M3_GROUP.group_size)
    if activations is not None and activations.amax_bound is not None:
        suffix += f"_ub{activations.amax_bound:g}"
        activations = dataclasses.replace(activations, amax_bound=None)
    for known in SCHEMES.values():
        if (known.weights, known.activations) == (weights, activations):
            return dataclasses.replace(scheme, name=known.name + suffix)
    name = integer_scheme_name(scheme.weights, scheme.activations)
    if name is not None:
        return dataclasses.replace(scheme, name=name)
    is_static = activations is not None and not activations.dynamic
    if is_static and weights is not None and weights.strategy is Strategy.CHANNEL:
        raise ValueError("static activation scales do not go with per-channel weights; use dynamic per-token scales")
    raise NotImplementedError(
        f"weights {_describe(scheme.weights)} with activations {_describe(scheme.activations)} are not built; "
        f"supported schemes: {', '.join(SCHEMES)}"
    )


def _scheme_by_name(name: str) -> Scheme:
    if name.endswith(APPROXIMATE_SUFFIX):
        return with_approximate_fp8(_scheme_by_name(name.removesuffix(APPROXIMATE_SUFFIX)))
    canonical = ALIASES.get(name, name)
    if canonical in SCHEMES:
        return SCHEMES[canonical]
    integers = integer_scheme(canonical)
    if integers is not None:
        return integers
    raise ValueError(f"unknown scheme {name!r}; supported: {', '.join(SCHEMES)}; aliases: {', '.join(ALIASES)}")


def _scheme_of_config(config: Mapping[str, Any]) -> Scheme:
    """The scheme of a whole quantization_config; per-module rules are the loader's business, so one group only."""
    method = config.get("quant_method", "compressed-tensors")
    if method == "fp8":
        return _scheme_of_native_fp8(config)
    if method == "fbgemm_fp8":
        return _scheme_of_fbgemm_fp8(config)
    if method != "compressed-tensors":
        raise NotImplementedError(
            f"quant_method {method!r} is not supported; supported: 'compressed-tensors', 'fp8', 'fbgemm_fp8'"
        )
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        found = f"{len(groups)} groups" if isinstance(groups, Mapping) else repr(groups)
        raise ValueError(f"quantization_config: one layer needs exactly one entry in config_groups, found {found}")
    ((name, group),) = groups.items()
    if not isinstance(group, Mapping):
        raise ValueError(f"quantization_config: config_groups[{name!r}] must be a dict, found {group!r}")
    return _scheme_of_group({**group, "format": group.get("format") or config.get("format")})


def _scheme_of_native_fp8(config: Mapping[str, Any]) -> Scheme:
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
        weights = QuantFormat(element, Strategy.TENSOR)
        return check_scheme(Scheme("", weights, QuantFormat(element, Strategy.TENSOR, dynamic=is_dynamic)))
    block = _block_shape(config["weight_block_size"], "weight_block_size")
    if not is_dynamic:
        raise ValueError("quantization_config: activation_scheme 'static' cannot be combined with weight_block_size")
    weights = QuantFormat(element, Strategy.BLOCK, block_shape=block)
    activations = QuantFormat(element, Strategy.GROUP, group_size=block[1], dynamic=True)
    if scale_fmt == "ue8m0":
        activations = dataclasses.replace(activations, scale="ue8m0")
    return check_scheme(Scheme("", weights, activations))


def _scheme_of_fbgemm_fp8(config: Mapping[str, Any]) -> Scheme:
    """``{"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}``: per row, activations bounded."""
    bound = config.get("activation_scale_ub")
    if bound is not None and not (isinstance(bound, int | float) and not isinstance(bound, bool) and bound > 0):
        raise ValueError(f"quantization_config: activation_scale_ub must be positive, found {bound!r}")
    activations = dataclasses.replace(_E4M3_TOKEN, amax_bound=None if bound is None else float(bound))
    return check_scheme(Scheme("", _E4M3_CHANNEL, activations))


def _scheme_of_group(group: Mapping[str, Any]) -> Scheme:
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
        weights = dataclasses.replace(weights, packing=integer_packing(weights, activations, stored_as))
        supported = (*_UNPACKED_FORMATS, _PACKED_INTEGERS)
    else:
        supported = _UNPACKED_FORMATS
    if weights is not None and stored_as not in (None, *supported):
        raise NotImplementedError(
            f"format {stored_as!r} is not built for weights {_describe(weights)}; "
            f"supported formats: {', '.join(supported)}"
        )
    return check_scheme(Scheme("", weights, activations))


def _parse_arguments(args: Any, role: str) -> QuantFormat | None:
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
    if kind == "float" and (fmt := microscaling_format(args | {"num_bits": bits}, strategy, group_size, role)):
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


def _strategy_and_group_size(args: Mapping[str, Any], role: str) -> tuple[str, int | None]:
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


def _block_shape(value: Any, where: str) -> tuple[int, int]:
    """[128, 128], or "128x128" as files of 2024 spell it."""
    parts: Any = value
    if isinstance(value, str):
        parts = [int(part) if part.isdecimal() else part for part in value.split("x")]
    match parts:
        case [rows, columns] if _is_int(rows) and _is_int(columns) and rows > 0 and columns > 0:
            return rows, columns
    raise ValueError(f"{where} must be two positive integers, found {value!r}")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _reject_unknown_keys(mapping: Mapping[str, Any], known: frozenset[str], where: str) -> None:
    unknown = sorted(key for key, value in mapping.items() if key not in known and value is not None)
    if unknown:
        raise ValueError(f"{where} has unknown keys {unknown}; known: {sorted(known)}")


def _describe(fmt: QuantFormat | None) -> str:
    if fmt is None:
        return "unquantized"
    extent = fmt.group_size or fmt.block_shape
    described = f"{fmt.element} {'dynamic' if fmt.dynamic else 'static'} per {fmt.strategy.value}"
    if extent:
        described += f" {extent}"
    return described if fmt.symmetric else f"{described}, asymmetric"
