"""A cache in pages beside transformers' answers to whole prompts. Pages that nobody wrote hold NaN.

Layout contract: slot s of row b lies in page page_table[b, s // PAGE_SLOTS] of each layer, at s % PAGE_SLOTS.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moe_jax.models import _cache, _decoder, _inputs, _layer_cache, load_pretrained
from moe_jax.models._layer_cache import SlotCache
from moe_jax.models.attention import _mla
from tests.models.test_partition import mesh_of
from tests.support.cases.models import VOCAB, assert_logits_close, run, slow, write_checkpoint
from tests.support.refusals import refuses

TABLE = np.array([[5, 0, 7, 2], [1, 6, 3, 8]], np.int32)  # 16 slots a row; page 4 is nobody's


@pytest.fixture(autouse=True)
def small_pages(monkeypatch):
    for module in (_cache, _decoder, _inputs, _layer_cache, _mla):
        monkeypatch.setattr(module, "PAGE_SLOTS", 4)
    jax.clear_caches()
    yield
    jax.clear_caches()


def with_nan(cache):
    """Empty pages full of NaN."""
    layers = [
        SlotCache(tuple(jnp.full_like(pool, jnp.nan) for pool in layer.arrays))
        if isinstance(layer, SlotCache)
        else layer
        for layer in cache.layers
    ]
    return dataclasses.replace(cache, layers=tuple(layers))


def tokens(rows, columns, seed=0):
    return np.random.default_rng(seed).integers(0, VOCAB, (rows, columns)).astype(np.int32)


# Linear attention and full one; a window; an indexer that selects; sinks.
@pytest.mark.parametrize("name", ["mixtral_tied_window", *slow("qwen3_next", "deepseek_v32", "gpt_oss", "deepseek_v2")])
def test_transformers(case, name):
    """Rows of two lengths in chunks over the borders of pages, then cleared and filled again."""
    of = case(name)
    cache = with_nan(of.model.init_cache(2, 15, page_table=TABLE))
    assert cache.num_slots == 16 and cache.num_pages == 9
    for seed in (0, 1):
        ids, parts = tokens(2, 13, seed), []
        mask = np.arange(13) >= [[0], [3]]
        for begin, end in ((0, 6), (6, 12), (12, 13)):
            part, cache = run(of.model, ids[:, begin:end], attention_mask=mask[:, begin:end], cache=cache)
            parts.append(np.asarray(part))
        found = np.concatenate(parts, axis=1)
        for row, first in enumerate((0, 3)):
            assert_logits_close(found[row, first:], of.torch_logits(ids[row : row + 1, first:])[0])
        cache = cache.cleared(jnp.array([True, True]))
    used = next(layer for layer in cache.layers if isinstance(layer, SlotCache)).arrays[0]
    assert np.isnan(used[4]).all() and not np.isnan(used[TABLE[0, :3]]).any()
    # A page has the slots of its row.
    identity = of.model.init_cache(2, 16, page_table=np.arange(8).reshape(2, 4))
    contiguous = of.model.init_cache(2, 16)
    answers = [run(of.model, ids, attention_mask=mask, cache=one) for one in (identity, contiguous)]
    np.testing.assert_array_equal(answers[0][0], answers[1][0])
    for layer, other in zip(*(answer[1].layers for answer in answers), strict=True):
        for pool, array in zip(
            layer.arrays if isinstance(layer, SlotCache) else (), getattr(other, "arrays", ()), strict=True
        ):
            rows = pool.reshape(2, 4, *pool.shape[1:]).swapaxes(1, 2).reshape(array.shape)
            np.testing.assert_array_equal(rows, array)


@pytest.mark.parametrize("dtype", ["float32", *slow("fp8")])
def test_a_shared_prefix(case, dtype):
    """Two rows with the pages of one prompt in common, beside rows with a copy each."""
    model = load_pretrained(case("mixtral").directory, dtype="float32", kv_cache_dtype=dtype)
    prefix, ends = tokens(1, 8), tokens(2, 3, 1)
    both, first_alone = np.concatenate([prefix, prefix]), np.array([[True], [False]]) & np.ones((2, 8), bool)
    cache = model.init_cache(2, 12, page_table=np.array([[0, 1, 2], [3, 4, 5]]))
    _, cache = model(both, attention_mask=first_alone, cache=cache)
    table, lengths = cache.page_table.at[1, :2].set(cache.page_table[0, :2]), cache.lengths.at[1].set(8)
    found, _ = model(ends, cache=dataclasses.replace(cache, page_table=table, lengths=lengths))
    if dtype == "float32":
        expected = case("mixtral").torch_logits(np.concatenate([both, ends], axis=1))[:, 8:]
    else:
        expected = np.asarray(model(ends, cache=model(both, cache=model.init_cache(2, 12))[1])[0])
    assert_logits_close(found, expected)


def test_wrong_tables(case):
    model = case("mixtral").model
    make = functools.partial(model.init_cache, 2, 16)
    refuses(
        ValueError, r"page_table\[1, 2\] is 9, expected 0 to 8", make, page_table=TABLE + (TABLE == 3) * 6, num_pages=9
    )
    refuses(ValueError, r"page_table\[0, 1\] is -1, expected at least 0", make, page_table=TABLE - (TABLE == 0))
    refuses(ValueError, r"page_table has shape \(2, 3\), expected \(2, 4\)", make, page_table=TABLE[:, :3])
    refuses(ValueError, "num_pages=9 without a page_table", make, num_pages=9)
    cache, ids = make(page_table=TABLE), tokens(2, 5)
    wrong = dataclasses.replace(cache, page_table=cache.page_table.at[0, 1].set(9))
    refuses(ValueError, r"page_table\[0, 1\] is 9, expected 0 to 8, the cache's pages", model, ids, cache=wrong)
    refuses(ValueError, "one of the caches is in pages", cache.with_rows, jnp.arange(2), model.init_cache(2, 16))
    graphdef, state = nnx.split(model)
    run = jax.jit(lambda state, ids, cache: nnx.merge(graphdef, state)(ids, cache=cache))
    for entry in (9, -1):
        wrong = dataclasses.replace(cache, page_table=cache.page_table.at[0, 1].set(entry))
        logits, damaged = run(state, ids, wrong)
        assert np.isnan(logits[0]).all() and not np.isnan(logits[1]).any()
        assert damaged.is_damaged.tolist() == [True, False]
    behind = dataclasses.replace(cache, page_table=cache.page_table.at[0, 2].set(9))  # no token comes there
    assert not np.isnan(run(state, ids, behind)[0]).any()


@pytest.mark.slow
def test_rows_with_states_change_hands(case):
    """Tokens are copied into the pages that the row has, states of linear attention into its row."""
    model, ids = case("qwen3_next").model, tokens(2, 6)
    _, old = model(ids[:, :5], cache=model.init_cache(2, 16, page_table=TABLE))
    _, new = model(ids[1:, :5], cache=model.init_cache(1, 8, page_table=np.asarray([[1, 0]])))
    found, _ = model(ids[[1, 1], 5:], cache=old.with_rows(jnp.arange(1), new))
    np.testing.assert_allclose(found[0], found[1], atol=1e-5)


def test_whole_pages_hold_no_more_than_the_model_takes(tmp_path):
    """Two pages have 8 slots, the model takes 6 tokens."""
    write_checkpoint("mixtral", tmp_path, max_position_embeddings=6)
    model, ids = load_pretrained(tmp_path, dtype="float32"), tokens(1, 7)
    cache = model.init_cache(1, 6, page_table=np.array([[0, 1]]))
    refuses(ValueError, "cache has 6 slots, 0 used; 7 more tokens do not fit", model, ids, cache=cache)
    graphdef, state = nnx.split(model)
    run = jax.jit(lambda state, ids, cache: nnx.merge(graphdef, state)(ids, cache=cache))
    first, cache = run(state, ids[:, :3], cache)
    second, cache = run(state, ids[:, :3], cache)
    assert not np.isnan(first).any() and not np.isnan(second).any()
    assert np.isnan(run(state, ids[:, :1], cache)[0]).all()


def test_no_page_is_written_for_two_places(case):
    """Pages that all have filled may be shared, a page that a call fills belongs to one place."""
    model, words = case("mixtral").model, "which holds tokens of another place of the table"
    for table, where in (([[0, 1], [0, 2]], "0, 0"), ([[0, 0], [1, 2]], "0, 0")):
        cache = model.init_cache(2, 8, page_table=np.array(table))
        refuses(ValueError, rf"page_table\[{where}\] is 0, {words}", model, tokens(2, 5), cache=cache)
    cache = model.init_cache(2, 8, page_table=np.array([[0, 1], [2, 1]]))
    _, cache = run(model, tokens(2, 4), cache=cache)  # page 1 gets nothing
    refuses(ValueError, rf"page_table\[0, 1\] is 1, {words}", model, tokens(2, 1), cache=cache)
    one = np.array([[True], [False]])
    _, cache = model(tokens(2, 1), attention_mask=one, cache=cache)
    refuses(ValueError, rf"page_table\[1, 1\] is 1, {words}", model, tokens(2, 1), attention_mask=~one, cache=cache)
    padded = np.arange(8) >= [[0], [4]]
    cache = model.init_cache(2, 8, page_table=np.array([[0, 1], [0, 2]]))
    model(tokens(2, 8), attention_mask=padded, cache=cache)  # the second row has its padding there


@pytest.mark.slow
def test_mesh(case):
    of = case("mixtral")
    ids = tokens(2, 9)
    spread = load_pretrained(of.directory, dtype="float32", mesh=mesh_of("tensor=2", "Auto"))
    cache = spread.init_cache(2, 16, page_table=TABLE)
    assert not cache.layers[0].arrays[0].sharding.is_fully_replicated
    first, cache = spread(ids[:, :8], cache=cache)
    second, _ = spread(ids[:, 8:], cache=cache)
    assert_logits_close(np.concatenate([first, second], axis=1), of.torch_logits(ids))
    explicit = load_pretrained(of.directory, dtype="float32", mesh=mesh_of("tensor=2", "Explicit"))
    refuses(NotImplementedError, "axes are Explicit", explicit.init_cache, 2, 16, page_table=TABLE)
