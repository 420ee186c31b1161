"""Chat templates: a conversation rendered into the text that a model was trained on, in jinja2's sandbox.

A template is a program that came with the checkpoint. The sandbox keeps it from Python's attributes, so it can read
nothing and run nothing; jinja2 itself is loaded here alone.
"""

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
Message = dict[str, Any]


class ChatTemplate:
    """The template of a checkpoint: chat_template.jinja, or ``chat_template`` of tokenizer_config.json.

    Raises:
        ImportError: jinja2 is not installed. ValueError: no template, or one that is damaged.
    """

    def __init__(self, directory: Path):
        try:
            import jinja2
            from jinja2.ext import loopcontrols
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError:
            raise ImportError("--chat needs the package jinja2: pip install 'moe-jax[chat]'") from None
        self._error = jinja2.TemplateError
        self._path, config, text = _read(directory)
        self._tokens = {key: _text_of(config.get(key)) for key in _SPECIAL_TOKENS if config.get(key) is not None}
        # The settings and helpers that templates are written for, as transformers has them.
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = self._refuse
        environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
        try:
            self._template = environment.from_string(text)
        except self._error as error:
            raise ValueError(f"{self._path}: chat template: {error}") from None

    def render(self, messages: Sequence[Message]) -> str:
        """Text up to where the model's answer begins. messages: {"role": ..., "content": ...}, oldest first.

        Raises:
            ValueError: the template refuses the conversation, or does what the sandbox forbids.
        """
        try:
            # Templates ask whether tools and documents are none, so they have to be defined.
            return self._template.render(
                messages=list(messages), tools=None, documents=None, add_generation_prompt=True, **self._tokens
            )
        except Exception as error:  # a template is a program: it may raise anything, and recurse without end
            raise ValueError(f"{self._path}: chat template: {error}") from None

    def _refuse(self, message: str) -> None:
        raise self._error(message)


def _read(directory: Path) -> tuple[Path, dict[str, Any], str]:
    """Where the template lies, tokenizer_config.json, and the template."""
    own, path = directory / "chat_template.jinja", directory / "tokenizer_config.json"
    config = read_json(path) if path.is_file() else {}
    if own.is_file():
        try:
            return own, config, own.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{own}: not UTF-8: {error}") from None
    template = config.get("chat_template")
    if isinstance(template, list):  # several of them, by name
        named = {part.get("name"): part.get("template") for part in template if isinstance(part, dict)}
        template = named.get("default")
    if not isinstance(template, str):
        raise ValueError(f"{directory}: no chat_template.jinja and no chat_template in {path.name}; leave out --chat")
    return path, config, template


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file. ValueError: not readable, or something else."""
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not readable as JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected an object, found {type(found).__name__}")
    return found


def _text_of(token: Any) -> str:
    """A special token as text; older files hold an object with its content."""
    return str(token.get("content", "")) if isinstance(token, dict) else str(token)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)  # jinja2's own escapes for HTML
