"""From a checkpoint to ``ExpertWeights``, one layer at a time; ``HeaderCheck`` finds what that would refuse."""

import collections
import contextlib
import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import cast

import numpy as np

from moe_jax._config import MoEConfig
from moe_jax.loading._errors import CheckpointError, shorten
from moe_jax.loading.config._quantization_config import QuantizationConfig
from moe_jax.loading.files._checkpoint import CheckpointLike, TensorSource
from moe_jax.loading.files._gptq_awq import as_packed
from moe_jax.loading.files._safetensors import TensorInfo
from moe_jax.loading.layer._layer_loader import LayerLoader
from moe_jax.loading.layer._names import ExpertNames, ExpertTensor, is_expert_name, layer_of
from moe_jax.loading.layer._plan import IN_OUT, OUT_IN, Step, disk_shape
from moe_jax.loading.layer._staging import Staging
from moe_jax.loading.layer._values import TensorError
from moe_jax.quantization import ExpertWeights, LeafSpec, MoEMethod, Scheme, SchemeLike, method_for

_READERS = min(8, os.cpu_count() or 1)  # threads that read and copy
_AHEAD = 16  # tensors that are read before they are asked for


class ExpertReader:
    """The expert tensors of a checkpoint, grouped by layer once, and loaded layer by layer.

    Args:
        checkpoint: a ``Checkpoint``, open for as long as layers are loaded, or what has its ``names``, ``info`` and
            ``read`` (then ``quantization`` has to be given).
        quantization: how its modules are stored; None reads it from the checkpoint's own config.
        names: how its names are read; None understands every known spelling.

    Attributes:
        layers: indices of the layers that have expert tensors, ascending.
        peak_staged_bytes: the most bytes that were staged on the host at a time: at most one layer's.

    Raises:
        CheckpointError: an expert tensor whose name carries no layer, or experts of a layer under different parents.
    """

    def __init__(
        self,
        checkpoint: TensorSource,
        *,
        quantization: QuantizationConfig | None = None,
        names: ExpertNames | None = None,
    ):
        self._checkpoint = checkpoint = as_packed(checkpoint)
        self._where = str(getattr(checkpoint, "directory", "weights given as arrays"))
        self._quantization = quantization or _stated_quantization(cast(CheckpointLike, checkpoint))
        # No other tool writes blocks, and with interleaved rows their biases are interleaved too.
        is_gpt_oss = getattr(checkpoint, "config", {}).get("model_type") == "gpt_oss" or any(
            name.endswith(".experts.gate_up_proj_blocks") for name in checkpoint.names
        )
        self._names = names or ExpertNames(is_interleaved=is_gpt_oss)
        self._by_layer: dict[int, list[str]] = {}
        for name in checkpoint.names:
            if not is_expert_name(name):
                continue
            layer = layer_of(name)
            if layer is None:
                file = checkpoint.info(name).file
                raise CheckpointError(f"{file}: tensor {shorten(name)}: an expert tensor whose name carries no layer")
            own = self._by_layer.setdefault(layer, [])
            if own and _parent(own[0]) != _parent(name):
                raise CheckpointError(
                    f"{self._where}: tensors {shorten(own[0])} and {shorten(name)}: names of one layer's experts start "
                    "alike in every checkpoint that a tool writes; the file is damaged"
                )
            own.append(name)
        self.layers: tuple[int, ...] = tuple(sorted(self._by_layer))
        self._stored: dict[int, Scheme | None] = {}
        self._parsed: dict[tuple[int, bool], dict[str, ExpertTensor]] = {}
        self.peak_staged_bytes: int = 0

    def stored_scheme(self, layer: int) -> Scheme | None:
        """How the file stores this layer's experts, None for full precision.

        Raises:
            CheckpointError: projections or experts of the layer follow different schemes.
        """
        if layer in self._stored:
            return self._stored[layer]
        seen: dict[Scheme | None, str] = {}
        scale_dtypes = set()
        for tensor in self._tensors(layer).values():
            scheme = self._quantization.scheme_for(tensor.module)
            if scheme is not None and scheme.weights is not None:
                scale_dtypes.add(scheme.weights.group_scale_dtype)
            seen.setdefault(scheme if scheme is not None and scheme.is_quantized else None, tensor.module)
            if len(seen) > 1:
                found = " and ".join(f"{module} is {s.name if s else 'unquantized'}" for s, module in seen.items())
                raise CheckpointError(f"{self._where}: {found}; expected one scheme for all experts of a layer")
        found = next(iter(seen), None)
        if found is not None and found.weights is not None and len(scale_dtypes) > 1:
            found = dataclasses.replace(found, weights=dataclasses.replace(found.weights, group_scale_dtype="float32"))
        self._stored[layer] = found
        return found

    def target_scheme(self, layer: int, scheme: SchemeLike) -> Scheme:
        """How this layer's experts come out when ``scheme`` (what ``Scheme.parse`` accepts) is asked for.

        Quantized weights keep their format and container, so ``w4a8_int8_g32`` of a file in ``w4a16_g32`` means its
        packed weights with int8 activations: how activations are treated may be chosen where that needs no scales.

        Raises:
            ValueError: the scheme does not fit how the checkpoint is stored.
        """
        stored, target = self.stored_scheme(layer), Scheme.parse(scheme)
        if stored is None or target == stored:
            return target
        weights, held = target.weights, stored.weights
        if weights is not None and held is not None and not weights.element_type.is_float:
            if dataclasses.replace(weights, packing=held.packing) == held:
                held = dataclasses.replace(held, group_scale_dtype=weights.group_scale_dtype)
                target = Scheme.parse(dataclasses.replace(target, weights=held))
        needs_scales = any(s.activations is not None and s.activations.needs_input_scale for s in (stored, target))
        if target.weights != stored.weights or needs_scales:
            raise ValueError(
                f"layer {layer} is stored as {stored.name} and cannot be loaded as {target.name}; "
                f"only a full-precision checkpoint can be quantized while loading, so ask for {stored.name}"
            )
        return target

    def load(
        self,
        layer: int,
        config: MoEConfig,
        scheme: SchemeLike = None,
        *,
        like: ExpertWeights | None = None,
        fused_layout: str | None = None,
        method: MoEMethod | None = None,
        experts: Sequence[int] | None = None,
    ) -> ExpertWeights:
        """One layer's experts as JAX arrays on the default device.

        Args:
            layer: as the checkpoint's names count it.
            config: the layer; its scheme is how the weights come out: as they are stored (``stored_scheme``), or
                another one, into which a full-precision checkpoint is quantized while loading.
            scheme: what ``Scheme.parse`` accepts, instead of ``config.scheme``.
            like: weights to be replaced; the new ones must have the same structure, shapes and dtypes.
            fused_layout: see ``LayerLoader``; only needed where shapes do not tell.
            method: how the scheme is quantized and processed, None for its own method.
            experts: see ``LayerLoader``; None for all.

        Raises:
            CheckpointError: what ``LayerLoader`` refuses, with the file in front.
            ValueError: the scheme does not fit how the checkpoint is stored.
        """
        target = self.target_scheme(layer, config.scheme if scheme is None else scheme)
        quantizes = self.stored_scheme(layer) is None and target.is_quantized
        with ThreadPoolExecutor(_READERS) as executor:
            loader = LayerLoader(
                dataclasses.replace(config, scheme=target),
                method,
                experts=experts,
                layer=layer,
                names=dataclasses.replace(self._names, is_gated=config.is_act_and_mul),
                quantize=quantizes,
                fused_layout=fused_layout or self._fused_layout(layer, config),
                words_are_dense=self._quantization.words_are_dense,
                executor=executor,
            )
            try:
                self._fill(loader, layer, config.is_act_and_mul, executor if quantizes else None)
                return loader.finish(like)
            except CheckpointError:
                raise
            except TensorError as error:
                raise self._error(error.name, error) from None
            except ValueError as error:
                raise CheckpointError(f"{self._where}: {error}") from None
            finally:
                self.peak_staged_bytes = max(self.peak_staged_bytes, loader.peak_staged_bytes)

    def _fill(self, loader: LayerLoader, layer: int, is_gated: bool, executor: Executor | None) -> None:
        tensors = self._tensors(layer, is_gated)
        for name, array in self._read(layer, executor):
            try:
                if name in tensors:
                    loader.accept_tensor(tensors[name], array)
                else:
                    loader.accept(name, array)
            except TensorError:
                raise
            except ValueError as error:
                raise self._error(name, error) from None

    def _error(self, name: str, error: ValueError) -> CheckpointError:
        return CheckpointError(f"{self._checkpoint.info(name).file}: tensor {error}")

    def _in_order(self, layer: int) -> list[str]:
        """Names by expert, so that an expert that is to be quantized is complete as soon as possible."""
        experts = {name: tensor.expert for name, tensor in self._tensors(layer).items()}
        return sorted(self._by_layer.get(layer, ()), key=lambda name: -1 if (e := experts.get(name)) is None else e)

    def _read(self, layer: int, executor: Executor | None) -> Iterator[tuple[str, np.ndarray]]:
        """(name, array) in order.

        executor: its threads bring the next tensors into memory in the meantime; None reads each when it is its turn.
        """
        names = self._in_order(layer)
        if executor is None:
            yield from ((name, self._checkpoint.read(name)) for name in names)
            return
        ahead = collections.deque()
        for name in names:
            ahead.append((name, executor.submit(self._checkpoint.read, name)))
            if len(ahead) > _AHEAD:
                name, future = ahead.popleft()
                yield name, future.result()
        for name, future in ahead:
            yield name, future.result()

    def _tensors(self, layer: int, is_gated: bool = True) -> dict[str, ExpertTensor]:
        """Parsed names; those that cannot be parsed are left to the loader, which refuses them."""
        if (layer, is_gated) not in self._parsed:
            names, parsed = dataclasses.replace(self._names, is_gated=is_gated), {}
            for name in self._by_layer.get(layer, ()):
                with contextlib.suppress(ValueError):
                    parsed[name] = names.parse(name)
            self._parsed[layer, is_gated] = {name: tensor for name, tensor in parsed.items() if tensor is not None}
        return self._parsed[layer, is_gated]

    def _fused_layout(self, layer: int, config: MoEConfig) -> str | None:
        """The layout that all weights of all experts of this layer can have, None when that does not tell.

        A shape that fits both ways is settled by its neighbour: 2I = H and I = H cannot hold together.
        """
        specs = method_for(None).create_weights(dataclasses.replace(config, scheme=Scheme.parse(None)))
        possible = {OUT_IN, IN_OUT}
        for tensor in self._tensors(layer).values():
            if tensor.expert is not None or tensor.suffix != "weight":
                continue
            shape = self._checkpoint.info(tensor.name).shape
            experts, rows, columns = disk_shape(tensor, specs[tensor.leaf], config)
            fitting = {OUT_IN: (experts, rows, columns), IN_OUT: (experts, columns, rows)}
            possible &= {layout for layout, expected in fitting.items() if expected == shape}
        return possible.pop() if len(possible) == 1 else None


