"""GLM-4.7-Flash: attention and blocks with experts like DeepSeek-V3's, under GLM's own keys."""

from moe_jax.models._config import ConfigReader, DecoderConfig, read_decoder_config
from moe_jax.models._decoder import CausalLM
from moe_jax.models.families._layer_rules import corrected_experts, latent_attention


class Glm4MoeLiteForCausalLM(CausalLM):
    """GLM-4.7-Flash and models of its architecture."""

    model_type = "glm4_moe_lite"
    architecture = "Glm4MoeLiteForCausalLM"
    moe_module = "mlp"

    @staticmethod
    def read_config(reader: ConfigReader) -> DecoderConfig:
        experts = corrected_experts(reader, routed_scaling_factor=1.8)
        kinds, count = reader.value("mlp_layer_types"), reader.integer("num_hidden_layers")
        if kinds is not None:  # transformers' word for first_k_dense_replace
            if not isinstance(kinds, list) or len(kinds) != count or not {*kinds} <= {"dense", "sparse"}:
                raise reader.error(f"mlp_layer_types is {kinds!r}, expected a list of {count}, each dense or sparse")
            experts["moe_layers"] = tuple(index for index, kind in enumerate(kinds) if kind == "sparse")
        return read_decoder_config(reader, **experts, **latent_attention(reader))
