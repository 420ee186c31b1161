# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # How fast is it
#
# A layer of experts is limited by one of two things: reading weights, when there are few tokens, and multiplying, when
# there are many. The roofline shows both. First the kept results of an H200, beside vLLM's layers on the same machine;
# then the machine that runs this notebook.

# %%
import json
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from plots import COLORS, GREY, keep

root = next(path for path in (Path.cwd(), *Path.cwd().parents) if (path / "benchmarks/results").is_dir())
cells = json.loads((root / "benchmarks/results/moe_layer_peers_h200.json").read_text())
READ_GBPS, DENSE_TFLOPS = 4385.0, {"bf16": 789.0, "fp8": 1490.0}  # measured on that H200
models = sorted({cell["model"] for cell in cells})
cells = [cell for cell in cells if "us" in cell]
print(f"{len(cells)} cells, {sum('ratio' in cell for cell in cells)} with a peer that ran; models: {', '.join(models)}")

# %% [markdown]
# ## The roofline of an H200
#
# Each line is one scheme from 1 to 8192 tokens, from left to right.

# %%
shown = ("bf16", "fp8_channel", "fp8_block", "int8_w8a8", "w4a16_g128", "mxfp4_a16")
color = dict(zip(shown, COLORS, strict=False))
figure, panels = plt.subplots(1, len(models), figsize=(3.4 * len(models), 3.4), sharey=True, squeeze=False)
for axes, model in zip(panels[0], models, strict=True):
    axes.plot([1, 1e3 * 789 / READ_GBPS], [READ_GBPS / 1e3, 789], color="black", lw=1)
    axes.plot([1e3 * 789 / READ_GBPS, 1e3 * 1490 / READ_GBPS], [789, 1490], color="black", lw=1)
    for name, rate in DENSE_TFLOPS.items():
        axes.plot([1e3 * rate / READ_GBPS, 1e4], [rate, rate], color="black", lw=1)
        axes.annotate(name, (1e4, rate), (-2, -10), textcoords="offset points", ha="right", fontsize=7)
    for scheme in shown:
        own = [c for c in cells if (c["model"], c["scheme"]) == (model, scheme)]
        own = sorted((c["tokens"], 1e3 * c["tflops"] / c["gbps"], c["tflops"]) for c in own)
        if own:
            _, intensity, rates = zip(*own, strict=True)
            axes.plot(intensity, rates, "o-", ms=3, lw=1, color=color[scheme], label=scheme)
    axes.set(title=model, xscale="log", yscale="log", xlabel="FLOP per byte moved")
panels[0][0].set_ylabel("TFLOP/s")
panels[0][-1].legend(fontsize=7, loc="lower right")
keep(figure, "06_roofline_h200")

# %% [markdown]
# ## Beside the peers
#
# Time of the fastest vLLM layer of the same format that ran in that sitting, over ours: above 1 we are faster. Peers
# replay a CUDA graph after routing; ours include routing. Peers that did not run are not shown, and 4-bit weights had
# none: see the performance page for what is missing.

# %%
compared = [cell for cell in cells if "ratio" in cell]
figure, panels = plt.subplots(1, len(models), figsize=(3.4 * len(models), 3), sharey=True, squeeze=False)
for axes, model in zip(panels[0], models, strict=True):
    for scheme in dict.fromkeys(cell["scheme"] for cell in compared):
        own = sorted((c["tokens"], c["ratio"]) for c in compared if (c["model"], c["scheme"]) == (model, scheme))
        if own:
            axes.plot(*zip(*own, strict=True), "o-", ms=3, lw=1, color=color.get(scheme, GREY), label=scheme)
    axes.axhline(1, color="black", lw=0.8)
    axes.set(title=model, xscale="log", yscale="log", xlabel="tokens in a call")
panels[0][0].set_ylabel("their time / ours")
panels[0][-1].legend(fontsize=7)
keep(figure, "06_peers_h200")
worst = sorted(compared, key=lambda cell: cell["ratio"])[:5]
print("where we lose most:")
for cell in worst:
    print(f"  {cell['model']} {cell['scheme']} at {cell['tokens']} tokens: {cell['ratio']:.2f} of {cell['peer']}")
for scheme in dict.fromkeys(cell["scheme"] for cell in compared):
    ratios = [cell["ratio"] for cell in compared if cell["scheme"] == scheme]
    print(f"{scheme:<12} geometric mean {np.exp(np.mean(np.log(ratios))):.2f} over {len(ratios)} cells")

# %% [markdown]
# ## The machine that runs this notebook
#
# Limits measured now, with XLA's own matmul and copy, and a small layer beside them; `moe-jax bench` does the same on
# the command line.

# %%
from moe_jax.benchmarking import bench, render

print(render(bench("toy", ["bf16", "int8_w8a8"], [16])))
