"""One MoE block on the CPU: moe_jax against transformers' Qwen3MoeSparseMoeBlock, same weights, tokens and threads.

    JAX_PLATFORMS=cpu taskset -c 0,1 python benchmarks/moe_cpu.py [--tokens 256] [--out FILE]

Router, routing and experts are inside the timed call on both sides, and every experts implementation that transformers
runs on a CPU is tried. Candidates take turns: in each round each one rests, runs once untimed and once timed, so that
no one profits from another's load or suffers from threads that still spin. The table shows medians over the rounds.
On a machine that does other work too, put ``chrt -f 10`` before
``python``: torch's threads spin and XLA's sleep, so a busy machine favours now one, now the other. Both sides use as
many threads as the process has CPUs. Needs torch and transformers.
"""

import argparse
import datetime
import os
import platform
import statistics
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from jax import lax
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from moe_jax import MoEConfig
from moe_jax.experts import explain, fused_moe
from moe_jax.quantization import Scheme, method_for
from moe_jax.routing import route

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--tokens", type=int, default=256)
parser.add_argument("--experts", type=int, default=64)
parser.add_argument("--top-k", type=int, default=8)
parser.add_argument("--hidden", type=int, default=512)
parser.add_argument("--intermediate", type=int, default=256)
parser.add_argument("--rounds", type=int, default=20)
parser.add_argument("--schemes", default="bf16,fp8_tensor,fp8_channel,fp8_block,int8_w8a8,int8_w8a16")
parser.add_argument("--out", type=Path)
args = parser.parse_args()

THREADS = len(os.sched_getaffinity(0))  # what XLA takes
TORCH_IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")
REST_S = 0.05
SLOW_S = 0.2  # what takes longer is timed in three rounds only


def torch_block(implementation: str, dtype: torch.dtype) -> Qwen3MoeSparseMoeBlock:
    config = transformers.Qwen3MoeConfig(
        hidden_size=args.hidden,
        moe_intermediate_size=args.intermediate,
        num_experts=args.experts,
        num_experts_per_tok=args.top_k,
        norm_topk_prob=True,
    )
    config._experts_implementation = implementation
    block = Qwen3MoeSparseMoeBlock(config).eval()
    torch.manual_seed(0)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    return block.to(dtype)


def torch_candidates(x: np.ndarray) -> dict:
    candidates = {}
    for dtype in (torch.float32, torch.bfloat16):
        tokens = torch.from_numpy(x)[None].to(dtype)
        for implementation in TORCH_IMPLEMENTATIONS:
            block = torch_block(implementation, dtype)

            def call(block=block, tokens=tokens):
                with torch.no_grad():
                    return block(tokens)[0].float().numpy()

            candidates["transformers", implementation, str(dtype).removeprefix("torch.")] = call
    return candidates


def jax_candidates(x: np.ndarray) -> dict:
    block = torch_block("eager", torch.float32)
    router, w13, w2 = (
        jnp.asarray(t.detach().numpy())
        for t in (block.gate.weight, block.experts.gate_up_proj, block.experts.down_proj)
    )
    w13 = w13.reshape(args.experts, 2, args.intermediate, args.hidden)
    candidates = {}
    for scheme in args.schemes.split(","):
        for dtype in ("float32", "bfloat16"):
            config = MoEConfig(
                args.experts,
                args.top_k,
                args.hidden,
                args.intermediate,
                scheme=Scheme.parse(scheme),
                dtype=dtype,
                param_dtype=dtype,
            )
            method = method_for(config.scheme)
            leaves = method.quantize_leaves(w13.astype(dtype), w2.astype(dtype), None, config)
            weights = method.process_weights_after_loading(leaves, config)
            call = _jitted(lambda x, g, w, c=config: fused_moe(x, _logits(x, g), w, c), x, router, weights, dtype)
            candidates["moe_jax xla", scheme, dtype] = call
            print(explain(config, weights, args.tokens), "\n", file=sys.stderr)
    config = MoEConfig(args.experts, args.top_k, args.hidden, args.intermediate, dtype="float32")
    call = _jitted(lambda x, g, w: _ragged_moe(x, _logits(x, g), *w, config), x, router, (w13, w2), "float32")
    return candidates | {("lax.ragged_dot", "unquantized", "float32"): call}


