"""New weights for a layer that serves: whole or by expert, from any stream, at once or not at all, without growth."""

import dataclasses
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moe_jax
from moe_jax.loading import CheckpointError, ExpertStream, LayerLoader, packed_pairs
from moe_jax.loading.files._arrays import checked_experts
from moe_jax.loading.layer import _layer_loader as layer_loader
from moe_jax.quantization import method_for
from tests.support.checkpoints.expert_tensors import (
    BF16,
    INTER,
    PROJECTIONS,
    E,
    H,
    assert_same,
    config,
    frozen,
    plain_tensors,
    static_tensors,
)
from tests.support.refusals import refuses

PREFIX = "model.layers.0.mlp.experts"


def made(scheme="int8_w8a16", tensors=None, **options):
    """A loaded layer of the sizes in expert_tensors."""
    layer = moe_jax.FusedMoE(E, H, INTER, top_k=2, scheme=scheme, dtype=jnp.float32, **options)
    layer.load_weights((tensors or plain_tensors()).items())
    layer.process_weights_after_loading()
    return layer


def of_expert(tensors, *experts):
    return {name: t for name, t in tensors.items() if int(name.split("experts.")[1].split(".")[0]) in experts}


def test_a_correction_bias_that_nobody_asked_for_is_named():
    """It changes which experts a token gets. A bias given as an array is the layer's; what a checkpoint has is not."""
    bias = ("model.layers.0.mlp.gate.e_score_correction_bias", np.arange(E, dtype=np.float32))
    layer = moe_jax.FusedMoE(E, H, INTER, top_k=2)
    layer.load_weights([*plain_tensors().items(), bias])
    refuses(ValueError, f"unexpected: {bias[0]}", layer.process_weights_after_loading)
    layer.load_weights(plain_tensors().items())
    layer.process_weights_after_loading()
    with pytest.raises(ValueError, match="unexpected"):
        layer.reload_weights([*of_expert(plain_tensors(), 1).items(), bias], experts=[1])
    own = moe_jax.FusedMoE(E, H, INTER, top_k=2, scoring_func="sigmoid", e_score_correction_bias=np.ones(E))
    with pytest.raises(
        ValueError, match=f"{bias[0]}: differs from the e_score_correction_bias that the layer was built"
    ):
        own.load_weights([*plain_tensors().items(), bias])
    assert bias[0] not in own.load_weights([*plain_tensors().items(), (bias[0], np.ones(E, np.float32))])
    own.process_weights_after_loading()
    with pytest.raises(ValueError, match="differs from"):
        own.reload_weights([*plain_tensors().items(), bias])
    other_layer = (bias[0].replace("layers.0", "layers.1"), bias[1])
    assert own.reload_weights([*plain_tensors().items(), other_layer]) == set(plain_tensors())


@pytest.mark.parametrize("own", [None, True, np.ones(E)])
def test_a_misspelt_correction_bias_is_named(own):
    options = dict(top_k=2, scoring_func="sigmoid", e_score_correction_bias=own)
    right = [("model.layers.0.mlp.gate.e_score_correction_bias", np.ones(E, np.float32))] if own is True else []
    for word in ("e_scor_correction_bias", "correction_bias", "e_score_correction_biass"):
        layer, name = moe_jax.FusedMoE(E, H, INTER, **options), f"model.layers.0.mlp.gate.{word}"
        layer.load_weights([*plain_tensors().items(), *right, (name, np.ones(E, np.float32))])
        refuses(ValueError, f"unexpected: {name}", layer.process_weights_after_loading)


# -- by expert --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["bf16", "w4a16_g32_asym"])
@pytest.mark.sample(2)
def test_some_experts(scheme):
    """Every leaf of the experts named is new, every other one is what it was; ids in any order; no recompilation."""
    old, new = plain_tensors(bias=True), plain_tensors(bias=True, seed=1)
    layer = made(scheme, old, has_bias=True)
    run = jax.jit(lambda layer, x, z: layer(x, z))
    x, z = np.ones((5, H), np.float32), np.zeros((5, E), np.float32)
    run(layer, x, z)
    layer.reload_weights(of_expert(new, 2, 0).items(), experts=[2, 0])
    run(layer, x, z)
    assert run._cache_size() == 1 and "weights version: 1" in layer.explain(1)
    mixed = of_expert(new, 0, 2) | of_expert(old, 1)
    assert_same(layer.weights.get_value(), made(scheme, mixed, has_bias=True).weights.get_value())


