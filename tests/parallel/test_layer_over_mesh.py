"""``FusedMoE`` and ``MoEBlock`` over a mesh, as a user holds them: jit, scan over layers, donation, explain, errors."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import moe_jax
from moe_jax import checkpointing
from moe_jax.experts._choice import BACKENDS
from moe_jax.parallel import Placement, rearrange_expert_weights
from moe_jax.parallel._sharding import kernel_shares, plain_shares
from tests.support.cases.meshes import marked
from tests.support.oracles.tolerances import assert_rows_close, tolerance
from tests.support.refusals import refuses

E, K, H, I = 6, 2, 32, 24  # noqa: E741


def mesh_of(axis_type="Auto", **sizes):
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType[axis_type],) * len(sizes))


def make_layer(mesh=None, seed=0, scheme="fp8_channel", **options):
    options = dict(top_k=K, scheme=scheme, dtype=jnp.float32, param_dtype=jnp.float32) | options
    return moe_jax.FusedMoE(E, H, I, mesh=mesh, rngs=nnx.Rngs(seed), **options)


def inputs(num_tokens=9, seed=1):
    rng = np.random.default_rng(seed)
    return (jnp.asarray(rng.standard_normal((num_tokens, n)), jnp.float32) for n in (H, E))


def test_jit_and_shapes():
    x, z = inputs(12)
    shared = nnx.Linear(H, H, rngs=nnx.Rngs(3))
    expected = make_layer(shared_experts=shared)(x.reshape(3, 4, H), z.reshape(3, 4, E))
    mesh = mesh_of(e=4, t=2)
    for options in (dict(sequence_axis="t"), dict(dispatch="all_to_all", data_axis="e")):
        layer = make_layer(mesh, expert_axis="e", tensor_axis="t", shared_experts=shared, **options)
        y = jax.jit(lambda layer, x, z: layer(x, z))(layer, x.reshape(3, 4, H), z.reshape(3, 4, E))
        assert y.shape == (3, 4, H)
        assert_rows_close(y, expected, tolerance("fp8_channel", np.float32))


ROUTERS = [
    dict(zero_expert_type="identity", e_score_correction_bias=jnp.linspace(0.3, -0.3, E + 2)),
    dict(
        scoring_func="sigmoid",
        use_grouped_topk=True,
        num_expert_group=3,
        topk_group=2,
        e_score_correction_bias=jnp.linspace(-0.5, 0.5, E),
    ),
    dict(scoring_func="sqrtsoftplus", hash_indices_table=jnp.array([[0, 3], [5, 1], [2, 4]])),
]


@pytest.mark.parametrize("router", marked(ROUTERS, ()), ids=lambda router: next(iter(router)))
def test_what_a_router_takes_beside_logits(router):
    """Correction biases and tables are on every device, ids are split with the tokens; x is added for zero experts
    once."""
    rng = np.random.default_rng(4)
    x = jnp.asarray(rng.standard_normal((9, H)), jnp.float32)
    z = jnp.asarray(rng.standard_normal((9, E + 2 if "zero_expert_type" in router else E)), jnp.float32)
    ids = jnp.asarray(rng.integers(0, 3, 9)) if "hash_indices_table" in router else None
    expected, expected_stats = make_layer(**router)(x, z, token_ids=ids, return_stats=True)
    mesh = mesh_of(e=4, t=2)
    for options in (dict(data_axis="e", dispatch="all_gather"), dict(reduce_results=False)):
        layer = make_layer(mesh, expert_axis="e", tensor_axis="t", **router, **options)
        y, stats = layer(x, z, token_ids=ids, return_stats=True)
        assert_rows_close(y if y.ndim == 2 else y.sum(axis=0), expected, tolerance("fp8_channel", np.float32))
        np.testing.assert_array_equal(stats.topk_ids, expected_stats.topk_ids)


@pytest.mark.parametrize("axis_type", marked(["Auto", "Explicit"], {1}))
def test_the_callers_sharding_returns(axis_type):
    mesh = mesh_of(axis_type, d=2, e=4)
    layer = make_layer(mesh, expert_axis="e", data_axis="d", dispatch="all_gather")
    x, z = inputs(16)
    for spec in (PartitionSpec("d"), PartitionSpec(None, "e"), PartitionSpec()):
        placed = jax.device_put(x, NamedSharding(mesh, spec))
        y = layer(placed, z)
        assert y.sharding.is_equivalent_to(placed.sharding, 2)
        if axis_type == "Explicit":
            y = jax.jit(lambda layer, x, z: layer(x, z))(layer, placed, z)
            assert y.sharding.is_equivalent_to(placed.sharding, 2)


@pytest.mark.parametrize("lead", [(2, 6), (1, 2, 2), (8, 3)])
def test_rows_that_explicit_axes_do_not_divide(lead):
    """12 tokens on 4 devices, as 2 rows of 6: the rows of a batch come back from tokens that are split."""
    x, z = (array.reshape(*lead, -1) for array in inputs(int(np.prod(lead))))
    layer = make_layer(mesh_of("Explicit", d=4), data_axis="d")
    for call in (layer, jax.jit(lambda x, z: layer(x, z))):
        assert_rows_close(call(x, z), make_layer()(x, z), tolerance("fp8_channel", np.float32))


def test_scan_over_layers_with_donated_tokens():
    mesh = mesh_of(e=2, t=2)
    layers = [make_layer(mesh, seed, expert_axis="e", tensor_axis="t", dispatch="all_to_all") for seed in range(3)]
    graphdef, _ = nnx.split(layers[0])
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(nnx.state(layer) for layer in layers))

    @jax.jit(donate_argnums=1)
    def run(stacked, x, z):
        return jax.lax.scan(lambda x, state: nnx.merge(graphdef, state)(x, z, return_stats=True), x, stacked)

    x, z = inputs(7)
    expected = x
    for seed in range(3):
        expected = make_layer(seed=seed)(expected, z)
    donated = jax.device_put(x, NamedSharding(mesh, PartitionSpec()))
    y, stats = run(stacked, donated, z)
    assert_rows_close(y, expected, tolerance("fp8_channel", np.float32))
    assert donated.is_deleted() and stats.load.shape == (3, E) and (stats.load.sum(axis=1) == 7 * K).all()


def test_abstract_layer_holds_no_memory():
    mesh = mesh_of(e=4, t=2)
    layer = moe_jax.FusedMoE(E, H, I, top_k=K, scheme="w4a16_g32", mesh=mesh, expert_axis="e", tensor_axis="t")
    for leaf in jax.tree.leaves(layer.weights.get_value()):
        assert isinstance(leaf, jax.ShapeDtypeStruct) and leaf.sharding.mesh == mesh
    assert layer.weights.get_value().w13.shape == (8, 2, 64, H)


def test_initialised_inside_jit():
    mesh = mesh_of(e=2)
    leaf = jax.jit(lambda: make_layer(mesh, expert_axis="e").weights.get_value().w2.data)()
    expected = make_layer(mesh, expert_axis="e").weights.get_value().w2.data
    assert leaf.sharding.is_equivalent_to(expected.sharding, 3) and (leaf == expected).all()


def test_explain():
    layer = make_layer(mesh_of(e=4, t=2), scheme="w4a16_g32", expert_axis="e", tensor_axis="t", name="mlp")
    text = layer.explain(2048)
    for part in ("expert 'e': 4, tensor 't': 2", "dispatch: all_to_all, since", "6 experts, 2 slots on each device",
                 "padding: intermediate 24 to 64", "implementation: xla"):  # fmt: skip
        assert part in text, text
    assert "dispatch: replicate, since 512 tokens" in layer.explain(512)
    wide = make_layer(mesh_of(e=2, d=2), top_k=4, expert_axis="e", data_axis="d")
    assert "dispatch: replicate" in wide.explain(1024) and "dispatch: all_gather, since" in wide.explain(1026)
    assert "expert 'e': 2" in repr(wide)


ERRORS = [
    (dict(mesh=mesh_of(e=2), expert_axis="x"), ValueError, "is no axis of the mesh, which has (('e', 2),)"),
    (dict(mesh=mesh_of(e=2)), ValueError, "given without a meaning"),
    (dict(mesh=moe_jax.parallel.ParallelConfig(mesh_of(e=2), "e"), tensor_axis="e"), ValueError, "say it there"),
    (dict(mesh=mesh_of(e=2), expert_axis="e", tensor_axis="e"), ValueError, "expected different axes"),
    (dict(mesh=mesh_of(e=2), expert_axis="e", dispatch="deepep"), ValueError, "expected None or one of 'replicate'"),
    (dict(mesh=mesh_of(e=2), expert_axis="e", enable_eplb=True, placement="round_robin"), ValueError, "balancing"),
    (dict(mesh=mesh_of(t=2), tensor_axis="t", placement="round_robin"), ValueError, "no expert axis"),
    (dict(mesh=mesh_of(e=2), expert_axis="e", dispatch="all_gather", reduce_results=False), ValueError, "makes them"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "error", "message"), ERRORS)
def test_refused_arguments(options, error, message):
    refuses(error, re.escape(message), make_layer, **options)


@pytest.mark.parametrize("dispatch", ["ragged_all_to_all", "nvlink_dispatch"])
def test_what_cannot_run_here_is_refused_by_name(dispatch):
    layer = make_layer(mesh_of(e=2), expert_axis="e", dispatch=dispatch)
    refuses(NotImplementedError, f"dispatch='{dispatch}'.*all_to_all", layer, *inputs())


def test_partial_sums_in_16_bits():
    """Two partial sums rounded to bfloat16, and their sum: three halves of an ulp of the largest."""
    mesh, (x, z) = mesh_of(e=2), inputs(5)
    wide = make_layer(moe_jax.parallel.ParallelConfig(mesh, expert_axis="e"))(x, z)
    narrow = moe_jax.parallel.ParallelConfig(mesh, expert_axis="e", reduce_dtype="bfloat16")
    y = make_layer(narrow)(x, z)
    assert (np.asarray(y) != np.asarray(wide)).any() and "reduce_dtype='bfloat16'" in repr(narrow)
    assert_rows_close(y, wide, tolerance("bf16", jnp.bfloat16))


def test_x_on_another_device():
    layer = make_layer(mesh_of(e=2), expert_axis="e")
    x, z = inputs()
    with pytest.raises(ValueError, match="expected the 2 devices of the layer's mesh; move it with jax.device_put"):
        layer(jax.device_put(x, jax.devices()[5]), z)


def test_ragged_exchange_on_simulated_hardware(monkeypatch):
    """XLA has no ragged_all_to_all on the CPU; with its definition in its place, the offsets can still be wrong."""

    def ragged(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
        everything = [
            jax.lax.all_gather(part, axis_name) for part in (operand, input_offsets, send_sizes, output_offsets)
        ]
        me = jax.lax.axis_index(axis_name)
        rows = jnp.arange(output.shape[0])
        came = jnp.zeros((), jnp.int32)
        for source, (data, starts, sizes, places) in enumerate(zip(*everything, strict=True)):
            is_here = (rows >= places[me]) & (rows < places[me] + sizes[me])
            index = jnp.clip(rows - places[me] + starts[me], 0, data.shape[0] - 1)
            output = jnp.where(is_here.reshape(-1, *(1,) * (data.ndim - 1)), data[index], output)
            came += jnp.where(sizes[me] == recv_sizes[source], 0, 1)
        return jnp.where(came == 0, output, jnp.zeros_like(output))

    monkeypatch.setattr(jax.lax, "ragged_all_to_all", ragged)
    monkeypatch.setattr("moe_jax.parallel._choice.dispatch_refusal", lambda *_: None)
    x, z = inputs(11)
    layer = make_layer(mesh_of(e=4), expert_axis="e", dispatch="ragged_all_to_all", pinned_tokens=16)
    np.testing.assert_array_equal(layer(x, z), make_layer(pinned_tokens=16)(x, z))


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["w4a16_g32", "nvfp4_a16"])
def test_shares_in_kernel_layout(scheme):
    """Each device's share in the layout of the Hopper kernels: the same answer, and exactly back."""
    layer = make_layer(mesh_of(e=2, t=2), scheme=scheme, dtype=jnp.bfloat16, expert_axis="e", tensor_axis="t")
    weights, placement = layer.weights.get_value(), layer.placement.get_value()
    packed = kernel_shares(BACKENDS["hopper"], weights, layer.config, placement, layer.parallel)
    assert not packed.w13.layout.is_plain and packed.w13.data.sharding.spec[:2] == ("e", "t")
    back = plain_shares(packed, layer.config, placement, layer.parallel)
    for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(weights), strict=True):
        assert a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes()
    x, z = inputs(5)
    expected = layer(x, z)
    layer.weights.set_value(packed)
    np.testing.assert_array_equal(layer(x, z), expected)
    assert "kernel layout of the weights undone in every call" in layer.explain(5)


