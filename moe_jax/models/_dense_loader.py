"""Dense tensors of a checkpoint: each one expected, found, checked against its header, brought to what the model holds.

Experts are the business of ``moe_jax.loading.load_layer``; here is everything else, and the account of every name in
the files: used, allowed to be skipped, or an error.
"""

import dataclasses
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from moe_jax._typing import DTypeLike, Json
from moe_jax._versions import Place
from moe_jax.loading import CheckpointError, QuantizationConfig, layer_of
from moe_jax.loading._errors import listed
from moe_jax.loading.files._gptq_awq import PackedView
from moe_jax.loading.files._safetensors import DTYPES
from moe_jax.loading.layer._bitpacked import conform_words, stored_shapes
from moe_jax.loading.layer._names import CONTAINERS, CORRECTION_BIAS, is_expert_name
from moe_jax.models._layers import Head, Linear, in_computed_layout, keep_quantized
from moe_jax.parallel import ParallelConfig
from moe_jax.parallel._weights import intermediate_unit
from moe_jax.quantization import (
    QuantizedMatrix,
    QuantizedTensor,
    Scheme,
    SchemeLike,
    dequantize_tensor,
    method_for,
    scheme_per_token,
)

FLOAT_DTYPES = ("BF16", "F16", "F32")
SCALE_DTYPES = (*FLOAT_DTYPES, "F8_E8M0")
# Buffers, whose values are recomputed; scales of a quantized cache, which _kv_cache_dtype.py reads; layers for
# multi-token prediction: Qwen3-Next's and Qwen3.5's ``mtp``, ERNIE's ``model.mtp_block``.
_SKIPPED = re.compile(
    r"(.*\.)?(rotary_emb\.inv_freq|self_attn\.(attn\.)?([kvq]|kv|prob)_scale"
    r"|self_attn\.[qkv]_proj\.([kv]_scale|output_scale))|(model\.)?mtp[._].*"
)
_ROUTER = re.compile(
    rf"(.*\.layers\.\d+)\.(?:{'|'.join(CONTAINERS)})\.(?:(gate|router)(?:\.layer)?(\.[a-z]+)|.*{CORRECTION_BIAS})"
)
_BIAS_OWNERS = ("", "gate.", "moe_statics.", "gate.moe_statics.")


@dataclasses.dataclass(frozen=True)
class DenseTensor:
    """One parameter of a dense module and where it comes from.

    name: in the checkpoint. place: where it is in the model. shape: of the parameter. scheme: how the checkpoint stores
    it, None for full precision; else leaves are the names of what it is stored as, by the words of
    ``MoEMethod.matrix_specs``. words_are_dense: see ``LayerLoader``.
    """

    name: str
    place: Place
    shape: tuple[int, ...]
    scheme: Scheme | None = None
    leaves: Mapping[str, str] = dataclasses.field(default_factory=dict)
    words_are_dense: bool | None = None

    @property
    def variable(self) -> nnx.Variable[Any]:
        return self.place.variable

    @property
    def held(self) -> Scheme | None:
        """The scheme that the model holds it in, None for full precision."""
        value = self.variable.get_value()
        return value.scheme if isinstance(value, QuantizedMatrix) else None


def keep_as_stored(
    modules: Json,
    source: Any,
    quantization: QuantizationConfig,
    *,
    dtype: DTypeLike,
    quantize: SchemeLike = None,
    implementation: tuple[str, ...] | None = None,
) -> None:
    """Give abstract modules the weights that the checkpoint has: quantized where they are quantized there.

    quantize: as of ``load_pretrained``; matrices that are stored like it take its activations. Other arguments are
    those of ``plan_dense`` and ``keep_quantized``.
    """
    target = None if quantize is None else Scheme.parse(quantize)
    for name, place in _parameters(modules):
        module = place.module
        if not isinstance(module, Linear | Head) or place.name != "weight" or module.is_dequantized:
            continue
        stored = _stored_scheme(_spelling(name, source), source, quantization)
        if stored is None:
            continue
        held = scheme_per_token(stored)
        if target is not None and target.weights == stored.weights and not _needs_scales(target, stored):
            held = scheme_per_token(dataclasses.replace(target, weights=stored.weights))
        keep_quantized(module, held, dtype, implementation)


