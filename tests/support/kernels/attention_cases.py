"""Every form of the attention kernels."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from pallas_kernels.attention import PrefillConfig, PrefillDesc, choose_config, config_error
from pallas_kernels.attention.config import BLOCK_Q
from pallas_kernels.attention.kernel_sm90 import prefill_sm90
from pallas_kernels.common.pages import PAGE_SLOTS
from tests.support.kernels.case import Case

SMS = 132
WIDTHS = ((64, 64), (128, 128), (192, 128), (192, 192), (256, 256))
PREFILLS = {
    "causal": {},
    "window": dict(window=150),
    "sinks": dict(has_sinks=True),
    "window, sinks": dict(window=150, has_sinks=True),
    "not causal": dict(is_causal=False),
    "sequences": dict(has_sequences=True),
    "sequences, window, sinks": dict(window=150, has_sinks=True, has_sequences=True),
}


def prefill_desc(width: int, value_width: int, dtype: str = "bfloat16", **options: object) -> PrefillDesc:
    sizes: Any = dict(batch=2, num_queries=304, num_slots=712, num_heads=8, num_kv_heads=2)
    desc = PrefillDesc(**sizes, width=width, value_width=value_width, dtype=dtype, scale=width**-0.5)
    return dataclasses.replace(desc, **options)


def prefill_case(name: str, desc: PrefillDesc, config: PrefillConfig) -> Case:
    rows, caches = desc.batch, (desc.batch, desc.num_kv_heads, desc.num_slots)
    caches = (desc.num_pages, desc.num_kv_heads, PAGE_SLOTS) if desc.num_pages else caches
    shapes = [
        ((rows, desc.num_queries, desc.num_heads, desc.width), desc.dtype),
        ((*caches, desc.width), desc.dtype),
        ((*caches, desc.value_width), desc.dtype),
        *[((rows,), "int32")] * 3,
        *[((rows, desc.num_slots // PAGE_SLOTS), "int32")] * (desc.num_pages > 0),
    ]
    if desc.has_sequences:
        shapes += [((rows, desc.query_tiles * BLOCK_Q), "int32")]
        shapes += [((rows,), "int32")] if desc.window is None else []
    if desc.has_sinks:
        shapes.append(((desc.num_heads,), "float32"))
    if desc.has_scales:
        shapes += [((1,), "float32")] * 2
    form = f"{desc.width}/{desc.value_width} {desc.dtype} {name}, steps of {config.block_kv}"
    form += ", pages" if desc.num_pages else ""
    form += ", scales" if desc.has_scales else ""
    return Case(f"prefill {form}", prefill_sm90(desc, config), tuple(shapes), "HGMMA")


def prefill_cases() -> Iterator[Case]:
    """Each width and form as it is chosen, and what can be asked for beside it."""
    for widths in WIDTHS:
        for name, options in PREFILLS.items():
            for dtype in ("bfloat16", "float16"):
                desc = prefill_desc(*widths, dtype, **options)
                yield prefill_case(name, desc, choose_config(desc, SMS))
        for name in ("causal", "window", "sinks"):
            desc = prefill_desc(*widths, num_slots=704, num_pages=40, **PREFILLS[name])
            yield prefill_case(name, desc, choose_config(desc, SMS))
        for name, options in PREFILLS.items() if widths[0] == widths[1] else ():
            desc = prefill_desc(*widths, has_scales=True, **options)
            yield prefill_case(name, desc, choose_config(desc, SMS))
        desc = prefill_desc(*widths)
        chosen = choose_config(desc, SMS)
        narrow = dataclasses.replace(chosen, block_kv=64)
        if chosen.block_kv > 64 and config_error(desc, narrow) is None:
            yield prefill_case("causal", desc, narrow)
