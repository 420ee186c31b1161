"""Plain arguments: what passes, in which type it comes out, and the one error that everything else gets."""

from inspect import unwrap  # the tests' own checks of annotations would speak first

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe_jax import _arguments
from tests.support.refusals import refuses

integer, number, boolean, check_array, check_rngs, check_callables = (
    unwrap(getattr(_arguments, name))
    for name in ("integer", "number", "boolean", "check_array", "check_rngs", "check_callables")
)


@pytest.mark.parametrize("value", [3, np.int8(3), np.array(3), jnp.int32(3)])
def test_integers(value):
    found = integer("n", value, minimum=3, maximum=3)
    assert found == 3 and type(found) is int


@pytest.mark.parametrize("value", [True, np.True_, jnp.array(True), 3.0, np.float32(3), "3", None, [3], np.array([3])])
def test_no_integers(value):
    refuses(TypeError, r"^n=.*, expected an integer >= 0, a size$", integer, "n", value, minimum=0, why=", a size")


@pytest.mark.parametrize("value", [-1, 5, 2**70])
def test_integers_out_of_range(value):
    refuses(ValueError, r"^n=.*, expected an integer from 0 to 4$", integer, "n", value, minimum=0, maximum=4)


def test_a_tracer_is_no_integer():
    with pytest.raises(TypeError, match="expected an integer"):
        jax.eval_shape(lambda n: integer("n", n, minimum=0), jnp.int32(3))


@pytest.mark.parametrize("value", [2, 2.0, np.float16(2), np.int64(2), jnp.float32(2), jnp.bfloat16(2)])
def test_numbers(value):
    found = number("t", value, "> 0")
    assert found == 2.0 and type(found) is float


@pytest.mark.parametrize("value", [True, "2", None, [2.0], 2j, 10**400, {}])
def test_no_numbers(value):
    refuses(TypeError, r"^t=.*, expected a number > 0$", number, "t", value, "> 0")


@pytest.mark.parametrize("value", [True, False, np.True_, np.False_])
def test_booleans(value):
    found = boolean("flag", value)
    assert found == value and type(found) is bool


@pytest.mark.parametrize("value", ["False", "", 0, 1, 1.0, None, [], np.array([True]), np.array(True), jnp.array(True)])
def test_no_booleans(value):
    refuses(TypeError, r"^flag=.*, expected True or False$", boolean, "flag", value)


def test_callables():
    check_callables(router=None, shared_experts=print, gate=nnx.Linear(1, 1, rngs=nnx.Rngs(0)))
    with pytest.raises(TypeError, match="^gate=5, expected None, or a module or function that can be called$"):
        check_callables(router=print, gate=5)


def test_arrays():
    check_array("x", np.ones(2), jnp.floating, "(T,)")
    check_array("x", nnx.Param(jnp.ones(2)), jnp.floating, "(T,)")
    jax.eval_shape(lambda x: check_array("x", x, jnp.integer, "(T,)"), jnp.arange(2))
    for value, words in (([1.0], "x has type list, expected a JAX"), (np.ones(2), "x has dtype float64, expected int")):
        refuses(TypeError, words, check_array, "x", value, jnp.integer, "(T,)")


def test_rngs():
    check_rngs(None)
    check_rngs(nnx.Rngs(0))
    for value, words in ((jax.random.key(0), "PRNGKeyArray"), (0, "int")):
        refuses(TypeError, rf"rngs has type {words}, expected flax.nnx.Rngs", check_rngs, value)
