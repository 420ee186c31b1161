"""Rules of quantization_config: compressed-tensors judges which module gets which scheme."""

import copy
import json
import random

import pytest
import torch
from compressed_tensors.quantization import QuantizationConfig as JudgeConfig
from compressed_tensors.quantization import QuantizationScheme, apply_quantization_config
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES

from moe_jax.loading import CheckpointError
from moe_jax.quantization import Scheme
from tests.support.checkpoints.quantization_configs import (
    CHANNEL_GROUP,
    EXPERT,
    FP8,
    TOKEN,
    config_of,
    native,
    one_group,
    parse,
    scheme_name,
)

MODULES = [
    "model.embed_tokens",
    *(f"model.layers.{i}.self_attn.{p}_proj" for i in (0, 1, 10) for p in "qkvo"),
    *(f"model.layers.{i}.mlp.gate" for i in (0, 1, 10)),
    *(f"model.layers.{i}.mlp.experts.{e}.{p}_proj" for i in (1, 10) for e in (0, 1, 3) for p in ("gate", "up", "down")),
    "model.layers.0.mlp.shared_expert_gate",
    "lm_head",
]

# -- compressed-tensors as the judge ----------------------------------------------------------------------------------


def tree_of(names):
    root = torch.nn.Module()
    for name in names:
        *parents, last = name.split(".")
        node = root
        for part in parents:
            if part not in dict(node.named_children()):
                node.add_module(part, torch.nn.Module())
            node = node.get_submodule(part)
        node.add_module(last, torch.nn.Embedding(4, 4) if last == "embed_tokens" else torch.nn.Linear(4, 4, bias=False))
    return root


def judged(names, groups, ignore):
    """{module: Scheme or None} as compressed-tensors applies the config."""
    tree = tree_of(names)
    apply_quantization_config(tree, JudgeConfig(config_groups=groups, ignore=ignore, format="float-quantized"))
    schemes = {name: getattr(tree.get_submodule(name), "quantization_scheme", None) for name in names}
    return {
        name: scheme
        and Scheme.parse({"weights": args(scheme.weights), "input_activations": args(scheme.input_activations)})
        for name, scheme in schemes.items()
    }


def args(arguments):
    return None if arguments is None else json.loads(arguments.model_dump_json())


TARGETS = [
    ["Linear"],
    ["Embedding"],
    ["Linear", "Embedding"],
    [EXPERT],
    ["lm_head", "model.layers.1.self_attn.q_proj"],
    [r"re:.*experts\.\d+\.(gate|up)_proj$"],
    [r"re:.*experts.*"],
    [r"re:model\.layers\.1\..*"],
    [r"re:layers.*"],  # matches from the start only, so nothing
    [r"re:.*down_proj", "model.layers.1"],
    [r"re:.*"],
]
IGNORES = [
    "lm_head",
    "model.layers.1",  # a container: not a prefix rule
    "model.layers.1.mlp.experts.3",
    "gate_proj",  # not a substring rule
    EXPERT,
    "re:.*mlp.gate$",
    "re:.*gate",
    r"re:.*layers\.1\..*",
    "re:model",
    "re:mlp",
    "Embedding",
]
PRESETS = ["FP8", "FP8_DYNAMIC", "W8A8", "FP8_BLOCK"]


@pytest.mark.parametrize("seed", range(30))
def test_every_module_gets_the_scheme_that_compressed_tensors_gives_it(seed):
    rng = random.Random(seed)
    chosen = rng.sample(TARGETS, rng.choice((1, 1, 2, 3)))
    presets = rng.sample(PRESETS, len(chosen))
    groups, taken = {}, set()
    for number, (targets, preset) in enumerate(zip(chosen, presets, strict=True)):
        own = [target for target in targets if target not in taken]
        taken.update(own)
        if own:
            groups[f"group_{number}"] = QuantizationScheme(targets=own, **copy.deepcopy(PRESET_SCHEMES[preset]))
    ignore = rng.sample(IGNORES, rng.randrange(4))
    stated = JudgeConfig(config_groups=groups, ignore=ignore, format="float-quantized").to_dict()
    ours = parse({"quantization_config": json.loads(json.dumps(stated, default=str))})
    expected = judged(MODULES, groups, ignore)
    assert {name: ours.scheme_for(name) for name in MODULES} == expected, (groups, ignore)


