"""Checkpoints onto a mesh: the same weights as on one device, each device's share, and no byte of another's."""

import dataclasses
import json
import re
import shutil

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from safetensors.numpy import load_file, save_file

import moe_jax
from moe_jax.loading import Checkpoint, CheckpointError
from moe_jax.models import MixtralForCausalLM
from moe_jax.parallel import EplbState, ParallelConfig, Placement, _loading, _weights, place_weights, rebalance
from moe_jax.parallel._loading import ShardedExpertReader
from moe_jax.parallel._mesh import parse_mesh
from moe_jax.quantization import SCHEMES
from tests.support.cases.meshes import assert_same_experts, marked
from tests.support.checkpoints import writers
from tests.support.refusals import refuses

EXPERTS = 6
CALIBRATED = {"fp8_tensor_static": "FP8", "nvfp4": "NVFP4"}  # input scales that differ from expert to expert


def put_out_of_order(source, target):
    """Groups of columns dealt anew for every matrix of an expert, those of w1 and w3 alike (act-order)."""
    tensors, stated = load_file(source / "model.safetensors"), json.loads((source / "config.json").read_text())
    rng = np.random.default_rng(0)
    for name in [name for name in tensors if name.endswith("w1.weight_packed")]:
        for projections in (("w1", "w3"), ("w2",)):
            module = name.removesuffix("w1.weight_packed")
            columns = tensors[f"{module}{projections[0]}.weight_packed"].shape[1] * 8
            order = rng.permutation(np.arange(columns, dtype=np.int32) // 32)
            tensors |= {f"{module}{projection}.weight_g_idx": order for projection in projections}
    stated["quantization_config"]["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    target.mkdir()
    save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_text(json.dumps(stated))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """checkpoint(scheme or None) -> directory: Mixtral with 6 experts, I = 160, in this package's own writing; what
    needs calibration in compressed-tensors' own, "act_order" as ``put_out_of_order`` makes it."""
    root = tmp_path_factory.mktemp("mesh")

    def directory(scheme):
        source, target = root / "bf16", root / str(scheme)
        if not source.exists():
            writers.write_model("mixtral", source, num_local_experts=EXPERTS, num_hidden_layers=1)
        if scheme is None:
            return source
        if target.exists():
            return target
        if scheme in CALIBRATED:
            preset = writers.preset(CALIBRATED[scheme])
            writers.quantize_with_compressed_tensors(source, target, "mixtral", preset)
        elif scheme == "act_order":
            put_out_of_order(directory("w4a16_g32"), target)
        else:
            moe_jax.quantize_checkpoint(source, target, scheme=scheme)
        return target

    return directory


LOADS = [
    (None, None, "expert=4,tensor=2"),
    ("fp8_channel", None, "expert=2,tensor=2"),
    ("w4a16_g32", None, "tensor=4,expert=2"),
    (None, "int8_w8a16", "expert=2,tensor=2"),
    ("fp8_tensor_static", None, "expert=4,tensor=2"),
    ("nvfp4", None, "expert=2,tensor=2"),
    ("fp8_block", None, "tensor=4,expert=2"),
    ("act_order", None, "expert=2,tensor=2"),
]


@pytest.mark.parametrize("case", marked(LOADS, {2, 7}), ids=str)
def test_same_weights_and_answers(checkpoint, case):
    stored, quantize, mesh = case
    directory = checkpoint(stored)
    block = moe_jax.load_moe(directory, 0, quantize=quantize, dtype="float32")
    spread = moe_jax.load_moe(directory, 0, quantize=quantize, dtype="float32", mesh=parse_mesh(mesh))
    expected, placed = block.experts.weights.get_value(), spread.experts.weights.get_value()
    assert_same_experts(spread, expected)
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(placed))
    size = spread.experts.parallel.mesh.size
    for device in jax.devices()[:size]:
        shards = [s for leaf in jax.tree.leaves(placed) for s in leaf.addressable_shards if s.device == device]
        assert sum(shard.data.nbytes for shard in shards) <= 1.1 * total / size
    x = jax.random.normal(jax.random.key(1), (9, block.experts.config.hidden_size), "float32")
    np.testing.assert_allclose(spread(x), block(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mesh", ["tensor=2", "expert=2,tensor=2", "expert=2"])
def test_weight_shape_is_checked_in_parts_too(checkpoint, tmp_path, mesh):
    """It says what the whole matrix is, which a device that reads its part of one cannot compare by itself."""
    source = checkpoint("w4a16_g32")
    tensors = load_file(source / "model.safetensors")
    name = next(n for n in reversed(list(tensors)) if n.endswith("weight_shape"))
    tensors[name] = tensors[name] + 1
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(source / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match=rf"{re.escape(name)}: found \[\d+, \d+\], expected"):
        moe_jax.load_moe(tmp_path, 0, mesh=parse_mesh(mesh))


@pytest.mark.parametrize("mesh", ["tensor=2", "expert=2"])
@pytest.mark.parametrize("leaf", ["w1.weight", "w1.weight_shape", "w2.input_scale"])
def test_a_surplus_expert_is_unexpected(checkpoint, tmp_path, mesh, leaf):
    """No device has a place for it, and none looks at it."""
    source = checkpoint(None)
    tensors, name = load_file(source / "model.safetensors"), f"model.layers.0.block_sparse_moe.experts.{EXPERTS}.{leaf}"
    tensors[name] = np.ones((2, 2), np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(source / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match=f"unexpected: {name}; layer 0 has {EXPERTS} experts"):
        moe_jax.load_moe(tmp_path, 0, mesh=parse_mesh(mesh))


@pytest.mark.parametrize("mesh", ["tensor=2", "expert=2"])
def test_a_name_that_cannot_be_read_is_escaped(checkpoint, tmp_path, mesh):
    source = checkpoint(None)
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.block_sparse_moe.experts.1.w\x7f1.weight"] = np.ones((2, 2), np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(source / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match=r"experts\.1\.w\\x7f1\.weight"):
        moe_jax.load_moe(tmp_path, 0, mesh=parse_mesh(mesh))


def test_weight_shape_without_packed_weights_is_unexpected(checkpoint, tmp_path):
    source = checkpoint("int8_w8a16")
    tensors = load_file(source / "model.safetensors")
    name = next(n for n in tensors if n.endswith("w2.weight")) + "_shape"
    tensors[name] = np.array([1, 1])
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(source / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match=f"unexpected: {name}"):
        moe_jax.load_moe(tmp_path, 0, mesh=parse_mesh("tensor=2"))


# Left out: what compressed-tensors cannot hold, and groups that do not divide H and I here.
WRITABLE = [name for name in SCHEMES if not re.search("g64|g128|w4a8|modelopt|ue8m0|nvfp4_dynamic", name)]


@pytest.mark.slow
@pytest.mark.parametrize("stored", WRITABLE)
def test_every_scheme_is_cut_exactly(checkpoint, stored):
    expected = moe_jax.load_moe(checkpoint(stored), 0).experts.weights.get_value()
    for mesh in ("expert=2,tensor=2", "tensor=4", "tensor=3", "expert=4"):
        assert_same_experts(moe_jax.load_moe(checkpoint(stored), 0, mesh=parse_mesh(mesh)), expected)


@pytest.mark.parametrize("stored", marked(["fp8_channel", "w4a16_channel", None], {0}))
def test_each_device_reads_its_own_bytes(checkpoint, stored, monkeypatch):
    """Counted share by share: experts of others never, and of its own the part of I that is the device's."""
    counted = {}

    def counting(config, placement, parallel, read):
        def counted_read(*ranks):
            before = opened.bytes_read
            share = read(*ranks)
            counted[ranks] = opened.bytes_read - before
            return share

        return _weights.assemble(config, placement, parallel, counted_read)

    monkeypatch.setattr(_loading, "assemble", counting)
    block = moe_jax.load_moe(checkpoint(stored), 0)
    config = block.experts.config
    parallel = ParallelConfig(parse_mesh("expert=3,tensor=2"), expert_axis="expert", tensor_axis="tensor")
    with Checkpoint(checkpoint(stored)) as opened:
        quantization = moe_jax.loading.QuantizationConfig.from_config(opened.config, opened)
        reader = ShardedExpertReader(opened, quantization=quantization, names=MixtralForCausalLM.expert_names)
        placement = Placement.create(EXPERTS, 3, "round_robin")
        placed = reader.load(0, config, placement, parallel)
        names = [name for name in opened.names if ".experts." in name]
        total = sum(opened.info(name).nbytes for name in names if not name.endswith("weight_shape"))
    assert sorted(counted) == [(e, t) for e in range(3) for t in range(2)]
    halves = {rank: count / (total / 6) for rank, count in counted.items()}
    whole_scales = 0.02 if stored else 0.0  # w2's scales belong to its outputs
    assert all(1 <= share <= 1 + whole_scales for share in halves.values()), halves
    expected = place_weights(block.experts.weights.get_value(), config, placement, parallel)
    for a, b in zip(jax.tree.leaves(placed), jax.tree.leaves(expected), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.slow
def test_reload_and_some_experts(checkpoint):
    directory, mesh = checkpoint("fp8_channel"), parse_mesh("expert=4,tensor=2")
    block = moe_jax.load_moe(directory, 0, mesh=mesh)
    layer, run = block.experts, jax.jit(lambda layer, x, z: layer(x, z))
    x = jax.random.normal(jax.random.key(1), (5, layer.config.hidden_size), "bfloat16")
    z = jax.random.normal(jax.random.key(2), (5, EXPERTS), "float32")
    before, compiled = np.asarray(run(layer, x, z)), run._cache_size()
    with Checkpoint(directory) as opened:
        pairs = {name: np.array(opened.read(name)) for name in opened.names if ".experts." in name}
    changed = {n: a[::-1].copy() if n.endswith("w2.weight") else a for n, a in pairs.items()}
    layer.reload_weights(((n, a) for n, a in changed.items() if ".experts.3." in n), experts=[3])
    single = moe_jax.load_moe(directory, 0).experts
    single.reload_weights(((n, a) for n, a in changed.items() if ".experts.3." in n), experts=[3])
    after = np.asarray(run(layer, x, z))
    np.testing.assert_allclose(after.astype("f4"), np.asarray(single(x, z)).astype("f4"), rtol=2e-2, atol=2e-2)
    assert (after != before).any()
    layer.reload_weights(pairs.items())
    np.testing.assert_array_equal(np.asarray(run(layer, x, z)), before)
    assert run._cache_size() == compiled


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("expert", "mesh 'expert': expected AXIS=DEVICES,..., such as expert=4,tensor=2"),
        ("expert=0", "expected AXIS=DEVICES"),
        ("expert=2,expert=2", "at most once"),
        ("pipeline=2", "each axis of expert, tensor, data, sequence"),
        ("expert=64", "takes 64 devices, found 8 .cpu.; XLA_FLAGS=--xla_force_host_platform_device_count=64"),
    ],
)
def test_mesh_by_words(text, message):
    refuses(ValueError, message, parse_mesh, text)
    assert dict(parse_mesh("expert=4, tensor=2").shape) == {"expert": 4, "tensor": 2}


def test_meshes_without_meaning(checkpoint):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    with pytest.raises(ValueError, match="expected some of 'expert', 'tensor', 'data' and 'sequence'"):
        moe_jax.load_moe(checkpoint(None), 0, mesh=mesh)
    block = moe_jax.load_moe(checkpoint(None), 0, mesh=ParallelConfig(mesh, expert_axis="x", dispatch="all_gather"))
    assert "dispatch: all_gather, as the layer was told" in block.experts.explain(4)
    assert dataclasses.asdict(block.experts.config)["num_experts"] == EXPERTS


def test_redundant_experts_are_loaded_and_moved(checkpoint):
    """7 copies of 6 experts in 8 slots; after a move the layer gives the same bits by the same program."""
    parallel = ParallelConfig(parse_mesh("expert=4"), expert_axis="expert", dispatch="all_to_all")
    options = dict(mesh=parallel, enable_eplb=True, num_redundant_experts=1, dtype="float32")
    block = moe_jax.load_moe(checkpoint("fp8_channel"), 0, **options)
    expected = moe_jax.load_moe(checkpoint("fp8_channel"), 0, dtype="float32").experts.weights.get_value()
    x = jax.random.normal(jax.random.key(1), (9, block.experts.config.hidden_size), "float32")
    run = jax.jit(lambda block, x: block(x, return_stats=True))
    y, stats = run(block, x)
    old = block.experts.placement.get_value()
    assert old.num_slots == 8 and int(stats.load.sum()) == 18
    state = EplbState.create(1, old, window_size=1, mesh=parallel).record(stats.load[None]).next_step()
    plan = rebalance(state, load=[[90, 1, 1, 1, 1, 60]])
    state = plan.apply(0, block.experts, state)
    slots = np.asarray(block.experts.placement.get_value().physical_to_logical)
    assert (slots != np.asarray(old.physical_to_logical)).any() and np.bincount(slots)[0] == 2
    for found, wanted in zip(
        jax.tree.leaves(block.experts.weights.get_value()), jax.tree.leaves(expected), strict=True
    ):
        assert np.asarray(found).tobytes() == np.asarray(wanted)[slots].tobytes()
    again, moved = run(block, x)
    np.testing.assert_array_equal(again, y)
    assert run._cache_size() == 1 and (np.asarray(moved.load) != np.asarray(stats.load)).any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(enable_eplb=True), "enable_eplb=True balances the devices of an expert axis"),
        (dict(enable_eplb=True, mesh="tensor=2"), "enable_eplb=True balances the devices of an expert axis"),
        (dict(num_redundant_experts=2, mesh="expert=2"), "num_redundant_experts=2 needs enable_eplb=True"),
    ],
)
def test_load_balancing_needs_its_axis(checkpoint, options, message):
    mesh = parse_mesh(options["mesh"]) if "mesh" in options else None
    for load in (moe_jax.load_moe, moe_jax.load_pretrained):
        refuses(ValueError, message, load, checkpoint(None), **options | dict(mesh=mesh))


