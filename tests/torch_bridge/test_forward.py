"""Calling the torch layer: the nnx layer's bits, no copies on the way, gradients, compilation, refusals."""

import copy
import functools
import inspect
import os
import pickle
import select
import signal
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import moe_jax
import torch_bridge
from tests.support.cases.torch_bridge import (
    ALL_SCHEMES,
    ONE_OF_EACH,
    E,
    H,
    I,
    K,
    bits,
    bridge_layer,
    expected_bits,
    inputs,
    loaded_bridge,
    nnx_layer,
    plain_arrays,
    stored_arrays,
    torch_pairs,
)
from tests.support.refusals import refuses
from torch_bridge import _ops
from torch_bridge._tensors import to_arguments, to_jax, to_torch

SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ALL_SCHEMES if name not in ONE_OF_EACH]


@pytest.mark.parametrize("scheme", [*ONE_OF_EACH, *SLOW])
@pytest.mark.sample(4)
def test_output_is_the_nnx_layers_bit_for_bit(scheme):
    arrays = stored_arrays(scheme)
    layer, reference = loaded_bridge(scheme, arrays), nnx_layer(scheme, arrays)
    for tokens in (3, 19):
        x, z = inputs(tokens, seed=tokens)
        y = layer(x, z)
        assert y.shape == x.shape and y.dtype == x.dtype and y.abs().max() > 0
        assert bits(y) == expected_bits(reference, x, z)


def test_shapes_and_dtypes():
    """Leading axes, no tokens, one token, float16 and float32 activations of a bfloat16 layer."""
    layer = loaded_bridge("int8_w8a16", stored_arrays("int8_w8a16"))
    x, z = inputs(6)
    y = layer(x, z)
    assert torch.equal(layer(x.view(2, 3, H), z.view(2, 3, E)), y.view(2, 3, H))
    assert layer(x[:0], z[:0]).shape == (0, H)
    assert torch.equal(layer(x[:1], z[:1].bfloat16().float()), layer(x[:1], z[:1].bfloat16()))
    for dtype in (torch.float16, torch.float32):
        assert layer(x.to(dtype), z).dtype == dtype
    columns = torch.empty(6, 2 * H, dtype=x.dtype)[:, ::2].copy_(x)  # strides with gaps
    assert torch.equal(layer(columns, z), y)
    assert torch.equal(layer(x.T.contiguous().T, z), y)


def test_crossing_copies_nothing_that_it_need_not():
    """Bytes copied, by address: none for dense tensors of every dtype and for the layer's leaves, both ways."""
    copied = 0
    for name in ("float32", "bfloat16", "float16", "float8_e4m3fn", "uint8", "int8", "int32"):
        dtype = getattr(torch, name)
        tensor = torch.zeros(4, 64).to(dtype)
        array = to_jax(tensor)
        back = to_torch(array)
        copied += tensor.nbytes * (array.unsafe_buffer_pointer() != tensor.data_ptr())
        copied += tensor.nbytes * (back.data_ptr() != array.unsafe_buffer_pointer())
        copied += tensor.nbytes * (
            jax.device_put(to_arguments([tensor])[0]).unsafe_buffer_pointer() != tensor.data_ptr()
        )
        assert back.dtype == dtype
    assert copied == 0
    for scheme in ONE_OF_EACH:
        layer = loaded_bridge(scheme, stored_arrays(scheme))
        weights = jax.tree.leaves(layer.calls_for("moe").experts_tree.weights)
        addresses = {leaf.unsafe_buffer_pointer() for leaf in weights}
        for name, parameter in layer.named_parameters():
            assert parameter.data_ptr() in addresses or "input" in name, name


def test_what_has_to_be_copied():
    """Named in the module: 64-bit integers, memory off 64 bytes, strides with gaps; values survive."""
    base = torch.arange(129, dtype=torch.float32)
    for tensor in (torch.arange(6), base[1:], base[:128].view(2, 64)[:, ::2]):
        array = to_jax(tensor)
        assert array.unsafe_buffer_pointer() != tensor.data_ptr()
        np.testing.assert_array_equal(np.asarray(array), tensor.numpy())


