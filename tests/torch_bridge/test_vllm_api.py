"""Our classes and functions beside vLLM 0.24's: members, parameters, their order and defaults.

vllm_api.json is made from vLLM's sources: ``python -m tests.support.vllm_api SOURCES``. What differs is named here with
its reason; a difference that is gone has to leave the list.
"""

import ast
import json
from pathlib import Path

import pytest

import torch_bridge
from tests.support.vllm_api import FROZEN, differences, member_differences, members_of

API = json.loads(FROZEN.read_text())
FP8, INT4 = {"num_bits": 8, "type": "float"}, {"num_bits": 4, "type": "int"}
CHANNEL, TOKEN = {"strategy": "channel"}, {"strategy": "token", "dynamic": True}
INSTANCES = {
    "UnquantizedFusedMoEMethod": lambda ours: ours(),
    "OnlineMoEMethodBase": lambda ours: ours(scheme="fp8_channel"),
    "Int8OnlineMoEMethod": lambda ours: ours(),
    "Fp8MoEMethod": lambda ours: ours({"quant_method": "fp8", "activation_scheme": "dynamic"}),
    "CompressedTensorsW8A8Fp8MoEMethod": lambda ours: ours(FP8 | CHANNEL, FP8 | TOKEN),
    "CompressedTensorsW4A8Int8MoEMethod": lambda ours: ours(INT4 | CHANNEL, {"num_bits": 8, "type": "int"} | TOKEN),
    "CompressedTensorsW4A4Nvfp4MoEMethod": lambda ours: ours(),
    "CompressedTensorsWNA16MarlinMoEMethod": lambda ours: ours(INT4 | CHANNEL, None),
    "FusedMoEMethodBase": lambda ours: torch_bridge.UnquantizedFusedMoEMethod(),
    "GroupShape": lambda ours: ours(1, 128),
    "RoutedExperts": lambda ours: ours(4, 2, 32, 32),
    "MoERunnerInterface": lambda ours: ours(4, 2, 32, 32),
    "FusedMoEConfig": lambda ours: torch_bridge.FusedMoE(4, 2, 32, 32).moe_config,
    "FusedMoEParallelConfig": lambda ours: ours.make_no_parallel(),
    "FusedMoEQuantConfig": lambda ours: ours.make(),
    "FusedMoEQuantDesc": lambda ours: ours(),
}
_KERNEL = "vLLM's choice of a kernel; moe_jax chooses per call"
_TRANSPORT = "a table of vLLM's DeepEP transport"
_OWN = "of this library"
_EARLIER = "of the class FusedMoE of vLLM 0.16 to 0.19, which this layer also takes the place of"
_RUNNER = "vLLM's routers, runners and containers; this layer is all three"
# Why each is otherwise. "*.member" stands for the member of every class.
EXCEPTIONS = {
    "*.embedding: missing": "of linear and embedding layers, not of experts",
    "*.tie_weights: missing": "of linear and embedding layers, not of experts",
    "*.experts_cls: missing": _KERNEL,
    "*.fp8_backend: missing": _KERNEL,
    "*.int8_backend: missing": _KERNEL,
    "*.nvfp4_backend: missing": _KERNEL,
    "*.wna16_backend: missing": _KERNEL,
    "*.unquantized_backend: missing": _KERNEL,
    "*.backend: missing": _KERNEL,
    "*.forward_native: missing": _KERNEL,
    "*.forward_cuda: missing": _KERNEL,
    "*.marlin_input_dtype: missing": _KERNEL,
    "*.quant_type: missing": "a scalar type of vLLM's kernels; the scheme says it",
    "*.get_moe_method: missing": "reads a CompressedTensorsConfig of vLLM; quantization_config dicts are read here",
    "MoEActivation.custom_op_name: missing": "names vLLM's CUDA operators",
    "FusedMoEQuantConfig.w1_precision: missing": "of vLLM's Triton kernels",
    "FusedMoEQuantConfig.w2_precision: missing": "of vLLM's Triton kernels",
    "FusedMoEQuantConfig.ocp_mx_scheme: missing": "of vLLM's emulation of MX formats",
    "FusedMoEQuantConfig.config_name: missing": "names vLLM's files of tuned kernels",
    "FusedMoEParallelConfig.flatten_tp_across_dp_and_pcp: missing": "reads vLLM's process groups",
    "FusedMoEParallelConfig.make: missing": "reads vLLM's process groups",
    "OnlineMoEMethodBase.__init__: scheme is no parameter of vLLM's": _OWN,
    "Int8OnlineMoEMethod.__init__: scheme is no parameter of vLLM's": "also takes int8 activations",
    "determine_expert_map: no parameter num_fused_shared_experts": "fuses shared experts on ROCm",
    "determine_expert_map: no parameter return_expert_mask": "of kernels for ROCm",
    "FusedMoE: parameters in another order": _EARLIER,
    "FusedMoE: reduce_results is no parameter of vLLM's": _EARLIER,
    "FusedMoE: ep_size is no parameter of vLLM's": _EARLIER,
    "FusedMoE: is_act_and_mul is no parameter of vLLM's": _EARLIER,
    "RoutedExperts.expert_map_manager: missing": _RUNNER,
    "RoutedExperts.update_expert_map_info: missing": _RUNNER,
    "RoutedExperts.forward_modular: missing": "its runner's way to quant_method.apply, which forward calls here",
    "RoutedExperts.forward_monolithic: missing": "its runner's way to quant_method.apply_monolithic",
    "MoERunnerInterface.maybe_init_modular_kernel: missing": _KERNEL,
    "MoERunnerInterface.layer_id: missing": "of vLLM's capture of chosen experts",
    "MoERunnerInterface.is_monolithic: missing": "quant_method says it",
    "MoERunnerInterface.expert_global_to_physical: missing": _TRANSPORT,
    "MoERunnerInterface.expert_physical_to_global: missing": _TRANSPORT,
    "MoERunnerInterface.expert_local_to_global: missing": _TRANSPORT,
    "RoutedExperts.rocm_aiter_fmoe_enabled: missing": "of kernels for ROCm",
    "RoutedExperts.make_expert_params_mapping: routed_experts_prefix is '' by default, 'routed_experts' in vLLM": (
        _RUNNER
    ),
    **{
        f"FusedMoE: {name} is no parameter of vLLM's": _OWN
        for name in "online torch_kernels tp_rank ep_rank process_group has_partial_shared_experts routing_framework "
        "expert_placement_strategy implementation device".split()
    },
    **{
        f"FusedMoE: no parameter {name}": _RUNNER
        for name in "router runner_cls runner_args routed_experts_cls routed_experts_args".split()
    },
}


