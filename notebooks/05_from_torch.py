# %% [markdown]
# # From a torch checkpoint to a Flax model
#
# This notebook writes a small random Qwen3-MoE with transformers and reads the directory with moe_jax. There is no
# conversion step: both use the same safetensors files.

# %%
# Installs what is missing, moe_jax from its checkout. Nothing happens where all of it can be imported.
import importlib.util
import subprocess
import sys

CHECKOUT = ".."  # seen from the folder of this notebook
if not all(map(importlib.util.find_spec, ("moe_jax", "matplotlib", "torch", "transformers"))):
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", f"{CHECKOUT}[demo,torch]", "transformers"], check=True
    )

# %%
import tempfile
import time
from pathlib import Path

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import torch
import transformers

import moe_jax

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

# %%
directory = Path(tempfile.mkdtemp()) / "tiny-qwen3-moe"
torch.manual_seed(0)
config = transformers.Qwen3MoeConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=128,
    moe_intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    num_experts=8,
    num_experts_per_tok=2,
    norm_topk_prob=True,
    eos_token_id=None,
)
theirs = transformers.Qwen3MoeForCausalLM(config).eval()
for parameter in theirs.parameters():  # as trained weights, so that every matrix keeps the size of what passes
    if parameter.ndim > 1:
        torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
theirs.save_pretrained(directory)
print(*sorted(path.name for path in directory.iterdir()))

# %% [markdown]
# ## What is in it
#
# `inspect` reads config.json and the headers of the files, but no weights.

# %%
from moe_jax.inspection import inspect_checkpoint

print(inspect_checkpoint(directory).render())

# %% [markdown]
# ## Load, and compare with torch
#
# In float32 both compute the same function. Only the order of sums differs.

# %%
prompt = np.random.default_rng(0).integers(0, 256, (1, 24))
with torch.no_grad():
    expected = theirs(torch.from_numpy(prompt)).logits[0].numpy()

start = time.perf_counter()
model = moe_jax.load_pretrained(directory, dtype=jnp.float32)
print(f"loaded in {time.perf_counter() - start:.1f} s")
ours = np.asarray(model.score(jnp.asarray(prompt))[0])
print(f"largest difference {np.abs(ours - expected).max():.1e} of a range of {np.ptp(expected):.1f}")

# %% [markdown]
# ## Quantized while it is loaded
#
# The experts are quantized one after the other while they are read. Attention, embeddings and the head stay as they
# are.

# %%
SCHEMES = ("int8_w8a16", "fp8_block", "w4a16_g32")
logits = {}
for scheme in SCHEMES:
    quantized = moe_jax.load_pretrained(directory, dtype=jnp.float32, quantize=scheme)
    logits[scheme] = np.asarray(quantized.score(jnp.asarray(prompt))[0])
    nbytes = sum(block.experts.weights.get_value().nbytes() for block in quantized.moe_blocks())
    same = (logits[scheme].argmax(-1) == expected.argmax(-1)).mean()
    error = np.linalg.norm(logits[scheme] - expected) / np.linalg.norm(expected)
    print(f"{scheme:<11} experts {nbytes / 1e3:>6.0f} kB, logit error {error:.2%}, same best token {same:.0%}")

# %%
figure, panels = plt.subplots(1, 1 + len(SCHEMES), figsize=(9, 3), sharex=True, sharey=True)
for axes, (name, values) in zip(panels, [("float32", ours), *logits.items()], strict=True):
    axes.plot(expected.ravel(), values.ravel(), ",", color=BLUE)
    axes.axline((0, 0), slope=1, color=RED, lw=0.5)
    error = np.linalg.norm(values - expected) / np.linalg.norm(expected)
    axes.set(title=f"{name}\nerror {error:.1%}", xlabel="logit in torch", aspect="equal")
panels[0].set_ylabel("logit in moe_jax")

# %% [markdown]
# This is one prompt on a tiny random model, so the order of formats may differ from notebook 02: a small difference in
# one layer may send a token to other experts in the next, which moves its logits a lot. Judge a format by the model
# that you mean to use.
#
# ## Generate
#
# The loop over new tokens runs inside one jitted program.

# %%
ours_tokens = np.asarray(moe_jax.generate(model, jnp.asarray(prompt, jnp.int32), max_new_tokens=12))[0, 24:]
with torch.no_grad():
    torch_tokens = theirs.generate(torch.from_numpy(prompt), max_new_tokens=12, do_sample=False)[0, 24:].numpy()
print("moe_jax     ", ours_tokens.tolist())
print("transformers", torch_tokens.tolist())
