"""What one call asks (``RouteDesc``) and whether the Hopper kernel can run it."""

import dataclasses
from typing import Literal

TOKENS_PER_BLOCK = 4  # one a warp
MAX_EXPERTS = 512
PLAIN_FLOOR = 1.1754943508222875e-38  # smallest normal float32: only 0 / 0 is avoided
BIASED_FLOOR = 1e-20


@dataclasses.dataclass(frozen=True)
class RouteDesc:
    """Static description of one call; the fields mean what the arguments of ``route`` mean."""

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

    @property
    def floor(self) -> float:
        """What the sum of a token's weights is taken as at least when dividing by it."""
        return BIASED_FLOOR if self.has_bias or self.num_groups else PLAIN_FLOOR


def config_error(desc: RouteDesc) -> str | None:
    """Why the Hopper kernel cannot run ``desc``, or None when it can. There is nothing to configure."""
    if desc.dtype not in ("float32", "bfloat16"):
        return f"logits are {desc.dtype}; there are float32 and bfloat16"
    if desc.num_experts % 4 or desc.num_experts > MAX_EXPERTS:
        return f"num_experts={desc.num_experts}: a multiple of 4 up to {MAX_EXPERTS}, four logits a thread"
    if desc.num_tokens < 1:
        return "no tokens: there is nothing to route"
    return None
