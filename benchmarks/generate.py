"""Time whole decoders with quantized experts on a GPU: decode steps and prefills, and what of them is not experts.

    python benchmarks/generate.py [--cases qwen3-30b-a3b:fp8_block,mixtral-8x7b:w4a16_g128] [--layers 4]
        [--decode 1,16,64,256] [--context 1024,8192] [--prefill 512,2048,8192,32768] [--attention auto,cudnn]
        [--profile decode:1,prefill:2048] [--dense stored] [--whole] [--vocabulary N] [--pinned N] [--seconds 240]
        [--json FILE] [--routing]
    JAX_PLATFORMS=cpu python benchmarks/generate.py --tiny        # tries the script out anywhere

Random weights at the true sizes of a layer, as many layers as ``--layers`` says; embedding and head included. Weights
of attention, shared experts and dense layers are quantized like the experts where files of the format have them so
(``--dense bf16``: nowhere). decode: B rows, one new token each, a cache that holds ``--context`` tokens a row. prefill:
one row, an empty cache, logits of the last token. As in ``generate``, calls follow each other in a loop inside one
program, each fed by the one before; the time of 2 turns is taken off that of many, which leaves the device's time per
call. Prefills are also timed after a rest, as vllm_engine.py times those of vLLM: for 20 ms, or one call, in which the
GPU's clock is not held down by its power limit. "outside" is the time of the same model with its experts replaced by
nothing: attention, norms, embedding, head, and what XLA saves when the experts are gone. "launches" are the kernels of
a layer outside its experts, counted in programs with two layers of experts at least. ``--profile`` names the kernels of
a call, launched one by one, with their time from the end of the kernels before them ("alone") and from their own start,
and says how long any of them runs: what vllm_engine.py calls "kernels".
``--routing`` times nothing: it says how many experts of each layer a call's rows go to, and how many rows the busiest
one gets; on a CPU, too.

Each case is a process of its own; its programs are compiled side by side. Cells that would end after ``--seconds`` are
left out, and named; so are cells that fail, with the reason.
"""

import argparse
import dataclasses
import functools
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _arguments import duration, new_file, whole, wholes, words
from _busy import busy
from _hlo import launches, outside_the_experts
from _model_configs import MODELS
from _timing import header
from _trace import NO_COMMAND_BUFFERS, by_name, traced
from _workers import emit, lines_of
from dense_matrix import random_matrix
from flax import nnx
from moe_layer import scheme_named

from moe_jax.experts._matrix import in_best_matrix_layout
from moe_jax.models import KVCache, read_family
from moe_jax.models._compiled import merge_model, split_model
from moe_jax.models._layers import Linear
from moe_jax.models.attention._choice import ORDERS
from moe_jax.nn import QuantizedParam
from moe_jax.quantization import Scheme

CASES = "qwen3-30b-a3b:fp8_block,qwen3-30b-a3b:w4a16_g128,qwen3-30b-a3b:bf16,mixtral-8x7b:fp8_channel"
CASES += ",mixtral-8x7b:w4a16_g128,gpt-oss-20b:mxfp4_a16,gpt-oss-120b:mxfp4_a16,deepseek-v3:fp8_block"
_TINY = dict(hidden_size=256, intermediate_size=128, moe_intermediate_size=128, num_attention_heads=2, vocab_size=512)
_TINY |= dict(num_key_value_heads=2, num_experts=8, num_local_experts=8, num_experts_per_tok=2)
_FEW, _SAMPLES, _SAMPLE_S, _LONG_S, _TRACED = 2, 5, 0.05, 0.5, 3
_RESTS, _REST_S, _RESTED_S = 7, 0.1, 0.02
_DRAWN = 4  # layers
_TILED = 8  # slots of a cache, as ``generate`` makes it, are a multiple


class _Nothing(nnx.Module):
    """In place of a block of experts."""

    def __call__(self, x):
        return jnp.zeros_like(x)


