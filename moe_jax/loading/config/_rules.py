"""Which module has which scheme, as a ``quantization_config`` states it; one class for each kind of rules.

``decide(module)`` answers with a ``Decision``. Whether the tensors agree is not asked here.
"""

import dataclasses
import fnmatch
import re
import time
from collections.abc import Iterable, Mapping
from typing import Protocol, runtime_checkable

from moe_jax._typing import Json
from moe_jax.loading._errors import CheckpointError, shown
from moe_jax.loading.config._modules import classes_of, spellings
from moe_jax.loading.config._patterns import MAX_LENGTH, MAX_PATTERNS, BoundedPatterns, Budget
from moe_jax.loading.layer._names import is_expert_name
from moe_jax.quantization import SCHEMES, Scheme

BLOCK = [128, 128]
_REGEX = "re:"
_RETIRED_FORMATS = ("marlin-24", "sparse-24-bitmask", "sparse-bitmask")
_COMPRESSED_TENSORS_KEYS = frozenset(
    """quant_method config_groups format ignore kv_cache_scheme sparsity_config transform_config moe_sparsity_config
    quantization_status global_compression_ratio version""".split()
)
_FP8_KEYS = frozenset(
    """quant_method fmt activation_scheme weight_block_size modules_to_not_convert ignored_layers scale_fmt expert_dtype
    modules_to_convert dequantize""".split()
)
_MODELOPT_SCHEMES = {
    "FP8": "fp8_tensor_static",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8_channel",
    "NVFP4": "nvfp4_modelopt",
    "W4A16_NVFP4": "nvfp4_a16_modelopt",
    "MXFP8": "mxfp8",
}
_MIXED = "MIXED_PRECISION"
_E4M3_NAMES = (None, "e4m3", "e4m3fn", "float8_e4m3", "float8_e4m3fn")


@dataclasses.dataclass(frozen=True)
class Decision:
    """scheme: None for a module that is not quantized. why: for messages, "target 'Linear' of group_0 matches".

    refusal: non-empty when the module is quantized in a way that cannot be loaded; scheme is None then.
    is_for_linear: it is so as one of all Linear modules, which weights of all experts in one 3-D tensor are not.
    """

    scheme: Scheme | None
    why: str
    refusal: str = ""
    is_for_linear: bool = False


@runtime_checkable
class Rules(Protocol):
    """What answers for one config. scale_suffix: what scales of weights are called."""

    scale_suffix: str

    def decide(self, module: str) -> Decision: ...


class Unquantized:
    """No ``quantization_config`` at all."""

    scale_suffix = "weight_scale"

    def decide(self, module: str) -> Decision:
        return Decision(None, "there is no quantization_config")


