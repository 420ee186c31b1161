"""What a layer's loader refuses, and that a refusal leaves it as it was."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest

from moe_jax import Scheme
from moe_jax.loading import LayerLoader
from moe_jax.loading.layer._values import TensorError
from moe_jax.quantization import LeafSpec, method_for
from tests.support.checkpoints.expert_tensors import (
    BF16,
    INTER,
    E,
    H,
    assert_same,
    config,
    filled,
    fused,
    loaded,
    plain_tensors,
    static_tensors,
)
from tests.support.refusals import refuses


def test_one_error_names_everything():
    tensors = plain_tensors(bias=True)
    loader = LayerLoader(config(has_bias=True))
    gone = [n for n in tensors if n.endswith("experts.1.up_proj.bias") or "down_proj.weight" in n]
    loader.load((n, t) for n, t in tensors.items() if n not in gone)
    again = "model.layers.0.mlp.experts.2.gate_proj.weight"
    assert not loader.accept(again, tensors[again])
    unexpected = [
        "model.layers.0.mlp.experts.3.gate_proj.weight",
        "model.layers.0.mlp.experts.0.gate_proj.weight_g_idx",
        "model.layers.0.mlp.experts.0.router.weight",
        "model.layers.0.mlp.experts.gate_up_proj_blocks",
    ]
    for name in unexpected:
        assert not loader.accept(name, np.zeros((INTER, H), BF16))
    assert loader.missing() == {"w2_weight": {"w2": [0, 1, 2]}, "w13_bias": {"w3": [1]}}
    with pytest.raises(ValueError) as caught:
        loader.finish()
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(
        "experts of layer 0: missing: down_proj.weight of all 3 experts, up_proj.bias of expert 1; "
        f"duplicate: {again}; unexpected: {', '.join(unexpected)}; expected every tensor of 3 experts exactly once"
    )


def test_missing_is_listed_compactly():
    layer = config(num_experts=40)
    loader = LayerLoader(layer)
    for e in set(range(40)) - {3, 4, 5, 9, *range(20, 40)}:
        loader.accept(f"experts.{e}.w1.weight", np.zeros((INTER, H), BF16))
    refuses(ValueError, r"gate_proj\.weight of experts 3-5, 9, 20-39, up_proj\.weight of all 40 experts", loader.finish)


def test_incomplete_layer_can_be_completed():
    tensors = plain_tensors()
    first = next(iter(tensors))
    loader = filled(config("fp8_channel"), ((n, t) for n, t in tensors.items() if n != first))
    refuses(ValueError, "missing: gate_proj.weight of expert 0", loader.finish)
    loader.accept(first, tensors[first])
    assert_same(loader.finish(), loaded(config("fp8_channel"), tensors))
    refuses(ValueError, "already finished", loader.finish)
    refuses(ValueError, "already finished", loader.accept, first, tensors[first])


def test_duplicates_never_overwrite():
    """The first value stays, also for a fused tensor over experts that are there already."""
    tensors = plain_tensors()
    loader = filled(config(), tensors)
    kept = {leaf: array.copy() for leaf, array in loader._staging._buffers.items()}
    for name, tensor in [*fused(plain_tensors(seed=1)).items(), *plain_tensors(seed=1).items()]:
        assert not loader.accept(name, tensor)
    for leaf, array in kept.items():
        assert loader._staging._buffers[leaf].tobytes() == array.tobytes()
    refuses(ValueError, r"duplicate: experts\.gate_up_proj, experts\.down_proj, model", loader.finish)


@pytest.mark.parametrize(
    "name, shape",
    [
        ("experts.0.gate_proj.weight", (H, INTER)),
        ("experts.0.gate_proj.weight", (INTER, H, 1)),
        ("experts.0.gate_proj.weight", (INTER - 1, H)),
        ("experts.0.down_proj.weight", (INTER, H)),
        ("experts.0.gate_up_proj.weight", (INTER, H)),
        ("experts.gate_up_proj", (E + 1, 2 * INTER, H)),
        ("experts.gate_up_proj", (E, 2 * INTER, H + 1)),
        ("experts.gate_up_proj", (2 * INTER, H)),
        ("experts.0.gate_proj.bias", (INTER, 1)),
        ("experts.0.down_proj.bias", (INTER,)),
        ("experts.down_proj_bias", (H,)),
        ("experts.0.gate_proj.weight", ()),
        ("experts.0.down_proj.bias", ()),
    ],
)
def test_wrong_shape_leaves_the_loader_as_it_was(name, shape):
    layer = config(has_bias=True)
    loader = LayerLoader(layer)
    with pytest.raises(ValueError, match=rf"^{name}.*expected .*found|^{name}.*found .*expected"):
        loader.accept(name, np.zeros(shape, BF16))
    assert loader.staged_bytes == 0
    assert_same(loader_with(loader, plain_tensors(bias=True)), loaded(layer, plain_tensors(bias=True)))


@pytest.mark.parametrize(
    "scheme, leaf, dtype",
    [
        ("fp8_channel", "weight", ml_dtypes.float8_e4m3fn),
        ("fp8_channel", "weight_scale", np.float32),
        ("w3a16_g32_asym", "weight_packed", np.int32),
        ("w3a16_g32_asym", "weight_zero_point", np.int32),
    ],
)
def test_one_number_is_no_matrix(scheme, leaf, dtype):
    """It would be spread over all places of an expert."""
    name = f"experts.2.up_proj.{leaf}"
    loader = LayerLoader(config(scheme, hidden_size=64, intermediate_size=32))
    with pytest.raises(
        ValueError, match=rf"^{name}: found a single number, shape \(\), expected an array of w13_{leaf}"
    ):
        loader.accept(name, np.ones((), dtype))


def loader_with(loader, tensors):
    loader.load(tensors.items())
    return loader.finish()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.int16, np.uint16, np.float64, ml_dtypes.float8_e4m3fn])
def test_one_dtype_for_a_layer(dtype):
    """A tensor whose dtype was swapped for another of the same width must not load."""
    tensors = plain_tensors()
    name = "model.layers.0.mlp.experts.1.up_proj.weight"
    loader = filled(config(), ((n, t) for n, t in tensors.items() if n != name))
    with pytest.raises(ValueError, match=f"{name}: found dtype {np.dtype(dtype)}, expected bfloat16 as in model"):
        loader.accept(name, np.zeros((INTER, H), dtype))
    loader.accept(name, tensors[name])
    assert_same(loader.finish(), loaded(config(), tensors))


def test_one_dtype_for_scales():
    tensors = static_tensors()
    name = "experts.2.down_proj.weight_scale"
    loader = LayerLoader(config("fp8_tensor_static"))
    with pytest.raises(ValueError, match="all weight_scale tensors of a layer's experts share one dtype"):
        loader.load((tensors | {name: tensors[name].astype(np.float16)}).items())


@pytest.mark.parametrize(
    "scheme, dtype, suffix, expected",
    [
        ("bf16", np.int8, "weight", "float32 or bfloat16 or float16"),
        ("bf16", ml_dtypes.float8_e4m3fn, "weight", "float32 or bfloat16 or float16"),
        ("bf16", np.float64, "weight", "float32 or bfloat16 or float16"),
        ("fp8_channel", np.int8, "weight", "float8_e4m3fn"),
        ("fp8_channel", ml_dtypes.float8_e5m2, "weight", "float8_e4m3fn"),
        ("int8_w8a8", np.uint8, "weight", "int8"),
        ("fp8_channel", np.int32, "weight_scale", "float32 or bfloat16 or float16 or float8_e8m0fnu"),
    ],
)
def test_wrong_dtype(scheme, dtype, suffix, expected):
    shape = (INTER, 1) if suffix.endswith("scale") else (INTER, H)
    loader = LayerLoader(config(scheme))
    with pytest.raises(ValueError, match=rf"found dtype {np.dtype(dtype)}, expected {expected} for scheme '{scheme}'"):
        loader.accept(f"experts.0.gate_proj.{suffix}", np.zeros(shape, dtype))


def test_full_precision_where_the_config_says_quantized():
    """T12: with the config's word given, 16-bit experts are refused and not quantized on the sly."""
    name, tensor = next(iter(plain_tensors().items()))
    with pytest.raises(ValueError, match="found dtype bfloat16, expected float8_e4m3fn"):
        LayerLoader(config("fp8_channel"), quantize=False).accept(name, tensor)
    loader = filled(config("fp8_channel"), plain_tensors())
    loader.accept("experts.0.gate_proj.weight_scale", np.ones((INTER, 1), np.float32))
    refuses(ValueError, r"unexpected: experts\.0\.gate_proj\.weight_scale", loader.finish)


