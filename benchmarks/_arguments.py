"""Types of command-line arguments: a value that makes no sense is one line of argparse's, before anything runs."""

import argparse
import math
from collections.abc import Callable, Collection
from pathlib import Path


def whole(minimum: int) -> Callable[[str], int]:
    """An integer of at least ``minimum``."""

    def parsed(text: str) -> int:
        return _number(text, minimum, f"{text!r}")

    return parsed


def wholes(minimum: int, *, may_be_empty: bool = False) -> Callable[[str], list[int]]:
    """Integers of at least ``minimum`` with commas between them."""

    def parsed(text: str) -> list[int]:
        if may_be_empty and not text:
            return []
        return [_number(part, minimum, f"{text!r} has {part!r}") for part in text.split(",")]

    return parsed


def words(known: Collection[str]) -> Callable[[str], list[str]]:
    """Names with commas between them, each one of ``known`` and none twice."""

    def parsed(text: str) -> list[str]:
        names = text.split(",")
        for index, name in enumerate(names):
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(known)}")
            if name in names[:index]:
                raise argparse.ArgumentTypeError(f"{name!r} is named twice")
        return names

    return parsed


def duration(text: str) -> float:
    """A finite number of seconds; below 0, nothing is left."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not math.isfinite(found):
        raise argparse.ArgumentTypeError(f"{text!r}, expected a number of seconds")
    return found


def new_file(text: str) -> Path:
    """A file in a folder that exists."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}, expected a file in a folder that exists")
    return path


def _number(text: str, minimum: int, found: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = minimum - 1
    if number < minimum:
        raise argparse.ArgumentTypeError(f"{found}, expected integers of at least {minimum}")
    return number