class CompressedTensorsRules:
    """``ignore`` and ``targets`` of compressed-tensors: exact names, then regexes from the start, then class names.

    Among regexes the first in alphabetical order wins, as in compressed-tensors, which wrote the file by that rule.
    Entries may spell modules as in memory or as on disk, see ``spellings``.
    """

    scale_suffix = "weight_scale"

    def __init__(self, config: Json, where: str, longest_name: int):
        self._where = f"{where}: quantization_config"
        self._patterns = BoundedPatterns(longest_name)
        self._check_top_level(config)
        self.words_are_dense = _packs_densely(config.get("version"))
        self._ignored = self._entries(config.get("ignore"), "ignore")
        self._ignored_names = frozenset(self._ignored)
        self._ignored_patterns = [entry for entry in self._ignored if entry.startswith(_REGEX)]
        self._targets: dict[str, Decision] = {}
        self._read_groups(config)
        self._target_patterns = sorted(target for target in self._targets if target.startswith(_REGEX))

    def decide(self, module: str) -> Decision:
        """Raises CheckpointError when regexes take too long."""
        names, classes = spellings(module), classes_of(module)
        for entry in (*names, *classes):
            if entry in self._ignored_names:
                return Decision(None, f"ignore lists {shown(entry)}")
        for entry in self._ignored_patterns:
            if self._matches(entry, names):
                return Decision(None, f"ignore lists {shown(entry)}")
        for target in names:
            if target in self._targets:
                return self._targets[target]
        for target in self._target_patterns:
            if self._matches(target, names):
                return self._targets[target]
        for target in classes:
            if target in self._targets:
                return dataclasses.replace(self._targets[target], is_for_linear=target == "Linear")
        return Decision(None, "no target of quantization_config covers it")

    def _matches(self, entry: str, names: tuple[str, ...]) -> bool:
        try:
            return self._patterns.match(entry.removeprefix(_REGEX), names)
        except ValueError as error:
            raise self._error(str(error)) from None

    def _check_top_level(self, config: Json) -> None:
        _refuse_unknown_keys(config, _COMPRESSED_TENSORS_KEYS, self._where)
        sparsity, transform = config.get("sparsity_config"), config.get("transform_config")
        # Files of 2024 say {"format": "dense", ...} when nothing is sparse.
        if sparsity and not (isinstance(sparsity, dict) and sparsity.get("format") == "dense"):
            raise self._error("sparsity_config is not empty; sparse weights are not supported, use a dense version")
        if transform and transform != {"config_groups": {}}:
            raise self._error(
                "transform_config is not empty: the forward pass would have to apply its rotations, which is not "
                "supported; use a version quantized without transforms"
            )
        if config.get("moe_sparsity_config"):
            raise self._error("moe_sparsity_config is not empty; layers with pruned experts are not supported")
        for key, types in (("format", str), ("quantization_status", str), ("kv_cache_scheme", dict)):
            if not isinstance(config.get(key), types | None):
                raise self._error(f"{key} is {shown(config[key])}, expected {types.__name__} or null")

    def _entries(self, value: object, key: str) -> list[str]:
        """A list of names and regexes; the regexes are compiled."""
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise self._error(f"{key} is {shown(value)}, expected a list of strings")
        for entry in value:
            if entry.startswith(_REGEX):
                try:
                    self._patterns.add(entry.removeprefix(_REGEX))
                except ValueError as error:
                    raise self._error(f"{key}: {error}") from None
        return value

    def _read_groups(self, config: Json) -> None:
        groups = config.get("config_groups")
        if groups == {} and config.get("kv_cache_scheme"):
            return  # the cache alone is quantized
        if not isinstance(groups, dict) or not groups:
            raise self._error(f"config_groups is {shown(groups)}, expected an object with at least one group")
        for name, group in groups.items():
            # The short form: a preset's name, and its targets as the value.
            targets = group.get("targets") if isinstance(group, dict) else group
            if not targets:
                raise self._error(f"group {shown(name)} has no targets, found {shown(group)}")
            targets = self._entries(targets, f"targets of group {shown(name)}")
            scheme, refusal = self._scheme_of_group(name, group, config.get("format"))
            for target in targets:
                decision = Decision(scheme, f"target {shown(target)} of {name} matches", refusal)
                if self._targets.setdefault(target, decision).scheme != scheme:
                    raise self._error(f"target {shown(target)} stands in two groups with different schemes")

    def _scheme_of_group(self, name: str, group: object, top_format: str | None) -> tuple[Scheme | None, str]:
        """(scheme, refusal). What is real but not built is refused when a module needs it; what is wrong, at once."""
        try:
            if not isinstance(group, dict):
                return Scheme.parse(name.upper()), ""
            stored_as = group.get("format") or top_format
            if stored_as in _RETIRED_FORMATS:
                return None, f"format {stored_as!r} was retired by compressed-tensors; use a dense version"
            return Scheme.parse({**group, "format": stored_as}), ""
        except NotImplementedError as error:
            return None, str(error)
        except (ValueError, TypeError) as error:
            raise self._error(f"group {shown(name)}: {error}") from None

    def _error(self, text: str) -> CheckpointError:
        return CheckpointError(f"{self._where}: {text}")


