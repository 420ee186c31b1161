"""Runs the notebooks, from an empty folder each, and compares their figures with the committed ones.

    python docs/_execute.py                          # those whose code, or what they read, changed since they last ran
    python docs/_execute.py --write [NAME ...]       # all, or these: write notebooks/NAME.ipynb and figures/
    JAX_PLATFORMS=cuda python docs/_execute.py --write 07_a_model_on_a_gpu --out DIR       # on a GPU

``notebooks/NAME.py`` is what people edit, in cells that begin with ``# %%``. ``notebooks/NAME.ipynb`` is made from it,
with outputs; the site and code hosts show that file. Its figures have at most 128 colors, which keeps them small.
"""

import argparse
import base64
import hashlib
import io
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
NOTEBOOKS = ROOT / "notebooks"
SOURCES = sorted(NOTEBOOKS.glob("0*.py"))
READ = ("benchmarks/results/*.json*", "moe_jax/**/*", "torch_bridge/*", "pallas_kernels/**/*", "docs/_execute.py")
PICTURES = {"06_peers_h200.png": ("06_how_fast", 1)}  # for other pages: file of notebooks/figures -> notebook, figure
TIMES = ("06_how_fast", "07_a_model_on_a_gpu")  # take times, so they run alone, with all optimizations
ON_A_GPU = ("07_a_model_on_a_gpu",)  # committed as a GPU ran it; elsewhere it only has to run
TIMEOUT = 600
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 1 when a figure is not the committed one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="such as 01_five_minutes; all of them by default")
    parser.add_argument("--write", action="store_true", help="replace what is committed")
    parser.add_argument("--out", type=Path, default=NOTEBOOKS, help="where --write writes")
    args = parser.parse_args(argv)
    if unknown := sorted(set(args.names) - {path.stem for path in SOURCES}):
        parser.error(f"no notebook {unknown[0]}")
    is_on_gpu = os.environ.get("JAX_PLATFORMS", "cpu") != "cpu"
    paths = [path for path in SOURCES if path.stem in args.names or not args.names]
    if args.write and not is_on_gpu:
        left = [path.stem for path in paths if path.stem in ON_A_GPU]
        paths = [path for path in paths if path.stem not in ON_A_GPU]
        print("".join(f"{name} is written on a GPU, with JAX_PLATFORMS=cuda\n" for name in left), end="")
    digest, stamps = _digest(), ROOT / "docs/_build/notebooks"
    if not args.write:
        paths = [path for path in paths if not _has_run(path, digest, stamps)]
    together = [path for path in paths if path.stem not in TIMES]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        made = dict(zip(together, pool.map(execute, together), strict=True))
    made |= {path: execute(path) for path in paths if path.stem in TIMES}
    wrong = []
    for path, notebook in made.items():
        if args.write:
            args.out.mkdir(parents=True, exist_ok=True)
            (args.out / f"{path.stem}.ipynb").write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
            continue
        found = [] if path.stem in ON_A_GPU else other_figures(path.stem, notebook)
        wrong += found
        if not found:
            stamps.mkdir(parents=True, exist_ok=True)
            (stamps / f"{path.stem}.sha256").write_text(_stamp(path, digest))
    if args.write and args.out == NOTEBOOKS:
        shutil.rmtree(NOTEBOOKS / "figures", ignore_errors=True)
        (NOTEBOOKS / "figures").mkdir()
        for name, (stem, index) in PICTURES.items():
            (NOTEBOOKS / "figures" / name).write_bytes(committed_figures(stem)[index])
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


def cells(text: str) -> Iterator[tuple[str, str]]:
    """("markdown" or "code", source) of each cell of a notebook's .py."""
    for part in f"\n{text}".split("\n# %%")[1:]:
        head, _, body = part.partition("\n")
        body = body.strip("\n")
        if head.strip() == "[markdown]":
            yield "markdown", "\n".join(line[1:].removeprefix(" ") for line in body.split("\n"))
        else:
            yield "code", body


