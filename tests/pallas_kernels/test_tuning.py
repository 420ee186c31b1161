"""Tuning tables: the search with a timer that needs no GPU, the files it writes, and what a layer makes of them."""

import dataclasses
import json
import math
import re
import subprocess
import sys
import types

import jax
import numpy as np
import pytest

from pallas_kernels import autotune
from pallas_kernels.common.device import Gpu
from pallas_kernels.grouped_gemm import GemmConfig, candidates, choose_block_m, choose_config
from pallas_kernels.grouped_gemm.heuristics import expected_tiles, refusal, rounds_of
from pallas_kernels.grouped_gemm.packed import PackedConfig, describe_call
from pallas_kernels.grouped_gemm.packed.format import zero_point_of
from pallas_kernels.grouped_gemm.packed.reference import dequantized
from pallas_kernels.tuning import (
    FORMATS,
    PACKED_FORMATS,
    Entry,
    LayerConfig,
    LayerKey,
    PackedLayerKey,
    Table,
    load_table,
    table_for,
    timing,
    tune,
    update,
    user_path,
)
from pallas_kernels.tuning.operands import random_operands, random_packed_weights, random_routings
from pallas_kernels.tuning.table import path_for
from tests.support.cases.hopper_layers import on_hopper
from tests.support.kernels.case import launches
from tests.support.kernels.cases import PACKED
from tests.support.refusals import refuses

KEY = LayerKey(128, 8, 2048, 768, **FORMATS["fp8_channel"])
PAIR = LayerConfig(16, *[GemmConfig(16, 128, 4, swap_ab=True)] * 2)
PACKED_KEY = PackedLayerKey(128, 8, 2048, 768, **PACKED_FORMATS["int4_g128"])
PACKED_PAIR = LayerConfig(16, PackedConfig(16, 4, 2, 5), PackedConfig(16, 4, 4, 5))
GOOD = Table("NVIDIA H200", (Entry(KEY, 16, PAIR, 90.0), Entry(KEY, 64, PAIR, 150.0)))


def fake_timer(desc, config, key, tokens):
    """Fastest: swapped at 16 rows, 128 columns; the candidate of 64 columns refuses. Packed weights: any."""
    if isinstance(config, PackedConfig):
        return 5.0
    if config.block_n == 64:
        raise NotImplementedError("too narrow today")
    return abs(config.block_m - 16) + abs(config.block_n - 128) / 10 + (1.0 if config.swap_ab else 5.0)


def test_search_takes_the_least_sum_and_reports_refusals():
    lines = []
    (entry,) = tune([KEY], [16], fake_timer, 132, lines.append)
    assert (entry.key, entry.tokens, entry.micros) == (KEY, 16, 2.0)
    for config in (entry.config.gemm1, entry.config.gemm2):
        assert (config.block_m, config.block_n, config.swap_ab) == (16, 128, True)
    assert sum("too narrow today" in line for line in lines) >= 4
    timed = {(config.block_m, config.swap_ab) for config in map(_config_of, lines) if config}
    assert timed == {(8, True), (16, True), (64, False)}


def test_search_looks_at_large_m_tiles_where_experts_have_many_rows():
    key = LayerKey(8, 2, 512, 256, **FORMATS["fp8_channel"])
    assert key.heights(1024) == [64, 128, 144, 160]
    assert dataclasses.replace(key, rhs_scale="block").heights(1024) == [64, 128]
    blocks = dataclasses.replace(key, **FORMATS["fp8_block"])
    assert blocks.heights(16) == [8, 16, 64]
    assert dataclasses.replace(blocks, intermediate_size=192).heights(16) == [8, 16, 64]
    short_group = dataclasses.replace(blocks, intermediate_size=160)  # no kernel requantizes a last group of 32
    assert short_group.heights(16) == [64]


