"""One layer's experts: every element exactly once, in any order and spelling, within one layer's memory."""

import dataclasses
import gc
import weakref

import jax
import ml_dtypes
import numpy as np
import pytest

from moe_jax import Scheme
from moe_jax.loading import LayerLoader, Shard, make_expert_params_mapping
from moe_jax.quantization import dequantize_tensor, method_for
from tests.support.checkpoints.expert_tensors import (
    BF16,
    INTER,
    PROJECTIONS,
    E,
    H,
    assert_same,
    config,
    filled,
    frozen,
    fused,
    loaded,
    plain_tensors,
    static_tensors,
)
from tests.support.refusals import refuses


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("scheme", ["bf16", "int8_w8a8"])
def test_any_order(scheme, seed):
    """Shuffled tensors, biases and all, with and without quantization: the same bits."""
    layer = config(scheme, has_bias=True)
    tensors = plain_tensors(bias=True)
    names = list(tensors)
    np.random.default_rng(seed).shuffle(names)
    assert_same(loaded(layer, {name: tensors[name] for name in names}), loaded(layer, tensors))


@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_static_scales(seed):
    """Scales may come before the weights that tell what they belong to."""
    tensors = static_tensors()
    names = list(tensors)
    np.random.default_rng(seed).shuffle(names)
    weights = loaded(config("fp8_tensor_static"), {name: tensors[name] for name in names})
    for e in range(E):
        for half, name in enumerate(("gate_proj", "up_proj")):
            assert weights.w13.scale[e, half] == tensors[f"experts.{e}.{name}.weight_scale"][0]
    assert weights.w13.input_scale == max(t[0] for n, t in tensors.items() if "input" in n and "down" not in n)
    assert weights.w2.input_scale == max(t[0] for n, t in tensors.items() if "input" in n and "down" in n)


@pytest.mark.parametrize(
    "prefix", ["", "mlp.", "layers.0.feed_forward.", "model.language_model.layers.0.block_sparse_moe."]
)
def test_prefixes(prefix):
    assert_same(loaded(config(), plain_tensors(prefix)), loaded(config(), plain_tensors()))


def test_spellings_mix():
    """llm-compressor writes gate_proj into Mixtral files; a file may even mix both."""
    respelt = {}
    for i, (name, tensor) in enumerate(plain_tensors().items()):
        for word, letter in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
            name = name.replace(word, letter) if i % 2 else name
        respelt[name] = tensor
    assert_same(loaded(config(), respelt), loaded(config(), plain_tensors()))


def test_bias_values():
    """M136: biases are loaded; gate and up rows of w13_bias keep their order."""
    tensors = plain_tensors(bias=True)
    for scheme in ("bf16", "fp8_channel"):
        weights = loaded(config(scheme, has_bias=True), tensors)
        for e in range(E):
            of = {name: tensors[f"model.layers.0.mlp.experts.{e}.{name}.bias"] for name in PROJECTIONS}
            np.testing.assert_array_equal(weights.w13_bias[e], np.stack([of["gate_proj"], of["up_proj"]]))
            np.testing.assert_array_equal(weights.w2_bias[e], of["down_proj"])


def test_expert_mapping():
    """M110: names read by vLLM's rows instead; what no row knows is still an error."""
    rows = make_expert_params_mapping(None, "linear", "linear_1", "linear_v", E)
    words = {"gate_proj": "linear", "up_proj": "linear_v", "down_proj": "linear_1"}
    tensors = {}
    for name, tensor in plain_tensors().items():
        projection = name.split(".")[-2]
        tensors[name.replace(projection, words[projection])] = tensor
    assert_same(loaded(config(), tensors, expert_mapping=rows), loaded(config(), plain_tensors()))
    loader = LayerLoader(config(), expert_mapping=rows)
    loader.accept("model.layers.0.mlp.experts.0.gate_proj.weight", np.zeros((INTER, H), BF16))
    refuses(ValueError, r"unexpected: model\.layers\.0\.mlp\.experts\.0\.gate_proj\.weight", loader.finish)


