"""Expert parallelism on the GPUs of one host: each dispatch alone, the whole layer on 1 and N GPUs, NCCL beside it.

    python benchmarks/expert_parallel.py [--models dsv3,qwen3] [--tokens 16,64,256,1024,4096] [--schemes fp8_block]
    [--dispatches replicate,all_gather,all_to_all,ragged_all_to_all,nvlink_dispatch] [--parts exchange,layer,nccl]
    [--jobs 14] [--json FILE]
    XLA_FLAGS=--xla_force_host_platform_device_count=2 JAX_PLATFORMS=cpu python benchmarks/expert_parallel.py --toy

Tokens are per GPU. Parts:

    exchange  dispatch and combine with nothing between them: us, and GB/s of the rows that a GPU must send and receive
              at least (one copy of a token for each GPU that has experts of it, both ways, 16 bits), whatever it moves.
              nvlink_dispatch sends e4m3 and a scale for every 128 columns; rows that it brings back are in a buffer
              already
    layer     the whole layer: 2, 4, ... N GPUs on N * T tokens beside one GPU with all experts on T, and on N * T
    nccl      the same exchange through torch.distributed, where torch has CUDA: all_gather and reduce_scatter of the
              tokens; all_to_all there and back of one row for each of a token's experts, in equal shares

Lines after the cells compare: nvlink_dispatch with the fastest of XLA's ways, and tokens per second with those of one
GPU. With --jobs processes compile beside one another and time one at a time.

A cell that cannot run has an "error" in the JSON and its reason in the text. Times are of one call in a loop inside
jit, each of which waits for the one before, as layers do under scan.
"""

import argparse
import dataclasses
import functools
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _locks import locked, making
from _timing import header, time_in_loop
from _workers import ENVIRONMENT
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import moe_jax
from moe_jax.benchmarking import random_weights
from moe_jax.parallel import ParallelConfig, Placement, fused_moe
from moe_jax.parallel._choice import describe_dispatch, dispatch_refusal
from moe_jax.parallel._dispatch import WAYS, Exchange
from moe_jax.parallel._sharding import lay_out
from moe_jax.parallel._weights import assemble, share_config
from moe_jax.quantization import Scheme

# (experts, top_k, hidden, intermediate)
MODELS = {"dsv3": (256, 8, 7168, 2048), "qwen3": (128, 8, 2048, 768), "toy": (8, 2, 64, 32)}
# name, or name:dtype in which partial sums travel
DISPATCHES = (
    "replicate",
    "replicate:bfloat16",
    "all_gather",
    "all_gather:bfloat16",
    "all_to_all",
    "ragged_all_to_all",
    "nvlink_dispatch",
    "nvlink_dispatch:bfloat16",
)


Turn = Callable[[], Any]
Measures = Iterator[tuple[dict, Callable[[], dict]]]


def mesh_of(size: int) -> jax.sharding.Mesh:
    return jax.make_mesh((size,), ("expert",), axis_types=(AxisType.Auto,), devices=jax.devices()[:size])


def make_config(model: str, scheme: str) -> moe_jax.MoEConfig:
    experts, top_k, hidden, intermediate = MODELS[model]
    return moe_jax.MoEConfig(experts, top_k, hidden, intermediate, scheme=Scheme.parse(scheme))


def make_weights(config: moe_jax.MoEConfig, parallel: ParallelConfig, placement: Placement) -> Any:
    """Random experts, made on the device that holds them."""
    own = dataclasses.replace(share_config(config, placement, parallel), implementation=("xla",))
    shares = assemble(config, placement, parallel, lambda *_: random_weights(own))
    return jax.block_until_ready(lay_out(shares, config, placement, parallel))


def copies_on(parallel: ParallelConfig, values: list[Any], spec: PartitionSpec) -> list[jax.Array]:
    """Arguments where the program wants them, so that no call moves them first."""
    return [jax.device_put(value, NamedSharding(parallel.mesh, spec)) for value in values]


def trace_of(y: Any) -> Any:
    """(T, 1) float32 for the next round, of a result that is computed whole."""
    return jax.lax.optimization_barrier(y)[:, :1].astype(jnp.float32) * 1e-30


