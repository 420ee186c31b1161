"""Every form of the kernels that route: alone, with alignment, with that and the quantization of the tokens."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from pallas_kernels.align import AlignDesc, row_capacity
from pallas_kernels.align_and_permute.kernel_sm90 import align_and_permute_sm90
from pallas_kernels.quantize_and_permute import PermuteDesc
from pallas_kernels.quantize_and_permute.config import TAKES_SCALE
from pallas_kernels.route.config import RouteDesc
from pallas_kernels.route.config import choose_config as choose_route
from pallas_kernels.route.kernel_sm90 import route_and_align_sm90, route_sm90
from tests.support.kernels.case import Case, Shape

ROUTERS = {
    "softmax 128": dict(num_experts=128, top_k=8),
    "softmax 8, bf16": dict(num_experts=8, top_k=2, dtype="bfloat16"),
    "softmax 100, not renormalized, f16": dict(num_experts=100, top_k=4, dtype="float16", renormalize=False),
    "softmax 512, top 16, masked": dict(num_experts=512, top_k=16, has_mask=True),
    "sigmoid 32, top 1": dict(num_experts=32, top_k=1, scoring="sigmoid", renormalize=False),
    "sigmoid 256, bias": dict(num_experts=256, top_k=8, scoring="sigmoid", has_bias=True, scale=2.5),
    "sigmoid 256, bias, 8 groups": dict(
        num_experts=256, top_k=8, scoring="sigmoid", has_bias=True, scale=2.5, num_groups=8, groups_kept=4
    ),
    "softmax 160, 8 groups": dict(num_experts=160, top_k=6, num_groups=8, groups_kept=3, renormalize=False),
    "softmax 512, bias, 32 groups": dict(num_experts=512, top_k=16, has_bias=True, num_groups=32, groups_kept=5),
}


def route_cases() -> Iterator[Case]:
    """Each router alone for many tokens, and aligned in the same launch for as many as that takes."""
    for name, options in ROUTERS.items():
        for tokens in (1000, 64):
            desc = RouteDesc(
                **{"num_tokens": tokens, "dtype": "float32", "scoring": "softmax", "renormalize": True} | options
            )
            config = choose_route(desc, in_one_cta=tokens == 64)
            shapes: list[Shape] = [((tokens * desc.num_experts,), desc.dtype)]
            shapes += [((desc.num_experts,), "float32")] if desc.has_bias else []
            shapes += [((tokens,), "int32")] if desc.has_mask else []
            if name == "softmax 128":
                parts = dataclasses.replace(desc, num_parts=16)
                own: list[Shape] = [((16 * tokens * desc.num_experts,), desc.dtype)]
                yield Case(f"route {tokens} tokens, 16 parts", route_sm90(parts, choose_route(parts)), tuple(own))
                if tokens == 64:
                    few = dataclasses.replace(parts, num_tokens=16)
                    tiles = AlignDesc(128, 128, 16, row_capacity(128, 128, 16), top_k=8)
                    kernel = route_and_align_sm90(few, choose_route(few, in_one_cta=True), tiles)
                    yield Case("route_and_align, 16 parts", kernel, (((16 * 16 * 128,), "float32"),))
            if tokens == 64:
                pairs = tokens * desc.top_k
                tiles = AlignDesc(pairs, desc.num_experts, 64, row_capacity(pairs, desc.num_experts, 64))
                yield Case(f"route_and_align {name}", route_and_align_sm90(desc, config, tiles), tuple(shapes))
                if name == "softmax 128":
                    few = RouteDesc(
                        **dict(num_tokens=16, dtype="float32", scoring="softmax", renormalize=True) | options
                    )
                    unpermuted = AlignDesc(128, 128, 16, row_capacity(128, 128, 16), top_k=8)
                    kernel = route_and_align_sm90(few, choose_route(few, in_one_cta=True), unpermuted)
                    yield Case("route_and_align unpermuted", kernel, (((16 * 128,), "float32"),))
                    tiles = AlignDesc(pairs, 32, 64, row_capacity(pairs, 32, 64), has_offset=True)
                    kernel = route_and_align_sm90(desc, config, tiles)
                    yield Case("route_and_align of a shard", kernel, (*shapes, ((1,), "int32")))
            else:
                yield Case(f"route {name}", route_sm90(desc, config), tuple(shapes))


def quantizing_route_cases() -> Iterator[Case]:
    """Tokens that are quantized while they are routed: blocks of one, two and four warpgroups, wide rows."""
    options: dict[str, Any]
    for quantization, tokens, width, options in (
        ("e4m3_row", 1, 2048, {}),
        ("e4m3_tensor_row", 1, 7168, {}),
        ("int8_row", 5, 2880, {}),
        ("e4m3_row", 16, 7168, dict(num_experts=256, scoring="sigmoid", has_bias=True, num_groups=8, groups_kept=4)),
        ("int8_row", 16, 7168, dict(has_mask=True)),
        ("e4m3_row", 16, 8192, {}),
        ("e4m3_tensor", 16, 4096, dict(num_experts=8, top_k=2)),
        ("e4m3_group", 1, 2048, {}),
        ("e4m3_group", 16, 7168, {}),
        ("e4m3_group", 16, 2880, {}),
        ("e4m3_group_ue8m0", 8, 2944, {}),
    ):
        options = dict(num_experts=128, top_k=8, dtype="float32", scoring="softmax", renormalize=True) | options
        desc = RouteDesc(tokens, **options)
        pairs, has_offset = tokens * desc.top_k, desc.has_mask
        local = 32 if has_offset else desc.num_experts
        tiles = AlignDesc(pairs, local, 16, row_capacity(pairs, local, 16), has_offset, desc.top_k)
        rows = PermuteDesc(tokens, width, 0, tokens, "bfloat16", quantization, scale_rows=16)
        shapes = [
            ((tokens * desc.num_experts,), desc.dtype),
            ((desc.num_experts,), "float32") if desc.has_bias else None,
        ]
        shapes += [((tokens,), "int32") if desc.has_mask else None, ((1,), "int32") if has_offset else None]
        shapes += [((tokens, width), "bfloat16"), ((1,), "float32") if quantization in TAKES_SCALE else None]
        kernel = route_and_align_sm90(desc, choose_route(desc, in_one_cta=True), tiles, rows)
        name = f"route_and_align of {tokens} tokens, {quantization} {width}"
        yield Case(name, kernel, tuple(s for s in shapes if s))


def align_and_permute_cases() -> Iterator[Case]:
    """Tokens that are moved while they are aligned: one scale a row and many, wide rows, as many pairs as it takes."""
    for num_tokens, top_k, num_experts, block_m, width, kind in (
        (64, 8, 128, 8, 2048, "e4m3_row"),
        (64, 8, 32, 24, 7168, "e4m3_group"),
        (128, 8, 128, 16, 2048, "none"),
        (64, 4, 128, 16, 2880, "e4m3_tensor"),
        (64, 4, 128, 16, 2880, "e4m3_group_ue8m0"),
        (100, 10, 1024, 8, 8192, "int8_row"),
        (64, 2, 8, 32, 4096, "nvfp4"),
        (64, 8, 32, 24, 7168, "nvfp4_row"),
        (17, 4, 128, 8, 8192, "mxfp8"),
        (128, 4, 64, 16, 8192, "mxfp4"),
    ):
        pairs = num_tokens * top_k
        tiles = AlignDesc(pairs, num_experts, block_m, row_capacity(pairs, num_experts, block_m))
        rows = PermuteDesc(num_tokens, width, top_k, tiles.num_rows, "bfloat16", kind)
        shapes: list[Shape] = [((pairs,), "int32"), ((num_tokens, width), "bfloat16")]
        shapes += [((1,), "float32")] if kind in TAKES_SCALE else []
        name = f"align_and_permute, {num_tokens} tokens of {num_experts} experts, {kind} {width}"
        yield Case(name, align_and_permute_sm90(tiles, rows), tuple(shapes))
