"""OLMoE: experts in every layer, router weights used as softmax gives them, queries and keys normalised as a whole."""

from moe_jax.models._config import ConfigReader, DecoderConfig, read_decoder_config
from moe_jax.models._decoder import CausalLM
from moe_jax.models.families._layer_rules import attention_biases


class OlmoeForCausalLM(CausalLM):
    """OLMoE-1B-7B and models of its architecture."""

    model_type = "olmoe"
    architecture = "OlmoeForCausalLM"

    @staticmethod
    def read_config(reader: ConfigReader) -> DecoderConfig:
        return read_decoder_config(
            reader,
            moe_intermediate_size=("intermediate_size",),
            renormalize=reader.boolean("norm_topk_prob", default=False),
            qk_norm="projection",
            clip_qkv=None if reader.value("clip_qkv") is None else reader.positive("clip_qkv"),
            **attention_biases(reader),
        )
