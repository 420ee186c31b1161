# %% [markdown]
# # A quantized Mixture-of-Experts layer in five minutes
#
# Experts are most of the weights of a Mixture-of-Experts model, and each token uses a few of them. Quantized experts
# make such a model fit. This notebook builds one layer, quantizes it in several formats, and measures the error of
# each.

# %%
# Installs what is missing, moe_jax from its checkout. Nothing happens where all of it can be imported.
import importlib.util
import subprocess
import sys

CHECKOUT = ".."  # seen from the folder of this notebook
if not all(map(importlib.util.find_spec, ("moe_jax", "matplotlib"))):
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", f"{CHECKOUT}[demo]"], check=True)

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import moe_jax

COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb")
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

E, TOP_K, H, INNER, T = 8, 2, 256, 128, 64

# %% [markdown]
# ## Weights as a checkpoint has them
#
# Each expert has three matrices. These are the names that Qwen3-MoE and others use on disk.

# %%
rng = np.random.default_rng(0)
pairs = [
    (f"experts.{e}.{name}.weight", (rng.standard_normal(shape) * shape[1] ** -0.5).astype(jnp.bfloat16))
    for e in range(E)
    for name, shape in (("gate_proj", (INNER, H)), ("up_proj", (INNER, H)), ("down_proj", (H, INNER)))
]


def make(scheme, dtype=jnp.bfloat16):
    """Create, load, process: a layer without rngs is empty until it is loaded."""
    layer = moe_jax.FusedMoE(E, H, INNER, top_k=TOP_K, scheme=scheme, dtype=dtype)
    layer.load_weights(pairs)  # full-precision tensors are quantized expert by expert
    layer.process_weights_after_loading()
    return layer


layer = make("fp8_block")
print(layer.explain(num_tokens=T))

# %% [markdown]
# ## Calling it
#
# The layer is an **argument** of the jitted function. In a closure its weights would be constants of the compiled
# program, and a later `reload_weights` would change nothing there.

# %%
forward = jax.jit(lambda layer, x, logits: layer(x, logits))
x = jnp.asarray(rng.standard_normal((T, H)), jnp.bfloat16)
router_logits = jnp.asarray(rng.standard_normal((T, E)), jnp.float32)
y = forward(layer, x, router_logits)
print(y.shape, y.dtype)

# %% [markdown]
# ## What each format costs
#
# The error is the norm of the difference from the same layer in float32, relative to that layer's output. Every scheme
# reads the same weights.

# %%
exact = make("bf16", jnp.float32)
reference = np.asarray(forward(exact, x.astype(jnp.float32), router_logits), np.float64)
rows = []
for scheme in ("bf16", "fp8_channel", "fp8_block", "int8_w8a8", "int8_w8a16", "w4a16_g32", "w4a16_g128", "mxfp4_a16"):
    layer = make(scheme)
    out = np.asarray(forward(layer, x, router_logits), np.float64)
    error = np.linalg.norm(out - reference) / np.linalg.norm(reference)
    rows.append((scheme, layer.weights.get_value().nbytes(), error))
    print(f"{scheme:<12}{rows[-1][1] / 1e3:>9.0f} kB{100 * error:>9.2f} % error")

# %%
figure, axes = plt.subplots(figsize=(7, 3.8))
PLACE = {"mxfp4_a16": (-9, -3), "fp8_block": (-7, -3), "w4a16_g128": (4, 6), "w4a16_g32": (6, -7)}  # close neighbours
for scheme, nbytes, error in rows:
    look = dict(ms=10, mfc="none") if scheme == "mxfp4_a16" else {}  # a ring around the neighbour in the same place
    axes.plot(nbytes / rows[0][1], 100 * error, "o", **look)
    offset = PLACE.get(scheme, (7, -3))
    side = "right" if offset[0] < 0 else "left"
    axes.annotate(scheme, (nbytes / rows[0][1], 100 * error), offset, textcoords="offset points", fontsize=8, ha=side)
axes.set(yscale="log", xlim=(0.1, 1.12), ylim=(0.15, 40), yticks=(0.3, 1, 3, 10, 30), yticklabels=(0.3, 1, 3, 10, 30))
axes.set(xlabel="bytes of the experts (bf16 = 1)", ylabel="error of the output, %")
axes.set_title("One layer, the same weights: what smaller costs")

# %% [markdown]
# At half the bytes, INT8 has an error of one to two percent and FP8 of six: its 3-bit mantissa rounds every value by
# the same relative amount, activations too. At a quarter of the bytes the error is sixteen percent or more on these
# Gaussian weights. Trained weights suit some formats better and others worse. Notebook 02 shows where the error comes
# from.
