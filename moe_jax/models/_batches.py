"""Prompts of any lengths through a few compiled programs: sorted by length, in rows that are refilled as they end.

Prompts are padded to one of a few buckets of lengths. All share one cache of rows, unless a few long prompts would make
every row long: then there are two, one after the other. Programs: a prefill for each bucket, and for each cache its
zeros and its loop.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from moe_jax.models import _loop
from moe_jax.models._compiled import bucket, split_model
from moe_jax.models._decoder import CausalLM
from moe_jax.models._logprobs import TokenLogprobs
from moe_jax.models._prefill import Prefill
from moe_jax.models._sampling import Sampler

_MOST_BUCKETS = 4
_PREFILL_TOKENS = 2048  # of several short prompts that are taken in at once, padding included


@dataclasses.dataclass(frozen=True)
class Group:
    """Prompts that share a cache of ``num_slots``: (bucket, indices of prompts), longest first."""

    num_slots: int
    buckets: tuple[tuple[int, tuple[int, ...]], ...]

    @property
    def cost(self) -> int:
        """Slots that the loop reads for all prompts, if every slot of a row is read."""
        return self.num_slots * sum(len(indices) for _, indices in self.buckets)


def plan(lengths: Sequence[int], room: int) -> list[Group]:
    """Of prompts of these lengths, with ``room`` for new tokens: at most two groups and ``_MOST_BUCKETS`` buckets."""
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

    best = min((groups(split) for split in range(len(buckets))), key=lambda g: sum(one.cost for one in g))
    whole = groups(0)
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
) -> np.ndarray:
    """Tell ``hear`` the tokens of all prompts as they are made, and return the load.

    Args:
        sampler: settings of all prompts.
        hear: gets the next tokens of prompts, by their indices, and returns those that are over.
        tokens_at_once: tell at least after so many tokens; None where no answer ends by what is told.
        no_load: zeros (layers, slots), or (0, 0) where nobody asks for the load.
        hear_logprobs: gets those of the tokens that ``hear`` is told next, by the index of their prompt, where some
            prompt asks for them.
    """
    structure, leaves = split_model(model)
    room, load = bucket(max_new_tokens), no_load
    limit = np.int32(room if tokens_at_once is None else min(tokens_at_once, room))
    for group in plan([len(prompt) for prompt in prompts], room):
        count = sum(len(indices) for _, indices in group.buckets)
        batch = min(batch_size, 1 << (count - 1).bit_length())
        queue = collections.deque((size, collections.deque(indices)) for size, indices in group.buckets)
        sizes = (model.config, batch, group.num_slots, room, model.dtype, sampler.is_penalized, sampler.num_logprobs)
        state = model.laid_out(functools.partial(_loop.empty, *sizes, load))
        owner, told = np.full(batch, -1), np.zeros(batch, np.int64)  # of each row its prompt, -1 for none
        while queue or (owner >= 0).any():
            while queue and len(free := np.flatnonzero(owner < 0)) >= _fewest(queue, batch):
                size, waiting = queue[0]
                most = _at_once(size, batch)
                rows = free[: min(most, len(waiting))]
                owner[rows], told[rows] = [waiting.popleft() for _ in rows], 0
                if not waiting:
                    queue.popleft()
                targets, picked = np.full(most, batch, np.int32), np.full(most, owner[rows[0]])
                targets[: len(rows)], picked[: len(rows)] = rows, owner[rows]
                entering = _padded([prompts[index] for index in owner[rows]], most, size)
                prompt = Prefill(model, *entering)
                reading = prompt.read(structure, leaves, size, no_load)
                entering, picked = (prompt.ids, prompt.mask), sampler.rows(picked)
                state = _loop.admit(structure, prompt.chunk, leaves, reading, state, entering, targets, picked)
            idle = owner < 0
            wanted = np.int32(idle.sum() + _fewest(queue, batch) if queue else batch)
            state = dataclasses.replace(state, step=np.int32(0))
            picked = sampler.rows(np.maximum(owner, 0))
            state = _loop.proceed(structure, leaves, state, idle, limit, wanted, picked)
            is_done, made, tokens = (np.array(a) for a in (state.is_done, state.made, state.tokens))  # it is donated
            busy = np.flatnonzero(owner >= 0)
            if hear_logprobs is not None and state.logprobs is not None:
                logprobs = state.logprobs.part(slice(None))
                for row in busy:
                    hear_logprobs(int(owner[row]), logprobs.part(row, slice(told[row], made[row])))
            over = hear({int(owner[row]): tokens[row, told[row] : made[row]] for row in busy})
            told[busy] = made[busy]
            owner[is_done | np.isin(owner, list(over))] = -1
        load = np.array(state.load)
    return load


def _at_once(size: int, batch: int) -> int:
    """Rows of the prefill of a bucket."""
    return max(1, min(batch, _PREFILL_TOKENS // size))


def _fewest(queue: Any, batch: int) -> int:
    """Rows that have to be free before prompts are taken in: half of what their prefill takes, or all that wait."""
    size, waiting = queue[0]
    return min(len(waiting), -(-_at_once(size, batch) // 2))


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
