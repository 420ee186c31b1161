"""Granite-MoE: experts in every layer, fused as ``input_linear`` and ``output_linear``; multipliers along the way."""

from typing import Any

from moe_jax.loading import ExpertNames
from moe_jax.models._config import ConfigReader, DecoderConfig, read_decoder_config
from moe_jax.models._decoder import CausalLM
from moe_jax.models.families._layer_rules import attention_biases


class GraniteMoeForCausalLM(CausalLM):
    """Granite 3.0 1B-A400M, 3B-A800M and models of their architecture."""

    model_type = "granitemoe"
    architecture = "GraniteMoeForCausalLM"
    moe_module = "block_sparse_moe"
    router_module = "router.layer"
    expert_names = ExpertNames(spelling=("input_linear", "input_linear", "output_linear"))

    @staticmethod
    def read_config(reader: ConfigReader) -> DecoderConfig:
        keys = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
        multipliers: dict[str, Any] = {key: reader.positive(key, default=1.0) for key in keys}
        return read_decoder_config(
            reader,
            moe_intermediate_size=("intermediate_size",),
            renormalize=True,
            **attention_biases(reader),
            **multipliers,
        )
