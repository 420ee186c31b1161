"""Our layer beside vLLM's, from one sitting on one machine: ratios, geometric means, JSON and a plot.

    python benchmarks/moe_layer.py --jobs 8 --json ours.json
    python bench_vllm.py MODELS FORMATS > peers.txt          # vLLM 0.24 and its kernels, same machine, same sitting
    python benchmarks/compare_peers.py ours.json peers.txt [--json FILE] [--png FILE]

Lines of peers.txt read "model  backend format  T= N  time us ...". A ratio is the time of the fastest peer of the same
format over ours: above 1 we are faster. Peers replay a CUDA graph of one routing, so that at T = 1 their weights may
stay in the L2; ours are routed anew in each call.
"""

import argparse
import json
import math
import re
from pathlib import Path

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
# Marlin takes gpt-oss only padded to 3072.
SAME_MODEL = {"gpt-oss-pad": "gpt-oss-120b"}
_LINE = re.compile(r"^(\S+)\s+(\S.*?)\s+T=\s*(\d+)\s+([\d.]+) us")


def read_peers(path: Path) -> dict[tuple[str, str, int], float]:
    """{(model, format, tokens): microseconds}"""
    found = (_LINE.match(line) for line in path.read_text().splitlines())
    return {(SAME_MODEL.get(m[1], m[1]), m[2], int(m[3])): float(m[4]) for m in found if m}


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
    lines += ["", f"{'model':14} {'scheme':12}" + "".join(f"{f'T={count}':>24}" for count in tokens)]
    for model, scheme in dict.fromkeys((row["model"], row["scheme"]) for row in rows):
        text = f"{model:14} {scheme:12}"
        for count in tokens:
            cell = next((r for r in rows if (r["model"], r["scheme"], r["tokens"]) == (model, scheme, count)), {})
            ours = f"{cell['us']:.1f}" if "us" in cell else "-"
            peer = f"{cell['peer_us']:.1f} {cell['ratio']:.2f}x" if "ratio" in cell else "-"
            text += f"{f'{ours} / {peer}':>24}"
        lines.append(text)
    lines.append("")
    for scheme in dict.fromkeys(row["scheme"] for row in compared):
        ratios = [row["ratio"] for row in compared if row["scheme"] == scheme]
        lines.append(f"{scheme:12} geometric mean {geometric_mean(ratios):.2f}x over {len(ratios)} cells")
    return "\n".join(lines)


def plot(rows: list[dict], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    compared = [row for row in rows if "ratio" in row]
    models = list(dict.fromkeys(row["model"] for row in compared))
    figure, axes = pyplot.subplots(1, len(models), figsize=(4 * len(models), 3.6), sharey=True, squeeze=False)
    for axis, model in zip(axes[0], models, strict=True):
        for scheme in dict.fromkeys(row["scheme"] for row in compared if row["model"] == model):
            own = sorted((r["tokens"], r["ratio"]) for r in compared if (r["model"], r["scheme"]) == (model, scheme))
            axis.plot(*zip(*own, strict=True), marker="o", label=scheme)
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set(title=model, xscale="log", yscale="log", xlabel="tokens")
    axes[0][0].set_ylabel("time of the best peer / ours")
    axes[0][-1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ours", type=Path)
    parser.add_argument("peers", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path)
    args = parser.parse_args()
    rows = compare(json.loads(args.ours.read_text()), read_peers(args.peers))
    print(table(rows))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=0))
    if args.png:
        plot(rows, args.png)


if __name__ == "__main__":
    main()
