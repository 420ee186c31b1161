"""Which family a config.json asks for. A new one is one file beside this one, found by being there."""

import importlib
import pkgutil
from collections.abc import Iterator

from moe_jax._typing import Json
from moe_jax.loading._errors import shown
from moe_jax.models import families
from moe_jax.models._config import ConfigReader, DecoderConfig
from moe_jax.models._decoder import CausalLM


def _defined() -> Iterator[type[CausalLM]]:
    """The families that the public modules of this package define."""
    for found in pkgutil.iter_modules(families.__path__, f"{families.__name__}."):
        if found.name.rpartition(".")[2].startswith("_"):
            continue
        for value in vars(importlib.import_module(found.name)).values():
            if isinstance(value, type) and issubclass(value, CausalLM) and value.__module__ == found.name:
                yield value


FAMILIES: dict[str, type[CausalLM]] = {family.model_type: family for family in _defined()}


def read_family(config: Json, source: str = "config.json") -> tuple[type[CausalLM], DecoderConfig]:
    """Family and typed config for a config.json of either dialect.

    Args:
        config: the parsed file. source: its name in errors.

    Returns:
        The family, and what its ``read_config`` makes of the file.

    Raises:
        ValueError: an architecture that is not supported (the message lists those that are), or a key that is missing,
            out of range or not understood.
    """
    reader = ConfigReader(config, source)
    model_type, architectures = reader.value("model_type"), reader.value("architectures", default=[])
    supported = ", ".join(family.architecture for family in FAMILIES.values())
    named = [f for f in FAMILIES.values() if model_type in (f.model_type, *f.other_model_types)]
    if not named:
        raise reader.error(f"model_type {shown(model_type)} is not supported; supported architectures: {supported}")
    (family,) = named
    if not family.is_described_by(reader):
        raise reader.error(f"architectures {shown(architectures)} is not supported; supported: {supported}")
    return family, family.read_config(reader)
