"""DeepSeek-V3: MLA, dense first layers, shared experts, sigmoid scores with a correction bias and groups of experts."""

from moe_jax.models._config import ConfigReader, DecoderConfig, read_decoder_config
from moe_jax.models._decoder import CausalLM
from moe_jax.models.families._layer_rules import corrected_experts, latent_attention


class DeepseekV3ForCausalLM(CausalLM):
    """DeepSeek-V3, V3.1, R1, Kimi-K2 and models of their architecture."""

    model_type = "deepseek_v3"
    other_model_types = ("kimi_k2",)
    architecture = "DeepseekV3ForCausalLM"

    @staticmethod
    def read_config(reader: ConfigReader) -> DecoderConfig:
        experts = corrected_experts(reader, routed_scaling_factor=2.5)
        return read_decoder_config(reader, **experts, **latent_attention(reader))


class KimiK25ForConditionalGeneration(DeepseekV3ForCausalLM):
    """The language model of Kimi-K2.5, with a vision model beside it."""

    model_type = "kimi_k25"
    other_model_types = ()
    architecture = "KimiK25ForConditionalGeneration"
    other_architectures = ("Kimi_K25ForConditionalGeneration",)  # transformers' name
    model_module = "language_model.model"
    head_module = "language_model.lm_head"
    other_modules = ("vision_tower", "mm_projector", "multi_modal_projector")

    @staticmethod
    def read_config(reader: ConfigReader) -> DecoderConfig:
        return DeepseekV3ForCausalLM.read_config(reader.part("text_config"))
