"""moe-jax bench: figures against their definitions with a clock of our own, files, and one-line errors."""

import builtins
import json

import jax
import jax.numpy as jnp
import pytest

from moe_jax import cli
from moe_jax.benchmarking import SHAPES, BenchReport, Limits, layer_shape, render
from moe_jax.benchmarking import bench as run_bench
from moe_jax.cli.bench import _layer, _limits, _timing

E, K, H, I = SHAPE = (4, 2, 64, 32)  # noqa: E741
MODEL = "4,2,64,32"
MICROS = 50.0


@pytest.fixture
def fixed_times(monkeypatch):
    """Every call really runs once, and is said to take MICROS."""

    def time_in_jit(call, args, varied, *, variants=None, **options):
        copies = [args[varied]] if variants is None else variants
        for one in copies[:1]:
            jax.block_until_ready(jax.jit(call)(*args[:varied], jnp.asarray(one), *args[varied + 1 :]))
        return MICROS

    for module in (_layer, _limits):
        monkeypatch.setattr(module, "time_in_jit", time_in_jit)
    real = _limits.measure_limits
    monkeypatch.setattr(
        "moe_jax.cli.bench._bench.measure_limits", lambda operands: real(operands, size=32, copied_bytes=1 << 12)
    )


def test_the_time_of_one_call(monkeypatch):
    """A clock that advances by a millisecond with each execution, and by 5 with each program."""
    ran = []

    def call(x, bump):
        return x + jax.experimental.io_callback(
            lambda b: ran.append(1) or b, jax.ShapeDtypeStruct((), jnp.float32), bump
        )

    ticks = iter(range(10**6))
    monkeypatch.setattr(_timing.time, "perf_counter", lambda: len(ran) * 1e-3 + next(ticks) * 5e-3)
    args = (jnp.zeros(3), jnp.float32(1))
    assert _timing.time_in_jit(call, args, 1, calls=(1, 3), samples=3) == pytest.approx(1000, rel=1e-6)
    alone = _timing.time_in_jit(call, args, 1, calls=(0, 3), samples=3, budget_s=10.0)  # 40 programs, one start
    assert alone == pytest.approx((40 * 3 + 5) / (40 * 3) * 1000, rel=1e-6)
    looped = _timing.time_in_jit(call, args, 1, calls=(0, 3), rounds=7, samples=3, budget_s=10.0)
    assert looped == pytest.approx((40 * 21 + 5) / (40 * 21) * 1000, rel=1e-6)
    monkeypatch.setattr(_timing.time, "perf_counter", lambda: next(ticks) * 5e-3)  # however many calls there are
    with pytest.raises(RuntimeError, match="3 calls did not take longer than 1"):
        _timing.time_in_jit(call, args, 1, calls=(1, 3), samples=3)


def test_limits_are_operations_and_bytes_over_time(fixed_times):
    limits = _limits.measure_limits({"int8"}, size=64, copied_bytes=1 << 14)
    assert set(limits.tflops) == {"float32", "bfloat16"}, "a CPU has no rate of its own for 8 bits"
    assert limits.tflops["float32"] == pytest.approx(2 * 64**3 / (MICROS * 1e-6) / 1e12)
    assert limits.gbps == pytest.approx(2 * 5 * (1 << 14) / (MICROS * 1e-6) / 1e9), "4 passes and the first copy"


def test_limits_of_a_gpu_are_cublas(monkeypatch):
    """XLA would try Triton's kernels first, for most of a minute in e4m3; its other programs keep their options."""
    seen = []
    monkeypatch.setattr(
        _limits, "time_in_jit", lambda *args, compiler_options=None, **options: seen.append(compiler_options) or MICROS
    )
    monkeypatch.setattr(_limits.jax, "default_backend", lambda: "gpu")
    limits = _limits.measure_limits({"float8_e4m3fn"}, size=16, copied_bytes=1 << 12)
    assert set(limits.tflops) == {"bfloat16", "float8_e4m3fn"}
    assert seen == [None] + [{"xla_gpu_enable_triton_gemm": False}] * 2


def test_the_nearer_limit_counts():
    limits = Limits(100.0, {"bfloat16": 10.0, "int8": 40.0, "float8_e4m3fn": 5.0})
    assert limits.fraction(8.0, 10.0, "int8") == 0.2 and limits.fraction(8.0, 50.0, "int8") == 0.5
    assert limits.ceiling("float8_e4m3fn") == 10.0, "widened to bfloat16, not to another 8-bit dtype"
    with pytest.raises(ValueError, match="no matmul rate for float32"):
        limits.ceiling("float32")


