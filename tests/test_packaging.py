"""The wheel: what is in it, and that it installs and runs without torch, or any other optional package."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("moe_jax", "pallas_kernels", "torch_bridge")
ABSENT = ("torch", "transformers", "compressed_tensors", "matplotlib", "tqdm", "jaxtyping")

pytestmark = pytest.mark.slow


def run(*command, **options):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=900, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", out, ROOT)
    (path,) = out.glob("moe_jax-*.whl")
    return path


def test_wheel_holds_the_packages_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == set(PACKAGES)
    assert all(f"{package}/py.typed" in names for package in PACKAGES)
    tracked = run("git", "ls-files", *PACKAGES, cwd=ROOT).split()
    assert set(tracked) <= set(names), "tuning tables included"


def test_installs_and_runs_without_optional_packages(wheel, tmp_path):
    venv = tmp_path / "venv"
    run(sys.executable, "-m", "venv", venv)
    python = venv / "bin/python"
    run(python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt", wheel)
    look = f"import importlib.util as u; print(*[n for n in {ABSENT} if u.find_spec(n)])"
    found = run(python, "-c", look, cwd=tmp_path)
    assert not found.split()
    environment = {"PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu", "HOME": str(tmp_path)}
    options = dict(cwd=tmp_path, env=environment)
    version = run(venv / "bin/moe-jax", "--version", **options)
    assert re.fullmatch(r"moe-jax \d+\.\d+\.\d+\S*\n", version) and version.split()[1] in wheel.name
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert "(16, 64) bfloat16" in run(python, "-c", example, **options)
    text = run(venv / "bin/moe-jax", "doctor", **options)
    missing = {line.split()[0] for line in text.splitlines() if "  missing  " in line}
    assert {"torch", "matplotlib", "tqdm"} <= missing and "no problems found" in text
