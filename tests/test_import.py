"""What ``import moe_jax`` refuses (a JAX outside the tested range) and what it must not load."""

import importlib
import subprocess
import sys

import pytest

import moe_jax
from moe_jax import _compat

FORBIDDEN = ("huggingface_hub", "torch", "transformers", "compressed_tensors", "safetensors", "matplotlib")
BROUGHT_BY_OTHERS = ("rich", "tqdm", "orbax")


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("version", ["0.10.2", "0.10.3", "0.11.0", "0.11.2", "0.11.9.dev20260801+abc"])
def test_supported_versions(version):
    assert _compat.version_error("jax", version) is None


@pytest.mark.parametrize("version", ["0.10.1", "0.9.9", "0.4.38", "0.12.0", "0.12.0rc1", "0.100.0", "1.0"])
def test_refused_versions(version):
    error = _compat.version_error("jax", version)
    assert error is not None and "\n" not in error
    assert all(part in error for part in (f"jax {version}", ">= 0.10.2", "< 0.12", "pip install"))


@pytest.mark.parametrize("package", ["jax", "jaxlib"])
def test_import_says_so_in_one_line(package):
    """Stub modules stand in for the wrong version: they lack everything else, so the check must come first."""
    versions = {"jax": "0.10.2", "jaxlib": "0.10.2", package: "0.13.1"}
    stubs = "; ".join(
        f"sys.modules[{n!r}] = m = types.ModuleType({n!r}); m.__version__ = {v!r}" for n, v in versions.items()
    )
    done = run(f"import sys, types; {stubs}; import moe_jax")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: moe_jax supports {package} >= 0.10.2, < 0.12; found {package} 0.13.1")


@pytest.fixture(scope="module")
def loaded_modules():
    """Names in sys.modules after ``import flax.nnx`` and after all of moe_jax's public names, in fresh processes."""

    def names(statement):
        done = run(f"import sys; {statement}; print(*sorted(sys.modules))")
        assert done.returncode == 0, done.stderr
        return set(done.stdout.split())

    return names("import flax.nnx"), names("from moe_jax import *")


def worlds(modules):
    return {name.partition(".")[0] for name in modules}


def test_import_stays_light(loaded_modules):
    """flax loads rich by itself; beyond what flax brings, moe_jax adds none of the optional worlds."""
    by_flax, by_moe_jax = map(worlds, loaded_modules)
    assert "jax" in by_moe_jax
    assert not (by_moe_jax - by_flax) & set(BROUGHT_BY_OTHERS)
    assert not by_moe_jax & set(FORBIDDEN)


def test_import_brings_own_modules_only(loaded_modules):
    """Counted, not timed. Pallas and its MLIR dialects took two thirds of a second: they load with the first kernel."""
    by_flax, by_moe_jax = loaded_modules
    added = {name for name in by_moe_jax - by_flax if worlds([name]).isdisjoint(sys.stdlib_module_names)}
    foreign = {name for name in added if worlds([name]).isdisjoint({"moe_jax", "pallas_kernels", "jaxtyping"})}
    assert not foreign and not worlds(by_moe_jax) & {"torch_bridge"}
    kernels = {name for name in added if name.startswith("pallas_kernels.") and name.endswith("_sm90")}
    assert "pallas_kernels.grouped_gemm.api" in added and not kernels
    diagnosing = {"moe_jax.cli", "moe_jax.doctor", "moe_jax.inspection", "moe_jax.cli._demo", "moe_jax.benchmarking"}
    assert not added & diagnosing


def test_a_name_loads_its_own_room():
    """The facade is lazy: ``import moe_jax`` loads no room, a format loads no layer."""
    done = run(
        "import sys, moe_jax; before = set(sys.modules); moe_jax.Scheme; print(*sorted(set(sys.modules) - before))"
    )
    assert done.returncode == 0, done.stderr
    rooms = {".".join(name.split(".")[:2]) for name in done.stdout.split() if name.startswith("moe_jax.")}
    assert "moe_jax.quantization" in rooms and not rooms & {"moe_jax.experts", "moe_jax.nn", "moe_jax.models"}


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_the_program_answers_before_anything_large_is_loaded(option):
    """Counted, not timed: jax alone takes more than the 0.3 s that these may."""
    done = run(
        f"import sys; from moe_jax.cli._main import main; code = main([{option!r}]); print(); print(*sys.modules)"
    )
    assert done.returncode == 0 and done.stdout.startswith(("usage: moe-jax", "moe-jax 0."))
    assert not {"jax", "numpy", "flax", "tqdm"} & worlds(done.stdout.splitlines()[-1].split())


def test_unknown_names_of_the_facade():
    assert not hasattr(moe_jax, "FusedMoe")
    assert set(moe_jax.__all__) <= set(dir(moe_jax)) and moe_jax.parallel is sys.modules["moe_jax.parallel"]


def test_modules_are_there_without_an_import_of_their_own():
    """``import moe_jax`` gave them to who wrote no more than that."""
    used = "layer.FusedMoE activations.parse_activation models.generate checkpointing.save".split()
    done = run(f"import moe_jax; {', '.join(f'moe_jax.{name}' for name in used)}")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("former", "name", "later"),
    [
        ("push", "nvlink_dispatch", set()),
        (
            "grouped_gemm_packed",
            "grouped_gemm.packed",
            {"BLOCK_N", "HEIGHTS", "PackedVectorConfig", "adds_up_at_once", "dequantize_packed"}
            | {"stacked_projections"},
        ),
    ],
)
def test_kernels_under_their_former_names(former, name, later):
    """later: names that came when the former module had its own no more."""
    old, new = (importlib.import_module(f"pallas_kernels.{module}") for module in (former, name))
    values = [getattr(new, public) for public in set(new.__all__) - later]
    assert len(old.__all__) == len(values) and all(getattr(old, public) in values for public in old.__all__)
