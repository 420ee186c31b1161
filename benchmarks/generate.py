"""Time whole decoders with quantized experts on a GPU: one decode step and one prefill, and what is not experts.

    python benchmarks/generate.py [--models qwen3-30b-a3b,mixtral-8x7b] [--schemes bf16,fp8_channel,fp8_block]
        [--layers 8] [--decode 1,16,64] [--prefill 1024,8192] [--context 1024] [--json generate.json]
    JAX_PLATFORMS=cpu python benchmarks/generate.py --tiny        # tries the script out anywhere

Random weights at the true sizes of a layer, as many layers as ``--layers`` says; embedding and head included. decode: B
rows, one new token each, a cache that holds ``--context`` tokens a row. prefill: one row. Both are single calls inside
jit, timed as _timing.py tells. "outside" is the time of the same model with its experts replaced by nothing: attention,
norms, embedding, head, and what XLA saves when the experts are gone. Per layer figures divide by the number of layers.
"""

import argparse
import functools
import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from _timing import header, time_in_jit
from flax import nnx

from moe_jax.models._cache import KVCache
from moe_jax.models._compiled import merge_model, split_model
from moe_jax.models._config import ConfigReader
from moe_jax.models.mixtral import MixtralForCausalLM
from moe_jax.models.qwen3_moe import Qwen3MoeForCausalLM
from moe_jax.quantization import Scheme

_COMMON = dict(
    hidden_act="silu", max_position_embeddings=32768, rope_theta=1e6, rms_norm_eps=1e-6, tie_word_embeddings=False
)
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen3-30b-a3b": (
        Qwen3MoeForCausalLM,
        dict(
            model_type="qwen3_moe",
            hidden_size=2048,
            intermediate_size=6144,
            moe_intermediate_size=768,
            num_experts=128,
            num_experts_per_tok=8,
            norm_topk_prob=True,
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=128,
            vocab_size=151936,
            **_COMMON,
        ),
    ),
    "mixtral-8x7b": (
        MixtralForCausalLM,
        dict(
            model_type="mixtral",
            hidden_size=4096,
            intermediate_size=14336,
            num_local_experts=8,
            num_experts_per_tok=2,
            num_attention_heads=32,
            num_key_value_heads=8,
            vocab_size=32000,
            **_COMMON,
        ),
    ),
}
_TINY = dict(hidden_size=256, intermediate_size=128, moe_intermediate_size=128, num_attention_heads=2, vocab_size=512)


class _Nothing(nnx.Module):
    """In place of a block of experts."""

    def __call__(self, x):
        return jnp.zeros_like(x)


def build(name: str, scheme: str, layers: int, is_tiny: bool) -> Any:
    family, sizes = MODELS[name]
    sizes = {**sizes, "num_hidden_layers": layers}
    if is_tiny:
        sizes |= {key: value for key, value in _TINY.items() if key in sizes} | dict(num_key_value_heads=2)
        sizes |= {key: 8 for key in ("num_experts", "num_local_experts") if key in sizes}
        sizes |= dict(num_experts_per_tok=2)
    config = family.read_config(ConfigReader(sizes, name))
    parsed = Scheme.parse(None if scheme == "bf16" else scheme)
    dtype = jnp.float32 if is_tiny else jnp.bfloat16  # some bfloat16 products do not run on a CPU
    return family(
        config, schemes=dict.fromkeys(range(layers), parsed), max_seq_len=32768, dtype=dtype, rngs=nnx.Rngs(0)
    )


def step(structure: Any, leaves: Any, ids: Any, cache: Any) -> Any:
    """Logits of the last position of each row, and the cache."""
    model = merge_model(structure, leaves)
    hidden, cache = model.hidden_states(ids, cache=cache)
    return model.logits(hidden[:, -1]), cache


def micros(model: Any, rows: int, new: int, held: int) -> float:
    """One call on ``new`` tokens a row with ``held`` tokens a row in the cache."""
    structure, leaves = split_model(model)
    ids = jax.random.randint(jax.random.key(1), (rows, max(held, new)), 0, model.config.vocab_size)
    cache = KVCache.zeros(model.config, rows, held + new, model.dtype)
    call = functools.partial(step, structure)
    if held:
        _, cache = jax.jit(call)(leaves, ids[:, :held], cache)
    return time_in_jit(call, (leaves, ids[:, :new], cache), varied=1)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--schemes", default="bf16,fp8_channel,fp8_block")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--decode", default="1,16,64")
    parser.add_argument("--prefill", default="1024,8192")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.tiny:
        options.schemes, options.layers, options.decode, options.prefill, options.context = "int8_w8a8", 2, "2", "9", 5
    print(header(), f"{options.layers} layers, context {options.context}", flush=True)
    cells = []
    for name in options.models.split(","):
        for scheme in options.schemes.split(","):
            model = build(name, scheme, options.layers, options.tiny)
            calls = [("decode", int(rows), 1, options.context) for rows in options.decode.split(",")]
            calls += [("prefill", 1, int(tokens), 0) for tokens in options.prefill.split(",")]
            whole = [micros(model, *call[1:]) for call in calls]
            for layer in model.layers:
                layer.mlp = _Nothing()
            for (kind, rows, new, held), us in zip(calls, whole, strict=True):
                outside = micros(model, rows, new, held)
                cell = dict(model=name, scheme=scheme, kind=kind, rows=rows, tokens=new, us=us, outside_us=outside)
                cells.append(cell)
                print(
                    f"{name:14s} {scheme:12s} {kind:7s} rows={rows:3d} tokens={new:5d} {us / 1e3:9.3f} ms, "
                    f"{us / options.layers:8.1f} us a layer, {us / (rows * new):9.2f} us a token, "
                    f"outside the experts {outside / us:5.1%}",
                    flush=True,
                )
            del model
            if options.json:
                options.json.write_text(json.dumps(dict(layers=options.layers, cells=cells), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
