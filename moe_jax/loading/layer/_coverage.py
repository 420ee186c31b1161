"""Which elements of a layer's leaves have been written, expert by expert and projection by projection."""

from collections.abc import Mapping, Sequence

from moe_jax.loading._errors import ranges
from moe_jax.quantization import LeafSpec


class Coverage:
    """One byte for each expert of each leaf and projection, 1 once written: w13 leaves have w1 and w3, w2 have w2."""

    def __init__(self, is_gated: bool):
        self._w13_shards = ("w1", "w3") if is_gated else ("w1",)
        self._written: dict[str, dict[str, bytearray]] = {}

    def shards(self, leaf: str) -> tuple[str, ...]:
        """The projections that a leaf holds, in the order of its rows."""
        return ("w2",) if leaf.startswith("w2_") else self._w13_shards

    def any(self, leaf: str, experts: slice = slice(None), shards: Sequence[str] | None = None) -> bool:
        """Whether anything is written among these experts and projections (None: all of the leaf)."""
        written = self._written.get(leaf, {})
        return any(1 in row[experts] for shard, row in written.items() if shards is None or shard in shards)

    def mark(self, leaf: str, num_experts: int, experts: slice, shard: str) -> None:
        """Note that one projection of these experts is written."""
        if leaf not in self._written:
            self._written[leaf] = {each: bytearray(num_experts) for each in self.shards(leaf)}
        row = self._written[leaf][shard]
        row[experts] = b"\1" * len(row[experts])

    def missing(self, specs: Mapping[str, LeafSpec]) -> dict[str, dict[str, list[int]]]:
        """{leaf: {shard: experts}} of everything in ``specs`` that is not written."""
        result: dict[str, dict[str, list[int]]] = {}
        for leaf, spec in specs.items():
            written = self._written.get(leaf, {})
            for shard in self.shards(leaf):
                row = written.get(shard, bytes(spec.shape[0]))
                if 0 in row:
                    result.setdefault(leaf, {})[shard] = [expert for expert, is_there in enumerate(row) if not is_there]
        return result


def experts_text(experts: Sequence[int], total: int) -> str:
    """[0, 1, 2, 5] -> "experts 0-2, 5"."""
    if len(experts) == total:
        return f"all {total} experts"
    return f"expert{'s' if len(experts) > 1 else ''} {ranges(experts)}"
