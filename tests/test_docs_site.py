"""The site: its pages' Python runs, everything they point to is there. `make docs` builds it."""

import json
import re
from pathlib import Path

import pytest

from moe_jax.cli import _demo
from moe_jax.models import FAMILIES
from tests.test_architecture import FLOORS

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [DOCS / "quickstart.md", DOCS / "parallel.md", *sorted((DOCS / "guides").glob("*.md"))]
PAGES = [path for path in PAGES if "```python" in path.read_text()]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("0*.py"))


@pytest.mark.parametrize(
    "page",
    [pytest.param(p, marks=[pytest.mark.slow] * (p.stem in ("parallel", "quantize")), id=p.stem) for p in PAGES],
)
def test_python_of_a_page_runs(page, monkeypatch):
    """As one script, in order; the first line says where something is missing that only a reader has. The demo's
    checkpoint has one layer of its two, since compiling takes most of the time."""
    monkeypatch.setitem(_demo.CONFIG, "num_hidden_layers", 1)
    fences = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    run = [fence for fence in fences if not fence.startswith("# not run here: ")]
    assert run
    scope = {}
    for fence in run:
        exec(compile(fence, page.name, "exec"), scope)


def test_every_page_is_in_the_table_of_contents():
    index = (DOCS / "index.md").read_text()
    listed = {line.strip() for line in re.findall(r"^[\w/]+$", index, re.MULTILINE)}
    pages = {str(path.relative_to(DOCS).with_suffix("")) for path in DOCS.rglob("*.md")} - {"index"}
    pages = {page for page in pages if not page.startswith(("_", "notebooks"))}
    assert pages | {f"notebooks/{path.stem}" for path in NOTEBOOKS} <= listed
    missing = {name for name in listed if "_generated" not in name and not list(DOCS.glob(f"{name}.*"))}
    assert not missing


@pytest.mark.parametrize("path", [*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "notebooks/README.md"], ids=str)
def test_links_to_files_lead_somewhere(path):
    if "_generated" in path.parts or "_build" in path.parts:
        return
    for target in re.findall(r"\]\(([^)#\s]+)", path.read_text()):
        there = (path.parent / target).resolve()
        if "://" not in target and "_generated" not in target:
            assert there.exists(), f"{path.name} links to {target}"


@pytest.mark.parametrize("path", [*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=str)
def test_files_that_a_page_names_exist(path):
    if "_generated" in path.parts or "_build" in path.parts:
        return
    top = "|".join(
        ("moe_jax", "pallas_kernels", "torch_bridge", "tests", "benchmarks", "docs", "examples", "notebooks")
    )
    named = re.findall(rf"`((?:{top})/[\w./-]+)(?:::\w+)?`", path.read_text())
    assert [name for name in named if not (ROOT / name).exists() and name != "tests/path.py"] == []


@pytest.fixture
def generate(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    import _generate

    return _generate


@pytest.mark.parametrize("gpu", ["h100", "h200"])
def test_tables_of_results_are_those_of_the_files(generate, gpu):
    path = ROOT / f"benchmarks/results/moe_layer_peers_{gpu}.json"
    if not path.is_file():
        pytest.skip("a copy without benchmarks/results")
    text = generate.measured().partition(f"({path.name})")[2].partition("\n## ")[0]
    cells = [cell for cell in json.loads(path.read_text()) if "us" in cell]
    tokens = sorted({cell["tokens"] for cell in cells})
    rows = {row[0]: row[1].split(" | ") for row in re.findall(r"^\| (\S+ \| `\w+`) \| (.*) \|$", text, re.MULTILINE)}
    for cell in cells:
        shown = rows[f"{cell['model']} | `{cell['scheme']}`"][tokens.index(cell["tokens"])]
        numbers = [float(number) for number in re.findall(r"[\d.]+", shown)]
        wanted = [cell[key] for key in ("us", "peer_us", "ratio") if key in cell]
        assert numbers == pytest.approx(wanted, rel=0.01), "rounded to three digits"


def test_the_format_table_is_the_registry(generate):
    from moe_jax.quantization import ALIASES, SCHEMES

    text = generate.formats()
    assert text == (DOCS / "reference/formats.md").read_text(), "python docs/_generate.py writes the page anew"
    assert re.findall(r"^\| `([\w.]+)` \| .* \| [\d.]+ \|$", text, re.MULTILINE) == list(SCHEMES)
    assert all(f"| `{alias}` | `{name}` |" in text for alias, name in ALIASES.items())
    bits = {row[0]: float(row[1]) for row in re.findall(r"^\| `([\w.]+)` \| .* \| ([\d.]+) \|$", text, re.MULTILINE)}
    assert bits["bf16"] == 16 and bits["mxfp4_a16"] == 4.25 and bits["nvfp4_a16"] == 4.5


def test_the_family_table_is_the_registry():
    table = (DOCS / "reference/families.md").read_text().partition("## Checkpoint formats")[0]
    rows = {row[0]: row[1] for row in re.findall(r"^\| (`.*?) \|.*?\| (\S.*?) \| any layer", table, re.MULTILINE)}
    whole = {name for cell, models in rows.items() for name in re.findall(r"`(\w+)`", cell) if models != "not yet"}
    named = {name for cell in rows for name in re.findall(r"`(\w+)`", cell)}
    aliases = {alias for family in FAMILIES.values() for alias in family.other_model_types}
    assert set(FAMILIES) <= named <= set(FAMILIES) | aliases
    assert whole - aliases == set(FAMILIES)


def test_the_floors_shown_are_those_of_the_tree():
    rows = re.findall(r"^\| (\d*) ?\| (`.*?) \|", (DOCS / "architecture.md").read_text(), re.MULTILINE)
    floors, shown = [], set()
    for number, cell in rows:
        floors.append(int(number) if number else floors[-1])
        shown |= {(name, floors[-1]) for name in re.findall(r"`([\w.]+)`", cell)}
    assert shown == {(room, floor) for floor, rooms in enumerate(FLOORS) for room in rooms}
