"""What the torch bridge costs: a call against the same JAX call, and patched blocks against the block they replace.

    XLA_PYTHON_CLIENT_PREALLOCATE=false python benchmarks/bridge.py [--tokens 1 16 512] [--scheme fp8_channel]
        [--sizes E TOP_K H I] [--repeats 200] [--block-sizes E TOP_K H I] [--block-schemes fp8_channel int8_w8a8 ...]
        [--only calls | blocks | experts | profile]

First table, microseconds a call: "one" waits for every call, "row" is one of many queued in a row. jax is the jitted
function on arrays, bridge the layer on tensors as it is built by default, and the differences the bridge's own cost. On
a GPU also the layer through JAX's runtime (torch_kernels=False) and replayed from a CUDA graph. Second table: a block
of Qwen3-MoE in bfloat16, patched and as it was; without transformers as it was is a reference block of this file, a
loop over experts. Third table: the same block with each of transformers' experts_implementation, ours among them,
called and replayed from a CUDA graph, after a check of their values beside "eager" in float32; the exit code is 1 where
one of ours is wrong. With ``--only profile``, on a GPU: stages of a call on the host, cProfile of many calls and the
kernels of one, through JAX's runtime and on torch's stream. Everything runs under torch.no_grad().
"""

import argparse
import cProfile
import functools
import pstats
import statistics
import sys
import time

import jax
import torch

import torch_bridge
from torch_bridge._tensors import to_arguments, to_torch


def one_us(call, wait, repeats):
    """Median microseconds of a call that is waited for."""
    times = []
    for _ in range(repeats + 3):
        start = time.perf_counter()
        wait(call())
        times.append(1e6 * (time.perf_counter() - start))
    return statistics.median(times[3:])


def row_us(call, wait, repeats):
    """Microseconds of one of many calls in a row, the best of three."""
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(repeats):
            out = call()
        wait(out)
        best = min(best, 1e6 * (time.perf_counter() - start) / repeats)
    return best


class Qwen3MoeExperts(torch.nn.Module):
    """Experts as transformers keeps and, with its eager implementation, computes them: one expert after another."""

    def __init__(self, experts, hidden, intermediate, **factory):
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter(torch.randn(experts, 2 * intermediate, hidden, **factory) * 0.02)
        self.down_proj = torch.nn.Parameter(torch.randn(experts, hidden, intermediate, **factory) * 0.02)
        self.act_fn = torch.nn.SiLU()

    def forward(self, x, ids, weights):
        y = torch.zeros_like(x)
        for expert in ids.unique().tolist():
            rows, slots = torch.where(ids == expert)
            gate, up = torch.nn.functional.linear(x[rows], self.gate_up_proj[expert]).chunk(2, -1)
            out = torch.nn.functional.linear(self.act_fn(gate) * up, self.down_proj[expert])
            y.index_add_(0, rows, (out * weights[rows, slots, None]).to(x.dtype))
        return y


class ReferenceBlock(torch.nn.Module):
    """A Qwen3-MoE block in plain torch, for machines without transformers."""

    def __init__(self, experts, top_k, hidden, intermediate, **factory):
        super().__init__()
        self.gate = torch.nn.Linear(hidden, experts, bias=False, **factory)
        self.gate.top_k, self.gate.norm_topk_prob = top_k, True
        self.experts = Qwen3MoeExperts(experts, hidden, intermediate, **factory)

    def forward(self, hidden_states):
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        weights, ids = torch.topk(torch.softmax(self.gate(x).float(), -1), self.gate.top_k)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        return self.experts(x, ids, weights).reshape(hidden_states.shape)


