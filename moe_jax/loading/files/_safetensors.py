"""An own reader of safetensors files: every dtype of the format, nothing trusted before it is checked.

Data is read, not mapped: a mapped file that someone cuts ends the process by a signal.

A file is 8 bytes (length of the header, little-endian), the header (JSON: tensor name -> dtype, shape, data_offsets),
and the data. Nothing about the header is taken on faith: a file is opened only if its tensors tile the data exactly.
"""

import contextlib
import os
import struct
import threading
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np

from moe_jax._typing import AnyArray, Json
from moe_jax.loading._errors import CheckpointError, listed, parse_json_object, shorten, shown

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors package
MAX_NAME = 1000  # characters; real names have under 200, and some work grows with their square
MAX_DIMENSIONS = 32  # that of NumPy 1; NumPy 2 has 64
_READ_BYTES = 1 << 30  # a call of the system reads 2 GB at most
_BUFFER_BYTES = 1 << 24
_METADATA = "__metadata__"
_FIELDS = {"dtype", "shape", "data_offsets"}

DTYPES: dict[str, np.dtype] = {
    name: np.dtype(scalar)
    for name, scalar in {
        "BOOL": np.bool_,
        "U8": np.uint8,
        "I8": np.int8,
        "F8_E5M2": ml_dtypes.float8_e5m2,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E8M0": ml_dtypes.float8_e8m0fnu,
        "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
        "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
        "I16": "<i2",
        "U16": "<u2",
        "F16": "<f2",
        "BF16": ml_dtypes.bfloat16,
        "I32": "<i4",
        "U32": "<u4",
        "F32": "<f4",
        "C64": "<c8",
        "F64": "<f8",
        "I64": "<i8",
        "U64": "<u8",
    }.items()
}
# Several elements share bytes and NumPy has no packed dtypes: these are read as their raw bytes.
PACKED_BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}


class TensorInfo(NamedTuple):
    """One tensor of a checkpoint as its header describes it.

    dtype: the format's name ("BF16", "F8_E4M3", "F4"). numpy_dtype: what ``read`` returns; uint8 for packed kinds.
    shape: of the array that ``read`` returns. For packed kinds the header's last dimension counts elements and this one
    bytes; when rows do not end on whole bytes, shape is (number of bytes,). file: path of the file. start: position of
    the data, counted from the end of the header. nbytes: size of the data.
    """

    name: str
    dtype: str
    numpy_dtype: np.dtype
    shape: tuple[int, ...]
    file: str
    start: int
    nbytes: int

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


