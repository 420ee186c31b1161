"""gpt-oss: biases everywhere, a clamped SwiGLU, attention with sinks and a sliding window in every other layer."""

import re
from collections.abc import Mapping
from typing import Any

from moe_jax._typing import Json
from moe_jax.loading import ExpertNames
from moe_jax.models._config import ConfigReader, DecoderConfig, read_decoder_config
from moe_jax.models._decoder import CausalLM
from moe_jax.models.families._layer_rules import attention_biases, layers_with_windows

_SPLITS_WRONGLY = re.compile(r"0\.(\d|1[0-7])\b")  # compressed-tensors that went with llm-compressor up to 0.12
_PER_EXPERT = re.compile(r"\.experts\.\d+\.gate_proj\.")


class GptOssForCausalLM(CausalLM):
    """gpt-oss-20b, gpt-oss-120b and models of their architecture."""

    model_type = "gpt_oss"
    architecture = "GptOssForCausalLM"
    router_module = "router"
    expert_names = ExpertNames(is_interleaved=True)

    @staticmethod
    def read_config(reader: ConfigReader) -> DecoderConfig:
        if reader.value("rope_scaling", "rope_parameters") is None:
            raise reader.error("rope_scaling is missing; gpt-oss is trained with YaRN, whose factor must be stated")
        return read_decoder_config(
            reader,
            moe_intermediate_size=("intermediate_size",),
            renormalize=True,
            activation="swigluoai",
            swiglu_limit=reader.positive("swiglu_limit", default=7.0),
            swiglu_alpha=reader.positive("swiglu_alpha", default=1.702),
            has_bias=True,
            has_router_bias=True,
            **attention_biases(reader, default=True),
            has_sinks=True,
            **layers_with_windows(reader),
        )

    @classmethod
    def doubts(cls, source: Any, raw: Json) -> str | None:
        stated = raw.get("quantization_config")
        version = stated.get("version") if isinstance(stated, Mapping) else None
        if not isinstance(version, str) or _SPLITS_WRONGLY.match(version) is None:
            return None
        if not any(_PER_EXPERT.search(name) for name in source.names):
            return None
        return (
            f"compressed-tensors {version} wrote gpt-oss experts one by one; tools of that time took the first half of "
            "the interleaved columns as gate_proj, which nothing in the file shows. If answers make no sense, use a "
            "checkpoint written with compressed-tensors 0.19 or later"
        )
