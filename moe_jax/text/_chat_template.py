"""Chat templates: a conversation rendered into the text that a model was trained on.

A template is a program that came with the checkpoint. It runs in jinja2's sandbox, which keeps it from Python's
attributes, and in a process of its own, which may take so much time and memory and no more (``_template_process``).
"""

import json
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

from moe_jax._typing import Json
from moe_jax.loading._errors import CheckpointError, read_json, shown
from moe_jax.text import _template_process

MAX_CONFIG_BYTES = 16 << 20  # tokenizer_config.json, which may list every added token
MAX_TEMPLATE_BYTES = 1 << 20
CPU_SECONDS = 5  # for each conversation; real templates take milliseconds
SECONDS = 60.0  # the same on the clock, for a process that waits for a CPU
_OUT_OF_TIME = getattr(signal, "SIGXCPU", None)
_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
Message = dict[str, Any]


class ChatTemplate:
    """The template of a checkpoint: chat_template.jinja, or ``chat_template`` of tokenizer_config.json.

    template: in place of the checkpoint's.

    Raises:
        ImportError: jinja2 is not installed. ValueError: no template, or one that is damaged or too large.
    """

    def __init__(self, directory: Path, template: str | None = None):
        if find_spec("jinja2") is None:
            raise ImportError("a chat template needs the package jinja2: pip install jinja2")
        self._path, config, text = _read(directory, template)
        self._lock = threading.Lock()
        tokens = {key: _text_of(config.get(key)) for key in _SPECIAL_TOKENS if config.get(key) is not None}
        # As a file, not as a module: nothing of moe_jax is imported there. Without the user's stderr: a template cannot
        # write there, and a crash is told below.
        pipe = subprocess.PIPE
        command = [sys.executable, "-P", _template_process.__file__, str(CPU_SECONDS)]
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        weakref.finalize(self, _end, self._process)
        self._ask({"template": text, "tokens": tokens})

    def render(
        self,
        messages: Any,
        variables: Json = MappingProxyType({}),
        *,
        tools: Sequence[Json] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """Text up to where the model's answer begins.

        Args:
            messages: {"role": ..., "content": ...}, oldest first. A content of one part of text counts as that text.
            variables: what else the template reads, such as enable_thinking.
            tools: JSON schemas of functions that the model may call.
            add_generation_prompt: end with what opens the model's answer.

        Raises:
            TypeError: messages of another kind than this, or values that JSON cannot hold. ValueError: the template
                reads no such variable, refuses the conversation, does what the sandbox forbids, or takes too long.
        """
        given: dict[str, Any] = dict(messages=_checked_messages(messages), add_generation_prompt=add_generation_prompt)
        if tools is not None:
            given["tools"] = list(tools)
        if taken := sorted(variables.keys() & {"messages", "tools", "add_generation_prompt"}):
            raise ValueError(f"chat_template_kwargs: {taken[0]} has an argument of its own")
        expected = [*variables, *(["tools"] if tools else [])]
        return self._ask({"variables": {**given, **variables}, "expected": expected})

    def _ask(self, request: dict[str, Any]) -> str:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            line = json.dumps(request).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise TypeError(f"messages, tools and chat_template_kwargs hold what JSON cannot: {error}") from None
        with self._lock:
            clock = threading.Timer(SECONDS, self._process.kill)
            clock.start()
            try:
                self._process.stdin.write(line)
                self._process.stdin.flush()
                answer = self._process.stdout.readline()
            except OSError:  # it has ended
                answer = b""
            finally:
                clock.cancel()
        if not answer:
            raise ValueError(f"{self._path}: chat template: {self._end_of_process()}")
        found = json.loads(answer)
        if "error" in found:
            raise ValueError(f"{self._path}: chat template: {found['error']}")
        return found["text"]

    def _end_of_process(self) -> str:
        """Why there is no answer: only the system can have ended the process."""
        status = self._process.wait()
        if -status == _OUT_OF_TIME:
            return f"takes more than {CPU_SECONDS} s; it may never end"
        return f"its process ended with status {status}; it needs too much time or memory"


def _end(process: "subprocess.Popen[bytes]") -> None:
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()
    process.kill()
    process.wait()


def _checked_messages(messages: Any) -> list[Message]:
    """Copies whose content is text, where it was a part of text.

    Raises:
        TypeError: no list of objects with a role. ValueError: no message, or a part that is no text.
    """
    expected = 'expected a list of messages, each {"role": ..., "content": ...}'
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise TypeError(f"messages has type {type(messages).__name__}, {expected}")
    if not messages:
        raise ValueError(f"messages is empty, {expected}")
    checked = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise TypeError(f"messages[{index}] is {shown(message)}, {expected}")
        content = message.get("content")
        if isinstance(content, list | tuple):
            parts = [part if isinstance(part, Mapping) else {"text": part} for part in content]
            for part in parts:
                if part.get("type", "text") != "text" or not isinstance(part.get("text"), str):
                    raise ValueError(f"messages[{index}] has a part that is no text: {shown(part)}")
            if len(parts) != 1:  # templates differ in what they do with several
                raise ValueError(f"messages[{index}] has {len(parts)} parts, expected a text; join them")
            message = {**message, "content": parts[0]["text"]}
        checked.append(dict(message))
    return checked


def _read(directory: Path, given: str | None) -> tuple[Path | str, dict[str, Any], str]:
    """Where the template lies, tokenizer_config.json, and the template."""
    own, path = directory / "chat_template.jinja", directory / "tokenizer_config.json"
    config = read_json(path, max_bytes=MAX_CONFIG_BYTES) if path.is_file() else {}
    if given is not None:
        return "chat_template", config, given
    if own.is_file():
        with open(own, "rb") as file:
            return own, config, _checked(file.read(MAX_TEMPLATE_BYTES + 1), own)
    template = config.get("chat_template")
    if isinstance(template, list):  # several of them, by name
        defaults = [part for part in template if isinstance(part, dict) and part.get("name") == "default"]
        template = defaults[0].get("template") if defaults else None
    if not isinstance(template, str):
        raise ValueError(
            f"{directory}: no chat_template.jinja and no chat_template in {path.name}; "
            "give plain text instead of a conversation"
        )
    return path, config, _checked(template.encode(), path)


def _checked(template: bytes, path: Path) -> str:
    if len(template) > MAX_TEMPLATE_BYTES:
        raise CheckpointError(f"{path}: the chat template has more than {MAX_TEMPLATE_BYTES} bytes")
    try:
        return template.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not UTF-8: {error}") from None


def _text_of(token: Any) -> str:
    """A special token as text; older files hold an object with its content."""
    return str(token.get("content", "")) if isinstance(token, dict) else str(token)