def _logits(x, router):
    return lax.dot_general(x, router, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def _jitted(step, x, router, weights, dtype):
    tokens, router = jnp.asarray(x).astype(dtype), router.astype(dtype)
    step = jax.jit(step)
    return lambda: np.asarray(step(tokens, router, weights).astype(jnp.float32))


def _ragged_moe(x, logits, w13, w2, config):
    """What one writes with jax.lax alone: sort the rows, two ragged products, unsort."""
    routing = route(logits, config)
    expert = routing.topk_ids.reshape(-1)
    order = jnp.argsort(expert, stable=True)
    sizes = jnp.zeros(config.num_experts, jnp.int32).at[expert].add(1)
    h = lax.ragged_dot(x[order // config.top_k], w13.reshape(config.num_experts, -1, x.shape[1]).mT, sizes)
    gate, up = jnp.split(h, 2, axis=1)
    y = lax.ragged_dot(jax.nn.silu(gate) * up, w2.mT, sizes)
    y = jnp.zeros_like(y).at[order].set(y).reshape(*routing.topk_ids.shape, -1)
    return jnp.sum(y * routing.topk_weights[..., None], axis=1)


def measure(candidates: dict) -> dict:
    """Milliseconds of every timed call, by candidate."""
    times = {name: [] for name in candidates}
    for name, call in candidates.items():
        call()
        start = time.perf_counter()
        call()
        times[name].append(time.perf_counter() - start)
    slow = {name for name, taken in times.items() if taken[0] > SLOW_S}
    times = {name: [] for name in candidates}
    for n in range(args.rounds):
        for name, call in candidates.items():
            if name in slow and n >= 3:
                continue
            time.sleep(REST_S)
            call()
            start = time.perf_counter()
            call()
            times[name].append(1e3 * (time.perf_counter() - start))
    return times


def _scheduling() -> str:
    return "real-time priority" if os.sched_getscheduler(0) == os.SCHED_FIFO else "normal priority"


def header() -> list[str]:
    model = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if "model name" in line), "unknown CPU")
    return [
        f"# {model}, {THREADS} threads, {_scheduling()}, load average {os.getloadavg()[0]:.1f}, "
        f"Python {platform.python_version()}, jax {jax.__version__}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, {datetime.datetime.now().isoformat(timespec='minutes')}",
        f"# E={args.experts} H={args.hidden} I={args.intermediate} top_k={args.top_k} T={args.tokens} with router, "
        f"{args.rounds} rounds",
        f"{'who':14} {'experts':12} {'dtype':9} {'median ms':>9} {'min ms':>8} {'n':>3}  {'max |y - f32|':>13}",
    ]


def main() -> None:
    torch.set_num_threads(THREADS)
    x = np.random.default_rng(0).standard_normal((args.tokens, args.hidden), np.float32)
    candidates = torch_candidates(x) | jax_candidates(x)
    expected = candidates["transformers", "eager", "float32"]()
    times = measure(candidates)
    lines = header()
    for name, taken in times.items():
        error = np.abs(candidates[name]() - expected).max() / np.abs(expected).max()
        who, experts, dtype = name
        numbers = f"{statistics.median(taken):9.2f} {min(taken):8.2f} {len(taken):3}  {error:13.1e}"
        lines.append(f"{who:14} {experts:12} {dtype:9} {numbers}")
    for dtype in ("float32", "bfloat16"):
        medians = {name: statistics.median(taken) for name, taken in times.items() if name[2] == dtype}
        best = min((n for n in medians if n[0] == "transformers"), key=medians.__getitem__)
        ours = medians["moe_jax xla", "bf16", dtype]
        lines.append(
            f"# {dtype}, unquantized: moe_jax {ours:.2f} ms, best of transformers ({best[1]}) {medians[best]:.2f} ms: "
            f"{medians[best] / ours:.2f} x as fast"
        )
    print("\n".join(lines))
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")


main()
