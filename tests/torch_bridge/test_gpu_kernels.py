"""Hopper kernels on torch's current stream: JAX's own results, side streams, CUDA graphs, refusals by name.

XLA_PYTHON_CLIENT_PREALLOCATE=false JAX_PLATFORMS=cuda,cpu pytest -m gpu tests/torch_bridge/test_gpu_kernels.py
"""

import functools

import jax
import numpy as np
import pytest
import torch
from jax.experimental.pallas import mosaic_gpu as plgpu

import torch_bridge
from pallas_kernels.combine import combine
from pallas_kernels.common.activations import Activation
from pallas_kernels.grouped_gemm import grouped_gemm
from tests.support.cases.torch_bridge import bits
from tests.support.kernels.gemm_problem import make_problem
from torch_bridge import as_torch_kernels
from torch_bridge._tensors import to_torch

pytestmark = pytest.mark.gpu

SLEEP = 100_000_000  # cycles of a kernel that does nothing: about 50 ms on an H200
E, H, I, K = 8, 512, 512, 2  # noqa: E741
SCHEMES = (
    "bf16",
    "fp8_tensor_static",
    "fp8_tensor_token",
    "fp8_channel",
    "fp8_block",
    "int8_w8a8",
    "int8_w8a16",
    "nvfp4_a16",
    "mxfp4_a16",
    "mxfp8",
    "w4a16_g32",
    "w4a16_g32_asym",
    "w4a8_int8",
    "w4a8_fp8",
)


def gemm_case(kind="fp8_row"):
    """(function of arrays alone, its arguments as arrays): a gated grouped GEMM with ragged and empty experts."""
    problem = make_problem(
        kind, [3, 40, 0, 9], k=512, n=384, projections=2, activation=Activation("silu"), with_tile_rows=True
    )
    arrays = {name: value for name, value in problem.kwargs.items() if isinstance(value, jax.Array)}
    static = {name: value for name, value in problem.kwargs.items() if not isinstance(value, jax.Array)}

    def function(args, arrays):
        return grouped_gemm(*args, **arrays, **static, implementation="hopper")

    own = problem.row_expert >= 0
    return function, (problem.args, arrays), own


def as_tensors(tree):
    return jax.tree.map(lambda array: to_torch(array).clone(), tree)


def rows_bits(output, own):
    return bits(output.cpu()[torch.from_numpy(own)] if isinstance(output, torch.Tensor) else np.asarray(output)[own])


@pytest.mark.parametrize("kind", ["bf16", "fp8_row", "fp8_block", "int8_row"])
def test_grouped_gemm_is_jaxs_bit_for_bit(kind):
    function, arguments, own = gemm_case(kind)
    expected = jax.jit(function)(*arguments)
    tensors = as_tensors(arguments)
    torch.cuda.synchronize()
    assert rows_bits(as_torch_kernels(function)(*tensors), own) == rows_bits(expected, own)


def test_one_kernel_is_what_as_torch_kernel_makes_of_it():
    """JAX's own public wrapper as judge, where it can: one kernel without reshapes, on the default stream."""
    rng = np.random.default_rng(0)
    rows = torch.from_numpy(rng.standard_normal((64, 256), np.float32)).cuda().bfloat16()
    row_of = torch.from_numpy(rng.permutation(64)[:16].reshape(8, 2).astype(np.int32)).cuda()
    weights = torch.from_numpy(rng.random((8, 2), np.float32)).cuda()
    function = functools.partial(combine, implementation="hopper")
    torch.cuda.synchronize()
    expected = plgpu.as_torch_kernel(lambda *args: function(*args))(rows, row_of, weights)
    torch.cuda.synchronize()
    assert torch.equal(as_torch_kernels(function)(rows, row_of, weights), expected)


def test_grouped_gemm_on_a_side_stream():
    """The operand is written late on the side stream; the kernel comes after it, the reader after the kernel."""
    function, arguments, own = gemm_case()
    (x, *rest), arrays = as_tensors(arguments)
    run = as_torch_kernels(function)
    expected = rows_bits(run((x, *rest), arrays), own)
    late, side = torch.zeros_like(x.view(torch.uint8)), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLEEP)
        late.copy_(x.view(torch.uint8))
        y = run((late.view(x.dtype), *rest), arrays).clone()
    assert not side.query()
    side.synchronize()
    assert rows_bits(y, own) == expected


def test_grouped_gemm_in_a_cuda_graph():
    """Captured once, replayed on new operands in the same memory."""
    function, arguments, own = gemm_case()
    (x, *rest), arrays = as_tensors(arguments)
    run = as_torch_kernels(function)
    run((x, *rest), arrays)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run((x, *rest), arrays)
    for turn in (1, 2):
        x.copy_(torch.roll(x.view(torch.uint8), turn, 1).view(x.dtype))
        graph.replay()
        torch.cuda.synchronize()
        assert rows_bits(y, own) == rows_bits(run((x, *rest), arrays), own)


def test_first_call_in_a_capture_is_refused():
    function, arguments, _ = gemm_case("bf16")
    tensors = as_tensors(arguments)
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="call once with the same shapes before capturing"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            as_torch_kernels(function)(*tensors)


def checkpoint(seed=0):
    g = torch.Generator().manual_seed(seed)
    random = lambda *shape: (torch.randn(*shape, generator=g) * 0.05).bfloat16()  # noqa: E731
    words = {"gate_proj": (I, H), "up_proj": (I, H), "down_proj": (H, I)}
    return [(f"mlp.experts.{e}.{word}.weight", random(*words[word])) for e in range(E) for word in words]


