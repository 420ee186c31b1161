"""docs/parity.md: every row well formed, under a heading, true to the code's names, and shown by tests that run."""

import ast
import functools
import re
from pathlib import Path

import pytest

from moe_jax import Scheme

ROOT = Path(__file__).parent.parent
STATUSES = ("keep", "adapt", "not applicable", "not built")
HEADER = "| Row | Capability | Status | JAX layer | Torch bridge | Tests |"
# M1 to M262; sections on meshes by their paragraphs; faults of others by their section; the calls of the torch surface.
ROWS = [f"M{i}" for i in range(1, 263)]
SECTIONS = [f"4.{i}" for i in range(1, 13)] + [f"5.{i}" for i in range(1, 8)] + ["10.1"] * 11 + ["10.8"] * 7
SECTIONS += ["1.13"] * 15
TEST_NAME = re.compile(r"(tests/[\w/]+\.py)::(\w+)(?:::(\w+))?")
ABSENT = re.compile(r"(not applicable|not built): \S+.*")
NOT_IN_CI = ("slow", "gpu", "multi_gpu")


def parse_table(text):
    """{heading: cells of the rows of its table}: [row, capability, status, JAX layer, torch bridge, tests]."""
    tables, heading = {}, None
    for line in text.splitlines():
        if line.startswith("## "):
            heading = line[3:]
        elif re.match(r"\| (M?\d)", line):
            tables.setdefault(heading, []).append([cell.strip() for cell in line.strip().strip("|").split("|")])
    return tables


def is_marked(node, marks):
    names = {item.attr for item in ast.walk(node) if isinstance(item, ast.Attribute)}
    return bool(names & set(marks))


@functools.cache
def collected_names(path):
    """{name: whether it runs in CI} of what pytest collects from a file: functions, and Class::method of classes."""
    module = ast.parse(path.read_text())
    assigned = [
        node.value for node in module.body if isinstance(node, ast.Assign) and "pytestmark" in ast.unparse(node)
    ]
    is_left_out = any(is_marked(value, NOT_IN_CI) for value in assigned)

    def tests(body, prefix=""):
        return {
            prefix + node.name: not (is_left_out or any(is_marked(mark, NOT_IN_CI) for mark in whole_marks(node)))
            for node in body
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test")
        }

    names = tests(module.body)
    for node in module.body:
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            names |= tests(node.body, f"{node.name}::")
    return names


def whole_marks(node):
    """Decorators that mark a test as a whole: not those of a parametrization, which mark some cases."""
    return [mark for mark in node.decorator_list if "parametrize" not in ast.unparse(mark)]


@functools.cache
def source(surface):
    """All code that a surface consists of, and what its users write."""
    packages = {"JAX layer": ["moe_jax"], "torch bridge": ["moe_jax", "torch_bridge"]}[surface]
    return "\n".join(path.read_text() for package in packages for path in sorted((ROOT / package).rglob("*.py")))


@functools.cache
def names(surface):
    return set(re.findall(r"[A-Za-z_]\w*", source(surface)))


def is_known(word, surface):
    """Whether the code has a word: as it stands, as a part of a name (`_blocks`), as a leaf, or as a scheme."""
    leaf = re.sub("^(w13|w2)_", "", word)
    if leaf in names(surface) or (word.startswith("_") and word in source(surface)):
        return True
    try:
        return Scheme.parse(word).name == word
    except (ValueError, NotImplementedError):
        return False


def surface_faults(surface, cell):
    if cell in ("", "-"):
        return [f"{surface}: says nothing; write 'not applicable: reason' or 'not built: reason'"]
    if cell.startswith("not ") and not ABSENT.fullmatch(cell):
        return [f"{surface}: {cell!r} gives no reason"]
    words = {word for code in re.findall(r"`([^`]*)`", cell) for word in re.findall(r"[A-Za-z_]\w*", code)}
    return [f"{surface}: the code has no {word!r}" for word in sorted(words) if not is_known(word, surface)]