def test_ids_beyond_32_bits_stay_out_of_range():
    extremes = torch.tensor([2**63 - 1, -(2**63), 2**32, 2**32 + 1, -(2**32), -1, 7])
    largest, least = 2**31 - 1, -(2**31)
    found = np.asarray(to_jax(extremes)).tolist()
    assert found == [largest, least, largest, largest, least, -1, 7]


def test_writing_into_x_after_the_call_changes_nothing():
    """x shares memory with the computation, so the call must be over when it returns."""
    layer = loaded_bridge("bf16", plain_arrays())
    x, z = inputs(16)
    expected = layer(x.clone(), z)
    for _ in range(5):
        scratch = x.clone()
        y = layer(scratch, z)
        scratch.fill_(float("nan"))
        assert torch.equal(y, expected)


@pytest.mark.parametrize("tokens", [3, 19])
@pytest.mark.parametrize("scheme", ["bf16", "int8_w8a16"])
@pytest.mark.sample(4)
def test_activation_gradients(scheme, tokens):
    """Of x and of the router logits, against torch's own autograd through the dequantized experts in float32."""
    arrays = plain_arrays()
    layer = torch_bridge.FusedMoE(E, K, H, I, torch.float32, quant_config=scheme, online=scheme != "bf16")
    layer.load_weights([(n, t.float()) for n, t in torch_pairs(arrays)])
    layer.process_weights_after_loading()
    x, z = inputs(tokens, dtype=torch.float32)
    cotangent = torch.randn(tokens, H, generator=torch.Generator().manual_seed(3))
    scale = [getattr(layer, f"{w}_weight_scale", torch.ones(1)) for w in ("w13", "w2")]
    w13, w2 = (getattr(layer, f"{w}_weight").float() * s for w, s in zip(("w13", "w2"), scale, strict=True))

    def by_torch(x, z):
        weights, ids = torch.topk(torch.softmax(z, -1), K)
        weights = weights / weights.sum(-1, keepdim=True)
        y = torch.zeros_like(x)
        for k in range(K):
            gate, up = torch.einsum("th,tih->ti", x, w13[ids[:, k]]).chunk(2, -1)
            out = torch.einsum("ti,thi->th", torch.nn.functional.silu(gate) * up, w2[ids[:, k]])
            y = y + weights[:, k, None] * out
        return y

    grads = []
    for function in (layer, by_torch):
        leaves = [t.clone().requires_grad_() for t in (x, z)]
        (function(*leaves) * cotangent).sum().backward()
        grads.append([leaf.grad for leaf in leaves])
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-5)


def test_gradients_of_experts_are_refused():
    layer = loaded_bridge("bf16", plain_arrays())
    layer.w2_weight.requires_grad_(True)
    refuses(RuntimeError, r"call layer\.requires_grad_\(False\)", layer, *inputs(2))


def test_second_derivatives_are_refused():
    layer = loaded_bridge("bf16", plain_arrays())
    x, z = (t.requires_grad_() for t in inputs(2))
    (first,) = torch.autograd.grad(layer(x, z).float().square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="first derivatives only"):
        first.float().sum().backward()


def test_compile_and_export():
    """One graph without breaks, dynamic numbers of tokens, gradients through the compiled graph; export too."""
    layer = loaded_bridge("int8_w8a16", stored_arrays("int8_w8a16"))
    block = torch.nn.Sequential()
    block.forward = lambda x, z: layer(x * 2, z) + x
    compiled = torch.compile(block.forward, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (4, 7):
        x, z = inputs(tokens)
        assert torch.equal(compiled(x, z), layer(x * 2, z) + x)
    leaves = [[t.clone().requires_grad_() for t in inputs(4)] for _ in range(2)]
    compiled(*leaves[0]).float().sum().backward()
    block.forward(*leaves[1]).float().sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(*leaves, strict=True))
    exported = torch.export.export(layer, inputs(4), strict=False)
    names = [str(node.target) for node in exported.graph.nodes if node.op == "call_function"]
    assert any("torch_bridge.fused_moe" in name for name in names)
    assert torch.equal(exported.module()(*inputs(4)), layer(*inputs(4)))


