"""Qwen3-MoE: RMSNorm on query and key heads, dense layers by list or by step, renormalization by config."""

from moe_jax.models._config import ConfigReader, DecoderConfig, read_decoder_config
from moe_jax.models._decoder import CausalLM
from moe_jax.models.families._layer_rules import attention_biases, layers_by_step


class Qwen3MoeForCausalLM(CausalLM):
    """Qwen3-30B-A3B, Qwen3-235B-A22B and models of their architecture."""

    model_type = "qwen3_moe"
    architecture = "Qwen3MoeForCausalLM"

    @staticmethod
    def read_config(reader: ConfigReader) -> DecoderConfig:
        num_layers = reader.integer("num_hidden_layers")
        return read_decoder_config(
            reader,
            moe_intermediate_size=("moe_intermediate_size",),
            renormalize=reader.boolean("norm_topk_prob"),
            moe_layers=layers_by_step(reader),
            qk_norm="head",
            **attention_biases(reader),
            sliding_window=_sliding_window(reader, num_layers),
        )


def _sliding_window(reader: ConfigReader, num_layers: int) -> int | None:
    """``sliding_window`` counts only with ``use_sliding_window``; a window for some layers only is refused."""
    window, first = reader.value("sliding_window"), reader.integer("max_window_layers", minimum=0, default=0)
    if not reader.boolean("use_sliding_window", default=False) or window is None:
        return None
    if 0 < first < num_layers:
        # Engines disagree on which layers get the window then; transformers gives it to all.
        raise reader.error(f"max_window_layers={first} of {num_layers} layers with use_sliding_window is not supported")
    return reader.integer("sliding_window")
