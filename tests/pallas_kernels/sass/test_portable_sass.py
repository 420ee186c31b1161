"""What ptxas makes of the portable kernels for each GPU: no spills, and tensor cores at work.

Needs jax 0.11 in the CUDA compiler's environment: ``make test-sass-portable``. One process a target, since a process
compiles for one. MOE_JAX_SASS_EVERY=8 compiles each eighth kernel; all of one target take some ten minutes of a core.
"""

import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
PYTHON = shlex.split(os.environ.get("MOE_JAX_PORTABLE_SASS_PYTHON", ".venv-sass0.11.2/bin/python"))
EVERY = int(os.environ.get("MOE_JAX_SASS_EVERY", "1"))
TARGETS = {"sm_80": "sm_80", "sm_89": "sm_89", "sm_90": "sm_90a", "sm_100": "sm_100a", "sm_120": "sm_120a"}


@pytest.fixture(scope="module", params=TARGETS)
def kernels(request):
    if shutil.which(PYTHON[0]) is None and not (ROOT / PYTHON[0]).exists():
        pytest.skip(f"{PYTHON[0]} does not exist; `make test-sass-portable` makes it")
    found = compiled(request.param, "--every", str(EVERY))
    assert len(found) > 100 // EVERY
    return request.param, found


def compiled(*arguments):
    script = str((HERE / "compile_portable.py").relative_to(ROOT))
    run = subprocess.run([*PYTHON, script, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=7200)
    assert run.returncode == 0, run.stderr[-2000:]
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]


def test_all_compile_without_spills(kernels):
    target, found = kernels
    found = found + compiled(target, "--rows")
    assert [k for k in found if "error" in k or k["spill_bytes"] or k["target"] != TARGETS[target]] == []


def test_tensor_cores_multiply(kernels):
    """For sm_120 there is no SASS to read: jax does not assemble it."""
    target, found = kernels
    if target == "sm_120":
        pytest.skip("jax 0.11.2 assembles nothing for sm_120a")
    assert [k for k in found if not k["matrix"]] == []
    assert {op for k in found for op in k["matrix"]} == {"HMMA", "IMMA"} | ({"QMMA"} if target == "sm_89" else set())
