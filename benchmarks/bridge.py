"""Time of one call through the torch bridge against the same jitted JAX call, on the CPU or a GPU.

    python benchmarks/bridge.py [--tokens 1 16 512] [--scheme fp8_channel] [--sizes E TOP_K H I] [--repeats 50]

Prints microseconds per call, medians: JAX alone on arrays, the bridge on tensors, and their difference, the bridge's
own cost. On a GPU set XLA_PYTHON_CLIENT_PREALLOCATE=false first.
"""

import argparse
import statistics
import time

import jax
import torch

import torch_bridge
from torch_bridge import _ops
from torch_bridge._tensors import to_jax


def median_us(call, finish, repeats):
    """Median microseconds of ``call``, each waited for by ``finish``."""
    times = []
    for _ in range(repeats + 3):
        start = time.perf_counter()
        finish(call())
        times.append(1e6 * (time.perf_counter() - start))
    return statistics.median(times[3:])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 512])
    parser.add_argument("--scheme", default="fp8_channel")
    parser.add_argument("--sizes", type=int, nargs=4, default=[8, 2, 256, 256], metavar=("E", "TOP_K", "H", "I"))
    parser.add_argument("--repeats", type=int, default=50)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() and jax.default_backend() == "gpu" else "cpu"
    experts, _, hidden, _ = args.sizes
    layer = torch_bridge.FusedMoE(*args.sizes, torch.bfloat16, quant_config=args.scheme, device=device)
    layer.load_dummy_weights()
    versions = f"jax {jax.__version__}, torch {torch.__version__}"
    print(f"{jax.devices()[0].device_kind}, {versions}, {args.scheme}, {args.sizes}")
    print(f"{'T':>6} {'jax us':>10} {'bridge us':>10} {'bridge - jax':>13}")
    for tokens in args.tokens:
        x = torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16)
        logits = torch.randn(tokens, experts, device=device)
        arrays, weights = (to_jax(x), to_jax(logits)), layer.experts_for(x)
        wait = torch.cuda.synchronize if device == "cuda" else lambda: None

        def alone(arrays=arrays, weights=weights):
            return _ops._moe(*arrays, None, None, None, weights)

        def bridged(x=x, logits=logits):
            return layer(x, logits)

        pure = median_us(alone, jax.block_until_ready, args.repeats)
        bridge = median_us(bridged, lambda _, wait=wait: wait(), args.repeats)
        print(f"{tokens:>6} {pure:>10.1f} {bridge:>10.1f} {bridge - pure:>13.1f}")


if __name__ == "__main__":
    main()
