"""FlexOlmo: blocks with experts like OLMoE's, norms behind attention and experts instead of before them."""

from moe_jax.models._config import ConfigReader, DecoderConfig, read_decoder_config
from moe_jax.models._decoder import CausalLM


class FlexOlmoForCausalLM(CausalLM):
    """FlexOlmo-7x7B and models of its architecture."""

    model_type = "flex_olmo"
    architecture = "FlexOlmoForCausalLM"
    moe_module = "mlp"
    norm_modules = ("post_attention_layernorm", "post_feedforward_layernorm")

    @staticmethod
    def read_config(reader: ConfigReader) -> DecoderConfig:
        has_biases = reader.boolean("attention_bias", default=False)
        return read_decoder_config(
            reader,
            moe_intermediate_size=("intermediate_size",),
            renormalize=reader.boolean("norm_topk_prob", default=False),
            qk_norm="projection",
            is_post_norm=True,
            use_attention_bias=has_biases,
            use_output_bias=has_biases,
        )
