"""Time whole decoders with quantized experts on a GPU: a decode step and a prefill, and what of it is not experts.

    python benchmarks/generate.py [--models qwen3-30b-a3b,mixtral-8x7b] [--schemes fp8_channel] [--layers 2]
        [--decode 1,64] [--prefill 2048] [--context 1024] [--seconds 80] [--json FILE]
    JAX_PLATFORMS=cpu python benchmarks/generate.py --tiny        # tries the script out anywhere

Random weights at the true sizes of a layer, as many layers as ``--layers`` says; embedding and head included. decode: B
rows, one new token each, a cache that holds ``--context`` tokens a row. prefill: one row, an empty cache. As in
``generate``, calls follow each other in a loop inside one program, each fed by the one before; the time of 2 turns is
taken off that of many, which leaves the device's time per call. "outside" is the time of the same model with its
experts replaced by nothing: attention, norms, embedding, head, and what XLA saves when the experts are gone. Programs
of one model are compiled side by side. Cells that would end after ``--seconds`` are left out, and named.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _model_configs import MODELS
from _timing import header
from flax import nnx

from moe_jax.models import KVCache, read_family
from moe_jax.models._compiled import merge_model, split_model
from moe_jax.quantization import Scheme

NAMES = ("qwen3-30b-a3b", "mixtral-8x7b")
_TINY = dict(hidden_size=256, intermediate_size=128, moe_intermediate_size=128, num_attention_heads=2, vocab_size=512)
_TINY |= dict(num_key_value_heads=2, num_experts=8, num_local_experts=8, num_experts_per_tok=2)
_FEW, _SAMPLES, _SAMPLE_S = 2, 5, 0.05


class _Nothing(nnx.Module):
    """In place of a block of experts."""

    def __call__(self, x):
        return jnp.zeros_like(x)


def build(name: str, scheme: str, layers: int, is_tiny: bool) -> Any:
    sizes = MODELS[name] | {"num_hidden_layers": layers}
    if is_tiny:
        sizes |= {key: value for key, value in _TINY.items() if key in sizes}
    family, config = read_family(sizes, name)
    schemes = dict.fromkeys(range(layers), Scheme.parse(None if scheme == "bf16" else scheme))
    dtype = jnp.float32 if is_tiny else jnp.bfloat16  # some bfloat16 products do not run on a CPU
    return family(config, schemes=schemes, max_seq_len=32768, dtype=dtype, rngs=nnx.Rngs(0))


def filled_cache(config: Any, rows: int, held: int, new: int, dtype: Any) -> KVCache:
    """A cache of ``held`` + ``new`` slots as if ``held`` tokens a row had been seen."""
    cache = KVCache.zeros(config, rows, held + new, dtype)
    keys = iter(jax.random.split(jax.random.key(2), len(jax.tree.leaves(cache.layers))))
    layers = jax.tree.map(lambda a: jax.random.normal(next(keys), a.shape, jnp.float32).astype(a.dtype), cache.layers)
    return dataclasses.replace(cache, layers=layers, lengths=jnp.full((rows,), held, jnp.int32))


def turns(structure: Any, leaves: Any, ids: Any, cache: KVCache, count: Any) -> Any:
    """``count`` calls in a row on a cache of the same length, each with ids that follow from the last one's logits."""
    model = merge_model(structure, leaves)

    def turn(_, state):
        ids, layers = state
        hidden, after = model.hidden_states(ids, cache=dataclasses.replace(cache, layers=layers))
        chosen = jnp.argmax(model.logits(hidden[:, -1]), axis=-1).astype(jnp.int32)
        return (ids + chosen[:, None] + 1) % model.config.vocab_size, after.layers

    return jax.lax.fori_loop(0, count, turn, (ids, cache.layers))[0]


