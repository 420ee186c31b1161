"""Grouped GEMM problems with random stored values, and what they must give, in NumPy float64.

Layout contract: expert e owns ceil(sizes[e] / block_m) tiles of block_m rows, in expert order; x rows past sizes[e] in
an expert's last tile, and all rows past the last tile, are padding. Weights are (E, [G,] N, K); scales multiply.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.common.activations import Activation
from pallas_kernels.quantize_and_permute import quantize_and_permute
from tests.support.oracles.kernel_tolerances import product_tolerance
from tests.support.oracles.tolerances import Tolerance, assert_rows_close

# kind -> (element type, shape of x's scale, shape of w's scale)
KINDS = {
    "bf16": (ml_dtypes.bfloat16, None, None),
    "f16": (np.float16, None, None),
    "fp8_tensor": (ml_dtypes.float8_e4m3fn, "tensor", "tensor"),
    "fp8_row": (ml_dtypes.float8_e4m3fn, "row", "channel"),
    "fp8_block": (ml_dtypes.float8_e4m3fn, "group", "block"),
    "int8_row": (np.int8, "row", "channel"),
    "int8_tensor": (np.int8, "row", "tensor"),
}

# Hostile routings, by name: rows per expert.
ROUTINGS = {
    "ragged": [3, 64, 0, 65, 1, 130],
    "one expert takes all": [0, 0, 200, 0],
    "empty at both ends": [0, 17, 31, 0],
    "single row": [0, 1],
    "nothing routed": [0, 0, 0],
}


@dataclasses.dataclass
class Problem:
    """args, kwargs: of ``grouped_gemm``. expected: (Mp, N) float64 before output rounding. row_expert: (Mp,), -1 in
    padding.
    """

    args: tuple
    kwargs: dict[str, Any]
    expected: np.ndarray
    row_expert: np.ndarray

    @property
    def own(self) -> np.ndarray:
        """Which rows belong to an expert."""
        return self.row_expert >= 0

    def split(self) -> tuple[dict[str, jax.Array], dict[str, Any]]:
        """kwargs that are arrays, and the others."""
        arrays = {name: value for name, value in self.kwargs.items() if isinstance(value, jax.Array)}
        return arrays, {name: value for name, value in self.kwargs.items() if name not in arrays}

    def assert_close(self, out: Any, tol: Tolerance) -> None:
        assert_rows_close(np.asarray(out)[self.own], self.expected[self.own], tol, experts=self.row_expert[self.own])

    def compiled(self, op: Callable[..., Any], config: Any = None) -> Callable[[], Any]:
        """A function that runs the Hopper kernel; its outputs land in memory that held NaN before."""
        arrays, static = self.split()
        call = jax.jit(lambda args, arrays: op(*args, **arrays, **static, config=config, implementation="hopper"))
        call = call.lower(self.args, arrays).compile()

        def once():
            for leaf in jax.tree.leaves(call.out_info):
                jnp.full(leaf.shape, jnp.nan, leaf.dtype).block_until_ready()
            return call(self.args, arrays)

        return once


def reference_of(op: Callable[..., Any]) -> Callable[[Problem], Any]:
    """The op's reference as a function of a problem, compiled once for each set of static arguments."""
    run = jax.jit(
        lambda args, arrays, static: op(*args, **arrays, **dict(static), implementation="reference"), static_argnums=2
    )

    def of(problem: Problem) -> Any:
        arrays, static = problem.split()
        return run(problem.args, arrays, tuple(static.items()))

    return of


