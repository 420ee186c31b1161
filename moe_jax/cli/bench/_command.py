"""``moe-jax bench``: arguments checked before anything is measured, the table printed, files written."""

import argparse
import importlib.util
import json
import os
import sys
from pathlib import Path

from moe_jax._output import check_output, write_output
from moe_jax.cli._progress import progress_bar
from moe_jax.cli.bench._bench import bench
from moe_jax.cli.bench._report import draw_roofline, render


def run_bench(args: argparse.Namespace) -> int:
    """Run the command; returns how many cells failed. Raises ValueError and ImportError for bad input."""
    for option, path in (("--json", args.json), ("--png", args.png)):
        if path is not None:
            check_output(path, option)
    if args.json is not None and args.png is not None and _is_same(args.json, args.png):
        raise ValueError(f"--json and --png are both {args.json}; give two files")
    if args.png is not None:
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            raise ImportError("--png needs the package matplotlib: pip install matplotlib") from None
    with progress_bar("measuring", unit="cell", before="measuring ...") as progress:
        report = bench(
            args.model,
            _names(args.scheme),
            None if args.tokens is None else _numbers(args.tokens),
            implementation=_names(args.implementation),
            progress=progress,
        )
    print(render(report, rich=sys.stdout.isatty() and importlib.util.find_spec("rich") is not None))
    if args.json is not None:
        write_output(args.json, [json.dumps(report.as_json(), indent=1).encode()], "--json")
    failed = sum("error" in cell for cell in report.cells)
    if args.png is not None and failed < len(report.cells):
        draw_roofline(report, args.png)
    return failed


def _is_same(one: Path, other: Path) -> bool:
    """Whether two outputs are one regular file, which the second would replace; there need not be any yet."""
    same = os.path.realpath(one) == os.path.realpath(other)
    return same and (one.is_file() or not one.exists())


def _names(text: str | None) -> list[str] | None:
    return None if text is None else [name.strip() for name in text.split(",")]


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--tokens {text!r}: expected integers separated by commas") from None
