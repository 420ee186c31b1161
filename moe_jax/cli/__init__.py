"""The command line: ``moe-jax`` and ``python -m moe_jax``."""

from moe_jax.cli._main import (
    DTYPES,
    EXIT_BAD_INPUT,
    EXIT_INTERRUPTED,
    EXIT_PROBLEM,
    build_parser,
    main,
    one_line,
)
from moe_jax.cli._progress import progress_bar

__all__ = [
    "DTYPES",
    "EXIT_BAD_INPUT",
    "EXIT_INTERRUPTED",
    "EXIT_PROBLEM",
    "build_parser",
    "main",
    "one_line",
    "progress_bar",
]
