"""Runs the notebooks side by side, before Sphinx reads them: outputs go into MyST-NB's cache, so each runs once.

    python docs/_execute.py [--write-figures]

A notebook whose code is in the cache does not run again, as long as the library and the results it reads are those of
the last time. The figures drawn must be those of notebooks/figures; --write-figures runs every notebook and replaces
them.
"""

import argparse
import hashlib
import os
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jupytext
import numpy as np
from jupyter_cache import get_cache
from jupyter_cache.base import CacheBundleIn
from matplotlib.image import imread
from nbclient import NotebookClient

ROOT = Path(__file__).parent.parent
TIMED = "06_how_fast"
NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("0*.py"), key=lambda path: (path.stem == TIMED, path.name))
COMMITTED, BUILD = ROOT / "notebooks/figures", ROOT / "docs/_build"
READ = (
    "docs/notebooks/plots.py",
    "benchmarks/results/*.json*",
    "moe_jax/**/*",
    "torch_bridge/*",
    "pallas_kernels/**/*",
)
TIMEOUT = 600
# Programs here run once or twice; compiling them is most of the work. TIMED takes times: it
# comes last, and runs alone.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "MOE_JAX_FIGURES": str(BUILD / "figures"),
    "XLA_FLAGS": "",
    "PYTHONPATH": str(ROOT),
}
QUICKLY = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "true"}


def main() -> int:
    """Returns the exit code: 1 when a figure is not the committed one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write-figures", action="store_true")
    args = parser.parse_args()
    digest, kept = _digest(), BUILD / "inputs.sha256"
    if args.write_figures or not kept.is_file() or kept.read_text() != digest:
        for name in (".jupyter_cache", "figures"):
            shutil.rmtree(BUILD / name, ignore_errors=True)
    (BUILD / "figures").mkdir(parents=True, exist_ok=True)
    cache = get_cache(BUILD / ".jupyter_cache")
    waiting = [path for path in NOTEBOOKS if not _is_cached(cache, _read(path))]
    *together, last = NOTEBOOKS
    began = time.perf_counter()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        done = list(pool.map(lambda path: _execute(path, QUICKLY), [path for path in together if path in waiting]))
    done += [_execute(last, {})] if last in waiting else []
    for path, notebook, seconds in done:
        bundle = CacheBundleIn(notebook, str(path), data={"execution_seconds": seconds})
        cache.cache_notebook_bundle(bundle, check_validity=False, overwrite=True)
        print(f"{path.name}: {seconds:.0f} s")
    kept.write_text(digest)
    print(f"{len(done)} notebooks in {time.perf_counter() - began:.0f} s")
    if args.write_figures:
        shutil.rmtree(COMMITTED)
        shutil.copytree(BUILD / "figures", COMMITTED)
    wrong = _other_figures()
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


def _digest() -> str:
    """Of every file the notebooks read: the cache knows their own code alone."""
    files = sorted(
        path for glob in READ for path in ROOT.glob(glob) if path.is_file() and "__pycache__" not in path.parts
    )
    each = (f"{path.relative_to(ROOT)} {hashlib.sha256(path.read_bytes()).hexdigest()}\n" for path in files)
    return hashlib.sha256("".join(each).encode()).hexdigest()


def _read(path: Path):
    return jupytext.read(path, fmt="py:percent")


def _is_cached(cache, notebook) -> bool:
    try:
        cache.match_cache_notebook(notebook)
    except KeyError:
        return False
    return True


def _execute(path: Path, settings: dict[str, str]):
    """(path, the notebook with its outputs, seconds). Raises what a cell raises."""
    notebook, began = _read(path), time.perf_counter()
    folder = {"metadata": {"path": str(path.parent)}}
    # Times would go into the metadata of cells, which are part of what the cache looks a notebook up by.
    client = NotebookClient(notebook, timeout=TIMEOUT, record_timing=False, resources=folder)
    client.execute(env=os.environ | ENVIRONMENT | settings)
    return path, notebook, time.perf_counter() - began


def _other_figures() -> list[str]:
    """One line for each figure that is drawn and not committed, or the other way round, or looks different."""
    names = {path.name for folder in (COMMITTED, BUILD / "figures") for path in folder.glob("*.png")}
    wrong = []
    for name in sorted(names):
        committed, drawn = COMMITTED / name, BUILD / "figures" / name
        if not (committed.is_file() and drawn.is_file()):
            wrong.append(f"notebooks/figures/{name}: {'not committed' if drawn.is_file() else 'no notebook draws it'}")
            continue
        old, new = imread(committed), imread(drawn)
        # sums in another order move single points; another curve moves more
        if old.shape != new.shape or np.abs(old - new).mean() > 5e-3:
            wrong.append(f"notebooks/figures/{name} is not what its notebook draws now; make notebooks draws it anew")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
