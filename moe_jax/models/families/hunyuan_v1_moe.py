"""Hunyuan: softmax scores, a shared expert, queries and keys normalised after their rotation."""

from moe_jax.models._config import ConfigReader, DecoderConfig, read_decoder_config
from moe_jax.models._decoder import CausalLM
from moe_jax.models.families._layer_rules import attention_biases


class HunYuanMoEV1ForCausalLM(CausalLM):
    """Hunyuan-A13B and models of its architecture."""

    model_type = "hunyuan_v1_moe"
    architecture = "HunYuanMoEV1ForCausalLM"
    router_module = "gate.wg"
    shared_module = "shared_mlp"
    attention_names = {"q_norm": "query_layernorm", "k_norm": "key_layernorm"}

    @staticmethod
    def read_config(reader: ConfigReader) -> DecoderConfig:
        # transformers knows the architecture with these values alone and does not write them.
        for key, expected in (("use_cla", False), ("norm_topk_prob", True), ("use_qk_norm", True)):
            if reader.boolean(key, default=expected) != expected:
                raise reader.error(f"{key}={not expected} is not supported for this architecture; expected {expected}")
        reader.value("eod_token_id")  # a token of its own, not eos_token_id misspelt
        has_shared = reader.boolean("use_mixed_mlp_moe", default=True)
        shared = reader.integer("num_shared_expert", default=1, is_of_layers=True) if has_shared else 0
        stated = reader.value("moe_intermediate_size") is not None
        return read_decoder_config(
            reader,
            moe_intermediate_size=("moe_intermediate_size" if stated else "intermediate_size",),
            renormalize=True,
            shared_intermediate_size=shared * reader.integer("intermediate_size"),
            qk_norm="rotated_head",
            **attention_biases(reader),
        )
