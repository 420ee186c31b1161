"""Adapters of models on disk, as PEFT writes and reads them: adapter_config.json and adapter_model.safetensors.

Tensors lie below ``base_model.model.`` under the model's own module names, which are those of transformers 5:

    model.layers.0.self_attn.q_proj.lora_A.weight       (R, K)        .lora_B.weight (N, R)
    model.layers.0.mlp.experts.base_layer.lora_A.weight (E * R, H)    .lora_B.weight (2 I, R * E)    gate and up in one
    model.layers.0.mlp.experts.lora_A.weight            (E * R, I)    .lora_B.weight (H, R * E)      down

The last two are ``target_parameters`` of PEFT, ``gate_up_proj`` and ``down_proj``; without the second one the first has
no ``base_layer`` in its name. Experts count first in the rows of A and last in the columns of B. Adapters made with
transformers 4 name each expert, ``experts.3.gate_proj`` or ``experts.3.w1``, and gate and up have an A of their own.
"""

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from moe_jax._arguments import check_not_traced, shown
from moe_jax._output import write_output
from moe_jax.adapters._lora import Projection, adaptable
from moe_jax.adapters._peft_targets import Targets
from moe_jax.loading import CheckpointError, SafetensorsFile
from moe_jax.loading._errors import listed, read_json
from moe_jax.models._decoder import CausalLM
from moe_jax.models._layers import LinearLoRA
from moe_jax.models._partition import hold_lora
from moe_jax.nn import FusedMoE
from moe_jax.nn._lora import EXPERT_TARGETS, ExpertLoRA, held_expert_lora, whole_expert_lora

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_MAX_CONFIG_BYTES = 1 << 20
# Settings that change what an adapter computes, in ways that are not built; each must be absent or empty.
_NOT_BUILT = ("use_dora", "use_qalora", "use_bdlora", "lora_bias", "fan_in_fan_out", "modules_to_save", "rank_pattern")
_NOT_BUILT += ("alpha_pattern", "layer_replication", "trainable_token_indices", "alora_invocation_tokens")
_NOT_BUILT += ("arrow_config", "kasa_config", "velora_config", "monteclora_config", "megatron_config")
# Values of init_lora_weights, or what they begin with, whose adapters belong to weights that PEFT has changed.
_CHANGES_WEIGHTS = ("pissa", "olora", "corda", "loftq", "lora_ga")
_PARAMETERS = dict(w13="gate_up_proj", w2="down_proj")
_OF_AN_EXPERT = re.compile(r"(?P<experts>.*\.experts)\.(?P<expert>\d+)\.(?P<word>\w+)")
_WORDS = dict(gate_proj=("w13", 0), w1=("w13", 0), up_proj=("w13", 1), w3=("w13", 1), down_proj=("w2", 0), w2=("w2", 0))


