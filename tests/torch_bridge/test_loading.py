"""Loading through the torch layer: vLLM's names, attributes and calls end in the bits that moe_jax loads."""

import copy
import os
import subprocess
import sys

import numpy as np
import pytest
import torch

import torch_bridge
from moe_jax.quantization import SCHEMES, method_for
from tests.support.cases.torch_bridge import (
    ALL_SCHEMES,
    ONE_OF_EACH,
    PREFIX,
    WORDS,
    E,
    H,
    I,
    as_torch,
    assert_same_weights,
    bits,
    bridge_layer,
    config,
    inputs,
    loaded_bridge,
    nnx_layer,
    of_rank,
    plain_arrays,
    stored_arrays,
    torch_pairs,
)
from tests.support.refusals import refuses

RANKS = [dict(tp_size=2, tp_rank=0), dict(tp_size=2, tp_rank=1), dict(ep_size=3, ep_rank=0), dict(ep_size=3, ep_rank=2)]
RANKS.append(dict(tp_size=2, tp_rank=1, ep_size=2, ep_rank=1))
ROUND_ROBIN = dict(ep_size=2, ep_rank=1, expert_placement_strategy="round_robin")
RANKED = ("fp8_tensor_static", "fp8_block", "nvfp4", "w4a16_g32_asym")
RANKED_SLOW = ("bf16", "int8_w8a16", "mxfp4_a16", "w4a8_int8", "fp8_channel", "w4a16_channel")
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ALL_SCHEMES if name not in ONE_OF_EACH]
PARAMS = {"w1": "w13_", "w3": "w13_", "w2": "w2_"}


@pytest.fixture(scope="module")
def whole():
    """moe_jax's weights for each scheme's checkpoint, made once."""
    known = {}

    def get(scheme):
        if scheme not in known:
            known[scheme] = nnx_layer(scheme, stored_arrays(scheme)).weights.get_value()
        return known[scheme]

    return get


def shuffled(pairs, seed):
    return [pairs[i] for i in np.random.default_rng(seed).permutation(len(pairs))]


@pytest.mark.parametrize("scheme", [*ONE_OF_EACH, *SLOW])
@pytest.mark.sample(4)
def test_weights_of_every_scheme_are_those_of_the_nnx_layer(scheme, whole):
    """Shuffled checkpoint in, equal bits; the state dict of the result loads into the same bits again."""
    layer = bridge_layer(scheme)
    layer.load_weights(shuffled(torch_pairs(stored_arrays(scheme)), 1))
    layer.process_weights_after_loading()
    assert_same_weights(layer.expert_weights, whole(scheme))
    again = bridge_layer(scheme)
    assert again.load_state_dict(layer.state_dict()).missing_keys == []
    again.process_weights_after_loading()
    assert_same_weights(again.expert_weights, whole(scheme))


@pytest.mark.parametrize("rank", [*RANKS, ROUND_ROBIN], ids=str)
@pytest.mark.parametrize("scheme", [*RANKED, *(pytest.param(s, marks=pytest.mark.slow) for s in RANKED_SLOW)])
@pytest.mark.sample(4)
def test_every_rank_holds_its_part(scheme, rank, whole):
    """M116, M122, M130, M131, M132, M126: through weight_loader, parameter by parameter, in any order."""
    layer = bridge_layer(scheme, **rank)
    parameters = dict(layer.named_parameters())
    used = 0
    for (expert, shard, suffix), array in shuffled(list(stored_arrays(scheme).items()), 2):
        param = parameters[PARAMS[shard] + suffix]
        name = f"{PREFIX}{PARAMS[shard]}{suffix}"
        used += param.weight_loader(param, as_torch(array), name, shard, expert, return_success=True)
    assert 0 < used
    layer.process_weights_after_loading()
    assert_same_weights(layer.expert_weights, of_rank(whole(scheme), layer.rank))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rank", [{}, *RANKS], ids=str)
