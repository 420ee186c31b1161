"""Time the whole layer after the router logits on a GPU: routing, alignment, both products, combine.

    python benchmarks/moe_layer.py [--models qwen3-30b-a3b,...] [--tokens 1,16,...] [--schemes fp8_block,...]
    [--implementation mosaic] [--jobs 8] [--json FILE]

With --jobs, several processes compile their cells at the same time and take turns on the GPU.

Random weights of the model's sizes, silu, no biases, random logits, one call inside jit (see _timing.py). Reported per
cell: microseconds, TFLOP/s over the routed rows, GB/s over the weights of the experts that were hit plus activations
in and out, and the larger of the two as a fraction of the machine's measured limit.
"""

import argparse
import contextlib
import fcntl
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _timing import DENSE_TFLOPS, NUM_VARIANTS, READ_GBPS, header, time_in_jit

import moe_jax
from moe_jax._implementations import in_best_layout
from moe_jax.quantization import Scheme, method_for

# name: (experts E, top_k, hidden H, intermediate I); dsv3-ep8 is one of eight expert-parallel ranks.
MODELS = {
    "qwen3-30b-a3b": (128, 8, 2048, 768),
    "dsv3-ep8": (32, 8, 7168, 2048),
    "mixtral-8x7b": (8, 2, 4096, 14336),
    "gpt-oss-120b": (128, 4, 2880, 2880),
}
SCHEMES = (
    "bf16", "fp8_tensor", "fp8_channel", "fp8_block", "int8_w8a8", "w4a16_g128", "nvfp4_a16", "mxfp4_a16", "w4a8_int8"
)  # fmt: skip


def random_weights(config: moe_jax.MoEConfig) -> moe_jax.ExpertWeights:
    """Normal values, made and quantized on the device, in the layout that the kernels read."""
    method = method_for(config.scheme)
    inner, hidden = config.intermediate_size, config.hidden_size

    def stack(key, lead, n, k):
        values = jax.jit(lambda key: (jax.random.normal(key, (n, k), jnp.bfloat16) * k**-0.5).astype(jnp.bfloat16))
        keys = jax.random.split(key, int(np.prod(lead)))
        return jnp.stack([values(one) for one in keys]).reshape(*lead, n, k)

    key13, key2 = jax.random.split(jax.random.key(0))
    w13 = stack(key13, (config.num_experts, 2), inner, hidden)
    w2 = stack(key2, (config.num_experts,), hidden, inner)
    leaves = method.quantize_leaves(w13, w2, None, config)
    del w13, w2
    weights = method.process_weights_after_loading(leaves, config)
    return in_best_layout(config, weights)


def measure(config: moe_jax.MoEConfig, model: str, weights: moe_jax.ExpertWeights, tokens: int, turn: Any) -> dict:
    """One cell. turn: context in which this process has the GPU for itself."""
    scheme, hidden = config.scheme, config.hidden_size
    kx, kz = jax.random.split(jax.random.key(tokens))
    x = jax.random.normal(kx, (tokens, hidden), jnp.bfloat16)
    # Every call routes anew: at few tokens the weights of one routing would stay in the L2.
    logits = list(jax.random.normal(kz, (NUM_VARIANTS, tokens, config.num_experts), jnp.float32))
    micros = time_in_jit(
        lambda w, x, z: moe_jax.fused_moe(x, z, w, config),
        (weights, x, logits[0]),
        varied=2,
        variants=logits,
        turn=turn,
    )
    hit = np.mean([len(np.unique(np.asarray(jax.lax.top_k(z, config.top_k)[1]))) for z in logits])
    flops = 2 * 3 * tokens * config.top_k * hidden * config.intermediate_size
    moved = weights.nbytes() * hit / config.num_experts + 4 * tokens * hidden
    element = operand_of(scheme)
    fraction = max(flops / micros / 1e6 / DENSE_TFLOPS[element], moved / micros / 1e3 / READ_GBPS)
    return dict(
        model=model,
        scheme=scheme.name,
        tokens=tokens,
        us=round(micros, 1),
        tflops=round(flops / micros / 1e6, 1),
        gbps=round(moved / micros / 1e3),
        fraction=round(fraction, 3),
    )