# -- variants of configs ----------------------------------------------------------------------------------------------

WEIGHT_EXTRAS = {
    "actorder": None,
    "block_structure": None,
    "group_size": None,
    "symmetric": True,
    "scale_dtype": None,
    "zp_dtype": None,
    "observer": "minmax",
    "observer_kwargs": {},
    "dynamic": False,
}
INT8_TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
BLOCK_INPUT = FP8 | {"strategy": "group", "group_size": 128, "dynamic": True}


VARIANTS = {
    "0.20, nulls left out": (config_of(), "fp8_channel"),
    "0.17, everything spelt out": (
        config_of(
            one_group(
                CHANNEL_GROUP["weights"] | WEIGHT_EXTRAS, TOKEN, output_activations=None, format="float-quantized"
            ),
            version="0.17.1",
            quantization_status="compressed",
            global_compression_ratio=None,
            kv_cache_scheme=None,
            sparsity_config={},
            transform_config={},
        ),
        "fp8_channel",
    ),
    "0.20 with moe_sparsity_config": (config_of(moe_sparsity_config=None), "fp8_channel"),
    "2024: ratio, dense sparsity": (
        config_of(global_compression_ratio=1.23, sparsity_config={"format": "dense", "global_sparsity": 0.1}),
        "fp8_channel",
    ),
    "quant_method left out": (
        {"quantization_config": {k: v for k, v in config_of()["quantization_config"].items() if k != "quant_method"}},
        "fp8_channel",
    ),
    "group format wins": (
        config_of({"g": CHANNEL_GROUP | {"format": "float-quantized"}}, format="mixed-precision"),
        "fp8_channel",
    ),
    "naive-quantized": (
        config_of(one_group(FP8 | {"strategy": "channel"}), format="naive-quantized"),
        "fp8_channel_a16",
    ),
    "no format at all": (config_of(format=None), "fp8_channel"),
    "strategy left out: tensor": (config_of(one_group(FP8)), "fp8_tensor_a16"),
    "strategy left out: channel": (config_of(one_group(FP8 | {"group_size": -1})), "fp8_channel_a16"),
    "group_size -1 beside channel": (
        config_of(one_group({"num_bits": 8, "type": "int", "strategy": "channel", "group_size": -1}, INT8_TOKEN)),
        "int8_w8a8",
    ),
    "static tensor": (
        config_of(one_group(FP8 | {"strategy": "tensor"}, FP8 | {"strategy": "tensor"})),
        "fp8_tensor_static",
    ),
    "dynamic tensor": (
        config_of(one_group(FP8 | {"strategy": "tensor"}, FP8 | {"strategy": "tensor", "dynamic": True})),
        "fp8_tensor",
    ),
    "block": (
        config_of(one_group(FP8 | {"strategy": "block", "block_structure": [128, 128]}, BLOCK_INPUT)),
        "fp8_block",
    ),
    "block, spelling of 2024": (
        config_of(one_group(FP8 | {"strategy": "block", "block_structure": "128x128"}, BLOCK_INPUT)),
        "fp8_block",
    ),
    "actorder weight": (config_of(one_group(FP8 | {"strategy": "channel", "actorder": "weight"})), "fp8_channel_a16"),
    "group named after a preset": (config_of({"FP8_DYNAMIC": CHANNEL_GROUP}), "fp8_channel"),
    "short form: preset and targets": (config_of({"fp8_dynamic": ["Linear"]}), "fp8_channel"),
    "kv cache scheme": (config_of(kv_cache_scheme=FP8 | {"strategy": "tensor"}), "fp8_channel"),
    "label of a writer": (config_of(provider="a tool", tool_version=3), "fp8_channel"),
    "target FusedMoE": (config_of({"g": CHANNEL_GROUP | {"targets": ["FusedMoE"]}}), "fp8_channel"),
    "target RoutedExperts before Linear": (
        config_of({"g": CHANNEL_GROUP, "h": one_group(FP8)["group_0"] | {"targets": ["RoutedExperts"]}}),
        "fp8_tensor_a16",
    ),
    "ignored": (config_of(ignore=["re:.*experts.*"]), None),
    "ignore null": (config_of(ignore=None), "fp8_channel"),
    "ignore as a container": (
        config_of(ignore=["model.layers.1.mlp.experts", "model.layers.1.mlp.experts.3"]),
        "fp8_channel",
    ),
    "null": ({"quantization_config": None}, None),
    "absent": ({}, None),
    "DeepSeek": (native(fmt="e4m3", activation_scheme="dynamic"), "fp8_block"),
    "Qwen": (native(modules_to_not_convert=["lm_head", "model.layers.1.mlp.gate"]), "fp8_block"),
    "transformers 5": (
        native(dequantize=False, modules_to_not_convert=None, modules_to_convert=None, scale_fmt="float"),
        "fp8_block",
    ),
    "excluded by a parent": (native(ignored_layers=["model.layers.1.mlp.experts"]), None),
    "not excluded by a prefix": (native(ignored_layers=["model.layers.1.mlp.exp", "gate"]), "fp8_block"),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_of_configs(variant):
    config, expected = VARIANTS[variant]
    assert scheme_name(config) == expected


def test_native_fp8_names():
    excluded = ["lm_head", "model.layers.0.mlp", "gate", "model.layers.2.self_attn.q_proj"]
    config = native(modules_to_not_convert=excluded)
    quantized = [
        "model.layers.2.self_attn.q_proj_a", "model.layers.2.mlp.experts.0.gate_proj", "model.layers.01.mlp.x",
    ]  # fmt: skip
    plain = [
        "lm_head", "model.layers.0.mlp.experts.1.up_proj", "model.layers.7.mlp.gate", "model.layers.2.self_attn.q_proj",
        "model.embed_tokens", "model.norm", "model.layers.2.input_layernorm",
    ]  # fmt: skip
    assert [scheme_name(config, module) for module in quantized] == ["fp8_block"] * 3
    assert [scheme_name(config, module) for module in plain] == [None] * 7


def test_mixtral_targets_are_spelt_as_in_memory_and_ignore_as_on_disk():
    """llm-compressor matches its targets against transformers 5's names and writes ignore with names of the file."""
    target = r"re:.*mlp\.experts\.\d+\.(gate|up|down)_proj$"
    config = config_of({"g": CHANNEL_GROUP | {"targets": [target]}}, ignore=["model.layers.0.block_sparse_moe.gate"])
    for word in ("w1", "w2", "w3", "gate_proj", "down_proj"):
        assert scheme_name(config, f"model.layers.0.block_sparse_moe.experts.7.{word}") == "fp8_channel"
    assert scheme_name(config, "model.layers.0.block_sparse_moe.gate") is None
    other = config_of(ignore=["re:.*mlp.gate$", "model.layers.0.mlp.experts.1.up_proj"])
    assert scheme_name(other, "model.layers.3.block_sparse_moe.gate") is None
    assert scheme_name(other, "model.layers.0.block_sparse_moe.experts.1.w3") is None
    assert scheme_name(other, "model.layers.0.block_sparse_moe.experts.1.w1") == "fp8_channel"
    disk = config_of({"g": CHANNEL_GROUP | {"targets": [r"re:.*block_sparse_moe\.experts\.\d+\.w[123]"]}})
    assert scheme_name(disk, "model.layers.0.block_sparse_moe.experts.1.gate_proj") == "fp8_channel"
    assert scheme_name(disk, "model.layers.0.mlp.experts.1.gate_proj") is None  # not Mixtral's name


def test_random_damage_never_raises_anything_else():
    """600 configs with one node replaced or removed: parsed, refused, or another scheme, but never a crash."""
    rng = random.Random(0)
    junk = [
        None,
        True,
        -1,
        0,
        7,
        1.5,
        10**30,
        "",
        "re:(",
        "re:.*",
        "Linear",
        "x" * 300,
        [],
        [[]],
        [None],
        {},
        {"a": {}},
    ]
    bases = [config for config, _ in VARIANTS.values() if config.get("quantization_config")]
    outcomes = set()
    for _ in range(600):
        config = json.loads(json.dumps(rng.choice(bases)))
        node = config["quantization_config"]
        while True:
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            key = rng.choice(keys)
            if isinstance(node[key], dict | list) and node[key] and rng.random() < 0.7:
                node = node[key]
                continue
            if rng.random() < 0.3:
                del node[key]
            else:
                node[key] = rng.choice(junk)
            break
        try:
            outcomes.add(scheme_name(config))
        except CheckpointError as error:
            assert str(error).isprintable()
            outcomes.add("refused")
    assert {"refused", "fp8_channel", "fp8_block", None} <= outcomes