def least_rows(size: int, top_k: int) -> float:
    """Copies of a token that uniform routing needs on other devices."""
    return (size - 1) * (1 - (1 - 1 / size) ** top_k)


def measure_exchange(turn: Turn, model: str, dispatch: str, size: int, tokens: int) -> dict:
    """Dispatch and combine of ``tokens`` tokens per device; experts return their rows."""
    experts, top_k, hidden, _ = MODELS[model]
    dispatch, _, sums = dispatch.partition(":")
    parallel = ParallelConfig(mesh_of(size), expert_axis="expert", dispatch=dispatch)
    if reason := dispatch_refusal(dispatch, parallel.mesh):
        raise NotImplementedError(reason)
    exchange = Exchange(
        axis="expert",
        size=size,
        slots_per_device=-(-experts // size),
        round_axes=("expert",),
        sum_dtype=jnp.dtype(sums or "float32"),
        run=lambda x, weights, ids, choices: x.astype(jnp.float32) * (weights * (ids >= 0)).sum(axis=1, keepdims=True),
        row_dtype=jnp.dtype(jnp.bfloat16),
        is_one_round=False,
        quantization="e4m3_group" if hidden % 512 == 0 else "none",
    )
    by_token = PartitionSpec(parallel.token_axes(dispatch) or None)
    total, rng = size * tokens, np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((total, hidden), np.float32)).astype(jnp.bfloat16)
    weights = jnp.full((total, top_k), 1 / top_k, jnp.float32)
    slots = np.argsort(rng.random((total, experts)), axis=1)[:, :top_k].astype(np.int32)
    x, weights, slots = copies_on(parallel, [x, weights, slots], by_token)

    def one_device(serve: Any, x: Any, weights: Any, slots: Any) -> Any:
        own = dataclasses.replace(exchange, serve=serve)
        return WAYS[dispatch](x, weights, slots, {}, own).astype(jnp.bfloat16)

    def over(function: Any, count: int) -> Any:
        specs = (by_token,) * count
        return jax.shard_map(function, mesh=parallel.mesh, in_specs=specs, out_specs=by_token, check_vma=False)

    few = min(total, 64 * size)  # nvlink_dispatch holds a row of each of their experts once more
    some = copies_on(parallel, [part[:few] for part in (x, weights, slots)], by_token)
    as_they_came = functools.partial(rows_as_they_came, exchange.slots_per_device)
    with turn():
        got = np.asarray(jax.jit(over(functools.partial(one_device, as_they_came), 3))(*some), np.float32)
    expected = np.asarray(some[0], np.float32)
    if not np.allclose(got, expected, rtol=0.08, atol=0.05):
        raise RuntimeError(f"the exchange is wrong: {np.abs(got - expected).max()}")
    args = [x, weights, slots]
    if dispatch == "nvlink_dispatch":
        places = places_of(np.asarray(slots), size, exchange.slots_per_device)
        rows = jnp.zeros((size * (int(places.max()) + 1), hidden), jnp.bfloat16)
        args += copies_on(parallel, [places, rows], by_token)

    def one_round(carry: Any, x: Any, weights: Any, slots: Any, *there: Any) -> Any:
        x, slots, carry = jax.lax.optimization_barrier((x, slots, carry))  # or XLA moves work out of the loop
        y = one_device(functools.partial(rows_there_already, *there), x, weights + carry, slots)
        return trace_of(y)

    once = over(one_round, 1 + len(args))
    carry = copies_on(parallel, [jnp.zeros((total, 1), jnp.float32)], by_token)[0]
    rounds = 8 if dispatch.startswith("ragged") else 40
    micros = time_in_loop(lambda i, args, c: once(c, *args), args, carry, rounds=rounds, turn=turn)
    moved = 2 * 2 * tokens * hidden * least_rows(size, top_k)
    return dict(us=round(micros, 1), gbps=round(moved / micros / 1e3, 1))


