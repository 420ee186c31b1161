"""Expert parallelism on the GPUs of one host: each dispatch alone, the whole layer on 1 and N GPUs, NCCL beside it.

    python benchmarks/expert_parallel.py [--models dsv3,qwen3] [--tokens 16,64,256,1024,4096] [--schemes fp8_block]
    [--dispatches replicate,all_gather,all_to_all,ragged_all_to_all] [--parts exchange,layer,strong,nccl] [--json FILE]
    XLA_FLAGS=--xla_force_host_platform_device_count=2 JAX_PLATFORMS=cpu python benchmarks/expert_parallel.py --toy

Tokens are per GPU. Parts:

    exchange  dispatch and combine with nothing between them: us, and GB/s of the rows that a GPU must send and receive
              at least (one copy of a token for each GPU that has experts of it, both ways, 16 bits)
    layer     the whole layer: N GPUs on N * T tokens beside one GPU with all experts on T tokens
    strong    N GPUs on the largest T in all, beside the layer on one GPU with that T
    nccl      all_gather and reduce_scatter of the same tokens through torch.distributed, where torch has CUDA

A cell that cannot run has an "error" in the JSON and its reason in the text. Times are of one call inside jit.
"""

import argparse
import dataclasses
import functools
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _timing import header, time_in_jit
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import moe_jax
from moe_jax.benchmarking import random_weights
from moe_jax.parallel import ParallelConfig, Placement, fused_moe
from moe_jax.parallel._choice import describe
from moe_jax.parallel._dispatch import WAYS, Exchange, why_not
from moe_jax.parallel._packing import lay_out
from moe_jax.parallel._weights import assemble, local_config
from moe_jax.quantization import Scheme

# (experts, top_k, hidden, intermediate)
MODELS = {"dsv3": (256, 8, 7168, 2048), "qwen3": (128, 8, 2048, 768), "toy": (8, 2, 64, 32)}
# name, or name:dtype in which partial sums travel
DISPATCHES = ("replicate", "replicate:bfloat16", "all_gather", "all_gather:bfloat16", "all_to_all", "ragged_all_to_all")


def mesh_of(size: int) -> jax.sharding.Mesh:
    return jax.make_mesh((size,), ("expert",), axis_types=(AxisType.Auto,), devices=jax.devices()[:size])


def make_config(model: str, scheme: str) -> moe_jax.MoEConfig:
    experts, top_k, hidden, inner = MODELS[model]
    return moe_jax.MoEConfig(experts, top_k, hidden, inner, scheme=Scheme.parse(scheme))


def make_weights(config: moe_jax.MoEConfig, parallel: ParallelConfig, placement: Placement) -> Any:
    """Random experts, made on the device that holds them."""
    own = dataclasses.replace(local_config(config, placement, parallel), implementation=("xla",))
    shares = assemble(config, placement, parallel, lambda *_: random_weights(own))
    return jax.block_until_ready(lay_out(shares, config, placement, parallel))


def copies_on(parallel: ParallelConfig, values: list[Any], spec: PartitionSpec) -> list[jax.Array]:
    """Arguments where the program wants them, so that no call moves them first."""
    return [jax.device_put(value, NamedSharding(parallel.mesh, spec)) for value in values]


def least_rows(size: int, top_k: int) -> float:
    """Copies of a token that uniform routing needs on other devices."""
    return (size - 1) * (1 - (1 - 1 / size) ** top_k)


