"""``ShardedWriter``: safetensors files whose headers are written first, so that tensors can come one at a time."""

import json
import math
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from moe_jax.loading.files._checkpoint import INDEX_FILE, SINGLE_FILE, TensorSource
from moe_jax.loading.files._safetensors import DTYPES

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class TensorSpec(NamedTuple):
    """A tensor that will be written. dtype: of NumPy, with ml_dtypes' for what NumPy lacks."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class ShardedWriter:
    """Weight files of a checkpoint directory, with an index if there is more than one.

    Everything is planned when it is made: the same specs give the same bytes, whatever the order of ``write``. Memory
    is that of the tensor being written.

    Args:
        directory: exists and holds no weights.
        specs: all tensors, in the order in which shards are to hold them; names are unique.
        max_shard_bytes: of data per file; a larger tensor has a file of its own.
    """

    def __init__(self, directory: Path, specs: Iterable[TensorSpec], max_shard_bytes: int):
        shards = _split(list(specs), max_shard_bytes)
        self.files = (
            (SINGLE_FILE,)
            if len(shards) == 1
            else tuple(f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards)))
        )
        self._directory = directory
        self._shards = {name: _Shard(directory / name, shard) for name, shard in zip(self.files, shards, strict=True)}
        self._home = {name: shard for shard in self._shards.values() for name in shard.specs}
        self.nbytes = sum(spec.nbytes for shard in shards for spec in shard)

    def write(self, name: str, array: np.ndarray) -> None:
        """Put one tensor in its place. Raises ValueError unless it is planned, fits, and is not there yet."""
        if name not in self._home:
            raise ValueError(f"{name}: not planned, or its file is complete")
        self._home[name].write(name, array)

    def close(self) -> None:
        """Finish: every tensor must have been written. Files and index are on the disk when this returns."""
        missing = [name for name, shard in self._home.items() if name in shard.pending]
        if missing:
            raise ValueError(f"{len(missing)} tensors were not written, the first is {missing[0]}")
        if len(self.files) > 1:
            weight_map = {name: file for file, shard in self._shards.items() for name in shard.specs}
            index = {"metadata": {"total_size": self.nbytes}, "weight_map": dict(sorted(weight_map.items()))}
            write_text(self._directory / INDEX_FILE, json.dumps(index, indent=2) + "\n")

    def abandon(self) -> None:
        """Let go of files that are still open."""
        for shard in self._shards.values():
            shard.release()


class _Shard:
    """One file: made at its first tensor, on the disk after its last."""

    def __init__(self, path: Path, specs: list[TensorSpec]):
        self._path = path
        # Large elements first, as the safetensors package has them: each tensor then starts where its dtype may.
        ordered = sorted(specs, key=lambda spec: -spec.dtype.itemsize)
        self.specs = {spec.name: spec for spec in ordered}
        self.pending = set(self.specs)
        self._offsets: dict[str, int] = {}
        position = 0
        for spec in ordered:
            self._offsets[spec.name] = position
            position += spec.nbytes
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        for name, spec in self.specs.items():
            offsets = [self._offsets[name], self._offsets[name] + spec.nbytes]
            header[name] = {"dtype": _NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": offsets}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._head = struct.pack("<Q", len(text)) + text
        self._size = len(self._head) + position
        self._fd: int | None = None

    def write(self, name: str, array: np.ndarray) -> None:
        spec = self.specs[name]
        if (array.shape, array.dtype) != (spec.shape, spec.dtype):
            raise ValueError(f"{name}: found {array.dtype} {array.shape}, expected {spec.dtype} {spec.shape}")
        if name not in self.pending:
            raise ValueError(f"{name}: written twice")
        if self._fd is None:
            self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            os.truncate(self._fd, self._size)
            _put(self._fd, self._head, 0)
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        _put(self._fd, raw.data, len(self._head) + self._offsets[name])
        self.pending.discard(name)
        if not self.pending:
            os.fsync(self._fd)
            self.release()

    def release(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _put(fd: int, data: bytes | memoryview, position: int) -> None:
    view = memoryview(data)
    while view:  # a call writes 2 GB at most
        count = os.pwrite(fd, view, position)
        view, position = view[count:], position + count


def write_text(path: Path, text: str) -> None:
    """A small file, on the disk when this returns."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def copied_spec(checkpoint: TensorSource, name: str) -> TensorSpec:
    """The spec of a tensor that is written as it was read. Raises ValueError for dtypes that NumPy cannot hold."""
    info = checkpoint.info(name)
    if info.dtype not in DTYPES:
        raise ValueError(f"{info.file}: tensor {name}: dtype {info.dtype} cannot be copied")
    return TensorSpec(name, tuple(info.shape), info.numpy_dtype)


def _split(specs: list[TensorSpec], max_bytes: int) -> list[list[TensorSpec]]:
    shards: list[list[TensorSpec]] = [[]]
    size = 0
    for spec in specs:
        if shards[-1] and size + spec.nbytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(spec)
        size += spec.nbytes
    return shards
