"""Names, aliases and config dicts -> Scheme; every refusal."""

import copy
import itertools
import re

import pytest
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES

from moe_jax.quantization import (
    ALIASES,
    SCHEMES,
    Packing,
    QuantFormat,
    Scheme,
    Strategy,
    method_for,
    parse_scheme,
)
from tests.support.refusals import refuses

E4M3 = dict(num_bits=8, type="float", symmetric=True, dynamic=False)
INT8 = dict(num_bits=8, type="int", symmetric=True, dynamic=False)


def group(weights, activations=None, **rest):
    return {"weights": weights, "input_activations": activations, **rest}


# -- names -------------------------------------------------------------------------------------------------------------


def test_canonical_names_of_the_public_surface():
    for name in (
        *("bf16", "fp8_tensor", "fp8_tensor_static", "fp8_channel", "fp8_block", "int8_w8a8", "int8_w8a16"),
        *("fp8_tensor_token", "fp8_tensor_a16", "fp8_channel_a16", "fp8_block_a16"),
    ):
        scheme = Scheme.parse(name)
        assert scheme is SCHEMES[name] and scheme.name == name
        assert Scheme.parse(scheme) == scheme and Scheme.parse(scheme).name == name
    assert Scheme.parse(None) is SCHEMES["bf16"] and not Scheme.parse(None).is_quantized
    assert len(set(SCHEMES.values())) == len(SCHEMES), "two names for one scheme belong into ALIASES"


def test_what_the_names_mean():
    def fields(fmt):
        return fmt and (fmt.element, fmt.strategy.value, fmt.group_size or fmt.block_shape, fmt.dynamic)

    static_tensor, tokens = ("e4m3", "tensor", None, False), ("e4m3", "token", None, True)
    expected = {
        "bf16": (None, None),
        "fp8_tensor": (static_tensor, ("e4m3", "tensor", None, True)),
        "fp8_tensor_static": (static_tensor, static_tensor),
        "fp8_tensor_token": (static_tensor, tokens),
        "fp8_channel": (("e4m3", "channel", None, False), tokens),
        "fp8_block": (("e4m3", "block", (128, 128), False), ("e4m3", "group", 128, True)),
        "int8_w8a8": (("int8", "channel", None, False), ("int8", "token", None, True)),
        "int8_w8a16": (("int8", "channel", None, False), None),
    }
    for name, (weights, activations) in expected.items():
        scheme = SCHEMES[name]
        assert (fields(scheme.weights), fields(scheme.activations)) == (weights, activations), name


@pytest.mark.parametrize(
    "name", ["w2a16_g32", "w3a16_channel_asym_actorder", "w7a8_fp8_g64_unpacked", "w4a16", "w4a16_g0", "w4a8_int8_g128"]
)
def test_integer_names_are_read_in_their_shortest_form(name):
    if name in ("w2a16_g32", "w7a8_fp8_g64_unpacked"):
        assert Scheme.parse(name).name == name and Scheme.parse(Scheme.parse(name)).name == name
    else:
        refuses(ValueError, "unknown scheme", Scheme.parse, name)


def test_aliases():
    for alias, name in {
        "fp8_per_tensor": "fp8_tensor",
        "fp8_per_block": "fp8_block",
        "fp8_per_channel": "fp8_channel",
        "int8_per_channel_weight_only": "int8_w8a16",
        "FP8": "fp8_tensor_static",
        "FP8_DYNAMIC": "fp8_channel",
        "FP8_BLOCK": "fp8_block",
        "W8A8": "int8_w8a8",
        "INT8": "int8_w8a8",
    }.items():
        assert Scheme.parse(alias) is SCHEMES[name]
    assert set(ALIASES.values()) <= set(SCHEMES) and not set(ALIASES) & set(SCHEMES)


