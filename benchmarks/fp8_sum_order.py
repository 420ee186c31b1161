"""How far rows of a layer with FP8 operands lie apart when K is summed in another order, on a GPU.

    python benchmarks/fp8_sum_order.py [--scheme mxfp4_a16_approximate_fp8] [--tokens 300,1000,2048] [--pinned 16,64]

A layer of Qwen3-30B-A3B's sizes runs with the tuned tiles, with those of other numbers of tokens, and by the references
of its kernels in float32. For each pair: of all tokens the largest, 99th percentile and median RMS difference over the
RMS of the row, and the largest difference of a value over the RMS of its row; the fractions of hidden values, of their
codes and of their scales that differ; and for the token that is farthest off, what differs in the row of each expert.
"""

import argparse
import dataclasses
import itertools
import sys
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from _timing import header

import moe_jax
from moe_jax.benchmarking import MODELS, random_weights
from moe_jax.experts.hopper import _experts as _experts_mosaic
from moe_jax.experts.hopper import _packed_experts
from moe_jax.experts.hopper._kernel_layout import is_packed
from moe_jax.quantization import Scheme


@dataclasses.dataclass(frozen=True)
class Run:
    """y: (T, H). hidden, codes: (T, top_k, I). scales: (T, top_k). tiles: of both products, in words."""

    y: np.ndarray
    hidden: np.ndarray
    codes: np.ndarray
    scales: np.ndarray
    tiles: str


def run(config: moe_jax.MoEConfig, x: Any, logits: Any, weights: Any, kernels: str) -> Run:
    """The layer op by op, and what it requantized last."""
    permuted, routed = [], []
    module = _packed_experts if is_packed(weights.w13) else _experts_mosaic

    def permute(x, *args, **options):
        permuted.append((x, original(x, *args, **options)))
        return permuted[-1][1]

    def route(*args, **options):
        routed.append(original_route(*args, **options))
        return routed[-1]

    original, original_route = module.quantize_and_permute, _experts_mosaic.route_and_align
    with (
        mock.patch.object(module, "quantize_and_permute", permute),
        mock.patch.object(_experts_mosaic, "route_and_align", route),
    ):
        y = _experts_mosaic.forward_layer(config, x, logits, weights, kernels=kernels)[0]
    hidden, (codes, scales) = permuted[-1]
    rows = np.asarray(routed[-1].tiles.row_of)
    hidden, codes, scales = (np.asarray(part.astype(jnp.float32))[rows] for part in (hidden, codes, scales))
    plan = _experts_mosaic.make_plan(config, weights, x.shape[0], kernels)
    return Run(np.asarray(y.astype(jnp.float32)), hidden, codes, scales, "; ".join(map(str, plan.configs)))


def compare(one: Run, other: Run) -> str:
    size = np.sqrt((other.y**2).mean(1))
    rows = np.sqrt(((one.y - other.y) ** 2).mean(1)) / size
    values = (np.abs(one.y - other.y).max(1) / size).max()
    hidden, codes, scales = (getattr(one, name) != getattr(other, name) for name in ("hidden", "codes", "scales"))
    worst = int(rows.argmax())
    if (one.y == other.y).all():
        return "the same bits"
    return (
        f"rows {rows.max():.4f} at most, {np.quantile(rows, 0.99):.4f} of 99%, {np.median(rows):.4f} median; "
        f"values {values:.3f}; differ: hidden values {hidden.mean():.4f}, codes {codes.mean():.4f}, "
        f"scales {scales.mean():.4f}; row {worst}: scales {scales[worst].sum()} of {scales.shape[1]}, "
        f"codes {np.round(codes[worst].mean(-1), 3)}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scheme", default="mxfp4_a16_approximate_fp8")
    parser.add_argument("--tokens", default="300,1000,2048")
    parser.add_argument("--pinned", default="16,64")
    options = parser.parse_args()
    print(header())
    sizes = MODELS["qwen3-30b-a3b"]
    config = moe_jax.MoEConfig(*sizes, scheme=Scheme.parse(options.scheme), implementation=("mosaic",))
    weights = random_weights(config)
    for tokens in map(int, options.tokens.split(",")):
        kx, kz = jax.random.split(jax.random.key(tokens))
        x = jax.random.normal(kx, (tokens, config.hidden_size), jnp.bfloat16)
        logits = jax.random.normal(kz, (tokens, config.num_experts), jnp.float32)
        found = {"tuned": run(config, x, logits, weights, "mosaic")}
        for pinned in map(int, options.pinned.split(",")):
            own = dataclasses.replace(config, pinned_tokens=pinned)
            found[f"of {pinned} tokens"] = run(own, x, logits, weights, "mosaic")
        found["float32"] = run(config, x, logits, weights, "reference")
        for name, one in found.items():
            print(f"T={tokens} {name}: {one.tiles}", flush=True)
        for a, b in itertools.combinations(found, 2):
            print(f"T={tokens} {a} beside {b}: {compare(found[a], found[b])}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
