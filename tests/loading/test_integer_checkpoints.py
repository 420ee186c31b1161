"""Integer checkpoints through the loader: the weights are those that compressed-tensors itself decompresses."""

import copy
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.numpy import load_file, save_file

from moe_jax import MoEConfig, fused_experts, load_moe
from moe_jax.loading import Checkpoint, CheckpointError, ExpertReader, load_layer
from moe_jax.quantization import Scheme, dequantize_tensor
from pallas_kernels.common import packing
from tests.support.cases.experts import make_routing
from tests.support.checkpoints import writers
from tests.support.checkpoints.expert_tensors import matrices_of
from tests.support.oracles.layer_judge import assert_layer_close
from tests.support.refusals import refuses

SIZES = dict(hidden_size=96, num_attention_heads=2, num_key_value_heads=1, num_hidden_layers=1)
H, I, E = 96, 64, 3  # noqa: E741
INT8_TOKEN = QuantizationArgs(num_bits=8, type="int", strategy="token", dynamic=True)
FP8_TOKEN = QuantizationArgs(num_bits=8, type="float", strategy="token", dynamic=True)


def integers(bits, strategy, symmetric=True, **args):
    return QuantizationArgs(num_bits=bits, type="int", strategy=strategy, symmetric=symmetric, **args)


CASES = {
    "w4a16_g32": (integers(4, "group", group_size=32), None),
    "w4a16_g32_asym": (integers(4, "group", False, group_size=32), None),
    "w4a16_channel": (integers(4, "channel"), None),
    "w4a16_channel_asym": (integers(4, "channel", False), None),
    "w8a16_g32": (integers(8, "group", group_size=32), None),
    "w8a16_channel_asym": (integers(8, "channel", False), None),
    "w2a16_g16": (integers(2, "group", group_size=16), None),
    "w3a16_g32_asym": (integers(3, "group", False, group_size=32), None),
    "w3a16_channel": (integers(3, "channel"), None),
    "w5a16_g32_asym": (integers(5, "group", False, group_size=32), None),
    "w4a8_int8_g32": (integers(4, "group", group_size=32), INT8_TOKEN),
    "w4a8_int8_channel": (integers(4, "channel"), INT8_TOKEN),
    "w4a8_fp8_g32_unpacked": (integers(4, "group", group_size=32), FP8_TOKEN),
}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """directory(case): written by compressed-tensors once; what it decompresses lies beside it."""
    root = tmp_path_factory.mktemp("integers")
    source = root / "bf16"
    writers.write_model("qwen3_moe", source, num_experts=E, moe_intermediate_size=I, **SIZES)

    def directory(case):
        target = root / case
        if not target.exists():
            weights, activations = CASES[case]
            scheme = QuantizationScheme(targets=["Linear"], weights=weights, input_activations=activations)
            writers.quantize_with_compressed_tensors(source, target, "qwen3_moe", copy.deepcopy(scheme))
        return target

    return directory


def config(**changes):
    return MoEConfig(**(dict(num_experts=E, top_k=2, hidden_size=H, intermediate_size=I) | changes))


def load(directory, scheme=None):
    with Checkpoint(directory) as checkpoint:
        reader = ExpertReader(checkpoint)
        stored = reader.stored_scheme(0)
        return reader.load(0, config(scheme=stored), scheme), stored


def matrices(directory):
    """{(expert, projection): float32 weight} of a plain checkpoint."""
    tensors = load_file(directory / "model.safetensors")
    name = "model.layers.0.mlp.experts.{}.{}.weight".format
    return {(e, p): tensors[name(e, p)] for e in range(E) for p in ("gate_proj", "up_proj", "down_proj")}


def assert_weights_are(weights, expected):
    for place, matrix in matrices_of(weights).items():
        assert expected[place].dtype == np.float32
        np.testing.assert_array_equal(matrix.view(np.uint32), expected[place].view(np.uint32))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.sample(4)
