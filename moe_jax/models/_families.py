"""Which model class a config.json asks for. A new family is one file with a ``CausalLM`` subclass, named here."""

from collections.abc import Mapping
from typing import Any

from moe_jax.models._config import ConfigReader, DecoderConfig
from moe_jax.models._decoder import CausalLM
from moe_jax.models.mixtral import MixtralForCausalLM
from moe_jax.models.qwen3_moe import Qwen3MoeForCausalLM

FAMILIES: dict[str, type[CausalLM]] = {
    family.model_type: family for family in (MixtralForCausalLM, Qwen3MoeForCausalLM)
}


def read_family(config: Mapping[str, Any], source: str = "config.json") -> tuple[type[CausalLM], DecoderConfig]:
    """Model class and typed config for a config.json of either dialect.

    Args:
        config: the parsed file. source: its name in errors.

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
