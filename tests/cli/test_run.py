"""``moe-jax run``: chat templates, streaming, end tokens, stop texts, prompts from a file, sampling, speed."""

import io
import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

import moe_jax
from moe_jax.cli._run import Clock, keep_programs, read_prompts
from moe_jax.models import _loop, _programs
from moe_jax.text._chat_template import ChatTemplate
from tests.cli.test_main import model_dir, run  # noqa: F401  (a fixture)

TEMPLATE = """{{ bos_token }}{% for message in messages %}
    {% if message.role == "system" %}{{ raise_exception("no system messages") }}{% endif %}
    {{- " w1 " if message["role"] == "user" else " w2 " }}{{ message["content"] | trim }}
{%- endfor %}
{% if add_generation_prompt %} w2{% endif %}"""
MESSAGES = [
    {"role": "user", "content": " w3 w4"},
    {"role": "assistant", "content": "w5"},
    {"role": "user", "content": "w6"},
]
F32 = ("--dtype", "float32")
# Prompts and new tokens add up to 11 everywhere, so that few programs are compiled.


@pytest.fixture
def chat_dir(model_dir, tmp_path):  # noqa: F811
    """The model with a chat template."""
    directory = shutil.copytree(model_dir, tmp_path / "chat")
    config = {"bos_token": {"content": "w9"}, "eos_token": "w8", "chat_template": TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="module")
def greedy(model_dir):  # noqa: F811
    """greedy(ids, n, **options) -> the new tokens of a single prompt, by ``generate``."""

    model = moe_jax.load_pretrained(model_dir, dtype=jnp.float32)

    def tokens(ids, n, **options):
        return np.asarray(moe_jax.generate(model, [ids], max_new_tokens=n, **options))[0, len(ids) :].tolist()

    return tokens


def words(ids):
    return " ".join(f"w{i}" for i in ids)


# -- chat templates ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["tokenizer_config", "by name", "own file"])
def test_chat_template_is_rendered_as_transformers_does(chat_dir, place):
    config = json.loads((chat_dir / "tokenizer_config.json").read_text())
    if place == "by name":
        config["chat_template"] = [{"name": "tool", "template": "x"}, {"name": "default", "template": TEMPLATE}]
    if place == "own file":
        config["chat_template"] = "not this one"
        (chat_dir / "chat_template.jinja").write_text(TEMPLATE)
    (chat_dir / "tokenizer_config.json").write_text(json.dumps(config))
    (expected,), _ = render_jinja_template(
        [MESSAGES], chat_template=TEMPLATE, add_generation_prompt=True, bos_token="w9"
    )
    assert ChatTemplate(chat_dir).render(MESSAGES) == expected
    assert expected.split() == "w9 w1 w3 w4 w2 w5 w1 w6 w2".split()


def test_templates_helpers(chat_dir):
    text = "{% for x in [1, 2, 3] %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}{{ messages[0] | tojson }}"
    (chat_dir / "chat_template.jinja").write_text(text + "{{ strftime_now('%Y') | length }}")
    assert ChatTemplate(chat_dir).render([{"role": "<é>"}]) == '1{"role": "<é>"}4'


def test_template_sees_what_transformers_defines(chat_dir):
    text = (
        "{{ tools is none }} {{ documents is none }} {{ other is defined }} {% if tools %}x{% endif %}{{ eos_token }}"
    )
    (chat_dir / "chat_template.jinja").write_text(text)
    (expected,), _ = render_jinja_template(
        [MESSAGES], chat_template=text, add_generation_prompt=True, eos_token="w8", bos_token="w9"
    )
    assert ChatTemplate(chat_dir).render(MESSAGES) == expected == "True True False w8"


@pytest.mark.parametrize(
    "given, prompt", [('{"enable_thinking": false}', "w3 w5"), ('{"enable_thinking": true}', "w3")]
)
def test_template_variables(chat_dir, tmp_path, given, prompt):
    """They reach the template: the logits are those of the text it writes."""
    template = "{{ messages[0].content }}{% if not enable_thinking %} w5{% endif %}"
    (chat_dir / "chat_template.jinja").write_text(template)
    options = ("--max-new-tokens", "0", "--dtype", "float32", "--logits-out")
    chat = ("--chat", "--chat-template-kwargs", given, "--prompt", "w3")
    assert run(chat_dir, *chat, *options, str(tmp_path / "chat.npy")) == 0
    assert run(chat_dir, "--prompt", prompt, *options, str(tmp_path / "plain.npy")) == 0
    np.testing.assert_array_equal(*(np.load(tmp_path / f"{name}.npy") for name in ("chat", "plain")))


