"""``ExpertStream``: expert tensors of several layers in whatever order somebody else sends them."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from moe_jax._config import MoEConfig
from moe_jax.loading._errors import shorten
from moe_jax.loading.layer._layer_loader import LayerLoader
from moe_jax.loading.layer._names import ExpertNames, layer_of
from moe_jax.quantization import ExpertWeights


@dataclasses.dataclass(frozen=True)
class LoadReport:
    """What a load or reload held on the host.

    peak_staged_bytes: the most bytes of expert tensors, as the checkpoint stores them, that waited at a time for others
    of their expert or layer. peak_open_layers: the most layers that were begun and not complete at a time: 1 where
    tensors come layer by layer.
    """

    peak_staged_bytes: int
    peak_open_layers: int


class ExpertStream:
    """Takes the expert tensors of all layers one by one and processes each layer once it is complete.

    Experts of a full-precision stream under a quantizing scheme are quantized one by one, as soon as they are complete.
    What is staged is bounded by what is incomplete: an expert where tensors come in order, every layer in the worst
    order. ``report`` says what it was.

    Args:
        configs: the layers that are expected, by their index in names.
        names: how names are read.
        words_are_dense: see ``LayerLoader``.

    Attributes:
        surplus: names of expert tensors in layers that are not expected; they are not kept.
    """

    def __init__(
        self, configs: Mapping[int, MoEConfig], *, names: ExpertNames | None = None, words_are_dense: bool | None = None
    ):
        names = names or ExpertNames()
        self._loaders = {
            layer: LayerLoader(
                config,
                layer=layer,
                names=dataclasses.replace(names, is_gated=config.is_act_and_mul),
                words_are_dense=words_are_dense,
            )
            for layer, config in configs.items()
        }
        self._open: set[int] = set()
        self._done: dict[int, ExpertWeights] = {}
        self._late: list[str] = []
        self._staged = self._peak_staged = self._peak_open = 0
        self.surplus: list[str] = []

    @property
    def report(self) -> LoadReport:
        return LoadReport(self._peak_staged, self._peak_open)

    def accept(self, name: str, array: Any) -> None:
        """Stage one tensor; an array that could still change is copied. Raises ValueError as ``LayerLoader.accept``."""
        layer = layer_of(name)
        if layer is None:
            raise ValueError(f"{shorten(name)}: an expert tensor whose name carries no layer")
        loader = self._loaders.get(layer)
        if loader is None:
            self.surplus.append(name)
        elif layer in self._done:
            if not name.endswith("weight_shape"):  # optional, and known by now
                self._late.append(name)
        else:
            before = loader.staged_bytes
            loader.accept(name, array)
            self._open.add(layer)
            # An expert's last tensor is staged before the expert is quantized; one layer at a time grows.
            self._peak_staged = max(self._peak_staged, self._staged - before + loader.peak_staged_bytes)
            self._staged += loader.staged_bytes - before
            self._peak_staged = max(self._peak_staged, self._staged)
            self._peak_open = max(self._peak_open, len(self._open))
            if not loader.is_spoiled and not loader.missing():
                self._finish(layer)

    def finish(self) -> dict[int, ExpertWeights]:
        """The weights of every layer. Raises ValueError naming what is missing, doubled or left over."""
        for layer in self._loaders.keys() - self._done.keys():
            self._finish(layer)
        if self._late:
            count = f" (and {len(self._late) - 1} more)" if len(self._late) > 1 else ""
            raise ValueError(f"doubled or left over: {shorten(self._late[0])}{count}; its layer was complete before it")
        return self._done

    def _finish(self, layer: int) -> None:
        loader = self._loaders[layer]
        self._staged -= loader.staged_bytes
        self._done[layer] = loader.finish()
        self._open.discard(layer)
