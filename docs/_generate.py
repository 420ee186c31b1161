"""Pages that are made from the code and from kept results: format table, API, tables and raw output of benchmarks."""

import importlib
import importlib.util
import json
import shutil
from pathlib import Path

ROOT = Path(__file__).parent.parent
API = {
    "moe_jax": "layers, models, loading, generating",
    "moe_jax.quantization": "formats, schemes, tensors, methods",
    "moe_jax.routing": "router logits to experts and weights",
    "moe_jax.loading": "checkpoints, names, streams",
    "moe_jax.models": "families, decoder, cache",
    "moe_jax.parallel": "meshes, placement, load balancing",
    "moe_jax.writing": "quantized checkpoints",
    "moe_jax.checkpointing": "Orbax",
    "moe_jax.inspection": "what is in a checkpoint",
    "moe_jax.benchmarking": "timing, limits, reports",
    "moe_jax.doctor": "what runs here",
    "torch_bridge": "the layer as a torch module",
}


def has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


def write(directory: Path) -> None:
    """Write all generated pages below ``directory``, and only what changed, so that Sphinx rebuilds no more."""
    pages = {
        "formats.md": formats(),
        "measured.md": measured(),
        "results.md": results(),
        "api/index.md": api_index(),
    }
    pages |= api_pages()
    for name, text in pages.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_file() or path.read_text() != text:
            path.write_text(text)
    for picture in (ROOT / "benchmarks/results").glob("*.png"):
        shutil.copy2(picture, directory / picture.name)


def formats() -> str:
    """One row for each scheme of the registry, measured on a layer of 8 experts of 256 x 512."""
    from moe_jax import MoEConfig
    from moe_jax.quantization import ALIASES, SCHEMES, method_for

    lines = [
        "# Formats",
        "",
        "Every scheme that `scheme=`, `quantize=` and `--scheme` take, from the registry in `moe_jax/quantization`.",
        "Bits: of one weight with its scales and zero points, in a layer of 8 experts of 256 x 512.",
        "",
        "| Scheme | Weights | Scales of weights | Activations | Bits |",
        "|---|---|---|---|---|",
    ]
    for name, scheme in SCHEMES.items():
        config = MoEConfig(8, 2, 512, 256, scheme=scheme, dtype="bfloat16")
        bits = 8 * method_for(scheme).abstract_weights(config).nbytes() / (8 * 3 * 256 * 512)
        lines.append(
            f"| `{name}` | {element(scheme.weights)} | {extent(scheme.weights)} | {activations(scheme.activations)} "
            f"| {bits:.2f} |"
        )
    lines += ["", "## Other names", "", "| Name | Scheme |", "|---|---|"]
    lines += [f"| `{alias}` | `{name}` |" for alias, name in sorted(ALIASES.items())]
    return "\n".join(lines) + "\n"


def element(fmt) -> str:
    if fmt is None:
        return "as stored"
    return f"{fmt.element}{'' if fmt.symmetric else ', zero points'}"


def extent(fmt) -> str:
    if fmt is None:
        return "-"
    size = fmt.group_size or (" x ".join(map(str, fmt.block_shape)) if fmt.block_shape else "")
    whole = "" if fmt.global_scale is None else ", global scale"
    return f"{fmt.scale} per {fmt.strategy.value}{f' of {size}' if size else ''}{whole}"


def activations(fmt) -> str:
    if fmt is None:
        return "as they are"
    return f"{element(fmt)}, {extent(fmt)}, {'dynamic' if fmt.dynamic else 'from the checkpoint'}"


