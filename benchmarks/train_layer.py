"""Forward and backward of a layer's experts on a GPU: ours beside torch's grouped_mm and tokamax's ragged_dot.

    python benchmarks/train_layer.py [--models qwen3-30b-a3b,mixtral-8x7b] [--tokens 4096,16384] [--seconds 240]
    [--sides torch,ours,tokamax] [--keep-hidden] [--frozen w4a16_g128,...] [--kernels] [--trace] [--out FILE]

All get the same numbers, made on the GPU from the index of each element, and the same experts and router weights of
each token. The gradient is that of a sum with random weights, by x, by the router weights and by both matrices.

torch     what transformers' experts implementation "grouped_mm" does: rows sorted by expert, torch._grouped_mm, the
          activation and the sum in eager operations.
tokamax   rows sorted by expert, tokamax.ragged_dot with tokamax's own gradient, the rest left to XLA, in one program.
          Its Hopper kernels (implementation "mosaic_gpu") take weights as (experts, K, N). Each product runs in the
          fastest of a few configurations, see _tokamax_layer.py. Peak memory is XLA's plan of the program, so that
          what timing the configurations took is not in it. On a CPU: implementation "xla".

Samples of all results are compared with those of the first side that has any; NaN agrees with nothing.

Each side runs in a process of its own per model. It may take 1.5 times an equal part of the time that is left, so that
one slow side cannot take the time of all, and does not start a cell for which its time is too short by the time that
the cell before took. What was left out has a line that says so; so has a side that fails, with its error. Every line is
written as soon as its cell is done.

Reported per cell: milliseconds of forward, and of forward with backward, tokens per second of the latter, TFLOP/s (9
products' worth, whatever is computed twice), and peak memory. These are bursts after a rest. sustained_ms is a step of
two seconds without one, with what nvidia-smi saw meanwhile: medians of watts and of the SM clock in MHz, and
at_power_cap, the fraction of samples in which the power cap lowered the clock. --keep-hidden adds ours_kept, our layer
with MoEConfig.keep_hidden, whose forward pass alone is that of ours: nobody differentiates it. It does the same for
each scheme of --frozen, and for these alone where --sides is empty. --frozen adds our layer with quantized weights of
these schemes, random ones, where x and the router weights have gradients: its TFLOP/s count 6 products, and
backward_per_forward is the time of the backward pass as a multiple of the forward's; MOE_JAX_PACKED_GRADIENT=0 in the
environment has quantized weights dequantized first. --trace adds the microseconds of each of our GPU kernels of a step
in their order, by JAX's profiler. --kernels times the products of the gradient one by one, with several configurations.
FILE gets a JSON line per cell.
"""

import argparse
import functools
import json
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from _arguments import duration, new_file, wholes, words
from _power import sustained

# E, top_k, H, I. "tiny" tries the script out, on a CPU too.
SIZES = {"qwen3-30b-a3b": (128, 8, 2048, 768), "mixtral-8x7b": (8, 2, 4096, 14336), "tiny": (8, 2, 128, 64)}
SAMPLE = 64  # rows and columns of each result that are compared
SEEDS = dict(x=1, g=2, w13=3, w2=4)
BURSTS, BURST_S, REST_S = 3, 0.15, 0.1
SUSTAINED_S = 2.0  # nvidia-smi starts late, and the clock settles within a second
LEAST_S = 12.0  # with less time left no process is started
KEPT = "_kept"  # behind a side whose MoEConfig.keep_hidden is set
SIDES = ("torch", "ours", "ours" + KEPT, "tokamax")
REPORTED = 3  # the exit code of a process that has written a line for each of its errors


