"""Loading: speed beside a copy of the same files, peak memory, and online quantization beside a copy to the device.

    JAX_PLATFORMS=cpu python benchmarks/load.py speed [--scheme fp8_block,...] [--rounds 5] [--gigabytes 1]
    JAX_PLATFORMS=cpu python benchmarks/load.py memory [--scheme fp8_block,...] [--source directory|pairs]
    python benchmarks/load.py online [--scheme fp8_block,...] [--experts 64] [--rounds 5]

Each takes --out FILE, and --directory, where checkpoints are written once.

speed: a quantized Qwen3-MoE checkpoint of about 1 GB per scheme, tensors shuffled over its shards. Load and copy take
turns in one process with a warm page cache; the load is ``load_pretrained`` with all its checks and processing, the
copy is ``numpy.array`` of every tensor of a memory-mapped file, in the order of the files, all copies kept until the
end. The ratio of a round compares neighbours in time; the table shows medians over the rounds. CPU seconds, of all
threads, are beside wall time: on a machine that others use they say what the load itself costs.

memory: a bf16 Qwen3-MoE checkpoint of 8 layers and 2.4 GB whose tensors lie shuffled over its shards, loaded with
``quantize=`` in a fresh process. RssAnon (memory that is not a mapped file) is sampled during the load and compared
with its value after the import and the load of a tiny checkpoint. Bound for a directory: the quantized model + 1.5
full-precision layers + 300 MB. ``--source pairs`` reloads the loaded model from an iterator in random order: nothing
bounds what is incomplete there, so what was staged is reported beside the peak, which holds both models.

online: the experts of one layer lie in host memory in bfloat16, one array for each matrix, read-only as those of a
file. Three things take turns, every one ends when the device is done: ``jax.device_put`` of every matrix; a
``LayerLoader`` that quantizes them; and a ``FusedMoE`` that also brings them into the layout of its kernels. Rates are
bytes of bfloat16 by the second, medians over the rounds; ratios compare neighbours in time.
"""

import argparse
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
from _checkpoints import dense_tensors, expert_tensors, qwen3_config, write_shuffled
from flax import nnx

import moe_jax
from moe_jax.loading import Checkpoint, LayerLoader
from moe_jax.quantization import Scheme

REQUIRED = 0.6  # of the copy

EXPERTS, HIDDEN, INTERMEDIATE = 64, 2048, 768  # of the checkpoints for speed: matrices as in Qwen3-30B-A3B
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


def write_quantized(directory: Path, scheme: str, gigabytes: float) -> None:
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


def seconds(action: Callable[..., None], *args: object) -> tuple[float, float]:
    """(wall, CPU of all threads)"""
    wall, cpu = time.perf_counter(), time.process_time()
    action(*args)
    return time.perf_counter() - wall, time.process_time() - cpu


def write_out(lines: list[str], out: Path | None) -> None:
    if out:
        out.write_text("\n".join(lines) + "\n")


def speed(args: argparse.Namespace) -> None:
    lines = [
        f"# {os.cpu_count()} CPUs, Python {sys.version.split()[0]}, jax {jax.__version__}, NumPy {np.__version__}, "
        f"{time.strftime('%Y-%m-%d')}; medians of {args.rounds} rounds, load average at the end of each line",
        f"{'scheme':12} {'GB':>5} {'load GB/s':>9} {'copy GB/s':>9} {'load / copy':>11} {'by CPU time':>11}  ratios",
    ]
    print("\n".join(lines))
    slowest = 1.0
    for scheme in args.scheme.split(","):
        directory = args.directory / "speed" / scheme
        if not (directory / "config.json").exists():
            write_quantized(directory, scheme, args.gigabytes)
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
    write_out(lines, args.out)
    if slowest < REQUIRED:
        sys.exit(f"slower than {REQUIRED} of the copy")


LARGE = dict(layers=8, hidden=1024, intermediate=768, experts=64)  # the checkpoint for memory
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


def write_full(directory: Path) -> None:
    for name, sizes, shards in (
        ("tiny", dict(layers=1, hidden=128, intermediate=128, experts=2), 1),
        ("large", LARGE, 6),
    ):
        if (directory / name / "config.json").exists():
            continue
        config = qwen3_config(**sizes)
        write_shuffled(
            directory / name, config, [*dense_tensors(config), *expert_tensors(config)], shards=shards, seed=0
        )


def load_measured(directory: Path, scheme: str, source: str) -> None:
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


def memory(args: argparse.Namespace) -> None:
    directory = args.directory / "memory"
    if args.child:
        return load_measured(directory, args.child, args.source)
    write_full(directory)
    layer = LARGE["experts"] * 3 * LARGE["hidden"] * LARGE["intermediate"] * 2 / MB
    lines = [
        f"# {os.cpu_count()} CPUs, Python {sys.version.split()[0]}, {time.strftime('%Y-%m-%d')}; "
        f"{LARGE['layers']} layers of {layer:.0f} MB in bf16, tensors shuffled over 6 shards, source: {args.source}",
        f"{'scheme':16} {'quantized MB':>12} {'peak MB':>8} {'allowed MB':>10} {'staged MB':>9} {'seconds':>7}",
    ]
    is_within = True
    for scheme in args.scheme.split(","):
        command = [sys.executable, __file__, "memory", "--directory", str(args.directory)]
        command += ["--source", args.source, "--child", scheme]
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
    write_out(lines, args.out)
    if not is_within:
        sys.exit("peak above what is allowed")


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


def online(args: argparse.Namespace) -> None:
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
            (seconds(copied, pairs)[0], seconds(loaded, pairs, config)[0], seconds(processed, pairs, config)[0])
            for _ in range(1 + args.rounds)
        ][1:]  # the first one compiles
        copy, load, layer = (gigabytes / statistics.median(taken) for taken in zip(*rounds, strict=True))
        by_loader = statistics.median(copy / load for copy, load, _ in rounds)
        by_layer = statistics.median(copy / layer for copy, _, layer in rounds)
        slowest = min(slowest, by_loader)
        lines.append(f"{name:14} {copy:9.2f} {load:11.2f} {layer:10.2f} {by_loader:11.2f} {by_layer:10.2f}")
        print(lines[-1], flush=True)
    write_out(lines, args.out)
    if slowest < REQUIRED:
        sys.exit(f"slower than {REQUIRED} of the copy")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(required=True)
    for action, schemes in (
        (speed, "fp8_block,fp8_channel,int8_w8a8,w4a16_g128,nvfp4_a16,mxfp4_a16"),
        (memory, "fp8_block,int8_w8a16,w4a16_g128,nvfp4"),
        (online, "fp8_channel,fp8_block,int8_w8a8,w4a16_g128,nvfp4_dynamic,mxfp4"),
    ):
        part = parts.add_parser(action.__name__)
        part.add_argument("--scheme", default=schemes)
        part.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()) / "moe_jax_load")
        part.add_argument("--rounds", type=int, default=5)
        part.add_argument("--out", type=Path)
        part.set_defaults(action=action)
    parts.choices["speed"].add_argument("--gigabytes", type=float, default=1.0)
    parts.choices["memory"].add_argument("--source", choices=("directory", "pairs"), default="directory")
    parts.choices["memory"].add_argument("--child", metavar="SCHEME", help=argparse.SUPPRESS)
    for name, size in (("experts", 64), ("hidden", 4096), ("intermediate", 1536)):
        parts.choices["online"].add_argument(f"--{name}", type=int, default=size)
    args = parser.parse_args()
    args.action(args)


if __name__ == "__main__":
    main()
