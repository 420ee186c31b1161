"""vLLM's engine with and without the plugin: GPU time and clock of whole decoder steps, start-up time, memory.

    python benchmarks/vllm_engine.py speed --out DIR [--cases qwen3-30b-a3b:fp8_channel,...] [--layers 4]
        [--prefill 2048] [--decode 1x1024,64x1024] [--engines ours,triton] [--vocabulary 50000]
    python benchmarks/vllm_engine.py start --out DIR [--cases qwen3-30b-a3b:fp8_channel] [--layers 48]

Needs a Hopper GPU, vLLM 0.24, and this checkout as the current directory; two GPUs share the work, and
CUDA_VISIBLE_DEVICES chooses them. Weights are random. ``speed`` starts all engines side by side and lets those of one
GPU, which has whole cases, measure one at a time: ours, and vLLM's with each of its backends that may be the better
one. A line for each cell, and a ratio against the better one. "kernels" is the union of the GPU's busy time by torch's
profiler, "clock" what a caller waits, "parts" in results.jsonl the longest kernels; ours start early and wait (PDL), so
their parts overlap. ``start`` runs vLLM alone, ours with an empty cache, and both again.
"""

import argparse
import fcntl
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _busy import busy
from _vllm_environment import ENVIRONMENT

START_LIMIT = 280  # seconds
CALLS, STEPS, PROFILED = 3, 32, 8  # of a cell: samples, decode steps in one by the clock, and in one of kernels
WARM_UP = 8  # decode steps
HERE = Path(__file__).resolve().parent
CASES = "qwen3-30b-a3b:fp8_channel,qwen3-30b-a3b:fp8_block,qwen3-30b-a3b:w4a16_g128,gpt-oss-120b:mxfp4"
BACKENDS = {
    "fp8_channel": ("auto", "triton"),
    "fp8_channel_dense": ("auto", "triton"),
    "fp8_block": ("deep_gemm", "triton"),
    "fp8_block_dense": ("deep_gemm", "triton"),
    "w4a16_g128": ("auto",),
    "mxfp4": ("auto", "marlin"),
    "bf16": ("auto",),
}


def cells_of(options: argparse.Namespace) -> tuple[list[int], list[tuple[int, int]]]:
    """Tokens of each prefill; (rows, context) of each decode step."""
    decodes = [cell.split("x") for cell in options.decode.split(",")]
    return [int(tokens) for tokens in options.prefill.split(",")], [(int(rows), int(held)) for rows, held in decodes]


