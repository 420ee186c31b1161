"""One stored matrix as the tensors of a compressed-tensors module, and from one format into another."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax._typing import AnyArray, DTypeLike, Leaf
from moe_jax.quantization import (
    MoEMethod,
    Packing,
    QuantFormat,
    QuantizedTensor,
    Scheme,
    dequantize_tensor,
    method_for,
    repack_integers,
)
from pallas_kernels.common import numerics

# What became of weights, from the mildest on.
COPIED, REPACKED, QUANTIZED, DEQUANTIZED, REQUANTIZED = "copied", "repacked", "quantized", "dequantized", "requantized"
# The global scale of activations that nothing was measured for, as compressed-tensors writes it: block scales then
# reach from 2**-9 to 448, inputs up to 2688.
UNCALIBRATED = np.array(1.0, np.float32)

Layout = dict[str, tuple[tuple[int, ...], np.dtype]]


def module_layout(scheme: Scheme, n: int, k: int, dtype: np.dtype) -> Layout:
    """Suffix -> (shape, dtype) of the tensors of an (n, k) Linear. dtype: of an unquantized weight."""
    if scheme.weights is None:
        return {"weight": ((n, k), dtype)}
    layout: Layout = {}
    for suffix, spec in method_for(scheme).matrix_specs(n, k).items():
        layout[suffix] = (spec.shape[1:] or (1,), spec.dtype)
    if scheme.weights.packing is Packing.WORDS:
        layout["weight_shape"] = ((2,), np.dtype(np.int64))
    return layout


def module_tensors(tensor: QuantizedTensor, scheme: Scheme, layout: Layout) -> dict[str, np.ndarray]:
    """Suffix -> array in the shapes and dtypes of ``layout``.

    tensor: one (n, k) matrix, already in the format of ``scheme``; its input scale is written if the scheme has one.
    """
    fmt, activations = scheme.weights, scheme.activations
    if fmt is None:
        parts = {"weight": tensor.data}
    else:
        parts = {fmt.data_leaf: tensor.data, "weight_scale": tensor.scale, "weight_zero_point": tensor.zero_point}
        parts |= {} if fmt.global_scale is None else {fmt.global_scale_leaf: tensor.global_scale}
        parts["weight_shape"] = np.array(tensor.shape[-2:], np.int64)
        if activations is not None and activations.needs_input_scale:
            parts[activations.input_scale_leaf] = tensor.input_scale
    return {suffix: np.asarray(parts[suffix]).reshape(shape) for suffix, (shape, _) in layout.items()}


def conversion(stored: Scheme, target: Scheme) -> str:
    """What has to be done with weights of one scheme to have them in another one."""
    old, new = stored.weights, target.weights
    if old == new:
        return COPIED
    if old is None or new is None:
        return QUANTIZED if old is None else DEQUANTIZED
    return REPACKED if _without_container(old) == _without_container(new) else REQUANTIZED


def check_conversion(stored: Scheme, target: Scheme, where: str) -> None:
    """Raise ValueError where static scales of activations are wanted that cannot be had."""
    activations = target.activations
    if activations is None or activations.dynamic or _input_scales_convert(stored, target):
        return
    raise ValueError(
        f"{where}: scheme {target.name!r} needs input scales from calibration, and these weights, stored as "
        f"{stored.name}, have none; choose a scheme of dynamic activations such as 'fp8_tensor' or 'fp8_channel'"
    )


def converted(
    tensor: QuantizedTensor, stored: Scheme, target: Scheme, method: MoEMethod, dtype: DTypeLike
) -> QuantizedTensor:
    """One matrix (n, k) of ``stored`` as a QuantizedTensor of ``target``, see ``conversion``.

    method: quantizes where that is needed. dtype: of the result where the target is unquantized.
    """
    kind = conversion(stored, target)
    if kind == DEQUANTIZED:
        return QuantizedTensor(data=_dequantized(tensor, dtype))
    if kind in (QUANTIZED, REQUANTIZED):
        w = tensor.data if stored.weights is None else _dequantized(tensor, jnp.float32)
        tensor = quantized(w, method, tensor.input_scale)
    elif kind == REPACKED:
        tensor = _repacked(tensor, method.weight_format)
    return dataclasses.replace(tensor, input_scale=_input_scale(tensor.input_scale, stored, target))


def quantized(w: AnyArray, method: MoEMethod, input_scale: Leaf | None = None) -> QuantizedTensor:
    """A matrix (n, k) in the format of the method's scheme."""
    fmt = method.weight_format
    leaves = {name: leaf[0] for name, leaf in method.quantize_stack(w[None], jnp.float32).items()}
    return QuantizedTensor(
        data=leaves[fmt.data_leaf],
        scale=leaves["weight_scale"],
        global_scale=leaves.get(fmt.global_scale_leaf),
        input_scale=input_scale,
        zero_point=leaves.get("weight_zero_point"),
        fmt=fmt,
        num_columns=None if fmt.packing is None else w.shape[-1],
    )


_dequantized = jax.jit(dequantize_tensor, static_argnames="dtype")


def _without_container(fmt: QuantFormat) -> QuantFormat:
    """Formats that differ in nothing else hold the same codes: how they are packed, which way a global scale enters."""
    is_global = fmt.global_scale is not None
    packing = fmt.packing if fmt.element_type.is_float else None
    return dataclasses.replace(fmt, packing=packing, global_scale="divides" if is_global else None)


def _repacked(tensor: QuantizedTensor, fmt: QuantFormat) -> QuantizedTensor:
    if not fmt.element_type.is_float:
        return repack_integers(tensor, fmt.packing)
    # ModelOpt's global scale multiplies, compressed-tensors' divides; the quotient is rounded to float32.
    return dataclasses.replace(tensor, global_scale=numerics.reciprocal(jnp.asarray(tensor.global_scale)), fmt=fmt)


def _input_scales_convert(stored: Scheme, target: Scheme) -> bool:
    old, new = stored.activations, target.activations
    if old is None or new is None or not old.needs_input_scale:
        return False
    return _without_container(old) == _without_container(new)


def _input_scale(value: Leaf | None, stored: Scheme, target: Scheme) -> AnyArray | None:
    activations = target.activations
    if activations is None or not activations.needs_input_scale:
        return None
    if not _input_scales_convert(stored, target):
        return UNCALIBRATED
    is_turned = stored.activation_format.global_scale != activations.global_scale
    return numerics.reciprocal(jnp.asarray(value)) if is_turned else value