def test_unused_names():
    """What is no expert of this layer is left alone and not among the names used."""
    layer = config(name="model.layers.0.mlp.experts")
    others = {
        "model.layers.0.mlp.gate.weight": np.zeros((E, H), BF16),
        "model.layers.0.mlp.shared_experts.gate_proj.weight": np.zeros((1, 1), BF16),
        "model.layers.1.mlp.experts.0.gate_proj.weight": np.zeros((7, 7), BF16),
    }
    loader = LayerLoader(layer)
    assert loader.load((others | plain_tensors()).items()) == set(plain_tensors())
    assert_same(loader.finish().w2, loaded(layer, plain_tensors()).w2)
    unnamed = filled(config(), plain_tensors())
    with pytest.raises(ValueError, match="belongs to layer 1, earlier tensors to layer 0"):
        unnamed.accept("model.layers.1.mlp.experts.0.gate_proj.weight", np.zeros((7, 7), BF16))


def test_accept_shard():
    """The same layer by leaf, shard and expert, and by whole shards."""
    expected = loaded(config(), plain_tensors())
    one_by_one, whole = LayerLoader(config()), LayerLoader(config())
    stacked = {"w1": [], "w3": [], "w2": []}
    for name, tensor in plain_tensors().items():
        shard = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}[name.split(".")[-2]]
        leaf = "w2_weight" if shard == "w2" else "w13_weight"
        assert one_by_one.accept_shard(leaf, shard, len(stacked[shard]), tensor)
        stacked[shard].append(tensor)
    for shard, tensors in stacked.items():
        whole.accept_shard("w2_weight" if shard == "w2" else "w13_weight", shard, None, np.stack(tensors))
    assert_same(one_by_one.finish(), expected)
    assert_same(whole.finish(), expected)
    with pytest.raises(ValueError, match="'w2' is not part of w13_weight"):
        LayerLoader(config()).accept_shard("w13_weight", "w2", 0, np.zeros((H, INTER), BF16))
    with pytest.raises(ValueError, match="shard_id='w9', expected one of"):
        LayerLoader(config()).accept_shard("w13_weight", "w9", 0, np.zeros((H, INTER), BF16))


@pytest.mark.parametrize("scheme", ["bf16", "fp8_tensor"])
def test_not_gated(scheme):
    """A layer with one input projection, called up_proj or w1, also quantized online; a gate is unexpected."""
    layer = config(scheme, is_act_and_mul=False, activation="relu2")
    tensors = {n: t for n, t in plain_tensors().items() if "gate_proj" not in n}
    weights = loaded(layer, tensors)
    assert weights.w13.data.shape == (E, 1, INTER, H)
    assert_same(weights, loaded(layer, {n.replace("up_proj", "w1"): t for n, t in tensors.items()}))
    loader = filled(layer, plain_tensors())
    refuses(ValueError, r"unexpected: model\.layers\.0\.mlp\.experts\.0\.gate_proj\.weight", loader.finish)


def test_correction_bias():
    name, values = "model.layers.0.mlp.gate.e_score_correction_bias", np.arange(E).astype(BF16)
    loader = filled(config(), plain_tensors(), has_correction_bias=True)
    refuses(ValueError, "missing: e_score_correction_bias", loader.finish)
    refuses(ValueError, r"expected \(3,\) floats, found bfloat16 \(2,\)", loader.accept, name, values[:2])
    assert loader.accept(name, values)
    loader.finish()
    assert loader.correction_bias.dtype == np.float32
    np.testing.assert_array_equal(loader.correction_bias, [0, 1, 2])
    assert not LayerLoader(config()).accept(name, values)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.mlp.gate.e_score_correction_bias",
        "model.layers.0.mlp.gate.e_score_corection_bias",
        "model.layers.0.mlp.expert.0.gate_proj.bias",
        "model.layers.0.mlp.exprts.0.w1.bias",
        "mlp.gate.expert_bias",
    ],
)
def test_what_would_be_missed_is_left_over(name):
    """Without it the layer would compute something else. A layer's own number may come after it."""
    tensors = plain_tensors()
    for order in (lambda pairs: pairs, reversed):
        loader = LayerLoader(config(), has_correction_bias=False)
        assert loader.load(order([(name, np.zeros(E, np.float32)), *tensors.items()])) == set(tensors)
        assert loader.is_invalid
        refuses(ValueError, f"unexpected: {name}", loader.finish)
    elsewhere = name.replace("layers.0", "layers.7")
    if elsewhere != name:
        other = filled(config(), [(elsewhere, np.zeros(E, np.float32)), *tensors.items()], has_correction_bias=False)
        other.finish()


