"""What the documentation shows is run: the README's example and table, and the examples in docstrings."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import jax
import pytest

import moe_jax
import pallas_kernels
from moe_jax.quantization import SCHEMES

README = (Path(__file__).parent.parent / "README.md").read_text()
MODULES = sorted(
    module.name
    for package in (moe_jax, pallas_kernels)
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    if not module.name.endswith("__main__")
)


def test_readme_example_runs(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len([line for line in example.splitlines() if line and "import" not in line]) <= 10
    scope = {}
    exec(compile(example, "README.md", "exec"), scope)
    assert scope["y"].shape == (16, 64) and bool((scope["y"] != 0).any())
    assert "(16, 64) bfloat16" in capsys.readouterr().out


def test_readme_lists_only_schemes_that_are_built():
    listed = re.findall(r"^\| `(\w+)` \|", README, re.MULTILINE)
    assert listed and len(listed) == len(set(listed)) and set(listed) <= set(SCHEMES)


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert result.failed == 0
    jax.config.update("jax_numpy_dtype_promotion", "strict")
