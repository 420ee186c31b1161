"""torch tensors, NumPy arrays and JAX arrays over the same memory: dtypes, and the crossings in both directions.

DLPack carries every dtype of a checkpoint, FP8 included; packed weights are uint8 or int32 on all sides. A crossing
copies in three cases only: 64-bit integers, which JAX holds in 32 bits; memory that does not start at a multiple of 64
bytes on the CPU, of 128 on a GPU; a tensor whose strides are no permutation of a dense one.
"""

import functools
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jax
import ml_dtypes
import numpy as np
import torch
from torch.utils.dlpack import from_dlpack, to_dlpack  # pyright: ignore[reportPrivateImportUsage]

from torch_bridge._process import check_process

_NUMPY_OF_TORCH = {
    torch.float32: np.dtype(np.float32),
    torch.float16: np.dtype(np.float16),
    torch.bfloat16: np.dtype(ml_dtypes.bfloat16),
    torch.float8_e4m3fn: np.dtype(ml_dtypes.float8_e4m3fn),
    torch.float8_e8m0fnu: np.dtype(ml_dtypes.float8_e8m0fnu),
    torch.uint8: np.dtype(np.uint8),
    torch.int8: np.dtype(np.int8),
    torch.int16: np.dtype(np.int16),
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64),
    torch.bool: np.dtype(np.bool_),
}
_DL_CUDA = 2  # what DLPack calls a GPU's memory
CUDA_ALIGNMENT = 128  # bytes; what XLA's programs assume of an argument's start
_TORCH_OF_NUMPY = {numpy: dtype for dtype, numpy in _NUMPY_OF_TORCH.items()}
# NumPy has no such numbers of its own; torch hands them over as the bits of integers.
_BITS = {
    torch.bfloat16: torch.int16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e8m0fnu: torch.uint8,
}


def numpy_dtype(dtype: torch.dtype) -> np.dtype:
    """The NumPy dtype of a torch dtype. Raises TypeError for one that no layer of experts can hold."""
    if dtype not in _NUMPY_OF_TORCH:
        raise TypeError(f"dtype {dtype} is not supported; supported: {', '.join(map(str, _NUMPY_OF_TORCH))}")
    return _NUMPY_OF_TORCH[dtype]


def torch_dtype(dtype: Any) -> torch.dtype:
    """The torch dtype of a NumPy or JAX dtype that a layer of experts can hold."""
    return _TORCH_OF_NUMPY[np.dtype(dtype)]


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """The tensor as NumPy sees it: over the same memory on the CPU, a copy of a CUDA tensor.

    Raises TypeError for a dtype that no layer of experts can hold and for a sparse or nested tensor, ValueError for one
    without storage.
    """
    if tensor.is_nested or tensor.layout != torch.strided:
        raise TypeError(
            f"a tensor is nested or has layout {tensor.layout}, expected torch.strided; call its to_dense()"
        )
    if tensor.is_meta:
        raise ValueError(f"tensor {tuple(tensor.shape)} is on the meta device and has no values to load")
    dtype, tensor = numpy_dtype(tensor.dtype), tensor.detach().cpu().resolve_neg()
    bits = _BITS.get(tensor.dtype)
    return tensor.numpy() if bits is None else tensor.view(bits).numpy().view(dtype)


def to_jax(tensor: torch.Tensor) -> jax.Array:
    """The tensor as JAX sees it, on its own device, without a copy where the layout allows one to be avoided.

    64-bit integers are ``narrowed``.
    """
    tensor = narrowed(tensor.detach().resolve_neg())
    if tensor.is_cuda and tensor.data_ptr() % CUDA_ALIGNMENT:
        tensor = tensor.clone()
    try:
        return jax.dlpack.from_dlpack(tensor)
    except (BufferError, RuntimeError, ValueError):  # strides that overlap or leave gaps
        return jax.dlpack.from_dlpack(tensor.contiguous())


def to_arguments(tensors: Sequence[torch.Tensor | None]) -> list[Any]:
    """Tensors of one device as a jitted function takes them, over the same memory as ``to_jax``; the first is not None.

    On the CPU they are NumPy arrays: reading one costs a tenth of DLPack there. On a GPU JAX waits for torch's current
    stream, for all of them at once.
    """
    first = tensors[0]
    assert first is not None
    if not first.is_cuda:
        return [None if tensor is None else to_numpy(narrowed(tensor)) for tensor in tensors]
    import_dlpack = _importer()
    if import_dlpack is None:
        return [None if tensor is None else to_jax(tensor) for tensor in tensors]
    device = jax_device(first.device)
    stream = device.get_stream_for_external_ready_events()
    tensors = [None if tensor is None else _importable(tensor) for tensor in tensors]
    event = torch.cuda.Event()
    event.record()
    event.wait(_stream(stream, first.device))
    return [None if t is None else import_dlpack(to_dlpack(t), device, stream, None, _DL_CUDA) for t in tensors]


