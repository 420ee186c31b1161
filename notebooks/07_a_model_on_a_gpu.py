# %% [markdown]
# # A model on a GPU, beside what the GPU can do
#
# A model works in two phases. *Prefill* reads all tokens of a prompt in one call. *Decode* makes one token of each row
# per call. Two limits hold for both: every weight that a call uses is read from memory at least once, and every product
# takes its time on the matrix units. This notebook measures a whole model and compares it with both limits.
#
# On a GPU with 50 GB of free memory it takes Qwen3-30B-A3B at its true size, elsewhere a tiny model of the same family.
# Weights are random, which changes the text and not the time, as long as tokens spread evenly over experts. Set
# `CHECKPOINT` for real weights.

# %%
# Installs what is missing, moe_jax from its checkout. Nothing happens where all of it can be imported.
import importlib.util
import subprocess
import sys

CHECKOUT = ".."  # seen from the folder of this notebook
if not all(map(importlib.util.find_spec, ("moe_jax", "matplotlib"))):
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", f"{CHECKOUT}[demo]"], check=True)

# %%
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from flax import nnx

import moe_jax
from moe_jax.benchmarking import measure_limits
from moe_jax.models import read_family

BLUE, RED, GREY = "#4477aa", "#ee6677", "#bbbbbb"
plt.rcParams.update(
    {
        "axes.spines.right": False,
        "axes.spines.top": False,
        "figure.constrained_layout.use": True,
        "font.size": 9,
        "legend.frameon": False,
    }
)

SCHEME, CHECKPOINT = "fp8_channel", None  # a directory or a name, such as "Qwen/Qwen3-30B-A3B"
device = jax.devices()[0]
IS_BIG = device.platform == "gpu" and device.memory_stats()["bytes_limit"] > 50e9
print(device.device_kind, "jax", jax.__version__)

# %% [markdown]
# ## The model
#
# The fields are those of config.json. Experts are quantized to FP8 with one scale per output channel; attention, norms,
# embedding and head stay in bfloat16.

# %%
FIELDS = dict(
    architectures=["Qwen3MoeForCausalLM"],
    model_type="qwen3_moe",
    vocab_size=151936,
    hidden_size=2048,
    intermediate_size=6144,
    moe_intermediate_size=768,
    num_hidden_layers=48,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    num_experts=128,
    num_experts_per_tok=8,
    norm_topk_prob=True,
    max_position_embeddings=32768,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    hidden_act="silu",
    decoder_sparse_step=1,
    mlp_only_layers=[],
    attention_bias=False,
    tie_word_embeddings=False,
)
if not IS_BIG:
    FIELDS |= dict(vocab_size=512, hidden_size=128, moe_intermediate_size=64, num_hidden_layers=2, head_dim=32)
    FIELDS |= dict(num_attention_heads=4, num_key_value_heads=2, num_experts=16, num_experts_per_tok=2)
dtype = jnp.bfloat16 if device.platform == "gpu" else jnp.float32

begin = time.perf_counter()
if CHECKPOINT is None:
    family, config = read_family(FIELDS, "this notebook")
    schemes = dict.fromkeys(range(config.num_layers), moe_jax.Scheme.parse(SCHEME))
    model = family(config, schemes=schemes, max_seq_len=4096, dtype=dtype, rngs=nnx.Rngs(0))
else:
    model = moe_jax.load_pretrained(CHECKPOINT, quantize=SCHEME, max_seq_len=4096, dtype=dtype)
    config = model.config
nbytes = jax.tree.map(lambda leaf: leaf.nbytes, jax.tree.leaves(nnx.state(model)))
print(f"{sum(nbytes) / 1e6:,.0f} MB of weights, {config.num_layers} layers, {time.perf_counter() - begin:.0f} s")
print(model.moe_blocks()[0].experts.explain(num_tokens=1))

# %% [markdown]
# ## What this machine can do
#
# Measured now with XLA's own programs: a copy, and large products.

# %%
OPERAND = "float8_e4m3fn" if device.platform == "gpu" else "float32"
limits = measure_limits([OPERAND])
print(f"memory {limits.gbps:.0f} GB/s; products " + ", ".join(f"{k} {v:.3g} TFLOP/s" for k, v in limits.tflops.items()))

# %% [markdown]
# ## Measure
#
# `generate_stream` gives the first token after the prefill, and then as many at a time as it is asked for. The first
# call of each kind compiles; programs compile side by side. Times are those of the clock, the best of three.

# %%
CALLS = ((1, 2048), (16, 256), (64, 128)) if IS_BIG else ((1, 16), (4, 32))  # rows, tokens of each prompt
STEPS = 64 if IS_BIG else 8


def answer(rows, length):
    """Seconds of the prefill, and of one step of the decoding."""
    prompts = np.random.default_rng(rows).integers(0, config.vocab_size, (rows, length))
    options = dict(max_new_tokens=1 + STEPS, tokens_at_once=STEPS, eos_token_id=None)
    began = time.perf_counter()
    parts = moe_jax.generate_stream(model, prompts, **options)
    first = next(parts)
    read = time.perf_counter()
    others = next(parts)
    assert first.shape == (rows, 1) and others.shape == (rows, STEPS)
    return read - began, (time.perf_counter() - read) / STEPS


