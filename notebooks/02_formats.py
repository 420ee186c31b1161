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
# # What each format does to the weights
#
# Every format is a grid of values and a rule for scales. Here eight experts are rounded to each of them: half of them
# Gaussian, half with heavy tails (Student's t with 5 degrees of freedom), as outlier channels of trained experts have.

# %%
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from plots import BLUE, RED, keep

from moe_jax import MoEConfig, Scheme
from moe_jax.quantization import dequantize_tensor, method_for

E, H, INNER = 8, 256, 128
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
# One number for a layer would hide an expert that suffers, so the error is taken for each.

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
figure, axes = plt.subplots(figsize=(7, 3.6))
shown = 100 * np.array([errors[name] for name in SCHEMES])
image = axes.imshow(np.log10(shown), aspect="auto", cmap="magma_r")
for row, column in np.ndindex(shown.shape):
    dark = shown[row, column] > 4
    axes.text(
        column, row, f"{shown[row, column]:.1f}", ha="center", va="center", fontsize=8, color="w" if dark else "k"
    )
axes.set_yticks(range(len(SCHEMES)), [f"{name}  ({sizes[name]:.2f} bits)" for name in SCHEMES])
axes.set_xticks(range(E), [f"e{e}\n{'heavy' if e % 2 else 'normal'}" for e in range(E)])
axes.set_title("Relative error of w13 in percent, per expert; bits a weight with scales")
keep(figure, "02_error_per_expert")

# %% [markdown]
# - FP8 rounds relatively, so tails and sizes of experts do not matter to it.
# - Integer grids are uniform between the extremes of a channel or group: one outlier makes all steps around it coarser,
#   and heavy-tailed experts suffer. Smaller groups help because an outlier spoils fewer neighbours.
# - NVFP4 beats MXFP4 at nearly the same size: scales are e4m3 per 16 instead of powers of two per 32.
#
# ## Scales
#
# A scale follows the largest value it covers. Where the experts differ in size, so do their scales.

# %%
figure, panels = plt.subplots(1, 3, figsize=(9, 2.6), sharey=True)
for axes, name in zip(panels, ("fp8_channel", "fp8_block", "w4a16_g128"), strict=True):
    scale = np.asarray(weights[name].w13.scale, np.float64).reshape(E, -1)
    logs = [np.log2(scale[e]) for e in range(E)]
    for e in range(E):
        low, middle, high = np.quantile(logs[e], (0, 0.5, 1))
        axes.plot(
            [e, e], [low - 0.05, high + 0.05], color=RED if e % 2 else BLUE, lw=5, alpha=0.5, solid_capstyle="butt"
        )
        axes.plot(e, middle, "k_", ms=8)
    axes.set(title=name, xlabel="expert", xticks=range(E))
panels[0].set_ylabel("log2 of the scales:\nleast, median, largest")
keep(figure, "02_scales")

# %% [markdown]
# ## Where the error sits
#
# The same values through three grids: error against the size of the weight.

# %%
figure, panels = plt.subplots(1, 3, figsize=(9, 2.6), sharey=True)
one = np.asarray(w13, np.float64)[1].ravel()  # a heavy-tailed expert
for axes, name in zip(panels, ("fp8_channel", "int8_w8a16", "nvfp4_a16"), strict=True):
    back = np.asarray(dequantize_tensor(weights[name].w13), np.float64)[1].ravel()
    part = np.abs(one) > 0
    axes.plot(np.abs(one[part]), np.abs(back - one)[part] / np.abs(one[part]), ",", color=BLUE, alpha=0.3)
    axes.set(xscale="log", title=name, xlabel="|weight|", ylim=(0, 1.05), xlim=(1e-4, None))
panels[0].set_ylabel("relative error of one weight")
keep(figure, "02_error_by_size")

# %% [markdown]
# FP8 keeps the relative error under 1/16 down to its subnormals; a uniform integer grid loses the small weights
# entirely (error 1: rounded to zero) and keeps the large ones well; FP4 does a little of both.