def plan_dense(
    modules: Json,
    source: Any,
    quantization: QuantizationConfig,
    *,
    where: str,
    account: Iterable[str],
) -> list[DenseTensor]:
    """Match the parameters of dense modules with a checkpoint's tensors, by headers alone.

    Args:
        modules: checkpoint name -> module or place of a parameter, see ``MoEFamily.moe_dense_modules``.
        source: a ``Checkpoint`` or an ``ArraySource``.
        quantization: which modules are stored quantized.
        where: the checkpoint, for errors.
        account: names that must all be used by these modules; experts and tensors that may be skipped are left out
            already.

    Raises:
        CheckpointError: naming every missing and left-over tensor, or the first of a wrong shape or dtype.
    """
    tensors, used, missing = [], set(), []
    for name, place in _parameters(modules):
        name, variable = _spelling(name, source), place.variable
        if name not in source and f"{name}_packed" not in source:
            missing.append(name)
            continue
        used.add(name)
        is_matrix = name.endswith(".weight") and len(variable.shape) == 2
        scheme = _stored_scheme(name, source, quantization) if is_matrix else None
        tensor = DenseTensor(name, place, tuple(variable.shape))
        if scheme is not None:
            leaves = _leaves(tensor, scheme, source)
            missing += [leaf for leaf in leaves.values() if leaf not in source]
            used.update((*leaves.values(), f"{name}_shape"))  # the shape is known; compressed-tensors repeats it
            tensor = dataclasses.replace(
                tensor, scheme=scheme, leaves=leaves, words_are_dense=quantization.words_are_dense
            )
        tensors.append(tensor)
    unexpected = [name for name in account if name not in used]
    if missing or unexpected:
        raise CheckpointError(f"{where}: {_account(missing, unexpected)}")
    for tensor in tensors:
        _check_header(tensor, source, where)
        _check_held(tensor, where)
    _check_one_half_precision([t for t in tensors if t.scheme is None], source, where)
    return tensors


def read_dense(
    tensors: Iterable[DenseTensor], source: Any, where: str, parallel: ParallelConfig | None
) -> list[tuple[Place, Any]]:
    """(place, new value) for each planned tensor, as the model holds it.

    What the model holds quantized stays as it is stored; a matrix that the source has in full precision is quantized.
    All else is dequantized in float32 and cast once to the variable's dtype.

    parallel: of the model. Over a mesh values get the sharding that their variables have, else a copy on every device;
    a process reads the byte ranges of its own devices, each range once.

    Raises:
        CheckpointError: naming tensors with values that are not finite in that dtype.
    """
    loaded = [(tensor, _pieces(tensor, source, where, _sharding_of(tensor, parallel))) for tensor in tensors]
    # One transfer at the end, not one per tensor.
    finite = [[_is_finite(piece) for piece, _ in pieces] for _, pieces in loaded]
    bad = [tensor.name for (tensor, _), ok in zip(loaded, jax.device_get(finite), strict=True) if not all(ok)]
    if bad:
        raise CheckpointError(
            f"{where}: values that are NaN or infinite in {listed(bad)}; the file is damaged or the dtype too narrow"
        )
    return [(tensor.place, _assembled(tensor, pieces, parallel)) for tensor, pieces in loaded]


def _is_finite(value: Any) -> Any:
    """Of a quantized matrix its elements; scales are checked when it is processed."""
    data = value.tensor.data if isinstance(value, QuantizedMatrix) else value
    return jnp.isfinite(data).all() if jnp.issubdtype(data.dtype, jnp.floating) else True


def _sharding_of(tensor: DenseTensor, parallel: ParallelConfig | None) -> NamedSharding | None:
    """Where the values of a matrix or vector go."""
    value = tensor.variable.get_value()
    if not isinstance(value, QuantizedMatrix):
        return _placed(value, parallel)
    sharding = _placed(value.tensor.data, parallel)
    return None if sharding is None else NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))


def _placed(leaf: Any, parallel: ParallelConfig | None) -> NamedSharding | None:
    """Where a leaf goes: what the variable says, be it abstract or loaded; without a word on every device."""
    if parallel is None:
        return None
    sharding = getattr(leaf, "sharding", None)
    is_placed = isinstance(sharding, NamedSharding) and sharding.mesh == parallel.mesh
    return sharding if is_placed else NamedSharding(parallel.mesh, PartitionSpec())


