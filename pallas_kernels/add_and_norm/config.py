"""What one call asks (``AddNormDesc``) and whether the Hopper kernel can run it."""

import dataclasses

from pallas_kernels.common.rows import vector_length
from pallas_kernels.quantize_and_permute.config import GROUP, WARPS, PermuteDesc

QUANTIZATIONS = ("none", "e4m3_row", "int8_row", "e4m3_group", "e4m3_group_ue8m0")
MOST_COLUMNS = 8192  # of a row, which a warpgroup holds at once: 64 values a thread


@dataclasses.dataclass(frozen=True)
class AddNormDesc:
    """Static description of one call: T tokens of width H. num_parts: rows that are added to each; with has_bias one
    more, which all tokens share. eps: of the norm.

    dtype: of all operands and results, but for part_dtype of what is added; None where that has the same. quantization:
    of the norm, a kind of ``quantize_and_permute``, "none" for none. scale_rows: rows that its scales have room for, 0
    for num_tokens.
    """

    num_tokens: int
    width: int
    dtype: str
    num_parts: int
    eps: float
    part_dtype: str | None = None
    quantization: str = "none"
    scale_rows: int = 0
    has_bias: bool = False

    @property
    def rows(self) -> PermuteDesc:
        """The quantization as a launch of its own does it."""
        sizes = (self.num_tokens, self.width, 0, self.num_tokens)
        return PermuteDesc(*sizes, self.dtype, self.quantization, scale_rows=self.scale_rows)


@dataclasses.dataclass(frozen=True)
class AddNormConfig:
    """num_ctas: persistent CTAs of one warpgroup, each one row at a time."""

    num_ctas: int


def config_error(desc: AddNormDesc, config: AddNormConfig) -> str | None:
    """Why the Hopper kernel cannot run ``desc``, or None when it can."""
    if desc.dtype not in ("bfloat16", "float16"):
        return f"dtype {desc.dtype}; there are bfloat16 and float16"
    if desc.part_dtype not in (None, desc.dtype, "float32"):
        return f"parts of {desc.part_dtype}; there are {desc.dtype} and float32"
    if not vector_length(desc.width, 2) or desc.width > MOST_COLUMNS:
        return f"H={desc.width}: from 128 to {MOST_COLUMNS}"
    if desc.quantization not in QUANTIZATIONS:
        return f"quantization {desc.quantization!r}; there are {', '.join(QUANTIZATIONS)}"
    if desc.rows.is_grouped and desc.width % (WARPS * GROUP):
        return f"H={desc.width}: groups of {GROUP} take a multiple of {WARPS * GROUP}"
    if config.num_ctas < 1:
        return f"num_ctas={config.num_ctas}: at least 1"
    return None


def choose_config(desc: AddNormDesc, num_sms: int) -> AddNormConfig:
    """Up to 8 CTAs an SM."""
    return AddNormConfig(max(1, min(desc.num_tokens, 8 * num_sms)))
