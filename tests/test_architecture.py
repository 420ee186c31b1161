"""The floors of docs/architecture.md, read off import statements: late and typing-only imports count like others.

A module imports from its own room or from a floor below. No module takes part in a circle.
"""

import ast
import functools
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("moe_jax", "pallas_kernels", "torch_bridge")

# From the ground up. A room is a package or a module; the longest prefix decides which one a module belongs to.
FLOORS = (
    (
        "pallas_kernels.common",
        "moe_jax._arguments",
        "moe_jax._began",
        "moe_jax._compat",
        "moe_jax._output",
        "moe_jax._pytrees",
        "moe_jax._terminal",
        "moe_jax._typing",
        "moe_jax._versions",
    ),
    ("moe_jax._signals", "moe_jax._version", "pallas_kernels"),
    ("moe_jax._kept", "moe_jax.activations", "moe_jax.quantization", "moe_jax.routing"),
    ("moe_jax._config",),
    ("moe_jax.loading",),
    ("moe_jax.experts", "moe_jax.writing"),
    ("moe_jax.parallel",),
    ("moe_jax.nn",),
    ("moe_jax.checkpointing", "moe_jax.layer", "moe_jax.models"),
    ("moe_jax.adapters", "moe_jax.text"),
    ("moe_jax.cli",),
    ("moe_jax.__main__", "moe_jax.benchmarking", "moe_jax.doctor", "moe_jax.inspection"),
    ("moe_jax",),  # the facade: nothing else of the package imports it
    ("torch_bridge",),
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
# Never imported: pickle runs what it reads. At a module's top these would load with `import moe_jax`.
NEVER = {"pickle", "dill", "cloudpickle", "compressed_tensors", "transformers", "llmcompressor"}
NOT_AT_TOP = {"torch", "safetensors", "huggingface_hub", "matplotlib", "rich", "tqdm", "tokenizers", "jinja2", "orbax"}


# Behind ``Backend``; outside moe_jax.experts nobody imports one of these.
BACKENDS = tuple(f"moe_jax.experts.{name}" for name in ("_reference", "hopper", "portable", "xla"))


def module_name(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


FILES = {
    module_name(path.relative_to(ROOT)): path.relative_to(ROOT)
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
}


def room_of(module: str) -> Any:
    """The facade and ``__main__`` are rooms of one module each: no other module falls back to the facade."""
    while module not in FLOOR_OF:
        module = module.rpartition(".")[0]
        if module in ("", "moe_jax"):
            return None
    return module


def imports(path: Path) -> list[tuple[str, bool]]:
    """(imported name, is it executed on import) for every import statement of a file."""
    tree = ast.parse((ROOT / path).read_text())
    late = {id(n) for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for n in ast.walk(f) if n is not f}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        found += [(name, id(node) not in late) for name in names]
    return found


def module_of(name: str, modules) -> str | None:
    """The module that an imported name is or lives in; None outside the repository."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name or None


@functools.cache
def graph() -> dict[str, set[str]]:
    """Each module with the modules of the repository that it imports."""
    found = {module: [module_of(name, FILES) for name, _ in imports(path)] for module, path in FILES.items()}
    return {module: {name for name in names if name is not None} - {module} for module, names in found.items()}


def circles(edges: dict[str, set[str]]) -> list[list[str]]:
    """The strongly connected components of more than one module."""
    reached = {module: set(targets) for module, targets in edges.items()}
    for through in reached:
        for targets in reached.values():
            if through in targets:
                targets |= reached[through]
    groups = {frozenset({a, *(b for b in reached[a] if a in reached.get(b, ()))}) for a in reached}
    return sorted(sorted(group) for group in groups if len(group) > 1)


def upward(edges: dict[str, set[str]]) -> list[str]:
    """Imports from another room that is not on a floor below."""
    return sorted(
        f"{module} -> {target}"
        for module, targets in edges.items()
        for target in targets
        if room_of(module) != room_of(target) and FLOOR_OF[room_of(target)] >= FLOOR_OF[room_of(module)]
    )


def test_every_module_has_a_floor():
    assert [module for module in FILES if room_of(module) is None] == []


def test_imports_only_from_below():
    assert upward(graph()) == []


def test_no_circles():
    assert circles(graph()) == []


@pytest.mark.parametrize("module", [module for module in FILES if not module.startswith("torch_bridge")])
def test_optional_worlds_stay_out(module):
    found = imports(FILES[module])
    assert not NEVER & {name.partition(".")[0] for name, _ in found}
    assert not {name.partition(".")[0] for name, at_top in found if at_top} & NOT_AT_TOP
    assert not any(name.partition(".")[0] == "torch" for name, _ in found)


def asks_for_a_backend(path: Path) -> list[Any]:
    """What a file outside ``moe_jax.experts`` says that only ``Backend`` should know."""
    known = [name for name, _ in imports(path) if name.startswith(BACKENDS)]
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        names = [node.id] if isinstance(node, ast.Name) else [node.attr] if isinstance(node, ast.Attribute) else []
        known += [name for name in names if name in ("in_kernel_layout", "is_kernel_layout")]
        if isinstance(node, ast.Compare):
            values = {leaf.value for leaf in ast.walk(node) if isinstance(leaf, ast.Constant)}
            known += sorted(values & {"hopper", "mosaic", "portable", "xla"}, key=str)
    return known


@pytest.mark.parametrize(
    "module", [name for name in FILES if not name.startswith(("moe_jax.experts", "pallas_kernels"))]
)
def test_backends_are_known_through_their_protocol(module):
    assert asks_for_a_backend(FILES[module]) == []


def test_the_rules_can_fail():
    assert asks_for_a_backend(FILES["moe_jax.experts._choice"])
    assert room_of("moe_jax.loading.files._safetensors") == "moe_jax.loading"
    assert (
        room_of("moe_jax._new_module") is None
        and room_of("moe_jax.new.thing") is None
        and room_of("moe_jax") == "moe_jax"
    )
    assert upward({"moe_jax.routing._route": {"moe_jax.experts._backend"}})
    assert upward({"moe_jax.routing._route": {"moe_jax.activations"}})
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]
    late = [name for name, at_top in imports(FILES["moe_jax.cli._main"]) if not at_top]
    assert any(name.startswith("moe_jax.") for name in late) and set(late) <= {
        name for name, _ in imports(FILES["moe_jax.cli._main"])
    }
