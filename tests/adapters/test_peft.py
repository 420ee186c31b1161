"""Adapters on disk: PEFT's formulas applied to transformers' weights are the judge, and PEFT where it is installed."""

import copy
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from safetensors.numpy import load_file, save_file

import moe_jax
from moe_jax.nn._lora import held_expert_lora
from tests.adapters.test_lora_of_models import adapted, filled, load
from tests.support.cases.models import assert_logits_close
from tests.support.refusals import refuses

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."
RANK, ALPHA = 4, 8
FAMILIES = ("qwen3", "mixtral", "gpt_oss", "granite", "deepseek_v2", "phimoe", "minimax", "qwen3_next")


def with_sums(torch_model, directory):
    """transformers' model with ``alpha / r * B A`` added to its weights, by the formulas of PEFT's two layers."""
    model, tensors = copy.deepcopy(torch_model), load_file(directory / WEIGHTS)
    config = json.loads((directory / CONFIG).read_text())
    scale, parameters = config["lora_alpha"] / config["r"], dict(model.named_parameters())
    stated = [name.rpartition(".")[2] for name in config["target_parameters"] or ()]
    names = {name.removeprefix(PREFIX).removesuffix(".lora_A.weight") for name in tensors if "lora_A" in name}
    for name in names:
        a, b = (torch.tensor(tensors[f"{PREFIX}{name}.lora_{part}.weight"]).double() for part in "AB")
        if f"{name}.weight" in parameters:
            target, delta = parameters[f"{name}.weight"], b @ a
        else:
            is_inner = name.endswith("base_layer") or (len(stated) == 1 and stated == ["gate_up_proj"])
            module = name.removesuffix(".base_layer")
            target = parameters[f"{module}.{'gate_up_proj' if is_inner else 'down_proj'}"]
            e = target.shape[0]
            a, b = a.reshape(e, -1, a.shape[1]), b.reshape(b.shape[0], -1, e)
            delta = torch.einsum("ore,eri->eoi", b, a)
            if model.get_submodule(module).is_transposed:
                delta = delta.swapaxes(1, 2)
        with torch.no_grad():
            target.add_((scale * delta).to(target.dtype))
    return model


def torch_logits(model, ids):
    with torch.no_grad():
        return model(torch.tensor(ids)).logits.float().numpy()


@pytest.fixture
def peft():
    return pytest.importorskip("peft")


@pytest.mark.parametrize("targets", [("w13", "w2", "attention"), ("w13",), ("w2", "o_proj")], ids=lambda t: "-".join(t))
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.sample(11)
def test_files_mean_what_the_model_computes(case, prompt, tmp_path, name, targets):
    base, ids = case(name), prompt(2, 40)
    model = filled(adapted(load(base.directory), targets), size=0.1)
    moe_jax.save_lora(model, tmp_path, base_model="org/name")
    y = np.asarray(model.score(ids))
    assert np.abs(y - base.torch_logits(ids)).max() > 0.02 * np.ptp(y)
    assert_logits_close(y, torch_logits(with_sums(base.torch_model, tmp_path), ids), 3e-5)
    again = moe_jax.load_lora(load(base.directory), tmp_path)
    np.testing.assert_array_equal(again.score(ids), y)
    stated = json.loads((tmp_path / CONFIG).read_text())
    assert (stated["r"], stated["lora_alpha"], stated["base_model_name_or_path"]) == (RANK, ALPHA, "org/name")


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.sample(6)
def test_peft_reads_what_is_saved(case, prompt, tmp_path, peft, name):
    base, ids = case(name), prompt(2, 40)
    model = filled(adapted(load(base.directory)), size=0.1)
    moe_jax.save_lora(model, tmp_path)
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(base.torch_model), tmp_path).eval()
    assert_logits_close(model.score(ids), torch_logits(theirs, ids), 3e-5)


