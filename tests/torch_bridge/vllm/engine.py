"""Tiny checkpoints of each format in vLLM's real engine, with the plugin and without, on Hopper GPUs.

    PYTHONPATH=FOLDER_OF_VLLM python -m tests.torch_bridge.vllm.engine [--formats a,b] [--jobs 7] [--tp 2 [--ep]]

``--formats written`` is every folder of tests/support/checkpoints/written.py, which transformers and compressed-tensors
write; ``--formats bf16,written_nvfp4,...`` takes some. They are not among the formats by default.

One line a format: PASS, LEFT (vLLM ran the layer after all), NEITHER (vLLM fails by the same error without the plugin)
or FAIL, and what its engines took. A layer passes when its output is as near to float32 on the real weights as vLLM's
own is, for several numbers of tokens and both applies. The model passes when its logits are as near to those of
transformers in float32 as vLLM's own are, or within what is allowed for the format. Their distance is the upper
quartile over the prompts: a token that is routed to other experts by a rounding differs by more. Where vLLM leaves rows
in 16 bits though the checkpoint rounds them to 8, the judge of layers is the checkpoint's arithmetic. With --tp logits
alone are judged, and matrices are as many times as wide, so that a GPU's part is what --tp 1 has.

A slice of the formats has two processes, with the plugin and without, on one GPU (--tp 2: on two). Each has one engine
after the other (tests/support/in_turn.py): in itself, or in forks of itself. The exit code is 1 if any format failed.
"""

import argparse
import importlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.support import in_turn

# vLLM 0.24's own FP8 layers fail for a router of 8 columns, which are no multiple of 16.
SIZES = dict(num_experts=16, top_k=2, hidden=512, layers=2, vocabulary=1024)
INTERMEDIATE = 256  # columns of a GPU's part
TOKENS = (1, 16, 100)  # each bucket costs seconds of tracing in each engine
PROMPTS = (5, 17, 40, 100, 9, 33, 64, 80, 12, 25, 50, 120)  # tokens
LOGITS = {16: 0.03, 8: 0.12}  # relative distance from float32 that is allowed
FARTHEST = 0.35  # that is allowed beside vLLM's own, whatever these are: 0.26 at most where they are right
BOUNDS = {16: 0.02, 8: 0.12}  # relative error of a layer that vLLM's own kernels do not run


def _form(name: str) -> Any:
    """What says the config, the activations and the rows of a format."""
    from tests.support.checkpoints.vllm_formats import FORMATS
    from tests.support.checkpoints.written import WRITTEN

    return (FORMATS | WRITTEN)[name]


def write_checkpoint(folder: Path, name: str, intermediate: int) -> dict[str, Any]:
    """A model of one format, from the same seed wherever it is written. Real values of the experts by their place."""
    import torch
    from safetensors.torch import save_file

    from tests.support.checkpoints.vllm_formats import FORMATS, draw_experts
    from tests.support.checkpoints.written import WRITTEN, write

    if name in WRITTEN:
        return write(folder, name, intermediate=intermediate, **SIZES)
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    s, is_gpt_oss = SIZES, FORMATS[name].is_gpt_oss
    hidden, experts = s["hidden"], s["num_experts"]

    def normal(*shape: int, size: float | None = None) -> torch.Tensor:
        drawn = torch.randn(*shape, generator=generator, dtype=torch.float32)
        return (drawn * (shape[-1] ** -0.5 if size is None else size)).to(torch.bfloat16)

    tensors = {
        "model.embed_tokens.weight": normal(s["vocabulary"], hidden, size=1.0),
        "lm_head.weight": normal(s["vocabulary"], hidden),
        "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
    }
    values: dict[str, Any] = {}
    for layer in range(s["layers"]):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{norm}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
        for part, rows, columns in (("q", 512, hidden), ("k", 128, hidden), ("v", 128, hidden), ("o", hidden, 512)):
            tensors[f"{prefix}self_attn.{part}_proj.weight"] = normal(rows, columns)
            if is_gpt_oss:
                tensors[f"{prefix}self_attn.{part}_proj.bias"] = normal(rows, size=0.1)
        if is_gpt_oss:
            tensors[f"{prefix}self_attn.sinks"] = normal(8, size=1.0)
            tensors[f"{prefix}mlp.router.weight"] = normal(experts, hidden)
            tensors[f"{prefix}mlp.router.bias"] = normal(experts, size=0.1)
        else:
            for norm in ("q_norm", "k_norm"):
                tensors[f"{prefix}self_attn.{norm}.weight"] = torch.ones(64, dtype=torch.bfloat16)
            tensors[f"{prefix}mlp.gate.weight"] = normal(experts, hidden)
        parts, values[str(layer)] = draw_experts(FORMATS[name], generator, experts, hidden, intermediate)
        tensors |= {f"{prefix}mlp.experts.{suffix}": tensor.contiguous() for suffix, tensor in parts.items()}
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata=dict(format="pt"))
    (folder / "config.json").write_text(json.dumps(config_of(name, intermediate)))
    return values


