"""Granite-MoE: experts in every layer, fused as ``input_linear`` and ``output_linear``, weights renormalized."""

from moe_jax.loading import ExpertNames
from moe_jax.models._config import ConfigReader, MoEBlockConfig, read_block_config
from moe_jax.models.families._moe_family import MoEFamily


class GraniteMoe(MoEFamily):
    """Granite 3.0 1B-A400M, 3B-A800M and models of their architecture.

    The multipliers of the config act outside of the blocks with experts.
    """

    model_type = "granitemoe"
    architecture = "GraniteMoeForCausalLM"
    moe_module = "block_sparse_moe"
    router_module = "router.layer"
    expert_names = ExpertNames(spelling=("input_linear", "input_linear", "output_linear"))

    @staticmethod
    def read_config(reader: ConfigReader) -> MoEBlockConfig:
        return read_block_config(reader, moe_intermediate_size=("intermediate_size",), renormalize=True)
