"""One look for the figures of these notebooks. ``keep`` writes them where MOE_JAX_FIGURES names a directory."""

import os
from pathlib import Path

import matplotlib.pyplot as plt

BLUE, RED, GREEN, YELLOW, CYAN, PURPLE, GREY = (
    *("#4477aa", "#ee6677", "#228833", "#ccbb44"),
    *("#66ccee", "#aa3377", "#bbbbbb"),
)
COLORS = (BLUE, RED, GREEN, YELLOW, CYAN, PURPLE, GREY)
plt.rcParams.update(
    {
        "axes.prop_cycle": plt.cycler(color=COLORS),
        "axes.spines.right": False,
        "axes.spines.top": False,
        "figure.constrained_layout.use": True,
        "font.size": 9,
        "legend.frameon": False,
    }
)


def keep(figure: plt.Figure, name: str) -> None:
    """Save the figure as NAME.png, where figures are asked for."""
    if directory := os.environ.get("MOE_JAX_FIGURES"):
        figure.savefig(Path(directory) / f"{name}.png", dpi=100)
