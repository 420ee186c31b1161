"""Our layers and vLLM's in one sitting on one machine: every cell, its ratio to the best peer, JSON and a plot.

    python benchmarks/sitting.py --peers FOLDER --out DIR [--gpus 0,1] [--models ...] [--schemes ...]
        [--tokens 1,16,...] [--jobs 15] [--seconds 200] [--peer-jobs 9] [--peer-seconds 260]

FOLDER: bench_vllm.py, bench_base.py and, in "site", vLLM 0.24 with what it needs. First ours (moe_layer.py), then the
peers (time_peers.py), on the same GPUs by the same rule; each in several processes that compile side by side and take
turns on their GPU. DIR gets ours.jsonl and peers.txt as they grow, logs, and compare_peers.py's ratios.txt, .json and
.png. What --seconds and --peer-seconds cut off is not in them; a peer that fails is named.
"""

import argparse
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from compare_peers import compare, plot, read_ours, read_peers, table
from moe_layer import SCHEMES

from moe_jax.benchmarking import MODELS

_HERE = Path(__file__).parent
# our scheme: formats of time_peers.py that hold its peers
_FORMATS = {
    "bf16": ("bf16",),
    "fp8_tensor": ("fp8",),
    "fp8_channel": ("fp8",),
    "fp8_block": ("fp8", "dg_layer"),
    "int8_w8a8": ("int8",),
    "w4a16_g128": ("marlin4",),
    "nvfp4_a16": ("marlin_nvfp4",),
    "mxfp4_a16": ("marlin_mxfp4", "oai_mxfp4"),
    "w4a8_int8": ("int8", "marlin4"),
}


def peer_jobs(models: Sequence[str], schemes: Sequence[str]) -> list[tuple[str, str]]:
    """(model, format) of each process of the peers. Marlin takes gpt-oss only padded, and its MXFP4 and DeepGEMM not at
    all; OpenAI's kernels are timed where vLLM uses them or has nothing faster.
    """
    jobs = []
    for fmt in dict.fromkeys(fmt for scheme in schemes for fmt in _FORMATS[scheme]):
        for model in models:
            is_padded = model == "gpt-oss-120b" and fmt in ("marlin4", "marlin_nvfp4")
            if model == "gpt-oss-120b" and fmt in ("marlin_mxfp4", "dg_layer"):
                continue
            if fmt == "oai_mxfp4" and model not in ("gpt-oss-120b", "qwen3-30b-a3b"):
                continue
            jobs.append(("gpt-oss-pad" if is_padded else model, fmt))
    return jobs


def on_gpus(
    commands: Sequence[tuple[str, list[str]]],
    gpus: Sequence[str],
    per_gpu: int,
    until: float,
    folder: Path,
    environment: Mapping[str, str],
    finished: Callable[[str, int | None], None],
) -> None:
    """Run (name, command) in the order given, per_gpu at a time on each GPU, until the time ``until``.

    Output goes to folder/name.log; "{gpu}" in a command is the GPU's number. finished(name, exit code) is called as
    each ends, with None for one that the time cut off or that did not start.
    """
    waiting: queue.SimpleQueue[tuple[str, list[str]]] = queue.SimpleQueue()
    for item in commands:
        waiting.put(item)

    def worker(gpu: str) -> None:
        while True:
            try:
                name, command = waiting.get_nowait()
            except queue.Empty:
                return
            left, code = until - time.time(), None
            if left > 0:
                with (folder / f"{name}.log").open("w") as log:
                    own = dict(environment) | {"CUDA_VISIBLE_DEVICES": gpu}
                    words = [word.replace("{gpu}", gpu) for word in command]
                    process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, env=own)
                    try:
                        code = process.wait(left)
                    except subprocess.TimeoutExpired:
                        _end(process)
            finished(name, code)

    threads = [threading.Thread(target=worker, args=(gpu,)) for _ in range(per_gpu) for gpu in gpus]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _end(process: subprocess.Popen) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def run_ours(args: argparse.Namespace, gpus: Sequence[str]) -> None:
    pairs = [f"{model}:{scheme}" for scheme in args.schemes.split(",") for model in args.models.split(",")]
    commands = []
    for index in range(len(gpus)):
        own = ",".join(pairs[index :: len(gpus)])
        command = [sys.executable, str(_HERE / "moe_layer.py"), "--pairs", own, "--tokens", args.tokens]
        command += ["--jobs", str(max(args.jobs, 2)), "--seconds", str(args.seconds)]
        command += ["--json", str(args.out / "ours.jsonl")]
        commands.append((f"ours.{index}", command))
    until = time.time() + args.seconds + 20  # it ends by itself, and its processes with it
    told = lambda name, code: print(f"{name}: exit {code}", flush=True)  # noqa: E731
    on_gpus(commands, gpus, 1, until, args.out, os.environ, told)


def run_peers(args: argparse.Namespace, gpus: Sequence[str]) -> None:
    home = args.peers.resolve()
    paths = [str(home / "site"), str(home), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    # JAX's own settings would reach vLLM through Triton's and torch's libraries.
    kept = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    environment = kept | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PEERS_HOME": str(home)}
    commands = []
    for model, fmt in peer_jobs(args.models.split(","), args.schemes.split(",")):
        command = [sys.executable, "-u", str(_HERE / "time_peers.py"), model, fmt, str(args.out / "gpu{gpu}.lock")]
        commands.append((f"{model}.{fmt}", command))
    guard = threading.Lock()

    def finished(name: str, code: int | None) -> None:
        log = args.out / f"{name}.log"
        text = log.read_text() if log.exists() else ""
        with guard, (args.out / "peers.txt").open("a") as file:
            file.writelines(line + "\n" for line in text.splitlines() if " us " in line)
        if code != 0:
            last = text.strip().splitlines()[-1:] or ["no output"]
            print(f"peer {name}: {'cut off' if code is None else f'exit {code}'}: {last[0][:200]}", flush=True)

    on_gpus(commands, gpus, args.peer_jobs, time.time() + args.peer_seconds, args.out, environment, finished)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpus", default="0")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--schemes", default=",".join(SCHEMES))
    parser.add_argument("--tokens", default="1,16,64,256,1024,8192")
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--peer-jobs", type=int, default=8)
    parser.add_argument("--peer-seconds", type=float, default=600)
    args = parser.parse_args()
    if not (args.peers / "bench_vllm.py").is_file():
        parser.error(f"--peers {args.peers}: there is no bench_vllm.py in it; prepare the peers first")
    if unknown := set(args.schemes.split(",")) - _FORMATS.keys():
        parser.error(f"--schemes: {', '.join(sorted(unknown))} has no peer; those that have: {', '.join(_FORMATS)}")
    args.out.mkdir(parents=True, exist_ok=True)
    for name in ("ours.jsonl", "peers.txt"):
        (args.out / name).write_text("")
    gpus = args.gpus.split(",")
    run_ours(args, gpus)
    run_peers(args, gpus)
    rows = compare(read_ours(args.out / "ours.jsonl"), read_peers([args.out / "peers.txt"]))
    text = table(rows)
    print(text)
    (args.out / "ratios.txt").write_text(text + "\n")
    (args.out / "ratios.json").write_text(json.dumps(rows, indent=0))
    if any("ratio" in row for row in rows):
        plot(rows, args.out / "ratios.png")
    for row in rows:
        if "error" in row:
            print(f"ours {row['model']} {row['scheme']} T={row['tokens']}: {row['error']}")
    print(f"{sum('us' in row for row in rows)} cells of ours, {sum('ratio' in row for row in rows)} beside a peer")
    return 0


if __name__ == "__main__":
    sys.exit(main())