def test_neighbours_are_nothing_of_a_layer():
    """What a whole model has beside the experts is passed over: shared experts, norms, layers that predict."""
    names = [
        "model.layers.0.mlp.shared_experts.gate_proj.weight",
        "model.layers.0.mlp.shared_experts.0.w1.weight",
        "model.layers.0.mlp.shared_expert_gate.weight",
        "model.layers.0.mlp.gate.weight",
        "model.layers.0.mlp.gate_up_proj.weight",
        "model.layers.0.self_attn.q_proj.weight",
        "mtp.layers.0.mlp.experts.0.gate_proj.weight",
        "lm_head.weight",
    ]
    loader, tensors = LayerLoader(config(), has_correction_bias=False), plain_tensors()
    assert loader.load([*((name, np.zeros(E, BF16)) for name in names), *tensors.items()]) == set(tensors)
    loader.finish()


@pytest.mark.parametrize("scheme", ["bf16", "int8_w8a16"])
@pytest.mark.parametrize("transposed", [False, True])
def test_fused(scheme, transposed):
    """(E, out, in) and (E, in, out) are told apart by shape."""
    assert_same(loaded(config(scheme), fused(plain_tensors(), transposed)), loaded(config(scheme), plain_tensors()))


@pytest.mark.parametrize("offset", [0, 8])
def test_fused_is_kept_as_a_view(offset):
    """No copy on the host; one on the way to the device, whatever the alignment of the file's bytes (64 is special)."""
    tensors = {name: at_offset(tensor, offset) for name, tensor in fused(plain_tensors()).items()}
    loader = filled(config(), tensors)
    kept = {id(array) for array in loader._staging._buffers.values()}
    assert kept == {id(array) for array in tensors.values()}
    weights = loader.finish()
    assert_same(weights, loaded(config(), plain_tensors()))
    for leaf in jax.tree.leaves(weights):
        assert not any(np.shares_memory(np.asarray(leaf), array) for array in tensors.values())


def at_offset(array, offset):
    """A read-only copy that starts ``offset`` bytes after a multiple of 64."""
    raw = np.zeros(array.nbytes + 128, np.uint8)
    start = -raw.ctypes.data % 64 + offset
    copy = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return frozen(copy)


def test_arrays_that_may_change_are_copied():
    """The caller may reuse its buffer right after accept, per expert and fused, quantized or not."""
    for scheme in ("bf16", "int8_w8a16"):
        for tensors in (plain_tensors(), fused(plain_tensors())):
            loader = LayerLoader(config(scheme))
            for name, tensor in tensors.items():
                buffer = tensor.copy()
                loader.accept(name, buffer)
                buffer[:] = 7
            assert_same(loader.finish(), loaded(config(scheme), plain_tensors()))