def test_rows_requantized_by_their_own_launch_count():
    """Where a configuration cannot requantize, its product has to make good the launch that does."""
    key = LayerKey(8, 2, 512, 512, **FORMATS["fp8_block"])
    assert [key.products(16, height)[0].requantize for height in (8, 64, 96, 128)] == ["none", "group", "none", "group"]
    narrow, wide = (GemmConfig(8, block_n, 4, swap_ab=True) for block_n in (64, 128))
    apart = key.requantize_micros(16, narrow)
    assert 2.5 < apart < 2.6 and key.requantize_micros(16, wide) == 0.0
    assert key.requantize_micros(16, GemmConfig(64, 128, 4)) == 0.0
    for gain in (2.0, 3.0):

        def timer(desc, config, key, tokens, gain=gain):
            is_faster = (config.block_m, config.block_n, desc.projections) == (8, 64, 2)
            return 10.0 - gain * is_faster

        (entry,) = tune([key], [16], timer, 132)
        assert (entry.config.gemm1.block_n == 64) == (gain > apart)
        assert entry.micros == pytest.approx(min(20.0, 20.0 - gain + apart))


def _config_of(line):
    start = line.index("GemmConfig(")
    return eval(line[start : line.index(")", start) + 1]) if line.endswith("us") else None


def test_search_leaves_out_what_no_candidate_runs():
    lines = []
    odd = dataclasses.replace(KEY, hidden_size=2050)
    assert tune([odd], [1], fake_timer, 132, lines.append) == []
    ragged = PackedLayerKey(8, 2, 4096, 100, **PACKED_FORMATS["int4_g128"])
    assert tune([ragged], [16], fake_timer, 132, lines.append) == []
    assert "no candidate runs" in lines[-1]


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_has_candidates(name):
    key = LayerKey(8, 2, 512, 512, **FORMATS[name])
    assert key.may_swap
    for block_m in (16, 64):
        for desc in key.products(7, block_m):
            assert candidates(desc, block_m, 132)


def test_tiles_of_the_table_are_worth_timing():
    """What ``refusal`` leaves out no sweep finds again."""
    entries = [entry for entry in table_for("NVIDIA H200").entries if isinstance(entry.key, LayerKey)]
    assert len(entries) > 400
    for entry in entries:
        gemms = (entry.config.gemm1, entry.config.gemm2)
        for desc, config in zip(entry.key.products(entry.tokens, entry.config.block_m), gemms, strict=True):
            assert refusal(desc, config) is None, (entry.key, entry.tokens)


def test_clusters_are_timed_for_many_tokens_alone():
    key = LayerKey(8, 2, 4096, 14336, **FORMATS["fp8_block"])
    for desc in key.products(8192, 128):
        pairs = [c for c in key.candidates(desc, 128, 132) if c.cluster == 2]
        assert {c.shares_weights for c in pairs} == {False, True}
        assert not any(c.cluster == 2 for c in key.candidates(desc, 128, 131))
    assert not any(c.cluster == 2 for c in key.candidates(key.products(16, 64)[0], 64, 132))


