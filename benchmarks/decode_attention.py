"""Decode attention on a Hopper GPU: how fast is it, and is every form right. About a minute.

    python benchmarks/decode_attention.py --out FILE [--only TEXT] [--skip-checks] [--skip-times] [--limit 60]

First candidates are timed: microseconds of a call within a loop of one program, and the fraction of the limit, which is
reading the slots in use at 4385 GB/s. "nothing" is such a loop around a sum of as many elements as the output has: what
a turn costs without attention. Then every form is compared with NumPy. Each candidate and each group of checks is a
process with a time limit; several compile at once, but only one of them times at a time. Every line goes to FILE as
soon as it is known.
"""

import argparse
import dataclasses
import fcntl
import functools
import queue
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from _workers import emit, in_turns, lines_of, microseconds, say

from pallas_kernels.decode_attention.config import DecodeConfig, DecodeDesc, DecodeForm, choose_config, config_error

READ_GBPS = 4385.0  # of an H200, measured
SMS = 132
AT_ONCE = 6  # processes
CALLS = 8  # in one turn of a loop, whose condition the host waits for


def fitted(desc: DecodeDesc, split: int, block_kv: int, per_sm: int = 1) -> DecodeConfig | None:
    """With as many stages as fit where an SM holds ``per_sm`` CTAs; 0: queries are the rows of products."""
    config = choose_config(desc, SMS, DecodeForm(split, block_kv, per_sm or 1, swap_ab=per_sm > 0))
    is_asked_for = config.block_kv == block_kv and config.swap_ab == (per_sm > 0)
    return config if is_asked_for and config_error(desc, config) is None else None


@dataclasses.dataclass(frozen=True)
class Cell:
    """A call. lengths: of the rows; None for all slots. ragged: lengths from 1 to the slots."""

    name: str
    batch: int
    slots: int
    heads: int
    kv_heads: int
    width: int
    value_width: int
    queries: int = 1
    dtype: str = "bfloat16"
    window: int | None = None
    has_sinks: bool = False
    length: int | None = None
    is_ragged: bool = False

    @property
    def is_latent(self) -> bool:
        """One array holds keys and, in their first elements, values."""
        return self.width == 576

    @property
    def desc(self) -> DecodeDesc:
        return DecodeDesc(
            self.batch,
            self.queries,
            self.slots,
            self.heads,
            self.kv_heads,
            self.width,
            self.value_width,
            self.dtype,
            self.width**-0.5,
            self.window,
            self.has_sinks,
            self.is_latent,
        )


