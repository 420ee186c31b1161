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
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import jax
from _timing import H200, header

import moe_jax
from moe_jax.benchmarking import MODELS, measure_layer, random_weights
from moe_jax.quantization import Scheme

SCHEMES = (
    "bf16", "fp8_tensor", "fp8_channel", "fp8_block", "int8_w8a8", "w4a16_g128", "nvfp4_a16", "mxfp4_a16", "w4a8_int8"
)  # fmt: skip


def line(cell: dict) -> str:
    return (
        f"{cell['model']:14s} T={cell['tokens']:5d} {cell['scheme']:12s} {cell['us']:9.1f} us {cell['tflops']:8.1f} "
        f"TFLOP/s {cell['gbps']:7.0f} GB/s {cell['fraction']:6.1%} of limit"
    )


@contextlib.contextmanager
def locked(path: str | None, mode: int = fcntl.LOCK_EX) -> Iterator[None]:
    """Hold the lock file at path, alone or with ``LOCK_SH`` beside others that share it. None: there is no lock."""
    if path is None:
        yield
        return
    with open(path, "w") as file:
        fcntl.flock(file, mode)
        yield


def run_cells(pairs: list[tuple[str, str]], tokens: list[int], implementation: str, lock: str | None) -> list[dict]:
    """Every (model, scheme) at every number of tokens; a cell that fails has an "error" instead of figures."""
    cells = []
    for model, name in pairs:
        experts, top_k, hidden, inner = MODELS[model]
        scheme = Scheme.parse(name)
        config = moe_jax.MoEConfig(experts, top_k, hidden, inner, scheme=scheme, implementation=(implementation,))
        turn = functools.partial(locked, lock)
        try:
            with locked(lock, fcntl.LOCK_SH):  # beside others that make weights, while nobody is timed
                weights = jax.block_until_ready(random_weights(config))
        except Exception as error:
            weights, reason = None, f"{type(error).__name__}: {str(error)[:200]}"
        for count in tokens:
            try:
                if weights is None:
                    raise RuntimeError(reason)
                cells.append(measure_layer(config, model, weights, count, H200, turn=turn))
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
