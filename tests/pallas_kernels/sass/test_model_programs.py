"""Programs of models with ``pinned_tokens``, compiled for an H200: whatever a call has, a tile's kernels compute alike.

Needs the environment of test_sass.py. With jax 0.10 attention is XLA's, with 0.11 that of the Hopper kernels.
"""

import collections
import json
import re
import subprocess
import sysconfig

import pytest

from tests.pallas_kernels.sass.test_sass import HERE, PYTHON, ROOT

pytestmark = pytest.mark.slow

# What rounds, or must not be computed in one program and known in another.
ARITHMETIC = re.compile(r"= (?:f|bf)\d+\S* (?:add|subtract|multiply|divide|exponential|rsqrt|cosine|sine|dot|reduce)\(")
# One tile and several, one page and several, one row and several.
PROGRAMS = ("1x1x40", "1x48x200", "3x1x136", "3x131x200")


@pytest.mark.parametrize(("projections", "experts"), [(None, "hopper"), ("fp8_channel", "xla")])
def test_a_tile_has_the_same_kernels_in_every_call(projections, experts):
    """Kernels that differ move rows and numbers between a tile and its call, and compute nothing."""
    if not (ROOT / PYTHON[0]).exists():
        pytest.skip(f"{PYTHON[0]} does not exist; `make test-sass` makes it")
    options = ["--packages", sysconfig.get_paths()["purelib"], "--pinned", "48", "--experts", experts]
    options += [] if projections is None else ["--projections", projections]
    command = [*PYTHON, str((HERE / "compile_models.py").relative_to(ROOT)), *options, *PROGRAMS]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr[-2000:]
    first, *others = [collections.Counter(json.loads(line)) for line in run.stdout.splitlines()]
    assert len(others) == len(PROGRAMS) - 1
    assert sum(bool(ARITHMETIC.search(kernel)) for kernel in first) > 10
    if experts == "hopper":
        assert any("mosaic_gpu" in kernel for kernel in first)
    for other in others:
        differing = [*(first - other), *(other - first)]
        assert [kernel for kernel in differing if ARITHMETIC.search(kernel) or "custom-call" in kernel] == []
