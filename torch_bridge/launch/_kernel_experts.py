"""``KernelExperts``: the experts of one layer as kernels on torch's stream, over tensors that torch owns."""

import bisect
import functools
from collections.abc import Callable, Iterable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import torch

from moe_jax import ExpertWeights, MoEConfig
from moe_jax.experts._backend import Problem
from moe_jax.experts._choice import first_choice
from moe_jax.models._compiled import bucket
from moe_jax.quantization import method_for
from moe_jax.routing import RoutingParams
from torch_bridge._calls import padded, unnamed
from torch_bridge._tensors import narrowed, numpy_dtype
from torch_bridge.launch._calls import _Experts, _Moe, local_ids
from torch_bridge.launch._evaluate import struct_of
from torch_bridge.launch._gpu import Gpu
from torch_bridge.launch._kernels import CaptureError
from torch_bridge.launch._launch import Launches
from torch_bridge.launch._programs import PROGRAMS, Job, struct
from torch_bridge.launch._tracers import make_all

Entry = Literal["experts", "layer"]
_MOST_CAPTURED = 1024  # tokens: a first call of so many may come right before a graph is captured


class KernelExperts:
    """The experts of one layer, or of one rank of it, on a Hopper GPU.

    Nothing of it is in JAX's memory, and JAX needs no GPU: it traces and lowers the kernels, torch owns the weights and
    the results. Calls go to torch's current stream. CUDA graphs can capture sizes that ``prepare`` was told.

    Args:
        config: of the experts that are here; ``num_experts`` counts them.
        weights: leaves are tensors of one device, in the layout of ``abstract_weights``. They are read where they are.
        device: of the weights; None asks them.
        expert_map: (global experts,) int32, the place of each expert in ``weights``, -1 for those of other ranks. None:
            ids are places.
        gpu: what to trace for; None asks torch. Only tests without a GPU name one.

    Raises:
        NotImplementedError: the kernels do not take this layer, or the device is no Hopper GPU; one line says why.
        ValueError: weights of other shapes or dtypes than the config's, or not contiguous.
    """

    def __init__(
        self,
        config: MoEConfig,
        weights: ExpertWeights,
        device: torch.device | None = None,
        *,
        expert_map: torch.Tensor | None = None,
        gpu: Gpu | None = None,
    ):
        self.config: MoEConfig = config
        self.weights: ExpertWeights = weights
        self.device: torch.device = jax.tree.leaves(weights)[0].device if device is None else device
        self.gpu: Gpu = gpu or Gpu.of(self.device)
        self.expert_map: torch.Tensor | None = expert_map
        if (reason := refusal(config, self.gpu)) is not None:
            raise NotImplementedError(reason)
        self._structs = _checked(config, weights, self.gpu)
        self.why_not_routing: str | None = routing_refusal(config, self.gpu)
        if expert_map is not None:
            self.why_not_routing = "some of the experts are on other ranks"
        self._exact: dict[Entry, set[int]] = {"experts": set(), "layer": set()}
        self._buckets: list[int] = []
        self._launches: dict[Any, Launches] = {}

    def prepare(
        self,
        tokens: Iterable[int],
        *,
        buckets: Iterable[int] = (),
        entry: Entry = "experts",
        logits_dtype: torch.dtype | None = None,
        has_bias: bool = False,
        progress: Callable[[bool], None] | None = None,
    ) -> None:
        """Make the kernels of calls ahead. What is new is traced, kept on disk and compiled in the background.

        Many new programs are traced by several processes.

        Programs are shared by the layers of one configuration. Other numbers of tokens than these are made at their
        first call.

        Args:
            tokens: of calls that run as they are, such as those that graphs capture.
            buckets: numbers of tokens that calls with fewer are padded to.
            entry: "experts" for calls with given experts, "layer" for calls with router logits.
            logits_dtype: of the router's logits, None for the layer's dtype.
            has_bias: whether the router has a correction bias.
            progress: called for each program, with whether it had to be traced.
        """
        dtype = numpy_dtype(logits_dtype) if logits_dtype is not None else self.config.dtype
        exact, padded = set(tokens), set(buckets)
        wanted = [(count, False) for count in exact]
        wanted += [(count, True) for count in padded if entry == "layer" or count not in exact]
        jobs = [self._job(entry, count, dtype, has_bias, has_mask) for count, has_mask in sorted(wanted, reverse=True)]
        for name, is_new in make_all(PROGRAMS, jobs):
            if self.device.type == "cuda":
                PROGRAMS.compile(name, self.device)
            if progress is not None:
                progress(is_new)
        self._exact[entry] |= exact
        self._buckets = sorted({*self._buckets, *padded})

    def wait(self) -> None:
        """Until every kernel that was prepared in this process is compiled."""
        PROGRAMS.wait()

    def experts(self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        """x (T, H), topk_weights and topk_ids (T, k) -> the weighted sum over the experts that are here, (T, H).

        An id outside the experts contributes zero. Raises CaptureError for a size that is not prepared while a graph is
        captured.
        """
        count = x.shape[0]
        if count == 0:
            return torch.empty_like(x)
        ids = narrowed(topk_ids).to(torch.int32)
        if self.expert_map is not None:
            ids = local_ids(ids, self.expert_map)
        arguments = x, topk_weights.float(), ids
        if count not in self._exact["experts"] and (missing := self._bucket(count) - count):
            arguments = tuple(padded(a, missing, -1 if a is ids else 0) for a in arguments)
        return _first(self._run("experts", arguments), count)

    def layer(
        self, x: torch.Tensor, router_logits: torch.Tensor, correction_bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x (T, H), router_logits (T, E), correction_bias (E,) -> routing and experts, (T, H).

        Raises NotImplementedError where ``why_not_routing`` has a reason, CaptureError as ``experts``.
        """
        if self.why_not_routing is not None:
            raise NotImplementedError(self.why_not_routing)
        count = x.shape[0]
        if count == 0:
            return torch.empty_like(x)
        bias = None if correction_bias is None else correction_bias.float()
        if count in self._exact["layer"]:
            return self._run("layer", (x, router_logits, bias, None))
        missing = self._bucket(count) - count
        mask = _mask(count, missing, x.device)
        if missing:
            x, router_logits = padded(x, missing), padded(router_logits, missing)
        return _first(self._run("layer", (x, router_logits, bias, mask)), count)

    def replace(self, weights: ExpertWeights) -> None:
        """Other weights of the same shapes, in the memory that captured graphs read."""
        for old, new in zip(jax.tree.leaves(self.weights), jax.tree.leaves(weights), strict=True):
            if old.shape != new.shape or old.dtype != new.dtype:
                raise ValueError(f"weights are {new.dtype}{tuple(new.shape)}, expected {old.dtype}{tuple(old.shape)}")
            if old.data_ptr() != new.data_ptr():
                old.copy_(new)

    def _bucket(self, count: int) -> int:
        place = bisect.bisect_left(self._buckets, count)
        return self._buckets[place] if place < len(self._buckets) else bucket(count)

    def _job(self, entry: Entry, count: int, dtype: Any, has_bias: bool, has_mask: bool) -> Job:
        config = self.config
        x = struct((count, config.hidden_size), config.dtype)
        slots = (count, config.top_k)
        if entry == "experts":
            args: tuple[Any, ...] = x, struct(slots, jnp.float32), struct(slots, jnp.int32)
            return _Experts(unnamed(config)), args, self._structs, self.gpu
        bias = struct((config.num_experts,), jnp.float32) if has_bias else None
        mask = struct((count,), jnp.bool_) if has_mask else None
        args = x, struct((count, config.num_experts), dtype), bias, mask
        return _Moe(unnamed(config)), args, self._structs, self.gpu

    def _run(self, entry: Entry, arguments: tuple[Any, ...]) -> torch.Tensor:
        count, dtype = arguments[0].shape[0], arguments[1].dtype
        key = entry, count, dtype, *[argument is None for argument in arguments]
        launches = self._launches.get(key)
        if launches is None:
            launches = self._launches[key] = self._loaded(entry, arguments)
        return launches([argument for argument in arguments if argument is not None])[0]

    def _loaded(self, entry: Entry, arguments: tuple[Any, ...]) -> Launches:
        count, dtype = arguments[0].shape[0], numpy_dtype(arguments[1].dtype)
        if entry == "experts":
            has_bias = has_mask = False
        else:
            has_bias, has_mask = (argument is not None for argument in arguments[2:])
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise CaptureError(f"a CUDA graph is being captured before a call with {count} tokens has run")
        name, _ = PROGRAMS.make(*self._job(entry, count, dtype, has_bias, has_mask))
        if count <= _MOST_CAPTURED:
            PROGRAMS.wait()
        return PROGRAMS.ready(name, self.device).load(self.device, (self.weights,))


def abstract_weights(config: MoEConfig, gpu: Gpu) -> ExpertWeights:
    """What the kernels read, as ShapeDtypeStructs: the kernel layout of the config's scheme where it has one."""
    with gpu.tracing():
        return jax.eval_shape(functools.partial(as_kernels_read, config), _leaves(config))


def as_kernels_read(config: MoEConfig, leaves: Any) -> ExpertWeights:
    """Checkpoint leaves as the kernels read them; a pure function."""
    weights = method_for(config.scheme).process_weights_after_loading(leaves, config)
    backend = first_choice(config, "gpu")
    return backend.kernel_layout(weights, config) if backend.layout_refusal(weights, config) is None else weights


def refusal(config: MoEConfig, gpu: Gpu) -> str | None:
    """Why the kernels do not take a layer, by its configuration alone; or None."""
    try:
        weights = abstract_weights(config, gpu)
    except NotImplementedError as error:
        return str(error)
    with gpu.tracing():
        reason = first_choice(config, "gpu").refusal(Problem(config, weights, 1, "gpu"))
    return reason or ("apply_router_weight_on_input" if config.apply_router_weight_on_input else None)


def routing_refusal(config: MoEConfig, gpu: Gpu) -> str | None:
    """Why the kernels do not route for a layer, or None."""
    weights = abstract_weights(config, gpu)
    with gpu.tracing():
        return first_choice(config, "gpu").routing_refusal(config, weights, RoutingParams(), has_mask=True)


def _leaves(config: MoEConfig) -> dict[str, jax.ShapeDtypeStruct]:
    specs = method_for(config.scheme).create_weights(config)
    return {name: struct(spec.shape, spec.dtype) for name, spec in specs.items()}


def _checked(config: MoEConfig, weights: ExpertWeights, gpu: Gpu) -> ExpertWeights:
    wanted, found = abstract_weights(config, gpu), jax.tree.map(struct_of, weights)
    pairs = zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=False)
    if jax.tree.structure(wanted) != jax.tree.structure(found) or any(
        (a.shape, a.dtype) != (b.shape, b.dtype) for a, b in pairs
    ):
        raise ValueError(f"weights are {found}, expected {wanted}")
    if not all(leaf.is_contiguous() for leaf in jax.tree.leaves(weights)):
        raise ValueError("weights have gaps or transposed axes, expected contiguous tensors")
    return found


def _first(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """Its first rows; a slice, which is an operator of torch, only where it has more."""
    return tensor if tensor.shape[0] == count else tensor[:count]


@functools.lru_cache(maxsize=64)
def _mask(count: int, missing: int, device: torch.device) -> torch.Tensor:
    return torch.arange(count + missing, device=device) < count
