"""The wheel: what is in it, and that it installs and runs without torch, or any other optional package."""

import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.support.checkpoints.texts import write_text_model

ROOT = Path(__file__).parent.parent
PACKAGES = ("moe_jax", "pallas_kernels", "torch_bridge")
ABSENT = ("huggingface_hub", "torch", "transformers", "compressed_tensors", "matplotlib", "tqdm", "jaxtyping")

pytestmark = pytest.mark.slow


def run(*command, **options):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=900, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory, pytestconfig):
    if (given := pytestconfig.getoption("--wheel")) is not None:
        return given
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


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """installed(program, *arguments): run it in an environment that holds the wheel and what it requires."""
    directory = tmp_path_factory.mktemp("installed")
    run(sys.executable, "-m", "venv", directory / "venv")
    programs = directory / "venv/bin"
    run(programs / "python", "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt", wheel)
    environment = {"PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu", "HOME": str(directory)}
    return lambda program, *arguments: run(programs / program, *arguments, cwd=directory, env=environment)


def test_installs_and_runs_without_optional_packages(wheel, installed):
    assert not installed(
        "python", "-c", f"import importlib.util as u; print(*[n for n in {ABSENT} if u.find_spec(n)])"
    ).split()
    version = installed("moe-jax", "--version")
    assert re.fullmatch(r"moe-jax \d+\.\d+\.\d+\S*\n", version) and version.split()[1] in wheel.name
    example, *_ = re.findall(r"```python\n(.*?)```", (ROOT / "docs/quickstart.md").read_text(), re.DOTALL)
    assert "(16, 64) bfloat16" in installed("python", "-c", example)
    text = installed("moe-jax", "doctor")
    missing = {line.split()[0] for line in text.splitlines() if "  missing  " in line}
    assert {
        "torch",
        "huggingface_hub",
        "matplotlib",
        "tqdm",
        "jinja2",
        "tokenizers",
    } <= missing and "no problems found" in text


def pytest_generate_tests(metafunc):
    if "python" in metafunc.fixturenames:
        metafunc.parametrize("python", metafunc.config.getoption("--python") or [sys.executable], scope="module")


SELF = re.compile(r"'\.\[(.*)\]'")
NOT_HERE = {"make demo", "make test"}  # of a checkout: their commands are `moe-jax demo`, and continuous integration


def test_every_line_of_the_readme(python, wheel, tmp_path):
    """In an environment of its own that a user's command made, on a small checkpoint in place of the one it names."""
    text = (ROOT / "README.md").read_text()
    fences = re.findall(r"```(\w*)\n(.*?)```", text, re.DOTALL)
    lines = [line.partition("#")[0].strip() for kind, body in fences if not kind for line in body.splitlines()]
    lines += re.findall(r"`(moe-jax [^`]+)`", text)
    (example,) = (body for kind, body in fences if kind == "python")
    write_text_model(tmp_path / re.search(r'LLM\("(\S+)"', example)[1], max_position_embeddings=1024)
    run(python, "-m", "venv", tmp_path / "venv")
    programs = tmp_path / "venv/bin"
    environment = {"PATH": f"{programs}:/usr/bin:/bin", "JAX_PLATFORMS": "cpu", "HOME": str(tmp_path)}
    environment |= {
        name: value for name, value in os.environ.items() if name.startswith("PIP_") or "proxy" in name.lower()
    }
    options = dict(cwd=tmp_path, env=environment)
    seen = {}
    for line in [*lines, "moe-jax demo"]:
        if line in NOT_HERE:
            continue
        if line.startswith("pip install"):
            extras = SELF.search(line)[1]
            if "cuda" in extras:  # gigabytes for a GPU that is not here
                continue
            run(programs / "python", "-m", "pip", "install", "--quiet", f"{wheel}[{extras}]", **options)
            continue
        seen[line] = run(*shlex.split(line), **options)
    assert "no problems found" in seen["moe-jax doctor"]
    (answer,) = (out for line, out in seen.items() if line.startswith("moe-jax run"))
    assert answer.strip()
    assert len(seen) == 3 and len(lines) == 6, "a new line of the README needs a case here"
    assert "method: fp8_channel" in run("python", "-c", example, **options)


def test_import_takes_little_beyond_jax_and_flax(installed):
    """Seconds of the processor, the least of five, with compiled files as pip leaves them."""
    code = "import time, jax, flax.nnx; t = time.process_time(); import moe_jax; print(time.process_time() - t)"
    assert min(float(installed("python", "-c", code)) for _ in range(5)) < 0.3


@pytest.fixture(scope="module")
def verify_types(wheel, tmp_path_factory):
    """verify_types(package): pyright's report on the package in the wheel, beside all that is installed here.

    Pyright asks the first python of PATH where packages are, whatever --pythonpath says.
    """
    directory = tmp_path_factory.mktemp("typed")
    run(sys.executable, "-m", "venv", "--without-pip", directory / "venv")
    (site,) = (directory / "venv").glob("lib/python*/site-packages")
    zipfile.ZipFile(wheel).extractall(site)
    (site / "installed_here.pth").write_text(sysconfig.get_path("purelib"))
    path = os.pathsep.join([str(directory / "venv/bin"), os.environ["PATH"]])

    def report(package):
        command = [sys.executable, "-m", "pyright", "--verifytypes", package, "--ignoreexternal", "--outputjson"]
        options = dict(cwd=directory, env=os.environ | {"PATH": path, "PYTHONPATH": ""}, timeout=900)
        found = json.loads(subprocess.run(command, capture_output=True, text=True, **options).stdout)
        assert found["typeCompleteness"].get("packageRootDirectory") == str(site / package), found["generalDiagnostics"]
        return found["typeCompleteness"]

    return report


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_are_typed(package, verify_types):
    """What a type checker knows of a package that states py.typed."""
    exported = [symbol for symbol in verify_types(package)["symbols"] if symbol["isExported"]]
    assert len(exported) > 20
    assert [symbol["name"] for symbol in exported if not symbol["isTypeKnown"]] == []