@pytest.mark.parametrize("name", ["fp9", "", "Fp8_block", "w4a16", "fp8_e5m2"])
def test_an_unknown_name_lists_all(name):
    with pytest.raises(ValueError, match="unknown scheme") as caught:
        Scheme.parse(name)
    message = str(caught.value)
    assert repr(name) in message and "\n" not in message
    assert all(known in message for known in (*SCHEMES, *ALIASES))


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("int4", "'w4a16_g128'"),
        ("AWQ", "'w4a16_g128_asym'"),
        ("w4a16", "'w4a16_g128' or 'w4a16_channel'"),
        ("fp8_chanel", "'fp8_channel' or 'fp8_per_channel'"),
        ("bf-16", "'bf16'"),
    ],
)
def test_what_was_meant_is_guessed(name, meant):
    refuses(ValueError, re.escape(f"unknown scheme {name!r} (did you mean {meant}?); supported"), Scheme.parse, name)
    for guess in re.findall(r"'(\w+)'", meant):
        Scheme.parse(guess)


def test_other_types_are_refused():
    for value in (8, b"bf16", ["bf16"]):
        refuses(TypeError, "scheme must be", parse_scheme, value)


# -- compressed-tensors groups -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("alias", sorted(set(ALIASES) & set(PRESET_SCHEMES)))
def test_presets_as_compressed_tensors_serializes_them(alias):
    """The alias of a preset and the dict which compressed-tensors itself writes for it are the same scheme."""
    dumped = QuantizationScheme(targets=["Linear"], **PRESET_SCHEMES[alias]).model_dump()
    scheme = Scheme.parse(dumped)
    assert scheme == Scheme.parse(alias) and scheme.name == Scheme.parse(alias).name


# Integer presets without an alias, in the order of their bits: read, since every width is stored alike.
UNNAMED_PRESETS = {f"W{bits}A16": f"w{bits}a16_g128" for bits in (5, 6, 7)}
UNNAMED_PRESETS |= {f"W{bits}A8": f"w{bits}a8_int8" for bits in (2, 3, 5, 6, 7)}


@pytest.mark.parametrize("preset", UNNAMED_PRESETS)
def test_integer_presets_without_an_alias(preset):
    dumped = QuantizationScheme(targets=["Linear"], **PRESET_SCHEMES[preset]).model_dump()
    assert Scheme.parse(dumped).name == UNNAMED_PRESETS[preset]


@pytest.mark.parametrize("alias", sorted(set(PRESET_SCHEMES) - {*ALIASES, *UNNAMED_PRESETS, "UNQUANTIZED"}))
def test_presets_that_are_not_built_are_refused(alias):
    dumped = QuantizationScheme(targets=["Linear"], **PRESET_SCHEMES[alias]).model_dump()
    refuses(NotImplementedError, "not built", Scheme.parse, dumped)


CHANNEL, TOKEN = {**E4M3, "strategy": "channel"}, {**E4M3, "strategy": "token", "dynamic": True}
TENSOR, DYNAMIC_TENSOR = {**E4M3, "strategy": "tensor"}, {**E4M3, "strategy": "tensor", "dynamic": True}
BLOCK = {**E4M3, "strategy": "block", "block_structure": [128, 128]}
GROUP = {**E4M3, "strategy": "group", "group_size": 128, "dynamic": True}
INT4_GROUP = {**INT8, "num_bits": 4, "strategy": "group", "group_size": 128}
INT4_CHANNEL = {**INT8, "num_bits": 4, "strategy": "channel"}
INT_CHANNEL, INT_TOKEN = {**INT8, "strategy": "channel"}, {**INT8, "strategy": "token", "dynamic": True}


