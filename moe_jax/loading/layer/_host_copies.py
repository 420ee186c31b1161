"""Copies into host buffers, made by threads so that files are read in parallel, and the buffers themselves."""

import collections
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any

import numpy as np

_ALIGNMENT = 64  # of host memory that XLA's CPU client takes over without a copy
_BATCH_BYTES = 4 << 20  # one job for a thread; handing over a small tensor takes longer than copying it
_MOST_PENDING = 16  # jobs that wait for a thread; each keeps its arrays


class TensorError(ValueError):
    """What a thread found wrong in a tensor that was accepted before. name: the tensor's."""

    def __init__(self, name: str, message: str):
        super().__init__(message)
        self.name = name


class HostCopies:
    """Hands copies to the threads of an executor, several small ones together.

    failure: the first error of a thread; what is in the buffers is then not to be used.
    """

    def __init__(self, executor: Executor):
        self._executor = executor
        self._batch: list[tuple[str, Callable[[], None]]] = []
        self._batch_bytes = 0
        self._pending: collections.deque[Future[None]] = collections.deque()
        self.failure: Exception | None = None

    def add(self, name: str, copy: Callable[[], None], nbytes: int) -> None:
        """``copy`` will run in a thread. Raises TensorError for what earlier ones found wrong."""
        self._batch.append((name, copy))
        self._batch_bytes += nbytes
        if self._batch_bytes >= _BATCH_BYTES:
            self._submit()
            self._wait(_MOST_PENDING)

    def finish(self) -> None:
        """Wait for all copies. Raises TensorError for the first that found something wrong."""
        self._submit()
        self._wait(0)
        if self.failure is not None:
            raise self.failure

    def _submit(self) -> None:
        if self._batch:
            self._pending.append(self._executor.submit(_run, self._batch))
            self._batch, self._batch_bytes = [], 0

    def _wait(self, most: int) -> None:
        while len(self._pending) > most:
            try:
                self._pending.popleft().result()
            except Exception as error:
                self.failure = self.failure or error
                raise self.failure from None


def _run(batch: list[tuple[str, Callable[[], None]]]) -> None:
    for name, copy in batch:
        try:
            copy()
        except ValueError as error:
            raise TensorError(name, str(error)) from None


def aligned_zeros(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Zeros that the CPU client of XLA can take over without a copy."""
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.zeros(nbytes + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + nbytes].view(dtype).reshape(shape)
