"""GLM-4 MoE: blocks with experts like DeepSeek-V3's, usually in one group."""

from moe_jax.models._config import ConfigReader, MoEBlockConfig, read_block_config
from moe_jax.models.families._layer_rules import corrected_experts
from moe_jax.models.families._moe_family import MoEFamily


class Glm4Moe(MoEFamily):
    """GLM-4.5, GLM-4.5-Air, GLM-4.6 and models of their architecture."""

    model_type = "glm4_moe"
    architecture = "Glm4MoeForCausalLM"
    moe_module = "mlp"

    @staticmethod
    def read_config(reader: ConfigReader) -> MoEBlockConfig:
        return read_block_config(reader, **corrected_experts(reader, routed_scaling_factor=1.0))