def row_faults(cells, root=ROOT):
    """What is wrong with one row, as a list of sentences."""
    if len(cells) != 6:
        return [f"{len(cells)} cells, expected 6: {cells}"]
    row, capability, status, jax_layer, bridge, tests = cells
    faults = surface_faults("JAX layer", jax_layer) + surface_faults("torch bridge", bridge)
    if len(capability.split()) < 2:
        faults.append(f"capability {capability!r}, expected words that a reader has")
    if status not in STATUSES:
        faults.append(f"status {status!r}, expected one of {STATUSES}")
    has_jax, has_bridge = (not ABSENT.fullmatch(cell) for cell in (jax_layer, bridge))
    if (status in ("keep", "adapt")) != (has_jax or has_bridge):
        faults.append(f"status {status!r}, but the surfaces say {jax_layer!r} and {bridge!r}")
    named = [piece.strip() for piece in tests.split(",")] if tests != "-" else []
    if len(set(named)) < len(named):
        faults.append("a test is named twice")
    runs_in_ci = False
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
        else:
            runs_in_ci |= collected_names(path)[test]
    if status in ("keep", "adapt"):
        of_bridge = [name.startswith("tests/torch_bridge/") for name in named]
        if not runs_in_ci:
            faults.append("none of its tests runs in CI")
        if has_jax and all(of_bridge):
            faults.append("no test of the JAX layer")
        if has_bridge and not bridge.startswith("as JAX") and not any(of_bridge):
            faults.append("no test of the torch bridge")
    return [f"{row}: {fault}" for fault in faults]


@pytest.fixture(scope="module")
def text():
    return (ROOT / "docs/parity.md").read_text()


def test_every_row_once_and_in_order(text):
    rows = [cells[0] for table in parse_table(text).values() for cells in table]
    assert rows[: len(ROWS)] == ROWS
    assert [row.split()[0] for row in rows[len(ROWS) :]] == SECTIONS and len(set(rows)) == len(rows)


def test_every_table_has_a_heading_and_a_header(text):
    tables = parse_table(text)
    assert None not in tables and text.count(HEADER) == len(tables)
    for heading, rows in tables.items():
        section = text.partition(f"## {heading}\n")[2].partition("\n## ")[0]
        assert HEADER in section and len(rows) <= 45, heading


def test_rows_are_well_formed_and_their_tests_exist(text):
    faults = [fault for table in parse_table(text).values() for cells in table for fault in row_faults(cells)]
    assert not faults, "\n".join(faults)


HERE = "tests/test_parity.py::test_every_row_once_and_in_order"
BRIDGE = "tests/torch_bridge/test_methods.py::test_scheme_checks"
SLOW = "tests/parallel/test_experts.py::test_every_scheme_in_every_layout"


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("| M1 | a b | keep | c | as JAX | tests/test_parity.py::test_no_such_name |", "no such test"),
        ("| M1 | a b | keep | c | as JAX | tests/no_such_file.py::test_x |", "no such file"),
        (f"| M1 | a b | keep | c | as JAX | {HERE}, tests/test_parity.py |", "not written as"),
        (f"| M1 | a b | keep | c | as JAX | {HERE}, {HERE} |", "named twice"),
        (f"| M1 | a b | keep | - | as JAX | {HERE} |", "JAX layer: says nothing"),
        (f"| M1 | a b | keep | c |  | {HERE} |", "torch bridge: says nothing"),
        (f"| M1 | a b | keep | c | not built | {HERE} |", "gives no reason"),
        (f"| M1 | a b | keep | c | d | {HERE} |", "no test of the torch bridge"),
        (f"| M1 | a b | keep | c | d | {BRIDGE} |", "no test of the JAX layer"),
        (f"| M1 | a b | keep | c | as JAX | {SLOW} |", "none of its tests runs in CI"),
        (f"| M1 | a b | keep | `no_such_name` | as JAX | {HERE} |", "JAX layer: the code has no 'no_such_name'"),
        (f"| M1 | a b | keep | c | as JAX; `no_such_name` | {HERE} |", "torch bridge: the code has no 'no_such_name'"),
        ("| M1 | a b | adapt | c | as JAX | - |", "none of its tests runs in CI"),
        (f"| M1 | a b | done | c | as JAX | {HERE} |", "status 'done'"),
        (f"| M1 | a b | keep | not built: c | not built: d | {HERE} |", "but the surfaces say"),
        ("| M1 | a b | not applicable | not applicable: c | d | - |", "but the surfaces say"),
        (f"| M1 | shorthand | keep | c | as JAX | {HERE} |", "words that a reader has"),
        (f"| M1 | a b | keep | c | {HERE} |", "5 cells, expected 6"),
    ],
)
def test_a_wrong_row_is_found(line, fault):
    (cells,) = parse_table(line)[None]
    assert any(fault in found for found in row_faults(cells))


@pytest.mark.parametrize(
    "line",
    [
        f"| M1 | a b | keep | `FusedMoE(num_experts)` | `quant_config` | {HERE}, {BRIDGE}, {SLOW} |",
        f"| M1 | a b | adapt | scheme `fp8_block` | not built: `enable_eplb` is refused | {HERE} |",
        "| M1 | a b | not applicable | not applicable: ROCm only | not applicable: ROCm only | - |",
    ],
)
def test_a_right_row_is_not(line):
    (cells,) = parse_table(line)[None]
    assert row_faults(cells) == []
