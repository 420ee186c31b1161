"""OLMoE: experts in every layer, router weights used as softmax gives them."""

from moe_jax.models._config import ConfigReader, MoEBlockConfig, read_block_config
from moe_jax.models._moe_family import MoEFamily


class Olmoe(MoEFamily):
    """OLMoE-1B-7B and models of its architecture."""

    model_type = "olmoe"
    architecture = "OlmoeForCausalLM"
    moe_module = "mlp"

    @staticmethod
    def read_config(reader: ConfigReader) -> MoEBlockConfig:
        return read_block_config(
            reader,
            moe_intermediate_size=("intermediate_size",),
            renormalize=reader.boolean("norm_topk_prob", default=False),
        )
