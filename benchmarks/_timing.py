"""Device time of one call inside ``jax.jit``, and the limits it is compared with."""

import contextlib
import datetime
import platform
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

# Measured on one H200 (benchmarks/results): what a kernel could reach at most.
READ_GBPS = 4385.0
DENSE_TFLOPS = {"bfloat16": 789.0, "float16": 789.0, "float8_e4m3fn": 1490.0, "int8": 1473.0}

_SHORT, _LONG = 2, 10
NUM_VARIANTS = _LONG


def time_in_jit(
    call: Callable[..., Any],
    args: tuple,
    varied: int,
    *,
    variants: Sequence[Any] | None = None,
    samples: int = 5,
    turn: Callable[[], Any] = contextlib.nullcontext,
    budget_s: float = 0.02,
) -> float:
    """Microseconds one ``call(*args)`` takes on the device, launches inside one program included.

    Programs of 2 and of 10 calls run back to back; the difference is 8 calls, and what a program costs on the host
    drops out. XLA would merge equal calls, so each gets its own copy of the small argument ``args[varied]``, or one of
    the ten ``variants`` of it. Every result is returned, so that nothing is dead. Inputs of more than the L2 (60 MB)
    are cold by size; where the variants choose what is read of them, count what ten calls read. Median over samples.
    turn: makes the context of everything that runs on the device; programs are compiled outside of it.
    """
    inner = jax.jit(call)
    if variants is None:
        variants = [np.asarray(args[varied]).copy() for _ in range(_LONG)]
    copies = [jax.device_put(one) for one in variants]

    def program(count):
        def run(args, copies):
            return [inner(*args[:varied], copies[i], *args[varied + 1 :]) for i in range(count)]

        return jax.jit(run)

    programs = {count: program(count) for count in (_SHORT, _LONG)}

    def seconds(count: int, repeats: int) -> float:
        start = time.perf_counter()
        out = None
        for _ in range(repeats):
            out = compiled[count](args, copies[:count])
        jax.block_until_ready(out)
        return (time.perf_counter() - start) / repeats

    compiled = {count: program.lower(args, copies[:count]).compile() for count, program in programs.items()}
    with turn():
        for count in compiled:
            seconds(count, 2)
        repeats = int(np.clip(budget_s / seconds(_LONG, 3), 2, 40))
        differences = [seconds(_LONG, repeats) - seconds(_SHORT, repeats) for _ in range(samples)]
    return float(np.median(differences)) / (_LONG - _SHORT) * 1e6


def header() -> str:
    """Device, versions and date, for the top of a result file."""
    device = jax.devices()[0]
    today = datetime.date.today().isoformat()
    return f"# {device.device_kind}, jax {jax.__version__}, Python {platform.python_version()}, {today}"
