"""Prompts of any lengths in packs: a prefill reads several of them in one row, with hardly any padding.

A pack is (rows, columns) of tokens of a few fixed sizes. The longest prompt that waits goes first, then each time the
longest one that still fits behind it. Prompts that begin alike read what they share once: it stays in a cache of one
row, and packs of one row go on from there. So does a prompt that is longer than a call of the model may be: it is read
in parts, of which all but the last are "shared" by this one prompt.
"""

import bisect
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from moe_jax.models._compiled import bucket
from moe_jax.models._loop import Pack
from moe_jax.models._prefill import chunk_length
from moe_jax.models._shared_prefixes import shared_prefixes

PACK_TOKENS = 2048  # of packs whose prompts are all shorter
LEAST_SAVED = 1024  # tokens that sharing has to save, since it takes a program more
_LEAST_COLUMNS, _LEAST_TOKENS = 128, 64
_MOST_SIZES = 4  # of packs
_FULL = 0.85  # of a pack: of those that are so full the largest one is made, else the fullest
_TOKENS_A_PROMPT = 16  # a pack of n tokens has at most n / 16 prompts


@dataclasses.dataclass
class _Queue:
    """Prompts that wait and begin alike: (tokens of its own, index) each, the shortest first. prefix: what they share,
    (n,) int32."""

    prefix: np.ndarray
    waiting: list[tuple[int, int]]


