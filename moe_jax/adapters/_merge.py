"""``merge_lora``: adapters added to the weights themselves, which are quantized again as their scheme writes them."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moe_jax._arguments import check_not_traced
from moe_jax._typing import Array, Leaf
from moe_jax._versions import Place, changing, install
from moe_jax.adapters._lora import Projection, adaptable
from moe_jax.experts._choice import plain_layout
from moe_jax.experts._matrix import plain_matrix
from moe_jax.models._layers import in_computed_layout
from moe_jax.nn import FusedMoE
from moe_jax.nn._lora import whole_expert_lora
from moe_jax.parallel._sharding import plain_shares
from moe_jax.parallel._weights import all_experts
from moe_jax.quantization import (
    ExpertWeights,
    LowRank,
    QuantizedMatrix,
    QuantizedTensor,
    Scheme,
    dequantize_tensor,
    method_for,
)


class MergedWeight(NamedTuple):
    """What became of one weight; sizes are Frobenius norms over all its experts.

    name: of the layer or projection, and the weight. error: size of (stored - real) by that of the real sum. addend:
    size of what the adapter added, by the same. Where error is not far below addend, quantizing again has lost it.
    """

    name: str
    error: float
    addend: float


def merge_lora(module: Any) -> list[MergedWeight]:
    """Add the adapters of a layer or a model to its weights, in place, and take them away. Backends of one's own serve
    the result, and nothing is computed for adapters any more.

    Unquantized weights are rounded once to their dtype. Quantized ones are dequantized, added to in float32, one expert
    at a time, and quantized again by their scheme; input scales of the checkpoint stay. What that loses is returned:
    4-bit weights may lose most of a small adapter. Layers over a mesh pass through the host.

    Args:
        module: what ``moe_jax.lora`` or ``load_lora`` gave adapters.

    Returns:
        One ``MergedWeight`` for each weight that had an adapter.

    Raises:
        ValueError: no adapters, or weights that are not loaded. NotImplementedError: a scheme that cannot be quantized
            here, such as act-order, or a mesh of several processes. Nothing is changed then.
    """
    layers, projections = adaptable(module)
    layers = [layer for layer in layers if layer.lora is not None]
    projections = [place for place in projections if place.linear.lora is not None]
    if not layers and not projections:
        raise ValueError(f"a {type(module).__name__} without adapters has nothing to merge; moe_jax.lora adds some")
    check_not_traced("merge_lora", module)
    for adapter in (target.lora for target in (*layers, *(place.linear for place in projections))):
        assert adapter is not None and adapter.alpha  # raises where it is one of several
    for layer in layers:
        _check(layer._label(), layer.config.scheme, layer.weights.get_value())
    for place in projections:
        value = place.linear.weight.get_value()
        _check(place.label, value.scheme if isinstance(value, QuantizedMatrix) else Scheme("bf16"), value)
    merged: list[MergedWeight] = []
    for layer in layers:
        merged += _merge_layer(layer)
    return merged + [_merge_projection(place) for place in projections]


def _check(label: str, scheme: Scheme, value: Any) -> None:
    """Raises for what cannot be merged, before anything is."""
    leaves = jax.tree.leaves(value)
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        raise ValueError(f"{label} has no weights yet; load them before merging an adapter")
    if not all(leaf.is_fully_addressable for leaf in leaves if isinstance(leaf, jax.Array)):
        raise NotImplementedError(f"{label} lies on devices of other processes; merge its adapter on one host")
    if scheme.weights is None:
        return
    if scheme.weights.actorder:
        raise NotImplementedError(
            f"{label}: scheme {scheme.name!r} has columns in an order of their calibration (act-order), which merging "
            "would have to find again; keep the adapter"
        )
    try:
        jax.eval_shape(
            lambda w: method_for(scheme).quantize_stack(w, jnp.float32), jax.ShapeDtypeStruct((1, 256, 256), "float32")
        )
    except NotImplementedError as error:
        raise NotImplementedError(f"{label}: {error}; keep the adapter") from None


def _merge_layer(layer: FusedMoE) -> list[MergedWeight]:
    config, lora = layer.config, layer.lora
    assert lora is not None
    weights = layer.weights.get_value()
    if layer.parallel is None:
        weights = plain_layout(weights)
    else:
        weights = all_experts(plain_shares(weights, config, layer._slots, layer.parallel), config, layer._slots)
    weights = whole_expert_lora(lora, config, None if layer.placement is None else layer._slots).added_to(weights)
    label, sums, found = layer._label(), {}, []
    for name in ("w13", "w2"):
        sums[name] = _Sum(getattr(weights, name), getattr(weights, f"{name}_lora"))
    new = _requantized(weights, config, sums)
    for name, one in sums.items():
        if one.lora is not None:
            found.append(_report(f"{label} {name}", one, getattr(new, name)))
    layer.set_lora(None)
    with changing():
        install([(Place(layer, "weights"), layer._laid_out(new)), layer.next_version()])
    return found


@dataclasses.dataclass(frozen=True)
class _Sum:
    """A stack of matrices and what is added to it."""

    tensor: QuantizedTensor
    lora: LowRank | None

    def real(self, expert: int) -> Array:
        """One expert's sum, lead + (N, K) float32."""
        matrix = _real(self.tensor, expert)
        return matrix if self.lora is None else matrix + self.addend(expert)

    def addend(self, expert: int) -> Array:
        return _addend(jax.tree.map(lambda leaf: leaf[expert], self.lora))


