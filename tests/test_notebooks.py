"""notebooks/*.ipynb: made from the .py beside them, complete, self-contained. `make docs` runs all."""

import ast
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "notebooks"
SOURCES = sorted(FOLDER.glob("0*.py"))
BROUGHT = {"jax", "flax", "numpy"}  # by moe_jax


@pytest.fixture
def execute(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import _execute

    return _execute


def committed(path):
    return json.loads(path.with_suffix(".ipynb").read_text())


def code_of(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_all_are_there():
    assert len(SOURCES) == 8
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == {path.stem for path in SOURCES}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_made_from_its_source(path, execute):
    """Cell by cell; outputs aside, nothing in the file is anyone's own."""
    found = committed(path)
    for cell in code_of(found):
        cell["execution_count"], cell["outputs"] = None, []
    assert found == execute.unexecuted(path), "make notebooks writes it anew"


def test_the_model_on_a_gpu_is_the_one_of_the_benchmarks():
    """A notebook stands alone, so it says the sizes again."""
    from benchmarks._model_configs import MODELS

    tree = ast.parse((FOLDER / "07_a_model_on_a_gpu.py").read_text())
    (call,) = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        and ast.unparse(node.targets[0]) == "FIELDS"
        and isinstance(node.value, ast.Call)
    ]
    fields = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    of_benchmark = MODELS["qwen3-30b-a3b"]
    assert fields == {key: of_benchmark[key] for key in fields if key in of_benchmark} | {"num_hidden_layers": 48}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_outputs_are_those_of_one_run(path, execute):
    """Every cell ran once, in order; figures show, and are small; no warnings, errors or paths of a machine."""
    found = committed(path)
    cells = code_of(found)
    assert [cell["execution_count"] for cell in cells] == list(range(1, 1 + len(cells)))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} == {"stream", "display_data"}
    text = "".join(line for output in outputs for line in output.get("text", ()))
    assert text.strip() and not any(word in text for word in ("Warning", "Traceback", str(ROOT), "/root"))
    pngs = execute.figures(found)
    assert pngs and all(len(png) < 100_000 and png.startswith(b"\x89PNG") for png in pngs)
    drawn = path.read_text().count("plt.subplots(")
    assert len(pngs) == drawn


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_the_first_cell_installs_what_is_missing(path, execute, monkeypatch):
    """Of all that the notebook imports; and nothing where it is there."""
    sources = [source for kind, source in execute.cells(path.read_text()) if kind == "code"]
    imported = set()
    for node in ast.walk(ast.parse("\n".join(sources[1:]))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) else []
        imported |= {name.partition(".")[0] for name in names}
    asked, commands = [], []
    monkeypatch.setattr(subprocess, "run", lambda command, check: commands.append(command))
    exec(sources[0], {})
    assert commands == []
    monkeypatch.setattr("importlib.util.find_spec", asked.append)
    exec(sources[0], {})
    (command,) = commands
    assert command[:4] == [sys.executable, "-m", "pip", "install"]
    monkeypatch.undo()
    for name in ast.literal_eval(sources[0].split("find_spec, ")[1].partition(")):")[0].rstrip(")") + ")"):
        imported.discard(name)
    assert imported - BROUGHT - set(sys.stdlib_module_names) == set()


def test_pictures_of_pages_are_those_of_notebooks(execute):
    assert {path.name for path in (FOLDER / "figures").iterdir()} == set(execute.PICTURES)
    for name, (stem, index) in execute.PICTURES.items():
        assert (FOLDER / "figures" / name).read_bytes() == execute.committed_figures(stem)[index]


def test_another_figure_is_seen(execute, monkeypatch):
    """The same one passes; one with a curve less, and one that is missing, are named."""
    found = committed(SOURCES[0])
    assert execute.other_figures(SOURCES[0].stem, found) == []
    other = committed(SOURCES[1])
    assert "01_five_minutes.ipynb has 1 figures, its code draws 3" in execute.other_figures(SOURCES[0].stem, other)[0]
    monkeypatch.setattr(execute, "committed_figures", lambda stem: execute.figures(other)[:1])
    assert "figure 0 is not what its code draws" in execute.other_figures(SOURCES[0].stem, found)[0]


@pytest.mark.slow
@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_runs_from_an_empty_folder(path, tmp_path):
    """As a user does it: `jupyter nbconvert --execute`. Continuous integration runs the cells in `make docs`."""
    if find_spec("nbconvert") is None or find_spec("ipykernel") is None:
        pytest.skip("needs the extra notebooks")
    command = [sys.executable, "-m", "nbconvert", "--to", "notebook", "--execute", "--output-dir", str(tmp_path)]
    environment = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "JAX_DISABLE_MOST_OPTIMIZATIONS": "true"}
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / path.with_suffix(".ipynb").name).write_bytes(path.with_suffix(".ipynb").read_bytes())
    done = subprocess.run(
        [*command, path.with_suffix(".ipynb").name],
        cwd=empty,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert [file.name for file in empty.iterdir()] == [path.with_suffix(".ipynb").name]
