"""Gated delta net at the sizes of Qwen3-Next: do both forms agree on this device, and what do they take? Two minutes.

    python benchmarks/linear_attention.py --out FILE [--tiny]

Chunks of 64 tokens are compared with single steps, then a whole hybrid model's prefill with its decode steps. Times are
medians of calls: of the delta rule alone, and of a layer of linear attention in bfloat16. --tiny: small sizes, to try
the script without a GPU. Every line goes to FILE as soon as it is known.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _workers import say
from flax import nnx

from moe_jax.models.attention._delta_rule import in_chunks, step_by_step
from moe_jax.models.families._registry import read_model_family

QWEN3_NEXT = dict(
    model_type="qwen3_next",
    architectures=["Qwen3NextForCausalLM"],
    head_dim=256,
    hidden_act="silu",
    hidden_size=2048,
    intermediate_size=5120,
    linear_conv_kernel_dim=4,
    linear_key_head_dim=128,
    linear_num_key_heads=16,
    linear_num_value_heads=32,
    linear_value_head_dim=128,
    max_position_embeddings=262144,
    moe_intermediate_size=512,
    norm_topk_prob=True,
    num_attention_heads=16,
    num_experts=64,  # of 512: the layers with experts are not the subject here
    num_experts_per_tok=10,
    num_hidden_layers=4,
    num_key_value_heads=2,
    rms_norm_eps=1e-06,
    rope_theta=10000000,
    shared_expert_intermediate_size=512,
    vocab_size=32768,
)
TINY = dict(hidden_size=64, head_dim=16, linear_key_head_dim=16, linear_value_head_dim=16, moe_intermediate_size=32)
TINY |= dict(linear_num_key_heads=2, linear_num_value_heads=4, vocab_size=256, shared_expert_intermediate_size=32)


def problem(rows: int, length: int, sizes: Any) -> tuple[jax.Array, ...]:
    """Arguments of the delta rule: heads that remember 20 to 2000 tokens."""
    keys, ratio = sizes["linear_num_key_heads"], sizes["linear_num_value_heads"] // sizes["linear_num_key_heads"]
    width, values = sizes["linear_key_head_dim"], sizes["linear_value_head_dim"]
    of_q, of_k, of_v, of_g, of_b, of_s = jax.random.split(jax.random.key(0), 6)
    q, k = (jax.random.normal(key, (rows, length, keys, width)) for key in (of_q, of_k))
    q, k = (a / jnp.linalg.norm(a, axis=-1, keepdims=True) for a in (q, k))
    v = jax.random.normal(of_v, (rows, length, keys, ratio, values))
    g = -jnp.exp(jax.random.uniform(of_g, v.shape[:-1], minval=np.log(5e-4), maxval=np.log(5e-2)))
    beta = jax.random.uniform(of_b, v.shape[:-1])
    return q, k, v, g, beta, jax.random.normal(of_s, (rows, keys, ratio, width, values))


def milliseconds(function: Callable[..., Any], *arguments: Any) -> float:
    """Median of 11 calls behind two that warm up."""
    taken = []
    for _ in range(13):
        start = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        taken.append(1e3 * (time.perf_counter() - start))
    return round(statistics.median(taken[2:]), 4)


def difference(found: Any, expected: Any) -> float:
    """Largest, as a part of the largest value."""
    found, expected = (np.asarray(a, np.float64) for a in (found, expected))
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    sizes = QWEN3_NEXT | (TINY if options.tiny else {})
    lengths, rows = ((128,), (1, 2)) if options.tiny else ((1024, 4096, 16384), (1, 16, 64))
    with open(options.out, "w") as out:

        def tell(**line: Any) -> None:
            say(json.dumps(line), out)

        tell(device=jax.devices()[0].device_kind, jax=jax.__version__)
        chunks, steps = jax.jit(in_chunks), jax.jit(step_by_step)
        arguments = problem(2, lengths[0] - 7, sizes)
        pairs = zip(("output", "state"), chunks(*arguments), steps(*arguments), strict=True)
        tell(check="chunks are steps", allowed=1e-5, **{name: difference(a, b) for name, a, b in pairs})

        family, config = read_model_family(sizes)
        # Rounded to bfloat16 a token may go to another expert, so that only the difference is told.
        for dtype, allowed in ((jnp.float32, 1e-4), (jnp.bfloat16, None)):
            if options.tiny and dtype == jnp.bfloat16:
                continue  # a CPU lacks some of its products
            model: Any = family(config, dtype=dtype, rngs=nnx.Rngs(0), max_seq_len=32768)
            ids = np.random.default_rng(0).integers(0, config.vocab_size, (2, 136)).astype(np.int32)
            call = jax.jit(lambda model, ids, cache: model(ids, cache=cache))
            whole, _ = call(model, ids, model.init_cache(2, 144))
            parts, cache = [], model.init_cache(2, 144)
            for begin, end in ((0, 100), *((at, at + 1) for at in range(100, 136))):
                logits, cache = call(model, ids[:, begin:end], cache)
                parts.append(logits)
            found = difference(jnp.concatenate(parts, axis=1), whole)
            tell(check=f"steps are a prefill, {jnp.dtype(dtype)}", difference=found, allowed=allowed)

        for length in lengths:
            tell(time="delta rule in chunks", tokens=length, ms=milliseconds(chunks, *problem(1, length, sizes)))
        for count in rows:
            tell(time="delta rule, one step", rows=count, ms=milliseconds(steps, *problem(count, 1, sizes)))
        for length in lengths:
            ids = np.zeros((1, length), np.int32)
            cache = model.init_cache(1, length)
            tell(time="prefill of 4 layers", tokens=length, ms=milliseconds(call, model, ids, cache))
        for count in rows:
            ids, cache = np.zeros((count, 1), np.int32), model.init_cache(count, 1024)
            tell(time="decode step of 4 layers", rows=count, ms=milliseconds(call, model, ids, cache))


if __name__ == "__main__":
    main()
