"""The process that renders one chat template, run as a file of its own: ``ChatTemplate`` asks it line by line.

Each line is a JSON object. The first holds the template and special tokens, each other one the variables of a
conversation; the answer is {"text": ...} or {"error": ...}. The process limits itself before it reads: memory, and CPU
time for each answer, whose seconds are its argument.
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
                text = render(request["variables"], request["expected"])
            answer = json.dumps({"text": text})
        except MemoryError:
            answer = json.dumps({"error": "needs too much memory"})
        except Exception as error:  # a template is a program: it may raise anything, and recurse without end
            answer = json.dumps({"error": (str(error) or type(error).__name__)[:1000]})
        sys.stdout.write(answer + "\n")
        sys.stdout.flush()


def _renderer(template: str, tokens: dict[str, str]) -> Any:
    import jinja2
    from jinja2 import meta, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """``{% generation %}`` marks what an assistant says, which only training asks for."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    # The settings and helpers that templates are written for, as transformers has them.
    extensions = [Generation, loopcontrols]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    compiled = environment.from_string(template)
    known = meta.find_undeclared_variables(environment.parse(template))

    def render(variables: dict[str, Any], expected: list[str]) -> str:
        """expected: names of variables that the template has to read."""
        if unread := [name for name in expected if name not in known]:
            reads = ", ".join(sorted(known - {*tokens, *environment.globals})) or "none"
            raise ValueError(f"reads no variable {unread[0]!r}; it reads: {reads}")
        parts, size = [], 0
        # Templates ask whether tools and documents are none, so they have to be defined.
        for part in compiled.generate(dict(tools=None, documents=None) | tokens | variables):
            parts.append(part)
            size += len(part)
            if size > MAX_CHARACTERS:
                raise ValueError(f"writes more than {MAX_CHARACTERS} characters")
        return "".join(parts)

    return render


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Without jinja2's own escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


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
