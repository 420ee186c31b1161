"""moe-jax doctor: what it says, on machines that are not this one too, and its exit code."""

from importlib import metadata
from pathlib import Path

import jax
import pytest

from moe_jax import __version__, cli
from moe_jax.cli import _doctor as doctor
from moe_jax.experts._choice import BACKENDS
from moe_jax.quantization import SCHEMES
from tests.support.cases.hopper_layers import on_hopper


@pytest.fixture
def on_a_cpu(monkeypatch):
    """No NVIDIA GPU beside us, so that a machine with one reports the same."""
    monkeypatch.setattr(doctor, "has_nvidia_gpu", lambda: False)
    monkeypatch.setattr(doctor, "_DRIVER", Path("/no/driver"))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")


def without(monkeypatch, *missing, **other):
    """Make distributions seem missing, or of another version (names with underscores)."""
    real, other = metadata.version, {name.replace("_", "-"): found for name, found in other.items()}

    def version(name):
        if name in missing:
            raise metadata.PackageNotFoundError(name)
        return other.get(name) or real(name)

    monkeypatch.setattr(metadata, "version", version)


def test_a_healthy_cpu(on_a_cpu, capsys):
    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "no problems found" in text and f"moe-jax{' ' * 6}{__version__}" in text and jax.__version__ in text
    rows = {words[0]: words[1] for line in text.splitlines() if len(words := line.split()) > 2}
    assert {name: rows.get(name) for name in SCHEMES} == dict.fromkeys(SCHEMES, "xla")
    (reason,) = [line for line in text.splitlines() if "not on hopper" in line]
    assert "Hopper" in reason and "every scheme" in reason
    assert "prefill: XLA; not hopper: " in text and "decode step: XLA; not hopper: " in text
    assert text.count("cpu:") == len(jax.devices()) and "preallocates on GPUs only" in text


def test_what_is_missing_and_what_needs_it(on_a_cpu, monkeypatch):
    without(monkeypatch, "torch", "matplotlib")
    found = doctor.diagnose()
    assert found.missing == ("torch", "matplotlib") and not found.problems
    lines = {words[0]: line for line in found.render().splitlines() if (words := line.split())}
    assert "torch_bridge" in lines["torch"] and "pip install torch" in lines["torch"]
    assert "pip" not in lines["tqdm"]


def test_a_missing_requirement_is_a_problem(on_a_cpu, monkeypatch, capsys):
    without(monkeypatch, "absl-py")
    assert cli.main(["doctor"]) == 1
    assert "absl-py is not installed: pip install absl-py" in capsys.readouterr().out


REQUIREMENTS = (
    "flax>=0.12.8; python_version < '3'",
    "flax>=0.12.10; python_version >= '3'",
    "ml-dtypes>=0.5.3",
    'torch>=2.11; extra == "torch"',
    'torch>=2.11; extra == "all"',
    'ruff>=99; extra == "dev"',
)


@pytest.mark.parametrize(
    "installed, problems",
    [
        (dict(flax="0.12.9", torch="2.11.0+cpu", ml_dtypes="0.6.0"), ["flax is 0.12.9, expected >=0.12.10"]),
        (dict(flax="0.12.10", torch="2.5.1+cu124", ml_dtypes="0.6.0"), ["torch is 2.5.1+cu124, expected >=2.11"]),
        (dict(flax="0.13.0", torch="2.12.0rc1", ml_dtypes="0.5.1"), ["ml_dtypes is 0.5.1, expected >=0.5.3"]),
        (dict(flax="0.12.10", torch=None, ml_dtypes="0.6.0"), []),
    ],
)
def test_versions_outside_of_what_the_metadata_states(monkeypatch, installed, problems):
    """Markers count, extras too, each line comes once, and what only developers need is left alone."""
    monkeypatch.setattr(doctor, "installed_version", lambda name: installed.get(name, "1.0"))
    found = doctor.out_of_range(REQUIREMENTS)
    assert [line.partition(":")[0] for line in found] == problems
    assert all(f"pip install '{line.split()[0]}>=" in line for line in found)


def test_the_ranges_are_those_of_the_distribution(on_a_cpu, monkeypatch):
    monkeypatch.setattr(metadata, "requires", lambda name: ["numpy>=99"] if name == "moe-jax" else None)
    (problem,) = doctor.diagnose().problems
    assert problem.startswith("numpy is ") and "expected >=99" in problem


@pytest.mark.parametrize(
    "text, version",
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023", (535, 104, 5)),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build", (580, 65, 6)),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  580.95.05  Release Build", (580, 95, 5)),
        ("something else 1.2.3", None),
    ],
)
def test_version_of_the_driver(monkeypatch, tmp_path, text, version):
    monkeypatch.setattr(doctor, "_DRIVER", tmp_path / "version")
    assert doctor.driver_version() is None
    (tmp_path / "version").write_text(f"{text}\nGCC version:  gcc 12.3.0\n")
    assert doctor.driver_version() == version


