"""GLM-5: DeepSeek-V3.2 with an indexer that rotates neighbouring columns, and that several layers may share."""

from moe_jax.models._config import ConfigReader, DecoderConfig, read_decoder_config
from moe_jax.models._decoder import CausalLM
from moe_jax.models.families._layer_rules import (
    corrected_experts,
    indexer_of_tokens,
    latent_attention,
    layers_by_type,
)


class GlmMoeDsaForCausalLM(CausalLM):
    """GLM-5, 5.1, 5.2 and models of their architecture."""

    model_type = "glm_moe_dsa"
    architecture = "GlmMoeDsaForCausalLM"

    @staticmethod
    def read_config(reader: ConfigReader) -> DecoderConfig:
        experts = corrected_experts(reader, routed_scaling_factor=2.5) | dict(moe_layers=layers_by_type(reader))
        indexer = indexer_of_tokens(reader, is_interleaved=True)
        return read_decoder_config(reader, **experts, **latent_attention(reader, indexer))