def save_lora(
    model: Any, directory: str | os.PathLike[str], *, base_model: str | os.PathLike[str] | None = None
) -> None:
    """Write a model's adapters as PEFT does, so that ``peft.PeftModel.from_pretrained`` reads them for the same model.

    Experts over a mesh pass through the host. Where experts share an A, each is written with it. Where some layers have
    no adapter, the configuration names each weight that has one. Files of the same name are replaced.

    Args:
        model: a whole model with adapters of one rank and alpha, as ``lora`` and ``load_lora`` make them.
        directory: created where it does not exist.
        base_model: the model's name or directory, for PEFT's ``base_model_name_or_path``.

    Raises:
        ValueError: no adapters, or of several ranks; NaN or infinity, which ``load_lora`` refuses. TypeError: no whole
            model. NotImplementedError: named adapters; a family whose names for adapters of experts are not known.
            Nothing is written then.
    """
    check_not_traced("save_lora", model)
    places = _Places(model)
    tensors: dict[str, np.ndarray] = {}
    modules: set[str] = set()
    parameters: set[str] = set()
    adapted: list[str] = []
    held: set[tuple[int, float]] = set()
    for prefix, layer in places.experts.items():
        if layer.lora is None:
            continue
        held.add((layer.lora.rank, layer.lora.alpha))
        own = _tensors_of_experts(places, prefix, layer, layer.lora)
        tensors |= own
        adapted += [f"{prefix}.{name}" for name in _targets(layer.lora)]
        if _OF_AN_EXPERT.match(next(iter(own))):
            modules |= {name.rpartition(".lora_")[0] for name in own}
        else:
            parameters |= {f"{prefix}.{_PARAMETERS[name]}" for name in _targets(layer.lora)}
    for prefix, place in places.projections.items():
        if (lora := place.linear.lora) is not None:
            held.add((lora.rank, lora.alpha))
            adapted.append(prefix)
            modules.add(prefix)
            tensors[f"{prefix}.lora_A.weight"] = np.asarray(lora.a[...])
            tensors[f"{prefix}.lora_B.weight"] = np.asarray(lora.b[...])
    if not tensors:
        raise ValueError(f"a {type(model).__name__} without adapters has none to save; moe_jax.lora adds some")
    if len(held) > 1:
        raise ValueError(f"adapters have several (rank, alpha), {sorted(held)}; a file of PEFT has one here")
    if damaged := [name for name, array in tensors.items() if not _is_finite(array)]:
        raise ValueError(
            f"{listed(damaged)}: adapters with NaN or infinity, expected finite numbers; nothing is written. Go back "
            "to a checkpoint from before training diverged"
        )
    ((rank, alpha),) = held
    if not places.left_out(adapted):  # names that hold for every layer
        modules = {name.rpartition(".")[2] for name in modules}
        parameters = {".".join(name.split(".")[-3:]) for name in parameters}
    config = dict(
        peft_type="LORA",
        task_type="CAUSAL_LM",
        base_model_name_or_path=None if base_model is None else os.fspath(base_model),
        r=rank,
        lora_alpha=int(alpha) if alpha == int(alpha) else alpha,
        target_modules=sorted(modules),
        target_parameters=sorted(parameters) or None,
        bias="none",
        lora_dropout=0.0,
        fan_in_fan_out=False,
        use_rslora=False,
        use_dora=False,
        init_lora_weights=True,
        inference_mode=True,
    )
    root = Path(directory)
    root.mkdir(parents=True, exist_ok=True)
    from safetensors.numpy import save

    data = save({_PREFIX + name: np.ascontiguousarray(array) for name, array in tensors.items()}, {"format": "pt"})
    write_output(root / WEIGHTS_FILE, [data])
    write_output(root / CONFIG_FILE, [json.dumps(config, indent=2, sort_keys=True).encode()])


def load_lora(model: Any, source: Any) -> Any:
    """Give a model the adapters in a directory that PEFT, or ``save_lora``, wrote for it, in place; or several at once.

    Args:
        model: a whole model without adapters on the weights that the files name; nobody else may use it meanwhile.
        source: a directory with adapter_config.json and adapter_model.safetensors; or a mapping of names to such
            directories, whose adapters ``select_lora`` chooses from.

    Returns:
        The model.

    Raises:
        ValueError: files that are damaged, or of another model: names, shapes and the rank are compared, and so are
            the layers that the configuration names, as by ``layers_to_transform``; a weight that has an adapter
            already. NotImplementedError: a setting of PEFT that is not built, such as DoRA, by name; a
            layer over a mesh with copies of experts. TypeError: no whole model, or no directory. The model is then
            untouched.
    """
    check_not_traced("load_lora", model)
    places = _Places(model)
    sources: dict[Any, Any] = dict(source) if isinstance(source, Mapping) else {}
    names = tuple(sources)
    if isinstance(source, Mapping) and (not names or not all(isinstance(name, str) for name in names)):
        raise ValueError(f"source={shown(source)}, expected a directory, or a mapping of names to directories")
    directories: Any = sources.values() if names else (source,)
    if odd := [one for one in directories if not isinstance(one, str | os.PathLike)]:
        raise TypeError(f"source={shown(odd[0])}, expected a directory, or a mapping of names to directories")
    files = [_read_files(places, Path(one)) for one in directories]
    for prefix in {name for file in files for name in (*file.experts, *file.projections)}:
        target = places.experts[prefix] if prefix in places.experts else places.projections[prefix].linear
        if target.lora is not None:
            raise ValueError(f"{prefix} has an adapter already; moe_jax gives each weight one")
    alphas = [file.alpha for file in files]
    for prefix, layer in places.experts.items():
        parts = [file.experts.get(prefix) for file in files]
        if not any(parts):
            continue
        held: Any = dict(ranks=_ranks(files, parts), alphas=alphas, names=names)
        placement = None if layer.placement is None else layer.placement.get_value()
        arrays = _experts_side_by_side([part for part in parts if part])
        layer.set_lora(held_expert_lora(arrays, layer.config, placement, layer.parallel, **held))
    for prefix, place in places.projections.items():
        parts = [file.projections.get(prefix) for file in files]
        there = [part for part in parts if part]
        if there:
            a, b = (np.concatenate([part[i] for part in there], axis=i) for i in range(2))
            held = dict(ranks=_ranks(files, parts), alphas=alphas, names=names)
            hold_lora(place.owner, place.name, LinearLoRA(jnp.asarray(a), jnp.asarray(b), **held))
    return model


