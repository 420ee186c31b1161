"""Hopper kernels in JAX's GPU interpreter, races looked for: values, barriers and TMA copies without a GPU.

The interpreter runs what has no inline PTX and no matrix operand in registers: combine, the row kernels and the grouped
GEMM with operands in shared memory. It needs jax 0.11 (that of 0.10.2 knows neither transposed operands nor loads with
a layout). It simulates threads, which wait for ever where one has failed: each case is a process with a time limit.

    PYTHONPATH=. python tests/pallas_kernels/test_interpreter.py NAME
"""

import dataclasses
import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.add_and_norm import AddNormConfig, add_and_norm
from pallas_kernels.combine import RoutedRows, combine
from pallas_kernels.combine.config import CombineConfig, CombineDesc
from pallas_kernels.combine.kernel_sm90 import combine_sm90
from pallas_kernels.common import mosaic, numerics_sm90
from pallas_kernels.common.activations import Activation
from pallas_kernels.decode_attention import DecodeConfig, DecodeDesc, decode_attention_ref, latents_sm90
from pallas_kernels.decode_attention import kernel_sm90 as decode_kernel
from pallas_kernels.decode_attention.api import queries_in_columns
from pallas_kernels.decode_attention.combine_sm90 import Parts
from pallas_kernels.decode_attention.kernel_sm90 import decode_sm90
from pallas_kernels.decode_attention.schedule import make_schedule, seen
from pallas_kernels.grouped_gemm import GemmConfig, epilogue_sm90, grouped_gemm
from pallas_kernels.grouped_gemm.dgrad import DgradConfig, plain_sm90
from pallas_kernels.grouped_gemm.dgrad import kernel_sm90 as dgrad_kernel
from pallas_kernels.grouped_gemm.wgrad import WgradConfig, grouped_wgrad
from pallas_kernels.multiply_heads import HeadsConfig
from pallas_kernels.multiply_heads import describe as describe_heads
from pallas_kernels.multiply_heads.kernel_sm90 import multiply_heads_sm90
from pallas_kernels.multiply_heads.reference import multiply_heads_ref
from pallas_kernels.quantize_and_permute import PermuteConfig, PermuteDesc, quantize_and_permute
from pallas_kernels.quantize_and_permute import api as permute_api
from pallas_kernels.quantize_and_permute import kernel_sm90 as permute_kernel
from pallas_kernels.quantize_and_permute.kernel_sm90 import quantize_and_permute_sm90
from pallas_kernels.rotate_and_store import RotateConfig, rotate_and_store
from tests.support.kernels.dgrad_problem import (
    PullProblem,
    make_plain_pull,
    make_pull,
    make_widened,
    store_matrices,
    unpacked,
)

ROOT = Path(__file__).resolve().parents[2]
HAS_INTERPRETER = hasattr(plgpu, "force_gpu_interpret_mode")
ROW_OF = np.array([[3, 5], [-1, 2], [0, 9]], np.int32)
SILU, FP8 = Activation("silu"), "float8_e4m3fn"
FORM = ("block_n", "num_stages", "swap_ab", "cluster", "shares_weights", "sharers")  # fields of GemmConfig


def combining() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    rows = jnp.asarray(rng.standard_normal((16, 256)), jnp.bfloat16)
    weights = jnp.asarray(rng.random((3, 2)), "float32")
    found = combine_sm90(CombineDesc(3, 256, 2, 16, "bfloat16", "bfloat16"), CombineConfig(2))(rows, ROW_OF, weights)
    return found, combine(rows, jnp.asarray(ROW_OF), weights, out_dtype=jnp.bfloat16, implementation="reference")


def permuting(quantization: str, width: int = 512) -> tuple[Any, Any]:
    numerics_sm90.divide_in = lambda layout: jnp.divide  # in place of its PTX
    x = np.random.default_rng(0).standard_normal((3, width))
    where = (jnp.asarray(ROW_OF), 16)
    return _permuted(x, *where, quantization=quantization, config=PermuteConfig(2), own=ROW_OF[ROW_OF >= 0])


def permuting_in_parts(is_named: bool) -> tuple[Any, Any]:
    """Four rows of 32 groups, two parts each, over three blocks; where rows are named, one is in no use."""
    x = np.random.default_rng(0).standard_normal((4, 4096))
    rows = jnp.asarray([2, -1, 0, 3], jnp.int32) if is_named else None
    own = np.array([0, 2, 3]) if is_named else np.arange(4)
    return _permuted(x, quantization="e4m3_group", rows=rows, config=PermuteConfig(3), own=own)


def permuting_short_groups(width: int) -> tuple[Any, Any]:
    """The last group of a row has 64 columns."""
    permute_kernel.load_as = lambda ref, shape, layout: mosaic.load(ref).reshape(shape)
    permute_kernel.store_flat = _store_flat
    return permuting("e4m3_group", width)


def _store_flat(ref: Any, value: Any) -> None:
    ref[...] = value.reshape(-1)


def _permuted(x: Any, row_of: Any = None, count: int = 4, *, own: Any, **options: Any) -> tuple[Any, Any]:
    with mock.patch.object(permute_api, "hopper_sms", return_value=132):  # it asks for a GPU before it takes a config
        found, expected = (
            quantize_and_permute(jnp.asarray(x, jnp.bfloat16), row_of, count, implementation=name, **options)
            for name in ("hopper", "reference")
        )
    return _rows(found, own, count), _rows(expected, own, count)


def _rows(tree: Any, own: Any, count: int) -> list[Any]:
    """Of arrays (count, ...) and of scales (groups, count)."""
    return [leaf[own] if leaf.shape[0] == count else leaf[:, own] for leaf in jax.tree.leaves(tree)]


