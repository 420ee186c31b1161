"""``pinned_tokens`` of whole models: a token's bits beside other rows, in chunks, padded, in prompts and in answers."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moe_jax
from moe_jax.models import SamplingParams, generate, generate_stream, load_pretrained
from moe_jax.models._generate import generate_each
from moe_jax.models._logprobs import prompt_logprobs
from moe_jax.models.attention._attention import AttentionInputs, attend, attend_in_steps, attend_xla
from tests.adapters.test_lora_of_models import filled
from tests.models.test_partition import mesh_of
from tests.support.cases.models import CASES, FAMILY_CASES, VOCAB, assert_logits_close, write_checkpoint
from tests.support.chunks import in_chunks, stepped
from tests.support.refusals import refuses

PINNED = 16
LENGTH = 90  # no multiple of PINNED, and more than a page
SLOTS = 200
REFUSED = {"qwen3_next": "linear attention", "deepseek_v32": "indexer"}
NAMES = [
    name
    for name in (*CASES, *FAMILY_CASES)
    if not name.startswith(("qwen3_next", "qwen3_5", "deepseek_v32", "glm_dsa")) and name != "olmoe"
]
IDS = np.random.default_rng(1).integers(0, VOCAB, (4, LENGTH)).astype(np.int32)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """pair(name, pinned, **options) -> the model without ``pinned_tokens`` and with them, both for SLOTS tokens."""
    made: dict[str, Path] = {}

    def get(name, pinned=PINNED, **options):
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            write_checkpoint(name, made[name], max_position_embeddings=SLOTS)
        options = dict(dtype="float32") | options
        return tuple(load_pretrained(made[name], pinned_tokens=tokens, **options) for tokens in (None, pinned))

    return get


@jax.jit
def called(model, ids, mask=None):
    return model(ids, attention_mask=mask, return_stats=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sample(19)
def test_bits(pair, name, dtype):
    """Rows of one call are those of a call of one row, of chunks of any sizes in caches of any, and of padded ones.

    In float32 they are those of the plain model, but for rounding."""
    plain, model = pair(name, dtype=dtype)
    whole = np.asarray(called(model, IDS)[0])
    if dtype == "float32":
        assert_logits_close(whole, np.asarray(called(plain, IDS)[0]), 1e-5)
    np.testing.assert_array_equal(called(model, IDS[2:3])[0][0], whole[2])
    # Row 0 has its tokens behind padding, row 1 before and between.
    mask = np.ones((2, LENGTH), bool)
    mask[0, :71], mask[1, [3, 4, 20]], mask[1, 78:] = False, False, False
    ids = np.full_like(IDS[:2], VOCAB)  # what stands in padding is not looked at
    ids[0, mask[0]], ids[1, mask[1]] = IDS[3, : mask[0].sum()], IDS[1, : mask[1].sum()]
    padded = np.asarray(called(model, ids, mask)[0])
    if not model.config.rope.depends_on_length:  # of a row, which a call knows so far alone
        np.testing.assert_array_equal(padded[0, mask[0]], whole[3, : mask[0].sum()])
        np.testing.assert_array_equal(padded[1, mask[1]], whole[1, : mask[1].sum()])
        np.testing.assert_array_equal(in_chunks(model, IDS[[0, 1, 2, 3]], (5, 6, 67, LENGTH), 130), whole)
        np.testing.assert_array_equal(in_chunks(model, IDS[[3]], [3, *range(4, 20)], 20), whole[3:, :19])
        np.testing.assert_array_equal(in_chunks(model, IDS[[1, 3]], [16, 32, LENGTH], SLOTS), whole[[1, 3]])


@pytest.mark.parametrize("pinned", [1, 7, 500])
@pytest.mark.sample(2)
def test_tiles_of_any_size(pair, pinned):
    _, model = pair("deepseek_v3" if pinned == 7 else "gpt_oss", pinned, dtype="bfloat16")
    whole = np.asarray(called(model, IDS[:, :70])[0])
    np.testing.assert_array_equal(in_chunks(model, IDS[[2]], (1, 2, 30, 70), 70), whole[2:3])


def test_what_xla_could_compute_beforehand(pair):
    """Of one tile of one row without padding all places are constants, and a frequency follows from them."""
    _, model = pair("qwen3_dynamic")
    np.testing.assert_array_equal(called(model, IDS[2:3, :12])[0][0], called(model, IDS[:, :12])[0][2])


def test_plain_models_differ(pair):
    """Otherwise the tests above would show nothing."""
    plain, _ = pair("qwen3")
    whole = np.asarray(called(plain, IDS)[0])
    assert (in_chunks(plain, IDS[[3]], [3, *range(4, 20)], LENGTH) != whole[3:, :19]).any()


def told(model, prompts, params, batch_size, **options):
    """Of each prompt its new tokens and their ``TokenLogprobs``, by rows that are refilled."""
    tokens: dict[int, list[int]] = {index: [] for index in range(len(prompts))}
    logprobs: dict[int, list[Any]] = {index: [] for index in tokens}

    def hear(new):
        for index, found in new.items():
            tokens[index] += found.tolist()
        return ()

    settings = (0.0, 1.0, 0, params)
    hear_logprobs = lambda index, new: logprobs[index].append(new)  # noqa: E731
    most = max(each.max_tokens for each in params)
    ends = (batch_size, most, settings, None, jax.random.key(5))
    generate_each(model, prompts, hear, *ends, hear_logprobs=hear_logprobs, **options)
    return [(tokens[index], jax.tree.map(lambda *leaves: np.concatenate(leaves), *logprobs[index])) for index in tokens]


def assert_same(found, expected):
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    jax.tree.map(np.testing.assert_array_equal, [each for _, each in found], [each for _, each in expected])


@pytest.mark.parametrize("name", ["granite", "gpt_oss", "deepseek_v3", "qwen3_longrope"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.sample(8)
def test_answers(pair, name, dtype):
    """Tokens, draws and log-probabilities beside any rows, after chunks of any size, and of answers read as prompts."""
    _, model = pair(name, dtype=dtype)
    prompts = [IDS[0, :70].tolist(), IDS[1, :7].tolist(), IDS[2, :17].tolist(), IDS[3, :8].tolist()]
    own: list[Any] = [dict(), dict(temperature=1.0, top_p=0.8), dict(repetition_penalty=1.3, presence_penalty=0.2)]
    own += [dict(temperature=0.7, top_k=9, logit_bias={3: 1.5}, min_tokens=2)]
    common: dict[str, Any] = dict(logprobs=4, ignore_eos=True)
    params = [SamplingParams(**common, **each, seed=row, max_tokens=9 + row) for row, each in enumerate(own)]
    expected = told(model, prompts, params, 4)
    assert_same(told(model, prompts, params, 2), expected)
    alone = [told(model, [prompt], [each], 1)[0] for prompt, each in zip(prompts, params, strict=True)]
    assert_same(alone, expected)
    model.max_num_batched_tokens = 16
    assert_same(told(model, prompts, params, 3), expected)
    model.max_num_batched_tokens = 8192
    rows = generate(model, IDS[:, :7], max_new_tokens=6, eos_token_id=None)
    parts = generate_stream(model, IDS[1:3, :7], max_new_tokens=6, eos_token_id=None)
    np.testing.assert_array_equal(np.concatenate([*parts], axis=1), rows[1:3, 7:])
    if model.config.rope.depends_on_length:
        return
    for prompt, (tokens, logprobs) in zip(prompts, expected, strict=True):
        again = prompt_logprobs(model, [*prompt, *tokens], 4).part(slice(len(prompt) - 1, None))
        jax.tree.map(np.testing.assert_array_equal, again, logprobs)


@pytest.mark.parametrize("scheme", ["fp8_channel", "int8_w8a8", "w4a16_g32", "mxfp4", "fp8_block"])
@pytest.mark.sample(5)
def test_quantized_models(scheme, tmp_path):
    """Experts and dense layers of the scheme, keys and values in FP8, rows of one page and of four."""
    write_checkpoint("qwen3", tmp_path / "plain", intermediate_size=64, max_position_embeddings=256)
    moe_jax.quantize_checkpoint(tmp_path / "plain", tmp_path / "made", scheme=scheme, modules="all")
    options: Any = dict(dtype="bfloat16", kv_cache_dtype="fp8")
    model = load_pretrained(tmp_path / "made", pinned_tokens=PINNED, **options)
    ids = np.random.default_rng(2).integers(0, VOCAB, (3, 100)).astype(np.int32)
    whole = in_chunks(model, ids[[0, 1, 2]], [100], 256)
    np.testing.assert_array_equal(in_chunks(model, ids[[0, 1, 2]], (5, 6, 67, 100), 120), whole)
    np.testing.assert_array_equal(in_chunks(model, ids[[2]], [3, *range(4, 20)], 20), whole[2:, :19])


@pytest.mark.parametrize("mesh", ["expert=4", "data=2,expert=2", "expert=2,tensor=2"])
@pytest.mark.sample(3)
def test_over_a_mesh(pair, mesh):
    plain, model = pair("qwen3", mesh=mesh_of(mesh))
    whole = np.asarray(called(model, IDS)[0])
    assert_logits_close(whole, np.asarray(called(plain, IDS)[0]), 1e-5)
    np.testing.assert_array_equal(called(model, IDS[2:3])[0][0], whole[2])
    np.testing.assert_array_equal(in_chunks(model, IDS[[1, 3]], (5, 6, 67, LENGTH), 130), whole[[1, 3]])
    answers = generate(model, IDS, max_new_tokens=5, eos_token_id=None).tolist()
    assert generate(model, IDS.tolist(), max_new_tokens=5, eos_token_id=None, batch_size=3) == answers


def test_stats(pair):
    """Where tokens of a padded call go is where the plain model sends them; padding goes nowhere."""
    plain, model = pair("qwen3")
    mask = np.ones((4, LENGTH), bool)
    mask[0, :9], mask[2, 20:], mask[3] = False, False, False
    (_, expected), (_, found) = (called(each, IDS, mask) for each in (plain, model))
    np.testing.assert_array_equal(found.load, expected.load)
    np.testing.assert_array_equal(np.sort(found.topk_ids), np.sort(expected.topk_ids))
    is_token = mask.reshape(-1)
    np.testing.assert_allclose(found.router_logits[:, is_token], expected.router_logits[:, is_token], atol=1e-5)
    assert (np.asarray(found.topk_ids)[:, ~is_token] == -1).all()


def test_damage_stays_in_its_row(pair):
    _, model = pair("gpt_oss")
    ids = IDS.copy()
    ids[1, 30] = VOCAB
    whole = np.asarray(called(model, IDS)[0])
    found, cache = stepped(model, ids, model.init_cache(4, SLOTS))
    assert np.isnan(found[1]).all()
    np.testing.assert_array_equal(np.asarray(found)[[0, 2, 3]], whole[[0, 2, 3]])
    assert np.isnan(stepped(model, IDS[:, :2], cache)[0][1]).all()


def test_adapters(case, tmp_path):
    """Rows that take adapters, and tokens that do."""
    load = functools.partial(load_pretrained, case("qwen3").directory, dtype="float32")
    for seed, name in enumerate(("story", "code")):
        options: Any = dict(rank=2 + seed, alpha=4, targets=("w13", "w2", "attention"))
        made = moe_jax.lora(load(), **options, rngs=nnx.Rngs(seed))
        moe_jax.save_lora(filled(made, seed, size=0.3), tmp_path / name)
    adapters = {name: tmp_path / name for name in ("story", "code")}
    plain, model = (moe_jax.load_lora(load(pinned_tokens=pinned), adapters) for pinned in (None, PINNED))
    ids = IDS[:, :40]
    rows = ["code", None, "story", "code"]
    expected = np.asarray(called(moe_jax.select_lora(plain, rows), ids)[0])
    found = np.asarray(called(moe_jax.select_lora(model, rows), ids)[0])
    assert_logits_close(found, expected, 1e-5)
    np.testing.assert_array_equal(called(moe_jax.select_lora(model, rows[2:3]), ids[2:3])[0][0], found[2])
    choice = np.where(np.arange(40) < 7, 0, 1)[None].repeat(4, 0).astype(np.int32)
    mask = np.arange(40) >= np.array([0, 5, 11, 0])[:, None]
    found, expected = (called(moe_jax.select_lora(each, choice), ids, mask)[0] for each in (model, plain))
    assert_logits_close(np.asarray(found)[mask], np.asarray(expected)[mask], 1e-5)


@pytest.mark.parametrize("kind", ["plain", "window", "chunk", "sinks", "codes", "latents", "rows"])
def test_attention_in_steps(kind):
    """Beside the attention of all slots, in pages that another row has left NaN in; a row that sees nothing is
    finite."""
    rng = np.random.default_rng(3)
    q = jnp.asarray(rng.standard_normal((5, 1, 2, 3, 8)), jnp.float32)
    k, v = (jnp.asarray(rng.standard_normal((5, 2, 192, 8)), jnp.float32) for _ in range(2))
    lengths = jnp.asarray([1, 64, 65, 150, 0])
    first = jnp.maximum(lengths - 1, 0)
    inputs = AttentionInputs(None, None, jnp.zeros_like(lengths), lengths, first, first[:, None], None, is_pinned=True)
    kinds: dict[str, Any] = dict(window=None, chunk=None, sinks=None, scales=None)
    value_width = None
    if kind == "window":
        kinds["window"] = 70
    elif kind == "chunk":
        kinds["chunk"] = 48
    elif kind == "sinks":
        kinds["sinks"] = jnp.asarray(rng.standard_normal(6), jnp.float32)
    elif kind == "codes":
        k, v = (part.astype(jnp.float8_e4m3fn) for part in (k, v))
        kinds["scales"] = jnp.float32(0.3), jnp.float32(1.7)
    values: Any = v
    if kind == "latents":
        values, value_width, v = None, 6, k[..., :6]
    expected = np.asarray(attend_xla(q, k, v, inputs, scale=0.4, **kinds))
    if kind in ("rows", "latents"):
        paged, given = inputs, (k, values)
    else:
        table = rng.permutation(20)[:15].reshape(5, 3)
        is_own = np.arange(192) < np.asarray(lengths)[:, None]

        def pages(rows):
            pool = jnp.full((20, 2, 64, 8), jnp.nan).astype(rows.dtype)
            held = jnp.where(is_own[:, None, :, None], rows.astype(jnp.float32), jnp.nan).astype(rows.dtype)
            return pool.at[table].set(held.reshape(5, 2, 3, 64, 8).swapaxes(1, 2))

        paged, given = dataclasses.replace(inputs, page_table=jnp.asarray(table)), (pages(k), pages(v))
    found = np.asarray(attend_in_steps(q, *given, paged, scale=0.4, value_width=value_width, **kinds))
    np.testing.assert_allclose(found[:4], expected[:4], atol=2e-6)
    assert np.isfinite(found[4]).all()
    through = attend(q, *given, paged, scale=0.4, value_width=value_width, **kinds)
    np.testing.assert_array_equal(np.asarray(through), found)


def test_rows_change_hands_between_pages(pair):
    """As ``generate`` fills a row again: tokens go into the pages that the row has, and nobody else's change."""
    plain, model = pair("mixtral")
    _, old = stepped(model, IDS[:3], model.init_cache(3, 128))
    _, two = stepped(model, IDS[[3, 0], :20], model.init_cache(2, 20))
    cache = old.with_rows(jnp.asarray([1, 3]), two)
    again, _ = stepped(model, IDS[[0, 3, 2], 20:25], dataclasses.replace(cache, lengths=jnp.asarray([20, 20, 20])))
    np.testing.assert_array_equal(again, np.asarray(called(model, IDS[[0, 3, 2], :25])[0])[:, 20:])
    refuses(ValueError, "one of the caches is in pages", plain.init_cache(3, 64).with_rows, jnp.arange(1), two)
    refuses(ValueError, "new has 128 slots a row, expected at most 64", two.with_rows, jnp.arange(2), old)
    # What goes to an entry that names no page is dropped.
    table = jnp.asarray([[0, -1], [2, 3], [4, 5]])
    _, longer = stepped(model, IDS[3:], model.init_cache(1, 128))
    cache = dataclasses.replace(old, page_table=table).with_rows(jnp.arange(1), longer)
    for before, after in zip(old.layers, cache.layers, strict=True):
        for a, b in zip(before.arrays, after.arrays, strict=True):
            assert [bool((x == y).all()) for x, y in zip(a, b, strict=True)] == [False, *[True] * 5]