def build(name: str, scheme: str, options: Any, pinned: int | None = None) -> Any:
    """A model of random weights. Layers behind the first four are copies of a like layer there.

    Embeddings have unit variance, as vllm_engine.py draws them. With small ones what attention adds to all tokens alike
    decides where they are routed: 336 of a prefill's 512 tokens of Qwen3 to one expert, 61 with these.
    """
    parsed = None if scheme == "bf16" else scheme_named(scheme)
    dtype = jnp.float32 if options.tiny else jnp.bfloat16  # some bfloat16 products do not run on a CPU

    def sizes(layers: int) -> Any:
        found = MODELS[name] | {"num_hidden_layers": layers}
        if "layer_types" in found:
            found["layer_types"] = found["layer_types"][:layers]
        found |= {"vocab_size": options.vocabulary} if options.vocabulary else {}
        return found | ({key: value for key, value in _TINY.items() if key in found} if options.tiny else {})

    def kind(layer: int) -> tuple[Any, ...]:
        special = (whole.moe_layers, whole.chunked_layers, whole.unrotated_layers)
        return whole.window_of(layer), *(layer in layers for layers in special)

    _, whole = read_family(sizes(options.layers), name)
    family, config = read_family(sizes(min(options.layers, _DRAWN)), name)
    whole, config = (dataclasses.replace(c, pinned_tokens=pinned) for c in (whole, config))
    schemes = dict.fromkeys(config.moe_layers, parsed)
    model: Any = family(config, schemes=schemes, max_seq_len=32768, dtype=dtype, rngs=nnx.Rngs(0))
    drawn = model.embed_tokens.weight.get_value()
    model.embed_tokens.weight.set_value(drawn / jnp.std(drawn, dtype=jnp.float32).astype(dtype))
    if options.dense == "stored" and parsed is not None and not scheme.startswith("mxfp4"):
        keys = iter(jax.random.split(jax.random.key(3), 16 * _DRAWN))
        routers = [block.router for block in model.moe_blocks()]
        for module in model.dense_modules().values():
            is_stored = isinstance(module, Linear) and not module.is_dequantized
            if is_stored and not any(module is router for router in routers):
                quantize(module, parsed, dtype, next(keys))
    layers, kinds = list(model.layers), [kind(layer) for layer in range(options.layers)]
    for own in kinds[len(layers) :]:
        graphdef, state = nnx.split(layers[kinds.index(own)])
        layers.append(nnx.merge(graphdef, jax.tree.map(jnp.copy, state)))
    model.layers, model.config = nnx.List(layers), whole
    return model


def quantize(module: Linear, scheme: Scheme, dtype: Any, key: Any) -> None:
    """Give a Linear random weights of this scheme, as loading leaves them."""
    matrix = random_matrix(scheme, *module.weight.shape, key)
    module.dtype = jnp.dtype(dtype)
    module.weight = QuantizedParam(in_best_matrix_layout(matrix, dtype), eager_sharding=False)