@pytest.mark.parametrize("use_rslora", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.sample(5)
def test_what_peft_saves_is_read(case, prompt, tmp_path, peft, name, use_rslora):
    base, ids = case(name), prompt(2, 40)
    module = "block_sparse_moe" if name == "granite" else "mlp"
    projections = (
        ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa"] if name == "deepseek_v2" else ["q_proj", "k_proj", "v_proj"]
    )
    config = peft.LoraConfig(
        r=3,
        lora_alpha=5,
        use_rslora=use_rslora,
        target_modules=[*projections, "o_proj"],
        target_parameters=[f"{module}.experts.gate_up_proj", f"{module}.experts.down_proj"],
        init_lora_weights=False,
    )
    torch.manual_seed(0)
    theirs = peft.get_peft_model(copy.deepcopy(base.torch_model), config).eval()
    theirs.save_pretrained(tmp_path)
    model = moe_jax.load_lora(load(base.directory), tmp_path)
    want = torch_logits(theirs, ids)
    assert np.abs(want - base.torch_logits(ids)).max() > 0.02 * np.ptp(want)
    assert_logits_close(model.score(ids), want, 3e-5)


def with_own_a(model):
    """Gate and up of every expert have an A of their own, as adapters of transformers 4 have them."""
    rng = np.random.default_rng(4)
    for block in model.moe_blocks():
        config = block.experts.config
        e, h, i = config.num_experts, config.hidden_size, config.intermediate_size
        shapes = dict(w13_a=(e, 2, RANK, h), w13_b=(e, 2, i, RANK), w2_a=(e, RANK, i), w2_b=(e, h, RANK))
        arrays = {name: jnp.asarray(rng.standard_normal(shape) * 0.15, jnp.float32) for name, shape in shapes.items()}
        block.experts.set_lora(held_expert_lora(arrays, config, None, None, ranks=(RANK,), alphas=(float(ALPHA),)))
    return model


@pytest.mark.parametrize("name", ["mixtral", "qwen3"])
@pytest.mark.sample(2)
def test_names_of_each_expert(case, prompt, tmp_path, name):
    base, ids = case(name), prompt(2, 40)
    model = with_own_a(adapted(load(base.directory), "attention"))
    moe_jax.save_lora(model, tmp_path)
    names = load_file(tmp_path / WEIGHTS)
    spelled = dict(qwen3="mlp.experts.3.up_proj", mixtral="block_sparse_moe.experts.3.w3")[name]
    assert names[f"{PREFIX}model.layers.1.{spelled}.lora_A.weight"].shape == (RANK, 64)
    y = np.asarray(model.score(ids))
    np.testing.assert_array_equal(moe_jax.load_lora(load(base.directory), tmp_path).score(ids), y)


@pytest.mark.parametrize("name", ["qwen3", "mixtral"])
def test_peft_reads_names_of_each_expert(case, prompt, tmp_path, peft, name):
    base, ids = case(name), prompt(2, 40)
    model = with_own_a(adapted(load(base.directory), "attention"))
    moe_jax.save_lora(model, tmp_path)
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(base.torch_model), tmp_path).eval()
    assert_logits_close(model.score(ids), torch_logits(theirs, ids), 3e-5)


@pytest.mark.slow
@pytest.mark.parametrize("quantize", ["w4a16_g32", None])
def test_quantized_models_over_a_mesh(case, prompt, tmp_path, quantize):
    """Saved from a mesh, with one A for all experts, and read on one device."""
    base, ids = case("qwen3"), prompt(2, 40)
    mesh = jax.make_mesh((2, 2), ("expert", "tensor"))
    model = filled(adapted(load(base.directory, mesh=mesh, quantize=quantize), share_a=True))
    moe_jax.save_lora(model, tmp_path)
    again = moe_jax.load_lora(load(base.directory, quantize=quantize), tmp_path)
    assert_logits_close(again.score(ids), np.asarray(model.score(ids)), 1e-4)
    spread = moe_jax.load_lora(load(base.directory, mesh=mesh, quantize=quantize), tmp_path)
    assert spread.moe_blocks()[0].experts.lora.w13_b.get_value().sharding.spec[:3] == ("expert", None, "tensor")
    assert_logits_close(spread.score(ids), np.asarray(model.score(ids)), 1e-4)


