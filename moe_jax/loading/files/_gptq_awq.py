"""GPTQ and AWQ checkpoints, seen as if compressed-tensors had packed them: the same integers, laid out in other ways.

GPTQ keeps matrices as (in, out) and packs codes along ``in`` in dense words: transposed they are the words of
compressed-tensors. Its zero points are packed along ``out`` and, but for checkpoint_format "gptq_v2", stored less one.
AWQ packs codes and zero points along ``out``, eight to a word in an order of its own, without that offset. Codes are
unsigned in both, ``w = scale * (q - zero)``. Conversion is exact, one tensor at a time, when it is read.
"""

import copy
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import cast, overload

import numpy as np

from moe_jax._typing import AnyArray, Json
from moe_jax.loading._errors import CheckpointError, shorten, shown
from moe_jax.loading.files._arrays import ArraySource
from moe_jax.loading.files._checkpoint import CheckpointLike, TensorSource
from moe_jax.loading.files._safetensors import TensorInfo
from pallas_kernels.common import packing

_SOURCES = {
    "weight_packed": "qweight",
    "weight_scale": "scales",
    "weight_zero_point": "qzeros",
    "weight_g_idx": "g_idx",
}
_WAY_OUT = "use a compressed-tensors version, or load the full-precision model with quantize=..."


@dataclasses.dataclass(frozen=True)
class _Container:
    """What quantization_config states. zero_offset: what has to be added to a stored zero point."""

    method: str
    bits: int
    group_size: int | None
    symmetric: bool
    has_g_idx: bool
    zero_offset: int

    def suffixes(self) -> tuple[str, ...]:
        skipped = {"weight_zero_point"} if self.symmetric else set()
        return tuple(s for s in _SOURCES if s not in skipped | (set() if self.has_g_idx else {"weight_g_idx"}))


@overload
def as_packed(checkpoint: CheckpointLike) -> CheckpointLike: ...
@overload
def as_packed(checkpoint: TensorSource) -> TensorSource: ...
def as_packed(checkpoint: TensorSource) -> TensorSource:
    """The checkpoint itself, or for one of GPTQ or AWQ a view of it in the names and layouts of ``pack-quantized``.

    Raises CheckpointError for a variant that has no such view, by its name.
    """
    container = _container(getattr(checkpoint, "config", {}).get("quantization_config"), checkpoint)
    return checkpoint if container is None else PackedView(cast(CheckpointLike, checkpoint), container)


def packed_pairs(
    pairs: Iterable[tuple[str, AnyArray]], quantization_config: Json | None
) -> Iterator[tuple[str, AnyArray]]:
    """(name, array) of a GPTQ or AWQ model as ``pack-quantized`` has them, for ``load_weights`` and ``reload_weights``.

    A module is converted as soon as its tensors are there; one that stays incomplete yields what it has at the end.

    Args:
        pairs: (name, NumPy or JAX array); what belongs to no quantized module passes through.
        quantization_config: as config.json states it; of any other method (or None) all pairs pass through.

    Raises:
        CheckpointError: as ``as_packed``, and for values that have no counterpart.
    """
    container = _container(quantization_config, None)
    if container is None:
        yield from pairs
        return
    expected = {"qweight", "scales", "qzeros"} | ({"g_idx"} if container.method == "gptq" else set())
    modules: dict[str, ArraySource] = {}
    for name, array in pairs:
        module, _, suffix = name.rpartition(".")
        if suffix not in _SOURCES.values():
            yield name, array
            continue
        held = modules.setdefault(module, ArraySource(()))
        held.add(name, array)
        if all(f"{module}.{each}" in held for each in expected):
            yield from _packed_module(modules.pop(module), container)
    for held in modules.values():
        yield from _packed_module(held, container)


def _packed_module(source: ArraySource, container: "_Container") -> Iterator[tuple[str, np.ndarray]]:
    view = PackedView(source, container)
    for name in view.names:
        yield name, view.read(name)


def _container(stated: object, checkpoint: TensorSource | None) -> "_Container | None":
    if not isinstance(stated, Mapping) or stated.get("quant_method") not in ("gptq", "awq"):
        return None
    where = f"{getattr(checkpoint, 'config_path', 'config.json')}: quantization_config"
    return _gptq(stated, where) if stated["quant_method"] == "gptq" else _awq(stated, where)


