"""Where a call of the torch bridge spends its time on a GPU: each stage by itself, and cProfile of many calls.

    XLA_PYTHON_CLIENT_PREALLOCATE=false python benchmarks/bridge_profile.py [--sizes E TOP_K H I] [--block]

Microseconds of the host for one of many calls in a row (the GPU is waited for at the end of a row).
"""

import argparse
import cProfile
import pstats
import time
import traceback
from typing import Any

import bridge
import jax
import torch

import torch_bridge
from torch_bridge._tensors import to_arguments, to_torch


def host_us(call, repeats=300):
    """Microseconds of the host alone, the best of three rows; the queue is emptied between them."""
    best = float("inf")
    for _ in range(3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        best = min(best, 1e6 * (time.perf_counter() - start) / repeats)
        torch.cuda.synchronize()
    return best


def show(name, call, repeats=200):
    def wait(_):
        torch.cuda.synchronize()

    print(
        f"{name:<52} one {bridge.one_us(call, wait, repeats):8.1f}  row {bridge.row_us(call, wait, repeats):8.1f}"
        f"  host {host_us(call, 50):8.1f}",
        flush=True,
    )


def profiled(name, call, count=300, lines=22):
    print(f"-- cProfile of {count} calls: {name}; tottime in ms for all")
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(count):
        call()
    profile.disable()
    torch.cuda.synchronize()
    pstats.Stats(profile).strip_dirs().sort_stats("tottime").print_stats(lines)


def device_kernels(name, call, count=20):
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        for _ in range(count):
            call()
        torch.cuda.synchronize()
    print(f"-- kernels on the GPU, {count} calls: {name}")
    rows = [e for e in found.key_averages() if e.self_device_time_total > 0]
    for event in sorted(rows, key=lambda e: -e.self_device_time_total)[:16]:
        print(f"   {event.self_device_time_total / count:9.1f} us a call, {event.count:5d} x  {event.key[:110]}")


def sections(*parts):
    for part in parts:
        try:
            part()
        except Exception:
            traceback.print_exc()
        print(flush=True)


def calls(sizes, scheme, tokens, is_short):
    run: Any
    own: Any
    experts, _, hidden, _ = sizes
    options = dict(quant_config=scheme, device="cuda")
    layer = torch_bridge.FusedMoE(*sizes, torch.bfloat16, torch_kernels=False, **options)
    layer.load_dummy_weights()
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    z = torch.randn(tokens, experts, device="cuda")
    own = layer.calls_for(x, z)
    arrays = to_arguments([x, z, None, None])
    function = own.functions["moe"]
    output = function(own.leaves, arrays, None)
    print(layer.explain(tokens), flush=True)
    show(f"jax alone, {scheme} T={tokens}", lambda: function(own.leaves, arrays, None))
    show("bridge through JAX's runtime, grad mode", lambda: layer(x, z))
    with torch.no_grad():
        show("bridge through JAX's runtime, no_grad", lambda: layer(x, z))
        show("the same, another input each call", lambda: layer(x + 1, z))
        if is_short:
            return
        print(f"   host us: to_arguments {host_us(lambda: to_arguments([x, z, None, None])):.1f}, "
              f"from_dlpack {host_us(lambda: jax.dlpack.from_dlpack(x)):.1f}, "
              f"to_torch {host_us(lambda: to_torch(output)):.1f}, "
              f"calls.run {host_us(lambda: own.run('moe', x, z, None, None, bias=2)):.1f}", flush=True)  # fmt: skip
        profiled("bridge through JAX's runtime", lambda: layer(x, z))
        kernels = torch_bridge.FusedMoE(*sizes, torch.bfloat16, torch_kernels=True, **options)
        kernels.install(layer.expert_weights)
        show("torch_kernels", lambda: kernels(x, z))
        print("   equal:", torch.equal(kernels(x, z), layer(x, z)))
        run = kernels.calls_for(x, z)
        print(f"   host us: calls.run {host_us(lambda: run.run('moe', x, z, None, None, bias=2)):.1f}", flush=True)
        call = run._kernels["moe"]
        known = dict(zip(call.__code__.co_freevars, call.__closure__, strict=True))["known"].cell_contents
        [(_, launches)] = known.values()
        leaves = [x, z]
        print(f"   host us: launches {host_us(lambda: launches(leaves)):.1f}", flush=True)
        launches(leaves)
        _, start = launches._frames[-1]  # with the addresses of this call, whose memory nobody else has yet
        stream = torch.cuda.current_stream().cuda_stream
        for launch, function, where in launches._actions:
            if type(where) is int:
                us = host_us(lambda f=launch, a=(function, stream, start + where): f(*a), 100)
                print(f"   host us of one launch: {us:.1f}", flush=True)
        profiled("torch_kernels", lambda: kernels(x, z))
        device_kernels("torch_kernels", lambda: kernels(x, z))
        graph = torch.cuda.CUDAGraph()
        sx, sz = x.clone(), z.clone()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            y = kernels(sx, sz)

        def replayed():
            sx.copy_(x)
            sz.copy_(z)
            graph.replay()
            return y.clone()

        show("replay alone", graph.replay)
        show("copies, replay, clone", replayed)


def block(sizes, tokens):
    x = torch.randn(1, tokens, sizes[2], device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        for name, make in bridge.blocks(sizes, "cuda"):
            if "eager" in name:
                continue
            made = make().requires_grad_(False)
            show(f"{name} T={tokens}", lambda made=made: made(x), 50)
            holder = torch.nn.ModuleDict({"mlp": made})
            for torch_kernels in (False, True):
                holder = torch.nn.ModuleDict({"mlp": make().requires_grad_(False)})
                torch_bridge.patch(holder, torch_kernels=torch_kernels)
                patched: Any = holder["mlp"]
                print(patched.experts.experts.explain(tokens))
                show(f"patched, torch_kernels={torch_kernels}", lambda patched=patched: patched(x), 50)
                profiled(f"patched, torch_kernels={torch_kernels}", lambda patched=patched: patched(x), 100)
                device_kernels(f"patched, torch_kernels={torch_kernels}", lambda patched=patched: patched(x))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs=4, default=[64, 8, 2048, 768])
    parser.add_argument("--scheme", default="fp8_channel")
    parser.add_argument("--tokens", type=int, default=1)
    parser.add_argument("--block", action="store_true", help="the patched block of transformers, and nothing else")
    parser.add_argument("--short", action="store_true", help="the times through JAX's runtime, and nothing else")
    args = parser.parse_args()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, torch {torch.__version__}")
    if args.block:
        sections(lambda: block(args.sizes, args.tokens))
    else:
        sections(lambda: calls(args.sizes, args.scheme, args.tokens, args.short))


if __name__ == "__main__":
    main()
