"""``moe-jax demo``: write a small random Qwen3-MoE checkpoint, run it in every scheme, compare error, bytes, time."""

import io
import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moe_jax._output import check_output, write_output
from moe_jax._terminal import printable
from moe_jax.cli._progress import notice
from moe_jax.loading import save_safetensors
from moe_jax.loading._errors import read_json
from moe_jax.loading.files._checkpoint import MAX_CONFIG_BYTES
from moe_jax.models import generate, load_pretrained
from moe_jax.quantization import SCHEMES
from moe_jax.writing._whole_directory import check_destination, staged

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 256,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,  # compilation takes most of the time and grows with them
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 512,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": None,
}
_DRAWN = 1 << 18  # random numbers of a matrix
PROMPT = (
    "the river is long and cold . a small bird is on the old bridge , and the people of the town look at it . every "
    "evening it sings a song about the sea , where the water is blue and the days are warm . one morning"
)
UNKNOWN = "<unk>"
# The tokens, each a word: those of the prompt, and some more that random weights can choose among.
WORDS = tuple(
    dict.fromkeys(
        f"""{UNKNOWN} {PROMPT}
above across after again air all along also always an answer any apple around as away back be because become before
behind below best better between black boat book both bread bright bring but by can child city cloud come could dark
day deep did door down drink dry each earth east eat eye face father few fire first fish flower for four friend garden
gold good grass great green had hand happy hard has hear heart her here high hill him his home horse hour house in
into island its king lake land leave life light like little live man may milk money moon mother mountain move music
name never new night no once place plant play poor put queen question quick quiet rain read red rest ring rise road
rock room root round run sand say school season see seed she ship show side silver sky sleep slow snow so some soon
sound south space stand star stay step still stone stop story street strong summer sun sweet swim table take talk tall
tell them then they thing think thought three through time to tree turn two under until up very voice walk wall want
was watch way we well west what wheel when white who why wild wind window winter with wood word world year yes you
young
""".split()
    )
)
NEW_TOKENS = 32
LEGEND = f"""
expert MB    the experts' weights as they are held, scales included
logit error  |logits - exact| / |exact| over the prompt; exact: the bfloat16 weights, computed in float32
same tokens  share of {NEW_TOKENS} new tokens that are those of bf16; with random weights many are close calls
prefill ms   to read the prompt, median of 3 calls, compilation left out
ms/token     the same for an answer of {NEW_TOKENS} tokens, divided by their number"""

# The formats that are fast on a CPU; --all runs every one.
ONE_OF_EACH = ("bf16", "fp8_tensor", "fp8_channel", "fp8_block", "int8_w8a8", "int8_w8a16", "w4a8_int8")


def every_scheme() -> list[str]:
    """Schemes that need no calibration: a random checkpoint has no static activation scales."""
    return [name for name, s in SCHEMES.items() if s.activations is None or not s.activations.needs_input_scale]


