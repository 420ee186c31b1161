"""Walking what JAX traced."""

import itertools

from jax.extend import core


def equations(jaxpr):
    """All of a trace, in order, a kernel's body in the place of its launch."""
    for equation in jaxpr.eqns:
        inner = [getattr(v, "jaxpr", v) for p in equation.params.values() for v in (p if type(p) is tuple else (p,))]
        inner = [v for v in inner if isinstance(v, core.Jaxpr)]
        yield from itertools.chain(*map(equations, inner)) if inner else (equation,)
