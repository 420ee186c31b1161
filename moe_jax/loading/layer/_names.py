"""What the name of an expert tensor says: layer, expert, projection and what is stored.

Writers disagree on spelling within one family (llm-compressor writes ``gate_proj`` into Mixtral files, the hub has
``w1``), so every spelling is understood for every family; a family decides what is canonical in messages.
"""

import dataclasses
import itertools
import re
from collections.abc import Iterable
from typing import Any

import jax

SHARD_OF_PROJECTION = {
    "w1": ("w1",),
    "gate_proj": ("w1",),
    "w3": ("w3",),
    "up_proj": ("w3",),
    "w2": ("w2",),
    "down_proj": ("w2",),
    "gate_up_proj": ("w1", "w3"),  # gate rows, then up rows
    "input_linear": ("w1", "w3"),  # Granite
    "output_linear": ("w2",),
}
CONTAINERS = ("mlp", "block_sparse_moe", "feed_forward")
SUFFIX_ALIASES = {
    "weight_scale_inv": "weight_scale",  # despite its name it multiplies
    "scale": "weight_scale",
    "scale_inv": "weight_scale",
}
# gpt-oss stores MXFP4 for all experts in two tensors per projection.
_FUSED_MXFP4 = {"blocks": "weight_packed", "scales": "weight_scale"}
_FUSED = re.compile(rf"({'|'.join(sorted(SHARD_OF_PROJECTION, key=len, reverse=True))})(?:[._]([A-Za-z0-9_.]+))?")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,8}")
# Granite's experts are a projection of their container, without an "experts" between: fused, or numbered as <p>.<e>.
_GRANITE_CONTAINER, _GRANITE_PROJECTIONS = "block_sparse_moe", ("input_linear", "output_linear")
CORRECTION_BIAS = "e_score_correction_bias"
# Layers for multi-token prediction of Qwen3-Next and ERNIE, which are numbered from 0 like the model's own.
_PREDICTORS = {"mtp", "mtp_block"}


def is_expert_name(name: str) -> bool:
    """Whether a tensor or module belongs to the routed experts of one of the model's own layers."""
    components = name.split(".")
    return _experts_at(components) is not None and not _PREDICTORS.intersection(components)


def is_correction_bias_name(name: str) -> bool:
    """Whether a tensor is a router's correction bias, spelt rightly or nearly so."""
    word = name.rpartition(".")[2]
    return word.startswith("e_scor") or "correction_bias" in word


def is_misspelt(name: str) -> bool:
    """Whether a name that ``is_expert_name`` does not know looks like one of the routed experts all the same.

    A numbered projection after something that is no "experts" (``mlp.expert.0.w1.weight``), or a word with "expert" in
    it; words that begin with "shared" are of shared experts.
    """
    components = name.split(".")
    if "experts" in components or _PREDICTORS.intersection(components):
        return False
    words = [word for word in components if not word.startswith("shared")]
    is_numbered = any(
        _NUMBER.fullmatch(number) and projection in SHARD_OF_PROJECTION and not word.startswith(("shared", "layers"))
        for word, number, projection in zip(components, components[1:], components[2:], strict=False)
    )
    return is_numbered or any("expert" in word for word in words)


def _experts_at(components: list[str]) -> int | None:
    """Index of the first component that says which expert or projection, None in other names."""
    if "experts" in components:
        return components.index("experts") + 1
    for at, (container, projection) in enumerate(itertools.pairwise(components), start=1):
        if container == _GRANITE_CONTAINER and projection in _GRANITE_PROJECTIONS:
            return at
    return None


@dataclasses.dataclass(frozen=True)
class ExpertTensor:
    """One parsed name. layer: None when the name carries none. expert: None when the tensor holds all experts.

    shards: the projections inside, in order: ("w1",), ("w3",), ("w2",) or ("w1", "w3") for a stacked gate_up_proj.
    suffix: what is stored, in the words of the leaves: "weight", "weight_scale", "input_scale", "bias", ...
    is_interleaved: rows of the two projections alternate, gate first, instead of standing one after the other.
    module: the name without its suffix, as quantization configs address it.
    """

    name: str
    layer: int | None
    expert: int | None
    shards: tuple[str, ...]
    suffix: str
    module: str
    is_interleaved: bool = False

    @property
    def leaf(self) -> str:
        return f"{'w2' if self.shards == ('w2',) else 'w13'}_{self.suffix}"