class Program:
    """One cell's calls, compiled. Arguments are made when it is timed, so that only one cache exists at a time."""

    def __init__(self, model: Any, rows: int, new: int, held: int):
        structure, self._leaves = split_model(model)
        self._arguments = lambda: (
            jax.random.randint(jax.random.key(1), (rows, new), 0, model.config.vocab_size),
            filled_cache(model.config, rows, held, new, model.dtype),
        )
        shapes = jax.eval_shape(self._arguments)
        self._lowered = jax.jit(functools.partial(turns, structure)).lower(self._leaves, *shapes, np.int32(0))

    def compile(self) -> "Program":
        self._compiled = self._lowered.compile()
        return self

    def micros(self) -> float:
        """Device time of one call: median of the samples, with at least 10 calls in each."""
        arguments = self._arguments()

        def seconds(count: int) -> float:
            start = time.perf_counter()
            jax.block_until_ready(self._compiled(self._leaves, *arguments, np.int32(count)))
            return time.perf_counter() - start

        seconds(_FEW)
        many = int(np.clip(_SAMPLE_S / max(seconds(_FEW) / _FEW, 1e-6), 10, 200))
        differences = [seconds(_FEW + many) - seconds(_FEW) for _ in range(_SAMPLES)]
        return float(np.median(differences)) / many * 1e6


def measure(name: str, scheme: str, calls: Sequence[tuple], options: Any, is_late: Any) -> Iterator[dict[str, Any]]:
    """A cell per call (kind, rows, new tokens a row, held tokens a row); one that comes too late has no times."""
    whole = build(name, scheme, options.layers, options.tiny)
    empty = nnx.merge(*nnx.split(whole))
    for layer in empty.layers:
        layer.mlp = _Nothing()
    pairs = [[Program(model, *call[1:]) for model in (whole, empty)] for call in calls]
    with ThreadPoolExecutor(options.threads) as pool:
        compiled = list(pool.map(Program.compile, itertools.chain(*pairs)))
    for (kind, rows, new, _), *programs in zip(calls, compiled[::2], compiled[1::2], strict=True):
        cell = dict(model=name, scheme=scheme, kind=kind, rows=rows, tokens=new)
        if is_late():
            yield cell
            continue
        us, outside = (program.micros() for program in programs)
        yield cell | dict(us=us, outside_us=outside)


def row(cell: dict[str, Any], layers: int) -> str:
    head = (
        f"{cell['model']:14s} {cell['scheme']:12s} {cell['kind']:7s} rows={cell['rows']:3d} tokens={cell['tokens']:5d}"
    )
    if "us" not in cell:
        return f"{head}  left out: no time left"
    us, outside = cell["us"], cell["outside_us"]
    return (
        f"{head} {us / 1e3:9.3f} ms, {us / (cell['rows'] * cell['tokens']):9.2f} us a token, experts "
        f"{(us - outside) / layers:8.1f} us a layer, outside the experts {outside / us:5.1%}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(NAMES))
    parser.add_argument("--schemes", default="fp8_channel")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--decode", default="1,64")
    parser.add_argument("--prefill", default="2048")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=80.0)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    if options.tiny:
        options.schemes, options.decode, options.prefill, options.context = "int8_w8a8", "2", "9", 5
    began = time.monotonic()
    print(header(), f"{options.layers} layers, context {options.context}", flush=True)
    calls = [("decode", int(rows), 1, options.context) for rows in options.decode.split(",") if rows]
    calls += [("prefill", 1, int(tokens), 0) for tokens in options.prefill.split(",") if tokens]
    cells = []
    longest = 0.0  # what the slowest model took so far
    for name, scheme in itertools.product(options.models.split(","), options.schemes.split(",")):
        start = time.monotonic()
        if start + longest > began + options.seconds:
            print(f"{name:14s} {scheme:12s} left out: no time left", flush=True)
            continue
        for cell in measure(name, scheme, calls, options, lambda: time.monotonic() - began > options.seconds):
            cells.append(cell)
            print(row(cell, options.layers), flush=True)
            if options.json:
                options.json.write_text(json.dumps(dict(header=header(), layers=options.layers, cells=cells), indent=1))
        longest = max(longest, time.monotonic() - start)
    print(f"# {time.monotonic() - began:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
