"""Hopper kernels as launches on torch's current stream, without JAX's runtime: what side streams and CUDA graphs need.

A function of ``pallas_kernels`` is kernels with reshapes between them, a whole layer too. Its trace is walked once;
every kernel in it is lowered and compiled by itself, by the launcher that ``plgpu.as_torch_kernel`` is made of, and a
call is one launch per kernel (``_launch``). ``as_torch_kernel`` itself takes one kernel, has no float8 results, and
launches on torch's default stream whatever the current one is.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import numpy as np
import torch
from jax.extend import core
from jax.extend.mlir import ir, passmanager

from torch_bridge._tensors import numpy_dtype, torch_dtype
from torch_bridge.launch._launch import CompiledKernel, Launches, Shapes, Step, View

_KERNEL = "mpmd_map"  # the primitive of plgpu.kernel in JAX 0.10 and 0.11


def as_torch_kernels(function: Callable[..., Any], *bound: Any) -> Callable[..., Any]:
    """A function of Hopper kernels on JAX arrays, callable with CUDA tensors; results are new tensors.

    function: of ``pallas_kernels`` (``grouped_gemm``, ``combine``, ...) with implementation="hopper" and everything
    but arrays bound, or a composition of them; arguments and results may be any pytrees. Everything runs on torch's
    current stream, so that side streams are ordered as for any operator of torch, and CUDA graphs can capture it after
    one call with the same shapes. An int64 tensor comes as its words, int32 with a last axis of 2, low words first.
    bound: last arguments that stay the same tensors in every call, such as weights.

    Raises NotImplementedError for a function that computes outside of kernels, by the operation's name, RuntimeError
    for a first call during capture, and what the function raises.
    """
    return functools.update_wrapper(TorchKernels(function, *bound), function)


class TorchKernels:
    """What ``as_torch_kernels`` returns."""

    def __init__(self, function: Callable[..., Any], *bound: Any):
        self._function, self._bound = function, bound
        self._known: dict[Any, tuple[KernelProgram, Launches] | NotImplementedError] = {}

    def __call__(self, *args: Any) -> Any:
        leaves, program, launches = self.found(*args)
        return jax.tree.unflatten(program.structure, launches(leaves))

    def found(self, *args: Any) -> tuple[list[torch.Tensor], "KernelProgram", Launches]:
        """The leaves of arguments, and what launches on them. Raises as a call does."""
        leaves, structure = jax.tree.flatten(args)
        device = leaves[0].device
        key = structure, device, tuple([(leaf.shape, leaf.dtype) for leaf in leaves])
        found = self._known.get(key)
        if found is None:
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                raise CaptureError(
                    "a CUDA graph is being captured, in which kernels cannot be compiled: call once with the same "
                    "shapes before capturing"
                )
            structs, structure = jax.tree.flatten(jax.tree.map(_struct, (args, self._bound)))
            program = _program(self._function, structure, tuple((struct.shape, struct.dtype) for struct in structs))
            try:
                is_refused = isinstance(program, NotImplementedError)
                found = program if is_refused else (program, program.load(device, self._bound))
            except NotImplementedError as error:
                found = error.with_traceback(None)
            self._known[key] = found
        if isinstance(found, NotImplementedError):
            raise found
        return leaves, *found


@functools.lru_cache(maxsize=1024)
def _program(
    function: Callable[..., Any], structure: Any, shapes: tuple[Any, ...]
) -> "KernelProgram | NotImplementedError":
    """The program for (arguments, bound), which layers of one shape share, or the error of a function that has none."""
    args, bound = jax.tree.unflatten(structure, [jax.ShapeDtypeStruct(*shape) for shape in shapes])
    try:
        return KernelProgram(function, *args, bound=bound)
    except NotImplementedError as error:
        return error.with_traceback(None)


class CaptureError(RuntimeError):
    """A call that cannot be captured in a CUDA graph yet."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One kernel of a program. module: what the launcher compiles. results: shape and dtype of each."""

    module: bytes
    results: Shapes

    def load(self) -> CompiledKernel:
        """Compile for the current GPU of this process."""
        return CompiledKernel.compile(self.module, self.results)


