"""What a call on one layer runs: jitted JAX functions on tensors that cross by DLPack.

The number of tokens is padded to a bucket beyond 16, so that few programs are compiled; padding is masked. Weights go
in as flat leaves and everything static is in the function, which layers of one shape share: a call hashes no config and
takes no tree apart.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch

from moe_jax import ExpertWeights, MoEConfig, fused_experts, fused_moe
from moe_jax._typing import Array
from moe_jax.experts._fused_moe import finish, weighted_experts
from moe_jax.models._compiled import SMALLEST_BUCKET, bucket
from moe_jax.routing import Routing, RoutingParams, route, validate_routing
from torch_bridge._tensors import check_tensor, narrowed, numpy_dtype, to_arguments, to_torch


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Experts:
    """What a call needs of a layer on one rank, as one pytree. Results of all ranks add up to the layer's.

    weights and config: of this rank; weights may be None where only the router runs. global_config: of the whole layer,
    for routing. routing: its arrays, without the correction bias. expert_map: (P,) int32, global to local expert, or
    None when all are local. is_first_rank: whether this rank adds what zero experts return. is_first_part: whether it
    adds w2's bias, of which all parts have a copy.
    """

    weights: Any
    config: MoEConfig
    global_config: MoEConfig
    routing: RoutingParams
    expert_map: Any = None
    is_first_rank: bool = dataclasses.field(default=True, metadata=dict(static=True))
    is_first_part: bool = dataclasses.field(default=True, metadata=dict(static=True))

    @property
    def summed_weights(self) -> ExpertWeights:
        """The weights with what this rank contributes to the sum over ranks."""
        bias = self.weights.w2_bias
        if self.is_first_part or bias is None:
            return self.weights
        return dataclasses.replace(self.weights, w2_bias=jnp.zeros_like(bias))

    def moe(self, x: Array, logits: Array, bias: Array | None, token_ids: Array | None, mask: Array | None) -> Array:
        """Routing and experts."""
        config, routing = self.global_config, dataclasses.replace(self.routing, correction_bias=bias)
        if config == self.config and self.expert_map is None:
            return fused_moe(x, logits, self.weights, config, routing=routing, token_mask=mask, token_ids=token_ids)
        routed = route(logits, config, params=routing, hidden_states=x, token_ids=token_ids, token_mask=mask)
        return self._finished(x, routed)

    def experts(self, x: Array, topk_weights: Array, topk_ids: Array, mask: Array | None) -> Array:
        """The experts of this rank for global ids, and what the layer does to their sum.

        In a layer with zero experts, ids from E on are those.
        """
        config = self.global_config
        if config.zero_expert_type is None and not config.apply_routed_scale_to_output:
            ids = self._local(topk_ids)
            return fused_experts(x, topk_weights, ids, self.summed_weights, self.config, token_mask=mask)
        zero_expert_weight = None
        if mask is not None:
            topk_ids = jnp.where(mask[:, None], topk_ids, -1)
        if config.zero_expert_type is not None:
            is_zero = topk_ids >= config.num_experts
            zero_expert_weight = jnp.where(is_zero, topk_weights.astype(jnp.float32), 0.0).sum(axis=-1)
        return self._finished(x, Routing(topk_weights, topk_ids, zero_expert_weight))

    def _finished(self, x: Array, routed: Routing) -> Array:
        ids = self._local(routed.topk_ids)
        y = weighted_experts(x, routed.topk_weights, ids, self.summed_weights, self.config)
        if not self.is_first_rank:
            routed = dataclasses.replace(routed, zero_expert_weight=None)
        return finish(y, x, routed, self.global_config, None)

    def _local(self, topk_ids: Array) -> Array:
        """Global ids as this rank numbers its experts, -1 for others."""
        if self.expert_map is None:
            return topk_ids
        is_known = (topk_ids >= 0) & (topk_ids < self.expert_map.shape[0])
        return jnp.where(is_known, self.expert_map[jnp.where(is_known, topk_ids, 0)], -1)

    def select(
        self, x: Array, logits: Array, bias: Array | None, token_ids: Array | None, mask: Array | None
    ) -> tuple[Array, Array]:
        """The router alone; zero experts have the ids from E on."""
        routing, config = dataclasses.replace(self.routing, correction_bias=bias), self.global_config
        if config.zero_expert_type is not None:  # to the choice they are experts like others
            validate_routing(config, logits.shape[-1])
            config = dataclasses.replace(config, num_experts=logits.shape[-1], zero_expert_type=None)
        routed = route(logits, config, params=routing, hidden_states=x, token_ids=token_ids, token_mask=mask)
        return routed.topk_weights, routed.topk_ids

    def moe_gradients(self, grad: Array, x: Array, logits: Array, *rest: Array | None) -> tuple[Array, Array]:
        """Of x and the logits."""
        return jax.vjp(lambda x, logits: self.moe(x, logits, *rest), x, logits)[1](grad)

    def experts_gradients(self, grad: Array, x: Array, topk_weights: Array, *rest: Any) -> tuple[Array, Array]:
        """Of x and the weights."""
        return jax.vjp(lambda x, topk_weights: self.experts(x, topk_weights, *rest), x, topk_weights)[1](grad)


@functools.lru_cache(maxsize=256)
def _compiled(structure: Any, method: str) -> Callable[..., Any]:
    """One method of ``Experts`` as a jitted function of (leaves, arrays, mask)."""

    def run(leaves, arrays, mask):
        return getattr(jax.tree.unflatten(structure, leaves), method)(*arrays, mask)

    run.__name__ = method
    return jax.jit(run)


class JaxCalls:
    """The calls of a layer through JAX's runtime: any implementation, any device. Tensors in, tensors out."""

    def __init__(self, experts: Experts, layer_name: str, device: torch.device):
        """device: where the experts are."""
        self.experts_tree: Experts = experts
        self.layer_name: str = layer_name
        self.device: torch.device = device
        leaves, structure = jax.tree.flatten(experts)
        self.leaves: list[Any] = leaves
        self.functions: dict[str, Callable[..., Any]] = {
            name: _compiled(structure, name)
            for name in ("moe", "experts", "select", "moe_gradients", "experts_gradients")
        }

    def _check(self, method: str, *tensors: torch.Tensor | None) -> None:
        """Raise for tensors without rows what a call raises for others: shapes and dtypes that do not fit."""
        arrays = [t if t is None else jax.ShapeDtypeStruct(t.shape, numpy_dtype(narrowed(t).dtype)) for t in tensors]
        jax.eval_shape(self.functions[method], self.leaves, arrays, None)

    def run(self, method: str, *tensors: torch.Tensor | None, bias: int | None = None) -> Any:
        """A method of ``Experts`` on tensors with T rows each; None for no rows, which nothing is computed for.

        bias: the place of the tensor that has no tokens. Raises what ``check_call`` raises.
        """
        given = [t for place, t in enumerate(tensors) if t is not None and place != bias]
        check_call(self.layer_name, self.experts_tree.global_config.hidden_size, self.device, *given)
        tensors = tuple([None if tensor is None else tensor.resolve_neg() for tensor in tensors])
        if given[0].shape[0]:
            return self._run(method, tensors, bias)
        self._check(method, *tensors)
        return None

    def _run(self, method: str, tensors: tuple[Any, ...], bias: int | None) -> Any:
        """``run`` for tensors that have passed its checks."""
        first = tensors[0]
        if first.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"{self.layer_name}: a CUDA graph is being captured, and JAX's runtime launches on streams of its own; "
                "build the layer with torch_kernels=True, or leave it out of the graph"
            )
        if first.is_cuda and first.device.index != torch.cuda.current_device():
            with torch.cuda.device(first.device):
                return self._crossing(method, first, tensors, bias)
        return self._crossing(method, first, tensors, bias)

    def _crossing(self, method: str, first: torch.Tensor, tensors: tuple[Any, ...], bias: int | None) -> Any:
        padded, mask = pad_tokens(tensors, bias)
        *arrays, mask_array = to_arguments((*padded, mask))
        found = self.functions[method](self.leaves, arrays, mask_array)
        if not isinstance(found, tuple):
            return _trimmed(found, first, mask)
        return tuple(_trimmed(one, first, mask) for one in found)


