"""How ``FusedMoE`` gets its weights: vLLM's weight_loader and load_weights, processing, reload and dummy values."""

import dataclasses
from collections.abc import Hashable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from moe_jax import ExpertWeights, MoEConfig
from moe_jax._pytrees import signature
from moe_jax._versions import changing
from moe_jax.experts._choice import in_best_layout, plain_layout
from moe_jax.loading import ExpertNames, ExpertTensor, LayerLoader
from moe_jax.loading.layer._names import SHARD_OF_PROJECTION, map_expert_name
from moe_jax.quantization import method_for
from moe_jax.routing import RoutingParams
from torch_bridge import _ops
from torch_bridge._calls import Experts, JaxCalls, unnamed
from torch_bridge._just_in_time import dummy_values
from torch_bridge._method_base import FusedMoEMethodBase, MoELayer
from torch_bridge._methods import SchemeMoEMethod
from torch_bridge._own_parameters import load_into
from torch_bridge._repeats import Repeats
from torch_bridge._state import is_interleaved, stored_leaves
from torch_bridge._tensors import jax_device, refuse_foreign, to_numpy, torch_dtype
from torch_bridge.launch._calls import KernelCalls, calls_on

SHARD_IDS = ("w1", "w2", "w3")
# Tensors of all experts, which rows of a mapping do not name.
_FUSED = ("experts.gate_up_proj", "experts.down_proj")


