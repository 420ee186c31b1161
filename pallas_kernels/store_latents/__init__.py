"""From MLA's first projections to rows that queries are made of, and latents in the cache."""

from pallas_kernels.store_latents.api import describe, store_latents
from pallas_kernels.store_latents.config import LatentsConfig, LatentsDesc, choose_config, config_error

__all__ = ["LatentsConfig", "LatentsDesc", "choose_config", "config_error", "describe", "store_latents"]
