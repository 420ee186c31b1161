"""Problems of ``grouped_dgrad``, ``grouped_gemm_widened`` and ``grouped_gemm_pull``: random weights, and what they must
give, in NumPy float64.

Layout contract: as in gemm_problem.py. Rows that no expert owns hold NaN; some lie in tiles that are in use.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.common.activations import Activation
from pallas_kernels.grouped_gemm.dgrad import grouped_dgrad, grouped_gemm_widened, plain_weights
from pallas_kernels.grouped_gemm.packed import stacked_projections, to_kernel_layout
from pallas_kernels.grouped_gemm.packed.format import from_words
from pallas_kernels.grouped_gemm.pull import grouped_gemm_pull
from tests.support.kernels.gemm_problem import tiles_of
from tests.support.kernels.packed_problem import KINDS, make_stored
from tests.support.oracles.tolerances import Tolerance, assert_rows_close

# name -> (dtype of the codes, what has a scale, dtype of both operands)
PLAIN_KINDS: dict[str, tuple[Any, str, str]] = {
    "plain e4m3 channel": (ml_dtypes.float8_e4m3fn, "channel", "bfloat16"),
    "plain e4m3 channel f16": (ml_dtypes.float8_e4m3fn, "channel", "float16"),
    "plain e4m3 tensor": (ml_dtypes.float8_e4m3fn, "tensor", "bfloat16"),
    "plain e4m3 block": (ml_dtypes.float8_e4m3fn, "block", "bfloat16"),
    "plain int8 channel": (np.int8, "channel", "bfloat16"),
    "plain int8 channel f16": (np.int8, "channel", "float16"),
}


@dataclasses.dataclass
class PullProblem:
    """args, kwargs: of ``op``, which is ``grouped_dgrad`` where no other is named. row_expert: (Mp,), -1 in padding.

    expected: (Mp, K) float64; with an activation the cotangent of ``before`` in its columns, the sums (Mp,), and what
    their terms add up to. weighted: (Mp, K) float64, the activation's values times the rows' weights.
    """

    args: tuple
    kwargs: dict[str, Any]
    expected: tuple[np.ndarray, ...]
    row_expert: np.ndarray
    dtype: str
    op: Callable[..., Any] = grouped_dgrad
    weighted: np.ndarray | None = None

    def assert_close(self, found: Any) -> None:
        """Each row by its largest value: two units in the last place of the output, and for sums over K of them 2**-11
        of what the terms add up to.
        """
        own = self.row_expert >= 0
        found = jax.tree.leaves(found)
        assert len(found) == min(len(self.expected), 2) + (self.weighted is not None)
        value = np.asarray(found[0], np.float64)[own]
        assert_rows_close(value, self.expected[0][own], Tolerance(self.dtype, 2.0, 0.0), experts=self.row_expert[own])
        if self.weighted is not None:
            values = np.asarray(found[2], np.float64)[own]
            assert_rows_close(values, self.weighted[own], Tolerance(self.dtype, 2.0, 0.0), experts=self.row_expert[own])
        if len(found) > 1:
            sums, terms = (part[own] for part in self.expected[1:])
            assert (np.abs(np.asarray(found[1], np.float64)[own] - sums) <= 2.0**-11 * terms).all()


def check_on_gpu(problem: PullProblem, config: Any = None) -> None:
    """Values of the Hopper kernel; and that they repeat to the bit. Outputs land in memory that held NaN before."""
    static = {name: problem.kwargs[name] for name in ("activation", "has_weighted") if name in problem.kwargs}
    arrays = {name: value for name, value in problem.kwargs.items() if name not in static}
    run = jax.jit(lambda args, kwargs: problem.op(*args, **kwargs, **static, config=config, implementation="hopper"))
    run = run.lower(problem.args, arrays).compile()
    own = problem.row_expert >= 0

    def once() -> Any:
        for leaf in jax.tree.leaves(run.out_info):
            jnp.full(leaf.shape, jnp.nan, leaf.dtype).block_until_ready()
        return run(problem.args, arrays)

    found = once()
    problem.assert_close(found)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(once()), strict=True):
        np.testing.assert_array_equal(np.asarray(one, np.float32)[own], np.asarray(other, np.float32)[own])


def make_pull(
    kind: str,
    sizes: list[int],
    *,
    n: int,
    k: int,
    block_m: int = 128,
    activation: Activation | None = None,
    projections: int = 1,
    has_tile_rows: bool = True,
    rounds_once: bool = False,
    seed: int = 0,
) -> PullProblem:
    """projections: of the weights, which the call gets stacked: N is then n of each. rounds_once: as the reference
    multiplies weights; else as the kernel does, which takes float32 scales of packed ones in two parts of bfloat16.
    """
    rng = np.random.default_rng(seed)
    make = _plain if kind in PLAIN_KINDS else _packed
    w, matrices = make(kind, (len(sizes), projections), n, k, rng, rounds_once)
    args, kwargs, sums, row_expert = _product(rng, w, matrices, sizes, block_m, has_tile_rows)
    dtype, rows = w.fmt.operand, len(row_expert)
    if activation is None:
        return PullProblem(args, kwargs, (sums,), row_expert, dtype)
    count = 2 if activation.is_gated else 1
    size = k if kind in PLAIN_KINDS else 64  # columns of a projection that lie together
    given = rng.standard_normal((rows, k // size, count, size), np.float32).astype(dtype)
    kwargs |= dict(activation=activation, before=jnp.asarray(given.reshape(rows, -1)))
    given = given.astype(np.float64)
    hidden, slopes = _curve(activation, *(given[:, :, p].reshape(rows, k) for p in range(count)))
    bars = [(sums * slope).reshape(rows, -1, size) for slope in slopes]
    bar = np.stack(bars, axis=2).reshape(rows, -1)
    terms = np.sqrt(((hidden * sums) ** 2).sum(1)) + np.abs((hidden * sums).sum(1))
    return PullProblem(args, kwargs, (bar, (hidden * sums).sum(1), terms), row_expert, dtype)


def make_widened(
    kind: str,
    sizes: list[int],
    *,
    n: int,
    k: int,
    block_m: int = 128,
    projections: int = 1,
    has_tile_rows: bool = True,
    seed: int = 0,
) -> PullProblem:
    """A product of the forward pass; kind is one of ``PLAIN_KINDS``."""
    rng = np.random.default_rng(seed)
    w, matrices = _plain(kind, (len(sizes), projections), n, k, rng)
    args, kwargs, sums, row_expert = _product(rng, w, matrices.swapaxes(1, 2), sizes, block_m, has_tile_rows)
    return PullProblem(args, kwargs, (sums,), row_expert, w.fmt.operand, grouped_gemm_widened)


def _product(
    rng: np.random.Generator, w: Any, matrices: np.ndarray, sizes: list[int], block_m: int, has_tile_rows: bool
) -> tuple[tuple, dict[str, Any], np.ndarray, np.ndarray]:
    """(args, kwargs, (Mp, width) float64, row_expert) of rows times matrices (E, depth, width)."""
    tile_expert, tile_rows, row_expert = tiles_of(sizes, block_m, 2)
    dy = rng.standard_normal((len(row_expert), matrices.shape[1]), np.float32)
    dy = (dy / math.sqrt((matrices**2).mean() * matrices.shape[1])).astype(w.fmt.operand)
    dy[row_expert < 0] = np.nan
    sums = np.stack([row @ matrices[max(e, 0)] for row, e in zip(dy.astype(np.float64), row_expert, strict=True)])
    args = (jnp.asarray(dy), w, jnp.asarray(tile_expert), jnp.int32(len(tile_expert) - 2))
    return args, dict(tile_rows=jnp.asarray(tile_rows)) if has_tile_rows else {}, sums, row_expert


def _packed(
    kind: str, lead: tuple[int, int], n: int, k: int, rng: np.random.Generator, rounds_once: bool
) -> tuple[Any, np.ndarray]:
    """Stacked weights, and the numbers that are multiplied, (E, G * n, k): blocks of 64 channels in turn."""
    fmt = KINDS[kind][0]
    stored, values = make_stored(kind, lead, n, k, rng)
    matrices = _rounded(values, fmt.operand)
    wide = stored.get("channel_scale", stored.get("scale"))
    if not rounds_once and fmt.operand == "bfloat16" and wide is not None and wide.dtype == np.float32:
        wide = wide[..., None] if "channel_scale" in stored else np.repeat(wide, fmt.group_size or k, -1)[..., :k]
        matrices = _in_two_parts(values, wide.astype(np.float64))
    matrices = matrices.reshape(*lead, -1, 64, k).swapaxes(1, 2).reshape(lead[0], -1, k)
    return stacked_projections(jax.tree.map(jnp.asarray, to_kernel_layout(fmt, **stored))), matrices


def _plain(
    kind: str, lead: tuple[int, int], n: int, k: int, rng: np.random.Generator, rounds_once: bool = True
) -> tuple[Any, np.ndarray]:
    """Weights as they are stored, and the numbers that are multiplied, (E, G * n, k): a projection below the other."""
    dtype, of, operand = PLAIN_KINDS[kind]
    codes = rng.integers(0, 256, (*lead, n, k)).astype(np.uint8)
    codes = (np.where(codes & 127 == 127, codes - 1, codes).astype(np.uint8) if dtype != np.int8 else codes).view(dtype)
    shape = dict(tensor=lead, channel=(*lead, n), block=(*lead, -(-n // 128), -(-k // 128)))[of]
    scale = rng.uniform(0.001, 1.5, shape).astype(np.float32)
    if of == "block":
        spread = np.repeat(np.repeat(scale, 128, -2), 128, -1)[..., :n, :k]
    else:
        spread = scale.reshape(*lead, -1, 1)
    matrices = _rounded(codes.astype(np.float64) * spread.astype(np.float64), operand).reshape(lead[0], -1, k)
    return plain_weights(jnp.asarray(codes), jnp.asarray(scale), operand), matrices


def make_plain_pull(
    sizes: list[int],
    *,
    n: int,
    k: int,
    activation: Activation,
    block_m: int = 128,
    dtype: str = "bfloat16",
    has_weighted: bool = True,
    has_tile_rows: bool = True,
    seed: int = 0,
) -> PullProblem:
    """Weights of 16 bits, (E, K, N), with ``before`` of all columns of one projection, then of the other."""
    rng, experts = np.random.default_rng(seed), len(sizes)
    tile_expert, tile_rows, row_expert = tiles_of(sizes, block_m, 2)
    rows, count = len(row_expert), 2 if activation.is_gated else 1
    w = rng.standard_normal((experts, k, n), np.float32).astype(dtype)
    dy = (rng.standard_normal((rows, k), np.float32) / math.sqrt(k)).astype(dtype)
    before = rng.standard_normal((rows, count, n), np.float32).astype(dtype)
    weights = rng.random(rows, np.float32)
    dy[row_expert < 0] = np.nan
    wide = w.astype(np.float64)
    sums = np.stack([row @ wide[max(e, 0)] for row, e in zip(dy.astype(np.float64), row_expert, strict=True)])
    hidden, slopes = _curve(activation, *before.astype(np.float64).swapaxes(0, 1))
    weight = weights.astype(np.float64)[:, None]
    bar = np.concatenate([sums * weight * slope for slope in slopes], axis=1)
    terms = np.sqrt(((hidden * sums) ** 2).sum(1)) + np.abs((hidden * sums).sum(1))
    kwargs: dict[str, Any] = dict(tile_rows=jnp.asarray(tile_rows)) if has_tile_rows else {}
    kwargs |= dict(activation=activation, before=jnp.asarray(before.reshape(rows, -1)), has_weighted=has_weighted)
    kwargs |= dict(row_weights=jnp.asarray(weights))
    args = (jnp.asarray(dy), jnp.asarray(w), jnp.asarray(tile_expert), jnp.int32(len(tile_expert) - 2))
    expected = (bar, (hidden * sums).sum(1), terms)
    weighted = hidden * weight if has_weighted else None
    return PullProblem(args, kwargs, expected, row_expert, dtype, grouped_gemm_pull, weighted)


def unpacked(fmt: Any, block: Any, width: int, rows: Any, zeros: Any, scales: Any, wide_scales: Any) -> Any:
    """In place of ``load_block``, whose PTX runs on a GPU alone, for integers: of references or arrays."""
    codes = from_words(block[...].reshape(1, 1, -1), fmt).astype(jnp.float32)

    def spread(vector: Any) -> Any:
        vector = vector[...].reshape(-1, 64)
        quarters = [jnp.broadcast_to(vector[row].astype(jnp.float32)[:, None], (64, fmt.block_k // 4)) for row in rows]
        return jnp.concatenate(quarters, axis=1)

    value = codes * fmt.unit + (-fmt.unit * 2 ** (fmt.bits - 1) if zeros is None else spread(zeros))
    if scales is not None:
        value = value * (fmt.folded_unit / fmt.unit)
    for factor in (scales, wide_scales):
        value = value if factor is None else value * spread(factor)
    return (value.astype(fmt.operand),)


def store_matrices(matrix: Any, piece: int, value: Any) -> None:
    """In place of ``stmatrix_sm90.store_matrices``."""
    matrix[:, 64 * piece : 64 * (piece + 1)] = value


def _rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    return values.astype(np.float32).astype(dtype).astype(np.float64)


def _in_two_parts(values: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Weights whose scale is a sum of two bfloat16 numbers: one weight in a thousand is rounded to the other side."""
    codes = np.divide(values, scale, out=np.zeros_like(values), where=scale != 0).astype(np.float32)
    codes, high = codes.astype(np.float64), _rounded(scale, "bfloat16")
    low = _rounded(scale - high, "bfloat16")
    return _rounded(codes * high + _rounded(codes * low, "bfloat16"), "bfloat16")


def _curve(activation: Activation, gate: np.ndarray, up: Any = None) -> tuple[np.ndarray, list[np.ndarray]]:
    """Values of an activation, and their derivatives by differences of float64."""

    def value(gate: np.ndarray, up: Any) -> np.ndarray:
        name = activation.name.removesuffix("_no_mul")
        if name == "gelu_tanh":
            curve = gate / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
        elif name == "relu2":
            curve = np.maximum(gate, 0) ** 2
        else:
            curve = gate / (1 + np.exp(-activation.alpha * gate))
        return curve if up is None else curve * (up + activation.beta)

    step = 1e-5
    slopes = [(value(gate + step, up) - value(gate - step, up)) / (2 * step)]
    if up is not None:
        slopes.append((value(gate, up + step) - value(gate, up - step)) / (2 * step))
    return value(gate, up), slopes
