"""GLM-4.7-Flash: attention and blocks with experts like DeepSeek-V3's, under GLM's own keys."""

from moe_jax.models._config import ConfigReader, DecoderConfig, read_decoder_config
from moe_jax.models._decoder import CausalLM
from moe_jax.models.families._layer_rules import corrected_experts, latent_attention, layers_by_type


class Glm4MoeLiteForCausalLM(CausalLM):
    """GLM-4.7-Flash and models of its architecture."""

    model_type = "glm4_moe_lite"
    architecture = "Glm4MoeLiteForCausalLM"

    @staticmethod
    def read_config(reader: ConfigReader) -> DecoderConfig:
        experts = corrected_experts(reader, routed_scaling_factor=1.8) | dict(moe_layers=layers_by_type(reader))
        return read_decoder_config(reader, **experts, **latent_attention(reader))
