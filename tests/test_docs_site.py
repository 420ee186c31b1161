"""The site (`make docs`): its pages' Python runs, its notebooks run, and everything they point to is there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [DOCS / "quickstart.md", *sorted((DOCS / "guides").glob("*.md"))]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("0*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_of_a_page_runs(page):
    fences = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    scope = {}
    for fence in fences:
        if not fence.startswith("# not run here"):
            exec(compile(fence, page.name, "exec"), scope)


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs_and_draws_what_is_committed(notebook, tmp_path):
    environment = os.environ | {"MPLBACKEND": "agg", "JAX_PLATFORMS": "cpu", "MOE_JAX_FIGURES": str(tmp_path)}
    environment |= {"PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}
    done = subprocess.run(
        [sys.executable, notebook.name],
        cwd=notebook.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    drawn = {path.name for path in tmp_path.glob("*.png")}
    assert drawn == {path.name for path in (notebook.parent / "figures").glob(f"{notebook.stem[:2]}_*.png")} != set()


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
            assert there.exists() or there.with_suffix(".py").exists(), f"{path.name} links to {target}"


def test_the_format_table_is_the_registry():
    sys.path.insert(0, str(DOCS))
    try:
        import _generate
    finally:
        sys.path.remove(str(DOCS))
    from moe_jax.quantization import ALIASES, SCHEMES

    text = _generate.formats()
    assert re.findall(r"^\| `([\w.]+)` \| .* \| [\d.]+ \|$", text, re.MULTILINE) == list(SCHEMES)
    assert all(f"| `{alias}` | `{name}` |" in text for alias, name in ALIASES.items())
    bits = {row[0]: float(row[1]) for row in re.findall(r"^\| `([\w.]+)` \| .* \| ([\d.]+) \|$", text, re.MULTILINE)}
    assert bits["bf16"] == 16 and bits["mxfp4_a16"] == 4.25 and bits["nvfp4_a16"] == 4.5
