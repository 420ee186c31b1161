"""Seconds that one layer takes to compile for a bucket of tokens, and to come back from the persistent cache.

    python benchmarks/compile_time.py [--model qwen3-30b-a3b] [--scheme fp8_channel] [--tokens 1,16,64] [--cache DIR]
        [--layers 1] [--implementation hopper]

Each bucket is traced, lowered and compiled in this process for the first time; "first call" runs it, which on a
GPU loads its machine code. Run it twice with one --cache, an empty folder at first: the second run shows what the
cache saves. --layers: so many layers after each other in one program, each with a name of its own, as a model has them;
all read the same random weights, made by moe_layer.py.
"""

import argparse
import dataclasses
import sys
import time

import jax
import jax.numpy as jnp
from _timing import header
from moe_layer import scheme_named

import moe_jax
from moe_jax.benchmarking import layer_shape, random_weights


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-30b-a3b")
    parser.add_argument("--scheme", default="fp8_channel")
    parser.add_argument("--tokens", default="1,16,64,256,1024,8192")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--cache")
    parser.add_argument("--implementation", default="hopper")
    options = parser.parse_args()
    if options.cache:  # before anything is compiled: JAX looks once
        jax.config.update("jax_compilation_cache_dir", options.cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    experts, top_k, hidden, intermediate = layer_shape(options.model)
    config = moe_jax.MoEConfig(
        experts,
        top_k,
        hidden,
        intermediate,
        scheme=scheme_named(options.scheme),
        implementation=(options.implementation,),
    )
    weights = jax.block_until_ready(random_weights(config))
    configs = [dataclasses.replace(config, name=f"layers.{i}.mlp") for i in range(options.layers)]

    def call(x, z, weights):
        for one in configs:
            x = moe_jax.fused_moe(x, z, weights, one)
        return x

    print(header(), options.model, options.scheme, f"layers: {options.layers}", flush=True)
    for tokens in map(int, options.tokens.split(",")):
        x, z = jnp.ones((tokens, hidden), jnp.bfloat16), jnp.ones((tokens, experts), jnp.float32)
        jax.block_until_ready((x, z))
        marks = [time.perf_counter()]
        lowered = jax.jit(call).lower(x, z, weights)
        marks.append(time.perf_counter())
        compiled = lowered.compile()
        marks.append(time.perf_counter())
        jax.block_until_ready(compiled(x, z, weights))
        marks.append(time.perf_counter())
        lower, compile_, first = (after - before for before, after in zip(marks, marks[1:], strict=False))
        print(
            f"T={tokens:5d}: trace and lower {lower:.2f} s, compile {compile_:.2f} s, first call {first:.2f} s",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
