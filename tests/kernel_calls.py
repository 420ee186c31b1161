"""One small call of every Hopper kernel with real data, for what watches memory: canaries, and compute-sanitizer.

    compute-sanitizer --tool memcheck python tests/kernel_calls.py [NAME ...]

runs the calls (all, or those whose names start with one of the arguments) and prints their names.
"""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # as a program it has only its own folder on the path
    sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

import gemm_problem
import jax
import jax.numpy as jnp
import numpy as np
import packed_problem

from pallas_kernels.align import align
from pallas_kernels.combine import combine
from pallas_kernels.common.activations import Activation
from pallas_kernels.grouped_gemm import GemmConfig, grouped_gemm
from pallas_kernels.grouped_gemm_packed import grouped_gemm_packed
from pallas_kernels.quantize_and_permute import quantize_and_permute
from pallas_kernels.quantize_and_permute.config import QUANTIZATIONS, TAKES_SCALE
from pallas_kernels.route import route_and_align

Call = tuple[Callable[..., Any], tuple[Any, ...]]

SILU = Activation("silu")
SIZES = [3, 0, 70, 1]
_GEMMS: dict[str, tuple[str, dict[str, Any], GemmConfig | None]] = {
    "bf16": ("bf16", dict(block_m=64), None),
    "bf16 swapped": ("bf16", dict(block_m=16), GemmConfig(16, 128, 3, is_swapped=True)),
    "fp8 row, 128 rows": ("fp8_row", dict(block_m=128), None),
    "fp8 block, requantized": (
        "fp8_block",
        dict(halves=2, activation=SILU, requantize="group", with_tile_rows=True),
        None,
    ),
    "int8 gated": ("int8_row", dict(halves=2, activation=SILU, bias="bfloat16", with_tile_rows=True), None),
}
_PACKED = ("int4 g128", "int4 g128 asym", "int8 channel", "e4m3 g128", "nvfp4", "mxfp4", "mxfp8")
_PACKED_8BIT = ("w4a8 int8 g128", "w4a8 int8 g128 asym", "w4a8 fp8 g128", "mxfp4 fp8")


def small_calls() -> dict[str, Callable[[], Call]]:
    """By name: a maker of (function of arrays, arrays). The function runs the kernel and returns all it writes."""
    calls: dict[str, Callable[[], Call]] = {
        "route_and_align in one launch": lambda: _routing(60),
        "route_and_align in two": lambda: _routing(300),
        "align": lambda: (lambda ids: align(ids, 5, 16, implementation="mosaic"), (_ids(33),)),
        "align of a shard": lambda: (
            lambda ids: align(ids, 2, 16, group_offset=2, implementation="mosaic"),
            (_ids(33),),
        ),
        "quantize_and_permute with columns in an order": _gathering,
        "combine": _combining,
    }
    for quantization in QUANTIZATIONS:
        calls[f"quantize_and_permute {quantization}"] = functools.partial(_permuting, quantization)
    for name, (kind, options, config) in _GEMMS.items():
        calls[f"grouped_gemm {name}"] = functools.partial(_multiplying, kind, options, config)
    for kind in (*_PACKED, *_PACKED_8BIT):
        calls[f"grouped_gemm_packed {kind}"] = functools.partial(_multiplying_packed, kind)
    return calls


def _rng() -> np.random.Generator:
    return np.random.default_rng(0)


def _ids(tokens: int, experts: int = 5) -> jax.Array:
    return jnp.asarray(_rng().integers(-1, experts + 1, (tokens, 2)), jnp.int32)


def _routing(tokens: int) -> Call:
    logits = jnp.asarray(_rng().standard_normal((tokens, 40)), jnp.float32)

    def run(logits):
        routed = route_and_align(logits, 4, 16, scoring="softmax", renormalize=True, implementation="mosaic")
        return routed.weights, routed.ids, routed.tiles

    return run, (logits,)


def _rows(tokens: int, top_k: int, num_rows: int) -> np.ndarray:
    rows = _rng().permutation(num_rows)[: tokens * top_k].reshape(tokens, top_k)
    return np.where(_rng().random(rows.shape) < 0.75, rows, -1).astype(np.int32)


def _permuting(quantization: str) -> Call:
    x, row_of = jnp.asarray(_rng().standard_normal((9, 640)), jnp.bfloat16), _rows(9, 3, 40)
    scale = jnp.float32(0.03) if quantization in TAKES_SCALE else None

    def run(x, row_of):
        return quantize_and_permute(x, row_of, 40, quantization=quantization, scale=scale, implementation="mosaic")

    return run, (x, jnp.asarray(row_of))


def _gathering() -> Call:
    x, row_of = jnp.asarray(_rng().standard_normal((9, 200)), jnp.bfloat16), _rows(9, 3, 40)
    columns = _rng().permuted(np.tile(np.arange(200, dtype=np.int32), (5, 1)), axis=1)
    tile_expert = _rng().integers(0, 5, 5).astype(np.int32)

    def run(x, row_of, columns, tile_expert):
        options = dict(columns=columns, tile_expert=tile_expert, implementation="mosaic")
        return quantize_and_permute(x, row_of, 40, quantization="none", **options)

    return run, tuple(map(jnp.asarray, (x, row_of, columns, tile_expert)))


def _combining() -> Call:
    rows, row_of = jnp.asarray(_rng().standard_normal((40, 640)), jnp.bfloat16), _rows(9, 3, 40)
    weights = jnp.asarray(_rng().random((9, 3)), jnp.float32)
    return functools.partial(combine, implementation="mosaic"), (rows, jnp.asarray(row_of), weights)


def _multiplying(kind: str, options: dict[str, Any], config: GemmConfig | None) -> Call:
    problem = gemm_problem.make_problem(kind, SIZES, k=640, n=384, **options)
    return _bound(functools.partial(grouped_gemm, config=config), problem)


def _multiplying_packed(kind: str) -> Call:
    problem = packed_problem.make_problem(
        kind, SIZES, k=320, n=336, block_m=32, activation=SILU, bias="bfloat16", x_scale="row"
    )
    return _bound(grouped_gemm_packed, problem)


def _bound(op: Callable[..., Any], problem: Any) -> Call:
    """The op as a function of arrays alone."""
    arrays = {name: value for name, value in problem.kwargs.items() if isinstance(value, jax.Array)}
    static = {name: value for name, value in problem.kwargs.items() if name not in arrays}

    def run(args, arrays):
        return op(*args, **arrays, **static, implementation="mosaic")

    return run, (problem.args, arrays)


def main(wanted: list[str]) -> None:
    for name, make in small_calls().items():
        if not wanted or name.startswith(tuple(wanted)):
            function, arguments = make()
            jax.block_until_ready(jax.jit(function)(*arguments))
            print("ran", name, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
