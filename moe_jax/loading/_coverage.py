"""Which elements of a layer's leaves have been written, one bit per expert and projection."""

from collections.abc import Mapping, Sequence

import numpy as np

from moe_jax.loading._errors import ranges
from moe_jax.quantization import LeafSpec


class Coverage:
    """For every leaf a bitmap (E, number of projections): w13 leaves have w1 and w3, w2 leaves have w2."""

    def __init__(self, is_gated: bool):
        self._w13_shards = ("w1", "w3") if is_gated else ("w1",)
        self._written: dict[str, np.ndarray] = {}

    def shards(self, leaf: str) -> tuple[str, ...]:
        """The projections that a leaf holds, in the order of its rows."""
        return ("w2",) if leaf.startswith("w2_") else self._w13_shards

    def any(self, leaf: str, experts: slice = slice(None), shards: Sequence[str] | None = None) -> bool:
        """Whether anything is written among these experts and projections (None: all of the leaf)."""
        written = self._written.get(leaf)
        columns = [i for i, shard in enumerate(self.shards(leaf)) if shards is None or shard in shards]
        return written is not None and bool(written[experts, columns].any())

    def mark(self, leaf: str, num_experts: int, experts: slice, shard: str) -> None:
        """Note that one projection of these experts is written."""
        shards = self.shards(leaf)
        written = self._written.setdefault(leaf, np.zeros((num_experts, len(shards)), bool))
        written[experts, shards.index(shard)] = True

    def missing(self, specs: Mapping[str, LeafSpec]) -> dict[str, dict[str, list[int]]]:
        """{leaf: {shard: experts}} of everything in ``specs`` that is not written."""
        result: dict[str, dict[str, list[int]]] = {}
        for leaf, spec in specs.items():
            shards = self.shards(leaf)
            written = self._written.get(leaf, np.zeros((spec.shape[0], len(shards)), bool))
            for column, shard in enumerate(shards):
                if not written[:, column].all():
                    result.setdefault(leaf, {})[shard] = np.flatnonzero(~written[:, column]).tolist()
        return result


def experts_text(experts: Sequence[int], total: int) -> str:
    """[0, 1, 2, 5] -> "experts 0-2, 5"."""
    if len(experts) == total:
        return f"all {total} experts"
    return f"expert{'s' if len(experts) > 1 else ''} {ranges(experts)}"
