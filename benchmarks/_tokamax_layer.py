"""tokamax's ragged_dot in a layer of experts: configurations found by time, with its own gradient."""

import concurrent.futures
import functools
import importlib.util
import itertools
import sys
import time
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

# Of 384 configurations that tokamax's own search on Hopper tries per product: one that its table for H100s has as the
# best of a product, and its neighbors. block_n is 64 in all that it tries.
ROWS = [
    dict(block_m=128, block_k=128, num_stages=stages, persistent=persistent, grid_minor_dim=minor, grid_tile_width=wide)
    for stages, persistent, minor, wide in (
        *((4, True, minor, wide) for minor, wide in itertools.product((0, 1), (1, 8))),
        (4, False, 0, 8),
        (2, False, 0, 1),
    )
] + [dict(block_m=64, block_k=128, num_stages=2, persistent=False, grid_minor_dim=0, grid_tile_width=1)]
# The gradient of weights uses three fields alone.
WEIGHTS = [
    dict(block_m=block_m, block_k=block_k, num_stages=stages)
    for block_m, block_k, stages in ((64, 128, 2), (64, 128, 4), (128, 128, 2), (128, 128, 4), (64, 256, 2))
]
BEST = 3  # of the configurations of one count of tokens are tried with the next


def import_tokamax() -> Any:
    """tokamax; ``xprof``, which only its profiles read, is replaced by nothing where it is not installed."""
    if "xprof" not in sys.modules and importlib.util.find_spec("xprof") is None:
        for name in ("xprof", "xprof.cli", "xprof.cli.tools"):
            sys.modules[name] = types.ModuleType(name)
        setattr(sys.modules["xprof.cli.tools"], "get_kernel_stats_tool", None)  # noqa: B010  a module without fields
    import tokamax  # pyright: ignore[reportMissingImports]

    return tokamax


def ranked(make: Callable[[dict], Callable[..., jax.Array]], forms: Sequence[dict], *arguments: Any) -> list[dict]:
    """Forms that run, the fastest first. make: from a form to the function of ``arguments``. Raises the last error."""

    def compiled(form: dict) -> Any:
        try:
            return jax.jit(make(form)).lower(*arguments).compile()
        except Exception as error:  # a form that does not fit must not hide the others
            return error

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        functions = list(pool.map(compiled, forms))
    found, error = [], ValueError("no form")
    for form, function in zip(forms, functions, strict=True):
        if isinstance(function, Exception):
            error = function
            continue
        times = []
        for _ in range(4):
            start = time.perf_counter()
            jax.block_until_ready([function(*arguments) for _ in range(3)])
            times.append(time.perf_counter() - start)
        found.append((min(times), form))
    if not found:
        raise error
    return [form for _, form in sorted(found, key=lambda pair: pair[0])]


def tuned_product(
    lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, known: dict[str, list[dict]] | None = None
) -> tuple[Callable[..., jax.Array], dict[str, list[dict]]]:
    """``ragged_dot(lhs, rhs, sizes)`` by tokamax's Hopper kernels, each of its three products in its best form.

    lhs: (rows, K); rhs: (experts, K, N); sizes: (experts,) int32 rows of each expert. known: forms by product, the best
    first, of another number of rows. Returns the function and such forms.
    """
    from tokamax._src.ops.ragged_dot import api, base  # pyright: ignore[reportMissingImports]

    op = api.IMPLEMENTATIONS["mosaic_gpu"]

    def of(form: dict) -> Any:
        return op.replace(config=op.config_cls(block_n=64, split_k=1, **form), vjp=None)

    def forward(form: dict) -> Callable[..., jax.Array]:
        return lambda lhs, rhs, out: of(form)(lhs, rhs, group_sizes=sizes)

    def by_lhs(form: dict) -> Callable[..., jax.Array]:
        return lambda lhs, rhs, out: pulled(of(form), None)(lhs, rhs, out)[0]

    def by_rhs(form: dict) -> Callable[..., jax.Array]:
        return lambda lhs, rhs, out: pulled(None, of(form))(lhs, rhs, out)[1]

    def pulled(dlhs: Any, drhs: Any) -> Callable[..., Any]:
        nothing = lambda *args, **options: None  # noqa: E731  the product that is not timed
        pull = functools.partial(base.vjp, dlhs_ragged_dot=dlhs or nothing, drhs_ragged_dot=drhs or nothing)
        numbers = base.DEFAULT_RAGGED_DOT_DIM_NUMS
        options = dict(group_sizes=sizes, ragged_dot_dimension_numbers=numbers, preferred_element_type=None)
        precision = (jax.lax.Precision.DEFAULT, jax.lax.Precision.DEFAULT)
        return lambda lhs, rhs, out: pull(None, None, out, lhs, rhs, precision=precision, **options)

    out = jnp.ones((lhs.shape[0], rhs.shape[2]), lhs.dtype)
    best = {}
    for name, make, forms in (("forward", forward, ROWS), ("dlhs", by_lhs, ROWS), ("drhs", by_rhs, WEIGHTS)):
        best[name] = ranked(make, known[name][:BEST] if known else forms, lhs, rhs, out)
    pull = functools.partial(base.vjp, dlhs_ragged_dot=of(best["dlhs"][0]), drhs_ragged_dot=of(best["drhs"][0]))
    return of(best["forward"][0]).replace(vjp=pull), best


def experts_layer(
    x: jax.Array, topk_weights: jax.Array, ids: jax.Array, w13: jax.Array, w2: jax.Array, products: Sequence[Any]
) -> jax.Array:
    """Experts of a layer by ``tokamax.ragged_dot``. Indices of rows are unique, so that no gradient adds atomically.

    x: (T, H) bfloat16; topk_weights, ids: (T, K); w13: (E, H, 2 I); w2: (E, I, H); products: what ``implementation``
    takes for each matrix.
    """
    tokamax = import_tokamax()
    (tokens, top_k), hidden = ids.shape, x.shape[1]
    order = jnp.argsort(ids.reshape(-1), stable=True)
    sizes = jnp.bincount(ids.reshape(-1), length=w13.shape[0]).astype(jnp.int32)
    copies = jnp.broadcast_to(x[:, None], (tokens, top_k, hidden)).reshape(-1, hidden)
    rows = copies.at[order].get(mode="promise_in_bounds", unique_indices=True)
    gate, up = jnp.split(tokamax.ragged_dot(rows, w13, sizes, implementation=products[0]), 2, axis=-1)
    out = tokamax.ragged_dot(jax.nn.silu(gate) * up, w2, sizes, implementation=products[1])
    out = out.at[jnp.argsort(order)].get(mode="promise_in_bounds", unique_indices=True).reshape(tokens, top_k, hidden)
    return (out * topk_weights[..., None]).sum(axis=1).astype(x.dtype)
