"""``quantize_checkpoint``: one checkpoint directory in, another one out, layer by layer."""

import collections
import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np

from moe_jax._output import nearest_directory
from moe_jax._typing import Json, Leaf
from moe_jax.loading import (
    Checkpoint,
    CheckpointError,
    ExpertReader,
    QuantizationConfig,
    as_packed,
    checkpoint_directory,
)
from moe_jax.loading._errors import listed
from moe_jax.loading.config._modules import is_normally_plain
from moe_jax.loading.config._patterns import BoundedPatterns
from moe_jax.loading.files._checkpoint import CheckpointLike
from moe_jax.loading.files._safetensors import DTYPES
from moe_jax.quantization import (
    ExpertWeights,
    MoEMethod,
    QuantizedTensor,
    ScaleSearchMoEMethod,
    Scheme,
    method_for,
    online_scheme,
)
from moe_jax.writing._companions import Companions
from moe_jax.writing._config import config_group, quantization_config
from moe_jax.writing._matrices import (
    COPIED,
    QUANTIZED,
    REQUANTIZED,
    Layout,
    check_conversion,
    conversion,
    converted,
    module_layout,
    module_tensors,
)
from moe_jax.writing._shards import ShardedWriter, TensorSpec, copied_spec, write_text
from moe_jax.writing._survey import ExpertLayer, Linear, Survey, list_of_layers, numbered_experts, survey
from moe_jax.writing._whole_directory import check_destination, staged

MAX_SHARD_BYTES = 5 * 10**9  # transformers' default
MODULES = ("experts", "all")
SCALE_SEARCHES = ("mse",)
_REGEX = "re:"
_DTYPE_KEYS = ("dtype", "torch_dtype")

Progress = Callable[[int, int], None]


@dataclasses.dataclass(frozen=True)
class WrittenCheckpoint:
    """What was written. files: of weights. nbytes: of all tensors.

    experts, linears: how many layers of experts and how many matrices outside them were "copied" (same bits),
    "repacked" (same codes in another container), "quantized" from full precision, "dequantized", or "requantized"
    (dequantized exactly in float32, then quantized again: the errors of both formats add up).
    copied: other files of the source that were copied. left: those that were not -> why.
    """

    directory: Path
    scheme: Scheme
    files: tuple[str, ...]
    nbytes: int
    experts: Mapping[str, int]
    linears: Mapping[str, int]
    copied: tuple[str, ...]
    left: Mapping[str, str]

    @property
    def is_lossy_twice(self) -> bool:
        return REQUANTIZED in self.experts or REQUANTIZED in self.linears


def quantize_checkpoint(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    scheme: str | Scheme | Json,
    revision: str | None = None,
    modules: str = "experts",
    ignore: Sequence[str] = (),
    scale_search: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Progress | None = None,
) -> WrittenCheckpoint:
    """Write a checkpoint in another scheme, in compressed-tensors' format, which vLLM and transformers read as well.

    Experts in fused tensors are written one by one. What is stored in the scheme's format already keeps its bits; what
    is stored in another one is dequantized in float32 first. Matrices that stay out of the scheme but are stored
    quantized are dequantized and rounded to the checkpoint's 16-bit dtype. Memory is that of about one layer. The
    same source gives the same bytes.

    ``dst`` appears complete or not at all: it is written under another name beside it and renamed at the end. The
    tokenizer, generation settings and chat template are copied; code is not, nor what a link out of ``src`` leads to.

    Args:
        src: a checkpoint in any format that ``load_moe`` reads: a directory, or ``organization/name`` on a hub.
        dst: must not exist, or be an empty directory. Directories above it are made.
        scheme: as for ``load_pretrained(quantize=...)``; "bf16" writes everything unquantized. "nvfp4" without
            calibration in the source gets input global scales of 1.
        revision: branch, tag or commit of a source on a hub; None is main.
        modules: "experts", or "all" for the matrices of attention, dense layers and shared experts as well. Routers,
            the shared expert's gate, embeddings and the head always stay as they are, and so do vision models.
        ignore: more modules to leave out: names, or regular expressions after ``re:`` that match from the start. All
            experts of a layer go together.
        scale_search: None rounds with the scale of the largest value, "mse" searches the scale of the least squared
            error, which takes about twenty times as long.
        max_shard_bytes: of tensor data per file.
        progress: called as ``progress(done, total)`` with bytes.

    Raises:
        CheckpointError: a source that cannot be used or changes meanwhile, a destination that cannot be written.
        ValueError, NotImplementedError: arguments, or a scheme that does not fit the matrices' sizes or that
            compressed-tensors has no form for. Nothing is left behind.
    """
    target = Scheme.parse(scheme)
    if modules not in MODULES:
        raise ValueError(f"modules={modules!r}, expected one of {', '.join(MODULES)}")
    if scale_search is not None and scale_search not in SCALE_SEARCHES:
        raise ValueError(f"scale_search={scale_search!r}, expected None or one of {', '.join(SCALE_SEARCHES)}")
    if target.is_quantized:
        config_group(target)
    destination = Path(dst)
    check_destination(destination)
    source = checkpoint_directory(src, revision=revision)
    with Checkpoint(source) as opened:
        job = _Job(as_packed(opened), target, modules, tuple(ignore), scale_search is not None)
        companions = Companions(source, opened.files)
        _check_space(destination, sum(spec.nbytes for spec in job.specs) + companions.nbytes)
        try:
            with staged(destination) as directory:
                writer = ShardedWriter(directory, job.specs, max_shard_bytes)
                try:
                    done = 0
                    for name, array in job.tensors():
                        writer.write(name, array)
                        done += array.nbytes
                        if progress is not None:
                            progress(done, writer.nbytes)
                    writer.close()
                finally:
                    writer.abandon()
                companions.copy(directory)
                write_text(directory / "config.json", json.dumps(job.config(), indent=2) + "\n")
                opened.check_unchanged()
        except OSError as error:
            raise CheckpointError(
                f"{destination}: cannot be written: {error.strerror or error}; nothing was left behind"
            ) from None
    return WrittenCheckpoint(
        destination,
        target,
        writer.files,
        writer.nbytes,
        job.expert_kinds,
        job.linear_kinds,
        companions.names,
        companions.left,
    )


