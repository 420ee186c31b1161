"""What scales of a checkpoint may be, and the one activation scale of a layer out of those of its experts."""

import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from moe_jax._typing import AnyArray, Leaf
from moe_jax.quantization._formats import GROUP_SCALE_DTYPES, QuantFormat

# compressed-tensors' global scale of an expert whose calibration saw no token.
_UNCALIBRATED = 1.0
_MOST_ROUNDING = 2.0**-8  # of group scales, beside the largest of their matrix; bfloat16's is half of it
_F32_MAX = float(np.finfo(np.float32).max)


def check_scale_values(
    scale: AnyArray,
    name: str,
    projections: tuple[str, ...],
    *,
    allow_negative: bool = False,
    is_divisor: bool = False,
    largest: float = 1.0,
) -> None:
    """Raise ValueError naming the first NaN, infinite or (unless allowed) negative entry of a scale (E, ...).

    largest: the greatest magnitude that the scale multiplies or divides; an overflow of float32 is refused as well.
    scale: float32, float8_e4m3fn, or uint8 exponents, in which 255 is NaN. projections: what the axis after E stacks,
    () for a matrix outside the experts. Scale 0 is legal, it dequantizes to 0, unless the scale is a divisor. Under a
    trace values cannot be checked.
    """
    if isinstance(scale, Tracer):
        return
    greatest = _F32_MAX / largest
    # On an accelerator two numbers are fetched instead of all scales, as long as nothing is wrong.
    is_far = isinstance(scale, jax.Array) and any(device.platform != "cpu" for device in scale.devices())
    if _are_plain(scale if is_far else np.asarray(scale), 1 / greatest if is_divisor else 0.0, greatest):
        return
    values = np.asarray(scale)
    if values.dtype == np.uint8:
        bad = values > _greatest_exponent(greatest)
    elif values.dtype.itemsize == 1:  # by its bytes: float32 copies of all block scales would take half a layer
        code = values.view(np.uint8)
        bad = (code & 0x7F == 0x7F) | (code > 0x80)
    else:
        bad = ~np.isfinite(values) | (np.abs(values) < 1 / greatest if is_divisor else np.abs(values) > greatest)
        if is_divisor or not allow_negative:
            bad |= values <= 0 if is_divisor else values < 0
    if not bad.any():
        return
    index = tuple(int(i) for i in np.argwhere(bad)[0])
    place = ""
    if projections:
        half = index[1] * len(projections) // values.shape[1] if values.ndim > 1 else 0
        place = f"expert {index[0]} ({projections[half]}) has "
    sign = ", positive" if is_divisor else "" if allow_negative else ", non-negative"
    bound = f" whose multiples up to {largest:g} are finite in float32" if largest > 1 else ""
    raise ValueError(
        f"{name}: {place}scale {values[index]} at {index}, expected a finite{sign} "
        f"number{bound} ({int(bad.sum())} of {bad.size} are not)"
    )


def _are_plain(values: AnyArray, least: float, greatest: float) -> bool:
    """Whether all are finite, positive and in range, by maxima and minima alone; scales are an eighth of a layer."""
    if not values.size:
        return True
    if values.dtype == np.uint8:
        return bool(values.max() <= _greatest_exponent(greatest))
    if values.dtype.itemsize == 1:
        return bool(values.view(np.uint8).max() < 0x7F)
    return bool(values.min() > least and values.max() <= greatest)


def _greatest_exponent(greatest: float) -> int:
    """Of e8m0 bytes, which mean 2**(byte - 127)."""
    return 127 + math.floor(math.log2(greatest))


def check_held_exactly(scale: AnyArray, dtype: str, name: str) -> None:
    """Raise ValueError naming the first of group scales (float32) that ``dtype``, of ``GROUP_SCALE_DTYPES``, rounds.

    Under a trace values cannot be checked.
    """
    if dtype == "float32" or isinstance(scale, Tracer) or scale.dtype != np.float32:
        return
    if dtype == "bfloat16":  # the upper half of a float32
        bits = (
            scale.view(np.uint32) if isinstance(scale, np.ndarray) else jax.lax.bitcast_convert_type(scale, np.uint32)
        )
        bad = bits & np.uint32(0xFFFF) != 0
    else:
        bad = scale.astype(GROUP_SCALE_DTYPES[dtype]).astype(np.float32) != scale
    if not bool(bad.any()):
        return
    values, bad = np.asarray(scale), np.asarray(bad)
    index = tuple(int(i) for i in np.argwhere(bad)[0])
    raise ValueError(
        f"{name}: scale {values[index]} at {index} is not exact in {dtype}, in which this layer holds scales of groups "
        f"since the checkpoint it was made for has them so ({int(bad.sum())} of {bad.size} are not); make the layer "
        'from this checkpoint, or with group_scale_dtype="float32" in its scheme'
    )


def check_rounding(rounded: AnyArray, scale: AnyArray, w: AnyArray, dtype: str) -> None:
    """Raise ValueError for a matrix that rounding its group scales to ``dtype`` changes by more than bfloat16 would,
    beside the largest of them: float16 overflows above 65504, and small ones lose digits or vanish.

    rounded, scale: (E, ...) of the matrices w, (E, ..., N, K), of which one of zeros may have any. Under a trace values
    cannot be checked.
    """
    if isinstance(scale, Tracer):
        return
    axes = tuple(range(1, scale.ndim))
    largest = np.asarray(abs(scale).max(axes, initial=0))
    error = np.asarray(abs(rounded - scale).max(axes, initial=0))
    bad = (error > largest * _MOST_ROUNDING) & np.isfinite(largest)  # others are refused where scales are checked
    for at in np.flatnonzero(bad):
        bad[at] = bool((w[at] != 0).any())
    if not bad.any():
        return
    at = int(np.argmax(bad))
    raise ValueError(
        f"weight_scale: matrix {at} has scales of groups up to {largest[at]:g}, which {dtype} rounds by {error[at]:g} "
        f"({int(bad.sum())} of {bad.size} matrices), expected scales in its range; give the scheme "
        'group_scale_dtype="float32" or "bfloat16"'
    )


def common_input_scale(values: AnyArray, fmt: QuantFormat, name: str) -> Leaf:
    """() float32: what serves the activations of all experts and of gate and up, the largest range among them.

    values: (E,) or (E, G) float32, already checked. Of global scales that divide, the large ones, it is the smallest;
    infinity and 1, which compressed-tensors writes for experts that saw no token, count only if there is nothing else
    (then 1). Raises ValueError if all global scales that multiply are 0: they are missing in the file.
    """
    if fmt.global_scale != "divides":
        largest = values.max().reshape(())
        if fmt.global_scale == "multiplies" and not isinstance(largest, Tracer) and largest == 0:
            raise ValueError(f"{name}: all input scales are 0, expected positive numbers; the file lacks calibration")
        return largest
    if not isinstance(values, Tracer) and (unused := int(np.isinf(np.asarray(values)).sum())):
        warnings.warn(f"{name}: {unused} of {values.size} scales are infinite and do not count", stacklevel=2)
    values = jnp.asarray(values)
    smallest = jnp.where(values == _UNCALIBRATED, jnp.inf, values).min()
    return jnp.where(smallest < jnp.inf, smallest, _UNCALIBRATED)
