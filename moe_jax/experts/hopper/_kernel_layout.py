"""Expert weights in the layout of ``grouped_gemm_packed``, exactly and back: which schemes have one, and what it holds.

In kernel layout a ``QuantizedTensor`` keeps its scheme's leaves under other shapes: data is (E, NB, G, KB, ...) int32
blocks, scale the group scales (E, NB, G, groups, 64) or the factors of channels (E, NB, G, 64), zero_point the kernel's
``zero_term``; global_scale and input_scale stay as they were. Its layout names the operands' dtype.

Under act-order columns lie sorted by their groups, and g_idx (E, K) holds the order: where column c comes from. Rows of
w13, and its bias, lie in the order of w2's columns, so that hidden values leave the first product as w2 wants them.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from moe_jax._config import MoEConfig
from moe_jax._typing import DTypeLike, Leaf
from moe_jax.quantization import ExpertWeights, Packing, QuantFormat, QuantizedTensor, Scheme, Strategy
from pallas_kernels.common import PLAIN, WeightLayout, packing
from pallas_kernels.common.numerics import divide
from pallas_kernels.grouped_gemm import packed as packed_gemm
from pallas_kernels.grouped_gemm.packed import PackedFormat, PackedWeights
from pallas_kernels.grouped_gemm.packed.format import BLOCK_N

_PREFIX = "packed2_"  # another number when the order of bits changes: saved layers name their layout


def kernel_format(scheme: Scheme, dtype: DTypeLike) -> PackedFormat | None:
    """How the kernel wants this scheme's weights for a layer that computes in ``dtype``; None where it has no way."""
    weights, activations = scheme.weights, scheme.activations
    if weights is None:
        return None
    operand = _operand(weights, activations, jnp.dtype(dtype).name)
    return None if operand is None else _format_for(weights, operand)


def _operand(weights: QuantFormat, activations: QuantFormat | None, dtype: str) -> Any:
    """dtype of both operands of the product, or None."""
    if activations is None:
        # Only bfloat16 holds an element times a microscaling group's scale.
        return dtype if dtype == "bfloat16" or (dtype == "float16" and weights.scale == "float32") else None
    if activations.scale in ("e4m3", "e8m0"):
        # bfloat16 holds an activation rounded to the grid exactly.
        return "bfloat16" if weights.scale == activations.scale else None
    if activations.strategy is not Strategy.TOKEN:
        return None
    if weights.scale in ("e4m3", "e8m0"):
        if weights.element != "e2m1" or not activations.approximate:
            return None
        # A step of the fp8 instruction takes one group of MXFP4, two of NVFP4: those are multiplied in bfloat16.
        return "float8_e4m3fn" if weights.scale == "e8m0" else "bfloat16"
    if weights.scale != "float32":
        return None
    is_float, bits = weights.element_type.is_float, weights.element_type.bits
    is_usual = activations.symmetric and not activations.amax_bound
    fits_8_bits = not is_float and bits <= 4 and (weights.group_size or 64) % 64 == 0
    if is_usual and fits_8_bits and (weights.symmetric or activations.element == "int8"):
        return {"int8": "int8", "e4m3": "float8_e4m3fn"}.get(activations.element)
    is_plain = weights.packing is None and weights.symmetric and bits == 8 and weights.group_size is None
    # bfloat16 holds codes of 8 bits less their zero points, and e4m3, exactly.
    return None if is_usual and is_plain else "bfloat16"


def _format_for(weights: QuantFormat, operand: Any) -> PackedFormat:
    element: Any = weights.element
    if not weights.element_type.is_float:
        element = "int4" if weights.element_type.bits <= 4 else "int8"
    group = weights.group_size if weights.block_shape is None else weights.block_shape[1]
    scale: Any = "none" if group is None else "group" if weights.scale == "float32" else weights.scale
    return PackedFormat(element, operand, scale, group, not weights.symmetric)


