"""The kernels between the products of a layer: sums with norms, and rotations with writes to the cache."""

import dataclasses
from collections.abc import Iterator

from pallas_kernels.add_and_norm import AddNormDesc, config_error
from pallas_kernels.add_and_norm import choose_config as choose_norm
from pallas_kernels.add_and_norm.config import QUANTIZATIONS
from pallas_kernels.add_and_norm.kernel_sm90 import add_and_norm_sm90
from pallas_kernels.multiply_heads import HeadsDesc
from pallas_kernels.multiply_heads import choose_config as choose_heads
from pallas_kernels.multiply_heads.kernel_sm90 import multiply_heads_sm90
from pallas_kernels.rotate_and_store import RotateDesc
from pallas_kernels.rotate_and_store import choose_config as choose_rotate
from pallas_kernels.rotate_and_store.kernel_sm90 import rotate_and_store_sm90
from pallas_kernels.store_latents import LatentsDesc
from pallas_kernels.store_latents import choose_config as choose_latents
from pallas_kernels.store_latents.kernel_sm90 import store_latents_sm90
from tests.support.kernels.case import Case, Shape

SMS = 132


def add_and_norm_cases() -> Iterator[Case]:
    for width in (2048, 2880, 7168, 8192):
        for has_addend in (True, False):
            desc = AddNormDesc(64, width, "float16" if width == 8192 else "bfloat16", has_addend, 1e-6)
            rows: Shape = ((64, width), desc.dtype)
            shapes = (rows, ((width,), desc.dtype), *[((1, 64, width), desc.dtype)] * has_addend)
            name = f"add_and_norm {width}{', sum' if has_addend else ''}"
            yield Case(name, add_and_norm_sm90(desc, choose_norm(desc, SMS)), shapes)
        desc = AddNormDesc(60, width, "bfloat16", 8, 1e-6, "float32")
        shapes = (((60, width), desc.dtype), ((width,), desc.dtype), ((8, 64, width), "float32"))
        yield Case(f"add_and_norm {width}, 8 parts", add_and_norm_sm90(desc, choose_norm(desc, SMS)), shapes)
        desc = dataclasses.replace(desc, has_bias=True)
        shapes = (*shapes, ((width,), desc.dtype))
        yield Case(f"add_and_norm {width}, 8 parts, bias", add_and_norm_sm90(desc, choose_norm(desc, SMS)), shapes)
        for quantization in QUANTIZATIONS[1:]:
            desc = AddNormDesc(60, width, "bfloat16", 1, 1e-6, None, quantization, 64)
            shapes = (((60, width), desc.dtype), ((width,), desc.dtype), ((1, 64, width), desc.dtype))
            if config_error(desc, choose_norm(desc, SMS)) is None:
                yield Case(
                    f"add_and_norm {width}, {quantization}", add_and_norm_sm90(desc, choose_norm(desc, SMS)), shapes
                )
        for tokens, parts, experts, has_bias in ((1, 1, 128, False), (1, 0, 256, False), (4, 8, 100, True)):
            desc = AddNormDesc(tokens, width, "float16" if parts == 0 else "bfloat16", parts, 1e-6)
            desc = dataclasses.replace(desc, part_dtype="float32" if has_bias else None, has_bias=has_bias)
            desc = dataclasses.replace(desc, num_experts=experts, has_router_bias=has_bias)
            shapes = (((tokens, width), desc.dtype), ((width,), desc.dtype))
            shapes += (((parts, tokens, width), desc.part_dtype or desc.dtype),) * bool(parts)
            shapes += (((width,), desc.dtype),) * has_bias
            shapes += (((experts, width), desc.dtype), *[((experts,), desc.dtype)] * has_bias)
            name = f"add_and_norm {width}, {tokens} rows, {parts} parts, router of {experts}"
            yield Case(name, add_and_norm_sm90(desc, choose_norm(desc, SMS)), shapes)
        for tokens, quantization, top_k, shared in (
            *((1, "none", 8, None), (4, "e4m3_row", 10, "float32"), (2, "e4m3_group", 8, None)),
            (1, "int8_row", 4, "bfloat16"),
        ):
            desc = AddNormDesc(tokens, width, "bfloat16", 0, 1e-6, "bfloat16", quantization)
            desc = dataclasses.replace(desc, top_k=top_k, shared_dtype=shared)
            slots = (tokens, top_k)
            shapes = (((tokens, width), desc.dtype), ((width,), desc.dtype), ((top_k * 16, width), desc.dtype))
            shapes += ((slots, "int32"), (slots, "float32"), *[((tokens, width), str(shared))] * bool(shared))
            if config_error(desc, choose_norm(desc, SMS)) is None:
                name = f"add_and_norm {width}, {tokens} rows of {top_k} experts, {quantization}"
                yield Case(name, add_and_norm_sm90(desc, choose_norm(desc, SMS)), shapes)


