"""A directory that appears complete or not at all."""

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from moe_jax._output import MARKER, nearest_directory, parents_made, partial, remove

try:
    import fcntl
except ImportError:  # not a POSIX system: leftovers of killed runs are then not removed
    fcntl = None


def check_destination(path: Path) -> None:
    """Raises ValueError unless ``path``, which is absent or an empty directory, can become a new one. Directories above
    it may be missing too."""
    if path.is_symlink():
        raise ValueError(f"{path}: is a link to {os.readlink(path)}; choose a destination that is no link")
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path}: exists and is no directory; choose another destination")
    if path.is_dir() and any(path.iterdir()):
        raise ValueError(f"{path}: exists and is not empty; choose another destination or remove it")
    above = nearest_directory(path)
    if not above.is_dir():
        raise ValueError(f"{path}: {above} is no directory; choose another destination")
    if not os.access(above, os.W_OK | os.X_OK):
        raise ValueError(f"{path}: no permission to write in {above}; choose another destination")


@contextlib.contextmanager
def staged(path: Path) -> Iterator[Path]:
    """A temporary directory beside ``path`` that takes its name when the block ends, and vanishes if it raises.
    Directories above ``path`` that are missing are made, and vanish too.

    What a killed run leaves behind is hidden (``.NAME.partial-...``) and removed by the next run for the same path. Its
    marker decides, and that it is the user's own: other directories of such a name stay.
    """
    path = path.absolute()
    prefix = f".{path.name}.partial-"
    for leftover in path.parent.glob(f"{_escaped(prefix)}*"):
        with contextlib.suppress(OSError), _locked(leftover) as is_ours:
            marker = os.lstat(leftover / MARKER)
            if is_ours and stat.S_ISREG(marker.st_mode) and marker.st_uid == os.geteuid():
                remove(leftover)
    fresh = path.with_name(f"{prefix}{os.urandom(8).hex()}")
    with parents_made(path), partial(fresh) as directory:
        directory.mkdir()
        with _locked(directory):
            (directory / MARKER).touch()  # once nobody else can take the directory for a leftover
            yield directory
            if path.is_dir():
                directory.chmod(stat.S_IMODE(path.stat().st_mode))
            _sync(directory)
            os.rename(directory, path)  # over an empty directory as well
            with contextlib.suppress(OSError):
                (path / MARKER).unlink()
            _sync(path.parent)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[bool]:
    """Whether this process has the directory to itself; the system ends the claim with the process."""
    if fcntl is None:
        yield False
        return
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(fd)


def _sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _escaped(text: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in text)