def measure_exchange(model: str, dispatch: str, size: int, tokens: int) -> dict:
    """Dispatch and combine of ``tokens`` tokens per device; experts return their rows."""
    experts, top_k, hidden, _ = MODELS[model]
    dispatch, _, sums = dispatch.partition(":")
    parallel = ParallelConfig(mesh_of(size), expert_axis="expert", dispatch=dispatch)
    if reason := why_not(dispatch, parallel.mesh):
        raise NotImplementedError(reason)
    exchange = Exchange(
        axis="expert",
        size=size,
        slots_per_device=-(-experts // size),
        round_axes=("expert",),
        sum_dtype=jnp.dtype(sums or "float32"),
        run=lambda x, weights, ids: x.astype(jnp.float32) * (weights * (ids >= 0)).sum(axis=1, keepdims=True),
        row_dtype=jnp.dtype(jnp.bfloat16),
        is_one_round=False,
    )
    by_token = PartitionSpec(parallel.token_axes(dispatch) or None)
    total, rng = size * tokens, np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((total, hidden), np.float32)).astype(jnp.bfloat16)
    weights = jnp.full((total, top_k), 1 / top_k, jnp.float32)
    slots = [
        np.argsort(rng.random((total, experts)), axis=1)[:, :top_k].astype(np.int32)
        if total * experts < 1 << 22
        else rng.integers(0, experts, (total, top_k)).astype(np.int32)
        for _ in range(10)
    ]
    run = jax.shard_map(
        lambda x, weights, slots: WAYS[dispatch](x, weights, slots, exchange).astype(jnp.bfloat16),
        mesh=parallel.mesh,
        in_specs=(by_token,) * 3,
        out_specs=by_token,
        check_vma=False,
    )
    (x, weights), slots = copies_on(parallel, [x, weights], by_token), copies_on(parallel, slots, by_token)
    got, expected = np.asarray(run(x, weights, slots[0]), np.float32), np.asarray(x, np.float32)
    if not np.allclose(got, expected, rtol=0.05, atol=0.05):
        raise RuntimeError(f"the exchange is wrong: {np.abs(got - expected).max()}")
    micros = time_in_jit(run, (x, weights, slots[0]), varied=2, variants=slots)
    moved = 2 * 2 * tokens * hidden * least_rows(size, top_k)
    return dict(us=round(micros, 1), gbps=round(moved / micros / 1e3, 1))


def measure_layer(config: moe_jax.MoEConfig, dispatch: str | None, size: int, total: int, weights: Any) -> dict:
    """The whole layer on ``size`` devices for ``total`` tokens in all."""
    dispatch, _, sums = (dispatch or "").partition(":")
    parallel = ParallelConfig(
        mesh_of(size), expert_axis="expert", dispatch=dispatch or None, reduce_dtype=sums or "float32"
    )
    placement = Placement.create(config.num_experts, size)
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.standard_normal((total, config.hidden_size), np.float32)).astype(config.dtype)
    logits = [rng.standard_normal((total, config.num_experts), np.float32) for _ in range(10)]
    name = dispatch or "replicate"
    by_token = PartitionSpec(parallel.token_axes(name) or None)
    (x,), logits = copies_on(parallel, [x], by_token), copies_on(parallel, logits, by_token)

    def run(weights: Any, placement: Placement, x: Any, logits: Any) -> Any:
        return fused_moe(x, logits, weights, config, parallel, placement=placement)

    micros = time_in_jit(run, (weights, placement, x, logits[0]), varied=3, variants=logits)
    default = describe(dataclasses.replace(parallel, dispatch=None), config, total)
    return dict(us=round(micros, 1), tokens_per_s=round(total / micros * 1e6), default=default)


def cells_of(args: argparse.Namespace) -> Iterator[tuple[dict, Any]]:
    """(what the cell is, a function that measures it)."""
    size, tokens = args.devices, [int(count) for count in args.tokens.split(",")]
    for model in args.models.split(","):
        if "exchange" in args.parts:
            for count in tokens:
                for dispatch in args.dispatches.split(","):
                    key = dict(part="exchange", model=model, dispatch=dispatch, devices=size, tokens=count)
                    yield key, functools.partial(measure_exchange, model, dispatch, size, count)
        for scheme in args.schemes.split(","):
            yield from layer_cells(args, model, scheme, size, tokens)
    if "nccl" in args.parts:
        for model in args.models.split(","):
            for count in tokens:
                key = dict(part="nccl", model=model, devices=size, tokens=count)
                yield key, functools.partial(measure_nccl, MODELS[model][2], size, count)


