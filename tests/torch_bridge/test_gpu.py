"""The bridge on a GPU: the nnx layer's bits by default; through JAX's runtime no copies, stream order, shared memory.

Run with both platforms, without preallocation and in several processes, since every scheme compiles its kernels twice:
    XLA_PYTHON_CLIENT_PREALLOCATE=false JAX_PLATFORMS=cuda,cpu pytest -n 12 -m gpu tests/torch_bridge/test_gpu.py
Kernels on torch's own stream, and CUDA graphs, are in test_gpu_kernels.py.
"""

import os
import subprocess
import sys

import jax
import numpy as np
import pytest
import torch

import torch_bridge
from tests.support.cases.torch_bridge import (
    ALL_SCHEMES,
    E,
    H,
    I,
    K,
    bits,
    expected_bits,
    inputs,
    loaded_bridge,
    nnx_layer,
    plain_arrays,
    stored_arrays,
    torch_pairs,
)
from torch_bridge._tensors import to_jax, to_torch

pytestmark = pytest.mark.gpu

SLEEP = 1_000_000_000  # cycles of a kernel that does nothing: about half a second on an H200
DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "uint8", "int8", "int32")


@pytest.fixture(scope="module")
def layer():
    """One FP8 layer with its programs for 1 and 4 tokens compiled, and an input with its output."""
    layer = loaded_bridge("fp8_channel", stored_arrays("fp8_channel"), device="cuda", torch_kernels=False)
    for tokens in (1, 4):
        layer(*cuda_inputs(tokens))
    torch.cuda.synchronize()
    return layer


def cuda_inputs(tokens, seed=0):
    return tuple(tensor.cuda() for tensor in inputs(tokens, seed))


def allocated_by_torch():
    return torch.cuda.memory_stats()["allocated_bytes.all.allocated"]


@pytest.mark.parametrize("name", DTYPES)
def test_tensors_cross_without_a_copy(name):
    """Bytes copied, by address, both ways; values by way of JAX."""
    tensor = torch.arange(256, device="cuda").reshape(4, 64).remainder(7).to(getattr(torch, name))
    array = to_jax(tensor)
    back = to_torch(array)
    assert array.unsafe_buffer_pointer() == tensor.data_ptr() == back.data_ptr()
    assert back.dtype == tensor.dtype and next(iter(array.devices())).platform == "gpu"
    assert bits(np.asarray(array)) == bits(tensor)


def test_what_has_to_be_copied():
    """64-bit integers, memory off 128 bytes, strides with gaps: other memory, the same values."""
    base = torch.arange(129, dtype=torch.float32, device="cuda")
    for tensor in (torch.arange(6, device="cuda"), base[1:], base[:128].view(2, 64)[:, ::2]):
        array = to_jax(tensor)
        assert array.unsafe_buffer_pointer() != tensor.data_ptr()
        np.testing.assert_array_equal(np.asarray(array), tensor.cpu().numpy())


@pytest.mark.parametrize("tokens", [1, 4])
def test_a_call_copies_nothing_on_torchs_side(layer, tokens):
    """Bytes torch allocates in a call: none, inputs are read where they are and the output is JAX's memory."""
    x, z = cuda_inputs(tokens)
    before = allocated_by_torch()
    y = layer(x, z)
    assert allocated_by_torch() == before
    assert y.is_cuda and y.shape == x.shape and y.dtype == x.dtype


@pytest.mark.parametrize("scheme", ["bf16", "fp8_channel", "fp8_block", "int8_w8a8"])
def test_parameters_are_views_of_the_arrays(scheme):
    layer = loaded_bridge(scheme, stored_arrays(scheme), device="cuda")
    leaves = jax.tree.leaves(layer.expert_weights)
    addresses = {leaf.unsafe_buffer_pointer() for leaf in leaves}
    for name, parameter in layer.named_parameters():
        assert parameter.is_cuda and parameter.data_ptr() in addresses, name


def test_packed_weights_stay_placeholders_and_come_back_in_state_dicts():
    """In a kernel's own layout parameters have no memory; the state dict is the checkpoint's layout again."""
    arrays = stored_arrays("w4a16_g32")
    state = loaded_bridge("w4a16_g32", arrays, device="cuda").state_dict()
    expected = loaded_bridge("w4a16_g32", arrays, device="cuda", implementation="xla").state_dict()
    assert state.keys() == expected.keys()
    assert all(bits(state[name]) == bits(expected[name]) for name in state)


def test_producer_and_consumer_on_a_side_stream(layer):
    """x is written late, on the side stream that calls; the output is read there without a synchronization."""
    x, z = cuda_inputs(4)
    expected = layer(x, z).clone()
    late, side = torch.full_like(x, float("nan")), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLEEP // 10)
        late.copy_(x)
        doubled = layer(late, z) * 2
    side.synchronize()
    assert torch.equal(doubled, expected * 2)


def test_consumer_on_another_stream(layer):
    """Called on one stream, read on another after wait_stream, as for any operator of torch."""
    x, z = cuda_inputs(4)
    expected = layer(x, z).clone()
    late, side = torch.full_like(x, float("nan")), torch.cuda.Stream()
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP // 10)
    late.copy_(x)
    y = layer(late, z)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        doubled = y * 2
    side.synchronize()
    assert torch.equal(doubled, expected * 2)


