"""attention="cudnn" and "auto": cuDNN's calls, which JAX's own XLA form of them answers here, beside ours."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moe_jax
from moe_jax.models.attention import _choice, _cudnn, _hopper
from moe_jax.models.attention._attention import AttentionInputs, attend, attend_xla
from tests.models.test_partition import mesh_of
from tests.support.cases.models import VOCAB, assert_logits_close, run
from tests.support.refusals import refuses


@pytest.fixture
def calls(monkeypatch):
    """Keywords of all traced calls, taken as on a GPU, for float32 too."""
    found = []

    def stand_in(q, k, v, *, implementation, **options):
        assert implementation == "cudnn" and q.shape[-1] == k.shape[-1] == v.shape[-1]
        found.append(set(options))
        return jax.nn.dot_product_attention(q, k, v, implementation="xla", **options)

    monkeypatch.setattr(_cudnn, "dot_product_attention", stand_in)
    monkeypatch.setattr(_cudnn, "cuda_capability", lambda: (9, 0))
    monkeypatch.setattr(_cudnn, "DTYPES", ("float32",))
    monkeypatch.setattr(_cudnn, "LEAST_QUERIES", 5)
    jax.clear_caches()  # a part that was traced without the stand-in would not call it
    yield found
    jax.clear_caches()


def operands(queries, slots, starts, lengths, first, width=8, value_width=8):
    rng = np.random.default_rng(1)
    q = jnp.asarray(rng.standard_normal((2, queries, 2, 3, width)), jnp.float32)
    k, v = (jnp.asarray(rng.standard_normal((2, 2, slots, w)), jnp.float32) for w in (width, value_width))
    starts, lengths, first = (jnp.asarray(places, jnp.int32) for places in (starts, lengths, first))
    positions = first[:, None] - starts[:, None] + jnp.arange(queries, dtype=jnp.int32)
    return q, k, v, AttentionInputs(None, None, starts, lengths, first, positions, None)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(
    "places, value_width",
    [
        (([0, 0], [16, 11], [0, 0]), 8),  # cuDNN's own causal mask
        (([0, 3], [16, 11], [0, 0]), 8),
        (([0, 2], [22, 18], [6, 2]), 4),
    ],
)
def test_a_call(calls, places, value_width, window):
    q, k, v, inputs = operands(16, 24, *places, value_width=value_width)
    options = dict(scale=0.3, window=window)
    found = jax.jit(functools.partial(attend, **options, implementation="cudnn"))(q, k, v, inputs)
    expected = attend_xla(q, k, v, inputs, **options)
    own = inputs.first_slots[:, None] + jnp.arange(16)
    is_token = np.asarray((own >= inputs.starts[:, None]) & (own < inputs.lengths[:, None]))
    np.testing.assert_allclose(found[is_token], expected[is_token], rtol=1e-5, atol=1e-5)
    assert [("mask" in names, "is_causal" in names) for names in calls] == [(False, True), (True, False)]


@pytest.mark.parametrize("shared", [None, [4, 3]])
def test_rows_of_several_sequences(calls, shared):
    q, k, v, inputs = operands(16, 24, [0, 0], [22, 18], [6, 2])
    starts = jnp.asarray([[6] * 5 + [11] * 11, [2] * 1 + [3] * 8 + [11] * 7], jnp.int32)
    shared = None if shared is None else jnp.asarray(shared, jnp.int32)
    inputs = dataclasses.replace(inputs, segment_starts=starts, shared=shared)
    found = attend(q, k, v, inputs, scale=0.3, implementation="cudnn")
    assert [*map(sorted, calls)] == [["mask", "scale"]]
    is_real = np.asarray(inputs.first_slots[:, None] + np.arange(16) < inputs.lengths[:, None])
    expected = np.asarray(attend_xla(q, k, v, inputs, scale=0.3))
    np.testing.assert_allclose(np.asarray(found)[is_real], expected[is_real], rtol=1e-5, atol=1e-5)


def test_each_row_has_its_own_mask(calls):
    """No batch is cuDNN's causal form because one of its rows is."""
    q, k, v, inputs = operands(16, 24, [0, 0], [16, 22], [0, 6])
    found = attend(q, k, v, inputs, scale=0.3, implementation="cudnn")
    np.testing.assert_allclose(found, attend_xla(q, k, v, inputs, scale=0.3), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["qwen3_dense_bias", "deepseek_v3"])