def test_weights_are_what_compressed_tensors_decompresses(written, case):
    directory = written(case)
    weights, stored = load(directory)
    assert stored.name == case
    assert_weights_are(weights, matrices(directory.with_name(f"{case}-decompressed")))
    if "unpacked" not in case and "int8" not in case:
        bits = int(case[1])
        assert weights.w13.data.dtype == jnp.int32 and weights.w13.data.shape == (E, 2, I, H * bits // 32)


def rewritten(source, target, change, **top):
    """A copy of a checkpoint, each expert tensor passed through change(suffix, array), with other config keys."""
    tensors = load_file(source / "model.safetensors")
    target.mkdir()
    changed = {}
    for name, array in tensors.items():
        for suffix, value in change(name.rpartition(".")[2], array).items() if ".experts." in name else [(None, array)]:
            changed[name if suffix is None else f"{name.rpartition('.')[0]}.{suffix}"] = np.ascontiguousarray(value)
    save_file(changed, target / "model.safetensors")
    stated = json.loads((source / "config.json").read_text())
    stated["quantization_config"] |= top
    (target / "config.json").write_text(json.dumps(stated))
    return target


def as_padded(suffix, array):
    if suffix == "weight_packed":
        array = packing.pack_words(packing.unpack_words(array, 3, array.shape[1] * 32 // 3), 3, is_dense=False)
    if suffix == "weight_zero_point":
        codes = packing.unpack_words(array.T.copy(), 3, array.shape[0] * 32 // 3)
        array = packing.pack_words(codes, 3, is_dense=False).T
    return {suffix: array}


def test_padded_three_bit_words_are_the_same_weights(written, tmp_path):
    """96 and 64 codes of 3 bits take 9 and 6 dense words, 10 and 7 padded ones: the shapes tell."""
    source = written("w3a16_g32_asym")
    directory = rewritten(source, tmp_path / "padded", as_padded)
    with Checkpoint(directory) as checkpoint:
        assert checkpoint.info("model.layers.0.mlp.experts.0.gate_proj.weight_packed").shape == (I, 10)
    assert_weights_are(load(directory)[0], matrices(source.with_name(f"{source.name}-decompressed")))


def test_zero_points_of_early_files_are_plain_int8(written, tmp_path):
    def as_int8(suffix, array):
        if suffix != "weight_zero_point":
            return {suffix: array}
        codes = packing.unpack_words(array.T.copy(), 4, array.shape[0] * 8)
        return {suffix: (codes.astype(np.int16) - 8).astype(np.int8).T}

    source = written("w4a16_g32_asym")
    weights, _ = load(rewritten(source, tmp_path / "int8", as_int8))
    assert_weights_are(weights, matrices(source.with_name(f"{source.name}-decompressed")))


def test_weight_shape_may_be_missing_but_not_wrong(written, tmp_path):
    source = written("w4a16_g32")
    plain = matrices(source.with_name(f"{source.name}-decompressed"))
    without = rewritten(source, tmp_path / "without", lambda s, a: {} if s == "weight_shape" else {s: a})
    assert_weights_are(load(without)[0], plain)
    wrong = rewritten(source, tmp_path / "wrong", lambda s, a: {s: a[::-1] if s == "weight_shape" else a})
    refuses(CheckpointError, r"weight_shape: found \[64, 96\], expected \[96, 64\] from config.json", load, wrong)


@pytest.mark.parametrize("stated_as", ["group", "dynamic", True])
def test_act_order(written, tmp_path, stated_as):
    """A g_idx of its own for each expert and product: column k takes scale and zero point of group g_idx[k]."""
    source = written("w4a16_g32_asym")
    order = {}

    def shuffled(length, key):
        groups = np.arange(length) // 32
        return order.setdefault(key, np.random.default_rng(len(order)).permutation(groups).astype(np.int32))

    tensors, stated = load_file(source / "model.safetensors"), json.loads((source / "config.json").read_text())
    expected = {}
    for name, array in list(tensors.items()):
        if ".experts." in name and name.endswith("weight_packed"):
            expert, projection = name.split(".")[5:7]
            module, k = name.removesuffix(".weight_packed"), array.shape[1] * 8
            g_idx = shuffled(k, (expert, projection == "down_proj"))
            tensors[f"{module}.weight_g_idx"] = g_idx
            q = (packing.unpack_words(array, 4, k)).astype(np.float32)
            zero = packing.unpack_words(tensors[f"{module}.weight_zero_point"].T.copy(), 4, array.shape[0]).T
            difference = q - zero.astype(np.float32)[:, g_idx]
            expected[int(expert), projection] = difference * tensors[f"{module}.weight_scale"][:, g_idx]
    stated["quantization_config"]["config_groups"]["group_0"]["weights"]["actorder"] = stated_as
    directory = tmp_path / "actorder"
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(stated))
    weights, stored = load(directory)
    assert stored.name == "w4a16_g32_asym_actorder"
    assert weights.w13.g_idx.shape == (E, H) and weights.w2.g_idx.shape == (E, I)
    assert_weights_are(weights, expected)

    name = "model.layers.0.mlp.experts.1.up_proj.weight_g_idx"
    for change, message in (
        (lambda g: g[::-1], "w13_weight_g_idx of w1 and w3 must be equal"),
        (lambda g: g.astype(np.float32), "found dtype float32, expected int32"),
        (lambda g: g[:-1], "expected shape"),
    ):
        save_file(tensors | {name: np.ascontiguousarray(change(tensors[name]))}, directory / "model.safetensors")
        refuses(CheckpointError, message, load, directory)
    down = name.replace("up_proj", "down_proj")
    save_file(tensors | {down: tensors[down] + np.int32(1)}, directory / "model.safetensors")
    refuses(CheckpointError, "expert 1 has group 2 at column .*, expected 0 to 1", load, directory)
    unset = {n: np.full_like(a, -1) for n, a in tensors.items() if n.endswith("g_idx")}
    save_file(tensors | unset, directory / "model.safetensors")
    plain = matrices(source.with_name(f"{source.name}-decompressed"))
    assert_weights_are(load(directory)[0], plain)


@pytest.mark.parametrize("stated_as", ["weight", "static"])
def test_quantizing_in_another_order_leaves_no_trace(written, tmp_path, stated_as):
    source = written("w4a16_g32")
    directory = rewritten(source, tmp_path / "static", lambda suffix, array: {suffix: array})
    stated = json.loads((directory / "config.json").read_text())
    stated["quantization_config"]["config_groups"]["group_0"]["weights"]["actorder"] = stated_as
    (directory / "config.json").write_text(json.dumps(stated))
    weights, stored = load(directory)
    assert stored.name == "w4a16_g32"
    assert_weights_are(weights, matrices(source.with_name(f"{source.name}-decompressed")))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_negative_scales_are_read(written, tmp_path, dtype):
    """AutoRound's: half of them below zero, in 16 bits."""
    source = written("w4a16_g32")
    directory = rewritten(
        source,
        tmp_path / "negative",
        lambda s, a: (
            {s: (a * np.where(np.arange(a.shape[0]) % 2, -1, 1)[:, None]).astype(dtype)}
            if s == "weight_scale"
            else {s: a}
        ),
    )
    expected = {}
    for key, w in matrices(source.with_name(f"{source.name}-decompressed")).items():
        expected[key] = w * np.where(np.arange(w.shape[0]) % 2, np.float32(-1), np.float32(1))[:, None]
    weights, _ = load(directory)
    assert (np.asarray(weights.w13.scale) < 0).any()
    if dtype == np.float32:
        assert_weights_are(weights, expected)
    else:
        np.testing.assert_allclose(np.asarray(dequantize_tensor(weights.w2))[0], expected[0, "down_proj"], rtol=1e-3)


def test_what_is_missing_or_damaged_is_named(written, tmp_path):
    source = written("w4a16_g32_asym")
    dropped = rewritten(source, tmp_path / "dropped", lambda s, a: {} if s == "weight_zero_point" else {s: a})
    refuses(CheckpointError, "missing: .*weight_zero_point of all 3 experts", load, dropped)
    short = rewritten(source, tmp_path / "short", lambda s, a: {s: a[:, 1:] if s == "weight_packed" else a})
    refuses(CheckpointError, r"w2_weight_packed: expected shape \(96, 8\), found \(96, 7\)", load, short)
    refuses(ValueError, "is stored as w4a16_g32_asym and cannot be loaded as w4a16_g32", load, source, "w4a16_g32")


def test_the_dtype_of_group_scales_is_the_files(written, tmp_path):
    """Of all its experts; a layer that was made for it refuses others, one that was not takes all, in float32."""
    source = written("w4a16_g32")
    tensors = load_file(source / "model.safetensors")
    stored = next(array.dtype for name, array in tensors.items() if name.endswith("experts.0.up_proj.weight_scale"))
    assert load(source)[1].weights.group_scale_dtype == stored.name
    halves = rewritten(source, tmp_path / "f16", lambda s, a: {s: a.astype(np.float16) if s == "weight_scale" else a})
    weights, scheme = load(halves)
    assert scheme.weights.group_scale_dtype == weights.w2.fmt.group_scale_dtype == "float16"
    several = iter(range(100))
    mixed = rewritten(
        source,
        tmp_path / "mixed",
        lambda s, a: {s: a.astype(np.float32) if s == "weight_scale" and next(several) else a},
    )
    assert load(mixed)[1].weights.group_scale_dtype == "float32"
    odd = rewritten(source, tmp_path / "odd", lambda s, a: {s: a * np.float32(1.1) if s == "weight_scale" else a})
    with Checkpoint(odd) as checkpoint, pytest.raises(CheckpointError, match="weight_scale: .* not exact in float16"):
        ExpertReader(checkpoint).load(0, config(scheme=scheme))
    with Checkpoint(odd) as checkpoint:
        asked = ExpertReader(checkpoint).load(0, config(scheme=Scheme.parse("w4a16_g32")))
    assert asked.w13.fmt.group_scale_dtype == "float32"


def test_online_quantization(written):
    """A bf16 checkpoint through the loader has compressed-tensors' own codes, scales and zero points, but for ties."""
    for case in ("w4a16_g32_asym", "w3a16_channel", "w4a8_int8_g32"):
        stored, _ = load(written(case))
        with Checkpoint(written(case).with_name("bf16")) as checkpoint:
            online = load_layer(checkpoint, 0, config(), case)
        for ours, judge in ((online.w13, stored.w13), (online.w2, stored.w2)):
            np.testing.assert_array_equal(ours.scale, judge.scale)
            np.testing.assert_array_equal(ours.data, judge.data)
            if judge.zero_point is not None:
                np.testing.assert_array_equal(ours.zero_point, judge.zero_point)


@pytest.mark.parametrize(
    "case, asked, found",
    [
        ("w4a16_g32", "w4a8_int8_g32", "w4a8_int8_g32_packed"),
        ("w4a16_channel_asym", "w4a8_int8_channel_asym_asym_inputs", "w4a8_int8_channel_asym_asym_inputs_packed"),
        ("w3a16_channel", "w3a8_fp8_channel", "w3a8_fp8_channel"),
    ],
)
@pytest.mark.sample(3)
def test_activations_of_a_weight_only_file_may_be_quantized(written, case, asked, found):
    """M195: by the name that full-precision weights would take; the packed weights stay what the file has."""
    directory = written(case)
    experts = load_moe(directory, 0, quantize=asked, dtype=jnp.float32).experts
    weights, config = experts.weights.get_value(), experts.config
    assert config.scheme.name == weights.scheme.name == found
    assert ("quantized to e4m3" if "fp8" in asked else "quantized to int8") in experts.explain(4)
    assert_weights_are(weights, matrices(directory.with_name(f"{case}-decompressed")))
    x = np.random.default_rng(3).standard_normal((9, H)).astype(np.float32)
    p, ids = make_routing(9, config.top_k, E)
    y = jax.jit(fused_experts, static_argnums=4)(x, p, ids, weights, config)
    assert_layer_close(y, x, p, ids, weights, config, kernels=False)
    with pytest.raises(ValueError, match=f"is stored as {case} and cannot be loaded as w4a8_int8_g64"):
        load_moe(directory, 0, quantize="w4a8_int8_g64")
