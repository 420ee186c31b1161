"""How the bytes of one stacked expert weight lie in memory."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class WeightLayout:
    """Frozen description of a stored weight's arrangement; carried as static metadata beside the arrays.

    name: "plain" keeps the matrix as (..., N, K) with K contiguous and scales in their natural shapes; other names
        belong to a kernel family, which owns the exact ``pack`` and its inverse ``unpack``.
    tile: (rows, columns) of one packed tile, or None.
    """

    name: str = "plain"
    tile: tuple[int, int] | None = None

    @property
    def is_plain(self) -> bool:
        return self.name == "plain"


PLAIN = WeightLayout()
