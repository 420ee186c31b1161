"""MiniMax-M2: experts in every layer, sigmoid scores with a correction bias, queries and keys normalised as a whole."""

from moe_jax.loading import ExpertNames
from moe_jax.models._config import ConfigReader, DecoderConfig, read_decoder_config
from moe_jax.models._decoder import CausalLM


class MiniMaxM2ForCausalLM(CausalLM):
    """MiniMax-M2, M2.1 and models of their architecture."""

    model_type = "minimax_m2"
    architecture = "MiniMaxM2ForCausalLM"
    moe_module = "block_sparse_moe"
    correction_bias_name = "e_score_correction_bias"
    expert_names = ExpertNames(spelling=("w1", "w3", "w2"))

    @staticmethod
    def read_config(reader: ConfigReader) -> DecoderConfig:
        # transformers writes none of these: all follow from the architecture.
        reader.one_of("scoring_func", ("sigmoid",), default="sigmoid")
        reader.one_of("qk_norm_type", ("per_layer",), default="per_layer")
        for key in ("use_qk_norm", "use_routing_bias"):
            if not reader.boolean(key, default=True):
                raise reader.error(f"{key}=false is not supported for this architecture; expected true")
        rotated = 1.0
        if reader.value("rotary_dim") is not None:
            rotated = reader.integer("rotary_dim") / reader.integer("head_dim")
        return read_decoder_config(
            reader,
            moe_intermediate_size=("intermediate_size",),
            renormalize=True,
            scoring_func="sigmoid",
            has_correction_bias=True,
            qk_norm="projection",
            partial_rotary_factor=rotated,
        )
