"""A ``BenchReport`` as a table in the terminal and as a roofline."""

import io
from pathlib import Path
from typing import Any

from moe_jax._output import write_output
from moe_jax._terminal import table
from moe_jax.cli.bench._bench import BenchReport

_COLUMNS = ("scheme", "tokens", "runs on", "us", "TFLOP/s", "GB/s", "of limit")
_COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb")


def render(report: BenchReport, *, rich: bool = False) -> str:
    """The report as text. rich: with the colors and frames of the package rich, which must be installed."""
    experts, top_k, hidden, intermediate = report.shape
    rates = ", ".join(f"{rate:.4g} TFLOP/s in {name}" for name, rate in report.limits.tflops.items())
    versions = ", ".join(f"{name} {found}" for name, found in report.versions.items())
    head = [
        f"{report.device}, {versions}, {report.date}",
        f"limits of this machine, measured now: {report.limits.gbps:.4g} GB/s copied, {rates}",
        f"{report.model}: {experts} experts, top {top_k}, hidden {hidden}, intermediate {intermediate}",
    ]
    rows = [_row(cell) for cell in report.cells]
    body = _rich_table(rows) if rich else "\n".join(table([_COLUMNS, *rows], right=(1, 3, 4, 5, 6)))
    notes = [f"{c['scheme']} at {c['tokens']} tokens: {c['error']}" for c in report.cells if "error" in c]
    if any(cell.get("fraction", 0) > 1 for cell in report.cells):
        notes.append("above 100%: what was read lay in a cache, which the measured limits do not count on")
    return "\n".join([*head, "", body, *notes])


def _row(cell: dict[str, Any]) -> tuple[str, ...]:
    head = (cell["scheme"], str(cell["tokens"]), cell.get("implementation", "-"))
    if "error" in cell:
        return (*head, "failed", "-", "-", "-")
    return (*head, f"{cell['us']:.1f}", f"{cell['tflops']:.4g}", f"{cell['gbps']:.4g}", f"{cell['fraction']:.0%}")


def _rich_table(rows: list[tuple[str, ...]]) -> str:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    shown = Table(box=box.SIMPLE_HEAD)
    for at, name in enumerate(_COLUMNS):
        shown.add_column(name, justify="left" if at in (0, 2) else "right", no_wrap=True)
    before = None
    for row in rows:
        if before not in (None, row[0]):
            shown.add_section()
        before = row[0]
        shown.add_row(f"[bold]{row[0]}[/]", *row[1:], style="red" if row[3] == "failed" else None)
    console = Console(force_terminal=True, width=100)
    with console.capture() as captured:
        console.print(shown)
    return captured.get().rstrip("\n")


def draw_roofline(report: BenchReport, path: Path) -> None:
    """Write a PNG: arithmetic intensity (FLOP per byte moved) against TFLOP/s, one line of points for each scheme.

    The slope is the measured copy rate, the horizontals the measured matmul rates. Raises ImportError without
    matplotlib.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    cells = [cell for cell in report.cells if "error" not in cell]
    intensity = [1e3 * cell["tflops"] / cell["gbps"] for cell in cells]
    ridge = [1e3 * rate / report.limits.gbps for rate in report.limits.tflops.values()]
    low, high = min([*intensity, *ridge]) / 3, max([*intensity, *ridge]) * 3
    top = max(report.limits.tflops.values())
    axes.plot([low, 1e3 * top / report.limits.gbps], [low * report.limits.gbps / 1e3, top], color="black", lw=1)
    axes.annotate(
        f"{report.limits.gbps:.4g} GB/s",
        (low, low * report.limits.gbps / 1e3),
        (24, 6),
        textcoords="offset points",
        fontsize=8,
    )
    for name, rate in report.limits.tflops.items():
        axes.plot([1e3 * rate / report.limits.gbps, high], [rate, rate], color="black", lw=1)
        axes.annotate(
            f"{name}: {rate:.4g} TFLOP/s", (high, rate), (-4, 4), textcoords="offset points", ha="right", fontsize=8
        )
    for at, scheme in enumerate(dict.fromkeys(cell["scheme"] for cell in cells)):
        points = [
            (x, cell["tflops"], cell["tokens"])
            for x, cell in zip(intensity, cells, strict=True)
            if cell["scheme"] == scheme
        ]
        color = _COLORS[at % len(_COLORS)]
        axes.plot(*zip(*((x, y) for x, y, _ in points), strict=True), "o-", color=color, lw=1, ms=5, label=scheme)
        for x, y, tokens in points:
            axes.annotate(str(tokens), (x, y), (3, -10), textcoords="offset points", fontsize=7, color=color)
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte moved", ylabel="TFLOP/s", xlim=(low, high))
    axes.grid(True, which="major", color="#dddddd", lw=0.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, title="numbers: tokens in a call", title_fontsize=8)
    experts, top_k, hidden, intermediate = report.shape
    axes.set_title(
        f"{report.model} ({experts} experts, top {top_k}, {hidden} x {intermediate}), {report.device}", fontsize=10
    )
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    write_output(path, [picture.getvalue()], "--png")
