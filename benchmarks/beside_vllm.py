"""Our layers beside vLLM's, in one benchmark run on one machine: every cell, its ratio to the best peer, a plot.

    python benchmarks/beside_vllm.py --peers FOLDER --out DIR [--gpus 0,1] [--models ...] [--schemes ...]
        [--tokens 1,16,...] [--jobs 15] [--seconds 200] [--peer-jobs 9] [--peer-seconds 260]
    python benchmarks/beside_vllm.py --out DIR --compare      # anew from DIR's ours.jsonl and peers.txt

FOLDER: bench_vllm.py, bench_base.py and, in "site", vLLM 0.24 with what it needs. First ours (moe_layer.py), then the
peers (_vllm_layer.py), on the same GPUs by the same rule; each in several processes that compile side by side and take
turns on their GPU. DIR gets ours.jsonl and peers.txt as they grow, logs, and ratios.txt, ratios.json and ratios.png.
A ratio is the time of the fastest peer of the same format over ours: above 1 we are faster. What --seconds and
--peer-seconds cut off is not in them; a peer that fails is named.
"""

import argparse
import json
import math
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from moe_layer import SCHEMES

from moe_jax.benchmarking import MODELS

_HERE = Path(__file__).parent
# our scheme: formats of _vllm_layer.py that hold its peers
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
# our scheme: the peers' formats it is compared with
PEERS = {
    "bf16": ("vllm-triton bf16",),
    "fp8_tensor": ("vllm-triton fp8 tensor",),
    "fp8_channel": ("vllm-triton fp8 chan/token", "vllm-cutlass fp8 chan/token"),
    "fp8_block": ("vllm-triton fp8 block128", "vllm-deepgemm fp8 block128"),
    "int8_w8a8": ("vllm-triton int8 w8a8",),
    "w4a16_g128": ("vllm-marlin w4a16 g128",),
    "nvfp4_a16": ("vllm-marlin nvfp4 w4a16",),
    "mxfp4_a16": ("vllm-marlin mxfp4 w4a16", "oai-triton mxfp4 (+routing)"),
    "w4a8_int8": ("vllm-triton int8 w8a8", "vllm-marlin w4a16 g128"),
}
FOUR_BITS = ("w4a16_g128", "nvfp4_a16", "mxfp4_a16", "w4a8_int8")
# Marlin takes gpt-oss only padded to 3072.
SAME_MODEL = {"gpt-oss-pad": "gpt-oss-120b"}
_LINE = re.compile(r"^(\S+)\s+(\S.*?)\s+T=\s*(\d+)\s+([\d.]+) us")


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
        command = [sys.executable, "-u", str(_HERE / "_vllm_layer.py"), model, fmt, str(args.out / "gpu{gpu}.lock")]
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


def read_peers(path: Path) -> dict[tuple[str, str, int], float]:
    """{(model, format, tokens): microseconds}"""
    found = map(_LINE.match, path.read_text().splitlines())
    return {(SAME_MODEL.get(m[1], m[1]), m[2], int(m[3])): float(m[4]) for m in found if m}


def read_ours(path: Path) -> list[dict]:
    """Cells of a file of JSON lines, or of one JSON list; of a cell that is there twice the last."""
    text = path.read_text()
    cells = json.loads(text) if text.startswith("[") else [json.loads(line) for line in text.splitlines()]
    latest = {(cell["model"], cell["scheme"], cell["tokens"]): cell for cell in cells}
    models, schemes = (list(dict.fromkeys(cell[name] for cell in cells)) for name in ("model", "scheme"))
    order = lambda cell: (models.index(cell["model"]), schemes.index(cell["scheme"]), cell["tokens"])  # noqa: E731
    return sorted(latest.values(), key=order)


def compare(ours: list[dict], peers: dict[tuple[str, str, int], float]) -> list[dict]:
    """Our cells, with the fastest peer of the same format where one ran."""
    rows = []
    for cell in ours:
        candidates = {name: peers.get((cell["model"], name, cell["tokens"])) for name in PEERS.get(cell["scheme"], ())}
        candidates = {name: us for name, us in candidates.items() if us is not None}
        if "us" in cell and candidates:
            best = min(candidates, key=lambda name: candidates[name])
            cell = cell | dict(peer=best, peer_us=candidates[best], ratio=round(candidates[best] / cell["us"], 3))
        rows.append(cell)
    return rows


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def table(rows: list[dict]) -> str:
    """Losses first, then every model and scheme over T, then the geometric means."""
    compared = [row for row in rows if "ratio" in row]
    lines = ["Cells below 1.0, worst first:"]
    for row in sorted((row for row in compared if row["ratio"] < 1), key=lambda row: row["ratio"]):
        lines.append(
            f"  {row['model']} {row['scheme']} T={row['tokens']}: {row['ratio']:.2f} "
            f"(ours {row['us']} us, {row['peer']} {row['peer_us']} us)"
        )
    tokens = sorted({row["tokens"] for row in rows})
    lines += ["", f"{'model':14} {'scheme':12}" + "".join(f"{f'T={count}':>27}" for count in tokens)]
    for model, scheme in dict.fromkeys((row["model"], row["scheme"]) for row in rows):
        text = f"{model:14} {scheme:12}"
        for count in tokens:
            cell = next((r for r in rows if (r["model"], r["scheme"], r["tokens"]) == (model, scheme, count)), {})
            ours = f"{cell['us']:.1f} {cell['fraction']:.0%}" if "us" in cell else "-"
            peer = f"{cell['peer_us']:.1f} {cell['ratio']:.2f}x" if "ratio" in cell else "-"
            text += f"{f'{ours} / {peer}':>27}"
        lines.append(text)
    return "\n".join([*lines, "(microseconds, fraction of the machine's limit / best peer, ratio)", "", *summary(rows)])


