"""What calls return, as a reader and a type checker see it."""

import inspect
import json
import subprocess
import sys
import typing

import pytest

import moe_jax
from moe_jax.models import CausalLM

CALLS = {
    "generate": moe_jax.generate,
    "generate_stream": moe_jax.generate_stream,
    "fused_moe": moe_jax.fused_moe,
    "FusedMoE": moe_jax.FusedMoE.__call__,
    "MoEBlock": moe_jax.MoEBlock.__call__,
    "CausalLM": CausalLM.__call__,
    "LLM.generate": moe_jax.LLM.generate,
    "LLM.stream": moe_jax.LLM.stream,
}


@pytest.mark.parametrize("name", CALLS)
def test_no_any(name):
    """Of the function itself, and of each of its overloads."""
    function = inspect.unwrap(CALLS[name])
    for one in (function, *typing.get_overloads(function)):
        returned = inspect.signature(one).return_annotation
        assert returned is not inspect.Signature.empty and "Any" not in str(returned), returned


SCRIPT = """
import jax, numpy as np
import moe_jax
from moe_jax.models import CausalLM
def f(model: CausalLM, layer: moe_jax.FusedMoE, ids: jax.Array, llm: moe_jax.LLM):
    reveal_type(moe_jax.generate(model, ids, max_new_tokens=1))
    reveal_type(moe_jax.generate(model, [[1], [1, 2]], max_new_tokens=1, batch_size=2))
    reveal_type(moe_jax.generate_stream(model, ids, max_new_tokens=1))
    reveal_type(moe_jax.generate_stream(model, ids, max_new_tokens=1, return_load=True))
    reveal_type(model(ids))
    reveal_type(layer(ids, ids))
    reveal_type(layer(ids, ids, return_stats=True))
    reveal_type(llm.generate("a"))
"""
REVEALED = ["Array", "list[list[int]]", "Iterator[ndarray[", "Iterator[tuple[ndarray[", "Array", "Array"]
REVEALED += ["tuple[Array, MoEStats]", "list[RequestOutput]"]


@pytest.mark.slow
def test_a_type_checker_agrees(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    found = json.loads(done.stdout)["generalDiagnostics"]
    assert [one["severity"] for one in found] == ["information"] * len(REVEALED), found
    revealed = [one["message"].partition(" is ")[2].strip('"') for one in found]
    for is_type, expected in zip(revealed, REVEALED, strict=True):
        assert is_type.startswith(expected), revealed