class SafetensorsFile:
    """An open safetensors file. Arrays are read when they are asked for; rows not asked for are not read.

    The whole header is validated on opening; any flaw raises CheckpointError. All methods may be called from several
    threads.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path: Path = Path(path)
        self._lock = threading.Lock()
        self._bytes_read = 0
        if not self.path.is_file():
            raise CheckpointError(f"{self.path}: {_why_not_a_file(self.path)}")
        try:
            self._descriptor: _Descriptor | None = _Descriptor(self.path)
            with open(self._descriptor.number, "rb", closefd=False) as file:
                self._state = _state(file.fileno())
                size = self._state[0]
                header, self._data_start = _read_header(file, size, str(self.path))
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be read: {error.strerror}") from None
        self.metadata: dict[str, str] = _metadata(header.pop(_METADATA, None), str(self.path))
        self._infos = _tensor_infos(header, size - self._data_start, str(self.path))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors, in the order of their data."""
        return tuple(self._infos)

    @property
    def infos(self) -> dict[str, TensorInfo]:
        """Name -> TensorInfo; not to be changed."""
        return self._infos

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors' data."""
        return sum(info.nbytes for info in self._infos.values())

    @property
    def bytes_read(self) -> int:
        """Bytes of data handed out by ``read`` so far."""
        return self._bytes_read

    def info(self, name: str) -> TensorInfo:
        """Raises CheckpointError when the file has no such tensor."""
        try:
            return self._infos[name]
        except KeyError:
            raise CheckpointError(f"{self.path}: no tensor {shorten(name)}") from None

    def read(self, name: str, rows: slice | None = None, columns: slice | None = None) -> np.ndarray:
        """The tensor, or a range of its first and its last axis, as a read-only array.

        rows, columns: slices with step 1; like any slice they are cut to the axis. Raises CheckpointError when the
        tensor is missing or cannot be read, ValueError when a slice does not fit the tensor or the file is closed.
        """
        info = self.info(name)
        descriptor = self._descriptor
        if descriptor is None:
            raise ValueError(f"{self.path}: read of {shorten(name)} after close()")
        shape, offset = info.shape, self._data_start + info.start
        if rows is not None:
            if not shape or (info.dtype in PACKED_BITS and len(shape) == 1):
                raise ValueError(f"{self.path}: tensor {shorten(name)} ({info}) has no rows to select")
            first, last, step = rows.indices(shape[0])
            if step != 1:
                raise ValueError(f"{self.path}: rows={rows} of {shorten(name)}: only slices with step 1 can be read")
            row_bytes = info.nbytes // shape[0] if shape[0] else 0
            shape, offset = (max(last - first, 0), *shape[1:]), offset + first * row_bytes
        if columns is None:
            array = np.empty(shape, info.numpy_dtype)
            self._fill(array, descriptor, offset, name)
        else:
            if len(shape) < 2 or columns.indices(shape[-1])[2] != 1:
                raise ValueError(f"{self.path}: tensor {shorten(name)} ({info}) has no columns={columns} to select")
            array = self._columns(shape, info, columns, descriptor, offset)
        array.flags.writeable = False
        with self._lock:
            self._bytes_read += array.nbytes
        return array

    def expect_scattered_reads(self) -> None:
        """Tell the system not to read ahead: only small, scattered tensors will be wanted."""
        if self._descriptor is not None and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor.number, 0, 0, os.POSIX_FADV_RANDOM)

    def check_unchanged(self) -> None:
        """Raises CheckpointError when the file was written to since it was opened: what was read is then a mixture."""
        if self._descriptor is not None and _state(self._descriptor.number) != self._state:
            raise CheckpointError(f"{self.path}: was written to while it was read; wait for the writer and try again")

    def close(self) -> None:
        """Give up the file; it is closed with the last read that is under way."""
        self._descriptor = None

    def _columns(
        self, shape: tuple[int, ...], info: TensorInfo, columns: slice, descriptor: "_Descriptor", offset: int
    ) -> np.ndarray:
        """Whole rows pass through a buffer; of each only the columns stay."""
        first, last, _ = columns.indices(shape[-1])
        array = np.empty((prod(shape[:-1]), max(last - first, 0)), info.numpy_dtype)
        row_bytes = shape[-1] * info.numpy_dtype.itemsize
        step = max(1, _BUFFER_BYTES // max(row_bytes, 1))
        for start in range(0, len(array) if array.size else 0, step):
            part = np.empty((min(step, len(array) - start), shape[-1]), info.numpy_dtype)
            self._fill(part, descriptor, offset + start * row_bytes, info.name)
            array[start : start + step] = part[:, columns]
        return array.reshape((*shape[:-1], array.shape[1]))

    def _fill(self, array: np.ndarray, descriptor: "_Descriptor", offset: int, name: str) -> None:
        rest = array.reshape(-1).view(np.uint8).data if array.size else memoryview(b"")
        while rest:
            try:
                count = os.preadv(descriptor.number, [rest[:_READ_BYTES]], offset)
            except OSError as error:
                raise CheckpointError(f"{self.path}: tensor {shorten(name)} cannot be read: {error.strerror}") from None
            if not count:
                raise CheckpointError(
                    f"{self.path}: tensor {shorten(name)}: the file ends at {offset}, {len(rest)} bytes too early; "
                    "it was cut while it was read"
                )
            rest, offset = rest[count:], offset + count

    def __enter__(self) -> "SafetensorsFile":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Descriptor:
    """An open file that is closed with its last user, so that no thread reads from a number that is another file's."""

    def __init__(self, path: Path):
        self.number = os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError):
            os.close(self.number)


def _state(descriptor: int) -> tuple[int, int]:
    """What tells that somebody wrote to a file: its size, and the time of the last change in ns."""
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns


def save_safetensors(
    path: str | os.PathLike[str], tensors: Mapping[str, AnyArray], metadata: dict[str, str] | None = None
) -> None:
    """Write arrays (NumPy or JAX, any dtype of the format) as one safetensors file, with the safetensors package."""
    from safetensors.numpy import save_file

    arrays = {name: np.ascontiguousarray(array).reshape(np.shape(array)) for name, array in tensors.items()}
    save_file(arrays, os.fspath(path), metadata={"format": "pt"} if metadata is None else metadata)


def _why_not_a_file(path: Path) -> str:
    if path.is_symlink() and not path.exists():
        return f"a link to {os.readlink(path)}, which does not exist; download the checkpoint again"
    return "not a regular file" if path.exists() else "no such file; download the checkpoint again"


