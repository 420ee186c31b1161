"""Programs made ahead: traced or read from disk, compiled by threads, shared by the layers of one configuration."""

import concurrent.futures
import functools
import logging
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import torch

from torch_bridge.launch import _stored
from torch_bridge.launch._gpu import Gpu
from torch_bridge.launch._kernels import Kernel, KernelProgram

_log = logging.getLogger(__name__)
_MOST_THREADS = 16
Job = tuple[Callable[..., Any], Sequence[Any], Any, Gpu]  # arguments of ``Programs.make``


class Programs:
    """The programs of one process, by the names of their files."""

    def __init__(self) -> None:
        self._made: dict[str, KernelProgram] = {}
        self._pending: dict[tuple[str, torch.device], list[concurrent.futures.Future[Any]]] = {}
        self._lock = threading.RLock()

    def make(self, function: Callable[..., Any], args: Sequence[Any], bound: Any, gpu: Gpu) -> tuple[str, bool]:
        """Have the program of a function of one result; its name, and whether it had to be traced.

        args and bound: ShapeDtypeStructs in any pytree. Raises NotImplementedError as ``as_torch_kernels`` does.
        """
        name = _stored.name_of(function, (tuple(args), bound), gpu)
        with self._lock:
            if name in self._made:
                return name, False
            program = _stored.load(name)
            is_new = program is None
            if program is None:
                with gpu.tracing():
                    program = KernelProgram(function, *args, bound=(bound,))
                _stored.save(name, program)
            self._made[name] = program
            return name, is_new

    def is_known(self, function: Callable[..., Any], args: Sequence[Any], bound: Any, gpu: Gpu) -> bool:
        """Whether ``make`` finds the program in this process or on disk."""
        name = _stored.name_of(function, (tuple(args), bound), gpu)
        return name in self._made or _stored.is_there(name)

    def __getitem__(self, name: str) -> KernelProgram:
        return self._made[name]

    def compile(self, name: str, device: torch.device) -> None:
        """Begin to compile a program for a device, in the background."""
        with self._lock:
            if (name, device) not in self._pending:
                load = functools.partial(_load, device=device)
                self._pending[name, device] = [_threads().submit(load, k) for k in self._made[name].kernels]

    def ready(self, name: str, device: torch.device) -> KernelProgram:
        """The program, compiled for a device. Raises what the compiler raises."""
        with self._lock:
            program = self._made[name]
            if device.type == "cuda" and not program.is_loaded(device):
                self.compile(name, device)
                program.take(device, [future.result() for future in self._pending.pop((name, device))])
            return program

    def wait(self) -> None:
        """Until nothing is compiled in the background any more: modules cannot be loaded while a graph is captured."""
        with self._lock:
            for name, device in list(self._pending):
                self.ready(name, device)


def _load(kernel: Kernel, device: torch.device) -> Any:
    with torch.cuda.device(device):
        torch.cuda.current_stream(device).synchronize()  # makes torch's context this thread's
        return _FIRST.then(kernel.load)


class _FirstAlone:
    """Calls from many threads, of which none begins before the first one has ended; what fails beside others is tried
    once more.

    JAX itself compiles one kernel at a time, and its entry for torch takes no lock. Where programs are on disk all
    threads begin at once, and at times one fails there without a reason.
    """

    def __init__(self) -> None:
        self._lock, self._is_over = threading.Lock(), False

    def then(self, call: Callable[[], Any]) -> Any:
        if not self._is_over:
            with self._lock:
                if not self._is_over:
                    result = call()
                    self._is_over = True
                    return result
        try:
            return call()
        except RuntimeError as error:
            _log.warning("once more, since it failed beside others: %s", error)
            with self._lock:
                return call()


@functools.cache
def _threads() -> concurrent.futures.ThreadPoolExecutor:
    count = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
    return concurrent.futures.ThreadPoolExecutor(count, thread_name_prefix="moe_jax")


PROGRAMS = Programs()
_FIRST = _FirstAlone()


def struct(shape: Sequence[int], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(shape), dtype)
