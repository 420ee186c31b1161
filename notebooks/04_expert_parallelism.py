# %% [markdown]
# # Expert parallelism on eight devices: where every byte goes
#
# This notebook simulates eight CPU devices in one process and splits the experts of a layer over them. Tokens must
# reach the devices of their experts, and results must come back. There are several ways to do that; the notebook counts
# the bytes that each one sends.

# %%
# Installs what is missing, moe_jax from its checkout. Nothing happens where all of it can be imported.
import importlib.util
import subprocess
import sys

CHECKOUT = ".."  # seen from the folder of this notebook
if not all(map(importlib.util.find_spec, ("moe_jax", "matplotlib"))):
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", f"{CHECKOUT}[demo]"], check=True)

# %%
import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from flax import nnx

import moe_jax

plt.rcParams.update(
    {
        "axes.spines.right": False,
        "axes.spines.top": False,
        "figure.constrained_layout.use": True,
        "font.size": 9,
        "legend.frameon": False,
    }
)

D = 8
E, TOP_K, H, INNER = 16, 2, 128, 64
mesh = jax.make_mesh((D,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
print(mesh)


# %% [markdown]
# ## A layer whose experts are split
#
# The name of the axis is ours to choose; `expert_axis` tells the layer what it means. Each device holds two of the
# sixteen experts, with their scales.


# %%
def make(dispatch=None, mesh=mesh):
    over = {} if mesh is None else dict(mesh=mesh, expert_axis="expert", data_axis="expert", dispatch=dispatch)
    return moe_jax.FusedMoE(E, H, INNER, top_k=TOP_K, scheme="int8_w8a8", dtype=jnp.float32, rngs=nnx.Rngs(0), **over)


layer = make()
print(layer.explain(num_tokens=256))
for leaf in jax.tree.leaves(layer.weights.get_value()):
    shard = leaf.addressable_shards[0].data
    print(f"{leaf.dtype.name:>8} {leaf.shape!s:>18}  on each device {shard.shape!s:>18} {shard.nbytes:>9,} bytes")

# %% [markdown]
# ## The answer does not depend on the dispatch
#
# The same tokens on one device, and through each dispatch on eight.

# %%
DISPATCHES = ("replicate", "all_gather", "all_to_all")
rng = np.random.default_rng(0)
x = jnp.asarray(rng.standard_normal((64, H)), jnp.float32)
logits = jnp.asarray(rng.standard_normal((64, E)), jnp.float32)
forward = jax.jit(lambda layer, x, logits: layer(x, logits))
single = np.asarray(forward(make(mesh=None), x, logits))
for dispatch in DISPATCHES:
    y = np.asarray(forward(make(dispatch), x, logits))
    print(f"{dispatch:<12} largest difference {np.abs(y - single).max():.1e} of {np.abs(single).max():.2f}")

# %% [markdown]
# ## Counting bytes
#
# JAX shows the program of a call before anything runs. Inside the layer's `shard_map` all shapes are those of one
# device, so the operand of each collective says what one of the D devices must receive.
#
# - all_gather: the D - 1 shares of others
# - psum_scatter: D - 1 partial results for its share
# - psum: 2 (D - 1) / D of its operand (a ring: scatter, then gather)
# - all_to_all: (D - 1) / D of its operand, padding included


# %%
def collectives(jaxpr):
    """(name, operand bytes, result bytes) of each collective in a program and in those it calls."""
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if any(word in name for word in ("psum", "reduce_scatter", "all_gather", "all_to_all", "pmax")):
            size = [sum(v.aval.size * v.aval.dtype.itemsize for v in side) for side in (eqn.invars, eqn.outvars)]
            yield name, *size
        for value in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda v: hasattr(v, "eqns") or hasattr(v, "jaxpr")
        ):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from collectives(inner)


def received(name, operand, result):
    if "all_gather" in name:
        return result - operand
    if "scatter" in name:
        return (D - 1) * result
    return (D - 1) / D * operand * (1 if "all_to_all" in name else 2)


def traffic(dispatch, tokens):
    layer = make(dispatch)
    shapes = [jax.ShapeDtypeStruct((tokens, width), jnp.float32) for width in (H, E)]
    program = jax.make_jaxpr(lambda x, logits: layer(x, logits))(*shapes)
    found = {}
    for name, operand, result in collectives(program.jaxpr):
        kind = next(k for k in ("all_gather", "scatter", "all_to_all", "p") if k in name)
        kind = {"scatter": "psum_scatter", "p": "psum, pmax"}.get(kind, kind)
        found[kind] = found.get(kind, 0) + received(name, operand, result)
    return found


TOKENS = (16, 64, 256, 1024)
table = {dispatch: {t: traffic(dispatch, t) for t in TOKENS} for dispatch in DISPATCHES}
for dispatch, by_tokens in table.items():
    print(dispatch)
    for t, found in by_tokens.items():
        print(f"  {t:>5} tokens: " + ", ".join(f"{kind} {size / 1e3:.1f} kB" for kind, size in found.items()))

# %%
kinds = sorted({kind for rows in table.values() for found in rows.values() for kind in found})
figure, panels = plt.subplots(1, len(DISPATCHES), figsize=(9, 2.8), sharey=True)
for axes, dispatch in zip(panels, DISPATCHES, strict=True):
    bottom = np.zeros(len(TOKENS))
    for kind in kinds:
        size = np.array([table[dispatch][t].get(kind, 0) / t for t in TOKENS])
        axes.bar(range(len(TOKENS)), size, bottom=bottom, label=kind)
        bottom += size
    axes.set(title=dispatch, xlabel="tokens in a call", xticks=range(len(TOKENS)), xticklabels=TOKENS)
panels[0].set_ylabel("bytes received by a device,\nfor each token of the call")
panels[0].set_ylim(0, 1.1 * panels[0].get_ylim()[1])
panels[0].legend(fontsize=8, loc="upper left")

# %% [markdown]
# - `replicate` needs all tokens on every device and adds the results up in one collective. It is best for a few tokens.
#   If the tokens are split over the devices, XLA must first bring them to all; that happens outside of the layer's
#   program and is not counted here.
# - `all_gather` sends each token to all devices, whether they have an expert for it or not.
# - `all_to_all` sends a row only to the device that needs it, in portions of a fixed size because shapes must be known.
#   For few tokens a portion is large enough for any routing, so it is mostly padding: twice the bytes of `all_gather`.
#   At 1024 tokens a portion is a quarter larger than the mean, and `all_to_all` sends less than half as much. An
#   unbalanced routing then takes more rounds; one round is counted here.
#
# Which one is fastest also depends on latency, which a simulation on one machine cannot show.