def test_writing_into_x_after_the_call_changes_nothing(layer):
    x, z = cuda_inputs(4)
    expected = layer(x, z).clone()
    scratch = x.clone()
    torch.cuda._sleep(SLEEP // 10)
    y = layer(scratch, z)
    scratch.fill_(float("nan"))
    assert torch.equal(y, expected)


def test_outputs_that_are_let_go_are_not_overwritten_too_early(layer):
    """The next call may get the memory of an output that torch still reads: order on the streams protects it."""
    problems = [cuda_inputs(4, seed) for seed in range(8)]
    expected = [layer(*problem).clone() for problem in problems]
    torch.cuda.synchronize()
    found = []
    for problem in problems:
        y = layer(*problem)
        torch.cuda._sleep(SLEEP // 100)
        found.append(y + 0)
        del y
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


MEMORY = """
import warnings, torch, torch_bridge
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    layer = torch_bridge.FusedMoE(4, 2, 128, 256, torch.bfloat16, quant_config="fp8_channel", device="cuda")
    layer.load_dummy_weights()
layer(torch.ones(1, 128, device="cuda", dtype=torch.bfloat16), torch.zeros(1, 4, device="cuda"))
free, total = torch.cuda.mem_get_info()
torch.empty(int(0.5 * total), dtype=torch.uint8, device="cuda")
print(any("preallocates" in str(w.message) for w in caught), free / total > 0.5)
"""


@pytest.mark.parametrize(
    "setting", [{"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.2"}], ids=str
)
def test_memory_is_shared_with_the_documented_settings(setting):
    """No warning, and torch gets half of the memory while JAX holds a layer."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("XLA_PYTHON_CLIENT")}
    done = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, env=own | setting)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["False", "True"]


def test_capture_is_refused_by_name(layer):
    """JAX's runtime has streams of its own: one error that names the layer and the way out; torch goes on working."""
    x, z = cuda_inputs(4)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match=rf"{layer.layer_name}: a CUDA graph is being captured.*torch_kernels=True"):
        with torch.cuda.graph(graph):
            layer(x, z)
    assert torch.isfinite(layer(x, z).float()).all()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_torch_compile(layer, backend):
    """One graph without breaks around the operator."""
    compiled = torch.compile(lambda x, z: layer(x * 2, z) + x, fullgraph=True, backend=backend)
    x, z = cuda_inputs(4)
    assert torch.equal(compiled(x, z), layer(x * 2, z) + x)


def test_torch_compile_with_graphs_of_its_own(layer):
    """mode="reduce-overhead" captures what it can and leaves the operator out."""
    compiled = torch.compile(lambda x, z: layer(x * 2, z) + x, mode="reduce-overhead")
    x, z = cuda_inputs(4)
    for _ in range(4):
        y = compiled(x, z).clone()
    assert torch.equal(y, layer(x * 2, z) + x)


def gradient_of(scheme, device, **options):
    """Of the sum of squares of a layer's output with respect to x, in float32."""
    x, z = inputs(4, dtype=torch.float32)
    layer = torch_bridge.FusedMoE(
        E, K, H, I, torch.float32, quant_config=scheme, online=scheme != "bf16", device=device, **options
    )
    layer.load_weights((name, tensor.float()) for name, tensor in torch_pairs(plain_arrays()))
    layer.process_weights_after_loading()
    leaf = x.to(device).requires_grad_()
    layer(leaf, z.to(device)).square().sum().backward()
    return leaf.grad.cpu()


@pytest.mark.parametrize("scheme", ["bf16", "int8_w8a16"])
def test_gradients(scheme):
    """Those of the CPU, with the xla implementation; products in float32 round to TF32 on the way."""
    found, expected = (gradient_of(scheme, device, implementation="xla") for device in ("cuda", "cpu"))
    error = (found - expected).abs()
    print(scheme, float(error.max()), float(expected.abs().max()))
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-3 * float(expected.abs().max()))


def test_gradients_where_the_kernels_have_none():
    """By default the next implementation takes a call that is differentiated; the kernels alone say so."""
    x, z = torch.randn(4, 512, device="cuda", dtype=torch.bfloat16), cuda_inputs(4)[1]
    grads = []
    for options in ({}, dict(torch_kernels=False), dict(implementation="xla"), dict(implementation="hopper")):
        layer = torch_bridge.FusedMoE(
            E, K, 512, 544, torch.bfloat16, quant_config="fp8_channel", device="cuda", **options
        )
        layer.load_dummy_weights()
        leaf = x.clone().requires_grad_()
        y = layer(leaf, z)
        if options.get("implementation") == "hopper":
            with pytest.raises(NotImplementedError, match="has no gradient"):
                y.backward(torch.ones_like(x))
        else:
            y.backward(torch.ones_like(x))
            grads.append(leaf.grad)
    assert grads[2].abs().max() > 0
    assert torch.equal(grads[0], grads[2]) and torch.equal(grads[1], grads[2])


def test_devices():
    """A layer moves with .to(); tensors elsewhere are refused with both devices named."""
    layer = loaded_bridge("int8_w8a16", stored_arrays("int8_w8a16"), implementation="xla", device="cpu")
    x, z = inputs(3)
    expected = layer(x, z)
    layer.to("cuda")
    assert all(parameter.is_cuda for parameter in layer.parameters())
    torch.testing.assert_close(layer(x.cuda(), z.cuda()).cpu(), expected, rtol=2e-2, atol=1e-2)
    with pytest.raises(RuntimeError, match="expected all tensors on cuda.*found one on cpu"):
        layer(x, z)


@pytest.mark.parametrize("scheme", ALL_SCHEMES)
def test_output_is_the_nnx_layers_bit_for_bit(scheme):
    """As layers are built by default: kernels on torch's stream, or JAX's runtime where a call is more than kernels."""
    arrays = stored_arrays(scheme)
    layer, reference = loaded_bridge(scheme, arrays, device="cuda"), nnx_layer(scheme, arrays)
    x, z = cuda_inputs(3)
    y = layer(x, z)
    assert y.abs().max() > 0
    assert bits(y) == expected_bits(reference, x, z)
