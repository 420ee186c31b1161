"""Programs of Hopper kernels for torch, without a GPU: what they are made of, what is refused, and how they launch."""

import ctypes
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
import torch
from jax.experimental.mosaic.gpu import core as mgpu_core

import torch_bridge
from moe_jax.experts.hopper._kernel_layout import kernel_format, to_kernel_layout
from moe_jax.quantization import method_for
from pallas_kernels.combine import combine
from tests.support.cases.torch_bridge import E, config, inputs, loaded_bridge, plain_arrays, stored_arrays, torch_pairs
from tests.support.refusals import refuses
from torch_bridge._tensors import torch_dtype
from torch_bridge.launch import _calls as _kernel_calls
from torch_bridge.launch import _kernels, _launch
from torch_bridge.launch._kernels import Kernel, KernelProgram, as_torch_kernels
from torch_bridge.launch._launch import CompiledKernel

H200 = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132)
STRUCT = jax.ShapeDtypeStruct
ALIVE = []  # C functions, of which the bridge keeps addresses
LAUNCHED = []  # of all tests, since layers of one shape share their programs


@pytest.fixture(autouse=True)
def on_an_h200():
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=H200)):
        yield


def program_of_layer(scheme, tokens):
    own = config(scheme, hidden_size=512, intermediate_size=512)
    weights = method_for(scheme).abstract_weights(own)
    if kernel_format(weights.scheme, own.dtype) is not None:
        weights = jax.eval_shape(lambda weights: to_kernel_layout(weights, own), weights)
    assert all(torch_dtype(leaf.dtype) is not None for leaf in jax.tree.leaves(weights))
    mask = STRUCT((tokens,), bool) if tokens > 16 else None
    arguments = STRUCT((tokens, 512), jnp.bfloat16), STRUCT((tokens, E), jnp.float32), None, mask, weights
    return KernelProgram(_kernel_calls._Moe(own), *arguments)


@pytest.mark.parametrize(
    "scheme, tokens, kernels",
    [("fp8_channel", 4, 5), ("fp8_channel", 32, 6), ("fp8_block", 32, 6), ("fp8_block", 1000, 6), ("w4a16_g32", 1, 4)],
)
@pytest.mark.sample(3)
def test_layers_lower_to_kernels(scheme, tokens, kernels):
    """Route, permute but for few tokens, two products, requantization where the scale is not local or tiles are low,
    combine; for many tokens alignment apart. The last gives (T, H).
    """
    program = program_of_layer(scheme, tokens)
    assert len(program.kernels) == kernels
    assert program.kernels[-1].results == (((tokens, 512), torch.bfloat16),)
    assert all(len(kernel.module) > 1000 for kernel in program.kernels)


def test_layers_with_more_than_kernels_are_refused():
    refuses(NotImplementedError, "outside of the kernels", program_of_layer, "fp8_tensor", 4)


def test_programs_run_their_steps_in_order(monkeypatch):
    """Reshapes, broadcasts and casts around kernels, against JAX; a kernel stands for itself by its results."""

    def function(pair):
        x, row_of = pair["x"], pair["row_of"]
        weights = jnp.broadcast_to(jnp.reshape(pair["w"], (1, 2)), (4, 2)).astype(jnp.float32)
        twice = [combine(x, row_of, weights, out_dtype=jnp.bfloat16, implementation="hopper") for _ in range(2)]
        return {"y": twice[0].reshape(8, 128), "z": twice[1].astype(jnp.float32), "w": weights}

    launched = []

    def load(kernel):
        def launch(function, stream, address):
            assert (function, stream) == (5, 77)
            *inputs, result = words(address, 4)
            launched.append(inputs)
            [(shape, dtype)] = kernel.results
            filled = torch.full(shape, len(launched), dtype=dtype)
            ctypes.memmove(result, filled.data_ptr(), filled.nbytes)
            weights.append((ctypes.c_float * 8).from_address(inputs[2])[:])

        return CompiledKernel(5, launch, kernel.results)

    weights = []
    monkeypatch.setattr(Kernel, "load", load)
    monkeypatch.setattr(_launch, "_current_stream", lambda device: 77)
    pair = {
        "x": torch.randn(16, 256).bfloat16(),
        "row_of": torch.arange(8, dtype=torch.int32).view(4, 2),
        "w": torch.tensor([0.25, 0.75], dtype=torch.bfloat16),
    }
    run = as_torch_kernels(function)
    found = run(pair)
    assert found["y"].shape == (8, 128) and found["y"].eq(1).all()
    assert found["z"].dtype == torch.float32 and found["z"].eq(2).all()
    assert torch.equal(found["w"], torch.tensor([[0.25, 0.75]] * 4))
    assert [inputs[:2] for inputs in launched] == [[pair["x"].data_ptr(), pair["row_of"].data_ptr()]] * 2
    bound = as_torch_kernels(lambda row_of, rest: function(rest | dict(row_of=row_of)), {k: pair[k] for k in "xw"})
    again = bound(pair["row_of"])
    assert len(launched) == 4 and again["z"].eq(4).all() and torch.equal(again["w"], found["w"])
    assert launched[2][0] == pair["x"].data_ptr() and weights == [[0.25, 0.75] * 4] * 4
    off = torch.cat([pair["row_of"].new_zeros(1), pair["row_of"].flatten()])[1:].view(4, 2)
    assert off.data_ptr() % 16
    bound(off)
    assert launched[4][1] % 16 == 0 and launched[4][0] == pair["x"].data_ptr()