def test_what_experts_refuses():
    layer, new = made(), plain_tensors(seed=1)
    before = layer.weights.get_value().w13.data
    for experts, pairs, message in (
        ([1], of_expert(new, 1, 2), r"unexpected: .*experts\.2\."),
        ([1, 2], of_expert(new, 1), r"missing: gate_proj.weight of expert 2"),
        ([1], {f"{PREFIX}.down_proj": np.ones((E, H, INTER), BF16)}, r"holds all experts, but only experts \[1\]"),
        ([1, 1], {}, r"experts=\[1, 1\]: expected different ids from 0 to 2"),
        ([E], {}, rf"experts=\[{E}\]: expected different ids"),
        ([], {}, r"experts=\[\]"),
    ):
        with pytest.raises(ValueError, match=message):
            layer.reload_weights(pairs.items(), experts=experts)
    with pytest.raises(TypeError, match=r"experts=\[True\]: expected a list of integers, the ids of experts"):
        layer.reload_weights({}.items(), experts=[True])
    for experts in (1, True, "1", b"1", [0.0], np.eye(2, dtype=int), {1: 2}):
        refuses(TypeError, "expected a list of integers", checked_experts, experts, E)
    assert checked_experts(np.array([2, 0]), E) == [2, 0]
    assert layer.weights.get_value().w13.data is before
    with pytest.raises(ValueError, match="one input scale for all experts"):
        made("fp8_tensor_static", static_tensors()).reload_weights({}.items(), experts=[0])


def test_a_correction_bias_stays():
    bias = ("model.layers.0.mlp.gate.e_score_correction_bias", np.arange(E, dtype=np.float32))
    layer = moe_jax.FusedMoE(E, H, INTER, top_k=2, scoring_func="sigmoid", e_score_correction_bias=True)
    layer.load_weights([*plain_tensors().items(), bias])
    layer.process_weights_after_loading()
    layer.reload_weights(of_expert(plain_tensors(seed=1), 1).items(), experts=[1])
    np.testing.assert_array_equal(layer.correction_bias.get_value(), bias[1])
    layer.reload_weights([*plain_tensors(seed=1).items(), (bias[0], bias[1] + 1)])
    np.testing.assert_array_equal(layer.correction_bias.get_value(), bias[1] + 1)


# -- at once or not at all --------------------------------------------------------------------------------------------


def break_reading(monkeypatch):
    def pairs():
        yield from list(plain_tensors(seed=1).items())[:-1]
        raise OSError("the trainer is gone")

    return pairs(), OSError


def break_shape(monkeypatch):
    pairs = plain_tensors(seed=1)
    pairs[f"{PREFIX}.2.up_proj.weight"] = np.ones((INTER, H - 1), BF16)
    return pairs.items(), ValueError


def break_value(monkeypatch):
    pairs = plain_tensors(seed=1)
    pairs[f"{PREFIX}.2.up_proj.weight"] = np.full((INTER, H), np.inf, BF16)
    return pairs.items(), ValueError


def break_completeness(monkeypatch):
    return list(plain_tensors(seed=1).items())[1:], ValueError


def break_bias(monkeypatch):
    bias = ("model.layers.0.mlp.gate.e_score_correction_bias", np.full(E, np.nan, np.float32))
    return [*plain_tensors(seed=1).items(), bias], ValueError


def break_quantization(monkeypatch):
    """The last of the experts fails: those before it are quantized already."""
    method = type(method_for("int8_w8a16"))
    original, calls = method.quantize_leaves, []

    def fail(self, *args):
        calls.append(1)
        if len(calls) == E:
            raise MemoryError("no room")
        return original(self, *args)

    monkeypatch.setattr(method, "quantize_leaves", fail)
    return plain_tensors(seed=1).items(), MemoryError


def break_transfer(monkeypatch):
    """The last leaf does not fit on the device."""
    original, calls = layer_loader._on_device, []

    def fail(leaf):
        calls.append(1)
        if len(calls) == 4:
            raise RuntimeError("RESOURCE_EXHAUSTED")
        return original(leaf)

    monkeypatch.setattr(layer_loader, "_on_device", fail)
    return plain_tensors(seed=1).items(), RuntimeError