began = time.perf_counter()
with ThreadPoolExecutor() as pool:
    list(pool.map(answer, *zip(*CALLS, strict=True)))
print(f"compiled in {time.perf_counter() - began:.0f} s")
measured = {call: np.min([answer(*call) for _ in range(3)], axis=0) for call in CALLS}

# %% [markdown]
# ## Count
#
# - A call reads the weights of attention and head, and those of the experts that have a token: all of them in a long
#   prefill, about E (1 - (1 - k/E)^T) of E for T tokens that spread evenly over k experts each.
# - Decoding reads the keys and values of every token before, too.
# - A token is multiplied with the weights of attention and of its k experts. The head is only needed at the last token
#   of each row.
#
# Activations are left out of the bytes: for weights of this size they are little.

# %%
experts = [block.experts for block in model.moe_blocks()]
E, k = experts[0].config.num_experts, experts[0].config.top_k
expert_bytes = sum(layer.weights.get_value().nbytes() for layer in experts)
embedding = config.vocab_size * config.hidden_size
dense_bytes = sum(nbytes) - expert_bytes - embedding * jnp.dtype(dtype).itemsize
expert_weights = len(experts) * 3 * config.hidden_size * experts[0].config.intermediate_size  # of one expert a layer
attention = config.num_heads * config.head_dim
cached = 2 * config.num_kv_heads * config.head_dim * jnp.dtype(dtype).itemsize * config.num_layers  # bytes of a token
dense_weights = dense_bytes / jnp.dtype(dtype).itemsize - embedding  # without the head


def count(rows, new, held):
    """(bytes, operations of experts, other operations) of a call with ``new`` tokens a row after ``held``."""
    tokens = rows * new
    touched = E * (1 - (1 - k / E) ** tokens)
    moved = dense_bytes + expert_bytes * touched / E + rows * (held + new) * cached
    pairs = rows * new * (held + (new + 1) / 2)  # a query and a key
    others = 2 * tokens * dense_weights + 2 * rows * embedding + 4 * pairs * attention * config.num_layers
    return moved, 2 * tokens * k * expert_weights, others


rows_of_table = []
for (rows, length), (prefill, step) in measured.items():
    for name, seconds, new, held in (
        (f"prefill {rows} x {length}", prefill, length, 0),
        (f"decode {rows} x {length}", step, 1, length + STEPS // 2),
    ):
        moved, of_experts, others = count(rows, new, held)
        reading = moved / limits.gbps / 1e9
        rate = others / limits.ceiling("bfloat16") + of_experts / limits.ceiling(OPERAND)
        multiplying = rate / 1e12
        rows_of_table.append((name, seconds, reading, multiplying, moved, of_experts + others, rows * new))
print(f"{'':<18}{'measured':>12}{'reading':>12}{'multiplying':>14}{'of the limit':>14}{'tokens/s':>12}")
for name, seconds, reading, multiplying, _, _, tokens in rows_of_table:
    share = max(reading, multiplying) / seconds
    times = "".join(f"{1e3 * t:>{n}.3f} ms" for t, n in ((seconds, 9), (reading, 9), (multiplying, 11)))
    print(f"{name:<18}{times}{share:>13.0%} {tokens / seconds:>12.0f}")

# %% [markdown]
# ## The roofline
#
# Left: operations a second against operations per byte. A call cannot lie above the lines. Right: the same calls as
# times, beside the larger of both limits.

# %%
figure, (roof, bars) = plt.subplots(1, 2, figsize=(9, 3.6))
low, high = 0.3, 1e5
for name, rate in limits.tflops.items():
    corner = 1e3 * rate / limits.gbps
    roof.plot([low, corner, high], [low * limits.gbps / 1e3, rate, rate], color="black", lw=0.8)
    roof.annotate(name, (high, rate), (0, 2), textcoords="offset points", ha="right", fontsize=7)
for name, seconds, _, _, moved, operations, _ in rows_of_table:
    color = BLUE if name.startswith("decode") else RED
    roof.plot(operations / moved, operations / seconds / 1e12, "o", ms=5, color=color)
roof.set(xscale="log", yscale="log", xlabel="operations per byte", ylabel="TFLOP/s", title="Decode blue, prefill red")
places = np.arange(len(rows_of_table))
bars.barh(places - 0.2, [1e3 * row[1] for row in rows_of_table], 0.4, color=BLUE, label="measured")
bars.barh(places + 0.2, [1e3 * max(row[2:4]) for row in rows_of_table], 0.4, color=GREY, label="limit")
bars.set_yticks(places, [row[0] for row in rows_of_table])
bars.invert_yaxis()
bars.set(xscale="log", xlabel="ms", title=f"{device.device_kind}, {SCHEME}")
bars.legend(fontsize=7)

# %% [markdown]
# Where a time is far from its limit, `moe-jax bench` times the layer of experts alone, and `explain` says how it runs.
# [Performance](../docs/performance.md) says what the time outside of the experts is.
