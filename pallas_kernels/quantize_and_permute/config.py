"""What one call asks (``PermuteDesc``) and whether the Hopper kernel can run it."""

import dataclasses

import jax.numpy as jnp

from pallas_kernels.common.microscaling import MX_GROUP, NVFP4_GROUP
from pallas_kernels.common.rows import vector_length
from pallas_kernels.common.sm90 import LANES, WARPGROUP, WARPS

MICROSCALING = ("nvfp4", "nvfp4_row", "mxfp4", "mxfp8")
WITH_SCALES = ("e4m3_row", "int8_row", "e4m3_group", "e4m3_group_ue8m0")  # codes, and scales that rows have themselves
QUANTIZATIONS = ("none", *WITH_SCALES, "e4m3_tensor", "e4m3_tensor_row", *MICROSCALING)
TAKES_SCALE = ("e4m3_tensor", "nvfp4")
GROUP = 128
SHORT_GROUP = 64  # columns that the last group of a row may have instead
NARROW = 1024  # most columns of a row that a warp holds: 32 values a thread
PART_GROUPS = 16  # groups of a row that a warpgroup holds at once: 16 values a thread
ROWS_IN_PARTS = 3168  # more, of which none is named, are as many as CTAs, and whole rows take 0.93 of the time (H100)
GATHERED = 2048  # columns of a row that a warpgroup gathers at a time: sixteen loads in flight a thread