@pytest.mark.parametrize(
    "broken",
    [
        break_reading,
        break_shape,
        break_value,
        break_completeness,
        break_bias,
        break_quantization,
        break_transfer,
    ],
)
def test_a_failure_anywhere_leaves_everything_as_it_was(monkeypatch, broken):
    options = dict(e_score_correction_bias=True, scoring_func="sigmoid")
    bias = ("model.layers.0.mlp.gate.e_score_correction_bias", np.arange(E, dtype=np.float32))
    layer = made("int8_w8a16", dict([*plain_tensors().items(), bias]), **options)
    before = [(leaf, np.asarray(leaf).tobytes()) for leaf in jax.tree.leaves(layer)]
    pairs, error = broken(monkeypatch)
    if broken not in (break_bias, break_completeness):
        pairs = (pair for source in ([bias], pairs) for pair in source)
    with pytest.raises(error):
        layer.reload_weights(pairs)
    after = jax.tree.leaves(layer)
    assert all(
        leaf is old and np.asarray(leaf).tobytes() == stored for leaf, (old, stored) in zip(after, before, strict=True)
    )
    monkeypatch.undo()
    layer.reload_weights([*plain_tensors(seed=1).items(), bias])  # a fresh call works
    assert_same(layer.weights.get_value(), made("int8_w8a16", plain_tensors(seed=1)).weights.get_value())


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.slow)])
def test_many_reloads_hold_no_more_memory_than_one(count):
    """M229. Live arrays are counted; the last values are exact."""
    sizes = dict(num_experts=1, hidden_size=8, intermediate_size=8)
    layer = moe_jax.FusedMoE(**sizes, top_k=1, scheme="int8_w8a16")
    rng = np.random.default_rng(0)

    def pairs():
        for name in PROJECTIONS:
            yield f"experts.0.{name}.weight", rng.standard_normal((8, 8)).astype(np.float32)

    layer.load_weights(pairs())
    layer.process_weights_after_loading()

    def held():
        gc.collect()
        return len(jax.live_arrays()), len(gc.get_objects())

    for _ in range(20):
        layer.reload_weights(pairs())
    arrays, objects = held()
    for _ in range(count - 21):
        layer.reload_weights(pairs())
    last = dict(pairs())
    layer.reload_weights(last.items())
    arrays_after, objects_after = held()
    assert arrays_after <= arrays and objects_after < objects + 200
    assert f"weights version: {count}" in layer.explain(1)
    fresh = moe_jax.FusedMoE(**sizes, top_k=1, scheme="int8_w8a16")
    fresh.load_weights(last.items())
    fresh.process_weights_after_loading()
    assert_same(layer.weights.get_value(), fresh.weights.get_value())


# -- streams ----------------------------------------------------------------------------------------------------------


def two_layers():
    return {
        name: tensor
        for layer in (3, 5)
        for name, tensor in plain_tensors(f"model.layers.{layer}.mlp.", BF16, seed=layer).items()
    }


@pytest.mark.parametrize("scheme", ["int8_w8a16", "bf16"])
def test_streams_in_any_order(scheme):
    """The same bits in file order, by projection and shuffled; what was staged is bounded by what is incomplete."""
    tensors = two_layers()
    one_layer = sum(t.nbytes for t in tensors.values()) // 2
    one_expert = one_layer // E
    orders = {"file": list(tensors), "projection": sorted(tensors, key=lambda n: n.split(".")[-2])}
    orders["shuffled"] = list(np.random.default_rng(0).permutation(orders["file"]))
    found, reports = {}, {}
    for order, names in orders.items():
        stream = ExpertStream({layer: config(scheme) for layer in (3, 5)})
        for name in names:
            stream.accept(name, tensors[name])
        found[order], reports[order] = stream.finish(), stream.report
    for layer in (3, 5):
        own = {name: t for name, t in tensors.items() if f".{layer}." in name}
        loader = LayerLoader(config(scheme))
        loader.load(own.items())
        expected = loader.finish()
        for weights in found.values():
            assert_same(weights[layer], expected)
    assert reports["file"].peak_open_layers == 1 and reports["projection"].peak_open_layers == 2
    assert reports["file"].peak_staged_bytes == (one_expert if scheme == "int8_w8a16" else one_layer)
    assert reports["projection"].peak_staged_bytes <= 2 * one_layer
    assert reports["shuffled"].peak_staged_bytes <= 2 * one_layer


