"""Layers of each format in real vLLM on Hopper GPUs, with the plugin and without, each beside float32.

    PYTHONPATH=FOLDER_OF_VLLM python -m tests.torch_bridge.vllm.layers [--formats a,b] [--jobs 12]

One line a format: PASS, LEFT (vLLM runs the layer) or FAIL, and the relative errors of rows, their mean and (in
brackets) the largest. A layer passes when its outputs, for several numbers of tokens and both applies, are as near to
float32 on the real weights as vLLM's own are: the mean within a tenth, the largest, of which chance has more, within 3
tenths. vLLM leaves the rows of some layers in 16 bits though the checkpoint rounds them to 8 (int8; FP8 with a scale a
call, which it runs by Marlin); there the judge is the checkpoint's arithmetic.
Where vLLM's own fails, fixed bounds decide.
``engine.py`` judges whole models.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

from tests.support import in_turn
from tests.torch_bridge.vllm.engine import BOUNDS, INTERMEDIATE, config_of

E, TOP_K, H = 8, 2, 512


def row_errors(name: str, plugin: bool, tokens: list[int], intermediate: int) -> tuple[dict[str, list[float]], Any]:
    """Relative errors of all rows by the kind of apply, "exact" for the checkpoint's arithmetic; the layer's method."""
    import torch

    from tests.support import vllm_layers
    from tests.support.checkpoints.vllm_formats import FORMATS
    from tests.support.vllm_layers import experts_float32, load_experts, make_layer

    form = FORMATS[name]
    sizes = dict(num_experts=E, top_k=TOP_K, hidden_size=H, intermediate_size=intermediate)
    generator = torch.Generator().manual_seed(len(name))
    with torch.device("cuda"):
        layer = make_layer(form.config, plugin=plugin, **sizes, **form.settings)
    method = layer.quant_method
    drawn = load_experts(layer, form, generator, E, H, intermediate, device="cuda")
    values = [None if part is None else part.cuda() for part in drawn]
    ours = getattr(method, "moe_jax", None)
    if ours is None or not ours.form.online:
        method.process_weights_after_loading(layer)
    experts = None if ours is None else ours.experts
    errors: dict[str, list[float]] = {}
    for count in tokens:
        x = torch.randn(count, H, generator=generator, dtype=torch.float32).to("cuda", torch.bfloat16)
        logits = torch.randn(count, E, generator=generator, dtype=torch.float32).to("cuda", torch.bfloat16)
        weights, ids = torch.softmax(logits.float(), -1).topk(TOP_K)
        weights, ids = (weights / weights.sum(-1, keepdim=True)).contiguous(), ids.to(torch.int32)
        expected = experts_float32(x, weights, ids, *values)
        found = {}
        if experts is not None:
            found["experts"] = method.apply(layer, x.clone(), weights, ids, None, None)
            found["layer"] = method.apply_monolithic(layer, x.clone(), logits)
        elif method.is_monolithic:
            found["own"] = method.apply_monolithic(layer, x.clone(), logits)
        else:
            found["own"] = method.apply(layer, x.clone(), weights, ids, None, None)
        if form.rows is not None:
            rows = getattr(vllm_layers, form.rows)
            found["exact"] = experts_float32(x, weights, ids, *values, rows=rows).to(torch.bfloat16)
        for kind, y in found.items():
            of_rows = (y.float() - expected).norm(dim=-1) / expected.norm(dim=-1)
            errors.setdefault(kind, []).extend(of_rows.nan_to_num(float("inf")).tolist())
    return errors, method


def judge(name: str, folder: Path, tokens: list[int], intermediate: int) -> dict[str, Any]:
    """The line about a format."""
    from tests.support.checkpoints.vllm_formats import FORMATS

    form = FORMATS[name]
    set_model_config(name, folder, intermediate)
    ours, method = row_errors(name, True, tokens, intermediate)
    bounds = float("inf"), BOUNDS[form.activations]
    try:
        theirs = row_errors(name, False, tokens, intermediate)[0]
        beside = f"vLLM's own {_text(theirs['own'])}"
        judges = theirs["own"] if form.rows is None else ours.pop("exact")
        bounds = 1.1 * statistics.mean(judges) + 0.001, 1.3 * max(judges) + 0.002
        if form.rows is not None:
            beside += f" with rows in 16 bits; exact arithmetic of the checkpoint {_text(judges)}"
    except Exception as error:
        ours.pop("exact", None)
        beside = f"vLLM's own fails: {type(error).__name__} {error}"[:160]
    passes = all(statistics.mean(rows) <= bounds[0] and max(rows) <= bounds[1] for rows in ours.values())
    verdict = "LEFT" if "own" in ours else "PASS" if passes else "FAIL"
    said = " ".join(f"{kind} {_text(rows)}" for kind, rows in ours.items())
    return dict(line=f"{verdict} {name}: {type(method).__name__} {said}; {beside}")


def set_model_config(name: str, folder: Path, intermediate: int = INTERMEDIATE) -> None:
    """Gives vLLM's current config that of the model, which vLLM's choice of a kernel for gpt-oss asks; or none."""
    from vllm.config import get_current_vllm_config

    from tests.support.checkpoints.vllm_formats import FORMATS
    from tests.support.vllm_layers import model_config

    config = get_current_vllm_config()
    config.model_config = None
    if FORMATS[name].is_gpt_oss:
        (folder / "config.json").write_text(json.dumps(config_of(name, intermediate)))
        config.model_config = model_config(folder)


def _text(rows: list[float]) -> str:
    return f"{statistics.mean(rows):.4f} ({max(rows):.4f})"


def child(names: list[str], root: Path, tokens: list[int], intermediate: int) -> None:
    """Formats one after the other, in what vLLM's worker would surround them with."""
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.forward_context import set_forward_context
    from vllm.v1.worker.workspace import init_workspace_manager

    from torch_bridge.vllm import _method, register

    register()
    torch.set_default_dtype(torch.bfloat16)
    config = VllmConfig()
    no_programs_ahead = mock.patch.object(_method, "_prepare", _leaves_programs_to_calls)
    torch.set_grad_enabled(False)
    with set_current_vllm_config(config), no_programs_ahead:
        init_distributed_environment(1, 0, f"file://{tempfile.mkdtemp()}/store", 0, "nccl")
        initialize_model_parallel(1, 1)
        init_workspace_manager(torch.device("cuda:0"))
        with set_forward_context(None, config):
            in_turn.judge_in_turn(names, root, lambda name, folder: judge(name, folder, tokens, intermediate))