def tiles_of(sizes: list[int], block_m: int, spare_tiles: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(expert of each tile, its rows in use, expert of each row or -1), the spare tiles being out of use."""
    tiles = [-(-size // block_m) for size in sizes]
    tile_expert = np.concatenate([np.repeat(np.arange(len(sizes)), tiles), np.full(spare_tiles, -1)])
    used = [np.minimum(size - np.arange(0, size, block_m), block_m) for size in sizes]
    tile_rows = np.concatenate([*used, np.zeros(spare_tiles)]).astype(np.int32)
    in_use = np.arange(len(tile_expert) * block_m) % block_m < np.repeat(tile_rows, block_m)
    return tile_expert.astype(np.int32), tile_rows, np.where(in_use, np.repeat(tile_expert, block_m), -1)


def products_of(
    x: np.ndarray, w: np.ndarray, bias: np.ndarray | None, row_expert: np.ndarray, activation: Activation | None
) -> np.ndarray:
    """(Mp, N): each expert's rows times its matrices (E, G, N, K), with bias and activation, in float64."""
    expected = np.zeros((len(x), w.shape[2]))
    for e in range(len(w)):
        own = row_expert == e
        h = np.einsum("mk,gnk->gmn", x[own], w[e])
        if bias is not None:
            h = h + bias[e].astype(np.float64)[:, None]
        expected[own] = h[0] if activation is None else activation_numpy(activation, *h)
    return expected


def make_problem(
    kind: str,
    sizes: list[int],
    *,
    k: int,
    n: int,
    block_m: int = 64,
    projections: int = 0,
    activation: Activation | None = None,
    bias: str | None = None,
    requantize: str = "none",
    out_dtype: Any = jnp.bfloat16,
    with_tile_rows: bool = False,
    spare_tiles: int = 2,
    padding: float = 0.0,
    seed: int = 0,
) -> Problem:
    """projections: 0 for weights (E, N, K), else (E, projections, N, K). padding: what x holds in rows that
    no expert owns."""
    rng = np.random.default_rng(seed)
    dtype, x_kind, w_kind = KINDS[kind]
    num_experts, g = len(sizes), max(projections, 1)
    tile_expert, tile_rows, row_expert = tiles_of(sizes, block_m, spare_tiles)
    rows, num_tiles = len(row_expert), len(tile_expert) - spare_tiles

    def values(shape):
        if dtype == np.int8:
            return rng.integers(-127, 128, shape).astype(np.int8)
        return rng.standard_normal(shape, dtype=np.float32).astype(dtype)

    x, w = values((rows, k)), values((num_experts, g, n, k))
    x[row_expert < 0] = np.asarray(padding).astype(dtype)
    kb, nb = -(-k // 128), -(-n // 128)
    x_shape = {None: None, "tensor": (), "row": (rows,), "group": (kb, rows)}[x_kind]
    w_shape = {
        None: None,
        "tensor": (num_experts, g),
        "channel": (num_experts, g, n),
        "block": (num_experts, g, nb, kb),
    }[w_kind]

    def scales(shape):
        return None if shape is None else rng.uniform(0.5, 2.0, shape).astype(np.float32) / np.float32(8.0)

    x_scale, w_scale = scales(x_shape), scales(w_shape)
    b = rng.standard_normal((num_experts, g, n)).astype(bias) if bias else None

    x64, w64 = x.astype(np.float64), w.astype(np.float64)
    if x_kind == "group":
        x64 = x64 * np.repeat(x_scale.astype(np.float64), 128, axis=0)[:k].T
    elif x_kind is not None:
        x64 = x64 * np.asarray(x_scale, np.float64).reshape(-1, 1)
    if w_kind == "block":
        w64 = w64 * np.repeat(np.repeat(w_scale.astype(np.float64), 128, 2), 128, 3)[:, :, :n, :k]
    elif w_kind is not None:
        w64 = w64 * w_scale.astype(np.float64).reshape(num_experts, g, -1, 1)
    expected = products_of(x64, w64, b, row_expert, activation)

    out_scale = None
    if requantize == "tensor":
        out_scale = np.float32(max(np.abs(expected).max(), 1.0) / 300.0)  # a few values saturate
    lead = (lambda a: a) if projections else (lambda a: None if a is None else a[:, 0])
    kwargs = dict(
        x_scale=x_scale,
        w_scale=lead(w_scale),
        bias=lead(b),
        activation=activation,
        out_dtype=out_dtype,
        requantize=requantize,
        out_scale=out_scale,
        tile_rows=tile_rows if with_tile_rows else None,
    )
    kwargs = {name: jnp.asarray(v) if isinstance(v, np.ndarray | np.float32) else v for name, v in kwargs.items()}
    args = tuple(jnp.asarray(a) for a in (x, lead(w), tile_expert, np.int32(num_tiles)))
    return Problem(args, kwargs, expected, row_expert)


def activation_numpy(activation: Activation, gate: np.ndarray, up: np.ndarray | None = None) -> np.ndarray:
    """The activations a kernel can fuse, written a second time."""

    def sigmoid(v):
        return 0.5 + 0.5 * np.tanh(0.5 * v)

    limit = activation.limit
    match activation.name:
        case "silu" | "swigluoai" | "swigluoai_uninterleave":
            if limit is not None:
                gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
            return gate * sigmoid(activation.alpha * gate) * (up + activation.beta)
        case "swiglustep":
            gate = gate * sigmoid(gate)
            if limit is not None:
                gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
            return gate * up
        case "gelu_tanh" | "gelu_tanh_no_mul":
            h = 0.5 * gate * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (gate + 0.044715 * gate**3)))
            return h if up is None else h * up
        case "silu_no_mul":
            return gate * sigmoid(gate)
        case "relu2_no_mul":
            return np.maximum(gate, 0.0) ** 2
    raise NotImplementedError(activation.name)


def gemm_tolerance(kind: str, out_dtype: Any, *, tensor_core: bool = False) -> Tolerance:
    """Bound of one row against float64, by its largest value."""
    return product_tolerance(KINDS[kind][0], out_dtype, tensor_core=tensor_core)


def dequantized(out: Any, columns: int = 128) -> np.ndarray:
    """(codes, scales (groups, rows)) -> float64 values."""
    codes, scale = (np.asarray(a).astype(np.float64) for a in out)
    return codes * np.repeat(scale.T, columns, axis=1)[:, : codes.shape[1]]


def together_and_apart(problem: Problem, run: Callable[[Problem], Any], implementation: str) -> tuple[Any, Any]:
    """(codes as bytes, scales) of the rows in use: as the product requantizes them, and as ``quantize_and_permute``
    does with its bfloat16 result. Scales are None where the problem gives one.
    """
    requantize, own = problem.kwargs["requantize"], problem.row_expert >= 0
    plain = dataclasses.replace(problem, kwargs=problem.kwargs | dict(requantize="none", out_scale=None))
    apart = quantize_and_permute(
        run(plain),
        quantization=f"e4m3_{requantize}",
        scale=problem.kwargs["out_scale"],
        rows=jnp.asarray(np.where(own, np.arange(len(own)), -1), jnp.int32),
        implementation=implementation,
    )
    together = run(problem)
    pairs = [(together, None) if requantize == "tensor" else together, apart]
    together, apart = (
        (np.asarray(codes)[own].view(np.uint8), None if scales is None else np.asarray(scales)[:, own])
        for codes, scales in pairs
    )
    return together, apart