def test_bfloat16(case, tmp_path):
    model = filled(adapted(load(case("qwen3").directory), dtype=jnp.bfloat16))
    moe_jax.save_lora(model, tmp_path)
    again = moe_jax.load_lora(load(case("qwen3").directory), tmp_path)
    states = (nnx.to_flat_state(nnx.state(one, moe_jax.LoRAParam)) for one in (model, again))
    for (_, ours), (_, theirs) in zip(*states, strict=True):
        np.testing.assert_array_equal(ours.get_value(), theirs.get_value())
        assert theirs.get_value().dtype == ours.get_value().dtype


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("where", ["w13_b", "q_proj"])
def test_adapters_that_diverged_are_not_written(case, tmp_path, where, bad):
    """Not over good files either: load_lora would refuse what replaced them."""
    model = filled(adapted(load(case("qwen3").directory)))
    moe_jax.save_lora(model, tmp_path / "good", base_model=tmp_path)
    layer = model.layers[0]
    array = layer.self_attn.q_proj.lora.a if where == "q_proj" else layer.mlp.experts.lora.w13_b
    array[...] = array[...].at[(-1,) * array.ndim].set(bad)
    before = {path.name: path.read_bytes() for path in (tmp_path / "good").iterdir()}
    module = "self_attn.q_proj.lora_A" if where == "q_proj" else "mlp.experts.base_layer.lora_B"
    for directory in ("good", "new"):
        refuses(ValueError, rf"{module}\.weight: adapters with NaN", moe_jax.save_lora, model, tmp_path / directory)
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "good").iterdir()}
    assert json.loads(before["adapter_config.json"])["base_model_name_or_path"] == str(tmp_path)
    assert not (tmp_path / "new").exists()


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(case, tmp_path):
    """(model without adapters, directory with adapters for it)."""
    moe_jax.save_lora(filled(adapted(load(case("qwen3").directory))), tmp_path)
    return load(case("qwen3").directory), tmp_path


def rewrite(directory, change):
    tensors = load_file(directory / WEIGHTS)
    change(tensors)
    save_file(tensors, directory / WEIGHTS)


def reconfigure(directory, **settings):
    config = json.loads((directory / CONFIG).read_text())
    (directory / CONFIG).write_text(json.dumps(config | settings))


SETTINGS = {
    "another method": (dict(peft_type="IA3"), NotImplementedError, "peft_type is 'IA3', expected 'LORA'"),
    "rank 0": (dict(r=0), ValueError, "r is 0, expected an integer of at least 1"),
    "alpha": (dict(lora_alpha=None), ValueError, "lora_alpha is None, expected a number above 0"),
    "large alpha": (dict(lora_alpha=1e39), ValueError, r"lora_alpha is 1e\+39, above the largest float32"),
    "endless alpha": (dict(lora_alpha=10**400), ValueError, "lora_alpha is 1000.*, above the largest float32"),
    "no boolean": (dict(use_rslora="false"), ValueError, "use_rslora is 'false', expected true or false"),
    "parameters": (dict(target_parameters=[3]), ValueError, r"target_parameters is \[3\], expected a list of strings"),
    "dora": (dict(use_dora=True), NotImplementedError, "use_dora=True is not built"),
    "bias": (dict(bias="all"), NotImplementedError, "bias is 'all', which is not built"),
    "ranks": (dict(rank_pattern={"q_proj": 8}), NotImplementedError, "rank_pattern={'q_proj': 8} is not built"),
    "another rank": (dict(r=8), ValueError, "an adapter of another model or rank"),
    "weights that were changed": (
        dict(init_lora_weights="pissa_niter_4"),
        NotImplementedError,
        "weights that PEFT has",
    ),
    "weights changed by OLoRA": (dict(init_lora_weights="OLoRA"), NotImplementedError, "weights that PEFT has changed"),
    "whole modules": (dict(modules_to_save=["lm_head"]), NotImplementedError, r"modules_to_save=\['lm_head'\]"),
}


