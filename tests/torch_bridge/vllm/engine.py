"""Tiny checkpoints of each format in vLLM's real engine, with the plugin and without, on one Hopper GPU.

    PYTHONPATH=FOLDER_OF_VLLM python -m tests.torch_bridge.vllm.engine [--formats a,b] [--jobs 8] [--tp 2 [--ep]]

``--formats written`` is every folder of tests/support/checkpoints/written.py, which transformers and compressed-tensors
write; ``--formats written_nvfp4,...`` takes some of them. They are not among the formats by default.

One line a format: PASS, LEFT (vLLM ran the layer after all) or FAIL. A layer passes when its output is as near to
float32 on the real weights as vLLM's own is, for several numbers of tokens and both applies; the model when its logits
differ from vLLM's by no more than what is allowed for the format. Where vLLM leaves rows in 16 bits though the
checkpoint rounds them to 8, the judge of layers is the checkpoint's arithmetic. Each engine is a process with its own
time limit.
"""

import argparse
import concurrent.futures
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SIZES = dict(num_experts=8, top_k=2, hidden=512, intermediate=256, layers=2, vocabulary=1024)
TOKENS = (1, 16, 100)  # each bucket costs seconds of tracing in each engine
LOGITS = {16: 0.03, 8: 0.12}  # relative difference that is allowed


def _form(name: str) -> Any:
    """What says the config, the activations and the rows of a format."""
    from tests.support.checkpoints.vllm_formats import FORMATS
    from tests.support.checkpoints.written import WRITTEN

    return (FORMATS | WRITTEN)[name]


def _rows(name: str) -> str | None:
    """The function of tests/support/vllm_layers.py that rounds rows as the checkpoint says, where vLLM does not."""
    from tests.torch_bridge.vllm.layers import IN_16_BITS

    return IN_16_BITS.get(name, getattr(_form(name), "rows", None))


def write_checkpoint(folder: Path, name: str) -> dict[str, Any]:
    """A model of one format, from the same seed wherever it is written. Real values of the experts by their place."""
    import torch
    from safetensors.torch import save_file

    from tests.support.checkpoints.vllm_formats import FORMATS, draw_experts
    from tests.support.checkpoints.written import WRITTEN, write

    if name in WRITTEN:
        return write(folder, name, **SIZES)
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    s, is_gpt_oss = SIZES, FORMATS[name].is_gpt_oss
    hidden, intermediate, experts = s["hidden"], s["intermediate"], s["num_experts"]

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
    (folder / "config.json").write_text(json.dumps(_config(name)))
    return values


def _config(name: str) -> dict[str, Any]:
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
        more = dict(num_local_experts=s["num_experts"], intermediate_size=s["intermediate"])
        quantization = dict(quantization_config=QUANTIZATION["mxfp4"]) if config else {}
        kinds = ["sliding_attention", "full_attention"]
        return MODELS["gpt-oss-120b"] | common | more | dict(layer_types=kinds) | quantization
    more = dict(num_experts=s["num_experts"], moe_intermediate_size=s["intermediate"], intermediate_size=1024)
    found = MODELS["qwen3-30b-a3b"] | common | more
    return found | dict(quantization_config=config) if isinstance(config, dict) else found


def expected(x: Any, weights: Any, ids: Any, values: Any) -> Any:
    """The experts in float32 on the real weights."""
    import torch

    w13, w2, w13_bias, w2_bias = [None if value is None else value.to(x.device) for value in values]
    y = torch.zeros(x.shape, device=x.device)
    for expert in range(w13.shape[0]):
        token, place = (ids == expert).nonzero(as_tuple=True)
        h = torch.einsum("gih,th->tgi", w13[expert], x[token].float())
        if w13_bias is None:
            h = torch.nn.functional.silu(h[:, 0]) * h[:, 1]
        else:
            h = h + w13_bias[expert]
            gate, up = h[:, 0].clamp(max=7.0), h[:, 1].clamp(-7.0, 7.0)
            h = gate * torch.sigmoid(1.702 * gate) * (up + 1)
        out = h @ w2[expert].T + (0 if w2_bias is None else w2_bias[expert])
        y.index_add_(0, token, weights[token, place][:, None] * out)
    return y