class Fp8Rules:
    """``fp8`` as DeepSeek and Qwen write it, in 128 x 128 blocks, or AutoFP8, with one scale per projection.

    It covers every projection but those on a list of names.

    An entry of the list excludes a module that it names in full, from the start down to a dot (a parent), or from a dot
    to the end ("gate"). Scales of blocks are called ``weight_scale_inv`` and multiply nevertheless.
    """

    def __init__(self, config: Json, where: str):
        self._where = f"{where}: quantization_config"
        _refuse_unknown_keys(config, _FP8_KEYS, self._where)
        block = config.get("weight_block_size")
        self.scale_suffix = "weight_scale" if block is None else "weight_scale_inv"
        if block is not None and (not isinstance(block, list | tuple) or list(block) != BLOCK):
            raise self._error(f"weight_block_size is {shown(block)}, only {BLOCK} is supported")
        if config.get("fmt") not in _E4M3_NAMES:
            raise self._error(f"fmt is {shown(config['fmt'])}, only e4m3 is supported")
        if config.get("expert_dtype", "fp8") not in (None, "fp8"):
            raise self._error(f"expert_dtype is {shown(config['expert_dtype'])}, only fp8 is supported")
        if config.get("modules_to_convert"):
            raise self._error("modules_to_convert is not supported; only projections can be quantized")
        excluded = [entry for key in ("modules_to_not_convert", "ignored_layers") for entry in self._names(config, key)]
        self._excluded = frozenset(excluded)
        keys = ("activation_scheme", "scale_fmt", "weight_block_size")
        stated = {key: config[key] for key in keys if config.get(key) is not None}
        try:
            self._scheme = Scheme.parse({"quant_method": "fp8", **stated})
        except (ValueError, TypeError, NotImplementedError) as error:
            raise CheckpointError(f"{where}: {error}") from None

    def decide(self, module: str) -> Decision:
        if "Linear" not in classes_of(module):
            return Decision(None, "only projections are quantized")
        for part in (part for name in spellings(module) for part in _parts_of(name)):
            if part in self._excluded:
                return Decision(None, f"modules_to_not_convert lists {shown(part)}")
        return Decision(self._scheme, "quant_method 'fp8' covers every projection")

    def _names(self, config: Json, key: str) -> list[str]:
        value = config.get(key)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise self._error(f"{key} is {shown(value)}, expected a list of strings")
        return value

    def _error(self, text: str) -> CheckpointError:
        return CheckpointError(f"{self._where}: {text}")


class Covering:
    """Which entry of a list names a module in full, a parent of it, or its last components; * stands for anything."""

    def __init__(self, entries: Iterable[str], where: str):
        self._where, self._budget = where, Budget()
        self._position = {entry: at for at, entry in reversed([*enumerate(entries)])}
        wild = [entry for entry in self._position if set(entry) & set("*?[")]
        if len(wild) > MAX_PATTERNS or any(len(entry) > MAX_LENGTH for entry in wild):
            raise CheckpointError(
                f"{where}: more than {MAX_PATTERNS} names with *, or one of over {MAX_LENGTH} letters"
            )
        # Stars do not backtrack into each other there, so that one match takes little time.
        self._patterns = {entry: re.compile(fnmatch.translate(entry)) for entry in wild}

    def __call__(self, module: str) -> str | None:
        """The first such entry, for any spelling. Raises CheckpointError when the patterns take too long."""
        for name in spellings(module):
            start, parts = time.thread_time(), _parts_of(name)
            found = [part for part in parts if part in self._position]
            found += [entry for entry, pattern in self._patterns.items() if any(map(pattern.match, parts))]
            try:
                self._budget.spend(start, next(iter(self._patterns), ""))
            except ValueError as error:
                raise CheckpointError(f"{self._where}: {error}") from None
            if found:
                return min(found, key=self._position.__getitem__)
        return None


