"""QuantizationConfig: what is refused and how, and tensors that contradict the config."""

import copy
import json
import time

import ml_dtypes
import numpy as np
import pytest
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES

from moe_jax.loading import Checkpoint, CheckpointError, QuantizationConfig
from moe_jax.quantization import Scheme
from tests.support.checkpoints import writers
from tests.support.checkpoints.expert_tensors import write_checkpoint
from tests.support.checkpoints.quantization_configs import (
    CHANNEL_GROUP,
    EXPERT,
    FP8,
    TOKEN,
    config_of,
    native,
    one_group,
    parse,
)
from tests.support.refusals import refuses

# -- refusals ---------------------------------------------------------------------------------------------------------


REFUSED = {
    "no method": ({"quantization_config": {"bits": 4}}, "quant_method None is unknown"),
    "unknown method": (
        {"quantization_config": {"quant_method": "magic"}},
        "quant_method 'magic' is unknown; supported",
    ),
    "method a list": ({"quantization_config": {"quant_method": ["fp8"]}}, "is unknown"),
    "not an object": ({"quantization_config": "fp8"}, "expected an object or null"),
    "compression_config": ({"compression_config": {"format": "x"}}, "spelling of early 2024"),
    "MLX": ({"quantization": {"group_size": 64, "bits": 4}}, "quantization is how MLX writes it"),
    "no groups": (config_of(config_groups=None), "config_groups is None"),
    "empty groups": (config_of({}), "at least one group"),
    "groups a list": (config_of([CHANNEL_GROUP]), "expected an object"),
    "no targets": (config_of({"g": CHANNEL_GROUP | {"targets": []}}), "group 'g' has no targets"),
    "targets a string": (config_of({"g": CHANNEL_GROUP | {"targets": "Linear"}}), "expected a list of strings"),
    "targets numbers": (config_of({"g": CHANNEL_GROUP | {"targets": [1]}}), "expected a list of strings"),
    "group null": (config_of({"g": None}), "has no targets"),
    "group a number": (config_of({"g": 7}), "expected a list of strings"),
    "ignore a string": (config_of(ignore="lm_head"), "ignore is 'lm_head', expected a list"),
    "sparsity": (config_of(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config is not empty"),
    "transform": (config_of(transform_config={"config_groups": {"R1": {}}}), "transform_config is not empty"),
    "pruned experts": (config_of(moe_sparsity_config={"method": "prune"}), "moe_sparsity_config is not empty"),
    "unknown structure": (config_of(new_feature={"a": 1}), "unknown key 'new_feature'"),
    "format a number": (config_of(format=3), "format is 3"),
    "kv cache a string": (config_of(kv_cache_scheme="fp8"), "kv_cache_scheme is 'fp8'"),
    "unknown group key": (config_of({"g": CHANNEL_GROUP | {"extra": 1}}), "extra"),
    "unknown argument": (config_of(one_group(FP8 | {"strategy": "channel", "warp": 9})), "warp"),
    "bits a string": (config_of(one_group(FP8 | {"num_bits": "8"})), "num_bits"),
    "static channel inputs": (
        config_of(one_group(FP8 | {"strategy": "channel"}, FP8 | {"strategy": "tensor"})),
        "static activation scales",
    ),
    "static tokens": (config_of(one_group(FP8, TOKEN | {"dynamic": False})), "'token' needs dynamic"),
    "unknown preset": (config_of({"FP8_MAGIC": ["Linear"]}), "unknown scheme"),
    "target in two groups": (
        config_of({"g": CHANNEL_GROUP, "h": one_group(FP8)["group_0"]}),
        "'Linear' stands in two groups",
    ),
    "broken regex": (config_of(ignore=["re:(unclosed"]), "not a valid regular expression"),
    "evil regex": (config_of(ignore=["re:(a+)+$"]), "could take too long"),
    "evil target": (config_of({"g": CHANNEL_GROUP | {"targets": ["re:(.*)*x"]}}), "could take too long"),
    "other block": (native(weight_block_size=[64, 128]), r"weight_block_size is \[64, 128\]"),
    "block a number": (native(weight_block_size=128), "weight_block_size is 128"),
    "e5m2": (native(fmt="e5m2"), "fmt is 'e5m2'"),
    "static blocks": (native(activation_scheme="static"), "static"),
    "unknown activations": (native(activation_scheme="magic"), "magic"),
    "unknown scale_fmt": (native(scale_fmt="e5m2"), "scale_fmt must be"),
    "bound below zero": (
        {"quantization_config": {"quant_method": "fbgemm_fp8", "activation_scale_ub": -1}},
        "activation_scale_ub must be positive",
    ),
    "fp4 experts": (native(expert_dtype="fp4"), "expert_dtype is 'fp4'"),
    "embeddings": (native(modules_to_convert=["model.embed_tokens"]), "modules_to_convert"),
    "list a string": (native(ignored_layers="lm_head"), "ignored_layers is 'lm_head'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_is_refused_when_parsed(case):
    config, message = REFUSED[case]
    with pytest.raises(CheckpointError, match=message) as error:
        parse(config)
    assert str(error.value).startswith("config.json") and str(error.value).isprintable()


@pytest.mark.parametrize(
    "method",
    [
        "gptq",
        "awq",
        "bitsandbytes",
        "gguf",
        "mlx",
        "quark",
        "hqq",
        "aqlm",
        "torchao",
    ],
)
def test_other_methods_are_refused_by_name_with_a_way_out(method):
    with pytest.raises(
        CheckpointError, match=f"quant_method '{method}' is not supported; .*use a compressed-tensors version"
    ):
        parse({"quantization_config": {"quant_method": method, "bits": 4}})


def test_bitsandbytes_names_the_call_that_converts():
    with pytest.raises(CheckpointError, match=r"from_pretrained\(DIR\).dequantize\(\).save_pretrained"):
        parse({"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}})


NOT_BUILT = {
    "retired": (PRESET_SCHEMES["FP8_DYNAMIC"], "marlin-24", "retired"),
    "unknown format": (PRESET_SCHEMES["FP8_DYNAMIC"], "zip", "format 'zip'"),
}


@pytest.mark.parametrize("case", NOT_BUILT)
def test_schemes_that_are_not_built_name_the_module(case):
    """Only when a module needs them: an ignored module of such a model is readable."""
    preset, stored_as, message = NOT_BUILT[case]
    group = QuantizationScheme(targets=["Linear"], **copy.deepcopy(preset))
    config = parse(config_of({"g": json.loads(group.model_dump_json())}, format=stored_as))
    assert config.scheme_for("lm_head") is None
    refuses(CheckpointError, f"module {EXPERT}: target 'Linear' of g matches, .*({message})", config.scheme_for, EXPERT)


def test_output_activations_are_refused():
    config = parse(config_of({"g": CHANNEL_GROUP | {"output_activations": TOKEN}}))
    refuses(CheckpointError, "output_activations", config.scheme_for, EXPERT)


def test_a_pattern_that_uses_up_its_time_is_an_error(monkeypatch):
    config = parse(config_of(ignore=["re:.*x"]))
    monkeypatch.setattr("moe_jax.loading.config._patterns.TIME_LIMIT", -1.0)
    refuses(CheckpointError, "took over", config.scheme_for, EXPERT)


# -- tensors have the last word ---------------------------------------------------------------------------------------

F8, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16


def resolve(directory, config, tensors, module=EXPERT):
    checkpoint = write_checkpoint(directory, config, tensors)
    return QuantizationConfig.from_config(checkpoint.config, checkpoint).scheme_for(module)


def quantized(module=EXPERT, dtype=F8, scale=(6, 1), scale_name="weight_scale"):
    return {f"{module}.weight": np.zeros((6, 8), dtype), f"{module}.{scale_name}": np.ones(scale, np.float32)}


def plain(module=EXPERT):
    return {f"{module}.weight": np.zeros((6, 8), BF16)}


IGNORE_ALL = config_of(ignore=["re:.*"])
CONTRADICTIONS = {
    "config dropped": ({}, quantized(), "expected no quantization, since there is no quantization_config; found .*F32"),
    "config dropped, scale lost": (
        {},
        {f"{EXPERT}.weight": np.zeros((6, 8), F8)},
        r"no quantization.*weight F8_E4M3 \[6, 8\]",
    ),
    "int8 without config": ({}, {f"{EXPERT}.weight": np.zeros((6, 8), np.int8)}, "I8"),
    "ignored but quantized": (
        IGNORE_ALL,
        quantized(),
        r"since ignore lists 're:\.\*'; found .*weight_scale F32 \[6, 1\]",
    ),
    "not a target but quantized": (
        config_of({"g": CHANNEL_GROUP | {"targets": ["re:.*self_attn.*"]}}),
        quantized(),
        "no target .* covers it",
    ),
    "quantized but plain": (
        config_of(),
        plain(),
        r"expected fp8_channel, since target 'Linear' of group_0 matches; found .*BF16",
    ),
    "packed where plain is stated": ({}, {f"{EXPERT}.weight_packed": np.zeros((6, 1), np.int32)}, "weight_packed I32"),
    "other element": (config_of(), quantized(dtype=np.int8), "expected weights of e4m3; found .*weight I8"),
    "e5m2": (config_of(), quantized(dtype=ml_dtypes.float8_e5m2), "F8_E5M2"),
    "scale per tensor": (
        config_of(),
        quantized(scale=(1,)),
        r"expected one scale per channel \[6\].*weight_scale F32 \[1\]",
    ),
    "scale per channel": (config_of(one_group(FP8)), quantized(), "expected one scale per tensor"),
    "scale too long": (config_of(), quantized(scale=(7, 1)), "expected one scale per channel"),
    "DeepSeek's scale": (config_of(), quantized(scale_name="weight_scale_inv"), "expected its scale as weight_scale"),
    "not DeepSeek's scale": (native(), quantized(scale=(1, 1)), "expected its scale as weight_scale_inv"),
    "fused, scales beside": (
        {},
        {f"{EXPERT}": np.zeros((2, 6, 8), BF16), f"{EXPERT}_scale": np.ones((2, 6), np.float32)},
        "expected no quantization",
    ),
    "fused but plain": (
        config_of({"g": CHANNEL_GROUP | {"targets": ["RoutedExperts"]}}),
        {EXPERT: np.zeros((2, 6, 8), BF16)},
        "expected fp8_channel",
    ),
}


@pytest.mark.parametrize("tensor", ["experts.gate_up_proj", "input_linear.weight"])
def test_all_experts_in_one_tensor_are_no_linear(tmp_path, tensor):
    """compressed-tensors quantizes Linear modules; where a family holds 3-D parameters they stay in 16 bits."""
    name = f"model.layers.0.block_sparse_moe.{tensor}"
    module, tensors = name.removesuffix(".weight"), {name: np.zeros((2, 6, 8), BF16)}
    assert resolve(tmp_path / "linear", config_of(), tensors, module) is None
    named = config_of({"g": CHANNEL_GROUP | {"targets": ["re:.*block_sparse_moe.*"]}})
    with pytest.raises(CheckpointError, match=f"module {module}: expected fp8_channel"):
        resolve(tmp_path / "named", named, tensors, module)


def test_fused_experts_answer_to_the_module_that_holds_them():
    """Their tensors are parameters of "experts", so that is what a config calls them."""
    fused, other = "model.layers.1.mlp.experts.gate_up_proj", "model.layers.2.mlp.experts.gate_up_proj"
    group = CHANNEL_GROUP | {"targets": ["re:.*experts$"]}
    config = parse(config_of({"g": group}, ignore=["model.layers.2.mlp.experts"]))
    assert config.scheme_for(fused).name == "fp8_channel" and config.scheme_for(other) is None
    assert config.scheme_for("model.layers.1.mlp.experts.0.gate_proj") is None  # never a prefix


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_contradictions_name_module_config_and_tensor(tmp_path, case):
    config, tensors, message = CONTRADICTIONS[case]
    with pytest.raises(CheckpointError, match=message) as error:
        resolve(tmp_path, config, tensors)
    assert str(error.value).startswith(f"{tmp_path / 'config.json'}: module {EXPERT}: ")
    assert "do not belong together" in str(error.value)


def test_agreement_in_all_spellings_of_scales(tmp_path):
    tensor = config_of(one_group(FP8))
    blocks = {f"{EXPERT}.weight": np.zeros((160, 200), F8), f"{EXPERT}.weight_scale_inv": np.ones((2, 2), BF16)}
    accepted = [
        (config_of(), quantized(scale=(6, 1)), "fp8_channel"),
        (config_of(), quantized(scale=(6,)), "fp8_channel"),
        (tensor, quantized(scale=()), "fp8_tensor_a16"),
        (tensor, quantized(scale=(1,)), "fp8_tensor_a16"),
        (native(), blocks, "fp8_block"),
        (
            config_of(),
            {f"{EXPERT}.weight": np.zeros((6, 8), F8)},
            "fp8_channel",
        ),  # the loader reports the missing scale
        ({}, {EXPERT: np.zeros((2, 6, 8), BF16)}, None),
    ]
    for number, (config, tensors, name) in enumerate(accepted):
        scheme = resolve(tmp_path / str(number), config, tensors)
        assert (None if scheme is None else scheme.name) == name


@pytest.mark.parametrize(
    "module",
    ["lm_head", "model.embed_tokens", "model.layers.0.mlp.gate", "model.layers.0.mlp.shared_expert_gate",
     "model.layers.0.block_sparse_moe.router.layer", "model.layers.0.mlp.router"],
)  # fmt: skip
def test_routers_head_and_embeddings_may_be_plain_without_being_ignored(tmp_path, module):
    everything = config_of({"g": CHANNEL_GROUP | {"targets": ["Linear", "Embedding"]}}, ignore=[])
    assert resolve(tmp_path / "plain", everything, plain(module), module) is None
    assert resolve(tmp_path / "quantized", everything, quantized(module), module).name == "fp8_channel"
    with pytest.raises(CheckpointError, match="expected no quantization"):
        resolve(tmp_path / "hidden", {}, quantized(module), module)


def test_a_container_in_ignore_does_not_hide_quantized_experts(tmp_path):
    """compressed-tensors 0.17 lists containers; engines that matched prefixes loaded such models as bf16."""
    config = config_of(ignore=["lm_head", "model.layers.1.mlp.experts.3", "model.layers.1.mlp.experts"])
    assert resolve(tmp_path, config, quantized()).name == "fp8_channel"


@pytest.mark.slow
def test_twenty_thousand_modules_are_resolved_quickly(tmp_path):
    """0.2 s without the annotation checks of the tests; rule by rule it would take minutes."""
    names = [
        f"model.layers.{layer}.mlp.experts.{e}.{part}_proj"
        for layer in range(52) for e in range(128) for part in ("gate", "up", "down")
    ]  # fmt: skip
    tensors = {f"{name}.weight": np.zeros((2, 2), F8) for name in names}
    tensors |= {f"{name}.weight_scale": np.ones((2, 1), np.float32) for name in names}
    ignore = ["lm_head", "re:.*mlp.gate$", r"re:.*layers\.99\..*", *(f"model.layers.{i}.mlp.gate" for i in range(5000))]
    target = r"re:.*mlp\.experts\.\d+\.(gate|up|down)_proj$"
    config = config_of({"g": CHANNEL_GROUP | {"targets": [target]}}, ignore=ignore)
    checkpoint = write_checkpoint(tmp_path, config, tensors)
    start = time.process_time()
    quantization = QuantizationConfig.from_config(checkpoint.config, checkpoint)
    schemes = {quantization.scheme_for(name) for name in names}
    seconds = time.process_time() - start
    assert len(names) == 19968 and {scheme.name for scheme in schemes} == {"fp8_channel"}
    assert seconds < 60.0


# -- files that real writers made -------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["qwen3_moe", "mixtral"])
def family_source(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param) / "source"
    writers.write_model(request.param, directory, hidden_size=64, head_dim=16, num_hidden_layers=1)
    return request.param, directory


@pytest.mark.parametrize(
    "preset, name",
    [("FP8", "fp8_tensor_static"), ("FP8_DYNAMIC", "fp8_channel"), ("FP8_BLOCK", "fp8_block"), ("W8A8", "int8_w8a8")],
)
def test_files_that_compressed_tensors_wrote(family_source, tmp_path, preset, name):
    family, source = family_source
    writers.quantize_with_compressed_tensors(source, tmp_path / "model", family, writers.preset(preset))
    check_all_modules(tmp_path / "model", name)
    if preset == "FP8_BLOCK":
        writers.as_native_fp8(tmp_path / "model", tmp_path / "native")
        check_all_modules(tmp_path / "native", name)


def check_all_modules(directory, name):
    with Checkpoint(directory) as checkpoint:
        quantization = QuantizationConfig.from_config(checkpoint.config, checkpoint)
        modules = {tensor.rpartition(".")[0] for tensor in checkpoint.names}
        quantized = {
            module for module in modules if "experts" in module or "self_attn" in module and "norm" not in module
        }
        assert quantized and {module for module in modules if quantization.scheme_for(module)} == quantized
        assert {quantization.scheme_for(module) for module in quantized} == {Scheme.parse(name)}
        assert checkpoint.bytes_read == 0