def to_kernel_layout(weights: ExpertWeights, config: MoEConfig) -> ExpertWeights:
    """The same weights as ``grouped_gemm_packed`` reads them. Exact; ``to_plain_layout`` undoes it.

    Scales of groups are kept in the dtype that the format names (``group_scale_dtype``), which holds them exactly, not
    in one that follows from values: a reload replaces those and must not compile anything.
    Raises NotImplementedError when the scheme has no such layout, or act-order groups differ in size (concrete arrays).
    """
    if in_kernel_layout(weights):
        return weights
    if (reason := layout_refusal(weights, config)) is not None:
        raise NotImplementedError(reason)
    fmt = kernel_format(weights.scheme, config.dtype)
    assert fmt is not None
    inputs, hidden = _column_order(weights.w13), _column_order(weights.w2)
    return dataclasses.replace(
        weights,
        w13=_kernel_tensor(weights.w13, fmt, columns=inputs, rows=hidden),
        w2=_kernel_tensor(weights.w2, fmt, columns=hidden),
        w13_bias=_reordered(weights.w13_bias, hidden, -1),
    )


def to_plain_layout(weights: ExpertWeights) -> ExpertWeights:
    """Inverse of ``to_kernel_layout``; other weights are returned as they are."""
    if not in_kernel_layout(weights):
        return weights
    hidden = None if weights.w2.g_idx is None else _inverse(weights.w2.g_idx)
    return dataclasses.replace(
        weights,
        w13=plain_tensor(weights.w13, rows=hidden),
        w2=plain_tensor(weights.w2),
        w13_bias=_reordered(weights.w13_bias, hidden, -1),
    )


def layout_refusal(weights: ExpertWeights, config: MoEConfig) -> str | None:
    """Why plain weights have no kernel layout, or None."""
    if kernel_format(weights.scheme, config.dtype) is None:
        return f"scheme {weights.scheme.name!r} in {config.dtype.name} has no kernel layout"
    return uneven_groups(weights)


def uneven_groups(weights: ExpertWeights) -> str | None:
    """Why act-order columns have no kernel layout: groups of several sizes, or those of a rank, whose columns belong to
    groups of all ranks. None where they have; also of tracers, whose values are unknown.
    """
    return _uneven("w13", weights.w13) or _uneven("w2", weights.w2)