@pytest.mark.parametrize(
    "driver, plugins, words",
    [
        ("580.95.05", ["13"], None),
        ("535.104.05", ["12"], None),
        ("570.86.10", ["13"], ["is 570.86.10, expected 580 or newer for jax-cuda13-plugin", "'jax[cuda12]=="]),
        ("470.82.01", ["12"], ["expected 525 or newer for jax-cuda12-plugin: update the driver"]),
        ("470.82.01", ["13"], ["expected 580 or newer for jax-cuda13-plugin: update the driver"]),
        ("580.95.05", ["12", "13"], ["both installed, expected one: pip uninstall jax-cuda12-plugin"]),
    ],
)
def test_plugins_beside_the_driver(on_a_cpu, monkeypatch, tmp_path, driver, plugins, words):
    (tmp_path / "version").write_text(f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {driver}  Sat Aug 19\n")
    monkeypatch.setattr(doctor, "_DRIVER", tmp_path / "version")
    without(monkeypatch, **{f"jax_cuda{plugin}_plugin": metadata.version("jaxlib") for plugin in plugins})
    problems = doctor.diagnose().problems
    assert len(problems) == (words is not None)
    assert all(word in problems[0] for word in words or ())
    assert not words or driver != "470.82.01" or "jax[" not in problems[0], "no CUDA that we know runs on it"


def test_which_cuda_a_driver_wants(monkeypatch):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    for driver, cuda in (((570, 86), "cuda12"), ((580, 0), "cuda13"), (None, "cuda13")):
        monkeypatch.setattr(doctor, "driver_version", lambda found=driver: found)
        assert f"pip install 'jax[{cuda}]==0.11.2'" in doctor._why_on_the_cpu({"jax": "0.11.2"})


def test_plugin_of_another_version(on_a_cpu, monkeypatch):
    without(monkeypatch, jax_cuda13_plugin="0.9.1", jaxlib="0.10.2")
    (problem,) = doctor.diagnose().problems
    assert all(word in problem for word in ("jax-cuda13-plugin is 0.9.1", "jaxlib 0.10.2", "jax[cuda13]=="))


@pytest.mark.parametrize(
    "platforms, plugin, words",
    [("cpu", None, "unset it"), ("", None, f"pip install 'jax[cuda13]=={jax.__version__}'"), ("", "x", "says why")],
)
def test_a_gpu_that_jax_does_not_use(monkeypatch, platforms, plugin, words):
    monkeypatch.setattr(doctor, "has_nvidia_gpu", lambda: True)
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    same = metadata.version("jaxlib") if plugin else None
    without(monkeypatch, *(() if plugin else doctor._CUDA_PLUGINS), **({"jax_cuda13_plugin": same} if plugin else {}))
    (problem,) = doctor.diagnose().problems
    assert "NVIDIA GPU" in problem and words in problem


def test_no_device_at_all(on_a_cpu, monkeypatch, capsys):
    def devices():
        raise RuntimeError("Unable to initialize backend 'cuda':\nno GPU")

    monkeypatch.setattr(jax, "devices", devices)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    assert cli.main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "Unable to initialize backend 'cuda': no GPU; JAX_PLATFORMS is 'cuda'" in text and "fp8_block" not in text


def test_schemes_on_hopper(monkeypatch):
    """One scheme of each kind: with kernels, with packed weights, and one that the kernels refuse here."""
    names, hopper = ("fp8_channel", "w4a16_g128", "int8_w8a16"), BACKENDS["hopper"]
    refusal = hopper.refusal

    def not_today(problem):
        return "not today" if problem.config.scheme.name == names[2] else refusal(problem)

    monkeypatch.setattr(hopper, "refusal", not_today)
    monkeypatch.setattr(BACKENDS["portable"], "device_refusal", lambda: "no mma")
    monkeypatch.setattr(doctor, "SCHEMES", {name: SCHEMES[name] for name in names})
    monkeypatch.setattr(doctor, "LAYER", (4, 2, 256, 128))
    with on_hopper():
        runs, skipped = doctor.scheme_runs("gpu")
    found = {run.scheme: (run.implementation, run.how) for run in runs}
    assert found["fp8_channel"] == ("hopper", "grouped GEMM")
    assert found["w4a16_g128"] == ("hopper", "packed grouped GEMM")
    assert found["int8_w8a16"][0] == "xla"
    assert skipped == {"hopper: not today": ("int8_w8a16",), "portable: no mma": names}


@pytest.mark.parametrize(
    "settings, words",
    [
        ({}, "75% of each GPU"),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": ".4"}, "XLA_PYTHON_CLIENT_MEM_FRACTION=.4 of each GPU"),
        ({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, "allocated as needed (XLA_PYTHON_CLIENT_PREALLOCATE=false)"),
        ({"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}, "one by one"),
    ],
)
def test_memory_of_a_gpu(monkeypatch, settings, words):
    for name in ("PREALLOCATE", "MEM_FRACTION", "ALLOCATOR"):
        monkeypatch.delenv(f"XLA_PYTHON_CLIENT_{name}", raising=False)
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION", raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    assert words in doctor._memory("gpu")


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"moe-jax {__version__}"