@pytest.mark.slow
@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
def test_a_model_balances_while_it_serves(checkpoint, axis_type):
    """Load goes in with every step, layers are rearranged between steps: the same logits to the bit, one program. A
    reload then finds the experts where they are. Activations are not rounded, as in the next test."""
    mesh = jax.make_mesh((4,), ("expert",), axis_types=(AxisType[axis_type],))
    parallel = ParallelConfig(mesh, expert_axis="expert", dispatch="all_to_all")
    options = dict(mesh=parallel, enable_eplb=True, num_redundant_experts=2, dtype="float32")
    model = moe_jax.load_pretrained(checkpoint("w4a16_g32"), **options)
    ids = np.asarray([[5, 17, 3, 60, 2, 9]], np.int32)
    layers = [block.experts for block in model.moe_blocks()]
    state = EplbState.create(len(layers), layers[0].placement.get_value(), window_size=4, mesh=parallel)

    @jax.jit
    def step(model, ids, state):
        logits, stats = model(ids, return_stats=True)
        return logits, stats.load, state.record(stats.load).next_step()

    expected, load, state = step(model, ids, state)
    assert load.shape == (1, 8) and int(load.sum()) == 2 * ids.size
    for skew in ([[90, 1, 1, 1, 1, 60]], [[1, 1, 50, 1, 90, 1]]):
        plan = rebalance(state, load=skew)
        assert plan.layers == (0,)
        state = plan.apply(0, layers[0], state)
        logits, _, state = step(model, ids, state)
        np.testing.assert_array_equal(logits, expected)
    assert step._cache_size() == 1 and int(state.load().sum()) == 3 * 2 * ids.size
    model.reload_weights(checkpoint("w4a16_g32"))
    np.testing.assert_array_equal(step(model, ids, state)[0], expected)
    alone = moe_jax.load_pretrained(checkpoint("w4a16_g32"), dtype="float32")
    np.testing.assert_allclose(expected, alone(ids), rtol=1e-3, atol=1e-3)
    tokens, load = moe_jax.generate(model, ids, max_new_tokens=4, return_load=True)
    assert tokens.tolist() == moe_jax.generate(alone, ids, max_new_tokens=4).tolist()
    assert load.shape == (1, 8) and int(load.sum()) == 2 * (ids.size + 3)
    parts = list(moe_jax.models.generate_stream(model, ids, max_new_tokens=4, return_load=True))
    assert np.concatenate([part for part, _ in parts], 1).tolist() == tokens[:, ids.size :].tolist()
    np.testing.assert_array_equal(parts[-1][1], load)


