"""Prefill attention on a Hopper GPU: is every form right, and how fast is it beside cuDNN and XLA. About two minutes.

    python benchmarks/attention.py --out FILE [--only TEXT] [--seconds 110] [--skip-checks] [--skip-times]

First every form of the kernel is compared with the float32 reference on ragged rows whose unused slots hold NaN, in
processes of their own, several at once, each with a time limit. Then candidates are timed one after the other:
microseconds of a call within a loop of one program, and the fraction of the limit, 789 TFLOP/s over the scores that
queries see. Forms that failed are not timed. Every line goes to FILE as soon as it is known.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from _workers import emit, in_turns, lines_of, microseconds, say

from pallas_kernels.attention.config import PrefillConfig

LIMIT_TFLOPS = 789.0  # bf16 products on an H200, measured
SMS = 132
CALLS = 4  # in one turn of a loop, whose condition the host waits for
WIDTHS = {"64": (64, 64), "128": (128, 128), "192/128": (192, 128), "192": (192, 192), "256": (256, 256)}


def configs(width: int, value_width: int) -> list[PrefillConfig]:
    """Candidates for these widths, the most promising first."""
    found = {
        (64, 64): [
            PrefillConfig(128, 4, SMS, query_stages=2),
            PrefillConfig(128, 4, SMS),
            PrefillConfig(64, 6, SMS, query_stages=2),
        ],
        (128, 128): [
            PrefillConfig(128, 2, SMS, query_stages=2),
            PrefillConfig(128, 2, SMS),
        ],
        (192, 128): [PrefillConfig(128, 2, SMS), PrefillConfig(64, 3, SMS)],
        (192, 192): [PrefillConfig(64, 3, SMS)],
        (256, 256): [PrefillConfig(64, 2, SMS)],
    }
    return found[width, value_width]


@dataclasses.dataclass(frozen=True)
class Form:
    """One form of the kernel to be checked: options of the description beside the widths."""

    name: str
    options: dict[str, Any]
    is_chunk: bool = False


FORMS = [
    Form("causal", {}),
    Form("chunk on a filled cache", {}, is_chunk=True),
    Form("window, sinks", dict(window=150, has_sinks=True), is_chunk=True),
    Form("narrow window", dict(window=16)),
    Form("not causal, sinks", dict(is_causal=False, has_sinks=True)),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True)
    parser.add_argument("--only", default="", help="parts of the names of checks or cells, with commas between them")
    parser.add_argument("--beside", default="cuDNN,XLA", help="what is timed beside the kernel")
    parser.add_argument("--seconds", type=float, default=110)
    parser.add_argument("--at-once", type=int, default=9)
    parser.add_argument("--skip-checks", action="store_true")
    parser.add_argument("--skip-times", action="store_true")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        kind, argument = options.worker
        dict(check=check, times=times)[kind](json.loads(argument))
        return
    began, failed = time.time(), set()
    with open(options.out, "w") as out:

        def run(kind: str, argument: Any, limit: float) -> Iterator[str]:
            yield from lines_of([sys.executable, __file__, "--out", "-", "--worker", kind, json.dumps(argument)], limit)

        if not options.skip_checks:
            jobs = [(w, dtype, i) for w in WIDTHS for i in range(len(configs(*WIDTHS[w]))) for dtype in dtypes(i)]
            jobs = [job for job in jobs if wanted(" ".join(map(str, job)), options.only)]
            with concurrent.futures.ThreadPoolExecutor(options.at_once) as pool:
                for job, lines in zip(jobs, pool.map(lambda job: list(run("check", job, 60)), jobs), strict=True):
                    for line in lines:
                        say(f"{job[0]:8s} {job[1]:9s} {line}", out)
                    if not lines or any("WRONG" in line for line in lines):
                        failed.add(json.dumps([job[0], job[2]]))
            say(f"# checks took {time.time() - began:.0f} s; failed: {sorted(failed)}", out)
        if not options.skip_times:
            left = max(options.seconds - (time.time() - began), 20)
            argument = dict(only=options.only, beside=options.beside, seconds=left - 3, failed=sorted(failed))
            for line in run("times", argument, left):
                say(line, out)
        say(f"# {time.time() - began:.0f} s", out)


def wanted(name: str, parts: str) -> bool:
    return any(part in name for part in parts.split(","))


def dtypes(index: int) -> list[str]:
    """float16 is checked with the first configuration alone."""
    return ["bfloat16", "float16"] if index == 0 else ["bfloat16"]


# -- in a process of its own --------------------------------------------------------------------------------------


def check(job: list[Any]) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np

    from pallas_kernels.attention import prefill

    (width, value_width), dtype = WIDTHS[job[0]], job[1]
    config = configs(width, value_width)[job[2]]
    rng = np.random.default_rng(0)
    batch, queries, slots, heads, kv_heads = 4, 296, 712, 8, 2
    # Every form with the first configuration in bfloat16, the two that touch most code with all others.
    for form in FORMS if (dtype, job[2]) == ("bfloat16", 0) else FORMS[1:3]:
        last_slot = np.full(batch, queries) if not form.is_chunk else np.array([queries, 400, 640, slots])
        first = (last_slot - queries).astype(np.int32)
        starts = np.minimum(np.array([0, 5, 130, 200]), last_slot - 1).astype(np.int32)
        lengths = (last_slot - np.array([0, 0, 3, 40])).astype(np.int32)
        if not form.options.get("is_causal", True):
            lengths[0] = 650
        q = rng.standard_normal((batch, queries, heads, width)).astype(np.float32)
        k = rng.standard_normal((batch, kv_heads, slots, width)).astype(np.float32)
        v = rng.standard_normal((batch, kv_heads, slots, value_width)).astype(np.float32)
        sinks = jnp.asarray(3 * rng.standard_normal(heads), jnp.float32) if form.options.get("has_sinks") else None
        for row in range(batch):
            outside = (np.arange(slots) < starts[row]) | (np.arange(slots) >= lengths[row])
            k[row, :, outside] = v[row, :, outside] = np.nan
        arrays = [jnp.asarray(array).astype(dtype) for array in (q * 2, k, v)]
        places = dict(starts=starts, lengths=lengths, first_slots=first)
        places = {name: jnp.asarray(array) for name, array in places.items()}
        settings = dict(
            scale=width**-0.5,
            sinks=sinks,
            window=form.options.get("window"),
            is_causal=form.options.get("is_causal", True),
        )
        call = functools.partial(prefill, **settings)
        expected = np.asarray(
            jax.jit(functools.partial(call, implementation="reference"))(
                *(array.astype(jnp.float32) for array in arrays), **places
            )
        )
        run = jax.jit(functools.partial(call, implementation="hopper", config=config))
        actual, again = (np.asarray(run(*arrays, **places).astype(jnp.float32)) for _ in range(2))
        error = np.abs(actual - expected).max(-1) / np.maximum(np.abs(expected).max(-1), 0.05)
        error = np.where(np.isfinite(error), error, np.inf)
        at = np.unravel_index(np.argmax(error), error.shape)
        bound = 0.02 if dtype == "bfloat16" else 0.004
        good = error.max() < bound and np.array_equal(actual, again)
        note = "" if good else f" at (row, query, head) {tuple(map(int, at))}, {np.mean(error > bound):.1%} of rows"
        note += "" if np.array_equal(actual, again, equal_nan=True) else ", bits differ from call to call"
        emit(f"{form.name:24s} {_words(config)}  {'ok' if good else 'WRONG'} {error.max():.1e}{note}")


def _words(config: PrefillConfig) -> str:
    return f"kv {config.block_kv:3d} x {config.num_stages}, q x {config.query_stages}"


@dataclasses.dataclass(frozen=True)
class Cell:
    """A call that is timed."""

    name: str
    queries: int
    slots: int
    heads: int
    kv_heads: int
    widths: str
    window: int | None = None
    has_sinks: bool = False
    beside: tuple[str, ...] = ("cuDNN", "XLA")
    num_configs: int = 1

    @property
    def limit_us(self) -> float:
        """Of the products over the scores that queries see."""
        first = self.slots - self.queries
        own = range(first + 1, self.slots + 1)
        seen = sum(own) if self.window is None else sum(min(slot, self.window) for slot in own)
        width, value_width = WIDTHS[self.widths]
        return 2 * seen * self.heads * (width + value_width) / LIMIT_TFLOPS / 1e6


CELLS = [
    Cell("qwen3 2048", 2048, 2048, 32, 4, "128", num_configs=3),
    Cell("qwen3 8192", 8192, 8192, 32, 4, "128", beside=("cuDNN",), num_configs=3),
    Cell("gpt-oss 2048 sinks", 2048, 2048, 64, 8, "64", has_sinks=True, num_configs=4),
    Cell("gpt-oss 2048 window 128 sinks", 2048, 2048, 64, 8, "64", window=128, has_sinks=True, num_configs=4),
    Cell("gpt-oss 8192 sinks", 8192, 8192, 64, 8, "64", has_sinks=True, beside=("cuDNN",), num_configs=4),
    Cell("gpt-oss 8192 window 128", 8192, 8192, 64, 8, "64", window=128, has_sinks=True, num_configs=4, beside=()),
    Cell("mla 2048", 2048, 2048, 128, 128, "192/128", num_configs=2),
    Cell("256 2048", 2048, 2048, 16, 2, "256", beside=("cuDNN",), num_configs=2),
    Cell("qwen3 512 of 8192", 512, 8192, 32, 4, "128", beside=("XLA",)),
    Cell("mixtral 2048", 2048, 2048, 32, 8, "128", beside=("cuDNN",)),
    Cell("192 2048", 2048, 2048, 32, 4, "192", beside=()),
    Cell("qwen3 512", 512, 512, 32, 4, "128", beside=("cuDNN", "XLA")),
]


def times(argument: dict[str, Any]) -> None:
    import jax
    import jax.numpy as jnp

    began = time.time()
    emit(f"# {jax.devices()[0].device_kind}, jax {jax.__version__}")
    plans: list[tuple[Cell, str, Callable[..., Any], tuple[Any, ...]]] = []
    for cell in CELLS:
        if not wanted(cell.name, argument["only"]):
            continue
        width, value_width = WIDTHS[cell.widths]
        keys = jax.random.split(jax.random.key(0), 4)
        q = jax.random.normal(keys[0], (1, cell.queries, cell.heads, width), jnp.bfloat16)
        k = jax.random.normal(keys[1], (1, cell.kv_heads, cell.slots, width), jnp.bfloat16)
        v = jax.random.normal(keys[2], (1, cell.kv_heads, cell.slots, value_width), jnp.bfloat16)
        sinks = jax.random.normal(keys[3], (cell.heads,), jnp.float32) if cell.has_sinks else None
        ways: dict[str, Callable[..., Any]] = {}
        for index, config in enumerate(configs(width, value_width)[: cell.num_configs]):
            if json.dumps([cell.widths, index]) not in argument["failed"]:
                ways[_words(config)] = functools.partial(_hopper, cell, sinks, config)
        ways |= {
            way: functools.partial(dict(cuDNN=_cudnn, XLA=_xla)[way], cell, sinks)
            for way in cell.beside
            if way in argument["beside"]
        }
        plans += [(cell, name, way, (q, k, v)) for name, way in ways.items()]

    def lowered(way, arrays):
        try:
            return jax.jit(functools.partial(in_turns, way, CALLS)).lower(jnp.int32(0), *arrays)
        except Exception as error:
            return error

    def compiled(program):
        try:
            return program if isinstance(program, Exception) else program.compile()
        except Exception as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        programs = [pool.submit(compiled, lowered(way, arrays)) for _, _, way, arrays in plans]
    for (cell, name, _, arrays), future in zip(plans, programs, strict=True):
        if time.time() - began > argument["seconds"]:
            emit("# no time left")
            return
        program = future.result()
        if isinstance(program, Exception):
            emit(f"{cell.name:30s} {name:40s} no: {type(program).__name__} {str(program)[:200]!r}")
            continue
        us = microseconds(program, arrays, CALLS)
        emit(f"{cell.name:30s} {name:40s} {us:9.1f} us  {cell.limit_us / us:6.1%} of the limit")


def _hopper(cell: Cell, sinks: Any, config: PrefillConfig, q: Any, k: Any, v: Any) -> Any:
    import jax.numpy as jnp

    from pallas_kernels.attention import prefill

    places = dict(starts=0, lengths=cell.slots, first_slots=cell.slots - cell.queries)
    return prefill(
        q,
        k,
        v,
        scale=q.shape[-1] ** -0.5,
        window=cell.window,
        sinks=sinks,
        config=config,
        implementation="hopper",
        **{name: jnp.full((1,), value, jnp.int32) for name, value in places.items()},
    )


def _cudnn(cell: Cell, sinks: Any, q: Any, k: Any, v: Any) -> Any:
    import jax
    import jax.numpy as jnp

    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    value_width = v.shape[-1]
    if value_width < q.shape[-1]:
        v = jnp.pad(v, [(0, 0)] * 3 + [(0, q.shape[-1] - value_width)])
    if cell.queries < cell.slots:
        raise NotImplementedError("causal with an offset")
    found: Any = jax.nn.dot_product_attention(
        q,
        k,
        v,
        is_causal=True,
        implementation="cudnn",
        return_residual=sinks is not None,
        local_window_size=None if cell.window is None else (cell.window - 1, 0),
    )
    if sinks is None:
        return found[..., :value_width]
    out, residual = found
    return (out * jax.nn.sigmoid(residual.astype(jnp.float32) - sinks)[..., None]).astype(out.dtype)[..., :value_width]


def _xla(cell: Cell, sinks: Any, q: Any, k: Any, v: Any) -> Any:
    import jax.numpy as jnp

    from moe_jax.models.attention._attention import AttentionInputs, attend_xla

    batch, queries, heads, width = q.shape
    starts, lengths, first = (jnp.full(batch, slot, jnp.int32) for slot in (0, cell.slots, cell.slots - queries))
    positions = first[:, None] + jnp.arange(queries, dtype=jnp.int32)
    inputs = AttentionInputs(None, None, starts, lengths, first, positions, None)
    grouped = q.reshape(batch, queries, cell.kv_heads, -1, width)
    out = attend_xla(grouped, k, v, inputs, scale=width**-0.5, window=cell.window, sinks=sinks)
    return out.reshape(batch, queries, heads, -1)


if __name__ == "__main__":
    main()