def test_inference_skips_the_dispatcher_and_nothing_else():
    """Without gradients the operator's function runs at once: same bits; what traces still sees the operator."""
    layer = loaded_bridge("int8_w8a16", stored_arrays("int8_w8a16"))
    x, z = inputs(4)
    expected, seen = layer(x, z), []
    with torch.no_grad():
        assert torch.equal(layer(x, z), expected)
        with torch.profiler.profile() as profile:
            layer(x, z)
        assert not any("torch_bridge" in event.name for event in profile.events())

        def backend(graph, example):
            seen.extend(str(node.target) for node in graph.graph.nodes)
            return graph.forward

        assert torch.equal(torch.compile(layer, fullgraph=True, backend=backend)(x, z), expected)
        with torch._subclasses.FakeTensorMode() as mode:
            assert layer(mode.from_tensor(x), mode.from_tensor(z)).shape == x.shape
    assert any("torch_bridge.fused_moe" in name for name in seen)


def test_operators_keep_torchs_rules():
    """torch.library.opcheck: schema, fake kernels, autograd registration, dispatch."""
    layer = loaded_bridge("int8_w8a16", stored_arrays("int8_w8a16"))
    x, z = (t.requires_grad_() for t in inputs(4))
    weights, ids = layer.select_experts(x.detach(), z.detach())
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(_ops.fused_moe_op, (x, z, None, None, layer.layer_name), test_utils=tests)
    torch.library.opcheck(_ops.fused_experts_op, (x, weights, ids, layer.layer_name), test_utils=tests)
    torch.library.opcheck(
        _ops.select_experts_op, (x.detach(), z.detach(), None, None, K, layer.layer_name), test_utils=tests
    )


@pytest.mark.parametrize("ranks", [dict(tp_size=2), dict(ep_size=3)], ids=str)
@pytest.mark.sample(2)
def test_parts_of_all_ranks_add_up(ranks):
    """Outputs of simulated ranks sum to the whole layer's, zero experts counted once; a rank without its group refuses
    to reduce."""
    arrays = stored_arrays("int8_w8a16")
    x, z = inputs(5)
    whole = loaded_bridge("int8_w8a16", arrays)(x.float(), z)
    (kind, size), total = next(iter(ranks.items())), 0.0
    for rank in range(size):
        own = {kind: size, kind.replace("size", "rank"): rank}
        total = total + loaded_bridge("int8_w8a16", arrays, **own)(x.float(), z)
    torch.testing.assert_close(total, whole, rtol=2e-2, atol=2e-2 * float(whole.abs().max()))
    zeros = dict(zero_expert_type="identity", e_score_correction_bias=torch.zeros(E + 2), routed_scaling_factor=2.5)
    zeros |= dict(apply_routed_scale_to_output=True, renormalize=False)
    to_zeros, total = torch.cat([z, torch.full((5, 2), 20.0)], 1), 0.0  # both picks of every token, about half each
    for rank in range(size):
        own = {kind: size, kind.replace("size", "rank"): rank}
        total = total + loaded_bridge("int8_w8a16", arrays, **zeros, **own)(x.float(), to_zeros)
    torch.testing.assert_close(total, 2.5 * x.float(), rtol=1e-4, atol=1e-4)
    with pytest.raises(RuntimeError, match=r"needs torch\.distributed"):
        loaded_bridge("int8_w8a16", arrays, reduce_results=True, **own)(x, z)


def test_routing_arguments():
    """Groups, sigmoid, correction bias that is loaded later, scaling: the nnx layer with the same arguments."""
    arrays = plain_arrays()
    bias = torch.nn.Parameter(torch.zeros(E), requires_grad=False)
    options = dict(
        scoring_func="sigmoid", use_grouped_topk=True, num_expert_group=2, topk_group=1, routed_scaling_factor=2.5
    )
    layer = loaded_bridge("bf16", arrays, e_score_correction_bias=bias, **options)
    assert "e_score_correction_bias" not in dict(layer.named_parameters())
    bias.data.copy_(torch.tensor([0.0, 3.0, -1.0, 0.5]))
    reference = moe_jax.FusedMoE(E, H, I, top_k=K, e_score_correction_bias=bias.numpy(), **options)
    reference.weights.set_value(layer.expert_weights)
    x, z = inputs(9)
    assert bits(layer(x, z)) == expected_bits(reference, x, z)
    weights, ids = layer.select_experts(x, z)
    torch.testing.assert_close(layer.quant_method.apply(layer, x, weights, ids), layer(x, z))