class ListedRules:
    """One scheme for all projections but those on a list.

    An entry, in which * stands for anything, leaves out a module that it names in full, from the start down to a dot (a
    parent), or from a dot to the end ("gate").
    """

    scale_suffix = "weight_scale"

    def __init__(self, scheme: Scheme, excluded: object, where: str, *, experts_only: bool = False):
        if not isinstance(excluded, list) or not all(isinstance(entry, str) for entry in excluded):
            raise CheckpointError(f"{where}: modules left out are {shown(excluded)}, expected a list of strings")
        self._scheme, self._excluded, self._experts_only = scheme, Covering(excluded, where), experts_only

    def decide(self, module: str) -> Decision:
        if "Linear" not in classes_of(module):
            return Decision(None, "only projections are quantized")
        if self._experts_only and not is_expert_name(module):
            return Decision(None, "only experts are quantized")
        entry = self._excluded(module)
        if entry is not None:
            return Decision(None, f"{shown(entry)} leaves it out")
        return Decision(self._scheme, f"{self._scheme.name} covers every projection")


class ModelOptRules(ListedRules):
    """ModelOpt: ``quant_algo`` with shell wildcards in ``exclude_modules`` or ``ignore``, or ``quantized_layers``."""

    def __init__(self, config: Json, where: str):
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
            self._listed = Covering(self._by_module, self._where)
        super().__init__(
            Scheme.parse(None) if self._by_module is not None else self._scheme_of(config), excluded, where
        )

    def decide(self, module: str) -> Decision:
        decision = super().decide(module)
        if self._by_module is None or decision.scheme is None:
            return decision
        # A fused layer of experts may be listed as a whole.
        entry = self._listed(module)
        if entry is None:
            return Decision(None, "quantized_layers does not list it")
        return Decision(self._by_module[entry], f"quantized_layers lists {shown(entry)}")

    def _scheme_of(self, entry: Json) -> Scheme:
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


def gpt_oss_rules(config: Json, where: str) -> ListedRules:
    """``mxfp4``: the experts alone, activations in 16 bits."""
    return ListedRules(Scheme.parse("mxfp4_a16"), config.get("modules_to_not_convert") or [], where, experts_only=True)


def fbgemm_rules(config: Json, where: str) -> ListedRules:
    """``fbgemm_fp8``: a scale per row, activations per token and bounded by ``activation_scale_ub``."""
    try:
        scheme = Scheme.parse(config)
    except ValueError as error:
        raise CheckpointError(f"{where}: {error}") from None
    return ListedRules(scheme, config.get("modules_to_not_convert") or [], where)


def _parts_of(name: str) -> tuple[str, ...]:
    """A module's name, its parents', and its last components."""
    dots = [at for at, character in enumerate(name) if character == "."]
    return (name, *(name[:at] for at in dots), *(name[at + 1 :] for at in dots))


def _packs_densely(version: object) -> bool | None:
    """compressed-tensors left gaps in words of 3, 5, 6 and 7-bit codes up to 0.17; None without a version."""
    match = re.match(r"(\d{1,4})\.(\d{1,4})\b", version) if isinstance(version, str) else None
    return None if match is None else (int(match[1]), int(match[2])) >= (0, 18)


def supported_schemes() -> str:
    """The quantized schemes, for messages."""
    return ", ".join(name for name, scheme in SCHEMES.items() if scheme.is_quantized)


def _refuse_unknown_keys(config: Json, known: frozenset[str], where: str) -> None:
    """Writers add labels of their own, plain values that are ignored; a structure may change how weights are read."""
    for key, value in config.items():
        if key not in known and value and isinstance(value, dict | list):
            raise CheckpointError(
                f"{where}: unknown key {shown(key)} holds {shown(value)}; known: {', '.join(sorted(known))}"
            )
