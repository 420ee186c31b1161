"""Whole models over a mesh: the answer of one device, dense weights in shares, and each byte range read once."""

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import moe_jax
from moe_jax.loading import Checkpoint
from tests.support.cases.families import FAMILIES, H, as_mxfp4, assert_rows_close
from tests.support.cases.meshes import assert_same_experts
from tests.support.cases.models import CASES, FAMILY_CASES, VOCAB, assert_logits_close, write_checkpoint


def mesh_of(text, axis_type="Auto"):
    sizes = {name: int(size) for name, size in (entry.split("=") for entry in text.split(","))}
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType[axis_type],) * len(sizes))


def check_answers(case, mesh, axis_type):
    alone = case.model
    spread = moe_jax.load_pretrained(case.directory, dtype="float32", mesh=mesh_of(mesh, axis_type))
    ids = np.random.default_rng(0).integers(0, VOCAB, (2, 20)).astype(np.int32)
    mask = np.arange(20) < [[20], [13]]
    assert_logits_close(np.asarray(spread.score(ids))[mask], np.asarray(alone.score(ids))[mask])
    made = [moe_jax.generate(model, ids, max_new_tokens=3, attention_mask=mask).tolist() for model in (spread, alone)]
    assert made[0] == made[1]
    return spread


def test_answers_of_one_device(case):
    """Heads, vocabulary and intermediate width over the tensor axis: half of each on a device."""
    model = check_answers(case("qwen3_dense_bias"), "expert=2,tensor=2", "Auto")
    for name, split in (("q_proj", 0), ("k_proj", 0), ("v_proj", 0), ("o_proj", 1)):
        weight = getattr(model.layers[0].self_attn, name).weight.get_value()
        assert (
            weight.sharding.spec[split] == "tensor"
            and weight.sharding.shard_shape(weight.shape)[split] * 2 == (weight.shape[split])
        )
    assert model.lm_head.weight.get_value().sharding.spec == P("tensor", None)
    assert model.layers[0].mlp.down_proj.weight.get_value().sharding.spec == P(None, "tensor")
    assert model.init_cache(2, 16).layers[0].arrays[0].sharding.spec == P(None, "tensor", None, None)


@pytest.mark.slow
def test_linear_attention(case):
    """A key head and its value heads on each of two devices; what four cannot share is whole on all of them."""
    for mesh, axis in (("expert=2,tensor=2", "tensor"), ("tensor=4", None)):
        model = check_answers(case("qwen3_next"), mesh, "Auto")
        attention = model.layers[0].self_attn
        for name, split in (("in_proj_qkvz", 0), ("in_proj_ba", 0), ("out_proj", 1)):
            spec = getattr(attention, name).weight.get_value().sharding.spec
            assert (*spec, None, None)[split] == axis
        assert (*attention.A_log.get_value().sharding.spec, None)[0] == axis
        kept = model.init_cache(2, 16).layers[0]
        for array in (kept.conv, kept.state):
            assert (*array.sharding.spec, None, None)[1] == axis


def test_head_with_a_bias(case):
    """Phi's layer norms are whole on both devices, the head's bias lies with its rows of the vocabulary."""
    model = check_answers(case("phimoe"), "tensor=2", "Auto")
    assert model.lm_head.bias.get_value().sharding.spec == P("tensor")
    assert model.norm.bias.get_value().sharding.is_fully_replicated


# Four devices have two key heads to share.
LAYOUTS = (("tensor=4", "Auto"), ("expert=2,tensor=2", "Explicit"), ("expert=2", "Auto"), ("data=2,expert=2", "Auto"))


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(
    "name", [*(name for name in CASES if "rope" not in name and not name.startswith("qwen3_l")), *FAMILY_CASES]
)
def test_every_family(case, name, layout):
    check_answers(case(name), *layout)


def check_block(name, directory, layouts):
    FAMILIES[name].write(directory)
    layer, x = FAMILIES[name].moe_layers[0], np.random.default_rng(0).standard_normal((9, H)).astype(np.float32)
    expected = np.asarray(moe_jax.load_moe(directory, layer, dtype="float32")(jnp.asarray(x)))
    for layout in layouts:
        block = moe_jax.load_moe(directory, layer, dtype="float32", mesh=mesh_of(*layout))
        assert_rows_close(block(jnp.asarray(x)), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_blocks_of_every_family(tmp_path, name):
    """Also of families whose whole models are not built: routers, correction biases and shared experts around experts
    that lie one by one or in one tensor."""
    check_block(name, tmp_path, LAYOUTS)


def test_outputs_are_summed_over_the_mesh_once(case, tmp_path):
    """vllm-ascend #6710, where model and layer both summed: a block with shared experts, and a whole model."""
    layout = ("expert=2,tensor=2", "Explicit")
    check_block("qwen2_moe", tmp_path, [layout])
    check_answers(case("olmoe"), *layout)


def test_a_share_as_wide_as_all_columns(tmp_path):
    """MXFP4 in blocks of 32 and I = 32: the first device of the tensor axis has all columns, the others zeros."""
    as_mxfp4(tmp_path, FAMILIES["gpt_oss"].write(tmp_path, hidden_size=64))
    alone = moe_jax.load_moe(tmp_path, 1, dtype="float32")
    spread = moe_jax.load_moe(tmp_path, 1, dtype="float32", mesh=mesh_of("tensor=2"))
    assert spread.experts.weights.get_value().w13.shape[2] == 2 * alone.experts.config.intermediate_size
    assert_same_experts(spread, alone.experts.weights.get_value())


@pytest.fixture
def reads(monkeypatch):
    """What is read of each dense tensor: name -> sizes in bytes."""
    found, read = collections.defaultdict(list), Checkpoint.read

    def recorded(self, name, rows=None, columns=None):
        array = read(self, name, rows, columns)
        if ".experts." not in name:
            found[name].append(array.nbytes)
        return array

    monkeypatch.setattr(Checkpoint, "read", recorded)
    return found


def values(model):
    """Name -> bytes of every dense parameter."""
    modules = model.dense_modules()
    return {
        f"{name}.{attribute}": b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(variable.get_value()))
        for name, module in modules.items()
        for attribute in ("weight", "bias")
        if (variable := getattr(module, attribute, None)) is not None
    }


