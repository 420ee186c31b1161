"""Act-order over tensor-parallel ranks: w2's columns belong to groups of the whole layer, whichever rank holds them.

The expected values are the whole layer's, dequantized and computed by NumPy in float64.
"""

import functools

import numpy as np
import pytest
import torch

import torch_bridge
from moe_jax import Scheme
from moe_jax.experts._choice import BACKENDS
from tests.support.cases.torch_ranks import SimulatedGroup, assert_rows, run_ranks

E, K, H, I, G, T = 3, 2, 32, 64, 16, 6  # noqa: E741
WORDS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
LAYOUTS = [
    {},
    dict(tp_size=2),
    dict(tp_size=4),
    dict(tp_size=8),  # a rank has half a group's number of columns
    dict(tp_size=2, ep_size=2),
    dict(ep_size=2),
]
# Bits, zero points, order of columns. "positions": g_idx is there and says nothing new; "unset": -1, as in old files.
FILES = [
    (4, False, "shuffled"),
    (4, True, "shuffled"),
    (8, True, "shuffled"),
    (4, True, "positions"),
    (4, True, "unset"),
]


def scheme_of(bits: int, has_zeros: bool, actorder: str | None = "group"):
    weights = dict(num_bits=bits, type="int", strategy="group", group_size=G, symmetric=not has_zeros)
    return Scheme.parse({"weights": weights | {"actorder": actorder}, "format": "pack-quantized"})


def packed(codes, bits):
    """Unsigned codes (..., n) in int32 words, the first in the lowest bits."""
    per_word = 32 // bits
    shifted = codes.reshape(*codes.shape[:-1], -1, per_word).astype(np.int64) << (bits * np.arange(per_word))
    return shifted.sum(-1).astype(np.uint32).view(np.int32)


