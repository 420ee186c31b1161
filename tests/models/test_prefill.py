"""Prompts read in chunks: logits, cache and answers are those of one call, in one compiled shape and little memory."""

from inspect import unwrap  # the tests' own checks of annotations would speak first
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import moe_jax
from moe_jax.models import SamplingParams, _loop, generate, generate_stream
from moe_jax.models._compiled import split_model
from moe_jax.models._decoder import CausalLM
from moe_jax.models._layer_cache import RecurrentCache
from moe_jax.models._prefill import Prefill, chunk_length
from tests.support.cases.models import assert_logits_close, run, slow, write_checkpoint
from tests.support.refusals import refuses

NO_LOAD = np.zeros((0, 0), np.int32)


@pytest.fixture
def chunked(monkeypatch):
    """The model with another ``max_num_batched_tokens``: 32 tokens are 16 of each of two rows."""

    def limited(model, most):
        monkeypatch.setattr(model, "max_num_batched_tokens", most)
        return model

    return limited


def read_all(model, ids, mask, num_slots):
    """(logits behind every row's latest token, the cache) after the last chunk."""
    prompt, (structure, leaves) = Prefill(model, ids, mask), split_model(model)
    assert prompt.chunk == 16 < prompt.ids.shape[1]
    reading = prompt.read(structure, leaves, num_slots, NO_LOAD)
    last = (prompt.ids[:, -16:], prompt.mask[:, -16:], mask.sum(axis=1, dtype=np.int32))
    reading = _loop.read(structure, leaves, reading, last)
    return model.logits(reading.hidden), reading.cache


def ragged(shape):
    """A row of whole chunks of padding on the left and one on the right; both have padding inside of a chunk too."""
    mask = np.ones(shape, bool)
    mask[0, :20], mask[1, 27:] = False, False
    return mask


@pytest.mark.parametrize(
    "name",
    [
        *("deepseek_v3", "qwen3_longrope", "qwen3_next"),
        *slow(
            "mixtral_tied_window",
            "llama4",
            "gpt_oss",
            "qwen3_dynamic",
            "phimoe",
            "deepseek_v2",
            "qwen2",
            "llama4_tied",
            "qwen3_5",
            "qwen3_next_tied",
        ),
    ],
)
def test_logits_and_cache_are_those_of_one_call(case, chunked, prompt, name):
    """Against ours and, row by row, against transformers. The lengths are no multiple of a chunk. Windows, attention in
    chunks and rotary embeddings that change with the length (longrope, dynamic, Phi's amplitudes) reach over the ends
    of chunks."""
    case = case(name)
    length = min(60, case.model.max_seq_len - 4)
    ids, num_slots, rows = prompt(2, length), length + 4, np.arange(2)
    mask = ragged(ids.shape)
    logits, cache = read_all(chunked(case.model, 32), np.where(mask, ids, 0), mask, num_slots)
    whole, expected = run(case.model, ids, attention_mask=mask, cache=case.model.init_cache(2, num_slots))
    last = length - 1 - np.argmax(mask[:, ::-1], axis=1)
    assert_logits_close(
        logits, np.asarray(whole)[rows, last], 1e-6 if case.model.config.linear_attention is None else 3e-6
    )
    judged = [case.torch_logits(ids[row : row + 1, mask[row]])[0, -1] for row in rows]
    assert_logits_close(logits, np.stack(judged))
    np.testing.assert_array_equal(cache.num_tokens, [length - 20, 27])
    for kept, other in zip(cache.layers, expected.layers, strict=True):
        for actual, wanted in zip(jax.tree.leaves(kept), jax.tree.leaves(other), strict=True):
            if isinstance(kept, RecurrentCache):
                np.testing.assert_allclose(actual, wanted, atol=1e-5 * np.abs(wanted).max())
                continue
            for row in rows:
                mine, theirs = (
                    np.asarray(array)[row, :, c.starts[row] : c.lengths[row]]
                    for array, c in ((actual, cache), (wanted, expected))
                )
                np.testing.assert_allclose(mine, theirs, atol=1e-5 * np.abs(theirs).max())


