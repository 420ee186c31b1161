"""Sparse attention: which tokens an indexer selects, beside NumPy in float64, and every way through a model's cache.

Logits and greedy tokens beside transformers are in tests/models/families/test_whole_models.py. Prompts here have five
times as many tokens as a query attends to.
"""

import copy
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moe_jax
from moe_jax.adapters._lora import adaptable
from moe_jax.inspection import inspect_checkpoint
from moe_jax.models import IndexerConfig, generate
from moe_jax.models.attention import _attention, _choice, _hopper
from moe_jax.models.attention._attention import AttentionInputs
from moe_jax.models.attention._indexer import Indexer
from pallas_kernels.decode_attention import decode_attention
from tests.models.test_partition import check_answers
from tests.models.test_prefill import ragged, read_all
from tests.support.cases.models import assert_logits_close, run, slow

NAMES = ("deepseek_v32", "glm_dsa")
TOPK = 8
every_model = pytest.mark.parametrize("name", ["deepseek_v32", *slow("glm_dsa")])


@pytest.fixture
def model(case):
    """DeepSeek-V3.2 in float32."""
    return case("deepseek_v32").model


def with_indexer(model, **changes):
    """A copy of the model, or its config, with another indexer."""
    config = model.config
    indexer = dataclasses.replace(config.mla.indexer, **changes)
    changed = copy.deepcopy(model)
    for layer in changed.layers:
        attention = layer.self_attn
        mla = dataclasses.replace(config.mla, indexer=indexer)
        attention.config = dataclasses.replace(config, mla=mla)
        if attention.indexer is not None:
            attention.indexer.config = indexer
    return changed


def selected_by_numpy(indexer, x, compressed, keys, angles, visible, topk, is_interleaved):
    """(B, S) sets of slots, and the scores. angles: (B, S, F). visible: (B, S, L)."""

    def weight(linear):
        return np.asarray(linear.weight[...], np.float64)

    heads, width = indexer.config.num_heads, indexer.config.head_dim
    q = (compressed @ weight(indexer.wq_b).T).reshape(*x.shape[:2], heads, width)
    turn = np.exp(1j * angles)[:, :, None]
    count = angles.shape[-1]
    even, odd = (
        (slice(0, 2 * count, 2), slice(1, 2 * count, 2)) if is_interleaved else (slice(count), slice(count, 2 * count))
    )
    turned = (q[..., even] + 1j * q[..., odd]) * turn
    q = np.concatenate([turned.real, turned.imag, q[..., 2 * count :]], axis=-1)
    weights = (x @ weight(indexer.weights_proj).T) * heads**-0.5
    scores = np.einsum("bshl,bsh->bsl", np.maximum(np.einsum("bshd,bld->bshl", q, keys) * width**-0.5, 0), weights)
    order = np.argsort(np.where(visible, -scores, np.inf), axis=-1, kind="stable")[..., :topk]
    found = [
        [{s for s in row if seen[s]} for row, seen in zip(*pair, strict=True)]
        for pair in zip(order, visible, strict=True)
    ]
    return found, scores


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_selection_beside_numpy(model, is_interleaved):
    """Rows that start and end at slots of their own, queries behind tokens of earlier calls, two rotations."""
    batch, queries, slots, width = 2, 5, 20, 16
    config = dataclasses.replace(
        model.config,
        mla=dataclasses.replace(
            model.config.mla, indexer=IndexerConfig(num_heads=6, head_dim=width, topk=4, is_interleaved=is_interleaved)
        ),
    )
    indexer = Indexer(config, dtype=jnp.float32, rngs=nnx.Rngs(3))
    rng = np.random.default_rng(5)
    x = rng.standard_normal((batch, queries, config.hidden_size)).astype(np.float32)
    compressed = rng.standard_normal((batch, queries, config.mla.q_lora_rank)).astype(np.float32)
    keys = rng.standard_normal((batch, 1, slots, width)).astype(np.float32)
    starts, first, lengths = np.array([0, 3]), np.array([9, 2]), np.array([14, 8])
    positions = np.maximum(first[:, None] + np.arange(queries) - starts[:, None], 0)
    angles = positions[..., None] * np.array([1.0, 0.3, 0.1, 0.01])
    places = [jnp.asarray(a, jnp.int32) for a in (starts, lengths, first, positions)]
    turned = [jnp.asarray(f(angles), jnp.float32) for f in (np.cos, np.sin)]
    found = indexer.select(*map(jnp.asarray, (x, compressed, keys)), AttentionInputs(*turned, *places, None))
    at = np.arange(slots)
    seen = (at >= starts[:, None, None]) & (at < lengths[:, None, None])
    seen = seen & (at <= (first[:, None] + np.arange(queries))[..., None])
    expected, _ = selected_by_numpy(indexer, x, compressed, keys[:, 0], angles, seen, 4, is_interleaved)
    for row in range(batch):
        for query in range(queries):
            slots_of = np.asarray(found)[row, query]
            assert len(set(slots_of.tolist())) == 4
            counted = [s for s in slots_of.tolist() if seen[row, query, s]]
            assert {*counted} == expected[row][query] and counted == slots_of[: len(counted)].tolist()
    assert {len(chosen) for row in expected for chosen in row} >= {0, 1, 4}


