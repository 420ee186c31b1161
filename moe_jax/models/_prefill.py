"""Prompts that are too long for one call of the model: read in chunks of one shape, each behind the ones before it."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from moe_jax.models import _loop
from moe_jax.models._compiled import SMALLEST_BUCKET

MAX_NUM_BATCHED_TOKENS = 8192


class Prefill:
    """Prompts on their way through the model.

    ids, mask: (B, P) int32 and bool, padded to whole chunks. chunk: columns of a call, P where one call does.

    Args:
        progress: called as ``progress(done, total)`` with tokens where there are several chunks.
    """

    def __init__(
        self,
        model: Any,
        ids: np.ndarray,
        mask: np.ndarray,
        progress: Callable[[int, int], None] | None = None,
    ):
        self._model, self._progress = model, progress
        rows, length = ids.shape
        self.chunk = chunk_length(rows, length, model.max_num_batched_tokens)
        tail = ((0, 0), (0, -length % self.chunk))
        self.ids, self.mask = np.pad(ids, tail), np.pad(mask, tail)

    def read(self, structure: Any, leaves: list[Any], num_slots: int, load: Any) -> Any:
        """``_loop.Reading`` of all but the last chunk, in a cache of ``num_slots``; None where there is one chunk.

        load: zeros in the shape of the load.
        """
        rows, length = self.ids.shape
        if length == self.chunk:
            return None
        sizes = (self._model.config, rows, num_slots, self._model.dtype)
        reading = self._model.laid_out(functools.partial(_loop.unread, *sizes, load))
        lengths = self.mask.sum(axis=1, dtype=np.int32)
        for end in range(self.chunk, length, self.chunk):
            part = slice(end - self.chunk, end)
            if self.mask[:, part].any():
                reading = _loop.read(structure, leaves, reading, (self.ids[:, part], self.mask[:, part], lengths))
                self._tell(reading.hidden, end)
        return reading

    def done(self, state: Any) -> None:
        """Tell that the last chunk, which made ``state``, has been read."""
        if self.chunk < self.ids.shape[1]:
            self._tell(state.token, self.ids.shape[1])

    def _tell(self, made: Any, end: int) -> None:
        if self._progress is not None:
            jax.block_until_ready(made)
            self._progress(int(self.mask[:, :end].sum()), int(self.mask.sum()))


def chunk_length(rows: int, length: int, most: int) -> int:
    """Columns of (rows, length) tokens to read at once: all if those are ``most`` tokens, else a power of two."""
    if rows * length <= most:
        return length
    return min(length, max(SMALLEST_BUCKET, 1 << (max(most // rows, 1).bit_length() - 1)))