@pytest.mark.parametrize(
    "options, words",
    [
        (["--chat", "--chat-template-kwargs", "enable_thinking=false"], "expected a JSON object such as"),
        (["--chat", "--chat-template-kwargs", "[1]"], "is '[1]', expected a JSON object"),
        (["--chat", "--chat-template-kwargs", '{"thinks": 1}'], "reads no variable 'thinks'"),
        (["--chat-template-kwargs", "{}"], "--chat-template-kwargs needs --chat"),
    ],
)
def test_template_variables_that_cannot_be(chat_dir, capsys, options, words):
    assert run(chat_dir, *options, "--prompt", "w3") == 2
    assert words in (error := capsys.readouterr().err) and len(error.splitlines()) == 1


@pytest.mark.parametrize(
    "template, words",
    [
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ raise_exception('no tools') }}", "no tools"),
        ("{% for %}", "chat template: "),
        ("{{ 1 / 0 }}", "division"),
        ("{{ messages[0].content + 1 }}", "chat template: "),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ ''.__class__.__subclasses__() }}", "unsafe"),
        ("{% for i in range(999999999) %}{% endfor %}", "range"),
        ("{% include '/etc/passwd' %}", "chat template: "),
        ("{{ cycler.__init__.__globals__.os.system('true') }}", "unsafe"),
    ],
)
def test_templates_that_fail_are_one_line(chat_dir, capsys, template, words):
    (chat_dir / "chat_template.jinja").write_text(template)
    assert run(chat_dir, "--chat", "--prompt", "w3") == 2
    error = capsys.readouterr().err
    assert words in error and "chat_template.jinja" in error and len(error.splitlines()) == 1


@pytest.mark.parametrize("template, prompt", [("{{ '\\ud800' }}", "w3"), ("{{ messages[0].content }}", "w3\udcff")])
@pytest.mark.parametrize("chat", [[], ["--chat"]])
def test_what_is_no_text_is_named(chat_dir, capsys, template, prompt, chat):
    """As from an argument that is not UTF-8; the tokenizer says only that it is no text."""
    (chat_dir / "chat_template.jinja").write_text(template)
    if chat or "\udcff" in prompt:
        assert run(chat_dir, *chat, "--prompt", prompt) == 2
        place = " in the chat template" if chat else ""
        assert f"{place}: character " in (error := capsys.readouterr().err) and "is an unpaired surrogate" in error


@pytest.mark.parametrize("name", [["default"], {}, 5, None, "tool_use"])
def test_templates_without_a_default_one(chat_dir, name):
    (chat_dir / "chat_template.jinja").unlink(missing_ok=True)
    config = chat_dir / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": [{"name": name, "template": "a"}]}))
    with pytest.raises(ValueError, match="no chat_template in tokenizer_config.json; give plain text"):
        ChatTemplate(chat_dir)


def test_chat(chat_dir, greedy, capsys):
    """The prompt is what the user says; the template writes the rest, special tokens included."""
    assert run(chat_dir, "--chat", "--prompt", "w3", "--max-new-tokens", "7", *F32) == 0
    assert capsys.readouterr().out == words(greedy([9, 1, 3, 2], 7)) + "\n"


# -- what comes out ---------------------------------------------------------------------------------------------------


def test_tokens_are_written_while_they_are_made(model_dir, monkeypatch, greedy):  # noqa: F811
    """The first token is out before the program that makes the others is called."""
    from moe_jax.models import _generate

    expected = greedy([3, 1, 4], 8)
    out, seen = io.StringIO(), []
    monkeypatch.setattr("sys.stdout", out)
    until = _generate._Run.until
    monkeypatch.setattr(_generate._Run, "until", lambda *args: seen.append(out.getvalue()) or until(*args))
    assert run(model_dir, "--prompt", "w3 w1 w4", "--max-new-tokens", "8", *F32) == 0
    assert out.getvalue() == words(expected) + "\n" and seen == [words(expected[:n]) for n in (1, 5)]


