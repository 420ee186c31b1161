"""Who holds which pages of a cache: told on the host, between compiled steps, to whom the table is an argument."""

from typing import Any, Literal

import numpy as np

from moe_jax._arguments import integer, shown
from moe_jax._typing import Int
from moe_jax.models._layer_cache import PAGE_SLOTS

NumPages = int | Literal["auto"] | None


class PagePool:
    """The pages from ``first`` on, before ``end``. A page may have several holders, who share what it says."""

    def __init__(self, first: int, end: int):
        self._free = list(range(end - 1, first - 1, -1))
        self._holders = np.zeros(end, np.int32)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> Int[np.ndarray, " count"]:
        """Pages that nobody held."""
        if count > len(self._free):
            raise RuntimeError(f"{count} pages are wanted, {len(self._free)} are free")
        pages = np.array([self._free.pop() for _ in range(count)], np.int32)
        self._holders[pages] = 1
        return pages

    def hold(self, pages: Int[np.ndarray, " n"]) -> None:
        """One holder more."""
        self._holders[pages] += 1

    def give_back(self, pages: Int[np.ndarray, " n"]) -> None:
        """One holder less; pages without one are free."""
        self._holders[pages] -= 1
        if (self._holders[pages] < 0).any():
            raise RuntimeError(f"page {pages[self._holders[pages] < 0][0]} is given back, and nobody holds it")
        self._free += pages[self._holders[pages] == 0].tolist()[::-1]


def checked_num_pages(num_pages: Any, model: Any) -> NumPages:
    """num_pages of ``generate`` for this model.

    Raises:
        ValueError, TypeError: no such number, or calls of the model that are shorter than a page. NotImplementedError:
            a model whose prompts are not read in packs, or a mesh with Explicit axes.
    """
    if num_pages is None:
        return None
    if isinstance(num_pages, str):
        if num_pages != "auto":
            raise ValueError(f'num_pages={shown(num_pages)}, expected a number of pages, "auto" or None')
    else:
        num_pages = integer("num_pages", num_pages, minimum=1)
    config, where = model.config, f"num_pages={shown(num_pages)}"
    if not all(spec.holds_slots for spec in config.layer_caches):
        raise NotImplementedError(f"{where}: the states of linear attention have no pages; leave num_pages out")
    if model.segments_refusal() is not None:
        kind = f"the rotary embedding of type {config.rope.rope_type!r} changes with the length of a row"
        if config.pinned_tokens is not None:
            kind = f"with pinned_tokens={config.pinned_tokens} each row has pages of its own"
        raise NotImplementedError(f"{where}: {kind}; leave num_pages out")
    check_mesh(where, model)
    if model.max_num_batched_tokens < PAGE_SLOTS:
        raise ValueError(
            f"{where}: the model's max_num_batched_tokens is {model.max_num_batched_tokens}, expected at least "
            f"{PAGE_SLOTS}, the slots of a page"
        )
    return num_pages


def check_mesh(where: str, model: Any) -> None:
    """Raise NotImplementedError where the model lies on a mesh over which there are no pages."""
    partition = model.layers[0].self_attn.partition
    if partition is not None and partition.is_explicit:
        raise NotImplementedError(f"{where}: over a mesh whose axes are Explicit; make its axes Auto")
