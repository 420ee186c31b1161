"""Every Hopper kernel in every form it is built in, as a function and the shapes of its arguments.

For what needs no GPU: lowering (each test file) and compiling to SASS (tests/pallas_kernels/sass). Imports no test
tool, since the compiler's environment has none.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

from pallas_kernels.add_and_norm.config import AddNormDesc
from pallas_kernels.align.config import AlignDesc, row_capacity
from pallas_kernels.align.config import choose_config as choose_align
from pallas_kernels.align.kernel_sm90 import align_sm90, ranks_sm90, rows_sm90
from pallas_kernels.combine.config import CombineDesc
from pallas_kernels.combine.config import choose_config as choose_combine_config
from pallas_kernels.combine.kernel_sm90 import combine_sm90
from pallas_kernels.common.activations import Activation
from pallas_kernels.grouped_gemm import FewRowsConfig, GemmConfig, GemmDesc, VectorConfig, candidates
from pallas_kernels.grouped_gemm.dgrad import DgradConfig, DgradDesc
from pallas_kernels.grouped_gemm.dgrad import candidates as dgrad_candidates
from pallas_kernels.grouped_gemm.dgrad.config import COPIES_OF_SCALE, operand_names
from pallas_kernels.grouped_gemm.dgrad.kernel_sm90 import grouped_dgrad_sm90
from pallas_kernels.grouped_gemm.heuristics import choose_config as choose_gemm_config
from pallas_kernels.grouped_gemm.heuristics import deepest
from pallas_kernels.grouped_gemm.kernel_sm90 import grouped_gemm_sm90
from pallas_kernels.grouped_gemm.packed import PackedConfig, PackedDesc, PackedFormat, PackedVectorConfig
from pallas_kernels.grouped_gemm.packed import candidates as packed_candidates
from pallas_kernels.grouped_gemm.packed.dense_config import DenseDesc
from pallas_kernels.grouped_gemm.packed.dense_sm90 import dequantize_sm90
from pallas_kernels.grouped_gemm.packed.heuristics import choose_config as choose_packed_config
from pallas_kernels.grouped_gemm.packed.vector import HEIGHTS, vector_candidates
from pallas_kernels.grouped_gemm.wgrad import WgradDesc
from pallas_kernels.grouped_gemm.wgrad import candidates as wgrad_candidates
from pallas_kernels.grouped_gemm.wgrad.kernel_sm90 import grouped_wgrad_sm90
from pallas_kernels.norm_and_multiply import NormProductDesc
from pallas_kernels.norm_and_multiply import choose_config as choose_product
from pallas_kernels.norm_and_multiply.kernel_sm90 import norm_and_multiply_sm90, product_names
from pallas_kernels.nvlink_dispatch.combine_sm90 import combine_sm90 as nvlink_combine_sm90
from pallas_kernels.nvlink_dispatch.config import QUANTIZATIONS as EXCHANGE_QUANTIZATIONS
from pallas_kernels.nvlink_dispatch.config import ExchangeDesc, PlaceDesc, choose_dispatch_config, choose_place_config
from pallas_kernels.nvlink_dispatch.config import choose_combine_config as choose_nvlink_combine
from pallas_kernels.nvlink_dispatch.dispatch_sm90 import dispatch_sm90
from pallas_kernels.nvlink_dispatch.place_sm90 import place_sm90
from pallas_kernels.quantize_and_permute.config import QUANTIZATIONS, TAKES_SCALE, PermuteDesc, config_error
from pallas_kernels.quantize_and_permute.config import choose_config as choose_permute
from pallas_kernels.quantize_and_permute.gather_sm90 import gather_rows_sm90
from pallas_kernels.quantize_and_permute.kernel_sm90 import quantize_and_permute_sm90
from pallas_kernels.quantize_and_permute.narrow_sm90 import quantize_narrow_rows_sm90
from pallas_kernels.tuning import table_for
from tests.support.kernels.attention_cases import prefill_cases
from tests.support.kernels.case import Case, Shape
from tests.support.kernels.decode_cases import combine_quantized_cases, decode_cases
from tests.support.kernels.layer_cases import (
    add_and_norm_cases,
    multiply_heads_cases,
    rotate_and_store_cases,
    store_latents_cases,
)
from tests.support.kernels.router_cases import align_and_permute_cases, quantizing_route_cases, route_cases

H200_SMS = 132

_BASE = GemmDesc(rows=1024, n=512, k=512, num_experts=4, dtype="float8_e4m3fn")
_SILU = Activation("silu")
_OAI = Activation("swigluoai", limit=7.0, alpha=1.702, beta=1.0)
_TENSOR = dict(lhs_scale="tensor", rhs_scale="tensor")
_ROW = dict(lhs_scale="row", rhs_scale="channel")
_BLOCK = dict(lhs_scale="group", rhs_scale="block")
_GATED = dict(projections=2, activation=_SILU)
_RAGGED = dict(has_tile_rows=True)
GEMMS = {
    "bf16": dict(dtype="bfloat16"),
    "bf16 gated bias": dict(dtype="bfloat16", projections=2, activation=_OAI, bias_dtype="bfloat16"),
    "bf16 not gated": dict(dtype="bfloat16", activation=Activation("relu2_no_mul")),
    "bf16 gelu_tanh": dict(dtype="bfloat16", projections=2, activation=Activation("gelu_tanh")),
    "bf16 swiglustep": dict(dtype="bfloat16", projections=2, activation=Activation("swiglustep", limit=3.0)),
    "f16 to f32": dict(dtype="float16", out_dtype="float32"),
    "fp8 tensor": _TENSOR,
    "fp8 tensor gated, requantized": dict(requantize="tensor", **_TENSOR, **_GATED),
    "fp8 row": _ROW,
    "fp8 row gated": dict(**_ROW, **_GATED),
    "fp8 block": _BLOCK,
    "fp8 block, bias": dict(bias_dtype="float32", **_BLOCK),
    "fp8 block gated": dict(**_BLOCK, **_GATED),
    "fp8 block gated, requantized": dict(requantize="group", **_BLOCK, **_GATED),
    "fp8 block gated, requantized ue8m0": dict(requantize="group", has_power_of_two_scales=True, **_BLOCK, **_GATED),
    "int8 row": dict(dtype="int8", **_ROW),
    "int8 row gated": dict(dtype="int8", **_ROW, **_GATED),
    "fp8 block 2880 gated, requantized": dict(n=2880, k=2880, requantize="group", **_BLOCK, **_GATED),
    "fp8 block 2880 gated, bias": dict(n=2880, k=2880, projections=2, activation=_OAI, bias_dtype="bfloat16", **_BLOCK),
    "bf16 2880": dict(dtype="bfloat16", n=2880, k=2880, bias_dtype="float32"),
    "int8 2880": dict(dtype="int8", n=2880, k=2880, **_ROW),
    "bf16 ragged": dict(dtype="bfloat16", **_RAGGED),
    "fp8 row ragged": dict(**_ROW, **_RAGGED),
    "fp8 block ragged": dict(**_BLOCK, **_RAGGED),
    "fp8 block gated, requantized, ragged": dict(requantize="group", **_BLOCK, **_GATED, **_RAGGED),
    "int8 row gated ragged": dict(dtype="int8", **_ROW, **_GATED, **_RAGGED),
    "bf16 transposed": dict(dtype="bfloat16", n=2880, k=1536, transposes_w=True),
    "f16 transposed": dict(dtype="float16", out_dtype="float16", transposes_w=True),
}


def gemm(name: str) -> GemmDesc:
    return dataclasses.replace(_BASE, **GEMMS[name])


def gemm_case(name: str, desc: GemmDesc, config: GemmConfig | VectorConfig | FewRowsConfig) -> Case:
    """The Hopper grouped GEMM on its flat operands."""
    shapes = _gemm_shapes(desc, config)
    if isinstance(config, VectorConfig):
        return _case_of_operands(
            f"grouped_gemm of single rows, {name}, {config.channels} channels", desc, config, shapes, None
        )
    if isinstance(config, FewRowsConfig):
        form = f"K in {config.k_split} parts"
        return _case_of_operands(f"grouped_gemm of few rows, {name}, {form}", desc, config, shapes, None)
    instruction = {"float8_e4m3fn": "QGMMA", "int8": "IGMMA"}.get(desc.dtype, "HGMMA")
    form = " swapped" * config.swap_ab + f", steps of {config.step_blocks}" * (config.step_blocks > 1)
    form += f", {config.sharers} sharers" * (config.sharers > 1)
    form += f", clusters of {config.cluster}" * (config.cluster > 1) + " sharing weights" * config.shares_weights
    name = f"grouped_gemm {name}, {config.block_m} x {desc.projections} x {config.block_n}{form}"
    return _case_of_operands(name, desc, config, shapes, instruction)


def _gemm_shapes(desc: GemmDesc, config: GemmConfig | VectorConfig | FewRowsConfig) -> dict[str, Shape]:
    """Of all operands that a call may have."""
    matrices, groups_k, groups_n = desc.num_experts * desc.projections, -(-desc.k // 128), -(-desc.n // 128)
    tiles = ((desc.rows // config.block_m,), "int32")
    scaled = config.block_m if desc.unpermuted_rows else desc.rows
    shapes: dict[str, Shape] = {
        "x": ((desc.unpermuted_rows or desc.rows, desc.k), desc.dtype if desc.quantization == "none" else "bfloat16"),
        "w": ((matrices, *((desc.k, desc.n) if desc.transposes_w else (desc.n, desc.k))), desc.dtype),
        "tile_expert": tiles,
        "num_tiles": ((1,), "int32"),
        "x_scale": ({"tensor": (1,), "row": (scaled,)}.get(desc.lhs_scale, (groups_k, scaled)), "float32"),
        "w_scale": (
            {"tensor": (matrices,), "channel": (matrices, desc.n)}.get(desc.rhs_scale, (matrices, groups_n, groups_k)),
            "float32",
        ),
        "bias": ((matrices, desc.n), desc.bias_dtype or "float32"),
        "out_scale": ((1,), "float32"),
        "tile_rows": tiles,
        "tile_bits": tiles,
        "before": ((desc.rows, desc.pulled_projections * desc.n), desc.dtype),
        "row_weights": ((desc.rows,), "float32"),
    } | _sum_shapes(desc)
    for index, n in enumerate(desc.widths):  # of several weights that lie apart
        own = {"tensor": (1,), "channel": (1, n)}.get(desc.rhs_scale, (1, -(-n // 128), groups_k))
        end = f"_{index}" if index else ""
        shapes |= {f"w{end}": ((1, n, desc.k), desc.dtype), f"w_scale{end}": (own, "float32")}
        shapes[f"bias{end}"] = ((1, n), desc.bias_dtype or "float32")
    return shapes


def _sum_shapes(desc: Any) -> dict[str, Shape]:
    slots = (desc.num_tokens, desc.top_k)
    shared = (desc.num_tokens, desc.n), desc.shared_dtype or "float32"
    return {"row_of": (slots, "int32"), "slot_weights": (slots, "float32"), "shared": shared}


def _case_of_operands(name: str, desc: Any, config: Any, shapes: dict[str, Shape], instruction: str | None) -> Case:
    kernel, names = grouped_gemm_sm90(desc, config), desc.operand_names
    function = lambda *arrays: kernel(dict(zip(names, arrays, strict=True)))  # noqa: E731
    return Case(name, function, tuple(shapes[n] for n in names), instruction)


def _in_tiles(desc: Any, block_m: int) -> Any:
    """``desc`` with rows in whole tiles."""
    return dataclasses.replace(desc, rows=-(-desc.rows // block_m) * block_m)


def gemm_cases() -> Iterator[Case]:
    """Each description at each tile height with every width the heuristic may choose.

    The first case is in each sample that starts there: it spills as soon as LLVM unrolls the loop over K.
    """
    for name in GEMMS:
        for block_m in (192, 8, 16, 32, 64, 80, 128):
            desc = _in_tiles(gemm(name), block_m)
            found = [] if desc.transposes_w and block_m % 64 else candidates(desc, block_m, H200_SMS)
            # The other heights differ in one extent of an instruction: the most registers at each will do.
            for config in found if block_m in (16, 64, 128) else sorted(found, key=lambda c: -c.block_n)[:1]:
                yield gemm_case(name, desc, config)


def wgrad_cases() -> Iterator[Case]:
    """Gradients of weights: wide ones, those of adapters of rank 64, sizes off the tile."""
    for name, options in (
        ("bf16", dict(n=1536, k=2048)),
        ("bf16 2880", dict(n=2880, k=2880)),
        ("bf16 of rank 64", dict(n=64, k=2048)),
        ("bf16 by rank 64", dict(n=1536, k=64, out_dtype="float32")),
        ("f16 to f32", dict(n=512, k=512, dtype="float16", out_dtype="float32")),
    ):
        desc = WgradDesc(rows=1024, num_experts=4, **options)
        for config in wgrad_candidates(desc, H200_SMS):
            shapes = (((desc.rows, desc.n), desc.dtype), ((desc.rows, desc.k), desc.dtype))
            bounds = ((desc.num_experts,), "int32")
            named = f"grouped_wgrad {name}, {config.block_n} x {config.block_k}"
            yield Case(named, grouped_wgrad_sm90(desc, config), (*shapes, bounds, bounds), "HGMMA")


def pull_cases() -> Iterator[Case]:
    """Transposed weights and the derivative of an activation, with and without its values.

    Then what keeps the rows that the derivative is given.
    """
    for name in ("bf16 gated bias", "bf16 gelu_tanh"):
        desc = dataclasses.replace(gemm(name), keeps_before=True)
        for block_m in (64, 128):
            tiles = _in_tiles(dataclasses.replace(desc, has_tile_rows=True), block_m)
            yield gemm_case(f"{name} kept", tiles, candidates(tiles, block_m, H200_SMS)[0])
    for activation, has_weighted, name in (
        (_SILU, True, "bf16"),
        (_SILU, False, "bf16"),
        (Activation("gelu_tanh_no_mul"), True, "bf16"),
        (dataclasses.replace(_OAI, limit=None), True, "f16"),
    ):
        desc = dataclasses.replace(gemm(f"{name} transposed"), pulls=activation, has_weighted=has_weighted)
        named = f"{name} through {activation.name}" + ", weighted" * has_weighted
        for block_m in (64, 128):
            tiles = _in_tiles(dataclasses.replace(desc, has_tile_rows=True), block_m)
            found = candidates(tiles, block_m, H200_SMS)
            for config in found if named == "bf16 through silu, weighted" else found[:1]:
                yield gemm_case(named, tiles, config)


def tall_cases() -> Iterator[Case]:
    """The other large-M tiles of swap_ab, in every width."""
    for name in ("bf16 gated bias", "fp8 row", "int8 row gated"):
        for block_m in (112, 144, 160, 176):
            desc = _in_tiles(gemm(name), block_m)
            for config in candidates(desc, block_m, H200_SMS):
                yield gemm_case(name, desc, config)


def sharing_cases() -> Iterator[Case]:
    """One matrix for all rows, whose K consumers share; the rows in use are known."""
    for name in ("bf16", "int8 row", "fp8 block, bias"):
        for block_m in (8, 16, 64, 96):
            desc = dataclasses.replace(gemm(name), rows=block_m, num_experts=1, k=3072, has_tile_rows=True)
            sharing = GemmConfig(block_m, 64, 3, swap_ab=True, sharers=3)
            for config in (choose_gemm_config(desc, block_m, H200_SMS), sharing):
                assert config.sharers > 1
                yield gemm_case(name, desc, config)


def swapped_block_cases() -> Iterator[Case]:
    """Block scales with swapped operands at the heights that ``gemm_cases`` leaves out."""
    for name in ("fp8 block, bias", "fp8 block gated", "fp8 block 2880 gated, bias", "fp8 block gated, requantized"):
        for block_m in (24, 48, 96):
            desc = _in_tiles(gemm(name), block_m)
            for config in candidates(desc, block_m, H200_SMS):
                yield gemm_case(name, desc, config)


def cluster_cases() -> Iterator[Case]:
    """Blocks in pairs: both ways to multiply, columns in an odd number of tiles, tiles with an empty half."""
    for name, sizes in (
        ("bf16", ((128, 256), (64, 128))),
        ("bf16 2880", ((128, 128),)),
        ("fp8 row ragged", ((128, 256),)),
        ("int8 row gated ragged", ((128, 128),)),
        ("fp8 block ragged", ((128, 256), (128, 128))),
        ("fp8 block 2880 gated, requantized", ((128, 128),)),
        ("fp8 block gated", ((64, 64),)),
    ):
        for block_m, block_n in sizes:
            desc = _in_tiles(gemm(name), block_m)
            plain = next(c for c in candidates(desc, block_m, H200_SMS) if (c.block_n, c.swap_ab) == (block_n, False))
            pair = dataclasses.replace(plain, row_chunk=None, cluster=2)
            yield gemm_case(name, desc, pair)
            yield gemm_case(name, desc, dataclasses.replace(pair, shares_weights=True))
    for name, block_m, block_n in (
        ("bf16", 144, 256),
        ("bf16", 176, 128),
        ("bf16 2880", 192, 192),
        ("fp8 row ragged", 160, 256),
        ("int8 row gated ragged", 144, 128),
        ("int8 row gated ragged", 192, 128),
        ("int8 row gated ragged", 96, 64),
    ):
        desc = _in_tiles(gemm(name), block_m)
        pair = dataclasses.replace(deepest(desc, GemmConfig(block_m, block_n, 2, swap_ab=True)), cluster=2)
        yield gemm_case(name, desc, pair)
        yield gemm_case(name, desc, dataclasses.replace(pair, shares_weights=True))


def narrow_cases() -> Iterator[Case]:
    """Gated tiles so narrow that scales and biases of a projection end where no TMA copy may start."""
    for name, options in (
        ("bf16 gated bias", dict(n=2880, k=2880)),
        ("fp8 row gated", dict(bias_dtype="bfloat16")),
    ):
        desc = _in_tiles(dataclasses.replace(gemm(name), **options), 64)
        for block_n in (48, 96):
            yield gemm_case(f"{name} narrow", desc, deepest(desc, GemmConfig(64, block_n, 2)))


_GROUPS: dict[str, Any] = dict(scale="group", group_size=128)
_CHANNEL: dict[str, Any] = dict(has_channel_scale=True)
_SCALE16: dict[str, Any] = dict(scale_dtype="bfloat16")
PACKED: dict[str, dict[str, Any]] = {
    "int4 channel": dict(fmt=PackedFormat("int4"), **_CHANNEL),
    "int4 channel, zero points": dict(fmt=PackedFormat("int4", has_zero_point=True), **_CHANNEL),
    "int4 g128": dict(fmt=PackedFormat("int4", **_GROUPS), **_SCALE16),
    "int4 g128 f32": dict(fmt=PackedFormat("int4", **_GROUPS)),
    "int4 g32": dict(fmt=PackedFormat("int4", scale="group", group_size=32), **_SCALE16),
    "int4 g128, zero points": dict(fmt=PackedFormat("int4", has_zero_point=True, **_GROUPS), **_SCALE16),
    "int4 g128 f16": dict(fmt=PackedFormat("int4", "float16", **_GROUPS), scale_dtype="float16", out_dtype="float16"),
    "int8 channel": dict(fmt=PackedFormat("int8"), **_CHANNEL),
    "int8 g64, zero points": dict(fmt=PackedFormat("int8", scale="group", group_size=64, has_zero_point=True)),
    "e4m3 channel": dict(fmt=PackedFormat("e4m3"), **_CHANNEL),
    "e4m3 g128": dict(fmt=PackedFormat("e4m3", **_GROUPS)),
    "nvfp4": dict(fmt=PackedFormat("e2m1", scale="e4m3", group_size=16), **_CHANNEL),
    "mxfp4": dict(fmt=PackedFormat("e2m1", scale="e8m0", group_size=32), **_CHANNEL),
    "mxfp4 2880": dict(n=2880, k=2880, fmt=PackedFormat("e2m1", scale="e8m0", group_size=32), **_CHANNEL),
    "mxfp8": dict(fmt=PackedFormat("e4m3", scale="e8m0", group_size=32), **_CHANNEL),
    "int4 to int8 g128": dict(fmt=PackedFormat("int4", "int8", **_GROUPS), lhs_scale="row", **_SCALE16),
    "int4 to int8 g64, zero points": dict(
        fmt=PackedFormat("int4", "int8", "group", 64, True), lhs_scale="row", **_SCALE16
    ),
    "int4 to int8 channel, zero points": dict(
        fmt=PackedFormat("int4", "int8", has_zero_point=True), lhs_scale="row", **_CHANNEL
    ),
    "int4 to int8 channel": dict(fmt=PackedFormat("int4", "int8"), lhs_scale="row", **_CHANNEL),
    "int4 to e4m3 g128": dict(fmt=PackedFormat("int4", "float8_e4m3fn", **_GROUPS), lhs_scale="row", **_SCALE16),
}
PACKED["mxfp4 to e4m3"] = dict(
    fmt=PackedFormat("e2m1", "float8_e4m3fn", scale="e8m0", group_size=32), lhs_scale="row", **_CHANNEL
)
_PACKED_BASE = PackedDesc(rows=1024, n=512, k=512, num_experts=4, fmt=PackedFormat("int4"))


_ROWS_OF_8_BITS = (("int4 to int8 g128", 1, 8), ("int4 to e4m3 g128", 5, 16), ("mxfp4 to e4m3", 16, 16))


def dense_cases() -> Iterator[Case]:
    """Words for operands of 16 bits back to matrices, one projection and two."""
    for name, options in PACKED.items():
        packed = dataclasses.replace(_PACKED_BASE, **options)
        if packed.fmt.is_8bit:
            continue
        fmt = packed.fmt
        for projections in (1, 2) if name in ("int4 g128", "mxfp4 2880") else (2,):
            desc = DenseDesc(
                num_experts=packed.num_experts,
                channel_blocks=packed.channel_blocks,
                projections=projections,
                depth_blocks=packed.k // fmt.block_k,
                n=packed.n,
                k=packed.k,
                groups=1 if fmt.group_size is None else packed.k // fmt.group_size,
                fmt=fmt,
                out_dtype=packed.out_dtype,
                scale_dtype=packed.scale_dtype,
                has_channel_scale=packed.has_channel_scale,
            )
            beside = (desc.num_blocks, desc.groups, 64)
            shapes = [((desc.num_blocks, desc.depth_blocks, *fmt.block_shape), "int32")]
            shapes += [(beside, desc.scale_dtype)] * desc.has_groups + [(beside, fmt.operand)] * fmt.has_zero_point
            shapes += [((desc.num_blocks, 64), "float32")] * desc.has_channel_scale
            yield Case(f"dequantize {name} x {projections}", dequantize_sm90(desc, H200_SMS), tuple(shapes))


def dgrad_cases() -> Iterator[Case]:
    """Gradients of rows: every format, plain and with the derivative of an activation, in tiles of both heights."""
    for name, options in PACKED.items():
        packed = dataclasses.replace(_PACKED_BASE, **options)
        if packed.fmt.is_8bit:
            continue
        has_groups = packed.fmt.scale == "group" or packed.fmt.has_zero_point  # else scales lie in the blocks
        plain = DgradDesc(
            rows=packed.rows,
            n=packed.n,
            k=packed.k,
            num_experts=packed.num_experts,
            groups=packed.k // packed.fmt.group_size if has_groups and packed.fmt.group_size else 1,
            fmt=packed.fmt,
            scale_dtype=packed.scale_dtype,
            has_channel_scale=packed.has_channel_scale,
        )
        activations = (None, _SILU, _OAI) if name in ("int4 g128", "mxfp4 2880") else (None, _SILU)
        for activation in activations:
            desc = dataclasses.replace(plain, activation=activation, has_tile_rows=name != "int4 channel")
            if desc.unsupported() is not None:
                continue
            for block_m in (64, 128):
                for config in _dgrad_configs(desc, block_m, every=name == "int4 g128"):
                    before = "" if activation is None else f", before {activation.name}"
                    yield Case(f"grouped_dgrad {name}{before}, {_size(config)}", *_dgrad_call(desc, config), "HGMMA")


def plain_dgrad_cases() -> Iterator[Case]:
    """Plain weights of 8 bits: gradients of rows, with the derivative of an activation, and the forward product."""
    for name, fmt, options in (
        ("e4m3 channel", PackedFormat("e4m3"), _CHANNEL),
        ("e4m3 channel f16", PackedFormat("e4m3", "float16"), _CHANNEL),
        ("e4m3 blocks", PackedFormat("e4m3", **_GROUPS), dict(groups=4)),
        ("e4m3 blocks 2880", PackedFormat("e4m3", **_GROUPS), dict(n=2880, k=2880, groups=23)),
        ("int8 channel", PackedFormat("int8"), _CHANNEL),
        ("int8 channel f16", PackedFormat("int8", "float16"), _CHANNEL),
    ):
        sizes: dict[str, Any] = dict(rows=1024, n=512, k=512, num_experts=4, groups=1) | options
        plain = DgradDesc(**sizes, fmt=fmt, is_plain=True, has_tile_rows=True)
        for form, changes in (
            ("", {}),
            (", before silu", dict(activation=_SILU)),
            (", forward", dict(contracts_k=True)),
        ):
            desc = dataclasses.replace(plain, **changes)
            for block_m in (64, 128):
                for config in _dgrad_configs(desc, block_m, every=name in ("e4m3 blocks", "int8 channel")):
                    named = f"grouped_dgrad plain {name}{form}, {_size(config)}"
                    yield Case(named, *_dgrad_call(desc, config), "HGMMA")


def _dgrad_configs(desc: DgradDesc, block_m: int, *, every: bool) -> list[DgradConfig]:
    """All of them, or the first of each form: tiles alone, and pairs."""
    found = dgrad_candidates(desc, block_m, H200_SMS)
    return found if every else list({config.neighbours: config for config in reversed(found)}.values())


def _size(config: DgradConfig) -> str:
    neighbours = f"{config.neighbours} x " if config.neighbours > 1 else ""
    return f"{neighbours}{config.block_m} x {config.block_n}"


def _dgrad_call(desc: DgradDesc, config: DgradConfig) -> tuple[Any, tuple[Shape, ...]]:
    """A call's function of its operands in their order, and their shapes."""
    blocks, tiles = desc.num_experts * desc.n // 64, (desc.rows // config.block_m,)
    words = (blocks, desc.k // desc.fmt.block_k, *desc.fmt.block_shape)
    shapes: dict[str, Shape] = dict(
        dy=((desc.rows, desc.depth), desc.dtype),
        w=((desc.num_experts * desc.n, desc.k) if desc.is_plain else words, desc.stored_dtype),
        tile_expert=(tiles, "int32"),
        num_tiles=(tiles if config.neighbours > 1 else (1,), "int32"),
        scale=((blocks, desc.groups, COPIES_OF_SCALE if desc.is_plain else 64), desc.scale_dtype),
        zero=((blocks, desc.groups, 64), desc.dtype),
        channel_scale=((blocks, 64), "float32"),
        tile_rows=(tiles, "int32"),
        first_tile=(tiles, "int32"),
        before=((desc.rows, desc.projections * desc.k), desc.dtype),
    )
    run, names = grouped_dgrad_sm90(desc, config), operand_names(desc, config)
    return lambda *arrays: run(dict(zip(names, arrays, strict=True))), tuple(shapes[name] for name in names)


def unpermuted_cases() -> Iterator[Case]:
    """GEMM 1 of few tokens, which are the rows of every tile: one, five, and all that a tile holds."""
    for name, tokens, block_m in (("bf16 gated bias", 1, 8), ("bf16 2880", 5, 8), ("bf16 gelu_tanh", 16, 16)):
        desc = _in_tiles(dataclasses.replace(gemm(name), unpermuted_rows=tokens), block_m)
        yield gemm_case(f"same {tokens} rows, {name}", desc, candidates(desc, block_m, H200_SMS)[0])
    for name, block_m in itertools.product(("bf16 gated bias", "fp8 row gated", "fp8 block", "int8 2880"), (8, 16)):
        desc = _in_tiles(dataclasses.replace(gemm(name), has_tile_rows=True, has_tile_bits=True), block_m)
        for config in candidates(desc, block_m, H200_SMS):
            yield gemm_case(f"rows in use, {name}", desc, config)
    ragged = dataclasses.replace(gemm("bf16 ragged"), unpermuted_rows=3)
    yield gemm_case("same 3 rows, bf16 ragged", ragged, GemmConfig(64, 128, 4, row_chunk=16))
    for name, tokens, block_m in (
        ("fp8 row gated", 1, 16),
        ("int8 row gated", 5, 8),
        ("int8 2880", 16, 16),
        ("fp8 tensor gated, requantized", 8, 64),
        ("fp8 block gated, requantized", 1, 64),
    ):
        desc = _in_tiles(dataclasses.replace(gemm(name), unpermuted_rows=tokens), block_m)
        yield gemm_case(f"same {tokens} rows, {name}", desc, candidates(desc, block_m, H200_SMS)[0])
    for name, tokens in (("int8 row gated ragged", 3), ("fp8 block gated, requantized, ragged", 16)):
        ragged = dataclasses.replace(gemm(name), unpermuted_rows=tokens)
        yield gemm_case(f"same {tokens} rows, {name}", ragged, GemmConfig(64, 128, 4, row_chunk=16))
    for name, tokens, block_m in (
        ("int4 g128", 1, 8),
        ("nvfp4", 5, 16),
        ("mxfp4", 16, 16),
        ("int8 channel", 8, 24),
        *_ROWS_OF_8_BITS,
    ):
        desc = dataclasses.replace(_PACKED_BASE, **PACKED[name], **_GATED, unpermuted_rows=tokens)
        desc = _in_tiles(desc, block_m)
        config = next(packed_candidates(desc, block_m, H200_SMS))
        yield packed_case(f"same {tokens} rows, {name} gated", desc, config)


def vector_cases() -> Iterator[Case]:
    """Tiles of one row and of a few: every description that has them, long rows, rows that are quantized first, weights
    apart."""
    for name in GEMMS:
        for config in candidates(dataclasses.replace(gemm(name), rows=8), 1, H200_SMS):
            yield gemm_case(name, dataclasses.replace(gemm(name), rows=8), config)
        few = dataclasses.replace(gemm(name), rows=16, has_tile_rows=True)
        for config in candidates(few, FewRowsConfig.block_m, H200_SMS):
            yield gemm_case(name, few, config)
        same = dataclasses.replace(few, unpermuted_rows=3)
        for config in candidates(same, FewRowsConfig.block_m, H200_SMS)[:1]:
            yield gemm_case(f"the same 3 of {name}", same, config)
    for name in ("bf16", "f16 to f32", "fp8 row", "fp8 block", "int8 row"):  # the narrowest loads: a lane's two bytes
        k = 544 if gemm(name).itemsize == 2 else 576
        yield gemm_case(f"{name}, K {k}", dataclasses.replace(gemm(name), rows=8, k=k), VectorConfig(2))
    long = dict(rows=8, k=14336, n=4096)
    for name in ("bf16", "fp8 row", "fp8 block", "int8 row"):
        yield gemm_case(f"{name} of long rows", dataclasses.replace(gemm(name), **long), VectorConfig(2))
    for name, kind in (
        ("fp8 row", "e4m3_row"),
        ("fp8 block", "e4m3_group"),
        ("fp8 block", "e4m3_group_ue8m0"),
        ("fp8 block 2880 gated, bias", "e4m3_group"),
        ("int8 2880", "int8_row"),
    ):
        desc = dataclasses.replace(gemm(name), rows=8, quantization=kind)
        yield gemm_case(f"{name} of rows in {kind}", desc, candidates(desc, 1, H200_SMS)[0])
    for name, k in (
        ("bf16", 768),
        ("bf16", 14336),
        ("fp8 row", 2048),
        ("fp8 block", 2048),
        ("fp8 block, bias", 2880),
        ("fp8 tensor", 768),
        ("int8 row", 2048),
    ):
        summed: dict[str, Any] = dict(rows=8, n=2048, k=k, num_tokens=1, top_k=8)
        desc = dataclasses.replace(gemm(name), **summed, shared_dtype="bfloat16")
        yield gemm_case(f"{name} added up, K {k}", desc, candidates(desc, 1, H200_SMS)[0])
    widths = (4096, 512, 512)
    apart: dict[str, Any] = dict(num_experts=1, widths=widths, n=sum(widths), k=2048, rows=1, unpermuted_rows=1)
    for name in ("bf16", "fp8 block, bias", "fp8 row", "int8 row"):
        desc = dataclasses.replace(gemm(name), **apart)
        yield gemm_case(f"side by side, {name}", desc, candidates(desc, 1, H200_SMS)[0])


def in_parts_cases() -> Iterator[Case]:
    """Parts of K of one matrix, few rows and many, moved in chunks and whole."""
    for name, tokens in itertools.product(("fp8 block", "fp8 row", "int8 row", "bf16"), (16, 64)):
        sizes: dict[str, Any] = dict(num_experts=1, rows=256, n=2048, k=4096, k_parts=4, unpermuted_rows=tokens)
        desc = dataclasses.replace(gemm(name), out_dtype="float32", has_tile_rows=True, **sizes)
        config = choose_gemm_config(desc, 64, H200_SMS)
        yield gemm_case(f"{name} in parts, {tokens} rows", desc, config)


def norm_and_multiply_cases() -> Iterator[Case]:
    """One token: with and without a sum, weights side by side and one, with and without biases."""
    for width, dtype in itertools.product((2048, 2880, 4096, 7168), ("bfloat16", "float16")):
        for parts, widths in ((1, (4096, 512, 512)), (3, ()), (0, ())):
            norm = AddNormDesc(1, width, dtype, parts, 1e-6, "float32" if parts == 3 else None, has_bias=parts == 3)
            shapes: list[Shape] = [((1, width), dtype), ((width,), dtype)]
            shapes += [((parts, 1, width), norm.part_dtype or dtype)] * bool(parts)
            shapes += [((width,), dtype)] * norm.has_bias
            sizes: dict[str, Any] = dict(rows=1, n=sum(widths) or 704, k=width, num_experts=1, widths=widths)
            desc = NormProductDesc(norm, GemmDesc(**sizes, dtype=dtype, bias_dtype=None if widths else dtype))
            config = choose_product(desc, H200_SMS)
            names, of_product = product_names(desc), _gemm_shapes(desc.gemm, config)
            function = functools.partial(_normed_and_multiplied, desc, config, len(shapes))
            name = f"norm_and_multiply {width} {dtype}, {parts} parts, {config.channels} channels"
            yield Case(name, function, (*shapes, *(of_product[name] for name in names)))


def _normed_and_multiplied(desc: NormProductDesc, config: VectorConfig, count: int, *operands: Any) -> Any:
    """count: of the norm's operands."""
    named = dict(zip(product_names(desc), operands[count:], strict=True))
    return norm_and_multiply_sm90(desc, config)(operands[:count], named)


def side_by_side_cases() -> Iterator[Case]:
    """Queries, keys and values of one token, few and many: one launch reads three weights where they lie."""
    widths, k = (4096, 512, 512), 2048
    apart: dict[str, Any] = dict(num_experts=1, widths=widths, n=sum(widths), k=k)
    for name in ("fp8 block", "fp8 block, bias", "fp8 row", "int8 row", "fp8 tensor"):
        for tokens, block_m in ((1, 8), (64, 64), (2048, 128)):
            rows = 0 if tokens > block_m else tokens
            desc = dataclasses.replace(gemm(name), rows=max(tokens, block_m), unpermuted_rows=rows, **apart)
            ragged = dataclasses.replace(desc, has_tile_rows=True)
            config = choose_gemm_config(ragged, block_m, H200_SMS)
            yield gemm_case(f"side by side {tokens} tokens, {name}", ragged, config)
    for name in ("int4 g128", "int4 g128, zero points", "int8 channel", "int4 to int8 g128", "nvfp4"):
        for tokens, block_m in ((1, 8), (64, 64)):
            options = dict(PACKED[name], rows=block_m, bias_dtype="bfloat16", unpermuted_rows=tokens, **apart)
            desc = dataclasses.replace(_PACKED_BASE, **options)
            config = choose_packed_config(desc, block_m, H200_SMS)
            yield packed_case(f"side by side {tokens} tokens, {name}", desc, config)


def packed_case(name: str, desc: PackedDesc, config: PackedConfig | PackedVectorConfig) -> Case:
    """The Hopper grouped GEMM with packed weights on its flat operands."""
    fmt, blocks = desc.fmt, desc.num_experts * desc.channel_blocks * desc.projections
    grouped = (blocks, -(-desc.k // fmt.group_size) if fmt.group_size else 1, 64)
    scaled = config.block_m if desc.unpermuted_rows else desc.rows
    shapes = {
        "x": ((desc.unpermuted_rows or desc.rows, desc.k), fmt.operand),
        "w": ((blocks, desc.k // fmt.block_k, *fmt.block_shape), "int32"),
        "tile_expert": ((desc.rows // config.block_m,), "int32"),
        "num_tiles": ((1,), "int32"),
        "scale": (grouped, desc.scale_dtype),
        "zero": (grouped, fmt.operand),
        "channel_scale": ((blocks, 64), "float32"),
        "bias": ((blocks, 64), desc.bias_dtype or "float32"),
        "x_scale": ((1,) if desc.lhs_scale == "tensor" else (scaled,), "float32"),
        "tile_rows": ((desc.rows // config.block_m,), "int32"),
    } | _sum_shapes(desc)
    for index, n in enumerate(desc.widths):
        end = f"_{index}" if index else ""
        for own in ("w", "scale", "zero", "channel_scale", "bias"):
            (_, *shape), dtype = shapes[own]
            shapes[f"{own}{end}"] = (-(-n // 64), *shape), dtype
    if isinstance(config, PackedVectorConfig):
        rows = "single rows" if config.block_m == 1 else f"{config.block_m} rows"
        name = f"grouped_gemm_packed of {rows}, {name}, K in {config.k_split} parts"
        name += f", {desc.top_k} added up" * bool(desc.top_k)
        return _case_of_operands(name, desc, config, shapes, None)
    if isinstance(config, FewRowsConfig):
        form = f"K in {config.k_split} parts"
        return _case_of_operands(f"grouped_gemm of few rows, {name}, {form}", desc, config, shapes, None)
    instruction = {"float8_e4m3fn": "QGMMA", "int8": "IGMMA"}.get(fmt.operand, "HGMMA")
    return _case_of_operands(f"grouped_gemm_packed {name}, {config}", desc, config, shapes, instruction)


def packed_cases() -> Iterator[Case]:
    """Each format, gated with a bias and alone, at every tile height with what the heuristic likes best there; the two
    commonest formats with all it may choose. Tiles are multiplied at several heights.
    """
    for name, options in PACKED.items():
        variants: tuple[dict[str, Any], ...] = (dict(bias_dtype="bfloat16", **_GATED), {})
        is_common = name in ("int4 g128", "nvfp4")
        for gated in variants:
            for block_m in (8, 16, *((24,) if is_common else ()), 64, 80, 128, 144, 176):
                desc = _in_tiles(dataclasses.replace(_PACKED_BASE, **options, **gated, **_RAGGED), block_m)
                found = list(packed_candidates(desc, block_m, H200_SMS))
                for config in found if is_common else found[:1]:
                    yield packed_case(f"{name}{' gated' if gated else ''}", desc, config)


def packed_vector_cases() -> Iterator[Case]:
    """Tiles of few rows: each format alone and gated with a bias, K in every number of parts; short and long rows."""
    for name, options in PACKED.items():
        for gated in (dict(bias_dtype="bfloat16", **_GATED), {}):
            desc = dataclasses.replace(_PACKED_BASE, **options, **gated)
            for k in (512, 768, 4096) if desc.k == 512 else (desc.k,):
                sized = dataclasses.replace(desc, rows=8, k=k)
                found = list(packed_candidates(sized, 1, H200_SMS))
                for config in found if k == 768 and name == "int4 g128" else found[:1]:
                    yield packed_case(f"{name}{' gated' if gated else ''}, K {sized.k}", sized, config)
                for block_m in HEIGHTS[1:] if k != 512 else ():
                    few = dataclasses.replace(sized, rows=8 * block_m, has_tile_rows=True)
                    found_few = vector_candidates(few, H200_SMS, block_m)
                    for config in found_few if k == 768 and name == "int4 g128" else found_few[:1]:
                        yield packed_case(f"{name}{' gated' if gated else ''}, K {k}", few, config)
                if not gated:
                    adding = dataclasses.replace(sized, num_tokens=1, top_k=8, shared_dtype="bfloat16")
                    yield packed_case(f"{name}, K {k}", adding, found[0])


def tuned_cases() -> Iterator[Case]:
    """What the shipped tables name, each form once: sizes and numbers of stages hardly change the code."""
    seen = set()
    for entry in (*table_for("NVIDIA H200").entries, *table_for("NVIDIA H100 80GB HBM3").entries):
        products = entry.key.products(entry.tokens, entry.config.block_m)
        for whole, config in zip(products, (entry.config.gemm1, entry.config.gemm2), strict=True):
            desc = dataclasses.replace(whole, rows=64 * config.block_m, num_experts=4)
            is_packed = isinstance(desc, PackedDesc)
            same = dict(n=0, k=0) if is_packed else dict(n=desc.n % config.block_n, k=0)
            form = (dataclasses.replace(desc, **same), dataclasses.replace(config, num_stages=2))
            if form not in seen:
                seen.add(form)
                kind = desc.fmt if is_packed else desc.dtype
                name = f"tuned {kind} {desc.projections} projections {desc.n} x {desc.k}"
                yield (packed_case if is_packed else gemm_case)(name, desc, config)


def permute_cases() -> Iterator[Case]:
    for quantization in QUANTIZATIONS:
        for width in (7168, 2880, 768, 256):
            for top_k in (8, 0):
                yield from _permute_case(quantization, width, top_k)
    for quantization in ("e4m3_row", "int8_row"):
        for width, top_k, dtype in (
            (768, 8, "bfloat16"),
            (768, 0, "bfloat16"),
            (1024, 0, "float32"),
            (704, 0, "float16"),
        ):
            yield from _permute_case(quantization, width, top_k, dtype, rows_at_once=4)


def _permute_case(
    quantization: str, width: int, top_k: int, dtype: str = "bfloat16", rows_at_once: int = 1
) -> Iterator[Case]:
    desc = PermuteDesc(64, width, top_k, 4096 if top_k else 64, dtype, quantization, None if top_k else 48)
    config = dataclasses.replace(choose_permute(desc, H200_SMS), rows_at_once=rows_at_once)
    if config_error(desc, config):
        return
    shapes = [((64, width), dtype), ((64, 8), "int32") if top_k else None]
    shapes += [((1,), "float32") if quantization in TAKES_SCALE else None]
    shapes += [None if top_k else ((48,), "int32")]
    kernel = quantize_and_permute_sm90 if rows_at_once == 1 else quantize_narrow_rows_sm90
    several = "" if rows_at_once == 1 else f", {dtype}, {rows_at_once} rows at once"
    name = f"quantize_and_permute {quantization} {width}{'' if top_k else ' in place'}{several}"
    yield Case(name, kernel(desc, config), tuple(s for s in shapes if s))


def gather_cases() -> Iterator[Case]:
    for dtype, width in (("bfloat16", 7168), ("float16", 2880), ("float32", 200)):
        desc = PermuteDesc(64, width, 8, 4096, dtype, "none", num_experts=16, block_m=32)
        shapes = (((64, width), dtype), ((64, 8), "int32"), ((16, width), "int32"), ((128,), "int32"))
        kernel = gather_rows_sm90(desc, choose_permute(desc, H200_SMS))
        yield Case(f"gather_rows {dtype} {width}", lambda *arrays, kernel=kernel: kernel(*arrays)[0], shapes)


def combine_cases() -> Iterator[Case]:
    for width in (7168, 2880, 768, 128):
        for dtype in ("bfloat16", "float32"):
            desc = CombineDesc(64, width, 8, 4096, dtype, "bfloat16", shared_dtype="float32")
            shapes = (((4096, width), dtype), ((64, 8), "int32"), ((64, 8), "float32"), ((64, width), "float32"))
            yield Case(f"combine {dtype} {width}", combine_sm90(desc, choose_combine_config(desc, H200_SMS)), shapes)
    for dtype in ("bfloat16", "float16"):
        desc = CombineDesc(1, 2048, 8, 128, dtype, dtype)
        shapes = (((128, 2048), dtype), ((1, 8), "int32"), ((1, 8), dtype))
        yield Case(f"combine by {dtype}", combine_sm90(desc, choose_combine_config(desc, H200_SMS)), shapes)


def align_cases() -> Iterator[Case]:
    for pairs, experts, block_m in ((8, 128, 64), (512, 128, 64), (65536, 256, 128), (16384, 8, 128), (100, 300, 16)):
        desc = AlignDesc(pairs, experts, block_m, row_capacity(pairs, experts, block_m))
        config = dataclasses.replace(choose_align(desc), num_ctas=1)
        yield Case(f"align {pairs} to {experts}", align_sm90(desc, config), (((pairs,), "int32"),))
    for pairs, experts, has_offset in ((65536, 128, False), (40000, 32, True)):
        desc = AlignDesc(pairs, experts, 128, row_capacity(pairs, experts, 128), has_offset)
        config, offset = choose_align(desc), (((1,), "int32"),) if has_offset else ()
        ids, by_cta = ((pairs,), "int32"), ((config.num_ctas * experts,), "int32")
        yield Case(f"align {pairs} to {experts}, ranks", ranks_sm90(desc, config), (ids, *offset))
        yield Case(f"align {pairs} to {experts}, rows", rows_sm90(desc, config), (ids, by_cta, ids, *offset))
    unpermuted = AlignDesc(128, 128, 16, row_capacity(128, 128, 16), top_k=8)
    yield Case("align unpermuted", align_sm90(unpermuted, choose_align(unpermuted)), (((128,), "int32"),))
    for desc in (unpermuted, AlignDesc(4096, 64, 64, row_capacity(4096, 64, 64))):
        desc = dataclasses.replace(desc, are_wide=True)
        yield Case(
            f"align {desc.num_pairs} wide", align_sm90(desc, choose_align(desc)), (((2 * desc.num_pairs,), "int32"),)
        )
    shard = AlignDesc(512, 32, 64, row_capacity(512, 32, 64), has_offset=True)
    yield Case("align of a shard", align_sm90(shard, choose_align(shard)), (((512,), "int32"), ((1,), "int32")))


def nvlink_dispatch_cases() -> Iterator[Case]:
    """Dispatch in every quantization, combine and placing: few and many tokens, a mesh of one axis and of two."""
    four, two_axes = (("e", 4),), (("t", 2), ("e", 2))
    for number, quantization in enumerate(EXCHANGE_QUANTIZATIONS):
        for tokens, width in ((16, 7168), (4096, 2048)):
            mesh = two_axes if number == 1 else four
            sums = "bfloat16" if tokens > 16 else None
            desc = ExchangeDesc(mesh, "e", tokens, width, 8, 32, "bfloat16", quantization, sum_dtype=sums)
            shapes = (((tokens, width), "bfloat16"), ((desc.padded_pairs,), "int32"))
            shapes += (((desc.padded_pairs,), "float32"),) if sums else ()
            kernel = dispatch_sm90(desc, choose_dispatch_config(desc, H200_SMS))
            yield Case(f"nvlink dispatch {quantization} {tokens} x {width}", kernel, shapes, mesh=mesh)
    for mesh, dtype, sums, tokens, width in (
        (four, "bfloat16", None, 16, 7168),
        (four, "bfloat16", "bfloat16", 16, 7168),
        (four, "bfloat16", None, 4096, 7168),
        (four, "bfloat16", "bfloat16", 4096, 7168),
        (two_axes, "float16", None, 16, 2880),
        ((("e", 8),), "bfloat16", "float32", 256, 2048),
    ):
        desc = ExchangeDesc(mesh, "e", tokens, width, 8, 32, dtype, row_dtype=dtype, sum_dtype=sums)
        pairs = desc.num_pairs
        shapes = (((4096, width), dtype), ((desc.size * pairs,), "int32"), ((pairs,), "int32"))
        shapes += (((desc.size, desc.padded_pairs) if sums else (pairs,), "float32"),)
        shapes += (((desc.mailbox_rows, width), desc.mailbox_dtype), ((desc.size + 1, 128), "int32"))
        kernel = nvlink_combine_sm90(desc, choose_nvlink_combine(desc, H200_SMS))
        yield Case(f"nvlink combine {dtype} to {sums} {tokens} x {width}", kernel, shapes, mesh=mesh)
    for width, groups in ((7168, 56), (2048, 16), (2880, 0)):
        place = PlaceDesc(64, 1024, width, 8, groups)
        scales = (64, groups) if groups else (64,)
        shapes = (((64, width), "int8"), (scales, "float32"), ((64, 8), "int32"))
        yield Case(
            f"nvlink place {width}, {groups} groups", place_sm90(place, choose_place_config(place, H200_SMS)), shapes
        )


def all_cases() -> Iterator[Case]:
    yield from gemm_cases()
    yield from wgrad_cases()
    yield from tall_cases()
    yield from swapped_block_cases()
    yield from sharing_cases()
    yield from cluster_cases()
    yield from narrow_cases()
    yield from packed_cases()
    yield from packed_vector_cases()
    yield from dense_cases()
    yield from dgrad_cases()
    yield from plain_dgrad_cases()
    yield from pull_cases()
    yield from unpermuted_cases()
    yield from in_parts_cases()
    yield from side_by_side_cases()
    yield from vector_cases()
    yield from norm_and_multiply_cases()
    yield from tuned_cases()
    yield from permute_cases()
    yield from gather_cases()
    yield from combine_cases()
    yield from align_cases()
    yield from route_cases()
    yield from quantizing_route_cases()
    yield from align_and_permute_cases()
    yield from nvlink_dispatch_cases()
    yield from prefill_cases()
    yield from decode_cases()
    yield from combine_quantized_cases()
    yield from add_and_norm_cases()
    yield from rotate_and_store_cases()
    yield from multiply_heads_cases()
    yield from store_latents_cases()
