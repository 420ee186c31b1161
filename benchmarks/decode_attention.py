"""Decode attention on a Hopper GPU: the time of each of its kernels in other forms than the default.

    python benchmarks/decode_attention.py --out FILE [--only TEXT] [--limit 60]

A program attends in several layers, whose caches are together larger than the GPU's; its kernels are timed by JAX's
profiler, from the end of the kernels before them. The limit is reading the slots in use at 4385 GB/s. Each cell is a
process with a time limit: several compile at once, but only one of them times at a time. Every line goes to FILE as
soon as it is known.
"""

import argparse
import dataclasses
import fcntl
import functools
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from _timing import header
from _workers import emit, lines_of, say

from pallas_kernels.decode_attention.config import (
    FEW,
    FULL_LATENTS,
    MANY_LATENTS,
    DecodeDesc,
    DecodeForm,
    choose_config,
)

READ_GBPS = 4385.0  # of an H200, measured
SMS = 132
AT_ONCE = 8  # processes
CALLS = 5
CACHES_BYTES = 150e6  # of all layers: more than an L2 holds
WHOLE_TILES, IN_RUNS, WITHOUT_RUNS, BY_XLA = "whole tiles", "runs", "without runs", "XLA"
Way = DecodeForm | str | None  # a form, the default's with whole tiles, runs or neither, by XLA, or the default


@dataclasses.dataclass(frozen=True)
class Cell:
    """A call. length: of all rows, with is_ragged the most that one has, with others of the first row alone."""

    name: str
    batch: int
    slots: int
    heads: int
    kv_heads: int
    width: int
    value_width: int
    length: int
    window: int | None = None
    has_sinks: bool = False
    is_ragged: bool = False
    others: int | None = None
    is_e4m3: bool = False

    @property
    def is_latent(self) -> bool:
        """One array holds keys and, in their first elements, values."""
        return self.width == 576

    @property
    def desc(self) -> DecodeDesc:
        sizes = (self.batch, 1, self.slots, self.heads, self.kv_heads, self.width, self.value_width)
        options = (self.window, self.has_sinks, self.is_latent, self.is_e4m3)
        return DecodeDesc(*sizes, "bfloat16", self.width**-0.5, *options)


