"""Pages that are made from the code and from kept results: formats, API, tables and raw output of benchmarks.

python docs/_generate.py    # writes docs/reference/formats.md, the one such page that is committed
"""

import importlib
import importlib.util
import json
from pathlib import Path

ROOT = Path(__file__).parent.parent
API = {
    "moe_jax": "layers, models, loading, generating",
    "moe_jax.quantization": "formats, schemes, tensors, methods",
    "moe_jax.routing": "router logits to experts and weights",
    "moe_jax.loading": "checkpoints, names, streams",
    "moe_jax.models": "families, decoder, cache",
    "moe_jax.text": "prompts in, texts out",
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


def formats() -> str:
    """docs/reference/formats.md: one row for each scheme of the registry, and the other names of schemes."""
    from moe_jax import MoEConfig
    from moe_jax.quantization import ALIASES, SCHEMES, method_for

    experts, hidden, intermediate = 8, 512, 256
    lines = [FORMATS_HEAD, "| Scheme | Weights | Activations | Bits |", "|---|---|---|---|"]
    for name, scheme in SCHEMES.items():
        config = MoEConfig(experts, 2, hidden, intermediate, scheme=scheme, dtype="bfloat16")
        nbytes = method_for(scheme).abstract_weights(config).nbytes()
        bits = 8 * nbytes / (experts * 3 * intermediate * hidden)
        lines.append(f"| `{name}` | {_weights(scheme.weights)} | {_activations(scheme.activations)} | {bits:.2f} |")
    lines += ["", "## Other names", "", "| Name | Scheme |", "|---|---|"]
    lines += [f"| `{alias}` | `{name}` |" for alias, name in sorted(ALIASES.items())]
    return "\n".join(lines) + "\n"


FORMATS_HEAD = """# Formats

The schemes that `scheme=`, `quantize=` and `--scheme` accept. A scheme says how the weights of the experts are stored,
and whether activations are rounded before each of the two products. `python docs/_generate.py` writes this page from
the registry in `moe_jax/quantization`.

- **Scale per matrix, row, group, block**: what shares one scale. A row is an output channel of a weight. A group is a
  run of consecutive inputs within a row. For activations, per tensor means one scale for all tokens of a call. Scales
  are float32 unless the table names another kind.
- **Dynamic** scales are computed from the activations of the call. **Static** scales are read from the checkpoint.
- **Bits** count one weight as checkpoints store it, with its scales and zero points, in a layer of 8 experts of
  256 x 512. W4A8 checkpoints with int8 activations store one weight per byte; the Hopper kernels repack those to 4
  bits.
- **Names of integer schemes** follow a pattern, and each name of it is accepted, in the table or not: `w5a16_g64`,
  `w6a16_g32_asym`, `w4a8_int8_g32`. `w` is followed by the bits of a weight (2 to 8), `a` by those of an activation
  (16: not quantized), `g` by the group; `_channel` is one scale per row, `_asym` has zero points.
- The suffix `_approximate_fp8` on a weight-only scheme of 2 to 4 bits rounds activations to e4m3, per token. It is
  faster for many tokens. It is approximate, because the checkpoint does not ask for this rounding. See
  [quantize](../guides/quantize.md).
"""


def _weights(fmt) -> str:
    if fmt is None:
        return "bfloat16, float16 or float32"
    coarse = {None: "", "divides": ", divided by a global scale", "multiplies": ", times a global scale"}
    return f"{_element(fmt)}, {_extent(fmt, 'matrix', 'row')}{coarse[fmt.global_scale]}"


def _activations(fmt) -> str:
    if fmt is None:
        return "not quantized"
    dynamic, is_static = "dynamic " if fmt.dynamic else "static ", fmt.needs_input_scale
    coarse = f"; {'static' if is_static else 'dynamic'} global scale{'' if is_static else ' per token'}"
    return f"{_element(fmt)}, {dynamic}{_extent(fmt, 'tensor', 'token')}{coarse if fmt.global_scale else ''}"


def _element(fmt) -> str:
    return f"{fmt.element}{'' if fmt.symmetric else ' with zero points'}"


def _extent(fmt, whole: str, row: str) -> str:
    """What shares one scale, and the kind of scale where it is not float32."""
    kind = {"float32": "", "ue8m0": "power-of-two ", "e8m0": "power-of-two ", "e4m3": "e4m3 "}[fmt.scale]
    blocks = fmt.block_shape and f"block of {fmt.block_shape[0]} x {fmt.block_shape[1]}"
    where = blocks or (
        f"group of {fmt.group_size}" if fmt.group_size else {"tensor": whole}.get(fmt.strategy.value, row)
    )
    return f"{kind}scale per {where}"


def measured() -> str:
    """Tables of the results that are kept as JSON: layers beside vLLM's."""
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
    ours = _micros(cell["us"])
    return f"{ours} / {_micros(cell['peer_us'])} = **{cell['ratio']:.2f}**" if "ratio" in cell else ours


def _micros(us: float) -> str:
    """To a tenth below 100."""
    return f"{us:.0f}" if us >= 100 else f"{us:.1f}"


def results() -> str:
    """The raw files of benchmarks/results, whole."""
    folder = ROOT / "benchmarks/results"
    lines = ["# Raw results", "", "What the scripts in `benchmarks/` printed, as kept in `benchmarks/results/`.", ""]
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


if __name__ == "__main__":
    (ROOT / "docs/reference/formats.md").write_text(formats())
