"""The time in which a GPU runs anything: one rule for the profiles of both sides."""

from collections.abc import Iterable


def busy(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of (start, end)."""
    total, last = 0.0, -float("inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, last))
        last = max(last, end)
    return total
