"""Attention of DeepSeek-V3.2 on a GPU: what the indexer costs and saves beside dense attention. Three minutes.

    python benchmarks/sparse_attention.py --out FILE [--only TEXT] [--limit SECONDS] [--tiny]

One layer's attention with published sizes and random bfloat16 weights, its projections included. Each call has a cache
whose slots are all in use, and is timed within a loop of one program that carries the cache. "dense" has no indexer,
"select" is the indexer alone. "hopper" steps are compared with XLA's. Every cell runs in a process of its own, which
ends after the limit; every line goes to FILE as soon as it is known. --tiny runs small sizes on any machine.
"""

import argparse
import dataclasses
import functools
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from _workers import emit, lines_of, say

# name -> rows, queries of a row, slots of the cache
CELLS = {
    "step 1 x 32768": (1, 1, 32768),
    "step 16 x 32768": (16, 1, 32768),
    "prefill 1024 of 8192": (1, 1024, 8192),
    "prefill 1024 of 32768": (1, 1024, 32768),
}
TINY = {"step 2 x 64": (2, 1, 64), "prefill 16 of 64": (1, 16, 64)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--only", default="", help="part of the name of a cell")
    parser.add_argument("--limit", type=float, default=60, help="seconds of a process")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        measure(options.worker, options.tiny)
        return
    began = time.time()
    with open(options.out, "w") as out:
        for name in TINY if options.tiny else CELLS:
            if options.only not in name:
                continue
            command = [sys.executable, __file__, "--out", options.out, "--worker", name]
            for line in lines_of([*command, *(["--tiny"] if options.tiny else [])], options.limit):
                say(line, out)
        out.write(f"# {time.time() - began:.0f} s\n")


# -- in a process of its own ------------------------------------------------------------------------------------------


def _config(is_tiny: bool) -> Any:
    from moe_jax.models import read_family

    sizes = dict(hidden_size=7168, num_attention_heads=128, num_key_value_heads=128, q_lora_rank=1536, index_topk=2048)
    sizes |= dict(index_n_heads=64)
    if is_tiny:
        sizes = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=32, index_topk=16)
        sizes |= dict(index_n_heads=4)
    stated = dict(
        model_type="deepseek_v32",
        hidden_act="silu",
        intermediate_size=64,
        moe_intermediate_size=64,
        n_routed_experts=8,
        num_experts_per_tok=2,
        num_hidden_layers=4,
        vocab_size=64,
        max_position_embeddings=163840,
        rms_norm_eps=1e-6,
        rope_theta=10000,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        index_head_dim=128,
    )
    return read_family(stated | sizes)[1]


def measure(name: str, is_tiny: bool) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from _timing import header, time_in_loop
    from flax import nnx

    from moe_jax.models._layer_cache import SlotCache
    from moe_jax.models.attention._attention import AttentionInputs
    from moe_jax.models.attention._mla import LatentAttention
    from moe_jax.models.attention._rope import rotary_angles

    emit(header())
    config, (rows, queries, slots) = _config(is_tiny), (TINY if is_tiny else CELLS)[name]
    dense = dataclasses.replace(config, mla=dataclasses.replace(config.mla, indexer=None))
    sparse_layer = LatentAttention(config, 3, rngs=nnx.Rngs(0))
    drawn = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        """Rows alike in all but the first value, since only time counts."""
        one = jnp.asarray(drawn.standard_normal((1, *shape[1:]), np.float32), jnp.bfloat16)
        return jnp.broadcast_to(one, shape) * (1 + jnp.arange(shape[0], dtype=jnp.bfloat16) / 64).reshape(
            -1, *[1] * (len(shape) - 1)
        )

    x = normal(rows, queries, config.hidden_size)
    lengths = jnp.full((rows,), slots, jnp.int32)
    first = lengths - queries
    positions = first[:, None] + jnp.arange(queries, dtype=jnp.int32)
    cos, sin = rotary_angles(config.rope, positions, lengths)
    inputs = AttentionInputs(cos, sin, jnp.zeros_like(lengths), lengths, first, positions, None)
    cached = SlotCache(tuple(normal(rows, 1, slots, width) for _, width in config.cache_widths(3)))
    compressed = normal(rows, queries, config.mla.q_lora_rank)

    def layer(own: Any, implementation: str) -> Any:
        """The layer that shares the weights of ``sparse_layer``."""
        made = nnx.merge(*nnx.split(sparse_layer))
        made.config, made.implementation = own, implementation
        if own.mla.indexer is None:
            made.indexer = None
        return made

    def attend(model: Any, x: Any, cached: Any) -> Any:
        y, kept, _ = model(x, inputs, cached)
        return y, kept

    def select(model: Any, x: Any, cached: Any) -> Any:
        return model.indexer.select(x, compressed, cached.arrays[1], inputs).astype(jnp.bfloat16), cached

    ways: dict[str, tuple[Callable[..., Any], Any]] = {
        "sparse, XLA": (attend, layer(config, "xla")),
        "dense, XLA": (attend, layer(dense, "xla")),
        "select alone": (select, layer(config, "xla")),
    }
    if not is_tiny:
        ways |= {
            "sparse, hopper": (attend, layer(config, "hopper")),
            "dense, hopper": (attend, layer(dense, "hopper")),
        }
    if "step" in name and "sparse, hopper" in ways:
        found = [
            np.asarray(jax.jit(attend)(ways[way][1], x, cached)[0], np.float32)
            for way in ("sparse, XLA", "sparse, hopper")
        ]
        error = np.abs(found[0] - found[1]).max() / np.abs(found[0]).max()
        emit(f"check {name}: hopper beside XLA {error:.1e} {'ok' if error < 0.02 else 'WRONG'}")
    for words, (function, model) in ways.items():
        state = SlotCache(cached.arrays[: 1 if model.indexer is None else 2])
        try:
            us = time_in_loop(functools.partial(_turn, function), model, (x, state), rounds=20, samples=5)
        except Exception as error:
            emit(f"{name:24s} {words:16s} no: {type(error).__name__} {str(error)[:300]!r}")
            continue
        emit(f"{name:24s} {words:16s} {us:10.1f} us")


def _turn(function: Callable[..., Any], i: Any, model: Any, carry: Any) -> Any:
    """One call, on the cache of the one before; what it gives reaches the next one's x, too small to change it."""
    import jax.numpy as jnp

    x, cached = carry
    y, cached = function(model, x, cached)
    return x + (y.astype(jnp.float32).mean() * 1e-30).astype(x.dtype), cached


if __name__ == "__main__":
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    main()
