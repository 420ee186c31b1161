"""NVFP4, MXFP4 and MXFP8 as schemes: their names, and how the arguments of a compressed-tensors group say them."""

from collections.abc import Mapping
from typing import Any

from moe_jax.quantization._format import Packing, QuantFormat, Scheme, Strategy

_TENSOR_GROUP = "tensor_group"


def _nvfp4(global_scale: str, *, packing: Packing | None = None, dynamic: bool = False) -> QuantFormat:
    return QuantFormat("e2m1", Strategy.GROUP, 16, None, dynamic, packing, scale="e4m3", global_scale=global_scale)


def _mx(element: str, *, packing: Packing | None = None, dynamic: bool = False) -> QuantFormat:
    return QuantFormat(element, Strategy.GROUP, 32, None, dynamic, packing, scale="e8m0")


_NVFP4 = _nvfp4("divides", packing=Packing.NIBBLES)
_NVFP4_MODELOPT = _nvfp4("multiplies", packing=Packing.NIBBLES)
_MXFP4 = _mx("e2m1", packing=Packing.NIBBLES)
_MXFP8 = _mx("e4m3")

# nvfp4 takes the activations' global scale from the checkpoint, nvfp4_dynamic computes one for each row; _modelopt says
# that the checkpoint's global scales multiply.
MICROSCALING_SCHEMES = {
    name: Scheme(name, weights, activations)
    for name, weights, activations in (
        ("nvfp4", _NVFP4, _nvfp4("divides", dynamic=True)),
        ("nvfp4_dynamic", _NVFP4, _nvfp4("token", dynamic=True)),
        ("nvfp4_a16", _NVFP4, None),
        ("nvfp4_modelopt", _NVFP4_MODELOPT, _nvfp4("multiplies", dynamic=True)),
        ("nvfp4_a16_modelopt", _NVFP4_MODELOPT, None),
        ("mxfp4", _MXFP4, _mx("e2m1", dynamic=True)),
        ("mxfp4_a16", _MXFP4, None),
        ("mxfp8", _MXFP8, _mx("e4m3", dynamic=True)),
        ("mxfp8_a16", _MXFP8, None),
    )
}
MICROSCALING_ALIASES = {
    "NVFP4": "nvfp4",
    "NVFP4A16": "nvfp4_a16",
    "MXFP4": "mxfp4",
    "MXFP4A16": "mxfp4_a16",
    "MXFP8": "mxfp8",
    "MXFP8A16": "mxfp8_a16",
}


def online_scheme(scheme: Scheme) -> Scheme:
    """What a full-precision checkpoint is quantized to for ``scheme``: nvfp4 without calibration is nvfp4_dynamic."""
    nvfp4 = MICROSCALING_SCHEMES["nvfp4"]
    return MICROSCALING_SCHEMES["nvfp4_dynamic"] if scheme == nvfp4 else scheme


def container_of(fmt: QuantFormat) -> str | None:
    """The ``format`` in which compressed-tensors stores weights of this format; None for formats of other modules."""
    return {_NVFP4: "nvfp4-pack-quantized", _MXFP4: "mxfp4-pack-quantized", _MXFP8: "mxfp8-quantized"}.get(fmt)


def microscaling_format(
    args: Mapping[str, Any], strategy: str, group_size: int | None, role: str
) -> QuantFormat | None:
    """The format of float arguments with NVFP4's or MX scales, None for other ones.

    args: without null values. Raises NotImplementedError for what looks like one of them and is not.
    """
    bits, dynamic = args["num_bits"], args.get("dynamic", False)
    scale_dtype = args.get("scale_dtype")
    scale_dtype = None if scale_dtype is None else str(scale_dtype).removeprefix("torch.")
    if bits != 4 and strategy != _TENSOR_GROUP and scale_dtype not in ("uint8", "float8_e4m3fn"):
        return None
    is_weight = role == "weights"
    packing = Packing.NIBBLES if is_weight else None
    match bits, strategy, group_size, scale_dtype:
        case 4, "tensor_group", 16, None | "float8_e4m3fn" if dynamic == (False if is_weight else "local"):
            return _nvfp4("divides", packing=packing, dynamic=not is_weight)
        case 4, "group", 32, None | "uint8" if dynamic is not is_weight:
            return _mx("e2m1", packing=packing, dynamic=not is_weight)
        case 8, "group", 32, "uint8" if dynamic is not is_weight:
            return _mx("e4m3", dynamic=not is_weight)
    raise NotImplementedError(
        f"{role}: {bits}-bit float with strategy {strategy!r}, group_size {group_size}, scale_dtype {scale_dtype} and "
        f"dynamic={dynamic!r} is not built; built are NVFP4 (4 bits, tensor_group 16, float8_e4m3fn scales, "
        "activations dynamic='local'), MXFP4 and MXFP8 (group 32, uint8 scales, dynamic activations)"
    )