def _pieces(
    tensor: DenseTensor, source: Any, where: str, sharding: NamedSharding | None
) -> list[tuple[Any, list[Any]]]:
    """The parts of a tensor that this process holds, each on the first of its devices, and all of these.

    One without devices is the whole tensor.
    """
    if sharding is None:
        return [(_value(tensor, source, where), [])]
    holders: dict[_Part | None, list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(tensor.shape).items():
        holders.setdefault(_part_of(index or (), tensor.shape), []).append(device)
    if not all(part is None or _can_cut(tensor, source, part) for part in holders):
        return [(_value(tensor, source, where), [])]
    pieces = []
    for part, devices in holders.items():
        with jax.default_device(devices[0]):
            piece = _value(tensor, source, where, part)
        pieces.append((jax.device_put(piece, devices[0]), devices))
    return pieces


def _value(tensor: DenseTensor, source: Any, where: str, part: "_Part | None" = None) -> Any:
    """A tensor, or a part of it, as the model holds it, on the default device."""
    value, held = _read(tensor, source, where, part), tensor.held
    if held is None:
        whole = dequantize_tensor(value)[0] if isinstance(value, QuantizedTensor) else value
        return whole.astype(tensor.variable.dtype)
    if not isinstance(value, QuantizedTensor):
        value = method_for(held).quantize_matrix(value)
    return in_computed_layout(tensor.place.module, QuantizedMatrix(value, held))


def _assembled(tensor: DenseTensor, pieces: list[tuple[Any, list[Any]]], parallel: ParallelConfig | None) -> Any:
    """One value out of its parts, in the layout of the model's own."""
    like, (first, devices) = tensor.variable.get_value(), pieces[0]
    if parallel is None:
        return first

    def placed(own: Any, *parts: Any) -> jax.Array:
        sharding = _placed(own, parallel)
        assert sharding is not None
        if not devices:
            whole = np.asarray(parts[0])
            return jax.make_array_from_callback(own.shape, sharding, lambda index: whole[index])
        copies = [jax.device_put(part, to) for part, (_, held) in zip(parts, pieces, strict=True) for to in held]
        return jax.make_array_from_single_device_arrays(own.shape, sharding, copies)

    leaves, structure = jax.tree.flatten(like)
    return structure.unflatten(map(placed, leaves, *(jax.tree.leaves(piece) for piece, _ in pieces)))


@dataclasses.dataclass(frozen=True)
class _Part:
    """Entries from ``start`` to ``stop`` of a tensor along an axis."""

    axis: int
    start: int
    stop: int

    @property
    def rows(self) -> slice:
        return slice(self.start, self.stop)

    def read(self, source: Any, name: str) -> np.ndarray:
        return source.read(name, self.rows) if self.axis == 0 else source.read(name, None, self.rows)

    def divides(self, total: int, shape: tuple[int, ...]) -> bool:
        """Whether a leaf of this stored shape, of a matrix with ``total`` entries along the axis, has whole entries for
        the part."""
        count = self._count(shape)
        if count == 1:
            return True
        return total % count == 0 and self.start % (total // count) == 0 and self.stop % (total // count) == 0

    def scaled(self, total: int, shape: tuple[int, ...]) -> "_Part | None":
        """The same part of such a leaf; None, all of it, where the leaf has one entry for all along the axis."""
        count = self._count(shape)
        return None if count == 1 else _Part(self.axis, self.start * count // total, self.stop * count // total)

    def _count(self, shape: tuple[int, ...]) -> int:
        return shape[self.axis] if self.axis < len(shape) else 1


def _part_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> _Part | None:
    """What an index takes of an array that is split along one axis at most; None for all of it."""
    for axis, (entry, size) in enumerate(zip(index, shape, strict=True)):
        start, stop, _ = entry.indices(size)
        if stop - start < size:
            return _Part(axis, start, stop)
    return None


def _can_cut(tensor: DenseTensor, source: Any, part: _Part) -> bool:
    """Whether the part can be read alone: of a quantized matrix whole blocks, groups and words, in their order, as they
    are in the file."""
    if tensor.scheme is None:
        return tensor.held is None
    weights = tensor.scheme.weights
    if (weights is not None and weights.actorder) or (part.stop - part.start) % intermediate_unit(tensor.scheme):
        return False
    if isinstance(source, PackedView) and any(map(source.is_converted, tensor.leaves.values())):
        return False
    shapes = [source.info(name).shape for name in tensor.leaves.values()]
    return all(part.divides(tensor.shape[part.axis], shape) for shape in shapes)


def dense_names(names: Iterable[str], num_layers: int, other_modules: Collection[str] = ()) -> list[str]:
    """The names that dense modules must account for: no experts, no buffers, no layers that are skipped, nothing of
    ``MoEFamily.other_modules``."""
    names = [name for name in names if not any(name.startswith(f"{module}.") for module in other_modules)]
    skipped = skipped_layers(names, num_layers)
    return [
        name
        for name in names
        if not is_expert_name(name) and layer_of(name) not in skipped and not _SKIPPED.fullmatch(name)
    ]


def skipped_layers(names: Iterable[str], num_layers: int) -> set[int]:
    """Layers for multi-token prediction: past the last one and marked by ``eh_proj``; other surplus is an error."""
    marked = {layer_of(name) for name in names if name.endswith(".eh_proj.weight")}
    return {layer for layer in marked if layer is not None and layer >= num_layers}


def _parameters(modules: Json) -> Iterator[tuple[str, Place]]:
    """(checkpoint name, parameter): a module's weight and bias by its name, a bare parameter by its own."""
    for name, value in modules.items():
        if isinstance(value, Place):
            yield name, value
            continue
        for attribute in ("weight", "bias"):
            if getattr(value, attribute, None) is not None:
                yield f"{name}.{attribute}", Place(value, attribute)


def _spelling(name: str, source: Any) -> str:
    """The name in this checkpoint: LoRA puts ``base_layer`` in it; a router and its correction bias may lie elsewhere,
    as models are held in memory."""
    if name in source:
        return name
    module, _, attribute = name.rpartition(".")
    others = [f"{module}.base_layer.{attribute}"]
    if router := _ROUTER.fullmatch(name):
        owners = [f"{router[1]}.{container}." for container in CONTAINERS]
        inside = [f"{word}{router[3]}" for word in ("gate", "router")] if router[2] else []
        inside = inside or [f"{owner}{CORRECTION_BIAS}" for owner in _BIAS_OWNERS]
        others += [owner + word for owner in owners for word in inside]
    return next((other for other in others if other in source), name)


def _stored_scheme(name: str, source: Any, quantization: QuantizationConfig) -> Scheme | None:
    """How a matrix of this name is stored; None for one in full precision or that is missing."""
    if name not in source and f"{name}_packed" not in source:
        return None
    scheme = quantization.scheme_for(name.removesuffix(".weight"))
    return scheme if scheme is not None and scheme.is_quantized else None


def _needs_scales(*schemes: Scheme) -> bool:
    return any(s.activations is not None and s.activations.needs_input_scale for s in schemes)


def _leaves(tensor: DenseTensor, scheme: Scheme, source: Any) -> dict[str, str]:
    """Leaf -> name in the checkpoint; ``weight_scale_inv`` is DeepSeek's word for the scale."""
    module_name = tensor.name.removesuffix(".weight")
    leaves = {leaf: f"{module_name}.{leaf}" for leaf in method_for(scheme).matrix_specs(*tensor.shape)}
    scale = leaves["weight_scale"]
    if f"{scale}_inv" in source and scale not in source:
        leaves["weight_scale"] = f"{scale}_inv"
    return leaves


def _check_header(tensor: DenseTensor, source: Any, where: str) -> None:
    if tensor.scheme is None:
        info = source.info(tensor.name)
        is_row = info.name.endswith("moe_statics.e_score_correction_bias") and info.shape == (1, *tensor.shape)
        _check_info(info, FLOAT_DTYPES, None if is_row else tensor.shape, where)
        return
    method = method_for(tensor.scheme)
    weights, (n, k) = method.weight_format, tensor.shape
    for leaf, spec in method.matrix_specs(*tensor.shape).items():
        is_scale = spec.kind not in ("weight", "zero_point", "channel_zero_point", "g_idx")
        stored_as = next(word for word, dtype in DTYPES.items() if dtype == spec.dtype)
        expected = SCALE_DTYPES if is_scale and spec.dtype == np.float32 else (stored_as,)
        if is_scale and spec.dtype == np.uint8:
            expected = ("U8", "F8_E8M0")
        info = source.info(tensor.leaves[leaf])
        if info.shape in stored_shapes(leaf, weights, (n, k)).get(info.numpy_dtype, ()):
            continue
        # Scales with and without axes of size 1 are read alike; QuantizationConfig and processing check their number.
        _check_info(info, expected, None if is_scale else spec.shape[1:], where)


def _check_held(tensor: DenseTensor, where: str) -> None:
    """What the model holds quantized has to be stored so, or in full precision for a scheme without calibration."""
    stored, held = tensor.scheme, tensor.held
    if held is None or (stored is None and not _needs_scales(held)):
        return
    if (
        stored is not None
        and stored.weights == held.weights
        and (scheme_per_token(stored) == held or not _needs_scales(stored, held))
    ):
        return
    found = "in full precision" if stored is None else f"as {stored.name}"
    raise CheckpointError(
        f"{where}: tensor {tensor.name}: stored {found}, expected {held.name}, in which the model holds it; load the "
        "checkpoint as a model of its own"
    )


def _check_info(info: Any, dtypes: tuple[str, ...], shape: tuple[int, ...] | None, where: str) -> None:
    if shape is not None and info.shape != shape:
        raise CheckpointError(
            f"{where}: tensor {info.name}: expected shape {shape} from config.json, found {info.shape}"
        )
    if info.dtype not in dtypes:
        raise CheckpointError(
            f"{where}: tensor {info.name}: expected dtype {' or '.join(dtypes)}, found {info.dtype}; "
            "config.json's quantization_config does not fit the file"
        )


def _check_one_half_precision(tensors: list[DenseTensor], source: Any, where: str) -> None:
    """BF16 and F16 in one model is a damaged header: their bits mean different numbers and no writer mixes them."""
    first: dict[str, str] = {}
    for tensor in tensors:
        first.setdefault(source.info(tensor.name).dtype, tensor.name)
    if "BF16" in first and "F16" in first:
        raise CheckpointError(
            f"{where}: tensor {first['F16']} is F16 while {first['BF16']} is BF16; expected one of them throughout"
        )


def _read(tensor: DenseTensor, source: Any, where: str, part: _Part | None = None) -> Any:
    """A tensor, or a part of it, as stored: an array or a ``QuantizedTensor`` (1, N, K), on the default device."""

    # A copy: on CPU jnp.asarray may alias an array that the caller gave and can still change.
    if tensor.scheme is None:
        if part is not None:
            return jnp.array(part.read(source, tensor.name))
        return jnp.array(source.read(tensor.name)).reshape(tensor.shape)
    n, k = shape = tensor.shape
    if part is not None:
        n, k = (part.stop - part.start if axis == part.axis else size for axis, size in enumerate(shape))
    leaves = {}
    for leaf, name in tensor.leaves.items():
        own = None if part is None else part.scaled(shape[part.axis], source.info(name).shape)
        leaves[leaf] = np.array(source.read(name) if own is None else own.read(source, name))
    module_name, scheme = tensor.name.removesuffix("weight"), tensor.scheme
    if tensor.held is not None:  # whose dtype of group scales the model keeps
        scheme = dataclasses.replace(scheme, weights=tensor.held.weights)
    method = method_for(scheme)
    try:
        for leaf, name in tensor.leaves.items():
            leaves[leaf] = conform_words(name, leaf, leaves[leaf], method.weight_format, (n, k), tensor.words_are_dense)
        matrix = method.process_matrix(leaves, n, k, where=module_name)
    except ValueError as error:
        raise CheckpointError(f"{where}: tensor {error}") from None
    return jax.tree.map(jnp.asarray, matrix)


def _account(missing: list[str], unexpected: list[str]) -> str:
    labelled = (("missing", missing), ("unexpected", unexpected))
    parts = [f"{len(names)} tensors {label}: {listed(sorted(names))}" for label, names in labelled if names]
    return "; ".join(parts) + "; config.json does not describe this file, or the file is incomplete"