def places_of(slots: np.ndarray, size: int, slots_per_device: int) -> np.ndarray:
    """(size * N, top_k): on each device in turn a row for each of its (token, slot) pairs, -1 for those of others."""
    here = slots[None] // slots_per_device == np.arange(size)[:, None, None]
    rank = np.cumsum(here.reshape(size, -1), axis=1).reshape(here.shape) - 1
    return np.where(here, rank, -1).reshape(-1, slots.shape[1]).astype(np.int32)


def rows_as_they_came(slots_per_device: int, arrived: Any, first_slot: Any, send_back: Any) -> Any:
    """Experts that return their rows, one for each (token, slot) that arrived here."""
    values = arrived.codes.astype(jnp.float32)
    if arrived.scales is not None:
        values = values * jnp.repeat(arrived.scales, 128, axis=1)
    here = (arrived.slots >= first_slot) & (arrived.slots < first_slot + slots_per_device)
    pair = jnp.arange(here.size, dtype=jnp.int32).reshape(here.shape)
    rows = jnp.repeat(values.astype(jnp.bfloat16), here.shape[1], axis=0)
    return send_back(rows, jnp.where(here, pair, -1))


def rows_there_already(row_of: Any, rows: Any, arrived: Any, first_slot: Any, send_back: Any) -> Any:
    """Rows that experts could have made of what arrived, without their time."""
    del first_slot
    rows, row_of, _, _ = jax.lax.optimization_barrier((rows, row_of, arrived.codes, arrived.scales))
    return send_back(rows, row_of)


def measure_layer(
    turn: Turn, config: moe_jax.MoEConfig, dispatch: str | None, size: int, total: int, weights: Any
) -> dict:
    """The whole layer on ``size`` devices for ``total`` tokens in all."""
    dispatch, _, sums = (dispatch or "").partition(":")
    parallel = ParallelConfig(
        mesh_of(size), expert_axis="expert", dispatch=dispatch or None, reduce_dtype=sums or "float32"
    )
    placement = Placement.create(config.num_experts, size)
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.standard_normal((total, config.hidden_size), np.float32)).astype(config.dtype)
    logits = rng.standard_normal((total, config.num_experts), np.float32)
    name = dispatch or "replicate"
    by_token = PartitionSpec(parallel.token_axes(name) or None)
    x, logits, carry = copies_on(parallel, [x, logits, np.zeros((total, 1), np.float32)], by_token)

    def once(i: Any, args: Any, carry: Any) -> Any:
        weights, placement, x, logits = args
        x, carry = jax.lax.optimization_barrier((x, carry))
        return trace_of(fused_moe(x, logits + carry, weights, config, parallel, placement=placement))

    micros = time_in_loop(once, (weights, placement, x, logits), carry, turn=turn)
    default = describe_dispatch(dataclasses.replace(parallel, dispatch=None), config, total)
    return dict(us=round(micros, 1), tokens_per_s=round(total / micros * 1e6), default=default)


def groups_of(args: argparse.Namespace) -> list[tuple[dict, Any]]:
    """(what the cells of a group have in common, a function of a turn that yields (what else a cell is, measure))."""
    size, tokens, parts = args.devices, [int(count) for count in args.tokens.split(",")], args.parts.split(",")
    models, dispatches, groups = args.models.split(","), args.dispatches.split(","), []
    for model in models if "layer" in parts else ():
        for scheme in args.schemes.split(","):
            config = make_config(model, scheme)
            for count in [count for count in (1, 2, 4, 8) if count < size] + [size]:
                key = dict(part="layer", model=model, scheme=scheme, devices=count)
                ways: list[str | None] = [None] if count == 1 else [*dispatches]
                groups.append((key, functools.partial(layers, config, ways, count, tokens, args.lock)))
    for model in models if "exchange" in parts else ():
        for dispatch in dispatches:
            key = dict(part="exchange", model=model, dispatch=dispatch, devices=size)
            groups.append((key, functools.partial(exchanges, model, dispatch, size, tokens)))
    for model in models if "nccl" in parts else ():
        for way, name in enumerate(("nccl all_gather + reduce_scatter", "nccl all_to_all")):
            key = dict(part="nccl", model=model, dispatch=name, devices=size)
            groups.append((key, functools.partial(nccl_exchanges, model, way, size, tokens)))
    return groups