@pytest.mark.parametrize(
    ("weights", "activations", "name"),
    [
        (TENSOR, TENSOR, "fp8_tensor_static"),
        (TENSOR, DYNAMIC_TENSOR, "fp8_tensor"),
        (TENSOR, TOKEN, "fp8_tensor_token"),
        (TENSOR, None, "fp8_tensor_a16"),
        (CHANNEL, TOKEN, "fp8_channel"),
        (CHANNEL, None, "fp8_channel_a16"),
        (BLOCK, GROUP, "fp8_block"),
        (BLOCK, None, "fp8_block_a16"),
        ({**BLOCK, "block_structure": "128x128"}, GROUP, "fp8_block"),
        ({**BLOCK, "block_structure": [64, 32]}, {**GROUP, "group_size": 32}, "fp8_block_64x32"),
        ({**E4M3}, TOKEN, "fp8_tensor_token"),  # hand-made: no strategy, no group_size
        ({**E4M3, "group_size": -1}, TOKEN, "fp8_channel"),
        ({**CHANNEL, "group_size": -1, "actorder": "static", "zp_dtype": "torch.int8"}, TOKEN, "fp8_channel"),
        ({**CHANNEL, "observer": "minmax", "observer_kwargs": {}, "scale_dtype": "bfloat16"}, TOKEN, "fp8_channel"),
        ({**CHANNEL, "scale_dtype": None, "novelty": None}, TOKEN, "fp8_channel"),
        (INT_CHANNEL, INT_TOKEN, "int8_w8a8"),
        (INT_CHANNEL, None, "int8_w8a16"),
        (INT4_GROUP, None, "w4a16_g128"),
        ({**INT4_GROUP, "actorder": "static"}, None, "w4a16_g128"),
        ({**INT4_GROUP, "actorder": "weight"}, None, "w4a16_g128"),
        ({**INT4_GROUP, "actorder": "group"}, None, "w4a16_g128_actorder"),
        ({**INT4_GROUP, "actorder": "dynamic", "symmetric": False}, None, "w4a16_g128_asym_actorder"),
        ({**INT4_GROUP, "actorder": True, "group_size": 40}, None, "w4a16_g40_actorder"),
        ({**INT4_GROUP, "num_bits": 3, "symmetric": False}, None, "w3a16_g128_asym"),
        ({**INT4_CHANNEL, "group_size": -1}, None, "w4a16_channel"),
        ({**INT4_CHANNEL, "num_bits": 8, "symmetric": False}, None, "w8a16_channel_asym"),
        (INT4_GROUP, INT_TOKEN, "w4a8_int8"),
        (INT4_CHANNEL, INT_TOKEN, "w4a8_int8_channel"),
        (INT4_CHANNEL, {**INT_TOKEN, "symmetric": False}, "w4a8_int8_channel_asym_inputs"),
        (INT4_GROUP, TOKEN, "w4a8_fp8"),
        ({**INT8, "strategy": "group", "group_size": 128}, None, "w8a16_g128"),
        (None, None, "bf16"),
    ],
)
def test_groups(weights, activations, name):
    scheme = Scheme.parse(group(weights, activations, targets=["Linear"], output_activations=None))
    assert scheme.name == name
    if name in SCHEMES:
        assert scheme == SCHEMES[name]
    if weights is not None:
        assert method_for(scheme).scheme == scheme


@pytest.mark.parametrize("weights", [INT_CHANNEL, CHANNEL])
def test_format_of_a_group(weights):
    for known in ("float-quantized", "int-quantized", "naive-quantized", None):
        Scheme.parse(group(weights, format=known))
    packed = Scheme.parse(group(INT_CHANNEL, format="pack-quantized"))
    assert packed.name == "w8a16_channel" and packed.weights.packing is Packing.WORDS
    for unbuilt in ("marlin-24", "dense", *(["pack-quantized"] if weights is CHANNEL else [])):
        with pytest.raises(NotImplementedError, match=f"format '{unbuilt}' is not built"):
            Scheme.parse(group(weights, format=unbuilt))