def new_tokens(rows: int, context: int, batched: int) -> int:
    """That a row makes until all rows have been read, ``batched`` tokens at a time, and measured."""
    reading = -(-rows * context // max(1, batched - rows))
    return reading + WARM_UP + CALLS * (STEPS + PROFILED) + 8


def cache_bytes(config: dict[str, Any]) -> int:
    """Of a token in a layer, in 16 bits."""
    if "kv_lora_rank" in config:
        return 2 * (config["kv_lora_rank"] + config["qk_rope_head_dim"])
    width = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    return 2 * 2 * config["num_key_value_heads"] * width


class Engine:
    """One engine of one process, with the measurements."""

    def __init__(self, options: argparse.Namespace):
        sys.path.insert(0, str(HERE.parent))
        from benchmarks import _vllm_models as models
        from benchmarks._model_configs import MODELS

        began = time.monotonic()
        import torch
        import vllm
        from vllm.model_executor.model_loader import dummy_loader

        dummy_loader.initialize_dummy_weights = models.draw_weights
        if options.plugin:
            from torch_bridge.vllm import register

            register()
        imported = time.monotonic()
        self.torch, self.vllm = torch, vllm
        model, form = options.case.split(":")
        folder = Path(tempfile.mkdtemp()) / model
        self.vocabulary = int(options.vocabulary) or MODELS[model]["vocab_size"]
        config = MODELS[model] | dict(vocab_size=self.vocabulary)
        self.prefills, self.decodes = cells_of(options)
        rows = [rows for rows, _ in self.decodes]
        self.batched = 8192 if options.default_graphs else min(8192, max(2048, *self.prefills))
        held = [(rows, context + new_tokens(rows, context, self.batched)) for rows, context in self.decodes]
        longest = max(self.prefills + [each for _, each in held])
        length = max(4096, longest + 16)  # vLLM wants room for one row of it
        config["max_position_embeddings"] = max(length, config["max_position_embeddings"])
        models.write_config(folder, config, models.QUANTIZATION[form], int(options.layers))
        tokens = max([length, *self.prefills, *(rows * each for rows, each in held)])
        # Tokens are counted in blocks of 16, a few of which vLLM keeps; 1.2 is room for both.
        cache = int(1.2 * tokens * cache_bytes(config)) * int(options.layers)
        graphs = sorted({1, 2, 4, 8, *rows})
        sizes = dict(cudagraph_capture_sizes=graphs, max_cudagraph_capture_size=graphs[-1])
        sizes = {} if options.default_graphs else sizes
        memory = {} if options.default_graphs else dict(kv_cache_memory_bytes=cache)
        self.llm = vllm.LLM(
            model=str(folder),
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=length,
            max_num_seqs=256 if options.default_graphs else max(rows),
            max_num_batched_tokens=self.batched,
            enable_prefix_caching=False,
            gpu_memory_utilization=0.9 if options.default_graphs else 0.03,
            compilation_config=sizes,
            generation_config="vllm",
            disable_log_stats=True,
            seed=0,
            quantization="moe_jax" if options.plugin else None,
            moe_backend=options.backend,
            **memory,
        )
        self.engine = self.llm.llm_engine
        self.started = dict(imports=imported - began, engine=time.monotonic() - imported)
        self.random = torch.Generator().manual_seed(1)
        self.count = 0

    def methods(self) -> list[str]:
        """The classes that run the experts, and whether they are ours."""

        def names(module: Any) -> list[str]:
            found = [m.quant_method for m in module.modules() if type(m).__name__ == "RoutedExperts"]
            left = [getattr(getattr(m, "moe_jax", None), "is_left", True) for m in found]
            return sorted(
                {f"{type(m).__name__}{'' if is_left else ' (ours)'}" for m, is_left in zip(found, left, strict=True)}
            )

        return self.llm.apply_model(names)[0]

    def memory(self) -> dict[str, float]:
        """GiB: tensors of torch, what torch reserved, what is in use on the device."""
        free, total = self.torch.cuda.mem_get_info()
        found = self.torch.cuda.memory_allocated(), self.torch.cuda.memory_reserved(), total - free
        return dict(zip(("allocated", "reserved", "in use"), [round(b / 2**30, 2) for b in found], strict=True))

    def add(self, length: int, new: int) -> None:
        ids = self.torch.randint(10, self.vocabulary - 10, (length,), generator=self.random).tolist()
        params = self.vllm.SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
        self.count += 1
        self.engine.add_request(str(self.count), dict(prompt_token_ids=ids), params)

    def prefill(self, length: int) -> dict[str, Any]:
        def once() -> float:
            self.torch.cuda.synchronize()
            start = time.perf_counter()
            self.add(length, 1)
            while self.engine.has_unfinished_requests():
                self.engine.step()
            self.torch.cuda.synchronize()
            return time.perf_counter() - start

        for _ in range(3):
            once()
        clock = statistics.median(once() for _ in range(7))
        return dict(clock=1e3 * clock) | self.profiled(once, 1)

    def decode(self, rows: int, context: int) -> dict[str, Any]:
        for _ in range(rows):
            self.add(context - 2 * STEPS, new_tokens(rows, context, self.batched))
        made: dict[str, int] = {}  # the last token of each row

        def step() -> None:
            for out in self.engine.step():
                made[out.request_id] = out.outputs[0].token_ids[-1]

        while len(made) < rows:
            step()
        for _ in range(WARM_UP):
            step()
        clocks = []
        for _ in range(CALLS):
            self.torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(STEPS):
                step()
            self.torch.cuda.synchronize()
            clocks.append((time.perf_counter() - start) / STEPS)
        profiled = self.profiled(lambda: [step() for _ in range(PROFILED)], PROFILED)
        if len({out.request_id for _ in range(2) for out in self.engine.step()}) != rows:
            raise RuntimeError(f"decode {rows} x {context}: rows ended before they were measured")
        self.engine.abort_request(list(made))
        while self.engine.has_unfinished_requests():
            self.engine.step()
        return dict(clock=1e3 * statistics.median(clocks), distinct=len(set(made.values()))) | profiled

    def profiled(self, call: Callable[[], Any], count: int) -> dict[str, Any]:
        """ms of one of ``count`` steps in which the GPU runs anything, the median of three, and its longest kernels."""
        from torch.profiler import ProfilerActivity, profile

        totals = []
        for _ in range(CALLS):
            with profile(activities=[ProfilerActivity.CUDA]) as profiler:
                call()
                self.torch.cuda.synchronize()
            events = [e for e in profiler.events() if str(e.device_type).endswith("CUDA")]
            totals.append(busy((e.time_range.start, e.time_range.end) for e in events) / count / 1e3)
        parts: Counter[str] = Counter()
        for event in events:
            parts[event.name[:60]] += event.time_range.elapsed_us() / count / 1e3
        return dict(kernels=statistics.median(totals), parts={n: round(ms, 4) for n, ms in parts.most_common(20)})


def child(options: argparse.Namespace) -> None:
    """One engine: a line of JSON for each thing it finds, last "done"."""
    lock = open(options.lock, "w")
    fcntl.flock(lock, fcntl.LOCK_SH)
    starts = open(f"{options.lock}_starts", "w")
    if options.one_by_one:
        fcntl.flock(starts, fcntl.LOCK_EX)
    signal.alarm(START_LIMIT)  # one that hangs would keep the others waiting
    engine = Engine(options)
    starts.close()

    def say(**found: Any) -> None:
        print("RESULT " + json.dumps(dict(case=options.case, name=options.name) | found), flush=True)

    say(started=engine.started, memory=engine.memory(), methods=engine.methods())
    if options.command == "speed":
        engine.prefill(engine.prefills[0])
        signal.alarm(0)
        fcntl.flock(lock, fcntl.LOCK_UN)
        fcntl.flock(lock, fcntl.LOCK_EX)
        for tokens in engine.prefills:
            say(cell=f"prefill {tokens}", **engine.prefill(tokens))
        for rows, context in engine.decodes:
            say(cell=f"decode {rows} x {context}", **engine.decode(rows, context))
    say(done=True)
    sys.stdout.flush()
    os._exit(0)


def launch(options: argparse.Namespace, name: str, case: str, plugin: bool, backend: str, cache: Path, gpu: str) -> Any:
    """A process of ``child`` on one GPU; its output goes to a file."""
    own = name.removesuffix(" again")  # a second start finds what the first one kept
    environment = (
        os.environ
        | ENVIRONMENT
        | dict(
            CUDA_VISIBLE_DEVICES=gpu,
            VLLM_PLUGINS="",
            VLLM_CACHE_ROOT=str(cache / f"vllm_{own}"),
            TORCHINDUCTOR_CACHE_DIR=str(cache / f"inductor_{own}"),
            TRITON_CACHE_DIR=str(cache / f"triton_{own}"),
            MOE_JAX_CACHE_DIR=str(cache / "moe_jax"),
        )
    )
    command = [
        sys.executable,
        str(Path(__file__).resolve()),
        options.command,
        "--child",
        "--case",
        case,
        "--name",
        name,
    ]
    command += [
        "--vocabulary",
        of_case(options, "vocabulary", case),
        "--layers",
        of_case(options, "layers", case),
        "--prefill",
        options.prefill,
        "--decode",
        options.decode,
        "--backend",
        backend,
        "--lock",
        str(cache / f"lock{gpu}"),
    ]
    command += (
        ["--plugin"] * plugin
        + ["--one-by-one"] * options.one_by_one
        + ["--default-graphs"] * (options.command == "start")
    )
    log = open(cache / f"{name.replace(':', '_')}.txt", "w")
    return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT), Path(log.name)


