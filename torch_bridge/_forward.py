"""The forward half of ``FusedMoE``: routing, experts, sums over ranks, and the torch modules around them."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch

from moe_jax.routing import RoutingParams
from torch_bridge import _ops
from torch_bridge._calls import Experts, JaxCalls
from torch_bridge._method_base import FusedMoEMethodBase, MoELayer
from torch_bridge._methods import SchemeMoEMethod
from torch_bridge._tensors import check_tensor, jax_device

_NOT_TRAINABLE = (
    "{name}: a parameter of the experts requires a gradient, which experts of the bridge do not have; call "
    "layer.requires_grad_(False), gradients reach activations and router logits all the same"
)


class ForwardMixin(MoELayer):
    """What a call of ``FusedMoE`` does."""

    quant_method: FusedMoEMethodBase
    device: torch.device
    reduce_results: bool
    gate: Any
    shared_experts: Any
    shared_expert_gate: Any
    has_partial_shared_experts: bool
    routed_input_transform: Any
    routed_output_transform: Any
    torch_routing: Callable[..., Any] | None
    _calls: JaxCalls | None
    _routing: RoutingParams

    def forward(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor | None = None,
        input_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """hidden_states (..., H), router_logits (..., E) -> (..., H) in the same dtype.

        A layer with a gate computes the logits, whatever is passed for them, as vLLM's does. input_ids: (...,) token
        ids, needed by hash routing only. The result includes shared experts, if there are any. With several ranks it
        is the layer's result with ``reduce_results``, else this rank's part: the parts of all ranks add up to it.
        """
        check_tensor(f"{self.layer_name}: x", hidden_states)
        self.check_sums()
        logits = router_logits if self.gate is None else self._output_of("gate", hidden_states)
        if logits is None:
            raise ValueError(f"router_logits is None and {self.layer_name} owns no gate; pass logits or gate=")
        for label, tensor in (("router_logits", logits), ("input_ids", input_ids)):
            if tensor is not None:
                check_tensor(f"{self.layer_name}: {label}", tensor)
        lead = hidden_states.shape[:-1]
        tokens = hidden_states if len(lead) == 1 else hidden_states.reshape(-1, hidden_states.shape[-1])
        transform = self.routed_input_transform
        routed_in = tokens if transform is None else self._output_of("routed_input_transform", tokens)
        logits = logits if logits.ndim == 2 else logits.reshape(-1, logits.shape[-1])
        y = self._routed(routed_in, logits, None if input_ids is None else input_ids.reshape(-1))
        y = self._with_shared_experts(y, tokens)
        return y if len(lead) == 1 else y.reshape(*lead, y.shape[-1])

    def check_sums(self) -> None:
        """Raises ValueError for an output transform of partial sums, which are left to the caller."""
        if self.routed_output_transform is not None and not self.reduce_results and not self.rank.is_whole:
            raise ValueError(
                f"{self.layer_name}: reduce_results=False over {self.rank.size} ranks leaves sums to the caller, but "
                "routed_output_transform needs them; pass reduce_results=True, or transform after your sum"
            )

    def _routed(self, x: torch.Tensor, logits: torch.Tensor, input_ids: torch.Tensor | None) -> torch.Tensor:
        method, hidden_size = self.quant_method, self.config.hidden_size
        if x.shape[1] != hidden_size:  # told here, since padding would cut it or fill it up
            raise ValueError(f"{self.layer_name}: x has shape {tuple(x.shape)}, expected (T, {hidden_size})")
        if method.is_monolithic and not self.routes_in_torch:
            y = method.apply_monolithic(layer=self, x=self._padded(x), router_logits=logits, input_ids=input_ids)
            return y[:, : x.shape[1]]
        weights, ids = self.select_experts(x, logits, input_ids=input_ids)
        if isinstance(method, SchemeMoEMethod):
            return method.apply(self, x, weights, ids)
        return self._around_own_method(method, x, weights, ids)

    def _around_own_method(self, method: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> Any:
        """A method that is not this package's computes the experts; zero experts and scale are added to its result.

        It sees the id 0 with weight 0 for a zero expert, and x padded to the sizes that it asked for, as in vLLM. What
        it returns for a row of zero experts alone is dropped: with weights on the input it holds biases.
        """
        config, padded = self.config, self._padded(x)

        def apply(weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            call = dict(x=padded, topk_weights=weights, topk_ids=ids, shared_experts=None, shared_experts_input=None)
            return method.apply(layer=self, **call)[:, : x.shape[1]]

        if config.zero_expert_type is None and not config.apply_routed_scale_to_output:
            return apply(weights, ids)
        is_zero = ids >= config.num_experts if config.zero_expert_type is not None else torch.zeros_like(ids).bool()
        y = apply(weights.masked_fill(is_zero, 0), ids.masked_fill(is_zero, 0)).float()
        y = y.masked_fill(is_zero.all(-1, keepdim=True), 0)
        if self.rank.is_first:
            y = y + weights.masked_fill(~is_zero, 0).sum(-1, keepdim=True) * x.float()
        return (y * config.routed_scaling_factor if config.apply_routed_scale_to_output else y).to(x.dtype)

    def _padded(self, x: torch.Tensor) -> torch.Tensor:
        """x as wide as the method's parameters, which may be rounded up."""
        width = self.moe_config.hidden_dim - x.shape[1]
        return torch.nn.functional.pad(x, (0, width)) if width and not self.quant_method.skip_forward_padding else x

    def _with_shared_experts(self, y: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, output transform and shared experts, each once.

        Shared experts that return their part on every rank are summed with the routed experts. Others are whole: they
        are added after the sum, or by the first rank where the sum is left to the caller.
        """
        rank, transform = self.rank, self.routed_output_transform
        is_partial = self.has_partial_shared_experts and not rank.is_whole
        is_added = self.shared_experts is not None and (is_partial or self.reduce_results or rank.is_first)
        shared = self._shared(tokens) if is_added else None
        if shared is not None and is_partial and transform is None:
            y, shared = self._plus(y, shared), None
        if self.reduce_results:
            y = self.maybe_all_reduce(y)
        if transform is not None:
            y = self._output_of("routed_output_transform", y)
        if shared is None:
            return y
        if is_partial and self.reduce_results:
            shared = self.maybe_all_reduce(shared)
        return self._plus(y, shared)

    def _plus(self, y: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
        """y and the output of shared experts, float32, in y's dtype."""
        self._check_output("shared_experts", shared, y.shape, y.device)
        return (y.float() + shared).to(y.dtype)

    def _shared(self, tokens: torch.Tensor) -> torch.Tensor:
        """The output of the shared experts, float32."""
        shared = self._output_of("shared_experts", tokens).float()
        if self.shared_expert_gate is None:
            return shared
        gate = self._output_of("shared_expert_gate", tokens)
        self._check_output("shared_expert_gate", gate, (tokens.shape[0], 1), shared.device)
        return shared * torch.sigmoid(gate.float())

    def _output_of(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """What one of the layer's modules returns; vLLM's linear layers return their output and a bias."""
        result: Any = getattr(self, name)(x)
        first: Any = next(iter(result), None) if isinstance(result, tuple) else result
        check_tensor(f"{self.layer_name}: output of {name}", first)
        return first

    def _check_output(self, name: str, output: torch.Tensor, shape: Sequence[int], device: torch.device) -> None:
        if output.shape != torch.Size(shape) or output.device != device:
            raise ValueError(
                f"{self.layer_name}: output of {name} has shape {tuple(output.shape)} on {output.device}, expected "
                f"{tuple(shape)} on {device}"
            )

    def maybe_all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks that share the layer; nothing to do when it is whole."""
        try:
            return self.rank.sum(part)
        except RuntimeError as error:
            raise RuntimeError(f"{self.layer_name}: {error}") from None

    @property
    def routes_in_torch(self) -> bool:
        """Whether torch chooses experts, or one of their copies, which no operator contains."""
        return self.torch_routing is not None or self.eplb_state is not None

    def must_reduce_shared_expert_outputs(self) -> bool:
        """Whether a model that owns shared experts cut over the ranks sums them itself before it hands them over."""
        return not self.rank.is_whole and not self.has_partial_shared_experts

    def select_experts(
        self, hidden_states: torch.Tensor, router_logits: torch.Tensor, *, input_ids: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's router alone: topk_weights (T, top_k) float32 and global topk_ids (T, top_k).

        Ids from E on are zero experts, which ``quant_method.apply`` understands. With EPLB ids are of copies, and the
        call is counted. input_ids: (T,), for hash routing.
        """
        check_tensor(f"{self.layer_name}: router_logits", router_logits)
        if self.torch_routing is not None:
            weights, ids = self._routed_in_torch(hidden_states, router_logits)
        else:
            arguments = router_logits, self.correction_bias, input_ids, self.config.top_k, self.layer_name
            weights, ids = _ops.call(_ops.select_experts_op, hidden_states, *arguments)
        if self.eplb_state is not None:
            ids = self.eplb_state.to_physical(ids)
        dtype = self.quant_method.topk_indices_dtype
        return weights, ids if dtype is None else ids.to(dtype)

    def _routed_in_torch(self, x: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the layer's custom routing function chooses, checked, with the layer's scale."""
        config = self.config
        assert self.torch_routing is not None
        if config.router_logits_dtype is not None:
            logits = logits.to(getattr(torch, str(config.router_logits_dtype)))
        found = self.torch_routing(
            hidden_states=x, gating_output=logits, topk=config.top_k, renormalize=config.renormalize
        )
        expected = (x.shape[0], config.top_k)
        if not isinstance(found, tuple | list) or len(found) != 2:
            raise TypeError(
                f"{self.layer_name}: custom_routing_function returned a {type(found).__name__}, expected the pair "
                "(weights, ids) of torch tensors"
            )
        for name, tensor in zip(("weights", "ids"), found, strict=True):
            if not isinstance(tensor, torch.Tensor) or tensor.shape != expected:
                shape = tuple(tensor.shape) if hasattr(tensor, "shape") else None
                raise ValueError(
                    f"{self.layer_name}: {name} of custom_routing_function are a {type(tensor).__name__} {shape}, "
                    f"expected a torch tensor {expected}; of a function of JAX arrays say routing_framework='jax'"
                )
        weights, ids = found
        factor = 1.0 if config.apply_routed_scale_to_output else config.routed_scaling_factor
        return weights.float() * factor, ids.to(torch.int32)

    def calls_for(self, method: str) -> JaxCalls:
        """What runs a method of ``Experts``. Raises RuntimeError when nothing is loaded, but for the router alone."""
        calls = self._calls
        if calls is None and method != "select":
            if not isinstance(self.quant_method, SchemeMoEMethod):
                raise NotImplementedError(f"{type(self.quant_method).__name__} has to compute by itself in apply()")
            raise RuntimeError(
                f"{self.layer_name} has no weights yet: call load_weights(pairs), then process_weights_after_loading()"
            )
        if calls is None:
            experts = Experts(None, self.local_config, self.config, self._routing)
            return JaxCalls(jax.device_put(experts, jax_device(self.device)), self.layer_name, self.device)
        for parameter in self._parameters.values():
            if parameter is not None and parameter.requires_grad:
                raise RuntimeError(_NOT_TRAINABLE.format(name=self.layer_name))
        return calls
