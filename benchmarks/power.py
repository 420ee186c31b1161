"""What a GPU's clock and power do while a layer runs without a pause.

    python benchmarks/power.py [--cells dsv3-ep8:w4a16_g128:64,matmul:bfloat16:8192,...] [--seconds 2.5] [--gpu 0]

A cell is model:scheme:tokens, or matmul:dtype:N: in place of a layer XLA's product of two N x N matrices.

Per cell, microseconds of a layer in programs of many calls: "burst", the least of five programs that follow a rest,
and "sustained", the median of the later half of --seconds without one. Beside them what nvidia-smi saw of GPU --gpu
(its own number for it) every 20 ms, the first third left out: the clock of the multiprocessors, watts, and the reasons
for a lower clock (clocks_event_reasons.active; 4 is the power cap).
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from _power import watched
from _timing import header
from moe_layer import scheme_named

import moe_jax
from moe_jax.benchmarking import layer_shape, random_weights

CELLS = (
    "dsv3-ep8:w4a16_g128:64,dsv3-ep8:w4a16_g128:256,dsv3-ep8:fp8_channel:64,mixtral-8x7b:nvfp4_a16:64,"
    "dsv3-ep8:w4a8_int8:64"
)
_ROUTINGS = 8


def product(dtype: str, size: int, calls: int) -> Callable[[], Any]:
    """One program of ``calls`` products after each other, compiled."""
    x, w = jax.random.normal(jax.random.key(0), (2, size, size), jnp.dtype(dtype))

    def many(x, w):
        def call(_, carry):
            x_now, carry = jax.lax.optimization_barrier((x, carry))
            return jax.lax.optimization_barrier(x_now @ w)[:1, :1] + carry * 0

        return jax.lax.fori_loop(0, calls, call, jnp.zeros((1, 1), x.dtype))

    compiled = jax.jit(many).lower(x, w).compile()
    return lambda: jax.block_until_ready(compiled(x, w))


def program(model: str, scheme: str, tokens: int, calls: int) -> Callable[[], Any]:
    """One program of ``calls`` layers after each other, compiled."""
    experts, top_k, hidden, intermediate = layer_shape(model)
    config = moe_jax.MoEConfig(
        experts, top_k, hidden, intermediate, scheme=scheme_named(scheme), implementation=("hopper",)
    )
    weights = jax.block_until_ready(random_weights(config))
    x = jax.random.normal(jax.random.key(0), (tokens, hidden), jnp.bfloat16)
    logits = jax.random.normal(jax.random.key(1), (_ROUTINGS, tokens, experts), jnp.float32)

    def many(weights, x, logits):
        def call(i, carry):
            x_now, carry = jax.lax.optimization_barrier((x, carry))
            y = moe_jax.fused_moe(x_now, logits[i % _ROUTINGS] + carry, weights, config)
            return y[:1, :1].astype(jnp.float32) * 1e-30

        return jax.lax.fori_loop(0, calls, call, jnp.zeros((1, 1), jnp.float32))

    compiled = jax.jit(many).lower(weights, x, logits).compile()
    return lambda: jax.block_until_ready(compiled(weights, x, logits))


def micros(run: Callable[[], Any], calls: int) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) / calls * 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", default=CELLS)
    parser.add_argument("--seconds", type=float, default=2.5)
    parser.add_argument("--gpu", default="0")
    options = parser.parse_args()
    print(header(), flush=True)
    for cell in options.cells.split(","):
        model, scheme, tokens = cell.split(":")
        calls = 200 if int(tokens) < 4096 else 20
        is_product = model == "matmul"
        run = product(scheme, int(tokens), calls) if is_product else program(model, scheme, int(tokens), calls)
        run()
        bursts = []
        for _ in range(5):
            time.sleep(0.15)
            bursts.append(micros(run, calls))
        until, times = time.perf_counter() + options.seconds, []
        with watched(options.gpu) as seen:
            while time.perf_counter() < until:
                times.append(micros(run, calls))
        clocks, watts = seen.clocks, seen.watts
        reasons = " ".join(sorted({f"{bits:x}" for bits in seen.reasons}))
        print(
            f"{cell:28s} burst {min(bursts):7.1f} sustained {statistics.median(times[len(times) // 2 :]):7.1f} us, "
            f"{min(clocks):.0f} to {max(clocks):.0f} MHz, median {statistics.median(clocks):.0f}, "
            f"{statistics.median(watts):.0f} W, at most {max(watts):.0f}, reasons {reasons}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