def words(address, count):
    return tuple((ctypes.c_uint64 * count).from_address(address))


def launcher_of_0_10(record):
    """(A C function that passes on what it is given, JAX's launch): pointers to the three arguments."""

    def called(address):
        record(*(words(at, 1)[0] for at in words(address, 3)))

    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(called)


def launcher_of_0_11(record):
    pointer = ctypes.c_void_p
    return ctypes.CFUNCTYPE(None, pointer, pointer, pointer)(record)


def jaxs_launch(of_version, record, function):
    """What JAX's ``_compile_as_torch_gpu_kernel`` returns first, with a stand-in for the compiled code."""
    called = of_version(record)
    ALIVE.append(called)
    if of_version is launcher_of_0_11:

        def compiled(function, launch_c):
            def launch(arg_ptrs, device):
                launch_c(function, torch.cuda.default_stream(device)._as_parameter_, arg_ptrs)

            return launch

        return compiled(function, called)

    def compiled_before(ctx_ptr_ptr, launch_c):
        def launch(arg_ptrs, device):
            arguments = ctx_ptr_ptr.contents, torch.cuda.default_stream(device)._as_parameter_, ctypes.pointer(arg_ptrs)
            launch_c((ctypes.c_void_p * 3)(*map(ctypes.addressof, arguments)))

        return launch

    return compiled_before(ctypes.pointer(ctypes.c_void_p(function)), called)


@pytest.mark.parametrize("of_version", [launcher_of_0_10, launcher_of_0_11])
def test_launches_give_what_jaxs_launcher_gives(of_version, monkeypatch):
    """JAX's launchers as judge: the same function, stream and operands, for every kernel of a program."""
    seen, functions = [], iter(range(1000, 1010))

    def record(function, stream, operands):
        seen.append((function, stream, words(operands, 4)))

    def compile_kernel(module):
        return jaxs_launch(of_version, record, next(functions)), None

    monkeypatch.setattr(mgpu_core, "_compile_as_torch_gpu_kernel", compile_kernel)
    stream = SimpleNamespace(_as_parameter_=ctypes.c_void_p(77))
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: stream)
    monkeypatch.setattr(_launch, "_current_stream", lambda device: 77)

    def function(x, row_of, weights):
        twice = [combine(x, row_of, weights, out_dtype=jnp.float32, implementation="hopper") for _ in range(2)]
        return twice[1]

    tensors = torch.randn(16, 256).bfloat16(), torch.zeros(4, 2, dtype=torch.int32), torch.ones(4, 2)
    y = as_torch_kernels(function)(*tensors)
    ours, addresses = seen.copy(), tuple(tensor.data_ptr() for tensor in (*tensors, y))
    assert ours[1] == (1001, 77, addresses) and ours[0] == (1000, 77, (*addresses[:3], ours[0][2][3]))
    assert ours[0][2][3] not in addresses
    compile_kernel(b"")[0]((ctypes.c_void_p * 4)(*addresses), torch.device("cpu"))
    assert seen[-1] == (1002, *ours[1][1:])


def test_a_launcher_made_otherwise_is_refused(monkeypatch):
    for other in (lambda arguments, device: None, print):
        monkeypatch.setattr(mgpu_core, "_compile_as_torch_gpu_kernel", lambda module, other=other: (other, None))
        refuses(NotImplementedError, "in a way that is not known here", CompiledKernel.compile, b"", ())


def test_the_launcher_of_this_jax_is_known(monkeypatch):
    """It is asked to compile the kernel's module, and says when it cannot."""
    given = []

    class Library:
        def __init__(self):
            self.MosaicGpuCompile = self.MosaicGpuUnload = lambda module, length: given.append((module, length))

    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(ctypes, "CDLL", lambda path: Library())
    function = functools.partial(combine, implementation="hopper")
    arguments = STRUCT((16, 256), jnp.bfloat16), STRUCT((4, 2), jnp.int32), STRUCT((4, 2), jnp.float32)
    [kernel] = KernelProgram(function, *arguments).kernels
    refuses(RuntimeError, "Failed to compile the module", kernel.load)
    [(module, length)] = given
    assert length.value == len(kernel.module) and module.value is not None