def config_of(name: str, intermediate: int) -> dict[str, Any]:
    """The config.json of a model of one format."""
    from benchmarks._model_configs import MODELS
    from benchmarks._vllm_models import QUANTIZATION
    from tests.support.checkpoints.vllm_formats import FORMATS

    s = SIZES
    common = dict(
        hidden_size=s["hidden"],
        num_experts_per_tok=s["top_k"],
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=s["vocabulary"],
        num_hidden_layers=s["layers"],
        max_position_embeddings=4096,
    )
    config = FORMATS[name].config
    if FORMATS[name].is_gpt_oss:
        more = dict(num_local_experts=s["num_experts"], intermediate_size=intermediate)
        quantization = dict(quantization_config=QUANTIZATION["mxfp4"]) if config else {}
        kinds = ["sliding_attention", "full_attention"]
        return MODELS["gpt-oss-120b"] | common | more | dict(layer_types=kinds) | quantization
    more = dict(num_experts=s["num_experts"], moe_intermediate_size=intermediate, intermediate_size=1024)
    found = MODELS["qwen3-30b-a3b"] | common | more
    return found | dict(quantization_config=config) if isinstance(config, dict) else found


def layer_errors(model: Any, values: dict[str, Any], rows: str | None) -> dict[str, Any]:
    """By the kind of apply: the largest relative error of a row of any layer, "exact" for rows rounded by ``rows``."""
    import torch

    from tests.support import vllm_layers

    errors: dict[str, float] = {}
    methods = set()
    for index, layer in enumerate(m for m in model.modules() if type(m).__name__ == "RoutedExperts"):
        method = layer.quant_method
        experts = getattr(getattr(method, "moe_jax", None), "experts", None)
        real: list[Any] = [None if value is None else value.to("cuda") for value in values[str(index)]]
        methods.add(f"{type(method).__name__}{' (ours)' if experts is not None else ''}")
        for count in TOKENS:
            generator = torch.Generator().manual_seed(count + index)
            x = torch.randn(count, SIZES["hidden"], generator=generator, dtype=torch.float32).to("cuda", torch.bfloat16)
            logits = torch.randn(count, SIZES["num_experts"], generator=generator, dtype=torch.float32)
            logits = logits.to("cuda", torch.bfloat16)
            weights, ids = torch.softmax(logits.float(), -1).topk(SIZES["top_k"])
            weights, ids = (weights / weights.sum(-1, keepdim=True)).contiguous(), ids.to(torch.int32)
            wanted = vllm_layers.experts_float32(x, weights, ids, *real)
            found = {}
            if experts is not None:
                found["experts"] = experts.experts(x.clone(), weights, ids)
                found["layer"] = experts.layer(x.clone(), logits)
                if rows is not None:
                    rounded = getattr(vllm_layers, rows)
                    exact = vllm_layers.experts_float32(x, weights, ids, *real, rows=rounded)
                    found["exact"] = exact.to(torch.bfloat16)
            elif method.is_monolithic:
                found["own"] = method.apply_monolithic(layer, x.clone(), logits)
            else:
                found["own"] = method.apply(layer, x.clone(), weights, ids, None, None)
            for kind, y in found.items():
                error = (y.float() - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp(min=1e-6)
                value = float(error.max()) if bool(torch.isfinite(y).all()) else float("inf")
                errors[kind] = max(errors.get(kind, 0.0), value)
    return dict(errors=errors, methods=sorted(methods))


def engine(name: str, out: Path, plugin: bool, tp: int, ep: bool) -> dict[str, Any]:
    """One engine in this process, gone when it is done: errors of its layers; its logits go into a file."""
    import torch

    form = _form(name)
    values = write_checkpoint(out / "checkpoint", name, INTERMEDIATE if ep else INTERMEDIATE * tp)
    is_online = isinstance(form.config, str)
    if plugin:
        from torch_bridge.vllm import register

        register()
        quantization = form.config if is_online else "moe_jax"
    else:
        quantization = form.config.removeprefix("moe_jax_") if is_online else None
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(out / "checkpoint"),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=128,
        max_num_seqs=8,
        max_num_batched_tokens=128,
        enforce_eager=True,
        enable_prefix_caching=False,
        gpu_memory_utilization=0.02,
        kv_cache_memory_bytes=1 << 28,
        generation_config="vllm",
        quantization=quantization,
        tensor_parallel_size=tp,
        enable_expert_parallel=ep,
        max_logprobs=SIZES["vocabulary"],
        disable_log_stats=True,
        seed=0,
    )
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(5, 1000, (n,), generator=generator).tolist() for n in PROMPTS]
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=SIZES["vocabulary"], detokenize=False)

    def ask(batch: list[list[int]]) -> Any:
        found = llm.generate([dict(prompt_token_ids=ids) for ids in batch], params, use_tqdm=False)
        rows = [found_one.outputs[0].logprobs[0] for found_one in found]
        return torch.tensor([[row[token].logprob for token in range(SIZES["vocabulary"])] for row in rows])

    together, alone = ask(prompts), torch.cat([ask([prompt]) for prompt in prompts])
    logits = dict(together=together, alone=alone)
    found = dict(errors={}, methods=[])
    if tp == 1:
        with torch.inference_mode():
            found = llm.apply_model(lambda model: layer_errors(model, values, form.rows))[0]
    core = llm.llm_engine.engine_core.engine_core
    core.shutdown() if tp == 1 else core.model_executor.shutdown()  # process groups and memory; or the workers
    torch._dynamo.reset()
    if plugin:
        from tests.support.oracles.float32_logits import last_logprobs

        logits["float32"] = last_logprobs(out / "checkpoint", values, prompts)
    torch.save(logits, out / "logits.pt")
    return found