def _of(name: str, batch: int, tokens: int, shape: tuple[int, ...], **options: Any) -> Cell:
    """One more token is in use, the new one, of as many slots as ``generate`` makes."""
    return Cell(f"{name} {batch} x {tokens}", batch, -(-(tokens + 1) // 8) * 8, *shape, length=tokens + 1, **options)


QWEN, GPT, MLA = (32, 4, 128, 128), (64, 8, 64, 64), (128, 1, 576, 512)
ONE = dataclasses.replace(FEW, ctas_per_sm=1)
TWO = dataclasses.replace(FEW, ctas_per_sm=2)
# Two CTAs an SM have room for one stage of 128 slots.
STEPS_OF_64, STEPS_OF_128 = (dataclasses.replace(FEW, block_kv=slots, ctas_per_sm=1) for slots in (64, 128))
LONG = dataclasses.replace(FEW, doubles_at=(2048, 6144))
ONE_SPLIT = dataclasses.replace(FEW, split=1 << 17, doubles_at=())
CELLS: list[tuple[Cell, tuple[Way, ...]]] = [
    *[(_of("qwen3", batch, 1024, QWEN), (None, ONE, TWO, STEPS_OF_128, BY_XLA)) for batch in (1, 16, 64, 256)],
    *[
        (_of("qwen3 in e4m3", *sizes, QWEN, is_e4m3=True), (STEPS_OF_64, STEPS_OF_128))
        for sizes in ((1, 8192), (16, 1024), (64, 1024), (64, 8192))
    ],
    *[(_of("16 heads a key head", 64, tokens, (64, 4, 128, 128)), (None, ONE, TWO)) for tokens in (1024, 8192)],
    *[(_of("qwen3", batch, 8192, QWEN), (None, ONE, TWO, LONG, BY_XLA)) for batch in (1, 16, 64)],
    (_of("qwen3", 1, 32768, QWEN), (None, ONE, TWO, BY_XLA)),
    *[
        (_of("runs qwen3", *sizes, QWEN), (WHOLE_TILES, IN_RUNS, WITHOUT_RUNS, ONE_SPLIT))
        for sizes in ((64, 1024), (128, 1024), (256, 1024), (64, 8192))
    ],
    *[
        (_of("runs ragged qwen3", *sizes, QWEN, is_ragged=True), (WHOLE_TILES, IN_RUNS, WITHOUT_RUNS))
        for sizes in ((64, 1024), (64, 2040), (64, 4096), (256, 1024), (64, 8192))
    ],
    *[
        (_of("one long qwen3", 64, tokens, QWEN, others=128), (WHOLE_TILES, IN_RUNS, WITHOUT_RUNS))
        for tokens in (1024, 2040, 4096, 8192)
    ],
    (_of("gpt-oss sinks", 64, 1024, GPT, has_sinks=True), (None, IN_RUNS, WITHOUT_RUNS, ONE, TWO, BY_XLA)),
    *[
        (_of("gpt-oss window", rows, 8192, GPT, has_sinks=True, window=128), (None, IN_RUNS, WITHOUT_RUNS, ONE, TWO))
        for rows in (1, 16, 64)
    ],
    (_of("mixtral", 64, 1024, (32, 8, 128, 128)), (None, IN_RUNS, WITHOUT_RUNS, ONE, TWO)),
    *[(_of("mla", batch, 1024, MLA), (None, FEW, MANY_LATENTS)) for batch in (1, 4, 16)],
    *[(_of("mla", 64, tokens, MLA), (None, MANY_LATENTS)) for tokens in (1024, 8192)],
    (_of("mla", 16, 8192, MLA), (None, FULL_LATENTS)),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--only", default="", help="part of the name of a cell that is timed")
    parser.add_argument("--limit", type=float, default=60, help="seconds of a process, waiting included")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        measure(*CELLS[int(options.worker)], options.out)
        return
    wanted = [str(index) for index, (cell, _) in enumerate(CELLS) if options.only in cell.name]
    with open(options.out, "w") as out, tempfile.NamedTemporaryFile() as lock, ThreadPoolExecutor(AT_ONCE) as pool:
        command = [sys.executable, __file__, "--out", lock.name, "--worker"]
        say(header(), out)

        def run(index: str) -> None:
            for line in lines_of([*command, index], options.limit):
                say(line, out)

        list(pool.map(run, wanted))


# -- in a process of its own --------------------------------------------------------------------------------------


def measure(cell: Cell, ways: tuple[Way, ...], lock: str) -> None:
    import jax
    import jax.numpy as jnp
    from _trace import NO_COMMAND_BUFFERS, PAUSE, medians_alone, split, traced

    itemsize = 1 if cell.is_e4m3 else 2
    row_bytes = itemsize * cell.kv_heads * (cell.width + (0 if cell.is_latent else cell.value_width))
    counts = np.full(cell.batch, cell.length, np.int32)
    if cell.others is not None:
        counts[1:] = cell.others
    if cell.is_ragged:
        counts = np.random.default_rng(0).integers(1, cell.length + 1, cell.batch, np.int32)
    seen = int(np.minimum(counts, cell.window or cell.length).sum())
    number = max(2, min(12, round(CACHES_BYTES / (cell.batch * cell.slots * row_bytes))))
    keys = iter(jax.random.split(jax.random.key(0), 2 * number + 2))

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape, jnp.bfloat16)

    q, sinks = normal(cell.batch, 1, cell.heads, cell.width), normal(cell.heads) if cell.has_sinks else None
    widths = (cell.width,) if cell.is_latent else (cell.width, cell.value_width)
    stored = jnp.float8_e4m3fn if cell.is_e4m3 else jnp.bfloat16
    layers = [
        [normal(cell.batch, cell.kv_heads, cell.slots, width).astype(stored) for width in widths] for _ in range(number)
    ]
    lengths = jnp.asarray(counts)
    rows = (jnp.zeros_like(lengths), lengths, lengths - 1)
    programs = {}
    for way in ways:
        by = _xla if way == BY_XLA else functools.partial(_hopper, way)
        attend = jax.jit(functools.partial(by, cell, sinks))  # which is lowered once for all layers
        jitted = jax.jit(lambda q, layers, attend=attend: [attend(q, *layer, *rows) for layer in layers])
        name = way if isinstance(way, str) else _words(way)
        programs[name] = jitted.lower(q, layers).compile(compiler_options=NO_COMMAND_BUFFERS)
    with open(lock) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for program in programs.values():
            jax.block_until_ready(program(q, layers))
        with traced() as found:
            for program in programs.values():
                for _ in range(CALLS):
                    out = program(q, layers)
                jax.block_until_ready(out)
                time.sleep(2 * PAUSE)
    limit = seen * row_bytes / READ_GBPS / 1e3
    for name, part in zip(programs, split(found), strict=True):
        times = medians_alone(part, CALLS * number)
        each = ", ".join(f"{kernel} {us:.2f}" for kernel, us in times.items())
        total = sum(times.values())
        emit(f"{cell.name:30s} {name:50s} {total:8.2f} us, {limit / total:6.1%} of the limit ({limit:.1f} us): {each}")


def _words(form: DecodeForm | None) -> str:
    """What it has otherwise than FEW."""
    if form is None:
        return "default"
    fields = dataclasses.asdict(form).items()
    return ", ".join(f"{name}={value}" for name, value in fields if value != getattr(FEW, name)) or "FEW"


def _hopper(form: Way, cell: Cell, sinks: Any, q: Any, k: Any, *rest: Any) -> Any:
    import jax.numpy as jnp

    from pallas_kernels.decode_attention import decode_attention

    if isinstance(form, str):
        config = choose_config(cell.desc, SMS)
        config = dataclasses.replace(config, runs=form == IN_RUNS, whole_tiles=form == WHOLE_TILES)
    else:
        config = choose_config(cell.desc, SMS, form)
    options: dict[str, Any] = dict(scale=cell.width**-0.5, window=cell.window, sinks=sinks, config=config)
    arrays: Any = (q, k, None, *rest) if cell.is_latent else (q, k, *rest)
    options |= dict(value_width=cell.value_width) if cell.is_latent else {}
    options |= dict(scales=(jnp.ones(()), jnp.ones(()))) if cell.is_e4m3 else {}
    return decode_attention(*arrays, implementation="hopper", **options)


def _xla(cell: Cell, sinks: Any, q: Any, k: Any, *rest: Any) -> Any:
    """As ``moe_jax.models.attention`` computes it in plain jnp."""
    import jax.numpy as jnp

    from pallas_kernels.decode_attention.reference import visible_slots

    *v, starts, lengths, first_slots = rest
    v = v[0] if v else k[..., : cell.value_width]
    grouped = q.reshape(*q.shape[:2], cell.kv_heads, -1, cell.width)
    visible = visible_slots(cell.desc, starts, lengths, first_slots)
    scores = jnp.einsum("bsngd,bnld->bngsl", grouped, k, preferred_element_type=jnp.float32) * cell.width**-0.5
    scores = jnp.where(visible[:, None, None], scores, jnp.finfo(jnp.float32).min)
    top = scores.max(axis=-1, keepdims=True)
    extra = 0.0
    if sinks is not None:
        sinks = sinks.reshape(1, cell.kv_heads, -1, 1, 1)
        top = jnp.maximum(top, sinks)
        extra = jnp.exp(sinks - top)
    weights = jnp.exp(scores - top)
    weights = weights / (weights.sum(axis=-1, keepdims=True) + extra)
    y = jnp.einsum("bngsl,bnld->bsngd", weights.astype(v.dtype), v)
    return y.reshape(*q.shape[:3], -1)


if __name__ == "__main__":
    main()
