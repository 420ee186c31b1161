"""shapes_of: kernels have the shapes of their results without a body, and nobody runs what was traced so."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.align import align, kernel_sm90
from pallas_kernels.common.shapes import shapes_of
from tests.support.cases.hopper_layers import on_hopper
from tests.support.kernels.case import Case, launches
from tests.support.kernels.cases import all_cases


def by_kernel(ids):
    return align(ids, 3, 16, implementation="hopper")


def test_no_body_is_traced(monkeypatch):
    """And its results are those of a trace with bodies."""
    ids = jax.ShapeDtypeStruct((4, 2), jnp.int32)
    with on_hopper():
        want = jax.eval_shape(by_kernel, ids)
        monkeypatch.setattr(kernel_sm90, "AlignCta", None)
        assert shapes_of(by_kernel, ids) == want
        with pytest.raises(TypeError):
            jax.eval_shape(lambda ids: by_kernel(ids), ids)


def test_nobody_runs_what_was_traced_for_its_shapes():
    """JAX keeps the traces of a jitted function, which layers are made of."""
    inner, ids = jax.jit(by_kernel), jax.ShapeDtypeStruct((4, 2), jnp.int32)
    with on_hopper():
        found = shapes_of(lambda ids: inner(ids), ids)
        assert launches(lambda ids: inner(ids), ids) == 1
        assert shapes_of(lambda ids: inner(ids), ids) == found


def one_of_each_kind() -> list[Case]:
    """The first case of every kernel: names of cases begin with theirs."""
    found: dict[str, Case] = {}
    for case in all_cases():
        if not case.mesh:
            found.setdefault(case.name.split(",")[0].split(" ")[0], case)
    return list(found.values())


@pytest.mark.parametrize("case", one_of_each_kind(), ids=lambda case: case.name)
def test_every_kernel(case):
    shapes = [jax.ShapeDtypeStruct(*shape) for shape in case.shapes]
    want = jax.eval_shape(case.function, *shapes)
    assert jax.tree.leaves(shapes_of(case.function, *shapes)) == jax.tree.leaves(want)
