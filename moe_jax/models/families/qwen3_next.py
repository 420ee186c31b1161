"""Qwen3-Next: linear attention in three layers of four, gated heads in the others, experts like Qwen2-MoE's."""

from moe_jax.models._config import ConfigReader, DecoderConfig, read_decoder_config
from moe_jax.models._decoder import CausalLM
from moe_jax.models.families._layer_rules import gated_delta_net, gated_shared_experts


class Qwen3NextForCausalLM(CausalLM):
    """Qwen3-Next-80B-A3B and models of its architecture."""

    model_type = "qwen3_next"
    architecture = "Qwen3NextForCausalLM"
    shared_module = "shared_expert"

    @staticmethod
    def read_config(reader: ConfigReader) -> DecoderConfig:
        return read_decoder_config(
            reader, **gated_shared_experts(reader, renormalize=True), **gated_delta_net(reader, is_fused=True)
        )