def test_equal_scores_select_the_earliest(model):
    config = dataclasses.replace(
        model.config, mla=dataclasses.replace(model.config.mla, indexer=IndexerConfig(num_heads=2, head_dim=8, topk=3))
    )
    indexer = Indexer(config, dtype=jnp.float32, rngs=nnx.Rngs(0))
    ones = [jnp.ones((1, 1, n)) for n in (config.hidden_size, config.mla.q_lora_rank)]
    places = [jnp.asarray(a, jnp.int32) for a in ([1], [7], [6], [[5]])]
    angles = [jnp.ones((1, 1, 4)), jnp.zeros((1, 1, 4))]
    found = indexer.select(*ones, jnp.zeros((1, 1, 9, 8)), AttentionInputs(*angles, *places, None))
    assert found.tolist() == [[[1, 2, 3]]]


@every_model
def test_selection_matters(case, prompt, name):
    """Agreement with transformers says something: all tokens, one more, or the other rotation give other logits."""
    case, ids = case(name), prompt(2, 40)
    expected = np.asarray(case.model.score(ids))
    rotation = not case.model.config.mla.indexer.is_interleaved
    for change in (dict(topk=64), dict(topk=TOPK + 1), dict(is_interleaved=rotation)):
        other = np.asarray(with_indexer(case.model, **change).score(ids))
        assert np.abs(other - expected).max() > 1e-2 * np.ptp(expected), change
        assert_logits_close(other[:, :TOPK], expected[:, :TOPK])  # these see too few tokens to select some of them


@every_model
def test_steps_agree_with_a_prefill(case, prompt, name):
    """One token at a time gathers the rows that it selects; three at a time attend under a mask."""
    model, ids = case(name).model, prompt(2, 40)
    whole = np.asarray(model.score(ids))[:, :30]
    for step in (1, 3):
        logits, cache = run(model, ids[:, :6], cache=model.init_cache(2, 33))
        parts = [logits]
        for t in range(6, 30, step):
            logits, cache = run(model, ids[:, t : t + step], cache=cache)
            parts.append(logits)
        assert_logits_close(np.concatenate(parts, axis=1), whole)


def test_a_cache_no_longer_than_the_selection(model, prompt):
    """Every token is selected then; a longer cache with as many tokens in it gives the same."""
    ids = prompt(2, TOPK)
    short, long = (run(model, ids, cache=model.init_cache(2, slots))[0] for slots in (TOPK, 40))
    assert_logits_close(short, np.asarray(long))


@every_model
def test_rows_have_their_own_lengths(case, prompt, name):
    """Padding left, right and between, in calls of several tokens and of one."""
    model, ids = case(name).model, prompt(3, 30)
    alone = np.asarray(model.score(ids))
    cache, done, got = model.init_cache(3, 32), np.zeros(3, int), [[], [], []]
    for turn, counts in enumerate([(9, 4, 1), (9, 9, 6), (5, 9, 8), (1, 0, 1), (0, 1, 1), (1, 1, 1)]):
        width = max(counts)
        mask = np.zeros((3, width), bool)
        mask[0, : counts[0]] = mask[1, width - counts[1] :] = True
        mask[2, np.sort(np.random.default_rng(turn).permutation(width)[: counts[2]])] = True
        tokens = np.full((3, width), -7, np.int32)
        for row, count in enumerate(counts):
            tokens[row, mask[row]] = ids[row, done[row] : done[row] + count]
        logits, cache = run(model, tokens, attention_mask=mask, cache=cache)
        done += counts
        for row in range(3):
            got[row].append(np.asarray(logits)[row, mask[row]])
    assert done.tolist() == [25, 24, 18]
    for row in range(3):
        assert_logits_close(np.concatenate(got[row]), alone[row, : done[row]])


def test_a_row_is_cleared_and_filled_again(model, prompt):
    """Index keys of the old row, NaN here, are gone with its latents."""
    ids = prompt(2, 30)
    _, cache = run(model, ids, cache=model.init_cache(2, 32))
    spoiled = jax.tree.map(lambda a: a.at[1].set(jnp.nan), cache.layers)
    fresh = dataclasses.replace(cache, layers=spoiled).cleared(jnp.array([False, True]))
    assert all(not np.asarray(array)[1].any() for layer in fresh.layers for array in layer.arrays)
    new = prompt(1, 30)[0, ::-1]
    mask = np.array([np.zeros(20, bool), np.ones(20, bool)])
    logits, _ = run(model, np.stack([new[:20]] * 2), attention_mask=mask, cache=fresh)
    assert_logits_close(np.asarray(logits)[1], np.asarray(model.score(np.tile(new[:20], (2, 1))))[0])


