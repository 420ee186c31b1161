"""``LLM`` against transformers: tokens, texts, chat templates, generation_config.json; and vLLM's names."""

import dataclasses
import json
import shutil
import sys
import warnings

import jax
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import moe_jax
from moe_jax import SamplingParams
from moe_jax.models import generate, load_pretrained
from tests.models.test_partition import mesh_of
from tests.support.checkpoints.texts import VOCAB
from tests.support.refusals import refuses

PROMPTS = ["The capital of France is", "é", "Once upon a time, in a"]
GREEDY = SamplingParams(temperature=0, max_tokens=12)
MESSAGES = [
    {"role": "user", "content": "Name a river."},
    {"role": "assistant", "content": "Seine"},
    {"role": "user", "content": "ünd another"},
]
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def torch_new_tokens(directory, ids, **options):
    """What transformers adds, end token included, by the file's settings and ``options``."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ids = torch.tensor([ids])
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options)
    return made[0, ids.shape[1] :].tolist()


@pytest.fixture(scope="module")
def tokenizer(text_dir):
    """transformers'."""
    return PreTrainedTokenizerFast.from_pretrained(text_dir)


@pytest.fixture(scope="module")
def free(llm):
    """Greedy tokens of the prompts, past all end tokens."""
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]


# -- tokens and texts -------------------------------------------------------------------------------------------------


def test_greedy_equals_transformers(llm, text_dir, tokenizer):
    """Prompts of three lengths in one call: tokens, texts, and what vLLM calls the rest."""
    outputs = llm.generate(PROMPTS, GREEDY)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = tokenizer(prompt).input_ids
        answer = output.outputs[0]
        assert (output.prompt, output.prompt_token_ids, output.finished) == (prompt, ids, True)
        assert answer.token_ids == torch_new_tokens(text_dir, ids, max_new_tokens=12, do_sample=False)
        assert answer.text == tokenizer.decode(answer.token_ids, skip_special_tokens=True)
        assert (answer.index, answer.finish_reason, answer.stop_reason) == (0, "length", None) and answer.finished()
    assert len({output.request_id for output in outputs}) == 3


@pytest.mark.parametrize("mesh", [None, pytest.param("expert=2,tensor=2", marks=pytest.mark.slow)])
def test_a_hybrid_model(hybrid_dir, mesh):
    """More prompts than rows, of which the last ones get rows that others leave; all that are long come in chunks."""
    mesh = None if mesh is None else mesh_of(mesh)
    made = moe_jax.LLM(hybrid_dir, dtype="float32", max_num_seqs=2, max_num_batched_tokens=32, mesh=mesh)
    prompts = [*PROMPTS, "A text that takes more than two chunks of the prompt to be read, all in all."]
    for output in made.generate(prompts, GREEDY):
        expected = torch_new_tokens(hybrid_dir, output.prompt_token_ids, max_new_tokens=12, do_sample=False)
        assert output.outputs[0].token_ids == expected


def test_generation_config_decides(with_config, free):
    """End tokens as a list, a penalty, a number of tokens: what transformers does by the same file. Without do_sample
    transformers is greedy, so the file says so."""
    stated = {"eos_token_id": [free[0][5], VOCAB - 3], "repetition_penalty": 1.4, "max_new_tokens": 20}
    directory = with_config(stated | {"do_sample": False})
    llm = moe_jax.LLM(directory, dtype="float32")
    params = llm.get_default_sampling_params()
    assert (params.temperature, params.repetition_penalty, params.max_tokens) == (0, 1.4, 20)
    for prompt, output in zip(PROMPTS, llm.generate(PROMPTS), strict=True):
        expected = torch_new_tokens(directory, output.prompt_token_ids)
        assert output.outputs[0].token_ids == expected, prompt
    ended = llm.generate(PROMPTS[0], GREEDY)[0].outputs[0]
    assert ended.token_ids == torch_new_tokens(
        directory, llm.get_tokenizer().encode(PROMPTS[0]).ids, repetition_penalty=1.0, max_new_tokens=12
    )
    assert ended.token_ids[-1] == free[0][5] and (ended.finish_reason, ended.stop_reason) == ("stop", None)
    assert ended.text == llm.get_tokenizer().decode(ended.token_ids[:-1]), "the end token does not show"
    plain = moe_jax.LLM(directory, dtype="float32", generation_config="vllm")
    assert plain.get_default_sampling_params() == SamplingParams()
    assert plain.generate(PROMPTS[0], GREEDY)[0].outputs[0] == ended, "end tokens hold all the same"