@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0])
@pytest.mark.parametrize("suffix", ["weight_scale", "input_scale"])
def test_bad_scale(suffix, value):
    tensors = static_tensors()
    tensors[f"experts.1.up_proj.{suffix}"] = np.float32([value])
    loader = filled(config("fp8_tensor_static", name="model.layers.5.mlp.experts"), tensors)
    refuses(ValueError, rf"w13_{suffix}: expert 1 \(w3\) has scale {value}", loader.finish)


@pytest.mark.parametrize("source", [np.float32, np.float16, BF16])
@pytest.mark.parametrize("target", ["float32", "float16", "bfloat16"])
def test_param_dtype(source, target):
    """Full-precision weights come in the parameter dtype: rounded once, exact where the dtype can hold them."""
    tensors = plain_tensors(dtype=source)
    weights = loaded(config(param_dtype=target), tensors)
    gate = tensors["model.layers.0.mlp.experts.1.gate_proj.weight"]
    assert weights.w13.data.dtype == target
    np.testing.assert_array_equal(weights.w13.data[1, 0], gate.astype(np.dtype(weights.w13.data.dtype)))


def test_overflow_of_float16():
    tensors = plain_tensors(dtype=np.float32)
    name = "model.layers.0.mlp.experts.1.gate_proj.weight"
    big = tensors[name].copy()
    big[2, 3] = 1e6
    loader = LayerLoader(config(param_dtype="float16"))
    refuses(ValueError, rf"{name}: 1 values exceed float16", loader.accept, name, big)
    LayerLoader(config("int8_w8a16", param_dtype="float16")).accept(name, big)  # quantized from float32, never float16