@pytest.mark.parametrize("case_name", SETTINGS)
def test_settings_that_are_refused(saved, case_name):
    model, directory = saved
    settings, error, text = SETTINGS[case_name]
    reconfigure(directory, **settings)
    refuses(error, text, moe_jax.load_lora, model, directory)
    assert not nnx.state(model, moe_jax.LoRAParam)


def test_tensors_that_are_refused(saved):
    model, directory = saved
    good = (directory / WEIGHTS).read_bytes()
    query = f"{PREFIX}model.layers.0.self_attn.q_proj.lora_A.weight"

    def poison(tensors):
        tensors[query] = np.full_like(tensors[query], np.nan)

    def renamed(old, new):
        return lambda tensors: tensors.update({new: tensors.pop(old)})

    wrong: dict[str, Any] = {
        "q_proj.lora_A.weight holds NaN or infinity; the file is damaged": poison,
        "q_proj has lora_B alone, expected A and B": lambda tensors: tensors.pop(query),
        "q_proj.lora_magnitude_vector is neither": renamed(
            query, query.replace("lora_A.weight", "lora_magnitude_vector")
        ),
        "layers.7.self_attn.q_proj.*a Qwen3MoeForCausalLM has no such weight": lambda tensors: [
            tensors.update({name.replace("layers.0", "layers.7"): tensors.pop(name)})
            for name in list(tensors)
            if "0.self_attn.q" in name
        ],
    }
    for text, change in wrong.items():
        (directory / WEIGHTS).write_bytes(good)
        rewrite(directory, change)
        error = NotImplementedError if "neither" in text else ValueError
        refuses(error, text, moe_jax.load_lora, model, directory)
        assert not nnx.state(model, moe_jax.LoRAParam)
    (directory / WEIGHTS).write_bytes(good[:-9])
    refuses(ValueError, WEIGHTS, moe_jax.load_lora, model, directory)
    (directory / CONFIG).unlink()
    refuses(ValueError, CONFIG, moe_jax.load_lora, model, directory)


LAYERS_STATED: dict[str, dict[str, Any]] = {
    "by number": dict(layers_to_transform=[0]),
    "by one number": dict(layers_to_transform=0),
    "by pattern": dict(
        target_modules=r".*\.layers\.[0]\..*_proj", target_parameters=["layers.0.mlp.experts.down_proj"]
    ),
    "by name": dict(
        target_modules=[f"layers.0.self_attn.{name}_proj" for name in "qkvo"],
        target_parameters=["layers.0.mlp.experts.gate_up_proj", "layers.0.mlp.experts.down_proj"],
    ),
    "by exclusion": dict(exclude_modules=r"model\.layers\.1\..*"),
}
GATE_AND_UP = dict(target_parameters=["mlp.experts.gate_up_proj"])
NOT_STATED: dict[str, tuple[dict[str, Any], str]] = {
    "of other modules": (dict(exclude_modules=["lm_head"]), "has .* and not model.layers.1"),
    "no layers": (dict(layers_to_transform=[]), "has .* and not model.layers.1"),
    "both layers": (dict(layers_to_transform=[0, 1]), "has .* and not model.layers.1"),
    "pattern of all": (
        dict(target_modules=r".*\.layers\.[0-9]+\..*_proj", **GATE_AND_UP),
        "has .* and not model.layers.1",
    ),
    "no pattern": (dict(target_modules="(", **GATE_AND_UP), "target_modules: .*not a valid regular expression"),
    "endless pattern": (dict(target_modules="(.+)+x", **GATE_AND_UP), "target_modules: .*could take too long"),
    "no number": (dict(layers_to_transform="0"), "layers_to_transform is '0', expected an integer or a list"),
    "no list": (dict(exclude_modules={"a": 1}), "exclude_modules is {'a': 1}, expected a string or a list of strings"),
}


