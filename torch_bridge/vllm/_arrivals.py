"""What vLLM's loader has brought to a layer's parameters, so that what a checkpoint lacks can be named.

vLLM 0.24 does not look: where a file lacks an expert, or one of its tensors, that part of a parameter is memory as it
was. With a quantization method it does not compare the parameters of whole modules either.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

Part = tuple[str, str, int]  # parameter, shard ("w1", "w2" or "w3"), place among the experts of this rank


class Arrivals:
    """Of one layer, since it was made or last processed."""

    def __init__(self) -> None:
        self._seen: set[Part] = set()

    def noting(self, loader: Callable[..., Any], layer: Any) -> Callable[..., Any]:
        """``loader``, vLLM's ``weight_loader`` of a layer, noted down here. Tensors of all experts at once are not."""
        signature = inspect.signature(loader)

        @functools.wraps(loader)
        def load(*arguments: Any, **named: Any) -> Any:
            done = loader(*arguments, **named)
            given = signature.bind(*arguments, **named).arguments
            name, shard, expert = (given.get(each) for each in ("weight_name", "shard_id", "expert_id"))
            if done is not False and isinstance(name, str) and isinstance(shard, str) and isinstance(expert, int):
                place = layer._map_global_expert_id_to_local_expert_id(expert)
                self._seen.add((name.rpartition(".")[2], shard, place))
            return done

        return load

    def forget(self) -> None:
        """Begin anew."""
        self._seen.clear()

    def missing(self, names: Sequence[str], num_experts: int, *, is_gated: bool) -> str | None:
        """What of parameters that a loader fills expert by expert has not come, in words, or None.

        names: of parameters ("w13_..." or "w2_..."). num_experts: of this rank; places are counted on it. None as well
        where no expert's tensor has come: then something else filled the memory, such as random values.
        """
        if not self._seen:
            return None

        def parts(name: str) -> tuple[tuple[str, ...], ...]:  # shards of an expert, one of which is enough
            if name.startswith("w2"):
                return (("w2",),)
            return (("w1",), ("w3",)) if is_gated else (("w1", "w3"),)

        lacking = [
            f"{name} ({' or '.join(shards)}) of expert {expert}"
            for name in names
            for expert in range(num_experts)
            for shards in parts(name)
            if not any((name, shard, expert) in self._seen for shard in shards)
        ]
        others = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        return f"{lacking[0]}{others}" if lacking else None
