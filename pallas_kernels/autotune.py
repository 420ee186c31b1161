"""Time every candidate configuration of layers on the GPU at hand and write the fastest to a table.

    python -m pallas_kernels.autotune --layer 128,8,2048,768 --layer 8,2,4096,14336 --formats fp8_channel,fp8_block \
        --tokens 1,16,64,256,512,1024,2048,4096,8192 [--out FILE]

A layer is experts,top_k,hidden,intermediate of one device's shard. Random values, uniform routing. The table of this
kind of device is extended in place; --out names another file.
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from pallas_kernels.common.device import device_kind, hopper_sms
from pallas_kernels.grouped_gemm import GemmDesc, grouped_gemm
from pallas_kernels.grouped_gemm.packed import grouped_gemm_packed
from pallas_kernels.tuning import timing
from pallas_kernels.tuning.layer import FORMATS, PACKED_FORMATS, AnyConfig, AnyDesc, AnyKey, key_of
from pallas_kernels.tuning.operands import random_operands, random_routings
from pallas_kernels.tuning.search import Timer, tune
from pallas_kernels.tuning.table import path_for, update


class GpuTimer:
    """Microseconds of one product inside jit on the default device; keeps the operands of the last description."""

    def __init__(self) -> None:
        self._held: tuple[Any, Any] = (None, None)

    def __call__(self, desc: AnyDesc, config: AnyConfig, key: AnyKey, num_tokens: int) -> float:
        asked = (desc, config.block_m, num_tokens)
        if self._held[0] != asked:
            self._held = (None, None)  # before the new ones are made: both may not fit
            routings = random_routings(desc, config.block_m, key, num_tokens, timing.calls_of(num_tokens))
            self._held = (asked, (routings, *random_operands(desc, config.block_m, key)))
        run, held = jax.jit(products_of(desc, config)), self._held[1]
        return timing.least_of_bursts(lambda: run(*held)) / timing.calls_of(num_tokens) * 1e6


def products_of(desc: AnyDesc, config: AnyConfig) -> Callable[[list[Any], Any, Any, dict[str, Any]], list[Any]]:
    """(``random_routings``, x, w, scales by name) -> each one's product; the kernel is lowered once."""
    static: dict[str, Any] = dict(activation=desc.activation, out_dtype=desc.out_dtype, config=config)
    if isinstance(desc, GemmDesc):
        static["requantize"] = desc.requantize
    gemm: Any = grouped_gemm if isinstance(desc, GemmDesc) else grouped_gemm_packed
    one = jax.jit(lambda routing, x, w, scales: gemm(x, w, **routing, **scales, **static, implementation="hopper"))
    return lambda routings, *operands: [one(routing, *operands) for routing in routings]


def main(arguments: Sequence[str] | None = None, timer: Timer | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layer", action="append", required=True, metavar="E,TOP_K,H,I")
    parser.add_argument("--formats", default=",".join((*FORMATS, *PACKED_FORMATS)))
    parser.add_argument("--tokens", default="1,16,64,256,512,1024,2048,4096,8192")
    parser.add_argument("--not-gated", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    tokens, keys = _positive(options.tokens), []
    if tokens is None:
        parser.error(f"--tokens {options.tokens}: expected positive integers, with commas between them")
    for layer in options.layer:
        match _positive(layer):
            case [experts, top_k, hidden_size, intermediate_size] if top_k <= experts:
                pass
            case _:
                parser.error(f"--layer {layer}: expected four positive integers, experts,top_k,hidden,intermediate")
        for name in options.formats.split(","):
            if name not in FORMATS and name not in PACKED_FORMATS:
                parser.error(f"--formats {name}: there are {', '.join((*FORMATS, *PACKED_FORMATS))}")
            sizes = (experts, top_k, hidden_size, intermediate_size)
            keys.append(key_of(name, *sizes, projections=1 if options.not_gated else 2))
    try:
        num_sms = hopper_sms()
    except NotImplementedError as error:
        parser.error(f"nothing to tune here: {error}")
    path = options.out or path_for(device_kind())
    try:
        update(path, device_kind(), ())  # fails before anything is timed
    except ValueError as error:
        parser.error(f"{error} with --out")
    timer = timer or GpuTimer()
    for key in keys:
        # Saved after each layer: a run that is cut short loses one.
        found = tune([key], tokens, timer, num_sms, report=print)
        update(path, device_kind(), found)
        for entry in found:
            print(f"{dataclasses.astuple(entry.key)} tokens={entry.tokens}: {entry.micros:.1f} us {entry.config}")
    return 0


def _positive(text: str) -> list[int] | None:
    """Integers above zero with commas between them; None for anything else."""
    words = text.split(",")
    return [int(word) for word in words] if all(word.isdecimal() and int(word) > 0 for word in words) else None


if __name__ == "__main__":
    sys.exit(main())
