"""Locks between processes that share a GPU: one times alone, several make operands at the same time."""

import contextlib
import fcntl
import os
from collections.abc import Iterator

_MAKERS = 6  # processes that make weights at the same time: temporaries of a large layer take 10 GB


@contextlib.contextmanager
def locked(path: str | None, mode: int = fcntl.LOCK_EX) -> Iterator[None]:
    """Hold the lock file at path, alone or with ``LOCK_SH`` beside others that share it. None: there is no lock."""
    if path is None:
        yield
        return
    with open(path, "w") as file:
        fcntl.flock(file, mode)
        yield


@contextlib.contextmanager
def making(lock: str | None) -> Iterator[None]:
    """One of ``_MAKERS`` places, and the lock shared: weights are made while nobody is timed."""
    if lock is None:
        yield
        return
    with locked(f"{lock}.{os.getpid() % _MAKERS}"), locked(lock, fcntl.LOCK_SH):
        yield