def test_a_stream_frees_what_is_complete():
    """In file order an expert's tensors are let go before the next expert's come, and a late tensor is named."""
    stream = ExpertStream({layer: config("int8_w8a16") for layer in (3, 5)})
    for name, tensor in two_layers().items():
        stream.accept(name, frozen(tensor.copy()))
    refuses(ValueError, "carries no layer", stream.accept, "experts.0.gate_proj.weight", np.zeros((INTER, H), BF16))
    stream.accept("model.layers.9.mlp.experts.0.gate_proj.weight", np.zeros((INTER, H), BF16))
    assert stream.surplus == ["model.layers.9.mlp.experts.0.gate_proj.weight"]
    stream.accept("model.layers.3.mlp.experts.0.gate_proj.weight", np.zeros((INTER, H), BF16))
    refuses(ValueError, r"duplicate or unexpected: model\.layers\.3\.mlp\.experts\.0\.gate_proj", stream.finish)
    stream = ExpertStream({3: config("int8_w8a16")})
    stream.accept("model.layers.3.mlp.experts.0.gate_proj.weight", np.zeros((INTER, H), BF16))
    refuses(ValueError, "missing: gate_proj.weight of experts 1-2", stream.finish)


GPTQ = dict(quant_method="gptq", bits=4, group_size=16, sym=False, desc_act=False)
AWQ = dict(quant_method="awq", bits=4, group_size=16, zero_point=True, version="gemm")


def packed_layer(stated, seed):
    """One layer of random codes as GPTQ or AWQ stores them; names shuffled."""
    rng = np.random.default_rng(seed)
    words = lambda *shape: rng.integers(0, 1 << 31, shape, np.int32) & 0x6EEEEEEE  # noqa: E731  # no zero point 15
    tensors = {}
    for expert in range(E):
        for name, (n, k) in PROJECTIONS.items():
            module = f"{PREFIX}.{expert}.{name}"
            is_gptq = stated["quant_method"] == "gptq"
            tensors[f"{module}.qweight"] = words(k // 8, n) if is_gptq else words(k, n // 8)
            tensors[f"{module}.qzeros"] = words(k // 16, n // 8)
            tensors[f"{module}.scales"] = rng.random((k // 16, n)).astype(np.float16)
            if is_gptq:
                tensors[f"{module}.g_idx"] = (np.arange(k) // 16).astype(np.int32)
    return [(name, tensors[name]) for name in rng.permutation(list(tensors))]


@pytest.mark.parametrize("stated", [GPTQ, AWQ], ids=lambda stated: stated["quant_method"])
def test_gptq_and_awq_tensors_one_by_one(stated):
    """A stream in any order gives what the same tensors in a checkpoint give, at first and on a reload."""
    layer = moe_jax.FusedMoE(E, H, INTER, top_k=2, scheme="w4a16_g16_asym")
    for seed in (0, 1):
        pairs = packed_layer(stated, seed)
        if seed == 0:
            layer.load_weights(packed_pairs(iter(pairs), stated))
            layer.process_weights_after_loading()
        else:
            layer.reload_weights(packed_pairs(iter(pairs), stated))
        in_order = moe_jax.FusedMoE(E, H, INTER, top_k=2, scheme="w4a16_g16_asym")
        in_order.load_weights(packed_pairs(sorted(pairs), stated))
        in_order.process_weights_after_loading()
        assert_same(layer.weights.get_value(), in_order.weights.get_value())
    others = [("model.norm.weight", np.ones(H, np.float32))]
    assert list(packed_pairs(others, stated)) == others and list(packed_pairs(others, None)) == others
    with pytest.raises(CheckpointError, match="scales is given twice"):
        list(
            packed_pairs(
                [pairs[0] if "scales" in pairs[0][0] else p for p in pairs if "scales" in p[0]][:1] * 2, stated
            )
        )
    with pytest.raises(ValueError, match="missing: .*weight_zero_point of expert"):
        layer.reload_weights(packed_pairs([p for p in pairs if "0.up_proj.qzeros" not in p[0]], stated))


def test_derived_arrays_are_renewed():
    """Scales and what else processing makes of a checkpoint change with the weights they belong to."""
    layer = made("fp8_tensor_static", static_tensors())
    before = jax.tree.map(np.asarray, layer.weights.get_value())
    doubled = {name: t if t.dtype != np.float32 else 2 * t for name, t in static_tensors().items()}
    layer.reload_weights(doubled.items())
    after = layer.weights.get_value()
    for old, new in ((before.w13, after.w13), (before.w2, after.w2)):
        np.testing.assert_array_equal(new.scale, 2 * old.scale)
        np.testing.assert_array_equal(new.input_scale, 2 * old.input_scale)
        np.testing.assert_array_equal(new.data, old.data)
    assert dataclasses.replace(after.w13, scale=None).fmt == before.w13.fmt
