"""Expert load balancing as vLLM drives it: copies of experts, counts of their load, rows that move between ranks.

Layers are judged by the whole layer in float64, counts and turns of copies by NumPy.
"""

import itertools

import numpy as np
import pytest
import torch

import torch_bridge
from tests.support.cases.torch_ranks import (
    FACTOR,
    E,
    H,
    I,
    K,
    SimulatedGroup,
    T,
    arrays,
    assert_rows,
    reference,
    routing_of,
    run_ranks,
    tensors,
)
from tests.support.refusals import refuses

R = 3  # copies beyond the first of each expert
P = E + R
LAYOUTS = [dict(ep_size=2), dict(ep_size=4), dict(ep_size=2, tp_size=2), {}]
ROW_WORDS = ("gate_proj", "down_proj", "up_proj")  # in the order of make_expert_params_mapping
WORDS = dict(w1="gate_proj", w3="up_proj", w2="down_proj")
INITIAL = [0, 1, 2, 3, 4, 0, 1, 2]
MOVED = [3, 3, 1, 4, 0, 2, 3, 4]  # expert 3 is on three ranks of four, and twice on the first


def maps_of(experts):
    """(logical_to_physical_map (1, E, R + 1), logical_replica_count (1, E)) of the expert in each copy."""
    table, count = torch.full((1, E, R + 1), -1), torch.zeros((1, E), dtype=torch.long)
    for copy, expert in enumerate(experts):
        table[0, expert, count[0, expert]] = copy
        count[0, expert] += 1
    return table, count


def expected_load(ids, experts):
    """(P,) how often each copy is chosen: the row's hash, modulo the number of copies, as vLLM's kernel does."""
    load = np.zeros(P, np.int64)
    for row, chosen in enumerate(ids):
        for expert in chosen:
            copies = [copy for copy, held in enumerate(experts) if held == expert]
            load[copies[row * 2654435769 % 2**32 % len(copies)]] += 1
    return load


def checkpoint(factor=1.0, has_bias=True):
    p = arrays()
    pairs = {f"experts.{e}.{word}.weight": factor * p[w][e] for e in range(E) for w, word in WORDS.items()}
    if has_bias:
        pairs |= {f"experts.{e}.{word}.bias": p[f"b{w[1]}"][e] for e in range(E) for w, word in WORDS.items()}
    return [(name, torch.tensor(value, dtype=torch.float32)) for name, value in pairs.items()]


