"""``FusedMoE``: routed experts as a torch module with vLLM's constructor, parameters and verbs, over moe_jax."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
import torch

import moe_jax
from moe_jax import ExpertWeights, MoEConfig
from moe_jax.experts import explain
from moe_jax.experts._choice import BACKENDS, first_choice, plain_layout
from moe_jax.loading import LayerLoader
from moe_jax.parallel import determine_expert_map
from moe_jax.routing import RoutingParams
from torch_bridge import _ops
from torch_bridge._calls import Experts, JaxCalls
from torch_bridge._layer_loading import LoadingMixin
from torch_bridge._methods import SchemeMoEMethod
from torch_bridge._moe_config import FusedMoEConfig, MoEActivation, RoutingMethodType, get_routing_method_type
from torch_bridge._rank import Rank
from torch_bridge._resolve import resolve_method
from torch_bridge._state_dict import StateDictMixin
from torch_bridge._tensors import check_tensor, numpy_dtype, to_numpy

_NOT_TRAINABLE = (
    "{name}: a parameter of the experts requires a gradient, which experts of the bridge do not have; call "
    "layer.requires_grad_(False), gradients reach activations and router logits all the same"
)


class FusedMoE(StateDictMixin, LoadingMixin):
    """Routed experts of one layer: ``layer(hidden_states (T, H), router_logits (T, E)) -> (T, H)``.

    Create, load, process, call. Weights live on the meta device until they are loaded. They stay as the checkpoint
    stores them. Bit for bit they are the weights of ``moe_jax.FusedMoE`` for the same checkpoint.

    Args (in vLLM's order):
        num_experts, top_k, hidden_size, intermediate_size: sizes of the whole layer.
        params_dtype: dtype of activations, unquantized weights and biases; None takes torch's default dtype.
        reduce_results: sum the outputs of all ranks with torch.distributed; else a rank returns its own part.
        renormalize, use_grouped_topk, num_expert_group, topk_group, custom_routing_function, scoring_func,
            routed_scaling_factor, apply_router_weight_on_input, activation, is_act_and_mul, has_bias,
            router_logits_dtype: as in ``moe_jax.FusedMoE``. A custom_routing_function takes and returns JAX arrays.
        e_score_correction_bias: (E,) tensor, read at every call, so that it may be loaded later; it stays its owner's.
        quant_config: None, a ``Scheme``, a scheme's name, a quantization_config dict, a ``FusedMoEMethodBase``, or an
            object with vLLM's ``get_quant_method(layer, prefix)``.
        tp_size, ep_size: ranks that share the layer; one of them is 1. dp_size, pcp_size: must be None or 1.
        prefix: unique name of the layer; one is made up for "".
        enable_eplb, num_redundant_experts, is_sequence_parallel: refused by name.
        expert_mapping: rows of ``make_expert_params_mapping``; without them every known spelling of names is read.
        n_shared_experts: must be None. gate, shared_experts, routed_input_transform, shared_expert_gate,
            routed_output_transform: torch modules, run in torch.
        swiglu_limit, swiglu_alpha, swiglu_beta, apply_routed_scale_to_output, zero_expert_type, hash_indices_table: as
            in ``moe_jax.FusedMoE``.
        online: quantize a full-precision checkpoint while it is loaded.
        torch_kernels: launch the Hopper kernels on torch's current stream, without JAX's runtime, so that CUDA graphs
            can capture a call. None launches calls that are kernels from end to end in this way and sends the others
            through JAX's runtime. True refuses the others. False sends all calls through JAX's runtime. The results
            have the same bits.
        tp_rank, ep_rank: default to torch.distributed's, else 0. expert_placement_strategy: "linear" or "round_robin".
        implementation: names to try, see ``moe_jax.FusedMoE``.
        device: where the weights will be; None takes torch's default device at this moment.

    Raises ValueError for contradictory arguments, NotImplementedError for what is not built, by name.
    """

    def __init__(
        self,
        num_experts: int,
        top_k: int,
        hidden_size: int,
        intermediate_size: int,
        params_dtype: torch.dtype | None = None,
        reduce_results: bool = False,
        renormalize: bool = True,
        use_grouped_topk: bool = False,
        num_expert_group: int | None = None,
        topk_group: int | None = None,
        quant_config: Any = None,
        tp_size: int | None = None,
        ep_size: int | None = None,
        dp_size: int | None = None,
        pcp_size: int | None = None,
        prefix: str = "",
        custom_routing_function: Callable[..., Any] | str | None = None,
        scoring_func: str = "softmax",
        routed_scaling_factor: float = 1.0,
        e_score_correction_bias: torch.Tensor | None = None,
        apply_router_weight_on_input: bool = False,
        activation: str = "silu",
        is_act_and_mul: bool = True,
        enable_eplb: bool = False,
        num_redundant_experts: int = 0,
        has_bias: bool = False,
        is_sequence_parallel: bool = False,
        expert_mapping: Any = None,
        n_shared_experts: int | None = None,
        router_logits_dtype: torch.dtype | None = None,
        gate: torch.nn.Module | None = None,
        shared_experts: torch.nn.Module | None = None,
        routed_input_transform: torch.nn.Module | None = None,
        *,
        swiglu_limit: float | None = None,
        swiglu_alpha: float | None = None,
        swiglu_beta: float | None = None,
        shared_expert_gate: torch.nn.Module | None = None,
        routed_output_transform: torch.nn.Module | None = None,
        apply_routed_scale_to_output: bool = False,
        zero_expert_type: str | None = None,
        hash_indices_table: torch.Tensor | None = None,
        online: bool = False,
        torch_kernels: bool | None = None,
        tp_rank: int | None = None,
        ep_rank: int | None = None,
        expert_placement_strategy: str = "linear",
        implementation: str | Iterable[str] | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        _refuse(
            dp_size=None if dp_size == 1 else dp_size,
            pcp_size=None if pcp_size == 1 else pcp_size,
            is_sequence_parallel=is_sequence_parallel or None,
            enable_eplb=enable_eplb or None,
            n_shared_experts=n_shared_experts,
        )
        if shared_expert_gate is not None and shared_experts is None:
            raise ValueError("shared_expert_gate is given without shared_experts; pass both or neither")
        self.device: torch.device = torch.device(device) if device is not None else torch.get_default_device()
        if self.device.type in ("meta", "cpu"):  # a model built under torch.device("meta") runs where it is loaded
            self.device = torch.device("cpu")
        if self.device.type == "cuda" and self.device.index is None and torch.cuda.is_available():
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.params_dtype: torch.dtype = params_dtype or torch.get_default_dtype()
        self.rank: Rank = Rank.current(num_experts, tp_size, ep_size, tp_rank, ep_rank, expert_placement_strategy)
        self.torch_kernels = torch_kernels
        self.moe_config: FusedMoEConfig = FusedMoEConfig(
            num_experts=num_experts,
            experts_per_token=top_k,
            hidden_dim=hidden_size,
            intermediate_size=intermediate_size,
            num_local_experts=self.rank.num_local_experts,
            num_logical_experts=num_experts,
            activation=MoEActivation.of(activation, is_act_and_mul),
            device=self.device,
            routing_method=RoutingMethodType.Custom
            if custom_routing_function is not None
            else get_routing_method_type(
                scoring_func,
                top_k,
                renormalize,
                num_expert_group if use_grouped_topk else None,
                e_score_correction_bias is not None,
                routed_scaling_factor,
            ),
            moe_parallel_config=self.rank.moe_parallel_config,
            in_dtype=self.params_dtype,
            router_logits_dtype=router_logits_dtype,
            has_bias=has_bias,
            swiglu_limit=swiglu_limit,
            swiglu_alpha=swiglu_alpha,
            swiglu_beta=swiglu_beta,
        )
        self.quant_method: Any = resolve_method(quant_config, self, prefix, online=online)
        bias = None if e_score_correction_bias is None else np.zeros(e_score_correction_bias.shape, np.float32)
        described = moe_jax.FusedMoE(
            num_experts,
            hidden_size,
            intermediate_size,
            top_k=top_k,
            scheme=self.quant_method.scheme,
            activation=activation,
            is_act_and_mul=is_act_and_mul,
            renormalize=renormalize,
            scoring_func=scoring_func,
            use_grouped_topk=use_grouped_topk,
            num_expert_group=num_expert_group,
            topk_group=topk_group,
            e_score_correction_bias=bias,
            routed_scaling_factor=routed_scaling_factor,
            apply_routed_scale_to_output=apply_routed_scale_to_output,
            apply_router_weight_on_input=apply_router_weight_on_input,
            custom_routing_function=custom_routing_function,
            router_logits_dtype=None if router_logits_dtype is None else numpy_dtype(router_logits_dtype),
            zero_expert_type=zero_expert_type,
            hash_indices_table=None if hash_indices_table is None else to_numpy(hash_indices_table).astype(np.int32),
            swiglu_limit=swiglu_limit,
            swiglu_alpha=swiglu_alpha,
            swiglu_beta=swiglu_beta,
            has_bias=has_bias,
            num_redundant_experts=num_redundant_experts,
            name=prefix,
            implementation=implementation,
            dtype=numpy_dtype(self.params_dtype),
            param_dtype=numpy_dtype(self.params_dtype),
        )
        self._is_implementation_given = implementation is not None
        if torch_kernels and not first_choice(described.config, "gpu").is_all_kernels:
            launched = " or ".join(repr(name) for name, backend in BACKENDS.items() if backend.is_all_kernels)
            raise ValueError(
                f"torch_kernels=True launches the kernels of implementation {launched}, found {implementation=}; leave "
                "one of them out"
            )
        self.config: MoEConfig = self._on_device(described.config)
        self.local_config: MoEConfig = self.rank.shard.local(self.config)
        self.reduce_results = reduce_results
        self.expert_mapping = expert_mapping
        self.gate: Any = gate
        self.shared_experts: Any = shared_experts
        self.shared_expert_gate: Any = shared_expert_gate
        self.routed_input_transform: Any = routed_input_transform
        self.routed_output_transform: Any = routed_output_transform
        self.layer_name: str = _ops.register(self, prefix)
        # In a list, so that torch does not register a parameter that belongs to the router.
        self._borrowed = [e_score_correction_bias]
        table = described.hash_table
        self._routing = RoutingParams(hash_indices_table=None if table is None else table.get_value())
        self._experts: Experts | None = None
        self._calls: JaxCalls | None = None
        self._loader: LayerLoader | None = None
        self._create_weights()

    def _create_weights(self) -> None:
        config = self.config
        self.quant_method.create_weights(
            layer=self,
            num_experts=self.local_num_experts,
            hidden_size=config.hidden_size,
            intermediate_size_per_partition=self.local_config.intermediate_size,
            params_dtype=self.params_dtype,
            weight_loader=self.weight_loader,
            global_num_experts=config.num_experts,
            intermediate_size_full=config.intermediate_size,
        )

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_calls": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy is a layer of its own: another name, and parameters that are views of its own weights."""
        super().__setstate__(state)
        self.layer_name = _ops.register(self, "")
        if isinstance(self.quant_method, SchemeMoEMethod):
            self._create_weights()
            if self._experts is not None:
                self.install(self.expert_weights)

    # -- forward ------------------------------------------------------------------------------------------------------

    def forward(
        self,
        hidden_states: torch.Tensor,
        router_logits: torch.Tensor | None = None,
        token_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """hidden_states (..., H), router_logits (..., E), None when the layer has a gate -> (..., H) in the same dtype.

        token_ids: (...,), needed by hash routing only. The result includes shared experts, if there are any; with
        several ranks it is the sum over them with ``reduce_results``, else this rank's part.
        """
        check_tensor(f"{self.layer_name}: x", hidden_states)
        logits = router_logits
        if logits is None:
            if self.gate is None:
                raise ValueError(f"router_logits is None and {self.layer_name} owns no gate; pass logits or gate=")
            logits = self.gate(hidden_states)
        for label, tensor in (("router_logits", logits), ("token_ids", token_ids)):
            if tensor is not None:
                check_tensor(f"{self.layer_name}: {label}", tensor)
        lead = hidden_states.shape[:-1]
        tokens = hidden_states if len(lead) == 1 else hidden_states.reshape(-1, hidden_states.shape[-1])
        routed_in = tokens if self.routed_input_transform is None else self.routed_input_transform(tokens)
        logits = logits if logits.ndim == 2 else logits.reshape(-1, logits.shape[-1])
        y = self._routed(routed_in, logits, None if token_ids is None else token_ids.reshape(-1))
        if self.reduce_results:
            y = self.maybe_all_reduce(y)
        if self.routed_output_transform is not None:
            y = self.routed_output_transform(y)
        if self.shared_experts is not None:
            shared = self.shared_experts(tokens).float()
            if self.shared_expert_gate is not None:
                shared = shared * torch.sigmoid(self.shared_expert_gate(tokens).float())
            y = (y.float() + shared).to(y.dtype)
        return y if len(lead) == 1 else y.reshape(*lead, y.shape[-1])

    def _routed(self, x: torch.Tensor, logits: torch.Tensor, token_ids: torch.Tensor | None) -> torch.Tensor:
        method = self.quant_method
        if token_ids is not None:
            return _ops.call(_ops.fused_moe_op, x, logits, self.correction_bias, token_ids, self.layer_name)
        if method.is_monolithic:
            return method.apply_monolithic(self, x, logits)
        return method.apply(self, x, *self.select_experts(x, logits))

    def select_experts(
        self, hidden_states: torch.Tensor, router_logits: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's router alone: topk_weights (T, top_k) float32 and global topk_ids (T, top_k)."""
        arguments = router_logits, self.correction_bias, None, self.config.top_k, self.layer_name
        weights, ids = _ops.call(_ops.select_experts_op, hidden_states, *arguments)
        dtype = self.quant_method.topk_indices_dtype
        return weights, ids if dtype is None else ids.to(dtype)

    def maybe_all_reduce(self, routed: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks that share the layer; nothing to do when it is whole."""
        if self.rank.is_whole:
            return routed
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            raise RuntimeError(
                f"{self.layer_name}: reduce_results=True over {self.tp_size * self.ep_size} ranks "
                "needs torch.distributed; "
                "initialize a process group, or pass reduce_results=False and sum the parts yourself"
            )
        routed = routed.clone()
        torch.distributed.all_reduce(routed)
        return routed

    def calls_for(self, x: torch.Tensor, *others: torch.Tensor) -> JaxCalls:
        """What runs a call on these tensors. Raises RuntimeError when nothing is loaded, or it is elsewhere."""
        if self._calls is None:
            if not isinstance(self.quant_method, SchemeMoEMethod):
                raise NotImplementedError(f"{type(self.quant_method).__name__} has to compute by itself in apply()")
            raise RuntimeError(
                f"{self.layer_name} has no weights yet: call load_weights(pairs), then process_weights_after_loading()"
            )
        config = self.config
        if x.ndim != 2 or x.shape[1] != config.hidden_size:
            raise ValueError(f"{self.layer_name}: x has shape {tuple(x.shape)}, expected (T, {config.hidden_size})")
        if not x.is_floating_point():
            raise ValueError(f"{self.layer_name}: x has dtype {x.dtype}, expected a float dtype")
        for tensor in (x, *others):
            if tensor.device != self.device:
                raise RuntimeError(
                    f"{self.layer_name}: expected all tensors on {self.device}, where the experts are, found one on "
                    f"{tensor.device}; move one of them with .to()"
                )
            if tensor.shape[0] != x.shape[0]:
                raise ValueError(
                    f"{self.layer_name}: x has {x.shape[0]} tokens, found {tensor.shape[0]} in {tuple(tensor.shape)}"
                )
        for parameter in self._parameters.values():
            if parameter is not None and parameter.requires_grad:
                raise RuntimeError(_NOT_TRAINABLE.format(name=self.layer_name))
        return self._calls

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "FusedMoE":
        """``.to(device)`` moves the experts; another dtype is refused, since stored weights have no other."""
        if not isinstance(self.quant_method, SchemeMoEMethod):
            return super()._apply(fn, recurse)
        probe = fn(torch.empty(0, dtype=self.params_dtype, device=self.device))
        if probe.dtype != self.params_dtype:
            raise TypeError(
                f"{self.layer_name}: experts keep params_dtype {self.params_dtype}, found a cast to "
                f"{probe.dtype}; build "
                "the layer with the params_dtype you want, and cast the rest of the model before"
            )
        own = {name: self._parameters.pop(name) for name in list(self._parameters) if name.startswith(("w13_", "w2_"))}
        super()._apply(fn, recurse)
        self._parameters.update(own)
        if probe.device != self.device and not probe.is_meta:
            weights = None if self._experts is None else self.expert_weights
            self.device = probe.device
            self.config, self.local_config = self._on_device(self.config), self._on_device(self.local_config)
            if weights is not None:
                self.install(weights)
        return self

    def _on_device(self, config: MoEConfig) -> MoEConfig:
        """The configuration with the implementations of the layer's device, where none were named.

        moe_jax takes the order of JAX's default backend, which the layer's device may not belong to.
        """
        if self._is_implementation_given:
            return config
        is_elsewhere = self.device.type == "cpu" and jax.default_backend() != "cpu"
        return dataclasses.replace(config, implementation=("xla",) if is_elsewhere else None)

    # -- what vLLM asks a layer ---------------------------------------------------------------------------------------

    @property
    def correction_bias(self) -> torch.Tensor | None:
        """e_score_correction_bias (E,), as its owner has it now."""
        bias = self._borrowed[0]
        return bias() if callable(bias) and not isinstance(bias, torch.Tensor) else bias

    @property
    def routing_params(self) -> RoutingParams:
        """Arrays of the router other than its correction bias."""
        return self._routing

    @property
    def expert_weights(self) -> ExpertWeights:
        """The processed weights of this rank, in the plain layout. Raises RuntimeError when there are none."""
        if self._experts is None:
            raise RuntimeError(f"{self.layer_name} has no processed weights: call process_weights_after_loading()")
        return plain_layout(self._experts.weights)

    @property
    def global_num_experts(self) -> int:
        return self.config.num_experts

    @property
    def logical_num_experts(self) -> int:
        return self.config.num_experts

    @property
    def local_num_experts(self) -> int:
        return self.rank.num_local_experts

    @property
    def tp_size(self) -> int:
        return self.rank.tp_size

    @property
    def tp_rank(self) -> int:
        return self.rank.tp_rank

    @property
    def ep_size(self) -> int:
        return self.rank.ep_size

    @property
    def ep_rank(self) -> int:
        return self.rank.ep_rank

    @property
    def use_ep(self) -> bool:
        return self.rank.ep_size > 1

    @property
    def expert_map(self) -> torch.Tensor | None:
        """(P,) int32, global to local expert, -1 where not local; None when all experts are local."""
        return None if self.rank.expert_map is None else torch.from_numpy(self.rank.expert_map)

    @property
    def is_internal_router(self) -> bool:
        return self.gate is not None

    def get_expert_weights(self) -> list[torch.Tensor]:
        """Every leaf with experts as (E, -1), views of the processed weights: what moves with an expert."""
        experts = self.local_num_experts
        parameters = [p for name, p in self.named_parameters(recurse=False) if name.startswith(("w13_", "w2_"))]
        return [parameter.data.reshape(experts, -1) for parameter in parameters]

    def set_eplb_state(self, *state: Any, **named: Any) -> None:
        """vLLM's hook for replicas of experts. Raises NotImplementedError: layers here have none yet."""
        raise NotImplementedError(f"{self.layer_name}: EPLB is not built here; build the layer without enable_eplb")

    def update_expert_map(self) -> None:
        """Check the expert map against ``ep_size`` and ``ep_rank``. Raises ValueError for a layer without a map."""
        if self.rank.expert_map is None:
            raise ValueError(
                f"{self.layer_name}: ep_size=1, all experts are local and there is no expert map to update"
            )
        determine_expert_map(self.ep_size, self.ep_rank, self.global_num_experts, self.rank.strategy)

    def explain(self, num_tokens: int) -> str:
        """What would run for this many tokens and why, see ``moe_jax.FusedMoE.explain``."""
        experts = self._experts
        weights = self.expert_weights if experts is None else experts.weights
        return explain(self.local_config, weights, num_tokens)

    def extra_repr(self) -> str:
        c = self.config
        return (
            f"num_experts={c.num_experts}, local_num_experts={self.local_num_experts}, top_k={c.top_k}, "
            f"hidden_size={c.hidden_size}, intermediate_size={c.intermediate_size}, scheme={c.scheme.name!r}, "
            f"tp_size={self.tp_size}, ep_size={self.ep_size}, reduce_results={self.reduce_results}, "
            f"method={type(self.quant_method).__name__}"
        )


def _refuse(**options: Any) -> None:
    given = [f"{name}={value!r}" for name, value in options.items() if value is not None]
    if given:
        raise NotImplementedError(f"FusedMoE({', '.join(given)}) is not built; leave it out")