def run_demo(out: Path, all_schemes: bool = False) -> list[dict[str, Any]]:
    """Run the demo into directory ``out``; prints a table, writes ``demo.json`` and ``demo.png``; returns the rows.

    The checkpoint of an earlier demo there is used again, and its results are replaced.

    Each row: scheme, expert_bytes, logit_error (relative Frobenius against the float32 run of the bf16 weights),
    same_tokens (share of generated tokens equal to bf16's), prefill_ms, ms_per_token (median of 3, after compilation).
    """
    checkpoint = _checkpoint_in(out)
    for name in ("demo.json", "demo.png"):
        check_output(out / name, "--out")
    words = vocabulary()
    prompt = jnp.asarray([[words.get(word, 0) for word in PROMPT.split()]], jnp.int32)
    print(f"prompt: {PROMPT}")
    reference = load_pretrained(checkpoint, dtype=jnp.float32, implementation="reference")
    with notice("compiling the float32 reference ..."):
        exact = np.asarray(reference.score(prompt), np.float64)
    del reference
    rows: list[dict[str, Any]] = []
    bf16_tokens = None
    for scheme in every_scheme() if all_schemes else ONE_OF_EACH:
        with notice(f"compiling and measuring {scheme} ..."):
            row, tokens = measure(checkpoint, scheme, prompt, exact)
        bf16_tokens = tokens if scheme == "bf16" else bf16_tokens
        row["same_tokens"] = float((tokens == bf16_tokens).mean())
        rows.append(row)
        print(render_row(rows[-1], header=len(rows) == 1), flush=True)
    print(LEGEND)
    if bf16_tokens is not None:
        print(f"answer of bf16, of random weights: {' '.join(list(words)[token] for token in bf16_tokens[0])}")
    results = json.dumps({"device": jax.devices()[0].device_kind, "rows": rows}, indent=1)
    write_output(out / "demo.json", [results.encode()])
    if draw(rows, out / "demo.png"):
        print(printable(f"wrote {out / 'demo.json'} and {out / 'demo.png'}"))
    else:
        print(printable(f"wrote {out / 'demo.json'}; the picture needs matplotlib: pip install matplotlib"))
    print(printable(f'more of it: moe-jax run --model {checkpoint} --prompt "{" ".join(PROMPT.split()[:7])}"'))
    return rows


def _checkpoint_in(out: Path) -> Path:
    """The demo's checkpoint under ``out``, written unless it is there. Raises ValueError for files of somebody else."""
    checkpoint = out / "tiny-qwen3-moe"
    config = checkpoint / "config.json"
    is_whole = config.is_file() and (checkpoint / "tokenizer.json").is_file()
    if is_whole and read_json(config, max_bytes=MAX_CONFIG_BYTES) == CONFIG:
        print(printable(f"found {checkpoint} of an earlier demo"))
        return checkpoint
    for path in (checkpoint, out / "demo.json", out / "demo.png"):
        if path.exists() or path.is_symlink():
            raise ValueError(f"{path}: exists and is not what the demo wrote; choose another --out or move it away")
    write_checkpoint(checkpoint)
    made = f"{CONFIG['num_hidden_layers']} layers of {CONFIG['num_experts']} experts, bf16"
    print(printable(f"wrote {checkpoint}: {made}"))
    return checkpoint


def measure(checkpoint: Path, scheme: str, prompt: jax.Array, exact: np.ndarray) -> tuple[dict[str, Any], np.ndarray]:
    """Load the checkpoint in ``scheme`` and measure it. Returns (row, generated token ids)."""
    model = load_pretrained(checkpoint, quantize=None if scheme == "bf16" else scheme)
    logits = np.asarray(model.score(prompt), np.float64)
    tokens = np.asarray(generate(model, prompt, max_new_tokens=NEW_TOKENS))[:, prompt.shape[1] :]
    prefill = _median_seconds(lambda: model.score(prompt))
    whole = _median_seconds(lambda: generate(model, prompt, max_new_tokens=NEW_TOKENS))
    row = {
        "scheme": scheme,
        "expert_bytes": sum(block.experts.weights.get_value().nbytes() for block in model.moe_blocks()),
        "logit_error": float(np.linalg.norm(logits - exact) / np.linalg.norm(exact)),
        "prefill_ms": 1e3 * prefill,
        "ms_per_token": 1e3 * whole / NEW_TOKENS,
    }
    return row, tokens


def _median_seconds(call) -> float:
    times = []
    for _ in range(3):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def render_row(row: dict[str, Any], *, header: bool) -> str:
    """One line of the table, with the column heads before it when ``header``."""
    head = f"{'scheme':<18}{'expert MB':>10}{'logit error':>13}{'same tokens':>13}{'prefill ms':>12}{'ms/token':>10}\n"
    line = (
        f"{row['scheme']:<18}{row['expert_bytes'] / 1e6:>10.2f}{row['logit_error']:>13.4f}{row['same_tokens']:>12.0%} "
        f"{row['prefill_ms']:>12.1f}{row['ms_per_token']:>10.2f}"
    )
    return head + line if header else line


