"""``RankLoader``: what one rank keeps of each checkpoint tensor. Placement is ``moe_jax.weight_loader``'s, staging and
checking ``LayerLoader``'s; here a tensor is only cut to the rank's part."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from moe_jax import MoEConfig, weight_loader
from moe_jax.loading import ExpertTensor, LayerLoader, Placement
from moe_jax.loading.layer._packed_tensors import check_weight_shape, conform_packed
from moe_jax.loading.layer._tensor_checks import IN_OUT, disk_shape, fused_layout, split_shards
from moe_jax.quantization import ExpertWeights, LeafSpec, MoEMethod, Scheme, common_input_scale, method_for
from torch_bridge._rank import Rank


class RankLoader:
    """Fills the leaves of one rank of a layer from tensors of the whole layer.

    Args:
        config: the whole layer; rank: the part to keep.
        method: what the leaves are and how they are processed.
        quantize: whether the tensors are full precision and get quantized; None lets the first weight or scale decide,
            which a rank that holds a part cannot.
        fused_layout: how weights of all experts are stored, see ``LayerLoader``.
    """

    def __init__(
        self,
        config: MoEConfig,
        rank: Rank,
        method: MoEMethod,
        *,
        quantize: bool | None = False,
        fused_layout: str | None = None,
    ):
        self._whole = dataclasses.replace(config, scheme=method.scheme)
        self._rank, self._method, self._quantizes = rank, method, bool(quantize)
        self._fused_layout = fused_layout
        self._loader = LayerLoader(local_config(config, rank), method, quantize=quantize, fused_layout=fused_layout)
        stored = method_for(None) if quantize else method
        plain = dataclasses.replace(self._whole, scheme=Scheme.parse(None)) if quantize else self._whole
        self._whole_specs: Mapping[str, LeafSpec] = stored.create_weights(plain)
        self._specs: Mapping[str, LeafSpec] = stored.create_weights(local_config(plain, rank))
        self._input_scales: dict[str, dict[tuple[int, str], float]] = {}
        weights = method.scheme.weights
        if rank.tp_size > 1 and weights is not None and weights.actorder:
            raise NotImplementedError(
                f"scheme {method.scheme.name!r} with tp_size={rank.tp_size}: an act-order checkpoint "
                "spreads the groups of w2 over all ranks; use expert parallelism (ep_size)"
            )
        if rank.tp_size > 1 and config.intermediate_size % rank.tp_size:
            raise ValueError(f"intermediate_size={config.intermediate_size} does not divide by tp_size={rank.tp_size}")

    @property
    def staged_bytes(self) -> int:
        return self._loader.staged_bytes

    def accept(self, tensor: ExpertTensor, array: np.ndarray) -> bool:
        """Keep this rank's part of a tensor of the whole layer; whether there was one.

        Raises what LayerLoader raises.
        """
        if self._rank.is_whole:
            return self._loader.accept_tensor(tensor, array)
        if tensor.suffix == "weight_shape":
            check_weight_shape(tensor, array, self._whole)
            return False
        if tensor.leaf not in self._specs:
            raise ValueError(
                f"{tensor.name}: there is no leaf {tensor.leaf!r} in this layer, expected one of "
                f"{', '.join(sorted(self._specs))}"
            )
        spec = self._whole_specs[tensor.leaf]
        if not self._quantizes and "w2_weight_packed" in self._specs:
            array = conform_packed(tensor, array, self._whole, None)
        if tensor.expert is None and spec.kind == "weight" and tensor.suffix != "weight_packed":
            expected = disk_shape(tensor, spec, self._whole)
            if fused_layout(tensor, array.shape, expected, self._fused_layout) == IN_OUT:
                array = array.swapaxes(1, 2)
        used = False
        for shard, part in split_shards(tensor, array, spec, self._whole):
            if spec.kind == "input_scale" and self._rank.ep_size > 1:
                used |= self._keep_input_scale(tensor, shard, part)
                continue
            placements = weight_loader(
                self._specs,
                tensor.leaf,
                part,
                tensor.name,
                shard,
                tensor.expert,
                is_act_and_mul=self._whole.is_act_and_mul,
                tp_rank=self._rank.tp_rank,
                tp_size=self._rank.tp_size,
                expert_map=self._rank.expert_map,
                scale_extent=self._scale_extent(),
            )
            for placement in placements:
                assert isinstance(placement, Placement)
                used |= self._keep(tensor, shard, placement, part)
        return used

    def accept_leaf(self, leaf: str, array: np.ndarray, *, is_interleaved: bool = False) -> bool:
        """Take a whole leaf of this rank, as a state dict has it: (E, 2I, ...), gate rows first or interleaved."""
        prefix, _, suffix = leaf.partition("_")
        shards = ("w2",) if prefix == "w2" else ("w1", "w3") if self._whole.is_act_and_mul else ("w1",)
        if suffix == "weight_g_idx":
            shards = shards[:1]
        spec = self._specs.get(leaf)
        if spec is not None and spec.kind in ("input_scale", "tensor") and array.shape == spec.shape[:1]:
            # vLLM keeps one value of an expert for gate and up, once it has processed them.
            array = np.broadcast_to(array.reshape(-1, *(1,) * (len(spec.shape) - 1)), spec.shape)
        if spec is not None and array.shape != spec.shape:
            raise ValueError(f"{leaf}: found shape {array.shape}, expected {spec.shape}")
        used = False
        for half, shard in enumerate(shards):
            rows = (
                array if len(shards) == 1 else array[:, half::2] if is_interleaved else np.split(array, 2, axis=1)[half]
            )
            for expert in range(array.shape[0]):
                tensor = ExpertTensor(leaf, None, expert, (shard,), suffix, "")
                used |= self._loader.accept_tensor(tensor, rows[expert])
                if suffix == "weight_g_idx" and prefix == "w13" and self._whole.is_act_and_mul:
                    self._loader.accept_tensor(dataclasses.replace(tensor, shards=("w3",)), rows[expert])
        return used

    def fill_dummy(self) -> None:
        """See ``LayerLoader.fill_dummy``."""
        self._loader.fill_dummy()

    def is_complete(self) -> bool:
        """Whether every leaf of this rank is written."""
        return not self.missing()

    def missing(self) -> dict[str, dict[str, list[int]]]:
        """See ``LayerLoader.missing``; input scales that all ranks share count once every expert's is there."""
        missing = self._loader.missing()
        for leaf, values in self._input_scales.items():
            if len(values) == int(np.prod(self._whole_specs[leaf].shape)):
                missing.pop(leaf, None)
        return missing

    def finish(self, like: ExpertWeights | None = None) -> ExpertWeights:
        """This rank's weights, on JAX's default device.

        Raises ValueError naming what is missing, doubled or left over.
        """
        self._share_input_scales()
        return self._loader.finish(like)

    def _keep(self, tensor: ExpertTensor, shard: str, placement: Placement, part: np.ndarray) -> bool:
        spec, value = self._specs[tensor.leaf], placement.value(part)
        local, *rest = placement.index
        if shard != "w2" and self._whole.is_act_and_mul and rest and spec.kind != "g_idx":
            shard = ("w1", "w3")[rest[0].start // (spec.shape[1] // 2)]
        carries_all = len(placement.source) > len(rest)
        used = False
        for at, expert in enumerate(range(local.start, local.stop)):
            own = dataclasses.replace(tensor, expert=expert, shards=(shard,))
            used |= self._loader.accept_tensor(own, value[at] if carries_all else value)
        return used

    def _keep_input_scale(self, tensor: ExpertTensor, shard: str, part: np.ndarray) -> bool:
        """Of every expert, local or not: a layer has one input scale, the widest of all."""
        values = self._input_scales.setdefault(tensor.leaf, {})
        experts = range(self._whole.num_experts) if tensor.expert is None else (tensor.expert,)
        for expert, value in zip(experts, np.asarray(part, np.float32).reshape(-1), strict=True):
            if (expert, shard) in values:
                raise ValueError(f"{tensor.name}: the input scale of expert {expert} ({shard}) is there already")
            values[expert, shard] = float(value)
        return True

    def _share_input_scales(self) -> None:
        activations = self._method.scheme.activations
        for leaf, values in self._input_scales.items():
            spec = self._whole_specs[leaf]
            if len(values) != int(np.prod(spec.shape)):
                continue  # LayerLoader names what is missing
            found = np.asarray(list(values.values()), np.float32)
            if leaf.endswith("input_global_scale"):
                found = np.where(np.isposinf(found), np.float32(1), found)
            assert activations is not None, "a layer with input scales quantizes activations"
            common = np.asarray(common_input_scale(found, activations, leaf), np.float32)
            for shard in sorted({shard for _, shard in values}):
                for expert in range(self._rank.num_local_experts):
                    self._loader.accept_shard(leaf, shard, expert, common)
        self._input_scales.clear()

    def _scale_extent(self) -> tuple[int, int] | None:
        fmt = self._method.scheme.weights
        if fmt is None or self._quantizes:
            return None
        return fmt.block_shape or (None if fmt.group_size is None else (1, fmt.group_size))


def local_config(config: MoEConfig, rank: Rank) -> MoEConfig:
    """The configuration of one rank's experts, which sees no router."""
    if rank.is_whole:
        return config
    changes: dict[str, Any] = dict(intermediate_size=config.intermediate_size // rank.tp_size)
    if rank.ep_size > 1:
        # The experts of a rank have no groups and no order of their own; routing runs on the whole layer's config.
        changes |= dict(num_experts=rank.num_local_experts)
    return dataclasses.replace(config, **changes)