def _entry_point(root: Path) -> Path:
    """A folder from which vLLM's workers learn of the plugin where this checkout is not installed."""
    about = root / "entry" / "moe_jax_here-0.dist-info"
    about.mkdir(parents=True, exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: moe_jax_here\nVersion: 0\n")
    (about / "entry_points.txt").write_text("[vllm.general_plugins]\nmoe_jax = torch_bridge.vllm:register\n")
    return about.parent


def line(name: str, root: Path, found: dict[str, dict[str, Any]]) -> str:
    """The line about a format. found: what ``engine`` gave, by side."""
    import torch

    ours, own = found["ours"], found.get("vllm", dict(error="not run"))
    took = ", ".join(f"{side} {one['seconds']:.0f} s" for side, one in found.items())
    if "error" in ours:
        verdict = "NEITHER" if own.get("error") == ours["error"] else "FAIL"
        return f"{verdict} {name}: ours: {ours['error']}; vLLM: {own.get('error', 'ran')} ({took})"

    def apart(a: Any, b: Any) -> float:
        a, b = (t - t.mean(-1, keepdim=True) for t in (a, b))
        return float(((a - b).norm(dim=-1) / b.norm(dim=-1)).quantile(0.75))

    log = (root / "ours" / name / "log.txt").read_text(errors="replace")
    left = [said[:220] for said in log.splitlines() if "moe_jax leaves" in said][:1]
    activations, exact = _form(name).activations, ours["errors"].pop("exact", None)
    has_vllm = "error" not in own
    logits = {side: torch.load(root / side / name / "logits.pt") for side in ("ours", *["vllm"] * has_vllm)}
    far = {side: apart(of_side["together"], logits["ours"]["float32"]) for side, of_side in logits.items()}
    spread = {side: apart(of_side["alone"], of_side["together"]) for side, of_side in logits.items()}
    allowed = LOGITS[activations]
    if has_vllm:
        allowed = max(allowed, min(1.15 * far["vllm"] + 0.002, FARTHEST))
        theirs = own["errors"].get("own", 0.0)
        bound = 1.15 * (theirs if exact is None else exact) + 0.002
        beside = f"vLLM's {','.join(own['methods'])} {theirs:.4f}"
        beside += "" if exact is None else f" with rows in 16 bits, exact arithmetic of the checkpoint {exact:.4f}"
        of_vllm = f"vLLM's {far['vllm']:.4f}, runs of its own {spread['vllm']:.4f} apart"
    else:
        bound, beside, of_vllm = BOUNDS[activations], f"vLLM: {own['error']}", "vLLM has none"
    is_near = all(v <= bound < float("inf") for v in ours["errors"].values()) and far["ours"] <= allowed
    said = ""
    if ours["errors"]:  # not with --tp
        of_layers = " ".join(f"{k} {v:.4f}" for k, v in ours["errors"].items())
        said = f"{','.join(ours['methods'])} errors {of_layers}; {beside}; "
    elif not has_vllm:
        said = f"{beside}; "
    return (
        f"{'FAIL' if not is_near else 'LEFT' if left else 'PASS'} {name}: {said}logits off float32 by "
        f"{far['ours']:.4f}, runs {spread['ours']:.4f} apart, {of_vllm} ({took}) {' '.join(left)}"
    )


def _environment(root: Path) -> dict[str, str]:
    from benchmarks._vllm_environment import ENVIRONMENT

    path = os.pathsep.join([str(_entry_point(root)), os.getcwd(), os.environ.get("PYTHONPATH", "")])
    own = dict(PYTHONPATH=path, VLLM_PLUGINS="moe_jax", VLLM_ALLOW_INSECURE_SERIALIZATION="1")
    # With a pool of threads for each core, engines side by side wait for each other.
    return os.environ | ENVIRONMENT | own | dict(OMP_NUM_THREADS="1", MOE_JAX_CACHE_DIR=str(root / "moe_jax"))


def _ends(log: str) -> str:
    """Beginning and end of a log without what repeats: frames of C++ stacks."""
    text = "\n".join(line for line in log.splitlines() if not line.startswith("frame #"))
    return text if len(text) <= 40000 else f"{text[:20000]}\n...\n{text[-20000:]}"


def main() -> None:
    from tests.support.checkpoints.vllm_formats import FORMATS
    from tests.support.checkpoints.written import WRITTEN

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--beside", help="formats for which vLLM runs alone too; all by default")
    parser.add_argument("--jobs", type=int, help="slices of the formats, of two processes; default: half the cores'")
    parser.add_argument("--limit", type=float, default=120, help="seconds for one engine, and for a start of a process")
    parser.add_argument("--total", type=float, help="seconds for all of it")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--ep", action="store_true")
    parser.add_argument("--forks", action="store_true", help="each engine in a fork of its own, as with --tp anyway")
    parser.add_argument("--out", type=Path, help="where the ends of all logs go")
    parser.add_argument("--plugin", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--root", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.formats.split(",")
    if options.root:
        importlib.import_module("vllm.entrypoints.llm")  # a part of the start, not of the first engine
        own = dict(plugin=options.plugin, tp=options.tp, ep=options.ep)
        forks = options.forks or options.tp > 1  # vLLM forks the workers, best from what had none before
        in_turn.judge_in_turn(names, options.root, lambda name, out: engine(name, out, **own), forks)
    names = list(dict.fromkeys(each for name in names for each in (WRITTEN if name == "written" else [name])))
    if unknown := set(names) - {*FORMATS, *WRITTEN}:
        parser.error(f"--formats: no {', '.join(sorted(unknown))}; there are written, {', '.join(FORMATS | WRITTEN)}")
    # Two sides; a process keeps two cores busy, and half of the cores stay free.
    jobs = min(options.jobs or max(1, ((os.cpu_count() or 1) - 1) // (8 * options.tp)), len(names))
    beside = options.beside.split(",") if options.beside else names
    root = Path(tempfile.mkdtemp())
    environment = _environment(root)
    command = [sys.executable, "-m", "tests.torch_bridge.vllm.engine", "--tp", str(options.tp)]
    command += ["--ep"] * options.ep + ["--forks"] * options.forks
    slices: list[in_turn.Slice] = []
    for index, gpus in enumerate(in_turn.gpus_of_slices(jobs, options.tp)):
        part = names[index::jobs]
        for side, of_side in (("vllm", [name for name in part if name in beside]), ("ours", part)):
            own = [*command, *["--plugin"] * (side == "ours"), "--root", str(root / side), "--formats"]
            on_gpus = environment | dict(CUDA_VISIBLE_DEVICES=gpus)
            slices.append(in_turn.Slice(own, of_side, root / side, options.limit, on_gpus))
    found: dict[str, dict[str, Any]] = {name: {} for name in names}
    verdicts: dict[str, str] = {}
    for one, name, of_side in in_turn.run(slices, options.total):
        found[name][one.root.name] = of_side
        if len(found[name]) == 1 + (name in beside):
            said = line(name, root, found[name])
            verdicts[name] = said.split()[0]
            print(said, flush=True)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        logs = {log: log.read_text(errors="replace") for log in sorted(root.glob("[ov]*/**/*.txt"))}
        text = "\n".join(f"=== {log.relative_to(root)}\n{_ends(content)}" for log, content in logs.items())
        (options.out / "logs.txt").write_text(text)
    sys.exit(in_turn.summary(names, verdicts, slices))


if __name__ == "__main__":
    main()
