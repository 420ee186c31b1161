"""What ``ExpertReader.load`` would refuse, found without reading weights: names, shapes, dtypes, gaps, bad scales."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from moe_jax._config import MoEConfig
from moe_jax.loading._errors import CheckpointError, shorten
from moe_jax.loading.layer._layer_loader import LayerLoader
from moe_jax.loading.layer._stream import ExpertReader
from moe_jax.quantization import method_for


def _unread(info: Any) -> np.ndarray:
    """An array like the tensor that takes no memory; all its elements are 0."""
    return np.broadcast_to(np.zeros((), info.numpy_dtype), info.shape)


class _HeaderLoader(LayerLoader):
    """A ``LayerLoader`` that does all its checks of names, shapes and dtypes and stores nothing."""

    def check_complete(self) -> None:
        """Raises ValueError naming what is missing, doubled or left over."""
        self._check_complete()

    def _check_contents(self, tensor: Any, array: np.ndarray, specs: Mapping[str, Any]) -> None:
        """Values are not known here."""

    def _check_common(self, step: Any, name: str) -> None:
        """Values are not known here."""

    def _store(
        self, steps: list[Any], tensor: Any, array: np.ndarray, specs: Mapping[str, Any], is_deferred: bool
    ) -> None:
        for step in steps:
            placement = step.placement
            self._coverage.mark(placement.leaf, specs[placement.leaf].shape[0], placement.index[0], step.shard)


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
