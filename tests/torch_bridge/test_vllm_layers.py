"""Layers of vLLM's kind, as plain torch modules with its parameter names, to ours: every method, ranks, refusals."""

from types import SimpleNamespace

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs

import torch_bridge
from tests.support.cases.torch_bridge import (
    E,
    I,
    K,
    as_torch,
    assert_same_weights,
    bits,
    bridge_layer,
    inputs,
    loaded_bridge,
    nnx_layer,
    of_rank,
    plain_arrays,
    stored_arrays,
)

FP8 = dict(num_bits=8, type="float")
TOKEN = dict(strategy="token", dynamic=True)
# Scheme -> the class of vLLM's method and what it keeps of the config.
METHODS = {
    "bf16": ("UnquantizedFusedMoEMethod", {}),
    "fp8_channel": ("CompressedTensorsW8A8Fp8MoEMethod", (dict(FP8, strategy="channel"), dict(FP8, **TOKEN))),
    "fp8_tensor_static": (
        "CompressedTensorsW8A8Fp8MoEMethod",
        (dict(FP8, strategy="tensor"), dict(FP8, strategy="tensor", dynamic=False)),
    ),
    "int8_w8a8": (
        "CompressedTensorsW8A8Int8MoEMethod",
        (dict(num_bits=8, strategy="channel"), dict(num_bits=8, **TOKEN)),
    ),
    "w4a16_g32": ("CompressedTensorsWNA16MarlinMoEMethod", (dict(num_bits=4, strategy="group", group_size=32), None)),
    "w4a16_g32_asym": (
        "CompressedTensorsWNA16MoEMethod",
        (dict(num_bits=4, strategy="group", group_size=32, symmetric=False), None),
    ),
    "w4a8_int8_channel": (
        "CompressedTensorsW4A8Int8MoEMethod",
        (dict(num_bits=4, strategy="channel"), dict(num_bits=8, **TOKEN)),
    ),
    "nvfp4": ("CompressedTensorsW4A4Nvfp4MoEMethod", {"use_a16": False}),
    "nvfp4_a16": ("CompressedTensorsW4A4Nvfp4MoEMethod", {"use_a16": True}),
}


def method(scheme):
    name, kept = METHODS[scheme]
    if isinstance(kept, tuple):
        quants = [None if one is None else QuantizationArgs(**one) for one in kept]
        kept = dict(zip(("weight_quant", "input_quant"), quants, strict=True))
    return type(name, (), kept)()


def vllm_layer(leaves, quant_method, **attributes):
    """A module with parameters as vLLM registers them, made without the bridge."""
    layer = torch.nn.Module()
    for name, leaf in leaves.items():
        layer.register_parameter(name, torch.nn.Parameter(leaf, requires_grad=False))
    stated = dict(
        quant_method=quant_method,
        top_k=K,
        global_num_experts=E,
        intermediate_size_per_partition=I,
        params_dtype=torch.bfloat16,
        activation=SimpleNamespace(value="silu"),
        renormalize=True,
        scoring_func="softmax",
    )
    for name, value in (stated | attributes).items():
        setattr(layer, name, value)
    return layer


def leaves_of(scheme, own=range(E)):
    """The parameters of a checkpoint by stacking its tensors, expert by expert, gate over up."""
    arrays, leaves = stored_arrays(scheme), {}
    for suffix in sorted({suffix for _, _, suffix in arrays}):
        for prefix, shards in (("w13", ("w1", "w3")), ("w2", ("w2",))):
            experts = [[as_torch(arrays[e, shard, suffix]) for shard in shards] for e in own]
            stacked = [torch.stack(parts) if parts[0].ndim == 0 else torch.cat(parts) for parts in experts]
            leaf = torch.stack(stacked)
            is_single = leaf.ndim == 2 and leaf.shape[1] == 1
            leaves[f"{prefix}_{suffix}"] = leaf[:, 0] if is_single else leaf
    if "w13_input_scale" in leaves:  # (E,) in vLLM: gate and up share theirs
        leaves["w13_input_scale"] = leaves["w13_input_scale"].amax(-1)
    return leaves


@pytest.mark.parametrize("scheme", METHODS)
@pytest.mark.sample(2)
def test_every_method(scheme):
    """The method of the layer says what its parameters are; the weights are those of the nnx layer, bit for bit."""
    layer = vllm_layer(leaves_of(scheme), method(scheme))
    if scheme == "w4a16_g32":
        layer.register_parameter("w13_weight_shape", torch.nn.Parameter(torch.zeros(E, 2), requires_grad=False))
        layer.register_parameter("w13_weight_g_idx", torch.nn.Parameter(torch.zeros(E, 128), requires_grad=False))
    converted = torch_bridge.convert(layer)
    assert converted.config.scheme.name == scheme and converted.params_dtype == torch.bfloat16
    reference = loaded_bridge(scheme, stored_arrays(scheme))
    assert_same_weights(converted.expert_weights, reference.expert_weights)


