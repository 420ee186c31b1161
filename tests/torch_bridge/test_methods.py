"""The methods under their vLLM names: what they accept, their surface, and number formats and methods of one's own."""

import jax
import numpy as np
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs

import moe_jax
import torch_bridge
from tests.support.cases.torch_bridge import (
    E,
    H,
    I,
    K,
    bits,
    bridge_layer,
    call,
    inputs,
    loaded_bridge,
    plain_arrays,
    stored_arrays,
    torch_pairs,
)
from tests.support.refusals import refuses

FP8, INT4 = {"num_bits": 8, "type": "float"}, {"num_bits": 4, "type": "int"}
TOKEN = {"strategy": "token", "dynamic": True, "symmetric": True}
GROUPS = {"strategy": "group", "group_size": 128, "dynamic": True}
INT8_TOKEN = {"num_bits": 8, "type": "int", **TOKEN}
METHODS = {
    "fp8_channel": lambda: torch_bridge.CompressedTensorsW8A8Fp8MoEMethod(FP8 | {"strategy": "channel"}, FP8 | TOKEN),
    "nvfp4": lambda: torch_bridge.CompressedTensorsW4A4Nvfp4MoEMethod(),
    "nvfp4_a16": lambda: torch_bridge.CompressedTensorsW4A4Nvfp4MoEMethod(None, "experts", use_a16=True),
    "w4a8_int8_channel": lambda: torch_bridge.CompressedTensorsW4A8Int8MoEMethod(
        INT4 | {"strategy": "channel"}, INT8_TOKEN
    ),
    "w4a16_g32": lambda: torch_bridge.CompressedTensorsWNA16MarlinMoEMethod(
        INT4 | {"strategy": "group", "group_size": 32}, None
    ),
    "int8_w8a16": lambda: torch_bridge.Int8OnlineMoEMethod(layer=None),
}


PROPERTIES = (
    "is_monolithic",
    "supports_eplb",
    "supports_internal_mk",
    "topk_indices_dtype",
    "has_unpadded_output",
    "skip_forward_padding",
    "mk_can_overlap_shared_experts",
    "method_name",
    "use_global_sf",
)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.sample(6)
def test_methods_by_their_names(name):
    """The surface of each: scheme, properties, hooks that refuse, apply = route + experts = monolithic."""
    method = METHODS[name]()
    assert method.scheme.name == name and isinstance(method, torch_bridge.FusedMoEMethodBase)
    assert method.is_monolithic and method.supports_internal_mk and method.topk_indices_dtype == torch.int32
    assert method.supports_eplb and not (method.has_unpadded_output or method.skip_forward_padding)
    assert not (method.mk_can_overlap_shared_experts or method.uses_weight_scale_2_pattern())
    assert method.method_name == type(method).__name__
    assert method.use_global_sf == (name == "nvfp4")
    for read_only in PROPERTIES:
        refuses(AttributeError, "no setter", setattr, method, read_only, None)
    refuses(ValueError, rf"{type(method).__name__} uses its own kernels", method.maybe_make_prepare_finalize)
    with pytest.raises(ValueError, match=r"no GEMM to select"):
        method.select_gemm_impl(None, torch.nn.Module())
    layer = bridge_layer(method)
    layer.load_weights(torch_pairs(plain_arrays() if method.uses_meta_device else stored_arrays(name)))
    layer.process_weights_after_loading()
    x, z = inputs(4, dtype=torch.float32)
    weights, ids = layer.select_experts(x, z)
    assert ids.dtype == torch.int32 and ids.shape == (4, K)
    routed = method.apply_monolithic(layer, x, z)
    torch.testing.assert_close(method.apply(layer, x, weights, ids), routed)
    reference = moe_jax.FusedMoE(E, H, I, top_k=K, scheme=method.scheme)
    reference.weights.set_value(layer.expert_weights)
    expected = call(reference, x.numpy(), z.numpy(), None)
    torch.testing.assert_close(routed, torch.from_numpy(np.array(expected)))


