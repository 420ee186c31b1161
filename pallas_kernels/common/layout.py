"""How the bytes of one stacked expert weight lie in memory."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class WeightLayout:
    """Frozen description of a stored weight's arrangement; carried as static metadata beside the arrays.

    name: "plain" keeps the matrix as (..., N, K) with K contiguous and scales in their natural shapes; other names
        belong to a kernel family, which owns the exact ``pack`` and its inverse ``unpack``.
    tile: (rows, columns) of one packed tile, or None.
    shape: of one expert's matrices, ([G,] N, K), where the packed array does not say; None where it does.
    """

    name: str = "plain"
    tile: tuple[int, int] | None = None
    shape: tuple[int, ...] | None = None

    @property
    def is_plain(self) -> bool:
        return self.name == "plain"


PLAIN = WeightLayout()
