"""Time the Hopper grouped GEMM with clusters of two blocks beside single blocks, in the same process.

    python benchmarks/clusters.py --cells dsv3-ep8:fp8_block:8192,... [--gemms 1,2] [--columns 256,128] [--jobs 12]
        [--seconds 75] [--stuck 40] --out FILE

A cell is model:format:tokens. Each (cell, GEMM) has a process of its own: it takes the tuning table's tile and tiles of
128 rows by --columns weight rows, each alone, in clusters that share rows and in clusters that share weights. After a
warm-up the three take turns for 9 samples, under a lock that all processes share. One JSON line a tile and way: median
and least microseconds of a product, TFLOP/s over the rows in use, the ratio of the median to that of single blocks, and
in how many elements of the rows in use its bits differ from theirs (must be 0). What FILE holds is not timed again. A
process that says nothing for --stuck seconds is ended, and what it was at is written down: a wrong count of arrivals
waits for ever.
"""

import argparse
import dataclasses
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from sweep_products import Group, append, locked
from sweep_space import H200_SMS

from pallas_kernels.grouped_gemm import candidates, config_error
from pallas_kernels.grouped_gemm.heuristics import deepest
from pallas_kernels.tuning import table_for
from pallas_kernels.tuning.timing import calls_of

SAMPLES = 9
WAYS: dict[str, dict[str, Any]] = {
    "alone": {},
    "rows": dict(cluster=2),
    "weights": dict(cluster=2, shares_weights=True),
}


def tiles(group: Group, tokens: int, columns: list[int]) -> list[Any]:
    """The table's tile where it is not swapped, and those with ``columns`` weight rows, all moved whole. First the
    table's as it is where that is another.
    """
    desc = group.key().products(tokens, 128)[group.gemm - 1]
    entry = table_for("NVIDIA H200").lookup(group.key(), tokens)
    tuned = None if entry is None else (entry.config.gemm1, entry.config.gemm2)[group.gemm - 1]
    found = [] if tuned is None or tuned.block_m != 128 or tuned.swap_ab else [tuned]
    own = {desc.projections * config.block_n: config for config in candidates(desc, 128, H200_SMS)}
    found += [own[count] for count in columns if count in own]
    band = tuned.raster_group_m if tuned is not None else 8
    whole = [deepest(desc, dataclasses.replace(config, raster_group_m=band, row_chunk=None)) for config in found]
    return list(dict.fromkeys(found[:1] + whole))


def count_differing(block_m: int, one: Any, other: Any, tile_rows: Any) -> Any:
    """Elements of rows in use whose bits differ, of outputs (rows, N) and scales (groups, rows)."""
    mask = (jnp.arange(block_m) < tile_rows[:, None]).reshape(-1, 1)
    total = jnp.int32(0)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        bits: Any = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[a.dtype.itemsize]
        differ = jax.lax.bitcast_convert_type(a, bits) != jax.lax.bitcast_convert_type(b, bits)
        total += jnp.sum(differ & (mask if a.shape[0] == mask.shape[0] else mask.T))
    return total


def time_cell(text: str, columns: list[int], out: Path, lock: str) -> None:
    model, fmt, count, gemm = text.split(":")
    group, tokens = Group(f"{model}:{fmt}:{gemm}"), int(count)
    desc = group.key().products(tokens, 128)[group.gemm - 1]
    known = out.read_text().splitlines() if out.exists() else []
    for tile in tiles(group, tokens, columns):
        record: dict[str, Any] = dict(model=model, format=fmt, tokens=tokens, gemm=group.gemm)
        programs: list[tuple[dict[str, Any], Any]] = []
        args: Any = None
        for way, change in WAYS.items():
            config = dataclasses.replace(tile, **change)
            own = record | dict(way=way, config=dataclasses.asdict(config))
            if any(line.startswith(json.dumps(own)[:-1]) for line in known):
                break
            if (reason := config_error(desc, config)) is None:
                print("at", json.dumps(own), flush=True)
                compiled, args = group.program(tokens, config, lock)
                programs.append((own, compiled))
            else:
                print(json.dumps(own | dict(error=reason)), flush=True)
        for line in take_turns(programs, args, lock, desc, tile.block_m) if programs else []:
            append(out, line)