def test_fused_tensors(rank, transposed):
    """M123: (E, 2I, H) and (E, H, 2I), whole or cut for a rank."""
    arrays = plain_arrays()
    gate_up = np.stack([np.concatenate([arrays[e, s, "weight"] for s in ("w1", "w3")]) for e in range(E)])
    down = np.stack([arrays[e, "w2", "weight"] for e in range(E)])
    pairs = [("experts.gate_up_proj", gate_up), ("experts.down_proj", down)][:: -1 if transposed else 1]
    layer = bridge_layer("bf16", **rank)
    layer.load_weights([(n, as_torch(a.swapaxes(1, 2) if transposed else a)) for n, a in pairs])
    layer.process_weights_after_loading()
    assert_same_weights(layer.expert_weights, of_rank(nnx_layer("bf16", arrays).weights.get_value(), layer.rank))


@pytest.mark.parametrize("rank", [{}, RANKS[3]], ids=str)
@pytest.mark.sample(2)
def test_biases(rank):
    """M136: biases are loaded, which vLLM's loader refuses; quantized online or not."""
    arrays = plain_arrays(bias=True)
    layer = loaded_bridge("bf16", arrays, has_bias=True, **rank)
    expected = of_rank(nnx_layer("bf16", arrays, has_bias=True).weights.get_value(), layer.rank)
    assert_same_weights(layer.expert_weights, expected)
    online = loaded_bridge("int8_w8a16", arrays, has_bias=True, online=True, **rank)
    np.testing.assert_array_equal(online.expert_weights.w13_bias, expected.w13_bias)


def test_expert_mapping_and_loaded_names():
    """M109, M110: vLLM's rows translate names; the parameters that got something are returned."""
    rows = torch_bridge.make_expert_params_mapping(None, "linear", "linear_1", "linear_v", E)
    words = {"gate_proj": "linear", "up_proj": "linear_v", "down_proj": "linear_1"}
    layer = bridge_layer("fp8_channel", expert_mapping=rows)
    arrays, loaded = stored_arrays("fp8_channel"), set()
    for name, tensor in torch_pairs(arrays):
        loaded |= layer.load_weights([(name.replace(word := name.split(".")[-2], words[word]), tensor)])
    assert loaded == {"w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale"}
    layer.process_weights_after_loading()
    assert_same_weights(layer.expert_weights, nnx_layer("fp8_channel", arrays).weights.get_value())


@pytest.mark.parametrize("mapped", [False, True])
def test_names_relative_to_the_layer(mapped):
    """M110: vLLM's models hand over what follows the layer's own name, per expert or fused."""
    rows = torch_bridge.FusedMoE.make_expert_params_mapping(None, "gate_proj", "down_proj", "up_proj", E)
    assert rows[0] == ("experts.w13_", "experts.0.gate_proj.", 0, "w1") and len(rows) == 3 * E
    inner = torch_bridge.FusedMoE.make_expert_params_mapping(None, "w1", "w2", "w3", E, 1, "routed_experts")
    assert inner[-2:] == [
        ("experts.routed_experts.w2_", "experts.0.w2.", E, "w2"),
        ("experts.routed_experts.w13_", "experts.0.w3.", E, "w3"),
    ]
    arrays = plain_arrays()
    expected = nnx_layer("bf16", arrays).weights.get_value()
    stacked = [np.stack([arrays[e, s, "weight"] for e in range(E)]) for s in WORDS]
    fused = [("gate_up_proj", np.concatenate([stacked[0], stacked[1]], 1)), ("down_proj", stacked[2])]
    single = [(name.removeprefix(PREFIX), tensor) for name, tensor in torch_pairs(arrays)]
    for pairs in (single, [(name, as_torch(array)) for name, array in fused]):
        layer = bridge_layer("bf16", expert_mapping=rows if mapped else None)
        assert layer.load_weights([*pairs, ("norm.weight", torch.ones(3))]) == {"w13_weight", "w2_weight"}
        layer.process_weights_after_loading()
        assert_same_weights(layer.expert_weights, expected)


ONLINE = [
    name for name, s in SCHEMES.items() if s.is_quantized and not (s.activations and s.activations.needs_input_scale)
]


FEW_ONLINE = ("fp8_tensor", "fp8_block", "int8_w8a16", "mxfp8", "w4a16_g32")
SLOW_ONLINE = [pytest.param(name, marks=pytest.mark.slow) for name in ONLINE if name not in FEW_ONLINE]


