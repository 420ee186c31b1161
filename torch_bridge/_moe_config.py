"""vLLM's description of a layer of experts, under vLLM's names: what methods and models written for vLLM read."""

import dataclasses
import enum
from typing import Any

import torch

from moe_jax.activations import NOT_GATED_SUFFIX, parse_activation


class MoEActivation(enum.StrEnum):
    """Names of activations; a member equals its name."""

    SILU = "silu"
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    RELU2 = "relu2"
    SWIGLUOAI = "swigluoai"
    SWIGLUOAI_UNINTERLEAVE = "swigluoai_uninterleave"
    SWIGLUSTEP = "swiglustep"
    SILU_NO_MUL = "silu_no_mul"
    GELU_NO_MUL = "gelu_no_mul"
    GELU_TANH_NO_MUL = "gelu_tanh_no_mul"
    RELU2_NO_MUL = "relu2_no_mul"

    @property
    def is_gated(self) -> bool:
        """Whether the activation of one projection multiplies another."""
        return not self.value.endswith(NOT_GATED_SUFFIX)

    def without_mul(self) -> "MoEActivation":
        """The member that is not gated; itself where there is none."""
        name = self.value.removesuffix(NOT_GATED_SUFFIX) + NOT_GATED_SUFFIX
        return MoEActivation(name) if name in MoEActivation._value2member_map_ else self

    @classmethod
    def from_str(cls, s: str) -> "MoEActivation":
        """s: a name or an alias. Raises ValueError for an unknown one."""
        return cls(s) if s in cls._value2member_map_ else cls(parse_activation(s))

    @classmethod
    def of(cls, name: str, is_act_and_mul: bool) -> "MoEActivation":
        """A name with what else says whether the layer is gated. Raises ValueError for a pair that does not exist."""
        member = cls.from_str(name)
        return member if is_act_and_mul else cls(parse_activation(member.value, is_gated=False))


class RoutingMethodType(enum.IntEnum):
    """How a router turns logits into weights, by vLLM's numbers."""

    Default = 0
    Renormalize = 1
    DeepSeekV3 = 2
    Llama4 = 3
    RenormalizeNaive = 4
    TopK = 5
    SigmoidRenorm = 6
    MiniMax2 = 7
    Sigmoid = 8
    Unspecified = 9
    DeepseekV4 = 100
    Custom = 101
    Simulated = 102


def get_routing_method_type(
    scoring_func: str,
    top_k: int,
    renormalize: bool,
    num_expert_group: int | None,
    has_e_score_bias: bool,
    routed_scaling_factor: float | None = 1.0,
) -> RoutingMethodType:
    """The number of a router; Unspecified for one that vLLM has no name for."""
    kinds = RoutingMethodType
    if has_e_score_bias and scoring_func == "sigmoid" and renormalize:
        if num_expert_group:
            return kinds.DeepSeekV3
        return kinds.MiniMax2 if routed_scaling_factor in (None, 1.0) else kinds.Unspecified
    if has_e_score_bias and scoring_func != "sqrtsoftplus":
        return kinds.Unspecified
    return {
        ("sqrtsoftplus", True): kinds.DeepseekV4,
        ("sigmoid", True): kinds.SigmoidRenorm,
        ("sigmoid", False): kinds.Sigmoid,
        ("softmax", True): kinds.RenormalizeNaive,
        ("softmax", False): kinds.Default,
    }.get((scoring_func, bool(renormalize)), kinds.Unspecified)


def _uses(*transports: str) -> Any:
    """Whether tokens travel between ranks by one of these transports."""
    return property(lambda self: self.use_all2all_kernels and self.all2all_backend in transports)


def _any_of(*names: str) -> Any:
    return property(lambda self: any(getattr(self, name) for name in names))


@dataclasses.dataclass
class FusedMoEParallelConfig:
    """Sizes and ranks of a layer's groups: tensor, prefill context, data, expert and sequence parallelism.

    use_ep: whether experts are distributed. all2all_backend: vLLM's transport of tokens; ranks of the bridge exchange
    outputs instead. enable_eplb: whether experts move between ranks.
    """

    tp_size: int
    pcp_size: int
    dp_size: int
    ep_size: int
    tp_rank: int
    pcp_rank: int
    dp_rank: int
    ep_rank: int
    sp_size: int
    use_ep: bool
    all2all_backend: str
    enable_eplb: bool

    @classmethod
    def make_no_parallel(cls) -> "FusedMoEParallelConfig":
        """Of a layer that one process holds."""
        return cls.of_rank()

    @classmethod
    def of_rank(
        cls, tp_size: int = 1, tp_rank: int = 0, ep_size: int = 1, ep_rank: int = 0
    ) -> "FusedMoEParallelConfig":
        """Of one rank of a tensor-parallel or expert-parallel group."""
        return cls(
            tp_size=tp_size,
            pcp_size=1,
            dp_size=1,
            ep_size=ep_size,
            tp_rank=tp_rank,
            pcp_rank=0,
            dp_rank=0,
            ep_rank=ep_rank,
            sp_size=1,
            use_ep=ep_size > 1,
            all2all_backend="allgather_reducescatter",
            enable_eplb=False,
        )

    @property
    def is_sequence_parallel(self) -> bool:
        return self.sp_size > 1

    @property
    def use_all2all_kernels(self) -> bool:
        """Whether tokens travel between ranks."""
        return self.dp_size > 1 and self.use_ep

    use_deepep_ht_kernels = _uses("deepep_high_throughput")
    use_deepep_ll_kernels = _uses("deepep_low_latency")
    use_deepep_v2_kernels = _uses("deepep_v2")
    use_fi_nvl_two_sided_kernels = _uses("flashinfer_all2allv", "flashinfer_nvlink_two_sided")
    use_fi_nvl_one_sided_kernels = _uses("flashinfer_nvlink_one_sided")
    use_ag_rs_all2all_kernels = _uses("allgather_reducescatter")
    use_mori_kernels = _uses("mori_high_throughput", "mori_low_latency")
    use_nixl_ep_kernels = _uses("nixl_ep")
    use_batched_activation_format = _any_of("use_deepep_ll_kernels", "use_nixl_ep_kernels")
    needs_round_robin_routing_tables = _any_of("use_deepep_ll_kernels", "use_nixl_ep_kernels")


