"""Qwen2-MoE: a shared expert behind a sigmoid gate, router weights used as softmax gives them."""

from moe_jax.models._config import ConfigReader, MoEBlockConfig, read_block_config
from moe_jax.models._layer_rules import layers_by_step
from moe_jax.models._moe_family import MoEFamily


class Qwen2Moe(MoEFamily):
    """Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B and models of their architecture."""

    model_type = "qwen2_moe"
    architecture = "Qwen2MoeForCausalLM"
    moe_module = "mlp"
    shared_module = "shared_expert"

    @staticmethod
    def read_config(reader: ConfigReader) -> MoEBlockConfig:
        return read_gated_shared_config(reader, renormalize=reader.boolean("norm_topk_prob", default=False))


def read_gated_shared_config(reader: ConfigReader, *, renormalize: bool) -> MoEBlockConfig:
    """Qwen2-MoE and Qwen3-Next, which differ in the default of ``norm_topk_prob`` alone."""
    return read_block_config(
        reader,
        moe_intermediate_size=("moe_intermediate_size",),
        renormalize=renormalize,
        moe_layers=layers_by_step(reader),
        shared_intermediate_size=reader.integer("shared_expert_intermediate_size"),
        has_shared_expert_gate=True,
    )