@dataclasses.dataclass(frozen=True)
class PermuteDesc:
    """Static description of one call.

    Args:
        num_tokens: T, rows of the input.
        width: H.
        top_k: copies of each token, 0 when rows keep their places.
        num_rows: Mp, rows of the output.
        dtype: of the input.
        quantization: one of ``QUANTIZATIONS``.
        num_named: with top_k = 0, how many rows are named as in use; None for all.
        num_experts: experts with an order of columns each, 0 where columns keep their places.
        block_m: rows of a tile, which has one expert; 0 where columns keep their places.
        scale_rows: rows that the scales have room for, 0 for num_rows.
    """

    num_tokens: int
    width: int
    top_k: int
    num_rows: int
    dtype: str
    quantization: str
    num_named: int | None = None
    num_experts: int = 0
    block_m: int = 0
    scale_rows: int = 0

    @property
    def num_items(self) -> int:
        """What CTAs take in turn: rows of the input, or pieces of rows of the output where columns are gathered."""
        if self.num_experts:
            return self.num_tokens * self.top_k * -(-self.width // GATHERED)
        return (self.num_tokens if self.num_named is None else self.num_named) * self.parts

    @property
    def parts(self) -> int:
        """Equal parts of a wide row that keeps its place, each the work of a CTA. 1 unless it has whole groups with
        scales.
        """
        groups = self.width // GROUP
        is_cut = self.num_named is not None or self.num_tokens <= ROWS_IN_PARTS
        if not self.is_grouped or self.top_k or not is_cut or groups <= PART_GROUPS or self.width % GROUP:
            return 1
        return groups // next((size for size in range(PART_GROUPS, 3, -4) if groups % size == 0), groups)

    @property
    def is_grouped(self) -> bool:
        """Whether every 128 columns have a scale."""
        return self.quantization.startswith("e4m3_group")

    @property
    def has_power_of_two_scales(self) -> bool:
        """Whether scales are rounded up to powers of two."""
        return self.quantization.endswith("_ue8m0")

    @property
    def microscaling_kind(self) -> str | None:
        """The microscaling format that rows are rounded to, None for other rules."""
        return self.quantization.removesuffix("_row") if self.quantization in MICROSCALING else None

    @property
    def microscaling_group(self) -> int | None:
        """Columns that share one of its scales."""
        kind = self.microscaling_kind
        return None if kind is None else NVFP4_GROUP if kind == "nvfp4" else MX_GROUP

    @property
    def out_dtype(self) -> str:
        kind = self.quantization.partition("_")[0]
        return {"none": self.dtype, "e4m3": "float8_e4m3fn", "int8": "int8"}.get(kind, "bfloat16")

    @property
    def scale_shape(self) -> tuple[int, ...] | None:
        """Shape of the scales that are computed, or None."""
        rows = self.scale_rows or self.num_rows
        if self.is_grouped:
            return (-(-self.width // GROUP), rows)
        return (rows,) if self.quantization.endswith("_row") else None


@dataclasses.dataclass(frozen=True)
class PermuteConfig:
    """num_ctas: persistent CTAs of one warpgroup. rows_at_once: rows a CTA works on, 1, or 4 with a warp each."""

    num_ctas: int
    rows_at_once: int = 1


def config_error(desc: PermuteDesc, config: PermuteConfig) -> str | None:
    """Why the Hopper kernel cannot run ``desc``, or None when it can."""
    if desc.dtype not in ("bfloat16", "float16", "float32"):
        return f"x is {desc.dtype}; there are bfloat16, float16 and float32"
    if desc.num_experts:
        if desc.quantization != "none":
            return f"an order of columns with quantization {desc.quantization!r}; gather first, then quantize in place"
        if max(desc.num_rows, desc.num_tokens, desc.num_experts) * desc.width >= 1 << 31:
            return f"{desc.num_rows} rows of {desc.width} columns: gathered columns are counted in 31 bits"
    elif desc.is_grouped:
        if desc.width % SHORT_GROUP or not desc.width:
            return f"H={desc.width}: groups of {GROUP} take a multiple of {SHORT_GROUP}"
    elif (group := desc.microscaling_group) is not None:
        if desc.width % group or not grid_vector(desc):
            return f"H={desc.width}: {desc.quantization} takes a multiple of {group}, at least {2 * WARPGROUP}"
    elif not vector_length(desc.width, jnp.dtype(desc.dtype).itemsize):
        return f"H={desc.width}: a row must give each of 128 threads an element"
    if config.num_ctas < 1:
        return f"num_ctas={config.num_ctas}: at least 1"
    if config.rows_at_once not in (1, WARPS):
        return f"rows_at_once={config.rows_at_once}: 1 or {WARPS}"
    if config.rows_at_once == WARPS and not narrow_vector(desc):
        return (
            f"rows_at_once={WARPS} of {desc.width} columns, {desc.quantization!r}: rows with a scale each, an even "
            f"number of columns a thread of a warp, at most {NARROW}"
        )
    return None


def narrow_vector(desc: PermuteDesc) -> int:
    """Elements that a thread loads at once where a warp holds a row: up to 16 bytes, at least 2 elements.

    0 where a row is too wide for a warp, and for quantizations that take a warpgroup.
    """
    if desc.quantization not in ("e4m3_row", "int8_row") or desc.num_experts or desc.width > NARROW:
        return 0
    length = 16 // jnp.dtype(desc.dtype).itemsize
    while length > 1 and desc.width % (LANES * length):
        length //= 2
    return length if length > 1 else 0


def grid_vector(desc: PermuteDesc) -> int:
    """Elements that a thread loads at once of rows in groups: up to 16 bytes, at least 2; 0 for rows too short."""
    length = vector_length(desc.width, jnp.dtype(desc.dtype).itemsize)
    return length if length > 1 else 0


def choose_config(desc: PermuteDesc, num_sms: int) -> PermuteConfig:
    """As many CTAs as an SM holds, and some to follow. Rows in flight hide the latency of loads, reduction and stores.

    On an H200 8192 tokens of Mixtral in e4m3 take 37 us with 24 CTAs an SM, 55 with 4 and 45 with 8. Narrow rows are
    taken four at a time where an SM has more than three: 512 rows of Qwen3 in e4m3 take 1.5 us, one by one 1.7; 65536
    rows 46 and 58.
    """
    rows_at_once = WARPS if narrow_vector(desc) and desc.num_items > 3 * num_sms else 1
    return PermuteConfig(max(1, min(-(-desc.num_items // rows_at_once), 24 * num_sms)), rows_at_once)
