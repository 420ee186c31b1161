# %% [markdown]
# # Fine-tune beside 4-bit experts
#
# The experts of this model stay in 4 bits. Low-rank adapters (LoRA) beside them and beside attention train, on rows
# that hold several sentences each, with and without a loss that evens out the load of the experts. The program
# `examples/finetune_lora.py` does the same, with checkpoints, gradient accumulation and meshes.

# %%
# Installs what is missing, moe_jax from its checkout. Nothing happens where all of it can be imported.
import importlib.util
import subprocess
import sys

CHECKOUT = ".."  # seen from the folder of this notebook
if not all(map(importlib.util.find_spec, ("moe_jax", "matplotlib", "optax", "tokenizers"))):
    packages = [f"{CHECKOUT}[chat,demo]", "optax"]
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *packages], check=True)

# %%
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx

import moe_jax
from moe_jax.cli import _demo  # writes a small Qwen3-MoE checkpoint; give your own directory instead

plt.rcParams.update(
    {
        "axes.spines.right": False,
        "axes.spines.top": False,
        "figure.constrained_layout.use": True,
        "font.size": 9,
        "legend.frameon": False,
    }
)

directory = Path(tempfile.mkdtemp()) / "tiny"
_demo.write_checkpoint(directory)

# %% [markdown]
# ## Rows of several sentences
#
# Sentences are short and rows are long, so a row holds several. `segment_ids` says which is which: tokens attend within
# their sentence, every sentence begins at position 0, and 0 is padding.

# %%
rng = np.random.default_rng(0)
words = _demo.vocabulary()
things = "bird boat child cloud fish flower king moon queen river ship tree".split()
looks = "black bright cold dark good great old quiet small strong warm white".split()
LENGTH, ROWS = 32, 24


def sentence():
    first, second = rng.choice(len(things), 2)
    return f"the {looks[first]} {things[first]} can see the {looks[second]} {things[second]} .".split()


ids, segments = np.zeros((2, ROWS, LENGTH), np.int32)
for row in range(ROWS):
    end, number = 0, 1
    while end + 9 <= LENGTH:
        tokens = [words[word] for word in sentence()]
        ids[row, end : end + 9], segments[row, end : end + 9] = tokens, number
        end, number = end + 9, number + 1
print(segments[0])
print(f"{(segments > 0).mean():.0%} of the tokens are real")

# %% [markdown]
# Packing changes no logit: a sentence in a row has those of the sentence alone.

# %%
model = moe_jax.load_pretrained(directory, quantize="w4a16_g128", dtype=jnp.float32)
packed = jax.jit(lambda model, ids, segments: model(ids, segment_ids=segments))(model, ids[:1], segments[:1])
alone = model.score(ids[:1, 9:18])
print(f"largest difference {np.abs(packed[0, 9:18] - alone[0]).max():.1e} of a range of {np.ptp(alone):.1f}")

# %% [markdown]
# ## Train
#
# The optimizer takes `LoRAParam`, and nothing else has gradients. `return_stats=True` hands out the routers' logits,
# which the load-balancing loss differentiates.


# %%
@nnx.jit
def step(model, optimizer, ids, segments, balance):
    def loss(model):
        logits, stats = model(ids, segment_ids=segments, return_stats=True)
        entropy = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], ids[:, 1:])
        is_next = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
        entropy = jnp.where(is_next, entropy, 0.0).sum() / is_next.sum()
        return entropy + balance * moe_jax.load_balancing_loss(stats), (entropy, stats.load)

    grads, found = nnx.grad(loss, argnums=nnx.DiffState(0, moe_jax.LoRAParam), has_aux=True)(model)
    optimizer.update(model, grads)
    return found


def train(balance, steps=20):
    model = moe_jax.load_pretrained(directory, quantize="w4a16_g128", dtype=jnp.float32)
    model = moe_jax.lora(model, rank=8, alpha=16, targets=("w13", "w2", "attention"), rngs=nnx.Rngs(0))
    schedule = optax.warmup_cosine_decay_schedule(1e-3, 1e-2, 4, steps)
    optimizer = nnx.Optimizer(model, optax.adamw(schedule), wrt=moe_jax.LoRAParam)
    losses, loads = [], []
    for number in range(steps):
        rows = [(4 * number + i) % ROWS for i in range(4)]
        loss, load = step(model, optimizer, ids[rows], segments[rows], balance)
        losses.append(float(loss))
        loads.append(np.asarray(load))
    return losses, loads


runs = {balance: train(balance) for balance in (0.0, 0.5)}
for balance, (losses, _) in runs.items():
    print(f"balance {balance}: loss {losses[0]:.2f} -> {losses[-1]:.2f}")

# %% [markdown]
# ## What happened
#
# Left: the loss. Right: the share of rows that the busiest expert of the first layer serves. 1/32 would be even. The
# routers stay as they are here: the balance loss reaches only the adapters before them, so it moves little. Train the
# routers as well to give it more hold.

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3))
for balance, (losses, loads) in runs.items():
    left.plot(losses, label=f"balance {balance}")
    right.plot([load[0].max() / load[0].sum() for load in loads], label=f"balance {balance}")
left.set(xlabel="step", ylabel="cross entropy")
right.axhline(1 / 32, color="black", lw=0.5)
right.set(xlabel="step", ylabel="share of the busiest expert", ylim=(0, None))
left.legend()
plt.show()