def summary(rows: list[dict]) -> list[str]:
    """Geometric means of the ratios by scheme and by tokens, and the mean fraction of the machine's limit."""
    compared, lines = [row for row in rows if "ratio" in row], []
    for name in ("scheme", "tokens"):
        for value in dict.fromkeys(sorted((row[name] for row in compared), key=str if name == "scheme" else int)):
            ratios = [row["ratio"] for row in compared if row[name] == value]
            below = sum(ratio < 1 for ratio in ratios)
            label = value if name == "scheme" else f"T={value}"
            lines.append(
                f"{label:12} geometric mean {geometric_mean(ratios):.2f}x over {len(ratios)} cells, {below} below 1"
            )
    for is_four, label in ((False, "8 and 16 bits"), (True, "4 bits")):
        cells = [row for row in rows if "us" in row and (row["scheme"] in FOUR_BITS) == is_four]
        for tokens in sorted({row["tokens"] for row in cells}):
            of_limit = [row["fraction"] for row in cells if row["tokens"] == tokens]
            lines.append(
                f"weights of {label}, T={tokens}: {sum(of_limit) / len(of_limit):.0%} of the limit on average, "
                f"{min(of_limit):.0%} to {max(of_limit):.0%}"
            )
    return lines


def plot(rows: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    compared = [row for row in rows if "ratio" in row]
    models = list(dict.fromkeys(row["model"] for row in compared))
    colors = {scheme: f"C{i}" for i, scheme in enumerate(dict.fromkeys(row["scheme"] for row in compared))}
    figure, axes = pyplot.subplots(
        1, len(models), figsize=(3.6 * len(models), 4), sharey=True, squeeze=False, layout="constrained"
    )
    for axis, model in zip(axes[0], models, strict=True):
        for scheme, color in colors.items():
            own = sorted((r["tokens"], r["ratio"]) for r in compared if (r["model"], r["scheme"]) == (model, scheme))
            if own:
                axis.plot(*zip(*own, strict=True), marker="o", markersize=4, color=color)
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set(title=model, xscale="log", yscale="log", xlabel="tokens")
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("{x:g}")
    axes[0][0].set_ylabel("time of the best peer / ours")
    lines = [pyplot.Line2D([], [], color=color, marker="o", markersize=4, label=name) for name, color in colors.items()]
    figure.legend(handles=lines, loc="outside lower center", ncols=len(lines), fontsize=8, frameon=False)
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--gpus", default="0")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--schemes", default=",".join(SCHEMES))
    parser.add_argument("--tokens", default="1,16,64,256,1024,8192")
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--peer-jobs", type=int, default=8)
    parser.add_argument("--peer-seconds", type=float, default=600)
    parser.add_argument("--compare", action="store_true", help="time nothing, compare what --out holds")
    args = parser.parse_args()
    if args.compare:
        return compared(args.out)
    if args.peers is None or not (args.peers / "bench_vllm.py").is_file():
        parser.error(f"--peers {args.peers}: there is no bench_vllm.py in it; prepare the peers first")
    if unknown := set(args.schemes.split(",")) - _FORMATS.keys():
        parser.error(f"--schemes: {', '.join(sorted(unknown))} has no peer; those that have: {', '.join(_FORMATS)}")
    args.out.mkdir(parents=True, exist_ok=True)
    for name in ("ours.jsonl", "peers.txt"):
        (args.out / name).write_text("")
    gpus = args.gpus.split(",")
    run_ours(args, gpus)
    run_peers(args, gpus)
    return compared(args.out)


def compared(folder: Path) -> int:
    """Print and write what ours.jsonl and peers.txt of ``folder`` say beside each other."""
    rows = compare(read_ours(folder / "ours.jsonl"), read_peers(folder / "peers.txt"))
    text = table(rows)
    print(text)
    (folder / "ratios.txt").write_text(text + "\n")
    (folder / "ratios.json").write_text(json.dumps(rows, indent=0))
    if any("ratio" in row for row in rows):
        plot(rows, folder / "ratios.png")
    for row in rows:
        if "error" in row:
            print(f"ours {row['model']} {row['scheme']} T={row['tokens']}: {row['error']}")
    print(f"{sum('us' in row for row in rows)} cells of ours, {sum('ratio' in row for row in rows)} beside a peer")
    return 0


if __name__ == "__main__":
    sys.exit(main())