def sizes_of(directory):
    with Checkpoint(directory) as opened:
        return {name: opened.info(name).nbytes for name in opened.names if ".experts." not in name}


ROWS_AND_COLUMNS = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "embed_tokens",
    "lm_head",
    "gate_proj",
    "up_proj",
    "down_proj",
)


def test_each_byte_range_is_read_once(case, reads):
    """Two devices take halves of what is split; what is whole on every device is read once as well."""
    directory = case("qwen3_dense_bias").directory
    reads.clear()
    model = moe_jax.load_pretrained(directory, dtype="float32", mesh=mesh_of("expert=2,tensor=2"))
    sizes = {name: size for name, size in sizes_of(directory).items() if not name.endswith("o_proj.bias")}
    for name, size in sizes.items():
        is_split = any(word in name for word in ROWS_AND_COLUMNS)
        assert reads[name] == ([size // 2] * 2 if is_split else [size]), name
    assert values(model) == values(moe_jax.load_pretrained(directory, dtype="float32"))
    weight = model.embed_tokens.weight.get_value()
    shards = {tuple(shard.data.shape) for shard in weight.addressable_shards}
    assert shards == {(VOCAB // 2, weight.shape[1])}


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["fp8_channel", "w4a16_g32", "w4a16_g32_asym", "fp8_block"])
def test_quantized_dense_weights(tmp_path, scheme, reads):
    """Whole groups and words are read alone; blocks of 128, of which a device would get a part, are read whole."""
    directory = tmp_path / scheme
    write_checkpoint("mixtral", tmp_path / "source", intermediate_size=64)
    moe_jax.quantize_checkpoint(tmp_path / "source", directory, scheme=scheme, modules="all")
    reads.clear()
    model = moe_jax.load_pretrained(directory, dtype="float32", mesh=mesh_of("tensor=2"))
    found, on_disk = {name: list(sizes) for name, sizes in reads.items()}, sizes_of(directory)
    alone = moe_jax.load_pretrained(directory, dtype="float32")
    assert values(model) == values(alone)
    for projection in ("q_proj", "o_proj"):  # split by rows, by columns
        (name,) = (n for n in on_disk if re.search(rf"layers\.0\.self_attn\.{projection}\.weight(_packed)?$", n))
        assert found[name] == ([on_disk[name]] if scheme == "fp8_block" else [on_disk[name] // 2] * 2), name
    ids = np.random.default_rng(0).integers(0, VOCAB, (2, 9)).astype(np.int32)
    # Activations beside a border may fall to its other side where sums have another order.
    allowed = 1e-5 if scheme.startswith("w4") else 0.02
    assert_logits_close(model.score(ids), np.asarray(alone.score(ids)), allowed)


RULES = (("expert", "ep"), ("mlp", "tp"), ("heads", "tp"), ("kv_heads", "tp"), ("vocab", "tp"))


@pytest.mark.parametrize("name", ["qwen3_dense_bias", "deepseek_v2"])
def test_logical_axes_of_a_model(case, name):
    """With rules Flax's functions split a model as ``load_pretrained`` does over a mesh of that meaning."""
    mesh = jax.make_mesh((2, 2), ("ep", "tp"), axis_types=(AxisType.Auto,) * 2)
    made = case(name)
    with nnx.logical_axis_rules(RULES):
        found = nnx.get_named_sharding(nnx.state(made.model), mesh)
    bare = nnx.get_named_sharding(nnx.state(made.model), mesh)
    assert all(sharding.is_fully_replicated for sharding in jax.tree.leaves(bare))
    parallel = moe_jax.parallel.ParallelConfig(mesh, expert_axis="ep", tensor_axis="tp")
    spread = nnx.state(moe_jax.load_pretrained(made.directory, dtype="float32", mesh=parallel))
    stated = nnx.get_named_sharding(spread, mesh)
    leaves = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(spread)}
    for tree in (found, stated):
        shardings = {jax.tree_util.keystr(path): s for path, s in jax.tree_util.tree_leaves_with_path(tree)}
        for path, leaf in leaves.items():
            if "placement" in path or "version" in path:
                continue
            assert leaf.sharding.is_equivalent_to(shardings[path], leaf.ndim), path
