"""``FusedMoE``: routed experts as a torch module with vLLM's constructor, parameters and verbs, over moe_jax."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

import moe_jax
from moe_jax import ExpertWeights, MoEConfig
from moe_jax._arguments import boolean, check_callables, integer, shown
from moe_jax.experts import explain
from moe_jax.experts._choice import BACKENDS, first_choice, plain_layout
from moe_jax.loading import LayerLoader
from moe_jax.routing import RoutingParams
from torch_bridge import _ops
from torch_bridge._attributes import AttributesMixin
from torch_bridge._calls import Experts, JaxCalls, configured_for
from torch_bridge._eplb import EplbLayerState
from torch_bridge._forward import ForwardMixin
from torch_bridge._layer_loading import LoadingMixin
from torch_bridge._methods import SchemeMoEMethod
from torch_bridge._moe_config import FusedMoEConfig, MoEActivation, RoutingMethodType, get_routing_method_type
from torch_bridge._process import check_process
from torch_bridge._rank import Rank
from torch_bridge._repeats import Repeats
from torch_bridge._resolve import resolve_method
from torch_bridge._state_dict import StateDictMixin
from torch_bridge._tensors import check_tensor, narrowed, numpy_dtype, to_numpy


class FusedMoE(ForwardMixin, AttributesMixin, StateDictMixin, LoadingMixin):
    """Routed experts of one layer: ``layer(hidden_states (T, H), router_logits (T, E)) -> (T, H)``.

    Create, load, process, call. Weights live on the meta device until they are loaded. They stay as the checkpoint
    stores them. Bit for bit they are the weights of ``moe_jax.FusedMoE`` for the same checkpoint.

    Args (in vLLM's order):
        num_experts, top_k, hidden_size, intermediate_size: sizes of the whole layer.
        params_dtype: dtype of activations, unquantized weights and biases; None takes torch's default dtype.
        reduce_results: sum the outputs of the ranks that share the layer; else a rank returns its own part.
        renormalize, use_grouped_topk, num_expert_group, topk_group, custom_routing_function, scoring_func,
            routed_scaling_factor, apply_router_weight_on_input, activation, is_act_and_mul, has_bias,
            router_logits_dtype: as in ``moe_jax.FusedMoE``, but for functions in custom_routing_function, see
            routing_framework.
        e_score_correction_bias: (E,) tensor, read at every call, so that it may be loaded later; it stays its owner's.
        quant_config: None, a ``Scheme``, a scheme's name, a quantization_config dict, a ``FusedMoEMethodBase``, or an
            object with vLLM's ``get_quant_method(layer, prefix)``.
        tp_size, ep_size: ``tp_size * ep_size`` ranks share the layer: the experts are divided among ``ep_size`` groups,
            and each expert among the ``tp_size`` ranks of a group. dp_size, pcp_size: must be None or 1.
        prefix: unique name of the layer; one is made up for "".
        enable_eplb, num_redundant_experts: experts have copies, which move between ranks, see ``set_eplb_state``. The
            copies of all experts have to divide by ep_size. is_sequence_parallel: refused by name.
        expert_mapping: rows of ``make_expert_params_mapping``; without them every known spelling of names is read.
        n_shared_experts: must be None. gate, shared_experts, routed_input_transform, shared_expert_gate,
            routed_output_transform: torch modules, run in torch. Of a tuple that one returns, the first part counts.
        has_partial_shared_experts: shared_experts returns this rank's part of a sum over the ranks, as vLLM's do; else
            all of its output, which is added once.
        swiglu_limit, swiglu_alpha, swiglu_beta, apply_routed_scale_to_output, zero_expert_type, hash_indices_table: as
            in ``moe_jax.FusedMoE``.
        online: quantize a full-precision checkpoint while it is loaded.
        torch_kernels: launch the Hopper kernels on torch's current stream, without JAX's runtime, so that CUDA graphs
            can capture a call. None launches calls that are kernels from end to end in this way and sends the others
            through JAX's runtime. True refuses the others. False sends all calls through JAX's runtime. The results
            have the same bits.
        tp_rank, ep_rank: by default from the rank in process_group, tensor-parallel neighbours first.
        process_group: the ranks that share the layer, a torch ProcessGroup or vLLM's GroupCoordinator; None takes all
            ranks of torch.distributed, which then have to be as many.
        routing_framework: "torch" if a function in custom_routing_function takes and returns torch tensors, as in vLLM:
            ``function(hidden_states=, gating_output=, topk=, renormalize=) -> (weights, ids)``. "jax" for JAX arrays.
        expert_placement_strategy: "linear" or "round_robin".
        implementation: names to try, see ``moe_jax.FusedMoE``.
        device: where the weights will be; None takes torch's default device at this moment.

    Raises ValueError for contradictory arguments, TypeError for arguments of another kind, NotImplementedError for what
    is not built, by name.
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
        process_group: Any = None,
        has_partial_shared_experts: bool = False,
        routing_framework: str = "torch",
        expert_placement_strategy: str = "linear",
        implementation: str | Iterable[str] | None = None,
        device: torch.device | str | None = None,
    ):
        super().__init__()
        for name, value in dict(
            reduce_results=reduce_results,
            renormalize=renormalize,
            use_grouped_topk=use_grouped_topk,
            apply_router_weight_on_input=apply_router_weight_on_input,
            is_act_and_mul=is_act_and_mul,
            enable_eplb=enable_eplb,
            has_bias=has_bias,
            is_sequence_parallel=is_sequence_parallel,
            apply_routed_scale_to_output=apply_routed_scale_to_output,
            online=online,
            torch_kernels=False if torch_kernels is None else torch_kernels,
            has_partial_shared_experts=has_partial_shared_experts,
        ).items():
            boolean(name, value)
        check_callables(
            gate=gate,
            shared_experts=shared_experts,
            shared_expert_gate=shared_expert_gate,
            routed_input_transform=routed_input_transform,
            routed_output_transform=routed_output_transform,
        )
        _refuse(
            dp_size=None if dp_size == 1 else dp_size,
            pcp_size=None if pcp_size == 1 else pcp_size,
            is_sequence_parallel=is_sequence_parallel or None,
            n_shared_experts=n_shared_experts,
        )
        for name, tensor in dict(
            e_score_correction_bias=e_score_correction_bias, hash_indices_table=hash_indices_table
        ).items():
            if tensor is not None:
                check_tensor(name, tensor)
        for name, dtype in dict(params_dtype=params_dtype, router_logits_dtype=router_logits_dtype).items():
            if dtype is not None and not isinstance(dtype, torch.dtype):
                raise TypeError(f"{name}={shown(dtype)}, expected a torch dtype")
        if device is not None and not isinstance(device, torch.device | str | int):
            raise TypeError(f"device={shown(device)}, expected a torch device or its name")
        if routing_framework not in ("torch", "jax"):
            raise ValueError(f"routing_framework={routing_framework!r}, expected 'torch' or 'jax'")
        is_in_torch = callable(custom_routing_function) and routing_framework == "torch"
        self.torch_routing: Any = custom_routing_function if is_in_torch else None
        self.device: torch.device = torch.device(device) if device is not None else torch.get_default_device()
        if self.device.type in ("meta", "cpu"):  # a model built under torch.device("meta") runs where it is loaded
            self.device = torch.device("cpu")
        if self.device.type == "cuda" and self.device.index is None and torch.cuda.is_available():
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.params_dtype: torch.dtype = params_dtype or torch.get_default_dtype()
        num_physical = num_experts + integer("num_redundant_experts", num_redundant_experts, minimum=0)
        self.eplb_state: EplbLayerState | None = EplbLayerState() if enable_eplb else None
        self.rank: Rank = Rank.current(
            num_physical, tp_size, ep_size, tp_rank, ep_rank, expert_placement_strategy, process_group
        )
        if enable_eplb:
            self._check_eplb(num_physical, zero_expert_type)
        self.torch_kernels = torch_kernels
        self.moe_config: FusedMoEConfig = FusedMoEConfig(
            num_experts=num_physical,
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
            moe_parallel_config=dataclasses.replace(self.rank.moe_parallel_config, enable_eplb=enable_eplb),
            in_dtype=self.params_dtype,
            router_logits_dtype=router_logits_dtype,
            has_bias=has_bias,
            swiglu_limit=swiglu_limit,
            swiglu_alpha=swiglu_alpha,
            swiglu_beta=swiglu_beta,
        )
        # Attributes that vLLM's methods read, and some of which they set.
        self.top_k: int = top_k
        self.num_experts: int = num_experts
        self.hidden_size: int = hidden_size
        self.intermediate_size_per_partition: int = self.moe_config.intermediate_size_per_partition
        self.activation: MoEActivation = self.moe_config.activation
        self.renormalize: bool = renormalize
        self.scoring_func: str = scoring_func
        self.use_grouped_topk: bool = use_grouped_topk
        self.num_expert_group: int | None = num_expert_group
        self.topk_group: int | None = topk_group
        self.custom_routing_function: Any = custom_routing_function
        self.routed_scaling_factor: float = 1.0 if apply_routed_scale_to_output else routed_scaling_factor
        self.apply_router_weight_on_input: bool = apply_router_weight_on_input
        self.swiglu_limit: float | None = swiglu_limit
        self.swiglu_alpha: float | None = swiglu_alpha
        self.swiglu_beta: float | None = swiglu_beta
        self.quant_config: Any = quant_config
        self.quant_method: Any = resolve_method(quant_config, self, prefix, online=online)
        if enable_eplb and not self.quant_method.supports_eplb:
            raise NotImplementedError(f"enable_eplb=True: {self.quant_method.method_name} does not support EPLB")
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
            custom_routing_function=_in_torch if is_in_torch else custom_routing_function,
            router_logits_dtype=None if router_logits_dtype is None else numpy_dtype(router_logits_dtype),
            zero_expert_type=zero_expert_type,
            hash_indices_table=None if hash_indices_table is None else to_numpy(narrowed(hash_indices_table)),
            swiglu_limit=swiglu_limit,
            swiglu_alpha=swiglu_alpha,
            swiglu_beta=swiglu_beta,
            has_bias=has_bias,
            num_redundant_experts=0 if enable_eplb else num_redundant_experts,
            expert_mapping=expert_mapping,
            shared_experts=_stand_in(shared_experts),
            shared_expert_gate=_stand_in(shared_expert_gate),
            routed_input_transform=_stand_in(routed_input_transform),
            routed_output_transform=_stand_in(routed_output_transform),
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
        self.local_config: MoEConfig = self.rank.shard.local(self.physical_config)
        self.reduce_results = reduce_results
        self.has_partial_shared_experts = has_partial_shared_experts
        self.expert_mapping = described.expert_mapping
        self.gate: Any = gate
        self.shared_experts: Any = shared_experts
        self.shared_expert_gate: Any = shared_expert_gate
        self.routed_input_transform: Any = routed_input_transform
        self.routed_output_transform: Any = routed_output_transform
        self.layer_name: str = _ops.register(self, prefix)
        self.check_sums()
        # In a list, so that torch does not register a parameter that belongs to the router.
        self._borrowed = [e_score_correction_bias]
        table = described.hash_table
        self._routing = RoutingParams(hash_indices_table=None if table is None else table.get_value())
        self._experts: Experts | None = None
        self._calls: JaxCalls | None = None
        self._loader: LayerLoader | None = None
        self._repeats: Repeats = Repeats()
        self._create_weights()

    def _create_weights(self) -> None:
        config, moe = self.config, self.moe_config
        sizes = config.hidden_size, self.local_config.intermediate_size
        sizes = self.quant_method.maybe_roundup_sizes(*sizes, moe.in_dtype, moe.moe_parallel_config)
        moe.hidden_dim, moe.intermediate_size_per_partition = sizes
        self.quant_method.create_weights(
            layer=self,
            num_experts=self.local_num_experts,
            hidden_size=sizes[0],
            unpadded_hidden_size=config.hidden_size,
            intermediate_size_per_partition=sizes[1],
            params_dtype=self.params_dtype,
            weight_loader=self.weight_loader,
            global_num_experts=self.rank.num_experts,
            intermediate_size_full=config.intermediate_size,
        )

    def _check_eplb(self, num_physical: int, zero_expert_type: str | None) -> None:
        if self.rank.strategy != "linear":
            raise ValueError(f"enable_eplb=True moves experts by load, found placement {self.rank.strategy!r}")
        if num_physical % self.rank.ep_size:
            raise ValueError(
                f"enable_eplb=True needs as many copies of experts on every rank, found {num_physical} for "
                f"ep_size={self.rank.ep_size}; change num_redundant_experts"
            )
        if zero_expert_type is not None:
            raise NotImplementedError("enable_eplb=True with zero_expert_type is not built; leave one of them out")

    def __getstate__(self) -> dict[str, Any]:
        check_process(self.layer_name)  # arrays that are copied or pickled belong to JAX
        return self.__dict__ | {"_calls": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy is a layer of its own: another name, and parameters that are views of its own weights."""
        super().__setstate__(state)
        self.layer_name = _ops.register(self, "")
        if isinstance(self.quant_method, SchemeMoEMethod):
            self._create_weights()
            if self._experts is not None:
                self.install(self.expert_weights)

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
        """The configuration with the implementations of the layer's device, where none were named."""
        return config if self._is_implementation_given else configured_for(config, self.device)

    @property
    def expert_weights(self) -> ExpertWeights:
        """The processed weights of this rank, in the plain layout. Raises RuntimeError when there are none."""
        if self._experts is None:
            raise RuntimeError(f"{self.layer_name} has no processed weights: call process_weights_after_loading()")
        return plain_layout(self._experts.weights)

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


def _stand_in(module: Any) -> Any:
    """What stands for a torch module in the description of the layer, which is never called."""
    return None if module is None else _in_torch


def _in_torch(**arguments: Any) -> Any:
    raise NotImplementedError(
        "custom_routing_function is torch's and cannot run in JAX; call the layer, or select_experts and apply"
    )


def _refuse(**options: Any) -> None:
    given = [f"{name}={value!r}" for name, value in options.items() if value is not None]
    if given:
        raise NotImplementedError(f"FusedMoE({', '.join(given)}) is not built; leave it out")