class Ranks:
    """All ranks of one layer with the state that vLLM's EplbState would give them."""

    def __init__(self, layout, load=None, **options):
        self.size = layout.get("tp_size", 1) * layout.get("ep_size", 1)
        options = dict(has_bias=True, reduce_results=True, params_dtype=torch.float32) | options
        self.layers = [
            torch_bridge.FusedMoE(
                E, K, H, I, enable_eplb=True, num_redundant_experts=R, process_group=group,
                tp_rank=rank % layout.get("tp_size", 1), ep_rank=rank // layout.get("tp_size", 1), **layout, **options,
            )
            for rank, group in enumerate(SimulatedGroup.make(self.size))
        ]  # fmt: skip
        self.load = [torch.zeros((1, P), dtype=torch.int32) for _ in self.layers]
        self.maps, self.experts = maps_of(INITIAL), INITIAL
        for layer, counts in zip(self.layers, self.load, strict=True):
            (load or (lambda layer: layer.load_weights(checkpoint())))(layer)
            layer.process_weights_after_loading()
            layer.set_eplb_state(0, counts, *self.maps)

    def __call__(self, x, z):
        return run_ranks(lambda rank: self.layers[rank](x, z), self.size)

    def move(self, experts):
        """Rows of every array to where ``experts`` want them, in place, as vLLM's rearrangement writes them."""
        own = [layer.get_expert_weights() for layer in self.layers]
        tp_size = self.layers[0].tp_size
        source = [self.experts.index(expert) for expert in experts]
        for tp_rank in range(tp_size):
            group = own[tp_rank::tp_size]
            for leaves in zip(*group, strict=True):
                rows = torch.cat([leaf.view(torch.uint8) for leaf in leaves])[source]
                for leaf, new in zip(leaves, rows.split(len(leaves[0])), strict=True):
                    leaf.view(torch.uint8).copy_(new)
        for kept, new in zip(self.maps, maps_of(experts), strict=True):
            kept.copy_(new)
        self.experts = experts


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(map(str, layout.values())) or "one")
@pytest.mark.parametrize("features", ["bias", "bias scale"])
@pytest.mark.sample(3)
def test_experts_move_while_ranks_serve(layout, features):
    """M64, M94, M103, M104, 4.7: the whole layer's output before and after; load is what NumPy counts."""
    options = dict(routed_scaling_factor=FACTOR, apply_routed_scale_to_output=True) if "scale" in features else {}
    ranks, (x, z) = Ranks(layout, **options), tensors(features)
    _, ids = routing_of(features.split(), x.double().numpy(), z.double().numpy())
    total = np.zeros(P, np.int64)
    for experts in (INITIAL, MOVED, INITIAL[::-1]):
        if experts is not INITIAL:
            ranks.move(experts)
        for found in ranks(x, z):
            assert_rows(found, reference(features))
        total += expected_load(ids, experts)
        for counts in ranks.load:
            np.testing.assert_array_equal(counts[0], total)
    for layer in ranks.layers:
        held = INITIAL[::-1][layer.ep_rank * layer.local_num_experts :][: layer.local_num_experts]
        part = np.split(arrays()["w2"], layer.tp_size, axis=2)[layer.tp_rank]
        np.testing.assert_array_equal(layer.state_dict()["w2_weight"], part[held].astype(np.float32))
        assert (layer.global_num_experts, layer.logical_num_experts) == (P, E)
        assert layer.moe_config.num_experts == P and layer.moe_parallel_config.enable_eplb


def test_a_map_without_its_move_is_another_layer():
    """What the other tests rest on: calls really read the map."""
    ranks, (x, z) = Ranks(dict(ep_size=2)), tensors("bias")
    for kept, new in zip(ranks.maps, maps_of(MOVED), strict=True):
        kept.copy_(new)
    with pytest.raises(AssertionError):
        assert_rows(ranks(x, z)[0], reference("bias"))


@pytest.mark.parametrize(
    "scheme", ["fp8_tensor", "fp8_block", "w4a16_g16_asym", "nvfp4_dynamic", "int8_w8a16", "mxfp4_a16", "w4a8_int8"]
)
@pytest.mark.sample(2)
def test_every_array_of_a_scheme_moves(scheme):
    """M29, M156, M168, M190, M214: bit for bit the parts of layers that never moved, scales and zero points too."""
    sizes = (E, K, 128, 128, torch.float32)
    rng = np.random.default_rng(0)
    shape = dict(gate_proj=(128, 128), up_proj=(128, 128), down_proj=(128, 128))
    pairs = [(f"experts.{e}.{w}.weight", torch.tensor(rng.standard_normal(s) * (e + 1) / 10).float())
             for e in range(E) for w, s in shape.items()]  # fmt: skip
    x = torch.tensor(rng.standard_normal((T, 128)), dtype=torch.float32)
    weights = torch.tensor(rng.uniform(0.1, 1, (T, K)), dtype=torch.float32)

    def layer(**options):
        made = torch_bridge.FusedMoE(*sizes, quant_config=scheme, online=True, ep_size=2, **options)
        made.load_weights(pairs)
        made.process_weights_after_loading()
        return made

    ranks = Ranks.__new__(Ranks)
    ranks.layers = [layer(enable_eplb=True, num_redundant_experts=R, ep_rank=rank) for rank in range(2)]
    ranks.maps, ranks.experts = maps_of(INITIAL), INITIAL
    ranks.move(MOVED)
    reloaded = [layer(enable_eplb=True, num_redundant_experts=R, ep_rank=rank) for rank in range(2)]
    for one in reloaded:
        one.set_eplb_state(0, torch.zeros((1, P), dtype=torch.int32), *maps_of(MOVED))
        one.reload_weights(pairs)  # into the places where copies lie now
    ids = torch.tensor(np.stack([rng.permutation(P)[:K] for _ in range(T)]), dtype=torch.int32)
    for moved, expected in zip(ranks.layers, reloaded, strict=True):
        for found, wanted in zip(moved.get_expert_weights(), expected.get_expert_weights(), strict=True):
            assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))
        assert torch.equal(
            moved.quant_method.apply(moved, x, weights, ids), expected.quant_method.apply(expected, x, weights, ids)
        )


