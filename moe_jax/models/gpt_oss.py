"""gpt-oss: biases everywhere, a clamped SwiGLU with interleaved gate and up, weights renormalized."""

from moe_jax.models._config import ConfigReader, MoEBlockConfig, read_block_config
from moe_jax.models._moe_family import MoEFamily


class GptOss(MoEFamily):
    """gpt-oss-20b, gpt-oss-120b and models of their architecture."""

    model_type = "gpt_oss"
    architecture = "GptOssForCausalLM"
    moe_module = "mlp"
    router_module = "router"

    @staticmethod
    def read_config(reader: ConfigReader) -> MoEBlockConfig:
        return read_block_config(
            reader,
            moe_intermediate_size=("intermediate_size",),
            renormalize=True,
            activation="swigluoai",
            swiglu_limit=reader.positive("swiglu_limit", default=7.0),
            swiglu_alpha=reader.positive("swiglu_alpha", default=1.702),
            has_bias=True,
            has_router_bias=True,
        )