@dataclasses.dataclass(frozen=True)
class ExpertNames:
    """Reads expert tensor names. spelling: the words for w1, w3, w2 used in messages.

    is_gated: with False the only input projection may be called w1 or up_proj, and a gate is an error. is_interleaved:
    gate and up rows alternate in fused tensors, as gpt-oss has them; its MXFP4 tensors are known by their names.
    """

    spelling: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    is_gated: bool = True
    is_interleaved: bool = False

    def parse(self, name: str) -> ExpertTensor | None:
        """Read one checkpoint name, with or without what precedes ``experts``.

        Returns:
            None for a name that is no expert's: of a router, a norm, shared experts, multi-token prediction.

        Raises:
            ValueError: an expert tensor in a spelling that is not known. Skipping it would load garbage.
        """
        components = name.split(".")
        at = _experts_at(components)
        if at is None or not is_expert_name(name):
            return None
        is_mxfp4 = False
        before, after = components[:at], [c for c in components[at:] if c != "base_layer"]
        container = before[:-1] if before[-1] == "experts" else before
        if container and container[-1] not in CONTAINERS:
            raise self._unknown(name)
        is_number_last = len(after) > 1 and after[0] in _GRANITE_PROJECTIONS and _NUMBER.fullmatch(after[1])
        if is_number_last:
            after[:2] = after[1::-1]
        if after and _NUMBER.fullmatch(after[0]):
            if len(after) < 3 or after[1] not in SHARD_OF_PROJECTION:
                raise self._unknown(name)
            expert, projection, suffix = int(after[0]), after[1], ".".join(after[2:])
        else:
            match = _FUSED.fullmatch(".".join(after))
            if match is None:
                raise self._unknown(name)
            expert, projection, suffix = None, match[1], match[2] or "weight"
            is_mxfp4 = suffix in _FUSED_MXFP4
            suffix = _FUSED_MXFP4.get(suffix, suffix)
        module = name[: name.rindex(projection) + len(projection)]
        if is_number_last:
            module = f"{module}.{expert}"
        shards = self._shards(name, projection)
        return ExpertTensor(
            name=name,
            layer=layer_of(name),
            expert=expert,
            shards=shards,
            suffix=SUFFIX_ALIASES.get(suffix, suffix),
            module=module,
            is_interleaved=len(shards) == 2 and (self.is_interleaved or is_mxfp4),
        )

    def _shards(self, name: str, projection: str) -> tuple[str, ...]:
        if self.is_gated:
            return SHARD_OF_PROJECTION[projection]
        if projection == "up_proj":
            return ("w1",)
        if projection in ("gate_proj", "w3") or len(SHARD_OF_PROJECTION[projection]) == 2:
            raise ValueError(
                f"{name}: this layer is not gated, it has one input projection (w1 or up_proj) and w2 or down_proj"
            )
        return SHARD_OF_PROJECTION[projection]

    def describe(self, leaf: str, shard: str) -> str:
        """The canonical checkpoint words for one leaf and shard, e.g. "gate_proj.weight_scale"."""
        if not self.is_gated and shard == "w1":
            shard = "w3"
        return f"{self.spelling[('w1', 'w3', 'w2').index(shard)]}.{leaf.split('_', 1)[1]}"

    @staticmethod
    def _unknown(name: str) -> ValueError:
        return ValueError(
            f"{name}: unknown spelling of an expert tensor, expected experts.<e>.<projection>.<suffix> or "
            f"experts.<projection>, after one of {', '.join(CONTAINERS)}, with one of {', '.join(SHARD_OF_PROJECTION)}"
        )


def make_expert_params_mapping(
    model: object,
    ckpt_gate_proj_name: str,
    ckpt_down_proj_name: str,
    ckpt_up_proj_name: str,
    num_experts: int,
    num_redundant_experts: int = 0,
) -> list[tuple[str, str, int, str]]:
    """Rows (parameter prefix, checkpoint fragment, physical expert, shard) that translate per-expert names, as in vLLM.

    Args:
        model: what holds the parameters: a torch or nnx module, a pytree, an iterable of parameter names, or None. Only
            asked whether a name contains ".base_layer." (LoRA wrapping), which then becomes part of both names.
        ckpt_gate_proj_name, ckpt_down_proj_name, ckpt_up_proj_name: the checkpoint's words, e.g. "w1", "w2", "w3".
        num_experts, num_redundant_experts: logical experts L, extra physical slots R. Slot p >= L is a copy of logical
            expert (p - L) % L, so one checkpoint tensor maps to all of its replicas.
    """
    base = "base_layer." if any(".base_layer." in name for name in _parameter_names(model)) else ""
    projections = (("w1", ckpt_gate_proj_name), ("w2", ckpt_down_proj_name), ("w3", ckpt_up_proj_name))
    return [
        (f"experts.{base}{'w2_' if shard == 'w2' else 'w13_'}", f"experts.{p % num_experts}.{name}.{base}", p, shard)
        for p in range(num_experts + num_redundant_experts)
        for shard, name in projections
    ]


def _parameter_names(model: Any) -> list[str]:
    if model is None:
        return []
    if hasattr(model, "named_parameters"):  # a torch module; torch itself is not imported here
        return [name for name, _ in model.named_parameters()]
    if isinstance(model, (list, tuple, set, frozenset)) and all(isinstance(name, str) for name in model):
        return list(model)
    return [
        jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in jax.tree_util.tree_leaves_with_path(model)
    ]


def map_expert_name(mapping: Iterable[tuple[str, str, int, str]], name: str) -> tuple[ExpertTensor, ...]:
    """Read a name by rows of ``make_expert_params_mapping``: one result per replica, none when no row fits.

    A row fits where its checkpoint fragment stands at the start of the name or after a dot: "experts.0.w1." must not be
    found inside "shared_experts.0.w1.".
    """
    found = []
    for _, fragment, expert, shard in mapping:
        head, separator, suffix = f".{name}".partition(f".{fragment}")
        if separator and suffix:
            suffix = suffix.removeprefix("base_layer.")
            module = f"{head}.{fragment}".strip(".")
            found.append(
                ExpertTensor(name, layer_of(name), expert, (shard,), SUFFIX_ALIASES.get(suffix, suffix), module)
            )
    return tuple(found)


def layer_of(name: str) -> int | None:
    """Index after the last ``layers`` component before ``experts`` or the router, None when the name carries none."""
    components = name.split(".")
    for word, number in zip(components, components[1:], strict=False):
        if word == "layers" and _NUMBER.fullmatch(number):
            return int(number)
    return None
