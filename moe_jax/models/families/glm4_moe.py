"""GLM-4 MoE: blocks with experts like DeepSeek-V3's, usually in one group; half of every head is rotated."""

from moe_jax.models._config import ConfigReader, DecoderConfig, read_decoder_config
from moe_jax.models._decoder import CausalLM
from moe_jax.models.families._layer_rules import corrected_experts


class Glm4MoeForCausalLM(CausalLM):
    """GLM-4.5, GLM-4.5-Air, GLM-4.6, GLM-4.7 and models of their architecture."""

    model_type = "glm4_moe"
    architecture = "Glm4MoeForCausalLM"

    @staticmethod
    def read_config(reader: ConfigReader) -> DecoderConfig:
        return read_decoder_config(
            reader,
            **corrected_experts(reader, routed_scaling_factor=1.0),
            qk_norm="head" if reader.boolean("use_qk_norm", default=False) else None,
            use_attention_bias=reader.boolean("attention_bias", default=False),
            partial_rotary_factor=0.5,
        )