@pytest.mark.parametrize("scheme", [*FEW_ONLINE, *SLOW_ONLINE])
@pytest.mark.sample(2)
def test_online_quantization_of_every_format(scheme):
    """M23, M25, M259: full precision in, the last tensor processes the layer, the bits are moe_jax's."""
    layer, arrays = bridge_layer(scheme, online=True), plain_arrays()
    assert layer.quant_method.uses_meta_device
    pairs = torch_pairs(arrays)
    layer.load_weights(pairs[:-1])
    refuses(RuntimeError, "no weights yet", layer, *inputs(2))
    layer.load_weights(pairs[-1:])
    assert_same_weights(layer.expert_weights, nnx_layer(scheme, arrays).weights.get_value())
    before = layer.expert_weights
    layer.process_weights_after_loading()
    assert layer.expert_weights.w13.data is before.w13.data


def test_static_schemes_are_not_for_online():
    refuses(ValueError, "needs input scales", bridge_layer, "nvfp4", online=True)


def test_processing_is_idempotent_and_names_what_is_missing():
    """M18: again and again; before that, one error with every missing part, and the rest can still come."""
    layer, pairs = bridge_layer("fp8_channel"), torch_pairs(stored_arrays("fp8_channel"))
    refuses(ValueError, "missing: .*all 4 experts", layer.process_weights_after_loading)
    layer.load_weights(pairs[1:])
    refuses(ValueError, r"missing: gate_proj\.weight of expert 0", layer.process_weights_after_loading)
    layer.load_weights(pairs[:1])
    layer.process_weights_after_loading()
    pointers = [p.data_ptr() for p in layer.parameters()]
    layer.process_weights_after_loading()
    assert pointers == [p.data_ptr() for p in layer.parameters()]
    old = layer.expert_weights
    layer.load_weights(pairs)  # the same again changes nothing
    assert_same_weights(layer.expert_weights, old)
    (name, tensor), *_ = pairs
    for other in (tensor.flip(0), tensor.view(torch.int8).add(1).view(tensor.dtype)):
        refuses(ValueError, "came twice with different values", layer.load_weights, [(name, other)])
    layer.load_state_dict(layer.state_dict())
    refuses(ValueError, "already processed; use reload_weights", layer.load_weights, pairs[:1])


@pytest.mark.parametrize("online", [False, True])
def test_repeated_tensors_are_loaded_once(online):
    """M22: in any place before and after the layer is processed; other values in the same place are an error."""
    scheme, arrays = "int8_w8a16", plain_arrays() if online else stored_arrays("int8_w8a16")
    pairs, expected = torch_pairs(arrays), loaded_bridge(scheme, arrays, online=online).expert_weights
    layer = bridge_layer(scheme, online=online)
    layer.load_weights([*pairs[:5], *pairs[3:7], *pairs, *pairs[:2]])
    layer.process_weights_after_loading()
    assert_same_weights(layer.expert_weights, expected)
    layer.reload_weights([*pairs, *pairs[-3:]])
    assert_same_weights(layer.expert_weights, expected)
    with pytest.raises(ValueError, match="came twice with different values"):
        layer.reload_weights([*pairs, (pairs[0][0], pairs[0][1] * 2)])
    assert_same_weights(layer.expert_weights, expected)


@pytest.mark.parametrize("scheme", ["fp8_block", "int8_w8a16"])
def test_reload(scheme):
    """New values, atomic: what is incomplete changes nothing; state dicts do the same to a processed layer."""
    layer = loaded_bridge(scheme, plain_arrays(0), online=True)
    expected = nnx_layer(scheme, plain_arrays(1)).weights.get_value()
    old = layer.expert_weights
    refuses(ValueError, "missing", layer.reload_weights, torch_pairs(plain_arrays(1))[:-1])
    assert layer.expert_weights.w13.data is old.w13.data
    layer.reload_weights(torch_pairs(plain_arrays(1)))
    assert_same_weights(layer.expert_weights, expected)
    saved = {name: leaf.clone() for name, leaf in layer.state_dict().items()}
    other = loaded_bridge(scheme, plain_arrays(2), online=True)
    other.load_state_dict(saved)
    assert_same_weights(other.expert_weights, expected)