def test_generation_config_decides_on_end_tokens(model_dir, tmp_path, greedy, capsys):  # noqa: F811
    free = greedy([3, 1, 4], 8)
    directory = shutil.copytree(model_dir, tmp_path / "model")
    at = next(i for i, token in enumerate(free) if token == free[2])
    for stated in (free[2], [31, free[2]]):
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": stated, "top_p": 0.5}))
        assert run(directory, "--input-ids", "3,1,4", "--max-new-tokens", "8", *F32) == 0
        assert capsys.readouterr().out == ",".join(map(str, free[: at + 1])) + "\n"
    for wrong, expected in (
        (["2"], "expected an integer or a list"),
        (99, "eos_token_id 99 is outside the vocabulary"),
    ):
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": wrong}))
        assert run(directory, "--input-ids", "3,1,4", *F32) == 2
        assert expected in capsys.readouterr().err


def test_stop(model_dir, greedy, capsys):  # noqa: F811
    """A text, cut before it; an id with ids, which then is the last one."""
    free = greedy([3, 1, 4], 8)
    at = free.index(free[3])
    args = ("--max-new-tokens", "8", *F32, "--stop")
    assert run(model_dir, "--prompt", "w3 w1 w4", *args, "nothing like it", "--stop", f"w{free[3]}") == 0
    assert capsys.readouterr().out.split() == words(free[:at]).split()
    assert run(model_dir, "--input-ids", "3,1,4", *args, str(free[3])) == 0
    assert capsys.readouterr().out == ",".join(map(str, free[: at + 1])) + "\n"


def test_stop_tokens_that_no_text_shows(model_dir, tmp_path, greedy, capsys):  # noqa: F811
    """A special token is skipped in texts: as --stop it counts by its id, and the other tokens are shown."""
    from tokenizers import AddedToken, Tokenizer

    free = greedy([3, 1, 4], 8)
    directory = shutil.copytree(model_dir, tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(f"w{free[3]}", special=True)])
    tokenizer.save(str(directory / "tokenizer.json"))
    assert run(directory, "--prompt", "w3 w1 w4", "--max-new-tokens", "8", "--stop", f"w{free[3]}", *F32) == 0
    assert capsys.readouterr().out.split() == words(free[: free.index(free[3])]).split()


def test_prompts_are_neither_truncated_nor_padded(model_dir, tmp_path, greedy, capsys):  # noqa: F811
    """tokenizer.json may hold both, from a training run; transformers sets them aside too."""
    from tokenizers import Tokenizer

    directory = shutil.copytree(model_dir, tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=6)
    tokenizer.save(str(directory / "tokenizer.json"))
    assert run(directory, "--prompt", "w3 w1 w4", "--max-new-tokens", "8", *F32) == 0
    assert capsys.readouterr().out.split() == words(greedy([3, 1, 4], 8)).split()


def test_prompts_from_a_file(chat_dir, tmp_path, greedy, capsys):
    """Batches of two, of unequal lengths: each answer is the one its prompt gets alone."""
    lines = ["w3 w1 w4", "", '"w5"', '{"prompt": "w7 w7"}', json.dumps({"messages": MESSAGES[:1]})]
    plain, rich = tmp_path / "prompts.txt", tmp_path / "prompts.jsonl"
    plain.write_text("\n".join([lines[0], "", "w5 w6"]))
    rich.write_text("\n".join(lines[1:]))
    args = ("--batch-size", "2", *F32, "--max-new-tokens")
    assert run(chat_dir, "--prompts", str(plain), *args, "8") == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert rows == [
        {"prompt": "w3 w1 w4", "completion": words(greedy([3, 1, 4], 8))},
        {"prompt": "w5 w6", "completion": words(greedy([5, 6], 8))},
    ]
    assert run(chat_dir, "--chat", "--prompts", str(rich), *args, "6") == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["prompt"] for row in rows] == ["w5", "w7 w7", MESSAGES[:1]]
    expected = [greedy(ids, 6) for ids in ([9, 1, 5, 2], [9, 1, 7, 7, 2], [9, 1, 3, 4, 2])]
    assert [row["completion"] for row in rows] == [words(ids) for ids in expected]


@pytest.mark.slow
def test_pinned_tokens(model_dir, tmp_path, greedy, capsys):  # noqa: F811
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("w3 w1 w4\nw7 w7 w2\n")
    args = ("--prompts", str(prompts), "--pinned-tokens", "4", *F32)
    assert run(model_dir, *args, "--num-pages", "auto") == 2
    assert "with pinned_tokens=4 each row has pages of its own" in capsys.readouterr().err
    assert run(model_dir, *args) == 0
    expected = capsys.readouterr().out
    assert len(expected.splitlines()) == 2 and run(model_dir, *args, "--batch-size", "1") == 0
    assert capsys.readouterr().out == expected