LAYERS = ("RoutedExperts", "MoERunnerInterface")  # two objects of vLLM that one layer here stands for


def ours_of(name):
    if name in LAYERS:
        return torch_bridge.FusedMoE
    return getattr(torch_bridge, name, None)


def is_excepted(text):
    owner, _, rest = text.partition(".")
    return text in EXCEPTIONS or f"*.{rest}" in EXCEPTIONS


MIRRORED = [name for name in API["classes"] if isinstance(ours_of(name), type)]


def found_differences():
    for name in MIRRORED:
        instance = INSTANCES[name](ours_of(name)) if name in INSTANCES else None
        members = dict(API["classes"][name])
        if name in LAYERS:  # the constructor and the call are those of FusedMoE
            members = {member: what for member, what in members.items() if member not in ("__init__", "forward")}
        yield from member_differences(name, members, ours_of(name), instance)
    for name, parameters in API["functions"].items():
        if ours_of(name) is not None:
            yield from differences(name, parameters, ours_of(name))


def test_differences_are_those_that_are_named():
    found = list(found_differences())
    assert [text for text in found if not is_excepted(text)] == []
    used = set(found) | {f"*.{text.partition('.')[2]}" for text in found}
    assert [text for text in EXCEPTIONS if text not in used] == []


PLUGIN = Path(torch_bridge.__file__).parent / "vllm"
OVERRIDES = [("_method.py", "TakenMixin", "FusedMoEMethodBase"), ("_config.py", "MoeJaxConfig", "QuantizationConfig")]


def override_differences(node, theirs):
    """What a class of the plugin, as text, overrides otherwise than vLLM has it. Attributes of its own do not count."""
    for member, described in members_of(node, {}).items():
        if member == "__init__" or (described["kind"] == "attribute" and member not in theirs):
            continue
        if member not in theirs:
            yield f"{member}: not in vLLM"
        elif "parameters" in described:
            names, expected = ([name for name, _ in each.get("parameters", ())] for each in (described, theirs[member]))
            named = [name for name in names if not name.startswith("*")]
            takes_all = len(named) == len(expected) or len(named) < len(names)
            if theirs[member]["kind"] != described["kind"] or named != expected[: len(named)] or not takes_all:
                yield f"{member}: {described['kind']} of {names}, in vLLM {theirs[member]['kind']} of {expected}"


@pytest.mark.parametrize("file, ours, theirs", OVERRIDES, ids=[ours for _, ours, _ in OVERRIDES])
def test_what_the_plugin_overrides(file, ours, theirs):
    """vLLM is not installed here: the plugin is read, as vLLM's sources were."""
    nodes = ast.parse((PLUGIN / file).read_text()).body
    [node] = [node for node in nodes if isinstance(node, ast.ClassDef) and node.name == ours]
    assert list(override_differences(node, API["classes"][theirs])) == []


def test_other_overrides_are_found():
    text = (
        "class A:\n def apply(self, x, layer): ...\n def gone(self): ...\n @property\n def is_on(self): ...\n own: int"
    )
    theirs = {name: {"kind": "method", "parameters": [["layer", None], ["x", None]]} for name in ("apply", "other")}
    [node] = ast.parse(text).body
    assert [line.split(":")[0] for line in override_differences(node, theirs)] == ["apply", "gone", "is_on"]


def test_differences_are_found():
    """The judge: another order, default, kind, and what is missing or more."""
    theirs = [["layer", None], ["x", None], ["scale", "1.0"]]
    assert differences("f", theirs, lambda layer, x, scale=1.0: None) == []
    assert differences("f", theirs, lambda layer, x=None, scale=1.0: None) == []
    for function, text in (
        (lambda x, layer, scale=1.0: None, "parameters in another order"),
        (lambda layer, x, scale=2.0: None, "scale is 2.0 by default, 1.0 in vLLM"),
        (lambda layer, scale=1.0: None, "no parameter x"),
        (lambda layer, x, scale=1.0, more=3: None, "more is no parameter of vLLM's"),
    ):
        assert differences("f", theirs, function) == [f"f: {text}"]
    described = {"kind": "method", "parameters": []}

    class Ours:
        is_there = property(lambda self: True)

        def called(self):
            """A method."""

    found = member_differences(
        "C", {"gone": described, "is_there": described, "called": {"kind": "property"}}, Ours, None
    )
    assert found == [
        "C.gone: missing",
        "C.is_there: a property, in vLLM a method",
        "C.called: a method, in vLLM a property",
    ]