@pytest.mark.parametrize("is_shared", [False, True])
def test_rows_of_a_table(pair, is_shared):
    """Padding on the left takes no slots; a row that began at a later slot goes on from there; what a full row gets
    more is written nowhere."""
    plain, model = pair("qwen3")
    table = np.asarray([[0, 1], [0, 1]] if is_shared else [[3, 1], [0, 2]])
    if not is_shared:
        ids, mask = np.pad(IDS[:2, :10], ((0, 0), (64, 0))), np.arange(74) >= 64
        cache = model.init_cache(2, 128, page_table=np.asarray([[0, 1], [2, 1]]))
        found, _ = model(ids, attention_mask=np.stack([mask, mask]), cache=cache)
        assert_logits_close(np.asarray(found)[:, 64:], np.asarray(called(plain, IDS[:2, :10])[0]), 1e-5)
        cache = model.init_cache(2, 128, page_table=np.asarray([[0, 1], [0, 2]]))
        refuses(
            ValueError, "holds tokens of another place", model, ids, attention_mask=np.stack([mask] * 2), cache=cache
        )
        _, cache = stepped(model, IDS[:2, :64], model.init_cache(2, 128, page_table=table))
        moved = dataclasses.replace(cache, starts=jnp.asarray([64, 64]))
        found, _ = stepped(model, IDS[:2, :9], moved)
        assert_logits_close(found, np.asarray(called(plain, IDS[:2, :9])[0]), 1e-5)
        return
    ids = np.concatenate([IDS, IDS], axis=1)[:2, :131]
    _, cache = stepped(model, ids[:1, :128], model.init_cache(1, 128, page_table=table[:1], num_pages=4))
    double = {name: jnp.repeat(getattr(cache, name), 2, axis=0) for name in ("starts", "lengths", "is_damaged")}
    cache = dataclasses.replace(cache, page_table=jnp.asarray(table), **double)
    found, after = stepped(model, ids[:, 128:], cache, np.asarray([[True] * 3, [False] * 3]))
    assert np.isnan(found[0]).all() and after.is_damaged.tolist() == [True, False]
    jax.tree.map(np.testing.assert_array_equal, after.layers, cache.layers)


