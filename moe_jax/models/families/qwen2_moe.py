"""Qwen2-MoE: a shared expert behind a sigmoid gate, router weights as softmax gives them, biases into attention."""

from typing import Any

from moe_jax.models._config import ConfigReader, DecoderConfig, read_decoder_config
from moe_jax.models._decoder import CausalLM
from moe_jax.models.families._layer_rules import gated_shared_experts, layers_with_windows


class Qwen2MoeForCausalLM(CausalLM):
    """Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B and models of their architecture."""

    model_type = "qwen2_moe"
    architecture = "Qwen2MoeForCausalLM"
    shared_module = "shared_expert"

    @staticmethod
    def read_config(reader: ConfigReader) -> DecoderConfig:
        return read_decoder_config(
            reader,
            **gated_shared_experts(reader, renormalize=False),
            use_attention_bias=reader.boolean("qkv_bias", default=True),
            **_windows(reader),
        )


def _windows(reader: ConfigReader) -> dict[str, Any]:
    """``sliding_window`` counts only with ``use_sliding_window``, in layers that must then be named one by one."""
    if not reader.boolean("use_sliding_window", default=False):
        return {}
    if reader.value("layer_types") is None:
        # Engines disagree on which layers max_window_layers means.
        raise reader.error("use_sliding_window needs layer_types, a list that says which layers have the window")
    return layers_with_windows(reader)
