"""What ptxas makes of every Hopper kernel: no spills, the wgmma meant, nothing serialized.

Needs the CUDA compiler's environment, which ``make test-sass`` makes; MOE_JAX_SASS_PYTHON is the command that runs its
interpreter. ``make test-sass SASS_JAX=0.11.2 SASS_PYTHON=python3.12`` takes another jax. MOE_JAX_SASS_EVERY=8 compiles
each eighth kernel: all of them take some 80 minutes of one core, two seconds each.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
PYTHON = shlex.split(os.environ.get("MOE_JAX_SASS_PYTHON", ".venv-sass/bin/python"))
EVERY = int(os.environ.get("MOE_JAX_SASS_EVERY", "1"))
# ptxas notes that cost nothing: C7519, an arrive it placed itself in front of a wgmma.
HARMLESS = {"C7519"}
REGISTERS = 65_536


@pytest.fixture(scope="module")
def kernels():
    if shutil.which(PYTHON[0]) is None and not (ROOT / PYTHON[0]).exists():
        pytest.skip(f"{PYTHON[0]} does not exist; `make test-sass` makes it")
    command = [*PYTHON, str((HERE / "compile_kernels.py").relative_to(ROOT)), "--every", str(EVERY)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=7200)
    assert run.returncode == 0, run.stderr[-2000:]
    found = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    assert len(found) > 2100 // EVERY
    return found


def failing(kernels, is_wrong):
    return [k for k in kernels if is_wrong(k)]


def test_all_compile(kernels):
    assert not failing(kernels, lambda k: "error" in k)


def test_no_spills(kernels):
    """But for prefills of 128 columns with a window: one value of theirs is stored once and loaded once."""

    def spills(k):
        of_one_value = 8 if k["name"].startswith("prefill 128/128") and " window" in k["name"] else 0
        moves = [k["sass"].get(name, 0) for name in ("LDL", "STL")]
        return k["spill_bytes"] > of_one_value or max(moves) > of_one_value // 8

    assert not failing(kernels, spills)


def test_two_ctas_share_an_sm(kernels):
    two = [k for k in kernels if "two CTAs an SM" in k["name"]]
    assert two or EVERY > 1
    assert not failing(two, lambda k: 2 * k["threads"] * -(-k["registers"] // 8) * 8 > REGISTERS)


def test_nothing_is_serialized_or_ignored(kernels):
    assert not failing(kernels, lambda k: k["serialized"] or set(k["notes"]) - HARMLESS)


def test_layers_wait_for_the_kernel_before_them_first(kernels):
    def is_wrong(k):
        return k["before_wait"] != (None if k["name"].startswith("nvlink ") else [])

    assert not failing(kernels, is_wrong)


def test_the_matrix_instruction_is_the_one_meant(kernels):
    def is_wrong(k):
        used = {"HGMMA", "QGMMA", "IGMMA"} & k["sass"].keys()
        return used != ({k["instruction"]} if k["instruction"] else set())

    assert not failing(kernels, is_wrong)


def test_few_instructions_unpack_weights(kernels):
    """Of bits and integers in a step of 16 rows: for each product of 64 x 16 weights, 8 to a thread, what masks,
    turned words and scales take, and for all else 18; where four warpgroups share K 28, with NVFP4 33.
    """
    rates = {"int4 g128": 5, "int4 channel": 5, "mxfp4": 6.75, "nvfp4": 7.5}

    def is_wrong(k):
        kind = re.match(r"grouped_gemm_packed ([^,]*?)(?: gated)?, PackedConfig\(block_m=16,", k["name"])
        rate = rates.get(kind.group(1)) if kind else None
        rest = 18 if "k_split=4" not in k["name"] else 33 if "nvfp4" in k["name"] else 28
        return rate is not None and k["loop"]["bits"] > rate * k["loop"]["matrix"] + rest

    assert not failing(kernels, is_wrong)


def test_register_budgets_fit_the_entry_allocation(kernels):
    def is_wrong(k):
        entered, warpgroups = k["registers"], k["threads"] // 128
        if not k["register_limits"]:
            return entered * k["threads"] > REGISTERS
        # Consumers' code stands last in every kernel, and they share its number; each other warpgroup has its own. A
        # sum above what the block entered with would never return.
        ways, limits = zip(*k["register_limits"], strict=True)
        wanted = sum(limits) + limits[-1] * (warpgroups - len(limits))
        go_their_way = all(n >= entered if way == "inc" else n <= entered for way, n in k["register_limits"])
        fit = ways[-1] == "inc" and len(limits) <= warpgroups and wanted <= entered * warpgroups
        return not (go_their_way and fit and k["sass"].get("USETMAXREG") == len(limits))

    assert not failing(kernels, is_wrong)