def test_layers_refuse_what_kernels_cannot():
    layer = loaded_bridge("bf16", plain_arrays(), torch_kernels=True)
    with pytest.raises(NotImplementedError, match=r"torch_kernels=True needs CUDA tensors, found cpu"):
        layer(*inputs(2))
    assert isinstance(layer.calls_for("moe"), _kernel_calls.KernelCalls)


def test_what_is_not_kernels_throughout_goes_to_jaxs_runtime(monkeypatch):
    """Without torch_kernels=True: the layer's own answer; what one trace found holds for all layers of the shape."""
    _kernels._program.cache_clear()
    layer = loaded_bridge("fp8_tensor", stored_arrays("fp8_tensor"))
    x, z = inputs(3)
    expected, traced = layer(x, z), []
    layer._calls = calls = _kernel_calls.KernelCalls(layer._experts, layer.layer_name, layer.device, is_strict=False)
    monkeypatch.setattr(calls, "_is_cuda", True)
    program = _kernels.KernelProgram
    monkeypatch.setattr(_kernels, "KernelProgram", lambda *args, **named: traced.append(1) or program(*args, **named))
    assert all(torch.equal(layer(x, z), expected) for _ in range(2)) and len(traced) == 1
    strict = loaded_bridge("fp8_tensor", stored_arrays("fp8_tensor"), torch_kernels=True)
    monkeypatch.setattr(strict._calls, "_is_cuda", True)
    for _ in range(2):
        refuses(NotImplementedError, rf"{strict.layer_name}: torch_kernels=True: ", strict, x, z)
    assert len(traced) == 1