def test_common_input_scale():
    """M125: one place for w1 and w3 demands equal values, also when the first one is 1 (where vLLM stops checking)."""

    @dataclasses.dataclass(frozen=True)
    class OneInputScale(type(method_for("fp8_tensor_static"))):
        def create_weights(self, config):
            scale = LeafSpec((config.num_experts,), np.dtype(np.float32), "input_scale", 1.0)
            return super().create_weights(config) | {"w13_input_scale": scale}

    method = OneInputScale(Scheme.parse("fp8_tensor_static"))
    for first in (1.0, 0.02):
        loader = LayerLoader(config("fp8_tensor_static"), method)
        loader.accept("experts.0.up_proj.input_scale", np.float32([first]))
        loader.accept("experts.1.gate_proj.input_scale", np.float32([5]))
        with pytest.raises(ValueError, match="w13_input_scale of w1 and w3 must be equal"):
            loader.accept("experts.0.gate_proj.input_scale", np.float32([first * 1.001]))
        assert loader.accept("experts.0.gate_proj.input_scale", np.float32(first * (1 + 1e-7)))
        assert loader.missing()["w13_input_scale"] == {"w1": [2], "w3": [1, 2]}


def test_damage_that_a_thread_finds():
    """What it copied is not used any more, however often the layer is asked for."""
    tensors, name = plain_tensors(), "model.layers.0.mlp.experts.1.up_proj.weight"
    damaged = tensors[name].copy()
    damaged[2, 7] = np.nan
    with ThreadPoolExecutor(2) as executor:
        loader = filled(config(), tensors | {name: damaged}, executor=executor)
        for _ in range(2):
            with pytest.raises(
                TensorError, match=rf"{name}: 1 values are NaN or infinite, the first at \(2, 7\)"
            ) as found:
                loader.finish()
            assert found.value.name == name and loader.is_invalid
        sound = filled(config(), tensors, executor=executor)
        assert_same(sound.finish(), loaded(config(), tensors))


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((INTER, H + 1), BF16), r"expected shape \(32, 48\), found \(32, 49\)"),
        (np.zeros((INTER, H), np.float16), "found dtype float16, expected bfloat16"),
        (np.full((INTER, H), np.inf, BF16), "1536 values are NaN or infinite"),
    ],
)
def test_what_held_for_one_expert_is_checked_for_the_next(array, message):
    """Places are found once for a kind of tensor; every tensor of it is looked at all the same."""
    loader, tensors = LayerLoader(config()), plain_tensors()
    loader.load(tensors_of(tensors, 0))
    refuses(ValueError, message, loader.accept, "model.layers.0.mlp.experts.1.gate_proj.weight", array)
    loader.load(tensors_of(tensors, 1, 2))
    assert_same(loader.finish(), loaded(config(), tensors))


def tensors_of(tensors, *experts):
    return [(name, tensor) for name, tensor in tensors.items() if int(name.split(".")[5]) in experts]


def test_a_weight_shape_of_no_expert_is_unexpected():
    name = "model.layers.0.mlp.experts.7.down_proj.weight_shape"
    loader = LayerLoader(config("w4a16_g32"))
    assert not loader.accept(name, np.array([H, INTER]))
    refuses(ValueError, f"unexpected: {name}", loader.finish)


def test_one_expert_has_no_axis_of_experts():
    """Not even in a layer of one expert, where the shape would fit; fused names have one."""
    loader = LayerLoader(config(num_experts=1, top_k=1))
    with pytest.raises(ValueError, match=r"up_proj.weight: found shape \(1, 32, 48\), expected that of one expert"):
        loader.accept("model.layers.0.mlp.experts.0.up_proj.weight", np.ones((1, INTER, H), np.float32))
    assert loader.accept("model.layers.0.mlp.experts.down_proj", np.ones((1, H, INTER), np.float32))
