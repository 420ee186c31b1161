"""Files that commands write: whole or not at all, and never through a link into something else.

What is being written is remembered, so that whoever ends the process can remove it (``discard_partials``).
"""

import contextlib
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

MARKER = ".moe-jax-partial"  # in every directory that is removed as unfinished: nobody else's holds it
_partials: set[Path] = set()
_made: list[Path] = []  # directories above them


def check_output(path: Path, what: str) -> None:
    """Raises ValueError unless ``write_output`` can write there. what: the option or file, for messages."""
    _is_stream(path, what)
    parent = path.absolute().parent
    if not parent.is_dir():
        raise ValueError(f"{what} {path}: the directory {parent} does not exist")
    if not os.access(path if path.exists() else parent, os.W_OK):
        raise ValueError(f"{what} {path}: no permission to write it")


def write_output(path: Path, chunks: Iterable[bytes | memoryview], what: str = "output") -> None:
    """Write a file in one step: a reader finds all of it, or what was there before.

    A regular file is replaced and keeps its permissions; a new one gets those of the umask. Into a device or a FIFO
    that exists the bytes are written as they come.

    Raises:
        ValueError: a directory, a link to a file, a block device or a socket. OSError: as the system says.
    """
    if _is_stream(path, what):
        with open(os.open(path, os.O_WRONLY | os.O_NOCTTY), "wb", buffering=0) as stream:
            if stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                raise ValueError(f"{what} {path}: became a regular file meanwhile; nothing was written")
            try:
                _write(stream.fileno(), chunks)
            except BrokenPipeError:
                raise OSError(f"{what} {path}: its reader has gone") from None
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(path)) from None
        return
    with partial(path.with_name(f".moe-jax-{os.urandom(8).hex()}.partial")) as fresh:
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            with contextlib.suppress(FileNotFoundError):
                os.fchmod(fd, stat.S_IMODE(os.lstat(path).st_mode) & 0o777)
            _write(fd, chunks)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(fresh, path)


@contextlib.contextmanager
def partial(path: Path) -> Iterator[Path]:
    """``path``, a file or directory that the block makes and renames; it is removed if the block raises."""
    _partials.add(path)
    try:
        yield path
    except BaseException:
        remove(path)
        raise
    finally:
        _partials.discard(path)


@contextlib.contextmanager
def parents_made(path: Path) -> Iterator[None]:
    """Every directory above ``path`` exists in the block; those that were missing are removed if it raises."""
    made: list[Path] = []
    try:
        for parent in reversed([parent for parent in path.absolute().parents if not parent.exists()]):
            with contextlib.suppress(FileExistsError):  # another process was faster, and it is its own
                parent.mkdir()
                made.append(parent)
                _made.append(parent)
        yield
    except BaseException:
        _remove_empty(made)
        raise
    finally:
        for parent in made:
            _made.remove(parent)


def nearest_directory(path: Path) -> Path:
    """The nearest of what is above ``path`` that exists, which need not be a directory."""
    return next(parent for parent in path.absolute().parents if os.path.lexists(parent))


def remove(path: Path) -> None:
    """Remove a file or directory as far as possible. A directory's marker goes last, so that the rest stays known."""
    with contextlib.suppress(OSError):
        if not path.is_dir():
            path.unlink()
            return
        for entry in os.scandir(path):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry, ignore_errors=True)
            elif entry.name != MARKER:
                os.unlink(entry)
        shutil.rmtree(path, ignore_errors=True)


def discard_partials() -> None:
    """Remove all that is being written. Callable from any thread; the writer fails or finds that it has finished."""
    for path in tuple(_partials):
        aside = path.with_name(f"{path.name}-ended")
        with contextlib.suppress(OSError):
            os.rename(path, aside)  # from here on the writer can neither add to it nor give it its final name
            remove(aside)
    _remove_empty(tuple(_made))


def _remove_empty(directories: Sequence[Path]) -> None:
    """directories: outermost first. What somebody else put something into stays."""
    for directory in reversed(directories):
        with contextlib.suppress(OSError):
            directory.rmdir()


def _is_stream(path: Path, what: str) -> bool:
    """Whether bytes are written into what is there. Raises ValueError for what nobody writes a file to."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return False
    is_link = stat.S_ISLNK(mode)
    if is_link:
        with contextlib.suppress(OSError):
            mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        raise ValueError(f"{what} {path} is a directory, expected the path of a file")
    if stat.S_ISCHR(mode) or stat.S_ISFIFO(mode):
        return True
    if is_link:
        raise ValueError(f"{what} {path} is a link to {os.readlink(path)}; give the path of the file itself")
    if not stat.S_ISREG(mode):
        raise ValueError(f"{what} {path} is a block device or a socket, expected the path of a file")
    return False


def _write(fd: int, chunks: Iterable[bytes | memoryview]) -> None:
    for chunk in chunks:
        view = memoryview(chunk).cast("B")
        while view:  # a call writes 2 GB at most
            view = view[os.write(fd, view) :]