def test_sampling(model_dir, greedy, capsys):  # noqa: F811
    """Seeds decide; the flags are those of ``generate``."""

    def sampled(*args):
        flags = ("--max-new-tokens", "8", "--temperature", "3", "--top-p", "0.9", "--top-k", "7", *args)
        assert run(model_dir, "--input-ids", "3,1,4", *F32, *flags) == 0
        return [int(token) for token in capsys.readouterr().out.split(",")]

    key = jax.random.fold_in(jax.random.key(5), 0)
    assert sampled("--seed", "5") == greedy([3, 1, 4], 8, temperature=3.0, top_p=0.9, top_k=7, rng=key)
    assert sampled() == sampled("--seed", "0") != sampled("--seed", "1")


def test_speed_is_told_on_stderr(model_dir, capsys, monkeypatch):  # noqa: F811
    assert run(model_dir, "--input-ids", "3,1,4", "--max-new-tokens", "8", *F32) == 0
    error = capsys.readouterr().err
    assert "\n3 prompt tokens, 8 new tokens in " in error and " tokens/s after the first 5" in error
    times = iter([0.0, 10.0, 12.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(times))
    clock = Clock(parts=2)
    for count in (1, 4, 4, 4):
        clock.count(count)
    assert clock.line(3).startswith("3 prompt tokens, 13 new tokens in 12.00 s; 4.0 tokens/s after the first 5")


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["expert=4", "expert=2,tensor=2", "tensor=2"])
def test_mesh(model_dir, greedy, capsys, mesh):  # noqa: F811
    """Six experts on four devices or two, attention on two or four; the tokens are those of one device."""
    args = ("--max-new-tokens", "8", "--mesh", mesh, *F32)
    assert run(model_dir, "--input-ids", "3,1,4", *args) == 0
    assert capsys.readouterr().out == ",".join(map(str, greedy([3, 1, 4], 8))) + "\n"


