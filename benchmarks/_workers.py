"""What scripts share whose parts are processes of their own: the lines that these print, and the time of a call."""

import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TextIO

# Memory is taken as it is needed: several processes share a GPU.
ENVIRONMENT = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def run_all(
    jobs: Sequence[tuple[list[str], Mapping[str, str]]],
    at_once: int,
    *,
    seconds: float = math.inf,
    seconds_each: float = math.inf,
) -> None:
    """Run commands, each with what is added to its environment.

    A process is killed after ``seconds_each``, those that are left after ``seconds``.
    """
    until, waiting = time.time() + seconds, list(jobs)
    running: list[tuple[subprocess.Popen, float]] = []
    try:
        while (waiting or running) and time.time() < until:
            for worker, end in running:
                if time.time() > end:
                    worker.kill()
            running = [(worker, end) for worker, end in running if worker.poll() is None]
            while waiting and len(running) < at_once:
                command, added = waiting.pop(0)
                running.append((subprocess.Popen(command, env=ENVIRONMENT | added), time.time() + seconds_each))
            time.sleep(0.1)
    finally:
        for worker, _ in running:
            worker.kill()


def lines_of(command: list[str], limit: float, environment: Mapping[str, str] = ENVIRONMENT) -> Iterator[str]:
    """What a process says by ``emit``, as it says it; killed after ``limit`` seconds.

    A failure is the last line: "WRONG ", how it ended, the command's last word, and its last lines.
    """
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    timer = threading.Timer(limit, process.kill)
    timer.start()
    assert process.stdout is not None
    last: list[str] = []
    for text in process.stdout:
        if text.startswith("| "):
            yield text[2:].rstrip()
        else:
            last = [*last[-6:], text.rstrip()]
    timer.cancel()
    code = process.wait()
    if code:
        end = f"killed after {limit:.0f} s" if code == -signal.SIGKILL else f"exit {code}"
        yield f"WRONG {end} of {command[-1]}: " + " / ".join(last)[-600:]


def emit(line: str) -> None:
    """Say a line to the process that waits in ``lines_of``."""
    print("| " + line, flush=True)


def say(line: str, out: TextIO) -> None:
    """Print a line and write it to the file, at once."""
    print(line, flush=True)
    out.write(line + "\n")
    out.flush()


def in_turns(way: Callable[..., Any], calls: int, n: Any, q: Any, *rest: Any) -> Any:
    """n turns of some calls, each fed by the one before: XLA makes one of calls with the same arguments.

    The host waits for the loop's condition, so that a turn has several. An output of another shape than q feeds one
    element of it.
    """
    import jax

    def step(_, q):
        for _ in range(calls):
            out = way(q, *rest)
            q = out if out.shape == q.shape else q.at[0, 0, 0, 0].set(out[0, 0, 0, 0])
        return q

    return jax.lax.fori_loop(0, n, step, q)


def microseconds(program: Any, arrays: tuple[Any, ...], calls: int) -> float:
    """Of one call in ``in_turns``, which ``program`` is compiled from: the time of two turns is taken off."""
    import jax
    import numpy as np

    def seconds(n: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready(program(np.int32(n), *arrays))
        return time.perf_counter() - start

    seconds(2)
    seconds(2)
    one = max((seconds(22) - seconds(2)) / 20, 1e-6)
    many = int(min(max(0.04 / one, 10), 500))
    found = sorted(seconds(2 + many) - seconds(2) for _ in range(5))
    return found[2] / many / calls * 1e6
