"""generate for prompts of any lengths: each prompt's answer is the one it gets alone, with few programs."""

from inspect import unwrap  # the tests' own checks of annotations would speak first

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

import moe_jax
from moe_jax.models import SamplingParams, generate
from moe_jax.models._batches import plan
from moe_jax.models._packs import Packs
from tests.support.cases.models import VOCAB, slow, write_checkpoint
from tests.support.refusals import refuses


def prompts_of(*lengths):
    rng = np.random.default_rng(len(lengths))
    return [rng.integers(0, VOCAB, length).tolist() for length in lengths]


def alone(model, prompts, **options):
    return [generate(model, [prompt], batch_size=1, **options)[0] for prompt in prompts]


@pytest.mark.parametrize(
    "name", ["mixtral_tied_window", "qwen3_next", *slow("gpt_oss", "deepseek_v3", "qwen3_dynamic", "llama4", "qwen3_5")]
)
def test_greedy_tokens_are_those_of_transformers(case, name):
    """More prompts than rows, end tokens that free rows at different times, two caches."""
    case, prompts = case(name), prompts_of(3, 1, 9, 40, 2, 16, 5)
    free = [case.torch_greedy(np.asarray([prompt]), 8, pad_token_id=0)[0].tolist() for prompt in prompts]
    ends = [free[0][4], free[2][12]]
    expected = []
    for prompt, answer in zip(prompts, free, strict=True):
        new = answer[len(prompt) :]
        count = next((at + 1 for at, token in enumerate(new) if token in ends), len(new))
        expected.append(prompt + new[:count])
    assert len({len(answer) - len(prompt) for answer, prompt in zip(expected, prompts, strict=True)}) > 1
    assert generate(case.model, prompts, max_new_tokens=8, batch_size=3, eos_token_id=ends) == expected
    tupled = [np.asarray(prompt) for prompt in prompts]
    assert generate(case.model, tupled, max_new_tokens=8, eos_token_id=ends) == expected


def test_draws_do_not_depend_on_the_batch(case):
    """The prompt's index and its own tokens decide, or its seed; settings stay with their prompts."""
    model, prompts = case("qwen3_linear").model, prompts_of(3, 11, 1, 7, 15)
    params = [SamplingParams(temperature=1.5, seed=5, max_tokens=n, presence_penalty=0.5) for n in (2, 7, 3, 9, 4)]
    options = dict(max_new_tokens=9, sampling_params=params)
    made = generate(model, prompts, batch_size=2, **options)
    assert [len(a) - len(p) for a, p in zip(made, prompts, strict=True)] == [2, 7, 3, 9, 4]
    assert made == [
        generate(model, [p], batch_size=1, max_new_tokens=9, sampling_params=[q])[0]
        for p, q in zip(prompts, params, strict=True)
    ]
    drawn = [
        generate(model, prompts, batch_size=size, max_new_tokens=9, temperature=2.0, rng=jax.random.key(3))
        for size in (1, 2)
    ]
    assert drawn[0] == drawn[1]
    same = generate(model, [prompts[0]] * 4, batch_size=2, max_new_tokens=9, temperature=2.0, rng=jax.random.key(3))
    assert len({tuple(answer) for answer in same}) > 1


@pytest.mark.parametrize(
    "layout", [("expert=2,tensor=2", "Explicit"), *slow(("tensor=4", "Auto"), ("expert=2", "Auto"))]
)
def test_over_a_mesh(case, layout):
    """Rows are refilled in caches that are split by heads; the load counts each token once."""
    alone, prompts = case("qwen3_linear").model, prompts_of(3, 11, 1, 7, 40, 4)
    sizes = {name: int(size) for name, size in (entry.split("=") for entry in layout[0].split(","))}
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType[layout[1]],) * len(sizes))
    spread = moe_jax.load_pretrained(case("qwen3_linear").directory, dtype="float32", mesh=mesh)
    options = dict(max_new_tokens=6, batch_size=2, return_load=True)
    (made, load), (expected, load_alone) = (generate(model, prompts, **options) for model in (spread, alone))
    assert made == expected
    np.testing.assert_array_equal(load, load_alone)
    layers, top_k = len(alone.config.moe_layers), alone.config.top_k
    assert load.sum() == layers * top_k * sum(len(answer) - 1 for answer in made)


@pytest.fixture
def compilations():
    """Programs that XLA has compiled since the test began."""
    found = []

    def listen(event, _, **__):
        if event == "/jax/core/compile/backend_compile_duration":
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield found
    jax.monitoring.unregister_event_duration_listener(listen)