def _of_parallel(name: str) -> Any:
    return property(lambda self: getattr(self.moe_parallel_config, name))


@dataclasses.dataclass
class FusedMoEConfig:
    """What vLLM's methods are told of the layer they serve: ``layer.moe_config`` and ``method.moe``.

    Args:
        num_experts: of all ranks. num_local_experts: of this rank. num_logical_experts: without copies.
        experts_per_token: top_k.
        hidden_dim, intermediate_size: H, and I of the whole layer.
        activation: a ``MoEActivation``; a name becomes one.
        device: where the weights will be.
        routing_method: how the router turns logits into weights.
        moe_parallel_config: the ranks.
        in_dtype: of activations. router_logits_dtype: of logits, in_dtype by default.
        hidden_dim_unpadded, intermediate_size_per_partition_unpadded: sizes of the checkpoint, by default those above.
        moe_backend, max_num_tokens, is_lora_enabled, max_capture_size, rocm_aiter_fmoe_enabled,
            aiter_fmoe_shared_expert_enabled: settings of vLLM's engine; nothing here reads them.
        has_bias: the experts have biases.
        swiglu_limit, swiglu_alpha, swiglu_beta: of clamped SwiGLU.
        intermediate_size_per_partition: I of this rank; computed.

    Raises ValueError where intermediate_size does not divide by tp_size.
    """

    num_experts: int
    experts_per_token: int
    hidden_dim: int
    intermediate_size: int
    num_local_experts: int
    num_logical_experts: int
    activation: MoEActivation
    device: torch.device | str
    routing_method: RoutingMethodType
    moe_parallel_config: FusedMoEParallelConfig
    in_dtype: torch.dtype
    router_logits_dtype: torch.dtype | None = None
    hidden_dim_unpadded: int | None = None
    intermediate_size_per_partition_unpadded: int | None = None
    moe_backend: str = "auto"
    max_num_tokens: int = 256
    has_bias: bool = False
    is_lora_enabled: bool = False
    swiglu_limit: float | None = None
    swiglu_alpha: float | None = None
    swiglu_beta: float | None = None
    max_capture_size: int = 0
    intermediate_size_per_partition: int = -1
    rocm_aiter_fmoe_enabled: bool = False
    aiter_fmoe_shared_expert_enabled: bool = False

    def __post_init__(self) -> None:
        tp_size = self.moe_parallel_config.tp_size
        if self.intermediate_size % tp_size:
            raise ValueError(f"intermediate_size={self.intermediate_size} does not divide by tp_size={tp_size}")
        self.activation = MoEActivation.from_str(self.activation)
        self.intermediate_size_per_partition = self.intermediate_size // tp_size
        if self.router_logits_dtype is None:
            self.router_logits_dtype = self.in_dtype
        if self.hidden_dim_unpadded is None:
            self.hidden_dim_unpadded = self.hidden_dim
        if self.intermediate_size_per_partition_unpadded is None:
            self.intermediate_size_per_partition_unpadded = self.intermediate_size_per_partition

    @property
    def is_act_and_mul(self) -> bool:
        """Whether w13 holds gate and up."""
        return self.activation.is_gated

    tp_size = _of_parallel("tp_size")
    tp_rank = _of_parallel("tp_rank")
    pcp_size = _of_parallel("pcp_size")
    pcp_rank = _of_parallel("pcp_rank")
    dp_size = _of_parallel("dp_size")
    dp_rank = _of_parallel("dp_rank")
    ep_size = _of_parallel("ep_size")
    ep_rank = _of_parallel("ep_rank")
    sp_size = _of_parallel("sp_size")
    use_ep = _of_parallel("use_ep")
    is_sequence_parallel = _of_parallel("is_sequence_parallel")
    use_deepep_ht_kernels = _of_parallel("use_deepep_ht_kernels")
    use_deepep_ll_kernels = _of_parallel("use_deepep_ll_kernels")
    use_deepep_v2_kernels = _of_parallel("use_deepep_v2_kernels")
    use_mori_kernels = _of_parallel("use_mori_kernels")
    use_fi_nvl_two_sided_kernels = _of_parallel("use_fi_nvl_two_sided_kernels")
    use_fi_nvl_one_sided_kernels = _of_parallel("use_fi_nvl_one_sided_kernels")
    use_ag_rs_all2all_kernels = _of_parallel("use_ag_rs_all2all_kernels")
    use_nixl_ep_kernels = _of_parallel("use_nixl_ep_kernels")
    needs_round_robin_routing_tables = _of_parallel("needs_round_robin_routing_tables")