def test_state_dict_of_full_precision_is_quantized():
    """A layer's own unquantized state dict under a quantizing scheme, before processing."""
    plain = loaded_bridge("bf16", plain_arrays())
    layer = bridge_layer("int8_w8a16", online=True)
    layer.load_state_dict(plain.state_dict())
    layer.process_weights_after_loading()
    assert_same_weights(layer.expert_weights, nnx_layer("int8_w8a16", plain_arrays()).weights.get_value())


def test_state_dict_errors():
    layer = loaded_bridge("fp8_channel", stored_arrays("fp8_channel"))
    state = dict(layer.state_dict())
    scale = state.pop("w2_weight_scale")
    with pytest.raises(RuntimeError, match=r"Missing key\(s\).*w2_weight_scale"):
        bridge_layer("fp8_channel").load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\).*w2_weight_zero_point"):
        bridge_layer("fp8_channel").load_state_dict(state | {"w2_weight_scale": scale, "w2_weight_zero_point": scale})
    with pytest.raises(RuntimeError, match="w2_weight_scale"):
        bridge_layer("fp8_channel").load_state_dict(state | {"w2_weight_scale": scale[:, :5]})
    half = bridge_layer("fp8_channel")
    half.load_weights(torch_pairs(stored_arrays("fp8_channel"))[:3])
    refuses(RuntimeError, "loaded but not processed", half.state_dict)


