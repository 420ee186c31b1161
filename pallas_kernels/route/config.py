"""What one call asks (``RouteDesc``), how it is run (``RouteConfig``), and whether the Hopper kernel can."""

import dataclasses
from typing import Literal

from pallas_kernels.common.sm90 import WARPS
from pallas_kernels.quantize_and_permute.config import PermuteConfig, PermuteDesc
from pallas_kernels.quantize_and_permute.config import config_error as permute_error

MAX_EXPERTS = 512  # sixteen scores a thread
MAX_TOP_K = 16
MAX_GROUPS = 32  # one a thread of a warp
MAX_WARPGROUPS = 8
PLAIN_FLOOR = 1.1754943508222875e-38  # the smallest normal float32, which only avoids 0 / 0
BIASED_FLOOR = 1e-20


@dataclasses.dataclass(frozen=True)
class RouteDesc:
    """Static description of one call; the fields mean what the arguments of ``route`` mean.

    num_parts: partial sums whose sum are the logits.
    """

    num_tokens: int
    num_experts: int
    top_k: int
    dtype: str
    scoring: Literal["softmax", "sigmoid"]
    renormalize: bool
    scale: float = 1.0
    has_bias: bool = False
    num_groups: int = 0
    groups_kept: int = 0
    has_mask: bool = False
    num_parts: int = 1

    @property
    def floor(self) -> float:
        """Least divisor when a token's weights are divided by their sum."""
        return BIASED_FLOOR if self.has_bias or self.num_groups else PLAIN_FLOOR

    @property
    def chooses_by_logit(self) -> bool:
        """Whether weights are the softmax of the chosen logits. It also orders experts whose softmax underflows."""
        return self.scoring == "softmax" and self.renormalize and not self.has_bias and not self.num_groups


@dataclasses.dataclass(frozen=True)
class RouteConfig:
    """num_ctas: CTAs. num_warpgroups: of a CTA. Each warp takes a token at a time."""

    num_ctas: int
    num_warpgroups: int


def config_error(desc: RouteDesc, config: RouteConfig) -> str | None:
    """Why the Hopper kernel cannot run ``desc``, or None when it can."""
    if desc.dtype not in ("float32", "bfloat16", "float16"):
        return f"logits are {desc.dtype}; there are float32, bfloat16 and float16"
    if desc.num_experts > MAX_EXPERTS:
        return f"num_experts={desc.num_experts}: at most {MAX_EXPERTS}"
    if desc.top_k > MAX_TOP_K:
        return f"top_k={desc.top_k}: at most {MAX_TOP_K}"
    if desc.num_groups > MAX_GROUPS:
        return f"num_groups={desc.num_groups}: at most {MAX_GROUPS}"
    if desc.num_tokens < 1:
        return "no tokens: there is nothing to route"
    if config.num_ctas < 1 or not 1 <= config.num_warpgroups <= MAX_WARPGROUPS:
        return f"{config}: at least one CTA of 1 to {MAX_WARPGROUPS} warpgroups"
    return None


def fused_tokens(num_experts: int) -> int:
    """Most tokens that one CTA routes and aligns in one launch.

    On an H200 one launch takes 3.2 us for 16 tokens of 128 experts and 7.0 us for 64. Two launches take 3.1 and 3.5 us,
    and about 1 us between them. For 64 tokens of 8 experts one launch takes 3.1 us and two take 2.4 us.
    """
    return 64 if num_experts <= 16 else 32 if num_experts <= 64 else 16


def quantizes_beside(rows: PermuteDesc) -> bool:
    """Whether tokens are quantized in the launch that routes and aligns them.

    16 tokens take CTAs of four warpgroups, whose threads have the registers for 8192 columns: 119 of 128 registers at
    7168 columns, spills at 16384. More tokens, wider ones and microscaling formats take a launch of their own.
    """
    if rows.num_tokens > 16 or rows.width > 8192 or rows.microscaling_kind or rows.top_k:
        return False
    return permute_error(rows, PermuteConfig(1)) is None


def choose_config(desc: RouteDesc, *, in_one_cta: bool = False) -> RouteConfig:
    """A warp for every token, four tokens a CTA; with ``in_one_cta`` as many warps as one CTA holds.

    Eight warpgroups leave 64 registers a thread, which would spill with over 256 experts.
    """
    warpgroups = max(1, -(-desc.num_tokens // WARPS))
    if not in_one_cta:
        return RouteConfig(warpgroups, 1)
    return RouteConfig(1, min(MAX_WARPGROUPS if desc.num_experts <= 256 else MAX_WARPGROUPS // 2, warpgroups))
