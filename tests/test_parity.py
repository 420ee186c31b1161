"""docs/parity.md: well-formed rows for M1..M262, for meshes and for the torch surface; every test it names exists."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
STATUSES = ("keep", "adapt", "not applicable", "not built")
NUM_ROWS = 262
# Sections by their paragraphs; faults of others by their section; the calls of the torch surface.
SECTIONS = [f"4.{i}" for i in range(1, 13)] + [f"5.{i}" for i in range(1, 8)] + ["10.1"] * 11 + ["10.8"] * 7
SECTIONS += ["1.13"] * 15
TEST_NAME = re.compile(r"(tests/[\w/]+\.py)::(\w+)(?:::(\w+))?")


def parse_table(text, begins=r"\| M"):
    """Cells of every line that begins like a parity row: [row, capability, status, where, tests]."""
    lines = [line for line in text.splitlines() if re.match(begins, line)]
    return [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines]


def collected_names(path):
    """Names pytest collects from a file: module-level test functions and Class::method of test classes."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            names |= {
                f"{node.name}::{item.name}"
                for item in node.body
                if isinstance(item, ast.FunctionDef) and item.name.startswith("test")
            }
    return names


def row_faults(cells, root=ROOT):
    """What is wrong with one row, as a list of sentences."""
    if len(cells) != 5:
        return [f"{len(cells)} cells, expected 5: {cells}"]
    row, capability, status, where, tests = cells
    faults = []
    if not capability:
        faults.append("no capability")
    if status not in STATUSES:
        faults.append(f"status {status!r}, expected one of {STATUSES}")
    if status in ("keep", "adapt") and (where in ("", "-") or not TEST_NAME.search(tests)):
        faults.append("a built row names its place and at least one test")
    if status == "not applicable" and where in ("", "-"):
        faults.append("a row that does not apply gives the reason")
    if status == "not built" and (where, tests) != ("-", "-"):
        faults.append("an unbuilt row claims a place or a test")
    named = [piece.strip().strip("`") for piece in tests.split(",")] if tests != "-" else []
    for name in named:
        match = TEST_NAME.fullmatch(name)
        if match is None:
            faults.append(f"{name!r} is not written as tests/path.py::test_name")
            continue
        path, test = root / match[1], "::".join(match.groups("")[1:]).removesuffix("::")
        if not path.is_file():
            faults.append(f"{name}: there is no such file")
        elif test not in collected_names(path):
            faults.append(f"{name}: the file has no such test")
    return [f"{row}: {fault}" for fault in faults]


@pytest.fixture(scope="module")
def table():
    return parse_table((ROOT / "docs/parity.md").read_text())


def test_every_row_once_and_in_order(table):
    assert [cells[0] for cells in table] == [f"M{i}" for i in range(1, NUM_ROWS + 1)]


def test_rows_are_well_formed_and_their_tests_exist(table):
    faults = [fault for cells in table for fault in row_faults(cells)]
    assert not faults, "\n".join(faults)


def test_sections_on_meshes_and_torch():
    rows = parse_table((ROOT / "docs/parity.md").read_text(), r"\| \d")
    assert [cells[0].split()[0] for cells in rows] == SECTIONS
    assert len({cells[0] for cells in rows}) == len(rows)
    faults = [fault for cells in rows for fault in row_faults(cells)]
    assert not faults, "\n".join(faults)


HERE = "tests/test_parity.py::test_every_row_once_and_in_order"


@pytest.mark.parametrize(
    "line",
    [
        "| M1 | x | keep | moe_jax/a.py | tests/test_parity.py::test_no_such_name |",
        "| M1 | x | keep | moe_jax/a.py | tests/no_such_file.py::test_x |",
        f"| M1 | x | keep | moe_jax/a.py | {HERE}, tests/test_parity.py |",
        f"| M1 | x | keep | - | {HERE} |",
        "| M1 | x | adapt | moe_jax/a.py | - |",
        f"| M1 | x | done | moe_jax/a.py | {HERE} |",
        "| M1 | x | not applicable | - | - |",
        f"| M1 | x | not built | - | {HERE} |",
        "| M1 | x | not built | - |",
    ],
)
def test_a_wrong_row_is_found(line):
    (cells,) = parse_table(line)
    assert row_faults(cells)


def test_a_right_row_is_not():
    (cells,) = parse_table(
        f"| M1 | x | keep | moe_jax/a.py | {HERE}, `tests/test_parity.py::test_a_right_row_is_not` |"
    )
    assert row_faults(cells) == []
