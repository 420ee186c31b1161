# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""vLLM's method of a checkpoint's experts, with our kernels in it.

It is a subclass, made at run time, of vLLM's own method under the same name: vLLM's weight loader goes by the names of
classes. So parameters and loading stay vLLM's. What is ours is ``process_weights_after_loading`` and both applies.
"""

import functools
import logging
import time
from typing import Any

import jax
import torch
from vllm.config import get_current_vllm_config

from moe_jax import ExpertWeights, MoEConfig
from torch_bridge.launch._gpu import Gpu
from torch_bridge.launch._kernel_experts import KernelExperts, refusal
from torch_bridge.launch._weights import destination_names, load_weights
from torch_bridge.vllm._arrivals import Arrivals
from torch_bridge.vllm._formats import Format, format_of
from torch_bridge.vllm._parameters import Parameters
from torch_bridge.vllm._settings import config_of, logits_dtype, obstacle, routing_obstacle, token_counts

logger = logging.getLogger("vllm.moe_jax")


def taken(method: Any, layer: Any, prefix: str, *, vllm_runs_it: bool = True) -> Any:
    """The method with our kernels; or as it is, where they do not take the layer, which is logged in one line.

    vllm_runs_it: whether vLLM's kernels could run the layer once it is loaded.
    """
    try:
        form = format_of(method, layer.params_dtype)
        reason = obstacle(layer, form)
        if reason is None:
            gpu = gpu_of_process()
            reason = refusal(config_of(layer, form.scheme), gpu)
        if reason is not None:
            raise NotImplementedError(reason)
    except (NotImplementedError, ValueError) as error:
        leave(prefix, method, error)
        return method
    ours = object.__new__(_subclass(type(method)))
    ours.__dict__.update(method.__dict__, moe_jax=Taken(form, gpu, routing_obstacle(layer), vllm_runs_it))
    return ours


def leave(prefix: str, method: Any, reason: Any) -> None:
    """Say that vLLM runs a layer."""
    logger.warning("moe_jax leaves %s to vLLM's %s: %s", prefix, type(method).__name__, " ".join(str(reason).split()))


def gpu_of_process() -> Gpu:
    """The GPU of this worker. JAX is kept off it: it traces here, and torch's allocator has the memory.

    Raises NotImplementedError for anything but a Hopper GPU.
    """
    jax.config.update("jax_platforms", "cpu")
    if not torch.cuda.is_available():
        raise NotImplementedError("the kernels need a Hopper GPU, torch sees none")
    return Gpu.of(torch.device("cuda", torch.cuda.current_device()))


class NotTakenError(Exception):
    """A loaded layer that vLLM can still process itself."""


class Taken:
    """What a method of ours knows beside what vLLM's does.

    experts: from processing on; None where vLLM runs the layer after all. routes: whether our kernels route.
    vllm_runs_it: whether vLLM has kernels for the parameters as they are. arrivals: what has been loaded.
    """

    def __init__(self, form: Format, gpu: Gpu, routing_obstacle: str | None, vllm_runs_it: bool):
        self.form: Format = form
        self.gpu: Gpu = gpu
        self.routing_obstacle: str | None = routing_obstacle
        self.experts: KernelExperts | None = None
        self.routes = False
        self.is_left = False
        self.vllm_runs_it = vllm_runs_it
        self.arrivals = Arrivals()

    def load(self, layer: Any) -> None:
        """Kernels over a loaded layer's parameters, which become what the kernels read.

        Raises NotTakenError with the parameters as they were, for scales that can only be damage and for biases
        without parameters; ValueError of a layer that has been loaded before, or that vLLM does not run.
        """
        config = config_of(layer, self.form.scheme)
        parameters = Parameters(layer, self.form)
        self._say_what_is_missing(layer, parameters)
        memory = parameters.memory() if self.experts is None else _named(self.experts.weights)
        try:
            if config.has_bias and not hasattr(layer, "w13_bias"):
                raise ValueError("the layer has biases, and this method no parameters for them")
            weights = load_weights(config, parameters.read, self.gpu, memory=memory, online=self.form.online)
        except (NotImplementedError, ValueError) as error:
            if self.experts is not None or not self.vllm_runs_it:
                raise
            raise NotTakenError(str(error)) from error
        if config.has_bias and layer.moe_config.tp_rank > 0:
            bias: Any = weights.w2_bias
            bias.zero_()  # outputs of ranks are added up
        parameters.show(weights)
        if self.experts is None:
            self.experts = self._new(layer, config, weights)

    def _say_what_is_missing(self, layer: Any, parameters: Parameters) -> None:
        names, is_gated = parameters.names_of_experts(), layer.moe_config.is_act_and_mul
        missing = self.arrivals.missing(names, layer.local_num_experts, is_gated=is_gated)
        short = self.arrivals.short(names)
        self.arrivals.forget()
        for amount, parts in (("nothing", missing), ("too little", short)):
            if parts is not None:
                said = "moe_jax: %s was loaded into %s: %s. The rest stays as vLLM made it"
                logger.warning(said, amount, layer.layer_name, parts)

    def _new(self, layer: Any, config: MoEConfig, weights: ExpertWeights) -> KernelExperts:
        experts = KernelExperts(config, weights, expert_map=layer.expert_map, gpu=self.gpu)
        self.routes = self.routing_obstacle is None and experts.why_not_routing is None
        _prepare(experts, layer, self.routes)
        return experts


def _prepare(experts: KernelExperts, layer: Any, routes: bool) -> None:
    exact, buckets = token_counts(get_current_vllm_config())
    made, began = [], time.monotonic()

    def progress(is_new: bool) -> None:
        made.append(is_new)
        if is_new and sum(made) % 8 == 1:
            logger.info("moe_jax makes kernels of %s: %d so far, %.0f s", layer.layer_name, len(made), took())

    def took() -> float:
        return time.monotonic() - began

    experts.prepare(
        exact,
        buckets=buckets,
        entry="layer" if routes else "experts",
        logits_dtype=logits_dtype(layer),
        has_bias=layer.e_score_correction_bias is not None,
        progress=progress,
    )
    if took() > 0.5:
        logger.info("moe_jax: %d programs, %d of them traced, in %.1f s", len(made), sum(made), took())


def _named(weights: ExpertWeights) -> dict[str, torch.Tensor]:
    return dict(zip(destination_names(weights), jax.tree.leaves(weights), strict=True))


def _end_reload(layer: Any) -> None:
    """Give a layer whose new weights are refused its old ones back. vLLM would take the next reload for the rest of
    this one and leave the kernels' memory as it is.
    """
    from vllm.model_executor.model_loader.reload import layerwise

    info = layerwise.get_layerwise_info(layer)
    if info.kernel_tensors is not None:
        layerwise._place_kernel_tensors(layer, info)
        info.reset()


class TakenMixin:
    """In front of vLLM's class of the method."""

    moe_jax: Taken

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        if "weight_loader" in extra_weight_attrs:
            loader = extra_weight_attrs["weight_loader"]
            extra_weight_attrs["weight_loader"] = self.moe_jax.arrivals.noting(loader, layer)
        sizes = num_experts, hidden_size, intermediate_size_per_partition
        super().create_weights(layer, *sizes, params_dtype, **extra_weight_attrs)

    def process_weights_after_loading(self, layer: Any) -> None:
        if self.moe_jax.is_left:
            return super().process_weights_after_loading(layer)
        if self.moe_jax.form.online and getattr(layer, "_already_called_process_weights_after_loading", False):
            return None
        try:
            self.moe_jax.load(layer)
        except NotTakenError as error:
            self.moe_jax.is_left = True
            leave(layer.layer_name, self, error)
            return super().process_weights_after_loading(layer)
        except (NotImplementedError, ValueError):
            _end_reload(layer)
            raise
        if self.moe_jax.form.online:
            layer._already_called_process_weights_after_loading = True
        return None

    def get_fused_moe_quant_config(self, layer: Any) -> Any:
        return super().get_fused_moe_quant_config(layer) if self.moe_jax.is_left else None

    @property
    def is_monolithic(self) -> bool:
        return super().is_monolithic if self.moe_jax.is_left else self.moe_jax.routes

    @property
    def supports_internal_mk(self) -> bool:
        return super().supports_internal_mk if self.moe_jax.is_left else True

    def maybe_make_prepare_finalize(self, routing_tables: Any = None) -> Any:
        return super().maybe_make_prepare_finalize(routing_tables) if self.moe_jax.is_left else None

    @property
    def topk_indices_dtype(self) -> torch.dtype | None:
        return super().topk_indices_dtype if self.moe_jax.is_left else torch.int32

    def maybe_roundup_sizes(self, hidden_size: int, intermediate_size_per_partition: int, *_: Any) -> Any:
        own = hidden_size, intermediate_size_per_partition  # which our kernels take
        if tuple(super().maybe_roundup_sizes(*own, *_)) != own:
            self.moe_jax.vllm_runs_it = False
        return own

    @property
    def supports_eplb(self) -> bool:
        return False

    @property
    def skip_forward_padding(self) -> bool:
        return super().skip_forward_padding if self.moe_jax.is_left else False

    @property
    def has_unpadded_output(self) -> bool:
        return super().has_unpadded_output if self.moe_jax.is_left else False

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Shared experts are the runner's business: it computes them itself beside methods without a moe_kernel."""
        if self.moe_jax.experts is None:
            return super().apply(layer, x, topk_weights, topk_ids, shared_experts, shared_experts_input)
        return self.moe_jax.experts.experts(x, topk_weights, topk_ids)

    def apply_monolithic(
        self, layer: Any, x: torch.Tensor, router_logits: torch.Tensor, input_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        if self.moe_jax.experts is None:
            return super().apply_monolithic(layer, x, router_logits, input_ids)
        return self.moe_jax.experts.layer(x, router_logits, layer.e_score_correction_bias)


@functools.cache
def _subclass(cls: type) -> type:
    return type(cls.__name__, (TakenMixin, cls), {"__module__": cls.__module__})