TABLE = torch.tensor([[0, 3], [2, 1], [1, 2]])
ARGUMENTS = [
    dict(renormalize=False),
    dict(top_k=1, apply_router_weight_on_input=True),
    dict(top_k=1, custom_routing_function="llama4"),
    dict(
        custom_routing_function=lambda **arguments: worst(arguments["gating_output"], arguments["topk"]),
        routing_framework="jax",
    ),
    dict(scoring_func="sqrtsoftplus"),
    dict(router_logits_dtype=torch.bfloat16),
    dict(renormalize=False, routed_scaling_factor=2.5, apply_routed_scale_to_output=True),
    dict(activation="gelu"),
    dict(activation="relu2_no_mul", is_act_and_mul=False),
    dict(activation="swigluoai", swiglu_limit=0.5, swiglu_alpha=1.3, swiglu_beta=0.7),
    dict(zero_expert_type="identity", e_score_correction_bias=torch.zeros(E + 2)),
    dict(scoring_func="sqrtsoftplus", hash_indices_table=TABLE),
]


def worst(logits, top_k):
    """The worst experts in place of the best, equally weighted."""
    _, ids = jax.lax.top_k(-logits, top_k)
    return jnp.full(ids.shape, 1 / top_k, jnp.float32), ids


@pytest.mark.parametrize("options", ARGUMENTS, ids=lambda options: "-".join(options))
def test_arguments_mean_what_they_mean_in_moe_jax(options):
    """M61 to M63, M70, M74, M77 to M79: the nnx layer's bits, and not those of a layer without the argument."""
    is_gated = options.get("is_act_and_mul", True)
    arrays = {key: array for key, array in plain_arrays().items() if is_gated or key[1] != "w3"}
    common = {"top_k": K} | options
    layer = torch_bridge.FusedMoE(
        E, hidden_size=H, intermediate_size=I, params_dtype=torch.bfloat16, quant_config="bf16", **common
    )
    pairs = torch_pairs(arrays)
    layer.load_weights(
        pairs if is_gated else [(name.replace("gate_proj", "up_proj"), tensor) for name, tensor in pairs]
    )
    layer.process_weights_after_loading()
    nnx_options = {key: value.numpy() if isinstance(value, torch.Tensor) else value for key, value in common.items()}
    nnx_options.pop("routing_framework", None)
    if "router_logits_dtype" in options:
        nnx_options["router_logits_dtype"] = "bfloat16"
    reference = moe_jax.FusedMoE(E, H, I, scheme="bf16", **nnx_options)
    reference.weights.set_value(layer.expert_weights)
    x, z = inputs(5)
    if "zero_expert_type" in options:
        z = torch.cat([z, z[:, :2] + 0.5], 1)
    ids = torch.tensor([2, 0, 1, 1, 0]) if "hash_indices_table" in options else None
    jax_ids = None if ids is None else jnp.asarray(ids.numpy(), jnp.int32)
    arguments = jnp.asarray(x.float().numpy()).astype(jnp.bfloat16), jnp.asarray(z.numpy())
    expected = jax.jit(lambda layer, x, z: layer(x, z, token_ids=jax_ids))(reference, *arguments)
    found = layer(x, z, ids)
    assert bits(found) == bits(np.asarray(expected))
    if is_gated and "zero_expert_type" not in options:
        assert not torch.equal(found, loaded_bridge("bf16", arrays)(x, z))


def test_params_dtype_is_torchs_default():
    try:
        torch.set_default_dtype(torch.float16)
        layer = torch_bridge.FusedMoE(E, K, H, I, has_bias=True)
    finally:
        torch.set_default_dtype(torch.float32)
    assert layer.params_dtype == layer.w13_weight.dtype == layer.w2_bias.dtype == torch.float16


