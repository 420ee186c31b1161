"""benchmarks/beside_vllm.py, the routings of its peers and the tables made of sweeps: no GPU, no vLLM."""

import importlib
import json
import os
import subprocess
import sys
import time
import types

import pytest

from tests.support.benchmarks import benchmarks_or_skip

SOURCE = "with times of fp8_channel"


@pytest.fixture
def load(monkeypatch):
    monkeypatch.syspath_prepend(str(benchmarks_or_skip()))
    monkeypatch.setitem(sys.modules, "bench_base", types.ModuleType("bench_base"))
    return importlib.import_module


def test_each_job_runs_once_on_one_of_the_gpus(load, tmp_path):
    beside, ended = load("beside_vllm"), {}
    code = "import os, sys; print(os.environ['CUDA_VISIBLE_DEVICES'], sys.argv[1], ' us '); sys.exit(int(sys.argv[2]))"
    commands = [(f"job{i}", [sys.executable, "-c", code, "gpu{gpu}", str(i % 2)]) for i in range(5)]
    beside.on_gpus(commands, ["0", "3"], 2, time.time() + 60, tmp_path, {}, ended.__setitem__)
    assert ended == {f"job{i}": i % 2 for i in range(5)}
    for i in range(5):
        seen, named, _ = (tmp_path / f"job{i}.log").read_text().split()
        assert seen in ("0", "3") and named == f"gpu{seen}"


def test_what_the_time_cuts_off_is_said(load, tmp_path):
    beside, ended = load("beside_vllm"), {}
    commands = [("slow", [sys.executable, "-c", "import time; time.sleep(60)"]), ("late", [sys.executable, "-c", ""])]
    start = time.time()
    beside.on_gpus(commands, ["0"], 1, start + 1, tmp_path, {}, ended.__setitem__)
    assert ended == {"slow": None, "late": None} and time.time() - start < 30


def test_peers_of_each_scheme(load):
    beside = load("beside_vllm")
    assert beside._FORMATS.keys() == beside.PEERS.keys()
    jobs = beside.peer_jobs(["gpt-oss-120b", "qwen3-30b-a3b"], ["w4a16_g128", "mxfp4_a16", "w4a8_int8"])
    assert sorted(jobs) == sorted(
        [("gpt-oss-pad", "marlin4"), ("qwen3-30b-a3b", "marlin4"), ("qwen3-30b-a3b", "marlin_mxfp4")]
        + [(model, fmt) for model in ("gpt-oss-120b", "qwen3-30b-a3b") for fmt in ("oai_mxfp4", "int8")]
    )


def test_a_run_of_other_programs(load, tmp_path, monkeypatch, capsys):
    """Both programs replaced: what they print and write becomes ratios, and a peer that fails is named."""
    beside = load("beside_vllm")
    cell = dict(model="mixtral-8x7b", scheme="bf16", tokens=16, us=100.0, tflops=1.0, gbps=1.0, fraction=0.5)
    (tmp_path / "moe_layer.py").write_text(
        f"import sys; open(sys.argv[sys.argv.index('--json') + 1], 'a').write({json.dumps(cell)!r} + chr(10))"
    )
    (tmp_path / "_vllm_layer.py").write_text(
        "import sys; sys.argv[1] == 'mixtral-8x7b' or sys.exit('no such layer'); "
        "print('mixtral-8x7b   vllm-triton bf16   T=   16    150.0 us  1.0 TFLOP/s')"
    )
    (tmp_path / "bench_vllm.py").write_text("")
    monkeypatch.setattr(beside, "_HERE", tmp_path)
    arguments = ["--peers", str(tmp_path), "--out", str(tmp_path / "out"), "--models", "mixtral-8x7b,dsv3-ep8"]
    monkeypatch.setattr(sys, "argv", ["beside_vllm.py", *arguments, "--schemes", "bf16", "--tokens", "16"])
    assert beside.main() == 0
    (row,) = json.loads((tmp_path / "out/ratios.json").read_text())
    assert row["peer_us"] == 150 and row["ratio"] == 1.5 and (tmp_path / "out/ratios.png").stat().st_size > 1000
    printed = capsys.readouterr().out
    assert "peer dsv3-ep8.bf16: exit 1: no such layer" in printed and "1 cells of ours, 1 beside a peer" in printed
    assert "bf16         geometric mean 1.50x over 1 cells, 0 below 1" in printed
    assert "weights of 8 and 16 bits, T=16: 50% of the limit on average" in printed
    (tmp_path / "out/ratios.json").unlink()
    monkeypatch.setattr(sys, "argv", ["beside_vllm.py", "--out", str(tmp_path / "out"), "--compare"])
    assert beside.main() == 0 and json.loads((tmp_path / "out/ratios.json").read_text()) == [row]


