"""The walls of docs/architecture.md, read off import statements: rooms import from below, optional worlds stay out."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("moe_jax", "pallas_kernels", "torch_bridge")
FILES = sorted(path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("*.py"))

# Longest prefix decides; modules without an entry (_config, _typing, _compat, _version) serve every floor.
FLOORS = {
    "pallas_kernels": 0,
    "moe_jax.quantization": 1,
    "moe_jax.routing": 1,
    "moe_jax.activations": 1,
    "moe_jax.loading": 2,
    "moe_jax.parallel": 2,
    "moe_jax.experts": 2,
    "moe_jax.layer": 3,
    "moe_jax.models": 4,
    "torch_bridge": 4,
    "moe_jax.checkpointing": 4,
    "moe_jax.writing": 4,
    "moe_jax.inspection": 5,
    "moe_jax.doctor": 5,
    "moe_jax.benchmarking": 5,
    "moe_jax.cli._chat": 5,
    "moe_jax.cli._demo": 5,
    "moe_jax.cli._run": 5,
    "moe_jax.cli": 5,
}
# Never imported: pickle runs what it reads. At a module's top these would load with `import moe_jax`.
NEVER = {"pickle", "dill", "cloudpickle", "compressed_tensors", "transformers", "llmcompressor"}
NOT_AT_TOP = {"torch", "safetensors", "matplotlib", "rich", "tqdm", "tokenizers", "jinja2", "orbax"}


def module_name(path):
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def floor_of(name):
    known = [prefix for prefix in FLOORS if name == prefix or name.startswith(f"{prefix}.")]
    return FLOORS[max(known, key=len)] if known else None


def imports(path):
    """(imported module, is it executed on import) for every import statement of a file."""
    tree = ast.parse((ROOT / path).read_text())
    inside = {id(n) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for n in ast.walk(f) if n is not f}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            yield name, id(node) not in inside


@pytest.mark.parametrize("path", FILES, ids=str)
def test_imports_only_from_below(path):
    floor = floor_of(module_name(path))
    if floor is None:
        return
    above = [name for name, _ in imports(path) if (floor_of(name) or 0) > floor]
    assert not above, f"{path} (floor {floor}) imports {above}"


@pytest.mark.parametrize("path", [path for path in FILES if path.parts[0] != "torch_bridge"], ids=str)
def test_optional_worlds_stay_out(path):
    found = {name.partition(".")[0]: at_top for name, at_top in imports(path)}
    assert not NEVER & set(found)
    assert not {name for name, at_top in found.items() if at_top} & NOT_AT_TOP
    assert path.parts[0] == "torch_bridge" or "torch" not in found


@pytest.mark.parametrize("path", FILES, ids=str)
def test_files_stay_readable(path):
    """At 500 lines, ask which half has a name of its own."""
    assert len((ROOT / path).read_text().splitlines()) <= 500


def test_the_rules_can_fail():
    assert floor_of("moe_jax.loading.files._safetensors") == 2 and floor_of("moe_jax.layer.FusedMoE") == 3
    assert floor_of("moe_jax._config") is None and len(FILES) > 10