def take_turns(programs: list[Any], args: Any, lock: str, desc: Any, block_m: int) -> list[dict[str, Any]]:
    """Records with times of (record, compiled program) each; what differs is counted against the first."""
    tile_rows = args[4]["tile_rows"]
    outputs = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), programs[0][1].out_info)
    count = jax.jit(functools.partial(count_differing, block_m)).lower(outputs, outputs, tile_rows).compile()
    calls = calls_of(programs[0][0]["tokens"])
    times: list[list[float]] = [[] for _ in programs]
    with locked(lock):
        expected, differ = None, []
        for own, compiled in programs:
            print("at", json.dumps(own), flush=True)
            found = jax.block_until_ready(compiled(*args))
            expected = found if expected is None else expected
            differ.append(int(count(found, expected, tile_rows)))
        del found, expected
        for _ in range(SAMPLES):
            for (_, compiled), own_times in zip(programs, times, strict=True):
                start = time.perf_counter()
                jax.block_until_ready(compiled(*args))
                own_times.append((time.perf_counter() - start) / calls * 1e6)
    work = 2.0 * int(np.asarray(tile_rows).sum()) * desc.projections * desc.n * desc.k
    first, records = statistics.median(times[0]), []
    for (own, _), own_times, differing in zip(programs, times, differ, strict=True):
        median = statistics.median(own_times)
        found = dict(us=round(median, 1), least=round(min(own_times), 1), tflops=round(work / median / 1e6))
        records.append(own | found | dict(ratio=round(median / first, 4), differing=differing))
    return records


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", required=True)
    parser.add_argument("--gemms", default="1,2")
    parser.add_argument("--columns", default="256,128")
    parser.add_argument("--jobs", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=75)
    parser.add_argument("--stuck", type=float, default=40)
    parser.add_argument("--out", required=True)
    parser.add_argument("--lock", default="/tmp/gpu_lock")
    parser.add_argument("--own", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.own:
        columns = [int(count) for count in options.columns.split(",")]
        time_cell(options.cells, columns, Path(options.out), options.lock)
        return 0
    waiting = [f"{cell}:{gemm}" for cell in options.cells.split(",") for gemm in options.gemms.split(",")]
    return run(options, waiting)


def run(options: argparse.Namespace, waiting: list[str]) -> int:
    """Keep --jobs processes at work; 1 where one failed."""
    until, failed, running = time.time() + options.seconds, 0, []
    command = [sys.executable, "-u", __file__, "--own", "--out", options.out, "--lock", options.lock]
    command += ["--columns", options.columns, "--cells"]
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    start = functools.partial(subprocess.Popen, stderr=subprocess.STDOUT, env=environment)
    while (waiting or running) and time.time() < until:
        while waiting and len(running) < options.jobs:
            text = waiting.pop(0)
            log = Path(f"{options.out}.{text.replace(':', '_').replace('/', '+')}.log").open("w+")
            running.append((text, start([*command, text], stdout=log), log))
        time.sleep(0.3)
        for one in list(running):
            text, process, log = one
            code, idle = process.poll(), time.time() - os.fstat(log.fileno()).st_mtime
            if code is None and idle < options.stuck:
                continue
            running.remove(one)
            if code == 0:
                continue
            process.kill()
            process.wait()
            log.seek(0)
            lines, failed = log.read().splitlines(), failed + 1
            last = next((line[3:] for line in reversed(lines) if line.startswith("at ")), "{}")
            why = "no answer" if code is None else f"exit {code}"
            append(Path(options.out), json.loads(last) | dict(cell=text, error=why))
            print("gave up", text, why, *lines[-12:], sep="\n  ", flush=True)
    for text, process, _ in running:
        process.kill()
        process.wait()
        print("cut off", text, flush=True)
    print("not begun", *waiting)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
