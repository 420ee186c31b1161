"""Kernels of a GPU by JAX's profiler: what ran when, and for how long."""

import contextlib
import glob
import re
import tempfile
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

# In compiler_options: launches outside of command buffers, whose kernels are not traced one by one.
NO_COMMAND_BUFFERS: dict[str, str | bool] = {"xla_gpu_enable_command_buffer": ""}
PAUSE = 0.004  # seconds to sleep between two programs of a trace, so that ``split`` tells them apart


class Kernel(NamedTuple):
    """start, duration: microseconds."""

    start: float
    duration: float
    name: str


@contextlib.contextmanager
def traced() -> Iterator[list[Kernel]]:
    """A list that holds the kernels of the block, by start, once it is over."""
    found: list[Kernel] = []
    options: Any = jax.profiler.ProfileOptions()
    options.python_tracer_level = options.host_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            yield found
        for path in glob.glob(f"{folder}/**/*.xplane.pb", recursive=True):
            for plane in jax.profiler.ProfileData.from_file(path).planes:
                for row in plane.lines if "GPU" in plane.name else ():
                    if "Stream" in row.name:
                        found += [Kernel(e.start_ns / 1e3, e.duration_ns / 1e3, e.name) for e in row.events]
    found.sort()


def split(found: list[Kernel]) -> list[list[Kernel]]:
    """The kernels of each program, where ``PAUSE`` lay between them."""
    parts: list[list[Kernel]] = []
    end = -float("inf")
    for kernel in found:
        if kernel.start - end > PAUSE * 0.5e6:
            parts.append([])
        parts[-1].append(kernel)
        end = kernel.start + kernel.duration
    return parts


def alone(found: list[Kernel]) -> Iterator[tuple[str, Kernel, float]]:
    """(name, kernel, microseconds) of each, by start.

    A kernel that is let in while the one before it runs waits for it, which counts as its duration. The microseconds
    are those from the end of all kernels before it. Numbers that XLA puts behind names are left out.
    """
    last = -float("inf")
    for kernel in sorted(found):
        end = kernel.start + kernel.duration
        yield re.sub(r"(_mosaic_gpu_kernel)?(_\d+)*$", "", kernel.name), kernel, max(0.0, end - max(kernel.start, last))
        last = max(last, end)


def by_name(found: list[Kernel], calls: int) -> list[tuple[str, float, float, float]]:
    """(name, microseconds, microseconds alone, launches) of a call, the longest alone first."""
    sums: dict[str, tuple[float, float, float]] = {}
    for name, kernel, own in alone(found):
        duration, own_before, launches = sums.get(name, (0.0, 0.0, 0.0))
        sums[name] = duration + kernel.duration / calls, own_before + own / calls, launches + 1 / calls
    return sorted(((name, *entry) for name, entry in sums.items()), key=lambda row: -row[2])


def medians_alone(found: list[Kernel], calls: int) -> dict[str, float]:
    """By name: the median of microseconds alone, times the launches in each of ``calls`` like calls."""
    each: dict[str, list[float]] = {}
    for name, _, own in alone(found):
        each.setdefault(name, []).append(own)
    return {name: float(np.median(own)) * len(own) / calls for name, own in each.items()}


def per_call(part: list[Kernel], calls: int) -> dict[str, Any]:
    """Median microseconds of each kernel of a call, and of the gap before it."""
    each, rest = divmod(len(part), calls)
    if rest or not each:
        return dict(kernels=f"{len(part)} kernels in {calls} calls: {sorted({k.name[:40] for k in part})[:8]}")
    starts, durations = (np.array([k[i] for k in part]).reshape(calls, each) for i in (0, 1))
    flat = starts.ravel()[1:] - (starts + durations).ravel()[:-1]
    gaps = np.append(np.nan, flat).reshape(calls, each)
    names = [kernel.name[:24] for kernel in part[:each]]
    return dict(
        kernels=[round(float(value), 2) for value in np.median(durations, axis=0)],
        gaps=[round(float(value), 2) for value in np.nanmedian(gaps, axis=0)],
        names=names,
    )