@pytest.mark.parametrize(
    "name", ["mixtral_tied_window", *slow("deepseek_v3", "gpt_oss", "qwen3_longrope", "qwen3_next")]
)
def test_answers_equal_transformers(case, chunked, prompt, name):
    """Three chunks and a part of a fourth."""
    case, ids = case(name), prompt(2, 50)
    expected = case.torch_greedy(ids, 8, pad_token_id=0)
    np.testing.assert_array_equal(generate(chunked(case.model, 32), ids, max_new_tokens=8), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mixtral_tied_window", "deepseek_v3", "qwen3_longrope", "qwen3_5"])
def test_prompts_of_any_lengths(case, chunked, prompt, name):
    """A short one shares the rows of long ones, which are read in chunks."""
    case, ids = case(name), prompt(2, 50)
    prompts = [ids[0].tolist(), ids[1, :5].tolist(), ids[1].tolist()]
    expected = [case.torch_greedy(np.asarray([given]), 8, pad_token_id=0)[0].tolist() for given in prompts]
    assert generate(chunked(case.model, 16), prompts, max_new_tokens=8) == expected


@pytest.mark.slow
def test_penalties_see_the_whole_prompt(case, chunked, prompt):
    model, ids = case("mixtral_tied_window").model, prompt(2, 50)
    options: Any = dict(max_new_tokens=8, sampling_params=SamplingParams(temperature=0.0, repetition_penalty=50.0))
    expected = np.asarray(generate(model, ids, **options))
    assert not any(set(row[:50]) & set(row[50:]) for row in expected.tolist())
    np.testing.assert_array_equal(generate(chunked(model, 32), ids, **options), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [("expert=2,tensor=2", "Explicit"), ("tensor=4", "Auto"), ("data=2,expert=2", "Explicit")]
)
@pytest.mark.parametrize("name", ["qwen3_linear", "deepseek_v3", "qwen3_next"])
def test_over_a_mesh(case, prompt, chunked, name, layout):
    """The load counts every token of every chunk once, in a batch and in rows that are refilled."""
    case, ids = case(name), prompt(2, 50)
    sizes = {axis: int(size) for axis, size in (entry.split("=") for entry in layout[0].split(","))}
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType[layout[1]],) * len(sizes))
    options: Any = dict(dtype="float32", mesh=mesh, max_num_batched_tokens=32)
    spread = moe_jax.load_pretrained(case.directory, **options)
    prompts = [ids[0].tolist(), ids[1, :5].tolist(), ids[1].tolist()]
    for given, size in ((ids, None), (prompts, 2)):
        (made, load), (expected, load_alone) = (
            generate(model, given, max_new_tokens=6, return_load=True, batch_size=size)
            for model in (spread, case.model)
        )
        assert [list(map(int, row)) for row in made] == [list(map(int, row)) for row in expected]
        np.testing.assert_array_equal(load, load_alone)
        layers, top_k = len(spread.config.moe_layers), spread.config.top_k
        assert load.sum() == layers * top_k * sum(len(answer) - 1 for answer in made)


def test_one_shape_is_compiled_for_any_length(case, chunked, prompt, monkeypatch):
    """A program for all chunks but the last, one for the last and one for the loop; what follows compiles nothing."""
    model, traces = chunked(case("mixtral_no_groups").model, 32), []
    forward = CausalLM.hidden_states
    monkeypatch.setattr(CausalLM, "hidden_states", lambda *a, **k: traces.append(a[1].shape) or forward(*a, **k))
    ids = prompt(2, 60)
    generate(model, ids[:, :50], max_new_tokens=4)
    assert traces == [(2, 16), (2, 16), (2, 1)]
    generate(model, ids[:, :35], max_new_tokens=3)
    assert len(traces) == 3


def test_memory_is_bounded_by_the_chunk(tmp_path):
    """XLA's own account of a program for 2048 tokens: beside cache and weights, chunks of 128 take a tenth."""
    write_checkpoint("mixtral", tmp_path, max_position_embeddings=4096)
    model = moe_jax.load_pretrained(tmp_path, dtype="float32")
    structure, leaves = split_model(model)
    reading = _loop.unread(model.config, 1, 2048, model.dtype, NO_LOAD)

    def temporary(length):
        chunk = (np.zeros((1, length), np.int32), np.ones((1, length), bool), np.full(1, 2048, np.int32))
        account = _loop.read.jitted.lower(None, structure, leaves, reading, chunk).compile().memory_analysis()
        assert account is not None
        return account.temp_size_in_bytes

    assert temporary(128) < 0.1 * temporary(2048)


def test_progress_is_of_tokens(case, chunked, prompt):
    """Padding does not count; what fits into one call has nothing to tell."""
    model, ids, told = chunked(case("mixtral_no_groups").model, 32), prompt(2, 60), []
    mask = ragged(ids.shape)
    options: Any = dict(max_new_tokens=2, attention_mask=mask, progress=lambda *counts: told.append(counts))
    list(generate_stream(model, ids, **options))
    assert told == [(16, 67), (12 + 27, 67), (28 + 27, 67), (67, 67)]
    told.clear()
    list(generate_stream(chunked(model, 200), ids, **options))
    assert told == []


@pytest.mark.parametrize(
    "rows, length, most, expected",
    [
        *((1, 8192, 8192, 8192), (1, 9216, 8192, 8192), (8, 1024, 8192, 1024), (8, 2048, 8192, 1024)),
        *((3, 4096, 8192, 2048), (1, 5120, 5000, 4096), (64, 1024, 100, 16), (1, 16, 1, 16), (2, 64, 32, 16)),
    ],
)
def test_chunk_lengths(rows, length, most, expected):
    assert chunk_length(rows, length, most) == expected


@pytest.mark.parametrize("most, kind", [(0, ValueError), (2.5, TypeError), (True, TypeError)])
def test_refusals(case, most, kind):
    model = case("mixtral").model
    refuses(
        kind, "max_num_batched_tokens", unwrap(type(model).__init__), model, model.config, max_num_batched_tokens=most
    )