def by_rows(layer):
    """vLLM's way: rows of the mapping, one for each copy."""
    names = torch_bridge.FusedMoE.make_expert_params_mapping(None, *ROW_WORDS, E, R)
    layer.expert_mapping = names
    assert layer.load_weights(checkpoint(has_bias=False)) == {"w13_weight", "w2_weight"}


def by_parameters(layer):
    """The same with the model's loop: weight_loader takes ids of copies."""
    parameters, pairs = dict(layer.named_parameters()), dict(checkpoint(has_bias=False))
    names = torch_bridge.FusedMoE.make_expert_params_mapping(None, *ROW_WORDS, E, R)
    for prefix, fragment, copy, shard in names:
        parameter = parameters[prefix.removeprefix("experts.") + "weight"]
        name = fragment + "weight"
        held = parameter.weight_loader(parameter, pairs[name], name, shard, copy, return_success=True)
        assert held == (layer.ep_rank == copy // (P // 2))


def by_fused_tensors(layer):
    p = arrays()
    both = np.concatenate([p["w1"], p["w3"]], 1)
    named = dict(gate_up_proj=both, down_proj=p["w2"])
    layer.load_weights((f"experts.{name}", torch.tensor(value).float()) for name, value in named.items())


@pytest.mark.parametrize("load", [by_rows, by_parameters, by_fused_tensors])
def test_ways_of_loading(load):
    """M65, M68, 4.5: every copy of an expert gets its tensors."""
    ranks, (x, z) = Ranks(dict(ep_size=2), load=load, has_bias=False), tensors("")
    for found in ranks(x, z):
        assert_rows(found, reference(""))


def test_reload_after_a_move():
    """Experts go where their copies lie by then; a mapping's rows, which say where they began, change nothing."""
    for mapping in (None, torch_bridge.FusedMoE.make_expert_params_mapping(None, *ROW_WORDS, E, R)):
        ranks, (x, z) = Ranks(dict(ep_size=2), has_bias=False, load=by_fused_tensors), tensors("")
        ranks.move(MOVED)
        doubled = [(name, 2 * value) if "down" in name else (name, value) for name, value in checkpoint(has_bias=False)]
        for layer in ranks.layers:
            layer.expert_mapping = mapping
            layer.reload_weights(doubled)
        for found in ranks(x, z):
            assert_rows(found, 2 * reference(""))


def test_what_is_counted():
    """Only while should_record_tensor says so; calls without tokens and several calls add up."""
    ranks, (x, z) = Ranks({}), tensors("bias")
    (layer,), (counts,) = ranks.layers, ranks.load
    layer.eplb_state.should_record_tensor = torch.zeros((), dtype=torch.bool)
    layer(x, z)
    assert counts.sum() == 0
    layer.eplb_state.should_record_tensor.fill_(True)
    layer(x, z), layer(x[:2], z[:2]), layer(x[:0], z[:0])
    assert counts.sum() == (T + 2) * K
    weights, ids = layer.select_experts(x, z)
    assert ids.dtype == torch.int32 and counts.sum() == (2 * T + 2) * K
    held = torch.tensor(INITIAL)[ids]
    _, chosen = routing_of([], x.double().numpy(), z.double().numpy())
    np.testing.assert_array_equal(held, chosen)
    y = layer.quant_method.apply_monolithic(layer, x, z)
    assert_rows(y, reference("bias"))
    assert torch.equal(layer.quant_method.apply(layer, x, weights, ids), y)


def test_ids_outside_the_layer():
    """Ids that are no expert stay -1 and are not counted, as in vLLM's kernel."""
    state = torch_bridge.EplbLayerState()
    load, maps = torch.zeros((1, P), dtype=torch.int32), maps_of(INITIAL)
    state.set_layer_state(0, load, *maps)
    ids = torch.tensor([[-1, 0], [E, 4], [99, 1]], dtype=torch.int32)
    found = state.to_physical(ids)
    assert found[:, 0].tolist() == [-1, -1, -1] and found.dtype == torch.int32
    turns = [row * 2654435769 % 2**32 for row in range(3)]
    expected = [[0, 5][turns[0] % 2], 4, [1, 6][turns[2] % 2]]
    assert found[:, 1].tolist() == expected
    assert load[0].nonzero().flatten().tolist() == sorted(expected) and load.sum() == 3


REFUSED = {
    "copies without load balancing": (dict(num_redundant_experts=1), ValueError, "needs enable_eplb"),
    "fewer copies": (dict(num_redundant_experts=-1), ValueError, "num_redundant_experts=-1, expected an integer >= 0"),
    "uneven": (dict(ep_size=2, num_redundant_experts=2), ValueError, "found 7 for ep_size=2"),
    "round robin": (dict(expert_placement_strategy="round_robin"), ValueError, "found placement 'round_robin'"),
    "zero experts": (dict(zero_expert_type="identity"), NotImplementedError, "zero_expert_type is not built"),
    "a method": (dict(quant_config="own"), NotImplementedError, "Own does not support EPLB"),
}


class Own(torch_bridge.FusedMoEMethodBase):
    def create_weights(self, layer, num_experts, hidden_size, intermediate_size_per_partition, **_): ...

    def get_fused_moe_quant_config(self, layer): ...


@pytest.mark.parametrize("case", REFUSED)
def test_constructor_refuses(case):
    options, error, message = REFUSED[case]
    options = dict(enable_eplb=case != "copies without load balancing", ep_rank=0) | options
    if "quant_config" in options:
        options["quant_config"] = Own()
    refuses(error, message, torch_bridge.FusedMoE, E, K, H, I, torch.float32, **options)


def test_calls_refuse():
    """A call before the maps, maps of another layer, an expert that is not there, and a conversion."""
    x, z = tensors("")
    layer = torch_bridge.FusedMoE(E, K, H, I, torch.float32, enable_eplb=True, num_redundant_experts=R)
    refuses(RuntimeError, "no processed weights", layer.get_expert_weights)
    with pytest.raises(ValueError, match="expert 5 is outside this layer's 5 experts"):
        layer.load_weights([("experts.5.gate_proj.weight", torch.zeros(I, H))])
    by_fused_tensors(layer)
    layer.process_weights_after_loading()
    refuses(ValueError, "pass them to set_eplb_state", layer, x, z)
    refuses(NotImplementedError, "enable_eplb", torch_bridge.to_nnx, layer)
    state = dict(
        expert_load_view=torch.zeros((1, P), dtype=torch.int32),
        logical_to_physical_map=maps_of(INITIAL)[0],
        logical_replica_count=maps_of(INITIAL)[1],
    )
    for name, tensor in itertools.product(state, (torch.zeros((1, 4), dtype=torch.int32), torch.zeros(P))):
        with pytest.raises(
            ValueError, match=rf"{name} is torch\.\w+ .* expected integers \(layers, {P if 'load' in name else E}"
        ):
            layer.set_eplb_state(0, **(state | {name: tensor}))
    with pytest.raises(ValueError, match="set_eplb_state needs enable_eplb=True"):
        torch_bridge.FusedMoE(E, K, H, I).set_eplb_state(0, **state)
