"""Qwen3-Next: blocks with experts like Qwen2-MoE's, renormalized unless the config says otherwise."""

from moe_jax.models._config import ConfigReader, MoEBlockConfig, read_block_config
from moe_jax.models.families._layer_rules import gated_shared_experts
from moe_jax.models.families._moe_family import MoEFamily


class Qwen3Next(MoEFamily):
    """Qwen3-Next-80B-A3B and models of its architecture."""

    model_type = "qwen3_next"
    architecture = "Qwen3NextForCausalLM"
    moe_module = "mlp"
    shared_module = "shared_expert"

    @staticmethod
    def read_config(reader: ConfigReader) -> MoEBlockConfig:
        return read_block_config(reader, **gated_shared_experts(reader, renormalize=True))