def test_layers_of_one_shape_and_reloads_share_their_kernels(monkeypatch):
    """Each kernel is compiled once, whatever the number of layers; each layer launches over its own weights."""
    compiled, launched = [], []

    def load(kernel):
        compiled.append(kernel)

        def launch(function, stream, address):
            launched.append(words(address, 3))  # a product's rows come first, then its weights

        return CompiledKernel(len(compiled), launch, kernel.results)

    monkeypatch.setattr(Kernel, "load", load)
    monkeypatch.setattr(_launch, "_current_stream", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    x, z = torch.zeros(2, 512).bfloat16(), torch.zeros(2, E)
    for turn in range(3):
        if turn < 2:
            layer = torch_bridge.FusedMoE(E, 2, 512, 512, torch.bfloat16, torch_kernels=True)
            layer.load_dummy_weights()
        else:
            layer.install(jax.tree.map(jnp.array, layer.expert_weights))
        monkeypatch.setattr(layer._calls, "_is_cuda", True)
        launched.clear()
        layer(x, z)
        assert len(compiled) == len(launched) == 4
        addresses = {word for operands in launched for word in operands}
        assert {layer.w13_weight.data_ptr(), layer.w2_weight.data_ptr()} <= addresses


@pytest.fixture
def launched(monkeypatch):
    """What kernels were launched with, (stream, first addresses) each, by layers whose memory passes for a GPU's."""

    def load(kernel):
        return CompiledKernel(0, lambda function, stream, at: LAUNCHED.append((stream, words(at, 4))), kernel.results)

    LAUNCHED.clear()
    monkeypatch.setattr(Kernel, "load", load)
    monkeypatch.setattr(_launch, "_current_stream", lambda device: 7)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return LAUNCHED


def layer_of_kernels(monkeypatch):
    layer = torch_bridge.FusedMoE(E, 2, 512, 512, torch.bfloat16, torch_kernels=True)
    layer.load_dummy_weights()
    monkeypatch.setattr(layer._calls, "_is_cuda", True)
    return layer


def choices():
    return torch.randn(3, 512).bfloat16(), torch.rand(3, 2).bfloat16(), torch.randint(E, (3, 2))


def addresses(launches):
    return {word for _, operands in launches for word in operands}


def test_later_calls_of_the_same_kinds_do_nothing_but_launch(launched, monkeypatch):
    """64-bit ids and 16-bit weights are read where they lie, and torch runs no operator, in any thread's stream."""
    layer = layer_of_kernels(monkeypatch)
    apply = functools.partial(layer.quant_method.apply, layer)
    apply(*choices())
    for stream in (8, 9):
        monkeypatch.setattr(_launch, "_current_stream", lambda device, stream=stream: stream)
        given = choices()
        launched.clear()
        with torch.profiler.profile() as profile:
            y = apply(*given)
        assert {event.name for event in profile.events() if event.name.startswith("aten::")} <= {"aten::empty_strided"}
        assert [at for at, _ in launched] == [stream] * 4
        assert {tensor.data_ptr() for tensor in (*given, y)} <= addresses(launched)
    assert y.shape == (3, 512) and y.dtype == torch.bfloat16
    with torch.inference_mode():
        assert apply(*choices()).is_inference()


def test_what_kernels_cannot_read_where_it_lies_is_copied_in_every_call(launched, monkeypatch):
    layer = layer_of_kernels(monkeypatch)
    x, weights, ids = choices()
    wide = torch.stack([weights, weights], -1)[..., 0]
    assert wide.shape == weights.shape and not wide.is_contiguous()
    others = [(x._neg_view(), weights, ids), (x, wide, ids), (x, weights, ids.to(torch.uint8))]
    others += [(x, weights.double(), ids)]
    layer.quant_method.apply(layer, x, weights, ids)
    for _ in range(2):
        for given in others:
            launched.clear()
            layer.quant_method.apply(layer, *given)
            read = [tensor.data_ptr() in addresses(launched) for tensor in given]
            assert read == [tensor is own for tensor, own in zip(given, (x, weights, ids), strict=True)]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_calls_are_refused_after_others_as_before_them(launched, monkeypatch):
    layer = layer_of_kernels(monkeypatch)
    apply = functools.partial(layer.quant_method.apply, layer)
    x, weights, ids = choices()
    nested = torch.nested.nested_tensor([torch.ones(2)] * 3, dtype=torch.bfloat16)
    for _ in range(2):
        for given, error, message in (
            ((x[:, :256], weights, ids), ValueError, r"expected \(T, 512\)"),
            ((x, weights[:1], ids), ValueError, "x has 3 tokens"),
            ((x.int(), weights, ids), ValueError, "expected a float dtype"),
            ((x, weights, ids.to("meta")), RuntimeError, "expected all tensors on cpu"),
            ((x, weights.to_sparse(), ids), TypeError, "has layout torch.sparse_coo"),
            ((x, nested, ids), TypeError, "is a nested tensor"),
            ((x, weights, ids.float()), TypeError, "topk_ids"),
        ):
            refuses(error, message, apply, *given)
        apply(x, weights, ids)
    layer.w2_weight.requires_grad_(True)
    refuses(RuntimeError, "a parameter of the experts requires a gradient", apply, x, weights, ids)


def test_scratch_memory_of_each_call(launched, monkeypatch):
    """Kernels pass on what they make in the memory of their own call, wherever torch has put it."""
    given = []

    def allocate(shape, strides, dtype):
        given.append(torch.empty_strided(shape, strides, dtype=dtype))
        return given[-1]

    monkeypatch.setattr(_launch, "_allocator", lambda device: allocate)
    layer = layer_of_kernels(monkeypatch)
    arguments, starts = choices(), set()
    for _ in range(3):
        launched.clear()
        y = layer.quant_method.apply(layer, *arguments)
        scratch, out = given[-2:]
        assert scratch.dtype == torch.uint8 and out.data_ptr() == y.data_ptr()
        rows = launched[2][1][0]  # of the second product
        assert 0 <= rows - scratch.data_ptr() < scratch.nbytes
        starts.add(scratch.data_ptr())
    assert len(starts) == 3


def test_ids_of_64_bits():
    """They come to kernels as their words; by an expert map those beyond 32 bits are nobody's."""
    struct = _kernels._struct(torch.zeros(3, 2, dtype=torch.int64))
    assert (struct.shape, struct.dtype) == ((3, 2, 2), jnp.int32)
    table = torch.tensor([-1, 0, 1], dtype=torch.int32)
    ids = torch.tensor([[0, 1, 2, 3, -1, 2**32 + 1, -(2**32) + 1]])
    found = _kernel_calls.local_ids(ids, table)
    assert found.dtype == torch.int32 and found.tolist() == [[-1, 0, 1, -1, -1, -1, -1]]


def test_a_reload_of_a_captured_layer_keeps_its_memory():
    """What a CUDA graph reads stays where it is and gets the new values; before a capture weights are just replaced."""
    layer = loaded_bridge("fp8_channel", plain_arrays(), online=True, torch_kernels=True)
    held = layer.w13_weight.data_ptr()
    calls = layer.calls_for("moe")
    calls.is_captured = True
    pairs = torch_pairs(plain_arrays(1))
    layer.reload_weights(pairs)
    assert layer.calls_for("moe") is calls and layer.w13_weight.data_ptr() == held
    expected = loaded_bridge("fp8_channel", plain_arrays(1), online=True)
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter.view(torch.uint8), expected.get_parameter(name).view(torch.uint8)), name
    calls.is_captured = False
    layer.reload_weights(pairs)
    assert layer.calls_for("moe") is not calls
