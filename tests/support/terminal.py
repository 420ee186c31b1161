"""A pseudo-terminal in the place of a stream, and what a person would have seen on it."""

import contextlib
import os
import pty
import re
import sys
import termios
import threading
from collections.abc import Iterator


class Screen:
    """written: all that came. Read it behind the block of ``terminal``."""

    def __init__(self):
        self.written = ""

    def lines(self) -> list[str]:
        """What stands on the lines in the end; return, backspace, line feed and one line up are understood."""
        rows, row, column = [[]], 0, 0
        for part in re.findall(r"\x1b\[A|\x1b\[K|[\s\S]", self.written):
            if part == "\x1b[A":
                row = max(row - 1, 0)
            elif part == "\x1b[K":
                del rows[row][column:]
            elif part == "\n":
                row += 1
                rows += [[]] if row == len(rows) else []
            elif part == "\r":
                column = 0
            elif part == "\b":
                column = max(column - 1, 0)
            else:
                rows[row] += [" "] * (column + 1 - len(rows[row]))
                rows[row][column] = part
                column += 1
        return ["".join(cells).rstrip() for cells in rows]


@contextlib.contextmanager
def terminal(monkeypatch, *names: str) -> Iterator[Screen]:
    """In the block ``sys.NAME`` of each name is one pseudo-terminal."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 100))  # bars take the width that is there
    screen = Screen()

    def read() -> None:
        with contextlib.suppress(OSError):  # how Linux says that the other side was closed
            while part := os.read(ours, 4096):
                screen.written += part.decode(errors="replace")

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    with os.fdopen(theirs, "w") as stream, monkeypatch.context() as patch:
        for name in names:
            patch.setattr(sys, name, stream)
        yield screen
    reader.join(timeout=10)
    os.close(ours)
