"""vLLM's runners on several ranks to ours: what they compute together is the whole layer in float64.

Each case runs on objects with vLLM 0.24's attributes, and where vllm is installed on its own classes.
"""

import dataclasses
import importlib.util
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import torch_bridge
from tests.support.cases.torch_ranks import (
    FACTOR,
    LAYOUTS,
    E,
    H,
    I,
    K,
    SimulatedGroup,
    arrays,
    assert_rows,
    modules_around,
    output_transform,
    reference,
    routed_reference,
    run_ranks,
    tensors,
    worst,
)
from torch_bridge._moe_config import FusedMoEConfig, FusedMoEParallelConfig, MoEActivation, RoutingMethodType
from torch_bridge._rank import Rank

HAS_VLLM = importlib.util.find_spec("vllm") is not None
FEATURES = ["bias zero partial factor", "transforms partial scale", "bias torch_routing", "partial ignored"]
RANKS = [layout for layout in LAYOUTS if len({"tp_size", "ep_size"} & layout.keys()) == 1]  # vLLM has one of them


def leaves_of(rank, features):
    """The parameters of one rank, cut with NumPy; w2's bias is on every rank, as vLLM's own loader leaves it."""
    p, own = arrays(), np.arange(E) if rank.expert_map is None else np.flatnonzero(rank.expert_map >= 0)
    cut = lambda array: np.split(array, rank.tp_size, axis=1)[rank.tp_rank]  # noqa: E731
    leaves = dict(
        w13_weight=np.concatenate([cut(p["w1"]), cut(p["w3"])], 1)[own],
        w2_weight=np.split(p["w2"], rank.tp_size, axis=2)[rank.tp_rank][own],
    )
    if "bias" in features:
        leaves |= dict(w13_bias=np.concatenate([cut(p["b1"]), cut(p["b3"])], 1)[own], w2_bias=p["b2"][own])
    return {name: torch.tensor(leaf, dtype=torch.float32) for name, leaf in leaves.items()}


def parallel_config(rank, kind=FusedMoEParallelConfig):
    sizes = dict(tp_size=rank.tp_size, tp_rank=rank.tp_rank, ep_size=rank.ep_size, ep_rank=rank.ep_rank)
    alone = dict(pcp_size=1, pcp_rank=0, dp_size=1, dp_rank=0, sp_size=1, enable_eplb=False)
    return kind(**sizes, **alone, use_ep=rank.ep_size > 1, all2all_backend="allgather_reducescatter")


def modules_of(features, rank):
    """What a model hands to vLLM's FusedMoE beside sizes; its transform returns as vLLM's linear layers do."""
    place = max(rank.tp_rank, rank.ep_rank)
    return modules_around(features.split(), place, rank.size, lambda y: (output_transform(y), None))