def test_int8_online_exports_its_own_scale_names():
    """M35, M36: w13_scale (E, 2I) and w2_scale (E, H), parameters and state dict, out and in.

    They are the largest magnitude of a row over 127; codes times scales are rows.
    """
    layer, arrays = bridge_layer(torch_bridge.Int8OnlineMoEMethod(layer=None)), plain_arrays()
    layer.load_weights(torch_pairs(arrays))
    state = layer.state_dict()
    assert set(state) == set(dict(layer.named_parameters())) == {"w13_weight", "w13_scale", "w2_weight", "w2_scale"}
    for name, shards in (("w13", ("w1", "w3")), ("w2", ("w2",))):
        rows = np.stack([np.concatenate([arrays[e, s, "weight"] for s in shards]) for e in range(E)]).astype(np.float32)
        scale = state[f"{name}_scale"].numpy()
        np.testing.assert_array_equal(scale, np.abs(rows).max(-1) / np.float32(127))
        assert bits(getattr(layer, f"{name}_scale")) == bits(scale)
        assert (np.abs(state[f"{name}_weight"].numpy() * scale[..., None] - rows) <= scale[..., None] * 0.5001).all()
    again = bridge_layer(torch_bridge.Int8OnlineMoEMethod(layer=layer))
    again.load_state_dict(state)
    again.process_weights_after_loading()
    assert bits(again.w13_scale) == bits(state["w13_scale"]) and bits(again.w2_weight) == bits(state["w2_weight"])


def test_scheme_checks():
    """M157, M173, M175, M191: each method refuses what is another's, in one line."""
    w4a8, fp8 = torch_bridge.CompressedTensorsW4A8Int8MoEMethod, torch_bridge.CompressedTensorsW8A8Fp8MoEMethod
    wna16, channel = torch_bridge.CompressedTensorsWNA16MarlinMoEMethod, {"strategy": "channel"}
    for construct, message in (
        (lambda: w4a8(INT4 | channel, INT8_TOKEN | {"dynamic": False}), "have to be dynamic per token"),
        (lambda: w4a8(INT4 | channel | {"num_bits": 8}, INT8_TOKEN), "have to be 4 bits, found 8"),
        (lambda: fp8(FP8 | channel, FP8 | {"strategy": "tensor", "dynamic": False}), "static activation scales"),
        (lambda: fp8(INT4 | channel, None), "have to be 8-bit floats"),
        (lambda: wna16(INT4 | channel, INT8_TOKEN), "without quantized activations"),
        (lambda: torch_bridge.Int8OnlineMoEMethod(scheme="fp8_channel"), "expected 'int8_w8a16'"),
        (lambda: torch_bridge.OnlineMoEMethodBase(scheme="nvfp4"), "needs input scales"),
    ):
        with pytest.raises(ValueError, match=message) as raised:
            construct()
        assert "\n" not in str(raised.value)
    refuses(TypeError, "expected QuantizationArgs", fp8, 3, None)


def test_arguments_of_compressed_tensors():
    """Its own objects say the same as dicts."""
    args = QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=32)
    method = torch_bridge.CompressedTensorsWNA16MarlinMoEMethod(args, None)
    assert method.scheme.name == "w4a16_g32" and method.packed_factor == 8 and method.strategy == "group"


