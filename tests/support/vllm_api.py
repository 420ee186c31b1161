"""The public surface of vLLM's layers of experts, read from its sources, and the same of ours.

    python -m tests.support.vllm_api SOURCES      (the folder that holds vllm/, of release 0.24.0)

writes tests/torch_bridge/vllm_api.json: for each class its public members, inherited ones too, with their parameters;
for each function its parameters. Nothing of vLLM is imported. A default is source text; null where there is none.
"""

import ast
import functools
import inspect
import json
import sys
from pathlib import Path

FROZEN = Path(__file__).parents[1] / "torch_bridge" / "vllm_api.json"
_MOE, _QUANT = "vllm/model_executor/layers/fused_moe", "vllm/model_executor/layers/quantization"
_CT = f"{_QUANT}/compressed_tensors/compressed_tensors_moe/compressed_tensors_moe"
# What is read, by file; bases come before the classes that inherit.
SOURCES = {
    f"{_QUANT}/base_config.py": ("QuantizeMethodBase", "QuantizationConfig"),
    f"{_QUANT}/utils/quant_utils.py": ("GroupShape",),
    f"{_MOE}/activation.py": ("MoEActivation",),
    f"{_MOE}/config.py": (
        "RoutingMethodType",
        "FusedMoEQuantDesc",
        "FusedMoEQuantConfig",
        "FusedMoEParallelConfig",
        "FusedMoEConfig",
        "get_routing_method_type",
    ),
    f"{_MOE}/fused_moe_method_base.py": ("FusedMoEMethodBase",),
    f"{_MOE}/unquantized_fused_moe_method.py": ("UnquantizedFusedMoEMethod",),
    f"{_MOE}/routed_experts.py": ("RoutedExperts",),
    f"{_MOE}/runner/moe_runner_interface.py": ("MoERunnerInterface",),
    f"{_MOE}/layer.py": ("FusedMoE", "fused_moe_make_expert_params_mapping"),
    f"{_MOE}/expert_map_manager.py": ("determine_expert_map",),
    f"{_QUANT}/online/moe_base.py": ("OnlineMoEMethodBase",),
    f"{_QUANT}/online/int8.py": ("Int8OnlineMoEMethod",),
    f"{_QUANT}/fp8.py": ("Fp8MoEMethod",),
    f"{_CT}.py": ("CompressedTensorsMoEMethod",),
    f"{_CT}_w8a8_fp8.py": ("CompressedTensorsW8A8Fp8MoEMethod",),
    f"{_CT}_w4a8_int8.py": ("CompressedTensorsW4A8Int8MoEMethod",),
    f"{_CT}_w4a4_nvfp4.py": ("CompressedTensorsW4A4Nvfp4MoEMethod",),
    f"{_CT}_wna16_marlin.py": ("CompressedTensorsWNA16MarlinMoEMethod",),
    "vllm/distributed/eplb/eplb_state.py": ("EplbLayerState",),
    "vllm/model_executor/utils.py": ("set_weight_attrs", "replace_parameter"),
}


def parameters_of(function: ast.FunctionDef) -> list[list[str | None]]:
    """[name, default] of each parameter but self, cls, *args and **kwargs; the names of those begin with stars."""
    args = function.args
    positional = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(positional) - len(args.defaults)) + [ast.unparse(node) for node in args.defaults]
    found: list[list[str | None]] = [[arg.arg, default] for arg, default in zip(positional, defaults, strict=True)]
    found += [[f"*{args.vararg.arg}", None]] if args.vararg else []
    found += [
        [arg.arg, None if node is None else ast.unparse(node)]
        for arg, node in zip(args.kwonlyargs, args.kw_defaults, strict=True)
    ]
    found += [[f"**{args.kwarg.arg}", None]] if args.kwarg else []
    return [pair for pair in found if pair[0] not in ("self", "cls")]


def members_of(node: ast.ClassDef, known: dict[str, dict]) -> dict[str, dict]:
    """{name: {"kind": ..., "parameters": ...}} of a class, with what known bases have."""
    members = {}
    for base in node.bases:
        members |= known.get(ast.unparse(base), {})
    is_dataclass = any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)
    fields = [item for item in node.body if isinstance(item, ast.AnnAssign)]
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and (not item.name.startswith("_") or item.name == "__init__"):
            decorators = {ast.unparse(decorator) for decorator in item.decorator_list}
            if "property" in decorators:
                members[item.name] = {"kind": "property"}
            elif not any(decorator == "overload" or decorator.endswith(".setter") for decorator in decorators):
                kind = next((kind for kind in ("staticmethod", "classmethod") if kind in decorators), "method")
                members[item.name] = {"kind": kind, "parameters": parameters_of(item)}
            if item.name == "__init__":
                members |= _instance_attributes(item, members)
    for target in [field.target for field in fields] + [
        target for item in node.body if isinstance(item, ast.Assign) for target in item.targets
    ]:
        if isinstance(target, ast.Name) and not target.id.startswith("_"):
            members.setdefault(target.id, {"kind": "attribute"})
    if is_dataclass:
        members["__init__"] = {
            "kind": "method",
            "parameters": [
                [ast.unparse(field.target), None if field.value is None else ast.unparse(field.value)]
                for field in fields
            ],
        }
    return members


