"""Which family a config.json asks for. A new one is one file with a ``MoEFamily`` subclass, named here."""

from moe_jax._typing import Json
from moe_jax.models._config import ConfigReader, DecoderConfig, MoEBlockConfig
from moe_jax.models._decoder import CausalLM
from moe_jax.models.families._moe_family import MoEFamily
from moe_jax.models.families.deepseek_v2 import DeepseekV2ForCausalLM
from moe_jax.models.families.deepseek_v3 import DeepseekV3ForCausalLM
from moe_jax.models.families.glm4_moe import Glm4Moe
from moe_jax.models.families.gpt_oss import GptOssForCausalLM
from moe_jax.models.families.granitemoe import GraniteMoe
from moe_jax.models.families.llama4 import Llama4, Llama4Text
from moe_jax.models.families.mixtral import MixtralForCausalLM
from moe_jax.models.families.olmoe import OlmoeForCausalLM
from moe_jax.models.families.qwen2_moe import Qwen2MoeForCausalLM
from moe_jax.models.families.qwen3_moe import Qwen3MoeForCausalLM
from moe_jax.models.families.qwen3_next import Qwen3Next

FAMILIES: dict[str, type[MoEFamily]] = {
    family.model_type: family
    for family in (
        MixtralForCausalLM,
        Qwen3MoeForCausalLM,
        Qwen2MoeForCausalLM,
        Qwen3Next,
        DeepseekV2ForCausalLM,
        DeepseekV3ForCausalLM,
        GptOssForCausalLM,
        OlmoeForCausalLM,
        GraniteMoe,
        Llama4,
        Llama4Text,
        Glm4Moe,
    )
}


def read_family(config: Json, source: str = "config.json") -> tuple[type[MoEFamily], MoEBlockConfig]:
    """Family and typed config for a config.json of either dialect.

    Args:
        config: the parsed file. source: its name in errors.

    Returns:
        The family, and what its ``read_config`` makes of the file: a ``DecoderConfig`` for a family whose whole model
        is built, which then is a ``CausalLM``.

    Raises:
        ValueError: an architecture that is not supported (the message lists those that are), or a key that is missing,
            out of range or not understood.
    """
    reader = ConfigReader(config, source)
    model_type, architectures = reader.value("model_type"), reader.value("architectures", default=[])
    supported = ", ".join(family.architecture for family in FAMILIES.values())
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise reader.error(f"model_type {model_type!r} is not supported; supported architectures: {supported}")
    family = FAMILIES[model_type]
    if architectures not in ([], [family.architecture]):
        raise reader.error(f"architectures {architectures!r} is not supported; supported: {supported}")
    return family, family.read_config(reader)


def read_model_family(config: Json, source: str = "config.json") -> tuple[type[CausalLM], DecoderConfig]:
    """``read_family`` for a whole model. Raises NotImplementedError when only its layers with experts are built."""
    family, family_config = read_family(config, source)
    if not (issubclass(family, CausalLM) and isinstance(family_config, DecoderConfig)):
        whole = ", ".join(f.architecture for f in FAMILIES.values() if issubclass(f, CausalLM))
        raise NotImplementedError(
            f"{source}: {family.architecture} is not built as a whole model yet; load its layers with experts with "
            f"moe_jax.load_moe(directory, layer); whole models: {whole}"
        )
    return family, family_config
