"""Names of integer schemes: ``w4a16_g128_asym`` and the like, read and written by one grammar.

``w<bits>a16``, ``w<bits>a8_int8`` or ``w<bits>a8_fp8``, then in this order what differs from the default:
``_channel`` or ``_g<group size>`` (a16 always says it; a8 means groups of 128 without it), ``_asym`` for zero points,
``_actorder`` for a stored order of columns, ``_asym_inputs`` for asymmetric int8 activations, and the container where
it is not the usual one: a16 and a8_fp8 pack weights in words (``_unpacked`` otherwise), a8_int8 keeps one weight per
byte (``_packed`` otherwise).
"""

import re

from moe_jax.quantization._format import Packing, QuantFormat, Scheme, Strategy

_TOKENS = {
    "16": None,
    "8_int8": QuantFormat("int8", Strategy.TOKEN, dynamic=True),
    "8_fp8": QuantFormat("e4m3", Strategy.TOKEN, dynamic=True),
}
_ASYMMETRIC_TOKENS = QuantFormat("int8", Strategy.TOKEN, dynamic=True, symmetric=False)
_USUAL_PACKING = {"16": Packing.WORDS, "8_int8": None, "8_fp8": Packing.WORDS}
_DEFAULT_GROUP = 128
_NAME = re.compile(
    r"w([2-8])a(16|8_int8|8_fp8)(?:_(channel|g([1-9][0-9]{0,5})))?(_asym)?(_actorder)?(_asym_inputs)?(_packed|_unpacked)?"
)


def integer_scheme(name: str) -> Scheme | None:
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
    inputs = _ASYMMETRIC_TOKENS if asymmetric_inputs else _TOKENS[activations]
    return Scheme(name, weights, inputs) if integer_scheme_name(weights, inputs) == name else None


def integer_scheme_name(weights: QuantFormat | None, activations: QuantFormat | None) -> str | None:
    """The name of a pair of formats; None unless it is one of the integer schemes that are built."""
    if weights is None or weights.element_type.is_float or weights.dynamic:
        return None
    if weights.strategy not in (Strategy.CHANNEL, Strategy.GROUP):
        return None
    inputs = {_TOKENS[key]: key for key in _TOKENS} | {_ASYMMETRIC_TOKENS: "8_int8"}
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
        (activations == _ASYMMETRIC_TOKENS, "_asym_inputs"),
        (not is_usual, "_unpacked" if weights.packing is None else "_packed"),
    )
    return "".join(text for is_said, text in parts if is_said)


def integer_packing(weights: QuantFormat, activations: QuantFormat | None, stored_as: str | None) -> Packing | None:
    """How a compressed-tensors group stores integer weights, by its ``format`` or, without one, by what is usual."""
    if stored_as is not None:
        return Packing.WORDS if stored_as == "pack-quantized" else None
    if activations is None:
        is_plain_int8 = weights.element == "int8" and weights.symmetric and weights.strategy is Strategy.CHANNEL
        return None if is_plain_int8 else Packing.WORDS
    return Packing.WORDS if activations.element_type.is_float else None


def _schemes(*names: str) -> dict[str, Scheme]:
    found = {name: integer_scheme(name) for name in names}
    return {name: scheme for name, scheme in found.items() if scheme is not None}


_INT4_EXTENTS = ("w4a16_g32", "w4a16_g64", "w4a16_g128", "w4a16_channel")
INTEGER_SCHEMES = _schemes(
    *_INT4_EXTENTS,
    *(f"{name}_asym" for name in _INT4_EXTENTS),
    *("w8a16_channel", "w8a16_g128", "w2a16_g128", "w3a16_g128"),
    *("w4a8_int8", "w4a8_int8_channel", "w4a8_int8_asym_inputs", "w4a8_fp8"),
)
INTEGER_ALIASES = {
    "W4A16": "w4a16_g128",
    "W4A16_ASYM": "w4a16_g128_asym",
    "W8A16": "w8a16_g128",
    "W2A16": "w2a16_g128",
    "W3A16": "w3a16_g128",
    "W4A8": "w4a8_int8",
    "W4AFP8": "w4a8_fp8",
}