class _Job:
    """One conversion, planned: which scheme every module gets, and the tensors that come out."""

    def __init__(
        self, checkpoint: CheckpointLike, target: Scheme, modules: str, ignore: tuple[str, ...], searches: bool
    ):
        self._checkpoint, self._target = checkpoint, target
        self._quantization = QuantizationConfig.from_config(checkpoint.config, checkpoint)
        self._reader = ExpertReader(checkpoint, quantization=self._quantization)
        self._survey: Survey = survey(checkpoint, self._quantization, self._reader)
        self._unquantized = Scheme.parse(None)
        self._dtype = _dtype_of(checkpoint.config)
        self._methods: dict[Scheme, MoEMethod] = {}
        if target.is_quantized:
            online = online_scheme(target)
            for chosen in {target, online}:
                self._methods[chosen] = ScaleSearchMoEMethod(chosen) if searches else method_for(chosen)
        modules_of_experts = (name for layer in self._survey.experts for name in layer.modules.values())
        names = (*checkpoint.names, *modules_of_experts)
        is_ignored = _Ignore(ignore, max(map(len, names), default=0))
        self._experts = [(layer, self._scheme_of_layer(layer, is_ignored)) for layer in self._survey.experts]
        # All else is of a vision model, or of predictors with a list of layers of their own.
        own = {list_of_layers(next(iter(layer.modules.values()))) for layer in self._survey.experts}
        self._linears: list[tuple[Linear, Scheme]] = []
        for linear in self._survey.linears:
            is_left = is_ignored(linear.module) or modules != "all" or list_of_layers(linear.module) not in own
            self._linears.append((linear, self._unquantized if is_left else target))
        for module in ("lm_head", *(name.rpartition(".")[0] for name in self._survey.plain)):
            is_ignored(module)  # which is never quantized, so that naming it asks for nothing
        is_ignored.check_used(checkpoint.directory)
        if not self._experts:
            raise CheckpointError(
                f"{checkpoint.directory}: has no experts; only Mixture-of-Experts models are quantized"
            )
        self.expert_kinds = collections.Counter(conversion(layer.stored, to) for layer, to in self._experts)
        self.linear_kinds = collections.Counter(
            conversion(linear.stored, to) for linear, to in self._linears if linear.stored.weights or to.weights
        )
        self._check()
        self.specs = [spec for _, specs in sorted(self._plan(), key=lambda item: item[0]) for spec in specs]

    def config(self) -> dict[str, Any]:
        """config.json of what is written."""
        config = {key: value for key, value in self._checkpoint.config.items() if key != "quantization_config"}
        stated = self._checkpoint.config.get("quantization_config") or {}
        if self._target.is_quantized:
            kv_cache = stated.get("kv_cache_scheme")
            config["quantization_config"] = quantization_config(self._target, self._ignored_modules(), kv_cache)
        return config

    def tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        """All tensors, layer by layer."""
        for name in self._survey.plain:
            yield name, self._checkpoint.read(name)
        for linear, to in self._linears:
            if conversion(linear.stored, to) == COPIED and to.weights is None:
                for name in linear.names:
                    yield name, self._checkpoint.read(name)
            else:
                yield from self._module(linear.module, self._read_linear(linear), linear.stored, to, linear.shape)
        for layer, to in self._experts:
            if conversion(layer.stored, to) == COPIED and to.weights is None:
                for name in layer.names:
                    yield name, self._checkpoint.read(name)
            else:
                yield from self._expert_tensors(layer, to)

    # -- planning -----------------------------------------------------------------------------------------------------

    def _scheme_of_layer(self, layer: ExpertLayer, is_ignored: "_Ignore") -> Scheme:
        left_out = [module for module in layer.modules.values() if is_ignored(module)]
        if left_out and len(left_out) < len(layer.modules):
            raise ValueError(
                f"ignore covers {len(left_out)} of {len(layer.modules)} modules of the experts of layer {layer.layer}, "
                f"such as {left_out[0]}; all experts of a layer share one scheme, so name all of them or none"
            )
        return self._unquantized if left_out else self._target

    def _check(self) -> None:
        where = str(self._checkpoint.directory)
        for layer, to in self._experts:
            if to.weights is not None:
                check_conversion(layer.stored, to, f"{where}: experts of layer {layer.layer}")
                for shard in ("w1", "w2"):
                    _check_columns(to, layer.modules[0, shard], layer.shape(shard)[1])
        for linear, to in self._linears:
            if to.weights is not None:
                check_conversion(linear.stored, to, f"{where}: {linear.module}")
                _check_columns(to, linear.module, linear.shape[1])

    def _plan(self) -> Iterator[tuple[tuple[int, int], list[TensorSpec]]]:
        """((position, 0), specs): in the order of layers as the source has them, which readers go through."""
        position = {name: at for at, name in enumerate(self._checkpoint.names)}
        for name in self._survey.plain:
            yield (position[name], 0), [copied_spec(self._checkpoint, name)]
        for linear, to in self._linears:
            if to.weights is None and linear.stored.weights is None:
                specs = [copied_spec(self._checkpoint, name) for name in linear.names]
            else:
                specs = _specs(linear.module, module_layout(to, *linear.shape, self._dtype))
            yield (min(position[name] for name in linear.names), 0), specs
        for layer, to in self._experts:
            if to.weights is None and layer.stored.weights is None:
                specs = [copied_spec(self._checkpoint, name) for name in layer.names]
            else:
                specs = []
                for (_, shard), module in layer.modules.items():
                    specs += _specs(module, module_layout(to, *layer.shape(shard), self._dtype))
                    if layer.bias_dtype is not None:
                        specs.append(TensorSpec(f"{module}.bias", layer.shape(shard)[:1], layer.bias_dtype))
            yield (min(position[name] for name in layer.names), 1), specs

    def _ignored_modules(self) -> list[str]:
        """Every Linear that is not in the scheme, by name: readers differ in how they read patterns."""
        ignored = {linear.module for linear, to in self._linears if to.weights is None}
        for layer, to in self._experts:
            if to.weights is None:
                ignored.update(layer.modules.values())
        for name in self._survey.plain:
            ignored.update(numbered_experts(self._checkpoint, name))
            module, _, leaf = name.rpartition(".")
            if leaf == "weight" and is_normally_plain(module) and not module.endswith(("embed_tokens", "wte")):
                ignored.add(module)
        return sorted(ignored | {"lm_head"})

    # -- reading and converting ---------------------------------------------------------------------------------------

    def _read_linear(self, linear: Linear) -> QuantizedTensor:
        if linear.stored.weights is None:
            return QuantizedTensor(data=cast(Leaf, self._checkpoint.read(linear.leaves["weight"])))
        leaves = {leaf: np.array(self._checkpoint.read(name)) for leaf, name in linear.leaves.items()}
        try:
            matrix = method_for(linear.stored).process_matrix(leaves, *linear.shape, where=f"{linear.module}.")
        except ValueError as error:
            raise CheckpointError(f"{self._checkpoint.directory}: tensor {error}") from None
        return jax.tree.map(lambda leaf: leaf[0] if leaf.ndim else leaf, matrix)

    def _expert_tensors(self, layer: ExpertLayer, to: Scheme) -> Iterator[tuple[str, np.ndarray]]:
        if conversion(layer.stored, to) == QUANTIZED:
            stored = online_scheme(to)
            weights = self._reader.load(layer.layer, layer.config, stored, method=self._methods[stored])
        else:
            stored = layer.stored
            weights = self._reader.load(layer.layer, layer.config)
        weights = jax.tree.map(np.asarray, weights)  # sliced below, which is cheap for NumPy
        for (expert, shard), module in layer.modules.items():
            matrix, bias = _matrix_of(weights, expert, shard)
            yield from self._module(module, matrix, stored, to, layer.shape(shard))
            if layer.bias_dtype is not None:
                yield f"{module}.bias", np.asarray(bias).astype(layer.bias_dtype)

    def _module(
        self, module: str, matrix: QuantizedTensor, stored: Scheme, to: Scheme, shape: tuple[int, int]
    ) -> Iterator[tuple[str, np.ndarray]]:
        method = self._methods.get(to) or method_for(to)
        matrix = converted(matrix, stored, to, method, self._dtype)
        for suffix, array in module_tensors(matrix, to, module_layout(to, *shape, self._dtype)).items():
            yield f"{module}.{suffix}", array


