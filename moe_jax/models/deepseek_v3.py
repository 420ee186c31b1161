"""DeepSeek-V3: dense first layers, shared experts, sigmoid scores with a correction bias and groups of experts."""

from moe_jax.models._config import ConfigReader, MoEBlockConfig, read_block_config
from moe_jax.models._layer_rules import expert_groups, layers_after_dense, shared_experts_size
from moe_jax.models._moe_family import MoEFamily


class DeepseekV3(MoEFamily):
    """DeepSeek-V3, V3.1, R1 and models of their architecture."""

    model_type = "deepseek_v3"
    architecture = "DeepseekV3ForCausalLM"
    moe_module = "mlp"

    @staticmethod
    def read_config(reader: ConfigReader) -> MoEBlockConfig:
        return read_corrected_config(reader, routed_scaling_factor=2.5)


def read_corrected_config(reader: ConfigReader, *, routed_scaling_factor: float) -> MoEBlockConfig:
    """DeepSeek-V3 and GLM-4 MoE, which differ in the default of ``routed_scaling_factor`` alone."""
    # transformers 5 writes neither key: both follow from the architecture.
    reader.one_of("scoring_func", ("sigmoid",), default="sigmoid")
    reader.one_of("topk_method", ("noaux_tc",), default="noaux_tc")
    return read_block_config(
        reader,
        moe_intermediate_size=("moe_intermediate_size",),
        renormalize=reader.boolean("norm_topk_prob", default=True),
        moe_layers=layers_after_dense(reader),
        scoring_func="sigmoid",
        has_correction_bias=True,
        routed_scaling_factor=reader.positive("routed_scaling_factor", default=routed_scaling_factor),
        shared_intermediate_size=shared_experts_size(reader),
        **expert_groups(reader),
    )