def adding_and_norming(width: int, parts: int = 0) -> tuple[Any, Any]:
    """parts: partial sums that are added, with two rows more; 0 for a plain sum."""
    rng = np.random.default_rng(0)
    x, weight = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in ((3, width), width))
    shape, dtype = ((parts, 5, width), jnp.float32) if parts else ((3, width), jnp.bfloat16)
    addend = jnp.asarray(rng.standard_normal(shape), dtype)
    config = AddNormConfig(2)
    return tuple(
        add_and_norm(x, weight, addend, eps=1e-6, config=config, implementation=name)
        for name in ("hopper", "reference")
    )


def norming_and_routing(width: int, experts: int, config: AddNormConfig, parts: int = 1) -> tuple[Any, Any]:
    """Three rows. A slice of the experts reaches back where config's do not divide all of them."""
    rng = np.random.default_rng(0)
    x, weight = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in ((3, width), width))
    addend = jnp.asarray(rng.standard_normal((parts, 5, width)), jnp.float32) if parts else None
    router = jnp.asarray(rng.standard_normal((experts, width)), jnp.bfloat16)
    options: Any = dict(config=config, router=router, router_bias=jnp.arange(experts, dtype=jnp.bfloat16))
    return tuple(
        add_and_norm(x, weight, addend, eps=1e-6, **options, implementation=name)[0 if parts else 1 :]
        for name in ("hopper", "reference")
    )


def adding_rows_of_experts(width: int, quantization: str = "none", has_shared: bool = False) -> tuple[Any, Any]:
    """Three tokens, of which one has one expert alone; against ``combine`` and the sum of its float32 result."""
    rng = np.random.default_rng(0)
    x, weight = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in ((3, width), width))
    rows = jnp.asarray(rng.standard_normal((16, width)), jnp.bfloat16).at[0].set(jnp.nan)
    shared = jnp.asarray(rng.standard_normal((3, width)), jnp.float32) if has_shared else None
    row_of = jnp.asarray([[3, 5], [-1, 2], [7, 9]], jnp.int32)
    routed = RoutedRows(rows, row_of, jnp.asarray(rng.random((3, 2)), jnp.float32), shared)
    options: Any = dict(eps=1e-6, quantization=quantization, config=AddNormConfig(2))
    found = add_and_norm(x, weight, routed, **options, implementation="hopper")
    added = routed.whole(jnp.float32, "reference")[None]
    return found, add_and_norm(x, weight, added, **options, implementation="reference")


def quantizing_norms(quantization: str, width: int = 512) -> tuple[Any, Any]:
    """Three rows with three partial sums, against the reference's norm quantized by a launch of its own."""
    rng = np.random.default_rng(0)
    x, weight = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in ((3, width), width))
    parts, config = jnp.asarray(rng.standard_normal((3, 5, width)), jnp.float32), AddNormConfig(2)
    options: Any = dict(quantization=quantization, scale_rows=8, config=config, implementation="hopper")
    total, codes, scales = add_and_norm(x, weight, parts, eps=1e-6, **options)
    expected, normal = add_and_norm(x, weight, parts, eps=1e-6, config=config, implementation="hopper")
    apart = quantize_and_permute_sm90(PermuteDesc(3, width, 0, 3, "bfloat16", quantization), PermuteConfig(2))(normal)
    # The same bits as of the two launches: compared as they are, not within a step.
    np.testing.assert_array_equal(np.asarray(codes).view(np.int8), np.asarray(apart[0]).view(np.int8))
    np.testing.assert_array_equal(scales[..., :3], apart[1])
    _, normal = add_and_norm(x, weight, parts, eps=1e-6, implementation="reference")
    codes_ref, scales_ref = quantize_and_permute(normal, quantization=quantization, implementation="reference")
    return (total, codes, scales[..., :3]), (expected, codes_ref, scales_ref)


