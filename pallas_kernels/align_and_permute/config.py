"""Whether one launch can align and move the tokens of a call."""

from pallas_kernels.align.config import AlignConfig, AlignDesc
from pallas_kernels.align.config import config_error as align_error
from pallas_kernels.quantize_and_permute.config import PermuteConfig, PermuteDesc
from pallas_kernels.quantize_and_permute.config import config_error as permute_error

MOST_PAIRS = 1024  # which every CTA reads: eight a thread
MOST_TOKENS = 128  # a CTA each; more were not timed
MOST_SLOTS = 16  # of a token: each is code of its own
MOST_COLUMNS = 8192  # of a token, which a thread holds while the CTA aligns: 64 of them


def config_error(tiles: AlignDesc, rows: PermuteDesc) -> str | None:
    """Why one launch cannot do ``tiles`` and ``rows``, or None when it can."""
    if tiles.num_pairs > MOST_PAIRS:
        return f"{tiles.num_pairs} pairs of token and slot: at most {MOST_PAIRS}"
    if rows.num_tokens > MOST_TOKENS or rows.top_k > MOST_SLOTS:
        return f"T={rows.num_tokens}, top_k={rows.top_k}: at most {MOST_TOKENS} and {MOST_SLOTS}"
    if tiles.top_k or tiles.are_wide:
        return "tokens that stay unpermuted, or ids of 64 bits"
    if rows.width > MOST_COLUMNS:
        return f"H={rows.width}: at most {MOST_COLUMNS}"
    return align_error(tiles, AlignConfig(1)) or permute_error(rows, PermuteConfig(1))
