"""``LeafLayout``: how a method of vLLM keeps what moe_jax calls a leaf, under which name and in which axes."""

import dataclasses
from collections.abc import Mapping

import torch


@dataclasses.dataclass(frozen=True)
class LeafLayout:
    """The parameter of a leaf.

    name: of the parameter. is_transposed: (E, K, N) where the leaf is (E, N, K). is_flat: (E, N) where the leaf is
    (E, N, 1). is_common: (E,) where the leaf is (E, G) with one value for gate and up. dtype: that vLLM's parameter
    has before loading, None for the leaf's.
    """

    name: str
    is_transposed: bool = False
    is_flat: bool = False
    is_common: bool = False
    dtype: torch.dtype | None = None

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The parameter's shape for a leaf's."""
        return tuple(self.shown(torch.empty(shape, device="meta")).shape)

    def shown(self, leaf: torch.Tensor) -> torch.Tensor:
        """The leaf as the parameter has it, a view."""
        if self.is_transposed:
            return leaf.transpose(1, 2)
        if self.is_common and leaf.ndim == 2:
            return leaf[:, 0]
        return leaf.flatten(1) if self.is_flat else leaf

    def stored(self, parameter: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """The inverse of ``shown``: the leaf of this shape."""
        if self.is_transposed:
            return parameter.transpose(1, 2)
        if self.is_common and len(shape) == 2:
            return parameter[:, None].expand(shape)
        return parameter.reshape(shape) if self.is_flat else parameter


def shown_leaves(leaves: Mapping[str, torch.Tensor], layouts: Mapping[str, LeafLayout]) -> dict[str, torch.Tensor]:
    """Leaves by the names and in the axes of their parameters."""
    return {layouts[name].name: layouts[name].shown(leaf) for name, leaf in leaves.items()}