def test_generate_ends_where_the_checkpoint_says(with_config, free):
    """moe_jax.generate too: by generation_config.json, else config.json; None never ends."""
    directory = with_config({"eos_token_id": free[0][3]})
    model = load_pretrained(directory, dtype="float32")
    assert model.eos_token_id == (free[0][3],) and model.config.eos_token_id == (VOCAB - 3,)
    ids = np.asarray([moe_jax.LLM(directory, dtype="float32").generate(PROMPTS[0], GREEDY)[0].prompt_token_ids])
    made = np.asarray(generate(model, ids, max_new_tokens=12))[0, ids.shape[1] :]
    at = free[0].index(free[0][3])
    assert made.tolist() == free[0][: at + 1] + [free[0][3]] * (11 - at)
    assert np.asarray(generate(model, ids, max_new_tokens=12, eos_token_id=None))[0, ids.shape[1] :].tolist() == free[0]
    refuses(TypeError, "eos_token_id", generate, model, ids, max_new_tokens=1, eos_token_id="eos")


def test_stop_tokens(llm, free):
    """Of the row: their id is the reason, they do not show unless asked for; the model's own end tokens have none."""
    at = free[0].index(free[0][4])
    params = SamplingParams(temperature=0, max_tokens=12, stop_token_ids=[free[0][4]])
    answer = llm.generate(PROMPTS[0], params)[0].outputs[0]
    decode = llm.get_tokenizer().decode
    assert answer.token_ids == free[0][: at + 1] and answer.text == decode(free[0][:at])
    assert (answer.finish_reason, answer.stop_reason) == ("stop", free[0][4])
    params = SamplingParams(temperature=0, max_tokens=12, stop_token_ids=[free[0][4]], include_stop_str_in_output=True)
    assert llm.generate(PROMPTS[0], params)[0].outputs[0].text == decode(free[0][: at + 1])


@pytest.mark.parametrize("includes", [False, True])
def test_stop_strings(llm, free, includes):
    """A string across two tokens ends one answer and not the others, whose tokens stay the same."""
    text = llm.get_tokenizer().decode(free[0])
    stop = text[5:7]
    params = SamplingParams(temperature=0, max_tokens=12, stop=["nowhere", stop], include_stop_str_in_output=includes)
    output, *others = llm.generate(PROMPTS, [params, GREEDY, GREEDY])
    answer = output.outputs[0]
    cut = text.index(stop) + (len(stop) if includes else 0)
    assert answer.text == text[:cut] and (answer.finish_reason, answer.stop_reason) == ("stop", stop)
    assert answer.token_ids == free[0][: len(answer.token_ids)] and len(answer.token_ids) < 12
    assert [other.outputs[0].token_ids for other in others] == free[1:]


