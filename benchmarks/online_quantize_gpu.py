"""Online quantization from host memory, against merely copying the same weights to the device.

    python benchmarks/online_quantize_gpu.py [--experts 64] [--scheme fp8_block,...] [--out FILE]

The experts of one layer lie in host memory in bfloat16, one array for each matrix, read-only as those of a file. Three
things take turns, every one ends when the device is done: ``jax.device_put`` of every matrix; a ``LayerLoader`` that
quantizes them; and a ``FusedMoE`` that also brings them into the layout of its kernels. Rates are bytes of bfloat16 by
the second, medians over the rounds; ratios compare neighbours in time. Asked for: 0.6 of the copy by the loader.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
from flax import nnx

import moe_jax
from moe_jax.loading import LayerLoader

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--scheme", default="fp8_channel,fp8_block,int8_w8a8,w4a16_g128,nvfp4_dynamic,mxfp4")
parser.add_argument("--experts", type=int, default=64)
parser.add_argument("--hidden", type=int, default=4096)
parser.add_argument("--intermediate", type=int, default=1536)
parser.add_argument("--rounds", type=int, default=5)
parser.add_argument("--out", type=Path)

REQUIRED = 0.6
Pairs = dict[str, np.ndarray]


def host_weights(experts: int, hidden: int, intermediate: int) -> Pairs:
    """Normal numbers; the same pool of them, begun elsewhere, for every matrix: drawing takes longer than copying."""
    size = hidden * intermediate
    pool = np.random.default_rng(0).standard_normal(size + 4096 * experts, np.float32) * 0.02
    pool = pool.astype(ml_dtypes.bfloat16)
    pairs = {}
    for expert in range(experts):
        for at, name in enumerate(("gate_proj", "up_proj", "down_proj")):
            shape = (hidden, intermediate) if name == "down_proj" else (intermediate, hidden)
            start = 4096 * expert + 128 * at
            matrix = pool[start : start + size].reshape(shape).copy()
            matrix.flags.writeable = False
            pairs[f"experts.{expert}.{name}.weight"] = matrix
    return pairs


def copied(pairs: Pairs) -> None:
    jax.block_until_ready([jax.device_put(array) for array in pairs.values()])


def loaded(pairs: Pairs, config: moe_jax.MoEConfig) -> None:
    loader = LayerLoader(config, quantize=True)
    loader.load(pairs.items())
    jax.block_until_ready(loader.finish())


def processed(pairs: Pairs, config: moe_jax.MoEConfig) -> None:
    layer = moe_jax.FusedMoE(
        config.num_experts, config.hidden_size, config.intermediate_size, top_k=config.top_k, scheme=config.scheme
    )
    layer.load_weights(pairs.items())
    layer.process_weights_after_loading()
    jax.block_until_ready(jax.tree.leaves(nnx.state(layer)))


def seconds(action: Callable[..., None], *args: object) -> float:
    start = time.perf_counter()
    action(*args)
    return time.perf_counter() - start


def main() -> None:
    args = parser.parse_args()
    pairs = host_weights(args.experts, args.hidden, args.intermediate)
    gigabytes = sum(array.nbytes for array in pairs.values()) / 1e9
    device = jax.devices()[0]
    lines = [
        f"# {device.device_kind}, jax {jax.__version__}, {time.strftime('%Y-%m-%d')}; {args.experts} experts, H "
        f"{args.hidden}, I {args.intermediate}, {gigabytes:.2f} GB in bfloat16, medians of {args.rounds} rounds",
        f"{'scheme':14} {'copy GB/s':>9} {'loader GB/s':>11} {'layer GB/s':>10} {'loader/copy':>11} {'layer/copy':>10}",
    ]
    print("\n".join(lines), flush=True)
    slowest = 1.0
    for name in args.scheme.split(","):
        config = moe_jax.MoEConfig(
            num_experts=args.experts,
            top_k=1,
            hidden_size=args.hidden,
            intermediate_size=args.intermediate,
            scheme=moe_jax.Scheme.parse(name),
        )
        rounds = [
            (seconds(copied, pairs), seconds(loaded, pairs, config), seconds(processed, pairs, config))
            for _ in range(1 + args.rounds)
        ][1:]  # the first one compiles
        copy, load, layer = (gigabytes / statistics.median(taken) for taken in zip(*rounds, strict=True))
        by_loader = statistics.median(copy / load for copy, load, _ in rounds)
        by_layer = statistics.median(copy / layer for copy, _, layer in rounds)
        slowest = min(slowest, by_loader)
        lines.append(f"{name:14} {copy:9.2f} {load:11.2f} {layer:10.2f} {by_loader:11.2f} {by_layer:10.2f}")
        print(lines[-1], flush=True)
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")
    if slowest < REQUIRED:
        sys.exit(f"slower than {REQUIRED} of the copy")


main()
