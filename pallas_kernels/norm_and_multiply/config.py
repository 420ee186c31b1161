"""What one call asks (``NormProductDesc``), whether the Hopper kernel can run it, and how."""

import dataclasses

from pallas_kernels.add_and_norm.config import AddNormConfig, AddNormDesc
from pallas_kernels.add_and_norm.config import config_error as norm_error
from pallas_kernels.grouped_gemm.problem import GemmDesc
from pallas_kernels.grouped_gemm.vector import VectorConfig, vector_candidates, vector_error


@dataclasses.dataclass(frozen=True)
class NormProductDesc:
    """Static description of one call. norm: of the sum and its norm. gemm: of the product of that, of one row, with one
    weight or several side by side."""

    norm: AddNormDesc
    gemm: GemmDesc


def config_error(desc: NormProductDesc, config: VectorConfig) -> str | None:
    """Why the Hopper kernel cannot run ``desc``, or None when it can."""
    if desc.norm.num_tokens != 1:
        return f"T={desc.norm.num_tokens} tokens: one"
    return norm_error(desc.norm, AddNormConfig(1)) or vector_error(desc.gemm, config)


def choose_config(desc: NormProductDesc, num_sms: int) -> VectorConfig:
    """That of the product alone."""
    return next(iter(vector_candidates(desc.gemm, num_sms)), VectorConfig(1))
