"""Each format through real vLLM: created, loaded, processed by our subclass, both applies; against float32."""

import ast
import re
from pathlib import Path

import pytest

pytest.importorskip("vllm")

import torch
import vllm

from tests.support.checkpoints.vllm_formats import FORMATS
from tests.support.vllm_layers import (
    computed_by_reference,
    errors_of_both_applies,
    heard,
    load_experts,
    make_layer,
    vllm_without_gpu,
    weights_of,
)
from tests.torch_bridge.vllm import layers
from torch_bridge.vllm import _formats

E, TOP_K, H, INTERMEDIATE = 4, 2, 256, 256
TOLERANCES = {16: 0.01, 8: 0.12}
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("name", FORMATS)
def test_layer_of_each_format(name, caplog, monkeypatch):
    computed_by_reference(monkeypatch)
    form = FORMATS[name]
    generator = torch.Generator().manual_seed(len(name))
    with vllm_without_gpu(), heard(caplog):
        layer = make_layer(
            form.config, num_experts=E, top_k=TOP_K, hidden_size=H, intermediate_size=INTERMEDIATE, **form.settings
        )
        method = layer.quant_method
        assert type(method).__name__ == form.method and hasattr(method, "moe_jax")
        values = load_experts(layer, form, generator, E, H, INTERMEDIATE)
        if not method.moe_jax.form.online:
            method.process_weights_after_loading(layer)
        assert "nothing was loaded" not in caplog.text
        experts = method.moe_jax.experts
        found13, found2 = map(torch.from_numpy, weights_of(experts))
        if method.moe_jax.form.online:
            assert (found13 - values.w13).norm() < 0.05 * values.w13.norm()
            assert (found2 - values.w2).norm() < 0.05 * values.w2.norm()
        else:
            torch.testing.assert_close(found13, values.w13, rtol=1e-6, atol=0)
            torch.testing.assert_close(found2, values.w2, rtol=1e-6, atol=0)
        errors = errors_of_both_applies(layer, generator, TOP_K, found13, found2, values.w13_bias, values.w2_bias)
        assert errors.max() < TOLERANCES[form.activations], errors


def test_gpt_oss_is_judged_with_the_config_of_its_model(tmp_path):
    """layers.py gives what vLLM's choice of a kernel asks for, which these surroundings answer for the other tests."""
    from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import select_mxfp4_moe_backend

    form = FORMATS["gpt_oss"]
    sizes = dict(num_experts=E, top_k=TOP_K, hidden_size=H, intermediate_size=INTERMEDIATE)
    with vllm_without_gpu() as config:
        layers.set_model_config("gpt_oss", tmp_path)
        layer = make_layer(form.config, plugin=False, **sizes, **form.settings)
        assert select_mxfp4_moe_backend(layer.moe_config)[0].value == "CPU"
        assert config.model_config.hf_config.model_type == "gpt_oss"
        layers.set_model_config("bf16", tmp_path)
        assert config.model_config is None


# Bases that vLLM makes no layer with, and the one that it wraps around its own methods, never around ours.
NO_METHODS = {
    *("FusedMoEMethodBase", "OnlineMoEMethodBase", "_Fp8OnlineMoEBase", "CompressedTensorsMoEMethod", "QuarkMoEMethod"),
    "FusedMoEModularMethod",
}


def methods_of_vllm():
    """The names of all methods for experts in vLLM's sources, which need not be importable here."""
    bases = {}
    for path in Path(vllm.__file__).parent.rglob("*.py"):
        text = path.read_text()
        if "MoE" in text:
            classes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef))
            bases |= {node.name: [ast.unparse(base).split(".")[-1] for base in node.bases] for node in classes}
    found, known = {"FusedMoEMethodBase"}, 0
    while len(found) > known:
        known = len(found)
        found |= {name for name, of in bases.items() if found & set(of)}
    return found - NO_METHODS


def test_no_method_of_vllm_is_forgotten():
    """Each is taken, and then some format loads it, or left; the documentation has all of them under what they are."""
    methods, taken = methods_of_vllm(), set(_formats.FORMATS)
    assert taken <= methods and {form.method for form in FORMATS.values()} == taken
    section = Path("docs/parity.md").read_text().split("## Inside vLLM")[1].split("\n## ")[0]
    documented = {"taken": set(), "left": set()}
    for line in section.splitlines():
        if line.startswith("| `"):
            _, names, _, reason, _ = line.split("|")
            documented["left" if reason.strip().startswith("always") else "taken"] |= set(re.findall(r"`(\w+)`", names))
    assert documented == dict(taken=taken, left=methods - taken)


@pytest.mark.parametrize("name", sorted(methods_of_vllm() - set(_formats.FORMATS)))
def test_other_methods_are_left_in_one_line(name, caplog):
    """The very object that vLLM made stays, whatever it is."""
    from torch_bridge.vllm._method import taken

    sizes = dict(num_experts=E, top_k=TOP_K, hidden_size=H, intermediate_size=INTERMEDIATE)
    with vllm_without_gpu(), heard(caplog):
        layer, method = make_layer(None, **sizes), type(name, (), {})()
        assert taken(method, layer, "model.layers.0.mlp.experts") is method
    [line] = [record.message for record in caplog.records]
    assert (
        line == f"moe_jax leaves model.layers.0.mlp.experts to vLLM's {name}: no kernel is known to read its parameters"
    )


def test_a_layer_of_another_checkpoint_is_vllms():
    """From the checkpoint's config to a layer whose parameters vLLM's own method made."""
    int8 = dict(dtype="int8", qscheme="per_channel", symmetric=True)
    config = dict(
        quant_method="quark",
        export=dict(kv_cache_group=[], pack_method="reorder"),
        exclude=[],
        layer_quant_config={},
        layer_type_quant_config={},
        global_quant_config=dict(
            weight=int8 | dict(is_dynamic=False),
            input_tensors=int8 | dict(is_dynamic=True),
            output_tensors=None,
            bias=None,
        ),
    )
    with vllm_without_gpu():
        layer = make_layer(config, num_experts=E, top_k=TOP_K, hidden_size=H, intermediate_size=INTERMEDIATE)
    assert type(layer.quant_method).__name__ == "QuarkW8A8Int8MoEMethod" and hasattr(layer, "w13_weight_scale")
    assert not hasattr(layer.quant_method, "moe_jax")
