"""Which weights adapter_config.json of PEFT says that an adapter has, by PEFT's own rules for names."""

from collections.abc import Mapping, Sequence
from typing import Any

from moe_jax.loading import CheckpointError
from moe_jax.loading.config._patterns import BoundedPatterns

_PARAMETERS = (".experts.gate_up_proj", ".experts.down_proj")


class Targets:
    """config: of PEFT. where: its file, for messages. longest_name: of the names that will be asked for."""

    def __init__(self, config: Mapping[str, Any], where: Any, longest_name: int):
        self._config = config
        self._where = where
        self._patterns = BoundedPatterns(longest_name)

    def has(self, name: str, layer: int) -> bool:
        """Whether a module, or experts' parameter, of a layer is to have an adapter.

        Raises CheckpointError for a pattern that cannot be evaluated and for settings of other types.
        """
        field = "target_parameters" if name.endswith(_PARAMETERS) else "target_modules"
        stated = self._config.get(field)
        is_named = not stated or stated == "all-linear" or self._names(field, name)
        return is_named and not self._is_left(name, layer)

    def _is_left(self, name: str, layer: int) -> bool:
        if self._config.get("exclude_modules") and self._names("exclude_modules", name):
            return True
        layers = self._config.get("layers_to_transform")
        if layers is None or layers == []:  # which PEFT takes for all
            return False
        stated = layers if isinstance(layers, list) else [layers]
        if not all(type(one) is int for one in stated):
            raise CheckpointError(f"{self._where}: layers_to_transform is {layers!r}, expected an integer or a list")
        return layer not in stated

    def _names(self, field: str, name: str) -> bool:
        """Whether the field, a pattern for whole names or a list of their ends, names one."""
        stated = self._config[field]
        if isinstance(stated, str):
            pattern = rf"(?:{stated})\Z"
            try:
                self._patterns.add(pattern)
                return self._patterns.match(pattern, (name,))
            except ValueError as error:
                raise CheckpointError(f"{self._where}: {field}: {error}") from None
        if not isinstance(stated, Sequence) or not all(isinstance(one, str) for one in stated):
            raise CheckpointError(f"{self._where}: {field} is {stated!r}, expected a string or a list of strings")
        return any(f".{name}".endswith(f".{end}") for end in stated)