@every_model
def test_prompts_in_chunks(case, monkeypatch, prompt, name):
    """Queries of a later chunk select tokens of earlier ones; blocks of queries within a chunk change nothing."""
    case, ids = case(name), prompt(2, 60)
    mask, rows = ragged(ids.shape), np.arange(2)
    monkeypatch.setattr(case.model, "max_num_batched_tokens", 32)
    monkeypatch.setattr(_attention, "QUERY_BLOCK", 5)
    logits, _ = read_all(case.model, np.where(mask, ids, 0), mask, 64)
    judged = [case.torch_logits(ids[row : row + 1, mask[row]])[0, -1] for row in rows]
    assert_logits_close(logits, np.stack(judged))


@every_model
def test_long_answers_equal_transformers(case, prompt, name):
    case, ids = case(name), prompt(2, 33)
    np.testing.assert_array_equal(
        generate(case.model, ids, max_new_tokens=12), case.torch_greedy(ids, 12, pad_token_id=0)
    )


def test_what_the_cache_keeps(case):
    """A latent and a rotated key for each token, an index key in layers that select."""
    caches = {name: case(name).model.init_cache(2, 24) for name in NAMES}
    shapes = {name: [[a.shape for a in layer.arrays] for layer in cache.layers] for name, cache in caches.items()}
    latent, index = (2, 1, 24, 24), (2, 1, 24, 16)
    assert shapes == {"deepseek_v32": [[latent, index]] * 2, "glm_dsa": [[latent, index], [latent]] * 2}


@pytest.mark.slow
@pytest.mark.parametrize("layout", [("tensor=2", "Auto"), ("expert=2,tensor=2", "Explicit")])
def test_over_a_mesh(case, layout):
    spread = check_answers(case("glm_dsa"), *layout)
    indexer = spread.layers[0].self_attn.indexer
    assert all(module.weight.get_value().sharding.is_fully_replicated for module in indexer.dense_modules().values())


def test_decode_steps_by_a_kernel(case, prompt, monkeypatch):
    """The rows that a step selects lie in the order that the kernel of decode steps wants; a reference stands in."""
    found = []

    def stand_in(q, k, v, *, implementation, **settings):
        found.append(k.shape)
        return decode_attention(q, k, v, implementation="reference", **settings)

    monkeypatch.setattr(_hopper, "decode_attention", stand_in)
    monkeypatch.setattr(_hopper, "hopper_sms", lambda: 132)
    monkeypatch.setattr(_hopper, "decode_config_error", lambda desc, config: None)
    monkeypatch.setattr(_choice, "model_refusal", lambda name, config, dtype: None)
    monkeypatch.setattr(_hopper, "OLDEST_JAX", (0, 10))
    one, ids = case("glm_dsa"), prompt(2, 40)
    model = moe_jax.load_pretrained(one.directory, dtype="float32", attention="hopper")
    mask = np.arange(39) >= [[0], [6]]
    _, cache = run(model, ids[:, :39], attention_mask=mask, cache=model.init_cache(2, 44))
    assert not found  # a prefill that selects has no kernel
    logits, _ = run(model, ids[:, 39:], cache=cache)
    assert set(found) == {(2, 1, TOPK, 24)}  # equal layers are traced once
    for row in range(2):
        alone = np.concatenate([ids[row, :39][mask[row]], ids[row, 39:]])
        assert_logits_close(np.asarray(logits)[row], np.asarray(one.model.score(np.tile(alone, (2, 1))))[0, -1:])


def test_gradients_pass_by_the_indexer(model, prompt):
    """What is selected has no gradient; what is attended has."""
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    grads = jax.jit(jax.grad(lambda p: nnx.merge(graphdef, p, rest)(prompt(1, 20)).sum()))(params)
    attention = grads["layers"][0]["self_attn"]
    assert all(not np.asarray(leaf).any() for leaf in jax.tree.leaves(attention["indexer"]))
    assert np.asarray(attention["kv_b_proj"]["weight"].get_value()).any()
    labels = {projection.label for projection in adaptable(model)[1]}
    assert any("q_b_proj" in label for label in labels) and not any("indexer" in label for label in labels)


def test_inspection(case):
    report = inspect_checkpoint(case("glm_dsa").directory).render()
    assert "MLA: 40 numbers cached per token, 24 in layers that share, an indexer selects 8 tokens" in report
