"""``load_moe`` for every family: output of each block equals that of transformers, in every spelling of its experts."""

import json
import shutil
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.torch import load_file, save_file

import moe_jax
from moe_jax.inspection import inspect_checkpoint
from moe_jax.loading import CheckpointError
from moe_jax.models import FAMILIES, CausalLM, families, read_family
from moe_jax.models.families import _registry
from tests.support.cases.families import FAMILIES as WRITTEN
from tests.support.cases.families import WRAPPED, assert_rows_close, edit, load, tokens, unfused
from tests.support.checkpoints.writers import fused
from tests.support.refusals import refuses

GATED = ("qwen2_moe", "qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text")
# Published with a vision model -> the language model alone.


@pytest.fixture(scope="session")
def written(tmp_path_factory):
    """written(family) -> (directory, transformers' layers), made on first use."""
    made = {}

    def get(name):
        if name not in made:
            directory = tmp_path_factory.mktemp(name)
            model = (WRAPPED[name][0] if name in WRAPPED else WRITTEN[name].write)(directory)
            made[name] = directory, getattr(model.model, "language_model", model.model).layers
        return made[name]

    return get


@pytest.fixture
def copied(written, tmp_path):
    """A family's checkpoint to be changed."""

    def copy(name):
        directory, layers = written(name)
        return shutil.copytree(directory, tmp_path / "model"), layers

    return copy


def text_of(name):
    """The family in WRITTEN whose language model it is."""
    return WRAPPED[name][1] if name in WRAPPED else name


def leaves(block):
    return jax.tree.leaves(block.experts.weights.get_value())


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.sample(3)
def test_block_equals_transformers(written, name):
    family, (directory, layers) = WRITTEN[name], written(name)
    x = tokens()
    for index in family.moe_layers:  # every call compiles, so the others are compared by their weights
        block = load(directory, index)
        down = getattr(layers[index], family.block).experts.down_proj.detach().numpy()
        w2 = np.asarray(block.experts.weights.get_value().w2.data)
        assert np.array_equal(w2, down if w2.shape == down.shape else down.swapaxes(1, 2))
    assert_rows_close(block(jnp.asarray(x)), family.output(layers[index], x))
    dense = [index for index in range(len(layers)) if index not in family.moe_layers]
    for index in (*dense, len(layers), -1):
        kind = "is dense" if index in dense else "does not exist"
        with pytest.raises(ValueError, match=f"layer {index} {kind}; layers with experts: {family.moe_layers[0]}"):
            load(directory, index)


@pytest.mark.parametrize("name", WRAPPED)
def test_published_with_a_vision_model(written, name):
    """Text keys lie in text_config, names hold language_model, a vision model stands beside."""
    (directory, layers), text = written(name), WRITTEN[text_of(name)]
    x, last = tokens(), text.moe_layers[-1]
    assert_rows_close(load(directory, last)(jnp.asarray(x)), text.output(layers[last], x))
    assert inspect_checkpoint(directory).left_out
    if name == "llama4":
        refuses(ValueError, "layer 0 is dense; layers with experts: 1, 3", load, directory, 0)


@pytest.mark.parametrize("base_layer", [False, True])
@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.sample(3)
def test_every_spelling_is_the_same_layer(copied, name, base_layer):
    """Fused as per expert and the other way round, with LoRA's base_layer in each name or not."""
    directory, _ = copied(name)
    layer = WRITTEN[name].moe_layers[-1]
    before = leaves(load(directory, layer))

    def respell(tensors):
        tensors = unfused(name, tensors) if WRITTEN[name].is_fused else fused(tensors)
        if not base_layer:
            return tensors
        return {_with_base_layer(key) if f".{layer}." in key else key: value for key, value in tensors.items()}

    edit(directory, respell)
    after = leaves(load(directory, layer))
    assert len(before) == len(after) and all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))