def _importable(tensor: torch.Tensor) -> torch.Tensor:
    numpy_dtype(tensor.dtype)
    tensor = narrowed(tensor.detach() if tensor.requires_grad else tensor)
    if not tensor.is_contiguous():
        return tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % CUDA_ALIGNMENT else tensor


@functools.cache
def _stream(handle: int, device: torch.device) -> Any:
    return torch.cuda.ExternalStream(handle, device)


@functools.cache
def _importer() -> Callable[..., Any] | None:
    """What ``jax.dlpack.from_dlpack`` ends in after its checks, where this JAX has it as we know it."""
    try:
        function = importlib.import_module("jaxlib._jax").dlpack_managed_tensor_to_buffer
    except (ImportError, AttributeError):
        return None
    return function if "dl_device_type" in (function.__doc__ or "") else None


def narrowed(tensor: torch.Tensor) -> torch.Tensor:
    """64-bit integers as 32-bit ones; what they cannot hold becomes their extremes, so that it stays out of range."""
    if tensor.dtype != torch.int64:
        return tensor
    limits = torch.iinfo(torch.int32)
    return tensor.clamp(limits.min, limits.max).to(torch.int32)


def to_torch(array: jax.Array) -> torch.Tensor:
    """The array as torch sees it, over the same memory.

    On CUDA torch's current stream waits for the array; on the CPU the caller does, since torch may write at once into
    memory that the computation still reads.
    """
    (device,) = array.devices()
    if device.platform == "cpu":
        array.block_until_ready()
        return torch.from_dlpack(array)
    # Stream 0 is called 1 by DLPack.
    stream = torch.cuda.current_stream(device.local_hardware_id).cuda_stream or 1
    return from_dlpack(array.__dlpack__(stream=stream))  # pyright: ignore[reportCallIssue]


def check_tensor(label: str, value: Any) -> None:
    """Raises TypeError for what is no torch tensor with strides, ValueError for one without axes."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{label} is a {type(value).__name__}, expected a torch tensor")
    if value.is_nested:
        raise TypeError(f"{label} is a nested tensor, expected one with a shape; call its to_padded_tensor(0.0)")
    if value.layout != torch.strided:
        raise TypeError(f"{label} has layout {value.layout}, expected torch.strided; call its to_dense()")
    if not value.ndim:
        raise ValueError(f"{label} has shape (), expected an axis at least")


def refuse_foreign(parameters: Mapping[str, Any]) -> None:
    """Raises NotImplementedError for parameters of bitsandbytes or GGUF, by name, with the way out."""
    for name, parameter in parameters.items():
        kind = type(parameter).__name__
        if hasattr(parameter, "quant_state") or "4bit" in kind or getattr(parameter, "use_bitsandbytes_4bit", False):
            library = "bitsandbytes"
        elif kind.startswith("GGUF") or any(
            hasattr(parameter, f"is_gguf_{what}") for what in ("weight", "weight_type")
        ):
            library = "GGUF"
        else:
            continue
        raise NotImplementedError(
            f"{name}: a parameter of {library}, whose codes are not supported; load the model in full precision and "
            "quantize it here, with quantize= or online=True"
        )


def jax_device(device: torch.device) -> Any:
    """The ``jax.Device`` of a torch device. Raises RuntimeError when JAX does not see it, or cannot run."""
    check_process("experts")
    return _jax_device(device)


@functools.cache
def _jax_device(device: torch.device) -> Any:
    platform = {"cpu": "cpu", "cuda": "cuda"}.get(device.type)
    try:
        return jax.devices(platform)[device.index or 0] if platform else _no_device(device)
    except (RuntimeError, IndexError):
        _no_device(device)


def _no_device(device: torch.device) -> NoReturn:
    found = ", ".join(str(d) for d in jax.devices())
    raise RuntimeError(
        f"JAX has no device for torch's {device}; it sees {found}. Experts run on CPU and CUDA devices that both know: "
        "for CUDA install jax[cuda13] and leave JAX_PLATFORMS unset"
    )