def _uneven(name: str, tensor: QuantizedTensor) -> str | None:
    if tensor.g_idx is None or is_kernel_layout(tensor.layout):
        return None
    assert tensor.fmt is not None and tensor.fmt.group_size is not None, "act-order is of groups"
    assert tensor.scale is not None, "groups have scales"
    size, columns = tensor.fmt.group_size, tensor.shape[-1]
    if tensor.scale.shape[-1] != -(-columns // size):
        return f"{name} is a part of its matrix, with the groups of all parts; the kernel takes whole groups"
    if isinstance(tensor.g_idx, Tracer | jax.ShapeDtypeStruct):
        return None
    wrong = jnp.sort(tensor.g_idx, axis=-1) != jnp.arange(columns) // size
    if not bool(wrong.any()):
        return None
    expert = int(jnp.argmax(wrong.any(axis=-1)))
    return f"{name}.g_idx of expert {expert}: groups of other sizes than {size}; the kernel takes whole ones"


def kernel_tensor(tensor: QuantizedTensor, scheme: Scheme, dtype: DTypeLike) -> QuantizedTensor:
    """Matrices (E, N, K) that no other product feeds, as ``to_kernel_layout`` has w2: their columns have an order of
    their own. ``plain_tensor`` undoes it. Raises NotImplementedError as ``to_kernel_layout``."""
    fmt = kernel_format(scheme, dtype)
    reason = f"scheme {scheme.name!r} in {jnp.dtype(dtype).name} has no kernel layout" if fmt is None else None
    if (reason := reason or _uneven("weight", tensor)) or fmt is None:
        raise NotImplementedError(reason)
    return _kernel_tensor(tensor, fmt, columns=_column_order(tensor))


def is_kernel_layout(layout: WeightLayout) -> bool:
    """Whether this is the layout of ``to_kernel_layout``."""
    return layout.name.startswith(_PREFIX)


def in_kernel_layout(weights: ExpertWeights) -> bool:
    """Whether the weights are in the layout of ``to_kernel_layout``; both matrices are or none."""
    return is_kernel_layout(weights.w13.layout)


def kernel_operand(tensor: QuantizedTensor) -> PackedWeights:
    """A tensor in kernel layout as ``grouped_gemm_packed`` takes it; leaves may be ShapeDtypeStructs."""
    fmt = _format_of(tensor)
    is_grouped = fmt.scale == "group"
    assert tensor.layout.shape is not None
    n, k = tensor.layout.shape[-2:]
    scale, channel_scale = (tensor.scale, None) if is_grouped else (None, tensor.scale)
    return PackedWeights(tensor.data, scale, tensor.zero_point, channel_scale, fmt, n, k)


def shard_axis(tensor: QuantizedTensor, field: str, is_w2: bool) -> int | None:
    """The axis of a leaf (E, blocks of N, G, blocks of K, ...) that counts I; None where it has none."""
    if field not in ("data", "scale", "zero_point"):
        return None
    if not is_w2:
        return 1
    # Of w2's scales and zero points, factors of whole channels (E, NB, G, 64) belong to no block of K.
    return 3 if field == "data" or len(getattr(tensor, field).shape) == 5 else None


def _format_of(tensor: QuantizedTensor) -> PackedFormat:
    assert tensor.fmt is not None, "only quantized weights have a kernel layout"
    return _format_for(tensor.fmt, tensor.layout.name.removeprefix(_PREFIX))


def _column_order(tensor: QuantizedTensor) -> Leaf | None:
    """(E, K) int32, columns by their groups, or None."""
    return None if tensor.g_idx is None else jnp.argsort(tensor.g_idx, axis=-1, stable=True).astype(jnp.int32)


def _inverse(order: Leaf) -> Leaf:
    return jnp.argsort(order, axis=-1).astype(jnp.int32)


def _reordered(array: Any, order: Any, axis: int) -> Any:
    """array (E, ...) with one axis, counted from the end, in each expert's order (E, n); as it is where one is None."""
    if array is None or order is None:
        return array
    shape = [order.shape[0], *[1] * (array.ndim - 1)]
    shape[axis] = order.shape[1]
    return jnp.take_along_axis(array, order.reshape(shape), axis)


def _kernel_tensor(
    tensor: QuantizedTensor, fmt: PackedFormat, *, columns: Leaf | None = None, rows: Leaf | None = None
) -> QuantizedTensor:
    arguments = dict(scale=tensor.scale, global_scale=tensor.global_scale, zero_point=tensor.zero_point)
    arguments |= dict(columns=columns, rows=rows)
    arguments = {name: value for name, value in arguments.items() if value is not None}
    assert tensor.fmt is not None
    held = _scale_dtype(tensor.fmt, fmt)
    packed = _kernel_stack(tensor.data, arguments, tensor.fmt, tensor.shape[-2:], fmt, held)
    scale = packed.scale if packed.scale is not None else packed.channel_scale
    layout = WeightLayout(f"{_PREFIX}{fmt.operand}", (BLOCK_N, fmt.block_k), tuple(tensor.shape[1:]))
    return dataclasses.replace(
        tensor, data=packed.words, scale=scale, zero_point=packed.zero, g_idx=columns, layout=layout
    )


def _scale_dtype(stored: QuantFormat, fmt: PackedFormat) -> str:
    """What group scales are kept in: float32 in place of float16 beside operands of int8 without zero points, as
    the tuning table knows those layers.
    """
    is_known_wide = fmt.operand == "int8" and not fmt.has_zero_point
    return "float32" if is_known_wide and stored.group_scale_dtype == "float16" else stored.group_scale_dtype


@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5))
def _kernel_stack(
    data: Leaf,
    leaves: dict[str, Leaf],
    stored: QuantFormat,
    shape: tuple[int, int],
    fmt: PackedFormat,
    held: str,
) -> PackedWeights:
    """One expert after another: codes of one number each are eight times what they are made from.

    held: dtype of group scales; ``stored`` alone would not tell two of them apart.
    """

    def one(expert):
        data, leaves = expert
        (n, k), lead = shape, data.shape[:-2]
        projections = lead[0] if lead else 1
        codes = _container_codes(data, stored, k).reshape(1, projections, n, k)
        given = _scales(stored, leaves, lead, n, k)
        given = {name: value.reshape(1, projections, *value.shape[len(lead) :]) for name, value in given.items()}
        if "columns" in leaves:
            codes = codes[..., leaves["columns"]]
        if "rows" in leaves:
            codes = codes[:, :, leaves["rows"]]
            given = {name: value[:, :, leaves["rows"]] for name, value in given.items()}
        packed = packed_gemm.to_kernel_layout(fmt, codes, **given)
        if fmt.scale == "group" and packed.scale is not None:
            packed = dataclasses.replace(packed, scale=packed.scale.astype(held))
        return jax.tree.map(lambda leaf: leaf[0], packed)

    return jax.lax.map(one, (data, leaves))


