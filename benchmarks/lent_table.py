"""Does the H200's tuning table serve another Hopper GPU of 132 SMs? The check of the card, then both beside others.

    XLA_FLAGS=--xla_gpu_autotune_level=0 python benchmarks/lent_table.py --out FILE [--jobs 6] [--seconds 150]
        [--models qwen3-30b-a3b,mixtral-8x7b] [--formats bf16,fp8_channel,int4_g128,mxfp4] [--tokens 1,64,1024]

First what nvidia-smi says of the GPU's clocks and power limit, and in a process of its own how fast it copies memory
and multiplies in bfloat16. A GPU below --least of both rates that its kind should have is off: the command ends with
exit code 1, and another GPU is to be taken. Then sweep.py times each product (a cell's mode ":lent") with the H200's
entry, the heuristic's choice and the few configurations of a brief sweep. FILE gets its lines; tuning_table.py makes a
table:

    python benchmarks/tuning_table.py products --device "NVIDIA H100 80GB HBM3" --at-least 1 FILE

In the end, by format and tokens: how much longer the table's entry takes than the fastest that was timed, and how much
longer the heuristic's choice does. The table serves where the first stays below the second.
"""

import argparse
import collections
import dataclasses
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _sweep_space import H200_SMS, of_heuristic, of_table
from tuning_table import Times, key_of, read

# Of a card in order, copying and multiplying (moe-jax bench): 1e9 bytes and 1e12 operations a second.
RATES = {"NVIDIA H200": (4000, 650), "NVIDIA H100 80GB HBM3": (2700, 600), "NVIDIA GH200 480GB": (3200, 600)}
_SMI = "name,clocks.sm,clocks.max.sm,clocks.mem,clocks.max.mem,power.limit,power.max_limit,temperature.gpu"
_MEASURE = """
import json, jax
from moe_jax.cli.bench._limits import measure_limits
found = measure_limits(["bfloat16"])
device = jax.devices()[0]
rates = dict(gbps=found.gbps, tflops=found.tflops["bfloat16"])
print(json.dumps(dict(kind=device.device_kind, sms=device.core_count, **rates)))
"""


def card() -> dict[str, Any]:
    """kind, sms, gbps, tflops of the GPU; what nvidia-smi says is printed."""
    smi = ["nvidia-smi", f"--query-gpu={_SMI}", "--format=csv"]
    print(subprocess.run(smi, capture_output=True, text=True).stdout, flush=True)
    found = subprocess.run([sys.executable, "-c", _MEASURE], capture_output=True, text=True)
    if found.returncode:
        raise SystemExit(f"the card cannot be measured: {found.stderr[-600:]}")
    return json.loads(found.stdout.splitlines()[-1])


def is_off(found: dict[str, Any], least: float) -> bool:
    gbps, tflops = RATES.get(found["kind"], (0, 0))
    return found["gbps"] < least * gbps or found["tflops"] < least * tflops


def losses(times: Times) -> Iterator[tuple[str, str, int, int, float, float]]:
    """(model, format, tokens, GEMM, table, heuristic): time by that of the fastest; nan where it was not timed."""
    for (model, fmt, tokens, gemm), found in sorted(times.items()):
        key, micros = key_of(model, fmt), {text: min(each) for text, each in found.items()}
        least = min(micros.values())
        ratios = []
        for configs in (of_table(key, gemm, tokens), of_heuristic(key, gemm, tokens, H200_SMS)):
            labels = [json.dumps(dataclasses.asdict(config), sort_keys=True) for config in configs]
            ratios.append(micros.get(labels[0], math.nan) / least if labels else math.nan)
        yield model, fmt, tokens, gemm, ratios[0], ratios[1]


def summary(times: Times) -> Iterator[str]:
    groups: dict[tuple[str, int], list[tuple[float, float]]] = collections.defaultdict(list)
    for model, fmt, tokens, gemm, table, heuristic in losses(times):
        yield f"{model:14s} {fmt:12s} T={tokens:5d} GEMM {gemm}: table {table:.3f}, heuristic {heuristic:.3f}"
        if table == table and heuristic == heuristic:
            groups[fmt, tokens].append((table, heuristic))
    for (fmt, tokens), pairs in sorted(groups.items()):
        means = [math.exp(sum(map(math.log, each)) / len(each)) for each in zip(*pairs, strict=True)]
        yield f"all {fmt:12s} T={tokens:5d}: table {means[0]:.3f}, heuristic {means[1]:.3f} of the fastest"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=6)
    parser.add_argument("--seconds", type=int, default=150, help="of the sweep")
    parser.add_argument("--least", type=float, default=0.85)
    parser.add_argument("--models", default="qwen3-30b-a3b,mixtral-8x7b")
    parser.add_argument("--formats", default="bf16,fp8_channel,int4_g128,mxfp4")
    parser.add_argument("--tokens", default="64,1024,1")
    options = parser.parse_args()
    found = card()
    print(json.dumps(found), flush=True)
    if is_off(found, options.least):
        print(f"this {found['kind']} is off; expected about {RATES[found['kind']]} GB/s and TFLOP/s: take another")
        return 1
    cells = [f"{model}:{fmt}:lent" for fmt in options.formats.split(",") for model in options.models.split(",")]
    sweep = [sys.executable, str(Path(__file__).with_name("sweep.py")), "products", "--cells", ",".join(cells)]
    sweep += ["--out", str(options.out), "--tokens", options.tokens.replace(" ", "")]
    sweep += ["--jobs", str(options.jobs), "--seconds", str(options.seconds)]
    root = str(Path(__file__).resolve().parent.parent)
    subprocess.run(sweep, env=os.environ | {"PYTHONPATH": root})
    print(*summary(read([options.out])), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
