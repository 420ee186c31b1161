"""The calls of a layer as Hopper kernels on torch's current stream: ``FusedMoE(torch_kernels=None)`` and True."""

import contextlib
import dataclasses
from typing import Any

import jax
import torch

from moe_jax import ExpertWeights, MoEConfig
from moe_jax.experts._backend import Problem
from moe_jax.experts._choice import first_choice
from moe_jax.routing import RoutingParams
from torch_bridge._calls import Experts, JaxCalls, missing_tokens, pad_tokens, padded
from torch_bridge._tensors import to_torch
from torch_bridge.launch._kernels import CaptureError, TorchKernels
from torch_bridge.launch._launch import Launches

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_READ = (torch.int64, torch.int32, torch.float32, torch.bfloat16, torch.float16)  # ids and weights, by the kernels


class KernelCalls(JaxCalls):
    """Routing and experts without JAX's runtime: ordered as any operator of torch, and fit for CUDA graphs.

    The weights are torch views of the JAX arrays. A call that is not kernels from end to end goes through JAX's
    runtime, or is refused by name and with the reason where the layer was told to have kernels only. Gradients, and
    the router alone, go through JAX's runtime.
    """

    def __init__(self, experts: Experts, layer_name: str, device: torch.device, *, is_strict: bool):
        """is_strict: whether calls that are not kernels from end to end are refused."""
        super().__init__(experts, layer_name, device)
        self._is_strict = is_strict
        weights = jax.block_until_ready(experts.summed_weights)  # calls may come on any stream
        self._weights: ExpertWeights = jax.tree.map(to_torch, weights)
        table = experts.expert_map
        self._expert_map = None if table is None else to_torch(table)
        self._is_cuda = jax.tree.leaves(self._weights)[0].is_cuda
        self._kernels: dict[str, TorchKernels] = {
            "moe": TorchKernels(_Moe(experts.config), self._weights),
            "experts": TorchKernels(_Experts(experts.config), self._weights),
        }
        # Kinds of a call's tensors, where kernels take them as they are -> what launches on others of these kinds.
        self._ready: dict[Any, Launches] = {}
        self.is_captured = False
        self._has_run = False

    def __del__(self):
        """JAX gives the weights' memory to its own streams at once, so nothing on torch's may read it any more."""
        if getattr(self, "_has_run", False):
            with contextlib.suppress(Exception):  # while the interpreter ends, or a graph is captured
                torch.cuda.synchronize()

    def run(self, method: str, *tensors: torch.Tensor | None, bias: int | None = None) -> Any:
        kinds = method, *[None if tensor is None else _kind(tensor) for tensor in tensors]
        launches = self._ready.get(kinds)
        if launches is not None:
            return self._launched(launches, [tensor for tensor in tensors if tensor is not None])
        return super().run(method, *tensors, bias=bias)

    def _run(self, method: str, tensors: tuple[Any, ...], bias: int | None) -> Any:
        if method not in self._kernels or (method == "experts" and not _are_choices(*tensors[1:])):
            return super()._run(method, tensors, bias)
        first = tensors[0]
        if not self._is_cuda:
            raise NotImplementedError(f"{self.layer_name}: torch_kernels=True needs CUDA tensors, found {first.device}")
        try:
            arguments = self._moe_arguments(tensors) if method == "moe" else self._expert_arguments(*tensors)
            leaves, _, launches = self._kernels[method].found(*arguments)
        except NotImplementedError as error:
            if not self._is_strict:
                return super()._run(method, tensors, bias)
            raise NotImplementedError(f"{self.layer_name}: torch_kernels=True: {error}") from None
        except CaptureError as error:
            raise CaptureError(f"{self.layer_name}: {error}") from None
        if all(argument is tensor for argument, tensor in zip(arguments, tensors, strict=True)):
            self._ready[method, *[None if tensor is None else _kind(tensor) for tensor in tensors]] = launches
        return self._launched(launches, leaves)[: first.shape[0]]

    def _launched(self, launches: Launches, leaves: list[torch.Tensor]) -> torch.Tensor:
        [y] = launches(leaves)
        self._has_run = True
        if not self.is_captured and torch.cuda.is_current_stream_capturing():
            self.is_captured = True
        return y

    def replace(self, experts: Experts) -> None:
        """Other weights of the same shapes in the memory that captured graphs read.

        Raises ValueError, with nothing changed, when the kernels' layout of the new ones is another.
        """
        pairs = list(zip(self.leaves, jax.tree.leaves(experts), strict=True))
        other = [f"{old.dtype}{old.shape} -> {new.dtype}{new.shape}" for old, new in pairs if old.aval != new.aval]
        if other:
            raise ValueError(
                f"{self.layer_name} is in a captured CUDA graph, and the new weights lie otherwise in memory "
                f"({', '.join(other)}); build a new layer and capture again"
            )
        for old, new in pairs:
            to_torch(old).copy_(to_torch(new))
        if self._is_cuda:
            torch.cuda.synchronize()  # JAX's runtime does not know of these writes

    def _moe_arguments(self, tensors: tuple[Any, ...]) -> tuple[Any, ...]:
        (x, logits, bias, token_ids), mask = pad_tokens(tensors, fixed=2)
        if token_ids is not None or self.experts_tree.routing.hash_indices_table is not None:
            raise NotImplementedError("hash routing has no kernel")
        if self._expert_map is not None:
            raise NotImplementedError(
                "routing to experts of other ranks has no kernel; route first, then call quant_method.apply"
            )
        return x, logits, None if bias is None else bias.float(), mask

    def _expert_arguments(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> tuple[Any, ...]:
        config = self.experts_tree.global_config
        if config.zero_expert_type is not None or config.apply_routed_scale_to_output:
            raise NotImplementedError("zero experts and a scale on the output have no kernel after routing")
        weights = weights if weights.dtype in _READ else weights.float()
        ids = ids if ids.dtype in _READ else ids.to(torch.int32)
        if self._expert_map is not None:
            ids = local_ids(ids, self._expert_map)
        if missing := missing_tokens(x.shape[0]):
            return padded(x, missing), padded(weights, missing), padded(ids, missing, -1)
        return x, weights, ids


def local_ids(ids: torch.Tensor, expert_map: torch.Tensor) -> torch.Tensor:
    """Global ids as a rank numbers its experts, int32, -1 for others. expert_map: (P,) int32."""
    is_known = (ids >= 0) & (ids < expert_map.numel())
    return torch.where(is_known, expert_map[torch.where(is_known, ids, 0)], -1)


def _kind(tensor: Any) -> Any:
    """What the checks of a call and its kernels depend on, but for strides. One of its own for what is no plain tensor,
    or has its sign in a flag: those are never remembered.
    """
    if not isinstance(tensor, torch.Tensor) or tensor.is_nested or tensor.layout != torch.strided or tensor.is_neg():
        return object()
    return tensor.shape, tensor.dtype, tensor.device


def _are_choices(weights: Any, ids: Any) -> bool:
    """Whether they are of the kinds and shapes that a call expects; moe_jax says what is wrong with others."""
    return weights.is_floating_point() and ids.dtype in _INTEGERS and weights.shape == ids.shape and ids.ndim == 2


@dataclasses.dataclass(frozen=True)
class _Moe:
    """Routing and experts as a function of arrays; equal for layers of one configuration, which share their kernels."""

    config: MoEConfig

    def __call__(self, x, logits, bias, mask, weights):
        params = RoutingParams(correction_bias=bias)
        backend = first_choice(self.config, "gpu")
        _refuse(backend.refusal(Problem(self.config, weights, x.shape[0], "gpu")))
        _refuse(backend.routing_refusal(self.config, weights, params, has_mask=mask is not None))
        return backend.run_layer(self.config, x, logits, weights, params, mask, None)[0]


@dataclasses.dataclass(frozen=True)
class _Experts:
    """The experts alone, for given ids and weights."""

    config: MoEConfig

    def __call__(self, x, topk_weights, topk_ids, weights):
        backend = first_choice(self.config, "gpu")
        _refuse(backend.refusal(Problem(self.config, weights, x.shape[0], "gpu")))
        _refuse("apply_router_weight_on_input" if self.config.apply_router_weight_on_input else None)
        return backend.run(x, topk_weights, topk_ids, weights, self.config, x.dtype)


def _refuse(reason: str | None) -> None:
    if reason is not None:
        raise NotImplementedError(reason)


def calls_on(experts: Experts, layer_name: str, device: torch.device, torch_kernels: bool | None) -> JaxCalls:
    """What runs calls on these weights; torch_kernels: see ``FusedMoE``."""
    is_all_kernels = first_choice(experts.config, "gpu").is_all_kernels
    if torch_kernels or (torch_kernels is None and device.type == "cuda" and is_all_kernels):
        return KernelCalls(experts, layer_name, device, is_strict=bool(torch_kernels))
    return JaxCalls(experts, layer_name, device)
