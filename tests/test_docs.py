"""What the README and docstrings show is run: examples, `explain` output, names of schemes."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import jax
import pytest

import moe_jax
import pallas_kernels
from moe_jax.experts import explain
from moe_jax.quantization import SCHEMES, method_for
from tests.support.cases.hopper_layers import on_hopper
from tests.support.checkpoints.texts import write_text_model

README = (Path(__file__).parent.parent / "README.md").read_text()
MODULES = sorted(
    module.name
    for package in (moe_jax, pallas_kernels)
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    if not module.name.endswith("__main__")
)


def test_readme_is_short():
    assert len(README.splitlines()) <= 120 and re.search(r"```\nmake demo .*\nmake test ", README)


def test_readme_example_runs(tmp_path, monkeypatch, capsys):
    """On a small checkpoint with random weights, in the place of the one it names."""
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len([line for line in example.splitlines() if line and "import" not in line]) <= 10
    write_text_model(tmp_path / re.search(r'LLM\("(\S+)"', example)[1])
    monkeypatch.chdir(tmp_path)
    scope = {}
    exec(compile(example, "README.md", "exec"), scope)
    output, answer = scope["output"], scope["answer"]
    assert output.prompt == "The capital of France is" and len(output.outputs[0].token_ids) == 32
    assert answer.prompt == "<|start|><|user|>Name three rivers.<|assistant|><no>"
    printed = capsys.readouterr().out
    assert printed.startswith(f"{output.outputs[0].text}\n{answer.outputs[0].text}\n")
    assert "method: fp8_channel" in printed


def test_readme_shows_what_explain_says():
    """The layer of the example at its true size, as an H200 would run it."""
    (shown,) = re.findall(r"```text\n(.*?)```", README, re.DOTALL)
    scheme = moe_jax.Scheme.parse("fp8_channel")
    config = moe_jax.MoEConfig(128, 8, 2048, 768, scheme=scheme, dtype="bfloat16", name="model.layers.0.mlp")
    with on_hopper():
        text = explain(config, method_for(config.scheme).abstract_weights(config), 1, platform="gpu")
    assert shown == f"{text}\nweights version: 0\n"


def test_readme_names_only_schemes_that_are_built():
    rows = re.findall(
        r"^\|(?:[^|\n]*\|){3}([^|\n]*)\|", README.partition("## Formats")[2].partition("\n## ")[0], re.MULTILINE
    )
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert len(named) > 10 and len(named) == len(set(named)) and set(named) <= set(SCHEMES)


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.failed == 0
    jax.config.update("jax_numpy_dtype_promotion", "strict")