def test_routings_of_the_peers_hit_what_is_expected(load):
    draw = load("_vllm_layer").draw_logits
    for tokens, experts, top_k in ((1, 128, 8), (16, 128, 4), (16, 8, 2), (64, 128, 8)):
        drawn = draw(tokens, experts, top_k, 10, "cpu")
        hit = sum(len(values.topk(top_k).indices.unique()) for values in drawn) / 10
        assert hit == pytest.approx(experts * (1 - (1 - top_k / experts) ** tokens), rel=0.005)
        assert len({values.sum().item() for values in drawn}) == 10


def test_a_lenders_times_never_count_beside_own_ones(load):
    """Products without zero points do less: a tile that is faster there is not taken for those with them."""
    making, json_of = load("tuning_table"), lambda config: json.dumps(config, sort_keys=True)
    tile = dict(block_m=16, num_consumers=2, step_blocks=2, num_stages=4)
    ours, theirs = dict(tile), dict(tile, num_stages=5)
    times = {
        ("qwen3-30b-a3b", fmt, 64, gemm): {json_of(config): [us] for config, us in known}
        for gemm in (1, 2)
        for fmt, known in (("int4_g64_asym", [(ours, 50.0)]), ("int4_g64", [(ours, 20.0), (theirs, 10.0)]))
    }
    entry = making.fastest(times, "qwen3-30b-a3b", "int4_g64_asym", 64, 1, min)
    assert (entry.config.gemm1.num_stages, entry.micros, entry.source) == (4, 100.0, None)
    lent = {cell: known for cell, known in times.items() if cell[1] == "int4_g64"}
    entry = making.fastest(lent, "qwen3-30b-a3b", "int4_g64_asym", 64, 1, min)
    assert (entry.config.gemm1.num_stages, entry.micros, entry.source) == (5, 20.0, "with times of int4_g64")