QWEN, GPT, MLA = (32, 4, 128, 128), (64, 8, 64, 64), (128, 1, 576, 512)
CELLS = {
    cell.name: cell
    for cell in (
        Cell("qwen3 64 x 1024", 64, 1024, *QWEN),
        Cell("qwen3 1 x 1024", 1, 1024, *QWEN),
        Cell("qwen3 1 x 32768", 1, 32768, *QWEN),
        Cell("qwen3 64 x 1024 of 8192", 64, 8192, *QWEN, length=1024),
        Cell("qwen3 64 x 1 to 2048", 64, 2048, *QWEN, is_ragged=True),
        Cell("gpt-oss 64 x 1024 sinks", 64, 1024, *GPT, has_sinks=True),
        Cell("gpt-oss 64 x 8192 window 128", 64, 8192, *GPT, has_sinks=True, window=128),
        Cell("mixtral 64 x 1024", 64, 1024, 32, 8, 128, 128),
        Cell("mla 64 x 1024", 64, 1024, *MLA),
        Cell("mla 1 x 1024", 1, 1024, *MLA),
        Cell("256 16 x 4096", 16, 4096, 16, 2, 256, 256),
    )
}
# (cell, split, block_kv, CTAs of an SM), or (cell, "XLA"). 0 CTAs: queries are rows.
TIMES: list[tuple[Any, ...]] = [
    ("qwen3 64 x 1024", "XLA"),
    ("qwen3 64 x 1024", 256, 128, 1),
    ("qwen3 64 x 1024", 256, 64, 2),
    ("qwen3 64 x 1024", 512, 128, 1),
    ("qwen3 1 x 1024", "XLA"),
    ("qwen3 1 x 1024", 256, 128, 1),
    ("qwen3 1 x 1024", 128, 128, 1),
    ("qwen3 1 x 1024", 64, 64, 1),
    ("qwen3 1 x 32768", "XLA"),
    ("qwen3 1 x 32768", 256, 128, 1),
    ("qwen3 1 x 32768", 512, 128, 1),
    ("qwen3 64 x 1 to 2048", 256, 128, 1),
    ("qwen3 64 x 1024 of 8192", 256, 128, 1),
    ("gpt-oss 64 x 1024 sinks", "XLA"),
    ("gpt-oss 64 x 1024 sinks", 256, 128, 1),
    ("gpt-oss 64 x 8192 window 128", 256, 128, 1),
    ("mixtral 64 x 1024", 256, 128, 1),
    ("mla 64 x 1024", "XLA"),
    ("mla 64 x 1024", 256, 64, 0),
    ("mla 64 x 1024", 512, 64, 0),
    ("mla 1 x 1024", "XLA"),
    ("mla 1 x 1024", 256, 64, 1),
    ("256 16 x 4096", 256, 64, 1),
]
CHECKS: list[list[tuple[Cell, tuple[int, int, int]]]] = [
    [
        (Cell("qwen3 ragged", 9, 1000, *QWEN, is_ragged=True), (256, 128, 1)),
        (Cell("gpt-oss window sinks", 5, 1400, *GPT, window=128, has_sinks=True, is_ragged=True), (256, 128, 1)),
    ],
    [
        (Cell("one row of 8192", 1, 8192, *QWEN), (256, 64, 2)),
        (Cell("f16, 4 heads, 3 queries", 5, 776, 8, 2, 128, 128, 3, "float16", is_ragged=True), (128, 64, 2)),
    ],
    [
        (Cell("192/128", 4, 776, 16, 2, 192, 128, is_ragged=True), (256, 64, 2)),
        (Cell("64, 8 queries, window", 4, 776, 16, 2, 64, 64, 8, window=50, is_ragged=True), (256, 64, 2)),
    ],
    [(Cell("256, sinks", 4, 776, 20, 2, 256, 256, has_sinks=True, is_ragged=True), (256, 64, 1))],
    [(Cell("mla", 4, 776, *MLA, is_ragged=True), (256, 64, 0))],
    [(Cell("qwen3 ragged", 9, 1000, *QWEN, is_ragged=True), (128, 128, 1))],
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--only", default="", help="part of the name of a cell that is timed")
    parser.add_argument("--limit", type=float, default=60, help="seconds of a process, waiting included")
    parser.add_argument("--skip-checks", action="store_true")
    parser.add_argument("--skip-times", action="store_true")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        kind, index = options.worker
        dict(check=check, times=times)[kind](int(index), options.out)
        return
    began, lines = time.time(), queue.Queue()
    with open(options.out, "w") as out, tempfile.NamedTemporaryFile() as lock:

        def run(kind: str, index: int) -> None:
            command = [sys.executable, __file__, "--out", lock.name, "--worker", kind, str(index)]
            for line in lines_of(command, options.limit):
                lines.put(line)

        wanted = [index for index, (name, *_) in enumerate(TIMES) if options.only in name]
        kinds = {"times": [] if options.skip_times else wanted}
        kinds["check"] = [] if options.skip_checks else list(range(len(CHECKS)))
        for kind, jobs in kinds.items():
            with ThreadPoolExecutor(AT_ONCE) as pool:
                left = [pool.submit(run, kind, index) for index in jobs]
                while not all(job.done() for job in left) or not lines.empty():
                    try:
                        line = lines.get(timeout=0.2)
                    except queue.Empty:
                        continue
                    say(line, out)
            out.write(f"# {time.time() - began:.0f} s after {kind}\n")


# -- in a process of its own --------------------------------------------------------------------------------------


def _arrays(cell: Cell, is_timed: bool = True) -> tuple[tuple[Any, ...], Any]:
    """((q, k, [v], starts, lengths, first_slots), sinks); NaN in slots that are not in use where it is not timed."""
    import jax.numpy as jnp
    import numpy as np

    rng = np.random.default_rng(0)
    shapes = [
        (cell.batch, cell.queries, cell.heads, cell.width),
        (cell.batch, cell.kv_heads, cell.slots, cell.width),
        (cell.batch, cell.kv_heads, cell.slots, cell.value_width),
    ]
    if cell.is_latent:
        shapes.pop()

    def normal(shape):
        """One row is drawn where only time counts."""
        drawn = rng.standard_normal((1, *shape[1:]) if is_timed else shape, np.float32)
        return np.broadcast_to(drawn, shape)

    arrays = [normal(shape) for shape in shapes]
    sinks = rng.standard_normal(cell.heads).astype(np.float32) if cell.has_sinks else None
    starts, lengths = np.zeros(cell.batch, np.int32), np.full(cell.batch, cell.length or cell.slots, np.int32)
    if cell.is_ragged:
        lengths = np.linspace(max(cell.queries, cell.slots // 64), cell.slots, cell.batch).astype(np.int32)
        lengths = rng.permutation(lengths)
        if not is_timed:
            starts = np.minimum(rng.integers(0, 300, cell.batch), lengths - 1).astype(np.int32)
            starts[0], lengths[-1], starts[-1] = 0, 0, 0
    if not is_timed:
        outside = (np.arange(cell.slots) < starts[:, None]) | (np.arange(cell.slots) >= lengths[:, None])
        arrays[1:] = [np.where(outside[:, None, :, None], np.nan, array) for array in arrays[1:]]
    rows = (starts, lengths, np.maximum(lengths - cell.queries, 0).astype(np.int32))
    cast = [jnp.asarray(array.astype(jnp.dtype(cell.dtype))) for array in arrays]
    return (*cast, *map(jnp.asarray, rows)), None if sinks is None else jnp.asarray(sinks)


def _expected(cell: Cell, arrays: tuple[Any, ...], sinks: Any) -> Any:
    """In NumPy, float32."""
    import numpy as np

    q, k, *v = (np.asarray(array, np.float32) for array in arrays[:-3])
    v = v[0] if v else k[..., : cell.value_width]
    starts, lengths, first_slots = map(np.asarray, arrays[-3:])
    found = np.zeros((*q.shape[:3], cell.value_width), np.float32)
    group = cell.heads // cell.kv_heads
    for b, s in np.ndindex(*q.shape[:2]):
        own = int(first_slots[b]) + s
        low = max(int(starts[b]), own - cell.window + 1 if cell.window else 0)
        high = min(int(lengths[b]), own + 1)
        for m in range(cell.kv_heads if high > low else 0):
            heads = slice(m * group, (m + 1) * group)
            scores = q[b, s, heads] @ k[b, m, low:high].T * cell.width**-0.5
            sink = np.full((group, 1), -np.inf, np.float32) if sinks is None else np.asarray(sinks)[heads, None]
            top = np.maximum(scores.max(-1, keepdims=True), sink)
            weights = np.exp(scores - top)
            total = weights.sum(-1, keepdims=True) + np.exp(sink - top)
            found[b, s, heads] = weights @ v[b, m, low:high] / total
    return found


def check(index: int, lock: str) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np

    del lock
    for cell, candidate in CHECKS[index]:
        config = fitted(cell.desc, *candidate)
        if config is None:
            emit(f"{cell.name:26s} no room")
            continue
        arrays, sinks = _arrays(cell, is_timed=False)
        run = jax.jit(functools.partial(_hopper, cell, sinks, config))
        actual, again = (np.asarray(run(*arrays).astype(jnp.float32)) for _ in range(2))
        middle = cell.batch // 2
        alone = np.asarray(run(*(a[middle : middle + 1] for a in arrays)).astype(jnp.float32))
        expected = _expected(cell, arrays, sinks)
        error = np.abs(actual - expected).max(-1) / np.maximum(np.abs(expected).max(-1), 0.05)
        error = np.where(np.isfinite(error), error, np.inf)
        at = np.unravel_index(np.argmax(error), error.shape)
        bound = 0.02 if cell.dtype == "bfloat16" else 0.004
        note = "" if error.max() < bound else f" at (row, query, head) {tuple(map(int, at))}"
        note += "" if error.max() < bound else f", {np.mean(error > bound):.1%} of rows"
        note += "" if np.array_equal(actual, again) else ", bits differ from call to call"
        note += "" if np.array_equal(actual[middle : middle + 1], alone) else ", bits differ from the row alone"
        emit(f"check {cell.name:26s} {_words(config)} {'WRONG' if note else 'ok'} {error.max():.1e}{note}")


def _words(config: DecodeConfig) -> str:
    sizes = f"split {config.split}, {config.block_kv} x {config.num_stages}, {config.columns} columns"
    return f"{sizes}, {config.num_ctas} CTAs{'' if config.swap_ab else ', queries are rows'}"


def times(index: int, lock: str) -> None:
    import jax
    import jax.numpy as jnp

    name, *candidate = TIMES[index]
    cell = CELLS[name]
    arrays, sinks = _arrays(cell)
    seen = jnp.minimum(arrays[-2], cell.window or cell.slots)
    row_bytes = 2 * cell.kv_heads * (cell.width + (0 if cell.is_latent else cell.value_width))
    limit = int(seen.sum()) * row_bytes / READ_GBPS / 1e3
    if candidate == ["XLA"]:
        ways = {"XLA": functools.partial(_xla, cell, sinks), "nothing": functools.partial(_nothing, cell)}
    else:
        config = fitted(cell.desc, *candidate)
        assert config is not None, candidate
        ways = {_words(config): functools.partial(_hopper, cell, sinks, config)}
    programs = {
        words: jax.jit(functools.partial(in_turns, way, CALLS)).lower(jnp.int32(0), *arrays).compile()
        for words, way in ways.items()
    }
    with open(lock) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for words, program in programs.items():
            us = microseconds(program, arrays, CALLS)
            emit(f"{name:30s} {words:76s} {us:9.2f} us  {limit / us:6.1%} of the limit ({limit:.1f} us)")


def _hopper(cell: Cell, sinks: Any, config: DecodeConfig, q: Any, k: Any, *rest: Any) -> Any:
    from pallas_kernels.decode_attention import decode_attention

    options: dict[str, Any] = dict(scale=cell.width**-0.5, window=cell.window, sinks=sinks, config=config)
    arrays = (q, k, None, *rest) if cell.is_latent else (q, k, *rest)
    options |= dict(value_width=cell.value_width) if cell.is_latent else {}
    y = decode_attention(*arrays, implementation="hopper", **options)
    return y


def _nothing(cell: Cell, q: Any, k: Any, *rest: Any) -> Any:
    """As many elements as attention gives, from the queries alone."""
    import jax.numpy as jnp

    del k, rest
    return jnp.sum(q, axis=-1, keepdims=True) + q[..., : cell.value_width]


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