def like_vllm(rank, features, monkeypatch):
    """A runner of modules and namespaces with the attributes of vLLM 0.24."""
    words, modules = features.split(), modules_of(features, rank)
    config = FusedMoEConfig(
        num_experts=E,
        experts_per_token=K,
        hidden_dim=H,
        intermediate_size=I,
        num_local_experts=rank.num_local_experts,
        num_logical_experts=E,
        activation=MoEActivation.SILU,
        device="cpu",
        routing_method=RoutingMethodType.Renormalize,
        moe_parallel_config=parallel_config(rank),
        in_dtype=torch.float32,
    )
    experts = torch.nn.Module()
    for name, leaf in leaves_of(rank, features).items():
        experts.register_parameter(name, torch.nn.Parameter(leaf, requires_grad=False))
    table = rank.expert_map
    experts.register_buffer("_expert_map", None if table is None else torch.from_numpy(table))
    stated = dict(layer_name="mlp.experts", moe_config=config, top_k=K, hidden_size=H, activation=config.activation)
    stated |= dict(intermediate_size_per_partition=config.intermediate_size_per_partition, renormalize=True)
    stated |= dict(global_num_experts=E, expert_placement_strategy=rank.strategy, params_dtype=torch.float32)
    stated |= dict(scoring_func="softmax", apply_router_weight_on_input=False)
    stated |= dict(routed_scaling_factor=FACTOR if {"factor", "ignored"} & set(words) else 1.0)
    stated |= dict(quant_method=type("UnquantizedFusedMoEMethod", (), {})(), swiglu_limit=None)
    router = dict(top_k=K, global_num_experts=E, eplb_state=None, capture_fn=None)
    kind = "FusedTopKRouter"
    if "zero" in words:
        kind, bias = "ZeroExpertRouter", torch.tensor(arrays()["correction"], dtype=torch.float32)
        router |= dict(e_score_correction_bias=bias, zero_expert_type="identity", num_logical_experts=E)
        router |= dict(routed_scaling_factor=FACTOR, renormalize=False, scoring_func="softmax")
    elif "torch_routing" in words:
        kind = "CustomRoutingRouter"
        router |= dict(custom_routing_function=worst, renormalize=True)
    else:
        router |= dict(scoring_func="softmax", renormalize=True)
    runner = torch.nn.Module()
    shared = modules.pop("shared_experts", None)
    runs = dict(layer_name="mlp.experts", moe_config=config, enable_dbo=False, _forward_entry=print)
    runs |= dict(routed_scaling_factor=FACTOR if "scale" in words else 1.0, gate=None, shared_expert_gate=None)
    runs |= dict(_shared_experts=None if shared is None else SimpleNamespace(_layer=shared), **modules)
    for part, attributes in ((experts, stated), (runner, runs)):
        for name, value in attributes.items():
            setattr(part, name, value)
    runner.routed_experts, runner.router = experts, type(kind, (), router)()
    vars(runner.router).update(router)
    return runner


def real_vllm(rank, features, monkeypatch):
    """vLLM's own FusedMoE() for one rank, filled by its weight loader."""
    from vllm.config import DeviceConfig, VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.layers.fused_moe import config as moe_config
    from vllm.model_executor.layers.fused_moe import layer as module

    if not parallel_state.model_parallel_is_initialized():
        with set_current_vllm_config(VllmConfig(device_config=DeviceConfig("cpu"))):
            parallel_state.init_distributed_environment(1, 0, "tcp://127.0.0.1:29517", 0, backend="gloo")
            parallel_state.initialize_model_parallel(1)
    own = parallel_config(rank, moe_config.FusedMoEParallelConfig)
    monkeypatch.setattr(module, "make_parallel_config", lambda **_: own)
    config = VllmConfig(device_config=DeviceConfig("cpu"))
    config.parallel_config.expert_placement_strategy = rank.strategy
    words, p = features.split(), arrays()
    options = dict(renormalize="zero" not in words, routed_scaling_factor=1.0, has_bias="bias" in words)
    if {"factor", "scale", "ignored"} & set(words):
        options |= dict(routed_scaling_factor=FACTOR, apply_routed_scale_to_output="scale" in words)
    if "zero" in words:
        bias = torch.nn.Parameter(torch.tensor(p["correction"], dtype=torch.float32), requires_grad=False)
        options |= dict(zero_expert_type="identity", e_score_correction_bias=bias)
    if "torch_routing" in words:
        options |= dict(custom_routing_function=worst)
    if rank.strategy == "round_robin":
        options |= dict(num_expert_group=2)  # vLLM places in turn where there are groups
    with set_current_vllm_config(config):
        runner = module.FusedMoE(
            E, K, H, I, torch.float32, prefix="mlp.experts", **options, **modules_of(features, rank)
        )
    experts = runner.routed_experts
    for expert in range(E):
        for shard in ("w1", "w3", "w2"):
            name = "w2_weight" if shard == "w2" else "w13_weight"
            loaded = torch.tensor(p[shard][expert], dtype=torch.float32)
            experts.weight_loader(getattr(experts, name), loaded, name, shard, expert)
    for name, leaf in leaves_of(rank, features).items():
        if name.endswith("bias"):
            getattr(experts, name).data.copy_(leaf)
    return runner