@dataclasses.dataclass(frozen=True)
class Shape:
    """Of a pack: (rows, columns), and prompts in it at most."""

    rows: int
    columns: int
    most: int

    @classmethod
    def create(cls, tokens: int, longest: int, batch: int, *, is_row: bool) -> "Shape":
        columns = tokens if is_row else min(tokens, max(_LEAST_COLUMNS, bucket(longest)))
        return cls(tokens // columns, columns, min(batch, max(1, tokens // _TOKENS_A_PROMPT)))

    @property
    def tokens(self) -> int:
        return self.rows * self.columns


class Packs:
    """The prompts of one cache on their way into its rows.

    Args:
        prompts: of the whole call. indices: those that share this cache.
        batch: rows of the cache.
        max_num_batched_tokens: of the model.
        is_shared: prompts that begin alike read it once.
        most_shapes: programs for packs that these prompts may take.
    """

    def __init__(
        self,
        prompts: Sequence[np.ndarray],
        indices: Sequence[int],
        *,
        batch: int,
        max_num_batched_tokens: int,
        is_shared: bool,
        most_shapes: int,
    ):
        self._prompts, self._batch, self._held = prompts, batch, 0
        lengths = [len(prompts[index]) for index in indices]
        of_rows = batch * sum(lengths) // len(lengths)  # tokens, when all rows get a prompt
        whole = max(bucket(max(lengths)), min(PACK_TOKENS, bucket(min(sum(lengths), of_rows))))
        tokens = chunk_length(1, whole, max_num_batched_tokens)
        self._queues = self._divided(indices, tokens, is_shared)
        plain = [own for queue in self._queues if not len(queue.prefix) for own, _ in queue.waiting]
        has_row = any(len(queue.prefix) for queue in self._queues)
        longest = max(plain, default=0)
        most = most_shapes // 2 if has_row and plain else most_shapes
        sizes = _sizes(tokens, of_rows // 4, most)
        self._row_shapes = [Shape.create(size, size, batch, is_row=True) for size in sizes if has_row]
        self._pack_shapes = [Shape.create(size, longest, batch, is_row=False) for size in sizes if plain]
        longest_prefix = max((len(queue.prefix) for queue in self._queues), default=0)
        self.row_slots: int = bucket(longest_prefix + tokens) if has_row else 0
        self.num_read, self.num_slots = 0, 0  # tokens read so far, and with padding

    def _divided(self, indices: Sequence[int], tokens: int, is_shared: bool) -> list[_Queue]:
        """Prompts that share something, and those too long for one pack, in queues of their own."""
        queues, left = [], dict.fromkeys(indices)
        given = [self._prompts[index] for index in indices]
        for length, members in shared_prefixes(given, LEAST_SAVED) if is_shared else []:
            own = [indices[member] for member in members if len(given[member]) - length <= tokens]
            if (len(own) - 1) * length >= LEAST_SAVED:
                queues.append(self._queue(length, own))
                for index in own:
                    del left[index]
        for index in [index for index in left if len(self._prompts[index]) > tokens]:
            queues.append(self._queue((len(self._prompts[index]) - 1) // tokens * tokens, [index]))
            del left[index]
        queues.sort(key=lambda queue: -len(queue.prefix) - queue.waiting[-1][0])
        return [*queues, *([self._queue(0, [*left])] if left else [])]

    def _queue(self, length: int, indices: Sequence[int]) -> _Queue:
        waiting = sorted((len(self._prompts[index]) - length, index) for index in indices)
        return _Queue(self._prompts[indices[0]][:length], waiting)

    def __bool__(self) -> bool:
        """Whether prompts wait."""
        return bool(self._queues)

    def fewest(self) -> int:
        """Rows that have to be free before prompts are taken in: as many as fill the smallest pack that the longest one
        fits into, but no more than a quarter of all."""
        queue, shapes = self._queues[0], self._shapes()
        shape = next((shape for shape in shapes if shape.columns >= queue.waiting[-1][0]), shapes[-1])
        return max(1, min(len(_placed(queue.waiting, shape, shape.most)), self._batch // 4))

    def next(
        self,
        free: Sequence[int],
        vocab_size: int | None,
        *,
        takes: Callable[[list[int]], bool] = lambda indices: True,
    ) -> tuple[Pack, bool, list[int]]:
        """(a pack, whether it goes on from the row of what is shared, indices of its prompts). All its tokens may be
        shared ones, and then it has no prompt.

        free: rows without a prompt, of which the first ones get one. vocab_size: to tell which tokens each prompt has,
        None where nobody asks. takes: whether there is memory for the prompts of these indices; one for which there is
        none keeps the shorter ones behind it waiting.
        """
        queue, shapes = self._queues[0], self._shapes()
        prefix = queue.prefix[self._held :]
        begin = min(len(prefix), shapes[-1].columns)
        shapes = [shape for shape in shapes if begin <= shape.columns]
        ways = [(_placed(queue.waiting, shape, min(len(free), shape.most), begin, takes), shape) for shape in shapes]

        def worth(way: tuple[Any, Shape]) -> tuple[float, int]:
            num_tokens = begin + sum(own for _, _, own, _ in way[0])
            return min(num_tokens / way[1].tokens, _FULL), way[1].tokens

        placed, shape = max(ways, key=worth)
        ids, segments = np.zeros((2, shape.rows, shape.columns), np.int32)
        ids[0, :begin], segments[0, :begin] = prefix[:begin], 1
        length, most = len(queue.prefix), shape.most
        first, lengths, rows = np.zeros(most, np.int32), np.ones(most, np.int32), np.full(most, self._batch, np.int32)
        lengths += length
        seen = None if vocab_size is None else np.zeros((most, vocab_size), bool)
        for at, (row, column, own, index) in enumerate(placed):
            prompt, columns = self._prompts[index], slice(column, column + own)
            ids[row, columns], segments[row, columns] = prompt[length:], at + 2
            first[at], lengths[at], rows[at] = row * shape.columns + column + self._held, len(prompt), free[at]
            if seen is not None:
                seen[at, prompt] = True
        arrays: dict[str, Any] = dict(ids=ids, segments=segments, first=first, lengths=lengths, rows=rows, seen=seen)
        arrays |= dict(held=np.int32(self._held), shared=np.int32(length))
        taken = {(own, index) for _, _, own, index in placed}
        queue.waiting = [entry for entry in queue.waiting if entry not in taken]
        self._held += begin
        self.num_read += begin + sum(own for own, _ in taken)
        self.num_slots += shape.tokens
        if not queue.waiting:
            self._queues.pop(0)
            self._held = 0
        return Pack(**arrays), bool(length), [index for _, _, _, index in placed]

    @property
    def num_queues(self) -> int:
        """Of prompts that wait; those of a queue share what they begin with."""
        return len(self._queues)

    def ahead(self) -> tuple[int, int]:
        """(tokens that the prompts of the first queue share, index of the longest of them)."""
        return len(self._queues[0].prefix), self._queues[0].waiting[-1][1]

    def shared_tokens(self) -> list[tuple[int, list[int]]]:
        """(tokens that they share, indices of the prompts) of all queues."""
        return [(len(queue.prefix), [index for _, index in queue.waiting]) for queue in self._queues]

    def most_rows(self, slots: int) -> int:
        """Pieces of so many slots that the rows of a pack have at most."""
        return max(shape.rows * -(-shape.columns // slots) for shape in (*self._row_shapes, *self._pack_shapes))

    def _shapes(self) -> list[Shape]:
        """Of packs for the queue whose turn it is, the smallest first."""
        return self._row_shapes if len(self._queues[0].prefix) else self._pack_shapes


def _sizes(tokens: int, fewest: int, most: int) -> list[int]:
    """Tokens of packs, the smallest first: halves, quarters, ... of ``tokens``, at most ``most``. The smallest one is a
    quarter or less, and full with ``fewest`` tokens."""
    halvings = 2
    while tokens >> halvings > max(fewest, _LEAST_TOKENS):
        halvings += 1
    while halvings and tokens >> halvings < _LEAST_TOKENS:
        halvings -= 1
    count = min(most, halvings + 1, _MOST_SIZES)
    return sorted({tokens >> (i * halvings // max(1, count - 1)) for i in range(count)})


def _placed(
    waiting: Sequence[tuple[int, int]],
    shape: Shape,
    most: int,
    begin: int = 0,
    takes: Callable[[list[int]], bool] = lambda indices: True,
) -> list[tuple[int, int, int, int]]:
    """(row, column, tokens, index) of prompts in a pack: each time the longest that fits. begin: columns of the first
    row that are taken. takes: as of ``Packs.next``."""
    left, placed = list(waiting), []
    for row in range(shape.rows):
        column = begin if row == 0 else 0
        while len(placed) < most:
            at = bisect.bisect_right(left, (shape.columns - column, np.inf)) - 1
            if at < 0:
                break
            own, index = left.pop(at)
            if not takes([*(one for _, _, _, one in placed), index]):
                return placed
            placed.append((row, column, own, index))
            column += own
    return placed
