"""Qwen3-Next: blocks with experts like Qwen2-MoE's, renormalized unless the config says otherwise."""

from moe_jax.models._config import ConfigReader, MoEBlockConfig
from moe_jax.models._moe_family import MoEFamily
from moe_jax.models.qwen2_moe import read_gated_shared_config


class Qwen3Next(MoEFamily):
    """Qwen3-Next-80B-A3B and models of its architecture."""

    model_type = "qwen3_next"
    architecture = "Qwen3NextForCausalLM"
    moe_module = "mlp"
    shared_module = "shared_expert"

    @staticmethod
    def read_config(reader: ConfigReader) -> MoEBlockConfig:
        return read_gated_shared_config(reader, renormalize=reader.boolean("norm_topk_prob", default=True))
