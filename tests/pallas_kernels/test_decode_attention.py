"""decode_attention: the reference against NumPy float64, refusals, lowering for CUDA, and the Hopper kernel on a GPU.

Layout contract: row b keeps its keys in the slots [starts[b], lengths[b]) and has its queries at first_slots[b] + s.
What other slots hold does not matter, NaN included. A query that sees nothing gives zeros. The bits of a row do not
depend on the other rows.
"""

import dataclasses
import functools
import itertools
import threading
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.decode_attention import (
    DecodeConfig,
    combine_quantized_sm90,
    combine_sm90,
    config_error,
    decode_attention,
    items_sm90,
    latents_sm90,
    outputs_sm90,
    quantizing_error,
    rows_of,
    schedule,
    widen_sm90,
)
from pallas_kernels.decode_attention import kernel_sm90 as decode_kernel
from pallas_kernels.decode_attention.api import queries_in_columns
from pallas_kernels.decode_attention.config import E4M3_WIDTHS, DecodeForm, choose_config, shared_bytes
from pallas_kernels.quantize_and_permute import by_thread_sm90, quantize_and_permute
from tests.support.cases.hopper_layers import on_hopper
from tests.support.kernels import warpgroups
from tests.support.kernels.case import launches
from tests.support.kernels.decode_cases import DECODES, SMS, WIDTHS, combine_case, decode_cases, decode_desc
from tests.support.kernels.in_lockstep import Memory, simt_of
from tests.support.oracles.tolerances import Tolerance, assert_rows_close
from tests.support.refusals import refuses

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
SCALES = np.float32(0.013), np.float32(0.31)  # of keys and values that are codes
# (start, length, first slot) of each row, for up to three queries and 60 slots: a full row, one padded on the left, one
# whose last queries are padding, one of a single token, and one without keys.
PLACES = ((0, 60, 57), (7, 31, 28), (3, 40, 38), (5, 6, 5), (0, 0, 4))


def make(desc, places, seed=0):
    """(arrays, places by name, sinks, expected in float64); slots outside [start, length) hold NaN. Codes stand for
    numbers of SCALES times as much."""
    rng = np.random.default_rng(seed)
    dtype = DTYPES[desc.dtype]
    stored, (k_scale, v_scale) = (ml_dtypes.float8_e4m3fn, SCALES) if desc.is_e4m3 else (dtype, (1, 1))
    caches = (desc.batch, desc.num_kv_heads, desc.num_slots)
    q = (2 * rng.standard_normal((desc.batch, desc.num_queries, desc.num_heads, desc.width))).astype(dtype)
    k = (rng.standard_normal((*caches, desc.width)) / k_scale).astype(stored)
    v = (rng.standard_normal((*caches, desc.value_width)) / v_scale).astype(stored)
    sinks = rng.standard_normal(desc.num_heads).astype(np.float32) * 3 if desc.has_sinks else None
    if sinks is not None and desc.dtype == "bfloat16":  # as models keep them
        sinks = sinks.astype(dtype)
    expected = np.zeros((*q.shape[:3], desc.value_width))
    for b, (start, length, first) in enumerate(places):
        outside = (np.arange(desc.num_slots) < start) | (np.arange(desc.num_slots) >= length)
        k[b, :, outside] = v[b, :, outside] = np.nan
        for s in range(desc.num_queries):
            slot = first + s
            low = start if desc.window is None else max(start, slot - desc.window + 1)
            high = min(slot + 1, length)
            for n in range(desc.num_heads if high > low else 0):
                m = n // (desc.num_heads // desc.num_kv_heads)
                scores = k[b, m, low:high].astype(np.float64) @ q[b, s, n].astype(np.float64)
                scores *= desc.scale * np.float64(k_scale)
                sink = -np.inf if sinks is None else np.float64(sinks[n])
                top = max(scores.max(), sink)
                weights = np.exp(scores - top)
                total = weights.sum() + np.exp(sink - top)
                expected[b, s, n] = weights @ v[b, m, low:high].astype(np.float64) / total * np.float64(v_scale)
    names = ("starts", "lengths", "first_slots")
    return (q, k, v), dict(zip(names, np.array(places, np.int32).T, strict=True)), sinks, expected


def test_values_among_the_keys():
    """As an MLA cache has them: the same as with those elements as an array of their own."""
    desc = decode_desc(24, 16, "float32", batch=5, num_slots=60, num_heads=6, num_kv_heads=1)
    (q, k, _), places, _, _ = jax.tree.map(jnp.asarray, make(desc, PLACES))
    call = functools.partial(decode_attention, scale=0.3, **places)
    found = call(q, k, None, value_width=16, implementation="reference")
    np.testing.assert_array_equal(found, call(q, k, k[..., :16], implementation="reference"))


def run(desc, arrays, places, sinks, implementation, config=None, value_width=None, **options):
    call = jax.jit(
        lambda arrays, places, sinks: decode_attention(
            *arrays,
            **places,
            scale=desc.scale,
            window=desc.window,
            sinks=sinks,
            value_width=value_width,
            scales=tuple(map(jnp.float32, SCALES)) if desc.is_e4m3 else None,
            implementation=implementation,
            config=config,
            **options,
        )
    )
    return jax.tree.map(np.asarray, call(*jax.tree.map(jnp.asarray, (arrays, places, sinks))))