def layers(
    config: moe_jax.MoEConfig, ways: list[str | None], size: int, tokens: list[int], lock: str | None, turn: Turn
) -> Measures:
    placement = Placement.create(config.num_experts, size)
    with making(lock):
        weights = make_weights(config, ParallelConfig(mesh_of(size), expert_axis="expert"), placement)
    for count in tokens:
        for way in ways:
            key = dict(tokens=count, dispatch=way or "one device")
            yield key, functools.partial(measure_layer, turn, config, way, size, count * size, weights)


def exchanges(model: str, dispatch: str, size: int, tokens: list[int], turn: Turn) -> Measures:
    for count in tokens:
        yield dict(tokens=count), functools.partial(measure_exchange, turn, model, dispatch, size, count)


def nccl_exchanges(model: str, way: int, size: int, tokens: list[int], turn: Turn) -> Measures:
    _, top_k, hidden, _ = MODELS[model]
    for index, count in enumerate(tokens):
        shapes = tuple((hidden, each, top_k) for each in tokens)
        yield dict(tokens=count), functools.partial(measure_nccl, turn, way, size, shapes, index)


@functools.cache
def all_of_nccl(size: int, shapes: tuple[tuple[int, int, int], ...]) -> list[list[float]]:
    """For each (hidden, tokens, top_k): microseconds of both ways. One set of processes times them all."""
    import torch
    from torch.multiprocessing.spawn import spawn

    if not torch.cuda.is_available() or torch.cuda.device_count() < size:
        raise RuntimeError(f"torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices, expected {size}")
    with tempfile.TemporaryDirectory() as folder:
        spawn(nccl_rank, (size, shapes, folder), nprocs=size)
        with open(os.path.join(folder, "0.json")) as file:
            return json.load(file)


def measure_nccl(turn: Turn, way: int, size: int, shapes: tuple[tuple[int, int, int], ...], index: int) -> dict:
    hidden, tokens, top_k = shapes[index]
    with turn():
        micros = all_of_nccl(size, shapes)[index][way]
    moved = 2 * 2 * tokens * hidden * least_rows(size, top_k)
    return dict(us=round(micros, 1), gbps=round(moved / micros / 1e3, 1))


