"""Device time of every kernel of a layer, by JAX's profiler: where the microseconds of a call go.

    python benchmarks/layer_kernels.py --cells mixtral-8x7b:fp8_channel,... [--tokens 1,16,64] [--lock FILE]

Ten calls of one program, command buffers off (their kernels are not traced one by one). Printed per cell: kernels in
the order of their start with the median duration of each, and the median gap in front of it; gaps are those without
command buffers. Random weights, each call routed anew (see moe_layer.py).
"""

import argparse
import sys

import jax
import jax.numpy as jnp
import numpy as np
from _trace import NO_COMMAND_BUFFERS, traced
from moe_layer import MODELS, locked, random_weights

import moe_jax
from moe_jax.quantization import Scheme

CALLS = 10


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", required=True)
    parser.add_argument("--tokens", default="1,16,64,256,1024,8192")
    parser.add_argument("--lock")
    options = parser.parse_args()
    for cell in options.cells.split(","):
        model, name = cell.split(":")
        experts, top_k, hidden, inner = MODELS[model]
        config = moe_jax.MoEConfig(experts, top_k, hidden, inner, scheme=Scheme.parse(name), implementation=("mosaic",))
        weights = jax.block_until_ready(random_weights(config))
        layer = jax.jit(lambda w, x, z, config=config: moe_jax.fused_moe(x, z, w, config))
        for tokens in map(int, options.tokens.split(",")):
            kx, kz = jax.random.split(jax.random.key(tokens))
            x = jax.random.normal(kx, (tokens, hidden), jnp.bfloat16)
            logits = list(jax.random.normal(kz, (CALLS, tokens, experts), jnp.float32))
            program = jax.jit(lambda w, x, logits, layer=layer: [layer(w, x, z) for z in logits])
            compiled = program.lower(weights, x, logits).compile(compiler_options=NO_COMMAND_BUFFERS)
            with locked(options.lock):
                for _ in range(2):
                    jax.block_until_ready(compiled(weights, x, logits))
                with traced() as found:
                    jax.block_until_ready(compiled(weights, x, logits))
            each, rest = divmod(len(found), CALLS)
            total = found[-1][0] + found[-1][1] - found[0][0] if found else float("nan")
            print(f"{model} {name} T={tokens}: {len(found)} kernels, {total / CALLS:.1f} us a call", flush=True)
            if not found or rest:
                print("  ", sorted({kernel[2] for kernel in found})[:20], flush=True)
                continue
            starts, durations = (np.array([k[i] for k in found]).reshape(CALLS, each) for i in (0, 1))
            flat = starts.ravel()[1:] - (starts.ravel() + durations.ravel())[:-1]
            gaps = np.append(np.nan, flat).reshape(CALLS, each)[1:]
            for i in range(each):
                what = found[each + i][2][:60]
                print(f"   {np.median(durations[:, i]):8.1f} us (gap {np.median(gaps[:, i]):5.1f})  {what}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