def of_case(options: argparse.Namespace, name: str, case: str) -> str:
    """An option that may have one value for each case, with slashes between them."""
    cases, given = options.cases.split(","), getattr(options, name).split("/")
    if len(given) not in (1, len(cases)):
        raise SystemExit(f"--{name}: {len(given)} values for {len(cases)} cases; one, or one for each")
    return given[cases.index(case) % len(given)]


def results(log: Path) -> list[dict[str, Any]]:
    """What a child found."""
    lines = log.read_text(errors="replace").splitlines()
    return [json.loads(line.partition("RESULT ")[2]) for line in lines if "RESULT {" in line]


def report(logs: dict[str, Path], out: Path) -> None:
    """All lines, failures with the end of their logs, and the ratios; also into files."""
    found = [result for log in logs.values() for result in results(log)]
    (out / "results.jsonl").write_text("".join(json.dumps(result) + "\n" for result in found))
    lines = [json.dumps(result) for result in found if "cell" not in result and "done" not in result]
    cells: dict[tuple[str, str], dict[str, Any]] = {}
    for result in found:
        if "cell" in result:
            cells.setdefault((result["case"], result["cell"]), {})[result["name"].partition("@")[2]] = result
    for (case, cell), sides in sorted(cells.items()):
        texts = [f"{name} {side['kernels']:.3f} ({side['clock']:.3f})" for name, side in sides.items()]
        others = [side["kernels"] for name, side in sides.items() if name != "ours"]
        ratio = f"  ratio {min(others) / sides['ours']['kernels']:.2f}" if others and "ours" in sides else ""
        # Rows that make the same tokens run the same few experts: weights that tell them apart are needed.
        alike = "".join(
            f"  {name}: {side['distinct']} distinct tokens" for name, side in sides.items() if "distinct" in side
        )
        lines.append(f"{case} {cell}: ms of kernels (clock): {', '.join(texts)}{ratio}{alike}")
    for name, log in logs.items():
        if not any("done" in result for result in results(log)):
            tail = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-12:]
            lines += [f"FAILED {name}", *(f"    {line[:300]}" for line in tail)]
        ours = [
            line for line in log.read_text(errors="replace").splitlines() if "moe_jax" in line and "RESULT" not in line
        ]
        lines += [f"    {name}: {line[:250]}" for line in ours[:12]]
    print("\n".join(lines), flush=True)
    (out / "report.txt").write_text("\n".join(lines) + "\n")