@pytest.mark.parametrize(
    ("left_out", "kind"), [("self_attn.q_proj", "self_attn.q_proj"), ("mlp.experts", "mlp.experts.w13")]
)
def test_adapters_of_fewer_layers_are_refused_unless_they_say_so(saved, left_out, kind):
    """A model of fewer layers has the same names: what is above them would stay without an adapter."""
    model, directory = saved
    rewrite(directory, lambda tensors: [tensors.pop(name) for name in list(tensors) if f"layers.1.{left_out}" in name])
    text = rf"has {kind} of 1 layers and not model\.layers\.1\.{kind}.*, which {CONFIG} names as well"
    refuses(ValueError, text, moe_jax.load_lora, model, directory)
    reconfigure(directory, target_modules="all-linear")
    refuses(ValueError, text, moe_jax.load_lora, model, {"one": directory, "same": directory})
    assert not nnx.state(model, moe_jax.LoRAParam)


@pytest.mark.parametrize("how", NOT_STATED)
def test_settings_that_leave_out_no_layer_do_not_excuse_one(saved, how):
    model, directory = saved
    rewrite(directory, lambda tensors: [tensors.pop(name) for name in list(tensors) if "layers.1." in name])
    settings, text = NOT_STATED[how]
    reconfigure(directory, **settings)
    refuses(ValueError, text, moe_jax.load_lora, model, directory)
    assert not nnx.state(model, moe_jax.LoRAParam)


@pytest.mark.parametrize("source", [None, ["here"], {"one": 3}])
def test_what_is_no_directory(saved, source):
    model, _ = saved
    refuses(TypeError, "expected a directory, or a mapping of names to directories", moe_jax.load_lora, model, source)


def test_layers_of_adapters_that_name_each_expert(case, tmp_path):
    moe_jax.save_lora(with_own_a(load(case("mixtral").directory)), tmp_path)
    rewrite(tmp_path, lambda tensors: [tensors.pop(name) for name in list(tensors) if "layers.1." in name])
    model = load(case("mixtral").directory)
    reconfigure(tmp_path, target_modules=["w1", "w2", "w3"])
    refuses(ValueError, "of 1 layers and not model.layers.1", moe_jax.load_lora, model, tmp_path)
    reconfigure(tmp_path, target_modules=r".*layers\.0\.block_sparse_moe.*w[123]")
    moe_jax.load_lora(model, tmp_path)
    assert [block.experts.lora is None for block in model.moe_blocks()] == [False, True]


@pytest.mark.parametrize("how", LAYERS_STATED)
def test_adapters_of_stated_layers_are_read(saved, how):
    model, directory = saved
    rewrite(directory, lambda tensors: [tensors.pop(name) for name in list(tensors) if "layers.1." in name])
    reconfigure(directory, **LAYERS_STATED[how])
    moe_jax.load_lora(model, directory)
    assert [layer.mlp.experts.lora is None for layer in model.layers] == [False, True]
    assert [layer.self_attn.q_proj.lora is None for layer in model.layers] == [False, True]


def test_a_parameter_may_be_named_alone(case, prompt, tmp_path, peft):
    base, ids = case("qwen3"), prompt(2, 40)
    config = peft.LoraConfig(r=2, target_modules=[], target_parameters=["gate_up_proj"], init_lora_weights=False)
    theirs = peft.get_peft_model(copy.deepcopy(base.torch_model), config).eval()
    theirs.save_pretrained(tmp_path)
    assert_logits_close(moe_jax.load_lora(load(base.directory), tmp_path).score(ids), torch_logits(theirs, ids), 3e-5)


