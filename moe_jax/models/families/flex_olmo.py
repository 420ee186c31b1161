"""FlexOlmo: blocks with experts like OLMoE's, norms behind attention and experts instead of before them."""

from moe_jax.models._config import ConfigReader, DecoderConfig, read_decoder_config
from moe_jax.models._decoder import CausalLM
from moe_jax.models.families._layer_rules import attention_biases


class FlexOlmoForCausalLM(CausalLM):
    """FlexOlmo-7x7B and models of its architecture."""

    model_type = "flex_olmo"
    architecture = "FlexOlmoForCausalLM"
    norm_modules = ("post_attention_layernorm", "post_feedforward_layernorm")

    @staticmethod
    def read_config(reader: ConfigReader) -> DecoderConfig:
        return read_decoder_config(
            reader,
            moe_intermediate_size=("intermediate_size",),
            renormalize=reader.boolean("norm_topk_prob", default=False),
            qk_norm="projection",
            is_post_norm=True,
            **attention_biases(reader),
        )
