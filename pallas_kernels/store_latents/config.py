"""What one call asks (``LatentsDesc``) and whether the Hopper kernel can run it."""

import dataclasses

from pallas_kernels.common.pages import PAGE_SLOTS
from pallas_kernels.common.sm90 import WARPGROUP, WARPS
from pallas_kernels.quantize_and_permute.config import GROUP, PermuteDesc

MOST_COLUMNS = 4096  # of a row that is normalised: 32 values a thread


@dataclasses.dataclass(frozen=True)
class LatentsDesc:
    """Static description of one call.

    Args:
        batch, num_tokens: B and S, rows and tokens of each.
        queries, rank, rope: Q, R and D, columns of a projected row.
        num_slots: L of the cache.
        dtype: of all but angles, codes and scales.
        eps: of the norms.
        is_interleaved: which columns of a key are pairs.
        has_queries: whether the first columns are normalised; else they are not read.
        quantization: of these, one of those of ``add_and_norm``.
        scale_rows: rows that the scales have room for, 0 for B * S.
        num_pages: of the cache, 0 where rows have slots of their own.
    """

    batch: int
    num_tokens: int
    queries: int
    rank: int
    rope: int
    num_slots: int
    dtype: str
    eps: float
    is_interleaved: bool
    has_queries: bool
    quantization: str = "none"
    scale_rows: int = 0
    num_pages: int = 0

    @property
    def rows(self) -> PermuteDesc:
        """What queries are made of, as rows that are quantized."""
        count = self.batch * self.num_tokens
        return PermuteDesc(count, self.queries, 0, count, self.dtype, self.quantization, scale_rows=self.scale_rows)

    @property
    def items_of_token(self) -> int:
        """What CTAs take in turn: the latent of a token, or what its queries are made of."""
        return 2 if self.has_queries else 1


@dataclasses.dataclass(frozen=True)
class LatentsConfig:
    """num_ctas: persistent CTAs of one warpgroup."""

    num_ctas: int


def config_error(desc: LatentsDesc, config: LatentsConfig) -> str | None:
    """Why the Hopper kernel cannot run ``desc``, or None when it can."""
    if desc.dtype not in ("bfloat16", "float16"):
        return f"dtype {desc.dtype}; there are bfloat16 and float16"
    if not 0 < desc.rank <= MOST_COLUMNS or not 0 < desc.rope <= 2 * WARPGROUP:
        return f"R={desc.rank}, D={desc.rope}: from 1 to {MOST_COLUMNS} and to {2 * WARPGROUP}"
    if desc.has_queries:
        step = WARPS * GROUP if desc.rows.is_grouped else WARPGROUP
        if desc.queries % step or not 0 < desc.queries <= MOST_COLUMNS:
            return f"Q={desc.queries} with {desc.quantization}: a multiple of {step}, at most {MOST_COLUMNS}"
    rows, slots = (desc.num_pages, PAGE_SLOTS) if desc.num_pages else (desc.batch, desc.num_slots)
    width = desc.queries + desc.rank + desc.rope
    if max(rows * slots, desc.batch * desc.num_tokens) * width >= 1 << 31:
        return f"{rows} {'pages' if desc.num_pages else 'rows'} of {slots} slots: elements are counted in 31 bits"
    if desc.batch * desc.num_tokens < 1 or config.num_ctas < 1:
        return f"{desc.batch * desc.num_tokens} tokens, num_ctas={config.num_ctas}: at least 1"
    return None


def choose_config(desc: LatentsDesc, num_sms: int) -> LatentsConfig:
    """Up to 16 CTAs an SM, all that its threads are."""
    return LatentsConfig(max(1, min(desc.batch * desc.num_tokens * desc.items_of_token, 16 * num_sms)))