def gpus_to_use() -> list[str]:
    """Two at most, since ``start`` has pairs of engines; those of CUDA_VISIBLE_DEVICES where it is set."""
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return visible.split(",")[:2]
    found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    return [str(index) for index in range(len(found.splitlines()))][:2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("speed", "start"))
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--cases", default=CASES)
    parser.add_argument("--engines", default="", help="some of ours, auto, triton, deep_gemm and marlin; default: all")
    parser.add_argument(
        "--layers", default="4", help="of all cases, or with slashes of each, as --engines and --vocabulary"
    )
    parser.add_argument("--prefill", default="2048", help="tokens, with commas between them")
    parser.add_argument("--decode", default="1x1024,64x1024", help="rows x tokens that each holds")
    parser.add_argument(
        "--vocabulary", default="0", help="another size of it; inductor tries gpt-oss' head in 50 GB of memory"
    )
    parser.add_argument(
        "--limit", type=float, default=900, help="seconds for all of it; six engines start in 2 minutes"
    )
    parser.add_argument("--one-by-one", action="store_true", help="starts that inductor needs the memory for")
    parser.add_argument("--plugin", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--default-graphs", action="store_true", help=argparse.SUPPRESS)
    for name in ("--case", "--name", "--lock"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--backend", default="auto", help=argparse.SUPPRESS)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options)
    began, cache, logs = time.monotonic(), Path(tempfile.mkdtemp()), {}
    options.out.mkdir(parents=True, exist_ok=True)
    gpus = gpus_to_use()
    plan: list[list[tuple[str, str, bool, str, str]]]
    if options.command == "start":
        case = options.cases.partition(",")[0]
        engines = [("vllm", False), ("ours", True), ("vllm again", False), ("ours again", True)]
        plan = [
            [
                (f"{case}@{name}", case, plugin, "auto", gpu)
                for gpu, (name, plugin) in zip(gpus, engines[i : i + len(gpus)], strict=True)
            ]
            for i in range(0, len(engines), len(gpus))
        ]
    else:
        plan = [[]]
        for index, case in enumerate(options.cases.split(",")):
            gpu = gpus[index % len(gpus)]
            backends = dict(ours="auto") | {name: name for name in BACKENDS[case.partition(":")[2]]}
            engines = of_case(options, "engines", case)
            wanted = [name for name in backends if not engines or name in engines.split(",")]
            plan[0] += [(f"{case}@{name}", case, name == "ours", backends[name], gpu) for name in wanted]
    for group in plan:
        running = {}
        for name, case, plugin, backend, gpu in group:
            running[name], logs[name] = launch(options, name, case, plugin, backend, cache, gpu)
        for process in running.values():
            try:
                process.wait(max(1.0, options.limit - (time.monotonic() - began)))
            except subprocess.TimeoutExpired:
                process.kill()
    report(logs, options.out)


if __name__ == "__main__":
    main()
