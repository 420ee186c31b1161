# %% [markdown]
# # What each format does to the weights
#
# A format is a grid of values and a rule for scales. This notebook rounds eight experts to each of several formats.
# Half of the experts are Gaussian. The others have heavy tails (Student's t with 5 degrees of freedom), like the
# outlier channels of trained experts.

# %%
# Installs what is missing, moe_jax from its checkout. Nothing happens where all of it can be imported.
import importlib.util
import subprocess
import sys

CHECKOUT = ".."  # seen from the folder of this notebook
if not all(map(importlib.util.find_spec, ("moe_jax", "matplotlib"))):
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", f"{CHECKOUT}[demo]"], check=True)

# %%
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from moe_jax import MoEConfig, Scheme
from moe_jax.quantization import dequantize_tensor, method_for

BLUE, RED = "#4477aa", "#ee6677"
plt.rcParams.update(
    {
        "axes.spines.right": False,
        "axes.spines.top": False,
        "figure.constrained_layout.use": True,
        "font.size": 9,
        "legend.frameon": False,
    }
)

E, H, INNER = 8, 256, 128
TAILS = ("normal", "heavy")  # of even and of odd experts
SCHEMES = ("fp8_tensor", "fp8_channel", "fp8_block", "int8_w8a16", "w4a16_g32", "w4a16_g128", "nvfp4_a16", "mxfp4_a16")

rng = np.random.default_rng(0)


def draw(expert, shape):
    values = rng.standard_t(5, shape) if expert % 2 else rng.standard_normal(shape)
    return 0.02 * 1.3**expert * values


w13 = jnp.asarray(np.stack([draw(e, (2, INNER, H)) for e in range(E)]), jnp.bfloat16)
w2 = jnp.asarray(np.stack([draw(e, (H, INNER)) for e in range(E)]), jnp.bfloat16)

# %% [markdown]
# ## Quantize, dequantize, compare: per expert
#
# One number for the whole layer would hide a single bad expert, so each expert gets its own.

# %%
errors, sizes, weights = {}, {}, {}
exact = np.asarray(w13, np.float64).reshape(E, -1)
for name in SCHEMES:
    scheme = Scheme.parse(name)
    config = MoEConfig(E, 2, H, INNER, scheme=scheme)
    method = method_for(scheme)
    leaves = method.quantize_leaves(w13, w2, None, config)
    weights[name] = method.process_weights_after_loading(leaves, config)
    back = np.asarray(dequantize_tensor(weights[name].w13), np.float64).reshape(E, -1)
    errors[name] = np.linalg.norm(back - exact, axis=1) / np.linalg.norm(exact, axis=1)
    sizes[name] = 8 * weights[name].nbytes() / (w13.size + w2.size)

# %%
figure, (axes, bars) = plt.subplots(1, 2, figsize=(9, 3.8), width_ratios=(3, 1))
shown = 100 * np.array([errors[name] for name in SCHEMES])
axes.imshow(np.log10(shown), aspect="auto", cmap="magma_r")
for row, column in np.ndindex(shown.shape):
    color = "w" if shown[row, column] > 4 else "k"
    axes.text(column, row, f"{shown[row, column]:.1f}", ha="center", va="center", fontsize=8, color=color)
axes.set(yticks=range(len(SCHEMES)), yticklabels=SCHEMES, title="Relative error of w13 in each expert, %")
axes.set_xticks(range(E), [f"e{e}\n{TAILS[e % 2]}" for e in range(E)])
bars.barh(range(len(SCHEMES)), [weights[name].nbytes() / 1e3 for name in SCHEMES], color=BLUE)
for row, name in enumerate(SCHEMES):
    bars.text(weights[name].nbytes() / 1e3, row, f" {sizes[name]:.2f} bits", va="center", fontsize=8)
bars.set(ylim=axes.get_ylim(), yticks=(), xlabel="kB, with scales", title="Size")
bars.set_xlim(0, 1.5 * max(weights[name].nbytes() for name in SCHEMES) / 1e3)

# %% [markdown]
# The worst expert of each format:

# %%
for name in SCHEMES:
    worst = int(errors[name].argmax())
    print(
        f"{name:<12} worst is e{worst} ({TAILS[worst % 2]}), {errors[name][worst] / errors[name].min():.2f} x the best"
    )

# %% [markdown]
# - FP8 rounds each value relative to its own size, so the tails and sizes of experts hardly matter.
# - An integer grid has equal steps between the extremes of a channel or group. One outlier makes all those steps
#   coarser, so heavy-tailed experts have larger errors. In smaller groups an outlier affects fewer neighbors.
# - NVFP4 is more accurate than MXFP4 at nearly the same size: its scales are e4m3 per 16 values, not powers of two per
#   32.
#
# ## Scales
#
# A scale follows the largest value that it covers. The histograms show the scales of each expert. Larger experts have
# larger scales. Heavy tails stretch the histogram to the right, and large scales mean coarse rounding. NVFP4 scales are
# relative to a global scale that follows the largest value of a matrix, so one outlier makes all the other scales
# smaller. MXFP4 scales are powers of two.

# %%
figure, panels = plt.subplots(1, 4, figsize=(9, 3.8), sharey=True)
for axes, name in zip(panels, ("fp8_channel", "w4a16_g128", "nvfp4_a16", "mxfp4_a16"), strict=True):
    leaf = weights[name].w13
    scale = np.asarray(leaf.scale).astype(np.float64).reshape(E, -1)
    if name.startswith("mxfp4"):
        scale = 2.0 ** (scale - 127) if scale.max() > 2 else scale  # stored as exponents
    logs = np.log2(scale)
    edges = np.arange(np.floor(logs.min()), np.ceil(logs.max()) + 0.26, 0.25)
    for e in range(E):
        share = np.histogram(logs[e], edges)[0] / logs[e].size
        axes.stairs(-e + 0.9 * share / share.max(), edges, baseline=-e, fill=True, color=(BLUE, RED)[e % 2], alpha=0.75)
    axes.set(title=f"{name}\n{logs[0].size} scales an expert", xlabel="log2 of the scale")
panels[0].set_yticks([0.3 - e for e in range(E)], [f"e{e} {TAILS[e % 2]}" for e in range(E)])

# %% [markdown]
# ## Where the error sits
#
# One expert, rounded to three grids: the relative error of each weight against its size.

# %%
figure, panels = plt.subplots(1, 3, figsize=(9, 2.6), sharey=True)
one = np.asarray(w13, np.float64)[1].ravel()  # a heavy-tailed expert
for axes, name in zip(panels, ("fp8_channel", "int8_w8a16", "nvfp4_a16"), strict=True):
    back = np.asarray(dequantize_tensor(weights[name].w13), np.float64)[1].ravel()
    part = np.abs(one) > 0
    axes.plot(np.abs(one[part]), np.abs(back - one)[part] / np.abs(one[part]), ",", color=BLUE, alpha=0.3)
    axes.set(xscale="log", title=name, xlabel="|weight|", ylim=(0, 1.05), xlim=(2e-4, 0.7))
panels[0].set_ylabel("relative error of one weight")

# %% [markdown]
# FP8 keeps the relative error below 1/16, down to its subnormal numbers. A uniform integer grid is accurate for large
# weights, but rounds small ones to zero (error 1). FP4 lies between the two.