@pytest.mark.parametrize("options", [{}, {"stop": True}, {"n": 2, "temperature": 1.5, "seed": 3, "stop": True}])
def test_stream_is_generate(llm, free, options):
    """Piece by piece the same text and tokens; the first before the second is asked for."""
    options = dict(temperature=0, max_tokens=12) | options
    if options.get("stop"):
        options["stop"] = llm.get_tokenizer().decode(free[0])[6:8]
    params = SamplingParams(**options)
    (whole,) = llm.generate([PROMPTS[0]], params)
    parts = list(llm.stream(PROMPTS[0], params))
    assert [part.finished for part in parts] == [False] * (len(parts) - 1) + [True] and len(parts) > 1
    for answer in whole.outputs:
        pieces = [each for part in parts for each in part.outputs if each.index == answer.index]
        assert "".join(piece.text for piece in pieces) == answer.text
        assert sum((piece.token_ids for piece in pieces), []) == answer.token_ids
        assert (pieces[-1].finish_reason, pieces[-1].stop_reason) == (answer.finish_reason, answer.stop_reason)
        assert all(piece.finish_reason is None for piece in pieces[:-1])


def test_prompts_of_every_kind(llm):
    (plain,) = llm.generate(PROMPTS[0], GREEDY)
    ids = plain.prompt_token_ids
    for given in (ids, np.asarray(ids), [ids], {"prompt": PROMPTS[0]}, [{"prompt_token_ids": ids}]):
        (output,) = llm.generate(given, GREEDY)
        assert output.outputs == plain.outputs and output.prompt_token_ids == ids
        assert output.prompt == (PROMPTS[0] if isinstance(given, dict) else None)
    assert llm.generate([], GREEDY) == []
    assert next(llm.stream(ids, GREEDY)).outputs[0].token_ids == plain.outputs[0].token_ids[:1]


def test_numbers_of_tokens(llm, text_dir):
    """16 unless said, as in vLLM; None and more than fit: up to the model's own limit."""
    ids = list(range(80))
    greedy = dict(temperature=0, ignore_eos=True)
    short, long = (llm.generate([PROMPTS[0], ids], SamplingParams(**greedy, **o)) for o in ({}, {"max_tokens": None}))
    assert [len(output.outputs[0].token_ids) for output in short] == [16, 16]
    assert [len(output.outputs[0].token_ids) for output in long] == [96 - len(PROMPTS[0]), 16]
    assert {output.outputs[0].finish_reason for output in [*short, *long]} == {"length"}
    (most,) = llm.generate(ids, SamplingParams(**greedy, max_tokens=1000))
    assert most.outputs == long[1].outputs
    refuses(ValueError, "prompt 1 of 96 tokens leaves no room", llm.generate, ["a", [1] * 96], GREEDY)


def test_draws(llm, text_dir):
    """Seeds decide, n answers differ, and a new LLM repeats the draws of the one before."""
    params = SamplingParams(temperature=2.0, n=3, seed=7, max_tokens=6)
    (three,) = llm.generate(PROMPTS[0], params)
    assert [answer.index for answer in three.outputs] == [0, 1, 2]
    assert len({tuple(answer.token_ids) for answer in three.outputs}) == 3
    alone = [llm.generate(PROMPTS, SamplingParams(temperature=2.0, seed=7 + i, max_tokens=6))[0] for i in range(3)]
    assert [output.outputs[0].token_ids for output in alone] == [answer.token_ids for answer in three.outputs]
    free = SamplingParams(temperature=2.0, max_tokens=6)
    drawn = []
    for seed in (0, 0, 1):
        fresh = moe_jax.LLM(text_dir, dtype="float32", seed=seed)
        drawn.append([fresh.generate(PROMPTS[0], free)[0].outputs[0].token_ids for _ in range(2)])
    assert drawn[0] == drawn[1] != drawn[2] and drawn[0][0] != drawn[0][1]


def test_pinned_tokens(text_dir):
    """Log-probabilities of prompts run together are those of each alone, and of answers read as prompts, to the bit."""
    llm = moe_jax.LLM(text_dir, dtype="float32", pinned_tokens=8)
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=10, logprobs=2, ignore_eos=True)

    def values(logprobs):
        return [{token: (one.logprob, one.rank) for token, one in each.items()} for each in logprobs]

    again = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=2)
    for prompt, together in zip(PROMPTS, llm.generate(PROMPTS, params), strict=True):
        (alone,) = llm.generate(prompt, params)
        answer = together.outputs[0]
        assert alone.outputs[0].token_ids == answer.token_ids
        assert values(alone.outputs[0].logprobs) == values(answer.logprobs)
        ids = [*together.prompt_token_ids, *answer.token_ids]
        (read,) = llm.generate({"prompt_token_ids": ids}, again)
        assert values(read.prompt_logprobs[len(together.prompt_token_ids) :]) == values(answer.logprobs)


