"""Flax's sharding functions on layers: logical axes that rules map to a mesh, for every leaf of every scheme."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import linen, nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import moe_jax
from moe_jax.parallel._weights import leaf_specs
from moe_jax.quantization import SCHEMES, Scheme, method_for
from moe_jax.quantization._method import ExpertShape

RULES = (("expert", "ep"), ("mlp", "tp"))
SIZES = dict(num_experts=4, hidden_size=256, intermediate_size=512)
ACT_ORDER = ("w4a16_g32_actorder", "w4a16_g64_asym_actorder")


def mesh_of(axis_type="Auto"):
    return jax.make_mesh((4, 2), ("ep", "tp"), axis_types=(AxisType[axis_type],) * 2)


def make(scheme="fp8_channel", **options):
    sizes = dict(num_experts=8, hidden_size=256, intermediate_size=128) | options
    return moe_jax.FusedMoE(**sizes, top_k=2, scheme=scheme, has_bias=True, dtype=jnp.float32, rngs=nnx.Rngs(0))


def by_path(tree):
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


@pytest.mark.parametrize("scheme", [*SCHEMES, *ACT_ORDER])
def test_an_axis_is_named_by_what_it_counts(scheme):
    """An axis that grows with E, H or I has that name, and no other axis has one."""

    def weights(**sizes):
        return method_for(Scheme.parse(scheme)).abstract_weights(
            ExpertShape(num_projections=2, has_bias=True, **SIZES | sizes)
        )

    names = by_path(leaf_specs(weights(), P("expert", "embed", "mlp")))
    shapes = {path: leaf.shape for path, leaf in by_path(weights()).items()}
    grown = {"expert": "num_experts", "embed": "hidden_size", "mlp": "intermediate_size"}
    for name, size in grown.items():
        larger = {path: leaf.shape for path, leaf in by_path(weights(**{size: 2 * SIZES[size]})).items()}
        for path, shape in shapes.items():
            axes = [axis for axis, pair in enumerate(zip(shape, larger[path], strict=True)) if pair[0] != pair[1]]
            if "actorder" in scheme and path.endswith((".scale", ".zero_point")) and axes == [len(shape) - 1]:
                axes = []  # groups of columns that lie anywhere
            assert [axis for axis, found in enumerate(names[path]) if found == name] == axes, (path, name)


@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
@pytest.mark.parametrize("scheme", [None, "fp8_channel", "w4a16_g32_asym"])
def test_sharded_init_and_orbax(scheme, axis_type, tmp_path):
    """A layer made in shards, saved and restored into them, is the layer of one device."""
    mesh = mesh_of(axis_type)
    with nnx.logical_axis_rules(RULES):
        graphdef, abstract = nnx.get_abstract_model(functools.partial(make, scheme), mesh)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
        assert shardings == nnx.get_named_sharding(nnx.state(make(scheme)), mesh)
    state = jax.jit(lambda: nnx.state(make(scheme)), out_shardings=shardings)()
    specs = {path.split("weights")[1]: leaf.spec for path, leaf in by_path(shardings).items() if "weights" in path}
    data = next(spec for path, spec in specs.items() if "w13" in path and "bias" not in path)
    assert data == P("ep", None, "tp", None)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "state", abstract)
    assert jax.tree.map(lambda leaf: leaf.sharding, restored) == shardings
    alone = jax.jit(lambda: nnx.state(make(scheme)))()
    for path, leaf in by_path(alone).items():
        np.testing.assert_array_equal(np.asarray(by_path(restored)[path]), np.asarray(leaf), err_msg=path)


def test_group_scales_lie_with_their_weights():
    """Rows and columns of packed words and of group scales are split alike; so are zero points."""
    with nnx.logical_axis_rules((("mlp", "tp"),)):
        state = nnx.get_partition_spec(nnx.state(make("w4a16_g32_asym"))).weights.get_raw_value()
    for leaf in ("data", "scale", "zero_point"):
        assert getattr(state.w13, leaf) == P(None, None, "tp", None)
        assert getattr(state.w2, leaf) == P(None, None, "tp")


def test_what_does_not_divide_is_whole():
    """One group of 128 columns cannot be split in two, the columns can."""
    with nnx.logical_axis_rules(RULES):
        _, state = nnx.get_abstract_model(functools.partial(make, "w4a16_g128"), mesh_of())
    w2 = state.weights.get_raw_value().w2
    assert w2.data.sharding.spec == P("ep", None, "tp")
    assert w2.scale.sharding.spec == P("ep", None, None)


def test_names_without_a_rule_split_nothing():
    state = nnx.get_named_sharding(nnx.state(make()), mesh_of())
    assert all(sharding.is_fully_replicated for sharding in jax.tree.leaves(state))


def test_axes_of_the_set_mesh_need_no_rule():
    mesh = jax.make_mesh((4, 2), ("expert", "x"), axis_types=(AxisType.Auto,) * 2)
    _, state = nnx.get_abstract_model(make, mesh)
    assert state.weights.get_raw_value().w13.data.sharding.spec == P("expert", None, None, None)


def test_eval_shape_and_as_abstract_give_shardings():
    mesh = mesh_of()
    with jax.set_mesh(mesh), nnx.logical_axis_rules(RULES):
        layer = nnx.eval_shape(make)
    assert layer.weights.get_value().w2.data.sharding.spec == P("ep", None, "tp")
    bare = nnx.eval_shape(make)
    assert bare.weights.get_value().w2.data.sharding is None
    with jax.set_mesh(mesh), nnx.logical_axis_rules(RULES):
        found = nnx.as_abstract(bare)
    assert found.weights.get_value().w2.data.sharding.spec == P("ep", None, "tp")


def test_a_layer_made_under_a_mesh_is_split_at_once():
    """As Flax's own layers are, unless ``nnx.use_eager_sharding(False)`` says otherwise."""
    with jax.set_mesh(mesh_of()), nnx.logical_axis_rules(RULES):
        split = make().weights.get_value().w13.data.sharding
        with nnx.use_eager_sharding(False):
            whole = make().weights.get_value().w13.data.sharding
    assert split.spec == P("ep", None, "tp", None)
    assert whole.is_fully_replicated