def test_experts_that_move_while_they_are_restored(tmp_path, monkeypatch):
    """The arrays that were read are for the slots of before."""
    layer = make_layer(mesh_of(e=4), expert_axis="e", enable_eplb=True)
    checkpointing.save(layer, tmp_path / "layer")
    old = layer.placement.get_value()
    other = Placement.from_slots(np.asarray(old.physical_to_logical)[::-1], old.num_experts, old.num_devices)
    x, z = inputs(5)
    expected, restore = layer(x, z), ocp.StandardCheckpointer.restore

    def moving(self, *args):
        rearrange_expert_weights(layer, other)
        return restore(self, *args)

    monkeypatch.setattr(ocp.StandardCheckpointer, "restore", moving)
    with pytest.raises(ValueError, match="experts of the module moved to other slots meanwhile; restore again"):
        checkpointing.restore(layer, tmp_path / "layer")
    assert_rows_close(layer(x, z), expected, tolerance("fp8_channel", np.float32))


@pytest.mark.slow
def test_orbax_onto_another_mesh(tmp_path):
    """Saved from shares, restored into other shares, with other padding and another order of experts."""
    saved = make_layer(mesh_of(e=4, t=2), seed=4, expert_axis="e", tensor_axis="t", placement="round_robin")
    checkpointing.save(saved, tmp_path / "layer")
    x, z = inputs(5)
    for mesh, axes in (
        (mesh_of(e=2, t=4), dict(expert_axis="e", tensor_axis="t")),
        (mesh_of(t=2), dict(tensor_axis="t")),
        (None, {}),
    ):
        other = make_layer(mesh, seed=5, **axes)
        checkpointing.restore(other, tmp_path / "layer")
        assert_rows_close(other(x, z), saved(x, z), tolerance("fp8_channel", np.float32))
        for leaf in jax.tree.leaves(other.weights.get_value()):
            assert mesh is None or leaf.sharding.mesh == mesh
    alone = make_layer(seed=6)
    checkpointing.save(alone, tmp_path / "alone")
    checkpointing.restore(saved, tmp_path / "alone")
    assert_rows_close(saved(x, z), alone(x, z), tolerance("fp8_channel", np.float32))
