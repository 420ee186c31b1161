"""``RoutedRows``: what ``combine`` reads, for a kernel that adds it up with something else."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels.combine.api import check_operands, combine
from pallas_kernels.common.types import Dtype, Leaf


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RoutedRows:
    """The rows of T tokens' experts, not added up. The fields are the operands of ``combine``.

    rows: (Mp, H). row_of: (T, top_k) int32, -1 for a slot that contributes nothing. weights: (T, top_k). shared: (T, H)
    or None.
    """

    rows: Leaf
    row_of: Leaf
    weights: Leaf
    shared: Leaf | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(T, H), of the sum."""
        return self.row_of.shape[0], self.rows.shape[1]

    def check(self) -> None:
        """Raises what ``combine`` raises for wrong operands."""
        check_operands(self.rows.shape, self.row_of, self.weights, self.shared)

    def whole(self, dtype: Dtype, implementation: str | Sequence[str] | None = None) -> jax.Array:
        """The sum (T, H), rounded once."""
        operands = self.rows, self.row_of, self.weights
        return combine(*operands, shared=self.shared, out_dtype=jnp.dtype(dtype), implementation=implementation)
