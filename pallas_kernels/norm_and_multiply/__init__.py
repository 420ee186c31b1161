"""A residual sum, its RMSNorm and the product of that with weights, of one token in one launch."""

from pallas_kernels.norm_and_multiply.api import describe, norm_and_multiply
from pallas_kernels.norm_and_multiply.config import NormProductDesc, choose_config, config_error

__all__ = ["NormProductDesc", "choose_config", "config_error", "describe", "norm_and_multiply"]