def layer_cells(
    args: argparse.Namespace, model: str, scheme: str, size: int, tokens: list[int]
) -> Iterator[tuple[dict, Any]]:
    parts = args.parts.split(",")
    if not {"layer", "strong"} & set(parts):
        return
    config = make_config(model, scheme)
    for count_devices in (1, size):
        parallel = ParallelConfig(mesh_of(count_devices), expert_axis="expert")
        weights = functools.cache(
            functools.partial(make_weights, config, parallel, Placement.create(config.num_experts, count_devices))
        )
        dispatches = [None] if count_devices == 1 else args.dispatches.split(",")
        cells = [("layer", count * count_devices, count) for count in tokens if "layer" in parts]
        if "strong" in parts and (count_devices > 1 or "layer" not in parts):
            cells.append(("strong", max(tokens), max(tokens) // count_devices))
        for part, total, per_device in cells:
            for dispatch in dispatches:
                key = dict(part=part, model=model, scheme=scheme, dispatch=dispatch or "one device")
                key |= dict(devices=count_devices, tokens=per_device, total=total)
                yield key, lambda d=dispatch, n=count_devices, t=total, w=weights: measure_layer(config, d, n, t, w())
        weights.cache_clear()


def measure_nccl(hidden: int, size: int, tokens: int) -> dict:
    """all_gather of bf16 rows and reduce_scatter of their sums through torch.distributed; torch must have CUDA."""
    import tempfile

    import torch

    if not torch.cuda.is_available() or torch.cuda.device_count() < size:
        raise RuntimeError(f"torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices, expected {size}")
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(nccl_rank, (size, hidden, tokens, folder), nprocs=size)
        micros = json.load(open(os.path.join(folder, "0.json")))["us"]
    moved = 2 * 2 * tokens * hidden * (size - 1)
    return dict(us=round(micros, 1), gbps=round(moved / micros / 1e3, 1))


def nccl_rank(rank: int, size: int, hidden: int, tokens: int, folder: str) -> None:
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    x = torch.ones(tokens, hidden, dtype=torch.bfloat16, device="cuda")
    gathered = torch.empty(size * tokens, hidden, dtype=x.dtype, device="cuda")
    for repeats in (5, 50):
        torch.cuda.synchronize()
        dist.barrier()
        start = time.perf_counter()
        for _ in range(repeats):
            dist.all_gather_into_tensor(gathered, x)
            dist.reduce_scatter_tensor(x, gathered)
        torch.cuda.synchronize()
        micros = (time.perf_counter() - start) / repeats * 1e6
    if rank == 0:
        json.dump(dict(us=micros), open(os.path.join(folder, "0.json"), "w"))
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="dsv3,qwen3")
    parser.add_argument("--tokens", default="16,64,256,1024,4096")
    parser.add_argument("--schemes", default="fp8_block")
    parser.add_argument("--dispatches", default=",".join(DISPATCHES))
    parser.add_argument("--parts", default="exchange,layer,strong,nccl")
    parser.add_argument("--devices", type=int, default=0, help="how many; 0 for all")
    parser.add_argument("--toy", action="store_true", help="a shape for simulated CPU devices")
    parser.add_argument("--json", help="where to write the cells")
    args = parser.parse_args()
    args.devices = args.devices or len(jax.devices())
    if args.toy:
        args.models, args.tokens, args.schemes = "toy", "4,16", "fp8_channel"
    print(header(), f"{args.devices} devices", flush=True)
    cells = []
    for key, measure in cells_of(args):
        try:
            cell = key | measure()
            text = ", ".join(f"{name} {cell[name]}" for name in cell if name not in key)
        except Exception as error:  # one cell that fails must not hide the others
            cell = key | dict(error=f"{type(error).__name__}: {str(error)[:200]}")
            text = cell["error"]
        cells.append(cell)
        print(" ".join(f"{value!s:>10s}" for value in key.values()), " ", text, flush=True)
        if args.json:
            with open(args.json, "w") as file:
                json.dump(cells, file, indent=0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
