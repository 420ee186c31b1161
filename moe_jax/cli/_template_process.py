"""The process that renders one chat template, run as a file of its own: ``_chat.ChatTemplate`` asks it line by line.

Each line is a JSON object. The first holds the template, each other one the messages of a conversation; the answer is
{"text": ...} or {"error": ...}. The process limits itself before it reads: memory, and CPU time for each answer, whose
seconds are its argument.
"""

import contextlib
import datetime
import json
import signal
import sys
from typing import Any

MAX_CHARACTERS = 16 << 20  # of a rendered conversation
_MEMORY_BYTES = 1 << 30


def main() -> None:
    """Answer the lines of stdin until it ends."""
    seconds, render = int(sys.argv[1]), None
    _limit_process()
    for line in sys.stdin.buffer:
        _limit_time(seconds)
        try:
            request = json.loads(line)
            if render is None:
                render, text = _renderer(request["template"], request["tokens"]), ""
            else:
                text = render(request["messages"])
            answer = json.dumps({"text": text})
        except MemoryError:
            answer = json.dumps({"error": "needs too much memory"})
        except Exception as error:  # a template is a program: it may raise anything, and recurse without end
            answer = json.dumps({"error": (str(error) or type(error).__name__)[:1000]})
        sys.stdout.write(answer + "\n")
        sys.stdout.flush()


def _renderer(template: str, tokens: dict[str, str]) -> Any:
    import jinja2
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    # The settings and helpers that templates are written for, as transformers has them.
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    compiled = environment.from_string(template)

    def render(messages: list[Any]) -> str:
        parts, size = [], 0
        # Templates ask whether tools and documents are none, so they have to be defined.
        variables = dict(messages=messages, tools=None, documents=None, add_generation_prompt=True, **tokens)
        for part in compiled.generate(variables):
            parts.append(part)
            size += len(part)
            if size > MAX_CHARACTERS:
                raise ValueError(f"writes more than {MAX_CHARACTERS} characters")
        return "".join(parts)

    return render


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)  # jinja2's own escapes for HTML


def _limit_process() -> None:
    # The program that started this one has blocked signals for itself; a child inherits that.
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
    try:
        import resource
    except ImportError:  # not a POSIX system: the clock of whoever asks is the only limit
        return
    limits = {
        resource.RLIMIT_AS: _MEMORY_BYTES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 0,
    }  # pipes have no size
    for kind, limit in limits.items():  # a pipe is no file: it can be written to
        with contextlib.suppress(OSError, ValueError):  # less is allowed already, or the system has no such limit
            resource.setrlimit(kind, (limit, limit))


def _limit_time(seconds: int) -> None:
    try:
        import resource
    except ImportError:
        return
    used = resource.getrusage(resource.RUSAGE_SELF)
    soft = int(used.ru_utime + used.ru_stime) + 1 + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (soft, resource.getrlimit(resource.RLIMIT_CPU)[1]))


if __name__ == "__main__":
    main()