class _Files(NamedTuple):
    """What one directory holds. experts: arrays of ``ExpertLoRA`` by module. projections: (a, b) by module."""

    rank: int
    alpha: float
    experts: dict[str, dict[str, np.ndarray]]
    projections: dict[str, tuple[np.ndarray, np.ndarray]]


def _read_files(places: "_Places", root: Path) -> _Files:
    config = read_json(root / CONFIG_FILE, max_bytes=_MAX_CONFIG_BYTES)
    rank, alpha = _read_config(config, root / CONFIG_FILE)
    with SafetensorsFile(root / WEIGHTS_FILE) as file:
        twice = [name for name in file.names if _PREFIX + name in file.names]
        if twice:
            raise CheckpointError(f"{root / WEIGHTS_FILE}: {listed(twice)}: there with {_PREFIX} in front as well")
        tensors = {name.removeprefix(_PREFIX): _supported(file.read(name), name, file.path) for name in file.names}
    reader = _Reader(root / WEIGHTS_FILE, places, rank, tensors)
    return _Files(rank, alpha, *reader.read(config))


def _ranks(files: Sequence[_Files], parts: Sequence[Any]) -> list[int]:
    """0 where a file leaves the weight."""
    return [file.rank if part else 0 for file, part in zip(files, parts, strict=True)]


def _experts_side_by_side(parts: Sequence[Mapping[str, np.ndarray]]) -> dict[str, Any]:
    """Arrays of several adapters of a layer joined along their ranks; one without a target has zeros there."""
    names = sorted({name for part in parts for name in part})
    projections = max((part["w13_a"].shape[1] for part in parts if "w13_a" in part), default=1)
    joined: dict[str, Any] = {}
    for name in names:
        axis = -2 if name.endswith("_a") else -1
        like = next(part[name] for part in parts if name in part)
        own = []
        for part in parts:
            rank = next(array.shape[-2] for other, array in part.items() if other.endswith("_a"))
            shape = list(like.shape)
            shape[axis] = rank
            array = part.get(name, np.zeros(shape, like.dtype))
            if name == "w13_a":
                array = np.broadcast_to(array, (array.shape[0], projections, *array.shape[2:]))
            own.append(array)
        joined[name] = jnp.asarray(np.concatenate(own, axis=axis))
    return joined