def test_modules_around_the_experts():
    """gate, shared experts with their gate, transforms: torch modules, summed as the nnx layer sums."""
    torch.manual_seed(0)
    gate, shared, shared_gate = (torch.nn.Linear(H, n, bias=False) for n in (E, H, 1))
    doubled, halved = torch.nn.Module(), torch.nn.Module()
    doubled.forward, halved.forward = lambda t: t * 2, lambda t: t / 2
    options = dict(gate=gate, shared_experts=shared, shared_expert_gate=shared_gate)
    options |= dict(routed_input_transform=halved, routed_output_transform=doubled)
    layer = torch_bridge.FusedMoE(E, K, H, I, torch.float32, **options)
    plain = torch_bridge.FusedMoE(E, K, H, I, torch.float32)
    for one in (layer, plain):
        one.load_weights([(n, t.float()) for n, t in torch_pairs(plain_arrays())])
        one.process_weights_after_loading()
    x, _ = inputs(5, dtype=torch.float32)
    expected = plain(x / 2, gate(x)) * 2 + shared(x) * torch.sigmoid(shared_gate(x))
    torch.testing.assert_close(layer(x), expected)
    assert layer.is_internal_router and not plain.is_internal_router
    refuses(ValueError, "owns no gate", plain, x)


@pytest.mark.parametrize(
    "options, error, message",
    [
        (dict(quant_config="no_such"), ValueError, "unknown scheme 'no_such'"),
        (dict(quant_config=7), TypeError, "quant_config is a int"),
        (dict(scoring_func="max"), ValueError, "scoring_func='max'"),
        (dict(use_grouped_topk=True), ValueError, "num_expert_group"),
        (dict(activation="nope"), ValueError, "activation='nope'"),
        (dict(dp_size=2), NotImplementedError, "dp_size=2"),
        (dict(pcp_size=2), NotImplementedError, "pcp_size=2"),
        (dict(n_shared_experts=1), NotImplementedError, "n_shared_experts=1"),
        (dict(is_sequence_parallel=True), NotImplementedError, "is_sequence_parallel"),
        (dict(prefix="taken"), ValueError, "Duplicate layer name: taken"),
        (dict(shared_expert_gate=torch.nn.Identity()), ValueError, "without shared_experts"),
        (dict(tp_rank=1), ValueError, "outside tp_size=1"),
        (dict(torch_kernels=True, implementation="xla"), ValueError, "torch_kernels=True launches .*'hopper'"),
        (dict(renormalize="False"), TypeError, "renormalize='False', expected True or False"),
        (dict(online=1), TypeError, "online=1, expected True or False"),
        (dict(reduce_results="no"), TypeError, "reduce_results='no', expected True or False"),
        (dict(torch_kernels="auto"), TypeError, "torch_kernels='auto', expected True or False"),
        (dict(has_partial_shared_experts=None), TypeError, "has_partial_shared_experts=None, expected True or False"),
        (dict(gate=torch.ones(H, E)), TypeError, "gate=tensor.*, expected None, or a module or function"),
        (dict(shared_experts=5), TypeError, "shared_experts=5, expected None, or a module or function"),
        (dict(params_dtype=torch.zeros(())), TypeError, "params_dtype=tensor.*, expected a torch dtype"),
        (dict(device=1.5), TypeError, "device=1.5, expected a torch device"),
        (dict(tp_size=True), TypeError, "tp_size=True, expected an integer >= 1"),
        (dict(ep_rank=0.0), TypeError, "ep_rank=0.0, expected an integer >= 0"),
        (dict(expert_mapping=5), TypeError, "expert_mapping=5, expected rows of make_expert_params_mapping"),
        (dict(e_score_correction_bias=[0.0] * E), TypeError, "e_score_correction_bias is a list, expected a torch"),
        (dict(hash_indices_table=torch.zeros(3, K)), ValueError, "hash_indices_table is float32"),
        (dict(hash_indices_table=torch.full((3, K), 2**32)), ValueError, "hash_indices_table holds 2147483647"),
    ],
)
@pytest.mark.sample(6)
def test_constructor_refuses(options, error, message):
    other = bridge_layer("bf16", prefix="taken")
    with pytest.raises(error, match=message) as raised:
        inspect.unwrap(torch_bridge.FusedMoE.__init__)(object.__new__(torch_bridge.FusedMoE), E, K, H, I, **options)
    assert "\n" not in str(raised.value) and other is not None