def vocabulary() -> dict[str, int]:
    """Word -> token, in the order of tokens."""
    return {word: token for token, word in enumerate(WORDS[: CONFIG["vocab_size"]])}


def write_checkpoint(directory: Path, seed: int = 0, config: dict[str, Any] | None = None) -> None:
    """Write a config, random weights in the names Qwen3-MoE files have on disk, and a tokenizer of ``WORDS``.

    directory: must not exist, or be empty; it appears complete or not at all. config: ``CONFIG`` with other sizes;
    None for itself. Matrices above ``_DRAWN`` elements repeat what was drawn. Raises ValueError.
    """
    config = CONFIG if config is None else config
    rng = np.random.default_rng(seed)
    check_destination(directory)
    hidden, inter, head = config["hidden_size"], config["moe_intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    vocab, experts = config["vocab_size"], config["num_experts"]
    tensors: dict[str, np.ndarray] = {}

    def matrix(name: str, rows: int, columns: int, scale: float = 1.0) -> None:
        values = rng.standard_normal(min(rows * columns, _DRAWN), np.float32) * (scale * columns**-0.5)
        tensors[name + ".weight"] = np.resize(values.astype(jnp.bfloat16), (rows, columns))

    def ones(name: str, size: int) -> None:
        tensors[name + ".weight"] = np.ones(size, jnp.bfloat16)

    matrix("model.embed_tokens", vocab, hidden, scale=hidden**0.5)
    matrix("lm_head", vocab, hidden)
    ones("model.norm", hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        ones(prefix + "input_layernorm", hidden)
        ones(prefix + "post_attention_layernorm", hidden)
        attention = prefix + "self_attn."
        matrix(attention + "q_proj", queries, hidden)
        matrix(attention + "k_proj", keys, hidden)
        matrix(attention + "v_proj", keys, hidden)
        matrix(attention + "o_proj", hidden, queries)
        ones(attention + "q_norm", head)
        ones(attention + "k_norm", head)
        matrix(prefix + "mlp.gate", experts, hidden)
        for expert in range(experts):
            name = f"{prefix}mlp.experts.{expert}."
            matrix(name + "gate_proj", inter, hidden)
            matrix(name + "up_proj", inter, hidden)
            matrix(name + "down_proj", hidden, inter)
    with staged(directory) as partial:
        save_safetensors(partial / "model.safetensors", tensors)
        (partial / "config.json").write_text(json.dumps(config, indent=1))
        (partial / "tokenizer.json").write_text(json.dumps(_tokenizer(), indent=1))


def _tokenizer() -> dict[str, Any]:
    """The content of tokenizer.json: a token for each word between blanks."""
    unknown = {"id": 0, "content": UNKNOWN, "special": True}
    flags = dict(single_word=False, lstrip=False, rstrip=False, normalized=False)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [unknown | flags],
        "normalizer": {"type": "Lowercase"},
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary(), "unk_token": UNKNOWN},
    }


def draw(rows: list[dict[str, Any]], path: Path) -> bool:
    """Bars of bytes, error and time per scheme as a PNG; False when matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 3, sharey=True)
    names = [row["scheme"] for row in rows]
    for axes, (field, title, factor) in zip(
        panels,
        (
            ("expert_bytes", "expert weights, MB", 1e-6),
            ("logit_error", "relative logit error", 1.0),
            ("ms_per_token", "ms per generated token", 1.0),
        ),
        strict=True,
    ):
        values = [row[field] * factor for row in rows]
        bars = axes.barh(names, values, color="#4477aa")
        axes.bar_label(bars, fmt="%.3g", padding=3)
        axes.set_title(title, fontsize=10)
        axes.margins(x=0.2)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].invert_yaxis()
    device = jax.devices()[0].device_kind
    figure.suptitle(f"Qwen3-MoE, {CONFIG['num_experts']} experts, random weights ({device})", fontsize=11)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=130)
    write_output(path, [picture.getvalue()])
    return True