@dataclasses.dataclass(frozen=True)
class Spread:
    """Elements repeated along the axes that are 1 in ``sizes``."""

    sizes: tuple[int, ...]
    shape: tuple[int, ...]

    def __call__(self, tensor: torch.Tensor) -> tuple[torch.Tensor]:
        return (tensor.reshape(self.sizes).expand(self.shape).contiguous(),)


@dataclasses.dataclass(frozen=True)
class Cast:
    """The same values in another dtype."""

    dtype: torch.dtype

    def __call__(self, tensor: torch.Tensor) -> tuple[torch.Tensor]:
        return (tensor.to(self.dtype),)


class KernelProgram:
    """The kernels of one function for one set of shapes, in order, with the reshapes between them.

    steps: (run, slots read, slots written) with a ``Kernel``, a ``View`` or a function of tensors as run; nothing is
    compiled for a GPU before the first call.
    """

    def __init__(self, function: Callable[..., Any], *args: Any, bound: tuple[Any, ...] = ()):
        """args and bound: ShapeDtypeStructs in any pytree. Raises as ``as_torch_kernels`` says."""
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*args, *bound)
        self.structure = jax.tree.structure(shape)
        self._num_leaves = len(jax.tree.leaves(args))
        self._num_slots = len(closed.jaxpr.invars)
        self._constants: list[tuple[int, Any]] = []
        self.steps: list[tuple[Any, tuple[int, ...], tuple[int, ...]]] = []
        self._results = self._walk(closed, list(range(self._num_slots)))
        self._loaded: dict[torch.device, list[Step]] = {}

    @classmethod
    def of_parts(
        cls,
        num_leaves: int,
        steps: list[tuple[Any, tuple[int, ...], tuple[int, ...]]],
        constants: list[tuple[int, Any]],
        results: list[int],
        structure: Any,
    ) -> "KernelProgram":
        """A program that was traced elsewhere, from its ``parts`` and the tree of its results."""
        program = cls.__new__(cls)
        program.structure, program._num_leaves, program._results = structure, num_leaves, results
        program.steps, program._constants, program._loaded = steps, constants, {}
        return program

    @property
    def parts(self) -> tuple[int, list[tuple[Any, tuple[int, ...], tuple[int, ...]]], list[tuple[int, Any]], list[int]]:
        """What ``of_parts`` takes, but for the tree of the results."""
        return self._num_leaves, self.steps, self._constants, self._results

    @property
    def kernels(self) -> list[Kernel]:
        return [run for run, _, _ in self.steps if isinstance(run, Kernel)]

    def load(self, device: torch.device, bound: Any) -> Launches:
        """What launches the program on a device over the tensors that are bound; kernels are compiled once for each.

        Raises NotImplementedError when JAX's launcher is not known here.
        """
        fixed = dict(enumerate(jax.tree.leaves(bound), self._num_leaves))
        fixed |= {slot: torch.as_tensor(value, device=device) for slot, value in self._constants}
        if device not in self._loaded:
            with torch.cuda.device(device if device.type == "cuda" else -1):
                self.take(device, [kernel.load() for kernel in self.kernels])
        return Launches(self._loaded[device], self._num_leaves, fixed, self._results, device)

    def is_loaded(self, device: torch.device) -> bool:
        """Whether ``take`` has brought what is compiled for a device."""
        return device in self._loaded

    def take(self, device: torch.device, compiled: Sequence[CompiledKernel]) -> None:
        """``kernels``, compiled for a device."""
        loaded = iter(compiled)
        self._loaded[device] = [
            (next(loaded) if isinstance(run, Kernel) else run, read, written) for run, read, written in self.steps
        ]

    def _new_slot(self, constant: Any = None) -> int:
        self._num_slots += 1
        if constant is not None:
            self._constants.append((self._num_slots - 1, np.asarray(constant)))
        return self._num_slots - 1

    def _walk(self, closed: core.ClosedJaxpr, inputs: Sequence[int]) -> list[int]:
        """The steps of one trace, given the slots of its inputs; the slots of its outputs."""
        slots = dict(zip(closed.jaxpr.invars, inputs, strict=True))
        for variable, value in zip(closed.jaxpr.constvars, closed.consts, strict=True):
            slots[variable] = self._new_slot(value)

        def read(variables: Sequence[Any]) -> list[int]:
            return [self._new_slot(v.val) if isinstance(v, core.Literal) else slots[v] for v in variables]

        for equation in closed.jaxpr.eqns:
            name, found = equation.primitive.name, read(equation.invars)
            inner = next((v for v in equation.params.values() if isinstance(v, core.ClosedJaxpr)), None)
            kernel = inner if inner is not None and [e.primitive.name for e in inner.jaxpr.eqns] == [_KERNEL] else None
            if kernel is not None or name in _BETWEEN:
                written = [self._new_slot() for _ in equation.outvars]
                run = _BETWEEN[name](equation) if kernel is None else _kernel(kernel)
                self.steps.append((run, tuple(found), tuple(written)))
            elif inner is not None:
                written = self._walk(inner, found)
            else:
                raise NotImplementedError(
                    f"{name} runs outside of the kernels, which torch cannot launch; leave this layer or function to "
                    "JAX's runtime"
                )
            slots.update(zip(equation.outvars, written, strict=True))
        return read(closed.jaxpr.outvars)


