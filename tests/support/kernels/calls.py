"""One small call of every Hopper kernel with real data, for what watches memory: canaries, and compute-sanitizer.

    compute-sanitizer --tool memcheck python tests/support/kernels/calls.py [NAME ...]

runs the calls (all, or those whose names start with one of the arguments, or for "=NAME" that one) and prints their
names; --list only names them.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # as a program it has only its own folder on the path
    sys.path[:0] = [str(Path(__file__).resolve().parents[3])]

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.align import AlignConfig, align
from pallas_kernels.combine import combine
from pallas_kernels.common.activations import Activation
from pallas_kernels.grouped_gemm import GemmConfig, grouped_gemm
from pallas_kernels.grouped_gemm.packed import PackedConfig, PackedVectorConfig, grouped_gemm_packed
from pallas_kernels.nvlink_dispatch import ExchangeDesc, place_rows
from pallas_kernels.quantize_and_permute import PermuteConfig, quantize_and_permute
from pallas_kernels.quantize_and_permute.config import QUANTIZATIONS, TAKES_SCALE
from pallas_kernels.route import route_and_align
from tests.support.kernels import gemm_problem, packed_problem

Call = tuple[Callable[..., Any], tuple[Any, ...]]

SILU = Activation("silu")
SIZES = [3, 0, 70, 1]
_TALL = dict(block_m=128)
_GATED = dict(projections=2, activation=SILU)
_BIASED = dict(bias="bfloat16", **_GATED)
_RAGGED = dict(with_tile_rows=True, **_GATED)
_REQUANTIZED = dict(requantize="group", **_RAGGED)
_GEMMS: dict[str, tuple[str, dict[str, Any], GemmConfig | None]] = {
    "bf16": ("bf16", dict(block_m=64), None),
    "bf16 swapped": ("bf16", dict(block_m=16), GemmConfig(16, 128, 3, swap_ab=True)),
    "fp8 row, 128 rows": ("fp8_row", _TALL, None),
    "fp8 block, requantized": ("fp8_block", _REQUANTIZED, None),
    "int8 gated": ("int8_row", dict(bias="bfloat16", **_RAGGED), None),
    "f16": ("f16", dict(out_dtype=jnp.float16), None),
    "bf16, 128 x 256": ("bf16", _TALL, GemmConfig(128, 256, 4)),
    "bf16, 128 x 2 x 96 in chunks of rows": ("bf16", _TALL | _RAGGED, GemmConfig(128, 96, 4, row_chunk=16)),
    "fp8 block, 128 x 256": ("fp8_block", _TALL, GemmConfig(128, 256, 4)),
    "bf16 clusters, 128 x 128": ("bf16", _TALL, GemmConfig(128, 128, 3, cluster=2)),
    "bf16 clusters sharing weights, 128 x 128": (
        "bf16",
        _TALL,
        GemmConfig(128, 128, 3, cluster=2, shares_weights=True),
    ),
    "fp8 block, requantized, clusters": ("fp8_block", _TALL | _REQUANTIZED, GemmConfig(128, 128, 3, cluster=2)),
    "fp8 block swapped, requantized": (
        "fp8_block",
        _REQUANTIZED | dict(block_m=24),
        GemmConfig(24, 128, 3, swap_ab=True),
    ),
    "fp8 tensor swapped, requantized": (
        "fp8_tensor",
        dict(requantize="tensor", block_m=16, **_BIASED),
        GemmConfig(16, 128, 3, swap_ab=True),
    ),
    "fp8 tensor, requantized": ("fp8_tensor", dict(requantize="tensor", **_GATED), None),
}
# kind, rows and columns of a tile, options; each in three stages with swap_ab
for _name, _kind, _m, _n, _options in (
    ("fp8 row swapped, 96 x 2 x 128", "fp8_row", 96, 128, _BIASED),
    ("fp8 block swapped, 16 x 256", "fp8_block", 16, 256, {}),
    ("fp8 block swapped, 96 x 2 x 128", "fp8_block", 96, 128, _BIASED),
    ("bf16 swapped, 80 x 256", "bf16", 80, 256, {}),
    ("bf16 large M, 144 x 256", "bf16", 144, 256, {}),
    ("fp8 row large M, 160 x 2 x 128", "fp8_row", 160, 128, _BIASED),
    ("int8 swapped, 48 x 2 x 192", "int8_row", 48, 192, _GATED),
):
    _GEMMS[_name] = (_kind, dict(block_m=_m, **_options), GemmConfig(_m, _n, 3, swap_ab=True))
_GEMMS["fp8 tensor swapped, 64 x 256"] = ("fp8_tensor", dict(block_m=64), GemmConfig(64, 256, 4, swap_ab=True))
_PACKED = ("int4 g128", "int4 g128 asym", "int8 channel", "e4m3 g128", "nvfp4", "mxfp4", "mxfp8")
_PACKED_8BIT = ("w4a8 int8 g128", "w4a8 int8 g128 asym", "w4a8 fp8 g128", "mxfp4 fp8")
# Tiles whose warpgroups share channels or K, long and short steps, scales folded into operands, heights between powers.
PACKED_TILES = {
    "int4 g128": (
        PackedVectorConfig(4),
        PackedVectorConfig(1),
        PackedConfig(128, 2, 2, 2, splits_projections=True),
        PackedConfig(80, 4, 2, 2, True, splits_projections=True),
        PackedConfig(64, 4, 1, 2, splits_projections=True),
        PackedConfig(16, 4, 4, 2, splits_projections=True),
        PackedConfig(16, 4, 4, 2, k_split=4),
        PackedConfig(8, 4, 4, 2, splits_projections=True),
        PackedConfig(128, 2, 4, 2, True),
        PackedConfig(48, 3, 2, 2),
        PackedConfig(24, 3, 4, 2),
        PackedConfig(144, 2, 2, 2, True),
        PackedConfig(160, 2, 2, 2, splits_projections=True),
    ),
    "nvfp4": (
        PackedVectorConfig(2),
        PackedConfig(176, 2, 2, 2),
        PackedConfig(128, 2, 2, 2, splits_projections=True),
        PackedConfig(16, 4, 4, 2, k_split=2),
        PackedConfig(8, 4, 2, 2),
        PackedConfig(48, 4, 2, 2, splits_projections=True),
        PackedConfig(16, 2, 5, 2),
    ),
    "mxfp4": (
        PackedConfig(80, 4, 2, 2, splits_projections=True),
        PackedConfig(96, 2, 2, 2, splits_projections=True),
        PackedConfig(24, 4, 4, 2, k_split=2),
    ),
    "w4a8 int8 g128": (
        PackedVectorConfig(4),
        PackedConfig(96, 2, 1, 2, splits_projections=True),
        PackedConfig(48, 4, 1, 2, splits_projections=True),
        PackedConfig(16, 2, 2, 2, k_split=2),
        PackedConfig(24, 3, 1, 2),
        PackedConfig(144, 2, 1, 2, splits_projections=True),
    ),
    "mxfp4 fp8": (PackedConfig(64, 2, 1, 2, splits_projections=True), PackedConfig(16, 4, 4, 2, k_split=4)),
    "int8 channel": (PackedConfig(16, 4, 4, 2, k_split=4), PackedConfig(64, 4, 1, 2, splits_projections=True)),
}
_PUSHED = ("none", "e4m3_row", "e4m3_group", "int8_row")


def small_calls() -> dict[str, Callable[[], Call]]:
    """By name: a maker of (function of arrays, arrays). The function runs the kernel and returns all it writes."""
    calls: dict[str, Callable[[], Call]] = {
        "route_and_align in one launch": lambda: _routing(60),
        "route_and_align in two": lambda: _routing(300),
        "route_and_align, groups and a bias": lambda: _routing(60, bias=True, num_groups=5, groups_kept=2),
        **{
            f"route_and_align, {kind} of its tokens": functools.partial(_routing_and_quantizing, kind)
            for kind in ("e4m3_row", "int8_row", "e4m3_tensor", "e4m3_group")
        },
        "align": lambda: (lambda ids: align(ids, 5, 16, implementation="hopper"), (_ids(33),)),
        "align of a shard": lambda: (
            lambda ids: align(ids, 2, 16, group_offset=2, implementation="hopper"),
            (_ids(33),),
        ),
        "align, pairs shared by blocks": lambda: (
            lambda ids: align(ids, 5, 16, config=AlignConfig(1, 3), implementation="hopper"),
            (_ids(300),),
        ),
        "quantize_and_permute with columns in an order": _gathering,
        "quantize_and_permute e4m3_group in place, in parts": functools.partial(_in_place, "e4m3_group", width=3584),
        "quantize_and_permute e4m3_group in place, few groups": functools.partial(_in_place, "e4m3_group", width=384),
        "quantize_and_permute e4m3_group in place, short group": functools.partial(_in_place, "e4m3_group", width=704),
        "combine": _combining,
        "combine_rows": lambda: _bringing_back(None),
        "combine_rows, sums of a device": lambda: _bringing_back("bfloat16"),
    }
    for quantization in QUANTIZATIONS:
        calls[f"quantize_and_permute {quantization}"] = functools.partial(_permuting, quantization)
        calls[f"quantize_and_permute {quantization} in place"] = functools.partial(_in_place, quantization)
        if quantization in ("e4m3_row", "int8_row"):
            for name, maker in ((" in place", _in_place), ("", _permuting)):
                name = f"quantize_and_permute {quantization}{name}, four rows at once"
                calls[name] = functools.partial(maker, quantization, PermuteConfig(2, 4))
    for name, (kind, options, config) in _GEMMS.items():
        calls[f"grouped_gemm {name}"] = functools.partial(_multiplying, kind, options, config)
    for kind in ("fp8_row", "fp8_block"):
        calls[f"grouped_gemm {kind}, unpermuted"] = functools.partial(_multiplying_unpermuted, kind)
    calls["grouped_gemm_packed, unpermuted"] = _multiplying_unpermuted_packed
    for kind in (*_PACKED, *_PACKED_8BIT):
        calls[f"grouped_gemm_packed {kind}"] = functools.partial(_multiplying_packed, kind)
    for kind, configs in PACKED_TILES.items():
        for config in configs:
            calls[f"grouped_gemm_packed {kind}, {_words(config)}"] = functools.partial(_multiplying_tiles, kind, config)
    for quantization in _PUSHED:
        calls[f"dispatch_rows {quantization}"] = functools.partial(_dispatching, quantization)
        if quantization != "none":
            calls[f"place_rows {quantization}"] = functools.partial(_placing, quantization)
    return calls


def _words(config: PackedConfig | PackedVectorConfig) -> str:
    if isinstance(config, PackedVectorConfig):
        return f"single rows, K in {config.k_split}"
    shared = " projections split" * config.splits_projections + f" K in {config.k_split}" * (config.k_split > 1)
    return (
        f"{config.block_m} rows {config.num_consumers} x {config.step_blocks}{shared}{' folded' * config.folds_scales}"
    )


def _rng() -> np.random.Generator:
    return np.random.default_rng(0)


def _ids(tokens: int, experts: int = 5) -> jax.Array:
    return jnp.asarray(_rng().integers(-1, experts + 1, (tokens, 2)), jnp.int32)


def _routing(tokens: int, bias: bool = False, **options: Any) -> Call:
    logits, biases = (jnp.asarray(_rng().standard_normal(shape), jnp.float32) for shape in ((tokens, 40), 40))
    options = dict(scoring="sigmoid" if bias else "softmax", implementation="hopper") | options

    def run(logits, biases):
        routed = route_and_align(logits, 4, 16, bias=biases if bias else None, **options)
        return routed.weights, routed.ids, routed.tiles

    return run, (logits, biases)


def _routing_and_quantizing(quantization: str) -> Call:
    """All rows of the scales named, so that all that is returned is written."""
    logits, x = (
        jnp.asarray(_rng().standard_normal(shape), dtype)
        for shape, dtype in (((16, 40), "float32"), ((16, 640), "bfloat16"))
    )
    scale = jnp.float32(0.03) if quantization in TAKES_SCALE else None

    def run(logits, x):
        tokens = dict(x=x, quantization=quantization, scale=scale)
        routed = route_and_align(logits, 4, 16, unpermuted=True, tokens=tokens, implementation="hopper")
        return routed.weights, routed.ids, routed.tiles, routed.codes, routed.scales

    return run, (logits, x)


def _rows(tokens: int, top_k: int, num_rows: int) -> np.ndarray:
    rows = _rng().permutation(num_rows)[: tokens * top_k].reshape(tokens, top_k)
    return np.where(_rng().random(rows.shape) < 0.75, rows, -1).astype(np.int32)


def _permuting(quantization: str, config: PermuteConfig | None = None) -> Call:
    x, row_of = jnp.asarray(_rng().standard_normal((9, 640)), jnp.bfloat16), _rows(9, 3, 40)
    scale = jnp.float32(0.03) if quantization in TAKES_SCALE else None

    def run(x, row_of):
        options: dict[str, Any] = dict(quantization=quantization, scale=scale, config=config, implementation="hopper")
        return quantize_and_permute(x, row_of, 40, **options)

    return run, (x, jnp.asarray(row_of))


def _in_place(quantization: str, config: PermuteConfig | None = None, width: int = 640) -> Call:
    x, rows = jnp.asarray(_rng().standard_normal((40, width)), jnp.bfloat16), _rng().permutation(40)[:27]
    scale = jnp.float32(0.03) if quantization in TAKES_SCALE else None

    def run(x, rows):
        options: dict[str, Any] = dict(quantization=quantization, scale=scale, config=config, implementation="hopper")
        return quantize_and_permute(x, rows=rows, **options)

    return run, (x, jnp.asarray(np.where(_rng().random(27) < 0.75, rows, -1), jnp.int32))


def _gathering() -> Call:
    x, row_of = jnp.asarray(_rng().standard_normal((9, 200)), jnp.bfloat16), _rows(9, 3, 40)
    columns = _rng().permuted(np.tile(np.arange(200, dtype=np.int32), (5, 1)), axis=1)
    tile_expert = _rng().integers(0, 5, 5).astype(np.int32)

    def run(x, row_of, columns, tile_expert):
        options: dict[str, Any] = dict(columns=columns, tile_expert=tile_expert, implementation="hopper")
        return quantize_and_permute(x, row_of, 40, quantization="none", **options)

    return run, tuple(map(jnp.asarray, (x, row_of, columns, tile_expert)))


def _combining() -> Call:
    rows, row_of = jnp.asarray(_rng().standard_normal((40, 640)), jnp.bfloat16), _rows(9, 3, 40)
    weights = jnp.asarray(_rng().random((9, 3)), jnp.float32)
    return functools.partial(combine, implementation="hopper"), (rows, jnp.asarray(row_of), weights)


def _placing(quantization: str) -> Call:
    x, row_of = jnp.asarray(_rng().standard_normal((9, 1024)), jnp.bfloat16), _rows(9, 3, 40)
    codes, scales = quantize_and_permute(x, quantization=quantization, implementation="reference")

    def run(codes, scales, row_of):
        return place_rows(codes, scales, row_of, 40, implementation="hopper")

    return run, (codes, jnp.asarray(np.asarray(scales).T), jnp.asarray(row_of))


def _dispatching(quantization: str) -> Call:
    """Devices are parts of one GPU (nvlink_rehearsal.py, whose kernels are only loaded where they run)."""
    from pallas_kernels.nvlink_dispatch.config import choose_dispatch_config
    from tests.support.kernels import nvlink_rehearsal

    desc = ExchangeDesc((("e", 2),), "e", 9, 1024, 3, 4, "bfloat16", quantization)
    x = jnp.asarray(_rng().standard_normal((2, 9, 1024)), jnp.bfloat16)
    slots = jnp.asarray(_rng().integers(-1, 8, (2, 9, 3)), jnp.int32)
    return functools.partial(nvlink_rehearsal.dispatch, desc, choose_dispatch_config(desc, 8)), (x, slots)


def _bringing_back(sum_dtype: str | None) -> Call:
    """Into the mailboxes of a dispatch of zeros."""
    from pallas_kernels.nvlink_dispatch.config import choose_combine_config, choose_dispatch_config
    from tests.support.kernels import nvlink_rehearsal

    desc = ExchangeDesc((("e", 2),), "e", 9, 1024, 3, 4, "bfloat16", sum_dtype=sum_dtype)
    there, back = choose_dispatch_config(desc, 8), choose_combine_config(desc, 8)
    rows, slots = _rng().standard_normal((2, 60, 1024)), _rng().integers(-1, 8, (2, 9, 3))
    here = slots.reshape(-1, 3) // 4 == np.arange(2)[:, None, None]
    places = np.stack([_rng().permutation(60)[:54].reshape(-1, 3)] * 2)
    arrays = jnp.asarray(rows, jnp.bfloat16), np.where(here, places, -1), slots, _rng().random(slots.shape)
    dtypes = jnp.bfloat16, jnp.int32, jnp.int32, jnp.float32

    def run(rows, row_of, slots, weights):
        x, told = jnp.zeros((2, 9, 1024), jnp.bfloat16), None if sum_dtype is None else weights
        *_, came, mailbox, table = nvlink_rehearsal.dispatch(desc, there, x, slots, told)
        factors = weights if sum_dtype is None else came
        return nvlink_rehearsal.combine(desc, back, rows, row_of, slots, factors, mailbox, table)

    return run, tuple(jnp.asarray(array, dtype) for array, dtype in zip(arrays, dtypes, strict=True))


def _multiplying(kind: str, options: dict[str, Any], config: GemmConfig | None) -> Call:
    problem = gemm_problem.make_problem(kind, SIZES, k=640, n=384, **options)
    return _bound(functools.partial(grouped_gemm, config=config), problem)


def _multiplying_packed(kind: str) -> Call:
    problem = packed_problem.make_problem(
        kind, SIZES, k=320, n=336, block_m=32, activation=SILU, bias="bfloat16", x_scale="row"
    )
    return _bound(grouped_gemm_packed, problem)


def _multiplying_tiles(kind: str, config: PackedConfig | PackedVectorConfig) -> Call:
    options: dict[str, Any] = dict(block_m=config.block_m, activation=SILU, bias="bfloat16", x_scale="row")
    problem = packed_problem.make_problem(kind, SIZES, k=1024, n=336, **options)
    return _bound(functools.partial(grouped_gemm_packed, config=config), problem)


def _multiplying_unpermuted(kind: str) -> Call:
    return _of_one_tile(grouped_gemm, gemm_problem.make_problem(kind, SIZES, k=640, n=384, block_m=64))


def _multiplying_unpermuted_packed() -> Call:
    problem = packed_problem.make_problem("w4a8 int8 g128", SIZES, k=320, n=336, block_m=32, x_scale="row")
    return _of_one_tile(grouped_gemm_packed, problem)


def _of_one_tile(op: Callable[..., Any], problem: Any) -> Call:
    """With five rows in every tile, and as many scales as a tile has rows."""
    x, w, tile_expert, num_tiles = problem.args
    block_m = x.shape[0] // tile_expert.size
    kwargs = dict(problem.kwargs, block_m=block_m, x_scale=problem.kwargs["x_scale"][..., :block_m])
    return _bound(op, dataclasses.replace(problem, args=(x[:5], w, tile_expert, num_tiles), kwargs=kwargs))


def _bound(op: Callable[..., Any], problem: Any) -> Call:
    """The op as a function of arrays alone."""
    arrays = {name: value for name, value in problem.kwargs.items() if isinstance(value, jax.Array)}
    static = {name: value for name, value in problem.kwargs.items() if name not in arrays}

    def run(args, arrays):
        return op(*args, **arrays, **static, implementation="hopper")

    return run, (problem.args, arrays)


def main(wanted: list[str]) -> None:
    calls = small_calls()
    if wanted == ["--list"]:
        print("\n".join(calls))
        return
    for name, make in calls.items():
        if not wanted or name.startswith(tuple(wanted)) or f"={name}" in wanted:
            function, arguments = make()
            jax.block_until_ready(jax.jit(function)(*arguments))
            print("ran", name, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
