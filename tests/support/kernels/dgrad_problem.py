"""Problems of ``grouped_dgrad`` and ``grouped_gemm_pull``: random weights, and what they must give, in NumPy float64.

Layout contract: as in gemm_problem.py. Rows that no expert owns hold NaN; some lie in tiles that are in use.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.common.activations import Activation
from pallas_kernels.grouped_gemm.packed import stacked_projections, to_kernel_layout
from pallas_kernels.grouped_gemm.packed.format import from_words
from tests.support.kernels.gemm_problem import tiles_of
from tests.support.kernels.packed_problem import KINDS, make_stored
from tests.support.oracles.tolerances import Tolerance, assert_rows_close


@dataclasses.dataclass
class PullProblem:
    """args, kwargs: of ``grouped_dgrad`` or ``grouped_gemm_pull``. row_expert: (Mp,), -1 in padding.

    expected: (Mp, K) float64; with an activation the cotangent of ``before`` in its columns, the sums (Mp,), and what
    their terms add up to. weighted: (Mp, K) float64, the activation's values times the rows' weights.
    """

    args: tuple
    kwargs: dict[str, Any]
    expected: tuple[np.ndarray, ...]
    row_expert: np.ndarray
    dtype: str
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
    multiplies weights; else as the kernel does, which takes float32 scales in two parts of bfloat16.
    """
    rng, fmt, experts = np.random.default_rng(seed), KINDS[kind][0], len(sizes)
    tile_expert, tile_rows, row_expert = tiles_of(sizes, block_m, 2)
    rows = len(row_expert)
    stored, values = make_stored(kind, (experts, projections), n, k, rng)
    matrices = _rounded(values, fmt.operand)
    wide = stored.get("channel_scale", stored.get("scale"))
    if not rounds_once and fmt.operand == "bfloat16" and wide is not None and wide.dtype == np.float32:
        wide = wide[..., None] if "channel_scale" in stored else np.repeat(wide, fmt.group_size, -1)[..., :k]
        matrices = _in_two_parts(values, wide.astype(np.float64))
    # Blocks of 64 channels in turn.
    matrices = matrices.reshape(experts, projections, -1, 64, k).swapaxes(1, 2).reshape(experts, -1, k)
    dy = rng.standard_normal((rows, matrices.shape[1]), np.float32)
    dy = (dy / math.sqrt((matrices**2).mean() * matrices.shape[1])).astype(fmt.operand)
    dy[row_expert < 0] = np.nan
    sums = np.stack([row @ matrices[max(e, 0)] for row, e in zip(dy.astype(np.float64), row_expert, strict=True)])
    w = stacked_projections(jax.tree.map(jnp.asarray, to_kernel_layout(fmt, **stored)))
    args = (jnp.asarray(dy), w, jnp.asarray(tile_expert), jnp.int32(len(tile_expert) - 2))
    kwargs: dict[str, Any] = dict(tile_rows=jnp.asarray(tile_rows)) if has_tile_rows else {}
    if activation is None:
        return PullProblem(args, kwargs, (sums,), row_expert, fmt.operand)
    count = 2 if activation.is_gated else 1
    given = rng.standard_normal((rows, k // 64, count, 64), np.float32).astype(fmt.operand)
    weights = rng.random(rows, np.float32)
    kwargs |= dict(activation=activation, before=jnp.asarray(given.reshape(rows, -1)), row_weights=jnp.asarray(weights))
    given = given.astype(np.float64).reshape(rows, k // 64, count, 64)
    hidden, slopes = _curve(activation, *(given[:, :, p].reshape(rows, k) for p in range(count)))
    bars = [(sums * weights.astype(np.float64)[:, None] * slope).reshape(rows, -1, 64) for slope in slopes]
    bar = np.stack(bars, axis=2).reshape(rows, -1)
    terms = np.sqrt(((hidden * sums) ** 2).sum(1)) + np.abs((hidden * sums).sum(1))
    return PullProblem(args, kwargs, (bar, (hidden * sums).sum(1), terms), row_expert, fmt.operand)


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
    return PullProblem(args, kwargs, expected, row_expert, dtype, hidden * weight if has_weighted else None)


def unpacked(fmt: Any, block: Any, width: int, rows: Any, zeros: Any, scales: Any, wide_scales: Any) -> Any:
    """In place of ``load_block``, whose PTX runs on a GPU alone, for integers: of references or arrays."""
    codes = from_words(block[...].reshape(1, 1, -1), fmt).astype(jnp.float32)

    def spread(vector: Any) -> Any:
        vector = vector[...].reshape(-1, 64)
        quarters = [jnp.broadcast_to(vector[row].astype(jnp.float32)[:, None], (64, fmt.block_k // 4)) for row in rows]
        return jnp.concatenate(quarters, axis=1)

    value = codes * fmt.unit + (-8 * fmt.unit if zeros is None else spread(zeros))
    for factor in (scales, wide_scales):
        value = value if factor is None else value * spread(factor)
    return (value.astype(fmt.operand),)


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
