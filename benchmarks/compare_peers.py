"""Our layer beside vLLM's, from one sitting on one machine: ratios, goals, JSON and a plot.

    python benchmarks/moe_layer.py --jobs 8 --json ours.jsonl
    python benchmarks/time_peers.py MODEL FORMAT LOCK >> peers.txt   # vLLM 0.24, same machine, same sitting
    python benchmarks/compare_peers.py ours.jsonl peers.txt [peers2.txt ...] [--json FILE] [--png FILE]

Lines of peers.txt read "model  backend format  T= N  time us ...". A ratio is the time of the fastest peer of the same
format over ours: above 1 we are faster.
"""

import argparse
import json
import math
import re
from collections.abc import Iterable
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
# goal of a geometric mean over all models and numbers of tokens: schemes that count together
GOALS = {
    ("fp8_channel", "fp8_block"): 1.3,
    ("int8_w8a8",): 1.9,
    ("w4a16_g128",): 2.3,
    ("nvfp4_a16",): 2.3,
    ("mxfp4_a16",): 1.6,
    ("bf16",): 1.2,
}
# goal of the fraction of the machine's limit
LIMIT_GOALS = {16: (0.85, 0.80), 64: (0.85, 0.80), 8192: (0.75, 0.75)}  # tokens: (all, schemes of 4 bits)
FOUR_BITS = ("w4a16_g128", "nvfp4_a16", "mxfp4_a16", "w4a8_int8")
# Marlin takes gpt-oss only padded to 3072.
SAME_MODEL = {"gpt-oss-pad": "gpt-oss-120b"}
_LINE = re.compile(r"^(\S+)\s+(\S.*?)\s+T=\s*(\d+)\s+([\d.]+) us")


def read_peers(paths: Iterable[Path]) -> dict[tuple[str, str, int], float]:
    """{(model, format, tokens): microseconds}"""
    found = (_LINE.match(line) for path in paths for line in path.read_text().splitlines())
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
    return "\n".join([*lines, "(microseconds, fraction of the machine's limit / best peer, ratio)", "", *goals(rows)])


def goals(rows: list[dict]) -> list[str]:
    """Geometric means and fractions of limits beside what is asked of them."""
    compared = [row for row in rows if "ratio" in row]
    lines = []
    for scheme in dict.fromkeys(row["scheme"] for row in compared):
        ratios = [row["ratio"] for row in compared if row["scheme"] == scheme]
        below = sum(ratio < 1 for ratio in ratios)
        lines.append(
            f"{scheme:12} geometric mean {geometric_mean(ratios):.2f}x over {len(ratios)} cells, {below} below 1"
        )
    for schemes, goal in GOALS.items():
        ratios = [row["ratio"] for row in compared if row["scheme"] in schemes]
        if ratios:
            found = geometric_mean(ratios)
            word = "reached" if found >= goal else "missed"
            lines.append(f"goal {goal}x for {' and '.join(schemes)}: {found:.2f}x over {len(ratios)} cells, {word}")
    times = {(row["model"], row["scheme"], row["tokens"]): row["us"] for row in rows if "us" in row}
    slower = []
    for (model, scheme, tokens), us in times.items():
        others = [times.get((model, other, tokens)) for other in ("int8_w8a8", "w4a16_g128")]
        least = min((other for other in others if other is not None), default=math.inf)
        if scheme == "w4a8_int8" and us > least:
            slower.append(f"{model} T={tokens} {us:.1f} us, {least:.1f}")
    lines.append(f"w4a8_int8 slower than the better of our int8_w8a8 and w4a16_g128: {'; '.join(slower) or 'nowhere'}")
    for tokens, (goal, four_bits) in LIMIT_GOALS.items():
        cells = [row for row in rows if row["tokens"] == tokens and "us" in row]
        wanted = {id(row): four_bits if row["scheme"] in FOUR_BITS else goal for row in cells}
        missed = [f"{r['model']} {r['scheme']} {r['fraction']:.0%}" for r in cells if r["fraction"] < wanted[id(r)]]
        asked = f"{goal:.0%}" if goal == four_bits else f"{goal:.0%} ({four_bits:.0%} with 4 bits)"
        lines.append(f"T={tokens}: {len(cells) - len(missed)} of {len(cells)} cells reach {asked} of the limit")
        lines += [f"  below: {', '.join(missed)}"] if missed else []
    one = [row for row in rows if row["tokens"] == 1 and "us" in row]
    late = [(row["us"] * (1 - row["fraction"]), row) for row in one]
    slow = [f"{row['model']} {row['scheme']} +{rest:.0f}" for rest, row in late if rest > 12]
    lines.append(f"T=1: {len(one) - len(slow)} of {len(one)} cells within 12 us of reading the weights")
    lines += [f"  above, us: {', '.join(slow)}"] if slow else []
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ours", type=Path)
    parser.add_argument("peers", type=Path, nargs="+")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path)
    args = parser.parse_args()
    rows = compare(read_ours(args.ours), read_peers(args.peers))
    print(table(rows))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=0))
    if args.png:
        plot(rows, args.png)


if __name__ == "__main__":
    main()