class _Ignore:
    """Names, and regular expressions after ``re:``; notes which of them matched. longest_name: of all modules."""

    def __init__(self, entries: tuple[str, ...], longest_name: int):
        self._names = frozenset(entry for entry in entries if not entry.startswith(_REGEX))
        self._patterns = {entry: entry.removeprefix(_REGEX) for entry in entries if entry.startswith(_REGEX)}
        self._matcher = BoundedPatterns(longest_name)
        for pattern in self._patterns.values():
            try:
                self._matcher.add(pattern)
            except ValueError as error:
                raise ValueError(f"ignore: {error}") from None
        self._unused = set(entries)

    def __call__(self, module: str) -> bool:
        found = {entry for entry, pattern in self._patterns.items() if self._matcher.match(pattern, [module])}
        found |= self._names & {module}
        self._unused -= found
        return bool(found)

    def check_used(self, where: Path | str) -> None:
        if self._unused:
            raise ValueError(
                f"ignore: {listed(sorted(self._unused))} matches no module of {where}; a name is that of a module, "
                "such as model.layers.0.self_attn.q_proj, and a regular expression starts with re:"
            )


def _matrix_of(weights: ExpertWeights, expert: int, shard: str) -> tuple[QuantizedTensor, Leaf | None]:
    """(matrix, bias) of one projection. An act-order index belongs to the expert, an input scale to all of them."""
    if shard == "w2":
        tensor, at, bias = weights.w2, (expert,), weights.w2_bias
    else:
        tensor, at, bias = weights.w13, (expert, 1 if shard == "w3" else 0), weights.w13_bias

    def part(leaf: Leaf | None) -> Leaf | None:
        return None if leaf is None else leaf[at]

    matrix = dataclasses.replace(
        tensor,
        data=part(tensor.data),
        scale=part(tensor.scale),
        global_scale=part(tensor.global_scale),
        zero_point=part(tensor.zero_point),
        g_idx=None if tensor.g_idx is None else tensor.g_idx[expert],
    )
    return matrix, part(bias)


