"""What a person at a terminal sees on stderr while a command works: bars, and a text once it has been silent.

Both are gone when the work is done, and neither is written where stderr is no terminal.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

SILENCE = 1.0  # seconds until a notice is shown
ProgressCallback = Callable[[int, int], None]


class Notice:
    """A text on stderr that is shown after a second, unless ``end`` was called before, and until it is. It may stand
    behind the beginning of an answer, on stdout and the same terminal.

    seconds: of silence; ``SILENCE`` if None.
    """

    def __init__(self, text: str, seconds: float | None = None):
        self._text, self._lock = text, threading.Lock()
        self._is_shown, self._is_over = False, not sys.stderr.isatty()
        if not self._is_over:
            self._clock = threading.Timer(SILENCE if seconds is None else seconds, self._show)
            self._clock.daemon = True
            self._clock.start()

    def _show(self) -> None:
        with self._lock:
            if not self._is_over:
                sys.stderr.write(self._text)
                sys.stderr.flush()
                self._is_shown = True

    def end(self) -> None:
        """Remove the text; whoever writes to the terminal next goes on where it began."""
        with self._lock:
            if not self._is_over:
                self._clock.cancel()
            if self._is_shown:
                back = "\b" * len(self._text)
                sys.stderr.write(f"{back}{' ' * len(self._text)}{back}")
                sys.stderr.flush()
            self._is_shown, self._is_over = False, True


@contextmanager
def notice(text: str) -> Iterator[Notice]:
    """``Notice`` for the time of the block."""
    shown = Notice(text)
    try:
        yield shown
    finally:
        shown.end()


def announced(parts: Iterator[Any], text: str, count: int) -> Iterator[Any]:
    """``parts``, with ``text`` as a notice while each of the first ``count`` is awaited."""
    for _ in range(count):
        with notice(text):
            part = next(parts, parts)
        if part is parts:
            return
        yield part
    yield from parts


@contextmanager
def progress_bar(label: str, unit: str = "layer", before: str | None = None) -> Iterator[ProgressCallback | None]:
    """Yields a callback ``(done, total)`` that draws a bar on a terminal, or None elsewhere or without tqdm.

    before: a notice until the first call; None where something else may draw on the terminal meanwhile.
    """
    with nullcontext() if before is None else notice(before) as silence:
        bar: Any = None
        tqdm = _tqdm()

        def advance(done: int, total: int) -> None:
            nonlocal bar
            if silence is not None:
                silence.end()
            if bar is None:
                options: dict[str, Any] = dict(desc=label, unit=unit, unit_scale=unit == "B", leave=False)
                bar = tqdm(total=total, initial=done, file=sys.stderr, **options)
            bar.total = total
            bar.update(done - bar.n)

        try:
            yield None if tqdm is None else advance
        finally:
            if bar is not None:
                bar.close()


def bars_hidden() -> AbstractContextManager[Any]:
    """For the time of the block no bar is on the terminal, so that stdout may be written to."""
    tqdm = sys.modules.get("tqdm")
    return nullcontext() if tqdm is None else tqdm.tqdm.external_write_mode(file=sys.stdout)


def _tqdm() -> Any:
    """The class, None where nobody would see a bar or the package is not installed."""
    if not sys.stderr.isatty():
        return None
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm
