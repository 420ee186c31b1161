"""inspect_checkpoint: what it counts, and that its problems are those that loading refuses, all of them at once."""

import json
import re
import resource
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

import moe_jax
from moe_jax.cli import _inspect
from moe_jax.inspection import inspect_checkpoint
from moe_jax.loading import Checkpoint, CheckpointError
from tests.support.refusals import refuses

DATA = Path(__file__).parents[1] / "data"  # written by llm-compressor
FAMILIES = ("qwen3_moe", "mixtral")
SCHEMES = {"fp8": "fp8_tensor_static", "fp8_dynamic": "fp8_channel", "fp8_block": "fp8_block", "w8a8": "int8_w8a8"}


@pytest.fixture
def model(tmp_path):
    """A small checkpoint to be damaged."""
    shutil.copytree(DATA / "qwen3_moe-fp8_dynamic", tmp_path / "model")
    return tmp_path / "model"


def edit_config(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(directory, change):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", SCHEMES)
def test_report_of_a_sound_checkpoint(family, name, monkeypatch):
    directory = DATA / f"{family}-{name}"
    tensors = load_file(directory / "model.safetensors")
    read, names = Checkpoint.read, []
    monkeypatch.setattr(Checkpoint, "read", lambda self, name: names.append(name) or read(self, name))
    report = inspect_checkpoint(directory)
    assert set(names) == {key for key in tensors if ".experts." in key and key.endswith("_scale")}  # and no weights
    assert report.problems == () and report.family == family
    assert (report.num_tensors, report.nbytes) == (len(tensors), sum(t.nbytes for t in tensors.values()))
    parts = {part.name: part for part in report.parts}
    assert sum(part.nbytes for part in report.parts) == report.nbytes
    experts = [tensor for key, tensor in tensors.items() if ".experts." in key]
    assert (parts["experts"].num_tensors, parts["experts"].nbytes) == (len(experts), sum(t.nbytes for t in experts))
    assert parts["experts"].dtypes[0] == ("I8" if name == "w8a8" else "F8_E4M3")
    routers = [key for key in tensors if key.endswith((".mlp.gate.weight", ".block_sparse_moe.gate.weight"))]
    assert parts["routers"].num_tensors == len(routers) == 2
    assert parts["norms"].num_tensors == sum("norm" in key for key in tensors)
    (run,) = report.expert_runs
    assert run.layers == (0, 1) and run.scheme == SCHEMES[name]


@pytest.mark.parametrize("name", SCHEMES)
def test_bytes_when_loaded_and_explanation(name):
    directory = DATA / f"qwen3_moe-{name}"
    (run,) = inspect_checkpoint(directory, num_tokens=7).expert_runs
    experts = moe_jax.load_moe(directory, 0).experts
    assert run.nbytes == 2 * experts.weights.get_value().nbytes()
    assert run.explanation.splitlines()[1:] == experts.explain(7).splitlines()[1 : len(run.explanation.splitlines())]


def test_text(model):
    text = inspect_checkpoint(model).render()
    assert all(line == line.rstrip() and len(line) < 130 for line in text.splitlines())
    for words in (
        "qwen3_moe",
        "fp8_channel",
        "implementation: xla",
        "no problems",
        "compressed-tensors (float-quantized",
    ):
        assert words in text
    rows = text[text.index("\npart") :].split("\n\n")[0].strip().splitlines()
    column = rows[0].index("stored as")
    assert all(row[column - 2 : column] == "  " and row[column] != " " for row in rows)


def load_error(directory):
    with pytest.raises((ValueError, NotImplementedError)) as error:
        moe_jax.load_pretrained(directory)
    return " ".join(str(error.value).split())


EXPERT = "model.layers.1.mlp.experts.2.up_proj"
DAMAGE = {
    "expert tensor missing": lambda t: t.pop(f"{EXPERT}.weight"),
    "expert scale missing": lambda t: t.pop(f"{EXPERT}.weight_scale"),
    "expert tensor unexpected": lambda t: t.update({f"{EXPERT}.weight_g_idx": t[f"{EXPERT}.weight_scale"].clone()}),
    "expert shape": lambda t: t.update(
        {f"{EXPERT}.{k}": t[f"{EXPERT}.{k}"][:-1].clone() for k in ("weight", "weight_scale")}
    ),
    "scale dtype": lambda t: t.update({f"{EXPERT}.weight_scale": t[f"{EXPERT}.weight_scale"].float()}),
    "dense tensor missing": lambda t: t.pop("model.layers.0.self_attn.q_proj.weight"),
    "dense tensor unexpected": lambda t: t.update(
        {"model.layers.0.self_attn.r_proj.weight": t["lm_head.weight"].clone()}
    ),
    "layer of experts beyond": lambda t: t.update(
        {"model.layers.7.mlp.experts.0.up_proj.weight": t["lm_head.weight"].clone()}
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
@pytest.mark.sample(2)
def test_problems_are_what_loading_refuses(model, case):
    edit_tensors(model, DAMAGE[case])
    problems = inspect_checkpoint(model).problems
    assert load_error(model) in problems, problems


@pytest.mark.parametrize("value, leaf", [(np.nan, "weight_scale"), (np.inf, "weight_scale"), (-1.0, "weight_scale")])
def test_bad_scales_are_problems(model, value, leaf):
    edit_tensors(model, lambda t: t[f"{EXPERT}.{leaf}"][3].fill_(value))
    (problem,) = inspect_checkpoint(model).problems
    assert f"tensor {EXPERT}.{leaf}: found scale {value} at (3, 0), expected a finite number >= 0" in problem
    assert "scale" in load_error(model)


def test_weights_are_left_to_loading(model):
    """A report says that it has not looked at them."""
    edit_tensors(model, lambda t: t["model.norm.weight"].fill_(np.nan))
    report = inspect_checkpoint(model)
    assert report.problems == () and "weights are checked when loaded" in report.render()
    assert "model.norm.weight" in load_error(model)


def test_all_problems_are_listed(model):
    def damage(tensors):
        for layer in (0, 1):
            del tensors[f"model.layers.{layer}.mlp.experts.0.gate_proj.weight"]
        del tensors["model.norm.weight"]

    edit_tensors(model, damage)
    report = inspect_checkpoint(model)
    assert len(report.problems) == 3
    assert all(any(word in problem for problem in report.problems) for word in ("layers.0", "layers.1", "model.norm"))
    assert "problems:" in report.render() and report.problems[0] in report.render()


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"model_type": "no_such_model"}, "no_such_model"),
        ({"num_experts": 4, "num_local_experts": 4}, "expert"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok"),
        ({"quantization_config": {"quant_method": "quark", "bits": 4}}, "quark"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "expected weights of int4"),
        ({"quantization_config": None}, "no quantization_config"),
    ],
)
def test_configs_that_do_not_fit(model, changes, words):
    edit_config(model, **changes)
    report = inspect_checkpoint(model)
    assert words in " ".join(report.problems) and load_error(model) in report.problems
    assert {part.name for part in report.parts} >= {"experts", "attention"}  # the rest of the report is there


