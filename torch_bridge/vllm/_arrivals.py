"""What vLLM's loader has brought to a layer's parameters, so that what a checkpoint lacks can be named.

vLLM 0.24 does not look: where a file lacks an expert, or one of its tensors, or has a shorter one, that part of a
parameter is memory as it was. With a quantization method it does not compare the parameters of whole modules either.
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
        self._short: dict[Part, str] = {}

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
                part = name.rpartition(".")[2], shard, place
                self._seen.add(part)
                said = _what_is_short(layer, part[0], given["param"], given["loaded_weight"])
                self._short.pop(part, None)
                if said is not None and place >= 0:
                    self._short[part] = said
            return done

        return load

    def forget(self) -> None:
        """Begin anew."""
        self._seen.clear()
        self._short.clear()

    def short(self, names: Sequence[str]) -> str | None:
        """What came shorter than its part of one of these parameters, in words, or None."""
        found = [
            f"{name} ({shard}) of expert {place}, {said}"
            for (name, shard, place), said in self._short.items()
            if name in names
        ]
        return _first_of(found)

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
        return _first_of(lacking)


def _first_of(found: Sequence[str]) -> str | None:
    others = f" and {len(found) - 1} more" if len(found) > 1 else ""
    return f"{found[0]}{others}" if found else None


def _what_is_short(layer: Any, name: str, parameter: Any, loaded: Any) -> str | None:
    """How many numbers have come for an expert's matrix, and how many its part of the parameter has; None if enough.

    Whole matrices come to each rank, which takes its share. So do scales and zero points, but those of a tensor or a
    channel may be the same on all: of them no share is counted.
    """
    config = layer.moe_config
    halves = 2 if name.startswith("w13") and config.is_act_and_mul else 1  # gate and up come one by one
    wanted, came = parameter[0].numel() // halves, loaded.numel()
    if loaded.dim() == 2 and not any(word in name for word in ("scale", "zero")):
        wanted *= config.moe_parallel_config.tp_size
    return f"{came} numbers of {wanted}" if came < wanted else None
