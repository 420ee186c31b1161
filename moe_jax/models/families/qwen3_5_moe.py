"""Qwen3.5-MoE: Qwen3-Next with separate projections and experts in every layer; published with a vision model."""

from typing import Any

from moe_jax.models._config import ConfigReader, DecoderConfig, read_decoder_config
from moe_jax.models._decoder import CausalLM
from moe_jax.models.families._layer_rules import gated_delta_net


class Qwen3_5MoeForCausalLM(CausalLM):
    """The language model of Qwen3.5-MoE alone."""

    model_type = "qwen3_5_moe_text"
    architecture = "Qwen3_5MoeForCausalLM"
    shared_module = "shared_expert"

    @staticmethod
    def read_config(reader: ConfigReader) -> DecoderConfig:
        return read_decoder_config(reader, **_fields(reader))


class Qwen3_5MoeForConditionalGeneration(CausalLM):
    """Qwen3.5-35B-A3B and its like as published: their language model. The vision model is left out."""

    model_type = "qwen3_5_moe"
    architecture = "Qwen3_5MoeForConditionalGeneration"
    shared_module = "shared_expert"
    model_module = "model.language_model"
    other_modules = ("model.visual",)

    @staticmethod
    def read_config(reader: ConfigReader) -> DecoderConfig:
        text = reader.part("text_config")
        return read_decoder_config(text, **_fields(text))


def _fields(reader: ConfigReader) -> dict[str, Any]:
    # Qwen3-Next's keys, which follow from the architecture here.
    if reader.integers("mlp_only_layers") or reader.integer("decoder_sparse_step", default=1) != 1:
        raise reader.error("mlp_only_layers and decoder_sparse_step must leave every layer its experts")
    if not reader.boolean("norm_topk_prob", default=True):
        raise reader.error("norm_topk_prob=false is not supported for this architecture; expected true")
    return dict(
        moe_intermediate_size=("moe_intermediate_size",),
        renormalize=True,
        shared_intermediate_size=reader.integer("shared_expert_intermediate_size"),
        has_shared_expert_gate=True,
        intermediate_size=0,  # no layer is dense
        **gated_delta_net(reader, is_fused=False),
    )