def measured() -> str:
    """Tables of the results that are kept as JSON: layers beside vLLM's, and whole decoders."""
    folder = ROOT / "benchmarks/results"
    lines = [
        "# Measured",
        "",
        "Made from the JSON files in `benchmarks/results/` when this site is built; what the",
        "figures mean, where we lose and why is on [](../performance.md).",
        "",
    ]
    for path in sorted(folder.glob("moe_layer_peers_*.json")):
        lines += [f"## A layer of experts beside vLLM's ({path.name})", "", *layers(json.loads(path.read_text()))]
    for path in sorted(folder.glob("generate_*.json")):
        report = json.loads(path.read_text())
        lines += [
            f"## Whole decoders ({path.name})",
            "",
            f"{report['header'].lstrip('# ')}. {report['layers']} layers.",
            "",
        ]
        lines += [
            "| Model | Scheme | Call | Rows | Tokens a row | us | Outside of the experts |",
            "|---|---|---|---|---|---|---|",
        ]
        lines += [
            f"| {c['model']} | `{c['scheme']}` | {c['kind']} | {c['rows']} | {c['tokens']} | {c['us']:.0f} "
            f"| {c['outside_us'] / c['us']:.0%} |"
            for c in report["cells"]
        ]
        lines.append("")
    return "\n".join([*lines, ""])


def layers(cells: list[dict]) -> list[str]:
    """A table: model and scheme by tokens. us / us of the fastest peer = ratio, or us alone."""
    tokens = sorted({cell["tokens"] for cell in cells})
    found = {(cell["model"], cell["scheme"], cell["tokens"]): cell for cell in cells if "us" in cell}
    lines = ["Microseconds: ours / the fastest peer's = ratio, above 1 ours is faster. -: not measured.", ""]
    lines += [
        "| Model | Scheme | " + " | ".join(f"T={t}" for t in tokens) + " |",
        "|---|---" + "|---" * len(tokens) + "|",
    ]
    for model, scheme in dict.fromkeys(key[:2] for key in sorted(found)):
        row = [_cell(found.get((model, scheme, t))) for t in tokens]
        lines.append(f"| {model} | `{scheme}` | " + " | ".join(row) + " |")
    return [*lines, ""]


def _cell(cell: dict | None) -> str:
    if cell is None:
        return "-"
    ours = f"{cell['us']:.0f}"
    return f"{ours} / {cell['peer_us']:.0f} = **{cell['ratio']:.2f}**" if "ratio" in cell else ours


def results() -> str:
    """The raw files of benchmarks/results, whole."""
    folder = ROOT / "benchmarks/results"
    lines = ["# Raw results", "", "What the scripts in `benchmarks/` printed, as kept in `benchmarks/results/`.", ""]
    for picture in sorted(folder.glob("*.png")):
        lines += [f"## {picture.name}", "", f"![{picture.stem}]({picture.name})", ""]
    for path in sorted(folder.glob("*.txt")):
        include = f"```{{literalinclude}} /../benchmarks/results/{path.name}"
        lines += [f"## {path.name}", "", include, ":language: text", "```", ""]
    return "\n".join(lines)


def api_index() -> str:
    names = "\n".join(API)
    return f"# API reference\n\nFrom the docstrings.\n\n```{{toctree}}\n:maxdepth: 1\n\n{names}\n```\n"


def api_pages() -> dict[str, str]:
    """A page for each module. What several of them export is described on the first one that does."""
    pages, seen = {}, set()
    for name, what in API.items():
        again = []
        if name != "torch_bridge" or has_torch():
            module = importlib.import_module(name)
            exported = [key for key in getattr(module, "__all__", ()) if hasattr(getattr(module, key), "__module__")]
            again = [key for key in exported if id(getattr(module, key)) in seen]
            seen |= {id(getattr(module, key)) for key in exported}
        lines = [f"# {name}", "", f"{what[0].upper()}{what[1:]}.", ""]
        lines += [f"Described elsewhere: {', '.join(f'`{key}`' for key in again)}.", ""] if again else []
        lines += ["```{eval-rst}", f".. automodule:: {name}"]
        lines += [f"   :exclude-members: {', '.join(again)}"] if again else []
        pages[f"api/{name}.md"] = "\n".join([*lines, "```", ""])
    return pages
