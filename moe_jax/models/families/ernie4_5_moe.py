"""ERNIE-4.5: softmax scores with a correction bias, shared experts, columns rotated as neighbours."""

from moe_jax.models._config import ConfigReader, DecoderConfig, read_decoder_config
from moe_jax.models._decoder import CausalLM


class Ernie4_5_MoeForCausalLM(CausalLM):
    """ERNIE-4.5-21B-A3B, 300B-A47B and models of their architecture."""

    model_type = "ernie4_5_moe"
    architecture = "Ernie4_5_MoeForCausalLM"
    correction_bias_name = "moe_statics.e_score_correction_bias"

    @staticmethod
    def read_config(reader: ConfigReader) -> DecoderConfig:
        if reader.boolean("use_bias", default=False):
            raise reader.error("use_bias=true is not supported for this architecture; expected false")
        if reader.positive("moe_norm_min", default=1e-12) > 1e-9:
            raise reader.error("moe_norm_min bounds a sum of scores that is never small; expected 1e-12")
        count = reader.integer("num_hidden_layers")
        first, step = reader.integer("moe_layer_start_index", minimum=0), reader.integer("moe_layer_interval")
        last = reader.integer("moe_layer_end_index", minimum=-1, default=-1)
        last = count - 1 if last == -1 else min(last, count - 1)
        shared = reader.integer("moe_num_shared_experts", minimum=0)
        return read_decoder_config(
            reader,
            moe_intermediate_size=("moe_intermediate_size",),
            renormalize=True,
            moe_layers=tuple(layer for layer in range(first, last + 1) if (layer + 1) % step == 0),
            has_correction_bias=True,
            shared_intermediate_size=shared * reader.integer("moe_intermediate_size"),
            is_rope_interleaved=True,
        )
