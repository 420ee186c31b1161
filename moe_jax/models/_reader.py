"""``ModelReader``: what a checkpoint holds for one model, and the reload of all its weights."""

import dataclasses
import json
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from moe_jax._typing import DTypeLike, Json
from moe_jax._versions import Place, changing, install
from moe_jax.loading import (
    Checkpoint,
    CheckpointError,
    ExpertReader,
    ExpertStream,
    LoadReport,
    QuantizationConfig,
    as_packed,
    checkpoint_directory,
    layer_of,
    packed_pairs,
)
from moe_jax.loading.files._arrays import ArraySource, checked_pairs
from moe_jax.loading.layer._names import is_expert_name
from moe_jax.models._config import ConfigReader, DecoderConfig, MoEBlockConfig
from moe_jax.models._dense_loader import (
    DenseTensor,
    dense_names,
    keep_as_stored,
    plan_dense,
    read_dense,
    skipped_layers,
)
from moe_jax.models._kv_cache_dtype import read_scales
from moe_jax.models.families._moe_family import MoEFamily
from moe_jax.nn import FusedMoE, MoEBlock
from moe_jax.parallel import ParallelConfig
from moe_jax.parallel._loading import ShardedExpertReader
from moe_jax.quantization import ExpertWeights, Scheme, online_scheme

Progress = Callable[[int, int], None]
Values = list[tuple[Any, Any]]  # (Place, its new value), (FusedMoE, its new weights and the slots they are in)


@runtime_checkable
class Model(Protocol):
    """What reading and reloading need of a ``CausalLM``."""

    config: DecoderConfig
    quantization_config: str
    layers: Sequence[Any]
    lm_head: Any

    @property
    def parallel(self) -> ParallelConfig | None: ...

    def dense_modules(self) -> dict[str, Any]: ...

    def moe_blocks(self) -> list[MoEBlock]: ...


def reload_weights(
    model: Model, family: type[MoEFamily], source: str | os.PathLike[str] | Iterable[tuple[str, Any]]
) -> LoadReport:
    """Replace all weights of a model by others of the same shapes; see ``CausalLM.reload_weights``."""
    if isinstance(source, str | os.PathLike):
        with Checkpoint(checkpoint_directory(source)) as opened:
            checkpoint = as_packed(opened)
            described = ConfigReader(checkpoint.config, str(checkpoint.config_path))
            if not family.is_described_by(described) or not _is_same(family.read_config(described), model.config):
                raise ValueError(f"{checkpoint.config_path} describes another model than the one that is loaded")
            reader = ModelReader(checkpoint, checkpoint.config, family, model.config)
            values, report = reader.read_model(model), reader.report
    else:
        values, report = _read_pairs(model, family, source)
    install_values(values, is_reload=True)
    return report


def _is_same(described: Any, own: DecoderConfig) -> bool:
    """But for the cache, whose dtype the user chose."""
    return dataclasses.replace(described, kv_cache_dtype=own.kv_cache_dtype) == own


def _read_pairs(model: Model, family: type[MoEFamily], pairs: Iterable[tuple[str, Any]]) -> tuple[Values, LoadReport]:
    """New values for the whole model out of tensors in any order. Experts are processed while they come; all else is
    small, and is kept until the account of names can be made."""
    stated = json.loads(model.quantization_config)
    blocks = {index: layer.mlp for index, layer in enumerate(model.layers)}
    configs = {index: block.experts.config for index, block in blocks.items() if isinstance(block, MoEBlock)}
    stream = ExpertStream(
        configs,
        names=family.expert_names,
        words_are_dense=QuantizationConfig.from_config(_packed_config(stated)).words_are_dense,
    )
    dense = ArraySource([])
    try:
        for name, array in packed_pairs(checked_pairs(pairs), stated):
            if is_expert_name(name):
                stream.accept(name, array)
            else:
                dense.add(name, array)
        experts = stream.finish()
    except ValueError as error:
        raise CheckpointError(f"{dense.directory}: {error}") from None
    raw = _packed_config(stated, dense.names)
    reader = ModelReader(dense, raw, family, model.config, [layer_of(name) for name in stream.surplus])
    return reader.read_model(model, experts=experts), stream.report


def _packed_config(stated: Json | None, names: Iterable[str] | None = None) -> dict[str, Any]:
    """config.json of a checkpoint, GPTQ and AWQ in the words of ``pack-quantized``.

    names: of tensors that came one by one. They tell whether the sender quantized at all, and for GPTQ and AWQ what.
    """
    raw = dict(as_packed(ArraySource([], {"quantization_config": stated})).config)
    if names is None:
        return raw
    if not any(name.endswith(("_scale", "_scale_inv", "_packed")) for name in names):
        return {}
    if isinstance(stated, Mapping) and stated.get("quant_method") in ("gptq", "awq"):
        (group,) = raw["quantization_config"]["config_groups"].values()
        group["targets"] = [name.removesuffix(".weight_packed") for name in names if name.endswith(".weight_packed")]
    return raw


