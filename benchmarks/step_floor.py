"""What a decode step of so many launches a layer takes at least: some read, and the others do nothing.

    python benchmarks/step_floor.py [--layers 48] [--megabytes 10.5,134.4,8.4,396,198] [--empty 7] [--head 622]

A layer is one launch for each number of --megabytes, which copies so many from global to shared memory on all SMs and
uses none of them, and --empty launches that hand on one vector. Each launch waits for the one before it, as in a model.
--head: megabytes of one more that reads, at the end. The defaults are Qwen3-30B-A3B with FP8 blocks and 64 rows of 1025
slots: queries, keys and values, the cache, out of attention, both products of the 126 experts that 512 pairs hit.

Milliseconds of a step in programs of one step, without a pause: the median of 20, the least, and what reading takes at
the rate of a single launch that reads 4 GB, which is measured first.
"""

import argparse
import functools
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
from _timing import header
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common import mosaic
from pallas_kernels.common.device import hopper_sms
from pallas_kernels.common.row_kernel_sm90 import for_items_of, items_of, row_kernel

COLUMNS, ROWS, SLOTS = 256, 32, 6  # int32 columns, rows of a copy (32 KiB), copies under way on an SM
_TOKEN = jax.ShapeDtypeStruct((128,), jnp.int32)


def _pass_on(token: Any, out: Any) -> None:
    pl.when(lax.axis_index("cta") == 0)(lambda: out.__setitem__(..., token[...]))


def _read(num_ctas: int, tiles: int, token: Any, data: Any, out: Any, *, slots: Any, full: Any) -> None:
    mosaic.begin()
    own = items_of(lax.axis_index("cta"), tiles, num_ctas)

    def copy(tile, i):
        slot = lax.rem(i, jnp.int32(SLOTS))
        pl.when(i >= SLOTS)(lambda: plgpu.barrier_wait(full.at[slot]))
        plgpu.copy_gmem_to_smem(data.at[pl.ds(tile * ROWS, ROWS)], slots.at[slot], full.at[slot])

    for_items_of(lax.axis_index("cta"), tiles, num_ctas, lambda tile: copy(tile, lax.div(tile, jnp.int32(num_ctas))))

    def wait(i, _):
        plgpu.barrier_wait(full.at[lax.rem(i, jnp.int32(SLOTS))])
        return 0

    lax.fori_loop(lax.max(own - SLOTS, 0), own, wait, 0)
    _pass_on(token, out)


@jax.jit
def read(token: jax.Array, data: jax.Array) -> jax.Array:
    """Copies all of data (rows, 256) int32; returns token."""
    sms, tiles = hopper_sms(), data.shape[0] // ROWS
    scratch = dict(slots=plgpu.SMEM((SLOTS, ROWS, COLUMNS), jnp.int32), full=plgpu.Barrier(num_barriers=SLOTS))
    return row_kernel(functools.partial(_read, sms, tiles), _TOKEN, sms, "read", scratch_types=scratch)(token, data)


@jax.jit
def nothing(token: jax.Array) -> jax.Array:
    """Returns token, by a launch of 64 CTAs."""

    def body(token, out):
        mosaic.begin()
        _pass_on(token, out)

    return row_kernel(body, _TOKEN, 64, "nothing")(token)


def step(layers: int, empty: int, token: jax.Array, data: list[jax.Array], head: jax.Array | None) -> jax.Array:
    for _ in range(layers):
        for index, one in enumerate(data):
            token = read(token, one)
            for _ in range(empty // len(data) + (index < empty % len(data))):
                token = nothing(token)
    return token if head is None else read(token, head)


def milliseconds(run: Any, *args: Any) -> tuple[float, float]:
    """(median, least) of 20 calls of 10 without a pause."""
    compiled = jax.jit(run).lower(*args).compile()
    jax.block_until_ready(compiled(*args))
    found = []
    for _ in range(20):
        start = time.perf_counter()
        jax.block_until_ready([compiled(*args) for _ in range(10)])
        found.append((time.perf_counter() - start) * 100)
    return statistics.median(found), min(found)


def of_megabytes(count: float) -> jax.Array:
    return jnp.zeros((round(count * 1e6 / (4 * COLUMNS * ROWS)) * ROWS, COLUMNS), jnp.int32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--megabytes", default="10.5,134.4,8.4,396,198")
    parser.add_argument("--empty", type=int, default=7)
    parser.add_argument("--head", type=float, default=622.0)
    options = parser.parse_args()
    print(header())
    token, long = jnp.zeros(128, jnp.int32), of_megabytes(4000)
    rate = long.nbytes / milliseconds(read, token, long)[1] / 1e6
    del long
    sizes = [float(one) for one in options.megabytes.split(",")]
    data = [of_megabytes(one) for one in sizes]
    head = of_megabytes(options.head) if options.head else None
    reading = (sum(sizes) * options.layers + options.head) / rate
    print(
        f"one launch reads {rate:.0f} GB/s; {sum(sizes):.1f} MB a layer and the head take {reading:.2f} ms at that rate"
    )
    for empty in (options.empty, 0):
        run = functools.partial(step, options.layers, empty)
        median, least = milliseconds(run, token, data, head)
        print(
            f"{options.layers} layers, {len(sizes)} launches that read and {empty} that do not: "
            f"{median:.2f} ms, at least {least:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
