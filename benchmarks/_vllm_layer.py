"""Time one format of vLLM's layers by the rule by which moe_layer.py times ours. beside_vllm.py runs this.

    PYTHONPATH=PEERS python benchmarks/_vllm_layer.py MODEL FORMAT LOCK

PEERS: the folder of bench_vllm.py, which builds the layers of vLLM 0.24; only its timer is replaced. A CUDA graph of
one call, or of several with a routing of their own up to 64 tokens, is replayed without a pause for a tenth of a
second; median of five samples, from 4096 tokens on of three with a rest before each. What changes the routing
is timed alone and taken off. A second line "(single replays)" has bench_vllm.py's own figure: one routing, the host
waiting after each replay. Compiling goes on beside other processes; what is timed holds the file LOCK alone, large
random arrays are made while it is shared.
"""

import fcntl
import inspect
import math
import sys
import time
from collections.abc import Callable
from typing import Any

import bench_base
import torch
from _locks import locked

_BUDGET_S, _REST_S, _REST_FROM = 0.1, 0.2, 4096
_LARGE = 1 << 22  # elements


def draw_logits(tokens: int, experts: int, top_k: int, count: int, device: Any) -> list[torch.Tensor]:
    """count times (tokens, experts) random logits that hit as many experts as uniform routing does on average, within
    half a percent: ten routings of 16 tokens can be 3% off, and so would the bytes that are read.
    """
    expected = experts * (1 - (1 - top_k / experts) ** tokens)
    for seed in range(1000):
        generator = torch.Generator(device).manual_seed(seed)
        drawn = [torch.randn(tokens, experts, device=device, generator=generator) for _ in range(count)]
        hit = sum(len(values.topk(top_k).indices.unique()) for values in drawn) / count
        if abs(hit / expected - 1) <= 0.005:
            return drawn
    raise RuntimeError(f"no draw of {count} routings of {tokens} tokens hits {expected:.2f} of {experts} experts")


def routed_anew(f: Callable[[], Any], experts: int) -> tuple[int, list[Callable[[], Any]]]:
    """Tokens of ``f``, and what gives its call another routing, one for each call of a graph: up to 64 tokens."""
    free = inspect.getclosurevars(f).nonlocals
    ids, tokens = free["ids"], len(free["x"])
    count = 40 if tokens == 1 else 10 if tokens <= 64 else 0
    # OpenAI's kernels route by themselves, from logits.
    logits = inspect.getclosurevars(free["fn"]).nonlocals.get("lg", {}).get(tokens)
    changes = []
    for values in draw_logits(tokens, experts, ids.shape[1], count, ids.device) if count else ():
        chosen = values.topk(ids.shape[1]).indices.to(ids.dtype)
        target, source = (ids, chosen) if logits is None else (logits, values.to(logits.dtype))
        changes.append(lambda target=target, source=source: target.copy_(source))
    return tokens, changes


def graph_of(calls: list[Callable[[], Any]]) -> Callable[[], Any]:
    """Runs the calls as one CUDA graph. What cannot be captured fails: its time would be of another kind."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay


def sustained(run: Callable[[], Any], rest_s: float) -> float:
    """Seconds a run takes among runs without a pause."""

    def seconds(repeats: int) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / repeats

    seconds(2)
    repeats = max(1, int(_BUDGET_S / seconds(3)))
    samples = []
    for _ in range(3 if rest_s else 5):
        if rest_s:
            time.sleep(rest_s)
            seconds(10)
        samples.append(seconds(repeats))
    return sorted(samples)[len(samples) // 2]


def main() -> None:
    model, fmt, lock = sys.argv[1:4]
    sys.argv = ["bench_vllm.py", model, fmt]
    import bench_vllm
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.v1.worker.workspace import init_workspace_manager

    single, line, figure = bench_base.cuda_time, bench_vllm.line, {}

    def cuda_time(f: Callable[[], Any], iters: int = 20, warm: int = 3, graph: bool = True) -> float:
        f()  # compiles
        torch.cuda.synchronize()
        with locked(lock, fcntl.LOCK_EX):
            figure["single"] = single(f, iters=iters, warm=warm, graph=graph)
            tokens, changes = routed_anew(f, bench_vllm.MODELS[model][0])
            rest_s = _REST_S if tokens >= _REST_FROM else 0.0
            if not changes:
                return sustained(graph_of([f]), rest_s) * 1e6
            both = sustained(graph_of([step for change in changes for step in (change, f)]), rest_s)
            return (both - sustained(graph_of(changes), rest_s)) / len(changes) * 1e6

    def lines(model: str, fmt: str, tokens: int, us: float, *rest: Any) -> None:
        line(model, fmt, tokens, us, *rest)
        line(model, f"{fmt} (single replays)", tokens, figure["single"], *rest)

    def shared(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any, **kwargs: Any) -> Any:
            sizes = [n for a in args for n in (a if isinstance(a, tuple | list) else [a]) if type(n) is int]
            if math.prod(max(n, 1) for n in sizes) < _LARGE:
                return make(*args, **kwargs)
            with locked(lock, fcntl.LOCK_SH):
                out = make(*args, **kwargs)
                torch.cuda.synchronize()
                return out

        return made

    bench_vllm.cuda_time, bench_vllm.line = cuda_time, lines
    for name in ("randn", "rand", "randint"):
        setattr(torch, name, shared(getattr(torch, name)))
    init_workspace_manager(torch.device("cuda"))
    with set_current_vllm_config(VllmConfig()):
        bench_vllm.bench(model, bench_vllm.TOKENS)
    print("done", model, fmt, flush=True)


if __name__ == "__main__":
    main()
