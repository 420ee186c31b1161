"""Where a checkpoint tensor goes: every decision of the weight loader, and tensor-parallel slices that fit together."""

import dataclasses
import itertools

import numpy as np
import pytest

from moe_jax import MoEConfig, Scheme
from moe_jax.loading import weight_loader
from moe_jax.quantization import LeafSpec, QuantizedTensor, Strategy, dequantize_tensor, method_for
from tests.support.refusals import refuses

E, H, INTER = 3, 24, 16
BLOCK = {"weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [4, 4]}}
GROUP = {"weights": {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 2}, "format": "int-quantized"}
SCHEMES = {"bf16": "bf16", "tensor": "fp8_tensor_static", "channel": "int8_w8a8", "block": BLOCK, "group": GROUP}


def config(scheme="bf16", **changes):
    defaults = dict(num_experts=E, top_k=1, hidden_size=H, intermediate_size=INTER, has_bias=True)
    return MoEConfig(**(defaults | changes), scheme=Scheme.parse(SCHEMES.get(scheme, scheme)))


def specs_of(scheme="bf16", **changes):
    layer = config(scheme, **changes)
    return method_for(layer.scheme).create_weights(layer)


def put(specs, leaf, loaded, shard, expert, **options):
    """Run the loader and make the copies in a zeroed leaf; returns (leaf, number of elements written)."""
    buffer = np.zeros(specs[leaf].shape, np.float32)
    placements = weight_loader(specs, leaf, loaded, f"experts.{expert}.{shard}", shard, expert, **options)
    for placement in placements:
        placement.write(buffer, loaded)
    return buffer, sum(placement.num_elements for placement in placements)


def numbers(*shape):
    """Distinct values, none of them 0, so that a misplaced element shows."""
    return np.arange(1, 1 + int(np.prod(shape)), dtype=np.float32).reshape(shape)


# (scheme, leaf, shape on disk of one projection of one expert, index of w1 or w2, index of w3 in that expert's leaf)
PLACES = [
    ("bf16", "w13_weight", (INTER, H), (slice(INTER),), (slice(INTER, None),)),
    ("bf16", "w2_weight", (H, INTER), (), None),
    ("bf16", "w13_bias", (INTER,), (slice(INTER),), (slice(INTER, None),)),
    ("bf16", "w2_bias", (H,), (), None),
    ("tensor", "w13_weight_scale", (1,), (0,), (1,)),
    ("tensor", "w13_weight_scale", (), (0,), (1,)),
    ("tensor", "w2_weight_scale", (1,), (), None),
    ("tensor", "w2_weight_scale", (), (), None),
    ("tensor", "w13_input_scale", (1,), (0,), (1,)),
    ("tensor", "w2_input_scale", (), (), None),
    ("channel", "w13_weight_scale", (INTER, 1), (slice(INTER),), (slice(INTER, None),)),
    ("channel", "w13_weight_scale", (INTER,), (slice(INTER),), (slice(INTER, None),)),
    ("channel", "w2_weight_scale", (H, 1), (), None),
    ("block", "w13_weight_scale", (INTER // 4, H // 4), (slice(INTER // 4),), (slice(INTER // 4, None),)),
    ("block", "w2_weight_scale", (H // 4, INTER // 4), (), None),
]


@pytest.mark.parametrize("scheme, leaf, shape, first, second", PLACES)
@pytest.mark.parametrize("expert", [0, 2])
def test_place_of_every_kind(scheme, leaf, shape, first, second, expert):
    specs = specs_of(scheme)
    for shard, index in (("w1", first), ("w3", second)) if second is not None else (("w2", first),):
        loaded = numbers(*shape)
        expected = np.zeros(specs[leaf].shape, np.float32)
        place = (expert, *index)
        expected[place] = loaded.reshape(expected[place].shape)
        found, written = put(specs, leaf, loaded, shard, expert)
        np.testing.assert_array_equal(found, expected)
        assert written == loaded.size


@pytest.mark.parametrize("scheme, leaf, shape, first, second", PLACES)
def test_all_experts_in_one_tensor(scheme, leaf, shape, first, second):
    """M123: the expert axis in front; a weight needs no expert_id=None for it, as in vLLM."""
    specs = specs_of(scheme)
    loaded = numbers(E, *shape)
    for shard in ("w1", "w3") if second is not None else ("w2",):
        whole, written = put(specs, leaf, loaded, shard, None)
        one_by_one = sum(put(specs, leaf, loaded[e], shard, e)[0] for e in range(E))
        np.testing.assert_array_equal(whole, one_by_one)
        assert written == loaded.size
        if len(shape) == 2:
            np.testing.assert_array_equal(put(specs, leaf, loaded, shard, 1)[0], whole)


def parts_of(scheme):
    """(leaf, shard, whole random tensor) of one expert."""
    rng = np.random.default_rng(0)
    whole = specs_of(scheme)
    for leaf, spec in whole.items():
        rows, *rest = spec.shape[1:] or (1,)
        for shard in ("w1", "w3") if leaf.startswith("w13") else ("w2",):
            size = rows // 2 if leaf.startswith("w13") else rows
            yield leaf, shard, rng.standard_normal((size, *rest)).astype(np.float32)


@pytest.mark.parametrize(
    ("scheme", "tp_size"), [(name, size) for name in SCHEMES for size in (1, 2, 4, 8) if (name, size) != ("block", 8)]
)
def test_ranks_reassemble(scheme, tp_size):
    """Slices of all ranks, put back together by plain concatenation, are the leaf of one rank. #41511: scales too."""
    full, part = specs_of(scheme), specs_of(scheme, intermediate_size=INTER // tp_size)
    tensors = list(parts_of(scheme))
    for leaf in full:
        expected = np.zeros(full[leaf].shape, np.float32)
        ranks = np.zeros((tp_size, *part[leaf].shape), np.float32)
        for name, shard, loaded in tensors:
            if name != leaf:
                continue
            for placement in weight_loader(full, leaf, loaded, "t", shard, 1):
                placement.write(expected, loaded)
            for rank in range(tp_size):
                options = dict(tp_rank=rank, tp_size=tp_size, scale_extent=(4, 4) if scheme == "block" else (1, 2))
                for placement in weight_loader(part, leaf, loaded, "t", shard, 1, **options):
                    placement.write(ranks[rank], loaded)
        if leaf.startswith("w13") and full[leaf].shape != part[leaf].shape:
            halves = ranks.reshape(tp_size, E, 2, -1, *ranks.shape[3:])
            together = np.concatenate(list(halves), axis=2).reshape(expected.shape)
        elif full[leaf].shape != part[leaf].shape:
            together = np.concatenate(list(ranks), axis=-1)
        else:  # whole on every rank
            assert all(np.array_equal(r, ranks[0]) for r in ranks)
            together = ranks[0]
        np.testing.assert_array_equal(together, expected, err_msg=leaf)
        assert np.count_nonzero(expected[1]) == expected[1].size, leaf


def test_decision_order():
    """Steps 2, 4 and 12-15 of the order of decisions: what is not local is skipped before anything else."""
    specs, loaded = specs_of("channel"), np.zeros((INTER, H), np.float32)

    def call(leaf, tensor, shard, expert, **options):
        return weight_loader(specs, leaf, tensor, "a.name", shard, expert, True, **options)

    # 2: the shard and the shape are wrong, but the expert lives elsewhere
    assert call("w13_weight", np.zeros(7), "w9", 0, expert_map=[-1, 0, 1]) == ((), False)
    # 4
    refuses(ValueError, r"a\.name: shard_id='w9', expected one of w1, w2, w3", call, "w13_weight", loaded, "w9", 0)
    refuses(ValueError, "does not belong to w2_weight", call, "w2_weight", loaded, "w1", 0)
    # 12 to 15: weights, scales and biases are written and say so
    for leaf, tensor in (("w13_weight", loaded), ("w13_weight_scale", loaded[:, :1]), ("w13_bias", loaded[:, 0])):
        placements, success = call(leaf, tensor, "w1", 0)
        assert success and len(placements) == 1
    refuses(ValueError, "there is no leaf 'w13_g_idx'", call, "w13_g_idx", loaded, "w1", 0)


def test_return_success():
    """M137: the pair on request, placements alone otherwise; M116: nothing for an expert that is not local."""
    specs, loaded = specs_of(), numbers(INTER, H)
    alone = weight_loader(specs, "w13_weight", loaded, "n", "w1", 0)
    assert weight_loader(specs, "w13_weight", loaded, "n", "w1", 0, return_success=True) == (alone, True)
    elsewhere = dict(expert_map=np.array([0, -1, 1]))
    assert weight_loader(specs, "w13_weight", loaded, "n", "w1", 1, **elsewhere) == ()
    assert weight_loader(specs, "w13_weight", loaded, "n", "w1", 1, return_success=True, **elsewhere) == ((), False)


def test_unknown_kind():
    """M133."""
    specs = {"w13_weight_scale": LeafSpec((E, 2, 1), np.dtype(np.float32), "diagonal")}
    with pytest.raises(ValueError, match="unknown kind 'diagonal', expected one of weight, group, block, channel"):
        weight_loader(specs, "w13_weight_scale", (1, 1), "n", "w1", 0)


def test_expert_map():
    """Local places under expert parallelism, per expert and for a tensor of all experts."""
    full = specs_of(num_experts=5)
    local = specs_of(num_experts=2)
    expert_map = [-1, 1, -1, -1, 0]
    loaded = numbers(5, H, INTER)
    expected = np.stack([loaded[4], loaded[1]])
    found, written = put(local, "w2_weight", loaded, "w2", None, expert_map=expert_map)
    np.testing.assert_array_equal(found, expected)
    assert written == expected.size
    each = sum(put(local, "w2_weight", loaded[e], "w2", e, expert_map=expert_map)[0] for e in range(5))
    np.testing.assert_array_equal(each, expected)
    np.testing.assert_array_equal(put(full, "w2_weight", loaded, "w2", None)[0], loaded)


@pytest.mark.parametrize(
    "expert_map, words",
    [
        ([-1, 1, 2, -1, 0], "holds local expert 2, expected -1 to 1: the leaf has 2 experts"),
        ([1, -1, -1, 1, 0], "holds local expert 1 twice"),
        ([0.0, 1.0], r"float64 \(2,\), expected integers"),
        ([[0, 1]], r"\(1, 2\), expected integers of shape \(P,\)"),
    ],
)
@pytest.mark.parametrize("expert", [0, None])
def test_expert_map_that_does_not_fit(expert_map, words, expert):
    loaded = numbers(5, H, INTER) if expert is None else numbers(H, INTER)
    with pytest.raises(ValueError, match=f"n: expert_map.*{words}"):
        weight_loader(specs_of(num_experts=2), "w2_weight", loaded, "n", "w2", expert, expert_map=expert_map)


@pytest.mark.parametrize("expert", [-1, 3])
def test_expert_out_of_range(expert):
    with pytest.raises(ValueError, match=f"expert {expert} is outside this layer's 3 experts"):
        weight_loader(specs_of(), "w2_weight", (H, INTER), "n", "w2", expert)


def test_not_gated():
    """M139: w1 fills w13; w3 has no place and says so."""
    specs = specs_of(is_act_and_mul=False)
    found, _ = put(specs, "w13_weight", numbers(INTER, H), "w1", 1, is_act_and_mul=False)
    np.testing.assert_array_equal(found[1], numbers(INTER, H))
    with pytest.raises(ValueError, match="w3 has no place in a layer that is not gated"):
        put(specs, "w13_weight", numbers(INTER, H), "w3", 1, is_act_and_mul=False)
    for scheme in ("tensor", "channel", "block"):
        specs = specs_of(scheme, is_act_and_mul=False)
        shape = specs["w13_weight_scale"].shape[1:]
        found, _ = put(specs, "w13_weight_scale", numbers(*shape), "w1", 1, is_act_and_mul=False)
        np.testing.assert_array_equal(found[1], numbers(*shape).reshape(shape))


@pytest.mark.parametrize(
    "leaf, shape, shard",
    [
        ("w13_weight", (H, INTER), "w1"),
        ("w13_weight", (INTER, H + 1), "w3"),
        ("w13_weight", (2 * INTER, H), "w1"),
        ("w13_weight", (INTER * H,), "w1"),
        ("w2_weight", (INTER, H), "w2"),
        ("w2_weight", (E + 1, H, INTER), "w2"),
        ("w2_weight", (1, 1, H, INTER), "w2"),
        ("w13_bias", (2 * INTER,), "w1"),
        ("w2_bias", (INTER,), "w2"),
    ],
)
def test_wrong_shape(leaf, shape, shard):
    with pytest.raises(ValueError, match=r"^the\.name for w.*: expected shape \(.*\), found \("):
        weight_loader(specs_of(), leaf, shape, "the.name", shard, 0)


def test_tensor_scale_must_be_one_value():
    for shape in ((2,), (1, 2), (0,)):
        with pytest.raises(ValueError, match=r"n: expected a single value, found shape"):
            weight_loader(specs_of("tensor"), "w2_weight_scale", shape, "n", "w2", 0)
    with pytest.raises(ValueError, match="expected 3 values, one per expert"):
        weight_loader(specs_of("tensor"), "w2_weight_scale", (4,), "n", "w2", None)


def test_zero_dim_broadcasts():
    """M138: a 0-dim tensor is never sliced; it fills its slice, on every rank alike."""
    specs = specs_of("channel", intermediate_size=INTER // 2)
    found, written = put(specs, "w13_weight_scale", np.float32(5), "w3", 1, tp_rank=1, tp_size=2)
    expected = np.zeros((E, INTER, 1), np.float32)
    expected[1, INTER // 2 :] = 5
    np.testing.assert_array_equal(found, expected)
    assert written == INTER // 2


def test_source_does_not_divide():
    """vLLM drops the tail here; we refuse, with and without padding."""
    part = specs_of(intermediate_size=5)
    with pytest.raises(ValueError, match=r"expected shape \(15, 24\) \(tp_size=3\), found \(16, 24\)"):
        weight_loader(part, "w13_weight", (16, H), "n", "w1", 0, tp_rank=2, tp_size=3)
    with pytest.raises(ValueError, match=r"shape \(16, 24\) does not divide by tp_size=3"):
        weight_loader(part, "w13_weight", (16, H), "n", "w1", 0, tp_rank=2, tp_size=3, allow_padding=True)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_padded_leaf(tp_size):
    """M140: a larger leaf takes the unpadded share of each rank in its leading corner and keeps zeros elsewhere."""
    padded = {
        "w13_weight": LeafSpec((E, 2 * 20, H + 8), np.dtype(np.float32), "weight"),
        "w2_weight": LeafSpec((E, H + 8, 20), np.dtype(np.float32), "weight"),
    }
    share = INTER // tp_size
    w3, w2 = numbers(INTER, H), numbers(H, INTER)
    for rank in range(tp_size):
        options = dict(tp_rank=rank, tp_size=tp_size, allow_padding=True)
        expected = np.zeros((E, 40, H + 8), np.float32)
        expected[2, 20 : 20 + share, :H] = w3[rank * share : (rank + 1) * share]
        found, written = put(padded, "w13_weight", w3, "w3", 2, **options)
        np.testing.assert_array_equal(found, expected)
        assert written == share * H
        expected = np.zeros((E, H + 8, 20), np.float32)
        expected[2, :H, :share] = w2[:, rank * share : (rank + 1) * share]
        np.testing.assert_array_equal(put(padded, "w2_weight", w2, "w2", 2, **options)[0], expected)
    with pytest.raises(ValueError, match="expected shape at most"):
        put(padded, "w2_weight", numbers(H + 9, INTER), "w2", 2, allow_padding=True)
    refuses(ValueError, "expected shape", put, padded, "w2_weight", w2, "w2", 2)


def test_scale_blocks_stay_whole():
    """A cut through a block would give one scale to two ranks, with shapes that fit all the same (I = 16 over 4 ranks
    leaves 4 columns of w2, half of what a scale of 4 x 8 covers)."""
    part = {"w2_weight": LeafSpec((E, H, 4), np.dtype(np.int8), "weight")}
    part["w13_weight"] = LeafSpec((E, 8, H), np.dtype(np.int8), "weight")
    part["w2_weight_scale"] = LeafSpec((E, H // 4, 1), np.dtype(np.float32), "block")
    call = dict(shard_id="w2", expert_id=0, tp_size=4)
    placements = weight_loader(part, "w2_weight_scale", (H // 4, 4), "n", scale_extent=(4, 4), **call)
    assert placements[0].num_elements == H // 4
    with pytest.raises(ValueError, match="4 of the intermediate size per rank is not a multiple of the 8"):
        weight_loader(part, "w2_weight_scale", (H // 4, 4), "n", scale_extent=(4, 8), **call)
    refuses(ValueError, "needs scale_extent", weight_loader, part, "w2_weight_scale", (H // 4, 4), "n", **call)


def packed_specs(intermediate, **changes):
    """w4a16_g32_asym of a rank with ``intermediate`` of the intermediate size."""
    fmt = dataclasses.replace(Scheme.parse("w4a16_g8_asym").weights, **changes)
    config = MoEConfig(E, 1, 32, intermediate, scheme=Scheme("", fmt))
    return method_for(config.scheme).create_weights(config)


def test_words_stay_whole():
    """28 columns of w2 take 4 words and so do 2 x 14, but a cut at 14 is in the middle of a word."""
    specs, call = packed_specs(14), dict(expert_id=0, tp_size=2)
    with pytest.raises(ValueError, match="14 of the intermediate size per rank is not a multiple of the 8 that fill"):
        weight_loader(specs, "w2_weight_packed", (32, 4), "n", shard_id="w2", **call)
    with pytest.raises(ValueError, match="14 of the intermediate size per rank is not a multiple of the 8 that fill"):
        weight_loader(specs, "w13_weight_zero_point", (4, 4), "n", shard_id="w1", **call)
    with pytest.raises(ValueError, match="not a multiple of the 8 that one scale covers"):
        weight_loader(specs, "w2_weight_zero_point", (4, 4), "n", shard_id="w2", scale_extent=(1, 8), **call)


def test_packed_leaves_are_cut_between_words():
    """M147: zero points of w13 are packed along the split axis, those of w2 are split by group."""
    specs = packed_specs(16)
    call = dict(tp_rank=1, tp_size=2, scale_extent=(1, 8))
    for leaf, shard, whole, at in (
        ("w13_weight_packed", "w3", (32, 4), (slice(16, 32), slice(0, 4))),
        ("w13_weight_zero_point", "w3", (4, 4), (slice(2, 4), slice(0, 4))),
        ("w2_weight_packed", "w2", (32, 4), (slice(0, 32), slice(2, 4))),
        ("w2_weight_zero_point", "w2", (4, 4), (slice(0, 4), slice(2, 4))),
    ):
        (placement,) = weight_loader(specs, leaf, whole, "n", shard, 0, **call)
        assert placement.source == at, leaf
    (placement,) = weight_loader(specs, "w2_weight_zero_point", (4, 2), "n", "w2", 0, **call | {"load_full_w2": True})
    assert placement.source == (slice(0, 4), slice(0, 2))
    channel = packed_specs(16, strategy=Strategy.CHANNEL, group_size=None)
    (placement,) = weight_loader(channel, "w2_weight_zero_point", (4, 1), "n", "w2", 0, tp_rank=1, tp_size=2)
    assert placement.source == (slice(0, 4), slice(0, 1))


def test_g_idx():
    """Section 6.5: w1 and w3 share one, whole on every rank; that of w2 is cut."""
    specs = packed_specs(16, actorder=True)
    for shard in ("w1", "w3"):
        (placement,) = weight_loader(specs, "w13_weight_g_idx", (32,), "n", shard, 2, tp_rank=1, tp_size=2)
        assert placement.is_common and placement.index == (slice(2, 3), slice(0, 32))
    (placement,) = weight_loader(specs, "w2_weight_g_idx", (32,), "n", "w2", 0, tp_rank=1, tp_size=2)
    assert placement.source == (slice(16, 32),)


def test_load_full_w2():
    """M131: act-order checkpoints keep the group scales of w2 whole on every rank."""
    specs = {"w2_weight_scale": LeafSpec((E, H, 4), np.dtype(np.float32), "group")}
    found, _ = put(specs, "w2_weight_scale", numbers(H, 4), "w2", 1, tp_rank=1, tp_size=2, load_full_w2=True)
    np.testing.assert_array_equal(found[1], numbers(H, 4))


def test_columns_of_a_rank_find_their_groups():
    """M203: a rank's columns of w2 belong to groups of all ranks under act-order. With whole scales and zero points and
    its part of g_idx, what it dequantizes is its part of the whole matrix; no is_k_full has to tell."""
    full, part = packed_specs(32, actorder=True), packed_specs(16, actorder=True)
    rng = np.random.default_rng(0)
    of = "w2_weight_{}".format
    whole = {
        of("packed"): rng.integers(-(2**31), 2**31, full[of("packed")].shape[1:]).astype(np.int32),
        of("scale"): rng.standard_normal(full[of("scale")].shape[1:]).astype(np.float32),
        of("zero_point"): rng.integers(-(2**31), 2**31, full[of("zero_point")].shape[1:]).astype(np.int32),
        of("g_idx"): rng.permutation(np.arange(32) // 8).astype(np.int32),
    }
    fmt = dataclasses.replace(Scheme.parse("w4a16_g8_asym").weights, actorder=True)

    def dequantized(leaves, columns):
        names = {"data": "packed", "scale": "scale", "zero_point": "zero_point", "g_idx": "g_idx"}
        tensor = QuantizedTensor(**{k: leaves[of(v)] for k, v in names.items()}, fmt=fmt, num_columns=columns)
        return np.asarray(dequantize_tensor(tensor))

    expected = dequantized({name: tensor[None] for name, tensor in whole.items()}, 32)[0]
    assert np.unique(whole[of("g_idx")][:16]).size == 4, "the first rank should need groups of both"
    specs = part | {name: full[name] for name in (of("scale"), of("zero_point"))}
    for rank in range(2):
        leaves = {}
        for name, tensor in whole.items():
            leaves[name] = np.zeros(specs[name].shape, specs[name].dtype)
            options = dict(tp_rank=rank, tp_size=2, load_full_w2=name in (of("scale"), of("zero_point")))
            for placement in weight_loader(specs, name, tensor, "n", "w2", 1, **options):
                placement.write(leaves[name], tensor)
        np.testing.assert_array_equal(dequantized(leaves, 16)[1], expected[:, 16 * rank : 16 * (rank + 1)])


def test_transposed_leaf():
    """M118: leaves kept as (in, out), as packed formats do; tensors of one axis stay as they are."""
    specs = {
        "w13_weight": LeafSpec((E, H, INTER), np.dtype(np.float32), "weight"),
        "w2_weight": LeafSpec((E, INTER // 2, H), np.dtype(np.float32), "weight"),
        "w13_weight_scale": LeafSpec((E, 1, INTER), np.dtype(np.float32), "channel"),
        "w13_bias": LeafSpec((E, INTER), np.dtype(np.float32), "bias"),
    }
    options = dict(tp_rank=1, tp_size=2, is_transposed=True)
    for leaf in ("w13_weight", "w13_weight_scale"):
        whole = numbers(INTER, specs[leaf].shape[1])
        found, _ = put(specs, leaf, whole, "w3", 0, **options)
        np.testing.assert_array_equal(found[0, :, INTER // 2 :], whole[INTER // 2 :].T)
        assert not found[0, :, : INTER // 2].any()
    found, _ = put(specs, "w2_weight", numbers(H, INTER), "w2", 0, **options)
    np.testing.assert_array_equal(found[0], numbers(H, INTER)[:, INTER // 2 :].T)
    found, _ = put(specs, "w13_bias", numbers(INTER), "w1", 0, **options)
    np.testing.assert_array_equal(found[0, : INTER // 2], numbers(INTER)[INTER // 2 :])


def test_transposed_source():
    """[E, in, out] files into [E, out, in] leaves, whole and sliced."""
    loaded = numbers(E, H, INTER)
    part = specs_of(intermediate_size=INTER // 2)
    found, _ = put(part, "w13_weight", loaded, "w1", None, transpose_loaded=True, tp_rank=1, tp_size=2)
    np.testing.assert_array_equal(found[:, : INTER // 2], loaded.swapaxes(1, 2)[:, INTER // 2 :])


def test_common_place():
    """M125: an input scale (E,) has one place for w1 and w3, and says so; w2's is its own."""
    specs = {f"{p}_input_scale": LeafSpec((E,), np.dtype(np.float32), "input_scale") for p in ("w13", "w2")}
    for shard, leaf in (("w1", "w13_input_scale"), ("w3", "w13_input_scale"), ("w2", "w2_input_scale")):
        (placement,) = weight_loader(specs, leaf, (1,), "n", shard, 1)
        assert placement.is_common == (shard != "w2")
        assert placement.index == (slice(1, 2),)
    (placement,) = weight_loader(specs_of("tensor"), "w13_input_scale", (1,), "n", "w3", 1)
    assert not placement.is_common


def test_tp_rank_outside():
    with pytest.raises(ValueError, match="tp_rank=2 is outside tp_size=2"):
        weight_loader(specs_of(), "w2_weight", (H, INTER), "n", "w2", 0, tp_rank=2, tp_size=2)


def test_takes_shapes_only():
    """Planning needs no data: a shape, and anything that has one, give the same placements."""
    info = dataclasses.make_dataclass("Info", ["shape"])((INTER, H))
    specs = specs_of()
    plans = [weight_loader(specs, "w13_weight", x, "n", "w3", 2) for x in ((INTER, H), info, np.zeros((INTER, H)))]
    assert plans[0] == plans[1] == plans[2]


def test_elements_add_up():
    """M15: every placement of a whole layer, no element twice, none left out, each counted."""
    specs = specs_of("block")
    for leaf, spec in specs.items():
        seen = np.zeros(spec.shape, int)
        shards = ("w1", "w3") if leaf.startswith("w13") else ("w2",)
        for expert, shard in itertools.product(range(E), shards):
            shape = (spec.shape[1] // len(shards), *spec.shape[2:])
            for placement in weight_loader(specs, leaf, shape, "n", shard, expert):
                assert placement.num_elements == seen[placement.index].size
                seen[placement.index] += 1
        assert (seen == 1).all(), leaf


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("expert", [1, None])
@pytest.mark.parametrize("scheme, rows", [("block", INTER // 4), ("channel", INTER)])
def test_scale_of_w1_and_w3_in_one_tensor(scheme, rows, expert, tp_size):
    """ModelOpt's: every rank takes its rows of w1 and its rows of w3, whichever of the two the caller names."""
    part = specs_of(scheme, intermediate_size=INTER // tp_size)
    columns = part["w13_weight_scale"].shape[2:]
    loaded = numbers(*(() if expert is not None else (E,)), 2 * rows, *columns)
    w1, w3 = loaded[..., :rows, :], loaded[..., rows:, :]
    for rank, shard in itertools.product(range(tp_size), ("w1", "w3")):
        options = dict(tp_rank=rank, tp_size=tp_size, scale_extent=(4, 4))
        found, count = put(part, "w13_weight_scale", loaded, shard, expert, **options)
        own = slice(rank * rows // tp_size, (rank + 1) * rows // tp_size)
        expected = np.concatenate([w1[..., own, :], w3[..., own, :]], axis=-2)
        assert np.array_equal(found if expert is None else found[expert], expected) and count == expected.size
        if expert is not None:
            assert not np.delete(found, expert, axis=0).any()
    weights = numbers(2 * INTER, H)
    with pytest.raises(ValueError, match="expected shape"):  # for scales only: a weight of both is fused another way
        put(specs_of(scheme), "w13_weight", weights, "w1", 0)


def test_global_scales_are_kept_for_experts_elsewhere():
    """A kernel takes one maximum over all experts of the model, so a rank stores those of others at their global id."""
    specs, expert_map = specs_of("tensor"), np.array([-1, 0, -1])
    for expert in range(E):
        options = dict(expert_map=expert_map, keeps_all_experts=True)
        found, count = put(specs, "w13_input_scale", np.float32([7]), "w3", expert, **options)
        assert count == 1 and found[expert, 1] == 7 and found.sum() == 7
    found, count = put(specs, "w2_input_scale", numbers(E), "w2", None, expert_map=expert_map, keeps_all_experts=True)
    assert (found == numbers(E)).all() and count == E
    with pytest.raises(ValueError, match="w13_weight is of kind 'weight'"):
        weight_loader(specs, "w13_weight", (INTER, H), "n", "w1", 0, expert_map=expert_map, keeps_all_experts=True)