def unexecuted(path: Path) -> dict[str, Any]:
    """The notebook of a .py, in Jupyter's format 4.5, without outputs."""
    made = []
    for index, (kind, source) in enumerate(cells(path.read_text())):
        cell = {"cell_type": kind, "id": f"cell-{index}", "metadata": {}, "source": source.splitlines(keepends=True)}
        made.append(cell | (dict(execution_count=None, outputs=[]) if kind == "code" else {}))
    metadata = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    return {"cells": made, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def execute(path: Path) -> dict[str, Any]:
    """The notebook with its outputs. Raises what a cell raises."""
    import nbformat
    from nbclient import NotebookClient

    began = time.perf_counter()
    platform = os.environ.get("JAX_PLATFORMS", "cpu")
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {"JAX_PLATFORMS": platform, "XLA_FLAGS": "", "PYTHONPATH": paths, "TQDM_DISABLE": "1"}
    if platform == "cpu" and path.stem not in TIMES:  # compiling is most of the work
        environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "true"
        environment["XLA_FLAGS"] = "--xla_cpu_parallel_codegen_split_count=1"
    notebook = nbformat.reads(json.dumps(unexecuted(path)), as_version=4)
    with tempfile.TemporaryDirectory() as empty:
        resources = {"metadata": {"path": empty}}
        client = NotebookClient(notebook, timeout=TIMEOUT, record_timing=False, resources=resources)
        client.execute(env=os.environ | environment)
    print(f"{path.name}: {time.perf_counter() - began:.0f} s", flush=True)
    found = unexecuted(path)  # without what Jupyter adds to metadata
    for cell, run in zip(found["cells"], notebook.cells, strict=True):
        if cell["cell_type"] == "code":
            cell |= dict(execution_count=run.execution_count, outputs=_kept(run.outputs))
    return found


def _kept(outputs: Sequence[Any]) -> list[dict[str, Any]]:
    """What is printed, then figures; without warnings of the machine and values of last lines, which print objects."""
    text = "".join(o["text"] for o in outputs if o["output_type"] == "stream" and o["name"] == "stdout")
    lines = text.splitlines(keepends=True)
    kept: list[dict[str, Any]] = [dict(name="stdout", output_type="stream", text=lines)] if lines else []
    for output in outputs:
        if "image/png" in output.get("data", {}):
            png = base64.b64encode(_small(output["data"]["image/png"])).decode()
            assert len(png) < 140_000, "a figure of more than 100 KB"
            kept.append(dict(data={"image/png": png}, metadata={}, output_type="display_data"))
    return kept


def _small(png: str) -> bytes:
    from PIL import Image

    out = io.BytesIO()
    image = Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB")
    image.quantize(128, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(out, "PNG", optimize=True)
    return out.getvalue()


def figures(notebook: dict[str, Any]) -> list[bytes]:
    """PNG files of a notebook, in their order."""
    outputs = (output for cell in notebook["cells"] for output in cell.get("outputs", ()))
    found = (output["data"]["image/png"] for output in outputs if "image/png" in output.get("data", {}))
    return [base64.b64decode(png) for png in found]


def committed_figures(stem: str) -> list[bytes]:
    return figures(json.loads((NOTEBOOKS / f"{stem}.ipynb").read_text()))


def other_figures(stem: str, notebook: dict[str, Any]) -> list[str]:
    """One line for each figure that looks different from the committed one, or one line for another number of them."""
    import numpy as np
    from matplotlib.image import imread

    pairs = committed_figures(stem), figures(notebook)
    if len(pairs[0]) != len(pairs[1]):
        return [f"notebooks/{stem}.ipynb has {len(pairs[0])} figures, its code draws {len(pairs[1])}; make notebooks"]
    wrong = []
    for index, pngs in enumerate(zip(*pairs, strict=True)):
        old, new = (imread(io.BytesIO(png))[..., :3] for png in pngs)
        # sums in another order move single points; another curve moves more
        if old.shape != new.shape or np.abs(old - new).mean() > 5e-3:
            wrong.append(f"notebooks/{stem}.ipynb: figure {index} is not what its code draws now; make notebooks")
    return wrong


def _digest() -> str:
    """Of every file the notebooks read, but for their own code."""
    files = sorted(
        path for glob in READ for path in ROOT.glob(glob) if path.is_file() and "__pycache__" not in path.parts
    )
    each = (f"{path.relative_to(ROOT)} {hashlib.sha256(path.read_bytes()).hexdigest()}\n" for path in files)
    return hashlib.sha256("".join(each).encode()).hexdigest()


def _stamp(path: Path, digest: str) -> str:
    written = path.with_suffix(".ipynb")
    own = [file.read_bytes() for file in (path, written) if file.is_file()]
    return hashlib.sha256(b"\n".join([digest.encode(), *own])).hexdigest()


def _has_run(path: Path, digest: str, stamps: Path) -> bool:
    stamp = stamps / f"{path.stem}.sha256"
    return stamp.is_file() and stamp.read_text() == _stamp(path, digest)


if __name__ == "__main__":
    sys.exit(main())