@pytest.mark.slow
def test_a_model_over_a_mesh(checkpoint):
    """Logits and tokens of one device. Activations are not rounded: a sum in another order may cross a tie of codes."""
    ids = np.asarray([[5, 17, 3, 60, 2, 9]], np.int32)
    alone = moe_jax.load_pretrained(checkpoint("w4a16_g32"), dtype="float32")
    spread = moe_jax.load_pretrained(checkpoint("w4a16_g32"), dtype="float32", mesh=parse_mesh("expert=2,tensor=2"))
    np.testing.assert_allclose(spread.score(ids), alone.score(ids), rtol=1e-3, atol=1e-3)
    made = [moe_jax.generate(model, ids, max_new_tokens=3).tolist() for model in (spread, alone)]
    assert made[0] == made[1]
    report = spread.reload_weights(checkpoint("w4a16_g32"))
    assert 0 < report.peak_staged_bytes
    np.testing.assert_allclose(spread.score(ids), alone.score(ids), rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_a_model_over_explicit_axes(checkpoint):
    mesh = jax.make_mesh((2, 2), ("expert", "tensor"), axis_types=(AxisType.Explicit,) * 2)
    ids = np.asarray([[5, 17, 3, 60, 2, 9]], np.int32)
    alone = moe_jax.load_pretrained(checkpoint("w4a16_g32"), dtype="float32")
    spread = moe_jax.load_pretrained(checkpoint("w4a16_g32"), dtype="float32", mesh=mesh)
    np.testing.assert_allclose(spread.score(ids), alone.score(ids), rtol=1e-3, atol=1e-3)