def static_checkpoint():
    """The same with a scale for each matrix and one for its input."""
    for name, weight in checkpoint():
        scale = weight.abs().max().float() / 448
        yield name, (weight.float() / scale).to(torch.float8_e4m3fn)
        yield f"{name}_scale", scale
        yield f"{name.removesuffix('weight')}input_scale", torch.tensor(0.02)


def layers(scheme):
    """One layer through JAX's runtime and one of kernels, over the same weights."""
    pair = [
        torch_bridge.FusedMoE(
            E,
            K,
            H,
            I,
            torch.bfloat16,
            quant_config=scheme,
            online=scheme not in ("bf16", "fp8_tensor_static"),
            device="cuda",
            torch_kernels=torch_kernels,
        )
        for torch_kernels in (False, True)  # the default is tried in test_gpu.py
    ]
    pair[0].load_weights(static_checkpoint() if scheme == "fp8_tensor_static" else checkpoint())
    pair[0].process_weights_after_loading()
    pair[1].install(pair[0].expert_weights)
    return pair


def tokens(count, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(count, H, generator=g).bfloat16().cuda(), torch.randn(count, E, generator=g).cuda()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_layers_of_kernels_are_those_of_jax(scheme):
    """Bit for bit, with routing and from given experts, a padded number of tokens and unknown ids.

    Few tokens: test_gpu.py, against the nnx layer.
    """
    through_jax, of_kernels = layers(scheme)
    x, z = tokens(19)
    expected = through_jax(x, z)
    assert expected.abs().max() > 0
    assert torch.equal(of_kernels(x, z), expected)
    weights, ids = through_jax.select_experts(x, z)
    ids[0, 0], ids[1, 1] = -1, E + 3
    for given in (ids, ids.long()):
        expected = through_jax.quant_method.apply(through_jax, x, weights, given)
        assert torch.equal(of_kernels.quant_method.apply(of_kernels, x, weights, given), expected)
    for wrong, error in (((weights, ids.float()), TypeError), ((weights[:, :1], ids), ValueError)):
        with pytest.raises(error, match="topk_"):
            of_kernels.quant_method.apply(of_kernels, x, *wrong)


@pytest.mark.parametrize("scheme", ["bf16", "fp8_channel", "w4a16_g32"])
def test_ids_and_weights_are_read_as_they_come(scheme):
    """64-bit ids and 16-bit weights, bit for bit as 32-bit ones; what has more than 32 bits is nobody's."""
    _, layer = layers(scheme)
    apply = functools.partial(layer.quant_method.apply, layer)
    for count in (1, 16, 300, 512):
        x, z = tokens(count)
        weights, ids = torch.topk(z.softmax(-1), K)
        known = ids.to(torch.int32)
        ids[0, 1] += 2**32
        known[0, 1] = -1
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            given = weights.to(dtype)
            expected = apply(x, given.float(), known)
            assert all(torch.equal(apply(x, given, ids), expected) for _ in range(2))


@pytest.mark.parametrize("scheme", ["bf16", "fp8_channel", "w4a16_g32"])
def test_layers_in_cuda_graphs(scheme):
    """Captured, replayed on other tokens; a reload goes into the memory that the graph reads."""
    _, layer = layers(scheme)
    x, z = tokens(4)
    layer(x, z)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x, z)
    for seed in (1, 2):
        for old, new in zip((x, z), tokens(4, seed), strict=True):
            old.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, layer(x, z))
    before = y.clone()
    layer.reload_weights(checkpoint(seed=5))
    graph.replay()
    torch.cuda.synchronize()
    fresh = layers(scheme)[0]
    fresh.reload_weights(checkpoint(seed=5))
    assert torch.equal(y, fresh(x, z)) and not torch.equal(y, before)


def test_layer_on_a_side_stream_waits_for_nothing():
    _, layer = layers("fp8_channel")
    x, z = tokens(4)
    expected = layer(x, z).clone()
    late, side = torch.full_like(x, float("nan")), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLEEP)
        late.copy_(x)
        y = layer(late, z)
    assert not side.query()
    side.synchronize()
    assert torch.equal(y, expected)


def test_inputs_off_their_alignment_are_copied():
    through_jax, of_kernels = layers("bf16")
    x, z = tokens(4)
    shifted = torch.cat([x.new_zeros(1), x.reshape(-1)])[1:].view(4, H)
    assert shifted.data_ptr() % 16
    assert torch.equal(of_kernels(shifted, z), through_jax(x, z))


def test_torch_compile():
    _, layer = layers("fp8_channel")
    compiled = torch.compile(lambda x, z: layer(x * 2, z) + x, fullgraph=True, backend="aot_eager")
    x, z = tokens(4)
    assert torch.equal(compiled(x, z), layer(x * 2, z) + x)


def test_layers_that_are_not_kernels_throughout_are_refused():
    layer = layers("fp8_tensor")[1]
    with pytest.raises(NotImplementedError, match=rf"{layer.layer_name}: torch_kernels=True: .*outside of the kernels"):
        layer(*tokens(4))


def test_weights_stay_until_kernels_have_read_them():
    """A reload while calls are queued: they compute with the old weights, whose memory JAX would give away at once."""
    _, layer = layers("bf16")
    x, z = tokens(4)
    expected = layer(x, z).clone()
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP)
    y = layer(x, z)
    layer.reload_weights(checkpoint(seed=5))
    fresh = layer(x, z)
    assert torch.equal(y, expected) and not torch.equal(fresh, expected)
