# %% [markdown]
# # Routing and load
#
# A router sends each token to a few experts, and some experts get more tokens than others. When experts are spread over
# devices, all wait for the busiest device. This notebook builds a skewed router, measures what the imbalance costs, and
# shows how much EPLB (expert parallel load balancing) recovers by moving experts and copying busy ones.

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

from moe_jax import MoEConfig
from moe_jax.parallel import EplbState, Placement, rebalance
from moe_jax.routing import route

BLUE, GREY, RED = "#4477aa", "#bbbbbb", "#ee6677"
plt.rcParams.update(
    {
        "axes.spines.right": False,
        "axes.spines.top": False,
        "figure.constrained_layout.use": True,
        "font.size": 9,
        "legend.frameon": False,
    }
)

E, TOP_K, T, LAYERS, DEVICES = 64, 6, 2048, 4, 8

# %% [markdown]
# ## A skewed router
#
# The logits are noise for each token plus a bias for each expert, drawn anew for each layer. The router takes the top 6
# of 64 experts after a softmax.

# %%
config = MoEConfig(E, TOP_K, 8, 8)
rng = np.random.default_rng(1)
routed = jax.jit(lambda logits: route(logits, config))
favour = rng.gumbel(size=(LAYERS, 1, E)) * 0.8
counts = np.zeros((LAYERS, E), np.int64)
for layer in range(LAYERS):
    logits = jnp.asarray(rng.standard_normal((T, E)) + favour[layer], jnp.float32)
    ids = np.asarray(routed(logits).topk_ids)
    counts[layer] = np.bincount(ids.ravel(), minlength=E)

# %%
figure, axes = plt.subplots(figsize=(9, 2.2))
image = axes.imshow(counts / counts.mean(), aspect="auto", cmap="magma_r", vmin=0)
axes.set(xlabel="expert", ylabel="layer", yticks=range(LAYERS), title="A few experts get most tokens")
figure.colorbar(image, ax=axes, label="tokens / mean")
print("busiest expert over the mean, by layer:", np.round(counts.max(1) / counts.mean(1), 2))

# %% [markdown]
# ## What it costs on eight devices
#
# Eight experts lie on each device, in order. All devices wait for the busiest, so they work for a share of the time
# that is the mean load divided by the largest. That share is called *balancedness*.
#
# `EplbState` records the load of each step over a window, on the devices, without waiting for anything. `rebalance`
# reads the window and makes a plan. Here there are 16 spare slots, two per device, for copies of busy experts.

# %%
placement = Placement.create(E, DEVICES, num_redundant_experts=16)
state = EplbState.create(LAYERS, placement, window_size=4)
first = np.array([np.flatnonzero(np.asarray(placement.physical_to_logical) == e)[0] for e in range(E)])
load = np.zeros((LAYERS, placement.num_slots), np.int32)
load[:, first] = counts  # what each slot served; copies are idle so far
state = state.record(jnp.asarray(load)).next_step()
assert (np.asarray(state.load()) == counts).all()
plan = rebalance(state)
for layer in range(LAYERS):
    in_order = counts[layer].sum() / counts[layer].reshape(DEVICES, -1).sum(1).max() / DEVICES
    print(f"layer {layer}: balancedness {in_order:.3f} in order, {plan.balancedness_after[layer]:.3f} by the plan")


# %%
def device_load(slots, load):
    """(DEVICES,) tokens, where the copies of an expert share its load evenly."""
    copies = np.bincount(slots[slots >= 0], minlength=E)
    share = np.where(slots >= 0, load[slots] / copies[slots], 0)
    return share.reshape(DEVICES, -1).sum(1)


plain = np.arange(E).reshape(DEVICES, -1)
figure, panels = plt.subplots(1, LAYERS, figsize=(9, 2.4), sharey=True)
for layer, axes in enumerate(panels):
    mean = counts[layer].sum() / DEVICES
    axes.bar(np.arange(DEVICES) - 0.2, counts[layer][plain].sum(1) / mean, 0.4, color=RED, label="in order")
    axes.bar(
        np.arange(DEVICES) + 0.2,
        device_load(plan.physical_to_logical[layer], counts[layer]) / mean,
        0.4,
        color=BLUE,
        label="EPLB",
    )
    axes.axhline(1, color=GREY, lw=0.8)
    axes.set(title=f"layer {layer}", xlabel="device", xticks=range(DEVICES))
panels[0].set_ylabel("tokens of a device / mean")
panels[-1].legend(fontsize=8)

# %% [markdown]
# ## How many copies are worth their memory
#
# A spare slot takes the memory of one expert. Moving experts already helps without any copy. Copies are needed for
# experts that are busier than a device's fair share.

# %%
spares = (0, 8, 16, 32, 64)
after = []
for spare in spares:
    state = EplbState.create(LAYERS, Placement.create(E, DEVICES, num_redundant_experts=spare), window_size=1)
    after.append(rebalance(state, load=counts).balancedness_after)
before = (counts.sum(1) / DEVICES) / counts[:, plain].sum(2).max(1)
figure, axes = plt.subplots(figsize=(5, 3))
axes.plot(spares, np.array(after).mean(1), "o-", label="EPLB, mean and range of layers")
axes.fill_between(spares, np.min(after, 1), np.max(after, 1), alpha=0.2)
axes.axhline(before.mean(), color=RED, label="experts in order")
axes.set(xlabel="spare slots", ylabel="balancedness (1: all equally busy)", ylim=(0, 1.05), xticks=spares)
axes.set_title("A few copies balance 64 experts on 8 devices")
axes.legend(loc="lower right")

# %% [markdown]
# This load is the one that the plan was made from. On other tokens of the same kind the balance is slightly worse, and
# it gets worse as traffic changes. So the window slides, and `rebalance` is called again from time to time.