def _struct(leaf: Any) -> jax.ShapeDtypeStruct:
    if leaf.dtype is torch.int64:
        return jax.ShapeDtypeStruct((*leaf.shape, 2), np.int32)
    dtype = numpy_dtype(leaf.dtype) if isinstance(leaf.dtype, torch.dtype) else leaf.dtype
    return jax.ShapeDtypeStruct(tuple(leaf.shape), dtype)


def _kernel(closed: core.ClosedJaxpr) -> Kernel:
    """A trace that is one kernel, lowered. Raises NotImplementedError when anything is left beside it."""
    jaxpr = closed.jaxpr
    structs = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in jaxpr.invars]
    module = jax.jit(core.jaxpr_as_fun(closed)).trace(*structs).lower(lowering_platforms=("cuda",)).compiler_ir()
    assert module is not None
    with module.context:
        mgpu.dialect.register_inliner_extensions(module.context)  # pyright: ignore[reportPrivateImportUsage]
        passmanager.PassManager.parse("builtin.module(inline{default-pipeline=})").run(module.operation)
        main = next(op for op in module.body.operations if op.name.value == "main")
        *calls, returned = main.body.blocks[0].operations
        names = [call.call_target_name.value if call.name == "stablehlo.custom_call" else call.name for call in calls]
        if names != ["mosaic_gpu_v2"]:
            raise NotImplementedError(f"a kernel lowers to {', '.join(names)}, expected one call of mosaic_gpu_v2")
        call = calls[0]
        operands = [ir.BlockArgument(operand).arg_number for operand in call.operands]
        if operands != list(range(len(structs))) or list(returned.operands) != list(call.results):
            raise NotImplementedError(f"a kernel takes its operands in the order {operands}")
        if len(call.attributes["output_operand_aliases"]):
            raise NotImplementedError("a kernel writes into its operands")
        code = call.attributes["mhlo.backend_config"]["module"].value_bytes
    results = tuple((tuple(v.aval.shape), torch_dtype(v.aval.dtype)) for v in jaxpr.outvars)
    return Kernel(bytes(code), results)


def _reshape(equation: Any) -> Callable[..., Any]:
    return View(equation.outvars[0].aval.shape)


def _broadcast(equation: Any) -> Callable[..., Any]:
    shape, kept = equation.params["shape"], equation.params["broadcast_dimensions"]
    operand = equation.invars[0].aval
    if operand.size == math.prod(shape):
        return View(shape)
    sizes = [1] * len(shape)
    for dimension, size in zip(kept, operand.shape, strict=True):
        sizes[dimension] = size
    return Spread(tuple(sizes), tuple(shape))


def _convert(equation: Any) -> Callable[..., Any]:
    return Cast(torch_dtype(equation.outvars[0].aval.dtype))


_BETWEEN = {
    "reshape": _reshape,
    "squeeze": _reshape,
    "broadcast_in_dim": _broadcast,
    "convert_element_type": _convert,
}