def _read_config(config: Mapping[str, Any], path: Path) -> tuple[int, float]:
    """(rank, alpha) such that alpha / rank is the scale."""
    if config.get("peft_type") != "LORA":
        raise NotImplementedError(f"{path}: peft_type is {config.get('peft_type')!r}, expected 'LORA'")
    if config.get("bias", "none") != "none":
        raise NotImplementedError(f"{path}: bias is {config['bias']!r}, which is not built; expected 'none'")
    wrong = [name for name in _NOT_BUILT if config.get(name)]
    if wrong:
        raise NotImplementedError(f"{path}: {wrong[0]}={config[wrong[0]]!r} is not built")
    start = str(config.get("init_lora_weights")).lower()
    if start.startswith(_CHANGES_WEIGHTS):
        raise NotImplementedError(
            f"{path}: init_lora_weights={start!r}: the adapter belongs to weights that PEFT has changed, which is not "
            "built; save it with save_pretrained(..., path_initial_model_for_weight_conversion=...)"
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or rank < 1:
        raise CheckpointError(f"{path}: r is {rank!r}, expected an integer of at least 1")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or alpha <= 0:
        raise CheckpointError(f"{path}: lora_alpha is {alpha!r}, expected a number above 0")
    if alpha > float(np.finfo(np.float32).max):
        raise CheckpointError(f"{path}: lora_alpha is {shown(alpha)}, above the largest float32")
    is_rank_stabilized = config.get("use_rslora") or False
    if not isinstance(is_rank_stabilized, bool):
        raise CheckpointError(f"{path}: use_rslora is {is_rank_stabilized!r}, expected true or false")
    parameters = config.get("target_parameters") or []
    if not isinstance(parameters, list) or not all(isinstance(one, str) for one in parameters):
        raise CheckpointError(f"{path}: target_parameters is {shown(parameters)}, expected a list of strings")
    return rank, float(alpha) * (rank**0.5 if is_rank_stabilized else 1.0)


def _supported(array: np.ndarray, name: str, path: Path) -> np.ndarray:
    """bfloat16 and float32 as they are, float16 and float64 as float32."""
    if array.dtype in (jnp.bfloat16, np.float32):
        return array
    if array.dtype not in (np.float16, np.float64):
        raise NotImplementedError(f"{path}: {name} is {array.dtype}, expected a float of 16, 32 or 64 bits")
    with np.errstate(over="ignore"):  # infinity is refused where shapes are
        return array.astype(np.float32)


def _is_finite(array: np.ndarray) -> bool:
    return bool(np.isfinite(array.astype(np.float32)).all())


class _Places:
    """Module names of a model, as transformers 5 has them, with what they name here."""

    def __init__(self, model: Any):
        if not isinstance(model, CausalLM):
            raise TypeError(
                f"model has type {type(model).__name__}, expected a whole model of load_pretrained: PEFT names weights "
                "by the model that they belong to"
            )
        self.family = type(model)
        if self.family.moe_module == "feed_forward":
            raise NotImplementedError(
                f"{self.family.__name__}: PEFT's names for adapters of these experts are not known"
            )
        # transformers 5 has "mlp" for what checkpoints call block_sparse_moe, except in this family.
        self.old_experts = f"{self.family.moe_module}.experts"
        self.moe_module = "block_sparse_moe" if self.family.model_type == "granitemoe" else "mlp"
        prefix = self.family.layers_module()
        _, projections = adaptable(model)
        owners = {id(layer.self_attn): index for index, layer in enumerate(model.layers)}
        words = self.family.attention_names
        self.projections: dict[str, Projection] = {
            f"{prefix}.{owners[id(place.owner)]}.{place.owner.module_name}.{words.get(place.name, place.name)}": place
            for place in projections
        }
        blocks = {id(block): block.experts for block in model.moe_blocks()}
        self.experts: dict[str, FusedMoE] = {
            f"{prefix}.{index}.{self.moe_module}.experts": blocks[id(layer.mlp)]
            for index, layer in enumerate(model.layers)
            if id(layer.mlp) in blocks
        }

    def left_out(self, adapted: Iterable[str]) -> dict[str, list[str]]:
        """{kind of a weight: names of it without an adapter}, of kinds that other layers have among ``adapted``.

        adapted: names of projections, of experts with ".w13" or ".w2"; so are the names that are found.
        """
        held = set(adapted)
        kinds = {self.kind(name) for name in held}
        of_experts = (f"{experts}.{name}" for experts in self.experts for name in EXPERT_TARGETS)
        found: dict[str, list[str]] = {}
        for name in (*self.projections, *of_experts):
            if name not in held and self.kind(name) in kinds:
                found.setdefault(self.kind(name), []).append(name)
        return found

    def kind(self, name: str) -> str:
        """The name of a weight within its layer."""
        return name.removeprefix(f"{self.family.layers_module()}.").partition(".")[2]

    def layer(self, name: str) -> int:
        return int(name.removeprefix(f"{self.family.layers_module()}.").partition(".")[0])

    def canonical(self, experts: str) -> str:
        """The name of experts in transformers 5 for that of a checkpoint."""
        old = f".{self.old_experts}"
        return experts if not experts.endswith(old) else experts.removesuffix(old) + f".{self.moe_module}.experts"


def _targets(lora: ExpertLoRA) -> list[str]:
    return [name for name in EXPERT_TARGETS if getattr(lora, f"{name}_a") is not None]


def _tensors_of_experts(places: _Places, prefix: str, layer: FusedMoE, lora: ExpertLoRA) -> dict[str, np.ndarray]:
    whole = whole_expert_lora(lora, layer.config, None if layer.placement is None else layer._slots)
    e, names = layer.config.num_experts, _targets(lora)
    found: dict[str, np.ndarray] = {}
    arrays = {f"{name}_{part}": np.asarray(getattr(whole, f"{name}_{part}")[...]) for name in names for part in "ab"}
    if "w13" in names and arrays["w13_a"].shape[1] == 2:
        return _tensors_by_expert(places, prefix, e, arrays)
    if not layer.config.is_act_and_mul:
        raise NotImplementedError(f"{prefix}: PEFT's names for experts without a gate are not known")
    for name in names:
        a, b = arrays[f"{name}_a"], arrays[f"{name}_b"]
        if name == "w13":
            a, b = a[:, 0], _joined(b, places.family.expert_names.is_interleaved)
        a = np.broadcast_to(a, (e, *a.shape[1:]))
        # PEFT wraps one parameter after the other: gate_up_proj lies inside where both are adapted.
        place = f"{prefix}.base_layer" if name == "w13" and "w2" in names else prefix
        found[f"{place}.lora_A.weight"] = a.reshape(-1, a.shape[-1])
        found[f"{place}.lora_B.weight"] = b.transpose(1, 2, 0).reshape(b.shape[1], -1)
    return found


def _tensors_by_expert(
    places: _Places, prefix: str, num_experts: int, arrays: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    words, old = places.family.expert_names.spelling, places.family.moe_module
    if len(set(words)) < 3 or places.family.expert_names.is_interleaved:
        raise NotImplementedError(f"{prefix}: gate and up have an A of their own, which PEFT has no names for here")
    prefix = prefix.removesuffix(f".{places.moe_module}.experts") + f".{old}.experts"
    found: dict[str, np.ndarray] = {}
    for expert in range(num_experts):
        for (name, index), word in zip((("w13", 0), ("w13", 1), ("w2", None)), words, strict=True):
            if f"{name}_a" not in arrays:
                continue
            a, b = arrays[f"{name}_a"], arrays[f"{name}_b"]
            own_a, own_b = a[expert if len(a) > 1 else 0], b[expert]
            found[f"{prefix}.{expert}.{word}.lora_A.weight"] = own_a if index is None else own_a[index]
            found[f"{prefix}.{expert}.{word}.lora_B.weight"] = own_b if index is None else own_b[index]
    return found


def _joined(b: np.ndarray, is_interleaved: bool) -> np.ndarray:
    """(E, 2, I, R) -> (E, 2 I, R) in the order of the model's rows."""
    e, g, i, r = b.shape
    return (b.swapaxes(1, 2) if is_interleaved else b).reshape(e, g * i, r)


def _split(b: np.ndarray, is_interleaved: bool) -> np.ndarray:
    """Inverse of ``_joined``."""
    e, rows, r = b.shape
    return b.reshape(e, rows // 2, 2, r).swapaxes(1, 2) if is_interleaved else b.reshape(e, 2, rows // 2, r)


class _Reader(NamedTuple):
    """tensors: by name without PEFT's prefix, in dtypes that adapters have here."""

    path: Path
    places: _Places
    rank: int
    tensors: dict[str, np.ndarray]

    def read(
        self, config: Mapping[str, Any]
    ) -> tuple[dict[str, dict[str, np.ndarray]], dict[str, tuple[np.ndarray, np.ndarray]]]:
        """({module: arrays of ``ExpertLoRA``}, {module: (a, b)})."""
        pairs = self._pairs()
        experts: dict[str, dict[str, np.ndarray]] = {}
        by_expert: dict[str, dict[tuple[int, str, int], tuple[np.ndarray, np.ndarray]]] = {}
        projections, unknown = {}, []
        for name, pair in pairs.items():
            inner = name.removesuffix(".base_layer")
            match = _OF_AN_EXPERT.fullmatch(name)
            home = self.places.canonical(match["experts"]) if match else inner
            if name in self.places.projections:
                n, k = self.places.projections[name].linear.weight.shape
                projections[name] = self._checked(name, pair, (self.rank, k), (n, self.rank))
            elif match and home in self.places.experts and match["word"] in _WORDS:
                target, place = _WORDS[match["word"]]
                key = (int(match["expert"]), target, place)
                if by_expert.setdefault(home, {}).setdefault(key, pair) is not pair:
                    raise ValueError(f"{self.path}: {name} is there under another name as well")
            elif inner in self.places.experts:
                experts.setdefault(inner, {}).update(self._fused(name, pair, pairs, config))
            else:
                unknown.append(name)
        if unknown:
            of = self.places.family.__name__
            raise ValueError(f"{self.path}: {listed(unknown)}: a {of} has no such weight that takes an adapter")
        for home, found in by_expert.items():
            if home in experts:
                raise ValueError(f"{self.path}: {home} has adapters of each expert and of all in one")
            experts[home] = self._stacked(home, found)
        if not experts and not projections:
            raise ValueError(f"{self.path}: holds no adapters")
        of_experts = (f"{home}.{name[:-2]}" for home, arrays in experts.items() for name in arrays if name[-2:] == "_a")
        self._check_layers((*projections, *of_experts), config, one_by_one=bool(by_expert))
        return experts, projections

    def _check_layers(self, adapted: Sequence[str], config: Mapping[str, Any], *, one_by_one: bool) -> None:
        """Raise ValueError where the configuration names weights of layers that the file leaves out.

        one_by_one: whether the file has tensors for each expert.
        """
        left_out = self.places.left_out(adapted)
        keys = {name: self._keys(name, one_by_one) for names in left_out.values() for name in names}
        longest = max((len(key) for own in keys.values() for key in own), default=0)
        targets = Targets(config, self.path.parent / CONFIG_FILE, longest)
        for kind, names in left_out.items():
            stated = [n for n in names if any(targets.has(key, self.places.layer(n)) for key in keys[n])]
            if stated:
                count = sum(self.places.kind(name) == kind for name in adapted)
                raise ValueError(
                    f"{self.path}: has {kind} of {count} layers and not {listed(stated)}, which {CONFIG_FILE} names as "
                    "well: an adapter of a model with fewer layers, a damaged file, or a configuration that does not "
                    "say which layers it has, as by layers_to_transform"
                )

    def _keys(self, name: str, one_by_one: bool) -> list[str]:
        """What PEFT may call a weight, those of its first expert where experts have tensors of their own."""
        module, _, target = name.rpartition(".")
        if module not in self.places.experts:
            return [name]
        if not one_by_one:
            return [f"{module}.{_PARAMETERS[target]}"]
        layer = module.removesuffix(f"{self.places.moe_module}.experts")
        words = [word for word, (of, _) in _WORDS.items() if of == target]
        return [f"{home}.0.{word}" for home in {module, layer + self.places.old_experts} for word in words]

    def _pairs(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        found: dict[str, dict[str, np.ndarray]] = {}
        for name, array in self.tensors.items():
            for part in "AB":
                if name.endswith(f".lora_{part}.weight"):
                    found.setdefault(name.removesuffix(f".lora_{part}.weight"), {})[part] = array
                    break
            else:
                raise NotImplementedError(f"{self.path}: {name} is neither lora_A.weight nor lora_B.weight")
        half = [name for name, parts in found.items() if len(parts) < 2]
        if half:
            raise ValueError(f"{self.path}: {half[0]} has lora_{''.join(found[half[0]])} alone, expected A and B")
        return {name: (parts["A"], parts["B"]) for name, parts in found.items()}

    def _checked(
        self, name: str, pair: tuple[np.ndarray, np.ndarray], a: tuple[int, ...], b: tuple[int, ...]
    ) -> tuple[np.ndarray, np.ndarray]:
        for part, array, shape in zip("AB", pair, (a, b), strict=True):
            if array.shape != shape:
                raise ValueError(
                    f"{self.path}: {name}.lora_{part}.weight is {list(array.shape)}, expected {list(shape)} for rank "
                    f"{self.rank}: an adapter of another model or rank"
                )
            if not _is_finite(array):
                raise ValueError(f"{self.path}: {name}.lora_{part}.weight holds NaN or infinity; the file is damaged")
        return pair

    def _fused(
        self,
        name: str,
        pair: tuple[np.ndarray, np.ndarray],
        pairs: Mapping[str, Any],
        config: Mapping[str, Any],
    ) -> dict[str, np.ndarray]:
        """Arrays of all experts in one tensor."""
        inner = name.removesuffix(".base_layer")
        layer = self.places.experts[inner].config
        e, r, h, i = layer.num_experts, self.rank, layer.hidden_size, layer.intermediate_size
        both = {inner, f"{inner}.base_layer"} <= pairs.keys()
        targets = (target.rpartition(".") for target in config.get("target_parameters") or ())
        stated = [word for module, _, word in targets if f".{inner}.".endswith(f".{module}." if module else ".")]
        target = ("w13" if name != inner else "w2") if both else "w2" if "gate_up_proj" not in stated else "w13"
        k, n = (h, 2 * i) if target == "w13" else (i, h)
        a, b = self._checked(name, pair, (e * r, k), (n, r * e))
        a, b = a.reshape(e, r, k), b.reshape(n, r, e).transpose(2, 0, 1)
        if target == "w13":
            a, b = a[:, None], _split(b, self.places.family.expert_names.is_interleaved)
        return {f"{target}_a": a, f"{target}_b": b}

    def _stacked(
        self, home: str, found: Mapping[tuple[int, str, int], tuple[np.ndarray, np.ndarray]]
    ) -> dict[str, np.ndarray]:
        """Arrays of experts that have tensors of their own."""
        layer = self.places.experts[home].config
        e, r, h, i = layer.num_experts, self.rank, layer.hidden_size, layer.intermediate_size
        targets = {name for _, name, _ in found}
        needed = {(x, name, g) for x in range(e) for name in targets for g in range(2 if name == "w13" else 1)}
        if wrong := sorted(needed ^ found.keys()):
            expert, name, _ = wrong[0]
            what = "has no" if wrong[0] in needed else "is not an expert of this model but has an"
            raise ValueError(
                f"{self.path}: {home}: expert {expert} {what} adapter of {name}; expected all or none of {e}"
            )
        arrays: dict[str, np.ndarray] = {}
        for name in targets:
            a, b = ((r, h), (i, r)) if name == "w13" else ((r, i), (h, r))
            pairs = {key: self._checked(f"{home}.{key[0]}", found[key], a, b) for key in needed if key[1] == name}
            for part, letter in enumerate("ab"):
                parts = [[pairs[x, name, g][part] for g in range(2 if name == "w13" else 1)] for x in range(e)]
                stack = np.stack([np.stack(own) for own in parts])
                arrays[f"{name}_{letter}"] = stack if name == "w13" else stack[:, 0]
        return arrays