def test_memory_settings(monkeypatch):
    """One warning where JAX would take the GPU, none where the user chose."""
    settings = ("XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_ALLOCATOR")
    for name in settings:
        monkeypatch.delenv(name, raising=False)
    with pytest.warns(UserWarning, match="JAX preallocates 75%.*XLA_PYTHON_CLIENT_PREALLOCATE=false"):
        _ops.warn_of_preallocation()
    for name, value in zip(settings, ("false", "0.3", "platform"), strict=True):
        with monkeypatch.context() as own, warnings.catch_warnings():
            warnings.simplefilter("error")
            own.setenv(name, value)
            _ops.warn_of_preallocation()


def test_call_refuses():
    layer = loaded_bridge("bf16", plain_arrays())
    x, z = inputs(3)
    for arguments, error, message in (
        ((x[:, :5], z), ValueError, r"expected \(T, 128\)"),
        ((x, z[:2]), ValueError, "x has 3 tokens"),
        ((x.to(torch.int32), z), ValueError, "expected a float dtype"),
        ((x.to("meta"), z), RuntimeError, "expected all tensors on cpu"),
        ((x[:0, :5], z[:0]), ValueError, r"expected \(T, 128\)"),
    ):
        refuses(error, message, _ops.fused_moe_op._init_fn, *arguments, None, None, layer.layer_name)
    refuses(TypeError, "experts keep params_dtype", layer.half)
    assert layer.to("cpu") is layer and layer.w2_weight.dtype == torch.bfloat16


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_what_is_no_tensor_with_rows_is_named():
    layer = loaded_bridge("bf16", plain_arrays())
    x, z = inputs(3)

    def nested(width, layout):
        return torch.nested.nested_tensor([torch.ones(rows, width) for rows in (2, 1)], layout=layout)

    assert torch.equal(layer(x._neg_view(), z._neg_view()), layer(-x, -z))
    for arguments, error, message in (
        ((None, z), TypeError, "x is a NoneType, expected a torch tensor"),
        ((np.zeros((3, H))[::-1], z), TypeError, "x is a ndarray, expected a torch tensor"),
        ((x, np.zeros((3, E))), TypeError, "router_logits is a ndarray"),
        ((x, z, [0, 1, 2]), TypeError, "input_ids is a list"),
        ((x.to_sparse(), z), TypeError, "x has layout torch.sparse_coo, expected torch.strided"),
        ((x[0, 0], z), ValueError, r"x has shape \(\), expected an axis at least"),
        ((nested(H, torch.strided), z), TypeError, "x is a nested tensor"),
        ((x, nested(E, torch.jagged)), TypeError, "router_logits is a nested tensor"),
        ((x, z, nested(1, torch.jagged)), TypeError, "input_ids is a nested tensor"),
    ):
        with pytest.raises(error, match=f"{layer.layer_name}: {message}"):
            inspect.unwrap(type(layer).forward)(layer, *arguments)
    for tensor in (nested(H, torch.strided), nested(H, torch.jagged), x.to_sparse()):
        with pytest.raises(TypeError, match="a tensor is nested or has layout"):
            bridge_layer("bf16").load_weights([("experts.0.w1.weight", tensor)])
    with pytest.raises(TypeError, match="router_logits is a NoneType, expected a torch tensor"):
        inspect.unwrap(type(layer).select_experts)(layer, x, None)
    with pytest.raises(TypeError, match="an input is a nested tensor"):
        layer.select_experts(x, z, input_ids=nested(1, torch.jagged))
    with pytest.raises(TypeError, match="x is a NoneType, expected a torch tensor"):
        inspect.unwrap(_ops.call)(_ops.select_experts_op, None, z, None, None, K, layer.layer_name)


class Function(torch.nn.Module):
    """A function as a module."""

    def __init__(self, function):
        super().__init__()
        self.forward = function