# -- conversations ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"chat_template_kwargs": {"enable_thinking": False}}, {"tools": TOOLS}, {"add_generation_prompt": False}],
)
def test_chat_renders_as_transformers_does(llm, tokenizer, options):
    """One conversation and several; template arguments and tools reach the template."""
    given = dict(options)
    variables = given.pop("chat_template_kwargs", {})
    expected = tokenizer.apply_chat_template(
        MESSAGES, tokenize=False, **{"add_generation_prompt": True} | given, **variables
    )
    ids = tokenizer(expected, add_special_tokens=False).input_ids
    first, second = llm.chat([MESSAGES[:1], MESSAGES], SamplingParams(temperature=0, max_tokens=2), **options)
    assert (second.prompt, second.prompt_token_ids) == (expected, ids) and first.prompt != second.prompt
    (alone,) = llm.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=2), **options)
    assert (
        alone.outputs
        == second.outputs
        == llm.generate({"prompt_token_ids": ids}, GREEDY.__class__(temperature=0, max_tokens=2))[0].outputs
    )
    streamed = list(llm.stream_chat(MESSAGES, SamplingParams(temperature=0, max_tokens=2), **options))
    assert sum((part.outputs[0].token_ids for part in streamed), []) == alone.outputs[0].token_ids


def test_chat_with_another_template(llm):
    (output,) = llm.chat(MESSAGES[:1], GREEDY, chat_template="{{ messages[0].content }}!")
    assert output.prompt == "Name a river.!"
    part = [{"role": "user", "content": [{"type": "text", "text": "Name a river."}]}]
    assert llm.chat(part, GREEDY, chat_template="{{ messages[0].content }}!")[0].outputs == output.outputs


@pytest.mark.parametrize(
    "messages, options, error, words",
    [
        (
            MESSAGES,
            {"chat_template_kwargs": {"thinking": 1}},
            ValueError,
            "reads no variable 'thinking'; it reads: add_",
        ),
        (MESSAGES, {"chat_template_kwargs": {"messages": []}}, ValueError, "messages has an argument of its own"),
        (MESSAGES, {"chat_template_kwargs": {"enable_thinking": {1}}}, TypeError, "what JSON cannot"),
        (MESSAGES, {"chat_template": "{{ x.y.z }}"}, ValueError, "chat_template: chat template: 'x' is undefined"),
        (MESSAGES, {"tools": TOOLS, "chat_template": "hi"}, ValueError, "reads no variable 'tools'; it reads: none"),
        ([], {}, ValueError, "messages is empty"),
        ("hello", {}, TypeError, "messages has type str"),
        (["hello"], {}, TypeError, r"messages\[0\] is 'hello', expected a list of messages"),
        ([{"content": "a"}], {}, TypeError, r"messages\[0\] is {'content': 'a'}"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], {}, ValueError, "a part that is no text"),
        ([{"role": "user", "content": ["a", "b"]}], {}, ValueError, "2 parts, expected a text; join them"),
        (MESSAGES, {"continue_final_message": True}, TypeError, "LLM.chat: continue_final_message=True is not built"),
    ],
)
def test_chat_refusals(llm, messages, options, error, words):
    refuses(error, words, llm.chat, messages, GREEDY, **options)
    refuses(error, words.replace("LLM.chat", "LLM.stream_chat"), llm.stream_chat, messages, GREEDY, **options)


