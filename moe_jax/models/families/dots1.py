"""dots.llm1: attention like Qwen3's, blocks with experts like DeepSeek-V3's, dense first layers."""

from moe_jax.models._config import ConfigReader, DecoderConfig, read_decoder_config
from moe_jax.models._decoder import CausalLM
from moe_jax.models.families._layer_rules import attention_biases, corrected_experts, layers_with_windows, windows_above


class Dots1ForCausalLM(CausalLM):
    """dots.llm1 and models of its architecture."""

    model_type = "dots1"
    architecture = "Dots1ForCausalLM"

    @staticmethod
    def read_config(reader: ConfigReader) -> DecoderConfig:
        # The published file calls its scores by the name of the method that chooses from them.
        experts = corrected_experts(reader, routed_scaling_factor=1.0, scoring_funcs=("sigmoid", "noaux_tc"))
        windows = windows_above if reader.value("layer_types") is None else layers_with_windows
        return read_decoder_config(
            reader,
            **experts | dict(renormalize=reader.boolean("norm_topk_prob")),
            qk_norm="head",
            **attention_biases(reader),
            **windows(reader),
        )
