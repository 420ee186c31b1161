# %% [markdown]
# # How fast is it
#
# With few tokens, a layer of experts is limited by reading its weights; with many tokens, by multiplying. A roofline
# shows both limits. This notebook first plots the committed results of an H200 (`benchmarks/results`), beside vLLM's
# layers in the same benchmark run, and then times a layer on the machine that runs the notebook.

# %%
# Installs what is missing, moe_jax from its checkout. Nothing happens where all of it can be imported.
import importlib.util
import subprocess
import sys

CHECKOUT = ".."  # seen from the folder of this notebook
if not all(map(importlib.util.find_spec, ("moe_jax", "matplotlib"))):
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", f"{CHECKOUT}[demo]"], check=True)

# %%
import json
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import moe_jax

COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb")
GREY = COLORS[-1]
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

RESULTS = "benchmarks/results/moe_layer_peers_h200.json"
found = [path for path in (*Path(moe_jax.__file__).parents, Path(CHECKOUT).resolve()) if (path / RESULTS).is_file()]
assert found, f"{RESULTS} is part of the checkout: write where that lies into CHECKOUT above"
cells = json.loads((found[0] / RESULTS).read_text())
READ_GBPS, DENSE_TFLOPS = 4385.0, {"16 bits": 789.0, "8 bits": 1490.0}  # measured on that H200
cells = [cell for cell in cells if "us" in cell]
compared = [cell for cell in cells if "ratio" in cell]
models = sorted({cell["model"] for cell in cells})
alone = sorted({cell["scheme"] for cell in cells} - {cell["scheme"] for cell in compared})
print(f"{len(cells)} cells, {len(compared)} with a peer that ran; models: {', '.join(models)}")
print(f"no peer ran for: {', '.join(alone) or 'none of the schemes'}")

# %% [markdown]
# ## The roofline of an H200
#
# Each line is one scheme of ours, from 1 token at the left to 8192 at the right. Circles are the fastest vLLM layer of
# the same format, at the same work and bytes. Under the slope, reading memory is the limit; under a horizontal line,
# multiplying is.

# %%
shown = ("bf16", "fp8_channel", "int8_w8a8", "w4a16_g128", "mxfp4_a16")
color = dict(
    zip((*shown, "fp8_block", "w4a8_int8", "nvfp4_a16", "fp8_tensor"), (*COLORS, "black", "saddlebrown"), strict=True)
)
LOW, HIGH = 0.7, 5e4  # FLOP per byte
figure, panels = plt.subplots(1, len(models), figsize=(3.4 * len(models), 3.8), sharey=True, squeeze=False)
for axes, model in zip(panels[0], models, strict=True):
    top = max(DENSE_TFLOPS.values())
    axes.plot([LOW, 1e3 * top / READ_GBPS], [LOW * READ_GBPS / 1e3, top], color="black", lw=1)
    for name, rate in DENSE_TFLOPS.items():
        axes.plot([1e3 * rate / READ_GBPS, HIGH], [rate, rate], color="black", lw=1)
        axes.annotate(f"{name}: {rate:.0f}", (HIGH, rate), (0, 2), textcoords="offset points", ha="right", fontsize=7)
    axes.annotate(
        f"{READ_GBPS:.0f} GB/s", (8, 8 * READ_GBPS / 1e3), (-6, 8), textcoords="offset points", ha="right", fontsize=7
    )
    for scheme in shown:
        own = sorted((c for c in cells if (c["model"], c["scheme"]) == (model, scheme)), key=lambda c: c["tokens"])
        intensity = [1e3 * c["tflops"] / c["gbps"] for c in own]
        axes.plot(intensity, [c["tflops"] for c in own], "-", lw=1.2, color=color[scheme], label=scheme)
        theirs = [
            (x, c["tflops"] * c["us"] / c["peer_us"]) for x, c in zip(intensity, own, strict=True) if "ratio" in c
        ]
        if theirs:
            axes.plot(*zip(*theirs, strict=True), "o", ms=4, mfc="none", color=color[scheme])
    axes.set(title=model, xscale="log", yscale="log", xlabel="FLOP per byte moved", xlim=(LOW, HIGH), ylim=(1.5, 3e3))
panels[0][0].set_ylabel("TFLOP/s")
panels[0][0].plot([], [], "o", ms=4, mfc="none", color="black", label="fastest peer")
panels[0][0].legend(fontsize=7, loc="lower right")

# %% [markdown]
# ## Beside the peers
#
# The time of the fastest vLLM layer of the same format in that benchmark run, divided by ours: above 1 ours is faster.
# vLLM's layers are replayed CUDA graphs that start after routing; our times include routing. A format without a vLLM
# layer that ran is not shown.

# %%
figure, panels = plt.subplots(1, len(models), figsize=(3.4 * len(models), 3.4), sharey=True, squeeze=False)
ticks = [tick for tick in (0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8) if tick <= 1.5 * max(c["ratio"] for c in compared)]
for axes, model in zip(panels[0], models, strict=True):
    for scheme in dict.fromkeys(cell["scheme"] for cell in compared):
        own = sorted((c["tokens"], c["ratio"]) for c in compared if (c["model"], c["scheme"]) == (model, scheme))
        if own:
            axes.plot(*zip(*own, strict=True), "o-", ms=3, lw=1, color=color.get(scheme, GREY))
    axes.axhline(1, color="black", lw=0.8)
    axes.set(title=model, xscale="log", yscale="log", xlabel="tokens in a call")
    axes.set_yticks(ticks, map(str, ticks), minor=False)
    axes.set_yticks([], minor=True)
for scheme in dict.fromkeys(cell["scheme"] for cell in compared):
    panels[0][0].plot([], [], "o-", ms=3, lw=1, color=color.get(scheme, GREY), label=scheme)
panels[0][0].set_ylabel("time of the fastest peer / ours")
panels[0][0].legend(fontsize=7, loc="upper left")
print("where we lose most:")
for cell in sorted(compared, key=lambda cell: cell["ratio"])[:5]:
    print(f"  {cell['model']} {cell['scheme']} at {cell['tokens']} tokens: {cell['ratio']:.2f} of {cell['peer']}")
for scheme in dict.fromkeys(cell["scheme"] for cell in compared):
    ratios = [cell["ratio"] for cell in compared if cell["scheme"] == scheme]
    print(f"{scheme:<12} geometric mean {np.exp(np.mean(np.log(ratios))):.2f} over {len(ratios)} cells")

# %% [markdown]
# ## The machine that runs this notebook
#
# This measures the limits now, with XLA's own matmul and copy, and times a small layer beside them. `moe-jax bench`
# does the same on the command line, and can write JSON and a roofline.

# %%
from moe_jax.benchmarking import bench, render

print(render(bench("toy", ["bf16", "int8_w8a8"], [16])))
