"""Peak host memory of loading a full-precision checkpoint with ``quantize=``, whatever the order of its tensors.

    JAX_PLATFORMS=cpu python benchmarks/load_memory.py [--scheme fp8_block] [--source directory|pairs] [--out FILE]

Writes once a bf16 Qwen3-MoE checkpoint of 8 layers and 2.4 GB whose tensors lie shuffled over its shards, and loads it
in a fresh process. RssAnon (memory that is not a mapped file) is sampled during the load and compared with its value
after the import and the load of a tiny checkpoint. Bound for a directory: the quantized model + 1.5 full-precision
layers + 300 MB. ``--source pairs`` reloads the loaded model from an iterator in random order: nothing bounds what is
incomplete there, so what was staged is reported beside the peak, which holds both models.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--directory", type=Path, default=Path("/tmp/moe_jax_load_memory"), help="where checkpoints go")
parser.add_argument("--scheme", default="fp8_block,int8_w8a16,w4a16_g128,nvfp4")
parser.add_argument("--source", choices=("directory", "pairs"), default="directory")
parser.add_argument("--out", type=Path)
parser.add_argument("--child", metavar="SCHEME", help=argparse.SUPPRESS)

LAYERS, EXPERTS, HIDDEN, INTERMEDIATE = 8, 64, 1024, 768
SLACK_MB = 300.0
MB = 1e6


def anonymous_mb() -> float:
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024 / MB
    raise OSError("/proc/self/status has no RssAnon")


class Peak(threading.Thread):
    """Samples RssAnon every few milliseconds until stopped."""

    def __init__(self):
        super().__init__(daemon=True)
        self.mb, self.is_done = 0.0, threading.Event()

    def run(self):
        while not self.is_done.wait(0.003):
            self.mb = max(self.mb, anonymous_mb())


def write_checkpoints(directory: Path) -> None:
    from _checkpoints import dense_tensors, expert_tensors, qwen3_config, write_shuffled

    for name, sizes, shards in (
        ("tiny", dict(layers=1, hidden=128, intermediate=128, experts=2), 1),
        ("large", dict(layers=LAYERS, hidden=HIDDEN, intermediate=INTERMEDIATE, experts=EXPERTS), 6),
    ):
        if (directory / name / "config.json").exists():
            continue
        config = qwen3_config(**sizes)
        write_shuffled(
            directory / name, config, [*dense_tensors(config), *expert_tensors(config)], shards=shards, seed=0
        )


def child(directory: Path, scheme: str, source: str) -> None:
    import jax
    import numpy as np
    from flax import nnx

    import moe_jax
    from moe_jax.loading import Checkpoint

    moe_jax.load_pretrained(directory / "tiny", quantize=scheme)
    before = anonymous_mb()
    staged = None
    if source == "directory":
        peak = Peak()
        peak.start()
        start = time.perf_counter()
        model = moe_jax.load_pretrained(directory / "large", quantize=scheme)
    else:
        model = moe_jax.load_pretrained(directory / "large", quantize=scheme)
        with Checkpoint(directory / "large") as checkpoint:
            names = list(checkpoint.names)
            np.random.default_rng(7).shuffle(names)
            peak = Peak()
            peak.start()
            start = time.perf_counter()
            report = model.reload_weights((name, checkpoint.read(name).copy()) for name in names)
            staged = report.peak_staged_bytes / MB
    jax.block_until_ready(jax.tree.leaves(nnx.state(model)))
    seconds = time.perf_counter() - start
    peak.is_done.set()
    peak.join()
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model))) / MB
    print(json.dumps(dict(growth=peak.mb - before, held=held, seconds=seconds, staged=staged)))


def main() -> None:
    args = parser.parse_args()
    if args.child:
        return child(args.directory, args.child, args.source)
    write_checkpoints(args.directory)
    layer = EXPERTS * 3 * HIDDEN * INTERMEDIATE * 2 / MB
    lines = [
        f"# {os.cpu_count()} CPUs, Python {sys.version.split()[0]}, {time.strftime('%Y-%m-%d')}; {LAYERS} layers of "
        f"{layer:.0f} MB in bf16, tensors shuffled over 6 shards, source: {args.source}",
        f"{'scheme':16} {'quantized MB':>12} {'peak MB':>8} {'allowed MB':>10} {'staged MB':>9} {'seconds':>7}",
    ]
    is_within = True
    for scheme in args.scheme.split(","):
        command = [sys.executable, __file__, "--directory", args.directory, "--source", args.source, "--child", scheme]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
        allowed = found["held"] + 1.5 * layer + SLACK_MB
        staged = "-"
        if args.source == "pairs":  # the model that is replaced is held too
            staged = f"{found['staged']:.0f}"
            allowed = 2 * found["held"] + found["staged"] + 0.5 * layer + SLACK_MB
        is_within &= found["growth"] <= allowed
        numbers = f"{found['held']:12.0f} {found['growth']:8.0f} {allowed:10.0f} {staged:>9} {found['seconds']:7.1f}"
        lines.append(f"{scheme:16} {numbers}")
        print(lines[-1], flush=True)
    print("\n".join(lines[:2]))
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")
    if not is_within:
        sys.exit("peak above what is allowed")


main()
