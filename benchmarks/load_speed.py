"""Loading an already quantized checkpoint, against NumPy reading and copying the same files.

    JAX_PLATFORMS=cpu python benchmarks/load_speed.py [--scheme fp8_block,...] [--rounds 5] [--out FILE]

Writes once a Qwen3-MoE checkpoint of about 1 GB per scheme, tensors shuffled over its shards. Load and copy take turns
in one process with a warm page cache; the load is ``load_pretrained`` with all its checks and processing, the copy is
``numpy.array`` of every tensor of a memory-mapped file, in the order of the files, all copies kept until the end. The
ratio of a round compares neighbours in time; the table shows medians over the rounds. CPU seconds, of all threads, are
beside wall time: on a machine that others use they say what the load itself costs.
"""

import argparse
import json
import mmap
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from _checkpoints import dense_tensors, expert_tensors, qwen3_config, write_shuffled
from flax import nnx

import moe_jax
from moe_jax.quantization import Scheme

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--directory", type=Path, default=Path("/tmp/moe_jax_load_speed"), help="where checkpoints go")
parser.add_argument("--scheme", default="fp8_block,fp8_channel,int8_w8a8,w4a16_g128,nvfp4_a16,mxfp4_a16")
parser.add_argument("--rounds", type=int, default=5)
parser.add_argument("--gigabytes", type=float, default=1.0)
parser.add_argument("--out", type=Path)

EXPERTS, HIDDEN, INTERMEDIATE = 64, 2048, 768  # matrices as in Qwen3-30B-A3B
REQUIRED = 0.6
ARGUMENTS = dict(
    fp8_block=dict(num_bits=8, type="float", strategy="block", block_structure=[128, 128]),
    fp8_channel=dict(num_bits=8, type="float", strategy="channel"),
    int8_w8a8=dict(num_bits=8, type="int", strategy="channel"),
    w4a16_g128=dict(num_bits=4, type="int", strategy="group", group_size=128),
    nvfp4_a16=dict(num_bits=4, type="float", strategy="tensor_group", group_size=16, scale_dtype="float8_e4m3fn"),
    mxfp4_a16=dict(num_bits=4, type="float", strategy="group", group_size=32, scale_dtype="uint8"),
)
FORMATS = dict(
    w4a16_g128="pack-quantized",
    int8_w8a8="int-quantized",
    nvfp4_a16="nvfp4-pack-quantized",
    mxfp4_a16="mxfp4-pack-quantized",
)
INPUTS = dict(
    fp8_block=dict(num_bits=8, type="float", strategy="group", group_size=128, dynamic=True),
    fp8_channel=dict(num_bits=8, type="float", strategy="token", dynamic=True),
    int8_w8a8=dict(num_bits=8, type="int", strategy="token", dynamic=True),
)


def write(directory: Path, scheme: str, gigabytes: float) -> None:
    layer_bytes = EXPERTS * 3 * HIDDEN * INTERMEDIATE * Scheme.parse(scheme).weights.element_type.bits / 8
    layers = max(1, round(gigabytes * 1e9 / layer_bytes))
    config = qwen3_config(layers=layers, hidden=HIDDEN, intermediate=INTERMEDIATE, experts=EXPERTS)
    config["quantization_config"] = dict(
        quant_method="compressed-tensors",
        format=FORMATS.get(scheme, "float-quantized"),
        version="0.20.0",
        ignore=["re:.*self_attn.*", "re:.*mlp.gate$", "lm_head"],
        config_groups=dict(
            group_0=dict(targets=["Linear"], weights=ARGUMENTS[scheme], input_activations=INPUTS.get(scheme))
        ),
    )
    write_shuffled(directory, config, [*dense_tensors(config), *expert_tensors(config, scheme)], shards=4, seed=0)


def load(directory: Path) -> None:
    model = moe_jax.load_pretrained(directory)
    jax.block_until_ready(jax.tree.leaves(nnx.state(model)))


def copy(directory: Path) -> None:
    """Without any library of ours: headers, then a copy of every tensor's bytes."""
    copies = []
    for path in sorted(directory.glob("*.safetensors")):
        with open(path, "rb") as file:
            mapped = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        length = int(mapped[:8].view(np.uint64)[0])
        for name, entry in json.loads(mapped[8 : 8 + length].tobytes()).items():
            first, last = entry["data_offsets"]
            copies.append((name, np.array(mapped[8 + length + first : 8 + length + last])))


def seconds(action: Callable[[Path], None], directory: Path) -> tuple[float, float]:
    """(wall, CPU of all threads)"""
    wall, cpu = time.perf_counter(), time.process_time()
    action(directory)
    return time.perf_counter() - wall, time.process_time() - cpu


def main() -> None:
    args = parser.parse_args()
    lines = [
        f"# {os.cpu_count()} CPUs, Python {sys.version.split()[0]}, jax {jax.__version__}, NumPy {np.__version__}, "
        f"{time.strftime('%Y-%m-%d')}; medians of {args.rounds} rounds, load average at the end of each line",
        f"{'scheme':12} {'GB':>5} {'load GB/s':>9} {'copy GB/s':>9} {'load / copy':>11} {'by CPU time':>11}  ratios",
    ]
    print("\n".join(lines))
    slowest = 1.0
    for scheme in args.scheme.split(","):
        directory = args.directory / scheme
        if not (directory / "config.json").exists():
            write(directory, scheme, args.gigabytes)
        size = sum(path.stat().st_size for path in directory.glob("*.safetensors")) / 1e9
        load(directory), copy(directory)
        rounds = [(seconds(load, directory), seconds(copy, directory)) for _ in range(args.rounds)]
        ratios, by_cpu = ([copied[i] / loaded[i] for loaded, copied in rounds] for i in (0, 1))
        loaded, copied = (statistics.median(wall for wall, _ in taken) for taken in zip(*rounds, strict=True))
        slowest = min(slowest, statistics.median(ratios))
        lines.append(
            f"{scheme:12} {size:5.2f} {size / loaded:9.2f} {size / copied:9.2f} {statistics.median(ratios):11.2f} "
            f"{statistics.median(by_cpu):11.2f}  {' '.join(f'{r:.2f}' for r in ratios)}  load {os.getloadavg()[0]:.1f}"
        )
        print(lines[-1], flush=True)
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")
    if slowest < REQUIRED:
        sys.exit(f"slower than {REQUIRED} of the copy")


main()