class ModelReader:
    """Reads the parts of one model from a ``Checkpoint`` or an ``ArraySource``; the model is not changed.

    raw: the config.json that says how modules are quantized. layers: those whose experts came another way. dense: the
    names that dense modules must account for.
    """

    def __init__(
        self,
        source: Any,
        raw: Json,
        family: type[MoEFamily],
        config: MoEBlockConfig,
        layers: Iterable[int | None] = (),
    ):
        self._source, self._config, self._family = source, config, family
        self._where = str(source.directory)
        self._quantization = QuantizationConfig.from_config(raw, source)
        if doubt := family.doubts(source, raw):
            warnings.warn(f"{self._where}: {doubt}", stacklevel=3)
        names = family.expert_names
        self._experts = ExpertReader(source, quantization=self._quantization, names=names)
        self._sharded = ShardedExpertReader(source, quantization=self._quantization, names=names)
        self.dense = dense_names(source.names, config.num_layers, family.other_modules)
        surplus = (
            {*self._experts.layers, *layers} - set(config.moe_layers) - skipped_layers(source.names, config.num_layers)
        )
        if surplus:
            raise CheckpointError(
                f"{self._where}: expert tensors in layers {ranges(tuple(sorted(surplus)))}; config.json puts experts "
                f"into layers {ranges(config.moe_layers)}"
            )

    def scheme(self, layer: int, quantize: Any) -> Scheme | None:
        """What the experts of a layer will follow: the scheme asked for, else the one they are stored in."""
        stored = self._experts.stored_scheme(layer)
        if quantize is None:
            return stored
        target = self._experts.target_scheme(layer, quantize)
        return online_scheme(target) if stored is None else target

    def keep_as_stored(
        self, modules: Json, quantize: Any, dtype: DTypeLike, implementation: Any, parallel: ParallelConfig | None
    ) -> None:
        """Let abstract dense modules hold quantized what the checkpoint stores quantized.

        Over a mesh XLA multiplies with it, since kernels see arrays of one device.
        """
        names = (implementation,) if isinstance(implementation, str) else implementation
        order = None if names is None else tuple(names)
        keep_as_stored(
            modules,
            self._source,
            self._quantization,
            quantize=quantize,
            dtype=dtype,
            implementation=order if parallel is None else ("xla",),
        )

    @property
    def report(self) -> LoadReport:
        peak = max(self._experts.peak_staged_bytes, self._sharded.peak_staged_bytes)
        return LoadReport(peak, peak_open_layers=1)

    def read_model(
        self,
        model: Model,
        progress: Progress | None = None,
        experts: Mapping[int, ExpertWeights] | None = None,
    ) -> Values:
        """New values for the whole model: headers of all dense tensors are checked first, then layers are read.

        experts: those of each layer where the source does not have them.
        """
        account, layers = set(self.dense), self._config.num_layers
        head = f"{self._family.head_module}.weight"
        if model.lm_head is None and head in account:
            self._check_tied(head)
            account.remove(head)
        plan = self._plan(model.dense_modules(), account)
        by_layer: dict[int | None, list[DenseTensor]] = {}
        for tensor in plan:
            by_layer.setdefault(layer_of(tensor.name), []).append(tensor)
        parallel = model.parallel
        values = self._read(by_layer[None], parallel)
        attentions = {f"{self._family.layers_module()}.{i}": layer.self_attn for i, layer in enumerate(model.layers)}
        named = ((f"{prefix}.{attention.module_name}", attention) for prefix, attention in attentions.items())
        values += read_scales(named, self._source, self._where, parallel)
        for index, layer in enumerate(model.layers):
            values += self._read(by_layer[index], parallel)
            if isinstance(layer.mlp, MoEBlock):
                own = layer.mlp.experts
                values.append(self.read_experts(layer.mlp, index) if experts is None else (own, (experts[index], None)))
            if progress is not None:
                progress(index + 1, layers)
        return values

    def read_dense(self, modules: Json, account: Iterable[str], parallel: ParallelConfig | None) -> Values:
        """New values for the parameters of ``modules``, which must use every name in ``account``."""
        return self._read(self._plan(modules, account), parallel)

    def _read(self, tensors: Iterable[DenseTensor], parallel: ParallelConfig | None) -> Values:
        """Dense values: on the default device, or where their variables lie on a mesh."""
        return [*read_dense(tensors, self._source, self._where, parallel)]

    def read_experts(self, block: MoEBlock, layer: int) -> tuple[FusedMoE, tuple[ExpertWeights, Any]]:
        """The experts of a block as the block's own scheme wants them, and the placement they were read for."""
        experts = block.experts
        if experts.parallel is None:
            return experts, (self._experts.load(layer, experts.config), None)
        placement = experts.placement
        weights = self._sharded.load(layer, experts.config, placement.get_value(), experts.parallel)
        return experts, (weights, placement)

    def _plan(self, modules: Json, account: Iterable[str]) -> list[DenseTensor]:
        return plan_dense(modules, self._source, self._quantization, where=self._where, account=account)

    def _check_tied(self, name: str) -> None:
        """Some files hold a tied head as well; the config decides, and a head that differs contradicts it."""
        tied = f"{self._family.model_module}.embed_tokens.weight"
        head, embedding = (self._source.read(tensor) for tensor in (name, tied))
        if head.dtype != embedding.dtype or head.shape != embedding.shape or head.tobytes() != embedding.tobytes():
            raise CheckpointError(
                f"{self._where}: tensor {name}: differs from {tied} although config.json "
                "says tie_word_embeddings; set it to false if the head is its own"
            )


def install_values(values: Values, *, is_reload: bool = False) -> None:
    """Put values in their places. Whatever can fail comes before the first of them, so a reload is atomic.

    Raises ValueError where experts moved to other slots since their weights were read.
    """
    arrays = {target: value for target, value in values if isinstance(target, Place)}
    checked = []
    with changing():
        for target, value in values:
            if not isinstance(target, FusedMoE):
                checked.append((target, value))
                continue
            weights, placement = value
            if placement is not None and placement is not target.placement:
                raise ValueError(
                    f"{target!r}: its experts moved to other slots while their new weights were read; reload again"
                )
            checked += target.new_values(weights, correction_bias=arrays.get(Place(target, "correction_bias")))
            if is_reload:
                checked.append(target.next_version())
        install(checked)


def ranges(numbers: tuple[int, ...]) -> str:
    """(0, 1, 2, 5) -> "0-2, 5"; "none" for an empty tuple."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs) or "none"
