"""What methods are told of their layer, under vLLM's names: ``moe_config`` and ``method.moe``."""

import pytest
import torch

import torch_bridge
from tests.support.cases.torch_bridge import E, H, I, K, bridge_layer

NO_RANKS = dict(tp_size=1, tp_rank=0, ep_size=1, ep_rank=0, use_ep=False)
RANKS = {
    "whole": ({}, E, I, NO_RANKS),
    "tp": (dict(tp_size=2, tp_rank=1), E, I // 2, NO_RANKS | dict(tp_size=2, tp_rank=1)),
    "ep": (dict(ep_size=2, ep_rank=1), E // 2, I, NO_RANKS | dict(ep_size=2, ep_rank=1, use_ep=True)),
}


class QuantConfig:
    """As vLLM's: asked for a method while the layer is built."""

    def __init__(self, make):
        self.make = make

    def get_quant_method(self, layer, prefix):
        self.seen = layer.moe_config
        return self.make(layer)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("is_gated", [True, False])
def test_layers_say_what_vllm_layers_say(ranks, is_gated):
    """M92: ``get_quant_method`` sees every field, before any parameter exists."""
    options, local, partition, parallel = RANKS[ranks]
    asked = QuantConfig(lambda layer: None)
    options |= dict(router_logits_dtype=torch.float32, has_bias=True, is_act_and_mul=is_gated, scoring_func="sigmoid")
    layer = bridge_layer(asked, **options)
    moe = asked.seen
    assert moe is layer.moe_config is layer.quant_method.moe
    assert (moe.num_experts, moe.num_logical_experts, moe.num_local_experts, moe.experts_per_token) == (E, E, local, K)
    assert (moe.hidden_dim, moe.hidden_dim_unpadded, moe.intermediate_size) == (H, H, I)
    assert (moe.intermediate_size_per_partition, moe.intermediate_size_per_partition_unpadded) == (partition, partition)
    assert (moe.in_dtype, moe.router_logits_dtype, moe.has_bias) == (torch.bfloat16, torch.float32, True)
    assert moe.is_act_and_mul is moe.activation.is_gated is is_gated
    assert moe.activation == ("silu" if is_gated else "silu_no_mul") and moe.device == torch.device("cpu")
    assert moe.routing_method is torch_bridge.RoutingMethodType.SigmoidRenorm
    for name, value in (parallel | dict(dp_size=1, pcp_size=1, sp_size=1, is_sequence_parallel=False)).items():
        assert getattr(moe, name) == getattr(moe.moe_parallel_config, name) == value, name
    assert not moe.use_deepep_ll_kernels and not moe.moe_parallel_config.use_batched_activation_format


@pytest.mark.parametrize(
    "make",
    [
        lambda layer: torch_bridge.Int8OnlineMoEMethod(layer=layer),
        lambda layer: torch_bridge.UnquantizedFusedMoEMethod(layer.moe_config),
        lambda layer: torch_bridge.SchemeMoEMethod("fp8_channel"),
    ],
)
def test_methods_know_their_layer(make):
    """M32, M93: whether the method was told or not."""
    layer = bridge_layer(QuantConfig(make), swiglu_limit=7.0)
    assert layer.quant_method.moe is layer.moe_config and layer.moe_config.swiglu_limit == 7.0


def test_transports_of_tokens():
    """Which of vLLM's transports a parallel configuration has, for methods that ask."""
    config = torch_bridge.FusedMoEParallelConfig.make_no_parallel()
    assert not config.use_all2all_kernels and not config.use_ag_rs_all2all_kernels
    config.dp_size, config.use_ep = 2, True
    assert config.use_ag_rs_all2all_kernels and not config.use_deepep_ht_kernels
    config.all2all_backend = "deepep_low_latency"
    assert config.use_deepep_ll_kernels and config.use_batched_activation_format and not config.use_mori_kernels


def test_names_of_activations():
    """M222: a member is its name; "gelu_pytorch_tanh" is an alias, as in vLLM."""
    activation = torch_bridge.MoEActivation
    assert activation.from_str("gelu_pytorch_tanh") is activation.GELU_TANH and activation.SILU == "silu"
    assert activation.SILU.without_mul() is activation.SILU_NO_MUL.without_mul() is activation.SILU_NO_MUL
    assert activation.SWIGLUOAI.without_mul() is activation.SWIGLUOAI
    with pytest.raises(ValueError, match="expected one of"):
        activation.from_str("tanh")
