"""What one call asks (``RotateDesc``) and whether the Hopper kernel can run it."""

import dataclasses

from pallas_kernels.common.pages import PAGE_SLOTS

HEADS = 4  # that a warpgroup works on at a time, one a warp


@dataclasses.dataclass(frozen=True)
class RotateDesc:
    """Static description of one call.

    batch, num_tokens: B and S, rows and tokens of each. num_heads, num_kv_heads: N and M. width: D of a head.
    num_slots: L of the cache. dtype: of all but angles, and but for the cache where it holds e4m3 codes: is_e4m3,
    with a scale of keys and one of values. is_packed: queries, keys and values are parts of one array.
    has_norm: heads of queries and keys are normalised. eps: of the norm. num_parts: partial sums that projections are
    given as. part_dtype: of these, None where it is ``dtype``. num_pages: of the cache, of PAGE_SLOTS slots each, in
    which a table says where rows have theirs; 0 where rows have slots of their own. has_bias: queries, keys and values
    have vectors that are added to their sums.
    """

    batch: int
    num_tokens: int
    num_heads: int
    num_kv_heads: int
    width: int
    num_slots: int
    dtype: str
    is_packed: bool
    has_norm: bool
    eps: float
    num_parts: int = 1
    part_dtype: str | None = None
    is_e4m3: bool = False
    num_pages: int = 0
    has_bias: bool = False

    @property
    def num_items(self) -> int:
        """What CTAs take in turn: four heads of a token."""
        return self.batch * self.num_tokens * self.items_of_token

    @property
    def items_of_token(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) // HEADS


@dataclasses.dataclass(frozen=True)
class RotateConfig:
    """num_ctas: persistent CTAs of one warpgroup."""

    num_ctas: int


def config_error(desc: RotateDesc, config: RotateConfig) -> str | None:
    """Why the Hopper kernel cannot run ``desc``, or None when it can."""
    if desc.dtype not in ("bfloat16", "float16"):
        return f"dtype {desc.dtype}; there are bfloat16 and float16"
    if desc.part_dtype not in (None, desc.dtype, "float32"):
        return f"partial sums of {desc.part_dtype}; there are {desc.dtype} and float32"
    if desc.num_heads % HEADS or desc.num_kv_heads % HEADS:
        return f"{desc.num_heads} query and {desc.num_kv_heads} key heads; multiples of {HEADS}"
    if desc.width not in (64, 128, 256):
        return f"width={desc.width}; there are 64, 128 and 256"
    rows, slots = (desc.num_pages, PAGE_SLOTS) if desc.num_pages else (desc.batch, desc.num_slots)
    if rows * desc.num_kv_heads * slots * desc.width >= 1 << 31:
        return f"a cache of {rows} {'pages' if desc.num_pages else 'rows'} of {slots} slots is counted in 31 bits"
    if config.num_ctas < 1:
        return f"num_ctas={config.num_ctas}: at least 1"
    return None


def choose_config(desc: RotateDesc, num_sms: int) -> RotateConfig:
    """Up to 16 CTAs an SM, all that its threads are."""
    return RotateConfig(max(1, min(desc.num_items, 16 * num_sms)))