# -- what is not built ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, words",
    [
        ({"pipeline_parallel_size": 2}, "LLM: pipeline_parallel_size=2 is not built; give mesh="),
        ({"gpu_memory_utilization": 0.9}, "gpu_memory_utilization=0.9 is not built; XLA_PYTHON_CLIENT_MEM_FRACTION"),
        ({"trust_remote_code": True}, "never run"),
        ({"enforce_eager": True}, "enforce_eager=True is not built"),
        ({"quantisation": "fp8"}, "LLM: no argument quantisation"),
    ],
)
def test_constructor_refuses(text_dir, options, words):
    refuses(TypeError, words, moe_jax.LLM, text_dir, **options)


@pytest.mark.parametrize(
    "options, error, words",
    [
        ({"generation_config": "none"}, ValueError, 'generation_config=\'none\', expected "auto" or "vllm"'),
        ({"tensor_parallel_size": 99}, ValueError, "tensor_parallel_size=99, and JAX sees 8 devices"),
        ({"tensor_parallel_size": 2, "mesh": 1}, ValueError, "tensor_parallel_size=2 and mesh= both say"),
        ({"max_model_len": 9, "max_seq_len": 8}, ValueError, "max_model_len=9 and max_seq_len=8 are two names"),
        ({"max_num_seqs": 0}, ValueError, "max_num_seqs=0"),
        ({"seed": -1}, ValueError, "seed=-1"),
    ],
)
def test_constructor_checks(text_dir, options, error, words):
    refuses(error, words, moe_jax.LLM, text_dir, **options)


def test_arguments_that_change_nothing_are_taken(text_dir, llm):
    """Of scripts written for vLLM: what holds here anyway."""
    options = dict(tensor_parallel_size=1, trust_remote_code=False, enforce_eager=False, quantization=None, seed=None)
    options |= dict(max_model_len=48, load_format="auto", tokenizer_mode="auto")
    other = moe_jax.LLM(text_dir, dtype="float32", **options)
    assert other.generate("a", GREEDY, use_tqdm=False, lora_request=None) and other.model.max_seq_len == 48
    held = dict(logprobs=None, prompt_logprobs=None, min_tokens=0, detokenize=True, bad_words=None, best_of=None)
    assert SamplingParams(temperature=0, max_tokens=12, **held, structured_outputs=None) == GREEDY


def test_a_bar(llm, capsys):
    """Of finished prompts, on stderr; vLLM's own kind of argument, a function that makes one, too."""
    llm.generate(PROMPTS, GREEDY, use_tqdm=True)
    assert "Processed prompts: 100%" in capsys.readouterr().err
    bars = []

    class Bar:
        def __init__(self, total, desc):
            self.total, self.n, self.is_closed = total, 0, False
            bars.append(self)

        def update(self, n):
            self.n += n

        def close(self):
            self.is_closed = True

    llm.generate(PROMPTS, SamplingParams(n=2, seed=0, max_tokens=3), use_tqdm=Bar)
    assert [(bar.total, bar.n, bar.is_closed) for bar in bars] == [(3, 3, True)]


def test_vllms_names_of_a_mesh(text_dir):
    """What such a model answers: test_a_mesh."""
    for options in ({}, {"enable_expert_parallel": True}):
        split = moe_jax.LLM(text_dir, dtype="float32", tensor_parallel_size=2, **options)
        assert split.model.parallel.mesh.shape == {"expert" if options else "tensor": 2}


