"""Phi-3.5-MoE: two experts chosen by sparsemixer, layer norms and biases, two amplitudes of the rotation."""

from moe_jax.loading import ExpertNames
from moe_jax.models._config import ConfigReader, DecoderConfig, read_decoder_config
from moe_jax.models._decoder import CausalLM
from moe_jax.models.families._layer_rules import attention_biases


class PhimoeForCausalLM(CausalLM):
    """Phi-3.5-MoE and models of its architecture."""

    model_type = "phimoe"
    architecture = "PhimoeForCausalLM"
    other_architectures = ("PhiMoEForCausalLM",)
    moe_module = "block_sparse_moe"
    expert_names = ExpertNames(spelling=("w1", "w3", "w2"))

    @staticmethod
    def read_config(reader: ConfigReader) -> DecoderConfig:
        if reader.positive("router_jitter_noise", default=0.01) != 0.01:
            raise reader.error("router_jitter_noise is the reach of the router's softmax; expected 0.01")
        if reader.integer("num_experts_per_tok", default=2) != 2:
            raise reader.error("num_experts_per_tok must be 2, since sparsemixer chooses two")
        window = reader.value("sliding_window")
        return read_decoder_config(
            reader,
            moe_intermediate_size=("intermediate_size",),
            renormalize=False,
            custom_routing_function="phi_sparsemixer",
            norm="layer",
            **attention_biases(reader),
            has_head_bias=reader.boolean("lm_head_bias", default=False),
            sliding_window=None if window is None else reader.integer("sliding_window"),
        )
