"""Time the whole layer after the router logits on a GPU: routing, alignment, both products, combine.

    python benchmarks/moe_layer.py [--models qwen3-30b-a3b,...] [--tokens 1,16,...] [--schemes fp8_block,...]
    [--implementation mosaic]

Random weights of the model's sizes, random logits, one call inside jit (see _timing.py). Reported per cell:
microseconds, TFLOP/s over the routed rows, GB/s over the weights of the experts that were hit plus activations in and
out, and the larger of the two as a fraction of the machine's measured limit.
"""

import argparse
import sys

import jax
import jax.numpy as jnp
import numpy as np
from _timing import DENSE_TFLOPS, NUM_VARIANTS, READ_GBPS, header, time_in_jit

import moe_jax
from moe_jax.quantization import QuantizedTensor, Scheme

# name: (experts E, top_k, hidden H, intermediate I); dsv3-ep8 is one of eight expert-parallel ranks.
MODELS = {
    "qwen3-30b-a3b": (128, 8, 2048, 768),
    "dsv3-ep8": (32, 8, 7168, 2048),
    "mixtral-8x7b": (8, 2, 4096, 14336),
}
SCHEMES = ("bf16", "fp8_channel", "fp8_block", "int8_w8a8")


def random_weights(scheme: Scheme, experts: int, hidden: int, inner: int) -> moe_jax.ExpertWeights:
    """Values with the spread of trained weights, made on the device one matrix at a time."""

    def stack(key, lead, n, k):
        fmt = scheme.weights

        @jax.jit
        def values(key):
            if fmt is not None and fmt.element == "int8":
                return jax.random.randint(key, (n, k), -127, 128, jnp.int8)
            x = jax.random.normal(key, (n, k), jnp.bfloat16)
            return (x * k**-0.5).astype(jnp.bfloat16) if fmt is None else x.astype(jnp.float8_e4m3fn)

        keys = jax.random.split(key, int(np.prod(lead)))
        data = jnp.stack([values(one) for one in keys]).reshape(*lead, n, k)
        if fmt is None:
            return QuantizedTensor(data)
        unit = k**-0.5 / (73.0 if fmt.element == "int8" else 1.0)
        scale = jax.random.uniform(key, (*lead, *fmt.scale_shape(n, k)), jnp.float32, 0.8 * unit, 1.2 * unit)
        return QuantizedTensor(data, scale, fmt=fmt)

    key13, key2 = jax.random.split(jax.random.key(0))
    return moe_jax.ExpertWeights(
        stack(key13, (experts, 2), inner, hidden), stack(key2, (experts,), hidden, inner), scheme=scheme
    )


def measure(model: str, scheme: Scheme, weights: moe_jax.ExpertWeights, tokens: int, implementation: str) -> str:
    experts, top_k, hidden, inner = MODELS[model]
    config = moe_jax.MoEConfig(experts, top_k, hidden, inner, scheme=scheme, implementation=(implementation,))
    kx, kz = jax.random.split(jax.random.key(tokens))
    x = jax.random.normal(kx, (tokens, hidden), jnp.bfloat16)
    # Every call routes anew: at few tokens the weights of one routing would stay in the L2.
    logits = list(jax.random.normal(kz, (NUM_VARIANTS, tokens, experts), jnp.float32))
    micros = time_in_jit(
        lambda w, x, z: moe_jax.fused_moe(x, z, w, config), (weights, x, logits[0]), varied=2, variants=logits
    )
    hit = np.mean([len(np.unique(np.asarray(jax.lax.top_k(z, top_k)[1]))) for z in logits])
    flops = 2 * 3 * tokens * top_k * hidden * inner
    moved = weights.nbytes() * hit / experts + 4 * tokens * hidden
    element = "bfloat16" if scheme.weights is None else str(scheme.weights.element_type.storage)
    fraction = max(flops / micros / 1e6 / DENSE_TFLOPS[element], moved / micros / 1e3 / READ_GBPS)
    return (
        f"{model:14s} T={tokens:5d} {scheme.name:12s} {micros:9.1f} us {flops / micros / 1e6:8.1f} TFLOP/s "
        f"{moved / micros / 1e3:7.0f} GB/s {fraction:6.1%} of limit"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--tokens", default="1,16,64,256,1024,8192")
    parser.add_argument("--schemes", default=",".join(SCHEMES))
    parser.add_argument("--implementation", default="mosaic")
    args = parser.parse_args()
    print(header(), f"implementation {args.implementation}", flush=True)
    failures = 0
    for model in args.models.split(","):
        experts, _, hidden, inner = MODELS[model]
        for name in args.schemes.split(","):
            scheme = Scheme.parse(name)
            weights = random_weights(scheme, experts, hidden, inner)
            for tokens in map(int, args.tokens.split(",")):
                try:
                    print(measure(model, scheme, weights, tokens, args.implementation), flush=True)
                except Exception as error:  # one cell that fails must not hide the others
                    failures += 1
                    print(f"{model} T={tokens} {name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
            del weights
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