def blocks(sizes, device):
    """(name, a maker of the block) for what is installed: transformers' block in its own implementations."""
    experts, top_k, hidden, intermediate = sizes
    factory = dict(device=device, dtype=torch.bfloat16)
    try:
        import transformers
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock
    except ImportError:
        yield "reference block (a loop)", functools.partial(ReferenceBlock, *sizes, **factory)
        return
    for implementation in ("eager", "grouped_mm"):

        def make(implementation=implementation):
            config = transformers.Qwen3MoeConfig(
                hidden_size=hidden, moe_intermediate_size=intermediate, num_experts=experts, num_experts_per_tok=top_k
            )
            config._experts_implementation = implementation
            block = Qwen3MoeSparseMoeBlock(config).to(**factory)
            for parameter in block.parameters():
                torch.nn.init.normal_(parameter.data, std=0.02)
            return block

        yield f"transformers, {implementation}", make


@torch.no_grad()
def calls_table(args, device, wait):
    experts, _, hidden, _ = args.sizes
    layer = torch_bridge.FusedMoE(*args.sizes, torch.bfloat16, quant_config=args.scheme, device=device)
    layer.load_dummy_weights()
    through_jax = None
    if device == "cuda":
        options = dict(quant_config=args.scheme, device=device, torch_kernels=False)
        through_jax = torch_bridge.FusedMoE(*args.sizes, torch.bfloat16, **options)
        through_jax.install(layer.expert_weights)
    print(f"calls, {args.scheme}, E TOP_K H I = {args.sizes}; microseconds")
    print(f"{'T':>6}  {'path':<22} {'one':>9} {'row':>9} {'one - jax':>10} {'row - jax':>10}", flush=True)
    for tokens in args.tokens:
        x = torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16)
        logits = torch.randn(tokens, experts, device=device)
        arrays = to_arguments([x, logits, None, None])
        calls = (through_jax or layer).calls_for("moe")
        function = calls.functions["moe"]
        paths = {
            "jax": (lambda f=function, a=arrays, c=calls: f(c.leaves, a, None), jax.block_until_ready),
            "bridge": (lambda x=x, z=logits: layer(x, z), wait),
        }
        if through_jax is not None:
            paths["torch_kernels=False"] = (lambda x=x, z=logits, f=through_jax: f(x, z), wait)
        shown = {}
        for name, (call, finish) in paths.items():
            finish(call())
            shown[name] = one_us(call, finish, args.repeats), row_us(call, finish, args.repeats)
        if through_jax is not None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                layer(x, logits)
            shown["replayed CUDA graph"] = (
                one_us(graph.replay, wait, args.repeats),
                row_us(graph.replay, wait, args.repeats),
            )
        for name, (one, row) in shown.items():
            by = "" if name == "jax" else f" {one - shown['jax'][0]:>10.1f} {row - shown['jax'][1]:>10.1f}"
            print(f"{tokens:>6}  {name:<22} {one:>9.1f} {row:>9.1f}{by}", flush=True)


@torch.no_grad()
def blocks_table(args, device, wait):
    print(
        f"blocks of Qwen3-MoE, bfloat16, E TOP_K H I = {args.block_sizes}; microseconds a call, waited for / in a row"
    )
    print(f"{'block':<34}" + "".join(f"{f'T={tokens}':>19}" for tokens in args.tokens), flush=True)
    made = [(name, make, None) for name, make in blocks(args.block_sizes, device)]
    make = made[0][1]
    made += [("patched", make, {})]
    made += [(f"patched, {scheme}", make, dict(quantize=scheme)) for scheme in args.block_schemes]
    if device == "cuda":
        made += [("patched, torch_kernels=False", make, dict(torch_kernels=False))]
    repeats = max(args.repeats // 10, 5)
    for name, make, options in made:
        torch.manual_seed(0)
        block = torch.nn.ModuleDict({"mlp": make()}).requires_grad_(False)
        if options is not None:
            torch_bridge.patch(block, **options)
        print(f"{name:<34}", end="")
        for tokens in args.tokens:
            x = torch.randn(1, tokens, args.block_sizes[2], device=device, dtype=torch.bfloat16)
            call = functools.partial(block["mlp"], x)
            us = f"{one_us(call, wait, repeats):.1f} / {row_us(call, wait, repeats):.1f}"
            print(f" {us:>18}", end="", flush=True)
        print(flush=True)


EXPERTS = {"moe_jax": "bf16", "moe_jax_fp8_channel": "fp8_channel", "grouped_mm": None, "eager": None}
# Largest distance of a row from float32, relative to the row: a few roundings of 8 bits of mantissa, or of 4.
ALLOWED = {"bf16": 0.02, "fp8_channel": 0.1}


def make_block(sizes, implementation, device, dtype=torch.bfloat16):
    """transformers' block of Qwen3-MoE; the same weights for each implementation."""
    import transformers
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    experts, top_k, hidden, intermediate = sizes
    names = dict(hidden_size=hidden, moe_intermediate_size=intermediate, num_experts=experts, num_experts_per_tok=top_k)
    config = transformers.Qwen3MoeConfig(**names)
    config._experts_implementation = implementation
    with torch.device(device):
        block = Qwen3MoeSparseMoeBlock(config)
    torch.manual_seed(0)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter.data, std=parameter.shape[-1] ** -0.5)
    return block.to(torch.bfloat16).to(dtype).requires_grad_(False)  # float32 has the values of bfloat16