def operand_of(scheme: Scheme) -> str:
    """The dtype in which the products run."""
    activations = scheme.activations
    if activations is None or activations.scale != "float32":
        return "bfloat16"
    return str(activations.element_type.storage)


def line(cell: dict) -> str:
    return (
        f"{cell['model']:14s} T={cell['tokens']:5d} {cell['scheme']:12s} {cell['us']:9.1f} us {cell['tflops']:8.1f} "
        f"TFLOP/s {cell['gbps']:7.0f} GB/s {cell['fraction']:6.1%} of limit"
    )


@contextlib.contextmanager
def exclusive(path: str) -> Iterator[None]:
    """Hold the lock file at path; other processes wait."""
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def run_cells(pairs: list[tuple[str, str]], tokens: list[int], implementation: str, lock: str | None) -> list[dict]:
    """Every (model, scheme) at every number of tokens; a cell that fails has an "error" instead of figures."""
    cells = []
    for model, name in pairs:
        experts, top_k, hidden, inner = MODELS[model]
        scheme = Scheme.parse(name)
        config = moe_jax.MoEConfig(experts, top_k, hidden, inner, scheme=scheme, implementation=(implementation,))
        turn = contextlib.nullcontext if lock is None else lambda: exclusive(lock)
        try:
            with turn():
                weights = jax.block_until_ready(random_weights(config))
        except Exception as error:
            weights, reason = None, f"{type(error).__name__}: {str(error)[:200]}"
        for count in tokens:
            try:
                if weights is None:
                    raise RuntimeError(reason)
                cells.append(measure(config, model, weights, count, turn))
                print(line(cells[-1]), flush=True)
            except Exception as error:  # one cell that fails must not hide the others
                reason = f"{type(error).__name__}: {str(error)[:200]}"
                cells.append(dict(model=model, scheme=name, tokens=count, error=reason))
                print(f"{model} T={count} {name}: {reason}", flush=True)
        del weights
    return cells


def run_jobs(pairs: list[tuple[str, str]], args: argparse.Namespace) -> list[dict]:
    """The cells in ``args.jobs`` processes."""
    with tempfile.TemporaryDirectory() as folder:
        workers = []
        share = f"{0.9 / args.jobs:.3f}"
        for job in range(args.jobs):
            own = [f"{model}:{name}" for model, name in pairs[job :: args.jobs]]
            if not own:
                continue
            command = [sys.executable, __file__, "--pairs", ",".join(own), "--tokens", args.tokens]
            command += ["--implementation", args.implementation, "--lock", f"{folder}/lock"]
            command += ["--json", f"{folder}/{job}.json"]
            environment = os.environ | {"XLA_PYTHON_CLIENT_MEM_FRACTION": share}
            workers.append(subprocess.Popen(command, env=environment))
        for worker in workers:
            worker.wait()
        files = [f"{folder}/{job}.json" for job in range(args.jobs)]
        return [cell for file in files if os.path.exists(file) for cell in json.load(open(file))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--tokens", default="1,16,64,256,1024,8192")
    parser.add_argument("--schemes", default=",".join(SCHEMES))
    parser.add_argument("--pairs", help="model:scheme,... instead of all of --models with all of --schemes")
    parser.add_argument("--implementation", default="mosaic")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--lock", help="file that processes lock while they use the GPU")
    parser.add_argument("--json", help="where to write the cells")
    args = parser.parse_args()
    if args.pairs:
        pairs = [(model, name) for model, name in (pair.split(":") for pair in args.pairs.split(","))]
    else:
        pairs = [(model, name) for model in args.models.split(",") for name in args.schemes.split(",")]
    if args.jobs > 1:
        cells = run_jobs(pairs, args)
    else:
        print(header(), f"implementation {args.implementation}", flush=True)
        cells = run_cells(pairs, [int(count) for count in args.tokens.split(",")], args.implementation, args.lock)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(cells, file, indent=0)
    return 1 if any("error" in cell for cell in cells) else 0


if __name__ == "__main__":
    sys.exit(main())