def gpt_oss_tensors():
    """MXFP4 as gpt-oss stores it: rows of gate and up alternate."""
    rng = np.random.default_rng(0)
    return {
        "gate_up_proj_blocks": rng.integers(0, 256, (E, 2 * I, H // 32, 16), np.uint8),
        "gate_up_proj_scales": rng.integers(110, 125, (E, 2 * I, H // 32), np.uint8),
        "gate_up_proj_bias": rng.standard_normal((E, 2 * I)).astype(np.float32),
        "down_proj_blocks": rng.integers(0, 256, (E, H, I // 32, 16), np.uint8),
        "down_proj_scales": rng.integers(110, 125, (E, H, I // 32), np.uint8),
        "down_proj_bias": rng.standard_normal((E, H)).astype(np.float32),
    }


@pytest.mark.parametrize("rank", [{}, RANKS[1], RANKS[2]], ids=str)
def test_gpt_oss_whole_leaves(rank):
    """M115: whole tensors without shard or expert, honouring ranks; the state dict is interleaved as vLLM's."""
    tensors = gpt_oss_tensors()
    options = dict(has_bias=True, activation="swigluoai", **rank)
    layer = bridge_layer("mxfp4_a16", **options)
    parameters = dict(layer.named_parameters())
    leaves = {"blocks": "weight_packed", "scales": "weight_scale", "bias": "bias"}
    for name, array in tensors.items():
        projection, _, kind = name.rpartition("_")
        leaf = f"{'w2' if projection == 'down_proj' else 'w13'}_{leaves[kind]}"
        array = array.reshape(E, array.shape[1], -1) if kind == "blocks" else array
        tensor = as_torch(array).bfloat16() if kind == "bias" else as_torch(array)
        assert parameters[leaf].weight_loader(parameters[leaf], tensor, name, None, None, return_success=True)
    layer.process_weights_after_loading()
    own = np.arange(E) if layer.rank.expert_map is None else np.flatnonzero(layer.rank.expert_map >= 0)
    for name, found in (("scales", layer.expert_weights.w13.scale), ("bias", layer.expert_weights.w13_bias)):
        for half in range(2):
            rows = tensors[f"gate_up_proj_{name}"][:, half::2]
            expected = np.split(rows, layer.tp_size, axis=1)[layer.tp_rank][own]
            np.testing.assert_array_equal(found[:, half], expected.astype(found.dtype))
    np.testing.assert_array_equal(
        layer.expert_weights.w2_bias, tensors["down_proj_bias"][own].astype(layer.expert_weights.w2_bias.dtype)
    )
    if rank:
        return
    state = layer.state_dict()
    assert bits(state["w13_weight_scale"]) == bits(tensors["gate_up_proj_scales"])
    assert bits(state["w13_weight_packed"]) == bits(tensors["gate_up_proj_blocks"].reshape(E, 2 * I, -1))
    again = bridge_layer("mxfp4_a16", **options)
    again.load_state_dict(state)
    again.process_weights_after_loading()
    assert_same_weights(again.expert_weights, layer.expert_weights)


def test_parameters_carry_what_loaders_read():
    """M224, 6.10: names, shapes and dtypes of the inventory; attributes that refuse to be set twice."""
    for scheme in (*ONE_OF_EACH, "fp8_channel"):
        layer, specs = bridge_layer(scheme), method_for(scheme).create_weights(config(scheme))
        parameters = dict(layer.named_parameters())
        assert {n for n in parameters if not n.endswith("weight_shape")} == set(specs)
        for name, spec in specs.items():
            parameter = parameters[name]
            shape = (E,) if name.endswith("_input_scale") else spec.shape  # gate and up share it, as in vLLM
            assert tuple(parameter.shape) == shape and parameter.is_meta and not parameter.requires_grad
            assert parameter.weight_loader == layer.weight_loader and parameter.is_transposed is False
            if spec.kind in ("tensor", "channel", "group", "block"):
                assert parameter.quant_method == spec.kind
            with pytest.raises(AssertionError, match="Overwriting existing tensor attribute: weight_loader"):
                torch_bridge.set_weight_attrs(parameter, {"weight_loader": None})
        scales = (f"{w}_input_scale" for w in ("w13", "w2"))
        assert all(name in specs or getattr(layer, name) is None for name in scales), scheme  # M12, M183
    packed = bridge_layer("w4a16_g32").w13_weight_packed
    assert packed.quant_method == "group" and packed.dtype == torch.int32


def test_a_replaced_parameter_keeps_what_loaders_read():
    """M225: the attributes stay; None takes the parameter away."""
    layer = bridge_layer("bf16")
    torch_bridge.replace_parameter(layer, "w2_weight", torch.ones(2))
    assert layer.w2_weight.tolist() == [1, 1] and not layer.w2_weight.requires_grad
    assert layer.w2_weight.leaf_name == "w2_weight" and layer.w2_weight.weight_loader == layer.weight_loader
    torch_bridge.replace_parameter(layer, "w2_weight", None)
    assert layer.w2_weight is None


def test_decisions_of_the_loader():
    """M119, M137, M139, M134 and what belongs to nobody."""
    layer = bridge_layer("bf16", ep_size=2, ep_rank=0)
    weight = torch.zeros(I, H, dtype=torch.bfloat16)
    w13, load = layer.w13_weight, layer.weight_loader
    assert load(w13, weight, "n", "w1", 3, return_success=True) is False
    assert load(w13, weight, "n", "w1", 0) is None
    assert load(w13, weight, "n", "w3", 0, return_success=True) is True
    refuses(ValueError, "shard_id='w9', expected one of", load, w13, weight, "n", "w9", 0)
    refuses(ValueError, "shard_id='w2' does not belong to w13_weight", load, w13, weight, "n", "w2", 0)
    refuses(ValueError, "expert 9 is outside", load, w13, weight, "n", "w1", 9)
    refuses(ValueError, "expected shape", load, w13, weight[:, :-1], "n", "w1", 1)
    with pytest.raises(ValueError, match="was not created by"):
        load(torch.nn.Parameter(torch.zeros(1)), weight, "n", "w1", 1)
    with pytest.raises(ValueError, match="on the meta device"):
        load(w13, weight.to("meta"), "n", "w1", 1)
    with pytest.raises(TypeError, match=r"complex64 is not supported"):
        load(w13, weight.to(torch.complex64), "n", "w1", 1)
    not_gated = bridge_layer("bf16", is_act_and_mul=False, activation="relu2")
    with pytest.raises(ValueError, match="w3 has no place in a layer that is not gated"):
        not_gated.weight_loader(not_gated.w13_weight, weight, "n", "w3", 0)
    for rank in ({}, RANKS[0], RANKS[2]):
        packed = bridge_layer("w4a16_g32", **rank)
        shape = packed.w2_weight_shape
        packed.weight_loader(shape, torch.tensor([float(H), float(I)]), "n", "w2", 0)
        with pytest.raises(ValueError, match=r"expected \[128, 256\] from config\.json"):
            packed.weight_loader(shape, torch.tensor([1.0, 2.0]), "n", "w2", 0)
    refuses(TypeError, r"pass its items\(\)", layer.load_weights, {})


def test_a_rank_that_quantizes_while_loading_has_all_of_its_experts_early():
    """Tensors of other ranks' experts may come after the last one of its own, which processed it."""
    pairs = torch_pairs(plain_arrays())
    for rank in range(3):
        layer = bridge_layer(torch_bridge.SchemeOnlineMoEMethod("fp8_tensor"), ep_size=3, ep_rank=rank)
        assert layer.load_weights(pairs) == {"w13_weight", "w2_weight"}
        assert layer.load_weights(pairs) == {"w13_weight", "w2_weight"}
        with pytest.raises(ValueError, match="came twice with different values"):
            layer.load_weights([(name, 2 * tensor) for name, tensor in pairs])


def test_dummy_weights():
    """M19: torch's uniform in +-1e-3 with seed 1234, as in vLLM; quantized as the scheme quantizes these values."""
    plain = bridge_layer("bf16")
    plain.load_dummy_weights()
    for weight in (plain.w13_weight, plain.w2_weight):
        generator = torch.Generator().manual_seed(1234)
        drawn = torch.empty(weight.shape, dtype=torch.bfloat16).uniform_(-1e-3, 1e-3, generator=generator)
        assert bits(weight) == bits(drawn)
    pairs = [
        (f"experts.{name}", leaf) for name, leaf in (("gate_up_proj", plain.w13_weight), ("down_proj", plain.w2_weight))
    ]
    for scheme in ("fp8_channel", "int8_w8a16"):
        layer, other, loaded = bridge_layer(scheme), bridge_layer(scheme), bridge_layer(scheme, online=True)
        layer.load_dummy_weights(), other.load_dummy_weights(), loaded.load_weights(pairs)
        assert_same_weights(layer.expert_weights, other.expert_weights)
        assert_same_weights(layer.expert_weights, loaded.expert_weights)


def test_copies_are_layers_of_their_own():
    """copy.deepcopy, processed or not: another name, other memory; loading one leaves the other alone."""
    layer = loaded_bridge("fp8_channel", plain_arrays(0), online=True)
    empty, twin = copy.deepcopy(bridge_layer("fp8_channel", online=True)), copy.deepcopy(layer)
    assert len({layer.layer_name, empty.layer_name, twin.layer_name}) == 3
    assert_same_weights(twin.expert_weights, layer.expert_weights)
    assert twin.w13_weight.data_ptr() != layer.w13_weight.data_ptr()
    twin.reload_weights(torch_pairs(plain_arrays(1)))
    for name, tensor in torch_pairs(plain_arrays(1)):
        *_, expert, word, _ = name.split(".")
        shard = {word: shard for shard, word in WORDS.items()}[word]
        param = empty.w2_weight if shard == "w2" else empty.w13_weight
        param.weight_loader(param, tensor, name, shard, int(expert))
    expected = [nnx_layer("fp8_channel", plain_arrays(seed)).weights.get_value() for seed in (0, 1, 1)]
    for one, weights in zip((layer, twin, empty), expected, strict=True):
        assert_same_weights(one.expert_weights, weights)
    x, z = inputs(2)
    assert torch.equal(twin(x, z), empty(x, z)) and not torch.equal(twin(x, z), layer(x, z))


def test_one_expert_in_full_precision_at_a_time():
    """M21: what is held while an online layer loads in checkpoint order is one expert beside the codes."""
    layer, held = bridge_layer("fp8_channel", online=True), []
    expert = 3 * H * I * 2  # bytes in bfloat16
    for name, tensor in torch_pairs(plain_arrays())[:-1]:
        layer.load_weights([(name, tensor)])
        held.append(layer.staged_bytes)
    codes = [e * (expert // 2 + 4 * (2 * I + H)) for e in range(E)]
    done = [i // 3 for i in range(1, len(held) + 1)]
    assert all(h <= codes[min(d, E - 1)] + expert for h, d in zip(held, done, strict=True))
    assert held[1] >= expert * 2 // 3 and max(held) < E * expert
    layer.load_weights(torch_pairs(plain_arrays())[-1:])
    assert layer.staged_bytes == 0


@pytest.mark.parametrize(("kind", "size", "rank"), [("tp", 2, 1), ("ep", 2, 1), ("ep", 4, 3)])
def test_sizes_and_ranks(kind, size, rank):
    """M99: what a layer says of its part is what it was built for."""
    layer = bridge_layer("bf16", **{f"{kind}_size": size, f"{kind}_rank": rank})
    given = (size, rank)
    assert (layer.tp_size, layer.tp_rank) == (given if kind == "tp" else (1, 0))
    assert (layer.ep_size, layer.ep_rank) == (given if kind == "ep" else (1, 0))
    assert layer.use_ep == (kind == "ep") and (layer.expert_map is None) == (kind == "tp")
    assert layer.local_num_experts == (E // size if kind == "ep" else E)
    assert layer.global_num_experts == layer.logical_num_experts == E
    assert repr(layer).startswith(
        f"FusedMoE(num_experts=4, local_num_experts={layer.local_num_experts}, top_k=2, hidden_size=128, "
        f"intermediate_size=256, scheme='bf16', tp_size={layer.tp_size}, ep_size={layer.ep_size}, "
        "reduce_results=False, method=UnquantizedFusedMoEMethod"
    )


def test_expert_map():
    """M85, M101, M216: the examples of the placement rules, and errors."""
    owned = lambda **o: [  # noqa: E731
        np.flatnonzero(torch_bridge.determine_expert_map(4, r, 10, **o)[1] >= 0).tolist() for r in range(4)
    ]
    assert owned() == [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9]]
    robin = owned(expert_placement_strategy="round_robin")
    assert robin == [[0, 4, 8], [1, 5, 9], [2, 6], [3, 7]]
    assert torch_bridge.determine_expert_map(1, 0, 10) == (10, None)
    assert torch_bridge.determine_expert_map(4, 3, 2)[0] == 0  # as in vLLM, more ranks than experts
    layer = bridge_layer("bf16", **ROUND_ROBIN)
    assert layer.expert_map.tolist() == [-1, 0, -1, 1] and layer.local_num_experts == 2 and layer.use_ep
    for call, error in (
        (lambda: torch_bridge.determine_expert_map(2, 0, 10, "random"), "expected one of 'linear', 'round_robin'"),
        (lambda: torch_bridge.determine_expert_map(2, 2, 10), "ep_rank=2, expected an integer from 0 to 1"),
        (lambda: bridge_layer("bf16", ep_size=5, ep_rank=0), "ep_size=5 for 4 experts"),
        (lambda: bridge_layer("bf16", tp_size=3, tp_rank=0), "does not divide by tp_size=3"),
        (lambda: bridge_layer("bf16").update_expert_map(), "no expert map to update"),
    ):
        refuses(ValueError, error, call)


MEASURE = """
import resource, torch, torch_bridge
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
torch_bridge.FusedMoE(4, 2, 128, 128, quant_config="fp8_channel")
before = peak()
layers = [torch_bridge.FusedMoE(256, 8, 4096, 2048, torch.bfloat16, quant_config="bf16") for _ in range(4)]
print(peak() - before, sum(p.numel() * p.element_size() for l in layers for p in l.parameters()) // 1024)
assert all(p.is_meta for l in layers for p in l.parameters())
"""


def test_creation_allocates_no_weight_memory():
    """Four layers of 12 GiB each: the process grows by less than a thousandth of that (in KiB)."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr
    grown, held = map(int, done.stdout.split())
    assert held == 4 * 12 * 1024**2 and grown < held / 1000
