"""DeepSeek-V2: MLA, dense first layers, shared experts, softmax scores with or without a choice of expert groups."""

from moe_jax.models._config import ConfigReader, DecoderConfig, read_decoder_config
from moe_jax.models._decoder import CausalLM
from moe_jax.models.families._layer_rules import (
    expert_groups,
    latent_attention,
    layers_after_dense,
    shared_experts_size,
)

_METHODS = ("greedy", "group_limited_greedy")


class DeepseekV2ForCausalLM(CausalLM):
    """DeepSeek-V2, V2-Lite, Coder-V2 and models of their architecture."""

    model_type = "deepseek_v2"
    architecture = "DeepseekV2ForCausalLM"

    @staticmethod
    def read_config(reader: ConfigReader) -> DecoderConfig:
        reader.one_of("scoring_func", ("softmax",), default="softmax")
        if reader.boolean("norm_topk_prob", default=False):
            # transformers ignores the key, DeepSeek's own code then drops routed_scaling_factor, vLLM applies both.
            raise reader.error("norm_topk_prob=true has no agreed meaning for this architecture; expected false")
        groups, method = expert_groups(reader), reader.one_of("topk_method", _METHODS, default="greedy")
        return read_decoder_config(
            reader,
            moe_intermediate_size=("moe_intermediate_size",),
            renormalize=False,
            moe_layers=layers_after_dense(reader),
            routed_scaling_factor=reader.positive("routed_scaling_factor", default=1.0),
            shared_intermediate_size=shared_experts_size(reader),
            **(groups if method == "group_limited_greedy" else {}),
            **latent_attention(reader),
        )