def distance(ours, expected):
    """The largest distance of a row, relative to the row."""
    ours, expected = ours.double().flatten(0, -2), expected.double().flatten(0, -2)
    return ((ours - expected).norm(dim=-1) / expected.norm(dim=-1)).max().item()


def captured(call):
    """(CUDA graph of a call, its output)."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    return graph, out


@torch.no_grad()
def experts_table(args, device, wait):
    import transformers

    torch_bridge.register_experts("moe_jax")
    torch_bridge.register_experts("moe_jax_fp8_channel", quantize="fp8_channel")
    hidden, repeats, is_right = args.block_sizes[2], max(args.repeats // 10, 5), True
    exact = make_block(args.block_sizes, "eager", device, torch.float32)
    inputs, expected = {}, {}
    for tokens in args.tokens:
        x = torch.randn(1, tokens, hidden, generator=torch.Generator().manual_seed(tokens)).to(device, torch.bfloat16)
        _, weights, ids = exact.gate(x.float()[0])  # one choice of experts for all: routers in bfloat16 may differ
        inputs[tokens] = x, ids, weights.bfloat16()
        expected[tokens] = exact.experts(x[0].float(), ids, inputs[tokens][2].float())
    del exact
    print(f"experts_implementation of transformers {transformers.__version__}")
    print(f"a block of Qwen3-MoE in bfloat16, E TOP_K H I = {args.block_sizes}; microseconds a call:")
    print("waited for / in a row / its experts alone in a row / replayed from a CUDA graph in a row")
    print("(largest distance of a row from eager float32)")
    print(f"{'implementation':<22}" + "".join(f"{f'T={tokens}':>48}" for tokens in args.tokens), flush=True)
    shown = {}
    for name, scheme in EXPERTS.items():
        block = make_block(args.block_sizes, name, device)
        print(f"{name:<22}", end="")
        for tokens in args.tokens:
            x, ids, weights = inputs[tokens]
            error = distance(block.experts(x[0], ids, weights), expected[tokens])
            call = functools.partial(block, x)
            alone = functools.partial(block.experts, x[0], ids, weights)
            times = [one_us(call, wait, repeats), row_us(call, wait, repeats), row_us(alone, wait, repeats)]
            note = ""
            if device == "cuda" and name != "eager":  # its loop over experts waits for the GPU
                try:
                    graph, out = captured(call)
                    called = call()
                    graph.replay()
                    note = "" if torch.equal(out, called) else f" replay differs by {distance(out, called):.1e}"
                    times.append(row_us(graph.replay, wait, repeats))
                except RuntimeError as found:
                    if scheme is not None:
                        raise
                    torch.cuda.synchronize()
                    note = f" no graph: {str(found).splitlines()[0][:40]}"
            is_right &= scheme is None or (error <= ALLOWED[scheme] and not note)
            shown[name, tokens] = times
            cell = " / ".join(f"{time:.1f}" for time in times) + f" ({error:.4f}){note}"
            print(f" {cell:>47}", end="", flush=True)
        print(flush=True)
        del block
    for name, scheme in EXPERTS.items():
        if scheme is not None:
            for at, kind in enumerate(("waited for", "in a row", "experts alone", "replayed")):
                pairs = [(shown["grouped_mm", tokens], shown[name, tokens]) for tokens in args.tokens]
                if any(len(times) <= at for pair in pairs for times in pair):
                    continue
                ratios = [theirs[at] / ours[at] for theirs, ours in pairs]
                print(
                    f"{name}, {kind}: grouped_mm takes "
                    + ", ".join(f"{ratio:.2f}" for ratio in ratios)
                    + " times as long"
                )
    return is_right


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


@torch.no_grad()
def profile_table(args, device, wait):
    if device != "cuda":
        print("profile: needs a GPU")
        return
    tokens = args.tokens[0]
    x = torch.randn(tokens, args.sizes[2], device=device, dtype=torch.bfloat16)
    logits = torch.randn(tokens, args.sizes[0], device=device)
    for torch_kernels in (False, True):
        options = dict(quant_config=args.scheme, device=device, torch_kernels=torch_kernels)
        layer = torch_bridge.FusedMoE(*args.sizes, torch.bfloat16, **options)
        layer.load_dummy_weights()
        calls, arrays = layer.calls_for("moe"), to_arguments([x, logits, None, None])
        output = calls.functions["moe"](calls.leaves, arrays, None)
        stages = {
            "the whole call": lambda f=layer: f(x, logits),
            "to_arguments": lambda: to_arguments([x, logits, None, None]),
            "calls.run": lambda c=calls: c.run("moe", x, logits, None, None, bias=2),
            "to_torch": lambda out=output: to_torch(out),
        }
        print(f"torch_kernels={torch_kernels}, {args.scheme}, T={tokens}; microseconds of the host")
        for name, call in stages.items():
            print(f"   {name:<20} {host_us(call):8.1f}", flush=True)
        with cProfile.Profile() as profile:
            for _ in range(args.repeats):
                layer(x, logits)
        torch.cuda.synchronize()
        pstats.Stats(profile).strip_dirs().sort_stats("tottime").print_stats(22)
        activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities) as found:
            for _ in range(20):
                layer(x, logits)
            torch.cuda.synchronize()
        for event in sorted(found.key_averages(), key=lambda e: -e.self_device_time_total)[:16]:
            if event.self_device_time_total:
                print(f"   {event.self_device_time_total / 20:9.1f} us a call, {event.count:5d} x  {event.key[:110]}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = dict(type=int, nargs=4, metavar=("E", "TOP_K", "H", "I"))
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 512])
    parser.add_argument("--scheme", default="fp8_channel")
    parser.add_argument("--sizes", **sizes)
    parser.add_argument("--block-sizes", **sizes)
    parser.add_argument("--block-schemes", nargs="+", default=["fp8_channel", "int8_w8a8", "int8_w8a16"])
    parser.add_argument("--only", choices=("calls", "blocks", "experts", "profile"))
    parser.add_argument("--repeats", type=int, default=200)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() and jax.default_backend() == "gpu" else "cpu"
    is_gpu = device == "cuda"
    args.sizes = args.sizes or ([64, 8, 2048, 768] if is_gpu else [8, 2, 256, 256])
    args.block_sizes = args.block_sizes or args.sizes
    wait = (lambda _: torch.cuda.synchronize()) if is_gpu else (lambda _: None)
    start = time.perf_counter()
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, torch {torch.__version__}", flush=True)
    tables = dict(calls=calls_table, blocks=blocks_table, experts=experts_table, profile=profile_table)
    wrong = []
    for name, table in tables.items():
        is_meant = name == args.only or (args.only is None and name in ("calls", "blocks"))
        if is_meant and table(args, device, wait) is False:
            wrong.append(name)
    print(f"{time.perf_counter() - start:.0f} s" + "".join(f"; wrong values in {name}" for name in wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