@pytest.mark.parametrize("name", PACKED_FORMATS)
def test_every_packed_format_has_candidates_and_operands(name):
    key = PackedLayerKey(8, 2, 512, 256, **PACKED_FORMATS[name])
    for tokens in (1, 64, 8192):
        for block_m in key.heights(tokens):
            for desc in key.products(tokens, block_m):
                assert key.candidates(desc, block_m, 132)
    desc = key.products(16, 16)[0]
    x, w, rest = jax.eval_shape(lambda: random_operands(desc, 16, key))
    lhs = "row" if "x_scale" in rest else "none"
    (routing,) = random_routings(desc, 16, key, 16, 1)
    assert routing.keys() == {"tile_expert", "num_tiles", "tile_rows"}
    described = describe_call(x.shape[0], w, "bfloat16", lhs, None, desc.activation)
    assert dataclasses.replace(described, has_tile_rows=True) == desc
    assert x.shape == (desc.rows, 512) and routing["tile_expert"].shape == (desc.rows // 16,)


@pytest.mark.parametrize(
    "name",
    [
        *("int4 g128, zero points", "int8 g64, zero points", "int4 to int8 g64, zero points"),
        *("e4m3 g128", "nvfp4", "mxfp4", "mxfp8", "mxfp4 to e4m3"),
    ],
)
def test_random_packed_weights_are_ordinary_ones(name):
    """Times must not come from bits that no checkpoint gives: huge scales, zero points far from all codes."""
    fmt, scale_dtype = PACKED[name]["fmt"], PACKED[name].get("scale_dtype", "float32")

    @jax.jit
    def make():
        w = random_packed_weights(fmt, (2, 1, 64, 512), scale_dtype)
        return w.zero, dequantized(w)

    zero, values = jax.device_get(make())
    if fmt.has_zero_point:
        assert np.abs(zero_point_of(fmt, zero.astype(np.float32))).max() <= 8
    assert np.isfinite(values).all() and np.abs(values).max() < 8
    assert 1e-5 < np.median(np.abs(values[values != 0]))


def test_search_over_packed_weights():
    def timer(desc, config, key, tokens):
        return 1.0 + abs(config.block_m - 24) + config.num_consumers

    (entry,) = tune([PACKED_KEY], [256], timer, 132)
    assert entry.key == PACKED_KEY and entry.config.block_m == 24
    assert {type(config) for config in (entry.config.gemm1, entry.config.gemm2)} == {PackedConfig}


def test_lookup():
    assert GOOD.buckets(KEY) == (16, 64)
    assert [GOOD.lookup(KEY, t).tokens for t in (1, 16, 17, 64, 5000)] == [16, 16, 64, 64, 64]
    assert GOOD.lookup(dataclasses.replace(KEY, intermediate_size=512), 16) is None


@pytest.mark.parametrize(
    "changes",
    [
        dict(dtype="int8"),
        dict(rhs_scale="tensor"),
        dict(lhs_scale="tensor", rhs_scale="tensor"),
        dict(lhs_scale="tensor", rhs_scale="tensor", requantize="tensor"),
        dict(dtype="int8", lhs_scale="tensor"),
    ],
)
def test_layers_without_entries_take_those_of_a_format_like_theirs(changes):
    key = dataclasses.replace(KEY, **changes)
    assert GOOD.lookup(key, 9) == Entry(key, 16, PAIR, 90.0, "with times of fp8_channel")
    own = Entry(key, 64, PAIR, 70.0)
    assert GOOD.merged([own]).lookup(key, 9) is own and GOOD.buckets(key) == ()


def test_entries_that_do_not_reach_give_way_to_lent_ones_that_do():
    own = Entry(dataclasses.replace(KEY, dtype="int8"), 2, PAIR, 9.0)
    table = GOOD.merged([own])
    assert [table.lookup(own.key, tokens).tokens for tokens in (1, 4, 5, 64, 128)] == [2, 2, 16, 64, 64]
    assert table.lookup(own.key, 5).source == "with times of fp8_channel"
    assert table.lookup(own.key, 129) is own  # nobody's reaches so many


@pytest.mark.parametrize(
    "changes",
    [
        dict(dtype="bfloat16", lhs_scale="none", rhs_scale="none"),
        dict(lhs_scale="group", rhs_scale="block"),
        dict(dtype="int8", intermediate_size=512),
    ],
)
def test_layers_that_nobody_lends_to(changes):
    assert GOOD.lookup(dataclasses.replace(KEY, **changes), 16) is None


def test_packed_layers_borrow_step_by_step():
    """float16 from bfloat16, each with scales of its own dtype; then without zero points; then bfloat16 scales."""
    entry = Entry(PACKED_KEY, 16, PACKED_PAIR, 70.0)
    table = Table("NVIDIA H200", (entry,))
    for operand in ("bfloat16", "float16"):
        for scale_dtype in ("bfloat16", "float16", "float32"):
            for zeros in (False, True):
                changes = dict(operand=operand, scale_dtype=scale_dtype, has_zero_point=zeros)
                key = dataclasses.replace(PACKED_KEY, **changes)
                found = table.lookup(key, 16)
                lent = dataclasses.replace(entry, key=key, source="with times of int4_g128")
                assert found == (entry if key == PACKED_KEY else lent)
    for changes in (
        dict(group_size=64),
        dict(operand="int8"),
        dict(element="int8"),
        dict(scale="none", group_size=None),
    ):
        assert table.lookup(dataclasses.replace(PACKED_KEY, **changes), 16) is None
    half = dataclasses.replace(PACKED_KEY, operand="float16", scale_dtype="float16")
    assert half.lender == PACKED_KEY
    assert dataclasses.replace(PACKED_KEY, operand="int8", has_zero_point=True).lender is None


@pytest.mark.parametrize("name", (*FORMATS, *PACKED_FORMATS))
def test_formats_know_their_names(name):
    key = PackedLayerKey(8, 2, 512, 256, **PACKED_FORMATS[name]) if name in PACKED_FORMATS else None
    key = key or LayerKey(8, 2, 512, 256, projections=1, **FORMATS[name])
    assert key.format_name == name
    assert key.lender is None or key.lender.format_name is not None


@pytest.mark.parametrize(
    ("tokens", "num_experts", "near", "far"),
    [
        (64, 128, (8, 64, 128), (1, 7, 129, 8192)),  # 1 row an expert
        (64, 4, (8, 64), (1, 7, 65, 128, 8192)),  # 32 rows, which already take two tiles
        (1024, 8, (128, 1024, 1 << 17), (1, 127)),  # 256 rows
        (16, 128, (2, 16, 32), (1, 33)),
    ],
)
def test_entries_reach_tokens_like_theirs(tokens, num_experts, near, far):
    entry = Entry(dataclasses.replace(KEY, num_experts=num_experts, top_k=2), tokens, PAIR, 1.0)
    assert all(entry.reaches(t) for t in near) and not any(entry.reaches(t) for t in far)


@pytest.mark.parametrize(("block_m", "most"), [(32, 64), (48, 73), (96, 128), (128, 128)])
def test_entries_reach_more_tokens_while_an_expert_fits_a_tile(block_m, most):
    """32 rows an expert where they were measured."""
    pair = dataclasses.replace(PAIR, block_m=block_m)
    entry = Entry(dataclasses.replace(KEY, num_experts=4, top_k=2), 64, pair, 1.0)
    assert [tokens for tokens in range(64, 200) if entry.reaches(tokens)] == [*range(64, most + 1)]


def test_shipped_entries_reach_what_lies_between_their_buckets():
    """Of layers that were timed at every usual number of tokens, all that is in between and above."""
    table, checked = table_for("NVIDIA H200"), 0
    for key in {entry.key for entry in table.entries}:
        if {1, 16, 64, 256, 1024, 8192} <= set(table.buckets(key)):
            checked += 1
            for tokens in (1, 2, 15, 16, 17, 63, 65, 255, 257, 1023, 1025, 4097, 8192, 16384, 1 << 17):
                assert table.lookup(key, tokens).reaches(tokens), (key, tokens)
    assert checked > 100


def test_files_come_back_as_they_were(tmp_path):
    path = tmp_path / "table.json"
    GOOD.save(path)
    assert load_table(path) == GOOD
    better = Entry(KEY, 16, PAIR, 80.0)
    packed = [Entry(PACKED_KEY, 16, PACKED_PAIR, 70.0), Entry(PACKED_KEY, 1, PACKED_PAIR, 9.0, "with times of others")]
    merged = GOOD.merged([better, *packed])
    merged.save(path)
    assert set(load_table(path).entries) == {better, GOOD.entries[1], *packed}
    assert load_table(path).lookup(PACKED_KEY, 9).tokens == 16
    Table("NVIDIA H100").save(path)
    assert load_table(path) == Table("NVIDIA H100")


def test_layers_stand_once_in_a_file(tmp_path):
    """Formats by name, or by their fields where they have none; fields of both products once, or in pairs."""
    path = tmp_path / "table.json"
    unnamed = dataclasses.replace(KEY, dtype="float16", lhs_scale="none", rhs_scale="none", projections=1)
    table = GOOD.merged([Entry(unnamed, 1, PAIR, 8.0), Entry(PACKED_KEY, 16, PACKED_PAIR, 70.0)])
    table.save(path)
    assert set(load_table(path).entries) == set(table.entries)
    plain, gated = json.loads(path.read_text())["layers"]
    assert plain["projections"] == 1 and plain["formats"][0]["format"] == {"dtype": "float16"}
    assert [stored["format"] for stored in gated["formats"]] == ["fp8_channel", "int4_g128"]
    (packed,) = gated["formats"][1]["entries"]
    assert packed == dict(tokens=16, block_m=16, num_consumers=4, step_blocks=[2, 4], num_stages=5, micros=70.0)


def _stored(table):
    """Entries of the first format of the first layer."""
    return table["layers"][0]["formats"][0]["entries"]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda t: t.update(format=3), "expected an object of format 2"),
        (lambda t: t.update(format=1), "expected an object of format 2"),
        (lambda t: t.update(format=1, entries=t.pop("layers")), "expected an object of format 2"),
        (lambda t: t.update(device=3), "device is 3"),
        (lambda t: t["layers"].append(t["layers"][0]), "two entries for one layer"),
        (lambda t: t["layers"].append(3), r"layer 1: found int, expected an object with formats"),
        (lambda t: t["layers"][0].update(formats={}), "layer 0: formats is a dict"),
        (lambda t: t["layers"][0]["formats"][0].pop("entries"), r"a format: found \['format'\]"),
        (lambda t: t["layers"][0]["formats"][0].update(format="fp9"), "layer 0, fp9: expected entries and a format of"),
        (lambda t: _stored(t)[1].pop("micros"), r"layer 0, fp8_channel, entry 1: found \["),
        (lambda t: _stored(t).append(3), r"entry 2: found int"),
        (lambda t: _stored(t)[0].update(tokens=0), "entry 0: tokens=0"),
        (lambda t: t["layers"][0].update(experts=3), "entry 0: layer is"),
        (lambda t: t["layers"][0].pop("hidden_size"), "entry 0: layer lacks hidden_size"),
        (lambda t: t["layers"][0].update(hidden=t["layers"][0].pop("hidden_size")), "entry 0: layer is"),
        (lambda t: _stored(t)[0].update(block_m=[32, 16]), "block_m is 32 and 16"),
        (lambda t: _stored(t)[0].update(num_stages=[4, 99]), "entry 0: gemm2 cannot run: needs"),
        (lambda t: _stored(t)[0].update(num_stages=[4]), r"num_stages is \[4\], expected a positive integer"),
        (lambda t: _stored(t)[0].update(num_stages=["4", 4]), "num_stages is '4', expected a positive integer"),
        (lambda t: _stored(t)[0].update(block_m=0), "block_m is 0, expected a positive integer"),
        (lambda t: _stored(t)[0].update(swap_ab=1), "swap_ab is 1, expected true or false"),
        (lambda t: _stored(t)[0].update(row_chunk=True), "row_chunk is True, expected a positive integer or null"),
        (lambda t: _stored(t)[0].update(micros=math.nan), "micros=nan, expected a positive integer and number"),
        (lambda t: t["layers"][0].update(num_experts=None), "num_experts is None, expected a positive integer"),
        (lambda t: t["layers"][0].update(num_experts=True), "num_experts is True, expected a positive integer"),
        (
            lambda t: t["layers"][0]["formats"][0].update(format={"element": "int9"}),
            "element is 'int9', expected one of",
        ),
        (lambda t: _stored(t)[0].update(source=3), "source=3"),
        (lambda t: t["layers"][0]["formats"][0].update(format={"element": "int4", "dtype": "int8"}), "layer is"),
    ],
)
def test_damaged_files_are_refused_by_name(change, match, tmp_path):
    path = tmp_path / "table.json"
    GOOD.save(path)
    stored = json.loads(path.read_text())
    change(stored)
    path.write_text(json.dumps(stored))
    with pytest.raises(ValueError, match=match) as caught:
        load_table(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("data", [b"{", b"\xff\xfe\x00", b"[" * 100_000])
def test_a_file_that_is_no_json(tmp_path, data):
    (tmp_path / "t.json").write_bytes(data)
    refuses(ValueError, "not JSON", load_table, tmp_path / "t.json")


def test_shipped_tables_load():
    for kind in ("NVIDIA H200", "NVIDIA H100 80GB HBM3"):
        assert table_for(kind).device == kind and table_for(kind).entries
    assert table_for("NVIDIA Something Else") == Table("NVIDIA Something Else")


def test_a_like_gpu_lends_its_table():
    """By SMs; ``where`` says so."""
    own, lent = (table_for(Gpu(kind, 132)) for kind in ("NVIDIA H200", "NVIDIA GH200 480GB"))
    assert len(lent.entries) == len(own.entries) > 2000 and lent.device == "NVIDIA GH200 480GB"
    found, entry = (table.lookup(KEY, 64) for table in (lent, own))
    assert entry.where is None and dataclasses.replace(found, where=None) == entry
    assert found.where == "on NVIDIA H200 (132 SMs as here, 4.8 TB/s beside 4 here)"
    assert table_for(Gpu("NVIDIA H99", 132)).lookup(KEY, 64).where == "on NVIDIA H200 (132 SMs as here)"
    borrowed = lent.lookup(dataclasses.replace(KEY, lhs_scale="tensor"), 64)  # a lent format of a lent table
    assert borrowed.source == "with times of fp8_channel" and borrowed.where == found.where
    for other in (Gpu("NVIDIA H20", 78), Gpu("NVIDIA H100 PCIe", 114)):
        assert table_for(other).entries == ()


def test_a_gpus_own_entries_stand_before_lent_ones(monkeypatch, tmp_path):
    """Cell by cell: where its table has none for a number of tokens, the like GPU's serves."""
    own = Entry(KEY, 64, PAIR, 1.0)
    lent = Table("NVIDIA H200", tuple(entry for entry in table_for("NVIDIA H200").entries if entry.key == KEY))
    for table in (lent, Table("NVIDIA H99", (own,))):
        table.save(tmp_path / path_for(table.device).name)
    monkeypatch.setattr("pallas_kernels.tuning.table.FOLDER", tmp_path)
    table_for.cache_clear()
    try:
        table = table_for(Gpu("NVIDIA H99", 132))
        assert table.lookup(KEY, 64) == own
        assert table.lookup(KEY, 16).where == "on NVIDIA H200 (132 SMs as here)"
        assert len(table.entries) == len(lent.entries)
    finally:
        table_for.cache_clear()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    table_for.cache_clear()
    yield tmp_path
    table_for.cache_clear()


def test_the_users_own_table_comes_first(cache):
    gpu, own = Gpu("NVIDIA H100 80GB HBM3", 132), Entry(KEY, 64, PAIR, 1.0)
    before = table_for(gpu)
    update(user_path(gpu.kind), gpu.kind, [own])
    assert user_path(gpu.kind).is_relative_to(cache)
    table = table_for(gpu)  # what was cached is dropped
    assert table.lookup(KEY, 64) == dataclasses.replace(own, where="here")
    assert table.lookup(KEY, 16) == before.lookup(KEY, 16) != None  # noqa: E711
    assert len(table.entries) == len(before.entries)
    assert load_table(user_path(gpu.kind)).entries == (own,)  # ``where`` is not saved


@pytest.mark.parametrize("text", ["{", pytest.param('{"format": 9}', marks=pytest.mark.slow), None])
def test_a_users_table_that_is_damaged_is_left_out(cache, text):
    gpu = Gpu("NVIDIA H200", 132)
    path = user_path(gpu.kind)
    path.parent.mkdir(parents=True)
    if text is None:
        Table("NVIDIA Other", GOOD.entries).save(path)
    else:
        path.write_text(text)
    with pytest.warns(UserWarning, match=f"{re.escape(str(path))}: .*left out: remove the file"):
        table = table_for(gpu)
    assert table.entries == table_for("NVIDIA H200").entries


def test_processes_update_one_table_without_loss(tmp_path):
    """Each adds entries of its own, at the same time."""
    path = tmp_path / "table.json"
    code = """if True:
        import pathlib, sys
        from pallas_kernels.grouped_gemm import GemmConfig
        from pallas_kernels.tuning import Entry, LayerConfig, LayerKey, update
        key, gemm = LayerKey(8, 2, 512, 256, "bfloat16"), GemmConfig(16, 128, 4, swap_ab=True)
        for tokens in range(int(sys.argv[2]), 40, 2):
            entry = Entry(key, tokens, LayerConfig(16, gemm, gemm), 1.0)
            update(pathlib.Path(sys.argv[1]), "NVIDIA H200", [entry])
    """
    started = [subprocess.Popen([sys.executable, "-c", code, str(path), first]) for first in ("1", "2")]
    assert [process.wait() for process in started] == [0, 0]
    assert sorted(entry.tokens for entry in load_table(path).entries) == list(range(1, 40))
    assert {one.name for one in tmp_path.iterdir()} == {"table.json", "table.lock"}


def test_where_users_tables_lie(monkeypatch):
    monkeypatch.setenv("HOME", "/home/one")
    for named in ("", "relative"):  # which the XDG specification has ignored
        monkeypatch.setenv("XDG_CACHE_HOME", named)
        assert str(user_path("NVIDIA H200")).startswith("/home/one/.cache/moe_jax/tuning/kernels-")


@pytest.mark.parametrize("num_sms", [78, 114, 132])
def test_the_heuristic_follows_the_number_of_sms(num_sms):
    """Every configuration has a CTA for each SM, and none that was passed over needs fewer columns in a row."""
    for key in (KEY, dataclasses.replace(KEY, num_experts=8, top_k=2), LayerKey(32, 8, 7168, 2048, **FORMATS["bf16"])):
        for tokens in (16, 2048):
            for block_m in (16, 128):
                for desc in key.products(tokens, block_m):
                    chosen = choose_config(desc, block_m, num_sms)
                    found = candidates(desc, block_m, num_sms)
                    assert {config.num_sms for config in found} == {chosen.num_sms} == {num_sms}
                    tiles = expected_tiles(desc, block_m)
                    depths = [rounds_of(tiles * -(-desc.n // c.block_n), num_sms) * c.block_n for c in found]
                    alone = dataclasses.replace(chosen, cluster=1, shares_weights=False)
                    assert depths[found.index(alone)] <= 1.08 * min(depths)


@pytest.mark.parametrize(
    ("fmt", "experts", "tokens", "expected"),
    [
        ("fp8_block", 256, 8192, True),
        ("fp8_block", 256, 2048, False),  # an expert is one tile
        ("fp8_block", 128, 2048, False),
        ("fp8_block", 32, 1024, False),  # too few rounds for CTAs to drift apart
        ("fp8_block", 32, 8192, True),
        ("fp8_channel", 32, 1024, False),
        ("fp8_channel", 256, 8192, True),
        ("bf16", 256, 512, False),  # small-M tiles
    ],
)
def test_ctas_of_one_expert_are_kept_in_step(fmt, experts, tokens, expected):
    key = LayerKey(experts, 8, 7168, 2048, **FORMATS[fmt])
    block_m = choose_block_m(tokens * 8 / experts, may_swap=key.may_swap, may_be_large_m=key.may_be_large_m)
    chosen = [choose_config(desc, block_m, 132) for desc in key.products(tokens, block_m)]
    assert [config.shares_weights for config in chosen] == [expected] * 2
    assert not any(choose_config(desc, block_m, 131).shares_weights for desc in key.products(tokens, block_m))


def test_dense_matrices_and_outputs_beside_have_no_clusters():
    key = LayerKey(32, 8, 7168, 2048, **FORMATS["bf16"])
    (desc, _) = key.products(8192, 128)
    assert choose_config(desc, 128, 132).shares_weights
    for changes in (dict(num_experts=1), dict(keeps_before=True)):
        assert not choose_config(dataclasses.replace(desc, **changes), 128, 132).shares_weights


def test_fewer_sms_take_other_tiles():
    key = LayerKey(8, 2, 4096, 14336, **FORMATS["bf16"])
    descs = [desc for tokens in (1, 16, 64, 256, 1024) for desc in key.products(tokens, 64)]
    widths = {sms: [choose_config(desc, 64, sms).block_n for desc in descs] for sms in (78, 114, 132)}
    assert widths[78] != widths[132] and widths[114] != widths[132]


def test_command(tmp_path, capsys):
    path = tmp_path / "h200.json"
    arguments = [*"--layer 128,8,2048,768 --formats fp8_channel,fp8_block,nvfp4 --tokens 1,64 --out".split(), str(path)]
    with on_hopper():
        assert autotune.main(arguments, timer=fake_timer) == 0
        assert autotune.main([*arguments[:3], "bf16", *arguments[4:]], timer=fake_timer) == 0
    table = load_table(path)
    packed = [entry for entry in table.entries if isinstance(entry.key, PackedLayerKey)]
    assert {(entry.key.element, entry.tokens) for entry in packed} == {("e2m1", 1), ("e2m1", 64)}
    plain = [entry for entry in table.entries if entry not in packed]
    assert {(entry.key.dtype, entry.key.rhs_scale, entry.tokens) for entry in plain} == {
        (dtype, scale, tokens)
        for dtype, scale in (("float8_e4m3fn", "channel"), ("float8_e4m3fn", "block"), ("bfloat16", "none"))
        for tokens in (1, 64)
    }
    assert "tokens=64" in capsys.readouterr().out


def test_a_kernel_is_lowered_once_for_all_calls_that_are_timed():
    """Lowering takes longer than everything else of a configuration."""
    desc, config = KEY.products(16, 16)[0], PAIR.gemm1
    operands = jax.eval_shape(lambda: random_operands(desc, 16, KEY))
    with on_hopper():
        assert launches(autotune.products_of(desc, config), random_routings(desc, 16, KEY, 16, 3), *operands) == 1


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--layer", "1,2,3"], "expected four positive integers"),
        (["--layer", "8,2,0,128"], "expected four positive integers"),
        (["--layer", "2,8,256,128"], "expected four positive integers"),
        (["--layer", "8,2,256,128", "--tokens", "16,x"], "--tokens 16,x"),
        (["--layer", "8,2,256,128", "--tokens", "0"], "--tokens 0"),
        (["--layer", "8,2,256,128", "--formats", "fp9"], "--formats fp9"),
        (["--layer", "8,2,256,128"], "needs a Hopper GPU"),
    ],
)
def test_command_says_what_is_wrong(arguments, match, capsys):
    with pytest.raises(SystemExit):
        autotune.main(arguments, timer=fake_timer)
    assert match in capsys.readouterr().err


def test_calls_of_a_program_have_routings_of_their_own():
    """512 tokens on 8 experts are 128 rows each: in tiles of 144 some calls need a ninth tile; every row is in one."""
    key = LayerKey(8, 2, 4096, 14336, **FORMATS["fp8_channel"])
    desc = key.products(512, 144)[0]
    found = random_routings(desc, 144, key, 512, 10)
    assert {int(routing["num_tiles"]) for routing in found} == {8, 9}
    assert len({tuple(routing["tile_rows"].tolist()) for routing in found}) == 10
    for routing in found:
        rows, experts, count = routing["tile_rows"], routing["tile_expert"], int(routing["num_tiles"])
        assert rows.sum() == 2 * 512 and rows.max() <= 144 and (rows[:count] > 0).all() and (rows[count:] == 0).all()
        assert set(experts[:count].tolist()) == set(range(8)) and (experts[count:] == -1).all()
    single = random_routings(KEY.products(1, 16)[0], 16, KEY, 1, 40)
    assert len({tuple(routing["tile_expert"].tolist()) for routing in single}) > 35


def test_the_least_burst_counts_and_short_calls_are_repeated(monkeypatch):
    clock, calls = [0.0], []

    def run():
        calls.append(0)
        clock[0] += 0.001 if 11 < len(calls) <= 15 else 0.00125  # the third burst is the fast one

    monkeypatch.setattr(timing, "time", types.SimpleNamespace(perf_counter=lambda: clock[0]))
    found = timing.least_of_bursts(run)
    repeats = (len(calls) - 3) // timing.BURSTS
    assert repeats == int(0.006 / 0.00125) == 4
    assert found == pytest.approx(0.001)
