"""Chat templates without end, files without end, and what a terminal would obey."""

import io
import json
import subprocess
import sys

import pytest

from moe_jax import cli
from moe_jax.cli import _run
from moe_jax.cli._main import one_line
from moe_jax.text import _chat_template, _template_process
from moe_jax.text._chat_template import ChatTemplate
from tests.cli.test_main import model_dir, run  # noqa: F401  (a fixture)
from tests.cli.test_run import MESSAGES, TEMPLATE

LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def with_template(directory, template):
    (directory / "chat_template.jinja").write_text(template)
    return directory


WITHOUT_END = {
    "loops": (LOOP, "takes more than 1 s; it may never end"),
    "width": ("{{ '%1000000000d' % 1 }}", "needs too much memory|takes more than 1 s"),
    "output": ("{% for i in range(99999) %}{{ 'x' * 100000 }}{% endfor %}", "writes more than 16777216 characters"),
    "lipsum": ("{% for i in range(99999) %}{{ lipsum(n=9) }}{% endfor %}", "takes more than 1 s|writes more than"),
    "repeat": ("{{ 'x' * 10**10 }}", "needs too much memory"),
    "power": ("{{ 9 ** (9 ** 9) }}", "takes more than 1 s"),
    "parentheses": ("{{ " + "(" * 100_000 + "1" + ")" * 100_000 + " }}", "recursion|status|memory"),
    "signs": ("{{ " + "-" * 100_000 + "1 }}", "recursion|status|memory"),
}


@pytest.mark.parametrize("case", WITHOUT_END)
def test_templates_without_end(tmp_path, monkeypatch, case):
    """Where the template is read or where it is rendered: jinja2 works out constants while it reads."""
    template, words = WITHOUT_END[case]
    monkeypatch.setattr(_chat_template, "CPU_SECONDS", 1)
    with pytest.raises(ValueError, match=words) as error:
        ChatTemplate(with_template(tmp_path, template)).render(MESSAGES)
    assert str(error.value).startswith(f"{tmp_path / 'chat_template.jinja'}: chat template: ")
    assert len(one_line(error.value)) < 2000


def test_a_template_that_gets_no_time_is_ended_by_the_clock(tmp_path, monkeypatch):
    monkeypatch.setattr(_chat_template, "SECONDS", 1.0)
    monkeypatch.setattr(_chat_template, "CPU_SECONDS", 1000)
    with pytest.raises(ValueError, match="needs too much time or memory"):
        ChatTemplate(with_template(tmp_path, LOOP)).render(MESSAGES)


def test_one_process_renders_all_conversations_and_ends(tmp_path, monkeypatch):
    started, real = [], subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda *args, **options: started.append(real(*args, **options)) or started[0]
    )
    template = ChatTemplate(with_template(tmp_path, TEMPLATE))
    texts = [template.render([{"role": "user", "content": f"{i}\n\u2028é\ud800"}]) for i in range(3)]
    assert [text.split()[1][0] for text in texts] == ["0", "1", "2"] and "\u2028é\ud800" in texts[0]
    with pytest.raises(ValueError, match="no system messages"):
        template.render([{"role": "system", "content": ""}])
    assert "w2" in template.render(MESSAGES), "an error ends nothing"
    assert len(started) == 1 and started[0].poll() is None
    del template
    assert started[0].poll() is not None


def test_a_template_cannot_read_or_write_files(tmp_path):
    """The sandbox keeps it from names; the process has no right to write a file in any case."""
    code = f"import runpy, sys; m = runpy.run_path({_template_process.__file__!r}); m['_limit_process']()"
    attempt = f"{code}; open({str(tmp_path / 'x')!r}, 'w').write('x' * 9999)"
    done = subprocess.run([sys.executable, "-c", attempt], capture_output=True, text=True)
    assert done.returncode != 0 and (tmp_path / "x").read_text() == ""


@pytest.mark.parametrize(
    "name, limit",
    [
        ("generation_config.json", 1 << 20),
        ("tokenizer_config.json", 16 << 20),
        ("chat_template.jinja", 1 << 20),
        ("tokenizer.json", 256 << 20),
        ("config.json", 16 << 20),
        ("hf_quant_config.json", 16 << 20),
        ("model.safetensors.index.json", 256 << 20),
    ],
)
def test_files_have_a_limit(model_dir, tmp_path, capsys, name, limit):  # noqa: F811
    """A file with a hole, which takes no room on the disk and would take all of the memory."""
    for path in model_dir.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    (tmp_path / name).unlink(missing_ok=True)
    with open(tmp_path / name, "wb") as file:
        file.truncate(limit + 1)
    assert run(tmp_path, "--chat", "--prompt", "w3") == 2
    error = capsys.readouterr().err
    assert str(tmp_path / name) in error and str(limit) in error and error.count("\n") == 1


ESCAPES = "\x1b]52;c;aGk=\x07\x1b[2J\x9b31m\u202e"


def test_no_escape_reaches_a_terminal(model_dir, tmp_path, capsys):  # noqa: F811
    """From a template's error, from config.json, from names."""
    for path in model_dir.iterdir():
        (tmp_path / path.name).symlink_to(path)
    template = "{{ raise_exception(" + json.dumps(ESCAPES) + ") }}"
    assert run(with_template(tmp_path, template), "--chat", "--prompt", "w3") == 2
    assert r"\x1b]52;c;aGk=\x07\x1b[2J\x9b31m" in (error := capsys.readouterr().err) and error[:-1].isprintable()
    config = json.loads((tmp_path / "config.json").read_text())
    changes = ({"model_type": ESCAPES}, {"quantization_config": {"quant_method": ESCAPES, "format": ESCAPES + "\n"}})
    for change in changes:
        (tmp_path / "config.json").unlink()
        (tmp_path / "config.json").write_text(json.dumps(config | change))
        assert cli.main(["inspect", str(tmp_path)]) == 2
        lines = capsys.readouterr().out.splitlines()
        assert all(line.isprintable() for line in lines) and any(r"\x1b[2J" in line for line in lines)
        assert run(tmp_path, "--input-ids", "3") == 2
        assert capsys.readouterr().err[:-1].isprintable()


def test_what_a_model_writes_is_raw_in_a_pipe_and_harmless_on_a_terminal(monkeypatch):
    text = f"a\tb\n{ESCAPES}\u200d\N{WOMAN}é"
    out = io.StringIO()
    monkeypatch.setattr("sys.stdout", out)
    _run._show(text)
    assert out.getvalue() == text
    out = io.StringIO()
    out.isatty = lambda: True
    monkeypatch.setattr("sys.stdout", out)
    _run._show(text)
    assert out.getvalue() == "a\tb\n" + r"\x1b]52;c;aGk=\x07\x1b[2J\x9b31m" + "\u202e\u200d\N{WOMAN}é"


def test_a_long_message_is_cut():
    assert len(one_line(ValueError("x" * 10**7))) < 4100
