"""What one call asks (``HeadsDesc``), how it runs (``HeadsConfig``), and what the Hopper kernel cannot run."""

import dataclasses

from pallas_kernels.common.sm90 import SMEM_BYTES, TMA_BOX, smem_bytes

DTYPES = ("bfloat16", "float16")
ROWS = 64  # tokens of a tile
DEPTH = 64  # of a step
WARPGROUPS = 2  # that multiply, each half of the columns
_BARRIERS = 1024  # bytes, more than the barriers take


@dataclasses.dataclass(frozen=True)
class HeadsDesc:
    """Static description of one call.

    Args:
        num_tokens, num_heads: T, N.
        first_row, num_rows: of the part of each head's matrix.
        all_rows: R, of a whole one.
        columns: C of a matrix.
        dtype: of all arrays.
        transposes_w: whether its columns are added up over, not its rows.
        x_columns: of a row of x, K or more.
    """

    num_tokens: int
    num_heads: int
    first_row: int
    num_rows: int
    all_rows: int
    columns: int
    dtype: str
    transposes_w: bool
    x_columns: int

    @property
    def depth(self) -> int:
        """Of a sum."""
        return self.columns if self.transposes_w else self.num_rows

    @property
    def width(self) -> int:
        """Outputs of a token and head."""
        return self.num_rows if self.transposes_w else self.columns


@dataclasses.dataclass(frozen=True)
class HeadsConfig:
    """How the kernel runs. num_stages: steps in shared memory."""

    num_stages: int


def shared_bytes(desc: HeadsDesc, config: HeadsConfig) -> int:
    """Shared memory of a CTA: rows and weights of its steps, and its outputs."""
    step = smem_bytes((config.num_stages, ROWS, DEPTH), desc.dtype)
    step += smem_bytes((config.num_stages, desc.width, DEPTH), desc.dtype)
    return step + smem_bytes((ROWS, desc.width), desc.dtype) + _BARRIERS


def config_error(desc: HeadsDesc, config: HeadsConfig) -> str | None:
    """Why the Hopper kernel cannot run ``desc``, or None when it can."""
    if desc.dtype not in DTYPES:
        return f"{desc.dtype}; there are {' and '.join(DTYPES)}"
    if desc.num_tokens < 1 or desc.num_heads < 1:
        return f"{desc.num_tokens} tokens of {desc.num_heads} heads: at least one"
    if desc.x_columns % DEPTH or desc.first_row % 8 or desc.all_rows % 8:
        # TMA copies take whole swizzled tiles.
        return (
            f"rows of {desc.x_columns}, matrices of {desc.all_rows} rows from row {desc.first_row} on: multiples of "
            f"{DEPTH}, 8 and 8"
        )
    if desc.depth % DEPTH:
        return f"K={desc.depth}: a multiple of {DEPTH}"
    most = WARPGROUPS * TMA_BOX
    if desc.width % (WARPGROUPS * 64) or desc.width > most:
        return f"{desc.width} outputs of a head: a multiple of {WARPGROUPS * 64}, at most {most}"
    if desc.num_rows > TMA_BOX:
        return f"{desc.num_rows} rows of a head's matrix: at most {TMA_BOX}"
    if config.num_stages < 1:
        return f"{config}: at least one stage"
    if (size := shared_bytes(desc, config)) > SMEM_BYTES:
        return f"{size} bytes of shared memory, there are {SMEM_BYTES}"
    return None


def choose_config(desc: HeadsDesc) -> HeadsConfig:
    """As many stages as there are steps, so that no load waits, or as fit."""
    fitting = (HeadsConfig(stages) for stages in range(max(1, desc.depth // DEPTH), 1, -1))
    return next((config for config in fitting if config_error(desc, config) is None), HeadsConfig(1))
