"""Layers of few tokens, with the tokens as the rows of every tile and with tokens moved to rows. Where a layer
quantizes them, that is a part of the launch that routes, or a launch of its own.

    python benchmarks/tokens_as_rows.py [--models qwen3-30b-a3b,...] [--tokens 1,4,8,16] [--schemes bf16,w4a16_g128,...]
    [--rounds 2] [--json FILE]

Both after each other in one process, in turns: us of a layer as moe_layer.py times it, each round, and whether the bits
of both are the same. A number of tokens that no tile of the plan holds is left out.
"""

import argparse
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from _timing import H200, header
from moe_layer import scheme_named, timing_of

import moe_jax
from moe_jax.benchmarking import MODELS, layer_shape, measure_layer, random_weights
from moe_jax.experts.hopper import _plan as _mosaic_plan

SCHEMES = (
    *("bf16", "w4a16_g128", "nvfp4_a16", "mxfp4_a16"),
    *("fp8_channel", "int8_w8a8", "fp8_block", "w4a8_int8", "w4a8_fp8"),
)


def switch(by_token: bool) -> None:
    """What decides is read while a call is traced."""
    _mosaic_plan.PLACES_BY_TOKEN = by_token
    jax.clear_caches()


def output(config: moe_jax.MoEConfig, weights, tokens: int) -> np.ndarray:
    kx, kz = jax.random.split(jax.random.key(tokens))
    x = jax.random.normal(kx, (tokens, config.hidden_size), config.dtype)
    z = jax.random.normal(kz, (tokens, config.num_experts), jnp.float32)
    return np.asarray(jax.jit(lambda x, z, w: moe_jax.fused_moe(x, z, w, config))(x, z, weights))


def measure(config: moe_jax.MoEConfig, model: str, weights, tokens: int, rounds: int) -> dict | None:
    """us of every round, by whether tokens are moved; None where they always are."""
    switch(True)
    if not _mosaic_plan.make_plan(config, weights, tokens).by_token:
        return None
    times: dict[bool, list[float]] = {True: [], False: []}
    found: dict[bool, np.ndarray] = {}
    for _ in range(rounds):
        for by_token in times:
            switch(by_token)
            times[by_token].append(measure_layer(config, model, weights, tokens, H200, **timing_of(tokens))["us"])
            found[by_token] = output(config, weights, tokens)
    same = found[True].tobytes() == found[False].tobytes()
    return dict(by_token=times[True], moved=times[False], same_bits=same)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--tokens", default="1,4,8,16")
    parser.add_argument("--schemes", default=",".join(SCHEMES))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", help="file that a JSON line per cell is appended to")
    args = parser.parse_args()
    print(header(), flush=True)
    differ = 0
    for model in args.models.split(","):
        experts, top_k, hidden, inner = layer_shape(model)
        for name in args.schemes.split(","):
            scheme = scheme_named(name)
            config = moe_jax.MoEConfig(experts, top_k, hidden, inner, scheme=scheme, implementation=("mosaic",))
            weights = jax.block_until_ready(random_weights(config))
            for tokens in map(int, args.tokens.split(",")):
                found = measure(config, model, weights, tokens, args.rounds)
                if found is None:
                    print(f"{model} T={tokens} {name}: tokens are moved", flush=True)
                    continue
                differ += not found["same_bits"]
                gain = min(found["moved"]) - min(found["by_token"])
                print(f"{model} T={tokens} {name}: {found}, {gain:+.1f} us saved", flush=True)
                if args.json:
                    with Path(args.json).open("a") as file:
                        file.write(json.dumps(dict(model=model, scheme=name, tokens=tokens, **found)) + "\n")
            del weights
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