def rotating_and_storing(
    is_packed: bool, has_parts: bool = False, is_e4m3: bool = False, has_pages: bool = False
) -> tuple[Any, Any]:
    """Three rows of two tokens: one before the row's start, one behind its end. has_parts: three partial sums, of two
    rows more. has_pages: the first row goes on in its second page, the last one has none."""
    rng, width = np.random.default_rng(0), 64
    parts = [jnp.asarray(rng.standard_normal((3, 2, n * width)), jnp.bfloat16) for n in (8, 4, 4)]
    projected = (jnp.concatenate(parts, axis=-1),) if is_packed else tuple(parts)
    if has_parts:
        projected = tuple(jnp.asarray(rng.standard_normal((3, 8, a.shape[-1])), jnp.float32) for a in projected)
    cos, sin = (jnp.asarray(rng.standard_normal((3, 2, width // 2)), jnp.float32) for _ in range(2))
    caches = tuple(jnp.asarray(rng.standard_normal((3, 4, 8, width)), jnp.bfloat16) for _ in range(2))
    places = [jnp.asarray(at, jnp.int32) for at in ([1, 0, 2], [2, 4, 6], [0, 3, 4])]
    norms = tuple(jnp.asarray(rng.standard_normal(width), jnp.bfloat16) for _ in range(2))
    options: Any = dict(norms=norms, eps=1e-6, config=RotateConfig(3), has_parts=has_parts)
    if has_pages:
        caches = tuple(jnp.asarray(rng.standard_normal((5, 4, 64, width)), jnp.bfloat16) for _ in range(2))
        places = [jnp.asarray(at, jnp.int32) for at in ([1, 0, 2], [65, 4, 6], [63, 3, 4])]
        options["page_table"] = jnp.asarray([[2, 0], [4, 7], [-1, 1]], jnp.int32)
    if is_e4m3:
        caches = tuple(cache.astype(jnp.float8_e4m3fn) for cache in caches)
        options["scales"] = jnp.float32(0.03), jnp.float32(0.02)  # nothing saturates: XLA's cast makes NaN of it
    return tuple(
        rotate_and_store(projected, cos, sin, caches, *places, implementation=name, **options)
        for name in ("hopper", "reference")
    )


def multiplying(dtype: str, scales: tuple[Any, Any], block_m: int, given: dict[str, Any]) -> tuple[Any, Any]:
    """Three experts of 3, 0 and block_m + 6 rows; the last tile of four is not in use."""
    options, rng = dict(given), np.random.default_rng(0)
    projections = 2 if "activation" in given and given["activation"].is_gated else 1
    k, n = options.pop("k", 256), options.pop("n", 128)
    if "bias" in options:
        options["bias"] = jnp.asarray(options["bias"], jnp.bfloat16)
    tile_expert, num_tiles = jnp.asarray([0, 2, 2, -1], jnp.int32), jnp.int32(3)
    numbers = [rng.standard_normal(shape) * 2 for shape in ((4 * block_m, k), (3, projections, n, k))]
    x, w = (jnp.asarray(np.rint(8 * v) if dtype == "int8" else v, dtype) for v in numbers)
    if options.get("transposes_w"):
        w = w.swapaxes(2, 3)
    unpermuted_rows = options.pop("unpermuted_rows", 0)
    if options.pop("has_tile_rows", False):
        options["tile_rows"] = jnp.asarray([3, block_m, 6, 0], jnp.int32)
        epilogue_sm90.store_by_row = _store_by_row
    if unpermuted_rows:
        x, options["block_m"] = x[:unpermuted_rows], block_m
    x_scale, w_scale = (None if s is None else jnp.asarray(rng.uniform(0.5, 2, s), jnp.float32) for s in scales)
    form: dict[str, Any] = dict(block_n=128, inline_ptx=False)
    form |= {name: options.pop(name) for name in FORM if name in options}
    config = GemmConfig(block_m, **dict(dict(num_stages=2, num_sms=2), **form))
    found, expected = (
        grouped_gemm(
            x,
            w if "activation" in given else w[:, 0],
            tile_expert,
            num_tiles,
            x_scale=x_scale,
            w_scale=w_scale,
            implementation=name,
            config=config if name == "hopper" else None,
            **options,
        )  # fmt: skip
        for name in ("hopper", "reference")
    )
    own = np.r_[0:3, block_m : 2 * block_m + 6]
    if unpermuted_rows:
        own = np.concatenate([np.arange(unpermuted_rows) + tile * block_m for tile in range(3)])
    return _rows(found, own, 4 * block_m), _rows(expected, own, 4 * block_m)


def _store_by_row(value: Any, target: Any, bits: Any, columns: Any) -> None:
    """In place of PTX that the interpreter cannot run, where the output has all columns of a tile."""
    del columns
    for row in range(value.shape[0]):
        is_used = (lax.shift_right_logical(bits, jnp.int32(row)) & 1) == 1
        own = target.at[pl.ds(row, 1)]
        pl.when(is_used)(functools.partial(own.__setitem__, ..., value[row : row + 1]))


def multiplying_side_by_side(dtype: str, block_m: int, swap_ab: bool, tokens: int) -> tuple[Any, Any]:
    """Weights of 256, 128 and 192 rows, in tiles of 64, against NumPy's product with each. The scales of each weight
    are of a size of their own."""
    rng, k, is_block = np.random.default_rng(0), 256, dtype == FP8
    each = []
    for index, n in enumerate((256, 128, 192)):
        own = dict(w=jnp.asarray(np.rint(8 * rng.standard_normal((1, n, k))) / (8 if is_block else 1), dtype))
        shape = (1, -(-n // 128), k // 128) if is_block else (1, n)
        own["w_scale"] = jnp.asarray(rng.uniform(0.5, 2, shape) * 10**index, jnp.float32)
        own["bias"] = jnp.asarray(100 * rng.standard_normal((1, n)), jnp.bfloat16)
        each.append(own)
    x = jnp.asarray(np.rint(8 * rng.standard_normal((tokens, k))), dtype)
    x_scale = jnp.asarray(rng.uniform(0.5, 2, (k // 128, block_m) if is_block else (block_m,)), jnp.float32)
    config = GemmConfig(block_m, 64, 2, num_sms=2, swap_ab=swap_ab, inline_ptx=False)
    options: Any = dict(x_scale=x_scale, block_m=block_m, config=config, implementation="hopper")
    options |= {name: tuple(own[name] for own in each) for name in ("w_scale", "bias")}
    weights = tuple(own["w"] for own in each)
    found = grouped_gemm(x, weights, jnp.zeros(1, jnp.int32), jnp.int32(1), **options)
    expected = []
    for own in each:
        w, scale, bias = (np.asarray(leaf[0], np.float64) for leaf in own.values())
        wide = np.asarray(x, np.float64)
        if is_block:
            wide = wide * np.repeat(np.asarray(x_scale)[:, :tokens].T, 128, axis=1)
            y = wide @ (w * np.repeat(np.repeat(scale, 128, 0)[: len(w)], 128, 1)).T
        else:
            y = wide @ w.T * scale * np.asarray(x_scale)[:tokens, None]
        expected.append(y + bias)
    return found[:tokens], jnp.asarray(np.concatenate(expected, axis=1), jnp.bfloat16)


def multiplying_in_parts(dtype: str, k_parts: int, tokens: int, **form: Any) -> tuple[Any, Any]:
    """Partial sums in float32 against NumPy's product with each part of K."""
    rng, k, n, is_block = np.random.default_rng(0), 256 * k_parts, 192, dtype == FP8
    unit = 1 if dtype == "int8" else 8
    x, w = (jnp.asarray(np.rint(8 * rng.standard_normal((rows, k))) / unit, dtype) for rows in (tokens, n))
    options: dict[str, Any] = {}
    wide = [np.asarray(a, np.float64) for a in (x, w)]
    if is_block:
        scales = [rng.uniform(0.5, 2, shape) for shape in ((k // 128, 64), (2, k // 128))]
        wide[0] *= np.repeat(scales[0][:, :tokens].T, 128, axis=1)
        wide[1] *= np.repeat(np.repeat(scales[1], 128, 0)[:n], 128, 1)
        options |= dict(x_scale=jnp.float32(scales[0]), w_scale=jnp.float32(scales[1][None]))
    if dtype == "int8":
        scales = [rng.uniform(0.5, 2, rows) for rows in (64, n)]
        wide = [wide[0] * scales[0][:tokens, None], wide[1] * scales[1][:, None]]
        options |= dict(x_scale=jnp.float32(scales[0]), w_scale=jnp.float32(scales[1][None]))
    config = GemmConfig(64, 64, **dict(dict(num_stages=3, num_sms=4), **form), inline_ptx=False)
    experts, used = jnp.zeros(k_parts, jnp.int32), jnp.full(k_parts, tokens, jnp.int32)
    options |= dict(block_m=64, k_parts=k_parts, out_dtype=jnp.float32, tile_rows=used, implementation="hopper")
    found = grouped_gemm(x, w[None], experts, jnp.int32(k_parts), config=config, **options)
    parts = (a.reshape(len(a), k_parts, -1) for a in wide)
    return found.reshape(k_parts, 64, n)[:, :tokens], jnp.asarray(np.einsum("tpk,npk->ptn", *parts), jnp.float32)


def multiplying_heads(tokens: int, rows: tuple[int, int], transposes_w: bool, stages: int) -> tuple[Any, Any]:
    """Of rows wider than what is multiplied; more steps than stages."""
    rng = np.random.default_rng(0)
    w = jnp.asarray(rng.standard_normal((2, 256, 256)), jnp.bfloat16)
    x = jnp.asarray(rng.standard_normal((tokens, 2, 320)), jnp.bfloat16)
    desc = describe_heads(x, w, rows=rows, transposes_w=transposes_w)
    wide = (a.astype(jnp.float32) for a in (x, w))  # products of 16-bit numbers XLA's CPU client adds up in 16 bits
    return multiply_heads_sm90(desc, HeadsConfig(stages))(x, w), multiply_heads_ref(desc, *wide).astype(x.dtype)


def contracting(config: WgradConfig, out_dtype: str) -> tuple[Any, Any]:
    """Four experts, two of them empty, the last rows of the others in part; rows of nobody hold NaN."""
    rng, rows = np.random.default_rng(0), 448
    first, count = (np.array(numbers, np.int32) for numbers in ([0, 128, 128, 320], [70, 0, 129, 0]))
    dy, x = (rng.standard_normal((rows, width)) for width in (192, 512))
    row, end = np.arange(rows), first + count
    is_own = ((row >= first[:, None]) & (row < end[:, None])).any(0)
    is_gap = ((row >= end[:, None]) & (row < first[:, None] + -(-count[:, None] // 64) * 64)).any(0)
    dy[is_gap], x[is_gap] = 0, 1
    dy[~is_own & ~is_gap], x[~is_own & ~is_gap] = np.nan, np.nan
    dy, x, first, count = (*(jnp.asarray(a, jnp.bfloat16) for a in (dy, x)), jnp.asarray(first), jnp.asarray(count))
    found, expected = (
        grouped_wgrad(dy, x, first, count, out_dtype=out_dtype, implementation=name, config=config)
        for name in ("hopper", "reference")
    )
    assert not np.asarray(found, np.float32)[[1, 3]].any()
    return found, expected


def pulling(kind: str, config: DgradConfig, activation: Activation | None = None) -> tuple[Any, Any]:
    """Gradients of rows: tiles with an empty half, rows in no use NaN. (It knows no stores under a predicate.)"""
    dgrad_kernel.load_block, dgrad_kernel.store_matrices = unpacked, store_matrices
    dgrad_kernel.accumulator_math_sm90.sigmoid = jax.lax.logistic
    sizes = [3, 0, 70, 129] if config.block_m == 128 else [3, 70]
    return _both(make_pull(kind, sizes, n=192, k=256, block_m=config.block_m, activation=activation), config)


def widening(kind: str, config: DgradConfig) -> tuple[Any, Any]:
    """The forward product with plain weights, of as many channels as columns of whole tiles."""
    sizes = [3, 0, 70, 129] if config.block_m == 128 else [3, 70]
    return _both(make_widened(kind, sizes, n=256, k=192, block_m=config.block_m), config)


def _both(problem: PullProblem, config: DgradConfig | GemmConfig) -> tuple[Any, Any]:
    plain_sm90.int8_to_half = lambda codes: codes.astype(jnp.float16)
    found, expected = (
        problem.op(*problem.args, **problem.kwargs, implementation=name, config=config)
        for name in ("hopper", "reference")
    )
    own = problem.row_expert >= 0
    return tuple([leaf[own] for leaf in jax.tree.leaves(tree)] for tree in (found, expected))


def pulling_plain(config: GemmConfig, activation: Activation = SILU, **options: Any) -> tuple[Any, Any]:
    """As ``pulling``, of weights that are not packed."""
    sizes = [3, 0, 70, 129] if config.block_m == 128 else [3, 70]
    return _both(make_plain_pull(sizes, n=256, k=192, block_m=config.block_m, activation=activation, **options), config)


def decoding(options: dict[str, Any], config: DecodeConfig) -> tuple[Any, Any]:
    """Partial sums of two rows, added up here; slots that are not in use hold NaN. Of whole tiles the outputs, also
    those of a row that sees no slot."""
    batch = 3 if config.whole_tiles else 2
    desc = dataclasses.replace(DecodeDesc(batch, 1, 264, 8, 2, 64, 64, "float16", 0.15), **options)
    rng = np.random.default_rng(0)
    decode_kernel.widen_tile = _widened

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.float16)

    places = [(0, 150), *[(9, 0)] * (batch - 2), (70, desc.num_slots)]
    starts, lengths = np.array(places, np.int32).T
    first_slots = np.maximum(lengths - desc.num_queries, 0)
    slots = np.arange(desc.num_slots)
    outside = (slots < starts[:, None]) | (slots >= lengths[:, None])
    caches = (batch, desc.num_kv_heads, desc.num_slots)
    q = normal(batch, desc.num_queries, desc.num_heads, desc.width)
    widths = (desc.width,) if desc.is_latent else (desc.width, desc.value_width)
    cached = [jnp.where(outside[:, None, :, None], jnp.nan, normal(*caches, width)) for width in widths]
    scales = (jnp.float32(0.7), jnp.float32(1)) if desc.is_e4m3 else None  # that of values is the second launch's
    cached = [part.astype(jnp.float8_e4m3fn) for part in cached] if desc.is_e4m3 else cached
    rows = tuple(map(jnp.asarray, (starts, lengths, first_slots)))
    stacked = () if scales is None else (jnp.stack(scales),)
    if desc.num_pages:
        # A row has every second page, or third, from the first one on, and the last row from its last one on.
        count = desc.num_slots // 64
        pages_of_rows = [np.arange(count) * batch + row for row in range(batch)]
        table = np.stack([*pages_of_rows[:-1], pages_of_rows[-1][::-1]])
        pools = []
        for part in cached:
            pages = part.reshape(batch, desc.num_kv_heads, count, 64, -1).swapaxes(1, 2)
            pools.append(jnp.zeros((desc.num_pages, *pages.shape[2:]), part.dtype).at[table].set(pages))
        stacked = (*stacked, jnp.asarray(table, jnp.int32))
    operands = pools if desc.num_pages else cached
    # It has no words for an accumulator that goes on being used: with a first top above all scores nothing shrinks.
    latents_sm90.clear_rows, latents_sm90.FLOOR = decode_kernel._clear, 8.0
    latents_sm90._shrink, latents_sm90._loaded = lambda *_: None, lambda out: out[...]
    kernel = decode_sm90 if config.swap_ab else latents_sm90.latents_sm90
    schedule = make_schedule(desc, config, *rows) if config.runs else ()
    decode_kernel.Columns, decode_kernel.store_tile = lambda *place: place, _stored
    found = kernel(desc, config)(queries_in_columns(desc, config, q), *operands, *stacked, *rows, *schedule)
    v = cached[0][..., : desc.value_width] if desc.is_latent else cached[1]
    expected = decode_attention_ref(desc, q, cached[0], v, *rows, scales=scales)
    if config.whole_tiles:
        return found[0].reshape(expected.shape), expected
    tiles, splits, columns = config.num_tiles(desc), config.num_splits(desc), config.columns
    shape = (2, desc.num_kv_heads, tiles, splits)
    sums, tops, totals = (np.asarray(array, np.float64).reshape(*shape, *array.shape[1:]) for array in found)
    sums = sums if config.swap_ab else sums.swapaxes(-1, -2)
    out = []
    for row in range(2):
        is_part = np.zeros(shape[1:], bool)  # what was written
        for tile in range(desc.num_kv_heads * tiles):
            place = row * desc.num_kv_heads * tiles + tile
            slots_seen = seen(desc, *(array[row] for array in rows))
            parts = Parts.of(desc, config, schedule[0] if config.runs else None, jnp.int32(place), slots_seen)
            for index in range(int(parts.count)):
                is_part.reshape(-1, splits)[tile, int(parts.at(index)[0])] = True
        top = np.where(is_part[..., None], tops[row], -np.inf)
        weights = np.exp2(top - top.max(axis=2, keepdims=True))
        total = (weights * np.where(is_part[..., None], totals[row], 0)).sum(axis=2)[:, :, None]
        own = np.where(is_part[..., None, None], sums[row], 0)
        y = (weights[:, :, :, None] * own).sum(axis=2) / total
        y = y.swapaxes(2, 3).reshape(desc.num_kv_heads, tiles * columns, -1)[:, : desc.columns]
        out.append(y.reshape(desc.num_kv_heads, desc.num_queries, -1, desc.value_width).swapaxes(0, 1))
    return jnp.asarray(np.stack(out).reshape(expected.shape), jnp.float16), expected


def _widened(source: Any, target: Any) -> None:
    """``widen_tile``, whose PTX the interpreter cannot run."""
    target[...] = source[...].astype(target.dtype)


def _stored(_: Any, place: Any, memory: Any, meet: Any, sinks: Any, scale: Any, outputs: Any) -> None:
    """``store_tile`` of one query whose heads fill the columns; the interpreter cannot run its PTX."""
    del sinks, scale
    meet()
    desc, config, row, head, _ = place
    total = memory["stats"].at[1][...]
    y = jnp.where(total == 0, 0, memory["sums"][...] / jnp.where(total == 0, 1, total))
    first = (row * desc.num_kv_heads + head) * (config.columns * desc.value_width)
    outputs[0].at[pl.ds(first, config.columns * desc.value_width)][...] = y.T.reshape(-1).astype(desc.dtype)
    meet()


_LATENT: dict[str, Any] = dict(width=192, value_width=128, num_heads=12, num_kv_heads=1, scale=0.05, is_latent=True)
_DECODES: dict[str, tuple[dict[str, Any], DecodeConfig]] = {
    "one query": ({}, DecodeConfig(8, 128, 64, 2, 3)),
    "window, three queries": (dict(window=40, num_queries=3, value_width=128), DecodeConfig(8, 128, 128, 3, 2)),
    "256, five heads": (dict(width=256, value_width=256, num_heads=10), DecodeConfig(8, 256, 64, 1, 5)),
    "runs": ({}, DecodeConfig(8, 64, 64, 2, 3, runs=True)),
    "runs, window, long splits": (
        dict(window=200, value_width=128, num_slots=520),
        DecodeConfig(8, 64, 64, 3, 2, doubles_at=(100,), runs=True),
    ),
    "whole tiles": (dict(num_heads=16), DecodeConfig(8, 64, 64, 2, 3, whole_tiles=True)),
    "whole tiles, window": (dict(num_heads=16, window=40), DecodeConfig(8, 64, 64, 3, 4, whole_tiles=True)),
    "e4m3, pages, whole tiles": (
        dict(num_heads=16, num_slots=320, num_pages=16, is_e4m3=True),
        DecodeConfig(8, 128, 64, 2, 3, doubles_at=(100,), whole_tiles=True),
    ),
    "e4m3": (dict(is_e4m3=True), DecodeConfig(8, 128, 64, 3, 2)),
    "e4m3, runs": (dict(is_e4m3=True), DecodeConfig(8, 64, 64, 3, 3, runs=True)),
    "pages": (dict(num_slots=320, num_pages=11), DecodeConfig(8, 128, 128, 2, 2)),
    "pages, three queries, runs": (
        dict(num_slots=320, num_pages=11, num_queries=3, window=230),
        DecodeConfig(16, 64, 64, 2, 2, runs=True),
    ),
    "e4m3, pages": (dict(num_slots=320, num_pages=11, is_e4m3=True), DecodeConfig(8, 128, 64, 2, 3)),
    "latent, queries are rows": (_LATENT, DecodeConfig(64, 128, 64, 2, 2, swap_ab=False)),
    "latent, queries are rows, whole tiles": (
        _LATENT | dict(num_heads=128),
        DecodeConfig(64, 256, 64, 2, 3, swap_ab=False, joins_rest=True, whole_tiles=True),
    ),
    "latent, queries are rows, window, four queries": (
        _LATENT | dict(num_heads=24, num_queries=4, window=100),
        DecodeConfig(64, 128, 64, 2, 3, swap_ab=False),
    ),
    "latent": (_LATENT, DecodeConfig(8, 128, 64, 2, 3)),
}
_NONE = (None, None)
_LARGE = dict(swap_ab=True, n=256)
_GATED_BLOCKS = dict(activation=SILU, requantize="group")
_SHARING_CHANNELS = dict(swap_ab=True, block_n=64, sharers=2)
_SHARING_WEIGHTS = dict(n=256, cluster=2, shares_weights=True)
# dtype, shapes of the scales, rows of a tile, options of ``multiplying``
PRODUCTS: dict[str, tuple[str, tuple[Any, Any], int, dict[str, Any]]] = {
    "bf16": ("bfloat16", _NONE, 64, {}),
    "bf16 transposed": ("bfloat16", _NONE, 64, dict(transposes_w=True, n=256)),
    "bf16 transposed, two consumers": ("bfloat16", _NONE, 128, dict(transposes_w=True, block_n=256, n=256)),
    "bf16 swapped": ("bfloat16", _NONE, 16, dict(swap_ab=True)),
    "bf16 swapped, rows in use": ("bfloat16", _NONE, 16, dict(swap_ab=True, has_tile_rows=True, n=512)),
    **{
        f"bf16 swapped, the same {n} rows": ("bfloat16", _NONE, 16, dict(swap_ab=True, unpermuted_rows=n))
        for n in (1, 5, 16)
    },
    "bf16 swapped, two sharers": ("bfloat16", _NONE, 16, dict(k=512, **_SHARING_CHANNELS)),
    "fp8 blocks swapped, three sharers": (
        *(FP8, ((6, 64), (3, 1, 6)), 16),
        dict(k=768, bias=np.random.default_rng(1).standard_normal((3, 128)), **_SHARING_CHANNELS)
        | dict(sharers=3, num_stages=3),
    ),
    "int8 rows swapped, the same 5 rows": ("int8", ((16,), (3, 128)), 16, dict(swap_ab=True, unpermuted_rows=5)),
    "int8 rows, the same 8 rows": ("int8", ((64,), (3, 128)), 64, dict(unpermuted_rows=8)),
    "fp8 blocks gated, the same 3 rows": (FP8, ((2, 64), (3, 2, 1, 2)), 64, dict(unpermuted_rows=3, **_GATED_BLOCKS)),
    "bf16 large M gated": ("bfloat16", _NONE, 112, dict(activation=SILU, **_LARGE)),
    "int8 rows large M": ("int8", ((576,), (3, 256)), 144, dict(block_n=256, **_LARGE)),
    "bf16 gated, two outputs": ("bfloat16", _NONE, 128, dict(activation=SILU, keeps_before=True)),
    "bf16 not gated, two outputs, one consumer": (
        *("bfloat16", _NONE, 64),
        dict(activation=Activation("silu_no_mul"), keeps_before=True, n=256, block_n=64),
    ),
    "int8 rows": ("int8", ((256,), (3, 128)), 64, {}),
    "bf16 in three pieces": ("bfloat16", _NONE, 64, dict(block_n=96, n=384)),
    "int8 rows gated, projections of 48 columns": (
        *("int8", ((256,), (3, 2, 192)), 64),
        dict(n=192, block_n=48, activation=SILU, bias=np.random.default_rng(1).standard_normal((3, 2, 192))),
    ),
    "bf16 clusters": ("bfloat16", _NONE, 64, dict(n=256, cluster=2)),
    "int8 rows, clusters sharing weights": ("int8", ((256,), (3, 256)), 64, _SHARING_WEIGHTS),
    "bf16 large M, clusters": ("bfloat16", _NONE, 112, dict(cluster=2, **_LARGE)),
    "int8 rows large M gated, clusters sharing weights": (
        *("int8", ((448,), (3, 2, 256)), 112),
        dict(swap_ab=True, activation=SILU, **_SHARING_WEIGHTS),
    ),
    "fp8 blocks gated, clusters sharing weights": (
        *(FP8, ((2, 256), (3, 2, 2, 2)), 64),
        _GATED_BLOCKS | _SHARING_WEIGHTS,
    ),
    "fp8 blocks gated, swapped": (FP8, ((2, 64), (3, 2, 2, 2)), 16, dict(activation=SILU, **_LARGE)),
    "fp8 blocks gated, swapped, requantized": (
        *(FP8, ((2, 96), (3, 2, 2, 2)), 24),
        dict(swap_ab=True, n=256, **_GATED_BLOCKS),
    ),
    "fp8 swapped, requantized to a given scale": (
        *(FP8, ((), (3, 2)), 16),
        dict(swap_ab=True, activation=SILU, requantize="tensor", out_scale=jnp.float32(8.0)),
    ),
    "fp8 blocks swapped, the same 5 rows": (FP8, ((2, 16), (3, 1, 2)), 16, dict(swap_ab=True, unpermuted_rows=5)),
    "fp8 blocks gated": (FP8, ((2, 256), (3, 2, 1, 2)), 64, _GATED_BLOCKS),
    "fp8 blocks gated, a short group": (FP8, ((2, 256), (3, 2, 1, 2)), 64, dict(k=192, **_GATED_BLOCKS)),
    "fp8 blocks gated, swapped, a short group": (
        *(FP8, ((2, 64), (3, 2, 2, 2)), 16),
        dict(k=192, n=256, swap_ab=True, activation=SILU),
    ),
}
CASES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "combine": combining,
    **{f"add_and_norm {width}": functools.partial(adding_and_norming, width) for width in (256, 320)},
    **{
        f"add_and_norm, {kind}": functools.partial(quantizing_norms, kind)
        for kind in ("e4m3_row", "int8_row", "e4m3_group", "e4m3_group_ue8m0")
    },
    "add_and_norm of parts": functools.partial(adding_and_norming, 320, 4),
    "add_and_norm, router": functools.partial(norming_and_routing, 256, 4, AddNormConfig(6, 2)),
    "add_and_norm, router, in turns": functools.partial(norming_and_routing, 320, 5, AddNormConfig(4, 2), 3),
    "add_and_norm, router, no sum": functools.partial(norming_and_routing, 256, 3, AddNormConfig(9, 1), 0),
    "add_and_norm, rows of experts": functools.partial(adding_rows_of_experts, 320),
    "add_and_norm, rows of experts, shared": functools.partial(adding_rows_of_experts, 256, has_shared=True),
    "add_and_norm, rows of experts, e4m3_group": functools.partial(adding_rows_of_experts, 512, "e4m3_group"),
    "rotate_and_store of parts": functools.partial(rotating_and_storing, False, True),
    "rotate_and_store of parts, packed": functools.partial(rotating_and_storing, True, True),
    "rotate_and_store": functools.partial(rotating_and_storing, False),
    "rotate_and_store, e4m3": functools.partial(rotating_and_storing, True, False, True),
    "rotate_and_store of parts, e4m3": functools.partial(rotating_and_storing, True, True, True),
    "rotate_and_store, pages": functools.partial(rotating_and_storing, False, has_pages=True),
    "rotate_and_store, packed": functools.partial(rotating_and_storing, True),
    **{f"decode {name}": functools.partial(decoding, *form) for name, form in _DECODES.items()},
    **{
        f"permute {kind}": functools.partial(permuting, kind)
        for kind in ("none", "e4m3_row", "e4m3_tensor_row", "e4m3_group", "mxfp4")
    },
    **{f"permute e4m3_group, {n}": functools.partial(permuting, "e4m3_group", n) for n in (128, 384)},
    **{f"permute e4m3_group, {n}": functools.partial(permuting_short_groups, n) for n in (64, 320, 704, 8256)},
    "permute e4m3_group in parts": functools.partial(permuting_in_parts, True),
    "permute e4m3_group in parts, all rows": functools.partial(permuting_in_parts, False),
    "multiply_heads": functools.partial(multiplying_heads, 70, (64, 192), False, 2),
    "multiply_heads, one stage": functools.partial(multiplying_heads, 3, (0, 192), False, 1),
    "multiply_heads, transposed": functools.partial(multiplying_heads, 3, (128, 256), True, 4),
    "multiply_heads, transposed, two stages": functools.partial(multiplying_heads, 70, (0, 128), True, 2),
    "fp8 blocks in parts, few rows": functools.partial(multiplying_in_parts, FP8, 3, 16),
    "fp8 blocks in parts": functools.partial(multiplying_in_parts, FP8, 2, 5),
    "bf16 in parts": functools.partial(multiplying_in_parts, "bfloat16", 4, 64, num_sms=7),
    "int8 rows in parts": functools.partial(multiplying_in_parts, "int8", 2, 16),
    "wgrad": functools.partial(contracting, WgradConfig(128, 256, 2, 1, 2), "bfloat16"),
    "wgrad, short tiles": functools.partial(contracting, WgradConfig(128, 128, 3, 2, 2), "bfloat16"),
    "wgrad, one consumer": functools.partial(contracting, WgradConfig(64, 128, 3, 2, 2), "float32"),
    "dgrad": functools.partial(pulling, "int4 g64", DgradConfig(128, 128, 4, 2, 3)),
    "dgrad, zero points": functools.partial(pulling, "int4 g128 asym", DgradConfig(128, 128, 3, 16, 2)),
    "dgrad, pairs": functools.partial(pulling, "int4 g64", DgradConfig(128, 128, 3, 2, 3, neighbours=2)),
    "dgrad, pairs, silu": functools.partial(pulling, "int4 g128 asym", DgradConfig(128, 128, 3, 2, 1, 2), SILU),
    "dgrad, one consumer": functools.partial(pulling, "int4 channel", DgradConfig(64, 64, 5, 16, 2)),
    "dgrad, silu": functools.partial(pulling, "int4 g64", DgradConfig(128, 128, 3, 16, 2), SILU),
    "dgrad, gelu, one consumer": functools.partial(
        pulling, "int4 g128 f32", DgradConfig(64, 128, 4, 16, 2), Activation("gelu_tanh_no_mul")
    ),
    "pull, silu": functools.partial(pulling_plain, GemmConfig(128, 128, 2, num_sms=2, inline_ptx=False)),
    "pull, silu, three stages, no values": functools.partial(
        pulling_plain, GemmConfig(128, 256, 3, num_sms=2, inline_ptx=False), has_weighted=False, has_tile_rows=False
    ),
    "pull, gelu, one consumer": functools.partial(
        pulling_plain, GemmConfig(64, 64, 5, num_sms=2, inline_ptx=False), Activation("gelu_tanh_no_mul")
    ),
    "dgrad, plain e4m3": functools.partial(pulling, "plain e4m3 channel", DgradConfig(128, 128, 4, 2, 3)),
    "dgrad, plain e4m3 blocks, silu": functools.partial(
        pulling, "plain e4m3 block", DgradConfig(128, 256, 3, 16, 2), SILU
    ),
    "dgrad, plain int8, one consumer": functools.partial(pulling, "plain int8 channel", DgradConfig(64, 64, 5, 16, 2)),
    "widened, e4m3 blocks": functools.partial(widening, "plain e4m3 block", DgradConfig(128, 128, 4, 2, 3)),
    "widened, int8, one consumer": functools.partial(widening, "plain int8 channel f16", DgradConfig(64, 64, 3, 16, 2)),
    **{name: functools.partial(multiplying, *case) for name, case in PRODUCTS.items()},
    **{
        f"{name} side by side": functools.partial(multiplying_side_by_side, *case)
        for name, case in {
            "fp8 blocks": (FP8, 64, False, 8),
            "fp8 blocks swapped": (FP8, 16, True, 5),
            "int8 rows swapped": ("int8", 16, True, 5),
        }.items()
    },
}


def watch_matrices(callbacks: Any) -> None:
    """Look for races of wgmma's reads, as the interpreter itself does for tcgen05_mma alone: of writes that no barrier
    orders, and of writes by threads without a fence. An instruction reads when it is issued, not until a wait."""
    usual = callbacks.wgmma

    def wgmma(*, thread: Any, source_info: Any = None, **given: Any) -> Any:
        memory = callbacks._get_shared_memory()
        with memory.lock:
            clock = memory.clocks[thread]
            clock.inc(memory.thread_to_vc_position(thread))
            clock = clock.async_smem_clock.copy()
        for name in ("a", "b"):
            key = callbacks.HostAllocationKey.from_array(given[f"{name}_allocation_key_as_array"])
            transforms = callbacks._remove_noop_transforms(given[f"{name}_transforms"])
            read = memory.access(key, jax.tree.map(int, transforms))
            callbacks.get_races().check_read(thread, clock, key, read, source_info=source_info)
        return usual(thread=thread, source_info=source_info, **given)

    callbacks.wgmma = wgmma


def check(name: str) -> None:
    gpu: Any = plgpu  # names that jax 0.10 has not
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks  # jax 0.10 has it not

    watch_matrices(gpu_callbacks)
    mosaic.USES_PDL = False  # it runs one kernel at a time, and knows neither instruction
    # By default it refuses every inline_mgpu; so it knows fences by their names.
    params = gpu.InterpretGPUParams(detect_races=True, inline_mgpu="_hack_model_inline_mgpu_tokamax")
    with gpu.force_gpu_interpret_mode(params):
        found, expected = CASES[name]()
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        # One step of the type; sums beside a border of e4m3 go either way.
        step = 2.0**-3 if one.dtype == jnp.float8_e4m3fn else 2.0**-7
        one, other = (np.asarray(leaf).astype(np.float64) for leaf in (one, other))
        np.testing.assert_allclose(one, other, rtol=step, atol=2.0**-7 * np.abs(other).max())
    assert not gpu_callbacks.get_races().races_found, "a race"
    print("checked", name)


@pytest.mark.slow
@pytest.mark.skipif(not HAS_INTERPRETER, reason="the GPU interpreter of jax 0.10 cannot run these kernels")
@pytest.mark.parametrize("name", CASES)
def test_interpreted(name):
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    # NPROC: threads of XLA's pool, in which those of a cluster's blocks wait for each other.
    environment = os.environ | dict(PYTHONPATH=path, JAX_PLATFORMS="cpu", NPROC="16")
    command = [sys.executable, __file__, name]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert run.returncode == 0 and f"checked {name}" in run.stdout, run.stdout[-2000:] + run.stderr[-4000:]
    assert "RACE DETECTED" not in run.stdout, run.stdout[-4000:]  # in kernels before the last one of a case


if __name__ == "__main__":
    check(sys.argv[1])