@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
@pytest.mark.parametrize("scheme", [None, "fp8_channel"])
def test_a_layer_made_under_a_mesh_can_be_called(scheme, axis_type):
    x, logits = jnp.ones((4, 256)), jax.random.normal(jax.random.key(0), (4, 8))
    call = jax.jit(lambda layer, x, logits: layer(x, logits))
    with jax.set_mesh(mesh_of(axis_type)), nnx.logical_axis_rules(RULES):
        found = call(make(scheme), x, logits)
    np.testing.assert_allclose(found, call(make(scheme), x, logits), rtol=0, atol=1e-5)


@pytest.mark.parametrize("scheme", [None, "fp8_channel"])
def test_linen_finds_specs(scheme):
    """A layer in Linen: initialised, called, and a spec for each of its arrays."""
    layer = nnx.bridge.to_linen(moe_jax.FusedMoE, 8, 64, 32, top_k=2, scheme=scheme, dtype=jnp.float32)
    x, logits = jnp.ones((4, 64)), jax.random.normal(jax.random.key(0), (4, 8))
    variables = layer.init(jax.random.key(0), x, logits)
    specs = linen.get_partition_spec(variables)
    assert len(jax.tree.leaves(specs)) == len(jax.tree.leaves(variables))
    assert layer.apply(variables, x, logits).shape == x.shape


def test_a_layer_over_a_mesh_says_how_it_is_split():
    """Padding, slots and all; the placement is on every device."""
    mesh = mesh_of()
    layer = make(num_experts=6, mesh=mesh, expert_axis="ep", tensor_axis="tp")
    for path, sharding in by_path(nnx.get_named_sharding(nnx.state(layer), mesh)).items():
        leaf = by_path(nnx.state(layer))[path]
        if "weights" in path:
            assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim), path
        else:
            assert sharding.is_fully_replicated
