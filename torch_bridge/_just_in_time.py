"""Placeholders that get memory with their first tensor and are processed by their last: vLLM's online loading."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from moe_jax.quantization import LeafSpec
from torch_bridge._method_base import replace_parameter
from torch_bridge._repeats import Repeats

DUMMY_BOUND, DUMMY_SEED = 1e-3, 1234  # vLLM's


def dummy_values(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Stand-in values for runs without a checkpoint, uniform in +-1e-3: vLLM's, from torch's generator at seed 1234."""
    generator = torch.Generator(device=device)
    generator.manual_seed(DUMMY_SEED)
    return torch.empty(shape, dtype=dtype, device=device).uniform_(-DUMMY_BOUND, DUMMY_BOUND, generator=generator)


class JustInTime:
    """The unquantized parameters of one module on the way in.

    Args:
        module: whose parameters ``specs`` name.
        specs: the leaves to be loaded.
        device: where they will have memory.
        on_complete: called once everything is there.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        specs: Mapping[str, LeafSpec],
        device: torch.device,
        on_complete: Callable[[], None],
    ):
        self._module, self._device, self._on_complete = module, device, on_complete
        self._specs = dict(specs)
        self._covered: dict[str, set[Any]] = {name: set() for name in specs}
        self._repeats = Repeats()
        self._is_complete = False

    def tracked(self, loader: Callable[..., Any]) -> Callable[..., Any]:
        """A ``weight_loader`` that calls this one, and processes the module after the last tensor.

        Its first argument may be a placeholder that was replaced since. A tensor that came before changes nothing; with
        other values it raises ValueError, as every tensor does that comes to a complete module for the first time.
        """

        def weight_loader(
            param: torch.Tensor,
            loaded_weight: torch.Tensor,
            weight_name: str,
            shard_id: str | None,
            expert_id: int | None,
            return_success: bool = False,
        ) -> Any:
            name = getattr(param, "leaf_name", None)
            if name not in self._specs:
                raise ValueError(f"{weight_name}: its parameter is none of {', '.join(self._specs)}")
            place = name, shard_id, expert_id
            if self._repeats.has(place, loaded_weight, weight_name):
                return True if return_success else None
            if self._is_complete:
                raise ValueError(f"{weight_name}: {type(self._module).__name__} is already processed")
            self._materialize()
            current = getattr(self._module, name)
            used = loader(current, loaded_weight, weight_name, shard_id, expert_id, return_success=True)
            if used is not False:
                self._repeats.add(place, loaded_weight)
                self._cover(name, shard_id, expert_id, loaded_weight.ndim == current.ndim)
                if not self._missing():
                    self._finish()
            return used if return_success else None

        return weight_loader

    def fill(self, where: str) -> None:
        """Dummy values for a module of which nothing was loaded, with a warning.

        where: the module, for messages. Raises ValueError for one of which a part was loaded.
        """
        missing = self._missing()
        if missing and any(self._covered.values()):
            raise ValueError(f"{where}: missing {', '.join(f'{n} of {name}' for name, n in missing.items())}")
        if missing:
            warnings.warn(f"{where}: nothing was loaded; weights are dummy values", stacklevel=4)
            self._materialize()
            for name in self._specs:
                param = getattr(self._module, name)
                param.data.copy_(dummy_values(tuple(param.shape), param.dtype, param.device))
        self._is_complete = True

    def _materialize(self) -> None:
        for name in self._specs:
            param = getattr(self._module, name)
            if param.is_meta:
                replace_parameter(self._module, name, torch.empty_like(param, device=self._device))

    def _cover(self, name: str, shard_id: str | None, expert_id: int | None, is_of_all: bool) -> None:
        shape = self._specs[name].shape
        shards = [shard_id] if shard_id else self._shards(name)
        experts = range(shape[0]) if is_of_all or expert_id is None else [("expert", expert_id)]
        self._covered[name] |= {(shard, expert) for shard in shards for expert in experts}

    def _shards(self, name: str) -> tuple[str, ...]:
        is_gated = self._specs["w13_weight"].shape[1] == 2 * self._specs["w2_weight"].shape[2]
        return ("w2",) if name.startswith("w2_") else ("w1", "w3") if is_gated else ("w1",)

    def _missing(self) -> dict[str, int]:
        """{leaf: how many tensors of experts are missing}."""
        counts = {
            name: spec.shape[0] * len(self._shards(name)) - len(self._covered[name])
            for name, spec in self._specs.items()
        }
        return {name: count for name, count in counts.items() if count > 0}

    def _finish(self) -> None:
        self._is_complete = True
        self._on_complete()