def test_every_script_imports_and_has_a_help():
    """In one process, which imports JAX once: a name that moved in the library is missed here, not on a GPU."""
    benchmarks = benchmarks_or_skip()
    code = """
import contextlib, io, runpy, sys
for script in sys.argv[1:]:
    sys.argv = [script, "--help"]
    shown = io.StringIO()
    try:
        with contextlib.redirect_stdout(shown):
            runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        assert end.code == 0 and "usage:" in shown.getvalue(), script
    else:
        raise AssertionError(f"{script} ran with --help")
print("all")
"""
    scripts = sorted(str(path) for path in benchmarks.glob("[a-z]*.py"))
    assert len(scripts) >= 12
    environment = os.environ | {"PYTHONPATH": f"{benchmarks}:{benchmarks.parent}", "JAX_PLATFORMS": "cpu"}
    ran = subprocess.run([sys.executable, "-c", code, *scripts], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0 and ran.stdout == "all\n", ran.stderr[-2000:]


def test_a_sweep_finds_something_to_time(load, tmp_path):
    """Near the table's tiles with --earlier, clusters with pairs, raster groups; a word that is no mode is named."""
    sweep = load("sweep")
    found = sweep.Group("mixtral-8x7b:fp8_channel:pairs:1").configs(8192)
    assert {config.cluster for config in found} == {2} and {config.shares_weights for config in found} == {False, True}
    rasters = [sweep.Group("gpt-oss-120b:bf16:rasters:2").configs(tokens) for tokens in (16, 1024, 8192)]
    assert [{config.raster_group_m for config in found} for found in rasters] == [{1, 2, 8}, {1, 2, 4, 8}, {2, 8}]
    assert [{config.step_blocks for config in found} for found in rasters] == [{1, 2, 4}, {1, 2, 4}, {1, 2}]
    every = sweep.Group("mixtral-8x7b/tp2:int4_g128:2").configs(64)
    times = {sweep.config_label(config): [100.0 + i] for i, config in enumerate(every)}
    earlier = {("mixtral-8x7b/tp2", "int4_g128", 64, 2): times}
    near = sweep.Group("mixtral-8x7b/tp2:int4_g128:near1.02:2", earlier)
    assert set(every[:3]) <= set(near.configs(64)) and len(near.configs(64)) <= 4 < len(every)
    with pytest.raises(SystemExit, match="'brie', expected brief, pairs, rasters, lent or near"):
        sweep.Group("mixtral-8x7b:fp8_channel:brie:1")


def test_a_lent_table_is_timed_beside_the_heuristic(load, capsys):
    """Both are among the configurations, and each one's time is compared with the least of all."""
    sweep, lent, seen = load("sweep"), load("lent_table"), []
    for fmt in ("fp8_channel", "int4_g128"):
        for gemm in (1, 2):
            group = sweep.Group(f"mixtral-8x7b:{fmt}:lent:{gemm}")
            found = group.configs(64)
            table = lent.of_table(group.key, gemm, 64)[0]
            heuristic = lent.of_heuristic(group.key, gemm, 64, 132)[0]
            assert {table, heuristic} <= set(found)
            if table == heuristic:
                continue
            seen.append((fmt, gemm))
            times = {sweep.config_label(config): [100.0, 300.0] for config in found}
            times[sweep.config_label(table)], times[sweep.config_label(heuristic)] = [90.0], [180.0, 135.0]
            ((*cell, of_table, of_heuristic),) = lent.losses({("mixtral-8x7b", fmt, 64, gemm): times})
            assert cell == ["mixtral-8x7b", fmt, 64, gemm] and (of_table, of_heuristic) == (1.0, 1.5)
            assert list(lent.summary({("mixtral-8x7b", fmt, 64, gemm): times}))[-1].endswith(
                "table 1.000, heuristic 1.500 of the fastest"
            )
    assert len(seen) >= 2
    slow = dict(kind="NVIDIA H100 80GB HBM3", sms=132, gbps=2900.0, tflops=190.0)
    assert lent.is_off(slow, 0.85) and not lent.is_off(slow | dict(tflops=640.0), 0.85)


@pytest.mark.parametrize("us, is_taken", [(90.0, True), (99.5, False)])
def test_whole_layers_replace_an_entry_where_they_are_faster(load, tmp_path, monkeypatch, capsys, us, is_taken):
    making, path = load("tuning_table"), tmp_path / "table.json"
    key = making.key_of("mixtral-8x7b", "fp8_channel")
    config, other = (making.GemmConfig(48, 128, stages, swap_ab=True) for stages in (4, 5))
    held = [making.Entry(key, 64, making.LayerConfig(48, config, config), 300.0)]
    lent = [making.dataclasses.replace(held[0], key=making.key_of("mixtral-8x7b", "int8"), source=SOURCE)]
    making.Table("NVIDIA H200", (*held, *lent)).save(path)
    monkeypatch.setattr(making, "path_for", lambda device: path)
    cell = dict(model="mixtral-8x7b", scheme="fp8_channel", tokens=64)
    tiles = dict(block_m=48, gemm1=making.dataclasses.asdict(other), gemm2=making.dataclasses.asdict(other))
    lines = [cell | dict(us=[101.0, 99.0, 100.0], graph_us=[100.0]), cell | tiles | dict(us=[us] * 3)]
    (tmp_path / "layers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(sys, "argv", ["", "layers", "--device", "NVIDIA H200", str(tmp_path / "layers.jsonl")])
    assert making.main() == 0
    entries = {entry.key: entry for entry in making.load_table(path).entries}
    assert entries[key].config.gemm1 == (other if is_taken else config)
    assert entries[key].micros == (270.0 if is_taken else 300.0)
    assert (entries[lent[0].key].config, entries[lent[0].key].source) == (entries[key].config, SOURCE)
    assert f"{int(is_taken)} of 1 cells have other tiles" in capsys.readouterr().out


def test_weights_of_an_engine_are_drawn_once(load):
    """vLLM's loader asks for a model and for each of its modules, whose own names do not say what they are."""
    torch = pytest.importorskip("torch")

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed_tokens = torch.nn.Embedding(64, 32)
            self.first, self.second = torch.nn.Linear(32, 64), torch.nn.Linear(32, 64)
            self.norm = torch.nn.LayerNorm(32)
            self.register_buffer("cos_sin_cache", torch.full((3,), 7.0))
            self.transposed = torch.nn.Parameter(torch.full((64, 32), 7.0).T)

    draw_weights = load("_vllm_models").draw_weights
    model = Model()
    for module in model.modules():
        draw_weights(module, None)
    first, second = model.first.weight, model.second.weight
    assert (model.norm.weight == 1).all() and (model.cos_sin_cache == 7).all()
    assert 0.9 < float(model.embed_tokens.weight.std()) < 1.1 and 0.9 < float(first.std() * 32**0.5) < 1.1
    assert abs(float((first * second).mean())) < 0.3 / 32
    assert 0.9 < float(model.transposed.std() * 64**0.5) < 1.1  # not contiguous: what is drawn is not lost in a copy
    assert float(model.norm.bias.abs().max()) < 0.1
    with pytest.raises(ValueError, match="a ReLU without parameters has no weights to draw"):
        draw_weights(torch.nn.ReLU())