MAKERS = [like_vllm, real_vllm] if HAS_VLLM else [like_vllm]  # real ones: `make test-vllm`


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("features", FEATURES, ids=lambda text: text.replace(" ", "-"))
@pytest.mark.parametrize("layout", RANKS, ids=lambda layout: "-".join(map(str, layout.values())))
@pytest.mark.sample(3)
def test_runners_are_the_whole_layer(layout, features, make, monkeypatch):
    """Ranks, placement, router, scale, transforms and shared experts; the experts alone give the routed part.

    A factor that vLLM's router does not read ("ignored") has no effect.
    """
    size, ranks = next(iter(layout.values())), []
    strategy = layout.get("expert_placement_strategy", "linear")
    for at in range(size):
        place = dict(tp_size=size, tp_rank=at) if "tp_size" in layout else dict(ep_size=size, ep_rank=at)
        ranks.append(Rank(**place, num_experts=E, strategy=strategy))
    runners = [make(rank, features, monkeypatch) for rank in ranks]
    groups = SimulatedGroup.make(size)
    layers = [torch_bridge.convert(one, process_group=group) for one, group in zip(runners, groups, strict=True)]
    x, z = tensors(features)
    expected = reference(features)
    for found in run_ranks(lambda at: layers[at](x, z), size):
        assert_rows(found, expected)
    if features != "bias torch_routing":
        return
    parts = [torch_bridge.convert(runners[0].routed_experts, process_group=groups[0])]
    parts[0].torch_routing = worst
    own = [layer.quant_method.apply_monolithic(layer, x, z) for layer in (parts[0], *layers[1:])]
    assert_rows(torch.stack(own).sum(0), routed_reference(features, x.double().numpy(), z.double().numpy()))


def change(part, **values):
    for name, value in values.items():
        setattr(part, name, value)


def reconfigure(runner, **values):
    config = runner.routed_experts.moe_config
    config.moe_parallel_config = dataclasses.replace(config.moe_parallel_config, **values)


# What to change in a runner -> what the refusal names.
REFUSED = {
    "data parallel": (lambda r: reconfigure(r, dp_size=2), "dp_size=2"),
    "sequence parallel": (lambda r: reconfigure(r, sp_size=2), "is_sequence_parallel=True|sp_size=2"),
    "context parallel": (lambda r: reconfigure(r, pcp_size=2), "pcp_size=2"),
    "load balancing": (lambda r: reconfigure(r, enable_eplb=True), "enable_eplb=True"),
    "LoRA": (lambda r: change(r.routed_experts.moe_config, is_lora_enabled=True), "is_lora_enabled=True"),
    "padding": (
        lambda r: change(r.routed_experts.moe_config, hidden_dim_unpadded=H - 1),
        f"hidden_dim_unpadded={H - 1}",
    ),
    "a replica map": (lambda r: change(r.router, eplb_state=object()), "eplb_state=object"),
    "a recorder": (lambda r: change(r.router, capture_fn=print), "capture_fn=builtin_function_or_method"),
    "a new flag": (lambda r: change(r.routed_experts, twice_as_good=True), "twice_as_good=True"),
    "a new number": (lambda r: change(r.routed_experts, temperature=0.5), "temperature=0.5"),
    "a new module": (lambda r: change(r, adapter=torch.nn.Identity()), "adapter=Identity"),
    "another router": (lambda r: change(r, router=SimpleNamespace()), "routes by a SimpleNamespace"),
    "moved experts": (
        lambda r: r.routed_experts.register_buffer("_expert_map", torch.tensor([0, 1, 2, 4, 3])),
        r"expert map \[0, 1, 2, 4, 3\] is not that of rank 0 of 1",
    ),
    "scaled twice": (
        lambda r: (change(r, routed_scaling_factor=2.0), change(r, router=scaling_router())),
        "on the output, and a router that scales too",
    ),
    "fused shared experts": (lambda r: change(r, shared_expert_gate=torch.nn.Identity()), "shared_expert_gate"),
    "a gate behind a transform": (
        lambda r: change(r, gate=torch.nn.Identity(), routed_input_transform=torch.nn.Identity()),
        "vLLM routes transformed tokens",
    ),
    "half precision": (
        lambda r: (
            change(r, routed_scaling_factor=2.0, _shared_experts=SimpleNamespace(_layer=torch.nn.Identity())),
            change(r.moe_config, in_dtype=torch.float16),
        ),
        "shared experts in float16",
    ),
}