def hashed(index: Any, seed: int) -> Any:
    """int32 indices -> values in [-1, 1) with 16 bits, float32 by ``/ 32768 - 1``; in torch and in jax alike."""
    h = index * 1664525 + (seed * 40503 + 12345)
    for shift, mask, factor in ((15, 0x1FFFF, 739982445), (12, 0xFFFFF, 695872825)):
        h = (h ^ ((h >> shift) & mask)) * factor
    return ((h ^ ((h >> 15) & 0x1FFFF)) >> 8) & 0xFFFF


def seconds_of(run: Callable[[int], None]) -> float:
    """Median over bursts of one call among several in a row. run: makes so many calls and waits for them."""
    run(2)
    start = time.perf_counter()
    run(2)
    calls = max(2, int(BURST_S / ((time.perf_counter() - start) / 2)))
    found = []
    for _ in range(BURSTS):
        time.sleep(REST_S)
        start = time.perf_counter()
        run(calls)
        found.append((time.perf_counter() - start) / calls)
    return float(np.median(found))


def samples(results: dict[str, Any], to_host: Callable[[Any], Any] = np.asarray) -> dict[str, np.ndarray]:
    """Rows and columns from the first to the last of each result, evenly spaced; of a matrix the first and the last
    expert's. to_host: from what was chosen to what NumPy takes.
    """

    def chosen(value: Any) -> np.ndarray:
        rows, columns = (np.linspace(0, n - 1, min(n, SAMPLE)).astype(int) for n in value.shape[-2:])
        whole = value[:: max(1, value.shape[0] - 1)] if value.ndim == 3 else value
        return np.asarray(to_host(whole[..., rows, :][..., columns]), np.float32)

    return {name: chosen(value) for name, value in results.items()}


def figures(
    seconds: float, forward: float, tokens: int, sizes: tuple[int, ...], peak: float, products: int = 9
) -> dict[str, Any]:
    _, top_k, hidden, intermediate = sizes
    flops = products * 2 * tokens * top_k * hidden * intermediate
    return dict(
        forward_ms=round(forward * 1e3, 3),
        step_ms=round(seconds * 1e3, 3),
        tokens_per_s=round(tokens / seconds),
        tflops=round(flops / seconds / 1e12, 1),
        peak_gib=round(peak / 2**30, 2),
        backward_per_forward=round(seconds / forward - 1, 2),
    )


# -- ours -------------------------------------------------------------------------------------------------------------


def calls(function: Callable[..., Any], *arguments: Any) -> Callable[[int], None]:
    import jax

    def run(count: int) -> None:
        out = None
        for _ in range(count):
            out = function(*arguments)
        jax.block_until_ready(out)

    return run


def programs_of(experts_of: Callable[..., Any], g: Any, arguments: tuple[Any, ...]) -> tuple[Any, Any]:
    """The forward pass, compiled; and (g, *arguments) -> its output with the gradients by all arguments, lowered."""
    import jax

    def step(g, *arguments):
        y, pull = jax.vjp(experts_of, *arguments)
        return dict(zip(("y", "x", "topk_weights", "w13", "w2"), (y, *pull(g)), strict=True))

    return jax.jit(experts_of).lower(*arguments).compile(), jax.jit(step).lower(g, *arguments)


def values(shape: tuple[int, ...], seed: int, scale: float) -> Any:
    import jax
    import jax.numpy as jnp

    def made() -> Any:
        index = jax.lax.iota(jnp.int32, int(np.prod(shape)))
        return ((hashed(index, seed) / jnp.float32(32768) - 1) * scale).astype(jnp.bfloat16).reshape(shape)

    return jax.jit(made)()