def layer_errors(model: Any, values: dict[str, Any], rows: str | None) -> dict[str, Any]:
    """By the kind of apply: the largest relative error of a row of any layer, "exact" for rows rounded by ``rows``."""
    import torch

    errors: dict[str, float] = {}
    methods = set()
    for index, layer in enumerate(m for m in model.modules() if type(m).__name__ == "RoutedExperts"):
        method = layer.quant_method
        experts = getattr(getattr(method, "moe_jax", None), "experts", None)
        methods.add(f"{type(method).__name__}{' (ours)' if experts is not None else ''}")
        for count in TOKENS:
            generator = torch.Generator().manual_seed(count + index)
            x = torch.randn(count, SIZES["hidden"], generator=generator, dtype=torch.float32).to("cuda", torch.bfloat16)
            logits = torch.randn(count, SIZES["num_experts"], generator=generator, dtype=torch.float32)
            logits = logits.to("cuda", torch.bfloat16)
            weights, ids = torch.softmax(logits.float(), -1).topk(SIZES["top_k"])
            weights, ids = (weights / weights.sum(-1, keepdim=True)).contiguous(), ids.to(torch.int32)
            wanted = expected(x, weights, ids, values[str(index)])
            found = {}
            if experts is not None:
                found["experts"] = experts.experts(x.clone(), weights, ids)
                found["layer"] = experts.layer(x.clone(), logits)
                if rows is not None:
                    from tests.support import vllm_layers

                    w13, w2 = (value.to("cuda") for value in values[str(index)][:2])
                    rounded = getattr(vllm_layers, rows)
                    exact = vllm_layers.experts_float32(x, weights, ids, w13, w2, rows=rounded)
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


def child(name: str, plugin: bool, out: Path, tp: int, ep: bool) -> None:
    """One engine: errors of its layers and its logits into a file."""
    import torch

    values, rows = write_checkpoint(out / "checkpoint", name), _rows(name)
    config = _form(name).config
    is_online = isinstance(config, str)
    if plugin:
        from torch_bridge.vllm import register

        register()
        quantization = config if is_online else "moe_jax"
    else:
        quantization = config.removeprefix("moe_jax_") if is_online else None
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
    prompts = [torch.randint(5, 1000, (n,), generator=generator).tolist() for n in (5, 17, 40, 100)]
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=SIZES["vocabulary"], detokenize=False)

    def ask(batch: list[list[int]]) -> Any:
        found = llm.generate([dict(prompt_token_ids=ids) for ids in batch], params, use_tqdm=False)
        rows = [found_one.outputs[0].logprobs[0] for found_one in found]
        return torch.tensor([[row[token].logprob for token in range(SIZES["vocabulary"])] for row in rows])

    together, alone = ask(prompts), torch.cat([ask([prompt]) for prompt in prompts])
    torch.save(dict(together=together, alone=alone), out / "logits.pt")
    found = dict(errors={}, methods=["?"])
    if tp == 1:
        with torch.inference_mode():
            found = llm.apply_model(lambda model: layer_errors(model, values, rows))[0]
    (out / "found.json").write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)