NOT_BUILT = [
    (group({**INT4_CHANNEL, "num_bits": 9}), "9-bit int with strategy 'channel'"),
    (group({**INT4_CHANNEL, "num_bits": 1}), "1-bit int with strategy 'channel'"),
    (group({**INT8, "num_bits": 4, "strategy": "tensor"}), "int4 static per tensor"),
    (group(INT4_GROUP, {**INT_TOKEN, "num_bits": 4}), "activations int4 dynamic per token"),
    (group({**E4M3, "num_bits": 4, "strategy": "tensor_group", "group_size": 32}), "4-bit float with strategy"),
    (group({**E4M3, "strategy": "group", "group_size": 64, "scale_dtype": "torch.uint8"}), "group_size 64"),
    (group({**CHANNEL, "symmetric": False}), "asymmetric"),
    (group(INT_CHANNEL, {**INT_TOKEN, "symmetric": False}), "int8 dynamic per token, asymmetric"),
    (group({**BLOCK, "actorder": "group"}), "actorder='group'"),
    (group({**INT4_GROUP, "actorder": "sideways"}), "actorder='sideways'"),
    (group({**E4M3, "strategy": "attn_head"}), "attn_head"),
    (group(TENSOR, {**TENSOR, "dynamic": "local"}), "dynamic='local'"),
    (group({**INT8, "strategy": "tensor"}), "weights int8 static per tensor with activations unquantized"),
    (group(CHANNEL, DYNAMIC_TENSOR), "with activations e4m3 dynamic per tensor"),
    (group(BLOCK, TOKEN), "per block"),
    (group(BLOCK, TENSOR), "per block"),
    (group(BLOCK, {**GROUP, "group_size": 64}), "dynamic per group 64"),
    (group(None, TOKEN), "weights unquantized with activations e4m3"),
    (group(CHANNEL, output_activations=TOKEN), "output_activations"),
    ({"quant_method": "gptq", "bits": 4}, "quant_method 'gptq'"),
    ({"quant_method": "fp8", "fmt": "e5m2"}, "'e5m2'"),
    ({"quant_method": "fp8", "fmt": "e4m3fnuz", "weight_block_size": [128, 128]}, "'e4m3fnuz'"),
]
WRONG = [
    ({}, "no 'weights' entry"),
    (group({**INT4_CHANNEL, "actorder": "group"}), "actorder=True needs integers in groups"),
    (group("e4m3"), "weights must be a dict"),
    (group({**CHANNEL, "bits": 8}), r"unknown keys \['bits'\]"),
    (group(CHANNEL, wieghts=CHANNEL), r"unknown keys \['wieghts'\]"),
    (group({**CHANNEL, "num_bits": "8"}), "num_bits='8'"),
    (group({**CHANNEL, "num_bits": True}), "num_bits=True"),
    (group({**CHANNEL, "type": "complex"}), "type='complex'"),
    (group({**CHANNEL, "symmetric": "yes"}), "symmetric='yes'"),
    (group({**CHANNEL, "dynamic": "sometimes"}), "dynamic='sometimes'"),
    (group({**CHANNEL, "dynamic": True}), "dynamic must be false"),
    (group({**E4M3, "strategy": "diagonal"}), "unknown strategy 'diagonal'"),
    (group({**CHANNEL, "group_size": 128}), "group_size=128 does not fit strategy 'channel'"),
    (group({**E4M3, "strategy": "group"}), "group_size=None does not fit"),
    (group({**E4M3, "group_size": 0}), "group_size must be positive"),
    (group({**E4M3, "group_size": "128"}), "group_size must be positive"),
    (group({**E4M3, "strategy": "block"}), "block_shape=None does not fit"),
    (group({**BLOCK, "block_structure": [128]}), "block_structure must be two positive integers"),
    (group({**BLOCK, "block_structure": "128 by 128"}), "block_structure must be two"),
    (group({**BLOCK, "block_structure": [128, 1.5]}), "block_structure must be two"),
    (group({**BLOCK, "block_structure": [128, 0]}), "block_structure must be two"),
    (group(CHANNEL, {**TOKEN, "dynamic": False}), "needs dynamic=true"),
    (group(CHANNEL, TENSOR), "static activation scales do not go with per-channel weights"),
    (group(INT_CHANNEL, {**INT8, "strategy": "tensor"}), "static activation scales do not go with per-channel weights"),
    ({"config_groups": {}}, "exactly one entry in config_groups, found 0 groups"),
    ({"config_groups": {"a": group(CHANNEL), "b": group(TENSOR)}}, "found 2 groups"),
    ({"config_groups": None}, "found None"),
    ({"config_groups": {"a": "FP8"}}, "must be a dict"),
    ({"quant_method": "fp8", "activation_scheme": "often"}, "activation_scheme"),
    ({"quant_method": "fp8", "weight_block_size": [128, -1]}, "weight_block_size must be two"),
    ({"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "static"}, "cannot be combined"),
]


@pytest.mark.parametrize(("config", "reason"), NOT_BUILT, ids=range(len(NOT_BUILT)))
def test_what_is_not_built_is_named(config, reason):
    with pytest.raises(NotImplementedError, match=reason) as caught:
        Scheme.parse(config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("config", "reason"), WRONG, ids=range(len(WRONG)))
def test_wrong_configs_are_value_errors(config, reason):
    with pytest.raises(ValueError, match=reason) as caught:
        Scheme.parse(config)
    assert "\n" not in str(caught.value)


def test_garbage_in_any_field_is_refused_or_harmless():
    """Whatever a damaged config holds, one of the two stated errors comes, never another."""
    garbage = [None, True, False, 0, -1, 3, 1.5, "", "x", "128x", [], [128, 128], [[1], {}], {}, {"a": 1}]
    keys = QuantizationArgs.model_fields
    refused = accepted = 0
    for (base, activations), value in itertools.product([(CHANNEL, TOKEN), (BLOCK, GROUP), (TENSOR, TENSOR)], garbage):
        for role, key in itertools.product(("weights", "input_activations"), keys):
            config = copy.deepcopy(group(base, activations))
            config[role][key] = value
            try:
                Scheme.parse(config)
                accepted += 1
            except (ValueError, NotImplementedError) as error:
                assert "\n" not in str(error)
                refused += 1
    assert refused > 600 and accepted > 100


# -- whole quantization_configs ----------------------------------------------------------------------------------------


def test_a_config_with_one_group():
    config = {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"]}
    assert Scheme.parse({**config, "config_groups": {"group_0": group(CHANNEL, TOKEN)}}) == SCHEMES["fp8_channel"]
    packed = {**config, "format": "pack-quantized", "config_groups": {"group_0": group(INT_CHANNEL)}}
    assert Scheme.parse(packed) == SCHEMES["w8a16_channel"]
    packed["config_groups"]["group_0"]["format"] = "int-quantized"  # the group's own format wins
    assert Scheme.parse(packed) == SCHEMES["int8_w8a16"]


def test_native_fp8_configs():
    deepseek = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    assert Scheme.parse(deepseek) == SCHEMES["fp8_block"]
    assert Scheme.parse({**deepseek, "scale_fmt": "ue8m0", "modules_to_not_convert": []}) == SCHEMES["fp8_block_ue8m0"]
    assert Scheme.parse({"quant_method": "fp8"}) == SCHEMES["fp8_tensor"]
    assert Scheme.parse({"quant_method": "fp8", "activation_scheme": "static"}) == SCHEMES["fp8_tensor_static"]


# -- QuantFormat -------------------------------------------------------------------------------------------------------


def test_quant_format_checks_itself():
    for element in ("e5m2", "e4m3fnuz", "e5m2fnuz"):
        refuses(NotImplementedError, element, QuantFormat, element, Strategy.TENSOR)
    refuses(ValueError, "unknown element type 'int9'", QuantFormat, "int9", Strategy.TENSOR)
    refuses(ValueError, "group_size", QuantFormat, "e4m3", Strategy.TENSOR, group_size=128)
    refuses(ValueError, "sizes must be positive", QuantFormat, "e4m3", Strategy.BLOCK, block_shape=(0, 128))


def test_scale_shapes():
    assert QuantFormat("e4m3", Strategy.TENSOR).scale_shape(160, 200) == ()
    assert QuantFormat("e4m3", Strategy.CHANNEL).scale_shape(160, 200) == (160,)
    assert QuantFormat("e4m3", Strategy.GROUP, group_size=128).scale_shape(160, 200) == (160, 2)
    assert QuantFormat("e4m3", Strategy.BLOCK, block_shape=(128, 128)).scale_shape(160, 200) == (2, 2)


def test_schemes_built_by_hand_are_checked_where_a_method_is_asked_for():
    odd = Scheme("mine", QuantFormat("int8", Strategy.TENSOR))
    refuses(NotImplementedError, "int8 static per tensor", method_for, odd)
    mine = Scheme("mine", QuantFormat("e4m3", Strategy.CHANNEL), QuantFormat("e4m3", Strategy.TOKEN, dynamic=True))
    assert Scheme.parse(mine).name == "fp8_channel"