@jax.jit
def _addend(lora: LowRank) -> Array:
    a, b = lora.a.astype(jnp.float32), lora.b.astype(jnp.float32) * lora.scale
    return jnp.einsum("...nr,...rk->...nk", b, a, precision=lax.Precision.HIGHEST)


def _real(tensor: QuantizedTensor, expert: int) -> Array:
    one = jax.tree.map(lambda leaf: leaf[expert : expert + 1], dataclasses.replace(tensor, input_scale=None))
    return dequantize_tensor(one)[0]


def _requantized(weights: ExpertWeights, config: Any, sums: dict[str, _Sum]) -> ExpertWeights:
    """The weights with the sums in place of those that have an adapter; the others keep every bit."""
    method = method_for(config.scheme)
    leaves: dict[str, Leaf] = {}
    for name, one in sums.items():
        parts = [method.quantize_stack(one.real(e)[None], config.param_dtype) for e in range(weights.num_experts)]
        leaves |= {f"{name}_{part}": jnp.concatenate([own[part] for own in parts]) for part in parts[0]}
    for name, bias in (("w13_bias", weights.w13_bias), ("w2_bias", weights.w2_bias)):
        if bias is not None:
            leaves[name] = bias
    specs = method.create_weights(config)
    for name, spec in specs.items():
        if spec.kind == "input_scale":
            leaves[name] = _full(spec.shape, sums[name.split("_")[0]].tensor.input_scale)
    leaves = {name: leaves[name].reshape(spec.shape) for name, spec in specs.items()}
    new = method.process_weights_after_loading(leaves, config)
    return dataclasses.replace(new, **{name: one.tensor for name, one in sums.items() if one.lora is None})


def _full(shape: tuple[int, ...], value: Any) -> Array:
    return jnp.full(shape, value, jnp.float32)


def _report(name: str, one: _Sum, stored: QuantizedTensor) -> MergedWeight:
    return _measured(name, one.tensor.data.shape[0], one.real, one.addend, lambda expert: _real(stored, expert))


def _measured(
    name: str,
    experts: int,
    real: Callable[[int], Array],
    addend: Callable[[int], Array],
    stored: Callable[[int], Array],
) -> MergedWeight:
    squares = np.zeros(3)
    for expert in range(experts):
        wanted = real(expert)
        parts = (wanted, stored(expert) - wanted, addend(expert))
        squares += [float(jnp.sum(jnp.square(part))) for part in parts]
    size, error, added = np.sqrt(squares)
    return MergedWeight(name, float(error / size), float(added / size))


def _merge_projection(place: Projection) -> MergedWeight:
    module = place.linear
    held, lora = module.weight.get_value(), module.lora
    assert lora is not None
    addend = _addend(lora.addend())
    if isinstance(held, QuantizedMatrix):
        plain = plain_matrix(held).tensor
        wanted = dequantize_tensor(plain)[0] + addend
        tensor = _requantized_matrix(held.scheme, wanted, plain)
        stored, new = dequantize_tensor(tensor)[0], in_computed_layout(module, QuantizedMatrix(tensor, held.scheme))
    else:
        wanted = held.astype(jnp.float32) + addend
        new = wanted.astype(held.dtype)
        stored = new.astype(jnp.float32)
    with changing():
        if jax.tree.structure(new) == jax.tree.structure(held):
            new = jax.tree.map(lambda leaf, old: jax.device_put(leaf, old.sharding), new, held)
        install([(Place(module, "weight"), new)])
        module.lora = None
    return _measured(place.label, 1, lambda _: wanted, lambda _: addend, lambda _: stored)


def _requantized_matrix(scheme: Scheme, wanted: Array, plain: QuantizedTensor) -> QuantizedTensor:
    method, (n, k) = method_for(scheme), wanted.shape
    leaves = {name: leaf[0] for name, leaf in method.quantize_stack(wanted[None], jnp.float32).items()}
    for name, spec in method.matrix_specs(n, k).items():
        if spec.kind == "input_scale":
            leaves[name] = _full(spec.shape[1:], plain.input_scale)
    return method.process_matrix(leaves, n, k)