def run_ours(
    model: str, tokens: int, routing: dict[str, np.ndarray], *, traces: bool, keep_hidden: bool = False
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    import jax
    import jax.numpy as jnp
    from _trace import NO_COMMAND_BUFFERS, per_call, traced

    import moe_jax
    from moe_jax.quantization import ExpertWeights, QuantizedTensor

    sizes = experts, _, hidden, intermediate = SIZES[model]
    by = "hopper" if jax.default_backend() == "gpu" else "xla"
    config = moe_jax.MoEConfig(*sizes, implementation=(by,), keep_hidden=keep_hidden)
    w13 = values((experts, 2, intermediate, hidden), SEEDS["w13"], 1 / 32)
    w2 = values((experts, hidden, intermediate), SEEDS["w2"], 1 / 32)
    x, g = (values((tokens, hidden), SEEDS[name], 1.0) for name in ("x", "g"))
    topk_weights, ids = (jnp.asarray(routing[name]) for name in ("topk_weights", "topk_ids"))

    def experts_of(x, topk_weights, w13, w2):
        weights = ExpertWeights(QuantizedTensor(w13), QuantizedTensor(w2))
        return moe_jax.fused_experts(x, topk_weights, ids, weights, config)

    arguments = (x, topk_weights, w13, w2)
    forward, step = programs_of(experts_of, g, arguments)
    both = step.compile()
    found = both(g, *arguments)
    found["w13"] = found["w13"].reshape(experts, -1, hidden)
    compared = samples(found)
    del found

    seconds = seconds_of(calls(both, g, *arguments))
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
    cell = figures(seconds, seconds_of(calls(forward, *arguments)), tokens, sizes, peak)
    cell |= sustained(calls(both, g, *arguments), SUSTAINED_S, seconds)
    cell["device"] = jax.devices()[0].device_kind
    if traces:
        apart = step.compile(compiler_options=NO_COMMAND_BUFFERS)
        calls(apart, g, *arguments)(2)
        with traced() as kernels:
            calls(apart, g, *arguments)(3)
        cell["kernels"] = per_call(kernels, 3)
    return cell, compared


def run_frozen(
    scheme: str, model: str, tokens: int, routing: dict[str, np.ndarray], *, traces: bool, keep_hidden: bool = False
) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp
    from _trace import NO_COMMAND_BUFFERS, per_call, traced

    import moe_jax
    from moe_jax.experts.hopper._kernel_layout import layout_refusal, to_kernel_layout
    from moe_jax.quantization import method_for

    sizes = _, _, hidden, _ = SIZES[model]
    scheme_of = moe_jax.Scheme.parse(scheme)
    config = moe_jax.MoEConfig(*sizes, scheme=scheme_of, implementation=("hopper",), keep_hidden=keep_hidden)
    abstract = method_for(config.scheme).abstract_weights(config)
    if layout_refusal(abstract, config) is None:
        abstract = jax.eval_shape(functools.partial(to_kernel_layout, config=config), abstract)

    def leaf(like: Any) -> Any:
        numbers = hashed(jax.lax.iota(jnp.int32, like.size), 5).reshape(like.shape)
        if like.dtype == jnp.int32:
            return numbers * 65537
        if like.dtype.itemsize == 1 and like.size > 2**20:  # no code of e4m3 is NaN: they are less than 2
            return jax.lax.bitcast_convert_type((numbers & 0xBF).astype(jnp.uint8), like.dtype)
        return jnp.full(like.shape, 1 / 64 if jnp.issubdtype(like.dtype, jnp.floating) else 120, like.dtype)

    weights = jax.jit(lambda: jax.tree.map(leaf, abstract))()
    x, g = (values((tokens, hidden), SEEDS[name], 1.0) for name in ("x", "g"))
    topk_weights, ids = (jnp.asarray(routing[name]) for name in ("topk_weights", "topk_ids"))

    def experts_of(x, topk_weights, weights):
        return moe_jax.fused_experts(x, topk_weights, ids, weights, config)

    def step(g, x, topk_weights, weights):
        y, pull = jax.vjp(lambda x, topk_weights: experts_of(x, topk_weights, weights), x, topk_weights)
        return y, pull(g)

    arguments = (x, topk_weights, weights)
    forward = jax.jit(experts_of).lower(*arguments).compile()
    lowered = jax.jit(step).lower(g, *arguments)
    both = lowered.compile()
    seconds = seconds_of(calls(both, g, *arguments))
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
    cell = figures(seconds, seconds_of(calls(forward, *arguments)), tokens, sizes, peak, products=6)
    cell |= sustained(calls(both, g, *arguments), SUSTAINED_S, seconds)
    cell |= dict(weights_gib=round(weights.nbytes() / 2**30, 2), device=jax.devices()[0].device_kind)
    if traces:
        apart = lowered.compile(compiler_options=NO_COMMAND_BUFFERS)
        calls(apart, g, *arguments)(2)
        with traced() as kernels:
            calls(apart, g, *arguments)(3)
        cell["kernels"] = per_call(kernels, 3)
    return cell


# -- tokamax ----------------------------------------------------------------------------------------------------------


def run_tokamax(
    model: str, tokens: int, routing: dict[str, np.ndarray], known: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """known: configurations of each matrix's products, the best first; filled for the next number of tokens."""
    import jax
    import jax.numpy as jnp
    from _tokamax_layer import experts_layer, import_tokamax, tuned_product

    version = import_tokamax().__version__
    sizes = experts, top_k, hidden, intermediate = SIZES[model]
    transposed = jax.jit(lambda w: w.mT)
    w13 = transposed(values((experts, 2 * intermediate, hidden), SEEDS["w13"], 1 / 32))
    w2 = transposed(values((experts, hidden, intermediate), SEEDS["w2"], 1 / 32))
    x, g = (values((tokens, hidden), SEEDS[name], 1.0) for name in ("x", "g"))
    topk_weights, ids = (jnp.asarray(routing[name]) for name in ("topk_weights", "topk_ids"))
    products: list[Any] = ["xla", "xla"]
    if jax.default_backend() == "gpu":
        group_sizes = jnp.bincount(ids.reshape(-1), length=experts).astype(jnp.int32)
        for index, (name, w) in enumerate((("w13", w13), ("w2", w2))):
            rows = jnp.ones((tokens * top_k, w.shape[1]), jnp.bfloat16)
            product, known[name] = tuned_product(rows, w, group_sizes, known.get(name))
            products[index] = (product,)

    def experts_of(x, topk_weights, w13, w2):
        return experts_layer(x, topk_weights, ids, w13, w2, products)

    arguments = (x, topk_weights, w13, w2)
    forward, step = programs_of(experts_of, g, arguments)
    both = step.compile()
    found = both(g, *arguments)
    compared = samples(found | {name: found[name].mT for name in ("w13", "w2")})
    del found
    memory: Any = both.memory_analysis()
    peak = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    seconds = seconds_of(calls(both, g, *arguments))
    cell = figures(seconds, seconds_of(calls(forward, *arguments)), tokens, sizes, peak)
    cell |= sustained(calls(both, g, *arguments), SUSTAINED_S, seconds)
    best = {name: {product: forms[0] for product, forms in by_product.items()} for name, by_product in known.items()}
    return cell | dict(device=jax.devices()[0].device_kind, tokamax=version, configurations=best), compared


# -- torch ------------------------------------------------------------------------------------------------------------


def run_torch(model: str, tokens: int, routing: dict[str, np.ndarray]) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    grouped_mm: Any = getattr(torch, "_grouped_mm")  # noqa: B009  a private name, which the types do not have
    sizes = experts, top_k, hidden, intermediate = SIZES[model]

    def values(shape, seed, scale):
        out = torch.empty(int(np.prod(shape)), dtype=torch.bfloat16, device=device)
        for start in range(0, out.numel(), 1 << 26):
            stop = min(start + (1 << 26), out.numel())
            index = torch.arange(start, stop, dtype=torch.int32, device=device)
            out[start:stop] = (hashed(index, seed) / 32768 - 1) * scale
        return out.reshape(shape)

    gate_up = values((experts, 2 * intermediate, hidden), SEEDS["w13"], 1 / 32).requires_grad_()
    down = values((experts, hidden, intermediate), SEEDS["w2"], 1 / 32).requires_grad_()
    x = values((tokens, hidden), SEEDS["x"], 1.0).requires_grad_()
    g = values((tokens, hidden), SEEDS["g"], 1.0)
    # In the layer's dtype, as routers of transformers' models give them.
    topk_weights = torch.tensor(routing["topk_weights"], device=device).to(torch.bfloat16).requires_grad_()
    ids = torch.tensor(routing["topk_ids"], device=device).long()
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def forward():
        sorted_ids, order = torch.sort(ids.reshape(-1))
        rows = x[order // top_k]
        numbers = sorted_ids.int() if device == "cuda" else sorted_ids.float()  # each device counts one of them alone
        counts = torch.histc(numbers, bins=experts, min=0, max=experts - 1)
        ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
        gate, up = grouped_mm(rows, gate_up.transpose(-2, -1), offs=ends).chunk(2, dim=-1)
        out = grouped_mm(torch.nn.functional.silu(gate) * up, down.transpose(-2, -1), offs=ends)
        out = out * topk_weights.reshape(-1)[order].unsqueeze(-1)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.numel(), device=device)
        return out[back].view(tokens, top_k, hidden).sum(dim=1).to(x.dtype)

    leaves = (x, topk_weights, gate_up, down)

    def step():
        y = forward()
        return y, torch.autograd.grad(y, leaves, g)

    y, (x_bar, topk_bar, gate_up_bar, down_bar) = step()
    named = dict(y=y.detach(), x=x_bar, topk_weights=topk_bar, w13=gate_up_bar, w2=down_bar)
    compared = samples(named, lambda value: value.float().cpu())
    del y, x_bar, topk_bar, gate_up_bar, down_bar, named

    def calls(function: Callable[[], Any]) -> Callable[[int], None]:
        def run(count: int) -> None:
            for _ in range(count):
                function()
            wait()

        return run

    seconds = seconds_of(calls(step))
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    with torch.no_grad():
        forward_seconds = seconds_of(calls(forward))
    cell: dict[str, Any] = figures(seconds, forward_seconds, tokens, sizes, peak)
    cell |= sustained(calls(step), SUSTAINED_S, seconds)
    return cell | dict(
        device=torch.cuda.get_device_name() if device == "cuda" else "cpu", torch=torch.__version__
    ), compared


# -- products of the gradient, one by one -----------------------------------------------------------------------------


def run_kernels(model: str, tokens: int, routing: dict[str, np.ndarray], report: Callable[[dict], None]) -> None:
    import dataclasses

    import jax
    import jax.numpy as jnp

    from pallas_kernels.align import align
    from pallas_kernels.common.activations import Activation
    from pallas_kernels.grouped_gemm import GemmConfig, GemmDesc, candidates, grouped_gemm
    from pallas_kernels.grouped_gemm.dgrad import candidates as dgrad_candidates
    from pallas_kernels.grouped_gemm.dgrad import describe_dgrad, grouped_dgrad, grouped_gemm_widened, plain_weights
    from pallas_kernels.grouped_gemm.packed import PackedFormat, PackedWeights
    from pallas_kernels.grouped_gemm.wgrad import WgradDesc, grouped_wgrad
    from pallas_kernels.grouped_gemm.wgrad import candidates as wgrad_candidates
    from pallas_kernels.tuning.timing import least_of_bursts

    experts, top_k, hidden, intermediate = SIZES[model]
    block_m = 128
    tiles = align(jnp.asarray(routing["topk_ids"]), experts, block_m)
    rows = tiles.tile_expert.size * block_m
    padded = -(-tiles.group_sizes // block_m) * block_m
    bounds = ((jnp.cumsum(padded) - padded).astype(jnp.int32), tiles.group_sizes)
    normal = functools.partial(jax.random.normal, jax.random.key(0), dtype=jnp.bfloat16)
    wide, narrow = normal((rows, 2 * intermediate)), normal((rows, hidden))
    half = wide[:, :intermediate]

    def timed(name: str, k: int, n: int, run: Callable[..., Any], *arguments: Any, config: Any) -> None:
        call = jax.jit(functools.partial(run, config=config, implementation="hopper"))
        try:
            seconds = least_of_bursts(lambda: call(*arguments))
        except Exception as error:  # one configuration that fails must not hide the others
            report(dict(kernel=name, model=model, tokens=tokens, config=str(config), error=str(error)[:200]))
            return
        tflops = 2 * tokens * top_k * k * n / seconds / 1e12
        form = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)[:4]}
        report(
            dict(kernel=name, model=model, tokens=tokens, us=round(seconds * 1e6, 1), tflops=round(tflops, 1), **form)
        )

    for name, dy, x in (("w13", wide, narrow), ("w2", narrow, half)):
        n, k = dy.shape[1], x.shape[1]
        found = wgrad_candidates(WgradDesc(rows=rows, n=n, k=k, num_experts=experts), 132)
        for config in [c for c in found if c.block_k >= 128 and (c.block_n == 128 or c.block_k == 256)]:
            timed(f"gradient of {name}", k, n, grouped_wgrad, dy, x, *bounds, config=config)
    for name, x, n, transposes in (
        ("gate and up", narrow, 2 * intermediate, False),
        ("g W2", narrow, intermediate, True),
        ("cotangent of x", wide, hidden, True),
    ):
        k = x.shape[1]
        w = normal((experts, k, n) if transposes else (experts, n, k))
        desc = GemmDesc(rows=rows, n=n, k=k, num_experts=experts, dtype="bfloat16", transposes_w=transposes)
        configs = [c for c in candidates(desc, block_m, 132) if c.block_n >= 128 and not c.swap_ab]
        if not transposes:
            configs += [dataclasses.replace(configs[0], cluster=2)]
        configs += [dataclasses.replace(configs[0], raster_group_m=16), GemmConfig(128, 192, 4)]
        for config in configs:
            run = functools.partial(grouped_gemm, transposes_w=transposes)
            timed(name, k, n, run, x, w, tiles.tile_expert, tiles.num_tiles, config=config)
        del w
    fmt = PackedFormat("int4", scale="group", group_size=128)
    for name, dy, k, activation in (
        ("g W2, packed", narrow, intermediate, None),
        ("g W2 and the derivative, packed", narrow, intermediate, Activation("silu")),
        ("cotangent of x, packed", wide, hidden, None),
    ):
        n = dy.shape[1]
        words = jax.random.bits(jax.random.key(1), (experts, n // 64, 1, k // 64, *fmt.block_shape), "uint32")
        scale = jnp.full((experts, n // 64, 1, k // 128, 64), 1 / 64, jnp.float32)
        packed = PackedWeights(words.astype(jnp.int32), scale, None, None, fmt, n, k)
        desc = describe_dgrad(rows, packed, activation, has_tile_rows=True)
        given = dict(tile_rows=tiles.tile_rows)
        if activation is not None:
            given["before"] = wide
        configs = dgrad_candidates(desc, block_m, 132)
        configs += [dataclasses.replace(configs[0], raster_group_m=group) for group in (8, 32)]
        configs += [dataclasses.replace(configs[0], num_stages=3)]

        def pull(dy, packed, given, activation=activation, **options):
            return grouped_dgrad(
                dy, packed, tiles.tile_expert, tiles.num_tiles, activation=activation, **given, **options
            )

        for config in configs:
            timed(name, n, k, pull, dy, packed, given, config=config)
        del words, packed
    for name, x, width, activation, contracts_k in (
        ("gate and up, FP8 blocks", narrow, 2 * intermediate, None, True),
        ("g W2 and the derivative, FP8 blocks", narrow, intermediate, Activation("silu"), False),
        ("cotangent of x, FP8 blocks", wide, hidden, None, False),
    ):
        depth = x.shape[1]
        n, k = (width, depth) if contracts_k else (depth, width)
        codes = jax.random.bits(jax.random.key(1), (experts, n, k), "uint8") & 0xBF  # e4m3 less than 2
        codes = jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn)
        plain = plain_weights(codes, jnp.full((experts, n // 128, k // 128), 1 / 64), "bfloat16")
        desc = describe_dgrad(rows, plain, activation, has_tile_rows=True, contracts_k=contracts_k)
        given = dict(tile_rows=tiles.tile_rows)
        if activation is not None:
            given["before"] = wide
        by = grouped_gemm_widened if contracts_k else functools.partial(grouped_dgrad, activation=activation)

        def product(x, plain, given, by=by, **options):
            return by(x, plain, tiles.tile_expert, tiles.num_tiles, **given, **options)

        for config in dgrad_candidates(desc, block_m, 132):
            timed(name, depth, width, product, x, plain, given, config=config)
        del codes, plain


# -- the comparison ---------------------------------------------------------------------------------------------------


def routing_of(model: str, tokens: int) -> dict[str, np.ndarray]:
    """Uniform: the experts of each token, ascending, and weights that sum to 1."""
    experts, top_k, *_ = SIZES[model]
    rng = np.random.default_rng(tokens)
    ids = np.argpartition(rng.random((tokens, experts), np.float32), top_k, axis=1)[:, :top_k]
    weights = rng.random((tokens, top_k), np.float32) + 0.1
    weights = weights / weights.sum(axis=1, keepdims=True)
    return dict(topk_weights=weights.astype(np.float32), topk_ids=np.sort(ids, axis=1).astype(np.int32))


def child(side: str, model: str, counts: list[int], folder: Path, *, seconds: float, traces: bool) -> int:
    """Cells of one side, each printed as a JSON line; samples of its results go to the folder."""

    def report(cell: dict) -> None:
        print(json.dumps(cell), flush=True)

    until, took, code = time.time() + seconds, 0.0, 0
    known: dict[str, Any] = {}
    for tokens in counts:
        start = time.time()
        if until - start < took:
            report(dict(side=side, model=model, tokens=tokens, left_out=f"{until - start:.0f} s are left"))
            continue
        try:
            routing = routing_of(model, tokens)
            compared = None
            if side == "kernels":
                run_kernels(model, tokens, routing, report)
                continue
            own, keep_hidden = side.removesuffix(KEPT), side.endswith(KEPT)
            if side == "torch":
                cell, compared = run_torch(model, tokens, routing)
            elif own == "ours":
                cell, compared = run_ours(model, tokens, routing, traces=traces, keep_hidden=keep_hidden)
            elif side == "tokamax":
                cell, compared = run_tokamax(model, tokens, routing, known)
            else:
                cell = run_frozen(own, model, tokens, routing, traces=traces, keep_hidden=keep_hidden)
            if compared is not None:
                np.savez(folder / f"{side}_{model}_{tokens}.npz", allow_pickle=False, **compared)
            report(dict(side=side, model=model, tokens=tokens, **cell))
        except Exception as error:  # one cell must not take the others with it
            traceback.print_exc()
            why = " ".join(f"{type(error).__name__}: {error}".split())
            report(dict(side=side, model=model, tokens=tokens, error=why[:500]))
            code = REPORTED
            if isinstance(error, ImportError):
                break  # no other cell would run
        took = time.time() - start
    return code


def run_child(command: list[str], seconds: float, report: Callable[[str], None]) -> tuple[bool, str]:
    """Passes on each JSON line of a process as it comes. Returns whether all went well, and an error without a line."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        late = threading.Timer(seconds, run.kill)
        late.start()
        for line in run.stdout or ():
            if line.startswith("{"):
                report(line.rstrip())
        code = run.wait()
        over = not late.is_alive()
        late.cancel()
    if over and code:
        return False, f"ended after {seconds:.0f} s"
    return code == 0, "" if code in (0, REPORTED) else f"ended with code {code}"


def differences(folder: Path, model: str, tokens: int, side: str, beside: str) -> dict[str, float]:
    """The largest difference of each result, as a fraction of the largest value ``beside`` has."""
    ours, theirs = (np.load(folder / f"{name}_{model}_{tokens}.npz") for name in (side, beside))
    return {
        name: round(float(np.abs(ours[name] - theirs[name]).max() / np.abs(theirs[name]).max()), 5) for name in theirs
    }


def check_schemes(names: list[str], parser: argparse.ArgumentParser) -> None:
    from moe_jax import Scheme  # here: a process that measures torch alone does without

    for name in names:
        try:
            Scheme.parse(name)
        except ValueError as error:
            parser.error(f"--frozen: {error}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=words(SIZES), default="qwen3-30b-a3b,mixtral-8x7b")
    parser.add_argument("--tokens", type=wholes(1), default="4096,16384")
    parser.add_argument("--seconds", type=duration, default=240, help="when to end")
    parser.add_argument("--sides", default="torch,ours", help=f"of {', '.join(SIDES)}; may be empty beside --frozen")
    parser.add_argument("--keep-hidden", action="store_true", help="add ours_kept, and the same of --frozen")
    parser.add_argument("--frozen", default="", help="schemes of quantized weights")
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--out", type=new_file, help="file that a JSON line per cell is appended to")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    models, counts = args.models, args.tokens
    if args.child:
        return child(args.child, models[0], counts, args.folder, seconds=args.seconds, traces=args.trace)
    until = time.time() + args.seconds
    compared = [name for name in args.sides.split(",") if name]
    if args.keep_hidden and compared and "ours" + KEPT not in compared:
        compared.append("ours" + KEPT)
    if unknown := [name for name in compared if name not in SIDES]:
        parser.error(f"--sides {unknown[0]!r} is none of {', '.join(SIDES)}")
    frozen = [name for name in args.frozen.split(",") if name]
    if not (compared or frozen or args.kernels):
        parser.error("--sides is empty, and so is --frozen; nothing to measure")
    if frozen:
        check_schemes(frozen, parser)
        frozen += [name + KEPT for name in frozen if args.keep_hidden]

    def report(line: str) -> None:
        print(line, flush=True)
        if args.out:
            with args.out.open("a") as file:
                file.write(line + "\n")

    failed = False
    sides = ["kernels"] if args.kernels else compared + frozen
    waiting = len(models) * len(sides)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for model in models:
            for side in sides:
                left = until - time.time()
                share = left / waiting * (1.5 if waiting > 1 else 1)
                waiting -= 1
                if left < LEAST_S:
                    report(json.dumps(dict(side=side, model=model, left_out=f"{left:.0f} s are left")))
                    failed = True
                    continue
                command = [
                    sys.executable,
                    __file__,
                    "--child",
                    side,
                    "--models",
                    model,
                    "--tokens",
                    ",".join(map(str, counts)),
                ]
                command += ["--folder", name, "--seconds", f"{share:.1f}"] + ["--trace"] * args.trace
                well, error = run_child(command, share, report)
                failed |= not well
                if error:
                    report(json.dumps(dict(side=side, model=model, error=error)))
            for tokens in () if args.kernels else counts:
                done = [side for side in compared if (folder / f"{side}_{model}_{tokens}.npz").exists()]
                failed |= len(done) < len(compared)
                for side in done[1:]:
                    found = differences(folder, model, tokens, side, done[0])
                    agree = all(value <= 0.03 for value in found.values())
                    failed |= not agree
                    line = dict(model=model, tokens=tokens, side=side, beside=done[0])
                    report(json.dumps(line | dict(differences=found, agree=agree)))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