@pytest.mark.parametrize("stated, dtype", [("float16", "float16"), ("float32", "bfloat16")])
def test_auto_dtype(text_dir, tmp_path, stated, dtype, monkeypatch):
    directory = shutil.copytree(text_dir, tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(
        json.dumps({k: v for k, v in config.items() if "dtype" not in k} | {"dtype": stated})
    )
    assert moe_jax.LLM(directory, dtype="auto").model.dtype == dtype


# -- log-probabilities ------------------------------------------------------------------------------------------------


def expected_logprobs(directory, ids):
    """(len(ids) - 1, vocab): transformers' for each token but the first."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([ids])).logits[0], -1)[:-1].double().numpy()


def check_logprobs(told, expected, tokens, number, decode):
    """Of each token: the chosen one first, then the likeliest, with ranks and texts."""
    assert len(told) == len(tokens) == len(expected)
    for found, values, token in zip(told, expected, tokens, strict=True):
        order = np.argsort(-values, kind="stable")
        top = order[: len(values) if number == -1 else number].tolist()
        assert next(iter(found)) == token and set(found) == {token, *top}
        for other, each in found.items():
            np.testing.assert_allclose(each.logprob, values[other], atol=2e-4)
            assert abs(each.rank - 1 - order.tolist().index(other)) <= (values[order[0]] - values[other] > 1e-3)
            assert each.decoded_token == decode([other], skip_special_tokens=False)


def test_logprobs(llm, text_dir):
    """The model's own, whatever bends the choice: each row's number of them, drawn tokens, penalties, the prompt."""
    bent = dict(temperature=1.5, repetition_penalty=1.3, max_tokens=6)
    numbers = (3, None, -1, 0)
    params = [SamplingParams(seed=3 + i, logprobs=n, prompt_logprobs=n, **bent) for i, n in enumerate(numbers)]
    params[0] = dataclasses.replace(params[0], n=2)
    outputs = llm.generate([*PROMPTS, PROMPTS[1]], params)
    first, plain = outputs[:2]
    assert plain.prompt_logprobs is None and plain.outputs[0].logprobs is plain.outputs[0].cumulative_logprob is None
    decode = llm.get_tokenizer().decode
    for number, output in zip(numbers, outputs, strict=True):
        if number is None:
            continue
        prompt = output.prompt_token_ids
        for answer in output.outputs:
            expected = expected_logprobs(text_dir, [*prompt, *answer.token_ids])
            check_logprobs(answer.logprobs, expected[len(prompt) - 1 :], answer.token_ids, number, decode)
            chosen = [
                values[token] for values, token in zip(expected[len(prompt) - 1 :], answer.token_ids, strict=True)
            ]
            np.testing.assert_allclose(answer.cumulative_logprob, sum(chosen), atol=1e-3)
        assert output.prompt_logprobs[0] is None
        check_logprobs(output.prompt_logprobs[1:], expected[: len(prompt) - 1], prompt[1:], number, decode)
    parts = list(llm.stream(PROMPTS[0], params[0]))
    for answer in first.outputs:
        pieces = [each for part in parts for each in part.outputs if each.index == answer.index]
        streamed = sum((piece.logprobs for piece in pieces), [])
        assert [list(found) for found in streamed] == [list(found) for found in answer.logprobs]
        values = [[each.logprob for found in told for each in found.values()] for told in (streamed, answer.logprobs)]
        np.testing.assert_allclose(*values, atol=1e-4)
        assert pieces[-1].cumulative_logprob == pytest.approx(answer.cumulative_logprob)


def test_logprobs_end_with_the_answer(llm, free):
    """A stop string ends an answer within what is made at a time."""
    stop = llm.get_tokenizer().decode(free[0])[5:7]
    (output,) = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=12, stop=stop, logprobs=1))
    answer = output.outputs[0]
    assert len(answer.logprobs) == len(answer.token_ids) < 12
    assert all(list(found) == [token] for found, token in zip(answer.logprobs, answer.token_ids, strict=True)), "greedy"


def test_min_tokens(llm, free):
    """End tokens are not chosen before, stop strings not looked for; a token that is no end token is free."""
    tokens = free[0]
    greedy = dict(temperature=0, max_tokens=12, ignore_eos=True)
    (early,) = llm.generate(PROMPTS[0], SamplingParams(**greedy, stop_token_ids=[tokens[1]]))
    assert early.outputs[0].token_ids == tokens[: tokens.index(tokens[1]) + 1]
    (late,) = llm.generate(PROMPTS[0], SamplingParams(**greedy, stop_token_ids=[tokens[1]], min_tokens=5))
    made = late.outputs[0].token_ids
    assert len(made) > 5 and tokens[1] not in made[:5] and made[:1] == tokens[:1]
    text = llm.get_tokenizer().decode(tokens)
    for least, wanted in ((0, text[: text.index(text[1])]), (12, text)):
        (output,) = llm.generate(PROMPTS[0], SamplingParams(**greedy, stop=text[1], min_tokens=least))
        assert output.outputs[0].text == wanted


def test_streams_that_are_left(llm):
    """One that is closed early leaves the model free for others."""
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    stream = llm.stream(PROMPTS[0], params)
    first = next(stream)
    stream.close()
    assert llm.generate(PROMPTS[0], params)[0].outputs[0].token_ids[:1] == first.outputs[0].token_ids


@pytest.mark.parametrize(
    "prompts, params, options, error, words",
    [
        ("a", SamplingParams(n=2, temperature=0), {}, ValueError, "n=2 with temperature=0"),
        ("a", [GREEDY, GREEDY], {}, ValueError, "2 entries, expected one for each of 1 prompts"),
        ("a", {"temperature": 0}, {}, TypeError, "sampling_params: expected SamplingParams"),
        ("a", GREEDY, {"lora_request": 1}, TypeError, "LLM.generate: lora_request=1 is not built"),
        ("a", GREEDY, {"use_tqdm": "yes"}, TypeError, "use_tqdm='yes'"),
        ("", GREEDY, {}, ValueError, "prompt 0 is empty after tokenization"),
        (["a", []], GREEDY, {}, ValueError, "prompt 1 is empty"),
        (["a", [VOCAB]], GREEDY, {}, ValueError, f"prompt 1 has the token {VOCAB}, expected 0 to {VOCAB - 1}"),
        (["a", 1.5], GREEDY, {}, TypeError, "prompt 1 is 1.5, expected a text or a list of tokens"),
        ({"prompt": "a", "multi_modal_data": {}}, GREEDY, {}, ValueError, "prompt 0 has the key 'multi_modal_data'"),
        ({"prompt": 3}, GREEDY, {}, TypeError, "prompt 0 has prompt=3, expected a text"),
        ({}, GREEDY, {}, ValueError, "expected prompt or prompt_token_ids"),
        (5, GREEDY, {}, TypeError, "prompts has type int"),
        (b"text", GREEDY, {}, TypeError, "prompts has type bytes, expected texts or lists of tokens"),
        (["a", b"text"], GREEDY, {}, TypeError, "prompt 1 is b'text', expected a text or a list of tokens"),
        ("\udcff", GREEDY, {}, ValueError, "prompt 0: character 0 is an unpaired surrogate"),
    ],
)
def test_generate_refuses(llm, prompts, params, options, error, words):
    refuses(error, words, llm.generate, prompts, params, **options)


def unannotated(**options):
    """``SamplingParams``, whose own checks come before those that the tests add to annotations."""
    params = object.__new__(SamplingParams)
    for field in dataclasses.fields(SamplingParams):
        object.__setattr__(params, field.name, options.get(field.name, field.default))
    params.__post_init__()
    return params


def test_sampling_params_that_are_not_built():
    for name in ("bad_words", "structured_outputs", "detokenize", "flat_logprobs", "best_of", "output_kind"):
        refuses(TypeError, f"SamplingParams: {name}=5 is not built", SamplingParams, **{name: 5})
    refuses(ValueError, "min_tokens=5 is more than max_tokens=4", SamplingParams, min_tokens=5, max_tokens=4)
    refuses(ValueError, "logprobs=-2", SamplingParams, logprobs=-2)
    refuses(TypeError, "temprature", SamplingParams, temprature=1)
    for options, words in (({"n": 0}, "n=0"), ({"stop": [""]}, "an empty text"), ({"seed": 2**32}, "seed=4294967296")):
        refuses(ValueError, words, SamplingParams, **options)
    for options, words in (({"stop": 5}, "stop=5"), ({"ignore_eos": 1}, "ignore_eos=1"), ({"n": 1.0}, "n=1.0")):
        refuses(TypeError, words, unannotated, **options)
    assert SamplingParams(stop="a", stop_token_ids=None, top_k=-1) == SamplingParams(stop=["a"], top_k=0)


def test_texts_need_an_llm(llm):
    for options in (
        {"n": 2},
        {"logprobs": 1},
        {"stop": "a"},
        {"include_stop_str_in_output": True},
        {"skip_special_tokens": False},
    ):
        params = SamplingParams(seed=0, **options)
        refuses(ValueError, "use moe_jax.LLM", generate, llm.model, [[1]], max_new_tokens=1, sampling_params=params)


def test_outputs_say_what_they_lack(llm):
    (output,) = llm.generate("a", GREEDY)
    assert not hasattr(output, "metrics")
    refuses(
        AttributeError,
        "LLM has no attribute 'beam_search': vLLM's class has it, it is not built",
        lambda: llm.beam_search,
    )
    refuses(AttributeError, "LLM has no attribute 'generat'$", lambda: llm.generat)


def test_what_is_missing_is_named(text_dir, tmp_path, monkeypatch, llm):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tekken.json").write_text("{}")
    refuses(ValueError, "tokenizer.json does not exist, and text needs it; make it from tekken", moe_jax.LLM, tmp_path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    refuses(ImportError, "text needs the package tokenizers: pip install tokenizers", moe_jax.LLM, text_dir)


# -- generation_config.json -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "stated, expected",
    [
        (
            {"temperature": 0.6, "top_p": 0.9, "top_k": 5, "min_p": 0.1},
            dict(temperature=0.6, top_p=0.9, top_k=5, min_p=0.1),
        ),
        ({"do_sample": True, "eos_token_id": 3}, dict(temperature=1.0)),
        ({"do_sample": False, "temperature": 0.6}, dict(temperature=0.0)),
        ({"max_new_tokens": 7, "top_p": None, "num_beams": 1, "no_repeat_ngram_size": 0}, dict(max_tokens=7)),
        ({}, {}),
    ],
)
def test_default_sampling_params(with_config, stated, expected):
    llm = moe_jax.LLM(with_config(stated), dtype="float32")
    assert llm.get_default_sampling_params() == SamplingParams(**expected)
    assert moe_jax.models._generation_config.GenerationConfig.read(with_config(stated)).left == ()


def test_what_the_file_says_and_nobody_does_is_told(with_config):
    directory = with_config({"num_beams": 4, "bad_words_ids": [[1]], "top_k": 3})
    with pytest.warns(UserWarning, match="generation_config.json: not applied: num_beams, bad_words_ids"):
        moe_jax.LLM(directory, dtype="float32")


@pytest.mark.parametrize(
    "stated, words",
    [
        ({"temperature": -1}, "generation_config.json: temperature=-1"),
        ({"top_k": 1.5}, "generation_config.json: top_k=1.5"),
        ({"max_new_tokens": "many"}, "generation_config.json: max_tokens='many'"),
        ({"eos_token_id": "</s>"}, "generation_config.json: eos_token_id is '</s>', expected an integer or a list"),
        ({"eos_token_id": [3, VOCAB]}, f"generation_config.json: eos_token_id {VOCAB} is outside the vocabulary"),
    ],
)
def test_damaged_generation_configs(with_config, stated, words, monkeypatch):
    monkeypatch.setattr("moe_jax.models._generation_config.SamplingParams", unannotated)
    refuses(ValueError, words, moe_jax.LLM, with_config(stated), dtype="float32")


def test_a_mesh(text_dir, free):
    mesh = jax.make_mesh((2, 2), ("expert", "tensor"))
    llm = moe_jax.LLM(text_dir, dtype="float32", mesh=mesh)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    assert [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)] == free