def _read_header(file: BinaryIO, size: int, where: str) -> tuple[dict[str, Any], int]:
    """(header as a dict, position of the first data byte)."""
    if size < 8:
        raise CheckpointError(f"{where}: {size} bytes, expected at least 8; not a safetensors file or truncated")
    (length,) = struct.unpack("<Q", file.read(8))
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{where}: header length {length}, expected at most {MAX_HEADER_BYTES}; not a safetensors file or damaged"
        )
    if 8 + length > size:
        raise CheckpointError(
            f"{where}: header of {length} bytes in a file of {size}; the file is truncated, download it again"
        )
    data = file.read(length)
    if data[:1] != b"{":
        raise CheckpointError(
            f"{where}: header starts with {data[:1]!r}, expected b'{{'; not a safetensors file or damaged"
        )
    return parse_json_object(data, f"{where}: header"), 8 + length


def _metadata(value: object, where: str) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
        raise CheckpointError(f"{where}: {_METADATA} is {shown(value)}, expected a map of strings to strings")
    return value


def _tensor_infos(header: Json, data_bytes: int, where: str) -> dict[str, TensorInfo]:
    """Validate all entries; returns them in the order of their data."""
    infos = [_tensor_info(name, entry, where) for name, entry in header.items()]
    infos.sort(key=lambda info: (info.start, info.nbytes))
    position = 0
    for info in infos:
        if info.start != position:
            problem = "overlaps the tensor before it" if info.start < position else "leaves a hole before it"
            found = f"data_offsets start at {info.start}, expected {position}"
            raise CheckpointError(f"{where}: tensor {shorten(info.name)}: {found}: it {problem}")
        position += info.nbytes
    if position > data_bytes:
        missing = [info.name for info in infos if info.start + info.nbytes > data_bytes]
        raise CheckpointError(
            f"{where}: {data_bytes} bytes of data, expected {position}; "
            f"the file is truncated in {listed(missing, 1)}, download it again"
        )
    if position < data_bytes:
        raise CheckpointError(
            f"{where}: {data_bytes - position} bytes after the last tensor, expected none; the file is damaged"
        )
    return {info.name: info for info in infos}


def _tensor_info(name: str, entry: object, where: str) -> TensorInfo:
    try:
        if len(name) > MAX_NAME:
            raise ValueError(f"its name has {len(name)} characters, expected at most {MAX_NAME}")
        dtype, numpy_dtype, shape, start, nbytes = _check_entry(entry)
    except ValueError as error:
        raise CheckpointError(f"{where}: tensor {shorten(name)}: {error}") from None
    return TensorInfo(name, dtype, numpy_dtype, shape, where, start, nbytes)


def _check_entry(entry: object) -> tuple[str, np.dtype, tuple[int, ...], int, int]:
    """Validate one entry by itself: (dtype, dtype in NumPy, shape, start, nbytes). Raises ValueError."""
    if type(entry) is not dict or entry.keys() != _FIELDS:
        raise ValueError(f"expected dtype, shape and data_offsets, found {shown(entry)}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if type(dtype) is not str or (dtype not in DTYPES and dtype not in PACKED_BITS):
        raise ValueError(f"dtype {shown(dtype)} is unknown, expected one of {', '.join([*DTYPES, *PACKED_BITS])}")
    if type(shape) is not list or len(shape) > MAX_DIMENSIONS or not all(type(n) is int and n >= 0 for n in shape):
        raise ValueError(f"shape {shown(shape)}, expected at most {MAX_DIMENSIONS} integers >= 0")
    if type(offsets) is not list or len(offsets) != 2 or not all(type(n) is int and n >= 0 for n in offsets):
        raise ValueError(f"data_offsets {shown(offsets)}, expected two integers >= 0")
    is_packed = dtype in PACKED_BITS
    bits = PACKED_BITS[dtype] if is_packed else 8 * DTYPES[dtype].itemsize
    # The product without the zeros too: NumPy cannot address an empty array with such strides.
    if prod(n for n in shape if n) * bits >= 2**63:
        raise ValueError(f"shape {shown(shape)} of {dtype} overflows 64 bits")
    size = prod(shape) * bits
    if size % 8:
        raise ValueError(f"shape {shape} of {dtype} does not fill whole bytes")
    start, end = offsets
    if end - start != size // 8:
        raise ValueError(f"data_offsets {offsets} span {end - start} bytes, expected {size // 8} for {dtype} {shape}")
    if is_packed:
        return dtype, DTYPES["U8"], tuple(_byte_shape(shape, bits)), start, end - start
    return dtype, DTYPES[dtype], tuple(shape), start, end - start


def _byte_shape(shape: list[int], bits: int) -> list[int]:
    """Shape in bytes of a packed tensor: whole rows where a row ends on a byte, else one flat run."""
    if shape and shape[-1] * bits % 8 == 0:
        return [*shape[:-1], shape[-1] * bits // 8]
    return [prod(shape) * bits // 8]