def filled_cache(config: Any, rows: int, held: int, new: int, dtype: Any) -> KVCache:
    """A cache with room for ``new`` tokens, as if ``held`` tokens a row had been seen."""
    make = functools.partial(KVCache.zeros, config, rows, -(-(held + new) // _TILED) * _TILED, dtype)
    shapes = jax.eval_shape(make)  # zeros would take the memory of a second cache
    keys = iter(jax.random.split(jax.random.key(2), len(jax.tree.leaves(shapes.layers))))
    layers = jax.tree.map(lambda a: jax.random.normal(next(keys), a.shape, jnp.float32).astype(a.dtype), shapes.layers)
    lengths, table = jnp.full((rows,), held, jnp.int32), shapes.page_table
    places: dict[str, Any] = dict(starts=jnp.zeros_like(lengths), lengths=lengths, is_damaged=lengths < 0)
    places["page_table"] = None if table is None else jnp.arange(table.size, dtype=jnp.int32).reshape(table.shape)
    return dataclasses.replace(shapes, layers=layers, **places)


def turns(structure: Any, leaves: Any, ids: Any, cache: KVCache, count: Any) -> Any:
    """``count`` calls in a row on a cache of the same length, each with ids that follow from the last one's logits.

    Returns the next ids and the cache."""
    model = merge_model(structure, leaves)

    def turn(_, state):
        ids, layers = state
        hidden, after = model.hidden_states(ids, cache=dataclasses.replace(cache, layers=layers))
        chosen = jnp.argmax(model.logits(hidden[:, -1]), axis=-1).astype(jnp.int32)
        return (ids + chosen[:, None] + 1) % model.config.vocab_size, after.layers

    ids, layers = jax.lax.fori_loop(0, count, turn, (ids, cache.layers))
    return ids, dataclasses.replace(cache, layers=layers)


class Program:
    """One cell's calls, compiled. Arguments are made when it is timed, so that only one cache exists at a time. A run
    uses the cache up, as ``generate`` does, and gives the next one."""

    _tracing = threading.Lock()  # threads that trace would wait for each other, and their times be no one's

    def __init__(self, model: Any, rows: int, new: int, held: int, is_profiled: bool):
        structure, self._leaves = split_model(model)
        self._arguments = lambda: (
            jax.random.randint(jax.random.key(1), (rows, new), 0, model.config.vocab_size),
            filled_cache(model.config, rows, held, new, model.dtype),
        )
        self._is_profiled = is_profiled
        with self._tracing:
            shapes = jax.eval_shape(self._arguments)
            began = time.monotonic()
            jitted = jax.jit(functools.partial(turns, structure), donate_argnums=2)
            self._lowered = jitted.lower(self._leaves, *shapes, np.int32(0))
            self.seconds = [time.monotonic() - began]  # of lowering, and of compiling

    def compile(self) -> "Program":
        began = time.monotonic()
        self._compiled = self._lowered.compile()
        self.seconds.append(time.monotonic() - began)
        self._open = self._lowered.compile(compiler_options=NO_COMMAND_BUFFERS) if self._is_profiled else None
        return self

    def launches(self) -> list[str]:
        """Of a layer in the middle, outside the experts."""
        layers = outside_the_experts(launches(self._compiled.as_text()))
        return [launch.name for launch in layers[len(layers) // 2]] if layers else []

    def micros(self) -> tuple[float, float]:
        """Device time of one call: of many without a pause, the median of samples with at least 10 calls in each, or as
        many as take half a second; and of few after a rest."""
        arguments = self._arguments()

        def seconds(count: int, rest: float = 0.0) -> float:
            nonlocal arguments
            time.sleep(rest)
            start = time.perf_counter()
            arguments = jax.block_until_ready(self._compiled(self._leaves, *arguments, np.int32(count)))
            return time.perf_counter() - start

        seconds(_FEW)
        one = max(seconds(_FEW) / _FEW, 1e-6)
        many = int(np.clip(_SAMPLE_S / one, np.clip(_LONG_S / one, 1, 10), 200))
        differences = [seconds(_FEW + many) - seconds(_FEW) for _ in range(_SAMPLES)]
        micros = float(np.median(differences)) / many * 1e6
        # As many as end before the power limit is felt: the first of them waits for its launch, too.
        few = max(1, round(_RESTED_S * 1e6 / micros))
        none, some = (np.median([seconds(count, _REST_S) for _ in range(_RESTS)]) for count in (0, few))
        return micros, float(some - none) / few * 1e6

    def profile(self) -> dict[str, Any]:
        """Of a call: busy_us, in which the GPU runs anything; profile, what ``by_name`` says of its kernels."""
        assert self._open is not None
        arguments = jax.block_until_ready(self._open(self._leaves, *self._arguments(), np.int32(1)))
        with traced() as found:
            jax.block_until_ready(self._open(self._leaves, *arguments, np.int32(_TRACED)))
        spans = ((kernel.start, kernel.start + kernel.duration) for kernel in found)
        return dict(busy_us=busy(spans) / _TRACED, profile=by_name(found, _TRACED))


def calls_of(options: Any) -> list[tuple[str, int, int, int]]:
    """(kind, rows, new tokens a row, held tokens a row) of each cell."""
    calls = [("decode", rows, 1, held) for held in options.context for rows in options.decode]
    return calls + [("prefill", 1, tokens, 0) for tokens in options.prefill]


def label(call: tuple[str, int, int, int]) -> str:
    """What ``--profile`` calls it."""
    return f"{call[0]}:{call[1] if call[0] == 'decode' else call[2]}"


def checked_case(text: str) -> str:
    """MODEL:FORMAT, both known."""
    name, _, scheme = text.partition(":")
    if name not in MODELS:
        raise argparse.ArgumentTypeError(f"{text!r}, expected MODEL:FORMAT, MODEL one of {', '.join(MODELS)}")
    try:
        scheme_named(scheme)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None
    return text


def cases(text: str) -> list[str]:
    return [checked_case(case) for case in text.split(",")]


def measure(name: str, scheme: str, options: Any, say: Any) -> None:
    """Say a cell for each way to attend and each call."""
    began = time.monotonic()
    whole = build(name, scheme, options, options.pinned or None)
    if options.routing:
        for kind, rows, new, held in calls_of(options):
            ids = jax.random.randint(jax.random.key(1), (rows, new), 0, whole.config.vocab_size)
            cache = filled_cache(whole.config, rows, held, new, whole.dtype)
            stats = whole.hidden_states(ids, cache=cache, return_stats=True)[-1]
            if stats is None:
                raise ValueError(f"--layers {options.layers} --routing: {name} has no layer of experts among these")
            load = np.asarray(stats.load)
            cell = dict(model=name, scheme=scheme, attention="", kind=kind, rows=rows, tokens=new, held=held)
            say(cell | dict(hit=(load > 0).sum(1).tolist(), busiest=load.max(1).tolist(), of=int(load.sum(1)[0])))
        return
    models = [whole, nnx.merge(*nnx.split(whole))][: 1 if options.whole else 2]
    for layer in models[1].layers if len(models) == 2 else ():
        layer.mlp = _Nothing()
    say(dict(model=name, scheme=scheme, built_s=round(time.monotonic() - began, 1)))
    cells = [(attention, call) for attention in options.attention for call in calls_of(options)]
    wanted = set(options.profile.split(","))

    def compiled(cell: tuple[str, tuple[str, int, int, int]]) -> Any:
        attention, call = cell
        is_profiled = label(call) in wanted
        try:
            own = [nnx.merge(*nnx.split(model)) for model in models]
            for model in own:
                for layer in model.layers:
                    layer.self_attn.implementation = attention
            pair = [Program(model, *call[1:], is_profiled and i == 0) for i, model in enumerate(own)]
            return [program.compile() for program in pair]
        except Exception as error:  # one cell must not end the run
            return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"

    with ThreadPoolExecutor(options.threads) as pool:
        pairs = list(pool.map(compiled, cells))  # all of them first: compiling runs kernels to choose among them
    for (attention, (kind, rows, new, held)), pair in zip(cells, pairs, strict=True):
        cell = dict(model=name, scheme=scheme, attention=attention, kind=kind, rows=rows, tokens=new, held=held)
        if isinstance(pair, str):
            say(cell | dict(failed=pair))
            continue
        if time.monotonic() - began > options.seconds:
            say(cell)
            continue
        try:
            (us, rested), *outside = (program.micros() for program in pair)
            cell |= dict(
                us=us,
                rested_us=rested if kind == "prefill" else None,
                outside_us=outside[0][0] if outside else None,
                launches=pair[0].launches(),
                compile_s=pair[0].seconds,
            )
            say(cell | (pair[0].profile() if pair[0]._is_profiled else {}))
        except Exception as error:
            say(cell | dict(failed=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"))


def rows_of(cell: dict[str, Any], layers: int) -> list[str]:
    if "built_s" in cell:
        return [f"{cell['model']} {cell['scheme']}: weights made in {cell['built_s']} s"]
    head = f"{cell['model']:14s} {cell['scheme']:12s} {cell['attention']:6s} {cell['kind']:7s} rows={cell['rows']:3d} "
    head += f"tokens={cell['tokens']:5d} held={cell['held']:5d}"
    if "busiest" in cell:
        return [f"{head}  {cell['of']} rows, by layer: to {cell['hit']} experts, {cell['busiest']} to the busiest"]
    if "us" not in cell:
        return [f"{head}  left out: {cell.get('failed', 'no time left')}"]
    us, outside, seconds = cell["us"], cell["outside_us"], " + ".join(f"{s:.1f}" for s in cell["compile_s"])
    apart = ""
    if outside is not None:
        apart = f" experts {(us - outside) / layers:8.1f} us, outside {outside / layers:8.1f} us ({outside / us:5.1%}),"
    rested = "" if cell["rested_us"] is None else f" ({cell['rested_us'] / 1e3:.3f} after a rest)"
    lines = [
        f"{head} {us / 1e3:9.3f} ms{rested}, {us / (cell['rows'] * cell['tokens']):9.2f} us a token; a layer:{apart} "
        f"{len(cell['launches']) or 'uncounted'} launches; lowered + compiled in {seconds} s"
    ]
    if "profile" in cell:
        lines += [f"    {' '.join(cell['launches'])}", f"    {cell['busy_us'] / 1e3:9.3f} ms of kernels"]
        lines += [
            f"    {alone:9.1f} us alone, {us:9.1f} us, {count:6.1f} x  {name}"
            for name, us, alone, count in cell["profile"][:30]
        ]
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=cases, help=f"default: {CASES}; with --tiny its first one")
    parser.add_argument("--layers", type=whole(1), default=4)
    parser.add_argument("--decode", type=wholes(1, may_be_empty=True), default="1,16,64,256")
    parser.add_argument("--context", type=wholes(0, may_be_empty=True), default="1024,8192")
    parser.add_argument("--prefill", type=wholes(1, may_be_empty=True), default="512,2048,8192,32768")
    parser.add_argument("--attention", type=words(ORDERS), default="auto")
    parser.add_argument("--profile", default="", help="decode:ROWS and prefill:TOKENS, with commas between them")
    parser.add_argument("--dense", default="stored", choices=("stored", "bf16"))
    parser.add_argument("--vocabulary", type=whole(0), default=0, help="another size of it, such as vllm_engine.py's")
    parser.add_argument("--pinned", type=whole(0), default=0, help="pinned_tokens of the model; 0 for none")
    parser.add_argument("--whole", action="store_true", help="time no model without experts")
    parser.add_argument("--routing", action="store_true", help="say where rows are routed, and time nothing")
    parser.add_argument("--seconds", type=duration, default=240.0)
    parser.add_argument("--threads", type=whole(1), default=8)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=new_file)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.tiny:
        options.decode, options.prefill, options.context = [2], [9], [5]
    options.cases = options.cases or cases(CASES)[: 1 if options.tiny else None]
    calls = calls_of(options)
    if not calls:
        parser.error("no call to time: --prefill is empty, and --decode or --context")
    known = sorted({label(call) for call in calls})
    if unknown := [name for name in options.profile.split(",") if name and name not in known]:
        parser.error(f"--profile: {unknown[0]!r} is none of the calls, {', '.join(known)}")
    if options.worker:
        measure(*options.cases[0].split(":"), options, lambda cell: emit(json.dumps(cell)))
        return 0
    began = time.monotonic()
    print(f"# {options.layers} layers" + (f", pinned_tokens={options.pinned}" if options.pinned else ""), flush=True)
    cells: list[dict[str, Any]] = []
    has_failed = False
    for case in options.cases:
        left = options.seconds - (time.monotonic() - began)
        if left <= 0:
            print(f"{case} left out: no time left", flush=True)
            continue
        arguments = [f"--layers={options.layers}"]
        arguments += [
            f"--{key}={','.join(map(str, getattr(options, key)))}"
            for key in ("decode", "context", "prefill", "attention")
        ]
        arguments += [f"--profile={options.profile}", f"--dense={options.dense}", f"--threads={options.threads}"]
        arguments += [f"--vocabulary={options.vocabulary}", f"--pinned={options.pinned}"]
        arguments += [f"--{flag}" for flag in ("tiny", "whole", "routing") if getattr(options, flag)]
        arguments += [f"--seconds={left}", "--worker", f"--cases={case}"]
        # One process at a time: it takes the GPU's memory at once, unlike those of the other scripts.
        for line in lines_of([sys.executable, __file__, *arguments], left + 30, os.environ):
            if line.startswith("WRONG"):
                has_failed = True
                print(line, flush=True)
                continue
            cell = json.loads(line)
            cells.append(cell)
            print("\n".join(rows_of(cell, options.layers)), flush=True)
            if options.json:
                options.json.write_text(json.dumps(dict(layers=options.layers, cells=cells), indent=1))
    print(f"{header()}, {time.monotonic() - began:.0f} s", flush=True)
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