def _instance_attributes(init: ast.FunctionDef, members: dict[str, dict]) -> dict[str, dict]:
    targets = [
        target
        for item in ast.walk(init)
        if isinstance(item, ast.Assign | ast.AnnAssign)
        for target in (item.targets if isinstance(item, ast.Assign) else [item.target])
    ]
    names = [name for target in targets for name in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return {
        target.attr: {"kind": "attribute"}
        for target in names
        if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self"
        if not target.attr.startswith("_") and target.attr not in members
    }


def read(sources: Path) -> dict[str, dict]:
    """{"classes": ..., "functions": ...} of vLLM's sources. Raises ValueError for a name that is not there."""
    classes, functions = {}, {}
    for file, names in SOURCES.items():
        nodes = {getattr(node, "name", None): node for node in ast.parse((sources / file).read_text()).body}
        for name in names:
            node = nodes.get(name)
            if isinstance(node, ast.ClassDef):
                classes[name] = members_of(node, classes)
            elif isinstance(node, ast.FunctionDef):
                functions[name] = parameters_of(node)
            else:
                raise ValueError(f"{file} has no {name}")
    return {"vllm": "0.24.0", "classes": classes, "functions": functions}


def _as_text(api: dict) -> str:
    """As JSON, with a line for every member and every function."""
    lines = ["{", f'"vllm": {json.dumps(api["vllm"])},', '"classes": {']
    for name, members in api["classes"].items():
        rows = ",\n".join(f"  {json.dumps(member)}: {json.dumps(described)}" for member, described in members.items())
        lines.append(f" {json.dumps(name)}: {{\n{rows}\n }}" + ("," if name != [*api["classes"]][-1] else ""))
    rows = ",\n".join(f" {json.dumps(name)}: {json.dumps(found)}" for name, found in api["functions"].items())
    return "\n".join([*lines, "},", f'"functions": {{\n{rows}\n}}', "}"]) + "\n"


def differences(name: str, theirs: list[list[str | None]], function: object) -> list[str]:
    """What differs between vLLM's parameters and those of a function of ours.

    Ours may have defaults where vLLM has none, and more parameters behind, which have defaults.
    """
    signature = inspect.signature(inspect.unwrap(function) if callable(function) else function)
    ours = {
        {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}.get(parameter.kind.name, "") + parameter.name: parameter
        for parameter in signature.parameters.values()
        if parameter.name not in ("self", "cls")
    }
    expected = [str(parameter) for parameter, _ in theirs]
    found = [f"{name}: no parameter {parameter}" for parameter in expected if parameter not in ours]
    named = [parameter for parameter in expected if parameter in ours]
    if [parameter for parameter in ours if parameter in named] != named:
        found.append(f"{name}: parameters in another order")
    more = [parameter for parameter in ours if parameter not in expected and not parameter.startswith("*")]
    found += [f"{name}: {parameter} is no parameter of vLLM's" for parameter in more]
    for parameter, default in theirs:
        if parameter in ours and default is not None and not _is_same(default, ours[str(parameter)].default):
            found.append(f"{name}: {parameter} is {ours[str(parameter)].default!r} by default, {default} in vLLM")
    return found


def _is_same(text: str, value: object) -> bool:
    if value is inspect.Parameter.empty:
        return False
    try:
        return ast.literal_eval(text) == value
    except ValueError:
        return True  # a name of vLLM's own


def member_differences(name: str, theirs: dict[str, dict], ours: type, instance: object | None) -> list[str]:
    """What differs between the members of a class of vLLM's and of ours."""
    found = []
    for member, described in theirs.items():
        where, kind = f"{name}.{member}", described["kind"]
        static = inspect.getattr_static(ours, member, None)
        is_there = static is not None or (instance is not None and hasattr(instance, member))
        is_there |= member in getattr(ours, "__annotations__", {})
        if not is_there:
            found.append(f"{where}: missing")
        elif kind in ("method", "staticmethod", "classmethod"):
            if isinstance(static, property | functools.cached_property):
                found.append(f"{where}: a property, in vLLM a {kind}")
            else:
                found += differences(where, described["parameters"], getattr(ours, member))
        elif inspect.isfunction(static):
            found.append(f"{where}: a method, in vLLM a {kind}")
    return found


if __name__ == "__main__":
    FROZEN.write_text(_as_text(read(Path(sys.argv[1]))))
