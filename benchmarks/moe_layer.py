"""Time the whole layer after the router logits on a GPU: routing, alignment, both products, combine.

    python benchmarks/moe_layer.py [--models qwen3-30b-a3b,...] [--tokens 1,16,...] [--schemes fp8_block,...]
    [--pairs gpt-oss-120b:mxfp4_a16,...] [--implementation hopper] [--jobs 8] [--seconds 250] [--json FILE]

With --jobs, each pair of a model and a scheme runs in a process of its own, in the order given: several compile at the
same time and take turns on the GPU. FILE gets a JSON line per cell as soon as it is measured, so that a run that is
ended loses nothing; --seconds ends it.

Random weights of the model's sizes, silu, no biases, random logits, calls inside jit (``timing_of``, _timing.py).
Scales of groups are bfloat16, as checkpoints of bfloat16 models have them. Reported per cell: microseconds, TFLOP/s
over the routed rows, GB/s over the weights of the experts that were hit plus activations in and out, and the larger of
the two as a fraction of the machine's measured limit. beside_vllm.py runs this and vLLM's layers and gives the ratios.
"""

import argparse
import dataclasses
import functools
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from _locks import locked, making
from _timing import header, limits_here
from _workers import run_all

import moe_jax
from moe_jax.benchmarking import MODELS, layer_shape, measure_layer, random_weights
from moe_jax.quantization import Scheme, Strategy

SCHEMES = (
    "bf16", "fp8_tensor", "fp8_channel", "fp8_block", "int8_w8a8", "w4a16_g128", "nvfp4_a16", "mxfp4_a16", "w4a8_int8"
)  # fmt: skip


def scheme_named(name: str) -> Scheme:
    """With scales of groups in bfloat16."""
    scheme = Scheme.parse(name)
    weights = scheme.weights
    if weights is None or weights.strategy is not Strategy.GROUP or weights.scale != "float32":
        return scheme
    return dataclasses.replace(scheme, weights=dataclasses.replace(weights, group_scale_dtype="bfloat16"))


def line(cell: dict) -> str:
    return (
        f"{cell['model']:14s} T={cell['tokens']:5d} {cell['scheme']:12s} {cell['us']:9.1f} us {cell['tflops']:8.1f} "
        f"TFLOP/s {cell['gbps']:7.0f} GB/s {cell['fraction']:6.1%} of limit"
    )


def timing_of(tokens: int) -> dict[str, Any]:
    """For ``time_in_jit``: calls in a loop, as layers run under ``scan``, for a tenth of a second without a pause. At
    one token a round holds more calls than weights fit into the L2. Where the GPU reaches its power limit it rests
    before each sample. Peers are timed by the same rule.
    """
    if tokens >= 4096:
        return dict(calls=(0, 10), samples=3, rest_s=0.2, budget_s=0.1)
    return dict(calls=(0, 40 if tokens == 1 else 10), rounds=10 if tokens <= 64 else 4, budget_s=0.1)


def run_pair(
    model: str, name: str, tokens: list[int], implementation: str, lock: str | None, report: Callable[[dict], None]
) -> None:
    """A model and scheme at every number of tokens; a cell that fails is reported with an "error" for its figures."""
    experts, top_k, hidden, intermediate = layer_shape(model)
    config = moe_jax.MoEConfig(
        experts, top_k, hidden, intermediate, scheme=scheme_named(name), implementation=(implementation,)
    )
    turn, weights, failed = functools.partial(locked, lock), None, ""
    try:
        with making(lock):
            weights = jax.block_until_ready(random_weights(config))
    except Exception as error:
        failed = f"{type(error).__name__}: {str(error)[:200]}"
    for count in tokens:
        cell: dict[str, Any] = dict(model=model, scheme=name, tokens=count)
        try:
            if weights is None:
                raise RuntimeError(failed)
            cell |= measure_layer(config, model, weights, count, limits_here(), turn=turn, **timing_of(count))
            cell["scheme"] = name
            print(line(cell), flush=True)
        except Exception as error:  # one cell that fails must not hide the others
            cell["error"] = f"{type(error).__name__}: {str(error)[:200]}"
            print(f"{model} T={count} {name}: {cell['error']}", flush=True)
        report(cell)


def run_jobs(pairs: list[tuple[str, str]], args: argparse.Namespace) -> None:
    """Each pair in a process, ``args.jobs`` of them at a time, until the time is over."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--tokens", args.tokens, "--implementation", args.implementation]
        command += ["--lock", f"{folder}/lock", *(["--json", args.json] if args.json else [])]
        jobs = [([*command, "--pairs", f"{model}:{name}"], {}) for model, name in pairs]
        run_all(jobs, args.jobs, seconds=args.seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--tokens", default="1,16,64,256,1024,8192")
    parser.add_argument("--schemes", default=",".join(SCHEMES))
    parser.add_argument("--pairs", help="model:scheme,... instead of all of --models with all of --schemes")
    parser.add_argument("--implementation", default="hopper")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="with --jobs: when to end")
    parser.add_argument("--lock", help="file that processes lock while they use the GPU")
    parser.add_argument("--json", help="file that a JSON line per cell is appended to")
    args = parser.parse_args()
    if args.pairs:
        pairs = [(model, name) for model, name in (pair.split(":") for pair in args.pairs.split(","))]
    else:
        pairs = [(model, name) for model in args.models.split(",") for name in args.schemes.split(",")]
    if args.jobs > 1:
        run_jobs(pairs, args)
        return 0
    failed = []

    def report(cell: dict) -> None:
        failed.extend([cell] if "error" in cell else [])
        if args.json:
            with Path(args.json).open("a") as file:
                file.write(json.dumps(cell) + "\n")

    if args.lock is None:
        print(header(), f"implementation {args.implementation}", flush=True)
    for model, name in pairs:
        tokens = [int(count) for count in args.tokens.split(",")]
        run_pair(model, name, tokens, args.implementation, args.lock, report)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