def test_online_int8():
    """M36: scales under the names w13_scale and w2_scale."""
    source = loaded_bridge("int8_w8a16", plain_arrays(), online=True)
    leaves = {name.replace("_weight_scale", "_scale"): leaf for name, leaf in source.state_dict().items()}
    converted = torch_bridge.convert(vllm_layer(leaves, type("Int8OnlineMoEMethod", (), {})()))
    assert_same_weights(converted.expert_weights, source.expert_weights)


@pytest.mark.parametrize("scheme", ["nvfp4_a16", "w4a8_int8_channel"])
@pytest.mark.sample(2)
def test_processed_layers(scheme):
    """After vLLM's processing, under the names it leaves."""
    source = loaded_bridge(scheme, stored_arrays(scheme))
    converted = torch_bridge.convert(vllm_layer(source.processed_state_dict(), method(scheme)))
    assert bits(converted.state_dict()["w2_weight_scale"]) == bits(source.state_dict()["w2_weight_scale"])
    x, z = inputs(3, dtype=torch.float32)
    torch.testing.assert_close(converted(x, z), source(x, z), rtol=1e-2, atol=1e-2 * float(source(x, z).abs().max()))


@pytest.mark.parametrize("rank", [dict(ep_size=2, ep_rank=1), dict(tp_size=2, tp_rank=1)], ids=str)
def test_ranks(rank):
    """A layer of one rank holds that rank's part, and becomes ours of the same rank."""
    source = bridge_layer("fp8_channel", **rank)
    whole = nnx_layer("fp8_channel", stored_arrays("fp8_channel")).weights.get_value()
    source.install(of_rank(whole, source.rank))
    layer = vllm_layer(
        source.state_dict(),
        method("fp8_channel"),
        intermediate_size_per_partition=source.local_config.intermediate_size,
        **rank,
    )
    converted = torch_bridge.convert(layer)
    assert (converted.tp_rank, converted.ep_rank) == (source.tp_rank, source.ep_rank)
    assert_same_weights(converted.expert_weights, source.expert_weights)


def test_routing_is_taken_over():
    bias = torch.tensor([0.0, 3.0, -1.0, 0.5])
    routing = dict(scoring_func="sigmoid", e_score_correction_bias=bias, routed_scaling_factor=2.5)
    converted = torch_bridge.convert(vllm_layer(leaves_of("bf16"), method("bf16"), **routing))
    x, z = inputs(5)
    assert torch.equal(converted(x, z), loaded_bridge("bf16", stored_arrays("bf16"), **routing)(x, z))


def test_one_scale_for_gate_and_up():
    """Per-tensor FP8 as vLLM has it after processing: (E,) scales, which both projections share."""
    leaves = leaves_of("fp8_tensor_static")
    shared = leaves | {"w13_weight_scale": leaves["w13_weight_scale"].amax(-1)}
    both = leaves | {"w13_weight_scale": shared["w13_weight_scale"][:, None].expand(-1, 2).contiguous()}
    one, two = (torch_bridge.convert(vllm_layer(own, method("fp8_tensor_static"))) for own in (shared, both))
    assert_same_weights(one.expert_weights, two.expert_weights)


def test_refusals():
    leaves = leaves_of("fp8_channel")
    for layer, options, error, message in (
        (vllm_layer(leaves, None), {}, ValueError, "does not say how .* pass quant_config="),
        (vllm_layer(leaves, None), {"quant_config": "nvfp4"}, ValueError, "does not hold scheme 'nvfp4'"),
        (vllm_layer(leaves, None), {"quantize": "fp8"}, ValueError, "keeps its parameters"),
        (vllm_layer(leaves, method("fp8_channel"), top_k=None), {}, ValueError, "has no top_k"),
        (
            vllm_layer(leaves | {"w2_weight_scale": leaves["w2_weight_scale"][:1]}, method("fp8_channel")),
            {},
            ValueError,
            r"w2_weight_scale: found shape \(1, 128, 1\), expected \(4, 128, 1\)",
        ),
    ):
        with pytest.raises(error, match=message) as raised:
            torch_bridge.convert(layer, **options)
        assert "\n" not in str(raised.value)
    packed = vllm_layer(leaves_of("bf16"), method("bf16"))
    packed.w2_weight.use_bitsandbytes_4bit = True
    with pytest.raises(NotImplementedError, match="w2_weight: a parameter of bitsandbytes"):
        torch_bridge.convert(packed)
    with pytest.raises(ValueError, match="meta device"):
        torch_bridge.convert(vllm_layer({n: t.to("meta") for n, t in leaves.items()}, method("fp8_channel")))
