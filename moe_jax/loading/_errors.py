"""``CheckpointError`` and the strict JSON reader that every file of a checkpoint goes through."""

import codecs
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

from moe_jax._terminal import printable

MAX_JSON_DEPTH = 64
_SHOWN = 120


class CheckpointError(ValueError):
    """A checkpoint that cannot be used: the message is one line with file, tensor, expected, found and way out.

    Names in a damaged file may hold line breaks or terminal escapes; whatever is not printable is escaped here, so that
    the message stays one harmless line wherever it is shown.
    """

    def __init__(self, message: str):
        super().__init__(printable(message))


def shown(value: object) -> str:
    """``repr(value)`` for an error message: at most a line's worth of it."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 4]} ..."


def listed(items: list[str], limit: int = 4) -> str:
    """``a, b, c and 17 more``."""
    rest = len(items) - limit
    return ", ".join(shorten(i) for i in items[:limit]) + (f" and {rest} more" if rest > 0 else "")


def ranges(numbers: Iterable[int], limit: int = 8) -> str:
    """[0, 1, 2, 5] -> "0-2, 5"; "none" for no numbers. numbers: ascending."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return listed([str(a) if a == b else f"{a}-{b}" for a, b in runs], limit) or "none"


def shorten(name: str) -> str:
    """A tensor or file name for an error message, cut in the middle when it is absurdly long."""
    return name if len(name) <= 2 * _SHOWN else f"{name[:_SHOWN]}...{name[-_SHOWN:]}"


def read_json(path: Path, *, max_bytes: int) -> dict[str, Any]:
    """The JSON object in a file, read strictly as ``parse_json_object`` describes. Raises CheckpointError.

    A byte order mark, as some editors write, is skipped. What is no regular file is refused: a pipe would block.
    """
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path}: not a regular file, expected a JSON file")
    try:
        with open(path, "rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    if len(data) > max_bytes:
        raise CheckpointError(f"{path}: larger than {max_bytes} bytes, the most that is accepted for such a file")
    return parse_json_object(data.removeprefix(codecs.BOM_UTF8), str(path))


def parse_json_object(data: bytes, where: str) -> dict[str, Any]:
    """Parse UTF-8 JSON whose outermost value is an object.

    Stricter than ``json.loads``, since each of these hides damage: duplicate keys, NaN and Infinity, numbers too large
    for a float, unpaired surrogates in strings, nesting beyond ``MAX_JSON_DEPTH``. Raises CheckpointError whose message
    starts with ``where``.
    """
    try:
        text = data.decode("utf-8")
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse_constant, parse_float=_finite)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{where}: not UTF-8 at byte {error.start}; the file is damaged") from None
    except UnicodeEncodeError:
        raise CheckpointError(f"{where}: a string holds an unpaired surrogate, which is not valid text") from None
    except RecursionError:
        raise CheckpointError(f"{where}: JSON nested too deeply, expected at most {MAX_JSON_DEPTH} levels") from None
    except ValueError as error:  # JSONDecodeError, the hooks below, integers of thousands of digits
        raise CheckpointError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: expected a JSON object, found {shown(value)}")
    if _depth_exceeds(value, MAX_JSON_DEPTH):
        raise CheckpointError(f"{where}: JSON nested too deeply, expected at most {MAX_JSON_DEPTH} levels")
    return value


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {shown(twice)} occurs twice in one object")
    return result


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is too large for a number")
    return value


def _depth_exceeds(value: object, limit: int) -> bool:
    """Level by level, so that a deep value cannot exhaust the stack here."""
    level = [value]
    for _ in range(limit + 1):
        level = [
            child
            for item in level
            for child in (item.values() if isinstance(item, dict) else item)
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True