def pad_tokens(
    tensors: tuple[torch.Tensor | None, ...], fixed: int | None = None
) -> tuple[tuple[torch.Tensor | None, ...], torch.Tensor | None]:
    """The tensors with a bucket's number of tokens, and the mask (bucket,) of those that are real, None when all are.

    fixed: the place of a tensor without a token axis.
    """
    first = tensors[0]
    assert first is not None
    count = first.shape[0]
    missing = missing_tokens(count)
    if not missing:
        return tensors, None
    rows = tuple(
        tensor if tensor is None or place == fixed else padded(tensor, missing) for place, tensor in enumerate(tensors)
    )
    return rows, torch.arange(count + missing, device=first.device) < count


def missing_tokens(count: int) -> int:
    """By how many tokens a call is padded."""
    return 0 if count <= SMALLEST_BUCKET else bucket(count) - count


def padded(tensor: torch.Tensor, missing: int, value: int = 0) -> torch.Tensor:
    """A tensor with more rows, which hold one value."""
    return torch.nn.functional.pad(tensor, (0, 0) * (tensor.ndim - 1) + (0, missing), value=value)


def _trimmed(array: jax.Array, like: torch.Tensor, mask: Any) -> torch.Tensor:
    return to_torch(array) if mask is None else to_torch(array)[: like.shape[0]]


def check_call(where: str, hidden_size: int, device: torch.device, x: torch.Tensor, *others: torch.Tensor) -> None:
    """Raise for what no call takes: ValueError for shapes and dtypes, RuntimeError for another device, TypeError for
    what is no tensor with strides.
    """
    check_tensor(f"{where}: x", x)
    for tensor in others:
        check_tensor(f"{where}: an input", tensor)
    if x.ndim != 2 or x.shape[1] != hidden_size:
        raise ValueError(f"{where}: x has shape {tuple(x.shape)}, expected (T, {hidden_size})")
    if not x.is_floating_point():
        raise ValueError(f"{where}: x has dtype {x.dtype}, expected a float dtype")
    for tensor in (x, *others):
        if tensor.device != device:
            raise RuntimeError(
                f"{where}: expected all tensors on {device}, where the experts are, found one on {tensor.device}; move "
                "one of them with .to()"
            )
        if tensor.shape[0] != x.shape[0]:
            raise ValueError(f"{where}: x has {x.shape[0]} tokens, found {tensor.shape[0]} in {tuple(tensor.shape)}")


def configured_for(config: MoEConfig, device: torch.device) -> MoEConfig:
    """The configuration with the implementations of torch's device, where the caller names none.

    moe_jax takes the order of JAX's default backend, which the device may not belong to.
    """
    is_elsewhere = device.type == "cpu" and jax.default_backend() != "cpu"
    return dataclasses.replace(config, implementation=("xla",) if is_elsewhere else None)


def unnamed(config: MoEConfig) -> MoEConfig:
    """Without the layer's name, so that layers of one shape share their compiled functions."""
    return dataclasses.replace(config, name="")
