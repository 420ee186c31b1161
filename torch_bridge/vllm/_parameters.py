"""The parameters of a layer of vLLM as checkpoint leaves, and back: what the kernels read as the layer's parameters."""

from typing import Any

import torch

from moe_jax import ExpertWeights
from torch_bridge.launch._weights import destination_names
from torch_bridge.vllm._formats import Format
from torch_bridge.vllm._settings import is_interleaved

# Leaves of ``ExpertWeights`` -> the kinds of checkpoint leaves that they are made from.
_SOURCES = {
    "data": ("weight", "weight_packed"),
    "scale": ("weight_scale",),
    "global_scale": ("weight_global_scale", "weight_scale_2"),
    "zero_point": ("weight_zero_point",),
    "g_idx": ("weight_g_idx",),
    "bias": ("bias",),
}


class Parameters:
    """The parameters of one ``RoutedExperts``, by the names of the format."""

    def __init__(self, layer: Any, form: Format):
        self._layer, self._form = layer, form
        moe = layer.moe_config
        self._projections = 2 if moe.is_act_and_mul else 1
        self._is_interleaved = is_interleaved(layer)

    def read(self, name: str, first: int, last: int) -> torch.Tensor:
        """A checkpoint leaf of experts first to last - 1; online "w13" (E, G, I, H) and "w2" (E, H, I)."""
        prefix, _, leaf = name.partition("_")
        if leaf == "bias":
            part = self._parameter(name)[first:last]
        elif leaf == "input_scale":
            return self._input_scale(prefix, last - first)
        else:
            source = self._form.leaves[leaf or "weight"]
            part = source.to_leaf(self._parameter(f"{prefix}_{source.parameter}")[first:last])
        if prefix == "w13" and self._is_interleaved and leaf != "weight_g_idx":
            part = torch.cat([part[:, 0::2], part[:, 1::2]], dim=1)
        if not leaf and prefix == "w13":
            part = part.unflatten(1, (self._projections, -1))
        return part

    def names_of_experts(self) -> list[str]:
        """Parameters that have to be loaded for each expert; scales of inputs may be one for all."""
        names = [f"{prefix}_{leaf.parameter}" for prefix in ("w13", "w2") for leaf in self._form.leaves.values()]
        return [name for name in dict.fromkeys(names) if hasattr(self._layer, name) and "input" not in name]

    def memory(self) -> dict[str, torch.Tensor]:
        """The parameters that results may take the place of."""
        found = {}
        for prefix in ("w13", "w2"):
            for field, kinds in _SOURCES.items():
                for kind in kinds:
                    name = kind if kind == "bias" else getattr(self._form.leaves.get(kind), "parameter", None)
                    if name is not None and hasattr(self._layer, f"{prefix}_{name}"):
                        found[f"{prefix}_{field}"] = self._parameter(f"{prefix}_{name}")
        return found

    def show(self, weights: ExpertWeights) -> None:
        """Register what the kernels read as the layer's parameters, in place of what it was made from."""
        import jax

        for name, tensor in zip(destination_names(weights), jax.tree.leaves(weights), strict=True):
            prefix, _, field = name.partition("_")
            self._register(self._name_of(prefix, field), tensor)
        for name in self._form.unused:
            for prefix in ("w13", "w2"):
                old = getattr(self._layer, f"{prefix}_{name}", None)
                if old is not None:
                    self._register(f"{prefix}_{name}", old.new_empty((old.shape[0], 0)))

    def _name_of(self, prefix: str, field: str) -> str:
        if field == "input_scale":
            return f"{prefix}_input_scale"
        for kind in _SOURCES[field]:
            if kind == "bias":
                return f"{prefix}_bias"
            if kind in self._form.leaves:
                return f"{prefix}_{self._form.leaves[kind].parameter}"
        return f"{prefix}_weight_{field}"  # quantized here: scales that vLLM's layer had no parameter for

    def _register(self, name: str, tensor: torch.Tensor) -> None:
        old = getattr(self._layer, name, None)
        if old is not None and old.data_ptr() == tensor.data_ptr() and old.shape == tensor.shape and tensor.numel():
            return
        parameter: Any = torch.nn.Parameter(tensor, requires_grad=False)
        if (loader := getattr(old, "weight_loader", None)) is not None:
            parameter.weight_loader = loader
        if name in self._layer.__dict__:
            delattr(self._layer, name)
        setattr(self._layer, name, parameter)

    def _parameter(self, name: str) -> torch.Tensor:
        return getattr(self._layer, name).data

    def _input_scale(self, prefix: str, count: int) -> torch.Tensor:
        """The largest of all experts, for each of some: the kernels have one for a layer. A negative one is damage,
        which is to be seen.
        """
        least, largest = self._parameter(f"{prefix}_input_scale").aminmax()
        largest = torch.where(least < 0, least, largest)
        return largest.expand((count, self._projections) if prefix == "w13" else (count,))
