"""Test configuration: annotations checked, strict dtype promotion, 8 simulated CPU devices.

GPU tests (markers gpu, multi_gpu) are deselected by default; they run with ``JAX_PLATFORMS=cuda pytest -m gpu``.
"""

import collections
import functools
import gc
import itertools
import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # of torch, whose threads wait for each other at full load
# One LLVM module a program: 32, compiled at once, cost twice the time on two cores.
XLA_FLAGS = {"--xla_force_host_platform_device_count": 8, "--xla_cpu_parallel_codegen_split_count": 1}
for flag, value in XLA_FLAGS.items():
    if flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}={value}".strip()

import jaxtyping

from tests.support import annotations

# Before the packages are imported: every annotated public function then checks shapes and dtypes in the tests.
jaxtyping.jaxtyped = annotations.jaxtyped
jaxtyping.install_import_hook(["moe_jax", "pallas_kernels", "torch_bridge"], "beartype.beartype")

import jax
import pytest
from jax._src import compiler
from jax._src.interpreters import mlir

from tests.support.oracles import layer_judge

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_traceback_in_locations_limit", 0)  # a tenth of the time that lowering takes
mlir.make_ir_context = functools.cache(mlir.make_ir_context)  # two thirds, for a program of one operation


def compile_quickly(*args, env_options_overrides=None, usual=compiler.get_compile_options, **options):
    """Programs of the tests run once or twice: half their time was XLA compiling, so LLVM optimizes less.

    And fused operations go straight to it instead of through MLIR, for which XLA has no option any more in jax 0.11.
    What XLA does to a program before, rounding and fusing included, stays as it is. jax.jit takes compiler options for
    one function; for all of them there is only the place where jax puts them together.
    """
    own = {"xla_cpu_use_fusion_emitters": False} if jax.__version_info__ < (0, 11) else {}
    return usual(*args, env_options_overrides=own | (env_options_overrides or {}), **options)


if os.environ["JAX_PLATFORMS"] == "cpu":
    compiler.get_compile_options = compile_quickly
    jax.config.update("jax_disable_most_optimizations", True)


def pytest_addoption(parser):
    default = Path(__file__).parent / "data"
    parser.addoption("--layer-errors", help="a file: print how far layers of each scheme are from what is allowed")
    parser.addoption("--wheel", type=Path, help="a wheel for test_packaging.py, instead of one that it builds")
    parser.addoption("--python", action="append", help="test_packaging.py runs the README with it; may be repeated")
    parser.addoption("--writers-dir", default=default, help="checkpoints for test_llm_compressor_files.py")


def pytest_configure(config):
    if path := config.getoption("--layer-errors"):
        os.environ[layer_judge.REPORT] = str(Path(path).absolute())


def pytest_terminal_summary(terminalreporter, config):
    path = config.getoption("--layer-errors")
    if path and Path(path).exists():
        terminalreporter.section("largest errors of layers")
        for line in layer_judge.report(Path(path)):
            terminalreporter.write_line(line)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """``@pytest.mark.sample(n)``: the default suite runs the first of every n cases; the others are slow."""
    counts = collections.defaultdict(itertools.count)
    for item in items:
        mark = item.get_closest_marker("sample")
        if mark is None or any(item.get_closest_marker(name) for name in ("slow", "gpu", "multi_gpu")):
            continue
        if next(counts[item.nodeid.partition("[")[0]]) % mark.args[0]:
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish():
    """What is imported and collected by now lives to the end; the collector need not walk it again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 50)


MAPS, MOST_MAPS = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")  # of Linux; no other system has a limit
TESTS_DONE = itertools.count(1)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown():
    """Compiled programs end early where a module has very many of them.

    XLA's CPU compiler loads each as 15 to 150 memory maps. Linux lets a process have 65530; with more, LLVM crashes
    ("Cannot allocate memory"). Eight tests add some 6300 at most.
    """
    if next(TESTS_DONE) % 8 == 0 and MAPS.exists():
        if MAPS.read_bytes().count(b"\n") > int(MOST_MAPS.read_text()) // 2:
            jax.clear_caches()


@pytest.fixture
def key():
    """One fixed jax.random key; split it for more."""
    return jax.random.key(0)


@pytest.fixture(autouse=True, scope="module")
def let_go_of_programs():
    """A module's compiled programs end with it: kept, those of the whole suite take 5 GB a process."""
    yield
    jax.clear_caches()
    mlir.make_ir_context.cache_clear()
