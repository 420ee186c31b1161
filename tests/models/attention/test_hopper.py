"""The Hopper kernels' way through whole models, with references in their places: the answers of XLA's way."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moe_jax
from moe_jax.models._partition import Partition
from moe_jax.models.attention import _choice, _hopper
from moe_jax.models.attention._attention import AttentionInputs, attend, attend_xla
from pallas_kernels.attention import prefill
from pallas_kernels.decode_attention import decode_attention
from tests.models.test_partition import mesh_of
from tests.support.cases.models import VOCAB, assert_logits_close, run
from tests.support.refusals import refuses


@pytest.fixture
def calls(monkeypatch):
    """Shapes of q and k in all traced calls of the kernels, one for equal layers, taken as on a Hopper GPU.

    Any dtype and width is taken."""
    found = []

    def stand_in(kernel):
        def call(q, k, v, *, implementation, **settings):
            assert implementation == "hopper"
            found.append((q.shape, k.shape))
            return kernel(q, k, v, implementation="reference", **settings)

        return call

    monkeypatch.setattr(_hopper, "prefill", stand_in(prefill))
    monkeypatch.setattr(_hopper, "decode_attention", stand_in(decode_attention))
    monkeypatch.setattr(_hopper, "hopper_sms", lambda: 132)
    monkeypatch.setattr(_hopper, "OLDEST_JAX", (0, 10))
    monkeypatch.setattr(_hopper, "config_error", lambda desc, config: None)
    monkeypatch.setattr(_hopper, "decode_config_error", lambda desc, config: None)
    monkeypatch.setattr(_hopper, "MOST_DECODED", 3)
    monkeypatch.setattr(_hopper, "LEAST_QUERIES", 5)
    monkeypatch.setattr(_choice, "model_refusal", lambda name, config, dtype: None)
    jax.clear_caches()  # a part that was traced without the stand-ins would not call them
    yield found
    jax.clear_caches()


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v3", pytest.param("qwen3_dense_bias", marks=pytest.mark.slow)])
@pytest.mark.sample(2)
def test_models(case, calls, name):
    """A padded prompt, then on its cache a second one, three tokens and one, beside XLA's answer to all at once."""
    one, rng = case(name), np.random.default_rng(0)
    model = moe_jax.load_pretrained(one.directory, dtype="float32", attention="hopper")
    ids = rng.integers(0, VOCAB, (2, 20)).astype(np.int32)
    mask = np.arange(20) >= [[0], [6]]
    by_xla = moe_jax.load_pretrained(one.directory, dtype="float32", attention="xla")
    expected = np.asarray(by_xla.score(ids, mask))
    assert not calls
    assert_logits_close(np.asarray(model.score(ids, mask))[mask], expected[mask])
    kinds = len({model.config.window_of(layer) for layer in range(model.config.num_layers)})  # equal layers: one trace
    assert len(calls) == kinds
    cache = model.init_cache(2, 24)
    first, cache = run(model, ids[:, :12], attention_mask=mask[:, :12], cache=cache)
    parts = [first]
    for begin, end in ((12, 16), (16, 19), (19, 20)):
        part, cache = run(model, ids[:, begin:end], cache=cache)
        parts.append(part)
    queries = [q[1] for q, _ in calls]
    assert {queries.count(count) for count in (3, 1)} == {kinds} and 4 not in queries
    assert_logits_close(np.concatenate(parts, axis=1)[mask], expected[mask])


def test_a_cache_in_fp8(case, calls):
    """The kernels are given codes in decode steps, numbers in prefills, and the scales; beside XLA's answers."""
    models = []
    for name in ("hopper", "xla"):
        options = dict(dtype="float32", attention=name, kv_cache_dtype="fp8")
        models.append(moe_jax.load_pretrained(case("gpt_oss").directory, **options))
        for index, layer in enumerate(models[-1].layers):
            layer.self_attn.k_scale.set_value(jnp.float32(0.013 + 0.01 * index))
            layer.self_attn.v_scale.set_value(jnp.float32(0.21))
    ids, answers = np.random.default_rng(0).integers(0, VOCAB, (1, 9)).astype(np.int32), []
    for model in models:
        cache, parts = model.init_cache(1, 16), []
        for begin, end in ((0, 5), (5, 8), (8, 9)):
            part, cache = run(model, ids[:, begin:end], cache=cache)
            parts.append(np.asarray(part))
        answers.append(np.concatenate(parts, axis=1))
    assert {q[1] for q, _ in calls} == {5, 3, 1}
    assert_logits_close(*answers)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("fp8", marks=pytest.mark.slow)])
