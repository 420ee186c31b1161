"""Time many configurations of the grouped GEMMs on a GPU, in several processes that compile at the same time.

    python benchmarks/sweep_products.py --cells qwen3-30b-a3b:fp8_channel,... [--tokens 64,256,...] [--jobs 15]
        [--seconds 300] --out FILE

Each process takes a (model, format, GEMM), keeps its weights, and appends a JSON line per configuration: the
microseconds of one product with what is fused around it. They hold a lock while they time. A process that takes longer
than --stuck seconds over one configuration is ended and its place taken, without that configuration, by another.
"""

import argparse
import contextlib
import dataclasses
import fcntl
import functools
import itertools
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

MODELS = {
    "qwen3-30b-a3b": (128, 8, 2048, 768),
    "dsv3-ep8": (32, 8, 7168, 2048),
    "mixtral-8x7b": (8, 2, 4096, 14336),
    "gpt-oss-120b": (128, 4, 2880, 2880),
}
PACKED = ("int4_g128", "nvfp4", "mxfp4", "int4_int8", "int8_a16")


def calls_of(tokens: int) -> int:
    """Calls in a program, each of which reads other experts: those of one routing would stay in the L2."""
    return 40 if tokens == 1 else 20 if tokens <= 16 else 10 if tokens <= 1024 else 3


def rows_per_expert(tokens: int, experts: int, top_k: int) -> float:
    return tokens * top_k / (experts * (1 - (1 - top_k / experts) ** tokens))


def heights(mean: float, allowed: tuple[int, ...]) -> list[int]:
    """Tile heights that hold an average expert with some to spare, and nearly every expert."""
    found = [next((h for h in allowed if h >= mean + s * math.sqrt(mean)), None) for s in (0.3, 1.2, 2.5)]
    return sorted({h for h in found if h})


def unpacked_configs(desc: Any, block_m: int) -> list[Any]:
    from pallas_kernels.grouped_gemm.config import config_error
    from pallas_kernels.grouped_gemm.heuristics import space

    found = []
    for config in space(desc, block_m, 132):
        if config.block_n in (32, 48) or config_error(desc, config):
            continue
        found.append(config)
        if block_m == 128 and config.row_chunk is not None:
            whole = dataclasses.replace(config, row_chunk=None)
            found += [whole, dataclasses.replace(whole, band=16)]
    return found