class LoadingMixin(MoELayer):
    """The loading half of ``FusedMoE``."""

    quant_method: FusedMoEMethodBase
    device: torch.device
    expert_mapping: Any
    _routing: RoutingParams
    torch_kernels: bool | None
    _experts: Experts | None
    _calls: JaxCalls | None
    _loader: LayerLoader | None
    _repeats: Repeats

    def weight_loader(
        self,
        param: torch.Tensor,
        loaded_weight: torch.Tensor,
        weight_name: str,
        shard_id: str | None,
        expert_id: int | None,
        return_success: bool = False,
    ) -> bool | None:
        """Stage one checkpoint tensor of the whole layer; this rank's part of it is kept.

        Args:
            param: the parameter it belongs to, also one that was replaced since.
            loaded_weight: of one expert, or of all with the expert axis first.
            weight_name: for errors.
            expert_id: global, with EPLB that of a copy; None when all experts are in the tensor.
            shard_id: "w1", "w3" or "w2"; "" or None for a tensor of a whole leaf, as vLLM's gpt-oss loads them.
            return_success: return whether something was kept, instead of None.

        Raises ValueError for a shape, dtype or value that does not fit, or for a layer that is processed already.
        """
        refuse_foreign({weight_name: param})
        refuse_foreign({weight_name: loaded_weight})
        if not isinstance(self.quant_method, SchemeMoEMethod):
            own = dict(self.named_parameters(recurse=False))
            used = load_into(
                own,
                param,
                loaded_weight,
                weight_name,
                shard_id,
                expert_id,
                moe=self.moe_config,
                expert_map=self.rank.expert_map,
                method=self.quant_method,
            )
        else:
            used = self._accept(self.expert_tensor(param, weight_name, shard_id, expert_id), loaded_weight)
        return used if return_success else None

    def expert_tensor(
        self, param: torch.Tensor, weight_name: str, shard_id: str | None, expert_id: int | None
    ) -> ExpertTensor:
        """The arguments of ``weight_loader`` as moe_jax's loaders take them. Raises ValueError for a wrong shard_id."""
        leaf = self._leaf_name(param)
        if not shard_id and expert_id is None:
            shards = ("w2",) if leaf.startswith("w2_") else ("w1", "w3")[: self.config.num_projections]
        elif shard_id not in SHARD_IDS:
            raise ValueError(f"{weight_name}: shard_id={shard_id!r}, expected one of {', '.join(SHARD_IDS)}")
        elif shard_id == "w3" and not self.config.is_act_and_mul:
            raise ValueError(f"{weight_name}: w3 has no place in a layer that is not gated, which holds w1 alone")
        else:
            shards = (shard_id,)
        stacked = len(shards) == 2 and is_interleaved(self.config)
        tensor = ExpertTensor(weight_name, None, expert_id, shards, leaf.partition("_")[2], "", stacked)
        if tensor.leaf != leaf:
            raise ValueError(f"{weight_name}: shard_id={shard_id!r} does not belong to {leaf}")
        return tensor

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Stage (checkpoint name, tensor) pairs in any order; returns the names of the parameters that got something.

        Names are of the checkpoint, or relative to the layer, as vLLM passes them ("0.w1.weight", "gate_up_proj"). They
        are read by ``expert_mapping`` where the layer has one, else in every known spelling, fused ones too.
        Raises ValueError for an expert tensor that nobody understands; what is missing is named by
        process_weights_after_loading.
        """
        loaded = set()
        for name, tensor in _checked(weights):
            for parsed in self.parse_name(name):
                if self._accept(parsed, tensor):
                    loaded.add(self._scheme_method.layout(parsed.leaf).name)
        return loaded

    def reload_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace all weights by others of the same shapes: atomic, and nothing compiles again.

        Raises ValueError as loading does; the old weights are then untouched.
        """
        loader, repeats = self.new_loader(), Repeats()
        for name, tensor in _checked(weights):
            for parsed in self.parse_name(name):
                if not repeats.has(_place(parsed, tensor), tensor, name):
                    self.accept_into(loader, parsed, tensor)
                    repeats.add(_place(parsed, tensor), tensor)
        self.install(self.finished(loader))
        self._repeats = repeats

    def load_dummy_weights(self) -> None:
        """Stand-in values, uniform in +-1e-3 from torch's generator at seed 1234, as vLLM's; the scheme quantizes them.

        Each weight and bias starts from the seed.
        """
        loader = self.new_loader(online=self.quant_method.scheme.is_quantized, fused_layout="out_in")
        for name, spec in method_for(None).create_weights(self.local_config).items():
            values = dummy_values(spec.shape, torch_dtype(spec.dtype), self.device)
            loader.accept_leaf(name, to_numpy(values))
        self._loader = None
        self.install(self.finished(loader))

    def process_weights_after_loading(self) -> None:
        """Make loaded weights ready to run. Idempotent; one ValueError names everything that is missing."""
        self.quant_method.process_weights_after_loading(self)

    def finish_loading(self) -> None:
        """What the methods of this package do to process a layer."""
        if self._loader is None and self._experts is not None:
            return
        loader = self._loader or self.new_loader()
        weights, repeats = self.finished(loader), self._repeats
        self._loader = None
        self.install(weights)
        self._repeats = repeats

    def install(self, weights: ExpertWeights) -> None:
        """Take processed weights of this rank as the layer's. Parameters become views of them.

        One thread at a time does so; a call under way, or begun meanwhile, has the old weights or the new ones. Raises
        ValueError for weights of another scheme or shape.
        """
        with changing():
            self._install(weights)

    def _install(self, weights: ExpertWeights) -> None:
        expected = signature(method_for(self.local_config.scheme).abstract_weights(self.local_config))
        if signature(weights) != expected:
            raise ValueError(f"{self.layer_name}: expected weights like {expected}, found {signature(weights)}")
        weights = jax.device_put(weights, jax_device(self.device))
        if self.device.type == "cuda":
            _ops.warn_of_preallocation()
        expert_map = None if self.rank.expert_map is None else jnp.asarray(self.rank.expert_map)
        packed = in_best_layout(self.local_config, weights)
        experts = jax.device_put(
            Experts(
                packed,
                unnamed(self.local_config),
                unnamed(self.config),
                self._routing,
                expert_map,
                is_first_rank=self.rank.is_first,
                is_first_part=self.rank.tp_rank == 0,
            ),
            jax_device(self.device),
        )
        if isinstance(self._calls, KernelCalls) and self._calls.is_captured:
            self._calls.replace(experts)
            experts = self._calls.experts_tree
            weights = plain_layout(experts.weights)
        else:
            self._calls = calls_on(experts, self.layer_name, self.device, self.torch_kernels)
        self._experts, self._repeats = experts, Repeats()
        specs = method_for(self.local_config.scheme).create_weights(self.local_config)
        shown = stored_leaves(weights, self.local_config) if packed.w13.layout.is_plain else None
        self._scheme_method.show(self, specs, shown)

    def new_loader(self, *, online: bool | None = None, fused_layout: str | None = None) -> LayerLoader:
        """An empty loader for this rank."""
        method = self._scheme_method
        return LayerLoader(
            self.physical_config,
            method.method,
            shard=self.rank.shard,
            quantize=method.quantizes_online if online is None else online,
            fused_layout=fused_layout,
        )

    @property
    def _scheme_method(self) -> SchemeMoEMethod:
        method = self.quant_method
        if not isinstance(method, SchemeMoEMethod):
            raise NotImplementedError(
                f"{type(method).__name__} keeps its own parameters, which load_weights does not fill; call the "
                "weight_loader of each parameter"
            )
        return method

    @property
    def staged_bytes(self) -> int:
        """Host memory that tensors hold which are loaded but not processed."""
        return 0 if self._loader is None else self._loader.staged_bytes

    def finished(self, loader: LayerLoader) -> ExpertWeights:
        """What a complete loader makes of its tensors, on the layer's device."""
        with jax.default_device(jax_device(self.device)):
            return loader.finish()

    def _accept(self, tensor: ExpertTensor, loaded: torch.Tensor) -> bool:
        if self._repeats.has(_place(tensor, loaded), loaded, tensor.name):
            return True
        if self._loader is None:
            if self._experts is not None and self._is_elsewhere(tensor):
                return False  # of a rank that quantizes while it loads, and has all of its own
            if self._experts is not None:
                raise ValueError(
                    f"{tensor.name}: {self.layer_name} is already processed; use "
                    "reload_weights(pairs) to replace weights"
                )
            self._loader = self.new_loader()
        used = self.accept_into(self._loader, tensor, loaded)
        if used:
            self._repeats.add(_place(tensor, loaded), loaded)
        if used and self.quant_method.uses_meta_device and not self._loader.missing():
            self.process_weights_after_loading()
        return used

    def _is_elsewhere(self, tensor: ExpertTensor) -> bool:
        expert_map = self.rank.expert_map
        if expert_map is None or tensor.expert is None or tensor.expert >= len(expert_map):
            return False
        return bool(expert_map[tensor.expert] < 0)

    def accept_into(self, loader: LayerLoader, tensor: ExpertTensor, loaded: torch.Tensor) -> bool:
        """Stage one tensor of the whole layer in a loader of this rank; whether a part of it was kept."""
        if tensor.suffix == "weight_shape":
            loaded = loaded.to(torch.int64)  # vLLM keeps it in floats
        is_of_all = tensor.expert is None and loaded.ndim > 0 and len(loaded) == self.config.num_experts
        if self.eplb_state is not None and is_of_all:  # experts into their copies
            loaded = loaded[torch.from_numpy(self._expert_of_copy).to(loaded.device)]
        return loader.accept_tensor(tensor, to_numpy(loaded))

    @property
    def physical_config(self) -> MoEConfig:
        """Of the whole layer, copies counted as experts."""
        return dataclasses.replace(self.config, num_experts=self.rank.num_experts)

    @property
    def _expert_of_copy(self) -> np.ndarray:
        """(P,) the expert of each copy, as they lie now."""
        assert self.eplb_state is not None
        return self.eplb_state.physical_to_logical(self.config.num_experts, self.rank.num_experts)

    def parse_name(self, name: str) -> tuple[ExpertTensor, ...]:
        """What a checkpoint name says, by the layer's mapping or by known spellings; nothing for what is no expert.

        Under EPLB one for each copy of the expert. Raises ValueError for an expert that the layer does not have.
        """
        found = self._parsed(name)
        named = [tensor.expert for tensor in found if tensor.expert is not None]
        if self.eplb_state is None or len(named) < len(found):
            return found
        count = self.config.num_experts
        for expert in named:
            if expert >= (self.rank.num_experts if self.expert_mapping else count):
                raise ValueError(f"{name}: expert {expert} is outside this layer's {count} experts")
        # Rows of a mapping say where copies lie initially.
        places = np.flatnonzero(np.isin(self._expert_of_copy, [expert % count for expert in named])).tolist()
        return tuple(dataclasses.replace(found[0], expert=place) for place in places)

    def _parsed(self, name: str) -> tuple[ExpertTensor, ...]:
        first = name.partition(".")[0]
        if first.isdecimal() or first in SHARD_OF_PROJECTION:
            name = f"experts.{name}"  # relative to the layer
        if self.expert_mapping is not None and (found := map_expert_name(self.expert_mapping, name)):
            return found
        if self.expert_mapping is not None and ".".join(name.split(".")[-2:]) not in _FUSED:
            return ()
        config = self.config
        names = ExpertNames(is_gated=config.is_act_and_mul, is_interleaved=is_interleaved(config))
        parsed = names.parse(name)
        return () if parsed is None else (parsed,)

    def _leaf_name(self, param: torch.Tensor) -> str:
        name = getattr(param, "leaf_name", None)
        if name is None:
            raise ValueError(
                f"a parameter of shape {tuple(param.shape)} was not created by {self.layer_name}; its own are "
                f"{', '.join(name for name, _ in self.named_parameters(recurse=False))}"
            )
        return name


def _checked(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterable[tuple[str, torch.Tensor]]:
    if hasattr(weights, "items") or isinstance(weights, torch.Tensor | str):
        raise TypeError(
            f"weights are a {type(weights).__name__}, expected pairs (name, tensor); of a state dict pass its items()"
        )
    for index, pair in enumerate(weights):
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[1], torch.Tensor):
            raise TypeError(f"weights: item {index} is no pair of a name and a torch tensor")
        yield pair[0], pair[1]


def _place(tensor: ExpertTensor, loaded: torch.Tensor) -> Hashable:
    """What may come once. Another weight_shape has a place of its own, since the loader says best what is wrong."""
    stated = tuple(loaded.tolist()) if tensor.suffix == "weight_shape" else ()
    return tensor.leaf, tensor.expert, tensor.shards, stated
