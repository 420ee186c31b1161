"""prefill: the reference against NumPy float64, refusals, the walk over tiles and steps, the kernel's body in threads,
lowering for CUDA, and the Hopper kernel on a GPU.

Layout contract: row b keeps its keys in the slots [starts[b], lengths[b]) and has its queries at first_slots[b] + s.
What other slots hold does not matter, NaN included. A query that sees nothing gives zeros.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.attention import (
    PrefillConfig,
    PrefillDesc,
    choose_config,
    config_error,
    kernel_sm90,
    prefill,
    schedule,
)
from pallas_kernels.attention.config import BLOCK_Q, ROWS
from pallas_kernels.attention.schedule import num_tiles_of, tile_of, unmasked_steps
from tests.support.kernels import warpgroups
from tests.support.kernels.attention_cases import PREFILLS, SMS, WIDTHS, prefill_cases, prefill_desc
from tests.support.oracles.tolerances import Tolerance, assert_rows_close
from tests.support.refusals import refuses

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
# (start, length, first slot) of each row, for 29 queries and 60 slots: a plain prompt, one padded on the left, a chunk
# behind others whose last queries are padding, and a row without keys.
SCALES = (0.023, 0.31)  # of codes of keys and of values
PLACES = ((0, 29, 0), (7, 29, 0), (3, 55, 30), (0, 0, 4))


CODES = {
    "causal": {},
    "window, sinks": dict(window=9, has_sinks=True),
    "sequences": dict(has_sequences=True),
}


def sequences_of(desc: PrefillDesc, places):
    """first_keys (B, S) and shared (B,): sequences of 1 to 40 slots behind what every second row shares, that begin
    within tiles and steps; the first query of a row may go on with an earlier sequence."""
    rng = np.random.default_rng(7)
    first_keys = np.zeros((desc.batch, desc.num_queries), np.int32)
    shared = np.zeros(desc.batch, np.int32)
    for b, (start, length, first) in enumerate(places):
        if desc.window is None and b % 2 == 0:
            shared[b] = start + (length - start) // 3
        begins = np.cumsum(rng.integers(1, 41, desc.num_slots)) + max(shared[b], start)
        begins = np.concatenate([[max(shared[b], start)], begins])
        for s in range(desc.num_queries):
            if first + s >= shared[b]:
                first_keys[b, s] = max([x for x in begins if x <= first + s], default=0)
    return first_keys, shared


def make(desc: PrefillDesc, places, seed=0):
    """(arrays, places by name, sinks, expected in float64); slots outside [start, length) hold NaN. Keys and values are
    codes where the call has scales."""
    first_keys, shared = sequences_of(desc, places) if desc.has_sequences else (None, None)
    rng = np.random.default_rng(seed)
    dtype = DTYPES[desc.dtype]
    caches = (desc.batch, desc.num_kv_heads, desc.num_slots)
    q = (2 * rng.standard_normal((desc.batch, desc.num_queries, desc.num_heads, desc.width))).astype(dtype)
    k = rng.standard_normal((*caches, desc.width)).astype(dtype)
    v = rng.standard_normal((*caches, desc.value_width)).astype(dtype)
    if desc.has_scales:
        k, v = (array.astype(ml_dtypes.float8_e4m3fn) for array in (k / SCALES[0], v / SCALES[1]))
    of_keys, of_values = SCALES if desc.has_scales else (1, 1)
    sinks = rng.standard_normal(desc.num_heads).astype(np.float32) * 3 if desc.has_sinks else None
    expected = np.zeros((*q.shape[:3], desc.value_width))
    for b, (start, length, first) in enumerate(places):
        outside = (np.arange(desc.num_slots) < start) | (np.arange(desc.num_slots) >= length)
        k[b, :, outside] = v[b, :, outside] = np.nan
        for s in range(desc.num_queries):
            slot = first + s
            low = start if desc.window is None else max(start, slot - desc.window + 1)
            high = min(slot + 1, length) if desc.is_causal else length
            keys = [*range(low, high)]
            if first_keys is not None:
                keys = [key for key in keys if key >= first_keys[b, s] or key < shared[b]]
            for n in range(desc.num_heads if keys else 0):
                m = n // (desc.num_heads // desc.num_kv_heads)
                scores = k[b, m, keys].astype(np.float64) @ q[b, s, n].astype(np.float64)
                scores = scores * desc.scale * of_keys
                sink = -np.inf if sinks is None else np.float64(sinks[n])
                top = max(scores.max(), sink)
                weights = np.exp(scores - top)
                total = weights.sum() + np.exp(sink - top)
                expected[b, s, n] = weights @ v[b, m, keys].astype(np.float64) / total * of_values
    names = ("starts", "lengths", "first_slots")
    named = dict(zip(names, np.array(places, np.int32).T, strict=True))
    named |= {} if first_keys is None else dict(first_keys=first_keys)
    named |= dict(shared=shared) if first_keys is not None and desc.window is None else {}
    return (q, k, v), named, sinks, expected


def run(desc, arrays, places, sinks, implementation, config=None):
    settings = dict(scale=desc.scale, window=desc.window, is_causal=desc.is_causal)
    settings |= dict(scales=tuple(map(jnp.float32, SCALES))) if desc.has_scales else {}
    call = jax.jit(
        lambda arrays, places, sinks: prefill(
            *arrays, **places, sinks=sinks, implementation=implementation, config=config, **settings
        )
    )
    return np.asarray(call(*jax.tree.map(jnp.asarray, (arrays, places, sinks))))


@pytest.mark.parametrize("options", PREFILLS.values(), ids=PREFILLS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_reference(options, dtype):
    if "window" in options:
        options = options | dict(window=9)
    small = dict(batch=4, num_queries=29, num_slots=60, num_heads=4, num_kv_heads=2)
    desc = dataclasses.replace(prefill_desc(16, 8, dtype), **small, **options)
    arrays, places, sinks, expected = make(desc, PLACES)
    found = run(desc, arrays, places, sinks, "reference")
    assert_rows_close(found, expected, Tolerance(DTYPES[dtype], 64.0 if dtype == "float32" else 1.0))


def in_pages(desc, arrays, seed=1):
    """(the description and arrays with k and v in pages, the table): pages in any order, NaN in those of nobody."""
    q, *cached = arrays
    count = desc.num_slots // 64
    table = np.random.default_rng(seed).permutation(desc.batch * count + 3)[: desc.batch * count]
    table, pools = table.reshape(desc.batch, count), []
    for array in cached:
        pools.append(np.full((desc.batch * count + 3, desc.num_kv_heads, 64, array.shape[3]), np.nan, array.dtype))
        pools[-1][table] = array.reshape(desc.batch, desc.num_kv_heads, count, 64, -1).swapaxes(1, 2)
    return dataclasses.replace(desc, num_pages=desc.batch * count + 3), (q, *pools), table.astype(np.int32)


@pytest.mark.parametrize("options", CODES.values(), ids=CODES)
def test_codes(options):
    """A cache in e4m3, contiguous and in pages, of rows of one sequence and of several."""
    sizes = dict(batch=4, num_queries=29, num_slots=192, num_heads=4, num_kv_heads=2)
    desc = dataclasses.replace(prefill_desc(16, 8, "float32", has_scales=True), **sizes, **options)
    arrays, places, sinks, expected = make(desc, ((0, 29, 0), (70, 150, 121), (3, 130, 101), (0, 0, 4)))
    found = run(desc, arrays, places, sinks, "reference")
    assert_rows_close(found, expected, Tolerance(np.float32, 64.0))
    _, paged, table = in_pages(desc, arrays)
    table[0, 1:] = 1000  # behind its last slot
    in_pools = run(desc, paged, places | dict(page_table=table), sinks, "reference")
    np.testing.assert_array_equal(in_pools, found)


@pytest.mark.parametrize("options", [{}, dict(has_sequences=True)], ids=["causal", "sequences"])
def test_pages(options):
    sizes = dict(batch=4, num_queries=29, num_slots=192, num_heads=4, num_kv_heads=2)
    desc = dataclasses.replace(prefill_desc(16, 8, "float32"), **sizes, **options)
    arrays, places, sinks, expected = make(desc, ((0, 29, 0), (70, 150, 121), (3, 130, 101), (0, 0, 4)))
    desc, paged, table = in_pages(desc, arrays)
    table[0, 1:] = 1000  # behind its last slot
    found = run(desc, paged, places | dict(page_table=table), sinks, "reference")
    assert_rows_close(found, expected, Tolerance(np.float32, 64.0))


def test_wrong_calls():
    q, k = jnp.zeros((2, 8, 4, 64), jnp.bfloat16), jnp.zeros((2, 2, 16, 64), jnp.bfloat16)
    rows = dict(starts=jnp.zeros(2, jnp.int32), lengths=jnp.zeros(2, jnp.int32), first_slots=jnp.zeros(2, jnp.int32))
    good = dict(scale=0.1) | rows
    refuses(ValueError, r"expected \(B, S, N, D\), \(B, M, L, D\), \(B, M, L, V\)", prefill, q, k, k[0], **good)
    refuses(ValueError, r"expected \(B, S, N, D\), \(B, M, L, D\)", prefill, q, k[..., :32], k, **good)
    refuses(ValueError, "N to be a multiple of M", prefill, q[:, :, :3], k, k, **good)
    refuses(TypeError, "q is bfloat16, k bfloat16, v float16", prefill, q, k, k.astype(jnp.float16), **good)
    codes, scales = k.astype(jnp.float8_e4m3fn), (jnp.float32(1),) * 2
    refuses(TypeError, "float8_e4m3fn with no scales", prefill, q, codes, codes, **good)
    refuses(TypeError, "bfloat16 with scales; scales belong to", prefill, q, k, k, scales=scales, **good)
    wrong = dict(scales=(jnp.zeros(1), jnp.float32(1)))
    refuses(ValueError, r"scales are \['float32\(1,\)', ", prefill, q, codes, codes, **wrong, **good)
    refuses(ValueError, "scale is 0", prefill, q, k, k, **good | dict(scale=0.0))
    refuses(ValueError, "window is 0", prefill, q, k, k, window=0, **good)
    refuses(ValueError, r"sinks has shape \(2,\)", prefill, q, k, k, sinks=jnp.zeros(2), **good)
    refuses(
        ValueError,
        r"lengths is int32\(1,\), expected int32\(2,\)",
        prefill,
        q,
        k,
        k,
        **good | dict(lengths=rows["lengths"][:1]),
    )
    keys = dict(first_keys=jnp.zeros((2, 8), jnp.int32))
    refuses(ValueError, r"first_keys is int32 \(2,\)", prefill, q, k, k, **good | dict(first_keys=rows["starts"]))
    refuses(ValueError, "first_keys needs is_causal", prefill, q, k, k, is_causal=False, **good, **keys)
    refuses(ValueError, "shared needs first_keys and no window", prefill, q, k, k, shared=rows["starts"], **good)
    refuses(ValueError, "no window", prefill, q, k, k, shared=rows["starts"], window=3, **good, **keys)
    refuses(ValueError, r"shared is int32 \(1,\)", prefill, q, k, k, shared=rows["starts"][:1], **good, **keys)
    refuses(NotImplementedError, "needs a Hopper GPU", prefill, q, k, k, implementation="hopper", **good)
    table = jnp.zeros((2, 3), jnp.int32)
    words = r"with a page_table; expected \(B, S, N, D\), \(P, M, 64, D\), \(P, M, 64, V\)"
    refuses(ValueError, words, prefill, q, k, k, page_table=table, **good)
    pages, one = jnp.zeros((5, 2, 64, 64), jnp.bfloat16), dict(page_table=table[:1]) | good
    refuses(ValueError, r"page_table is int32\(1, 3\), expected int32 of 2 rows", prefill, q, pages, pages, **one)


def test_config_error():
    desc = prefill_desc(128, 128)
    fits = PrefillConfig(128, 2, SMS)
    assert config_error(desc, fits) is None
    for wrong, why in (
        (dict(block_kv=96), "block_kv=96"),
        (dict(num_stages=4), "bytes of shared memory"),
        (dict(num_stages=1), "num_stages=1"),
    ):
        assert why in config_error(desc, dataclasses.replace(fits, **wrong))
    in_pages = dict(num_pages=9, num_slots=704, has_sequences=True)
    for options, why in (
        (in_pages, "gather them"),
        (dict(dtype="float32"), "float32"),
        (dict(width=192, has_scales=True), "codes with width=192, value_width=128"),
        (dict(width=96), "width=96"),
        (dict(width=320), "320"),
    ):
        assert why in config_error(dataclasses.replace(desc, **options), fits)
    narrow, three = prefill_desc(64, 64), dataclasses.replace(fits, block_kv=192)
    assert config_error(narrow, three) is None
    assert "block_kv=192 in pages" in config_error(dataclasses.replace(narrow, num_pages=9, num_slots=704), three)


@pytest.mark.parametrize("window", [None, 1, 50, 129, 400])
@pytest.mark.parametrize("form", ["causal", "not causal", "sequences"])
@pytest.mark.parametrize("block_kv", [64, 128])
@pytest.mark.sample(2)  # each window beside each form once, in steps of 64 and of 128 by turns
def test_schedule(block_kv, window, form):
    """Every tile is taken once; its steps hold every slot that a query sees; no step is without one but where the tile
    sees none at all; a step without a mask is seen as a whole.
    """
    places = np.array([(0, 300, 0), (37, 300, 0), (5, 700, 400), (0, 0, 0), (640, 704, 404), (0, 704, 100)], np.int32)
    sizes = dict(batch=len(places), num_heads=2, num_kv_heads=1, num_queries=300, num_slots=704)
    desc = dataclasses.replace(prefill_desc(128, 128), **sizes)
    is_causal, has_sequences = form != "not causal", form == "sequences"
    desc = dataclasses.replace(desc, window=window, is_causal=is_causal, has_sequences=has_sequences)
    config = PrefillConfig(block_kv, 2, num_sms=7)
    named = dict(zip(("starts", "lengths", "first_slots"), jnp.asarray(places.T), strict=True))
    first_keys, shared = sequences_of(desc, places)
    if has_sequences:
        missing = desc.query_tiles * BLOCK_Q - desc.num_queries
        named |= dict(first_keys=jnp.pad(first_keys, ((0, 0), (0, missing)), mode="edge"), shared=jnp.asarray(shared))
    taken = set()
    at = jax.jit(lambda cta, t: _described(desc, config, named, cta, t))
    for cta in range(config.num_sms):
        for t in range(int(num_tiles_of(desc, config, cta))):
            tile, ranges = jax.tree.map(int, at(cta, t))
            row, head, query, num_steps, *walked = tile
            taken.add((row, head, query))
            start, length, first = (int(x) for x in places[row])
            slots = np.arange(desc.num_slots)[None]
            own = first + np.arange(query, min(query + 2 * ROWS, 300))[:, None]
            seen = (slots >= start) & (slots < length) & ((slots <= own) | (not is_causal))
            seen &= slots > own - (window or 10**6)
            if has_sequences:
                seen &= (slots >= first_keys[row, query : query + 2 * ROWS, None]) | (slots < shared[row])
            walked = walked[:num_steps]
            assert 0 <= walked[-1] and walked[0] * block_kv < desc.num_slots and len({*walked}) == num_steps
            inside = np.isin(slots[0] // block_kv, walked)
            assert not seen[:, ~inside].any()
            if seen.any():
                assert all(seen[:, slots[0] // block_kv == step].any() for step in (walked[0], walked[-1]))
                is_seen = [seen[:, slots[0] // block_kv == step].any() for step in walked]
                assert has_sequences or all(is_seen)
                assert sum(is_seen) >= num_steps - 1
            for consumer, (begin, end) in enumerate(ranges):
                assert 1 <= begin <= end <= num_steps
                part = seen[consumer * ROWS : (consumer + 1) * ROWS]
                for i, step in enumerate(walked):
                    whole = part[:, slots[0] // block_kv == step]
                    full = whole.all() and whole.shape[1] == block_kv
                    assert full or not begin <= i < end
                    # What needs no mask gets none, but for the first step.
                    is_shared = has_sequences and step * block_kv < shared[row]
                    if full and len(part) == ROWS and i and not is_shared:
                        assert begin <= i < end
    assert len(taken) == desc.num_tiles == len(places) * desc.num_heads * 3


def _described(desc, config, places, cta, t):
    tile = tile_of(desc, config, places, cta, t)
    ranges = [unmasked_steps(desc, config, places, tile, jnp.int32(consumer)) for consumer in range(2)]
    steps = -(-desc.num_slots // config.block_kv)
    return (tile.row, tile.head, tile.query, tile.num_steps, *(tile.step(jnp.int32(i)) for i in range(steps))), ranges


def test_causal_work_is_even():
    """2048 queries of 32 heads: no CTA walks over 5% more steps than the mean."""
    desc = PrefillDesc(1, 2048, 2048, 32, 4, 128, 128, "bfloat16", 0.1)
    config = PrefillConfig(128, 2, SMS)
    places = dict(starts=jnp.zeros(1, jnp.int32), lengths=jnp.full(1, 2048), first_slots=jnp.zeros(1, jnp.int32))
    count = jax.jit(lambda cta, t: tile_of(desc, config, places, cta, t).num_steps)
    steps = [
        sum(int(count(cta, t)) for t in range(int(num_tiles_of(desc, config, cta)))) for cta in range(config.num_sms)
    ]
    assert sum(steps) == 32 * 16 * 17 // 2
    assert max(steps) <= 1.05 * np.mean(steps)


@pytest.mark.parametrize("case", prefill_cases(), ids=lambda case: case.name)
@pytest.mark.sample(10)  # each width, form and source of slots
def test_lowers_for_cuda(case):
    assert case.launches() == 1


def test_lowers_padded():
    """Queries and slots that are no multiple of 8."""
    q, k = jax.ShapeDtypeStruct((1, 13, 4, 64), "bfloat16"), jax.ShapeDtypeStruct((1, 2, 21, 64), "bfloat16")
    rows = [jax.ShapeDtypeStruct((1,), "int32")] * 3

    def call(q, k, v, starts, lengths, first_slots):
        places = dict(starts=starts, lengths=lengths, first_slots=first_slots)
        return prefill(q, k, v, scale=0.1, implementation="hopper", config=PrefillConfig(64, 2, 2), **places)

    lowered = jax.jit(call).trace(q, k, k, *rows).lower(lowering_platforms=("cuda",))
    assert lowered.out_info.shape == (1, 13, 4, 64)
    assert lowered.as_text().count("mosaic_gpu_v2") == 1


BARRIER_FORMS = {
    "causal": {},
    "window, sinks": dict(window=70, has_sinks=True),
    "narrow window": dict(window=16),
    "not causal": dict(is_causal=False),
    "sequences": dict(has_sequences=True),
    "sequences, window, sinks": dict(window=70, has_sinks=True, has_sequences=True),
    "scales": dict(has_scales=True, has_sinks=True),
    "pages": dict(is_paged=True),
    "pages, window, sinks": dict(is_paged=True, window=70, has_sinks=True),
}


@pytest.mark.parametrize("options", BARRIER_FORMS.values(), ids=BARRIER_FORMS)
@pytest.mark.parametrize(
    "config",
    [PrefillConfig(64, 2, 2), PrefillConfig(128, 3, 3, query_stages=2)],
    ids=lambda c: f"{c.block_kv}x{c.num_stages} in {c.num_sms} CTAs",
)
@pytest.mark.sample(3)
def test_body_in_threads(monkeypatch, config, options):
    """The kernel's body itself, by a thread for each warpgroup: its values, and that no wait is for ever."""
    is_paged, options = options.get("is_paged", False), {k: v for k, v in options.items() if k != "is_paged"}
    sizes = dict(batch=3, num_queries=136, num_slots=320 if is_paged else 264, num_heads=2, num_kv_heads=1)
    desc = dataclasses.replace(prefill_desc(64, 64, "float32", **options), **sizes)
    arrays, named, sinks, expected = make(desc, ((0, 136, 0), (70, 250, 120), (5, 5, 0)))
    if desc.has_sequences:
        missing = desc.query_tiles * BLOCK_Q - desc.num_queries
        named["first_keys"] = np.pad(named["first_keys"], ((0, 0), (0, missing)), mode="edge")
    if is_paged:
        desc, arrays, table = in_pages(desc, arrays)
        table[0, 3:] = 1000  # behind its last slot
        named = dict(itertools.islice(named.items(), 3)) | dict(pages=table) | named
    arrays = [array.astype(np.float32) for array in arrays]
    inputs = [*arrays, *named.values(), *([] if sinks is None else [sinks])]
    inputs += [np.float32([scale]) for scale in SCALES] if desc.has_scales else []
    for name, stand_in in warpgroups.stand_ins().items():
        monkeypatch.setattr(kernel_sm90, name, stand_in)
    monkeypatch.setattr(schedule, "pl", warpgroups.stand_ins()["pl"])
    monkeypatch.setattr(kernel_sm90, "clear_rows", warpgroups.clear_rows)
    out = np.full(expected.shape, np.nan, np.float32)
    rings = 2 * config.num_stages + config.query_stages

    def scratch():
        memory = dict(
            q=(config.query_stages, 128, 64),
            k=(config.num_stages, config.block_kv, 64),
            v=(config.num_stages, config.block_kv, 64),
            staging=(2, 64, 64),
        )
        memory = {name: warpgroups.Memory(np.full(shape, np.nan, np.float32)) for name, shape in memory.items()}
        full = warpgroups.Barriers(rings + 2, num_arrivals=kernel_sm90.num_copies(desc, config))
        return dict(memory, full=full, empty=warpgroups.Barriers(rings, num_arrivals=2))

    refs = [warpgroups.Memory(np.asarray(array)) for array in (*inputs, out)]
    refs[-1].array = out
    warpgroups.run(functools.partial(kernel_sm90._kernel, desc, config, *refs), config.num_sms, 3, scratch)
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("options", PREFILLS.values(), ids=PREFILLS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gpu(widths, options, dtype):
    places = ((0, 296, 0), (5, 296, 0), (130, 637, 344), (200, 702, 416), (0, 0, 0))
    desc = dataclasses.replace(prefill_desc(*widths, dtype, **options), batch=len(places), num_queries=296)
    arrays, named, sinks, expected = make(desc, places)
    found = run(desc, arrays, named, sinks, "hopper")
    # P is rounded before it is multiplied; rows that cancel are judged by the values they sum.
    scale = np.maximum(np.abs(expected).max(-1), 0.05 * (np.abs(expected).max(-1) > 0))
    assert_rows_close(found, expected, Tolerance(DTYPES[dtype], 4.0), row_scale=scale)
    np.testing.assert_array_equal(found, run(desc, arrays, named, sinks, "hopper"))


@pytest.mark.gpu
@pytest.mark.parametrize("widths", [widths for widths in WIDTHS if widths[0] == widths[1]], ids=str)
@pytest.mark.parametrize("options", CODES.values(), ids=CODES)
def test_codes_gpu(widths, options):
    """Contiguous and in pages."""
    places = ((0, 296, 0), (5, 296, 0), (130, 637, 344), (200, 702, 416), (0, 0, 0))
    sizes = dict(batch=len(places), num_queries=296, num_slots=704)
    desc = dataclasses.replace(prefill_desc(*widths, has_scales=True, **options), **sizes)
    arrays, named, sinks, expected = make(desc, places)
    found = run(desc, arrays, named, sinks, "hopper")
    scale = np.maximum(np.abs(expected).max(-1), 0.05 * (np.abs(expected).max(-1) > 0))
    assert_rows_close(found, expected, Tolerance(DTYPES["bfloat16"], 4.0), row_scale=scale)
    _, pools, table = in_pages(desc, arrays)
    table[0, 5:] = 1000  # behind its last slot
    np.testing.assert_array_equal(found, run(desc, pools, named | dict(page_table=table), sinks, "hopper"))


@pytest.mark.gpu
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("name", ["causal", "window", "sinks"])
def test_pages_gpu(widths, name):
    """The bits of rows with slots of their own."""
    places = ((0, 296, 0), (5, 296, 0), (130, 637, 344), (200, 702, 416), (0, 0, 0))
    sizes = dict(batch=len(places), num_queries=296, num_slots=704)
    desc = dataclasses.replace(prefill_desc(*widths, **PREFILLS[name]), **sizes)
    arrays, named, sinks, _ = make(desc, places)
    paged, pools, table = in_pages(desc, arrays)
    table[0, 5:] = 1000  # behind its last slot
    found = run(paged, pools, named | dict(page_table=table), sinks, "hopper")
    np.testing.assert_array_equal(found, run(desc, arrays, named, sinks, "hopper"))


def test_choice_fits_every_form():
    for widths in WIDTHS:
        for queries in (1, 8, 4096):
            desc = dataclasses.replace(prefill_desc(*widths), num_queries=queries)
            config = choose_config(desc, SMS)
            assert config_error(desc, config) is None
            assert config.num_sms == min(SMS, desc.num_tiles)
            ahead = dataclasses.replace(config, query_stages=2)
            assert config.query_stages == 2 or "bytes of shared memory" in config_error(desc, ahead)