def test_ambiguous_layout():
    """2I = H: nothing in the file tells rows from columns, so the caller has to."""
    layer = config(intermediate_size=H // 2)
    rng = np.random.default_rng(0)
    gate_up = frozen(rng.standard_normal((E, H, H)).astype(BF16))
    down = frozen(rng.standard_normal((E, H, H // 2)).astype(BF16))
    with pytest.raises(ValueError, match=r"fits \(E, out, in\) and \(E, in, out\) alike; say which by fused_layout"):
        LayerLoader(layer).accept("experts.gate_up_proj", gate_up)
    straight = loaded(layer, {"experts.gate_up_proj": gate_up, "experts.down_proj": down}, fused_layout="out_in")
    np.testing.assert_array_equal(straight.w13.data.reshape(E, H, H), gate_up)
    flipped = frozen(np.ascontiguousarray(down.swapaxes(1, 2)))
    turned = loaded(layer, {"experts.gate_up_proj": gate_up, "experts.down_proj": flipped}, fused_layout="in_out")
    np.testing.assert_array_equal(turned.w13.data.reshape(E, H, H), gate_up.swapaxes(1, 2))
    np.testing.assert_array_equal(turned.w2.data, down)
    with pytest.raises(ValueError, match="fused_layout='rows', expected None, 'out_in' or 'in_out'"):
        LayerLoader(layer, fused_layout="rows")


def test_layouts_do_not_mix():
    straight, turned = fused(plain_tensors()), fused(plain_tensors(), transposed=True)
    loader = LayerLoader(config())
    loader.accept("experts.gate_up_proj", straight["experts.gate_up_proj"])
    with pytest.raises(ValueError, match="stored as in_out, other weights of this layer as out_in"):
        loader.accept("experts.down_proj", turned["experts.down_proj"])


def test_fused_quantized():
    """Stacked FP8 tensors: scales per tensor (of both projections or each), per channel, blocks at the border."""
    rng = np.random.default_rng(0)
    gate_up = frozen(rng.standard_normal((E, 2 * INTER, H)).astype(ml_dtypes.float8_e4m3fn))
    down = frozen(rng.standard_normal((E, H, INTER)).astype(ml_dtypes.float8_e4m3fn))
    weights = {"experts.gate_up_proj": gate_up, "experts.down_proj": down}
    one, two = np.float32([1, 2, 3]), np.float32([[1, 4], [2, 5], [3, 6]])
    scales = {"experts.gate_up_proj_scale": one, "experts.down_proj_scale": one[:, None]}
    found = loaded(config("fp8_tensor"), weights | scales)
    np.testing.assert_array_equal(found.w13.scale, np.stack([one, one], 1))
    np.testing.assert_array_equal(found.w2.scale, one)
    found = loaded(config("fp8_tensor"), weights | scales | {"experts.gate_up_proj_scale": two})
    np.testing.assert_array_equal(found.w13.scale, two)

    channel = rng.random((E, 2 * INTER, 1)).astype(np.float32)
    scales = {"experts.gate_up_proj.weight_scale": channel, "experts.down_proj.weight_scale": channel[:, :H]}
    found = loaded(config("fp8_channel"), weights | scales)
    np.testing.assert_array_equal(found.w13.scale, channel.reshape(E, 2, INTER))

    def block(rows):
        args = dict(num_bits=8, type="float", strategy="block", block_structure=[rows, 16])
        return config({"weights": args})

    blocks = rng.random((E, 2 * INTER // 16, H // 16)).astype(np.float32)
    scales = {"experts.gate_up_proj_scale_inv": blocks, "experts.down_proj_scale_inv": blocks[:, : H // 16, :2]}
    found = loaded(block(16), weights | scales)
    np.testing.assert_array_equal(found.w13.scale, blocks.reshape(E, 2, INTER // 16, H // 16))
    # of 64 rows in blocks of 24 the second block covers gate and up rows; blocks of 20 do so too, though 4 = 2 + 2 fits
    for rows in (24, 20):
        count = -(-2 * INTER // rows)
        loader = LayerLoader(block(rows))
        with pytest.raises(ValueError, match="experts.gate_up_proj_scale_inv"):
            loader.accept("experts.gate_up_proj_scale_inv", np.ones((E, count, H // 16), np.float32))
    with pytest.raises(ValueError, match=r"quantized in groups or blocks are stored as \(E, in, out\)"):
        LayerLoader(block(16)).accept("experts.down_proj", frozen(np.ascontiguousarray(down.swapaxes(1, 2))))


def test_stacked_halves_of_one_expert():
    tensors = plain_tensors()
    stacked = {n: t for n, t in tensors.items() if "down_proj" in n}
    for e in range(E):
        gate, up = (tensors[f"model.layers.0.mlp.experts.{e}.{p}.weight"] for p in ("gate_proj", "up_proj"))
        stacked[f"experts.{e}.gate_up_proj.weight"] = np.concatenate([gate, up])
    assert_same(loaded(config(), stacked), loaded(config(), tensors))


@pytest.mark.parametrize("scheme", ["bf16", "fp8_block"])
def test_peak_of_staging(scheme):
    """At most one layer in full precision, whatever the order; by expert, one expert. M21."""
    layer, tensors = config(scheme), plain_tensors()
    total = sum(t.nbytes for t in tensors.values())
    by_projection = sorted(tensors, key=lambda name: name.split(".")[-2])
    for names, bound in ((list(tensors), total // E), (by_projection, total)):
        loader = filled(layer, ((name, tensors[name]) for name in names))
        assert 0 < loader.peak_staged_bytes <= (bound if scheme == "fp8_block" else total)
        loader.finish()
        assert loader.staged_bytes == 0


def test_quantized_experts_are_let_go():
    """Nothing keeps the full-precision tensors of an expert that is quantized: the byte counter tells the truth."""
    loader, alive = LayerLoader(config("int8_w8a16")), []
    for name in plain_tensors():
        tensor = frozen(np.ones(PROJECTIONS[name.split(".")[-2]], BF16))
        alive.append(weakref.ref(tensor))
        loader.accept(name, tensor)
        del tensor
    gc.collect()
    assert loader.staged_bytes == 0
    assert all(tensor() is None for tensor in alive)


def test_reload_asserts_shapes():
    layer = config("fp8_channel")
    old = loaded(layer, plain_tensors())
    loader = filled(layer, plain_tensors(seed=1))
    new = loader.finish(like=old)
    assert jax.tree.structure(new) == jax.tree.structure(old)
    assert not np.array_equal(new.w2.scale, old.w2.scale)
    other = filled(config("int8_w8a8"), plain_tensors())
    refuses(ValueError, "expected weights like", other.finish, like=old)


def test_incomplete_reload_keeps_the_old():
    old = loaded(config(), plain_tensors())
    before = np.asarray(old.w13.data).tobytes()
    loader = filled(config(), list(plain_tensors(seed=1).items())[:-1])
    refuses(ValueError, "missing", loader.finish, like=old)
    assert np.asarray(old.w13.data).tobytes() == before


def test_nothing_compiles_again_after_a_reload():
    layer = config("int8_w8a8")
    traces = []

    @jax.jit
    def total(weights):
        traces.append(1)
        return weights.w2.scale.sum()

    old = loaded(layer, plain_tensors())
    total(old)
    loader = filled(layer, plain_tensors(seed=1))
    total(loader.finish(like=old))
    assert len(traces) == 1


@pytest.mark.parametrize("scheme", ["bf16", "fp8_channel"])
def test_dummy(scheme):
    """M19: uniform in +-1e-3 with seed 1234, quantized like any weight; a leaf that has something stays as it is."""
    layer = config(scheme, has_bias=True, param_dtype="float32")
    loader = LayerLoader(layer)
    loader.fill_dummy()
    found = loader.finish()

    def drawn(*shape):
        return np.random.default_rng(1234).uniform(-1e-3, 1e-3, shape)

    np.testing.assert_array_equal(found.w13_bias, drawn(E, 2, INTER).astype(np.float32))
    np.testing.assert_array_equal(found.w2_bias, drawn(E, H).astype(np.float32))
    for tensor, shape in ((found.w13, (E, 2, INTER, H)), (found.w2, (E, H, INTER))):
        rounding = 0 if scheme == "bf16" else 1e-3 * 2.0**-4  # half a step of the largest e4m3 code
        np.testing.assert_allclose(dequantize_tensor(tensor), drawn(*shape).astype(np.float32), rtol=0, atol=rounding)
    partly = LayerLoader(layer)
    partly.accept("experts.0.down_proj.weight", np.zeros((H, INTER), np.float32))
    partly.fill_dummy()
    assert partly.missing() == {"w2_weight": {"w2": [1, 2]}}


def test_dummy_experts_may_be_square():
    """Two layouts of one shape, of which ours is meant."""
    loader = LayerLoader(config(intermediate_size=H))
    loader.fill_dummy()
    assert loader.finish().w2.data.shape == (E, H, H)


def test_jax_arrays():
    tensors = {name: jax.numpy.asarray(tensor) for name, tensor in plain_tensors().items()}
    for scheme in ("bf16", "fp8_block"):
        assert_same(loaded(config(scheme), tensors), loaded(config(scheme), plain_tensors()))


def test_own_number_format():
    """M1 to M5: loading and number format are two objects. A format of one's own says its leaves, how an expert is
    quantized and what becomes of the leaves; it gets one expert at a time, and both projections of w13 together."""
    calls = []

    @dataclasses.dataclass(frozen=True)
    class PowerOfTwoScales(type(method_for("fp8_channel"))):
        def quantize_stack(self, w, param_dtype):
            calls.append(w.shape)
            amax = np.abs(np.asarray(w, np.float32)).max(-1, keepdims=True)
            scale = np.exp2(np.ceil(np.log2(amax / 448))).astype(np.float32)
            return {"weight": (w / scale).astype(ml_dtypes.float8_e4m3fn), "weight_scale": scale}

    tensors = plain_tensors(dtype=np.float32)
    loader = filled(config(), tensors, PowerOfTwoScales(Scheme.parse("fp8_channel")))
    weights = loader.finish()
    assert calls == [(1, 2, INTER, H), (1, H, INTER)] * E
    mantissa, _ = np.frexp(np.asarray(weights.w13.scale))
    assert (mantissa == 0.5).all()
    for e in range(E):
        gate = tensors[f"model.layers.0.mlp.experts.{e}.gate_proj.weight"]
        real = np.asarray(weights.w13.data[e, 0], np.float32) * np.asarray(weights.w13.scale[e, 0])[:, None]
        np.testing.assert_allclose(real, gate, rtol=1 / 16, atol=1e-3)


SHARDS = {
    "tensor": [Shard(tp_rank=rank, tp_size=2) for rank in range(2)],
    "expert": [Shard(expert_map=(1, -1, 0)), Shard(expert_map=(-1, 0, -1))],
}


@pytest.mark.parametrize(
    "scheme, stored, split",
    [
        ("bf16", plain_tensors, "tensor"),
        ("bf16", plain_tensors, "expert"),
        ("fp8_tensor_static", static_tensors, "tensor"),
        ("fp8_tensor_static", static_tensors, "expert"),
        ("int8_w8a8", plain_tensors, "expert"),  # quantized on the way
    ],
)
def test_shards_are_parts_of_the_layer(scheme, stored, split):
    """Filled from tensors of the whole layer; the input scale is that of all experts, local or not."""
    layer, tensors = config(scheme), stored()
    whole = jax.tree.map(np.asarray, loaded(layer, tensors))
    for shard in SHARDS[split]:
        loader = filled(layer, tensors, shard=shard)
        experts, size = list(shard.experts(E)), INTER // shard.tp_size
        rows = slice(shard.tp_rank * size, (shard.tp_rank + 1) * size)
        scales = {
            name: None if (scale := getattr(whole, name).scale) is None else scale[experts] for name in ("w13", "w2")
        }
        w13 = dataclasses.replace(whole.w13, data=whole.w13.data[experts][:, :, rows], scale=scales["w13"])
        w2 = dataclasses.replace(whole.w2, data=whole.w2.data[experts][:, :, rows], scale=scales["w2"])
        assert_same(loader.finish(), dataclasses.replace(whole, w13=w13, w2=w2))


def test_a_shard_refuses_what_has_no_place_and_names_what_is_missing():
    """Experts by their ids in the layer; input scales of experts elsewhere are missing as well."""
    loader, tensors = LayerLoader(config("fp8_tensor_static"), shard=SHARDS["expert"][1]), static_tensors()
    assert not loader.accept("experts.0.down_proj.weight", tensors["experts.0.down_proj.weight"])
    with pytest.raises(ValueError, match=r"expert 7 is outside this layer's 3 experts"):
        loader.accept("experts.7.down_proj.weight", tensors["experts.0.down_proj.weight"])
    with pytest.raises(ValueError, match=r"there is no leaf 'w2_bias' in this layer"):
        loader.accept("experts.1.down_proj.bias", np.zeros(H, BF16))
    last = "experts.2.down_proj.input_scale"
    loader.load((name, tensor) for name, tensor in tensors.items() if name != last)
    refuses(ValueError, r"missing: down_proj\.input_scale of expert 2; expected", loader.finish)
    loader.accept(last, tensors[last])
    assert loader.finish().num_experts == 1


@pytest.mark.parametrize("shard", [None, SHARDS["tensor"][1]])
def test_a_scale_with_the_rows_of_both_projections(shard):
    """ModelOpt's form: one tensor is w1's and w3's, whichever is named; each half of it is written once."""
    scale = np.arange(2 * INTER, dtype=np.float32).reshape(-1, 1)
    loader = LayerLoader(config("fp8_channel"), shard=shard, quantize=False)
    for expert in range(E):
        loader.accept_shard("w13_weight_scale", "w1", expert, scale)
    assert "w13_weight_scale" not in loader.missing()
