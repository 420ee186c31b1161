"""``Scheme``: what is quantized in an expert layer; the schemes that are built, and how a name or a config becomes one.

Integer schemes have names by a grammar: ``w<bits>a16``, ``w<bits>a8_int8`` or ``w<bits>a8_fp8``, then in this order
what differs from the default: ``_channel`` or ``_g<group size>`` (a16 always says it; a8 means groups of 128 without
it), ``_asym`` for zero points, ``_actorder`` for a stored order of columns, ``_asym_inputs`` for asymmetric int8
activations, and the container where it is not the usual one: a16 and a8_fp8 pack weights in words (``_unpacked``
otherwise), a8_int8 keeps one weight per byte (``_packed`` otherwise).

``<scheme>_approximate_fp8`` is a weight-only scheme of at most 4 bits with activations rounded to e4m3, one scale per
token: faster than 16 bits, and approximate. That is no checkpoint's scheme: every activation loses up to 1/16 of
itself, which calibration never saw. Weights keep their values but for MXFP4 on Hopper, see
``pallas_kernels.grouped_gemm.packed``.
"""

import dataclasses
import difflib
import re
from collections.abc import Mapping, Sequence

from moe_jax._pytrees import static_type
from moe_jax._typing import Json
from moe_jax.quantization._config_formats import formats_of_config, formats_of_group
from moe_jax.quantization._formats import (
    E4M3_CHANNEL,
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


@static_type
@dataclasses.dataclass(frozen=True)
class Scheme:
    """What is quantized in an expert layer.

    Args:
        name: canonical name; it does not tell schemes apart.
        weights: their format, None: kept in param_dtype.
        activations: their format, None: left alone.
    """

    name: str = dataclasses.field(compare=False)
    weights: QuantFormat | None = None
    activations: QuantFormat | None = None

    @property
    def is_quantized(self) -> bool:
        return self.weights is not None

    @property
    def weight_format(self) -> QuantFormat:
        """``weights`` of a scheme that quantizes them."""
        assert self.weights is not None, f"scheme {self.name!r} quantizes no weights"
        return self.weights

    @property
    def activation_format(self) -> QuantFormat:
        """``activations`` of a scheme that quantizes them."""
        assert self.activations is not None, f"scheme {self.name!r} quantizes no activations"
        return self.activations

    @classmethod
    def parse(cls, scheme: "SchemeLike") -> "Scheme":
        """What ``scheme=``, ``quantize=`` and ``--scheme`` accept, as a supported Scheme.

        Args:
            scheme: a canonical name or alias ("fp8_block", "FP8_DYNAMIC", ...), a Scheme, None (unquantized), one group
                of a compressed-tensors config ({"weights": {...}, "input_activations": {...} or None}), or a whole
                quantization_config with one scheme in it.

        Raises:
            ValueError: it is wrong or unknown; an unknown name lists all.
            NotImplementedError: a real format that is not built; the message names the capability.
        """
        if scheme is None:
            return SCHEMES["bf16"]
        if isinstance(scheme, Scheme):
            return check_scheme(scheme)
        if isinstance(scheme, str):
            return _scheme_by_name(scheme)
        if isinstance(scheme, Mapping):
            is_whole = "quant_method" in scheme or "config_groups" in scheme
            return check_scheme(Scheme("", *(formats_of_config if is_whole else formats_of_group)(scheme)))
        raise TypeError(f"scheme must be a name, a Scheme, a dict or None, found {type(scheme).__name__}")


SchemeLike = str | Scheme | Json | None
parse_scheme = Scheme.parse


def check_scheme(scheme: Scheme) -> Scheme:
    """Return the scheme under its canonical name, or raise because this pair of formats is not built.

    Any (rows, columns) is accepted as a weight block; activations are then quantized in groups of that many columns.
    """
    weights, activations = scheme.weights, scheme.activations
    if activations is not None and activations.approximate:
        approximate = _with_approximate_fp8(check_scheme(Scheme("", weights)))
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
    name = _integer_scheme_name(scheme.weights, scheme.activations)
    if name is not None:
        return dataclasses.replace(scheme, name=name)
    is_static = activations is not None and not activations.dynamic
    if is_static and weights is not None and weights.strategy is Strategy.CHANNEL:
        raise ValueError("static activation scales do not go with per-channel weights; use dynamic per-token scales")
    raise NotImplementedError(
        f"weights {scheme.weights or 'unquantized'} with activations {scheme.activations or 'unquantized'} are not "
        f"built; supported schemes: {', '.join(SCHEMES)}"
    )


def online_scheme(scheme: Scheme) -> Scheme:
    """What a full-precision checkpoint is quantized to for ``scheme``: nvfp4 without calibration is nvfp4_dynamic."""
    return SCHEMES["nvfp4_dynamic"] if scheme == SCHEMES["nvfp4"] else scheme


def scheme_per_token(scheme: Scheme) -> Scheme:
    """The scheme with a scale for each token in place of one that is computed from all rows of a call.

    Matrices outside the experts take it: their rows include padding, which must not raise another row's scale.
    """
    activations = scheme.activations
    if activations is None or not activations.dynamic or activations.strategy is not Strategy.TENSOR:
        return scheme
    return check_scheme(dataclasses.replace(scheme, activations=_E4M3_TOKEN))


def _scheme_by_name(name: str) -> Scheme:
    if name.endswith(_APPROXIMATE_SUFFIX):
        return _with_approximate_fp8(_scheme_by_name(name.removesuffix(_APPROXIMATE_SUFFIX)))
    canonical = ALIASES.get(name, name)
    if canonical in SCHEMES:
        return SCHEMES[canonical]
    integers = _integer_scheme(canonical)
    if integers is not None:
        return integers
    near = " or ".join(map(repr, _nearest(name)))
    meant = f" (did you mean {near}?)" if near else ""
    raise ValueError(f"unknown scheme {name!r}{meant}; supported: {', '.join(SCHEMES)}; aliases: {', '.join(ALIASES)}")


# What a kind of quantization is called where one word says it all -> the schemes that it may be.
_KINDS = {
    "int4": ("w4a16_g128",),
    "int8": ("int8_w8a8", "int8_w8a16"),
    "gptq": ("w4a16_g128",),
    "awq": ("w4a16_g128_asym",),
    "w4a16": ("w4a16_g128", "w4a16_channel"),
    "w8a16": ("w8a16_channel", "w8a16_g128"),
    "w4a8": ("w4a8_int8", "w4a8_fp8"),
    "fp4": ("nvfp4_a16", "mxfp4_a16"),
}


def _nearest(name: str) -> Sequence[str]:
    """Schemes and aliases that someone may have meant; none for a name unlike any."""
    spoken = name.lower().replace("-", "_")
    return _KINDS.get(spoken) or difflib.get_close_matches(spoken, (*SCHEMES, *ALIASES), 2, 0.75)


# -- approximate activations -------------------------------------------------------------------------------------------

_APPROXIMATE_SUFFIX = "_approximate_fp8"


def _with_approximate_fp8(scheme: Scheme) -> Scheme:
    """A weight-only scheme with e4m3 activations. Raises ValueError for a scheme that says how activations are
    quantized, NotImplementedError for weights that are wider than 4 bits.
    """
    if scheme.weights is None or scheme.activations is not None:
        raise ValueError(
            f"{_APPROXIMATE_SUFFIX[1:]} goes with weight-only schemes such as 'mxfp4_a16', found {scheme.name!r}"
        )
    bits = scheme.weights.element_type.bits
    if bits > 4:
        raise NotImplementedError(
            f"{scheme.name}: weights of {bits} bits with approximate fp8 activations are not built; at most 4 bits are"
        )
    activations = dataclasses.replace(_E4M3_TOKEN, approximate=True)
    return Scheme(scheme.name + _APPROXIMATE_SUFFIX, scheme.weights, activations)


# -- integer schemes ---------------------------------------------------------------------------------------------------

_E4M3_TOKEN = e4m3_tokens()
_INT8_TOKEN = QuantFormat("int8", Strategy.TOKEN, dynamic=True)
_INPUTS = {
    "16": None,
    "8_int8": _INT8_TOKEN,
    "8_fp8": _E4M3_TOKEN,
}
_INT8_TOKEN_ASYMMETRIC = QuantFormat("int8", Strategy.TOKEN, dynamic=True, symmetric=False)
_USUAL_PACKING = {"16": Packing.WORDS, "8_int8": None, "8_fp8": Packing.WORDS}
_DEFAULT_GROUP = 128
_NAME = re.compile(
    r"w([2-8])a(16|8_int8|8_fp8)(?:_(channel|g([1-9][0-9]{0,5})))?(_asym)?(_actorder)?(_asym_inputs)?(_packed|_unpacked)?"
)


def _integer_scheme(name: str) -> Scheme | None:
    """The scheme of a name in its shortest form; None for anything else."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    bits, activations, extent, size, asymmetric, actorder, asymmetric_inputs, container = match.groups()
    packing = _USUAL_PACKING[activations]
    if container is not None:
        packing = Packing.WORDS if container == "_packed" else None
    if extent == "channel":
        strategy, group_size = Strategy.CHANNEL, None
    else:
        strategy, group_size = Strategy.GROUP, int(size or _DEFAULT_GROUP)
    if actorder and strategy is not Strategy.GROUP:
        return None
    weights = QuantFormat(
        f"int{bits}", strategy, group_size, packing=packing, symmetric=asymmetric is None, actorder=bool(actorder)
    )
    inputs = _INT8_TOKEN_ASYMMETRIC if asymmetric_inputs else _INPUTS[activations]
    return Scheme(name, weights, inputs) if _integer_scheme_name(weights, inputs) == name else None


def _integer_scheme_name(weights: QuantFormat | None, activations: QuantFormat | None) -> str | None:
    """The name of a pair of formats; None unless it is one of the integer schemes that are built."""
    if weights is None or weights.element_type.is_float or weights.dynamic:
        return None
    if weights.strategy not in (Strategy.CHANNEL, Strategy.GROUP):
        return None
    inputs = {_INPUTS[key]: key for key in _INPUTS} | {_INT8_TOKEN_ASYMMETRIC: "8_int8"}
    if activations not in inputs:
        return None
    kind = inputs[activations]
    bits = weights.element_type.bits
    if bits == 8 and weights.packing is None and weights.symmetric and weights.strategy is Strategy.CHANNEL:
        return None  # int8_w8a8 and int8_w8a16, or not built
    extent = "_channel" if weights.strategy is Strategy.CHANNEL else f"_g{weights.group_size}"
    is_usual = weights.packing is _USUAL_PACKING[kind]
    parts = (
        (True, f"w{bits}a{kind}"),
        (kind == "16" or weights.group_size != _DEFAULT_GROUP, extent),
        (not weights.symmetric, "_asym"),
        (weights.actorder, "_actorder"),
        (activations == _INT8_TOKEN_ASYMMETRIC, "_asym_inputs"),
        (not is_usual, "_unpacked" if weights.packing is None else "_packed"),
    )
    return "".join(text for is_said, text in parts if is_said)


# -- the tables --------------------------------------------------------------------------------------------------------

_E4M3_TENSOR = QuantFormat("e4m3", Strategy.TENSOR)
_E4M3_BLOCK = QuantFormat("e4m3", Strategy.BLOCK, block_shape=(128, 128))
_E4M3_DYNAMIC_TENSOR = QuantFormat("e4m3", Strategy.TENSOR, dynamic=True)
_E4M3_GROUP = QuantFormat("e4m3", Strategy.GROUP, group_size=128, dynamic=True)
_INT8_CHANNEL = QuantFormat("int8", Strategy.CHANNEL)
_NVFP4_MODELOPT = nvfp4("multiplies", packing=Packing.NIBBLES)

# nvfp4 takes the activations' global scale from the checkpoint, nvfp4_dynamic computes one for each row; _modelopt says
# that the checkpoint's global scales multiply.
_FLOAT_SCHEMES: dict[str, Formats] = {
    "bf16": (None, None),
    "fp8_tensor": (_E4M3_TENSOR, _E4M3_DYNAMIC_TENSOR),
    "fp8_tensor_static": (_E4M3_TENSOR, _E4M3_TENSOR),
    "fp8_tensor_token": (_E4M3_TENSOR, _E4M3_TOKEN),
    "fp8_tensor_a16": (_E4M3_TENSOR, None),
    "fp8_channel": (E4M3_CHANNEL, _E4M3_TOKEN),
    "fp8_channel_a16": (E4M3_CHANNEL, None),
    "fp8_block": (_E4M3_BLOCK, _E4M3_GROUP),
    "fp8_block_a16": (_E4M3_BLOCK, None),
    "fp8_block_ue8m0": (_E4M3_BLOCK, dataclasses.replace(_E4M3_GROUP, scale="ue8m0")),
    "int8_w8a8": (_INT8_CHANNEL, _INT8_TOKEN),
    "int8_w8a16": (_INT8_CHANNEL, None),
    "nvfp4": (NVFP4, nvfp4("divides", dynamic=True)),
    "nvfp4_dynamic": (NVFP4, nvfp4("token", dynamic=True)),
    "nvfp4_a16": (NVFP4, None),
    "nvfp4_modelopt": (_NVFP4_MODELOPT, nvfp4("multiplies", dynamic=True)),
    "nvfp4_a16_modelopt": (_NVFP4_MODELOPT, None),
    "mxfp4": (MXFP4, mx("e2m1", dynamic=True)),
    "mxfp4_a16": (MXFP4, None),
    "mxfp8": (MXFP8, mx("e4m3", dynamic=True)),
    "mxfp8_a16": (MXFP8, None),
}
# Of the integer schemes, those that tables and error messages list.
_INT4_EXTENTS = ("w4a16_g32", "w4a16_g64", "w4a16_g128", "w4a16_channel")
_INTEGER_SCHEMES = (
    *_INT4_EXTENTS,
    *(f"{name}_asym" for name in _INT4_EXTENTS),
    *("w8a16_channel", "w8a16_g128", "w2a16_g128", "w3a16_g128"),
    *("w4a8_int8", "w4a8_int8_channel", "w4a8_int8_asym_inputs", "w4a8_fp8"),
)
SCHEMES: dict[str, Scheme] = {name: Scheme(name, *formats) for name, formats in _FLOAT_SCHEMES.items()}
SCHEMES |= {name: scheme for name in _INTEGER_SCHEMES if (scheme := _integer_scheme(name))}

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
    "NVFP4": "nvfp4",
    "NVFP4A16": "nvfp4_a16",
    "MXFP4": "mxfp4",
    "MXFP4A16": "mxfp4_a16",
    "MXFP8": "mxfp8",
    "MXFP8A16": "mxfp8_a16",
    "W4A16": "w4a16_g128",
    "W4A16_ASYM": "w4a16_g128_asym",
    "W8A16": "w8a16_g128",
    "W2A16": "w2a16_g128",
    "W3A16": "w3a16_g128",
    "W4A8": "w4a8_int8",
    "W4AFP8": "w4a8_fp8",
}
