"""Rows of several sequences: logits and gradients of the sequences alone, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

import moe_jax
from tests.models.test_explicit_axes import split
from tests.support.cases.models import VOCAB, assert_logits_close, run, slow
from tests.support.refusals import refuses

run_with_stats = jax.jit(lambda model, ids, segments: model(ids, segment_ids=segments, return_stats=True))

# Two rows of 40 columns: sequences back to back, padding on the left, between sequences, within one, and behind.
SEGMENTS = np.array(
    [
        [1] * 13 + [2] * 1 + [3] * 26,
        [0] * 3 + [1] * 9 + [0] * 2 + [2] * 4 + [0] * 1 + [2] * 6 + [1] * 11 + [0] * 4,
    ]
)
ALONE = [  # row, columns
    *((0, range(13)), (0, range(13, 14)), (0, range(14, 40))),
    *((1, range(3, 12)), (1, [*range(14, 18), *range(19, 25)]), (1, range(25, 36))),
]


@pytest.fixture
def ids():
    tokens = np.random.default_rng(3).integers(0, VOCAB, SEGMENTS.shape)
    return np.where(SEGMENTS > 0, tokens, -100)


@pytest.mark.parametrize(
    "name",
    ["qwen3_tied_window", "deepseek_v3", "llama4", *slow("qwen3", "gpt_oss", "mixtral", "deepseek_v2_lite", "glm4")],
)
def test_logits_are_those_of_the_sequences_alone(case, ids, name):
    """transformers gets one sequence at a time. Windows and chunks are shorter than the longest."""
    case = case(name)
    logits, stats = run_with_stats(case.model, ids, SEGMENTS)
    for row, columns in ALONE:
        wanted = case.torch_logits(ids[row : row + 1, list(columns)])[0]
        assert_logits_close(np.asarray(logits)[row, list(columns)], wanted, 2e-5)
    routed = np.asarray(stats.topk_ids).reshape(-1, *SEGMENTS.shape, stats.topk_ids.shape[-1])
    assert ((routed >= 0).all(axis=-1) == (SEGMENTS > 0)).all()


def test_a_mask_and_positions_beside_segments(case, ids):
    """A masked token is none of its sequence; positions are taken as they are stated."""
    model = case("qwen3").model
    mask = np.ones(SEGMENTS.shape, bool)
    mask[0, 20:23] = False
    logits = np.asarray(run(model, ids, segment_ids=SEGMENTS, attention_mask=mask))
    columns = [*range(14, 20), *range(23, 40)]
    alone = np.asarray(run(model, ids[:1, columns]))
    assert_logits_close(logits[:1, columns], alone)
    counted = np.zeros(SEGMENTS.shape, int)
    for row, columns in ALONE:
        counted[row, list(columns)] = range(len(columns))
    plain = np.asarray(run(model, ids, segment_ids=SEGMENTS))
    stated = [np.asarray(run(model, ids, segment_ids=SEGMENTS, positions=counted * scale)) for scale in (1, 2)]
    real = SEGMENTS > 0
    assert_logits_close(stated[0][real], plain[real])
    assert np.abs(stated[1][real] - plain[real]).max() > 0.01


@pytest.mark.slow
def test_many_queries_are_attended_in_blocks(case, ids, monkeypatch):
    model = case("qwen3_tied_window").model
    whole = np.asarray(model(ids, segment_ids=SEGMENTS))
    monkeypatch.setattr("moe_jax.models.attention._attention.QUERY_BLOCK", 16)
    real = SEGMENTS > 0
    assert_logits_close(np.asarray(model(ids, segment_ids=SEGMENTS))[real], whole[real])


@pytest.mark.slow
def test_gradients_stay_within_a_sequence(case, ids):
    """The loss of one sequence moves nothing by the tokens of another; under remat."""
    model = moe_jax.load_pretrained(case("qwen3").directory, dtype=jnp.float32)

    def loss(model, ids, segments, columns):
        logits = model(ids, segment_ids=segments, remat=True)[:1, columns]
        return (jax.nn.log_softmax(logits) ** 2).mean()

    grads = jax.jit(nnx.grad(loss), static_argnums=3)
    columns = tuple(range(14, 40))
    packed = grads(model, ids[:1], SEGMENTS[:1], columns)
    alone = grads(model, ids[:1, list(columns)], SEGMENTS[:1, list(columns)], tuple(range(26)))
    for want, found in zip(jax.tree.leaves(alone), jax.tree.leaves(packed), strict=True):
        np.testing.assert_allclose(found, want, rtol=1e-3, atol=1e-4 * np.abs(want).max())


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["expert=2,tensor=2", "data=2,expert=2", "explicit"])
def test_over_a_mesh(case, ids, layout):
    alone, real = case("qwen3").model, SEGMENTS > 0
    if layout == "explicit":
        spread, _ = split(moe_jax.load_pretrained(case("qwen3").directory, dtype=jnp.float32))
    else:
        mesh = moe_jax.parallel.parse_mesh(layout)
        spread = moe_jax.load_pretrained(case("qwen3").directory, dtype=jnp.float32, mesh=mesh)
    (logits, stats), (wanted, wanted_stats) = (run_with_stats(model, ids, SEGMENTS) for model in (spread, alone))
    assert_logits_close(np.asarray(logits)[real], np.asarray(wanted)[real])
    for loss in (moe_jax.load_balancing_loss, moe_jax.router_z_loss):
        np.testing.assert_allclose(loss(stats), loss(wanted_stats), rtol=1e-5)


@pytest.mark.parametrize("name", ["mixtral", *slow("qwen3")])
def test_auxiliary_loss_is_that_of_transformers_models(case, name):
    """Padding left and right, all layers, and gradients of the routers, under jit and remat."""
    of = case(name)
    model = moe_jax.load_pretrained(of.directory, dtype=jnp.float32)
    ids, mask = np.random.default_rng(3).integers(0, VOCAB, (2, 40)), np.ones((2, 40), bool)
    mask[0, :15] = mask[1, 30:] = False

    @nnx.jit
    def value_and_grad(model):
        def loss(model):
            _, stats = model(ids, attention_mask=mask, remat=True, return_stats=True)
            return moe_jax.load_balancing_loss(stats)

        return nnx.value_and_grad(loss)(model)

    torch_model = of.torch_model
    torch_model.zero_grad()
    inputs = dict(attention_mask=torch.tensor(mask.astype(int)), output_router_logits=True)
    want = torch_model(torch.tensor(ids), **inputs).aux_loss
    want.backward()
    value, grads = value_and_grad(model)
    np.testing.assert_allclose(value, want.item(), rtol=1e-5)
    for index, layer in enumerate(torch_model.model.layers):
        found = grads["layers"][index]["mlp"]["router"]["weight"].get_value()
        wanted = layer.mlp.gate.weight.grad.numpy()
        np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-4 * np.abs(wanted).max())
    torch_model.zero_grad()


def test_what_is_refused(case, ids):
    model = case("qwen3").model
    refuses(ValueError, r"segment_ids has shape \(40,\), expected \(2, 40\)", model, ids, segment_ids=SEGMENTS[0])
    refuses(ValueError, "segment_ids holds -1, expected 0 for padding", model, ids, segment_ids=SEGMENTS - 1)
    refuses(TypeError, "segment_ids has dtype bool", model, ids, segment_ids=SEGMENTS > 0)
    cache = model.init_cache(2, 40)
    refuses(ValueError, "segment_ids is given with a cache", model, ids, segment_ids=SEGMENTS, cache=cache)
    refuses(ValueError, r"input_ids\[1, 0\] is -100", model, ids, segment_ids=np.maximum(SEGMENTS, 1))
    for kind in ("dynamic", "longrope"):
        longer = case(f"qwen3_{kind}").model
        refuses(NotImplementedError, f"type '{kind}' changes with the length", longer, ids, segment_ids=SEGMENTS)
    linear = case("qwen3_next").model
    refuses(NotImplementedError, "segment_ids: the state of linear attention", linear, ids, segment_ids=SEGMENTS)


def test_hidden_states_refuse_as_calls_do(case, ids):
    """Without logits too: sequences of a row would share rotations, and a cache its earlier tokens."""
    model = case("qwen3").model
    cache = model.init_cache(2, 40)
    refuses(
        ValueError, "segment_ids is given with a cache", model.hidden_states, ids, segment_ids=SEGMENTS, cache=cache
    )
    longer = case("qwen3_dynamic").model
    refuses(NotImplementedError, "type 'dynamic' changes", longer.hidden_states, ids, segment_ids=SEGMENTS)