def _unread(info: TensorInfo) -> np.ndarray:
    """An array like the tensor that takes no memory; all its elements are 0."""
    return np.broadcast_to(np.zeros((), info.numpy_dtype), info.shape)


class _Nothing(Staging):
    """Counts what would be written; values are not known here."""

    def check(self, *args: object) -> None:
        """Nothing to look at."""

    def add(
        self, name: str, contents: object, steps: Sequence[Step], specs: Mapping[str, LeafSpec], online: object
    ) -> None:
        for step in steps:
            self.coverage.mark(step.target.leaf, specs[step.target.leaf].shape[0], step.target.index[0], step.shard)


class _HeaderLoader(LayerLoader):
    """A ``LayerLoader`` that does all its checks of names, shapes and dtypes and stores nothing."""

    _staging_type = _Nothing

    def check_complete(self) -> None:
        """Raises ValueError naming what is missing, duplicate or unexpected."""
        self._check_complete()


class HeaderCheck(ExpertReader):
    """An ``ExpertReader`` that can also check layers without reading more of them than their scales and shapes."""

    def check(self, layer: int, config: MoEConfig) -> None:
        """Check the experts of one layer. config: as for ``load``; its scheme is the one they are stored in.

        Raises CheckpointError as ``load`` would, except for what only the values of weights can show.
        """
        allows_negative = method_for(config.scheme).allows_negative_scales
        loader = _HeaderLoader(
            config,
            layer=layer,
            names=dataclasses.replace(self._names, is_gated=config.is_act_and_mul),
            quantize=False,
            fused_layout=self._fused_layout(layer, config),
            words_are_dense=self._quantization.words_are_dense,
        )
        for name in self._in_order(layer):
            info = self._checkpoint.info(name)
            try:
                loader.accept(name, self._checkpoint.read(name) if name.endswith("weight_shape") else _unread(info))
            except ValueError as error:
                raise CheckpointError(f"{info.file}: tensor {error}") from None
            if name.endswith(("scale", "scale_inv")):
                self._check_scale(name, allows_negative and not name.endswith("input_scale"))
        try:
            loader.check_complete()
        except ValueError as error:
            raise CheckpointError(f"{self._where}: {error}") from None

    def _check_scale(self, name: str, allows_negative: bool) -> None:
        stored = self._checkpoint.read(name)
        if stored.dtype == np.uint8:
            stored = stored.view("float8_e8m0fnu")
        values = stored.astype(np.float32)
        if name.endswith("input_global_scale"):  # infinite for an expert that calibration never reached
            values = np.where(np.isposinf(values), np.float32(1), values)
        is_bad = ~np.isfinite(values) if allows_negative else ~(np.isfinite(values) & (values >= 0))
        if is_bad.any():
            index = tuple(int(i) for i in np.argwhere(is_bad)[0])
            expected = "a finite number" if allows_negative else "a finite number >= 0"
            raise CheckpointError(
                f"{self._checkpoint.info(name).file}: tensor {shorten(name)}: found scale {values[index]} at {index}, "
                f"expected {expected}; the file is damaged"
            )


