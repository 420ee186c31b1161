"""Ranks that share a layer, simulated in one process: their results are the whole layer's, computed in float64."""

import ml_dtypes
import numpy as np
import pytest
import torch

import torch_bridge
from moe_jax.quantization import dequantize_tensor
from tests.support.cases.torch_ranks import (
    FACTOR,
    LAYOUTS,
    E,
    H,
    I,
    SimulatedGroup,
    arrays,
    assert_rows,
    correction_of,
    is_renormalized,
    linear,
    modules_around,
    reference,
    routed_reference,
    routing_of,
    run_ranks,
    tensors,
    top_k_of,
    worst,
)

# What the layer has besides experts; every pair of features that may meet does so in one of them.
FEATURES = [
    "bias zero shared scale",
    "bias transforms partial scale",
    "bias transforms shared gated",
    "zero partial factor",
    "bias torch_routing partial gated factor",
    "bias zero input shared factor",
    "bias transforms input partial gated scale",
    "bias torch_routing input shared scale",
    "",
]


def layer_of(features, rank, group, reduce_results, *, quant_config=None, load=True, **layout):
    """One rank's layer, loaded through load_weights. rank: among all that share the layer."""
    p, words, size = arrays(), features.split(), layout.get("tp_size", 1) * layout.get("ep_size", 1)
    options = dict(has_bias="bias" in words, reduce_results=reduce_results, renormalize=is_renormalized(words))
    options |= dict(apply_router_weight_on_input="input" in words)
    if "zero" in words:
        bias = torch.tensor(correction_of(words), dtype=torch.float32)
        options |= dict(zero_expert_type="identity", e_score_correction_bias=bias)
    options |= modules_around(words, rank, size) | dict(has_partial_shared_experts="partial" in words)
    if "shared" in words:
        options |= dict(shared_experts=linear(p["shared"]))
    if "gated" in words:
        options |= dict(shared_expert_gate=linear(p["gate"]))
    if {"scale", "factor"} & set(words):
        options |= dict(routed_scaling_factor=FACTOR, apply_routed_scale_to_output="scale" in words)
    if "torch_routing" in words:
        options |= dict(custom_routing_function=worst)
    layer = torch_bridge.FusedMoE(
        E, top_k_of(words), H, I, torch.float32, quant_config=quant_config, process_group=group, **layout, **options
    )
    if not load:
        return layer
    names = dict(w1="gate_proj", w3="up_proj", w2="down_proj")
    pairs = [(f"experts.{e}.{name}.weight", p[w][e]) for e in range(E) for w, name in names.items()]
    if "bias" in words:
        pairs += [(f"experts.{e}.{name}.bias", p[f"b{w[1]}"][e]) for e in range(E) for w, name in names.items()]
    layer.load_weights((name, torch.tensor(value, dtype=torch.float32)) for name, value in pairs)
    layer.process_weights_after_loading()
    return layer


@pytest.mark.parametrize("features", FEATURES, ids=lambda text: text.replace(" ", "-") or "plain")
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(map(str, layout.values())))
@pytest.mark.sample(4)
def test_ranks_are_the_whole_layer(layout, features):
    """Each thing is added once: reduced on every rank, as parts that add up, and through select_experts and apply."""
    size = layout.get("tp_size", 1) * layout.get("ep_size", 1)
    x, z = tensors(features)
    groups = SimulatedGroup.make(size)
    layers = [layer_of(features, rank, group, True, **layout) for rank, group in enumerate(groups)]
    expected = reference(features)
    for found in run_ranks(lambda rank: layers[rank](x, z), size):
        assert_rows(found, expected)
    assert {group.sums for group in groups} == {2 if {"transforms", "partial"} <= set(features.split()) else 1}

    for layer in layers:
        layer.reduce_results = False
    if "transforms" in features:
        with pytest.raises(ValueError, match="routed_output_transform needs them"):
            layers[0](x, z)
    else:
        parts = [layer(x, z) for layer in layers]
        assert_rows(torch.stack(parts).sum(0), expected)

    expected = routed_reference(features, x.double().numpy(), z.double().numpy())
    in_steps, at_once = 0.0, 0.0
    for layer in layers:
        in_steps = in_steps + layer.quant_method.apply(layer, x, *layer.select_experts(x, z))
        at_once = at_once + layer.quant_method.apply_monolithic(layer, x, z)
    assert_rows(in_steps, expected)
    assert_rows(at_once, expected)


@pytest.mark.parametrize("features", FEATURES, ids=lambda text: text.replace(" ", "-") or "plain")
def test_whole_layers(features):
    """The same features on one rank, where sums over ranks are the identity, and the router's choice itself."""
    layer = layer_of(features, 0, None, False)
    x, z = tensors(features)
    assert_rows(layer(x, z), reference(features))
    weights, ids = layer.select_experts(x, z)
    expected_weights, expected_ids = routing_of(features.split(), x.double().numpy(), z.double().numpy())
    np.testing.assert_array_equal(ids, expected_ids)
    assert ("zero" in features) == bool((ids >= E).any()) and bool((ids < E).any())
    factor = FACTOR if "factor" in features else 1.0
    np.testing.assert_allclose(weights, expected_weights * factor, rtol=1e-5)
    routed = routed_reference(features, x.double().numpy(), z.double().numpy())
    assert_rows(layer.quant_method.apply(layer, x, weights, ids), routed)