def _with_base_layer(name):
    head, _, suffix = name.rpartition(".")
    is_wrapped = not name.endswith(("norm.weight", "e_score_correction_bias"))
    return f"{head}.base_layer.{suffix}" if is_wrapped else name


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.sample(2)
def test_names_as_models_are_held_in_memory(written, tmp_path, name):
    """A state_dict of transformers 5: all experts in one tensor, Mixtral's container and Granite's router renamed."""
    directory, layers = written(name)
    shutil.copy(directory / "config.json", tmp_path)
    state = {f"model.layers.{i}.{k}": v for i, layer in enumerate(layers) for k, v in layer.state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    for index in WRITTEN[name].moe_layers[:1]:
        saved, held = load(directory, index), load(tmp_path, index)
        assert all(np.array_equal(a, b) for a, b in zip(leaves(saved), leaves(held), strict=True))
        assert np.array_equal(saved.router.weight[...], held.router.weight[...])


def test_under_jit_with_hostile_tokens(written):
    """A block is an argument of a jitted function; no tokens, one token, and padding that holds NaN."""
    directory, layers = written("deepseek_v3")
    block, expected = load(directory, 2), WRITTEN["deepseek_v3"].output(layers[2], tokens())
    forward = jax.jit(lambda block, x, mask: block(x, token_mask=mask))
    for count in (0, 1, 9):
        y = forward(block, jnp.asarray(tokens()[:count]), jnp.ones(count, bool))
        assert y.shape == (count, 48)
        if count:
            assert_rows_close(y, expected[:count])
    mask = np.arange(9) % 3 != 1
    y = np.asarray(forward(block, jnp.asarray(np.where(mask[:, None], tokens(), np.nan)), jnp.asarray(mask)))
    assert_rows_close(y[mask], expected[mask])
    assert not y[~mask].any()


def test_reload_needs_the_correction_bias(written):
    """Experts of a loaded block take new weights under the same names; the bias that steers them is one of them."""
    directory, _ = written("deepseek_v3")
    experts = load(directory, 2).experts
    stored = {n: v.numpy() for n, v in load_file(directory / "model.safetensors").items() if ".layers.2.mlp." in n}
    pairs = {n: 2 * v for n, v in stored.items() if ".experts." in n or "correction" in n}
    before = experts.weights.get_value().w2.data
    bias = pairs.pop("model.layers.2.mlp.gate.e_score_correction_bias")
    refuses(ValueError, "missing: e_score_correction_bias", experts.reload_weights, pairs.items())
    assert (experts.weights.get_value().w2.data == before).all()
    experts.reload_weights((pairs | {"model.layers.2.mlp.gate.e_score_correction_bias": bias}).items())
    assert (experts.weights.get_value().w2.data == 2 * before).all()
    assert np.array_equal(experts.correction_bias.get_value(), bias)


@pytest.mark.parametrize("name", FAMILIES)
def test_inspection(written, name):
    directory, _ = written(name)
    report = inspect_checkpoint(directory)
    assert report.problems == () and report.family == name
    (run,) = report.expert_runs
    config = report.config
    assert run.layers == config.moe_layers == WRITTEN[text_of(name)].moe_layers
    assert bool(report.left_out) == (name in WRAPPED)
    parts = {part.name: part for part in report.parts}
    assert ("shared experts" in parts) == (config.shared_intermediate_size > 0)
    assert parts["routers"].num_tensors == len(run.layers) * (
        1 + config.has_router_bias + config.has_correction_bias + config.has_shared_expert_gate
    )
    text = report.render()
    assert ("behind a sigmoid gate" in text) == (name in GATED)
    cached = 40 if text_of(name) in ("deepseek_v32", "glm_moe_dsa") else 24
    assert (f"MLA: {cached} numbers cached per token" in text) == (config.mla is not None)


def test_inspection_states_the_routing(written):
    routing = {name: inspect_checkpoint(written(name)[0]).render() for name in ("deepseek_v3", "llama4_text")}
    assert "sigmoid, best 2 of 4 groups, correction bias, renormalized, scaled by 2.5" in routing["deepseek_v3"]
    assert "llama4, weight applied to the input" in routing["llama4_text"]


def drop(word):
    return lambda tensors: {name: value for name, value in tensors.items() if word not in name}


def put(name, value):
    return lambda tensors: tensors | {name: value(tensors)}


@pytest.mark.parametrize(
    "name, change, words",
    [
        ("qwen2_moe", drop("2.mlp.shared_expert_gate"), "missing: model.layers.2.mlp.shared_expert_gate.weight"),
        ("qwen2_moe", drop("2.mlp.shared_expert.up"), "missing: model.layers.2.mlp.shared_expert.up_proj.weight"),
        ("deepseek_v3", drop("e_score"), "missing: model.layers.2.mlp.gate.e_score_correction_bias"),
        ("gpt_oss", drop("0.mlp.router.bias"), "missing: model.layers.0.mlp.router.bias"),
        ("gpt_oss", drop("0.mlp.experts.down_proj_bias"), "missing: down_proj.bias of all 8 experts"),
        ("granitemoe", drop("0.block_sparse_moe.output"), "missing: output_linear.weight of all 8 experts"),
        ("llama4_text", drop("1.feed_forward.router"), "missing: model.layers.1.feed_forward.router.weight"),
        (
            "olmoe",
            put("model.layers.0.mlp.shared_expert.up_proj.weight", lambda t: t["model.layers.0.mlp.gate.weight"]),
            "unexpected: model.layers.0.mlp.shared_expert.up_proj.weight",
        ),
        (
            "deepseek_v2",
            put("model.layers.0.mlp.experts.0.up_proj.weight", lambda t: t["model.layers.1.mlp.gate.weight"]),
            "expert tensors in layers 0; config.json puts experts into layers 1-2",
        ),
        (
            "glm4_moe",
            put("model.layers.1.mlp.gate.e_score_correction_bias", lambda t: t["model.norm.weight"]),
            r"e_score_correction_bias: expected shape \(8,\) from config.json, found \(48,\)",
        ),
    ],
)
def test_what_a_block_lacks_is_named(copied, name, change, words):
    directory, _ = copied(name)
    edit(directory, change)
    refuses(CheckpointError, words, load, directory, WRITTEN[name].moe_layers[-1 if "2.mlp" in words else 0])


def test_split_as_if_stored_the_other_way_round(copied):
    """A writer that takes Llama-4's (in, out) for (out, in) makes matrices of shapes that no layer has."""
    directory, _ = copied("llama4_text")

    def split(tensors):
        wrong = drop(".experts.")(tensors)
        for layer in (1, 3):
            prefix = f"model.layers.{layer}.feed_forward.experts."
            for expert, matrix in enumerate(tensors[f"{prefix}gate_up_proj"]):
                wrong[f"{prefix}{expert}.gate_proj.weight"], wrong[f"{prefix}{expert}.up_proj.weight"] = matrix.chunk(2)
                wrong[f"{prefix}{expert}.down_proj.weight"] = tensors[f"{prefix}down_proj"][expert]
        return wrong

    edit(directory, split)
    refuses(CheckpointError, r"down_proj.weight.*expected shape \(48, 32\), found \(32, 48\)", load, directory, 1)


def test_layers_for_multi_token_prediction_are_left_alone(copied):
    """DeepSeek numbers them after the last layer, Qwen3-Next from 0 under a name of their own."""
    directory, layers = copied("qwen3_next")
    x, output = tokens(), WRITTEN["qwen3_next"].output
    edit(directory, lambda t: t | {f"mtp.{n.removeprefix('model.')}": v * 2 for n, v in t.items() if ".layers.0." in n})
    assert_rows_close(load(directory, 0)(jnp.asarray(x)), output(layers[0], x))
    assert inspect_checkpoint(directory).problems == ()


def test_layers_after_the_last(copied):
    directory, layers = copied("deepseek_v3")
    again = {"model.layers.3.eh_proj.weight": "model.norm.weight"}

    def add(tensors):
        again.update({n.replace(".2.", ".3.", 1): n for n in tensors if n.startswith("model.layers.2.")})
        return tensors | {new: tensors[old] * 2 for new, old in again.items()}

    edit(directory, add)
    x = tokens()
    assert_rows_close(load(directory, 2)(jnp.asarray(x)), WRITTEN["deepseek_v3"].output(layers[2], x))
    refuses(ValueError, "layer 3 does not exist; layers with experts: 2", load, directory, 3)


def test_correction_bias_in_bfloat16(copied):
    """Somebody cast the whole model; its values are then what they are."""
    import torch

    directory, _ = copied("glm4_moe")
    edit(directory, lambda t: {n: v.to(torch.bfloat16) if "correction" in n else v for n, v in t.items()})
    block = load(directory, 1)
    bias = block.experts.correction_bias.get_value()
    assert bias.dtype == jnp.float32 and (bias == bias.astype(jnp.bfloat16).astype(jnp.float32)).all()
    assert np.abs(bias).max() > 0.1


def test_online_quantization_and_half_precision(written):
    """The other arguments of load_moe, on a fused family: shared experts and router stay in 16 bits."""
    directory, layers = written("llama4_text")
    block = moe_jax.load_moe(directory, 1, quantize="int8_w8a16")
    assert block.experts.config.scheme.name == "int8_w8a16"
    assert block.shared_experts.gate_proj.weight.dtype == block.router.weight.dtype == jnp.bfloat16
    x = tokens()
    y = np.asarray(block(jnp.asarray(x, jnp.bfloat16)), np.float32)
    assert_rows_close(y, WRITTEN["llama4_text"].output(layers[1], x), 0.1)


def test_adapters_are_not_dropped(copied):
    """Weights that LoRA adds are no part of any layer here; leaving them out would be another model."""
    directory, _ = copied("olmoe")
    name = "model.layers.0.mlp.experts.1.up_proj.lora_A.weight"
    edit(directory, put(name, lambda t: t["model.layers.0.mlp.gate.weight"]))
    refuses(CheckpointError, f"unexpected: {name}", load, directory, 0)


@pytest.mark.parametrize("version, is_doubtful", [("0.12.2", True), ("0.17.1", True), ("0.18.0", False), (None, False)])
def test_gpt_oss_halves_that_cannot_be_told(copied, version, is_doubtful):
    """Older tools split interleaved columns in the middle; shapes do not show it, the version makes it likely."""
    directory, _ = copied("gpt_oss")
    linear = dict(targets=["re:.*nothing"], weights=dict(num_bits=8, type="float", strategy="channel"))
    stated = dict(quant_method="compressed-tensors", format="float-quantized", config_groups=dict(group_0=linear))
    edit(directory, lambda t: unfused("gpt_oss", t), quantization_config=stated | dict(version=version))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load(directory, 0)
    assert [str(w.message).count("took the first half") for w in caught] == [1] * is_doubtful


def test_the_family_file_shown_in_the_guide_is_the_package_s():
    root = Path(__file__).parents[3]
    shown = (root / "docs/models.md").read_text().partition("```python\n")[2].partition("```")[0]
    assert shown == (root / "moe_jax/models/families/minimax_m2.py").read_text()


def test_a_family_is_one_file(tmp_path, monkeypatch):
    """A file beside the others is found without a list to edit; its words decide, also those that mean the same."""
    source = (Path(families.__path__[0]) / "olmoe.py").read_text()
    source = source.replace('    model_type = "olmoe"', '    other_model_types = ("older",)\n    model_type = "olmoe"')
    (tmp_path / "newer.py").write_text(source.replace('"olmoe"', '"newer"'))
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(tmp_path)])
    found = {family.model_type: family for family in _registry._defined()}
    assert found.keys() - FAMILIES.keys() == {"newer"} and FAMILIES.keys() < found.keys()
    monkeypatch.setattr(_registry, "FAMILIES", found)
    config = json.loads((WRITTEN["olmoe"].write(tmp_path / "model") and tmp_path / "model/config.json").read_text())
    for model_type in ("newer", "older"):
        assert read_family(config | {"model_type": model_type})[0] is found["newer"]
    with pytest.raises(ValueError, match="architectures .'Olmo'. is not supported; supported: .*OlmoeForCausalLM"):
        read_family(config | {"model_type": "older", "architectures": ["Olmo"]})


def test_families_have_one_shape():
    """What a family file must define, so that adding one stays one file."""
    for model_type, family in FAMILIES.items():
        assert issubclass(family, CausalLM) and model_type == family.model_type
        assert family.architecture == family.__name__
        assert family.moe_module in ("mlp", "block_sparse_moe", "feed_forward") and callable(family.read_config)