@pytest.mark.slow
def test_experts_move_between_batches(model_dir, tmp_path, capsys):  # noqa: F811
    """Prompts one by one, experts rearranged in between: the same completions."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("w3 w1 w4\nw7 w7 w2\nw5 w9 w1\n")
    args = ("--prompts", str(prompts), "--batch-size", "1", "--max-new-tokens", "8", "--mesh", "expert=2", *F32)
    assert run(model_dir, *args) == 0
    expected = capsys.readouterr().out
    assert run(model_dir, *args, "--enable-eplb", "--num-redundant-experts", "2") == 0
    captured = capsys.readouterr()
    assert captured.out == expected and len(expected.splitlines()) == 3
    assert int(re.search(r"experts were moved in (\d+) layers", captured.err)[1]) >= 1


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "args, words",
    [
        (["--prompt", "w1", "--top-p", "0.5"], "--top-p has no effect on greedy choice; add --temperature"),
        (["--prompt", "w1", "--seed", "1"], "--seed has no effect"),
        (["--prompt", "w1", "--temperature", "-1"], "--temperature is -1.0"),
        (["--prompt", "w1", "--temperature", "nan"], "--temperature is nan"),
        (["--prompt", "w1", "--temperature", "1", "--top-p", "0"], "--top-p is 0.0"),
        (["--prompt", "w1", "--temperature", "1", "--top-k", "-1"], "--top-k is -1"),
        (["--prompt", "w1", "--temperature", "1", "--seed", "-1"], "--seed is -1"),
        (["--prompt", "w1", "--stop", ""], "--stop is empty"),
        (["--prompt", "w1", "--batch-size", "0"], "--batch-size is 0"),
        (["--prompt", "w1", "--pinned-tokens", "0"], "--pinned-tokens is 0, expected 1 or more"),
        (["--prompt", ""], "--prompt is empty after tokenization"),
        (["--prompt", "w1", "--chat"], "no chat_template.jinja and no chat_template in tokenizer_config.json"),
        (["--input-ids", "1", "--chat"], "--chat needs text"),
        (["--input-ids", "1", "--stop", "w3"], "--stop 'w3': with --input-ids expected the id of a token"),
        (["--input-ids", "1", "--stop", "77"], "end token 77 is outside the vocabulary"),
        (["--prompt", "w1", "--mesh", "expert"], "--mesh 'expert': expected AXIS=DEVICES"),
        (["--prompt", "w1", "--mesh", "expert=2,expert=2"], "each axis of expert, tensor, data, sequence at most once"),
        (["--prompt", "w1", "--mesh", "rows=2"], "--mesh 'rows=2': expected AXIS=DEVICES"),
        (["--prompt", "w1", "--mesh", "expert=4096"], "--mesh expert=4096 takes 4096 devices, found 8"),
        (["--prompt", "w1", "--enable-eplb"], "--enable-eplb balances the devices of an expert axis; add --mesh"),
        (["--prompt", "w1", "--num-redundant-experts", "2"], "--num-redundant-experts needs --enable-eplb"),
        (["--prompts", "nowhere.txt"], "--prompts nowhere.txt: no such file"),
        (["--prompts", "nowhere.txt", "--max-new-tokens", "0"], "score a single prompt"),
        (["--prompt", "w1", "--num-pages", "9"], "--num-pages is for a file of prompts; add --prompts"),
        (["--prompts", "nowhere.txt", "--num-pages", "0"], "--num-pages is '0', expected 1 or more, or auto"),
    ],
)
def test_bad_flags_are_one_line(model_dir, capsys, args, words):  # noqa: F811
    assert run(model_dir, *args) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and words in captured.err and len(captured.err.splitlines()) == 1


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("p.txt", b" \n\n", "no prompt in it"),
        ("p.txt", b"\xff\xfe", "not UTF-8"),
        ("p.jsonl", b'"a"\n{', "p.jsonl, line 2: not JSON"),
        ("p.jsonl", b'{"text": "a"}', 'line 1: expected a text, {"prompt": text}'),
        ("p.jsonl", b'{"prompt": "a", "messages": []}', "line 1: expected a text"),
        ("p.jsonl", b'{"messages": [{"content": "a"}]}', "line 1: expected a text"),
        ("p.jsonl", b"[" * 100000, "not JSON"),
    ],
)
def test_bad_prompt_files(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match="prompts|line") as error:
        list(read_prompts(tmp_path / name))
    assert words in str(error.value)


def test_prompt_files_as_others_write_them(tmp_path):
    """A byte order mark, line ends of Windows, and separators within a text that are no line breaks."""
    texts = ["a\u2028b", "c\x0bd\x85e", "f"]
    (tmp_path / "p.txt").write_bytes(b"\xef\xbb\xbf" + "\r\n".join([*texts, ""]).encode())
    lines = [json.dumps({"prompt": text}, ensure_ascii=False) for text in texts]
    (tmp_path / "p.jsonl").write_bytes("\n".join(lines).encode())
    for name in ("p.txt", "p.jsonl"):
        assert [given for _, given in read_prompts(tmp_path / name)] == texts
    assert [where.rpartition(" ")[2] for where, _ in read_prompts(tmp_path / "p.txt")] == ["1", "2", "3"]


def test_messages_need_chat(model_dir, tmp_path, capsys):  # noqa: F811
    (tmp_path / "p.jsonl").write_text(json.dumps({"messages": MESSAGES}))
    assert run(model_dir, "--prompts", str(tmp_path / "p.jsonl")) == 2
    assert "line 1: messages need --chat" in capsys.readouterr().err


# -- programs ---------------------------------------------------------------------------------------------------------


def test_programs_are_kept_on_a_gpu(monkeypatch, tmp_path):
    """Among the user's caches, unless somebody has said where; a CPU's are not kept."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = [(name, getattr(jax.config, name)) for name in names]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    try:
        for given, backend, expected in [
            (None, "cpu", None),
            (None, "gpu", str(tmp_path / "moe_jax" / "jax")),
            ("elsewhere", "gpu", "elsewhere"),
        ]:
            jax.config.update("jax_compilation_cache_dir", given)
            with monkeypatch.context() as patch:
                patch.setattr(jax, "default_backend", lambda backend=backend: backend)
                keep_programs()
            assert jax.config.jax_compilation_cache_dir == expected
    finally:
        for name, value in before:
            jax.config.update(name, value)


def test_prompts_of_other_lengths_find_the_same_programs(model_dir, monkeypatch, tmp_path, capsys):  # noqa: F811
    folders, path = [], _programs._path
    monkeypatch.setattr(_programs, "_folder", lambda weights: tmp_path)
    monkeypatch.setattr(_programs, "_path", lambda *args: folders.append(path(*args)) or folders[-1])
    answers = []
    for prompt, n in (("3,1,4", "8"), ("5", "6")):
        for program in (_loop.start, _loop.proceed):
            program.jitted.clear_cache()
        assert run(model_dir, "--input-ids", prompt, *F32, "--max-new-tokens", n) == 0
        answers.append(capsys.readouterr().out)
    assert len({*folders}) == len(folders) / 2 == len(list(tmp_path.iterdir())) and all(folders)