@pytest.mark.parametrize("name", DECODES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_reference(name, dtype):
    options = DECODES[name] | dict(batch=5, num_slots=60, num_heads=6, num_kv_heads=2)
    options |= dict(window=9) if "window" in options else {}
    desc = decode_desc(16, 8, dtype, **options)
    arrays, places, sinks, expected = make(desc, PLACES)
    found = run(desc, arrays, places, sinks, "reference")
    assert_rows_close(found, expected, Tolerance(DTYPES[dtype], 64.0 if dtype == "float32" else 1.0))


@pytest.mark.parametrize("name", ["one query", "three queries, window, sinks"])
def test_codes(name):
    """A cache in e4m3."""
    options = DECODES[name] | dict(batch=5, num_slots=60, num_heads=6, num_kv_heads=2, is_e4m3=True)
    desc = decode_desc(16, 8, "float32", **options | (dict(window=9) if "window" in options else {}))
    arrays, places, sinks, expected = make(desc, PLACES)
    found = run(desc, arrays, places, sinks, "reference")
    assert_rows_close(found, expected, Tolerance(np.float32, 64.0))


@pytest.mark.parametrize("width", E4M3_WIDTHS)
def test_places_of_widened_codes(width):
    """All chunks of a step, each once, where TMA puts them in tiles of 8 rows whose 16 bytes are swizzled."""
    rows, rows_of_pass = 64, 128 * widen_sm90.CHUNK // width
    kinds, threads = max(1, 8 // rows_of_pass), np.arange(128)
    found = np.full(rows * width // 8, -1)
    for i in range(rows // rows_of_pass):
        step = i // kinds * kinds * 128 * 16
        at = widen_sm90.target_offsets(threads, width, i % kinds) + step
        found[at // 16] = threads + 128 * i
    expected = np.zeros_like(found).reshape(rows // 8, width // 64, 8, 8)
    for row, chunk in np.ndindex(rows, width // 8):
        expected[row // 8, chunk // 8, row % 8, chunk % 8 ^ row % 8] = row * width // 8 + chunk
    np.testing.assert_array_equal(found, expected.ravel())


def in_pages(arrays, seed=1):
    """(arrays with k and v in pages, the table): pages in any order, one row's last in memory beside another's first,
    and NaN in those of nobody."""
    q, *cached = arrays
    batch, heads, slots = cached[0].shape[:3]
    count = slots // 64
    table = np.random.default_rng(seed).permutation(batch * count + 3)[: batch * count].reshape(batch, count)
    pools = []
    for array in cached:
        pools.append(np.full((batch * count + 3, heads, 64, array.shape[3]), np.nan, array.dtype))
        pools[-1][table] = array.reshape(batch, heads, count, 64, -1).swapaxes(1, 2)
    return (q, *pools), table.astype(np.int32)


@pytest.mark.parametrize("is_e4m3", [False, True])
def test_pages(is_e4m3):
    desc = decode_desc(16, 8, "float32", batch=5, num_slots=128, num_heads=6, num_kv_heads=2, is_e4m3=is_e4m3)
    arrays, places, _, expected = make(desc, ((0, 128, 127), (70, 100, 99), (3, 40, 39), (5, 6, 5), (0, 0, 4)))
    paged, table = in_pages(arrays)
    table[2:, 1] = 1000  # behind their last slot
    found = run(desc, paged, places | dict(page_table=table), None, "reference")
    assert_rows_close(found, expected, Tolerance(np.float32, 64.0))


def test_wrong_calls():
    q, k = jnp.zeros((2, 1, 4, 64), jnp.bfloat16), jnp.zeros((2, 2, 16, 64), jnp.bfloat16)
    rows = dict(starts=jnp.zeros(2, jnp.int32), lengths=jnp.zeros(2, jnp.int32), first_slots=jnp.zeros(2, jnp.int32))
    good = dict(scale=0.1) | rows
    call = decode_attention
    refuses(ValueError, r"expected \(B, S, N, D\), \(B, M, L, D\), \(B, M, L, V\)", call, q, k, k[0], **good)
    refuses(ValueError, r"expected \(B, S, N, D\), \(B, M, L, D\)", call, q, k[..., :32], k, **good)
    refuses(ValueError, "M dividing N", call, q[:, :, :3], k, k, **good)
    refuses(TypeError, "q is bfloat16, k bfloat16, v float16", call, q, k, k.astype(jnp.float16), **good)
    refuses(ValueError, "window=0", call, q, k, k, window=0, **good)
    refuses(ValueError, "scale is 0", call, q, k, k, **good | dict(scale=0.0))
    refuses(ValueError, "value_width=None, v=None; expected 1 to 64", call, q, k, None, **good)
    refuses(ValueError, r"sinks is float32\(2,\)", call, q, k, k, sinks=jnp.zeros(2), **good)
    words = r"sinks is int32\(4,\), expected float32, bfloat16, float16 and \(4,\)"
    refuses(ValueError, words, call, q, k, k, sinks=jnp.zeros(4, jnp.int32), **good)
    refuses(ValueError, r"lengths is int32\(1,\)", call, q, k, k, **good | dict(lengths=rows["lengths"][:1]))
    refuses(NotImplementedError, "needs a Hopper GPU", call, q, k, k, implementation="hopper", **good)
    codes, scales = k.astype(jnp.float8_e4m3fn), (jnp.float32(1), jnp.float32(2))
    table = jnp.zeros((2, 1), jnp.int32)
    refuses(ValueError, "with a page_table; expected", call, q, k, k, page_table=table, **good)
    good_but = dict(page_table=table[:1]) | good
    refuses(ValueError, r"page_table is int32\(1, 1\), expected int32 of 2 rows", call, q, k, k, **good_but)
    refuses(TypeError, "k is float8_e4m3fn with no scales", call, q, codes, codes, **good)
    refuses(TypeError, "k is bfloat16 with scales", call, q, k, k, scales=scales, **good)
    refuses(TypeError, "k float8_e4m3fn, v bfloat16", call, q, codes, k, scales=scales, **good)
    refuses(ValueError, "expected two float32 of shape", call, q, codes, codes, scales=(scales[0], jnp.ones(2)), **good)


def test_config_error():
    desc, fits = decode_desc(128, 128), DecodeConfig(8, 256, 128, 3, SMS)
    assert config_error(desc, fits) is None
    for options, why in (
        (dict(block_kv=96), "block_kv=96"),
        (dict(split=192), "split=192: a multiple of block_kv=128"),
        (dict(num_stages=7), "bytes of shared memory"),
        (dict(num_stages=0), "at least one stage"),
        (dict(columns=12), "columns=12"),
        (dict(columns=64, num_stages=1), "columns=64: too many registers"),
        (dict(runs=True, columns=24, block_kv=64, num_stages=2), "added up by a CTA with columns=24"),
        (dict(runs=True, joins_rest=True), "without joins_rest"),
        (dict(runs=True, whole_tiles=True), "runs or whole tiles"),
    ):
        assert why in config_error(desc, dataclasses.replace(fits, **options))
    for options, why in (
        (dict(dtype="float32"), "float32"),
        (dict(width=96), "width=96"),
        (dict(num_slots=713), "num_slots=713"),
        (dict(width=640), "width=640"),
    ):
        assert why in config_error(dataclasses.replace(desc, **options), fits)


def test_codes_fit():
    for width in E4M3_WIDTHS:
        desc = decode_desc(width, width, is_e4m3=True)
        config = choose_config(desc, SMS)
        assert config_error(desc, config) is None and config.num_stages > 1
        assert config.block_kv == (64 if width == 256 else 128)
        assert choose_config(decode_desc(width, width), SMS).block_kv == 64
    assert "width=192, value_width=128 in e4m3" in config_error(decode_desc(192, 128, is_e4m3=True), config)
    latent = decode_desc(256, 128, num_kv_heads=1, is_latent=True, is_e4m3=True)
    assert "values of their own" in config_error(latent, config)


def test_choice_fits():
    for widths in WIDTHS:
        for batch in (1, 300):
            desc = dataclasses.replace(decode_desc(*widths), batch=batch)
            config = choose_config(desc, SMS)
            assert config_error(desc, config) is None
            items = batch * 2 * config.num_splits(desc)
            ctas_per_sm = 2 if max(widths) <= 128 and items > SMS else 1
            assert config.num_ctas == min(SMS * ctas_per_sm, items)
            assert ctas_per_sm * (shared_bytes(desc, config) + 1024) <= 228 * 1024
            deeper = dataclasses.replace(config, num_stages=config.num_stages + 1)
            assert ctas_per_sm * (shared_bytes(desc, deeper) + 1024) > 228 * 1024 or config.num_stages == 12
            pair = choose_config(desc, SMS, DecodeForm(block_kv=64, ctas_per_sm=2))
            assert pair.num_ctas == min(2 * SMS, items)
            assert 2 * shared_bytes(desc, pair) <= 228 * 1024 or pair.num_stages == 1
    latent = decode_desc(576, 512, num_heads=128, num_kv_heads=1, is_latent=True)
    assert config_error(latent, choose_config(latent, SMS)) is None
    rows = DecodeForm(swap_ab=False)
    assert not choose_config(latent, SMS, rows).swap_ab and choose_config(desc, SMS, rows).swap_ab


@pytest.mark.parametrize(
    "is_twice, options",
    [
        (True, {}),
        (True, dict(num_pages=999, num_slots=704)),
        (False, dict(is_e4m3=True)),
        (False, dict(num_queries=2, num_heads=8)),
        (False, dict(num_heads=32)),
        (True, dict(num_heads=32, batch=67)),  # with 16 columns more tiles than SMs
        (False, dict(num_heads=32, batch=66)),
        (False, dict(num_heads=48, batch=67)),
        (False, dict(value_width=192)),
        (False, dict(width=192)),
        (False, dict(batch=1)),
        (True, dict(batch=1, num_slots=1 << 17)),
        # splits of 1024 of its slots
        (False, dict(batch=1, num_slots=1 << 16)),
        (False, dict(batch=1, num_slots=1 << 17, window=128)),
        (True, dict(window=128, batch=96)),
    ],
)
def test_two_ctas_of_an_sm(is_twice, options):
    desc = dataclasses.replace(decode_desc(128, 128), **(dict(batch=64) | options))
    assert (choose_config(desc, SMS).num_ctas > SMS) == is_twice


def test_sums_have_room():
    desc = decode_desc(576, 512, num_slots=64, num_heads=128, num_kv_heads=1, is_latent=True)
    config = choose_config(dataclasses.replace(desc, batch=64), SMS)
    assert (config.split, config.num_splits(desc)) == (1024, 1)  # of a row of less than half a split
    many = dataclasses.replace(desc, batch=63, num_slots=163_840)
    assert "counted in 31 bits" in config_error(many, DecodeConfig(64, 256, 64, 2, SMS, False))
    many = decode_desc(64, 64, batch=300, num_queries=8, num_slots=131_072, num_heads=32, num_kv_heads=8)
    assert "counted in 31 bits" in config_error(many, choose_config(many, SMS))


def test_forms_of_latents():
    """By rows, and by tiles of 64 heads: DeepSeek-V3's 128 heads, Kimi-K2's 64, and a device's share of 16."""
    of_few, of_many = (256, (2048, 4096, 16384)), (1024, (4096, 16384))
    sizes = ((128, (16, 63, 67, 127), (64, 66, 128, 300)), (64, (16, 127, 133), (128, 132, 256)), (16, (), ()))
    for heads, few, many in sizes:
        desc = decode_desc(576, 512, num_heads=heads, num_kv_heads=1, num_slots=8192, is_latent=True)
        chosen = {batch: choose_config(dataclasses.replace(desc, batch=batch), SMS) for batch in (1, 15, *few, *many)}
        assert chosen[1].swap_ab and chosen[15].swap_ab
        for batches, form in ((few, of_few), (many, of_many)):
            assert all((chosen[batch].split, chosen[batch].doubles_at) == form for batch in batches)
            assert all(chosen[batch].joins_rest for batch in batches)
        assert not any(chosen[batch].swap_ab for batch in (*few, *many))


@pytest.mark.parametrize("case", decode_cases(), ids=lambda case: case.name)
@pytest.mark.sample(11)
def test_lowers_for_cuda(case):
    assert case.launches() == 1


@pytest.mark.parametrize("is_e4m3", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_second_launch_lowers_for_cuda(dtype, is_e4m3):
    desc = decode_desc(128, 128, dtype, is_e4m3=is_e4m3, has_sinks=True)
    assert combine_case("sinks", desc, choose_config(desc, SMS)).launches() == 1


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("options", [{}, dict(num_queries=3, window=70)], ids=["one query", "three queries, window"])
def test_latents_in_threads(monkeypatch, options, is_whole):
    """The body of the kernel whose rows are queries, by a thread for each warpgroup, and its sums added up here; of
    whole tiles the outputs."""
    desc = decode_desc(192, 128, "float32", batch=4, num_slots=264, num_heads=40, num_kv_heads=1, is_latent=True)
    desc = dataclasses.replace(desc, **options, **(dict(num_heads=64) if is_whole else {}))
    config = DecodeConfig(64, 128, 64, 2, 3, swap_ab=False, doubles_at=(50, 200))
    if is_whole:
        config = DecodeConfig(64, 256, 64, 2, 3, swap_ab=False, joins_rest=True, whole_tiles=True)
        assert config_error(dataclasses.replace(desc, dtype="bfloat16"), config) is None
    places = ((0, 264, 261), (70, 250, 247), (3, 40, 39), (5, 5, 0))
    if is_whole:  # empty rows before others of a CTA, behind them, and by themselves
        desc = dataclasses.replace(desc, batch=7)
        places = ((5, 5, 0), (0, 0, 0), *places[:3], (5, 5, 0), (0, 0, 0))
        config = dataclasses.replace(config, num_ctas=3 if options else 6)
    (q, k, _), named, _, _ = make(desc, places)
    for module in (latents_sm90, items_sm90):
        for name, stand_in in warpgroups.stand_ins().items():
            monkeypatch.setattr(module, name, stand_in, raising=False)
    monkeypatch.setattr(latents_sm90, "clear_rows", warpgroups.clear_rows)
    items = config.all_tiles(desc) * config.num_splits(desc)
    shapes = [(items, 64, 128), (items, 64), (items, 64)]
    shapes = [(desc.batch, desc.columns, 128)] if is_whole else shapes
    outputs = [np.full(shape, np.nan, np.float32) for shape in shapes]
    queries = np.array(queries_in_columns(desc, config, jnp.asarray(q)))

    def scratch():
        shapes = dict(q=(64, 192), k=(2, 64, 192), weights=(64, 64), shrink=(64,))
        memory = {name: warpgroups.Memory(np.full(shape, np.nan, np.float32)) for name, shape in shapes.items()}
        return memory | dict(full=warpgroups.Barriers(5), empty=warpgroups.Barriers(3, num_arrivals=2))

    refs = [warpgroups.Memory(array) for array in (queries, k, *named.values(), *outputs)]
    warpgroups.run(functools.partial(latents_sm90._kernel, desc, config, *refs), config.num_ctas, 4, scratch)
    monkeypatch.undo()
    expected = run(desc, (q, k, k[..., :128]), named, None, "reference")
    if is_whole:
        np.testing.assert_allclose(outputs[0].reshape(expected.shape), expected, rtol=2e-5, atol=2e-5)
        return
    by_tile = [array.reshape(desc.batch, config.num_tiles(desc), -1, *array.shape[1:]) for array in outputs]
    for row in range(desc.batch):
        sums, tops, totals = (array[row].astype(np.float64) for array in by_tile)
        written = ~np.isnan(totals)
        weights = np.where(written, np.exp2(tops - np.where(written, tops, -np.inf).max(1, keepdims=True)), 0)
        total = (weights * np.where(written, totals, 0)).sum(1)
        y = (weights[..., None] * np.where(written[..., None], sums, 0)).sum(1)
        y = np.where(total[..., None] == 0, 0, y / np.where(total == 0, 1, total)[..., None])
        y = y.reshape(-1, 128)[: desc.columns].reshape(desc.num_queries, desc.num_heads, 128)
        np.testing.assert_allclose(y, expected[row], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("joins_rest", [False, True])
@pytest.mark.parametrize("options", [{}, dict(num_queries=3, window=900)], ids=["one query", "three queries, window"])
def test_items(monkeypatch, options, joins_rest):
    """Each CTA's items: every split of every row, of the length that the row's own slots ask for, by one of them."""
    monkeypatch.setattr(items_sm90, "pl", warpgroups.stand_ins()["pl"])
    desc = decode_desc(64, 64, batch=11, num_slots=3000, num_heads=4, num_kv_heads=2, **options)
    config = DecodeConfig(8, 128, 64, 2, 7, doubles_at=(300, 1000), joins_rest=joins_rest)
    places = np.array([(0, 3000, 2997), (130, 1131, 1130), (130, 1130, 1129), (5, 306, 305), (5, 305, 304), (9, 0, 0)])
    # Of both sides of half a split, and with the first slot behind the last whole one.
    places = np.concatenate([places, [(0, 192, 191), (0, 191, 190), (150, 180, 179), (0, 1, 0), (2, 63, 62)]])
    found, walked = {}, 0
    for cta in range(config.num_ctas):
        work = items_sm90.Items(desc, config, jnp.int32(cta), *jnp.asarray(places.T, jnp.int32))
        for t in range(int(work._count)):
            item = jax.tree.map(int, dataclasses.asdict(work._item(jnp.int32(t))))
            if item["num_steps"]:
                assert item["index"] not in found
                found[item["index"]] = item
                walked += item["num_steps"]
    expected, steps = set(), 0
    for row, (start, length, slot) in enumerate(places):
        first = start if desc.window is None else max(start, slot - desc.window + 1)
        end = min(length, slot + desc.num_queries)
        size = 128 * 2 ** sum(end - first > bound for bound in config.doubles_at)
        for head in range(2):
            stop = max(1, (end + size // 2) // size) if joins_rest else -(-end // size)
            splits = range(min(first // size, stop - 1), stop) if first < end else ()
            assert stop <= config.num_splits(desc)
            if splits:  # what the second launch adds
                found_size, *bounds = schedule.splits_of(desc, config, jnp.int32(first), jnp.int32(end))
                assert (found_size, range(*map(int, bounds))) == (size, splits)
            places_of_sums = (row * 2 + head) * config.num_splits(desc)
            for split in splits:
                expected.add(places_of_sums + split)
                own = found[places_of_sums + split]
                assert (own["row"], own["head"]) == (row, head)
                own_first, own_end = max(first, split * size), end if split + 1 == stop else (split + 1) * size
                assert own["first_step"] == own_first // 64
                assert own["num_steps"] == -(-own_end // 64) - own_first // 64
                steps += own["num_steps"]
    assert found.keys() == expected and walked == steps


RUNS: dict[str, tuple[int, dict[str, Any], list[int]]] = {
    "as long, one tile a CTA": (8, {}, [900] * 4),
    "as long, two tiles a CTA": (5, {}, [900] * 4),
    "as long, a tile for several CTAs": (13, {}, [2999] * 4),
    "uneven": (7, {}, [3000, 200, 0, 1, 2999, 1024]),
    "one long row": (7, {}, [3000] + [60] * 11),
    "window": (7, dict(window=700), [3000, 200, 0, 699, 701, 2048]),
    "three queries": (4, dict(num_queries=3, num_heads=4), [3000, 5, 640]),
    "nothing": (3, {}, [0, 0]),
}


@pytest.mark.parametrize("case", RUNS)
def test_runs(monkeypatch, case):
    """Every split of every tile is in one item of one CTA, runs before others; no CTA has much more than the mean."""
    monkeypatch.setattr(items_sm90, "pl", warpgroups.stand_ins()["pl"])
    num_ctas, options, lengths = RUNS[case]
    desc = decode_desc(64, 64, batch=len(lengths), num_slots=3000, **(dict(num_heads=16, num_kv_heads=2) | options))
    config = DecodeConfig(8, 128, 64, 2, num_ctas, doubles_at=(300, 1000), runs=True)
    starts = np.minimum(np.arange(len(lengths)) * 37, lengths)
    places = np.array([starts, lengths, np.maximum(np.array(lengths) - desc.num_queries, 0)], np.int32)
    made = jax.jit(functools.partial(schedule.make_schedule, desc, config))(*places)
    expected, sizes = {}, {}
    for tile in range(config.all_tiles(desc)):
        slots = schedule.seen(desc, *(jnp.int32(a) for a in places[:, tile // (config.all_tiles(desc) // desc.batch)]))
        size, begin, stop = map(int, schedule.splits_of(desc, config, *slots))
        sizes[tile] = size // config.split
        for split in range(begin, stop):
            expected[tile * config.num_splits(desc) + split] = (max(int(slots[0]), split * size), size)
    found, loads = {}, []
    for cta in range(num_ctas):
        work = items_sm90.Items(desc, config, jnp.int32(cta), *jnp.asarray(places), made)
        units, is_behind = 0, False
        for t in range(int(work._count)):
            item = jax.tree.map(int, dataclasses.asdict(work._item(jnp.int32(t))))
            if not item["num_steps"]:
                continue
            tile = item["index"] // config.num_splits(desc)
            is_run = t < -(-(config.all_tiles(desc) - cta) // num_ctas)
            assert is_run or item["num_splits"] == 1
            assert not (is_run and is_behind)
            is_behind |= not is_run
            own = range(item["index"], item["index"] + item["num_splits"])
            assert not found.keys() & set(own)
            found |= dict.fromkeys(own, cta)
            units += item["num_splits"] * sizes[tile]
            # Steps follow each other from the first slot in use on.
            first, size = expected[own[0]]
            assert item["split"] == own[0] % config.num_splits(desc) and item["steps_of_split"] == size // 64
            assert item["first_step"] == first // 64
            assert item["num_steps"] <= (own[0] % config.num_splits(desc) + len(own)) * size // 64 - first // 64
        loads.append(units)
    assert found.keys() == expected.keys()
    mean, longest = sum(loads) / num_ctas, max(sizes.values())
    assert max(loads) <= mean * 17 / 16 + 1 + longest
    if case.startswith("as long, one"):
        assert int(made.first_rest[-1]) == 0  # whole tiles


def test_who_has_runs():
    def chosen(**options):
        return choose_config(decode_desc(128, 128, **(dict(batch=64, num_slots=1032, num_heads=32) | options)), SMS)

    few_tiles = dict(batch=16, num_slots=8200, num_kv_heads=4)
    long = dict(num_slots=8200, num_kv_heads=4)
    assert [chosen(**long).runs, chosen(**few_tiles).runs, chosen(num_slots=256).runs] == [True, False, False]
    assert not chosen(batch=300, num_slots=256).runs  # of one split there is nothing to add up
    assert chosen(**long, is_e4m3=True).runs and chosen(num_heads=48, num_kv_heads=3).runs
    assert not chosen(num_heads=64, num_kv_heads=2).runs  # 32 columns: no registers
    latents = decode_desc(576, 512, batch=8, num_heads=128, num_kv_heads=1, num_slots=8200, is_latent=True)
    assert not choose_config(latents, SMS).runs
    for form in (choose_config(latents, SMS), DecodeConfig(64, 128, 64, 2, SMS, swap_ab=False)):
        assert "no latents" in config_error(latents, dataclasses.replace(form, runs=True))
    config, desc = chosen(**long), decode_desc(128, 128, batch=64, num_slots=8200, num_heads=32, num_kv_heads=4)
    without = shared_bytes(desc, dataclasses.replace(config, runs=False))
    assert shared_bytes(desc, config) - without >= 130 * 8 * 4


def test_who_has_whole_tiles():
    """Those of as many full rows as there are CTAs, or a little fewer; and of short ones, however few."""

    def is_whole(quantization="none", **options):
        sizes = dict(batch=64, num_slots=1032, num_heads=32, num_kv_heads=4)
        desc = dataclasses.replace(decode_desc(128, 128), **(sizes | options))
        rows = None if quantization == "none" else rows_of(desc, quantization, None)
        config = choose_config(desc, SMS, rows=rows)
        assert config_error(desc, config) is None and not (config.whole_tiles and config.runs)
        assert rows is None or quantizing_error(desc, config, rows) is None
        assert (shared_bytes(desc, config) + 1024) * -(-config.num_ctas // SMS) <= 228 * 1024
        return config.whole_tiles

    assert is_whole() and is_whole(batch=256) and is_whole(is_e4m3=True) and is_whole(num_slots=1536)
    assert not is_whole(batch=96) and not is_whole(batch=16) and not is_whole(num_slots=1544)
    assert is_whole(batch=1, num_slots=256) and is_whole(batch=1, num_slots=8200, window=128)
    assert is_whole("e4m3_group") and is_whole("e4m3_group_ue8m0") and is_whole("e4m3_row")
    assert is_whole(num_queries=2) and not is_whole(num_queries=3)  # of 24 columns
    narrow = dict(width=64, value_width=64, num_heads=1, num_kv_heads=1, num_slots=256)
    assert is_whole(**narrow) and not is_whole("int8_row", **narrow)  # which no launch behind them quantizes
    # Splits of so many heads have no launch that quantizes them with one scale a row, if the row is short.
    many = dict(batch=48, num_slots=8192, num_heads=128, num_kv_heads=8, window=1000)
    assert is_whole("e4m3_row", **many) and not is_whole(**many)
    desc = dataclasses.replace(decode_desc(128, 128), **many | dict(window=4000))
    assert not choose_config(desc, SMS, rows=rows_of(desc, "e4m3_row", None)).whole_tiles

    def latents(**options):
        sizes = dict(batch=64, num_slots=1032, num_heads=128, num_kv_heads=1, is_latent=True)
        config = choose_config(decode_desc(576, 512, **(sizes | options)), SMS)
        return config.whole_tiles, config.swap_ab

    assert latents() == latents(num_queries=2) == (True, False)
    assert latents(batch=8, num_slots=64) == (False, True)  # keys are rows, which has no room for sums
    assert latents(num_slots=1536) == latents(has_sinks=True) == (False, False)  # two splits, sinks


@pytest.mark.parametrize(("quantization", "count"), [("none", 1), ("e4m3_group", 1), ("int8_row", 2)])
@pytest.mark.parametrize("kind", ["plain", "sinks", "codes"])
@pytest.mark.sample(2)
def test_whole_tiles_are_one_launch(kind, quantization, count):
    """And one more for scales a row."""
    cached = jnp.float8_e4m3fn if kind == "codes" else jnp.bfloat16
    shapes: Any = dict(q=((66, 1, 32, 128), jnp.bfloat16), k=((66, 4, 256, 128), cached), v=((66, 4, 256, 128), cached))
    shapes |= dict.fromkeys(("starts", "lengths", "first_slots"), ((66,), jnp.int32))
    shapes |= dict(sinks=((32,), jnp.float32)) if kind == "sinks" else {}
    arrays = {name: jax.ShapeDtypeStruct(*shape) for name, shape in shapes.items()}

    def attend(arrays):
        scales = (jnp.float32(0.5), jnp.float32(2)) if kind == "codes" else None
        given: Any = dict(scale=0.1, scales=scales, quantization=quantization, implementation="hopper")
        return decode_attention(**arrays, **given)

    with on_hopper():
        assert launches(attend, arrays) == count


@pytest.mark.parametrize("options", [{}, dict(num_queries=3, window=900)], ids=["one query", "three queries, window"])
def test_whole_tiles_are_items(monkeypatch, options):
    """Each tile is in one item of one CTA, with all splits and steps of its row, also where no slot is seen."""
    monkeypatch.setattr(items_sm90, "pl", warpgroups.stand_ins()["pl"])
    desc = decode_desc(64, 64, batch=5, num_slots=3000, num_heads=32, num_kv_heads=2, **options)
    config = DecodeConfig(16, 128, 64, 2, 7, doubles_at=(300, 1000), whole_tiles=True)
    rows = np.array([(0, 3000, 2997), (130, 1131, 1130), (5, 306, 305), (2, 63, 62), (9, 0, 0)], np.int32)
    found = {}
    for cta in range(config.num_ctas):
        work, seen = items_sm90.Items(desc, config, jnp.int32(cta), *jnp.asarray(rows.T)), []
        with jax.disable_jit():
            work.for_each(lambda item, *before, seen=seen: seen.append((jax.tree.map(int, vars(item)), *before)))
        before = np.cumsum([0] + [item["num_steps"] for item, *_ in seen])
        assert [tuple(map(int, counts)) for _, *counts in seen] == [*enumerate(before[:-1])]
        for item, *_ in seen:
            place = item["row"], item["head"], item["column"]
            assert place not in found
            found[place] = item
    columns = range(0, config.num_tiles(desc) * 16, 16)
    assert found.keys() == set(itertools.product(range(5), range(2), columns))
    for (row, *_), item in found.items():
        first, end = map(int, schedule.seen(desc, *map(jnp.int32, rows[row])))
        size, begin, stop = map(int, schedule.splits_of(desc, config, jnp.int32(first), jnp.int32(end)))
        assert (item["split"], item["num_splits"], item["steps_of_split"]) == (begin, stop - begin, size // 64)
        assert item["num_steps"] == (-(-end // 64) - first // 64 if first < end else 0)
        assert not item["num_steps"] or item["first_step"] == first // 64


def test_a_run_has_the_bits_of_the_second_launch():
    """What a CTA makes of one split more, and ``SplitSums.plus``: also of scores far apart, equal, and of none."""
    rng = np.random.default_rng(0)
    tops = np.float32([3, 3.001, outputs_sm90.FLOOR, 200, -90, 1, np.nan, 0.25])
    for first, second in itertools.product(tops, tops):
        parts = []
        for top in (first, second):
            sums = rng.standard_normal((64, 8)).astype(np.float32) * np.float32(1e3)
            totals = rng.uniform(1, 500, 8).astype(np.float32)
            parts.append(((jnp.asarray(sums),), jnp.full((8,), top), jnp.asarray(totals)))
        (joined,), top, total = decode_kernel._joined(*parts)
        (sums,), own_top, own_total = parts[0]
        before = outputs_sm90.SplitSums(own_top, (sums,), own_total)
        after = before.plus((parts[1][1], parts[1][2], parts[1][0]))
        for a, b in ((joined, after.numerators[0]), (top, after.top), (total, after.denominator)):
            np.testing.assert_array_equal(np.asarray(a).view(np.int32), np.asarray(b).view(np.int32))


def in_runs(desc, config, share, is_part, units, parts):
    """[(values, which are written)] of (sums, tops, totals): the first splits of each tile as a run, in the place of
    the first of them. is_part (tiles, splits): those in use; units: of the tiles' splits, how long they are."""
    held, is_part, lengths = [array.astype(np.float32) for array in parts], is_part.copy(), []
    for tile, used in enumerate(map(np.flatnonzero, is_part.copy())):
        size = jnp.int32(units[tile] * config.split)
        length = schedule.run_length(desc, config, jnp.int32(share), jnp.int32(tile), jnp.int32(len(used)), size)
        lengths.append((int(length), len(used)))
        zero = jnp.zeros(held[1].shape[-1])
        state = outputs_sm90.SplitSums(zero + outputs_sm90.FLOOR, (jnp.zeros(held[0].shape[2:]),), zero)
        for split in used[: lengths[-1][0]]:
            values, top, total = (jnp.asarray(array[tile, split]) for array in held)
            state = state.plus((top, total, (values,)))
        if not lengths[-1][0]:
            continue
        for array, value in zip(held, (state.numerators[0], state.top, state.denominator), strict=True):
            array[tile, used[:1]] = value
        is_part[tile, used[1 : lengths[-1][0]]] = False
    assert any(length > 1 for length, _ in lengths) or any(used > length == 0 for length, used in lengths)
    return [(array, is_part.reshape(*is_part.shape, *[1] * (array.ndim - 2))) for array in held]


@pytest.mark.parametrize("joins_rest", [False, True])
@pytest.mark.parametrize("doubles_at", [(), (100,)], ids=["equal splits", "longer splits"])
@pytest.mark.parametrize("swap_ab", [True, False], ids=["keys are rows", "queries are rows"])
@pytest.mark.sample(3)
def test_combine_in_lockstep(monkeypatch, swap_ab, doubles_at, joins_rest):
    """Sums of up to ten splits, three loaded at once, with the bits of all at once; those of splits that no query sees
    are not read. The first row has half as many, twice as long, where ``doubles_at`` says so. Where keys are rows,
    values are codes with a scale."""
    desc = decode_desc(64, 64, num_queries=2, num_heads=6, num_slots=640, window=600, has_sinks=True, is_e4m3=swap_ab)
    config = DecodeConfig(8, 64, 64, 1, 1, swap_ab, doubles_at, joins_rest)
    places = {"starts": (0, 130, 0), "lengths": (640, 200, 0), "first_slots": (638, 198, 0)}
    rng = np.random.default_rng(0)
    tiles, splits, width = config.all_tiles(desc), config.num_splits(desc), desc.value_width
    sums, tops = rng.standard_normal((tiles, splits, width, 8)), 5 * rng.standard_normal((tiles, splits, 8))
    totals, sinks = rng.uniform(1, 9, (tiles, splits, 8)), rng.standard_normal(6)
    is_seen = np.zeros((3, splits), bool)
    first_row = slice(5) if doubles_at else slice(None)
    is_seen[0, first_row] = True  # the first query's window begins at slot 39, in split 0
    is_seen[1, 2 : 3 if joins_rest else 4] = True
    outs = [Memory(3 * 2 * 6 * width) for _ in range(2)]

    def memory(values, is_written: Any = True):
        held = Memory(values.size, values.astype(np.float32).reshape(-1).view(np.int32))
        held.is_written = np.broadcast_to(is_written, values.shape).reshape(-1)
        return held

    of_tile = np.repeat(is_seen, tiles // 3, axis=0)[:, :, None]
    refs = [memory(sums if swap_ab else sums.swapaxes(2, 3), of_tile[..., None]), memory(tops, of_tile)]
    refs += [memory(totals, of_tile), *(np.array(place, np.int32) for place in places.values())]
    refs += [jnp.float32([7.0, 3.0])] * desc.is_e4m3 + [memory(sinks)]
    stand_ins = warpgroups.stand_ins() | dict(simt=simt_of(128))
    stand_ins["simt"].float_bits = lambda value, dtype: value.astype(dtype).view(jnp.uint16).astype(jnp.int32)
    for name in ("lax", "mosaic", "simt"):
        monkeypatch.setattr(combine_sm90, name, stand_ins[name])
    for name in ("lax", "simt"):
        monkeypatch.setattr(outputs_sm90, name, stand_ins[name])
    monkeypatch.setattr(schedule, "lax", stand_ins["lax"])
    for unroll, out in zip((3, 10), outs, strict=True):
        monkeypatch.setattr(combine_sm90, "UNROLL", unroll)
        monkeypatch.setattr(combine_sm90, "UNROLL_WIDE", unroll)
        body = functools.partial(combine_sm90._kernel, desc, config, *refs, out)
        warpgroups.run(body, combine_sm90.num_combining_ctas(desc, config), 1, dict)
    np.testing.assert_array_equal(*(out.values for out in outs))
    out = outs[0]
    if swap_ab and not joins_rest:
        units = np.repeat([2, 1, 1] if doubles_at else [1, 1, 1], tiles // 3)
        # Every CTA has one tile, or one has two of other rows, where long splits make no run.
        for num_ctas, share in ((tiles, 4), (tiles - 1, 2)):
            with_runs, of_runs = dataclasses.replace(config, num_ctas=num_ctas, runs=True), Memory(3 * 2 * 6 * width)
            is_part = np.repeat(is_seen, tiles // 3, axis=0)
            changed = in_runs(desc, with_runs, share, is_part, units, (sums, tops, totals))
            given = (*itertools.starmap(memory, changed), *refs[3:6], jnp.int32([share]), *refs[6:])
            body = functools.partial(combine_sm90._kernel, desc, with_runs, *given, of_runs)
            warpgroups.run(body, combine_sm90.num_combining_ctas(desc, config), 1, dict)
            np.testing.assert_array_equal(of_runs.values, out.values)
    weights = np.where(of_tile, np.exp2(tops), 0)
    own = np.exp(np.tile(sinks.reshape(2, 3), (3, 2)))  # tile -> column: the heads of each query
    numerator = np.einsum("tsvc,tsc->tcv", sums, weights)[:, :6]
    expected = numerator / ((totals * weights).sum(1)[:, :6] + own)[..., None] * (3.0 if desc.is_e4m3 else 1.0)
    expected = expected.reshape(3, 2, 2, 3, width).swapaxes(1, 2)  # row, query, key head, member
    assert out.is_written.all()
    np.testing.assert_allclose((out.values << 16).view(np.float32), expected.reshape(-1), rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("quantization", ["e4m3_row", "int8_row", "e4m3_group_ue8m0"])
@pytest.mark.sample(2)
def test_quantized_combine_in_lockstep(monkeypatch, quantization):
    """Two key heads of five query heads each, up to five splits, one more than are loaded at once: outputs in float64,
    rounded, and quantized as rows are. Splits of the second row are half as long. In the last row no slot is seen."""
    desc = decode_desc(128, 128, num_heads=10, num_slots=320, has_sinks=True)
    config = dataclasses.replace(choose_config(desc, SMS), split=32, doubles_at=(50,))
    places = {"starts": (0, 130, 0), "lengths": (320, 170, 0), "first_slots": (319, 169, 0)}
    rng, rows = np.random.default_rng(0), rows_of(desc, quantization, 8)
    assert quantizing_error(desc, config, rows) is None and config.columns == 8
    splits = config.num_splits(desc)
    sums, tops = rng.standard_normal((6, splits, 128, 8)), 5 * rng.standard_normal((6, splits, 8))
    totals, sinks = rng.uniform(1, 9, (6, splits, 8)), rng.standard_normal(10)
    is_seen = np.zeros((3, splits), bool)
    is_seen[0, :5], is_seen[1, 4:6] = True, True
    of_tile = np.repeat(is_seen, 2, axis=0)[:, :, None]

    def memory(values, is_written: Any = True):
        held = Memory(values.size, values.astype(np.float32).reshape(-1).view(np.int32))
        held.is_written = np.broadcast_to(is_written, values.shape).reshape(-1)
        return held

    refs = [memory(sums, of_tile[..., None]), memory(tops, of_tile), memory(totals, of_tile)]
    refs += [*(np.array(place, np.int32) for place in places.values()), memory(sinks)]
    codes, scales = Memory(3 * 1280), Memory(int(np.prod(rows.scale_shape)))
    warpgroups_of_cta = 1 if rows.is_grouped else 2
    meeting, simt = threading.Barrier(warpgroups_of_cta), simt_of(128)
    simt.barrier = lambda: meeting.wait(60)
    simt.thread_index = lambda: jnp.arange(128, dtype=jnp.int32) + 128 * warpgroups._here.warpgroup
    stand_ins = warpgroups.stand_ins() | dict(simt=simt)
    for name in ("lax", "mosaic", "simt"):
        monkeypatch.setattr(combine_quantized_sm90, name, stand_ins[name])
        monkeypatch.setattr(combine_sm90, name, stand_ins[name])
    for name in ("lax", "simt"):
        monkeypatch.setattr(outputs_sm90, name, stand_ins[name])
    monkeypatch.setattr(by_thread_sm90, "simt", simt)
    monkeypatch.setattr(schedule, "lax", stand_ins["lax"])
    body = functools.partial(
        combine_quantized_sm90._kernel, desc, config, rows, warpgroups_of_cta, *refs, codes, scales
    )
    warpgroups.run(body, 6 // warpgroups_of_cta, warpgroups_of_cta, lambda: dict(maxima=Memory(32)))
    for num_ctas, share in ((6, 4), (4, 3)):
        with_runs = dataclasses.replace(config, num_ctas=num_ctas, runs=True)
        changed = in_runs(desc, with_runs, share, is_seen.repeat(2, axis=0), [2, 2, 1, 1, 1, 1], (sums, tops, totals))
        given = (*itertools.starmap(memory, changed), *refs[3:6], jnp.int32([share]), *refs[6:])
        of_runs = [Memory(len(out.values)) for out in (codes, scales)]
        body = functools.partial(
            combine_quantized_sm90._kernel, desc, with_runs, rows, warpgroups_of_cta, *given, *of_runs
        )
        warpgroups.run(body, 6 // warpgroups_of_cta, warpgroups_of_cta, lambda: dict(maxima=Memory(32)))
        for own, out in zip(of_runs, (codes, scales), strict=True):
            np.testing.assert_array_equal(own.values[own.is_written], out.values[out.is_written])
            np.testing.assert_array_equal(own.is_written, out.is_written)

    weights = np.where(of_tile, np.exp2(tops), 0)
    numerator = np.einsum("tsvc,tsc->tcv", sums, weights)[:, :5]
    expected = numerator / ((totals * weights).sum(1)[:, :5] + np.exp(np.tile(sinks.reshape(2, 5), (3, 1))))[..., None]
    expected = jnp.asarray(expected.reshape(3, 1280), jnp.bfloat16)
    wanted, factors = quantize_and_permute(
        expected, quantization=quantization, scale_rows=8, implementation="reference"
    )
    found_scales = scales.values.view(np.float32).reshape(rows.scale_shape)[..., :3]
    np.testing.assert_array_equal(found_scales, np.asarray(factors)[..., :3])
    found = codes.values.astype(np.uint8).view(np.asarray(wanted).dtype).reshape(3, 1280).astype(np.float32)
    differ = found != np.asarray(wanted, np.float32)
    # Float32 and float64 round a few outputs to different neighbours in bfloat16.
    assert codes.is_written.all() and differ.mean() < 0.01
    np.testing.assert_allclose(found[differ], np.asarray(wanted, np.float32)[differ], rtol=0.13, atol=1)


@pytest.mark.parametrize(
    ("quantization", "num_queries", "num_heads", "columns"),
    [
        *[(kind, 1, 10, 8) for kind in ("none", "e4m3_group", "e4m3_group_ue8m0")],
        *[("none", *sizes) for sizes in ((2, 10, 16), (3, 14, 8), (3, 22, 16), (2, 6, 8))],
    ],
)
def test_outputs_of_whole_tiles_in_lockstep(monkeypatch, quantization, num_queries, num_heads, columns):
    """The bits of the second launch, of one part a tile, with sinks and codes; up to three tiles a key head. The last
    row sees no slot."""
    sizes: Any = dict(num_queries=num_queries, num_heads=num_heads, num_slots=256, has_sinks=True, is_e4m3=True)
    desc = decode_desc(128, 128, **sizes)
    config = DecodeConfig(columns, 256, 128, 2, SMS)
    rows = rows_of(desc, quantization, 8) if quantization != "none" else None
    rng, tiles, own_tiles = np.random.default_rng(0), config.all_tiles(desc), config.num_tiles(desc)
    sums, tops = rng.standard_normal((tiles, 128, columns)), 5 * rng.standard_normal((tiles, columns))
    totals = rng.uniform(1, 9, (tiles, columns))
    last = slice(4 * own_tiles, None)
    sums[last], tops[last], totals[last] = 0, outputs_sm90.FLOOR, 0
    parts = [array.astype(np.float32).reshape(tiles, -1).view(np.int32) for array in (sums, tops, totals)]
    sinks = Memory(num_heads, rng.standard_normal(num_heads).astype(np.float32).view(np.int32))
    scales = jnp.float32([7.0, 3.0])
    simt = simt_of(128)
    simt.float_bits = lambda value, dtype: value.astype(dtype).view(jnp.uint16).astype(jnp.int32)
    stand_ins = warpgroups.stand_ins() | dict(simt=simt)
    for module in (combine_quantized_sm90, combine_sm90, outputs_sm90, by_thread_sm90, schedule):
        for name in ("lax", "mosaic", "simt"):
            monkeypatch.setattr(module, name, stand_ins[name], raising=False)

    def outputs():
        sizes = [array.size for array in outputs_sm90.outputs_of(desc, rows)]
        return [Memory(size) for size in sizes]

    second, found = outputs(), outputs()
    places = [np.int32(place) for place in ((0, 0, 0), (256, 256, 0), (255, 255, 0))]
    refs = [*(Memory(part.size, part.reshape(-1)) for part in parts), *places, scales, sinks, *second]
    if rows is None:
        body = functools.partial(combine_sm90._kernel, desc, config, *refs)
        warpgroups.run(body, combine_sm90.num_combining_ctas(desc, config), 1, dict)
    else:
        body = functools.partial(combine_quantized_sm90._kernel, desc, config, rows, 1, *refs)
        warpgroups.run(body, tiles, 1, lambda: dict(maxima=Memory(32)))
    with jax.disable_jit():
        for tile in range(tiles):
            memory = dict(sums=Memory(128 * columns, parts[0][tile]), maxima=Memory(4 * columns))
            memory["stats"] = Memory(2 * columns, np.concatenate([parts[1][tile], parts[2][tile]]))
            pair, own = divmod(tile, own_tiles)
            place = map(jnp.int32, (pair // 2, pair % 2, own * columns))
            placed = outputs_sm90.Columns(desc, config, *place)
            outputs_sm90.store_tile(rows, placed, memory, lambda: None, sinks, scales[1], found)
    for own, expected in zip(found, second, strict=True):
        np.testing.assert_array_equal(own.is_written, expected.is_written)
        np.testing.assert_array_equal(own.values, expected.values)
    of_row = num_queries * num_heads * 128
    assert found[0].is_written.all() and found[0].values[: 2 * of_row].any() and not found[0].values[2 * of_row :].any()


def test_what_is_not_quantized():
    desc = decode_desc(128, 128)
    config, kinds = choose_config(desc, SMS), ("e4m3_row", "e4m3_group")

    def reasons(**options):
        other = dataclasses.replace(desc, **options)
        return [quantizing_error(other, choose_config(other, SMS), rows_of(other, kind, 8)) for kind in kinds]

    assert reasons() == [None, None]
    assert "one of e4m3_row" in quantizing_error(desc, config, rows_of(desc, "mxfp8", 8))
    rows = dataclasses.replace(config, swap_ab=False)
    assert "keys as rows" in quantizing_error(desc, rows, rows_of(desc, "e4m3_row", 8))
    assert all("3 queries" in reason for reason in reasons(num_queries=3))
    assert reasons(value_width=64)[0] is None and "128" in reasons(value_width=64)[1]
    assert "more registers" in reasons(num_heads=128, num_kv_heads=16)[0]


@pytest.mark.gpu
@pytest.mark.parametrize("quantization", ["e4m3_row", "int8_row", "e4m3_group", "e4m3_group_ue8m0"])
@pytest.mark.parametrize("options", [{}, dict(window=150, has_sinks=True), dict(is_e4m3=True)], ids=str)
@pytest.mark.parametrize("num_kv_heads", [2, 4, 8])
def test_quantizing_gpu(quantization, options, num_kv_heads):
    """The bits of a launch of its own; up to twelve splits a row, more than either loads at once."""
    places = ((0, 712, 711), (5, 296, 295), (130, 637, 636), (200, 201, 200), (0, 0, 0))
    own = dict(num_heads=8 * num_kv_heads, num_kv_heads=num_kv_heads, batch=len(places))
    desc = decode_desc(128, 128, **own, **options)
    config = dataclasses.replace(choose_config(desc, SMS), split=64, block_kv=64, doubles_at=())
    arrays, named, sinks, _ = make(desc, places)
    plain = run(desc, arrays, named, sinks, "hopper", config=config)
    found = run(desc, arrays, named, sinks, "hopper", config=config, quantization=quantization, scale_rows=8)
    rows = jnp.asarray(plain).reshape(len(places), -1)
    codes, scales = quantize_and_permute(rows, quantization=quantization, implementation="hopper")
    assert np.asarray(found[0]).tobytes() == np.asarray(codes).tobytes()
    np.testing.assert_array_equal(np.asarray(found[1])[..., : len(places)], scales)


@pytest.mark.gpu
@pytest.mark.parametrize("name", DECODES)
def test_longer_splits_gpu(name):
    """Rows with splits of 128, 256 and 512 slots in one batch: as float64, and as each row alone, to the bit."""
    places = ((0, 712, 709), (5, 296, 293), (130, 637, 635), (200, 201, 200), (0, 0, 0))
    desc = dataclasses.replace(decode_desc(128, 128, **DECODES[name]), batch=len(places))
    config = dataclasses.replace(choose_config(desc, SMS), split=128, doubles_at=(100, 600))
    arrays, named, sinks, expected = make(desc, places)
    found = run(desc, arrays, named, sinks, "hopper", config=config)
    scale = np.maximum(np.abs(expected).max(-1), 0.05 * (np.abs(expected).max(-1) > 0))
    assert_rows_close(found, expected, Tolerance(DTYPES["bfloat16"], 4.0), row_scale=scale)
    for row in range(len(places)):
        own, alone = slice(row, row + 1), dataclasses.replace(desc, batch=1)
        arrays_alone, named_alone = jax.tree.map(lambda array, own=own: array[own], (arrays, named))
        np.testing.assert_array_equal(found[own], run(alone, arrays_alone, named_alone, sinks, "hopper", config=config))


@pytest.mark.gpu
@pytest.mark.parametrize("quantization", ["none", "e4m3_group"])
@pytest.mark.parametrize("name", ["one query", "window", "sinks"])
@pytest.mark.parametrize("is_e4m3", [False, True])
def test_runs_gpu(is_e4m3, name, quantization):
    """70 rows of any lengths: the bits that they have without runs, and alone."""
    lengths = np.random.default_rng(0).integers(0, 2049, 70)
    places = [(length // 9, length, max(length - 1, 0)) for length in [2048, *lengths[1:]]]
    sizes: Any = dict(batch=70, num_slots=2048, num_heads=32, num_kv_heads=4, is_e4m3=is_e4m3)
    desc = decode_desc(128, 128, **(sizes | DECODES[name]))
    config = choose_config(desc, SMS)
    assert config.runs
    (q, k, v), named, sinks, _ = make(dataclasses.replace(desc, batch=70), places)
    options: Any = dict(quantization=quantization)
    found = run(desc, (q, k, v), named, sinks, "hopper", config, **options)
    without = run(desc, (q, k, v), named, sinks, "hopper", dataclasses.replace(config, runs=False), **options)
    jax.tree.map(np.testing.assert_array_equal, found, without)
    if quantization == "none":
        for row in (0, 1, 69):
            alone = jax.tree.map(lambda array, row=row: array[row : row + 1], ((q, k, v), named))
            one = run(dataclasses.replace(desc, batch=1), *alone, sinks, "hopper")
            np.testing.assert_array_equal(found[row : row + 1], one)


WHOLE: list[dict[str, Any]] = [
    {},
    dict(window=150, has_sinks=True),
    dict(is_e4m3=True, has_sinks=True),
    dict(num_heads=64),
    dict(num_heads=20),
    dict(num_queries=2),
    dict(num_heads=24, num_queries=2),
    dict(width=64, value_width=64, num_heads=56, num_queries=3, has_sinks=True),  # two tiles a key head
]
QUANTIZED = [(own, kind) for own in WHOLE[:5] for kind in ("e4m3_group", "e4m3_group_ue8m0", "int8_row")]


@pytest.mark.gpu
@pytest.mark.parametrize(("options", "quantization"), [*((own, "none") for own in WHOLE), *QUANTIZED], ids=str)
def test_whole_tiles_gpu(options, quantization):
    """66 rows of any lengths: the bits of two launches, and of a row alone."""
    lengths = np.random.default_rng(0).integers(0, 1033, 66)
    places = [(length // 9, length, max(length - 1, 0)) for length in [1032, 0, *lengths[2:]]]
    sizes: Any = dict(batch=66, num_slots=1032, num_heads=32, num_kv_heads=4)
    desc = dataclasses.replace(decode_desc(128, 128), **(sizes | options))
    config = choose_config(desc, SMS)
    assert config.whole_tiles
    (q, k, v), named, sinks, _ = make(desc, places)
    kind: Any = dict(quantization=quantization)
    found = run(desc, (q, k, v), named, sinks, "hopper", config, **kind)
    apart = dataclasses.replace(config, whole_tiles=False)
    jax.tree.map(np.testing.assert_array_equal, found, run(desc, (q, k, v), named, sinks, "hopper", apart, **kind))
    if quantization == "none":
        for row in (0, 1, 65):
            alone = jax.tree.map(lambda array, row=row: array[row : row + 1], ((q, k, v), named))
            one = run(dataclasses.replace(desc, batch=1), *alone, sinks, "hopper")
            np.testing.assert_array_equal(found[row : row + 1], one)


@pytest.mark.gpu
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("name", DECODES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gpu(widths, name, dtype):
    places = ((0, 712, 709), (5, 296, 293), (130, 637, 635), (200, 201, 200), (0, 0, 0))
    desc = dataclasses.replace(decode_desc(*widths, dtype, **DECODES[name]), batch=len(places))
    arrays, named, sinks, expected = make(desc, places)
    found = run(desc, arrays, named, sinks, "hopper")
    # P is rounded before it is multiplied; rows that cancel are judged by the values they sum.
    scale = np.maximum(np.abs(expected).max(-1), 0.05 * (np.abs(expected).max(-1) > 0))
    assert_rows_close(found, expected, Tolerance(DTYPES[dtype], 4.0), row_scale=scale)
    np.testing.assert_array_equal(found, run(desc, arrays, named, sinks, "hopper"))
    alone = jax.tree.map(lambda array: array[1:2], (arrays, named))
    np.testing.assert_array_equal(found[1:2], run(dataclasses.replace(desc, batch=1), *alone, sinks, "hopper"))


@pytest.mark.gpu
@pytest.mark.parametrize("width", E4M3_WIDTHS)
@pytest.mark.parametrize("name", DECODES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_codes_gpu(width, name, dtype):
    places = ((0, 712, 709), (5, 296, 293), (130, 637, 635), (200, 201, 200), (0, 0, 0))
    desc = dataclasses.replace(decode_desc(width, width, dtype, **DECODES[name]), batch=len(places), is_e4m3=True)
    arrays, named, sinks, expected = make(desc, places)
    found = run(desc, arrays, named, sinks, "hopper")
    scale = np.maximum(np.abs(expected).max(-1), 0.05 * SCALES[1] * (np.abs(expected).max(-1) > 0))
    assert_rows_close(found, expected, Tolerance(DTYPES[dtype], 4.0), row_scale=scale)
    np.testing.assert_array_equal(found, run(desc, arrays, named, sinks, "hopper"))


@pytest.mark.gpu
@pytest.mark.parametrize("width", E4M3_WIDTHS)
@pytest.mark.parametrize("is_e4m3", [False, True])
@pytest.mark.parametrize("name", ["one query", "three queries, window, sinks"])
def test_pages_gpu(width, is_e4m3, name):
    """The bits of rows with slots of their own."""
    places = ((0, 704, 701), (5, 296, 293), (130, 637, 635), (200, 201, 200), (0, 0, 0))
    desc = decode_desc(width, width, num_slots=704, is_e4m3=is_e4m3, **DECODES[name])
    desc = dataclasses.replace(desc, batch=len(places))
    arrays, named, sinks, _ = make(desc, places)
    paged, table = in_pages(arrays)
    table[1, 5:] = -7
    found = run(desc, paged, named | dict(page_table=table), sinks, "hopper")
    np.testing.assert_array_equal(found, run(desc, arrays, named, sinks, "hopper"))


@pytest.mark.gpu
@pytest.mark.parametrize("split", [(256, (), False), (128, (300,), True), (1024, (), True)], ids=str)
@pytest.mark.parametrize("options", [{}, dict(num_queries=3, window=150, has_sinks=True)], ids=["one", "three, sinks"])
def test_latents_gpu(options, split):
    places = ((0, 712, 709), (5, 296, 293), (130, 637, 635), (200, 201, 200), (0, 0, 0))
    desc = decode_desc(576, 512, batch=len(places), num_heads=128, num_kv_heads=1, is_latent=True, **options)
    (q, k, _), named, sinks, _ = make(desc, places)
    expected = run(desc, (q, k, None), named, sinks, "reference", value_width=512).astype(np.float64)
    size, doubles_at, joins_rest = split
    config = DecodeConfig(64, size, 64, 2, SMS, False, doubles_at, joins_rest)
    found = run(desc, (q, k, None), named, sinks, "hopper", config, value_width=512)
    scale = np.maximum(np.abs(expected).max(-1), 0.05 * (np.abs(expected).max(-1) > 0))
    assert_rows_close(found, expected, Tolerance(DTYPES["bfloat16"], 4.0), row_scale=scale)
    few = dataclasses.replace(config, num_ctas=6)  # with several items each
    again = run(desc, (q, k, None), named, sinks, "hopper", few, value_width=512)
    np.testing.assert_array_equal(again, found)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, dict(num_queries=2, window=300)], ids=["one query", "two queries, window"])
def test_whole_tiles_of_latents_gpu(options):
    """64 rows of any lengths: the bits of two launches."""
    lengths = np.random.default_rng(0).integers(0, 1033, 64)
    places = [(length // 9, length, max(length - 2, 0)) for length in [1032, 0, *lengths[2:]]]
    sizes: Any = dict(batch=64, num_slots=1032, num_heads=128, num_kv_heads=1, is_latent=True)
    desc = decode_desc(576, 512, **sizes, **options)
    (q, k, _), named, _, _ = make(desc, places)
    config = choose_config(desc, SMS)
    assert config.whole_tiles and not config.swap_ab
    found = run(desc, (q, k, None), named, None, "hopper", config, value_width=512)
    apart = dataclasses.replace(config, whole_tiles=False)
    np.testing.assert_array_equal(found, run(desc, (q, k, None), named, None, "hopper", apart, value_width=512))
