"""How single products are timed: a program of several calls, launched again and again without a pause."""

import time
from collections.abc import Callable

import jax

BURSTS = 5
_BURST_S = 0.006


def calls_of(tokens: int) -> int:
    """Calls in a program, each with a routing of its own: the experts of one would stay in the L2."""
    return 40 if tokens == 1 else 20 if tokens <= 16 else 10 if tokens <= 1024 else 3


def seconds(run: Callable[[], object], repeats: int) -> float:
    """Of one ``run()`` among so many in a row, their results waited for at the end."""
    start = time.perf_counter()
    out = None
    for _ in range(repeats):
        out = run()
    jax.block_until_ready(out)
    return (time.perf_counter() - start) / repeats


def burst_length(run: Callable[[], object]) -> int:
    """Repeats that take some milliseconds; the first ones warm up."""
    seconds(run, 1)
    return max(1, min(20, int(_BURST_S / seconds(run, 2))))


def least_of_bursts(run: Callable[[], object]) -> float:
    """Seconds of one ``run()``: what others on the machine add to a burst is not its own."""
    repeats = burst_length(run)
    return min(seconds(run, repeats) for _ in range(BURSTS))