def test_figures_of_a_cell(fixed_times):
    tokens = 3
    report = run_bench(MODEL, ["bf16", "int8_w8a16"], [tokens])
    plain, quantized = report.cells
    seconds = MICROS * 1e-6
    assert plain["us"] == MICROS and plain["implementation"] == "xla" and plain["operand"] == "bfloat16"
    assert plain["tflops"] == pytest.approx(2 * 3 * tokens * K * H * I / seconds / 1e12, rel=1e-3)
    # 2 bytes an element; of E experts those that any of the routings of the timed calls hit
    activations, experts = 2 * 2 * tokens * H, 3 * H * I
    hit = (plain["gbps"] * 1e9 * seconds - activations) / (2 * experts)
    assert K <= hit <= E and hit * 4 == pytest.approx(round(hit * 4), abs=1e-2), "a mean over 4 calls"
    scales = 4 * (2 * I + H)
    assert quantized["gbps"] * 1e9 * seconds == pytest.approx(activations + hit * (experts + scales), rel=1e-3)
    share = max(plain["tflops"] / max(report.limits.tflops.values()), plain["gbps"] / report.limits.gbps)
    assert plain["fraction"] == pytest.approx(share, rel=2e-3)


def test_table_json_and_picture(fixed_times, tmp_path, capsys):
    files = ["--json", str(tmp_path / "b.json"), "--png", str(tmp_path / "b.png")]
    assert cli.main(["bench", "--model", MODEL, "--scheme", "bf16,fp8_channel", "--tokens", "1,5", *files]) == 0
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines() if line.startswith(("bf16", "fp8_channel"))]
    assert [row[:3] for row in rows] == [[s, t, "xla"] for s in ("bf16", "fp8_channel") for t in ("1", "5")]
    assert "GB/s copied" in out and "4 experts, top 2, hidden 64, intermediate 32" in out
    written = json.loads((tmp_path / "b.json").read_text())
    assert written["shape"] == list(SHAPE) and set(written["limits"]) == {"gbps", "tflops"}
    assert [cell["tokens"] for cell in written["cells"]] == [1, 5, 1, 5]
    assert (tmp_path / "b.png").read_bytes()[:4] == b"\x89PNG"


def test_a_cell_that_fails_is_said_beside_the_others(fixed_times, capsys):
    args = ["bench", "--model", MODEL, "--scheme", "bf16", "--tokens", "2", "--implementation", "hopper"]
    assert cli.main(args) == 1
    out = capsys.readouterr().out
    assert "failed" in out and "bf16 at 2 tokens: NotImplementedError" in out and "Hopper" in out


def test_rich_table_says_the_same():
    cell = dict(scheme="bf16", tokens=1, implementation="xla", us=1.5, tflops=2.0, gbps=3.0, fraction=1.25)
    failed = dict(scheme="mxfp8", tokens=2, error="OutOfMemory: all gone")
    report = BenchReport("cpu", {"jax": "0"}, "2026-01-01", "m", SHAPE, Limits(1.0, {"bfloat16": 2.0}), (cell, failed))
    plain, framed = render(report), render(report, rich=True)
    for word in ("1.5", "125%", "failed", "mxfp8 at 2 tokens: OutOfMemory: all gone", "above 100%"):
        assert word in plain and word in framed
    assert "\x1b[" in framed and "\x1b[" not in plain


@pytest.mark.parametrize(
    "args, words",
    [
        (["--model", "gpt-9"], ["gpt-9", "qwen3-30b-a3b", "experts,top_k,hidden,intermediate"]),
        (["--model", "4,9,64,32"], ["top_k is 9", "4 experts"]),
        (["--model", "4,2,0,32"], ["4,2,0,32"]),
        (["--scheme", "fp9"], ["fp9", "fp8_channel"]),
        (["--scheme", "fp8_tensor_static"], ["fp8_tensor_static", "from a checkpoint"]),
        (["--tokens", "1,x"], ["--tokens", "1,x"]),
        (["--tokens", "0"], ["[0]", "at least 1"]),
        (["--implementation", "fpga"], ["fpga", "reference"]),
        (["--json", "/no/such/place/b.json"], ["--json", "/no/such/place"]),
        (["--png", "/tmp"], ["--png", "/tmp", "directory"]),
    ],
)
def test_bad_input_is_one_line_before_anything_is_measured(monkeypatch, capsys, args, words):
    monkeypatch.setattr("moe_jax.cli.bench._bench.measure_limits", lambda operands: pytest.fail("measured"))
    assert cli.main(["bench", "--model", MODEL, "--tokens", "1", *args]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and len(captured.err.splitlines()) == 1
    for word in words:
        assert word in captured.err, captured.err


def test_a_picture_without_matplotlib_is_refused_first(monkeypatch, capsys, tmp_path):
    real = builtins.__import__

    def no_matplotlib(name, *args, **options):
        if name.partition(".")[0] == "matplotlib":
            raise ImportError(name)
        return real(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", no_matplotlib)
    assert cli.main(["bench", "--model", MODEL, "--png", str(tmp_path / "b.png")]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


def test_shapes():
    assert all(layer_shape(name) == shape for name, shape in SHAPES.items())
    assert layer_shape("8, 2,16,4") == (8, 2, 16, 4)
