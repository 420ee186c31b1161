"""Grouped GEMM problems with packed weights, random stored values, and what they must give, in NumPy float64.

Layout contract: as in gemm_problem.py; x rows that no expert owns hold NaN.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.common.activations import Activation
from pallas_kernels.grouped_gemm.packed import PackedFormat, to_kernel_layout
from pallas_kernels.grouped_gemm.packed.format import FOLDED_RANGE
from tests.support.kernels.gemm_problem import Problem, products_of, tiles_of
from tests.support.oracles.kernel_tolerances import product_tolerance
from tests.support.oracles.tolerances import Tolerance

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E2M1 = np.concatenate([E2M1, -E2M1])

# name -> (format, dtype of group scales, whether channels have a scale)
KINDS: dict[str, tuple[PackedFormat, str | None, bool]] = {
    "int4 channel": (PackedFormat("int4"), None, True),
    "int4 channel asym": (PackedFormat("int4", has_zero_point=True), None, True),
    **{f"int4 g{g}": (PackedFormat("int4", scale="group", group_size=g), "bfloat16", False) for g in (32, 64, 128)},
    "int4 g128 f32": (PackedFormat("int4", scale="group", group_size=128), "float32", False),
    "int4 g128 f16": (PackedFormat("int4", "float16", "group", 128), "float16", False),
    "int4 g128 asym": (PackedFormat("int4", scale="group", group_size=128, has_zero_point=True), "bfloat16", False),
    "int4 g32 asym f16": (PackedFormat("int4", "float16", "group", 32, True), "float16", False),
    "int8 channel": (PackedFormat("int8"), None, True),
    "int8 g128": (PackedFormat("int8", scale="group", group_size=128), "bfloat16", False),
    "int8 g64 asym": (PackedFormat("int8", scale="group", group_size=64, has_zero_point=True), "float32", False),
    "int8 channel f16": (PackedFormat("int8", "float16"), None, True),
    "e4m3 channel": (PackedFormat("e4m3"), None, True),
    "e4m3 channel f16": (PackedFormat("e4m3", "float16"), None, True),
    "e4m3 g128": (PackedFormat("e4m3", scale="group", group_size=128), "float32", False),
    "w4a8 int8 channel": (PackedFormat("int4", "int8"), None, True),
    "w4a8 int8 g128": (PackedFormat("int4", "int8", "group", 128), "float32", False),
    "w4a8 int8 g64": (PackedFormat("int4", "int8", "group", 64), "bfloat16", False),
    "w4a8 int8 g128 asym": (PackedFormat("int4", "int8", "group", 128, True), "bfloat16", False),
    "w4a8 int8 channel asym": (PackedFormat("int4", "int8", has_zero_point=True), None, True),
    "w4a8 fp8 g128": (PackedFormat("int4", "float8_e4m3fn", "group", 128), "bfloat16", False),
    "w4a8 fp8 channel": (PackedFormat("int4", "float8_e4m3fn"), None, True),
    "nvfp4": (PackedFormat("e2m1", scale="e4m3", group_size=16), None, True),
    "mxfp4": (PackedFormat("e2m1", scale="e8m0", group_size=32), None, False),
    "mxfp4 fp8": (PackedFormat("e2m1", "float8_e4m3fn", "e8m0", 32), None, False),
    "mxfp8": (PackedFormat("e4m3", scale="e8m0", group_size=32), None, False),
}


@dataclasses.dataclass
class PackedProblem(Problem):
    """A problem of ``grouped_gemm_packed``. stored: arguments of ``to_kernel_layout``. tile_rows: rows in use of each
    tile, which its arguments do not tell.
    """

    stored: dict[str, np.ndarray]
    tile_rows: jax.Array


def make_stored(kind: str, lead: tuple[int, int], n: int, k: int, rng: Any) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Arguments of ``to_kernel_layout`` for matrices lead + (n, k), and their real values in float64."""
    fmt, scale_dtype, has_channel_scale = KINDS[kind]
    codes = rng.integers(0, 1 << fmt.bits, (*lead, n, k)).astype(np.uint8)
    if fmt.element == "e4m3":
        codes = np.where(codes & 127 == 127, codes - 1, codes).astype(np.uint8)
        values = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    elif fmt.element == "e2m1":
        values = E2M1[codes]
    else:
        values = codes.astype(np.float64) - (1 << (fmt.bits - 1))
    size = fmt.group_size or k
    groups = -(-k // size)

    def spread(array):
        return np.repeat(array.astype(np.float64), size, -1)[..., :k]

    stored: dict[str, Any] = dict(codes=codes)
    if fmt.has_zero_point:
        half = 1 << (fmt.bits - 1)
        stored["zero_point"] = rng.integers(-half, half, (*lead, n, groups)).astype(np.int8)
        values = values - spread(stored["zero_point"])
    if fmt.scale == "group":
        stored["scale"] = rng.uniform(-1.5, 1.5, (*lead, n, groups)).astype(np.float32).astype(scale_dtype)
        values = values * spread(stored["scale"])
    elif fmt.scale == "e4m3":
        bits = rng.integers(0, 255, (*lead, n, groups)).astype(np.uint8)  # subnormal, zero and negative scales too
        stored["scale"] = np.where(bits & 127 == 127, 0, bits).astype(np.uint8).view(ml_dtypes.float8_e4m3fn)
        values = values * spread(stored["scale"])
    elif fmt.scale == "e8m0":
        stored["scale"] = rng.integers(110, 131, (*lead, n, groups)).astype(np.uint8)
        values = values * np.exp2(spread(stored["scale"]) - 127)
        if fmt.is_8bit:  # groups of far smaller scales than their channel's largest count as zeros
            values[spread(stored["scale"]) < stored["scale"].max(-1, keepdims=True).astype(int) - FOLDED_RANGE] = 0
    if has_channel_scale:
        stored["channel_scale"] = rng.uniform(0.001, 1.5, (*lead, n)).astype(np.float32)
        values = values * stored["channel_scale"].astype(np.float64)[..., None]
    return stored, values


def make_problem(
    kind: str,
    sizes: list[int],
    *,
    k: int,
    n: int,
    block_m: int = 16,
    activation: Activation | None = None,
    bias: str | None = None,
    x_scale: str = "none",
    out_dtype: Any = jnp.bfloat16,
    spare_tiles: int = 2,
    seed: int = 0,
) -> PackedProblem:
    rng = np.random.default_rng(seed)
    fmt = KINDS[kind][0]
    experts, projections = len(sizes), 2 if activation is not None and activation.is_gated else 1
    tile_expert, tile_rows, row_expert = tiles_of(sizes, block_m, spare_tiles)
    rows = len(row_expert)

    if fmt.operand == "int8":
        x = rng.integers(-127, 128, (rows, k)).astype(np.int8)
    else:
        x = rng.standard_normal((rows, k), dtype=np.float32).astype(fmt.operand)
        x[row_expert < 0] = np.nan
    stored, values = make_stored(kind, (experts, projections), n, k, rng)
    # Sums near 1, where activations bend: the real scales are far from the random ones.
    magnitude = np.sqrt((values**2).mean((0, 2, 3)).max() * k)
    if fmt.is_8bit:
        assert x_scale == "row", "8-bit rows have a scale each"
        row_scale = rng.uniform(0.5, 2, rows) / magnitude / (64.0 if fmt.operand == "int8" else 1.0)
    else:
        x = (x.astype(np.float32) / np.float32(magnitude)).astype(fmt.operand)
        row_scale = rng.uniform(0.5, 2, rows)
    factor = {"none": None, "tensor": np.float32(0.7), "row": row_scale.astype(np.float32)}[x_scale]
    b = rng.standard_normal((experts, projections, n)).astype(bias) if bias else None

    x64 = x.astype(np.float64) * (1.0 if factor is None else np.asarray(factor, np.float64).reshape(-1, 1))
    expected = products_of(x64, values, b, row_expert, activation)
    kwargs = dict(x_scale=factor, bias=b, activation=activation, out_dtype=out_dtype)
    kwargs = {name: jnp.asarray(v) if hasattr(v, "dtype") and hasattr(v, "shape") else v for name, v in kwargs.items()}
    w = jax.tree.map(jnp.asarray, to_kernel_layout(fmt, **stored))
    args = (jnp.asarray(x), w, jnp.asarray(tile_expert), jnp.int32(len(tile_expert) - spare_tiles))
    return PackedProblem(args, kwargs, expected, row_expert, stored, jnp.asarray(tile_rows))


def packed_tolerance(kind: str, out_dtype: Any, *, folded: bool = False, tensor_core: bool = False) -> Tolerance:
    """Bound of one row against float64, by its largest value."""
    return product_tolerance(KINDS[kind][0].operand, out_dtype, tensor_core=tensor_core, folded=folded)
