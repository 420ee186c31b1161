"""What one call asks (``CombineDesc``) and whether the Hopper kernel can run it."""

import dataclasses

import jax.numpy as jnp

from pallas_kernels.common.rows import pieces, vector_length
from pallas_kernels.common.sm90 import WARPGROUP


@dataclasses.dataclass(frozen=True)
class CombineDesc:
    """Static description of one call: T tokens of width H, top_k rows each out of Mp.

    dtype: of the rows. shared_dtype: of one more addend a token, or None.
    """

    num_tokens: int
    width: int
    top_k: int
    num_rows: int
    dtype: str
    out_dtype: str
    shared_dtype: str | None = None

    @property
    def piece(self) -> int:
        """Columns a block sums at a time."""
        return WARPGROUP * vector_length(self.width, jnp.dtype(self.dtype).itemsize)

    @property
    def starts(self) -> list[int]:
        """First columns of the pieces of a row."""
        return pieces(self.width, self.piece)


@dataclasses.dataclass(frozen=True)
class CombineConfig:
    """num_blocks: persistent blocks of one warpgroup, each one piece of a token's row at a time."""

    num_blocks: int


def config_error(desc: CombineDesc, config: CombineConfig) -> str | None:
    """Why the Hopper kernel cannot run ``desc``, or None when it can."""
    for what, name in (("rows", desc.dtype), ("the output", desc.out_dtype), ("shared", desc.shared_dtype)):
        if name not in ("bfloat16", "float16", "float32", None):
            return f"{what}: {name}; there are bfloat16, float16 and float32"
    if not vector_length(desc.width, jnp.dtype(desc.dtype).itemsize):
        return f"H={desc.width}: a row must give each of 128 threads an element"
    if config.num_blocks < 1:
        return f"num_blocks={config.num_blocks}: at least 1"
    return None


def choose_config(desc: CombineDesc, num_sms: int) -> CombineConfig:
    """Sixteen blocks a multiprocessor keep top_k loads of 16 bytes a thread in flight each."""
    items = desc.num_tokens * len(desc.starts) if vector_length(desc.width, jnp.dtype(desc.dtype).itemsize) else 1
    return CombineConfig(max(1, min(items, 16 * num_sms)))
