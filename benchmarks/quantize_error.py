"""Weight error of every scheme, rounded plainly and with searched scales, per expert.

    python benchmarks/quantize_error.py [CHECKPOINT [LAYER]] [--scheme A,B] > benchmarks/results/quantize_error.txt

Without a checkpoint the weights are drawn: eight experts of 512 x 512, normal with a standard deviation that differs by
expert (Student's t with 5 degrees of freedom for the odd ones, whose outliers are where a search pays). With one, the
full-precision experts of LAYER (default 0). Errors are relative Frobenius norms of w - dequantized(quantized(w)), both
input projections and the output projection of an expert taken together.
"""

import argparse
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).parent.parent))

import jax
import jax.numpy as jnp
import numpy as np

import moe_jax
from moe_jax.quantization import SCHEMES, ScaleSearchMoEMethod, dequantize_tensor, method_for
from moe_jax.writing._matrices import quantized

NAMES = (
    *("fp8_tensor", "fp8_channel", "fp8_block", "mxfp8", "int8_w8a8", "w8a16_channel", "w4a16_g32", "w4a16_g64"),
    *("w4a16_g128", "w4a16_channel", "w4a16_g32_asym", "w4a16_g128_asym", "w4a16_channel_asym", "nvfp4_a16"),
    *("mxfp4_a16", "w3a16_g128", "w2a16_g128"),
)


def drawn_experts():
    rng = np.random.default_rng(0)
    for expert in range(8):
        spread = 0.02 * 1.5**expert / 512**0.5
        draw = (lambda shape: rng.standard_t(5, shape)) if expert % 2 else rng.standard_normal
        yield [np.asarray(spread * draw((512, 512)), jnp.bfloat16) for _ in range(3)]


def stored_experts(directory, layer):
    weights = moe_jax.load_moe(directory, layer=layer).experts.weights.get_value()
    for w13, w2 in zip(weights.w13.data, weights.w2.data, strict=True):
        yield [*(np.asarray(w) for w in w13), np.asarray(w2)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, nargs="?")
    parser.add_argument("layer", type=int, nargs="?", default=0)
    parser.add_argument("--scheme", default=",".join(NAMES))
    args = parser.parse_args()
    if args.checkpoint:
        experts, what = list(stored_experts(args.checkpoint, args.layer)), f"{args.checkpoint.name}, layer {args.layer}"
    else:
        experts, what = list(drawn_experts()), "drawn, odd experts heavy-tailed"
    print(f"{len(experts)} experts ({what}); relative error of the weights, plain and searched, in percent")
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, {time.strftime('%Y-%m-%d')}\n")
    shown = range(min(len(experts), 8))
    print(f"{'scheme':<20}{'':<9}{'all':>7}" + "".join(f"{f'e{e}':>7}" for e in shown) + f"{'s/expert':>10}")
    for name in args.scheme.split(","):
        scheme = SCHEMES.get(name) or moe_jax.Scheme.parse(name)
        for label, method in (("plain", method_for(scheme)), ("mse", ScaleSearchMoEMethod(scheme))):
            squares, start = [], time.perf_counter()
            for matrices in experts:
                difference = [
                    np.asarray(dequantize_tensor(quantized(jnp.asarray(w), method))) - np.asarray(w, np.float32)
                    for w in matrices
                ]
                squares.append(
                    [
                        sum((d.astype(np.float64) ** 2).sum() for d in difference),
                        sum((np.asarray(w, np.float64) ** 2).sum() for w in matrices),
                    ]
                )
            seconds = (time.perf_counter() - start) / len(experts)
            errors = np.sqrt(np.array(squares)[:, 0] / np.array(squares)[:, 1])
            whole = np.sqrt(np.array(squares)[:, 0].sum() / np.array(squares)[:, 1].sum())
            row = "".join(f"{100 * errors[e]:>7.3f}" for e in shown)
            print(f"{name:<20}{label:<9}{100 * whole:>7.3f}{row}{seconds:>10.2f}", flush=True)


if __name__ == "__main__":
    main()