def nccl_rank(rank: int, size: int, shapes: tuple[tuple[int, int, int], ...], folder: str) -> None:
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    found = []
    for hidden, tokens, top_k in shapes:
        x = torch.ones(tokens, hidden, dtype=torch.bfloat16, device="cuda")
        gathered = torch.empty(size * tokens, hidden, dtype=x.dtype, device="cuda")
        pairs = torch.ones(tokens * top_k // size * size, hidden, dtype=x.dtype, device="cuda")
        came = torch.empty_like(pairs)

        def gather(x: Any = x, gathered: Any = gathered) -> None:
            dist.all_gather_into_tensor(gathered, x)
            dist.reduce_scatter_tensor(x, gathered)

        def to_all(pairs: Any = pairs, came: Any = came) -> None:
            dist.all_to_all_single(came, pairs)
            dist.all_to_all_single(pairs, came)

        micros = []
        for way in (gather, to_all):
            for repeats in (5, 50):
                torch.cuda.synchronize()
                dist.barrier()
                start = time.perf_counter()
                for _ in range(repeats):
                    way()
                torch.cuda.synchronize()
            micros.append((time.perf_counter() - start) / repeats * 1e6)
        found.append(micros)
    if rank == 0:
        with open(os.path.join(folder, "0.json"), "w") as file:
            json.dump(found, file)
    dist.destroy_process_group()


def compare(cells: list[dict]) -> Iterator[str]:
    """nvlink_dispatch beside the fastest of XLA's ways; tokens per second beside one GPU with all the experts."""
    ran = [cell for cell in cells if "us" in cell]
    for cell in ran:
        same = [
            c for c in ran if all(c.get(k) == cell.get(k) for k in ("part", "model", "scheme", "devices", "tokens"))
        ]
        others = [c for c in same if not c["dispatch"].startswith("nvlink_dispatch")]
        if cell["dispatch"].startswith("nvlink_dispatch") and others:
            best = min(others, key=lambda c: c["us"])
            yield (
                f"{cell['part']} {cell['model']} T={cell['tokens']} on {cell['devices']}: {cell['dispatch']} "
                f"{cell['us']} us, {best['dispatch']} {best['us']} us = {best['us'] / cell['us']:.2f}"
            )
    for cell in ran:
        if cell["part"] != "layer" or cell["devices"] == 1:
            continue
        for alone in ran:
            is_same = all(alone.get(k) == cell[k] for k in ("model", "scheme"))
            if (
                is_same
                and alone["devices"] == 1
                and alone["tokens"] in (cell["tokens"], cell["tokens"] * cell["devices"])
            ):
                times = cell["tokens"] * cell["devices"] / cell["us"] / (alone["tokens"] / alone["us"])
                yield (
                    f"layer {cell['model']} {cell['scheme']} {cell['dispatch']}: {cell['tokens']} tokens on each of "
                    f"{cell['devices']} {times:.2f} times one with {alone['tokens']}"
                )


def run_groups(args: argparse.Namespace, report: Callable[[dict], None]) -> None:
    """Every args.share-th group of cells, in this process."""
    turn = functools.partial(locked, args.lock)
    first, step = args.share
    for key, measures in groups_of(args)[first::step]:
        cell: dict = {}
        try:
            for cell, measure in measures(turn):
                try:
                    report(key | cell | measure())
                except NotImplementedError as error:  # this dispatch cannot run here
                    report(key | cell | dict(error=str(error)[:200]))
        except Exception as error:  # one group that fails must not hide the others
            report(key | cell | dict(error=f"{type(error).__name__}: {str(error)[:200]}"))


def run_jobs(args: argparse.Namespace, report: Callable[[dict], None]) -> None:
    """The groups in ``args.jobs`` processes; their cells as they come."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, *sys.argv[1:], "--lock", f"{folder}/lock"]
        workers = [
            subprocess.Popen([*command, "--share", str(i), str(args.jobs)], env=ENVIRONMENT, stdout=subprocess.PIPE)
            for i in range(args.jobs)
        ]
        with selectors.DefaultSelector() as waiting:
            for worker in workers:
                assert worker.stdout is not None
                waiting.register(worker.stdout, selectors.EVENT_READ)
            while waiting.get_map():
                for ready, _ in waiting.select():
                    stream: Any = ready.fileobj
                    text = stream.readline()
                    if not text:
                        waiting.unregister(ready.fileobj)
                    elif text.startswith(b"{"):
                        report(json.loads(text))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="dsv3,qwen3")
    parser.add_argument("--tokens", default="16,64,256,1024,4096")
    parser.add_argument("--schemes", default="fp8_block")
    parser.add_argument("--dispatches", default=",".join(DISPATCHES))
    parser.add_argument("--parts", default="exchange,layer,nccl")
    parser.add_argument("--devices", type=int, default=0, help="how many; 0 for all")
    parser.add_argument("--toy", action="store_true", help="a shape for simulated CPU devices")
    parser.add_argument("--json", help="where to write the cells")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--share", type=int, nargs=2, help="(of a job) which groups of cells: first, step")
    parser.add_argument("--lock", help="(of a job) the file that whoever is timed locks")
    args = parser.parse_args()
    args.devices = args.devices or len(jax.devices())
    if args.toy:
        args.models, args.tokens, args.schemes = "toy", "4,16", "fp8_channel"
    if args.share:
        run_groups(args, lambda cell: print(json.dumps(cell), flush=True))
        return 0
    args.share = (0, 1)
    print(header(), f"{args.devices} devices", flush=True)
    cells: list[dict] = []

    def report(cell: dict) -> None:
        cells.append(cell)
        print(", ".join(f"{name} {value}" for name, value in cell.items()), flush=True)
        if args.json:
            with open(args.json, "w") as file:
                json.dump(cells, file, indent=0)

    (run_groups if args.jobs == 1 else run_jobs)(args, report)
    for line in compare(cells):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