def _specs(module: str, layout: Layout) -> list[TensorSpec]:
    return [TensorSpec(f"{module}.{suffix}", shape, dtype) for suffix, (shape, dtype) in layout.items()]


def _check_columns(scheme: Scheme, module: str, columns: int) -> None:
    """compressed-tensors has no ragged last group."""
    size = scheme.weight_format.group_size
    if size is not None and columns % size:
        raise ValueError(
            f"{module}: {columns} columns do not divide into groups of {size}, which scheme {scheme.name!r} needs; "
            "choose smaller groups, a scheme with one scale per channel, or ignore the module"
        )


def _dtype_of(config: Json) -> np.dtype:
    """What unquantized weights are stored in: as config.json says, else bfloat16."""
    of_text = config.get("text_config")
    for part in (config, of_text if isinstance(of_text, Mapping) else {}):
        for key in _DTYPE_KEYS:
            name = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}.get(str(part.get(key)))
            if name is not None:
                return DTYPES[name]
    return DTYPES["BF16"]


def _check_space(destination: Path, nbytes: int) -> None:
    free = shutil.disk_usage(nearest_directory(destination)).free
    if free < nbytes:
        raise CheckpointError(
            f"{destination}: {nbytes / 1e9:.1f} GB will be written, and its disk has {free / 1e9:.1f} GB free"
        )