def _container_codes(data: Leaf, stored: QuantFormat, k: int) -> Leaf:
    """(..., N, K) uint8 codes of 4 or 8 bits from what is stored."""
    bits = stored.element_type.bits
    if stored.packing is Packing.NIBBLES:
        return packing.unpack_nibbles(data)
    if stored.element_type.is_float:
        return jax.lax.bitcast_convert_type(data, jnp.uint8)
    half = 8 if bits <= 4 else 128
    if stored.packing is Packing.WORDS:
        return packing.unpack_words(data, bits, k) + jnp.uint8(half - (1 << (bits - 1)))
    return (data.astype(jnp.int16) + half).astype(jnp.uint8)


def _scales(stored: QuantFormat, leaves: dict[str, Leaf], lead: tuple[int, ...], n: int, k: int) -> dict[str, Leaf]:
    """Arguments of ``to_kernel_layout`` beside the codes, of one expert; lead is () or (G,)."""
    given: dict[str, Leaf] = {}
    scale = leaves["scale"]
    match stored.strategy:
        case Strategy.TENSOR:
            given["channel_scale"] = jnp.broadcast_to(scale[..., None], (*lead, n))
        case Strategy.CHANNEL:
            given["channel_scale"] = scale
        case Strategy.BLOCK:
            given["scale"] = jnp.repeat(scale, stored.block[0], axis=-2)[..., :n, :]
        case _:
            given["scale"] = scale
    if "global_scale" in leaves:
        factor = leaves["global_scale"]
        factor = divide(jnp.ones_like(factor), factor) if stored.global_scale == "divides" else factor
        given["channel_scale"] = jnp.broadcast_to(factor[..., None], (*lead, n))
    if "zero_point" in leaves:
        zero = leaves["zero_point"]
        if stored.packing is not None:
            bits = stored.element_type.bits
            zero = packing.unpack_words(zero.swapaxes(-1, -2), bits, n).swapaxes(-1, -2)
            zero = (zero.astype(jnp.int16) - (1 << (bits - 1))).astype(jnp.int8)
        given["zero_point"] = zero
    return given


def plain_tensor(tensor: QuantizedTensor, *, rows: Leaf | None = None) -> QuantizedTensor:
    """A tensor in kernel layout -> plain. rows: (E, N), where each row lies, or None where they keep their places."""
    stored, shape = tensor.fmt, tensor.shape
    assert stored is not None
    parts = {
        name: _reordered(part, rows, 2 - part.ndim)
        for name, part in packed_gemm.from_kernel_layout(kernel_operand(tensor)).items()
    }
    g_idx = None
    if tensor.g_idx is not None:
        assert stored.group_size is not None, "act-order is of groups"
        places = _inverse(tensor.g_idx)
        parts["codes"] = _reordered(parts["codes"], places, -1)
        g_idx = places // stored.group_size
    lead = shape[:-2]

    def restored(array):
        return array.reshape(*lead, *array.shape[2:])

    bits = stored.element_type.bits
    codes = restored(parts["codes"])
    if stored.packing is Packing.NIBBLES:
        data = packing.pack_nibbles(codes)
    elif stored.element_type.is_float:
        data = jax.lax.bitcast_convert_type(codes, stored.storage)
    else:
        half = 8 if bits <= 4 else 128
        signed = codes.astype(jnp.int16) - half
        data = signed.astype(jnp.int8)
        if stored.packing is Packing.WORDS:
            data = packing.pack_words((signed + (1 << (bits - 1))).astype(jnp.uint8), bits)
    match stored.strategy:
        case Strategy.TENSOR:
            scale = restored(parts["channel_scale"])[..., 0]
        case Strategy.CHANNEL:
            scale = restored(parts["channel_scale"])
        case Strategy.BLOCK:
            scale = restored(parts["scale"])[..., :: stored.block[0], :].astype(stored.scale_dtype)
        case _:
            scale = restored(parts["scale"]).astype(stored.scale_dtype)
    zero = None
    if "zero_point" in parts:
        zero = restored(parts["zero_point"])
        if stored.packing is not None:
            unsigned = (zero.astype(jnp.int16) + (1 << (bits - 1))).astype(jnp.uint8)
            zero = packing.pack_words(unsigned.swapaxes(-1, -2), bits).swapaxes(-1, -2)
    return dataclasses.replace(tensor, data=data, scale=scale, zero_point=zero, g_idx=g_idx, layout=PLAIN)
