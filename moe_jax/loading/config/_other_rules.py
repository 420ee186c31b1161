"""Which module has which scheme, for tools that state one scheme for a model and a list of modules left out.

ModelOpt (FP8, NVFP4, MXFP8, mixed), ``fbgemm_fp8`` and gpt-oss' ``mxfp4``.
"""

import fnmatch
from collections.abc import Mapping
from typing import Any

from moe_jax.loading._errors import CheckpointError, shown
from moe_jax.loading.config._modules import classes_of, spellings
from moe_jax.loading.config._scheme_rules import Decision
from moe_jax.loading.layer._names import is_expert_name
from moe_jax.quantization import Scheme

_MODELOPT_SCHEMES = {
    "FP8": "fp8_tensor_static",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8_channel",
    "NVFP4": "nvfp4_modelopt",
    "W4A16_NVFP4": "nvfp4_a16_modelopt",
    "MXFP8": "mxfp8",
}
_MIXED = "MIXED_PRECISION"


class ListedRules:
    """One scheme for all projections but those on a list.

    An entry, in which * stands for anything, leaves out a module that it names in full, from the start down to a dot (a
    parent), or from a dot to the end ("gate").
    """

    scale_suffix = "weight_scale"

    def __init__(self, scheme: Scheme, excluded: Any, where: str, *, experts_only: bool = False):
        if not isinstance(excluded, list) or not all(isinstance(entry, str) for entry in excluded):
            raise CheckpointError(f"{where}: modules left out are {shown(excluded)}, expected a list of strings")
        self._scheme, self._excluded, self._experts_only = scheme, excluded, experts_only

    def decide(self, module: str) -> Decision:
        if "Linear" not in classes_of(module):
            return Decision(None, "only projections are quantized")
        if self._experts_only and not is_expert_name(module):
            return Decision(None, "only experts are quantized")
        entry = covering(module, self._excluded)
        if entry is not None:
            return Decision(None, f"{shown(entry)} leaves it out")
        return Decision(self._scheme, f"{self._scheme.name} covers every projection")


class ModelOptRules(ListedRules):
    """ModelOpt: ``quant_algo`` with shell wildcards in ``exclude_modules`` or ``ignore``, or ``quantized_layers``."""

    def __init__(self, config: Mapping[str, Any], where: str):
        self._where = f"{where}: quantization_config"
        algorithm = config.get("quant_algo")
        excluded = config.get("exclude_modules") or config.get("ignore") or []
        self._by_module: dict[str, Scheme] | None = None
        if algorithm == _MIXED:
            layers = config.get("quantized_layers")
            if not isinstance(layers, Mapping) or not all(isinstance(entry, Mapping) for entry in layers.values()):
                raise CheckpointError(
                    f"{self._where}: quantized_layers is {shown(layers)}, expected an object of objects"
                )
            self._by_module = {module: self._scheme_of(entry) for module, entry in layers.items()}
        super().__init__(
            Scheme.parse(None) if self._by_module is not None else self._scheme_of(config), excluded, where
        )

    def decide(self, module: str) -> Decision:
        decision = super().decide(module)
        if self._by_module is None or decision.scheme is None:
            return decision
        # A fused layer of experts may be listed as a whole.
        entry = covering(module, self._by_module)
        if entry is None:
            return Decision(None, "quantized_layers does not list it")
        return Decision(self._by_module[entry], f"quantized_layers lists {shown(entry)}")

    def _scheme_of(self, entry: Mapping[str, Any]) -> Scheme:
        algorithm, group_size = entry.get("quant_algo"), entry.get("group_size")
        if not isinstance(algorithm, str) or algorithm not in _MODELOPT_SCHEMES:
            raise CheckpointError(
                f"{self._where}: quant_algo {shown(algorithm)} of ModelOpt is not supported; supported: "
                f"{', '.join(_MODELOPT_SCHEMES)} and {_MIXED} of them; use a compressed-tensors version"
            )
        scheme = Scheme.parse(_MODELOPT_SCHEMES[algorithm])
        if group_size is not None and "NVFP4" in algorithm and group_size != 16:
            raise CheckpointError(f"{self._where}: group_size of {algorithm} is {shown(group_size)}, expected 16")
        return scheme


def gpt_oss_rules(config: Mapping[str, Any], where: str) -> ListedRules:
    """``mxfp4``: the experts alone, activations in 16 bits."""
    return ListedRules(Scheme.parse("mxfp4_a16"), config.get("modules_to_not_convert") or [], where, experts_only=True)


def fbgemm_rules(config: Mapping[str, Any], where: str) -> ListedRules:
    """``fbgemm_fp8``: a scale per row, activations per token and bounded by ``activation_scale_ub``."""
    try:
        scheme = Scheme.parse(config)
    except ValueError as error:
        raise CheckpointError(f"{where}: {error}") from None
    return ListedRules(scheme, config.get("modules_to_not_convert") or [], where)


def covering(module: str, entries: Any) -> str | None:
    """The first entry that names a module, a parent of it, or its last components; in any spelling."""
    for name in spellings(module):
        dots = [at for at, character in enumerate(name) if character == "."]
        parts = (name, *(name[:at] for at in dots), *(name[at + 1 :] for at in dots))
        for entry in entries:
            if any(fnmatch.fnmatchcase(part, entry) for part in parts):
                return entry
    return None