def test_eight_programs_for_any_lengths(tmp_path, compilations):
    """Every bucket from 16 to 1024 and beyond, prompts longer than a call may be, and some that begin alike; a second
    file of other lengths in the same buckets compiles nothing."""
    write_checkpoint("mixtral", tmp_path, max_position_embeddings=2048, num_hidden_layers=1)
    model = moe_jax.load_pretrained(tmp_path, dtype="float32", max_num_batched_tokens=512)
    lengths = [5, 17, 33, 70, 130, 260, 520, 1100, 3, 2, 1]

    def prompts(*lengths):
        return [*prompts_of(*lengths), *([7] * 900 + prompt for prompt in prompts_of(*lengths[:3]))]

    before = len(compilations)
    generate(model, prompts(*lengths), max_new_tokens=2, batch_size=4)
    assert 0 < len(compilations) - before <= 8
    before = len(compilations)
    generate(model, prompts(*(n + 1 for n in lengths)), max_new_tokens=3, batch_size=4)
    assert len(compilations) == before


def test_programs_are_few_whatever_the_lengths():
    """Those that read prompts, beside the zeros and the loop of each cache."""
    rng = np.random.default_rng(2)
    for _ in range(20):
        longest = int(rng.integers(1, 20000))
        prompts = [np.zeros(n, np.int32) + n % 3 for n in rng.integers(1, longest + 1, 60)]
        groups, found = plan([len(prompt) for prompt in prompts], 128), 0
        for group in groups:
            options = dict(batch=16, max_num_batched_tokens=2048, is_shared=True, most_shapes=8 // len(groups) - 2)
            packs, shapes = Packs(prompts, group.indices, **options), set()
            while packs:
                pack, has_row, _ = packs.next(range(packs.fewest()), None)
                shapes.add((pack.ids.shape, len(pack.rows), has_row))
            found += 2 + len(shapes)
        assert found <= 8


def test_plans():
    """One long prompt has a cache of its own; prompts of like lengths share one; padding is little."""
    (one,) = plan([10, 20, 16, 30], 16)
    assert one.num_slots == 48 and one.buckets == ((32, (3, 1)), (16, (2, 0)))
    long, short = plan([9] * 63 + [120], 16)
    assert long.buckets == ((128, (63,)),) and short.num_slots == 32
    lengths = np.random.default_rng(0).integers(1, 20000, 500).tolist()
    groups = plan(lengths, 128)
    buckets = [entry for group in groups for entry in group.buckets]
    assert len(groups) <= 2 and len(buckets) <= 4
    assert sorted(index for _, indices in buckets for index in indices) == list(range(500))
    assert all(lengths[index] <= size for size, indices in buckets for index in indices)
    assert all(size + 128 <= group.num_slots for group in groups for size, _ in group.buckets)


def test_sequences_of_any_kind(case):
    model, options = case("mixtral_tied_window").model, dict(max_new_tokens=2)
    given = [range(1, 4), (5, 6)]
    assert generate(model, given, **options) == generate(model, [[1, 2, 3], [5, 6]], **options)


def test_no_new_tokens(case):
    assert generate(case("mixtral").model, [[3], [4, 5]], max_new_tokens=0) == [[3], [4, 5]]


@pytest.mark.parametrize(
    "ids, options, words",
    [
        ([[1], []], {}, "prompt 1 is empty"),
        ([], dict(batch_size=2), "holds no prompt"),
        ([[1], [2] * 62], {}, "prompt 1 of 62 tokens and max_new_tokens=4 make 66 tokens.*max_seq_len=64"),
        ([[1], [2, VOCAB]], {}, f"prompt 1 has the id {VOCAB} at 1, expected 0 to {VOCAB - 1}"),
        ([[1, -1], [2]], {}, "prompt 0 has the id -1 at 1"),
        ([[1], [2, 3]], dict(batch_size=0), "batch_size=0"),
        ([[1, 2]], dict(batch_size=1, attention_mask=[[1, 1]]), "leave attention_mask out"),
        ([[[1], [2, 3]], [4]], {}, "prompt 0 holds lists"),
        ([1, 2], dict(batch_size=1), r"prompt 0 has shape \(\)"),
        (
            [[1], [2, 3]],
            dict(sampling_params=[SamplingParams(temperature=0.0)]),
            "1 entries, expected one for each of 2",
        ),
    ],
)
def test_refusals(case, ids, options, words):
    refuses(ValueError, words, generate, case("mixtral").model, ids, **dict(max_new_tokens=4) | options)


@pytest.mark.parametrize(
    "ids, words", [([[1.5], [2, 3]], "prompt 0 has dtype float64"), ("ab", "input_ids has type str")]
)
def test_wrong_types(case, ids, words):
    with pytest.raises(TypeError, match=words):
        unwrap(generate)(case("mixtral").model, ids, max_new_tokens=4, batch_size=2)