def test_explain(pair):
    _, model = pair("qwen3")
    assert "in tiles of 16 tokens that are rows of their own" in model.explain(9, batch=4)
    assert model.explain(9, batch=4).splitlines()[1:] == model.explain(40, batch=1).splitlines()[1:]


def test_refusals(case):
    for name, reason in REFUSED.items():
        refuses(NotImplementedError, reason, load_pretrained, case(name).directory, pinned_tokens=8)
    directory, ids = case("qwen3").directory, IDS[:, :9]
    for wrong, error in ((0, ValueError), (True, TypeError)):
        refuses(error, "pinned_tokens=", load_pretrained, directory, pinned_tokens=wrong)
    explicit = mesh_of("expert=2", "Explicit")
    refuses(NotImplementedError, "Explicit", load_pretrained, directory, pinned_tokens=8, mesh=explicit)
    reason = r"layers\.0.* has scheme 'fp8_tensor'"
    refuses(NotImplementedError, reason, load_pretrained, directory, pinned_tokens=8, quantize="fp8_tensor")
    model = load_pretrained(directory, dtype="float32", pinned_tokens=8)
    refuses(NotImplementedError, "pinned_tokens=8 has no gradients", model, ids, remat=True)
    refuses(NotImplementedError, "no gradients", jax.grad(lambda m: m(ids).sum(), allow_int=True), model)
    hidden = jnp.ones((3, 32))
    refuses(NotImplementedError, "no gradients", jax.jit(jax.grad(lambda h: model.logits(h).sum())), hidden)
    refuses(
        NotImplementedError, "no gradients", jax.jit(jax.grad(lambda m: called(m, ids)[0].sum(), allow_int=True)), model
    )
    refuses(NotImplementedError, "begins at the first slot", model, ids, segment_ids=np.ones_like(ids))
    options: Any = dict(max_new_tokens=2, batch_size=2)
    refuses(NotImplementedError, "pages of its own", generate, model, ids.tolist(), **options, num_pages="auto")
