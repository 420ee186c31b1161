"""Launching the kernels of a program: one block of addresses a call, one foreign call a kernel.

What a launch reads is fixed but for the addresses of arguments, results and scratch memory, and the stream. So a
program keeps frames in which everything else is written already, and a call fills in the rest. Memory between the
kernels is one piece of torch's, let go when the call returns: freed memory is reused in stream order.
"""

import ctypes
import dataclasses
import functools
import math
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import torch
from jax.experimental.mosaic.gpu import core as mgpu_core

ALIGNMENT = 16  # bytes; what TMA copies and vector loads of the kernels need of an array's start
_SCRATCH_ALIGNMENT = 256
_WORD = ctypes.sizeof(ctypes.c_uint64)

Step = tuple[Any, tuple[int, ...], tuple[int, ...]]
Shapes = tuple[tuple[tuple[int, ...], torch.dtype], ...]


@dataclasses.dataclass(frozen=True)
class CompiledKernel:
    """A kernel on the GPU of this process.

    launch: of function, a stream and the address of the operands' and results' addresses, all numbers. It has read
    them when it returns. results: shape and dtype of each.
    """

    function: int
    launch: Callable[[int, int, int], Any]
    results: Shapes

    @classmethod
    def compile(cls, module: bytes, results: Shapes) -> "CompiledKernel":
        """By JAX's own launcher, of which only the C function is used: it launches on torch's default stream.

        Raises NotImplementedError when the launcher of this JAX is made otherwise, RuntimeError when the kernel does
        not compile or the GPU does not load it.
        """
        try:
            launch = mgpu_core._compile_as_torch_gpu_kernel(module)[0]
        except RuntimeError as error:
            made = ", ".join(f"{dtype} {shape}" for shape, dtype in results)
            raise RuntimeError(
                f"the kernel of {made} did not compile: {error}. JAX gives no "
                "reason; one is a GPU without free memory, otherwise report it, with what runs in this process"
            ) from error
        cells: dict[str, Any] = {}
        if isinstance(launch, types.FunctionType):
            names = launch.__code__.co_freevars
            cells = {n: c.cell_contents for n, c in zip(names, launch.__closure__ or (), strict=True)}
        if {"function", "launch_c"} <= cells.keys():  # JAX 0.11
            kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
            return cls(cells["function"], ctypes.cast(cells["launch_c"], kind), results)
        if {"ctx_ptr_ptr", "launch_c"} <= cells.keys():  # JAX 0.10
            launch = functools.partial(_launch_packed, cells["launch_c"])
            return cls(cells["ctx_ptr_ptr"].contents.value, launch, results)
        raise NotImplementedError(
            f"JAX {jax.__version__} launches kernels of torch in a way that is not known here; build the layer without "
            "torch_kernels"
        )


def _launch_packed(launch: Callable[[int], Any], function: int, stream: int, operands: int) -> None:
    """A C function that takes pointers to its arguments."""
    arguments = (ctypes.c_uint64 * 3)(function, stream, operands)
    first = ctypes.addressof(arguments)
    pointers = (ctypes.c_uint64 * 3)(first, first + _WORD, first + 2 * _WORD)
    launch(ctypes.addressof(pointers))


@dataclasses.dataclass(frozen=True)
class View:
    """The same elements in another shape."""

    shape: tuple[int, ...]

    def __call__(self, tensor: torch.Tensor) -> tuple[torch.Tensor]:
        return (tensor.reshape(self.shape),)


