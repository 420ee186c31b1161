"""From a checkpoint to ``ExpertWeights``, one layer at a time."""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from moe_jax._config import MoEConfig
from moe_jax.loading._errors import CheckpointError, shorten
from moe_jax.loading._expert_names import ExpertNames, ExpertTensor, is_expert_name, layer_of
from moe_jax.loading._gptq_awq import as_packed
from moe_jax.loading._layer_loader import LayerLoader
from moe_jax.loading._quantization_config import QuantizationConfig
from moe_jax.loading._tensor_checks import IN_OUT, OUT_IN, disk_shape
from moe_jax.quantization import ExpertWeights, MoEMethod, Scheme, method_for


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
        CheckpointError: an expert tensor whose name carries no layer.
    """

    def __init__(
        self,
        checkpoint: Any,
        *,
        quantization: QuantizationConfig | None = None,
        names: ExpertNames | None = None,
    ):
        self._checkpoint = checkpoint = as_packed(checkpoint)
        self._where = str(getattr(checkpoint, "directory", "weights given as arrays"))
        self._quantization = quantization or QuantizationConfig.from_config(checkpoint.config, checkpoint)
        is_gpt_oss = getattr(checkpoint, "config", {}).get("model_type") == "gpt_oss"
        self._names = names or ExpertNames(is_interleaved=is_gpt_oss)
        self._by_layer: dict[int, list[str]] = {}
        for name in checkpoint.names:
            if not is_expert_name(name):
                continue
            layer = layer_of(name)
            if layer is None:
                file = checkpoint.info(name).file
                raise CheckpointError(f"{file}: tensor {shorten(name)}: an expert tensor whose name carries no layer")
            self._by_layer.setdefault(layer, []).append(name)
        self.layers = tuple(sorted(self._by_layer))
        self.peak_staged_bytes = 0

    def stored_scheme(self, layer: int) -> Scheme | None:
        """How the file stores this layer's experts, None for full precision.

        Raises:
            CheckpointError: projections or experts of the layer follow different schemes.
        """
        seen: dict[Scheme | None, str] = {}
        for tensor in self._tensors(layer):
            scheme = self._quantization.scheme_for(tensor.module)
            seen.setdefault(scheme if scheme is not None and scheme.is_quantized else None, tensor.module)
            if len(seen) > 1:
                found = " and ".join(f"{module} is {s.name if s else 'unquantized'}" for s, module in seen.items())
                raise CheckpointError(f"{self._where}: {found}; expected one scheme for all experts of a layer")
        return next(iter(seen), None)

    def load(
        self,
        layer: int,
        config: MoEConfig,
        scheme: Any = None,
        *,
        like: ExpertWeights | None = None,
        fused_layout: str | None = None,
        method: MoEMethod | None = None,
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

        Raises:
            CheckpointError: what ``LayerLoader`` refuses, with the file in front.
            ValueError: the scheme does not fit how the checkpoint is stored.
        """
        stored = self.stored_scheme(layer)
        target = Scheme.parse(config.scheme if scheme is None else scheme)
        self._check_scheme(stored, target, layer)
        loader = LayerLoader(
            dataclasses.replace(config, scheme=target),
            method,
            layer=layer,
            names=dataclasses.replace(self._names, is_gated=config.is_act_and_mul),
            quantize=stored is None and target.is_quantized,
            fused_layout=fused_layout or self._fused_layout(layer, config),
            words_are_dense=self._quantization.words_are_dense,
        )
        for name in self._in_order(layer):
            array = self._checkpoint.read(name)
            try:
                loader.accept(name, array)
            except ValueError as error:
                raise CheckpointError(f"{self._checkpoint.info(name).file}: tensor {error}") from None
        self.peak_staged_bytes = max(self.peak_staged_bytes, loader.peak_staged_bytes)
        try:
            return loader.finish(like)
        except ValueError as error:
            raise CheckpointError(f"{self._where}: {error}") from None

    def _in_order(self, layer: int) -> list[str]:
        """Names by expert, so that an expert that is to be quantized is complete as soon as possible."""
        experts = {tensor.name: -1 if tensor.expert is None else tensor.expert for tensor in self._tensors(layer)}
        return sorted(self._by_layer.get(layer, ()), key=lambda name: experts.get(name, -1))

    def _tensors(self, layer: int) -> Iterator[ExpertTensor]:
        """Parsed names; those that cannot be parsed are left to the loader, which refuses them."""
        for name in self._by_layer.get(layer, ()):
            try:
                tensor = self._names.parse(name)
            except ValueError:
                continue
            if tensor is not None:
                yield tensor

    def _check_scheme(self, stored: Scheme | None, target: Scheme, layer: int) -> None:
        """Quantized weights keep their format; how activations are treated may be chosen where that needs no scales."""
        if stored is None or target == stored:
            return
        needs_scales = any(s.activations is not None and s.activations.needs_input_scale for s in (stored, target))
        if target.weights != stored.weights or needs_scales:
            raise ValueError(
                f"layer {layer} is stored as {stored.name} and cannot be loaded as {target.name}; "
                f"only a full-precision checkpoint can be quantized while loading, so ask for {stored.name}"
            )

    def _fused_layout(self, layer: int, config: MoEConfig) -> str | None:
        """The layout that all weights of all experts of this layer can have, None when that does not tell.

        A shape that fits both ways is settled by its neighbour: 2I = H and I = H cannot hold together.
        """
        specs = method_for(None).create_weights(dataclasses.replace(config, scheme=Scheme.parse(None)))
        possible = {OUT_IN, IN_OUT}
        for tensor in self._tensors(layer):
            if tensor.expert is not None or tensor.suffix != "weight":
                continue
            shape = self._checkpoint.info(tensor.name).shape
            experts, rows, columns = disk_shape(tensor, specs[tensor.leaf], config)
            fitting = {OUT_IN: (experts, rows, columns), IN_OUT: (experts, columns, rows)}
            possible &= {layout for layout, expected in fitting.items() if expected == shape}
        return possible.pop() if len(possible) == 1 else None


def load_layer(
    checkpoint: Any,
    layer: int | str,
    config: MoEConfig,
    scheme: Any = None,
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
    checkpoint: Any,
    config: MoEConfig,
    scheme: Any = None,
    *,
    layers: Iterable[int] | None = None,
    quantization: QuantizationConfig | None = None,
) -> Iterator[tuple[int, ExpertWeights]]:
    """(layer, its experts) for ``layers``, by default all that have expert tensors; one layer is staged at a time."""
    reader = ExpertReader(checkpoint, quantization=quantization)
    for layer in reader.layers if layers is None else layers:
        yield layer, reader.load(layer, config, scheme)