@pytest.mark.parametrize(
    "modules, error, message",
    [
        (dict(gate=Function(lambda x: None)), TypeError, "output of gate is a NoneType"),
        (
            dict(shared_experts=Function(lambda x: x[:, :1])),
            ValueError,
            r"output of shared_experts has shape \(3, 1\) on cpu",
        ),
        (
            dict(shared_experts=Function(lambda x: x.to("meta"))),
            ValueError,
            r"\(3, 128\) on meta, expected \(3, 128\) on cpu",
        ),
        (
            dict(shared_experts=Function(lambda x: x), shared_expert_gate=Function(lambda x: x)),
            ValueError,
            r"output of shared_expert_gate has shape \(3, 128\) on cpu, expected \(3, 1\) on cpu",
        ),
        (dict(routed_output_transform=Function(lambda y: 5)), TypeError, "output of routed_output_transform is a int"),
    ],
)
def test_outputs_of_modules_are_checked(modules, error, message):
    layer = loaded_bridge("bf16", plain_arrays(), **modules)
    refuses(error, message, layer, *inputs(3))


@pytest.mark.parametrize("scheme", ["bf16", "int8_w8a16"])
def test_no_tokens_are_checked_as_others_are(scheme):
    """Same error for 0 rows and for 3, in the layer, its router and its experts."""
    layer = loaded_bridge(scheme, stored_arrays(scheme))
    x, z = inputs(3)
    weights, ids = layer.select_experts(x, z)
    for call, arguments in (
        (layer, (x, z[:, : E - 1])),
        (layer.select_experts, (x, z[:, : E - 1])),
        (functools.partial(_ops.call, _ops.fused_experts_op), (x, weights, ids[:, :1], layer.layer_name)),
        (functools.partial(_ops.call, _ops.fused_experts_op), (x, weights, ids.float(), layer.layer_name)),
    ):
        errors = []
        for rows in (3, 0):
            with pytest.raises((ValueError, TypeError)) as caught:
                call(*[t[:rows] if isinstance(t, torch.Tensor) else t for t in arguments])
            errors.append(str(caught.value).replace("(3, ", "(T, ").replace("(0, ", "(T, "))
        assert errors[0] == errors[1]
    assert layer(x[:0], z[:0]).shape == (0, H)
    assert [t.shape for t in layer.select_experts(x[:0], z[:0])] == [(0, K)] * 2


@pytest.mark.parametrize("tokens", [0, 3])
@pytest.mark.parametrize("width", [0, 1, H - 1, H + 1, 2 * H])
def test_rows_of_another_width_are_refused(tokens, width):
    """Padding for methods that round sizes up would cut them or fill them up."""
    layer = loaded_bridge("bf16", stored_arrays("bf16"))
    _, z = inputs(tokens)
    refuses(ValueError, rf"x has shape \({tokens}, {width}\), expected \(T, {H}\)", layer, torch.ones(tokens, width), z)


@pytest.mark.filterwarnings("ignore:os.fork.*was called:RuntimeWarning", "ignore:.*use of fork.*:DeprecationWarning")
def test_a_forked_process_is_refused(capfd):
    """It has none of JAX's threads. A call that tried would never end; the parent stops waiting after 20 s."""
    layer = loaded_bridge("bf16", plain_arrays())
    x, z = inputs(3)
    expected = layer(x, z)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            calls = [lambda: layer(x, z), lambda: layer(x[:0], z[:0]), layer.load_dummy_weights]
            for run in (*calls, lambda: copy.deepcopy(layer), lambda: pickle.dumps(layer)):
                try:
                    run()
                except RuntimeError as error:
                    os.write(writing, f"{error}\n".encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        ready, _, _ = select.select([pipe], [], [], 20)
        if not ready:
            os.kill(child, signal.SIGKILL)
        lines = pipe.read().splitlines()
    os.waitpid(child, 0)
    assert len(lines) == 5 and all("was forked from one that uses JAX" in line for line in lines)
    assert lines[0].startswith(f"{layer.layer_name}: ") and torch.equal(layer(x, z), expected)


def test_a_module_around_it_keeps_quantized_leaves():
    """model.to(dtype it has), .eval(), deep state: FP8 codes are not cast on the way."""
    model = torch.nn.ModuleDict({"experts": loaded_bridge("fp8_channel", stored_arrays("fp8_channel"))})
    model.to(torch.bfloat16).eval()
    state = model.state_dict()
    assert state["experts.w13_weight"].dtype == torch.float8_e4m3fn
    assert state["experts.w13_weight_scale"].dtype == torch.float32