def _stated_quantization(checkpoint: CheckpointLike) -> QuantizationConfig:
    return QuantizationConfig.from_config(checkpoint.config, checkpoint)


def _parent(name: str) -> str:
    """What an expert tensor's name starts with."""
    return name.partition(".experts." if ".experts." in name else "layers.")[0]


def load_layer(
    checkpoint: TensorSource,
    layer: int | str,
    config: MoEConfig,
    scheme: SchemeLike = None,
    *,
    quantization: QuantizationConfig | None = None,
) -> ExpertWeights:
    """The experts of one layer; see ``ExpertReader``, which reads names and configs only once for several layers.

    layer: its index, or a name that carries it, such as "model.layers.3.mlp".
    """
    index = layer_of(layer) if isinstance(layer, str) else layer
    if index is None:
        raise ValueError(f"layer={layer!r}: expected an index or a name that carries one, as in 'model.layers.3.mlp'")
    return ExpertReader(checkpoint, quantization=quantization).load(index, config, scheme)


def stream_layers(
    checkpoint: TensorSource,
    config: MoEConfig,
    scheme: SchemeLike = None,
    *,
    layers: Iterable[int] | None = None,
    quantization: QuantizationConfig | None = None,
) -> Iterator[tuple[int, ExpertWeights]]:
    """(layer, its experts) for ``layers``, by default all that have expert tensors; one layer is staged at a time."""
    reader = ExpertReader(checkpoint, quantization=quantization)
    for layer in reader.layers if layers is None else layers:
        yield layer, reader.load(layer, config, scheme)
