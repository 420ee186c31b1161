"""Does one checkpoint tensor fit its leaf: dtype, shape, and the two ways to store a weight of all experts."""

import numpy as np

from moe_jax._config import MoEConfig
from moe_jax.loading._errors import shorten
from moe_jax.loading.layer._names import ExpertTensor
from moe_jax.loading.layer._weight_loader import SCALAR_KINDS
from moe_jax.quantization import LeafSpec, QuantFormat, Strategy

OUT_IN, IN_OUT = (
    "out_in",
    "in_out",
)  # (E, out, in) as we and torch.nn.Linear keep it; (E, in, out) as torch.bmm likes it
FULL_PRECISION = tuple(np.dtype(name) for name in ("float32", "bfloat16", "float16"))
_EXPONENTS = (np.dtype(np.uint8), np.dtype("float8_e8m0fnu"))
E4M3 = np.dtype("float8_e4m3fn")
_SCALES = (*FULL_PRECISION, _EXPONENTS[1])
# The bits of infinity, and of e4m3's NaN: all ones in the exponent.
_EXPONENT_MASKS = {
    np.dtype("float32"): 0x7F800000,
    np.dtype("bfloat16"): 0x7F80,
    np.dtype("float16"): 0x7C00,
    E4M3: 0x7F,
}
_CHUNK = 1 << 18  # bytes: the second look at them comes out of the cache


def check_dtype(tensor: ExpertTensor, dtype: np.dtype, spec: LeafSpec, scheme_name: str) -> None:
    """Raise ValueError unless a leaf of this spec can be filled from ``dtype`` without changing what it means."""
    if spec.dtype == np.uint8 and spec.kind != "weight":
        allowed = _EXPONENTS
    elif spec.dtype not in FULL_PRECISION:
        allowed = (spec.dtype,)
    else:
        allowed = FULL_PRECISION if spec.kind in ("weight", "bias") else _SCALES
    if dtype not in allowed:
        raise ValueError(
            f"{shorten(tensor.name)}: found dtype {dtype}, expected {' or '.join(str(d) for d in allowed)} "
            f"for scheme {scheme_name!r}; does config.json describe this checkpoint?"
        )


def check_contents(name: str, value: np.ndarray, spec: LeafSpec, fmt: QuantFormat | None) -> None:
    """Raise ValueError for values that a leaf cannot take: not finite, too wide, or beyond float16. Safe in any thread.

    fmt: of the layer's weights.
    """
    if spec.kind in ("weight", "bias"):
        check_values(name, value)
        check_range(name, value, fmt if spec.kind == "weight" else None)
    if not (spec.kind == "weight" and fmt is not None):
        check_cast(name, value, spec.dtype)


def check_cast(name: str, value: np.ndarray, dtype: np.dtype) -> None:
    """Raise ValueError if a cast to float16 would turn a finite number into infinity."""
    if dtype != np.float16 or value.dtype == dtype:
        return
    with np.errstate(over="ignore"):
        overflows = np.isinf(value.astype(dtype)) & ~np.isinf(value)
    if overflows.any():
        raise ValueError(f"{shorten(name)}: {overflows.sum()} values exceed float16; load with param_dtype bfloat16")


def check_values(name: str, value: np.ndarray) -> None:
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


def _may_be_infinite(value: np.ndarray, target: np.ndarray | None = None) -> bool:
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


def copy_checked(name: str, value: np.ndarray, target: np.ndarray, spec: LeafSpec, fmt: QuantFormat | None) -> None:
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


def check_range(name: str, value: np.ndarray, fmt: QuantFormat | None) -> None:
    """Raise ValueError for narrow integers in an int8 container that do not fit their width: the config is wrong."""
    if fmt is None or fmt.element_type.is_float or value.dtype != np.int8 or fmt.element_type.bits >= 8:
        return
    limit = 1 << (fmt.element_type.bits - 1)
    if value.size and (value.min() < -limit or value.max() >= limit):
        raise ValueError(
            f"{shorten(name)}: values from {value.min()} to {value.max()}, expected {-limit} to {limit - 1} for "
            f"{fmt.element}; does config.json describe this checkpoint?"
        )