@functools.cache
def checkpoint(bits, has_zeros, order):
    """({checkpoint name: array}, {(expert, shard): float64 matrix}, {(expert, shard): float64 bias})."""
    rng, tensors, matrices, biases = np.random.default_rng(0), {}, {}, {}
    for e in range(E):
        of_inputs = rng.permutation(H) // G
        for shard, word in WORDS.items():
            n, k = (H, I) if shard == "w2" else (I, H)
            groups = np.arange(k) // G
            if order == "shuffled":
                groups = rng.permutation(groups) if shard == "w2" else of_inputs
            codes = rng.integers(0, 1 << bits, (n, k))
            zeros = rng.integers(0, 1 << bits, (n, k // G)) if has_zeros else np.full((n, k // G), 1 << bits - 1)
            scale = rng.uniform(0.5, 2.0, (n, k // G)).astype(np.float32) / (1 << bits)
            matrices[e, shard] = (codes - zeros[:, groups]) * scale[:, groups].astype(np.float64)
            biases[e, shard] = rng.standard_normal(n).astype(np.float32)
            stored = dict(weight_packed=packed(codes, bits), weight_scale=scale, bias=biases[e, shard])
            stored["weight_g_idx"] = (np.full(k, -1) if order == "unset" else groups).astype(np.int32)
            stored["weight_shape"] = np.array([n, k])
            if has_zeros:
                stored["weight_zero_point"] = packed(zeros.T, bits).T
            tensors |= {f"experts.{e}.{word}.{name}": array for name, array in stored.items()}
    return tensors, matrices, biases


def pairs(tensors, has_bias=True):
    """In an order of their own, as torch tensors."""
    names = [name for name in np.random.default_rng(1).permutation(sorted(tensors)) if has_bias or "bias" not in name]
    return [(name, torch.from_numpy(tensors[name].copy())) for name in names]


def call():
    rng = np.random.default_rng(2)
    x, logits = rng.standard_normal((T, H)), rng.standard_normal((T, E))
    return torch.tensor(x, dtype=torch.float32), torch.tensor(logits, dtype=torch.float32)


def expected(matrices, biases, x, logits):
    """The layer in float64: softmax, top K, renormalized."""
    x, logits = x.double().numpy(), logits.double().numpy()
    y = np.zeros_like(x)
    scores = np.exp(logits)
    for t in range(T):
        ids = np.argsort(-scores[t])[:K]
        for e in ids:
            gate, up = (matrices[e, w] @ x[t] + biases[e, w] for w in ("w1", "w3"))
            hidden = gate / (1 + np.exp(-gate)) * up
            y[t] += scores[t, e] / scores[t, ids].sum() * (matrices[e, "w2"] @ hidden + biases[e, "w2"])
    return y


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join(map(str, layout.values())) or "whole")
@pytest.mark.parametrize("bits, has_zeros, order", FILES)
@pytest.mark.sample(3)
def test_ranks_are_the_whole_layer(layout, bits, has_zeros, order):
    """M126, M202, M203: a rank keeps its columns with their groups, and the scales and zero points of all groups."""
    tensors, matrices, biases = checkpoint(bits, has_zeros, order)
    size = layout.get("tp_size", 1) * layout.get("ep_size", 1)
    layers = []
    for rank, group in enumerate(SimulatedGroup.make(size)):
        layer = torch_bridge.FusedMoE(
            E, K, H, I, torch.float32, True, quant_config=scheme_of(bits, has_zeros), has_bias=True,
            process_group=group, tp_rank=rank % layout.get("tp_size", 1), **layout,
        )  # fmt: skip
        layer.load_weights(pairs(tensors))
        layer.process_weights_after_loading()
        layers.append(layer)
    x, logits = call()
    for found in run_ranks(lambda rank: layers[rank](x, logits), size):
        assert_rows(found, expected(matrices, biases, x, logits))
    part = I // layout.get("tp_size", 1)
    for layer in layers:
        assert layer.w2_weight_scale.shape == (layer.local_num_experts, H, I // G)
        assert layer.w2_weight_g_idx.shape == (layer.local_num_experts, part)
        assert layer.w2_weight_packed.shape == (layer.local_num_experts, H, part * bits // 32)
        again = torch_bridge.FusedMoE(
            E, K, H, I, torch.float32, quant_config=scheme_of(bits, has_zeros), has_bias=True,
            tp_rank=layer.tp_rank, ep_rank=layer.ep_rank, **layout,
        )  # fmt: skip
        again.load_state_dict(layer.state_dict())
        again.process_weights_after_loading()
        for name, leaf in layer.state_dict().items():
            assert torch.equal(again.state_dict()[name], leaf), name


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("bits, has_zeros, order", [(4, True, "shuffled"), (8, False, "shuffled")])
def test_methods_on_modules(tp_size, bits, has_zeros, order):
    """vLLM's method on modules of one's own: parameters of vLLM's shapes, filled by their weight_loader.

    ``load_full_w2`` is on the zero points too, where vLLM 0.24 leaves it out and cannot load such a checkpoint.
    """
    tensors, matrices, biases = checkpoint(bits, has_zeros, order)
    x, logits = call()
    scores = torch.softmax(logits, -1)
    weights, ids = torch.topk(scores, K)
    weights, total = weights / weights.sum(-1, keepdim=True), 0.0
    for rank in range(tp_size):
        module = torch.nn.Module()
        module.top_k, module.has_bias = K, False
        module.moe_config = torch_bridge.FusedMoE(
            E, K, H, I, torch.float32, tp_size=tp_size, tp_rank=rank, process_group=SimulatedGroup.make(tp_size)[rank]
        ).moe_config
        group = dict(num_bits=bits, type="int", strategy="group", group_size=G, symmetric=not has_zeros)
        method = torch_bridge.CompressedTensorsWNA16MarlinMoEMethod(
            group | {"actorder": "group"}, None, module.moe_config
        )
        method.create_weights(module, E, H, I // tp_size, torch.float32, intermediate_size_full=I)
        parameters = dict(module.named_parameters())
        assert parameters["w2_weight_scale"].shape == (E, I // G, H)
        kept_whole = {name for name, parameter in parameters.items() if parameter.load_full_w2}
        assert kept_whole == {"w2_weight_scale"} | ({"w2_weight_zero_point"} if has_zeros else set())
        for name, tensor in pairs(tensors, has_bias=False):
            _, e, word, leaf = name.split(".")
            shard = next(shard for shard in WORDS if WORDS[shard] == word)
            parameter = parameters[f"{'w2' if shard == 'w2' else 'w13'}_{leaf}"]
            parameter.weight_loader(parameter, tensor, name, shard, int(e))
        method.process_weights_after_loading(module)
        total = total + method.apply(module, x, weights, ids)
    assert_rows(total, expected(matrices, dict.fromkeys(biases, 0.0), x, logits))


def test_unset_groups_of_a_part():
    """-1 in a part of the columns does not tell which columns of the layer they are."""
    layer = torch_bridge.FusedMoE(
        E, K, H, I, torch.float32, quant_config=scheme_of(4, False), tp_size=2, tp_rank=1, process_group=None
    )
    layer.load_weights(pairs(checkpoint(4, False, "shuffled")[0], has_bias=False))
    layer.process_weights_after_loading()
    leaves = layer.state_dict()
    leaves["w2_weight_g_idx"] = torch.full_like(leaves["w2_weight_g_idx"], -1)
    with pytest.raises(RuntimeError, match=r"w2_weight_g_idx: expert 0 has group -1 at column 0, expected 0 to 3"):
        layer.load_state_dict(leaves)


def test_orders_that_are_no_act_order():
    """M202: "weight" and "static" leave groups where they are, so w2's scales are cut with its columns."""
    for actorder in ("weight", "static", None):
        layer = torch_bridge.FusedMoE(
            E, K, H, I, torch.float32, quant_config=scheme_of(4, False, actorder), tp_size=2, tp_rank=0
        )
        assert layer.w2_weight_scale.shape == (E, H, I // G // 2)


@pytest.mark.parametrize("order", ["positions", "shuffled"])
def test_kernels_take_whole_matrices(order):
    """The kernels' layout has one scale for each run of columns; the first rank's columns may look as if they had."""
    layer = torch_bridge.FusedMoE(
        E, K, H, I, torch.bfloat16, quant_config=scheme_of(4, True), tp_size=2, tp_rank=0, has_bias=True
    )
    tensors = {name: torch.from_numpy(array) for name, array in checkpoint(4, True, order)[0].items()}
    layer.load_weights(tensors.items())
    layer.process_weights_after_loading()
    reason = BACKENDS["hopper"].layout_refusal(layer.expert_weights, layer.local_config)
    assert reason == "w2 is a part of its matrix, with the groups of all parts; the kernel takes whole groups"
