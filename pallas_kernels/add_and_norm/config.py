"""What one call asks (``AddNormDesc``) and whether the Hopper kernel can run it."""

import dataclasses

from pallas_kernels.common.rows import vector_length
from pallas_kernels.common.sm90 import WARPS
from pallas_kernels.quantize_and_permute.config import GROUP, WITH_SCALES, PermuteDesc

QUANTIZATIONS = ("none", *WITH_SCALES)
MOST_COLUMNS = 8192  # of a row, which a warpgroup holds at once: 64 values a thread
FEW_TOKENS = 4  # up to here a CTA multiplies with a router: more is others' work
_ROUTED_TOKENS, _MOST_ROUTED = 64, 16384  # of ``most_routed``
_MOST_WEIGHTS = 16384  # of a router, which a warpgroup holds at once: 64 registers a thread


@dataclasses.dataclass(frozen=True)
class AddNormDesc:
    """Static description of one call: T tokens of width H. num_parts: rows that are added to each; with has_bias one
    more, which all tokens share. eps: of the norm.

    dtype: of all operands and results, but for part_dtype of what is added; None where that has the same. quantization:
    of the norm, a kind of ``quantize_and_permute``, "none" for none. scale_rows: rows that its scales have room for, 0
    for num_tokens. num_experts: of the router that the norm is multiplied with, 0 for none; has_router_bias: its logits
    have a bias. top_k: rows of experts that are added to each token, 0 for none; then num_parts is 0, part_dtype is
    theirs, and shared_dtype that of one more row, or None.
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
    num_experts: int = 0
    has_router_bias: bool = False
    top_k: int = 0
    shared_dtype: str | None = None

    @property
    def has_addend(self) -> bool:
        return bool(self.num_parts or self.top_k)

    @property
    def rows(self) -> PermuteDesc:
        """The quantization as a launch of its own does it."""
        sizes = (self.num_tokens, self.width, 0, self.num_tokens)
        return PermuteDesc(*sizes, self.dtype, self.quantization, scale_rows=self.scale_rows)


@dataclasses.dataclass(frozen=True)
class AddNormConfig:
    """num_ctas: persistent CTAs of one warpgroup, each one row at a time; with a router one row and this many of its
    ``experts``."""

    num_ctas: int
    experts: int = 0


def most_routed(top_k: int, width: int) -> int:
    """Tokens whose rows of experts, ``top_k`` of ``width`` numbers each, a launch adds up: with more, or with longer
    rows of more than FEW_TOKENS, a launch of more CTAs than tokens does that."""
    return _ROUTED_TOKENS if top_k * width <= _MOST_ROUTED else FEW_TOKENS


def config_error(desc: AddNormDesc, config: AddNormConfig) -> str | None:
    """Why the Hopper kernel cannot run ``desc``, or None when it can."""
    if desc.dtype not in ("bfloat16", "float16"):
        return f"dtype {desc.dtype}; there are bfloat16 and float16"
    if desc.part_dtype not in (None, desc.dtype, "float32"):
        return f"parts of {desc.part_dtype}; there are {desc.dtype} and float32"
    if desc.shared_dtype not in (None, "bfloat16", "float16", "float32"):
        return f"shared: {desc.shared_dtype}; there are bfloat16, float16 and float32"
    most = most_routed(desc.top_k, desc.width)
    if desc.top_k and desc.num_tokens > most:
        return f"{desc.top_k} rows of experts, H={desc.width}, of T={desc.num_tokens} tokens: up to {most}"
    if not vector_length(desc.width, 2) or desc.width > MOST_COLUMNS:
        return f"H={desc.width}: from 128 to {MOST_COLUMNS}"
    if desc.quantization not in QUANTIZATIONS:
        return f"quantization {desc.quantization!r}; there are {', '.join(QUANTIZATIONS)}"
    if desc.rows.is_grouped and desc.width % (WARPS * GROUP):
        return f"H={desc.width}: groups of {GROUP} take a multiple of {WARPS * GROUP}"
    if config.num_ctas < 1:
        return f"num_ctas={config.num_ctas}: at least 1"
    return _router_error(desc, config) if desc.num_experts else None


def _router_error(desc: AddNormDesc, config: AddNormConfig) -> str | None:
    if desc.num_tokens > FEW_TOKENS:
        return f"a router of T={desc.num_tokens} tokens: up to {FEW_TOKENS}"
    if desc.quantization != "none":
        return f"a router of a norm that is quantized ({desc.quantization})"
    most = min(desc.num_experts, _MOST_WEIGHTS // desc.width)
    if not 1 <= config.experts <= most:
        return f"experts={config.experts} of a CTA: from 1 to {most}"
    return None


def choose_config(desc: AddNormDesc, num_sms: int) -> AddNormConfig:
    """Up to 8 CTAs an SM; with a router one an SM, where a CTA holds that many weights."""
    if not desc.num_experts:
        return AddNormConfig(max(1, min(desc.num_tokens, 8 * num_sms)))
    wanted = -(-desc.num_tokens * desc.num_experts // num_sms)
    experts = max(1, min(wanted, desc.num_experts, _MOST_WEIGHTS // desc.width))
    return AddNormConfig(max(1, desc.num_tokens * -(-desc.num_experts // experts)), experts)
