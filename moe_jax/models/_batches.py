"""Prompts of any lengths through a few compiled programs: sorted by length, in rows that are refilled as they end.

Prompts are read in packs (``_packs``). Models whose rows hold one sequence alone read them padded to one of a few
buckets of lengths. All share one cache of rows, unless a few long prompts would make every row long: then there are
two, one after the other. In pages a row takes no more than its prompt asks, so there is one. Programs: those that read
prompts, and for each cache its zeros and its loop.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from moe_jax.models import _loop
from moe_jax.models._compiled import bucket, split_model
from moe_jax.models._decoder import CausalLM
from moe_jax.models._layer_cache import PAGE_SLOTS, pages_of
from moe_jax.models._logprobs import TokenLogprobs
from moe_jax.models._loop import Pack
from moe_jax.models._packs import Packs
from moe_jax.models._pages import NumPages, PagePool
from moe_jax.models._prefill import Prefill
from moe_jax.models._sampling import Sampler

_MOST_BUCKETS = 4
_MOST_PROGRAMS = 8
_PREFILL_TOKENS = 2048  # of several short prompts that are padded and taken in at once, padding included


@dataclasses.dataclass(frozen=True)
class Group:
    """Prompts that share a cache of ``num_slots``: (bucket, indices of prompts), longest first."""

    num_slots: int
    buckets: tuple[tuple[int, tuple[int, ...]], ...]

    @property
    def indices(self) -> list[int]:
        return [index for _, indices in self.buckets for index in indices]

    @property
    def cost(self) -> int:
        """Slots that the loop reads for all prompts, if every slot of a row is read."""
        return self.num_slots * len(self.indices)


def plan(lengths: Sequence[int], room: int, most_groups: int = 2) -> list[Group]:
    """Of prompts of these lengths, with ``room`` for new tokens: at most so many groups, one or two, and
    ``_MOST_BUCKETS`` buckets."""
    members: dict[int, list[int]] = collections.defaultdict(list)
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        members[bucket(lengths[index])].append(index)
    while len(members) > _MOST_BUCKETS:
        sizes = sorted(members)
        padding = {a: (b - a) * len(members[a]) for a, b in zip(sizes, sizes[1:], strict=False)}
        least = min(padding, key=padding.__getitem__)
        members[sizes[sizes.index(least) + 1]] += members.pop(least)
    buckets = tuple((size, tuple(members[size])) for size in sorted(members, reverse=True))

    def groups(split: int) -> list[Group]:
        return [Group(part[0][0] + room, part) for part in (buckets[:split], buckets[split:]) if part]

    whole = groups(0)
    if most_groups == 1:
        return whole
    best = min((groups(split) for split in range(len(buckets))), key=lambda g: sum(one.cost for one in g))
    return best if 2 * sum(one.cost for one in best) <= whole[0].cost else whole


def run(
    model: CausalLM,
    prompts: Sequence[np.ndarray],
    sampler: Sampler,
    hear: Callable[[dict[int, np.ndarray]], Collection[int]],
    *,
    batch_size: int,
    max_new_tokens: int,
    tokens_at_once: int | None = None,
    no_load: np.ndarray,
    hear_logprobs: Callable[[int, TokenLogprobs], None] | None = None,
    is_shared: bool = True,
    num_pages: NumPages = None,
) -> np.ndarray:
    """Tell ``hear`` the tokens of all prompts as they are made, and return the load.

    Args:
        sampler: settings of all prompts.
        hear: gets the next tokens of prompts, by their indices, and returns those that are over.
        tokens_at_once: tell at least after so many tokens; None where no answer ends by what is told.
        no_load: zeros (layers, slots), or (0, 0) where nobody asks for the load.
        hear_logprobs: gets those of the tokens that ``hear`` is told next, by the index of their prompt, where some
            prompt asks for them.
        is_shared: prompts that begin alike read it once, where the model can.
        num_pages: as of ``generate``, checked.
    """
    structure, leaves = split_model(model)
    room, load = bucket(max_new_tokens), no_load
    limit = np.int32(room if tokens_at_once is None else min(tokens_at_once, room))
    call = _Call(model, structure, leaves, prompts, sampler, no_load)
    groups = plan([len(prompt) for prompt in prompts], room, 2 if num_pages is None else 1)
    for group in groups:
        batch = min(batch_size, 1 << (len(group.indices) - 1).bit_length())
        most_shapes = _MOST_PROGRAMS // len(groups) - 2
        if num_pages is not None:
            intake = _PagedIntake(call, group, batch, is_shared, most_shapes, num_pages)
        elif model.segments_refusal() is None:
            intake = _PackedIntake(call, group, batch, is_shared, most_shapes)
        else:
            intake = _PaddedIntake(call, group, batch)
        sizes = (batch, intake.num_slots, intake.row_slots, intake.num_pages, room, model.dtype)
        kinds = (sampler.is_penalized, sampler.num_logprobs)
        state, intake.row = model.laid_out(functools.partial(_loop.empty, model.config, *sizes, *kinds, load))
        owner, told = np.full(batch, -1), np.zeros(batch, np.int64)  # of each row its prompt, -1 for none
        while intake or (owner >= 0).any():
            while intake.has_pages() and len(free := np.flatnonzero(owner < 0)) >= min(intake.fewest(), batch):
                state, indices = intake.admit(state, free)
                rows = free[: len(indices)]
                owner[rows], told[rows] = indices, 0
            idle = owner < 0
            state, waits, most = intake.grow(state, told)
            more = min(intake.fewest(), batch) if intake.has_pages() else 1  # whose end may free pages
            some = intake or waits.any()
            wanted = np.int32(min(batch, (idle | waits).sum() + more) if some else batch)
            state = dataclasses.replace(state, step=np.int32(0))
            picked = sampler.rows(np.maximum(owner, 0))
            turns = limit if most is None else min(limit, np.int32(most))
            state = _loop.proceed(structure, leaves, state, idle, waits, turns, wanted, picked)
            is_done, made, tokens = (np.array(a) for a in (state.is_done, state.made, state.tokens))  # it is donated
            busy = np.flatnonzero(owner >= 0)
            if hear_logprobs is not None and state.logprobs is not None:
                logprobs = state.logprobs.part(slice(None))
                for row in busy:
                    hear_logprobs(int(owner[row]), logprobs.part(row, slice(told[row], made[row])))
            over = hear({int(owner[row]): tokens[row, told[row] : made[row]] for row in busy})
            told[busy] = made[busy]
            owner[is_done | np.isin(owner, list(over))] = -1
            intake.release({int(row): int(told[row]) for row in busy if owner[row] < 0})
        load = np.array(state.load)
    return load


@dataclasses.dataclass(frozen=True)
class _Call:
    """What all caches of a call share."""

    model: CausalLM
    structure: Any
    leaves: list[Any]
    prompts: Sequence[np.ndarray]
    sampler: Sampler
    no_load: np.ndarray


class _PackedIntake:
    """The prompts of a group, in packs. num_slots: of a row. row: the cache of what prompts share, None for none.
    num_pages: of the cache, 0 for rows with slots of their own."""

    num_pages = 0

    def __init__(self, call: _Call, group: Group, batch: int, is_shared: bool, most_shapes: int):
        self._call, self.row, self.num_slots = call, None, group.num_slots
        most = call.model.max_num_batched_tokens
        options: dict[str, Any] = dict(batch=batch, max_num_batched_tokens=most, most_shapes=most_shapes)
        self._packs = Packs(call.prompts, group.indices, is_shared=is_shared, **options)
        self.row_slots = self._packs.row_slots

    def __bool__(self) -> bool:
        """Whether prompts wait."""
        return bool(self._packs)

    def fewest(self) -> int:
        """Rows that have to be free before prompts are taken in."""
        return self._packs.fewest()

    def has_pages(self) -> bool:
        """Whether prompts wait and the next of them finds its pages."""
        return bool(self)

    def release(self, made: dict[int, int]) -> None:
        """These rows have ended, after so many new tokens."""

    def grow(self, state: _loop.State, made: np.ndarray) -> tuple[_loop.State, np.ndarray, int | None]:
        """The state with memory for the next tokens of rows; which rows have none and wait, (B,) bool; and how many
        tokens there is memory for, None for all. made: (B,), new tokens of each row."""
        return state, np.zeros(len(made), bool), None

    def admit(self, state: _loop.State, free: np.ndarray) -> tuple[_loop.State, list[int]]:
        """The state with prompts, and their first new token, in the first free rows, and the prompts' indices."""
        pack, has_row, indices = self._packs.next(free.tolist(), self._vocab_size())
        state, row = self._read(state, self.row if has_row else None, pack, indices)
        self.row = row if has_row else self.row
        return state, indices

    def _vocab_size(self) -> int | None:
        return self._call.model.config.vocab_size if self._call.sampler.is_penalized else None

    def _read(self, state: _loop.State, row: Any, pack: Pack, indices: list[int]) -> tuple[_loop.State, Any]:
        call, picked = self._call, np.zeros(len(pack.rows), np.int64)
        picked[: len(indices)] = indices
        return _loop.admit_pack(call.structure, call.leaves, row, state, pack, call.sampler.rows(picked))


