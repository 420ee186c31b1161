"""benchmarks/ for tests of its scripts."""

from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def benchmarks_or_skip() -> Path:
    """The folder; the test is skipped in a copy of the project without it."""
    if not BENCHMARKS.is_dir():
        pytest.skip("a copy without benchmarks")
    return BENCHMARKS
