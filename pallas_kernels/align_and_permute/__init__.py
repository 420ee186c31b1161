"""``align`` and ``quantize_and_permute`` of few tokens in one launch."""

from pallas_kernels.align_and_permute.api import align_and_permute
from pallas_kernels.align_and_permute.config import config_error

__all__ = ["align_and_permute", "config_error"]
