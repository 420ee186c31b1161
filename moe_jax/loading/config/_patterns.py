"""Regular expressions from a config file, bounded so that none of them can hang a load.

Python's engine backtracks: ``(a+)+$`` takes years on a name of 60 letters, holds the interpreter lock, and cannot be
interrupted from a thread. So before a pattern runs, the steps that it can take on the longest name of the checkpoint
are bounded from its syntax tree. Patterns that exceed the bound are refused; five ``.*`` in a row pass. What passes
runs in the plain engine, with the meaning compressed-tensors gives it. Compilation and matching share one budget of
time.
"""

import math
import re
import re._parser
import time
from collections.abc import Iterable
from typing import Any

from moe_jax.loading._errors import shown

MAX_LENGTH = 1000
MAX_PATTERNS = 1000
MAX_STEPS = 3e8  # about 5 ns each, so 1.5 s at worst
TIME_LIMIT = 5.0  # CPU seconds for all patterns of a config together; real ones take a tenth of a second
# What the engine does within a step, as parts of one: to compare a letter, to compare it with one entry of a class.
_COMPARE, _IN_CLASS = 0.3, 0.1

# Python's own syntax trees: private, but unchanged since the module was called sre_parse.
_parser: Any = re._parser
_LETTERS = (_parser.LITERAL, _parser.NOT_LITERAL, _parser.ANY, _parser.IN)
_REPEATS = (_parser.MAX_REPEAT, _parser.MIN_REPEAT, _parser.POSSESSIVE_REPEAT)


class Budget:
    """CPU seconds that all patterns of one config may take together."""

    def __init__(self):
        self._spent = 0.0

    def spend(self, since: float, pattern: str) -> None:
        """Count from ``time.thread_time()`` of then until now. Raises ValueError when the time is used up.

        CPU time: on a busy machine waiting is not the pattern's fault.
        """
        self._spent += time.thread_time() - since
        if self._spent > TIME_LIMIT:
            raise ValueError(
                f"regular expressions took over {TIME_LIMIT:g} s, last {shown(pattern)}; write fewer or simpler ones"
            )


class BoundedPatterns:
    """Compiles and matches regular expressions under the limits above. longest_name: of the names to be matched."""

    def __init__(self, longest_name: int):
        self.longest_name = longest_name
        self._compiled: dict[str, re.Pattern[str]] = {}
        self._budget = Budget()

    def add(self, pattern: str) -> None:
        """Check and compile. Raises ValueError when the pattern is invalid, too long, or could take too long."""
        if pattern in self._compiled:
            return
        if len(self._compiled) == MAX_PATTERNS:
            raise ValueError(f"more than {MAX_PATTERNS} regular expressions")
        if len(pattern) > MAX_LENGTH:
            raise ValueError(f"regular expression {shown(pattern)} has {len(pattern)} characters, at most {MAX_LENGTH}")
        start = time.thread_time()
        try:
            steps = count_steps(pattern, self.longest_name)
            compiled = re.compile(pattern) if steps <= MAX_STEPS else None
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"{shown(pattern)} is not a valid regular expression: {error}") from None
        self._budget.spend(start, pattern)
        if compiled is None:
            raise ValueError(
                f"regular expression {shown(pattern)} could take too long on a name of {self.longest_name} characters; "
                "write it without a repeat inside a repeat and with fewer of .* and the like"
            )
        self._compiled[pattern] = compiled

    def match(self, pattern: str, names: Iterable[str]) -> bool:
        """Whether an added pattern matches one of the names from its start, as ``re.match`` does.

        Raises ValueError when a name is longer than announced or the time is used up.
        """
        compiled = self._compiled[pattern]
        start, found = time.thread_time(), False
        for name in names:
            if len(name) > self.longest_name:
                raise ValueError(f"module name of {len(name)} characters, expected at most {self.longest_name}")
            if compiled.match(name):
                found = True
                break
        self._budget.spend(start, pattern)
        return found


def count_steps(pattern: str, length: int) -> float:
    """Upper bound of what matching costs: every way of trying, and the letters that are compared on it."""
    return _steps(list(_parser.parse(pattern).data), length, True)


def _ways_of(items: Any, length: int) -> tuple[float, int]:
    """(factor, number of open repeats) of a sequence: in how many ways a backtracking engine can try it.

    Every repeat of one character (class) splits the name at one more place, k of them in comb(length + k, k) ways;
    alternatives add up; a repeat of something that itself can match in several ways multiplies its ways each round,
    which is what grows exponentially.
    """
    factor, open_repeats = 1.0, 0
    for op, argument in items:
        if op in _REPEATS:
            low, high, body = argument
            inner = _total(_ways_of(body, length), length)
            rounds = min(int(high), length)
            if inner > 1:
                more, opened = _power(inner + 1, rounds), 0
            elif rounds - low > 1:
                more, opened = 1.0, 1
            else:
                more, opened = float(max(rounds - low, 0) + 1), 0
        elif op is _parser.SUBPATTERN:
            more, opened = _ways_of(argument[3], length)
        elif op is _parser.BRANCH:
            more, opened = sum(_total(_ways_of(branch, length), length) for branch in argument[1]), 0
        elif op is _parser.GROUPREF_EXISTS:
            more, opened = sum(_total(_ways_of(branch or (), length), length) for branch in argument[1:]), 0
        elif op in (_parser.ASSERT, _parser.ASSERT_NOT):
            more, opened = _ways_of(argument[1], length)
        elif op is _parser.ATOMIC_GROUP:
            more, opened = _ways_of(argument, length)
        else:  # one character, a position, a back reference
            more, opened = 1.0, 0
        factor, open_repeats = factor * more, open_repeats + opened
    return factor, open_repeats


def _steps(items: Any, length: int, is_whole: bool = False) -> float:
    """Of trying a sequence once. is_whole: nothing comes after it, so that a repeat at its end is never tried again."""
    steps, factor, open_repeats = 0.0, 1.0, 0
    for at, item in enumerate(items):
        steps += _total((factor, open_repeats), length) * _price(item, length)
        more, opened = _ways_of([item], length)
        if not (is_whole and at == len(items) - 1 and (more, opened) == (1.0, 1)):
            factor, open_repeats = factor * more, open_repeats + opened
    return steps + _total((factor, open_repeats), length)


def _price(item: Any, length: int) -> float:
    """Of trying one item once: letters that are compared, and the ways inside of it."""
    op, argument = item
    if op in _REPEATS:
        low, high, body = argument
        rounds = min(int(high), max(length, low))
        single = len(body) == 1 and body[0][0] in _LETTERS
        return rounds * (_price(body[0], length) if single else _steps(body, length))
    if op is _parser.SUBPATTERN:
        return _steps(argument[3], length)
    if op is _parser.BRANCH:
        return sum(_steps(branch, length) for branch in argument[1])
    if op is _parser.GROUPREF_EXISTS:
        return sum(_steps(branch or (), length) for branch in argument[1:])
    if op in (_parser.ASSERT, _parser.ASSERT_NOT):
        return _steps(argument[1], length)
    if op is _parser.ATOMIC_GROUP:
        return _steps(argument, length)
    if op is _parser.GROUPREF:
        return _COMPARE * length
    return _COMPARE + (_IN_CLASS * len(argument) if op is _parser.IN else 0.0)


def _total(ways: tuple[float, int], length: int) -> float:
    factor, open_repeats = ways
    splits = math.comb(length + open_repeats, open_repeats)
    return factor * splits if splits < 1e300 else math.inf


def _power(base: float, exponent: int) -> float:
    return base**exponent if exponent * math.log10(base) < 300 else math.inf