def test_a_family_without_a_model_still_shows_its_schemes(model):
    edit_config(model, model_type="qwen3_next", architectures=["Qwen3NextForCausalLM"])
    report = inspect_checkpoint(model)
    (run,) = report.expert_runs
    assert (run.layers, run.scheme, run.explanation) == ((0, 1), "fp8_channel", "") and report.config is None
    assert "experts of layers 0-1: fp8_channel" in report.render()


def test_many_problems_are_cut(model, monkeypatch):
    rng = np.random.default_rng(0)
    edit_tensors(model, lambda t: [t.pop(name) for name in list(t) if ".experts." in name and rng.random() < 0.2])
    monkeypatch.setattr(_inspect, "_MOST_PROBLEMS", 1)
    report = inspect_checkpoint(model)
    assert len(report.problems) == 2 and report.problems[-1].startswith("and ")


def test_what_cannot_be_opened_is_an_error(tmp_path):
    refuses(CheckpointError, "no such directory", inspect_checkpoint, tmp_path / "gone")


@pytest.mark.parametrize(
    "key, value, words",
    [
        ("num_local_experts", 10**7, "num_local_experts is 10000000, expected at most 65536"),
        ("num_local_experts", 2**40, "expected at most 65536"),
        ("num_local_experts", 60_000, "with 60000 experts; the .* tensors of the files cannot hold that many"),
        ("num_hidden_layers", 4096, "num_hidden_layers is 4096, expected at most 1024"),
        ("num_hidden_layers", 1000, "describes 1000 layers, 1000 of them with"),
        ("mlp_only_layers", list(range(200_000)), "layers"),
    ],
)
def test_counts_of_a_config_are_compared_with_the_files_first(model, key, value, words):
    """Nothing is built for layers and experts that cannot be there; every way of reading says so."""
    edit_config(model, **{key: value})
    start, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    problems = inspect_checkpoint(model).problems
    assert any(re.search(words, problem) for problem in problems), problems
    calls = [lambda: moe_jax.load_pretrained(model)]
    if key == "num_local_experts":
        calls += [
            lambda: moe_jax.load_moe(model),
            lambda: moe_jax.quantize_checkpoint(model, model.parent / "out", scheme="bf16"),
        ]
    for call in calls:
        refuses(ValueError, "at most|cannot hold|can hold|layers", call)
    assert time.process_time() - start < 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KB