@pytest.mark.parametrize("name", ["qwen3", "granite"])
@pytest.mark.filterwarnings("error:Found missing adapter keys")
def test_adapters_of_some_layers_come_back_and_are_named_for_peft(case, prompt, tmp_path, peft, name):
    """Experts of the first layer alone, only w2 in the second."""
    base, ids = case(name), prompt(2, 40)
    model = load(base.directory)
    for layer, targets in zip(model.moe_blocks(), (("w13", "w2"), ("w2",)), strict=False):
        moe_jax.lora(layer, RANK, ALPHA, targets, rngs=nnx.Rngs(1))
    moe_jax.save_lora(filled(model, size=0.1), tmp_path)
    module = "block_sparse_moe" if name == "granite" else "mlp"
    assert json.loads((tmp_path / CONFIG).read_text())["target_parameters"] == [
        f"model.layers.{index}.{module}.experts.{word}_proj"
        for index, word in ((0, "down"), (0, "gate_up"), (1, "down"))
    ]
    y = np.asarray(model.score(ids))
    np.testing.assert_array_equal(moe_jax.load_lora(load(base.directory), tmp_path).score(ids), y)
    theirs = peft.PeftModel.from_pretrained(copy.deepcopy(base.torch_model), tmp_path).eval()
    assert_logits_close(y, torch_logits(theirs, ids), 3e-5)


def test_weights_that_are_there_twice_are_refused(case, tmp_path):
    moe_jax.save_lora(with_own_a(load(case("qwen3").directory)), tmp_path)
    model, good = load(case("qwen3").directory), load_file(tmp_path / WEIGHTS)
    own = {name: array for name, array in good.items() if "layers.0." in name}
    fused = f"{PREFIX}model.layers.0.mlp.experts.lora_"
    experts = model.moe_blocks()[0].experts.config
    e, h, i = experts.num_experts, experts.hidden_size, experts.intermediate_size
    shapes = {"A.weight": (e * RANK, i), "B.weight": (h, e * RANK)}
    for more, text in (
        ({name.removeprefix(PREFIX): array for name, array in own.items()}, f"there with {PREFIX} in front as well"),
        ({name.replace("up_proj", "w3"): array for name, array in own.items()}, "is there under another name as well"),
        (
            {fused + part: np.zeros(shape, np.float32) for part, shape in shapes.items()},
            "layers.0.mlp.experts has adapters of each expert and of all in one",
        ),
    ):
        save_file(good | more, tmp_path / WEIGHTS)
        refuses(ValueError, text, moe_jax.load_lora, model, tmp_path)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_numbers_of_other_kinds_are_refused(saved, dtype):
    model, directory = saved
    rewrite(directory, lambda tensors: tensors.update({n: a.astype(jnp.dtype(dtype)) for n, a in tensors.items()}))
    refuses(NotImplementedError, f"is {dtype}, expected a float of 16, 32", moe_jax.load_lora, model, directory)


def test_an_expert_without_adapter_is_refused(case, tmp_path):
    moe_jax.save_lora(with_own_a(load(case("qwen3").directory)), tmp_path)
    rewrite(
        tmp_path, lambda tensors: [tensors.pop(name) for name in list(tensors) if "layers.0.mlp.experts.5.up" in name]
    )
    model = load(case("qwen3").directory)
    refuses(ValueError, "expert 5 has no adapter of w13; expected all or none of 8", moe_jax.load_lora, model, tmp_path)


def test_adapters_of_another_model_are_refused(saved, case):
    _, directory = saved
    refuses(
        ValueError,
        "another model or rank|no such weight",
        moe_jax.load_lora,
        load(case("mixtral").directory),
        directory,
    )


def test_models_that_are_refused(saved, tmp_path):
    model, directory = saved
    refuses(ValueError, "without adapters has none to save", moe_jax.save_lora, model, tmp_path / "new")
    adapted(model, "attention")
    refuses(ValueError, "_proj has an adapter already", moe_jax.load_lora, model, directory)
    moe_jax.lora(model, rank=2, alpha=4, rngs=nnx.Rngs(0))
    refuses(
        ValueError, r"several \(rank, alpha\), \[\(2, 4.0\), \(4, 8.0\)\]", moe_jax.save_lora, model, tmp_path / "new"
    )
    block = model.moe_blocks()[0]
    refuses(TypeError, "model has type MoEBlock, expected a whole model", moe_jax.save_lora, block, tmp_path / "new")
    assert not (tmp_path / "new").exists()
