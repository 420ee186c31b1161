"""Are the values of a checkpoint tensor possible: finite, in range, not beyond float16. Safe in any thread."""

import numpy as np

from moe_jax._typing import HostArray
from moe_jax.loading._errors import shorten
from moe_jax.quantization import LeafSpec, QuantFormat

E4M3 = np.dtype("float8_e4m3fn")
# The bits of infinity, and of e4m3's NaN: all ones in the exponent.
_EXPONENT_MASKS = {
    np.dtype("float32"): 0x7F800000,
    np.dtype("bfloat16"): 0x7F80,
    np.dtype("float16"): 0x7C00,
    E4M3: 0x7F,
}
_CHUNK = 1 << 18  # bytes: the second look at them comes out of the cache


class TensorError(ValueError):
    """What a thread found wrong in a tensor that was accepted before. name: the tensor's."""

    def __init__(self, name: str, message: str):
        super().__init__(message)
        self.name = name


def check_contents(name: str, value: HostArray, spec: LeafSpec, fmt: QuantFormat | None) -> None:
    """Raise ValueError for values that a leaf cannot take: not finite, too wide, or beyond float16.

    fmt: of the layer's weights.
    """
    if spec.kind in ("weight", "bias"):
        check_values(name, value)
        check_range(name, value, fmt if spec.kind == "weight" else None)
    if not (spec.kind == "weight" and fmt is not None):
        check_cast(name, value, spec.dtype)


def check_cast(name: str, value: HostArray, dtype: np.dtype) -> None:
    """Raise ValueError if a cast to float16 would turn a finite number into infinity."""
    if dtype != np.float16 or value.dtype == dtype:
        return
    with np.errstate(over="ignore"):
        overflows = np.isinf(value.astype(dtype)) & ~np.isinf(value)
    if overflows.any():
        raise ValueError(f"{shorten(name)}: {overflows.sum()} values exceed float16; load with param_dtype bfloat16")


def check_values(name: str, value: HostArray) -> None:
    """Raise ValueError for a weight or bias that holds NaN or infinity: no writer stores them, damage does.

    e4m3 has NaN (codes 0x7F and 0xFF) and no infinity. Packed codes and integers are always values.
    """
    if value.dtype not in _EXPONENT_MASKS or not _may_be_infinite(value):
        return
    is_bad = (value.view(np.uint8) & 0x7F) == 0x7F if value.dtype == E4M3 else ~np.isfinite(value)
    if is_bad.any():
        index = tuple(int(i) for i in np.argwhere(is_bad)[0])
        raise ValueError(
            f"{shorten(name)}: {int(is_bad.sum())} values are NaN or infinite, the first at {index}, expected finite "
            "numbers; the checkpoint is damaged"
        )


def _may_be_infinite(value: HostArray, target: np.ndarray | None = None) -> bool:
    """Whether a number is not finite, by two maxima over the bits as integers: many times as fast as isfinite.

    Bit patterns of positive numbers are ordered as the numbers are, those of negative ones too once the sign counts as
    a high bit; infinity and NaN lie above all finite ones. target: where to copy them on the way, of the same dtype;
    both are contiguous then.
    """
    size, mask = value.dtype.itemsize, _EXPONENT_MASKS[value.dtype]
    signed, unsigned = np.dtype(f"i{size}"), np.dtype(f"u{size}")
    negative = mask | 1 << (8 * size - 1)
    flat, step = (value.reshape(-1), _CHUNK // size) if value.flags.c_contiguous else (value, len(value))
    found, into = False, None if target is None else target.reshape(-1)
    for start in range(0, len(flat), step):
        part = flat[start : start + step]
        if into is not None:
            into[start : start + step] = part
            part = into[start : start + step]  # which the cache holds now
        found |= part.view(signed).max(initial=0) >= mask or part.view(unsigned).max(initial=0) >= negative
    return bool(found)


def copy_checked(name: str, value: HostArray, target: np.ndarray, spec: LeafSpec, fmt: QuantFormat | None) -> None:
    """``check_contents`` and a copy into ``target``, in one pass over memory where that is possible.

    value: the tensor, as large as target. What is written is undefined after an error.
    """
    is_plain = value.dtype == target.dtype and value.shape == target.shape and value.dtype in _EXPONENT_MASKS
    is_flat = value.flags.c_contiguous and target.flags.c_contiguous
    if spec.kind in ("weight", "bias") and is_plain and is_flat:
        if _may_be_infinite(value, target):
            check_contents(name, value, spec, fmt)
        return
    check_contents(name, value, spec, fmt)
    target[...] = value


def check_range(name: str, value: HostArray, fmt: QuantFormat | None) -> None:
    """Raise ValueError for narrow integers in an int8 container that do not fit their width: the config is wrong."""
    if fmt is None or fmt.element_type.is_float or value.dtype != np.int8 or fmt.element_type.bits >= 8:
        return
    limit = 1 << (fmt.element_type.bits - 1)
    if value.size and (value.min() < -limit or value.max() >= limit):
        raise ValueError(
            f"{shorten(name)}: values from {value.min()} to {value.max()}, expected {-limit} to {limit - 1} for "
            f"{fmt.element}; does config.json describe this checkpoint?"
        )