def test_a_cache_in_pages(case, calls, dtype):
    """Decode steps and prefills are given the pages; beside XLA's answers on rows with slots of their own."""
    ids, answers = np.random.default_rng(0).integers(0, VOCAB, (2, 9)).astype(np.int32), []
    for name, table in (("hopper", np.array([[2], [0]])), ("xla", None)):
        options = dict(dtype="float32", attention=name, kv_cache_dtype=dtype)
        model = moe_jax.load_pretrained(case("gpt_oss").directory, **options)
        cache, parts = model.init_cache(2, 64, page_table=table), []
        for begin, end in ((0, 5), (5, 8), (8, 9)):
            part, cache = run(model, ids[:, begin:end], cache=cache)
            parts.append(np.asarray(part))
        answers.append(np.concatenate(parts, axis=1))
    assert {(q[1], k[0]) for q, k in calls} == {(5, 3), (3, 3), (1, 3)}
    assert_logits_close(*answers)


# Two key heads: of four devices, two share one.
LAYOUTS = [
    ("tensor=4", "Auto"),
    pytest.param(("expert=2,tensor=2", "Auto"), marks=pytest.mark.slow),
    pytest.param(("expert=2,tensor=2", "Explicit"), marks=pytest.mark.slow),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_over_a_mesh(case, calls, layout):
    one = case("qwen3_dense_bias")
    spread = moe_jax.load_pretrained(one.directory, dtype="float32", attention="hopper", mesh=mesh_of(*layout))
    config, parts = one.model.config, mesh_of(*layout).shape["tensor"]
    ids = np.random.default_rng(0).integers(0, VOCAB, (2, 20)).astype(np.int32)
    assert_logits_close(np.asarray(spread.score(ids)), np.asarray(one.model.score(ids)))
    (q, k), *_ = calls
    assert q[2] == config.num_heads // parts and k[1] == max(config.num_kv_heads // parts, 1)
    made = [moe_jax.generate(model, ids, max_new_tokens=3).tolist() for model in (spread, one.model)]
    assert made[0] == made[1]


def operands(queries=16, slots=24, heads=2, group=3, width=8):
    rng = np.random.default_rng(1)
    q = jnp.asarray(rng.standard_normal((2, queries, heads, group, width)), jnp.float32)
    k, v = (jnp.asarray(rng.standard_normal((2, heads, slots, width)), jnp.float32) for _ in range(2))
    starts, lengths, first = (jnp.asarray(places, jnp.int32) for places in ([0, 2], [22, 18], [6, 2]))
    positions = first[:, None] - starts[:, None] + jnp.arange(queries, dtype=jnp.int32)
    return q, k, v, AttentionInputs(None, None, starts, lengths, first, positions, None)


def test_gradients_are_those_of_xla(calls):
    q, k, v, inputs = operands()
    weights = jnp.asarray(np.random.default_rng(2).standard_normal(q.shape), jnp.float32)
    sinks = jnp.asarray([0.5, -1, 2, 0, 1, -3], jnp.float32)

    def loss(way, q, k, v, sinks):
        return jnp.sum(way(q, k, v, inputs, scale=0.3, window=7, sinks=sinks) * weights)

    by_kernel = functools.partial(attend, implementation="hopper")
    found = jax.grad(loss, argnums=(1, 2, 3, 4))(by_kernel, q, k, v, sinks)
    for ours, theirs in zip(found, jax.grad(loss, argnums=(1, 2, 3, 4))(attend_xla, q, k, v, sinks), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        by_kernel(q, k, v, inputs, scale=0.3, window=7, sinks=sinks),
        attend_xla(q, k, v, inputs, scale=0.3, window=7, sinks=sinks),
        rtol=1e-5,
        atol=1e-5,
    )
    assert calls


def test_what_goes_to_xla(calls):
    """Chunks, positions of the caller's own in a window, and queries too many for a decode step, too few for a tile."""
    q, k, v, inputs = operands()
    stated = dataclasses.replace(inputs, key_positions=jnp.zeros((2, 24), jnp.int32))
    by_kernel = functools.partial(attend, scale=0.3, implementation="hopper")
    by_kernel(q, k, v, inputs, chunk=4)
    by_kernel(q, k, v, stated, window=4)
    by_kernel(q[:, :4], k, v, dataclasses.replace(inputs, query_positions=inputs.query_positions[:, :4]))
    attend(q, k, v, inputs, scale=0.3)
    assert not calls
    by_kernel(q, k, v, stated)
    assert len(calls) == 1


@pytest.mark.parametrize("form", ["counted", "shared"])
def test_rows_of_several_sequences(calls, form):
    """A window where positions count slots, and slots that sequences share; a window beside these goes to XLA."""
    q, k, v, inputs = operands()
    starts = jnp.asarray([[6] * 5 + [11] * 11, [2] * 1 + [3] * 8 + [11] * 7], jnp.int32)
    slots = inputs.first_slots[:, None] + jnp.arange(16, dtype=jnp.int32)
    stated = jnp.zeros((2, 24), jnp.int32).at[jnp.arange(2)[:, None], slots].set(slots - starts)
    packed = dict(segment_starts=starts, query_positions=slots - starts, key_positions=stated)
    packed |= dict(is_counted=True) if form == "counted" else dict(shared=jnp.asarray([4, 3], jnp.int32))
    inputs = dataclasses.replace(inputs, **packed)
    window = 3 if form == "counted" else None
    by_xla = attend_xla(q, k, v, inputs, scale=0.3, window=window)
    found = attend(q, k, v, inputs, scale=0.3, window=window, implementation="hopper")
    assert len(calls) == 1
    is_real = np.asarray(slots < inputs.lengths[:, None])
    np.testing.assert_allclose(np.asarray(found)[is_real], np.asarray(by_xla)[is_real], rtol=1e-5, atol=1e-5)
    few = dict(segment_starts=starts[:, :3], query_positions=inputs.query_positions[:, :3])
    attend(q[:, :3], k, v, dataclasses.replace(inputs, **few), scale=0.3, implementation="hopper")
    if form == "shared":
        attend(q, k, v, inputs, scale=0.3, window=3, implementation="hopper")
    assert len(calls) == 1


def test_refusals(monkeypatch):
    """What a 16-bit call on a Hopper GPU is refused for; on this machine every call is."""
    q, k = jnp.zeros((1, 64, 2, 2, 128), jnp.bfloat16), jnp.zeros((1, 2, 80, 128), jnp.bfloat16)
    settings = dict(scale=1.0, window=None)
    monkeypatch.setattr(_hopper, "OLDEST_JAX", (99,))
    assert "needs jax 0.11" in _hopper.refusal(q, k, k, **settings)
    monkeypatch.setattr(_hopper, "OLDEST_JAX", (0, 10))
    assert "needs a Hopper GPU" in _hopper.refusal(q, k, k, **settings)
    monkeypatch.setattr(_hopper, "hopper_sms", lambda: 132)
    assert _hopper.refusal(q, k, k, **settings) is None
    assert "63 queries; up to 8" in _hopper.refusal(q[:, 1:], k, k, **settings)
    assert "float32" in _hopper.refusal(*(a.astype(jnp.float32) for a in (q, k, k)), **settings)
    assert "width=96" in _hopper.refusal(q[..., :96], k[..., :96], k, **settings)
    assert "scale=-1" in _hopper.refusal(q, k, k, scale=-1.0, window=None)


def test_models_that_are_refused(case, monkeypatch):
    """By name, while a model is loaded."""
    directory, load = case("gpt_oss").directory, moe_jax.load_pretrained
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    expected = "attention='hopper': needs jax 0.11.*'xla' runs everywhere"
    refuses(NotImplementedError, expected, load, directory, attention="hopper")
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    refuses(NotImplementedError, "attention='hopper': needs a Hopper GPU", load, directory, attention="hopper")
    monkeypatch.setattr(_hopper, "hopper_sms", lambda: 132)
    refuses(NotImplementedError, "attention='hopper': width=", load, directory, attention="hopper")
    config = dataclasses.replace(case("gpt_oss").model.config, head_dim=64)
    expected = "'cuda', expected one of 'auto', 'xla', 'hopper', 'cudnn'"
    refuses(ValueError, expected, _choice.check_implementation, "cuda", config, "f2")
    assert _choice.model_refusal("hopper", config, "bfloat16") is None
    assert "float32" in _choice.model_refusal("hopper", config, "float32")
    assert "chunks" in _choice.model_refusal("hopper", dataclasses.replace(config, chunked_layers=(0,)), "bfloat16")


@pytest.mark.parametrize("queries", [256, 1])
def test_lowers_with_the_kernels_for_a_hopper_gpu(monkeypatch, queries):
    """No scores in memory, also over a mesh and with latents, whose heads share one key head."""
    for name in ("_hopper", "attention.api", "decode_attention.api"):
        where = "moe_jax.models.attention" if name == "_hopper" else "pallas_kernels"
        monkeypatch.setattr(f"{where}.{name}.hopper_sms", lambda: 132)
    monkeypatch.setattr(_hopper, "OLDEST_JAX", (0, 10))
    place = jax.ShapeDtypeStruct((1,), jnp.int32)
    heads = jax.ShapeDtypeStruct((1, queries, 4, 2, 128), jnp.bfloat16)
    keys = jax.ShapeDtypeStruct((1, 4, 512, 128), jnp.bfloat16)
    forms = [(heads, keys, keys, None)]
    if queries == 1:
        widened = jax.ShapeDtypeStruct((1, queries, 1, 32, 576), jnp.bfloat16)
        forms.append((widened, jax.ShapeDtypeStruct((1, 1, 512, 576), jnp.bfloat16), None, 512))
    for partition in (None, Partition(mesh_of("tensor=4"), "tensor", False)):
        for q, k, v, value_width in forms:

            def call(q, k, v, starts, lengths, first, partition=partition, value_width=value_width):
                inputs = AttentionInputs(None, None, starts, lengths, first, first[:, None], None)
                options = dict(scale=0.1, implementation="hopper", partition=partition, value_width=value_width)
                return attend(q, k, v, inputs, **options)

            text = jax.jit(call).trace(q, k, v, *[place] * 3).lower(lowering_platforms=("cuda",)).as_text()
            assert text.count("mosaic_gpu_v2") == (1 if queries > 1 else 2) and "dot_general" not in text


def test_decode_steps_that_are_refused(monkeypatch):
    """Slots that fill no tile; ``generate`` makes caches whose slots do."""
    monkeypatch.setattr(_hopper, "hopper_sms", lambda: 132)
    monkeypatch.setattr(_hopper, "OLDEST_JAX", (0, 10))
    q, k = jnp.zeros((2, 1, 4, 8, 128), jnp.bfloat16), jnp.zeros((2, 4, 80, 128), jnp.bfloat16)
    settings = dict(scale=1.0, window=None)
    assert _hopper.refusal(q, k, k, **settings) is None
    assert "num_slots=79" in _hopper.refusal(q, k[:, :, :79], k[:, :, :79], **settings)
    assert "9 queries" in _hopper.refusal(jnp.zeros((2, 9, 4, 8, 128), jnp.bfloat16), k, k, **settings)
    assert "width=96" in _hopper.refusal(q[..., :96], k[..., :96], k, **settings)
    rows = jnp.zeros((2, 1, 80, 576), jnp.bfloat16)
    absorbed = jnp.zeros((2, 1, 1, 128, 576), jnp.bfloat16)
    assert _hopper.refusal(absorbed, rows, None, value_width=512, **settings) is None


def test_generate_decodes_with_the_kernel(case, calls):
    """All steps: the cache has slots in eights, whatever the lengths are."""
    directory = case("qwen3_dense_bias").directory
    prompts = [[1, 2, 3, 4, 5, 6, 7], [8, 9, 10]]
    slots, made = [], []
    for attention in ("hopper", "xla"):
        model = moe_jax.load_pretrained(directory, dtype="float32", attention=attention)
        made.append(moe_jax.generate(model, prompts, max_new_tokens=5))
        slots += [k[2] for q, k in calls if q[1] == 1]
    assert made[0] == made[1] and slots and not any(count % 8 for count in slots)