def test_methods_say_what_they_were_given():
    """M142, M158, M174, M192 to M194: the attributes that vLLM's methods have."""
    fp8, w4a8 = torch_bridge.CompressedTensorsW8A8Fp8MoEMethod, torch_bridge.CompressedTensorsW4A8Int8MoEMethod
    wna16 = torch_bridge.CompressedTensorsWNA16MarlinMoEMethod
    blocks = fp8(FP8 | {"strategy": "block", "block_structure": [128, 128]}, FP8 | GROUPS)
    assert (blocks.block_quant, blocks.weight_block_size, blocks.static_input_scales) == (True, (128, 128), False)
    static = fp8(FP8 | {"strategy": "tensor"}, FP8 | {"strategy": "tensor", "dynamic": False})
    assert (static.block_quant, static.weight_block_size, static.static_input_scales) == (False, None, True)
    for bits_per_weight, strategy in ((4, {"strategy": "channel"}), (8, {"strategy": "group", "group_size": 64})):
        method = wna16({"num_bits": bits_per_weight, "type": "int"} | strategy, None)
        assert (method.num_bits, method.packed_factor) == (bits_per_weight, 32 // bits_per_weight)
        assert (method.strategy, method.group_size) == (strategy["strategy"], strategy.get("group_size", -1))
        assert not method.actorder
    assert wna16(INT4 | {"strategy": "group", "group_size": 32, "actorder": "group"}, None).actorder
    assert wna16(INT4 | {"strategy": "channel", "symmetric": False}, None).scheme.name == "w4a16_channel_asym"
    assert w4a8(INT4 | {"strategy": "channel"}, INT8_TOKEN).group_size == -1
    assert w4a8(INT4 | {"strategy": "group", "group_size": 32}, INT8_TOKEN).group_size == 32
    assert METHODS["nvfp4_a16"]().use_a16 and not METHODS["nvfp4"]().use_a16


def test_parameters_are_replaced_or_written_in_place():
    """M225: attributes stay; with ``prefer_copy`` the address too, where shape, dtype and device allow it."""
    module = torch.nn.Module()
    module.register_parameter("w", torch.nn.Parameter(torch.zeros(2, 3), requires_grad=False))
    torch_bridge.set_weight_attrs(module.w, {"weight_loader": print})
    torch_bridge.set_weight_attrs(module.w, None)
    address = module.w.data_ptr()
    torch_bridge.replace_parameter(module, "w", torch.ones(2, 3), prefer_copy=True)
    assert module.w.data_ptr() == address and module.w.sum() == 6 and module.w.weight_loader is print
    for other in (torch.ones(2, 3), torch.ones(3, 2), torch.ones(2, 3).half()):
        torch_bridge.replace_parameter(
            module, "w", other, prefer_copy=other.shape != (2, 3) or other.dtype == torch.half
        )
        assert module.w.data_ptr() == other.data_ptr() and module.w.weight_loader is print
    torch_bridge.replace_parameter(module, "w", None)
    assert module.w is None


NATIVE = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


class Fp8Config:
    """As vLLM's, which is no dict."""

    activation_scheme, weight_block_size = "dynamic", [128, 128]


@pytest.mark.parametrize(
    "config", [NATIVE, torch_bridge.Fp8MoEMethod(Fp8Config()), "fp8_block"], ids=["dict", "object", "name"]
)
def test_scales_of_native_fp8_have_their_own_name(config):
    """M262: w13_weight_scale_inv, w2_weight_scale_inv: created, loaded, processed, in state dicts, out and in."""
    is_native = config != "fp8_block"
    suffix = "weight_scale_inv" if is_native else "weight_scale"
    layer, arrays = bridge_layer(config), stored_arrays("fp8_block")
    expected = {f"{w}_{what}" for w in ("w13", "w2") for what in ("weight", suffix)}
    assert set(dict(layer.named_parameters())) == expected
    assert getattr(layer, f"w13_{suffix}").quant_method == "block"
    pairs = [(name.replace("weight_scale", "weight_scale_inv"), tensor) for name, tensor in torch_pairs(arrays)]
    assert layer.load_weights(pairs) == expected
    layer.process_weights_after_loading()
    state = layer.state_dict()
    assert set(state) == set(dict(layer.named_parameters())) == expected
    for expert in range(E):
        assert bits(state[f"w2_{suffix}"][expert]) == bits(arrays[expert, "w2", "weight_scale"])
    again = bridge_layer(config)
    again.load_state_dict(state)
    again.process_weights_after_loading()
    assert bits(getattr(again, f"w13_{suffix}")) == bits(state[f"w13_{suffix}"])
    if is_native:
        method = layer.quant_method
        assert (method.weight_block_size, method.block_quant, method.weight_scale_name) == ([128, 128], True, suffix)


def test_native_fp8_per_tensor():
    """M262: scales per tensor keep their name; activations dynamic or static."""
    method = torch_bridge.Fp8MoEMethod({"quant_method": "fp8", "activation_scheme": "static"})
    assert method.scheme.name == "fp8_tensor_static" and method.weight_block_size is None and not method.block_quant
    layer = bridge_layer(method)
    assert (
        layer.w13_weight_scale.shape == (E, 2)
        and layer.w13_input_scale.shape == (E,)
        and method.moe is layer.moe_config
    )


def test_marlin_says_the_shapes_of_its_parameters():
    """M197: weight, scale and zp of both, transposed; groups are needed where a shape has them."""
    method = torch_bridge.CompressedTensorsWNA16MarlinMoEMethod(INT4 | {"strategy": "group", "group_size": 32}, None)
    call, groups = (E, H, I), dict(num_groups_w2=I // 32, num_groups_w13=H // 32)
    layer = bridge_layer(method)
    assert method.get_weight_shape("w13_weight", *call) == layer.w13_weight_packed.shape == (E, H // 8, 2 * I)
    assert method.get_weight_shape("w2_weight", *call) == layer.w2_weight_packed.shape == (E, I // 8, H)
    assert method.get_weight_shape("w13_scale", *call, **groups) == layer.w13_weight_scale.shape == (E, H // 32, 2 * I)
    assert method.get_weight_shape("w2_scale", *call, **groups) == layer.w2_weight_scale.shape == (E, I // 32, H)
    assert method.get_weight_shape("w13_zp", *call, **groups) == (E, H // 32, 2 * I // 8)
    assert method.get_weight_shape("w2_zp", *call, **groups) == (E, I // 32, H // 8)
    refuses(ValueError, "w2_scale: num_groups_w2 is missing", method.get_weight_shape, "w2_scale", *call)


@pytest.mark.parametrize("num_bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("hidden", "inner"), [(256, 320), (64, 36)])
def test_marlin_says_the_shapes_of_every_width(num_bits, hidden, inner):
    """M192, M197: 3-bit codes straddle words; gate and up have words of their own for zero points."""
    integers = INT4 | {"num_bits": num_bits, "strategy": "channel", "symmetric": False}
    method = torch_bridge.CompressedTensorsWNA16MarlinMoEMethod(integers, None)
    layer = torch_bridge.FusedMoE(E, K, hidden, inner, torch.bfloat16, quant_config=method)
    words = {count: int(np.ceil(count * num_bits / 32)) for count in (hidden, inner)}
    for name, rows, columns, projections in (("w13", hidden, inner, 2), ("w2", inner, hidden, 1)):
        weight = method.get_weight_shape(f"{name}_weight", E, hidden, inner)
        zero_point = method.get_weight_shape(f"{name}_zp", E, hidden, inner, 1, 1)
        assert weight == getattr(layer, f"{name}_weight_packed").shape == (E, words[rows], projections * columns)
        assert zero_point == getattr(layer, f"{name}_weight_zero_point").shape == (E, 1, projections * words[columns])


def test_activations_of_a_weight_only_checkpoint_may_be_quantized():
    """M195: by the name of the scheme; the packed weights stay what they are."""
    arrays = stored_arrays("w4a16_g32")
    plain, quantized = (loaded_bridge(scheme, arrays) for scheme in ("w4a16_g32", "w4a8_int8_g32_packed"))
    for leaf in ("w13_weight_packed", "w13_weight_scale", "w2_weight_packed", "w2_weight_scale"):
        assert bits(getattr(plain, leaf)) == bits(getattr(quantized, leaf))
    x, z = inputs(6, dtype=torch.float32)
    expected, found = plain(x, z), quantized(x, z)
    assert 1e-3 < (found - expected).norm() / expected.norm() < 0.03


@pytest.mark.parametrize("scheme", ["fp8_channel", "nvfp4_a16", "w4a16_g32_asym", "marlin"])
def test_expert_weights_as_rows(scheme):
    """M104: every per-expert array as (E, -1), in the parameters' memory: all of an expert moves with its rows.

    Judged by a layer that is loaded with the experts in another order.
    """
    arrays, order = stored_arrays("w4a16_g32" if scheme == "marlin" else scheme), np.array([2, 0, 3, 1])
    moved = {(int(np.argsort(order)[expert]), *rest): array for (expert, *rest), array in arrays.items()}
    made = METHODS["w4a16_g32"] if scheme == "marlin" else lambda: scheme
    layer, expected = loaded_bridge(made(), arrays), loaded_bridge(made(), moved)
    views = layer.get_expert_weights()
    assert {v.data_ptr() for v in views} == {p.data_ptr() for p in layer.parameters()}
    assert sum(v.nbytes for v in views) == sum(leaf.nbytes for leaf in jax.tree.leaves(layer.expert_weights))
    for view, other in zip(views, expected.get_expert_weights(), strict=True):
        assert view.shape == (E, view.numel() // E)
        assert bits(view.view(torch.uint8)[order]) == bits(other.view(torch.uint8))


@pytest.mark.parametrize("scheme", ["nvfp4", "nvfp4_a16"])
@pytest.mark.sample(2)
def test_nvfp4_as_vllm_has_it_after_processing(scheme):
    """8.13: weight, weight_scale, scales that multiply; either view loads, and the other layout reads this one."""
    arrays = stored_arrays(scheme)
    layer = loaded_bridge(scheme, arrays)
    state, stored = layer.processed_state_dict(), layer.state_dict()
    kinds = {"weight", "weight_scale", "weight_scale_2"} | ({"input_scale"} if scheme == "nvfp4" else set())
    assert set(state) == {f"{w}_{kind}" for w in ("w13", "w2") for kind in kinds}
    assert bits(state["w13_weight"]) == bits(stored["w13_weight_packed"])
    assert torch.equal(state["w2_weight_scale_2"], 1 / stored["w2_weight_global_scale"])
    again, modelopt = bridge_layer(scheme), bridge_layer(f"{scheme}_modelopt")
    for other in (again, modelopt):
        other.load_state_dict(state)
        other.process_weights_after_loading()
    for name, leaf in again.state_dict().items():
        if "global" in name:
            torch.testing.assert_close(leaf, stored[name], rtol=2.0**-23, atol=0)
        else:
            assert bits(leaf) == bits(stored[name]), name
    x, z = inputs(4, dtype=torch.float32)
    torch.testing.assert_close(modelopt(x, z), layer(x, z), rtol=1e-2, atol=1e-2 * float(layer(x, z).abs().max()))


@pytest.mark.parametrize("scheme", ["w4a8_int8", "w4a8_int8_channel"])
def test_w4a8_as_vllm_packs_it(scheme):
    """M164: code plus 8, the even column in the low nibble; loads back bit for bit."""
    layer = loaded_bridge(scheme, stored_arrays(scheme))
    state, stored = layer.processed_state_dict(), layer.state_dict()
    assert set(state) == {f"{w}_{kind}" for w in ("w13", "w2") for kind in ("weight_packed", "weight_scale")}
    for w in ("w13", "w2"):
        codes, packed = stored[f"{w}_weight"].numpy(), state[f"{w}_weight_packed"].numpy()
        assert packed.dtype == np.uint8 and packed.shape == (*codes.shape[:2], codes.shape[2] // 2)
        np.testing.assert_array_equal((packed % 16).astype(int) - 8, codes[..., ::2])
        np.testing.assert_array_equal((packed // 16).astype(int) - 8, codes[..., 1::2])
    again = bridge_layer(scheme)
    again.load_state_dict(state)
    again.process_weights_after_loading()
    assert all(bits(leaf) == bits(stored[name]) for name, leaf in again.state_dict().items())
