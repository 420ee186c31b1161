"""Every form of the decode attention kernels."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.common.pages import PAGE_SLOTS
from pallas_kernels.decode_attention.api import rows_of
from pallas_kernels.decode_attention.combine_quantized_sm90 import combine_quantized_sm90
from pallas_kernels.decode_attention.combine_sm90 import combine_sm90
from pallas_kernels.decode_attention.config import (
    E4M3_WIDTHS,
    DecodeConfig,
    DecodeDesc,
    DecodeForm,
    choose_config,
    config_error,
    quantizing_error,
)
from pallas_kernels.decode_attention.kernel_sm90 import decode_sm90
from pallas_kernels.decode_attention.latents_sm90 import latents_sm90
from pallas_kernels.decode_attention.schedule import make_schedule
from pallas_kernels.quantize_and_permute.config import WITH_SCALES
from tests.support.kernels.case import Case, Shape

SMS = 132
WIDTHS = ((64, 64), (128, 128), (192, 128), (192, 192), (256, 256))
DECODES: dict[str, dict[str, Any]] = {
    "one query": {},
    "window": dict(window=150),
    "sinks": dict(has_sinks=True),
    "three queries, window, sinks": dict(num_queries=3, window=150, has_sinks=True),
    "many slots": dict(num_slots=70_000),
}


def decode_desc(width: int, value_width: int, dtype: str = "bfloat16", **options: Any) -> DecodeDesc:
    """Three rows with 712 slots and 16 heads, 8 to a key head, but for what ``options`` say."""
    desc = DecodeDesc(3, 1, 712, 16, 2, width, value_width, dtype, width**-0.5)
    return dataclasses.replace(desc, **options)


def decode_case(name: str, desc: DecodeDesc, config: DecodeConfig, quantization: str = "none") -> Case:
    caches = (desc.batch, desc.num_kv_heads, desc.num_slots)
    caches = (desc.num_pages, desc.num_kv_heads, PAGE_SLOTS) if desc.num_pages else caches
    columns, stored = config.num_tiles(desc) * config.columns, "float8_e4m3fn" if desc.is_e4m3 else desc.dtype
    shapes: list[Shape] = [
        ((desc.batch, desc.num_kv_heads, columns, desc.width), desc.dtype),
        ((*caches, desc.width), stored),
    ]
    shapes += [] if desc.is_latent else [((*caches, desc.value_width), stored)]
    shapes += [((2,), "float32")] * desc.is_e4m3
    shapes += [((desc.batch, desc.num_slots // PAGE_SLOTS), "int32")] * (desc.num_pages > 0)
    shapes += [((desc.batch,), "int32")] * 3
    shapes += [(array.shape, "int32") for array in schedule_of(desc, config)]
    shapes += [((desc.num_heads,), desc.dtype)] * (config.whole_tiles and desc.has_sinks)
    name = f"{name}, e4m3" if desc.is_e4m3 else name
    name = f"{name}, pages" if desc.num_pages else name
    form = f"{desc.width}/{desc.value_width} {desc.dtype} {name}, steps of {config.block_kv}"
    if config.whole_tiles and config.swap_ab:
        rows = None if quantization == "none" else rows_of(desc, quantization, None)
        kernel = decode_sm90(desc, config, rows)
    else:
        kernel = (decode_sm90 if config.swap_ab else latents_sm90)(desc, config)
    return Case(f"decode {form}", kernel, tuple(shapes), "HGMMA")


def schedule_of(desc: DecodeDesc, config: DecodeConfig) -> tuple[jax.ShapeDtypeStruct, ...]:
    if not config.runs:
        return ()
    rows = [jax.ShapeDtypeStruct((desc.batch,), jnp.int32)] * 3
    return jax.eval_shape(functools.partial(make_schedule, desc, config), *rows)


def combine_case(name: str, desc: DecodeDesc, config: DecodeConfig) -> Case:
    stats = config.all_tiles(desc) * config.num_splits(desc) * config.columns
    shapes: list[Shape] = [((stats * desc.value_width,), "float32"), *[((stats,), "float32")] * 2]
    shapes += [((desc.batch,), "int32")] * 3 + [((1,), "int32")] * config.runs + [((2,), "float32")] * desc.is_e4m3
    shapes += [((desc.num_heads,), desc.dtype)] * desc.has_sinks
    name = f"{name}, e4m3" if desc.is_e4m3 else name
    form = f"{desc.value_width} {desc.dtype} {name}"
    return Case(f"decode combine {form}", combine_sm90(desc, config), tuple(shapes))


def in_two_launches(desc: DecodeDesc) -> DecodeConfig:
    """That ``desc`` has, or would have with longer rows."""
    config = choose_config(desc, SMS)
    return dataclasses.replace(config, whole_tiles=False, runs=config.swap_ab) if config.whole_tiles else config


def combine_quantized_case(quantization: str, desc: DecodeDesc) -> Case:
    config, rows = in_two_launches(desc), rows_of(desc, quantization, 64)
    assert quantizing_error(desc, config, rows) is None
    plain = combine_case("", desc, config)
    name = f"decode combine {desc.num_kv_heads} x {desc.group} heads, {quantization}{', e4m3' * desc.is_e4m3}"
    return Case(f"{name}{', sinks' * desc.has_sinks}", combine_quantized_sm90(desc, config, rows), plain.shapes)


def combine_quantized_cases() -> Iterator[Case]:
    """The sum of the splits with the quantization behind it: four key heads, and as many registers as there are."""
    for quantization in WITH_SCALES:
        own = dict(batch=64, num_slots=1024, num_heads=32, num_kv_heads=4)
        yield combine_quantized_case(quantization, decode_desc(128, 128, **own))
        wide = own | dict(num_heads=64, num_kv_heads=8, has_sinks=True, is_e4m3=True)
        yield combine_quantized_case(quantization, decode_desc(128, 128, **wide))
    yield combine_quantized_case("e4m3_group", decode_desc(128, 128, **(own | dict(num_heads=32, num_kv_heads=1))))


def decode_cases() -> Iterator[Case]:
    """Each width and form, and the other size of a step. Sinks are an input of the second launch alone."""
    for widths in WIDTHS:
        for name, options in DECODES.items():
            for dtype in ("bfloat16", "float16"):
                desc = decode_desc(*widths, dtype, **options)
                if name != "sinks":
                    yield decode_case(name, desc, choose_config(desc, SMS))
        if max(widths) <= 128:
            long: dict[str, Any] = dict(num_slots=69_952, num_pages=9_999, window=150)
            for own in ({}, long, dict(num_heads=32, batch=67), dict(num_heads=32, batch=67, **long)):
                desc = dataclasses.replace(decode_desc(*widths, batch=64), **own)
                config = choose_config(desc, SMS)
                name = f"two CTAs an SM, {desc.num_slots} slots, {config.columns} columns"
                yield decode_case(name, desc, config)
        desc = decode_desc(*widths, num_queries=3, window=150, has_sinks=True)
        if widths[0] == widths[1]:
            yield combine_case("three queries, window, sinks", desc, choose_config(desc, SMS))
            many = decode_desc(*widths, num_slots=70_000)
            yield combine_case("many slots", many, choose_config(many, SMS))
        for columns, block_kv in ((8, 64), (8, 128), (32, 64), (32, 128)):
            other = DecodeConfig(columns, 512, block_kv, 2, SMS)
            if config_error(desc, other) is None:
                yield decode_case(f"{columns} columns", desc, other)
    for width in E4M3_WIDTHS:
        for name, options in DECODES.items():
            dtype = "float16" if name == "window" else "bfloat16"
            desc = decode_desc(width, width, dtype, is_e4m3=True, **options)
            config = choose_config(desc, SMS)
            yield combine_case(name, desc, config)
            if name != "sinks":
                yield decode_case(name, desc, config)
        for is_e4m3 in (False, True):
            desc = decode_desc(width, width, num_slots=704, num_pages=40, is_e4m3=is_e4m3)
            yield decode_case("one query", desc, choose_config(desc, SMS))
    # Runs in the forms that hold most; those with two CTAs an SM are above.
    for name, widths, own in (
        ("of wide heads", (256, 256), {}),
        ("of 16 query heads", (128, 128), dict(num_heads=32)),
        ("of three queries", (64, 64), dict(num_queries=3, window=150)),
        ("of codes", (128, 128), dict(is_e4m3=True)),
    ):
        desc = decode_desc(*widths, batch=132, **own)
        config = in_two_launches(desc)
        assert config.runs
        yield decode_case(f"runs {name}", desc, config)
        yield combine_case(f"runs {name}", desc, config)
    # Whole tiles: two CTAs an SM, and the forms that hold most.
    for name, widths, quantization, own in (
        ("", (128, 128), "none", {}),
        ("", (128, 128), "e4m3_group", dict(num_slots=704, num_pages=40)),
        (" with sinks", (64, 64), "none", dict(has_sinks=True, window=150)),
        (" of wide heads", (256, 256), "none", {}),
        (" of 16 query heads", (128, 128), "e4m3_group_ue8m0", dict(num_heads=32, has_sinks=True)),
        (" of two queries", (64, 64), "none", dict(num_queries=2)),
        (" of codes", (128, 128), "e4m3_group", dict(is_e4m3=True)),
    ):
        desc = decode_desc(*widths, batch=132, **own)
        config = choose_config(desc, SMS)
        assert config.whole_tiles
        yield decode_case(f"whole tiles{name}, {quantization}", desc, config, quantization)
    for name, options in DECODES.items():
        desc = decode_desc(576, 512, num_heads=128, num_kv_heads=1, is_latent=True, **options)
        config = choose_config(desc, SMS, DecodeForm())
        if name != "sinks":
            yield decode_case(f"latent, {name}", desc, config)
        yield combine_case(f"latent, {name}", desc, config)
        rows = DecodeConfig(64, 256, 64, 2, SMS, swap_ab=False)
        if name not in ("sinks", "many slots"):  # the last spills 8 bytes
            yield decode_case(f"latent, {name}, queries are rows", desc, rows)
        yield combine_case(f"latent, {name}, queries are rows", desc, rows)
    desc = decode_desc(576, 512, batch=64, num_slots=1032, num_heads=128, num_kv_heads=1, is_latent=True)
    assert choose_config(desc, SMS).whole_tiles
    yield decode_case("latent, whole tiles", desc, choose_config(desc, SMS))
    for batch in (16, 64):
        own = dict(batch=batch, num_slots=8192, num_heads=128, num_kv_heads=1, is_latent=True)
        desc = decode_desc(576, 512, **own)
        yield decode_case(f"latent, {batch} rows of 8192 slots", desc, choose_config(desc, SMS))
        yield combine_case(f"latent, {batch} rows of 8192 slots", desc, choose_config(desc, SMS))
