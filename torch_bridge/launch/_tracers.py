"""Processes that trace programs side by side. Tracing holds the interpreter's lock, so threads do not help.

A process gets one job after the other through a pipe that only its parent writes to, and leaves the program on disk. A
job that fails leaves nothing there: the parent traces it itself, and so raises what is wrong.

These are no processes of ``multiprocessing``, whose daemons may have no children: vLLM's workers are such daemons.
"""

import concurrent.futures
import contextlib
import os
import queue
import subprocess
import sys
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, Pipe
from types import TracebackType
from typing import Any

from torch_bridge.launch import _stored
from torch_bridge.launch._programs import PROGRAMS, Job, Programs

_START = "import sys; from torch_bridge.launch._tracers import serve; serve(int(sys.argv[1]))"
_JOBS_OF_ONE = 4  # a process takes about as long to start as to trace four programs


def _num_processes(num_jobs: int) -> int:
    """How many pay off; 0 where this process alone is as fast."""
    found = min(num_jobs // _JOBS_OF_ONE, len(os.sched_getaffinity(0)))
    return found if found > 1 else 0


def make_all(programs: Programs, jobs: Sequence[Job]) -> Iterator[tuple[str, bool]]:
    """What ``Programs.make`` returns for each job, in order; many new programs are traced by processes.

    Raises what ``make`` raises.
    """
    is_new = [not programs.is_known(*job) for job in jobs]
    count = _num_processes(sum(is_new)) if _stored.can_save() else 0
    with _Tracers(count) if count else contextlib.nullcontext() as tracers:
        waits = [tracers.trace(*job) if tracers and new else None for job, new in zip(jobs, is_new, strict=True)]
        for job, new, wait in zip(jobs, is_new, waits, strict=True):
            if wait is not None:
                wait.result()
            name, is_traced = programs.make(*job)
            yield name, new or is_traced


class _Tracers:
    """A context with processes that end with it. count: of the processes."""

    def __init__(self, count: int):
        self._started = [_start() for _ in range(count)]
        self._idle: queue.SimpleQueue[Connection] = queue.SimpleQueue()
        for _, connection in self._started:
            self._idle.put(connection)
        self._pool = concurrent.futures.ThreadPoolExecutor(count, "moe_jax_tracers")

    def trace(self, *job: Any) -> concurrent.futures.Future[None]:
        """What is done when a process has traced a program, or failed to. job: arguments of ``Programs.make``."""
        return self._pool.submit(self._trace, job)

    def _trace(self, job: tuple[Any, ...]) -> None:
        connection = self._idle.get()
        with contextlib.suppress(EOFError, OSError):  # a process that has ended
            connection.send(job)
            connection.recv()
        self._idle.put(connection)

    def __enter__(self) -> "_Tracers":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: Any, trace: TracebackType | None) -> None:
        for process, _ in self._started:
            process.kill()
        self._pool.shutdown(cancel_futures=True)
        for process, connection in self._started:
            process.wait()
            connection.close()


def serve(descriptor: int) -> None:
    """Trace what comes through a pipe until it ends."""
    with Connection(descriptor) as connection, contextlib.suppress(EOFError, OSError):
        while True:
            job = connection.recv()
            with contextlib.suppress(Exception):  # the parent meets it again
                PROGRAMS.make(*job)
            connection.send(None)


def _start() -> tuple[subprocess.Popen[bytes], Connection]:
    ours, theirs = Pipe()
    environment = os.environ | dict(
        PYTHONPATH=os.pathsep.join(filter(None, sys.path)),
        JAX_PLATFORMS="cpu",
        CUDA_VISIBLE_DEVICES="",
        OMP_NUM_THREADS="1",
    )
    with theirs:
        descriptor = theirs.fileno()
        process = subprocess.Popen(
            [sys.executable, "-c", _START, str(descriptor)],
            pass_fds=[descriptor],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
    return process, ours
