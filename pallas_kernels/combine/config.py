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
        """Columns that a CTA sums at a time."""
        return WARPGROUP * vector_length(self.width, jnp.dtype(self.dtype).itemsize)

    @property
    def starts(self) -> list[int]:
        """First columns of the pieces of a row."""
        return pieces(self.width, self.piece)


@dataclasses.dataclass(frozen=True)
class CombineConfig:
    """num_ctas: persistent CTAs of one warpgroup, each one piece of a token's row at a time."""

    num_ctas: int


def config_error(desc: CombineDesc, config: CombineConfig) -> str | None:
    """Why the Hopper kernel cannot run ``desc``, or None when it can."""
    for what, name in (("rows", desc.dtype), ("the output", desc.out_dtype), ("shared", desc.shared_dtype)):
        if name not in ("bfloat16", "float16", "float32", None):
            return f"{what}: {name}; there are bfloat16, float16 and float32"
    if not vector_length(desc.width, jnp.dtype(desc.dtype).itemsize):
        return f"H={desc.width}: a row must give each of 128 threads an element"
    if config.num_ctas < 1:
        return f"num_ctas={config.num_ctas}: at least 1"
    return None


def choose_config(desc: CombineDesc, num_sms: int) -> CombineConfig:
    """Up to 16 CTAs an SM, each of which keeps top_k loads of 16 bytes a thread in flight."""
    items = desc.num_tokens * len(desc.starts) if vector_length(desc.width, jnp.dtype(desc.dtype).itemsize) else 1
    return CombineConfig(max(1, min(items, 16 * num_sms)))