def _entry_point(root: Path) -> Path:
    """A folder from which vLLM's workers learn of the plugin where this checkout is not installed."""
    about = root / "entry" / "moe_jax_here-0.dist-info"
    about.mkdir(parents=True, exist_ok=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: moe_jax_here\nVersion: 0\n")
    (about / "entry_points.txt").write_text("[vllm.general_plugins]\nmoe_jax = torch_bridge.vllm:register\n")
    return about.parent


def judge(name: str, root: Path, limit: float, tp: int, ep: bool, is_beside: bool) -> str:
    """The engines of a format, and the line about them. is_beside: vLLM alone, too."""
    import torch

    from benchmarks._vllm_environment import ENVIRONMENT

    path = os.pathsep.join([str(_entry_point(root)), os.getcwd(), os.environ.get("PYTHONPATH", "")])
    own = dict(PYTHONPATH=path, VLLM_PLUGINS="moe_jax", VLLM_ALLOW_INSECURE_SERIALIZATION="1")
    environment = os.environ | ENVIRONMENT | own | dict(MOE_JAX_CACHE_DIR=str(root / "moe_jax"))

    def run(side: str) -> Any:
        out = root / f"{name}_{side}"
        out.mkdir()
        command = [sys.executable, "-m", "tests.torch_bridge.vllm.engine", "--child", name, "--out", str(out)]
        command += ["--plugin"] * (side == "ours") + ["--tp", str(tp)] + ["--ep"] * ep
        with open(out / "log.txt", "w") as log:
            try:
                rc = subprocess.run(command, env=environment, stdout=log, stderr=log, timeout=limit).returncode
            except subprocess.TimeoutExpired:
                rc = "time is up"
        text = (out / "log.txt").read_text(errors="replace")
        if rc != 0 or not (out / "found.json").exists():
            errors = [line for line in text.splitlines() if "Error" in line and "_C" not in line][-2:]
            return f"{side} failed ({rc}): " + " | ".join(line.strip()[:200] for line in errors)
        left = [line[:220] for line in text.splitlines() if "moe_jax leaves" in line][:1]
        return json.loads((out / "found.json").read_text()) | torch.load(out / "logits.pt") | dict(left=left)

    sides = ("vllm", "ours") if is_beside else ("ours",)
    with concurrent.futures.ThreadPoolExecutor(len(sides)) as pool:
        found = dict(zip(sides, pool.map(run, sides), strict=True))
    ours, own = found["ours"], found.get("vllm", "vLLM not run")
    if isinstance(ours, str):
        return f"FAIL {name}: {ours}; vLLM: {own if isinstance(own, str) else 'ran'}"

    def apart(a: Any, b: Any) -> float:
        a, b = (t - t.mean(-1, keepdim=True) for t in (a, b))
        return float((a - b).norm() / b.norm())

    activations, exact = _form(name).activations, ours["errors"].pop("exact", None)
    said = f"{','.join(ours['methods'])} errors " + " ".join(f"{k} {v:.4f}" for k, v in ours["errors"].items())
    verdict = "LEFT" if ours["left"] else "PASS"
    if isinstance(own, str):
        is_near = all(v < (0.02 if activations == 16 else 0.12) for v in ours["errors"].values())
        return f"{verdict if is_near else 'FAIL'} {name}: {said}; {own}"
    theirs, spread = own["errors"].get("own", 0.0), apart(own["alone"], own["together"])
    difference = apart(ours["together"], own["together"])
    bound = 1.15 * (theirs if exact is None else exact) + 0.002
    is_near = all(v <= bound for v in ours["errors"].values())
    beside = "" if exact is None else f" with rows in 16 bits, exact arithmetic of the checkpoint {exact:.4f}"
    is_same = difference <= max(LOGITS[activations], 3 * spread)
    verdict = verdict if is_near and is_same else "FAIL"
    return (
        f"{verdict} {name}: {said}; vLLM's {','.join(own['methods'])} {theirs:.4f}{beside}; "
        f"logits differ {difference:.4f}, vLLM's own spread {spread:.4f}, "
        f"ours {apart(ours['alone'], ours['together']):.4f} {' '.join(ours['left'])}"
    )


def main() -> None:
    from tests.support.checkpoints.vllm_formats import FORMATS
    from tests.support.checkpoints.written import WRITTEN

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--beside", help="formats for which vLLM runs alone too; all by default")
    parser.add_argument("--jobs", type=int, default=6, help="formats at once; each has up to two engines of two cores")
    parser.add_argument("--limit", type=float, default=240, help="seconds for one engine")
    parser.add_argument("--total", type=float, help="seconds for all of it")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--ep", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--plugin", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.plugin, options.out, options.tp, options.ep)
    root = Path(tempfile.mkdtemp())
    names = list(WRITTEN) if options.formats == "written" else options.formats.split(",")
    beside = options.beside.split(",") if options.beside else names
    pool = concurrent.futures.ThreadPoolExecutor(options.jobs)
    futures = {
        pool.submit(judge, name, root, options.limit, options.tp, options.ep, name in beside): name for name in names
    }
    try:
        for future in concurrent.futures.as_completed(futures, options.total):
            error = future.exception()
            print(future.result() if error is None else f"FAIL {futures[future]}: {error!r}", flush=True)
    except TimeoutError:
        print("not done:", ", ".join(name for future, name in futures.items() if not future.done()), flush=True)
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        logs = {log: log.read_text(errors="replace") for log in sorted(root.glob("*/log.txt"))}
        text = "\n".join(f"=== {log.parent.name}\n{content[-6000:]}" for log, content in logs.items())
        (options.out / "logs.txt").write_text(text)
    sys.stdout.flush()
    os._exit(0)  # engines that are still running end with their own limits


if __name__ == "__main__":
    main()
