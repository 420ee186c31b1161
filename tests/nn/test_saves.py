"""Orbax saves: the order of arguments, and saves that older versions wrote."""

from inspect import unwrap  # the tests' own checks of annotations would speak first
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

import moe_jax
from moe_jax import checkpointing

# ``Stack`` as it was saved at commit 42c3378, before experts were nnx.Param and Variables named their axes; and a call.
OLD = Path(__file__).parents[1] / "data" / "orbax" / "layers"


class Stack(nnx.Module):
    """Unquantized experts with biases and a correction bias, quantized ones, and a layer of Flax."""

    def __init__(self, rngs: nnx.Rngs | None = None):
        sizes: Any = dict(top_k=2, dtype=jnp.float32, rngs=rngs)
        routing: Any = dict(scoring_func="sigmoid", e_score_correction_bias=True)
        plain = moe_jax.FusedMoE(4, 32, 16, has_bias=True, **routing, **sizes)
        self.layers = nnx.List([plain, moe_jax.FusedMoE(4, 32, 16, scheme="int8_w8a16", **sizes)])
        self.norm = nnx.LayerNorm(32, rngs=rngs or nnx.Rngs(0))

    def __call__(self, x, logits):
        for layer in self.layers:
            x = self.norm(x + layer(x, logits))
        return x


@jax.jit
def run(stack, x, logits):
    return stack(x, logits)


def check_call(stack):
    call = np.load(OLD / "call.npz")
    y = run(stack, call["x"], call["logits"])
    np.testing.assert_allclose(y, call["y"], rtol=1e-5, atol=1e-5)


def test_a_save_of_an_older_version(tmp_path):
    """Into a module that has other values, and through a save of this version into a new one."""
    stack = Stack(nnx.Rngs(7))
    checkpointing.restore(stack, OLD)
    checkpointing.save(stack, tmp_path)
    again = Stack()
    checkpointing.restore(again, tmp_path)
    check_call(again)


def test_a_save_of_an_older_version_in_shards():
    """Into an abstract model whose leaves lie where the logical axes of this version put them."""
    mesh = jax.make_mesh((4,), ("ep",), axis_types=(AxisType.Auto,))
    with nnx.logical_axis_rules((("expert", "ep"),)):
        stack = nnx.merge(*nnx.get_abstract_model(lambda: Stack(nnx.Rngs(7)), mesh))
    checkpointing.restore(stack, OLD)
    for layer in stack.layers:
        assert layer.weights.get_value().w2.data.sharding.spec[0] == "ep"
    check_call(stack)


def test_either_order_of_arguments(tmp_path):
    stack, again = Stack(nnx.Rngs(1)), Stack()
    checkpointing.save(str(tmp_path), stack)
    checkpointing.restore(tmp_path, again)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(again), nnx.state(stack))


@pytest.mark.parametrize("arguments", [({"w": 1}, "there"), ("there", {"w": 1}), (Stack, "there"), ("a", "b")])
def test_what_is_no_module_or_no_path(arguments, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for function in (checkpointing.save, checkpointing.restore):
        wrong = ", expected an nnx.Module and the path of a directory"
        kinds = " and ".join(type(each).__name__ for each in arguments)
        with pytest.raises(TypeError, match=f"^{function.__name__} got {kinds}{wrong}"):
            unwrap(function)(*arguments)
    assert not list(tmp_path.iterdir())