class Launches:
    """The steps of a program, loaded for one device: a function of leaves.

    Args:
        steps: (run, slots read, slots written); run is a ``CompiledKernel``, a ``View``, or a function of tensors.
        num_leaves: slots 0 to num_leaves - 1 are what a call is given.
        fixed: tensors that are the same in every call, by slot.
        results: slots of what a call returns.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        num_leaves: int,
        fixed: Mapping[int, torch.Tensor],
        results: Sequence[int],
        device: torch.device,
    ):
        self.device, self._results = device, tuple(results)
        self._fixed = _with_views(steps, fixed)
        roots = {written[0]: read[0] for run, read, written in steps if isinstance(run, View)}

        def root(slot: int) -> int:
            while slot in roots and slot not in self._fixed:
                slot = roots[slot]
            return slot

        self._words = 0
        self._constants: list[tuple[int, int]] = []  # word, value
        self._places: dict[int, list[int]] = {}  # slot -> words that hold its address
        tensors = _seen_by_torch(steps, results)
        self._scratch: list[tuple[int, int]] = []  # word, bytes into the scratch memory
        self._scratch_bytes = 0
        self._empty: list[tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]] = []
        self._allocate = _allocator(device)
        # Of a kernel (launch, function, bytes into the frame), of a function of tensors (run, slots read, written).
        self._actions: list[tuple[Callable[..., Any], Any, Any]] = []
        scratch: dict[int, int] = {}
        for run, read, written in steps:
            if not isinstance(run, CompiledKernel):
                if written[0] not in self._fixed and (written[0] in tensors or not isinstance(run, View)):
                    self._actions.append((run, read, written))
                continue
            for slot, (shape, dtype) in zip(written, run.results, strict=True):
                if slot in tensors:
                    self._empty.append((slot, shape, torch.empty(shape, device="meta").stride(), dtype))
                else:
                    scratch[slot] = self._scratch_bytes
                    size = math.prod(shape) * dtype.itemsize
                    self._scratch_bytes += -(-size // _SCRATCH_ALIGNMENT) * _SCRATCH_ALIGNMENT
            self._actions.append((run.launch, run.function, self._words * _WORD))
            for slot in (*read, *written):
                self._places.setdefault(root(slot), []).append(self._words)
                self._words += 1
        for slot, offset in scratch.items():
            self._scratch += [(word, offset) for word in self._places.pop(slot, ())]
        for slot, tensor in self._fixed.items():
            self._constants += [(word, tensor.data_ptr()) for word in self._places.pop(slot, ())]
        self._leaves = [tuple(self._places.pop(slot, ())) for slot in range(num_leaves)]
        self._frames: list[Any] = []

    def _new_frame(self) -> tuple[Any, int, int]:
        """Addresses by word, where they lie, and the start of the scratch memory that they are of."""
        frame = (ctypes.c_uint64 * self._words)()
        for word, value in self._constants:
            frame[word] = value
        return frame, ctypes.addressof(frame), -1

    def __call__(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """leaves: tensors on the device, one for each leaf of the arguments. On torch's current stream."""
        device = self.device
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                return self(leaves)
        try:
            frame, start, held = self._frames.pop()  # in use by this call alone: others may run in other threads
        except IndexError:
            frame, start, held = self._new_frame()
        stream = _current_stream(device)
        leaves = list(leaves)  # those of them that lie as kernels read them, copies of others
        for index, (leaf, words) in enumerate(zip(leaves, self._leaves, strict=True)):
            address = leaf.data_ptr()
            if address % ALIGNMENT or not leaf.is_contiguous():
                leaf = leaves[index] = _aligned(leaf)
                address = leaf.data_ptr()
            for word in words:
                frame[word] = address
        scratch = self._allocate((self._scratch_bytes,), (1,), torch.uint8)
        scratch_start = scratch.data_ptr()
        if scratch_start != held:
            for word, offset in self._scratch:
                frame[word] = scratch_start + offset
        values: dict[int, torch.Tensor] = {}
        for slot, shape, strides, dtype in self._empty:
            values[slot] = tensor = self._allocate(shape, strides, dtype)
            self._point(frame, slot, tensor)
        for run, what, where in self._actions:
            if type(where) is int:
                run(what, stream, start + where)
                continue
            operands = [self._value(slot, values, leaves) for slot in what]
            for slot, tensor in zip(where, run(*operands), strict=True):
                values[slot] = tensor
                self._point(frame, slot, tensor)
        self._frames.append((frame, start, scratch_start))
        return [self._value(slot, values, leaves) for slot in self._results]

    def _point(self, frame: Any, slot: int, tensor: torch.Tensor) -> None:
        for word in self._places.get(slot, ()):
            frame[word] = tensor.data_ptr()

    def _value(self, slot: int, values: Mapping[int, torch.Tensor], leaves: Sequence[torch.Tensor]) -> torch.Tensor:
        if slot < len(leaves):
            return leaves[slot]
        return values[slot] if slot in values else self._fixed[slot]


def _with_views(steps: Sequence[Step], fixed: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """The fixed tensors and every view of one, contiguous as kernels read them."""
    found = {slot: _aligned(tensor) for slot, tensor in fixed.items()}
    for run, read, written in steps:
        if isinstance(run, View) and read[0] in found:
            [found[written[0]]] = run(found[read[0]])
    return found


def _seen_by_torch(steps: Sequence[Step], results: Sequence[int]) -> set[int]:
    """Slots that have to be tensors: what is returned, what functions of tensors read, and what these are views of."""
    seen = set(results)
    for run, read, written in reversed(steps):
        is_view, is_kernel = isinstance(run, View), isinstance(run, CompiledKernel)
        if not is_kernel and (not is_view or written[0] in seen):
            seen |= set(read)
    return seen


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_contiguous():
        return tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % ALIGNMENT else tensor


def _allocator(device: torch.device) -> Callable[[Any, Any, torch.dtype], torch.Tensor]:
    """A function of shape, strides and dtype; of the current device, which a call makes its own."""
    guards = getattr(getattr(torch._C, "_dynamo", None), "guards", None)  # where torch's own compiled programs have it
    own = getattr(guards, f"_empty_strided_{device.type}", None)
    return own or (lambda shape, strides, dtype: torch.empty_strided(shape, strides, dtype=dtype, device=device))


def _stream_of(device: torch.device) -> int:
    return torch.cuda.current_stream(device).cuda_stream


def _raw_stream_of(device: torch.device) -> int:
    return torch._C._cuda_getCurrentRawStream(device.index)  # what torch's own compiled programs call


_current_stream = _raw_stream_of if hasattr(torch._C, "_cuda_getCurrentRawStream") else _stream_of
