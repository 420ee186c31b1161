"""Products with one quantized matrix outside the experts: which backend multiplies, and in which layout it is held."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from moe_jax._typing import Array, DTypeLike, Float
from moe_jax.experts._backend import Backend, Biases, Matrices, MatrixProblem
from moe_jax.experts._choice import BACKENDS, layout_owner, names_in_order, nothing_runs
from moe_jax.experts._gradient import constant, with_gradient_of
from moe_jax.quantization import QuantizedMatrix

_JUDGE = BACKENDS["reference"]


def multiply(
    x: Float[Array, "... K"],
    matrix: QuantizedMatrix,
    bias: Array | None = None,
    *,
    out_dtype: DTypeLike,
    implementation: tuple[str, ...] | None = None,
) -> Float[Array, "... N"]:
    """x W^T + b with x quantized as the scheme says, summed in float32 and rounded once to ``out_dtype``.

    Reverse-mode gradients of x and bias are those of the reference: rounding passes them straight through.

    Args:
        x: (..., K), of 16 or 32 bits.
        matrix: (N, K).
        bias: (N,) or None.
        implementation: names of backends in the order to try; None takes the order of the platform.

    Raises:
        NotImplementedError: no backend can; each is named with its reason. TypeError: a gradient of a quantized leaf.
    """
    n, k = matrix.shape
    if 0 in x.shape:
        return jnp.zeros((*x.shape[:-1], n), out_dtype)
    tokens = x.reshape(-1, k)
    y = padded_product(tokens, matrix, bias, out_dtype=out_dtype, implementation=implementation)
    return y[: tokens.shape[0]].reshape(*x.shape[:-1], n)


def padded_product(
    tokens: Float[Array, "T K"],
    matrix: Matrices,
    bias: Biases = None,
    *,
    out_dtype: DTypeLike,
    implementation: tuple[str, ...] | None = None,
    parts: int = 1,
) -> Float[Array, "R N"]:
    """``multiply`` of T > 0 tokens, as the backend writes it: rows past T mean nothing.

    matrix, bias: of several matrices side by side a tuple each, where ``joins`` says so. parts: of
    ``parts_of_product``; several leave partial sums in float32, one after the other, without a bias.
    """
    backend = _chosen(_problem(matrix, tokens.shape[0], tokens.dtype, out_dtype, bias is not None), implementation)
    held = _each(lambda one: dataclasses.replace(one, tensor=constant("weight", one.tensor)), matrix)
    run = functools.partial(_run, backend, jnp.dtype(out_dtype), parts)
    num_rows = jax.eval_shape(run, tokens, held, bias).shape[0]

    def judge(tokens, held, bias):
        several = held if isinstance(held, tuple) else (held,)
        biases = bias if isinstance(bias, tuple) else (bias,) * len(several)
        found = [_run(_JUDGE, jnp.dtype(out_dtype), 1, tokens, *one) for one in zip(several, biases, strict=True)]
        y = jnp.concatenate(found, axis=-1)
        return jnp.pad(y, ((0, num_rows - y.shape[0]), (0, 0)))

    y: Any = with_gradient_of(run, judge, tokens, held, bias)
    return y


def joins(
    matrices: Sequence[QuantizedMatrix],
    num_tokens: int,
    dtype: DTypeLike,
    out_dtype: DTypeLike,
    implementation: tuple[str, ...] | None,
    *,
    has_bias: bool,
) -> bool:
    """Whether the backend that multiplies with each matrix takes all of them side by side, in one launch."""
    options: Any = (num_tokens, dtype, out_dtype, has_bias)
    backends = {_chosen(_problem(matrix, *options), implementation) for matrix in matrices}
    backend = backends.pop()
    if backends or not backend.joins_matrices:
        return False
    return backend.matrix_refusal(_problem(tuple(matrices), *options)) is None


def parts_of_product(
    matrix: QuantizedMatrix, num_tokens: int, dtype: DTypeLike, implementation: tuple[str, ...] | None
) -> int:
    """Parts of K whose products the backend would rather leave for whoever reads them to add up; 1 for the product."""
    problem = _problem(matrix, num_tokens, dtype, dtype, has_bias=False)
    return _chosen(problem, implementation).matrix_parts(problem)


def quantized_rows(
    matrices: Sequence[QuantizedMatrix],
    num_tokens: int,
    dtype: DTypeLike,
    implementation: tuple[str, ...] | None,
    parts: int = 1,
) -> tuple[str, int] | None:
    """How ``products_of_rows`` takes the rows of all these matrices: the kind of ``quantize_and_permute`` and the rows
    that scales have room for; None where it takes none, or the matrices differ in that."""
    found = set()
    for matrix in matrices:
        problem = _problem(matrix, num_tokens, dtype, dtype, has_bias=False)
        found.add(_chosen(problem, implementation).matrix_rows(problem, parts))
    return found.pop() if len(found) == 1 else None


def products_of_rows(
    codes: Array,
    scales: Array,
    num_tokens: int,
    matrices: Sequence[QuantizedMatrix],
    biases: Sequence[Array] | None,
    out_dtype: DTypeLike,
    implementation: tuple[str, ...] | None,
    parts: int = 1,
) -> list[Array]:
    """``padded_product`` of each matrix with rows that ``quantized_rows`` describes, or one of all side by side, as
    ``joins`` says. It has no gradient."""
    options: Any = dict(has_bias=biases is not None)
    if len(matrices) > 1 and joins(matrices, num_tokens, out_dtype, out_dtype, implementation, **options):
        several: list[Any] = [(tuple(matrices), None if biases is None else tuple(biases))]
    else:
        several = [*zip(matrices, [None] * len(matrices) if biases is None else biases, strict=True)]
    found = []
    for matrix, bias in several:
        backend = _chosen(_problem(matrix, num_tokens, out_dtype, out_dtype, **options), implementation)
        out = jnp.float32 if parts > 1 else out_dtype
        found.append(backend.multiply_rows(codes, scales, num_tokens, matrix, bias, out, parts))
    return found


def in_best_matrix_layout(
    matrix: QuantizedMatrix, dtype: DTypeLike, implementation: tuple[str, ...] | None = None
) -> QuantizedMatrix:
    """The matrix as the backend that is tried first on this platform reads it best in layers that compute in ``dtype``.

    Exact. matrix: plain arrays on one device, or ShapeDtypeStructs; in another layout it is returned as it is.
    """
    if not matrix.tensor.layout.is_plain:
        return matrix
    backend = BACKENDS[names_in_order(implementation, jax.default_backend())[0]]
    convert = functools.partial(backend.matrix_layout, dtype=dtype)
    try:
        held = jax.eval_shape(convert, matrix)
        if backend.matrix_refusal(_problem(held, 1, dtype, dtype, has_bias=False)) is not None:
            return matrix
        return held if isinstance(matrix.tensor.data, jax.ShapeDtypeStruct) else convert(matrix)
    except NotImplementedError:
        return matrix


def plain_matrix(matrix: QuantizedMatrix) -> QuantizedMatrix:
    """Inverse of ``in_best_matrix_layout``."""
    layout = matrix.tensor.layout
    return matrix if layout.is_plain else layout_owner(layout).plain_matrix(matrix)


def _each(function: Callable[[QuantizedMatrix], QuantizedMatrix], matrix: Matrices) -> Matrices:
    return tuple(map(function, matrix)) if isinstance(matrix, tuple) else function(matrix)


def _problem(
    matrix: Matrices, num_tokens: int, dtype: DTypeLike, out_dtype: DTypeLike, has_bias: bool
) -> MatrixProblem:
    return MatrixProblem(matrix, num_tokens, dtype, out_dtype, has_bias, jax.default_backend())


def _chosen(problem: MatrixProblem, implementation: tuple[str, ...] | None) -> Backend:
    skipped = []
    for name in names_in_order(implementation, problem.platform):
        reason = BACKENDS[name].matrix_refusal(problem)
        if reason is None:
            return BACKENDS[name]
        skipped.append((name, reason))
    raise NotImplementedError(nothing_runs(skipped))


def _run(backend: Backend, out_dtype: DTypeLike, parts: int, x: Array, matrix: Matrices, bias: Biases) -> Array:
    def as_read(one: QuantizedMatrix) -> QuantizedMatrix:
        return one if backend.reads(one.tensor.layout) else plain_matrix(one)

    held = _each(as_read, matrix)
    return backend.multiply(x, held, bias, out_dtype) if parts == 1 else backend.multiply_in_parts(x, held, parts)