def scaling_router():
    kept = dict(scoring_func="sigmoid", renormalize=True, routed_scaling_factor=3.0)
    return type("FusedTopKBiasRouter", (), dict(kept, e_score_correction_bias=torch.zeros(E)))()


@pytest.mark.parametrize("change, message", REFUSED.values(), ids=REFUSED)
def test_what_does_not_convert_is_named(change, message, monkeypatch):
    """Every attribute that says something has a counterpart or a refusal; nothing is dropped."""
    runner = like_vllm(Rank(num_experts=E), "", monkeypatch)
    change(runner)
    with pytest.raises(NotImplementedError, match=message) as raised:
        torch_bridge.convert(runner)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("value, expected", [(None, False), (1, True)])
def test_a_config_that_says_nothing_does_not_renormalize(monkeypatch, value, expected):
    """As vLLM's router takes what a model passes on."""
    runner = like_vllm(Rank(num_experts=E), "", monkeypatch)
    runner.router.renormalize = value
    assert torch_bridge.convert(runner).config.renormalize is expected


def test_settings_of_the_activation_are_taken(monkeypatch):
    """swiglu_limit, alpha and beta, of the experts' own attributes."""
    runner = like_vllm(Rank(num_experts=E), "bias", monkeypatch)
    wanted = dict(swiglu_limit=0.5, swiglu_alpha=1.3, swiglu_beta=0.7)
    change(runner.routed_experts, activation="swigluoai_uninterleave", **wanted)
    layer = torch_bridge.convert(runner)
    x, z = tensors("")
    p, limits = arrays(), {"w1": (None, 0.5), "w3": (-0.5, 0.5)}
    weights, ids = layer.select_experts(x, z)
    y = torch.zeros(len(x), H, dtype=torch.float64)
    for t in range(len(x)):
        for weight, e in zip(weights[t], ids[t], strict=True):
            gate, up = (
                (torch.tensor(p[w][e] @ x[t].double().numpy() + p[b][e])).clamp(*limits[w])
                for w, b in (("w1", "b1"), ("w3", "b3"))
            )
            hidden = gate * torch.sigmoid(1.3 * gate) * (up + 0.7)
            y[t] += weight * (torch.tensor(p["w2"][e]) @ hidden + torch.tensor(p["b2"][e]))
    assert_rows(layer(x, z), y.numpy())


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("layout", RANKS[:2], ids=lambda layout: "-".join(map(str, layout.values())))
def test_our_layer_says_what_vllms_says(layout, make, monkeypatch):
    """What models and methods read of vLLM's experts, they read of ours."""
    kind, size = next(iter(layout.items()))
    rank = Rank(**{kind: size, kind.replace("size", "rank"): 1}, num_experts=E)
    theirs = make(rank, "", monkeypatch)
    ours = torch_bridge.convert(theirs, process_group=SimulatedGroup.make(size)[1])
    experts = theirs.routed_experts
    names = "top_k hidden_size intermediate_size_per_partition activation renormalize scoring_func global_num_experts "
    names += "apply_router_weight_on_input params_dtype expert_placement_strategy routed_scaling_factor swiglu_limit"
    for name in names.split():
        found, expected = getattr(ours, name), getattr(experts, name)
        assert getattr(found, "value", found) == getattr(expected, "value", expected), name
    assert ours.e_score_correction_bias is None and ours.num_experts == E
    config = experts.moe_config.moe_parallel_config
    for name in ("tp_size", "tp_rank", "ep_size", "ep_rank", "use_ep"):
        assert getattr(ours.moe_parallel_config, name) == getattr(config, name) == getattr(ours, name), name
    table = experts._expert_map
    assert ours.expert_map is None if table is None else torch.equal(ours.expert_map, table)
    assert ours.local_num_experts == experts.moe_config.num_local_experts
    assert (
        ours.must_reduce_shared_expert_outputs()
        and not torch_bridge.convert(
            like_vllm(rank, "partial", monkeypatch), process_group=SimulatedGroup.make(size)[1]
        ).must_reduce_shared_expert_outputs()
    )
