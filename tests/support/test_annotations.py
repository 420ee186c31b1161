"""The annotations of the packages are checked while the tests run: dimensions, dtypes, and what has no array."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from beartype import beartype
from beartype.roar import BeartypeCallHintViolation
from jaxtyping import Float, TypeCheckError

import moe_jax
from pallas_kernels.grouped_gemm import GemmConfig
from tests.support import annotations

checked = annotations.jaxtyped(typechecker=beartype)


@checked
def products(x: Float[jax.Array, "T H"], *, w: Float[jax.Array, "H O"] | None = None) -> Float[jax.Array, "T"]:
    return x.sum(0) if w is None else (x @ w).sum(1)


@checked
def described(x: "Float[jax.Array, 'T H']", sizes: tuple[int, ...] = ()) -> str:
    return sizes


@checked
def named(size: int, names: tuple[str, ...] = ()) -> str:
    return size if names else "nobody"


@checked
@dataclasses.dataclass
class Sizes:
    hidden: int


@checked
@dataclasses.dataclass
class Pair:
    a: Float[jax.Array, "T H"]
    b: Float[jax.Array, "T"]


def test_dimensions_are_bound_across_arguments_and_results():
    x = jnp.ones((2, 3))
    assert products(x, w=jnp.ones((3, 4))).shape == (2,)
    assert products(jnp.ones((2, 2))).shape == (2,)
    for wrong in (
        lambda: products(x, w=jnp.ones((2, 4))),
        lambda: products(x.astype(int)),
        lambda: products(x),  # returns H sums, not T
        lambda: described(jnp.ones(3)),
        lambda: described(x),  # returns no str
        lambda: Pair(x, jnp.ones(3)),
    ):
        with pytest.raises(TypeCheckError):
            wrong()
    assert Pair(x, jnp.ones(2)).b.shape == (2,)


def test_annotations_without_arrays_are_checked_too():
    assert named(2) == "nobody" and Sizes(3).hidden == 3
    for wrong in (lambda: named("2"), lambda: named(2, "name"), lambda: named(2, ("name",)), lambda: Sizes("3")):
        with pytest.raises(BeartypeCallHintViolation):
            wrong()


def test_functions_and_dataclasses_of_the_packages_are_checked():
    with pytest.raises(TypeCheckError):
        moe_jax.fused_experts(jnp.ones(3), jnp.ones((3, 2)), jnp.zeros((4, 2), int), None, None)
    with pytest.raises(BeartypeCallHintViolation):
        GemmConfig("16", 128, 4)
