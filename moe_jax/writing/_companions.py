"""The files beside the weights: tokenizer, generation settings, chat template. Which are copied, and which are left.

A checkpoint comes from anybody. A link in it may lead to a file of the user that nobody else may read, so links are
followed only inside the checkpoint, or from a snapshot of a Hugging Face cache to its ``blobs``.
"""

import dataclasses
import os
import stat
from collections.abc import Collection
from pathlib import Path
from types import MappingProxyType

from moe_jax.loading import CheckpointError
from moe_jax.loading.files._checkpoint import INDEX_FILE

MAX_FILE_BYTES = 128 << 20  # tokenizers take up to 40 MB
_SUFFIXES = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".md")
_STARTS = ("LICENSE", "NOTICE")
_CODE = (".py", ".so", ".sh", ".ipynb")
_OF_THE_SOURCE = ("hf_quant_config.json", "quantize_config.json", "quantization_config.json")
_CHUNK = 1 << 20


@dataclasses.dataclass(frozen=True)
class _File:
    """path: without links. state: size and time of the last change, by which a copy knows that it is of this file."""

    name: str
    path: Path
    state: tuple[int, int]


class Companions:
    """What lies in a source directory beside config.json and the weights.

    names: of the files that are copied. left: name -> why it is not.

    Raises:
        CheckpointError: config.json is a link that leads out of the source, or the directory cannot be read.
    """

    def __init__(self, source: Path, weights: Collection[str]):
        self._source = source
        self._files: list[_File] = []
        left: dict[str, str] = {}
        try:
            roots = _roots(source)
            config = source / "config.json"
            if not _is_inside(_real(config), roots):
                raise CheckpointError(
                    f"{config}: is a link to {_real(config)}, outside of the source; what is written would hold its "
                    "contents: put a copy there"
                )
            for path in sorted(source.iterdir()):
                if path.name in (*weights, config.name, INDEX_FILE):
                    continue
                reason = self._add(path, roots)
                if reason:
                    left[path.name] = reason
        except OSError as error:
            raise CheckpointError(f"{error.filename or source}: cannot be read: {error.strerror}") from None
        self.left = MappingProxyType(left)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(file.name for file in self._files)

    @property
    def nbytes(self) -> int:
        return sum(file.state[0] for file in self._files)

    def copy(self, directory: Path) -> None:
        """Copy them, with the permissions they have, as far as the umask allows.

        Raises:
            CheckpointError: a file that cannot be read, or is not as it was. OSError: a copy that cannot be written.
        """
        for file in self._files:
            with open(self._open(file), "rb") as reader:
                mode = stat.S_IMODE(os.fstat(reader.fileno()).st_mode) & 0o666
                fd = os.open(directory / file.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
                with open(fd, "wb") as writer:
                    rest = file.state[0]
                    while chunk := self._read(reader, file, min(rest, _CHUNK)):
                        writer.write(chunk)
                        rest -= len(chunk)
                    writer.flush()
                    os.fsync(fd)
                if rest or _state(os.fstat(reader.fileno())) != file.state:
                    raise self._changed(file)

    def _add(self, path: Path, roots: tuple[Path, ...]) -> str:
        """Take a file, or say why not."""
        if path.suffix in _CODE:
            return "code"
        if path.name in _OF_THE_SOURCE or path.name.endswith(".index.json"):
            return "describes the weights of the source"
        real = _real(path)
        if not _is_inside(real, roots):
            return f"a link to {real}, outside of the source"
        status = real.stat() if real.exists() else None
        if status is None or not stat.S_ISREG(status.st_mode):
            return "no file" if status is None or not real.is_dir() else "a directory"
        if path.suffix not in _SUFFIXES and not path.name.startswith(_STARTS):
            return "not known to belong to a checkpoint"
        if status.st_size > MAX_FILE_BYTES:
            return f"{status.st_size} bytes, more than {MAX_FILE_BYTES}"
        self._files.append(_File(path.name, real, _state(status)))
        return ""

    def _open(self, file: _File) -> int:
        try:
            fd = os.open(file.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            raise CheckpointError(f"{self._source / file.name}: cannot be read: {error.strerror}") from None
        if _state(os.fstat(fd)) != file.state:
            os.close(fd)
            raise self._changed(file)
        return fd

    def _read(self, reader, file: _File, size: int) -> bytes:
        try:
            return reader.read(size)
        except OSError as error:
            raise CheckpointError(f"{self._source / file.name}: cannot be read: {error.strerror}") from None

    def _changed(self, file: _File) -> CheckpointError:
        return CheckpointError(f"{self._source / file.name}: was written to while the checkpoint was read; try again")


def _state(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns


def _real(path: Path) -> Path:
    return Path(os.path.realpath(path))  # which takes a circle of links as a path that is not there


def _roots(source: Path) -> tuple[Path, ...]:
    """Directories that links may lead into."""
    real = _real(source)
    repository = real.parent.parent  # of a Hugging Face cache: REPOSITORY/snapshots/REVISION, with REPOSITORY/blobs
    is_snapshot = real.parent.name == "snapshots" and (repository / "blobs").is_dir()
    return (real, repository / "blobs") if is_snapshot else (real,)


def _is_inside(path: Path, roots: tuple[Path, ...]) -> bool:
    return any(path.is_relative_to(root) for root in roots)
