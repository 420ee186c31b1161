"""moe-jax doctor: what it says, on machines that are not this one too, and its exit code."""

from importlib import metadata

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
    assert text.count("cpu:") == len(jax.devices()) and "preallocates on GPUs only" in text


def test_what_is_missing_and_what_needs_it(on_a_cpu, monkeypatch):
    without(monkeypatch, "torch", "matplotlib")
    found = doctor.diagnose()
    assert found.missing == ("torch", "matplotlib") and not found.problems
    lines = {words[0]: line for line in found.render().splitlines() if (words := line.split())}
    assert "torch_bridge" in lines["torch"] and "pip install 'moe-jax[torch]'" in lines["torch"]
    assert "pip" not in lines["tqdm"]


def test_a_missing_requirement_is_a_problem(on_a_cpu, monkeypatch, capsys):
    without(monkeypatch, "absl-py")
    assert cli.main(["doctor"]) == 1
    assert "absl-py is not installed: pip install absl-py" in capsys.readouterr().out


def test_plugin_of_another_version(on_a_cpu, monkeypatch):
    without(monkeypatch, jax_cuda13_plugin="0.9.1", jaxlib="0.10.2")
    (problem,) = doctor.diagnose().problems
    assert all(word in problem for word in ("jax-cuda13-plugin is 0.9.1", "jaxlib 0.10.2", "jax[cuda13]=="))


@pytest.mark.parametrize(
    "platforms, plugin, words", [("cpu", None, "unset it"), ("", None, "moe-jax[cuda]"), ("", "x", "says why")]
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
    monkeypatch.setattr(doctor, "SCHEMES", {name: SCHEMES[name] for name in names})
    monkeypatch.setattr(doctor, "LAYER", (4, 2, 256, 128))
    with on_hopper():
        runs, skipped = doctor.scheme_runs("gpu")
    found = {run.scheme: (run.implementation, run.how) for run in runs}
    assert found["fp8_channel"] == ("hopper", "grouped GEMM")
    assert found["w4a16_g128"] == ("hopper", "packed grouped GEMM")
    assert found["int8_w8a16"][0] == "xla" and skipped == {"hopper: not today": ("int8_w8a16",)}


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
