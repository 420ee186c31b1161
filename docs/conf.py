"""Sphinx: pages in MyST Markdown, notebooks as committed, the API from docstrings. `make docs` builds it."""

import os
import re
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import _generate

from moe_jax._version import __version__

_generate.write(HERE / "_generated")

project, author, release = "moe_jax", "the moe_jax authors", __version__
copyright = "the moe_jax authors, Apache-2.0"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx_copybutton"]
exclude_patterns = [
    "_build",
    "conf.py",
    "_execute.py",
    "_generate.py",
    "notebooks/README.md",
    "notebooks/figures",
]
html_theme, html_title = "furo", f"moe_jax {release}"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # docs/_execute.py runs them

autodoc_default_options = {"members": True, "no-value": True, "member-order": "bysource"}
autodoc_typehints = "signature"
autodoc_mock_imports = [] if _generate.has_torch() else ["torch"]
python_maximum_signature_line_length = 100
# Pages that are read on GitHub too link to files outside of the site.
suppress_warnings = ["myst.xref_missing", "misc.highlighting_failure"]


def _as_written(app, what, name, obj, options, lines: list[str]) -> None:
    """Docstrings are plain text: the first paragraph is a sentence, the rest keeps its columns."""
    first, _, rest = "\n".join(lines).strip().partition("\n\n")
    parts = re.split(r"(``.*?``)", first, flags=re.DOTALL)
    escaped = [part if at % 2 else re.sub(r"([*_|`\\])", r"\\\1", part) for at, part in enumerate(parts)]
    text = " ".join("".join(escaped).split())
    block = ["", ".. code-block:: text", "", *(f"   {line}" for line in rest.strip("\n").splitlines())] if rest else []
    lines[:] = [text, *block, ""]


def setup(app) -> None:
    app.connect("autodoc-process-docstring", _as_written)