def disk_shape(tensor: ExpertTensor, spec: LeafSpec, config: MoEConfig) -> tuple[int, ...]:
    """Shape of a tensor stored as (out, in), with the expert axis in front when it holds all experts."""
    experts, rows, *rest = spec.shape
    if tensor.leaf.startswith("w13"):
        rows = rows // config.num_halves * len(tensor.shards)
    return (*((experts,) if tensor.expert is None else ()), rows, *rest)


def fused_layout(tensor: ExpertTensor, shape: tuple[int, ...], expected: tuple[int, ...], stated: str | None) -> str:
    """``OUT_IN`` or ``IN_OUT`` of a weight of all experts: as stated, else as its shape tells.

    Raises ValueError when the shape fits neither, or both and nothing is stated.
    """
    swapped = (expected[0], expected[2], expected[1])
    if stated is None and shape == expected == swapped:
        raise ValueError(
            f"{shorten(tensor.name)}: shape {shape} fits (E, out, in) and (E, in, out) alike; "
            f"say which by fused_layout={OUT_IN!r} or {IN_OUT!r}"
        )
    for layout, fitting in ((OUT_IN, expected), (IN_OUT, swapped)):
        if shape == fitting and stated in (None, layout):
            return layout
    shapes = {None: f"{expected}, or {swapped} if stored as (in, out)", OUT_IN: expected, IN_OUT: swapped}
    raise ValueError(f"{shorten(tensor.name)}: found shape {shape}, expected {shapes[stated]}")


def check_transposable(tensor: ExpertTensor, fmt: QuantFormat | None) -> None:
    """Raise ValueError unless each scale covers whole rows of (out, in), so that (in, out) holds the same numbers."""
    if fmt is None or fmt.strategy not in (Strategy.TENSOR, Strategy.CHANNEL):
        raise ValueError(
            f"{shorten(tensor.name)}: weights quantized in groups or blocks are stored as (E, in, out), expected (E, "
            "out, in) or one tensor for each expert"
        )


def conform_scale(array: np.ndarray, spec: LeafSpec) -> np.ndarray:
    """A scale of all experts with the leaf's axes, or as it is where it needs no change or fits no leaf.

    Llama 4 keeps a scale per output as (E, 1, N), as its weights are (E, in, N); ModelOpt one number for all experts.
    """
    if spec.kind == "channel" and array.ndim == 3 and array.shape[1] == 1 != array.shape[2]:
        return array.swapaxes(1, 2)
    if spec.kind in SCALAR_KINDS and array.shape in ((), (1,)):
        return np.broadcast_to(array.reshape(()), spec.shape[:1])
    return array


def split_shards(
    tensor: ExpertTensor, array: np.ndarray, spec: LeafSpec, config: MoEConfig
) -> list[tuple[str, np.ndarray]]:
    """(shard, view) for every projection in a tensor; only a stacked gate_up_proj holds two. ``array`` is (out, in)."""
    if len(tensor.shards) == 1:
        return [(tensor.shards[0], array)]
    if spec.kind == "g_idx":  # both see the same columns
        return [(shard, array) for shard in tensor.shards]
    axis = 1 if tensor.expert is None else 0
    if spec.kind in SCALAR_KINDS and array.shape[axis:] in ((), (1,)):  # one scale for both
        return [(shard, array) for shard in tensor.shards]
    expected = disk_shape(tensor, spec, config)
    if array.shape != expected:
        raise ValueError(f"{shorten(tensor.name)}: found shape {array.shape}, expected {expected}")
    if spec.kind == "block" and config.intermediate_size % config.scheme.weights.block_shape[0]:
        # Blocks are counted over the stacked rows: here one of them would scale rows of both halves.
        raise ValueError(
            f"{shorten(tensor.name)}: blocks of {config.scheme.weights.block_shape[0]} rows do not end at the border "
            f"between gate and up, row {config.intermediate_size}; only separate gate_proj and up_proj can be read"
        )
    if tensor.is_interleaved:
        rows = (slice(None),) * axis
        return [(shard, array[(*rows, slice(half, None, 2))]) for half, shard in enumerate(tensor.shards)]
    return list(zip(tensor.shards, np.split(array, 2, axis=axis), strict=True))