def rotate_and_store_cases() -> Iterator[Case]:
    for width in (64, 128, 256):
        for is_packed, is_e4m3 in ((True, False), (False, False), (True, True), (False, True)):
            dtype, has_norm = "float16" if width == 256 else "bfloat16", width != 64
            desc = RotateDesc(4, 2, 32, 4, width, 256, dtype, is_packed, has_norm, 1e-6, is_e4m3=is_e4m3)
            columns = [40 * width] if is_packed else [32 * width, 4 * width, 4 * width]
            shapes: list[Shape] = [((4, 4, 256, width), "float8_e4m3fn" if is_e4m3 else dtype)] * 2
            shapes += [((4, 2, count), dtype) for count in columns] + [((4, 2, width // 2), "float32")] * 2
            shapes += [((width,), dtype)] * (2 * has_norm) + [((2,), "float32")] * is_e4m3 + [((4,), "int32")] * 3
            kernel = rotate_and_store_sm90(desc, choose_rotate(desc, SMS))
            form = f"{', packed' if is_packed else ''}{', e4m3' if is_e4m3 else ''}"
            yield Case(f"rotate_and_store {width}{form}", kernel, tuple(shapes))
            if is_packed:
                kernel = rotate_and_store_sm90(dataclasses.replace(desc, num_pages=9), choose_rotate(desc, SMS))
                pages = ((9, 4, 64, width), shapes[0][1])
                of_pages = (pages, pages, *shapes[2:], ((4, 4), "int32"))
                yield Case(f"rotate_and_store {width}{form}, pages", kernel, of_pages)
        for is_e4m3 in (False, True):
            desc = dataclasses.replace(desc, is_packed=True, is_e4m3=is_e4m3, num_parts=4, part_dtype="float32")
            shapes = [((4, 4, 256, width), "float8_e4m3fn" if is_e4m3 else dtype)] * 2
            shapes += [((4, 16, 40 * width), "float32")] + [((4, 2, width // 2), "float32")] * 2
            shapes += [((width,), dtype)] * (2 * has_norm) + [((2,), "float32")] * is_e4m3 + [((4,), "int32")] * 3
            kernel = rotate_and_store_sm90(desc, choose_rotate(desc, SMS))
            form = f"{width}, 4 parts{', e4m3' if is_e4m3 else ''}"
            yield Case(f"rotate_and_store {form}", kernel, tuple(shapes))
            kernel = rotate_and_store_sm90(dataclasses.replace(desc, has_bias=True), choose_rotate(desc, SMS))
            shapes[3:3] = [((count * width,), dtype) for count in (32, 4, 4)]
            yield Case(f"rotate_and_store {form}, biases", kernel, tuple(shapes))


def multiply_heads_cases() -> Iterator[Case]:
    """DeepSeek-V3's two products, one token and several tiles; more steps than stages; a narrow part."""
    for tokens, dtype in ((1, "bfloat16"), (16, "float16"), (200, "bfloat16")):
        for desc in (
            HeadsDesc(tokens, 128, 0, 128, 256, 512, dtype, transposes_w=False, x_columns=192),
            HeadsDesc(tokens, 128, 128, 128, 256, 512, dtype, transposes_w=True, x_columns=512),
            HeadsDesc(tokens, 20, 192, 256, 448, 512, dtype, transposes_w=True, x_columns=512),
            HeadsDesc(tokens, 16, 64, 192, 264, 128, dtype, transposes_w=False, x_columns=192),
        ):
            shapes: tuple[Shape, ...] = (((tokens, desc.num_heads, desc.x_columns), dtype),)
            shapes += (((desc.num_heads, desc.all_rows, desc.columns), dtype),)
            config = choose_heads(desc)
            name = f"multiply_heads {tokens} x {desc.depth} x {desc.width}, {config.num_stages} stages"
            yield Case(name, multiply_heads_sm90(desc, config), shapes, "HGMMA")


def store_latents_cases() -> Iterator[Case]:
    """DeepSeek-V3's rows in each quantization; rows whose first columns are not read; a narrow latent in pages."""
    deepseek = LatentsDesc(16, 1, 1536, 512, 64, 1024, "bfloat16", 1e-6, is_interleaved=True, has_queries=True)
    for quantization in QUANTIZATIONS:
        yield _store_latents_case(dataclasses.replace(deepseek, quantization=quantization, scale_rows=64))
    yield _store_latents_case(dataclasses.replace(deepseek, queries=3072, has_queries=False))
    narrow = dict(num_tokens=5, queries=640, rank=192, rope=32, dtype="float16", is_interleaved=False, num_pages=40)
    yield _store_latents_case(dataclasses.replace(deepseek, **narrow))


def _store_latents_case(desc: LatentsDesc) -> Case:
    tokens, width = desc.batch * desc.num_tokens, desc.rank + desc.rope
    slots = (desc.num_pages, 1, 64, width) if desc.num_pages else (desc.batch, 1, desc.num_slots, width)
    shapes: tuple[Shape, ...] = ((slots, desc.dtype), ((tokens, desc.queries + width), desc.dtype))
    shapes += (((desc.queries,), desc.dtype),) * desc.has_queries
    shapes += (((desc.rank,), desc.dtype), *[((desc.batch, desc.num_tokens, desc.rope // 2), "float32")] * 2)
    shapes += (((desc.batch,), "int32"),) * 3
    shapes += (((desc.batch, desc.num_slots // 64), "int32"),) * bool(desc.num_pages)
    kind = f"{desc.queries} columns in {desc.quantization}" if desc.has_queries else "the latent alone"
    name = f"store_latents {desc.rank} + {desc.rope}, {kind}{', pages' * bool(desc.num_pages)}"
    return Case(name, store_latents_sm90(desc, choose_latents(desc, SMS)), shapes)
