"""Seconds until ``generate`` returns in a process that has a model's weights and none of its programs.

    python benchmarks/first_tokens.py --cache DIR [--case qwen3-30b-a3b:fp8_channel] [--layers 48] [--rows 1,64]
        [--prompt 100] [--new 16]
    JAX_PLATFORMS=cpu python benchmarks/first_tokens.py --cache DIR --tiny

Each call makes two programs, ``start`` for the prompts and ``proceed`` for the loop. Of each are given the seconds in
which XLA compiles it, or JAX finds what an earlier process has compiled. Almost all of the rest is tracing and
lowering, or finding what was lowered: the next call of the same shapes takes a fraction. Run it twice with one DIR, an
empty folder at first; MOE_JAX_PROGRAM_CACHE=0 keeps no lowered programs. Weights are random, made by generate.py.
"""

import argparse
import collections
import sys
import time

import jax
from _arguments import whole, wholes
from _timing import header
from generate import build, checked_case

from moe_jax.models import generate

_PROGRAMS = "start", "proceed"
_COMPILED = "/jax/core/compile/backend_compile_duration"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", required=True)
    parser.add_argument("--case", type=checked_case, default="qwen3-30b-a3b:fp8_channel")
    parser.add_argument("--layers", type=whole(1), default=48)
    parser.add_argument("--rows", type=wholes(1), default="1,64")
    parser.add_argument("--prompt", type=whole(1), default=100, help="tokens of a prompt")
    parser.add_argument("--new", type=whole(1), default=16, help="tokens to add")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    options.vocabulary, options.dense = 0, "stored"
    jax.config.update("jax_compilation_cache_dir", options.cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    spent: dict[str, float] = collections.defaultdict(float)

    def listen(event: str, duration_secs: float, **about: str | int) -> None:
        program = str(about.get("fun_name", "")).removeprefix("jit_").removeprefix("jit(").removesuffix(")")
        if event == _COMPILED:
            spent[program] += duration_secs

    jax.monitoring.register_event_duration_secs_listener(listen)
    began = time.monotonic()
    name, scheme = options.case.split(":")
    model = build(name, scheme, options)
    weights = time.monotonic() - began
    print(header(), options.case, f"layers: {len(model.layers)}; weights made in {weights:.1f} s", flush=True)
    for rows in options.rows:
        prompts = [[5 + (row + i) % 300 for i in range(options.prompt)] for row in range(rows)]
        spent.clear()
        seconds = []
        for _ in range(2):
            began = time.monotonic()
            jax.block_until_ready(generate(model, prompts, max_new_tokens=options.new))
            seconds.append(time.monotonic() - began)
        compiled = ", ".join(f"{program} {spent[program]:.2f} s" for program in _PROGRAMS)
        print(f"rows={rows:3d}: {seconds[0]:.2f} s, compiled: {compiled}; the next call {seconds[1]:.2f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
