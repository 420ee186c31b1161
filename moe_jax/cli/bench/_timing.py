"""Device time of one call inside ``jax.jit``."""

import contextlib
import datetime
import functools
import platform
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax._typing import Json

_CALLS = (2, 10)
NUM_VARIANTS = _CALLS[1]


def time_in_jit(
    call: Callable[..., Any],
    args: tuple[Any, ...],
    varied: int,
    *,
    variants: Sequence[Any] | None = None,
    samples: int = 5,
    turn: Callable[[], Any] = contextlib.nullcontext,
    budget_s: float = 0.02,
    rest_s: float = 0.0,
    calls: tuple[int, int] = _CALLS,
    rounds: int = 1,
    compiler_options: Json | None = None,
) -> float:
    """Microseconds one ``call(*args)`` takes on the device, launches inside one program included.

    Programs of ``calls[0]`` and of ``calls[1]`` calls run back to back; the difference is what 8 calls take (of 2 and
    10), and what a program costs on the host drops out. With calls[0] = 0 the longer one runs alone, and what its start
    costs is spread over about ``budget_s`` seconds. XLA would merge equal calls, so each gets its own copy of the small
    argument ``args[varied]``, or one of the ``variants`` of it, at least calls[1]. Every result is returned, so that
    nothing is dead. Inputs of more than the L2 (60 MB) are cold by size; where the variants choose what is read of
    them, count what calls[1] calls read. Median over samples. turn: makes the context of everything that runs on the
    device; programs are compiled outside of it, with XLA's ``compiler_options``. rest_s: idle time before each sample,
    which then begins with a program that is not counted, for calls that bring the device to its power limit, where its
    clocks fall within tens of milliseconds. A call waits for the one before: side by side, XLA's kernels could read the
    same weights at the same time. XLA still merges collectives of several calls (``time_in_loop`` is for those).

    rounds: how often a program runs its calls, in a loop; a loop's arrays stay where they are, so that XLA records its
    launches once (a CUDA graph) and replays them, where those of a program's results are recorded anew each time.

    Raises RuntimeError when the longer program did not take longer: the machine is too busy, or the call too short.
    """
    short, long = calls
    inner = jax.jit(call)
    if variants is None:
        variants = [np.asarray(args[varied]).copy() for _ in range(long)]
    copies = [jax.device_put(one) for one in variants]

    def program(count):
        def once(args, copies):
            results: list[Any] = []
            for own in copies[:count]:
                if results:  # each call waits for the one before
                    own, results[-1] = jax.lax.optimization_barrier((own, results[-1]))
                results.append(inner(*args[:varied], own, *args[varied + 1 :]))
            return results

        def one_round(_, carry, args, copies):
            copies, carry = jax.lax.optimization_barrier((copies, carry))  # else XLA may move calls out of the loop
            firsts = [leaf.ravel()[:1] for leaf in jax.tree.leaves(jax.lax.optimization_barrier(once(args, copies)))]
            return carry + sum(first.astype(carry.dtype) for first in firsts)

        def run(args, copies):
            body = functools.partial(one_round, args=args, copies=copies)
            return jax.lax.fori_loop(0, rounds, body, jnp.zeros(1))

        return jax.jit(once if rounds == 1 else run)

    programs = {count: program(count) for count in calls}

    def seconds(count: int, repeats: int) -> float:
        start = time.perf_counter()
        out = None
        for _ in range(repeats):
            out = compiled[count](args, copies[:count])
        jax.block_until_ready(out)
        return (time.perf_counter() - start) / repeats

    options = None if compiler_options is None else dict(compiler_options)
    compiled = {
        count: program.lower(args, copies[:count]).compile(compiler_options=options)
        for count, program in programs.items()
        if count
    }
    with turn():
        for count in compiled:
            seconds(count, 2)
        repeats = int(np.clip(budget_s / seconds(long, 3), 1 if rest_s else 2, 40))
        differences = []
        for _ in range(samples):
            if rest_s:
                time.sleep(rest_s)
                seconds(long, 1)
            differences.append(seconds(long, repeats) - (seconds(short, repeats) if short else 0.0))
    found = float(np.median(differences)) / (rounds * (long - short)) * 1e6
    if found <= 0:
        raise RuntimeError(
            f"{long} calls did not take longer than {short}: the machine is too busy, or the call too short"
        )
    return found


def time_in_loop(
    body: Callable[..., Any],
    args: Any,
    carry: Any,
    *,
    rounds: int = 40,
    samples: int = 7,
    turn: Callable[[], Any] = contextlib.nullcontext,
) -> float:
    """Microseconds a round ``body(i, args, carry) -> carry`` takes in a loop inside jit, as layers run under ``scan``.

    Each round waits for the carry of the one before, so nothing overlaps; what the loop costs the host is in it. Of
    programs of 4 and of ``4 + rounds`` rounds the difference, median over samples. turn: as for ``time_in_jit``.
    """

    def program(count: int) -> Any:
        run = jax.jit(lambda args, carry: jax.lax.fori_loop(0, count, lambda i, c: body(i, args, c), carry))
        return run.lower(args, carry).compile()

    pair, differences = [program(4), program(4 + rounds)], []
    with turn():
        for sample in range(samples + 2):
            times = []
            for run in pair:
                start = time.perf_counter()
                jax.block_until_ready(run(args, carry))
                times.append(time.perf_counter() - start)
            if sample >= 2:
                differences.append((times[1] - times[0]) / rounds)
    return float(np.median(differences)) * 1e6


def header() -> str:
    """Device, versions and date, for the top of a result file."""
    device = jax.devices()[0]
    today = datetime.date.today().isoformat()
    return f"# {device.device_kind}, jax {jax.__version__}, Python {platform.python_version()}, {today}"