class Group:
    """One (model, format, GEMM): its weights, and what there is to time."""

    def __init__(self, model: str, fmt: str, gemm: int):
        self.model, self.fmt, self.gemm = model, fmt, gemm
        self.experts, self.top_k, self.hidden, self.inner = MODELS[model]
        self.w = None

    def problems(self, tokens: int) -> list[tuple[int, Any]]:
        """(block_m, configuration)."""
        mean = rows_per_expert(tokens, self.experts, self.top_k)
        found = []
        if self.fmt in PACKED:
            from pallas_kernels.grouped_gemm_packed.config import BLOCK_MS, PackedConfig, config_error
            from pallas_kernels.grouped_gemm_packed.heuristics import MAX_STAGES, _band

            for block_m in heights(mean, BLOCK_MS[1:9]) or [128]:
                desc = self.packed_desc(tokens, block_m)
                for folds, consumers in itertools.product((False, True), (4, 2, 1)):
                    deepest = []
                    for blocks, stages in itertools.product((2, 4, 3, 1), range(MAX_STAGES, 1, -1)):
                        config = PackedConfig(block_m, consumers, blocks, stages, folds, _band(block_m), 132)
                        if blocks not in [c.step_blocks for c in deepest] and config_error(desc, config) is None:
                            deepest.append(config)
                    found += [(block_m, config) for config in deepest[: 2 if consumers > 1 else 1]]
                for consumers, split, part in ((4, 2, 2), (4, 2, 1), (4, 4, 2), (4, 4, 1), (2, 2, 2)):
                    if tokens > 64:
                        break
                    for stages in range(MAX_STAGES, 1, -1):
                        config = PackedConfig(
                            block_m, consumers, split * part, stages, False, _band(block_m), 132, split
                        )
                        if config_error(desc, config) is None:
                            found.append((block_m, config))
                            break
            unfolded = {(b, c.num_consumers) for b, c in found if not c.folds_scales}
            return [(b, c) for b, c in found if not c.folds_scales or (b, c.num_consumers) not in unfolded]
        from pallas_kernels.grouped_gemm.config import SWAPPED_BLOCK_MS

        for block_m in heights(mean, SWAPPED_BLOCK_MS[1:]) if self.key().may_swap else ():
            found += [(block_m, c) for c in unpacked_configs(self.desc(tokens, block_m), block_m) if c.is_swapped]
        for block_m in (64, 128):
            if (block_m == 64 and mean > 80) or (block_m == 128 and mean < 24):
                continue
            configs = unpacked_configs(self.desc(tokens, block_m), block_m)
            if block_m == 128 and mean < 200:
                configs = [c for c in configs if c.row_chunk is not None]
            found += [(block_m, c) for c in configs if not c.is_swapped]
        return found

    def listed(self, configs: list[dict[str, Any]]) -> list[tuple[int, Any]]:
        """(block_m, configuration) of configurations by their fields."""
        from pallas_kernels.grouped_gemm import GemmConfig
        from pallas_kernels.grouped_gemm_packed import PackedConfig

        kind = PackedConfig if self.fmt in PACKED else GemmConfig
        return [(config["block_m"], kind(**config)) for config in configs]

    def key(self) -> Any:
        from pallas_kernels.tuning.layer import FORMATS, LayerKey

        how: Any = FORMATS[self.fmt]
        return LayerKey(self.experts, self.top_k, self.hidden, self.inner, **how)

    def desc(self, tokens: int, block_m: int) -> Any:
        return self.key().products(tokens, block_m)[self.gemm - 1]

    def packed_desc(self, tokens: int, block_m: int) -> Any:
        import grouped_gemm as bench
        import jax

        from pallas_kernels.grouped_gemm_packed import describe_call

        rows, w = self._packed_rows(tokens, block_m), self._packed_weights(shapes_only=True)
        lhs = "row" if bench.PACKED[self.fmt].is_8bit else "none"
        del jax
        return describe_call(rows.count, w, "bfloat16", lhs, None, bench.SILU if self.gemm == 1 else None)

    def _packed_rows(self, tokens: int, block_m: int) -> Any:
        import grouped_gemm as bench

        return bench.route(tokens, self.experts, self.top_k, lambda mean: block_m)

    def _sizes(self) -> tuple[int, int, int]:
        return (self.inner, self.hidden, 2) if self.gemm == 1 else (self.hidden, self.inner, 1)

    def _packed_weights(self, shapes_only: bool = False) -> Any:
        import grouped_gemm as bench
        import jax

        rows = self._packed_rows(1, 16)
        make = lambda: bench.packed_operands(bench.PACKED[self.fmt], rows, *self._sizes())[0][1]  # noqa: E731
        if shapes_only:
            return jax.eval_shape(make)
        if self.w is None:
            self.w = make()
        return self.w

    def program(self, tokens: int, block_m: int, config: Any, lock: str) -> tuple[Any, Any]:
        """(compiled program of ``calls_of`` calls, its arguments)."""
        with locked(lock, fcntl.LOCK_SH):  # beside others that make operands, while nobody is timed
            program, args = self._program(tokens, block_m, config)
        return program.lower(*args).compile(), args

    def _program(self, tokens: int, block_m: int, config: Any) -> tuple[Any, Any]:
        import jax
        import jax.numpy as jnp

        if self.fmt in PACKED:
            import grouped_gemm as bench

            from pallas_kernels.grouped_gemm_packed import grouped_gemm_packed

            w, rows = self._packed_weights(), self._packed_rows(tokens, block_m)
            n, k, _ = self._sizes()
            fmt = bench.PACKED[self.fmt]
            x = jax.random.normal(jax.random.key(1), (rows.count, k), jnp.bfloat16)
            x = (x * 40).astype(jnp.int8) if fmt.operand == "int8" else x.astype(fmt.operand)
            rest = {"x_scale": jnp.full((rows.count,), 0.01, jnp.float32)} if fmt.is_8bit else {}
            tile_expert, num_tiles = jnp.asarray(rows.tile_expert), jnp.int32(len(rows.tile_expert))
            call = functools.partial(
                grouped_gemm_packed, activation=bench.SILU if self.gemm == 1 else None, config=config,
                implementation="mosaic",
            )  # fmt: skip
        else:
            from pallas_kernels.autotune import _operands
            from pallas_kernels.grouped_gemm import grouped_gemm

            desc = self.desc(tokens, block_m)
            (x, w, tile_expert, num_tiles), rest = _operands(desc, block_m, self.key(), tokens)
            if self.w is None:
                self.w = w
            w = self.w
            call = functools.partial(
                grouped_gemm, activation=desc.activation, requantize=desc.requantize, config=config,
                implementation="mosaic",
            )  # fmt: skip
        inner = jax.jit(lambda x, w, experts, num, rest: call(x, w, experts, num, **rest))
        calls = calls_of(tokens)
        moved = [
            jnp.where(tile_expert < 0, -1, (tile_expert + i * self.experts // calls) % self.experts)
            for i in range(calls)
        ]
        args = (x, w, moved, num_tiles, rest)
        program = jax.jit(lambda x, w, moved, num, rest: [inner(x, w, one, num, rest) for one in moved])
        return program, jax.block_until_ready(args)


@contextlib.contextmanager
def locked(path: str, mode: int = fcntl.LOCK_EX):
    with open(path, "w") as file:
        fcntl.flock(file, mode)
        yield


def time_program(compiled: Any, args: Any, calls: int, lock: str) -> float:
    import jax

    with locked(lock):

        def seconds(repeats):
            start = time.perf_counter()
            out = None
            for _ in range(repeats):
                out = compiled(*args)
            jax.block_until_ready(out)
            return (time.perf_counter() - start) / repeats

        seconds(1)
        repeats = max(1, min(20, int(0.006 / seconds(2))))
        return min(seconds(repeats) for _ in range(5)) / calls * 1e6


def work(options: argparse.Namespace) -> None:
    skip = set(json.loads(options.skip))
    deadline = float(options.until)
    name, fmt, gemm = options.group.split(":")
    group = Group(name, fmt, int(gemm))
    plan = json.loads(Path(options.plan).read_text()) if options.plan else None
    for tokens in map(int, options.tokens.split(",")):
        listed = group.problems(tokens) if plan is None else group.listed(plan.get(f"{options.group}:{tokens}", ()))
        for block_m, config in listed:
            label = f"{options.group}:{tokens}:{dataclasses.astuple(config)}"
            if label in skip:
                continue
            if time.time() > deadline:
                return
            record = dict(model=name, format=fmt, gemm=int(gemm), tokens=tokens, config=dataclasses.asdict(config))
            print(label, flush=True)
            try:
                compiled, args = group.program(tokens, block_m, config, options.lock)
                record["us"] = round(time_program(compiled, args, calls_of(tokens), options.lock), 2)
            except Exception as error:
                record["error"] = f"{type(error).__name__}: {str(error)[:200]}"
            with open(options.out, "a") as file:
                file.write(json.dumps(record) + "\n")
            compiled = args = None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", default="")
    parser.add_argument("--tokens", default="64,256,16,1024,1,8192")
    parser.add_argument("--jobs", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--stuck", type=float, default=60)
    parser.add_argument("--out", required=True)
    parser.add_argument("--lock", default="/tmp/gpu_lock")
    parser.add_argument("--plan", help="JSON: model:format:gemm:tokens -> configurations to time instead of all")
    parser.add_argument("--group")
    parser.add_argument("--skip", default="[]")
    parser.add_argument("--until", default="inf")
    options = parser.parse_args()
    if options.group:
        work(options)
        return 0
    until = time.time() + options.seconds
    waiting = [f"{cell}:{gemm}" for cell in options.cells.split(",") for gemm in (1, 2)]
    tried: dict[str, list[str]] = {group: [] for group in waiting}
    running: dict[str, Any] = {}
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    while (waiting or running) and time.time() < until + 30:
        while waiting and len(running) < options.jobs and time.time() < until:
            group = waiting.pop(0)
            command = [sys.executable, __file__, "--group", group, "--tokens", options.tokens, "--out", options.out]
            command += ["--lock", options.lock, "--until", str(until), "--skip", json.dumps(tried[group])]
            command += ["--plan", options.plan] if options.plan else []
            log = Path(f"{options.out}.{group.replace(':', '_')}.log").open("w+")
            running[group] = (subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment), log)
        time.sleep(0.5)
        for group, (process, log) in list(running.items()):
            code, idle = process.poll(), time.time() - os.fstat(log.fileno()).st_mtime
            if code is None and idle < options.stuck:
                continue
            if code is None:
                process.kill()
            del running[group]
            log.seek(0)
            labels = [line.strip() for line in log if line.startswith(group)]
            if code != 0 and labels:
                print("gave up", labels[-1], "exit", code, flush=True)
                tried[group] += labels
                waiting.insert(0, group)
            elif code != 0:
                log.seek(0)
                print("failed", group, log.read()[-500:], flush=True)
    for process, _ in running.values():
        process.kill()
    return 0


if __name__ == "__main__":
    sys.exit(main())