@pytest.mark.parametrize(
    "features", ["zero shared scale", "zero factor", "bias zero input scale"], ids=lambda text: text.replace(" ", "-")
)
def test_methods_of_ones_own(features):
    """A method that computes in torch: the layer adds zero experts and the scale on the output around it, once.

    Biases of the expert that stands for a zero expert are not in the output.
    """

    class Own(torch_bridge.FusedMoEMethodBase):
        def create_weights(self, layer, num_experts, hidden_size, intermediate_size_per_partition, **_):
            own = np.arange(E) if layer.expert_map is None else np.flatnonzero(layer.expert_map.numpy() >= 0)
            names = ("w1", "w3", "w2", "b1", "b3", "b2")
            self.weights = [torch.tensor(arrays()[name][own], dtype=torch.float32) for name in names]

        def get_fused_moe_quant_config(self, layer):
            return None

        def apply(self, layer, x, topk_weights, topk_ids, shared_experts=None, shared_experts_input=None):
            assert int(topk_ids.max()) < E
            y = torch.zeros_like(x)
            for t in range(len(x)):
                for weight, e in zip(topk_weights[t], topk_ids[t], strict=True):
                    local = e if layer.expert_map is None else layer.expert_map[e]
                    if local >= 0:
                        gate, up, down, *biases = (array[local] for array in self.weights)
                        of_gate, of_up, of_down = (bias * layer.moe_config.has_bias for bias in biases)
                        on_input, on_output = (weight, 1) if layer.apply_router_weight_on_input else (1, weight)
                        row = on_input * x[t]
                        hidden = torch.nn.functional.silu(gate @ row + of_gate) * (up @ row + of_up)
                        y[t] += on_output * (down @ hidden + of_down)
            return y

    x, z = tensors(features)
    groups = SimulatedGroup.make(2)
    layers = [
        layer_of(features, rank, group, True, ep_size=2, quant_config=Own(), load=False)
        for rank, group in enumerate(groups)
    ]
    for found in run_ranks(lambda rank: layers[rank](x, z), 2):
        assert_rows(found, reference(features))


def rounded(x, element, axis):
    """x with the values that codes and a dynamic scale over ``axis`` keep of it."""
    scale = np.abs(x).max(axis, keepdims=True) / (127 if element == "int8" else 448)
    scaled = (x / np.where(scale == 0, 1, scale)).astype(np.float32)
    codes = np.rint(scaled) if element == "int8" else scaled.astype(ml_dtypes.float8_e4m3fn)
    return codes.astype(np.float64) * scale


@pytest.mark.parametrize(
    ("scheme", "axis", "layout"),
    [("int8_w8a8", 1, dict(tp_size=2)), ("fp8_tensor", None, dict(tp_size=2)), ("fp8_tensor", None, dict(ep_size=2))],
)
def test_dynamic_scales_are_of_the_ranks_own_part(scheme, axis, layout):
    """M52, M176: a rank rounds the rows that its experts get, and its part of I, by scales of those alone."""
    element = scheme[:4] if scheme.startswith("int8") else "e4m3"
    weights = [torch.tensor(arrays()[name], dtype=torch.float32) for name in ("w1", "w3", "w2")]
    names = ("gate_proj", "up_proj", "down_proj")
    pairs = [(f"experts.{e}.{name}.weight", w[e]) for e in range(E) for name, w in zip(names, weights, strict=True)]
    x, z = tensors("")
    x = x * torch.logspace(-1, 1, len(x))[:, None]  # rows of one rank have another range than all rows
    topk_weights, topk_ids = routing_of([], x.double().numpy(), z.double().numpy())

    def of_rank(layer):
        """The rank's part in float64, from the weights that it holds."""
        w13, w2 = (
            np.asarray(dequantize_tensor(w), np.float64) for w in (layer.expert_weights.w13, layer.expert_weights.w2)
        )
        own = range(E) if layer.expert_map is None else np.flatnonzero(layer.expert_map.numpy() >= 0)
        rows = [(t, k) for t in range(len(x)) for k in range(topk_ids.shape[1]) if topk_ids[t, k] in own]
        local = [list(own).index(topk_ids[row]) for row in rows]
        tokens = np.where([[any(e in own for e in chosen)] for chosen in topk_ids], x.double().numpy(), 0)
        tokens = rounded(tokens, element, axis)
        gate, up = (
            np.stack([w13[e, half] @ tokens[t] for e, (t, _) in zip(local, rows, strict=True)]) for half in (0, 1)
        )
        hidden = rounded(gate / (1 + np.exp(-gate)) * up, element, axis)
        y = np.zeros(x.shape)
        for e, (t, k), row in zip(local, rows, hidden, strict=True):
            y[t] += topk_weights[t, k] * (w2[e] @ row)
        return y

    def run(**ranks):
        layer = torch_bridge.FusedMoE(E, 2, H, I, torch.float32, quant_config=scheme, online=True, **ranks)
        layer.load_weights(pairs)
        layer.process_weights_after_loading()
        return layer(x, z).double().numpy(), of_rank(layer)

    (kind, size), found, expected = next(iter(layout.items())), 0.0, 0.0
    for rank in range(size):
        part = run(**layout, **{kind.replace("size", "rank"): rank})
        found, expected = found + part[0], expected + part[1]
    whole, whole_expected = run()
    assert_rows(torch.tensor(whole), whole_expected)
    assert_rows(torch.tensor(found), expected)
    with pytest.raises(AssertionError):  # no bound that any scale would meet
        assert_rows(torch.tensor(found), whole)