def _leaves_programs_to_calls(experts: Any, layer: Any, routes: bool) -> None:
    experts.prepare((), entry="layer" if routes else "experts")


def main() -> None:
    from tests.support.checkpoints.vllm_formats import FORMATS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--tokens", default="1,16,100", help="of the calls; each number costs seconds of tracing")
    parser.add_argument(
        "--intermediate", type=int, default=INTERMEDIATE, help="columns of a matrix, as of a rank's part"
    )
    parser.add_argument("--jobs", type=int, default=12, help="processes at once")
    parser.add_argument("--limit", type=float, default=120, help="seconds for one format, and for a start of a process")
    parser.add_argument("--root", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    names = options.formats.split(",")
    if options.root is not None:
        child(names, options.root, [int(count) for count in options.tokens.split(",")], options.intermediate)
    environment = os.environ | dict(VLLM_PLUGINS="", XLA_PYTHON_CLIENT_PREALLOCATE="false", DO_NOT_TRACK="1")
    root, jobs = Path(tempfile.mkdtemp()), min(options.jobs, len(names))
    command = [sys.executable, "-m", "tests.torch_bridge.vllm.layers", "--tokens", options.tokens]
    command += ["--intermediate", str(options.intermediate)]
    command += ["--root", str(root), "--formats"]
    slices = [
        in_turn.Slice(command, names[index::jobs], root, options.limit, environment | dict(CUDA_VISIBLE_DEVICES=gpu))
        for index, gpu in enumerate(in_turn.gpus_of_slices(jobs))
    ]
    verdicts: dict[str, str] = {}
    for _, name, found in in_turn.run(slices):
        line = found.get("line") or f"FAIL {name}: {found['error']}"
        verdicts[name] = line.split()[0]
        print(f"{line} ({found['seconds']:.0f} s)", flush=True)
    sys.exit(in_turn.summary(names, verdicts, slices))


if __name__ == "__main__":
    main()