@dataclasses.dataclass
class _Row:
    """A prompt in a row: its index, the pages that it shares and those of its own, how many of the latter it takes at
    most, and its new tokens."""

    index: int
    shared: np.ndarray
    own: np.ndarray
    most: int
    made: int = 0

    @property
    def missing(self) -> int:
        return self.most - len(self.own)


class _PagedIntake(_PackedIntake):
    """As ``_PackedIntake`` for rows in pages.

    The first pages are those of packs while they are read. A prompt takes the pages of its tokens as it enters a row,
    one more whenever its new tokens reach its end, and gives all back as it ends. What prompts share is read into pages
    that all of them hold.

    No page is taken unless all rows could still get all of theirs, one after the other as they end (``_is_safe``). A
    row that gets none waits, with what it holds, and some other row always goes on. Prompts enter a row where the pages
    that rows are expected to use are there: as many as their most new tokens take, until prompts have ended earlier.
    """

    def __init__(
        self,
        call: _Call,
        group: Group,
        batch: int,
        is_shared: bool,
        most_shapes: int,
        num_pages: NumPages,
    ):
        super().__init__(call, group, batch, is_shared, most_shapes)
        self._row_pages, self.row_slots = pages_of(self.row_slots), 0
        self.num_slots = pages_of(group.num_slots) * PAGE_SLOTS
        self._of_packs = self._packs.most_rows(PAGE_SLOTS)
        wholes = {i: pages_of(len(call.prompts[i]) + int(call.sampler.limits[i])) for i in group.indices}
        of_queues = [(pages_of(length), indices) for length, indices in self._packs.shared_tokens()]
        self._shared = {i: shared for shared, indices in of_queues for i in indices}
        self._most = {i: wholes[i] - self._shared[i] for i in group.indices}
        enough = self._enough(batch, wholes, sum(n for n, _ in of_queues))
        self.num_pages = min(num_pages, enough) if isinstance(num_pages, int) else enough
        longest = max(wholes, key=wholes.__getitem__)
        if self.num_pages < self._of_packs + wholes[longest]:
            raise ValueError(
                f"num_pages={self.num_pages}: prompt {longest} of {len(call.prompts[longest])} tokens and "
                f"{call.sampler.limits[longest]} new ones take {wholes[longest]} pages of {PAGE_SLOTS} slots, and "
                f"reading prompts takes {self._of_packs}; expected at least {self._of_packs + wholes[longest]}, or a "
                "smaller max_new_tokens or max_num_batched_tokens"
            )
        self._pool = PagePool(self._of_packs, self.num_pages)
        self._prefix: np.ndarray | None = None  # pages of what the first queue shares
        self._rows: dict[int, _Row] = {}  # the oldest first
        self._table = np.zeros((batch, pages_of(self.num_slots)), np.int32)
        self._ended: list[float] = []  # of prompts that have ended, new tokens as a share of the most

    def _enough(self, batch: int, wholes: dict[int, int], shared: int) -> int:
        """Pages with which no prompt waits for others, up to a quarter more, so that like calls take one program.
        shared: pages that queues share."""
        own, whole = (sum(sorted(costs.values())[-batch:]) for costs in (self._most, wholes))
        count = self._of_packs + min(own + shared, whole + pages_of(max(map(len, self._call.prompts))))
        step = 1 << max(0, count.bit_length() - 3)
        return -(-count // step) * step

    def has_pages(self) -> bool:
        if not self:
            return False
        shared, longest = self._packs.ahead()
        room = self._pool.num_free - (pages_of(shared) if self._prefix is None else 0)
        takes = self._takes(room)([longest])
        if not takes and not self._rows:
            raise RuntimeError(
                f"{room} pages are free, prompt {longest} takes {self._most[longest]}, and no row has any"
            )
        return takes

    def release(self, made: dict[int, int]) -> None:
        for row, count in made.items():
            ended = self._rows.pop(row)
            self._pool.give_back(np.concatenate([ended.shared, ended.own]))
            self._ended.append(count / int(self._call.sampler.limits[ended.index]))

    def grow(self, state: _loop.State, made: np.ndarray) -> tuple[_loop.State, np.ndarray, int | None]:
        waits, most = np.zeros(len(made), bool), None
        for at, row in self._rows.items():
            row.made = int(made[at])
            count = min(row.most, self._pages(row.index, row.made + PAGE_SLOTS)) - len(row.own)
            if count > 0 and not self._leaves_enough(at, count):
                waits[at] = True
                continue
            self._own(at, self._pool.take(max(count, 0)))
            most = PAGE_SLOTS if row.missing else most
        state = dataclasses.replace(state, cache=dataclasses.replace(state.cache, page_table=self._table.copy()))
        return state, waits, PAGE_SLOTS if waits.any() else most

    def admit(self, state: _loop.State, free: np.ndarray) -> tuple[_loop.State, list[int]]:
        shared, num_queues = self._packs.ahead()[0], self._packs.num_queues
        if self._prefix is None:
            self._prefix = self._pool.take(pages_of(shared))
        prefix = self._prefix
        takes = self._takes(self._pool.num_free)
        pack, has_row, indices = self._packs.next(free.tolist(), self._vocab_size(), takes=takes)
        rows, columns = pack.ids.shape
        of_packs = np.arange(self._of_packs, dtype=np.int32)
        if has_row:
            table = np.concatenate([prefix, of_packs, np.zeros(self._row_pages, np.int32)])[None, : self._row_pages]
        else:
            table = of_packs[: rows * pages_of(columns)].reshape(rows, -1)
        targets = np.full(rows * columns, self.num_pages * PAGE_SLOTS, np.int32)  # which is none
        for at, index in enumerate(indices):
            self._pool.hold(prefix)
            row, none = int(pack.rows[at]), np.zeros(0, np.int32)
            self._table[row] = 0
            self._table[row, : len(prefix)] = prefix
            self._rows[row] = _Row(index, prefix, none, self._most[index])
            self._own(row, self._pool.take(self._pages(index, 0)))
            slots, begin = np.arange(shared, int(pack.lengths[at])), int(pack.first[at] - pack.held)
            pages = self._table[row, slots // PAGE_SLOTS]
            targets[begin : begin + len(slots)] = pages * PAGE_SLOTS + slots % PAGE_SLOTS
        if self._packs.num_queues < num_queues:
            self._pool.give_back(prefix)
            self._prefix = None
        arrays: dict[str, Any] = dict(of_pack=table, targets=targets.reshape(rows, columns))
        pack = dataclasses.replace(pack, pages=_loop.PackPages(**arrays, is_shared=has_row))
        return self._read(state, None, pack, indices)[0], indices

    def _pages(self, index: int, new: int) -> int:
        """Pages of its own for a prompt and so many new tokens."""
        return pages_of(len(self._call.prompts[index]) + new) - self._shared[index]

    def _own(self, at: int, pages: np.ndarray) -> None:
        row = self._rows[at]
        begin = len(row.shared) + len(row.own)
        self._table[at, begin : begin + len(pages)] = pages
        row.own = np.concatenate([row.own, pages])

    def _takes(self, room: int) -> Callable[[list[int]], bool]:
        """Whether prompts of given indices may enter rows while so many pages are free."""
        limits, rows = self._call.sampler.limits, self._rows.values()
        shares = np.sort([*self._ended, *[1.0] * len(rows)]) if self._ended else np.ones(1)
        means = (np.cumsum(shares[::-1]) / np.arange(1, len(shares) + 1))[::-1]  # of a share and those above it

        @functools.cache
        def expected(index: int, made: int) -> int:
            limit = int(limits[index])
            longer = int(np.searchsorted(shares, made / limit, side="right"))
            count = math.ceil((means[longer] if longer < len(shares) else 1.0) * limit)
            return min(self._most[index], self._pages(index, count))

        wanted = sum(max(0, expected(row.index, row.made) - len(row.own)) for row in rows)
        held = [(len(row.own), row.missing) for row in rows]

        def takes(indices: list[int]) -> bool:
            new = [(self._pages(index, 0), self._most[index]) for index in indices]
            if wanted + sum(expected(index, 0) for index in indices) > room:
                return False
            free = room - sum(own for own, _ in new)
            return _is_safe(free, [*held, *((own, most - own) for own, most in new)])

        return takes

    def _leaves_enough(self, at: int, count: int) -> bool:
        """Whether a row may take so many pages more."""
        rows = [(len(row.own), row.missing) for other, row in self._rows.items() if other != at]
        row, free = self._rows[at], self._pool.num_free - count
        return _is_safe(free, [*rows, (len(row.own) + count, row.missing - count)])


def _is_safe(free: int, rows: list[tuple[int, int]]) -> bool:
    """Whether all rows, (pages held, pages missing at most) each, can get theirs one after the other, each from those
    that are free and those of the rows before it."""
    for held, missing in sorted(rows, key=lambda row: row[1]):
        if missing > free:
            return False
        free += held
    return True


class _PaddedIntake:
    """The prompts of a group, one to a row, padded to the length of their bucket."""

    row_slots = num_pages = 0

    def __init__(self, call: _Call, group: Group, batch: int):
        self._call, self._batch, self.row, self.num_slots = call, batch, None, group.num_slots
        self._queue = collections.deque((size, collections.deque(indices)) for size, indices in group.buckets)

    def __bool__(self) -> bool:
        """Whether prompts wait."""
        return bool(self._queue)

    def fewest(self) -> int:
        """As of ``_PackedIntake``: half of what their prefill takes, or all that wait."""
        size, waiting = self._queue[0]
        return min(len(waiting), -(-self._at_once(size) // 2))

    def has_pages(self) -> bool:
        """As of ``_PackedIntake``."""
        return bool(self)

    def release(self, made: dict[int, int]) -> None:
        """As of ``_PackedIntake``."""

    def grow(self, state: _loop.State, made: np.ndarray) -> tuple[_loop.State, np.ndarray, int | None]:
        """As of ``_PackedIntake``."""
        return state, np.zeros(len(made), bool), None

    def admit(self, state: _loop.State, free: np.ndarray) -> tuple[_loop.State, list[int]]:
        """As of ``_PackedIntake``."""
        call, (size, waiting) = self._call, self._queue[0]
        most = self._at_once(size)
        rows = free[: min(most, len(waiting))]
        indices = [waiting.popleft() for _ in rows]
        if not waiting:
            self._queue.popleft()
        targets, picked = np.full(most, self._batch, np.int32), np.full(most, indices[0])
        targets[: len(rows)], picked[: len(rows)] = rows, indices
        prompt = Prefill(call.model, *_padded([call.prompts[index] for index in indices], most, size))
        reading = prompt.read(call.structure, call.leaves, size, call.no_load)
        entering = (prompt.ids, prompt.mask)
        model = (call.structure, prompt.chunk, call.leaves)
        return _loop.admit(*model, reading, state, entering, targets, call.sampler.rows(picked)), indices

    def _at_once(self, size: int) -> int:
        """Rows of the prefill of a bucket."""
        return max(1, min(self._batch, _PREFILL_TOKENS // size))


def _padded(prompts: Sequence[np.ndarray], rows: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """(ids, mask), each (rows, size); rows without a prompt have no token."""
    ids, mask = np.zeros((rows, size), np.int32), np.zeros((rows, size), bool)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)], mask[row, : len(prompt)] = prompt, True
    return ids, mask


def checked_prompts(given: Any, vocab_size: int) -> list[np.ndarray]:
    """Each prompt as (n,) int32.

    Raises:
        TypeError: not a list of prompts, ids that are no integers. ValueError: no prompt at all, or one that is empty
            or has an id outside the vocabulary.
    """
    if not isinstance(given, Sequence | np.ndarray) or isinstance(given, str | bytes):
        raise TypeError(f"input_ids has type {type(given).__name__}, expected a list of prompts, each a list of ids")
    if not len(given):
        raise ValueError("input_ids holds no prompt")
    prompts = []
    for index, prompt in enumerate(given):
        try:
            ids = np.asarray(prompt)
        except ValueError:  # nested lists of unequal length
            raise ValueError(f"prompt {index} holds lists, expected a list of ids") from None
        if ids.ndim != 1:
            raise ValueError(f"prompt {index} has shape {ids.shape}, expected a list of ids")
        if not ids.size:
            raise ValueError(f"prompt {index} is empty, expected at least one token")
        if ids.dtype.kind not in "iu":
            raise TypeError(f"prompt {index} has dtype {ids.dtype}, expected integers")
        if ((ids < 0) | (ids >= vocab_size)).any():
            at = int(np.argmax((ids < 0) | (ids >= vocab_size)))
            raise ValueError(f"prompt {index} has the id {ids[at]} at {at}, expected 0 to {vocab_size - 1}")
        prompts.append(ids.astype(np.int32))
    return prompts


def check_lengths(prompts: Sequence[np.ndarray], limits: Any, max_seq_len: int) -> None:
    """Raises ValueError for a prompt that is too long together with its new tokens, of which limits, (prompts,) int,
    has the most."""
    for index, (ids, limit) in enumerate(zip(prompts, limits, strict=True)):
        if ids.size + limit > max_seq_len:
            raise ValueError(
                f"prompt {index} of {ids.size} tokens and max_new_tokens={limit} make "
                f"{ids.size + limit} tokens, the model takes max_seq_len={max_seq_len}"
            )
