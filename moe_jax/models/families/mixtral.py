"""Mixtral: every layer has experts, their two selected weights are renormalized, attention has no biases."""

from moe_jax.loading import ExpertNames
from moe_jax.models._config import ConfigReader, DecoderConfig, read_decoder_config
from moe_jax.models._decoder import CausalLM


class MixtralForCausalLM(CausalLM):
    """Mixtral 8x7B, 8x22B and models of their architecture."""

    model_type = "mixtral"
    architecture = "MixtralForCausalLM"
    moe_module = "block_sparse_moe"
    expert_names = ExpertNames(spelling=("w1", "w3", "w2"))

    @staticmethod
    def read_config(reader: ConfigReader) -> DecoderConfig:
        window = reader.value("sliding_window")
        return read_decoder_config(
            reader,
            moe_intermediate_size=("intermediate_size",),
            renormalize=True,
            sliding_window=None if window is None else reader.integer("sliding_window"),
        )