class PackedView:
    """A ``Checkpoint`` whose GPTQ or AWQ modules have ``weight_packed``, ``weight_scale`` and so on.

    Attributes:
        config: config.json with a quantization_config of compressed-tensors that targets the modules found quantized.
    """

    def __init__(self, checkpoint: CheckpointLike, container: _Container):
        self._checkpoint, self._container = checkpoint, container
        modules = [name.removesuffix(".qweight") for name in checkpoint.names if name.endswith(".qweight")]
        self._sources: dict[str, tuple[str, str]] = {}
        hidden = set()
        for module in modules:
            hidden.update(f"{module}.{source}" for source in _SOURCES.values())
            for suffix in container.suffixes():
                if f"{module}.{_SOURCES[suffix]}" in checkpoint:
                    self._sources[f"{module}.{suffix}"] = (module, suffix)
        self.names = (*(name for name in checkpoint.names if name not in hidden), *self._sources)
        self._known = frozenset(self.names)
        self.config = copy.deepcopy(dict(checkpoint.config))
        weights = {"num_bits": container.bits, "type": "int", "symmetric": container.symmetric}
        weights |= {"strategy": "channel"} if container.group_size is None else {"group_size": container.group_size}
        weights["actorder"] = "group" if container.has_g_idx else None
        self.config["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "version": "0.18.0",
            "config_groups": {container.method: {"targets": modules or ["Linear"], "weights": weights}},
        }

    @property
    def directory(self) -> Path | str:
        return self._checkpoint.directory

    @property
    def config_path(self) -> Path | str:
        return self._checkpoint.config_path

    def __getattr__(self, name: str) -> object:
        return getattr(self._checkpoint, name)

    def __contains__(self, name: str) -> bool:
        return name in self._known

    @property
    def quantization_config(self) -> Json:
        return self.config["quantization_config"]

    def info(self, name: str) -> TensorInfo:
        if name not in self._sources:
            return self._checkpoint.info(name)
        module, suffix = self._sources[name]
        stored = self._checkpoint.info(f"{module}.{_SOURCES[suffix]}")
        shape = stored.shape[::-1]
        if self._container.method == "awq" and suffix == "weight_packed" and len(shape) == 2:
            shape = (8 * shape[0], packing.words_per_row(shape[1], 4))
        return stored._replace(name=name, shape=shape)

    def is_converted(self, name: str) -> bool:
        """Whether ``read`` makes the tensor out of others, all of it whatever part is asked for."""
        return name in self._sources

    def read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> np.ndarray:
        """As ``Checkpoint.read``. Raises CheckpointError for values that have no counterpart, naming the tensor."""
        if name not in self._sources:
            return self._checkpoint.read(name, rows, columns)
        module, suffix = self._sources[name]
        source = f"{module}.{_SOURCES[suffix]}"
        stored = self._checkpoint.read(source)
        if suffix != "weight_g_idx" and stored.ndim != 2:
            raise self._error(source, f"expected a matrix, found shape {list(stored.shape)}")
        if suffix in ("weight_packed", "weight_zero_point") and stored.dtype != np.int32:
            raise self._error(source, f"expected int32 words, found {stored.dtype}")
        if suffix == "weight_packed":
            self._check_unread(module)
            extent = math.lcm(8, self._container.group_size or 1)
            if self._container.method == "awq" and stored.shape[0] % extent:
                raise self._error(source, f"has {stored.shape[0]} rows, expected a multiple of {extent}")
            stored = self._matrix(stored)
        elif suffix == "weight_zero_point":
            zeros = self._zeros(stored, source)
            stored = packing.pack_words(zeros, self._container.bits).T
        elif suffix == "weight_scale":
            stored = stored.T
        result = np.ascontiguousarray(stored)
        result.flags.writeable = False
        result = result if rows is None else result[rows]
        return result if columns is None else result[:, columns]

    def _matrix(self, words: np.ndarray) -> np.ndarray:
        if self._container.method == "gptq":
            return words.T
        return packing.pack_words(np.ascontiguousarray(packing.unpack_awq(words, 8 * words.shape[1]).T), 4)

    def _zeros(self, words: np.ndarray, source: str) -> np.ndarray:
        """(groups, out) uint8: the zero points that codes are compared with."""
        bits = self._container.bits
        if self._container.method == "awq":
            return packing.unpack_awq(words, 8 * words.shape[1])
        zeros = packing.unpack_words(words, bits, words.shape[1] * 32 // bits) + np.uint8(self._container.zero_offset)
        # In 8 bits the sum wraps to 0, in fewer it is 2**bits.
        if self._container.zero_offset and ((zeros >> bits if bits < 8 else zeros == 0).any()):
            raise self._error(
                source,
                f"holds zero point {2**bits - 1}, which format 'gptq' reads as {2**bits} and some tools as 0; "
                "convert it with GPTQModel to checkpoint_format 'gptq_v2'",
            )
        return zeros

    def _check_unread(self, module: str) -> None:
        """Tensors that the view leaves out must say nothing: zero points in the middle, columns in their order."""
        zeros, g_idx = f"{module}.qzeros", f"{module}.g_idx"
        middle = 1 << (self._container.bits - 1)
        if self._container.symmetric and zeros in self._checkpoint:
            words, expected = self._checkpoint.read(zeros), self._checkpoint.info(f"{module}.scales").shape
            stored = self._zeros(words, zeros) if words.ndim == 2 else words
            if stored.shape != expected or words.dtype != np.int32:
                raise self._error(
                    zeros, f"holds {words.dtype} zero points {list(stored.shape)}, expected int32 ones {list(expected)}"
                )
            if (stored != middle).any():
                raise self._error(
                    zeros,
                    f"holds zero point {stored[stored != middle][0]}, expected {middle} as config.json says symmetric",
                )
        if not self._container.has_g_idx and g_idx in self._checkpoint:
            stored = np.asarray(self._checkpoint.read(g_idx))
            rows = self._checkpoint.info(f"{module}.qweight").shape[0]
            columns = rows * 32 // self._container.bits if self._container.method == "gptq" else rows
            in_order = np.arange(columns) // (self._container.group_size or columns)
            if stored.shape != in_order.shape or not ((stored == in_order).all() or (stored == -1).all()):
                raise self._error(g_idx, "columns are not in order, but config.json says desc_act=false")

    def _error(self, name: str, text: str) -> CheckpointError:
        return CheckpointError(f"{self._checkpoint.info(name).file}: tensor {shorten(name)}: {text}")


def _gptq(stated: Json, where: str) -> _Container:
    bits, size = stated.get("bits"), stated.get("group_size", 128)
    form = stated.get("checkpoint_format") or "gptq"
    desc_act, symmetric = stated.get("desc_act", False), stated.get("sym", True)
    if bits not in (2, 3, 4, 8) or isinstance(bits, bool):
        raise CheckpointError(f"{where}: bits is {shown(bits)}, expected 2, 3, 4 or 8")
    if form not in ("gptq", "gptq_v2"):
        raise CheckpointError(f"{where}: checkpoint_format {shown(form)} of gptq is not supported; {_WAY_OUT}")
    if stated.get("dynamic"):
        raise CheckpointError(f"{where}: dynamic (other settings for some modules) is not supported; {_WAY_OUT}")
    if not isinstance(desc_act, bool) or not isinstance(symmetric, bool):
        raise CheckpointError(f"{where}: desc_act={shown(desc_act)}, sym={shown(symmetric)}, expected booleans")
    size = _group_size(size, where)
    return _Container("gptq", bits, size, symmetric, desc_act and size is not None, 1 if form == "gptq" else 0)


def _awq(stated: Json, where: str) -> _Container:
    bits = stated.get("bits", stated.get("w_bit"))
    version = str(stated.get("version", "gemm")).lower()
    has_zeros = stated.get("zero_point", True)
    if bits != 4:
        raise CheckpointError(f"{where}: bits is {shown(bits)}, awq has 4")
    if version != "gemm":
        raise CheckpointError(f"{where}: version {shown(version)} of awq is not supported, only 'gemm'; {_WAY_OUT}")
    if not isinstance(has_zeros, bool):
        raise CheckpointError(f"{where}: zero_point={shown(has_zeros)}, expected a boolean")
    size = _group_size(stated.get("group_size", stated.get("q_group_size", 128)), where)
    return _Container("awq", 4, size, not has_zeros, False, 0)


def _group_size(size: object, where: str) -> int | None:
    if not isinstance(size, int) or isinstance(size, bool) or not (size > 0 or size == -1):
        raise CheckpointError(f"{where}: group_size is {shown(size)}, expected a positive integer or -1")
    return None if size == -1 else size
