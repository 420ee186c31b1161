"""DeepSeek-V3.2: DeepSeek-V3 whose queries attend to the tokens that an indexer selects."""

from moe_jax.models._config import ConfigReader, DecoderConfig, read_decoder_config
from moe_jax.models._decoder import CausalLM
from moe_jax.models.families._layer_rules import (
    corrected_experts,
    indexer_of_tokens,
    latent_attention,
    layers_by_type,
)


class DeepseekV32ForCausalLM(CausalLM):
    """DeepSeek-V3.2, V3.2-Exp and models of their architecture."""

    model_type = "deepseek_v32"
    architecture = "DeepseekV32ForCausalLM"

    @staticmethod
    def read_config(reader: ConfigReader) -> DecoderConfig:
        experts = corrected_experts(reader, routed_scaling_factor=2.5) | dict(moe_layers=layers_by_type(reader))
        # DeepSeek's first code rotated neighbouring columns here, as in the rest of attention; the models were trained
        # with columns half a head apart.
        indexer = indexer_of_tokens(reader, is_interleaved=False)
        return read_decoder_config(reader, **experts, **latent_attention(reader, indexer))