def test_models(case, calls, name):
    """A padded prompt in two parts, of which the second has few tokens, with "auto" where no Hopper GPU is."""
    one, rng = case(name), np.random.default_rng(0)
    model = moe_jax.load_pretrained(one.directory, dtype="float32")
    ids = rng.integers(0, VOCAB, (2, 12)).astype(np.int32)
    mask = np.arange(12) >= [[0], [3]]
    by_xla = moe_jax.load_pretrained(one.directory, dtype="float32", attention="xla")
    expected = np.asarray(by_xla.score(ids, mask))
    assert not calls
    first, cache = run(model, ids[:, :9], attention_mask=mask[:, :9], cache=model.init_cache(2, 16))
    assert len(calls) == 2  # of equal layers one is traced
    second, _ = run(model, ids[:, 9:], cache=cache)
    assert len(calls) == 2
    assert_logits_close(np.concatenate([first, second], axis=1)[mask], expected[mask])


@pytest.mark.slow
def test_over_a_mesh(case, calls):
    one = case("qwen3_dense_bias")
    spread = moe_jax.load_pretrained(
        one.directory, dtype="float32", attention="cudnn", mesh=mesh_of("tensor=4", "Auto")
    )
    ids = np.random.default_rng(0).integers(0, VOCAB, (2, 20)).astype(np.int32)
    assert_logits_close(np.asarray(spread.score(ids)), np.asarray(one.model.score(ids)))
    assert calls


def test_refusals(monkeypatch):
    q, k = jnp.zeros((1, 64, 2, 2, 128), jnp.bfloat16), jnp.zeros((1, 2, 80, 128), jnp.bfloat16)
    settings = dict(scale=1.0, window=None)
    assert "needs an NVIDIA GPU" in _cudnn.refusal(q, k, k, **settings)
    monkeypatch.setattr(_cudnn, "cuda_capability", lambda: (7, 5))
    assert "8.0, found 7.5" in _cudnn.refusal(q, k, k, **settings)
    monkeypatch.setattr(_cudnn, "cuda_capability", lambda: (8, 9))
    assert _cudnn.refusal(q, k, k, **settings) is None
    assert "63 queries" in _cudnn.refusal(q[:, 1:], k, k, **settings)
    assert "sinks" in _cudnn.refusal(q, k, k, **settings, has_sinks=True)
    assert "float32" in _cudnn.refusal(*(a.astype(jnp.float32) for a in (q, k, k)), **settings)
    wide, keys = (jnp.zeros((*a.shape[:-1], 192), a.dtype) for a in (q, k))
    assert "width=192" in _cudnn.refusal(wide, keys, k, **settings)
    monkeypatch.setattr(_cudnn, "cuda_capability", lambda: (9, 0))
    assert _cudnn.refusal(wide, keys, k, **settings) is None
    assert "width=128 of keys, 192" in _cudnn.refusal(q, k, keys, **settings)


def test_models_that_are_refused(case, monkeypatch):
    directory, load = case("qwen3_dense_bias").directory, moe_jax.load_pretrained
    refuses(NotImplementedError, "attention='cudnn': needs an NVIDIA GPU", load, directory, attention="cudnn")
    monkeypatch.setattr(_cudnn, "cuda_capability", lambda: (8, 0))
    config = dataclasses.replace(case("qwen3_dense_bias").model.config, head_dim=64)
    assert _choice.model_refusal("cudnn", config, "bfloat16") is None
    assert "float32" in _choice.model_refusal("cudnn", config, "float32")
    assert "chunks" in _choice.model_refusal("cudnn", dataclasses.replace(config, chunked_layers=(0,)), "bfloat16")
    assert "sinks" in _choice.model_refusal("cudnn", dataclasses.replace(config, has_sinks=True), "bfloat16")


def test_the_order(monkeypatch):
    """What takes a prefill and a decode step with "auto" on a CPU, an A100 and a Hopper GPU."""
    k = jax.ShapeDtypeStruct((1, 2, 80, 128), jnp.bfloat16)

    def chosen(name="auto", width=128):
        shapes = [jax.ShapeDtypeStruct((1, queries, 2, 2, width), jnp.bfloat16) for queries in (64, 1)]
        keys = jax.ShapeDtypeStruct((*k.shape[:-1], width), k.dtype)
        return [_choice.choose(name, q, keys, k, scale=1.0, window=None)[0] for q in shapes]

    assert chosen() == [None, None]
    monkeypatch.setattr(_cudnn, "cuda_capability", lambda: (8, 0))
    assert chosen() == ["cudnn", None] and chosen("xla") == [None, None]
    monkeypatch.setattr(_hopper, "hopper_sms", lambda: 132)
    monkeypatch.setattr(_hopper, "OLDEST_JAX", (0, 10))
    assert chosen() == ["hopper", "hopper"] and chosen("cudnn") == ["cudnn", None]
    monkeypatch.setattr(_cudnn, "cuda_capability", lambda: (9, 0))
    assert chosen(width=192) == ["cudnn", "hopper"] and chosen("hopper", width=192) == ["hopper", "hopper"]  # MLA's
