"""FusedMoE and MoEBlock: constructor, forward, transforms of JAX and flax."""

from inspect import unwrap  # the tests' own checks of annotations would speak first
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import Literal
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import moe_jax
from moe_jax.layer import QuantizedParam
from moe_jax.loading.files._arrays import checked_pairs
from moe_jax.nn._moe_block import without_padding_in_gradients
from moe_jax.parallel._config import ParallelConfig
from tests.support.cases.layers import E, H, I, K, call, checkpoint_pairs, inputs, make_layer
from tests.support.refusals import refuses

SCHEMES = ("bf16", "fp8_tensor", "fp8_channel", "fp8_block", "int8_w8a8", "int8_w8a16")


# -- forward ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.sample(2)
def test_forward_is_the_functional_core(scheme):
    layer = make_layer(scheme)
    x, z = inputs(12)
    expected = moe_jax.fused_moe(x, z, layer.weights.get_value(), layer.config)
    y = layer(x.reshape(3, 4, H), z.reshape(3, 4, E))
    assert y.shape == (3, 4, H) and y.dtype == x.dtype
    np.testing.assert_array_equal(y.reshape(12, H), expected)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_output_has_the_dtype_of_x(dtype):
    x, z = inputs()
    assert make_layer(dtype=dtype)(x.astype(dtype), z).dtype == dtype


@pytest.mark.parametrize("tokens", [0, 1])
def test_few_tokens(tokens):
    x, z = inputs(tokens)
    assert call(make_layer(), x, z).shape == (tokens, H)


def test_masked_tokens_return_zero_and_change_nothing():
    layer, (x, z) = make_layer(shared_experts=lambda t: t), inputs()
    mask = jnp.array([True, False, True, True, False, False, True])
    y, stats = layer(x.at[1].set(jnp.nan), z, token_mask=mask, return_stats=True)
    np.testing.assert_array_equal(y[~mask], 0.0)
    np.testing.assert_array_equal(y[mask], layer(x, z)[mask])
    assert int(stats.load.sum()) == K * int(mask.sum())


def test_padding_is_zeroed_where_that_is_differentiated():
    x, mask = jnp.asarray([[1.0, 2.0], [jnp.nan, 3.0]]), jnp.asarray([True, False])

    def loss(x, w):
        return jnp.sum(without_padding_in_gradients(x, mask) * w)

    assert jnp.isnan(loss(x, jnp.ones_like(x)))  # as it is for kernels that pass over such tokens
    value, gradients = jax.value_and_grad(loss, argnums=(0, 1))(x, jnp.full_like(x, 2.0))
    assert value == 6
    np.testing.assert_array_equal(gradients[0], [[2, 2], [0, 0]])
    np.testing.assert_array_equal(gradients[1], [[1, 2], [0, 0]])


def test_mask_must_be_bool_and_keeps_nan_out_of_gradients():
    layer, (x, z) = make_layer(), inputs()
    with pytest.raises(TypeError, match="token_mask has dtype int32, expected bool"):
        layer(x, z, token_mask=jnp.arange(7))
    mask = jnp.arange(7) != 4

    def loss(matrix):
        block = moe_jax.MoEBlock(layer, router=lambda t: t @ matrix, shared_experts=lambda t: t * matrix.sum())
        return block(x.at[4].set(jnp.nan), token_mask=mask).sum()

    gradient = jax.grad(loss)(jnp.ones((H, E)) / H)
    assert np.isfinite(gradient).all() and np.abs(gradient).max() > 0


def test_shared_experts_and_gate_see_the_untransformed_input():
    x, z = inputs()
    routed = make_layer()(2 * x, z)
    layer = make_layer(
        shared_experts=lambda t: 3 * t,
        shared_expert_gate=lambda t: t[:, :1],
        routed_input_transform=lambda t: 2 * t,
        routed_output_transform=lambda t: 5 * t,
    )
    np.testing.assert_allclose(layer(x, z), 5 * routed + jax.nn.sigmoid(x[:, :1]) * 3 * x, rtol=1e-5, atol=1e-5)


def test_shared_and_routed_experts_do_not_wait_for_each_other():
    """M96: neither reads a result of the other before they are added, so that XLA may run them side by side."""
    x, z = inputs()
    routed = []
    layer = make_layer(
        shared_experts=jnp.tanh,  # a primitive that nothing else here uses
        routed_output_transform=lambda t: routed.append(t) or jnp.cos(t),
    )
    traced = jax.make_jaxpr(lambda x, z: layer(x, z))(x, z).jaxpr
    made_by = {out: eqn for eqn in traced.eqns for out in eqn.outvars}

    def ancestors(primitive):
        (eqn,) = (eqn for eqn in traced.eqns if eqn.primitive.name == primitive)
        found, left = set(), [eqn]
        while left:
            parents = [made_by[var] for var in left.pop().invars if not isinstance(var, Literal) and var in made_by]
            found |= {parent.primitive.name for parent in parents}
            left += parents
        return found

    assert "tanh" not in ancestors("cos") and ancestors("tanh") <= {"reshape"}


def test_scale_on_output_equals_scale_on_weights():
    x, z = inputs()
    on_weights = make_layer(routed_scaling_factor=2.5)(x, z)
    on_output = make_layer(routed_scaling_factor=2.5, apply_routed_scale_to_output=True)(x, z)
    np.testing.assert_allclose(on_weights, on_output, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(on_weights, 2.5 * make_layer()(x, z), rtol=1e-5, atol=1e-6)


def test_own_router():
    layer = make_layer(router=lambda t: t[..., :E])
    x, _ = inputs()
    np.testing.assert_array_equal(layer(x), layer(x, x[:, :E]))


def test_block_routes_and_adds_shared_experts():
    x, _ = inputs()
    experts = make_layer()
    block = moe_jax.MoEBlock(experts, router=lambda t: t[..., :E], shared_experts=lambda t: t)
    np.testing.assert_allclose(block(x), experts(x, x[:, :E]) + x, rtol=1e-6)


def test_block_takes_router_logits():
    (x, z), experts = inputs(), make_layer()
    block = moe_jax.MoEBlock(experts, router=lambda t: 1 / 0, shared_experts=lambda t: t)
    y, stats = block(x, router_logits=z, return_stats=True)
    np.testing.assert_allclose(y, experts(x, z) + x, rtol=1e-6)
    np.testing.assert_array_equal(stats.router_logits, z)
    refuses(ValueError, r"router_logits has shape \(3, 6\)", block, x, router_logits=z[:3])


def test_zero_experts_return_their_input():
    layer = make_layer(zero_expert_type="identity", e_score_correction_bias=jnp.zeros(E + 2))
    x, _ = inputs()
    z = jnp.full((7, E + 2), -9.0).at[:, E:].set(3.0)  # both picks are zero experts
    np.testing.assert_allclose(layer(x, z), x, rtol=1e-5)


def test_hash_routing_takes_ids_from_the_table():
    table = jnp.array([[0, 3], [5, 1], [2, 4]])
    layer = make_layer(scoring_func="sqrtsoftplus", hash_indices_table=table)
    x, z = inputs()
    token_ids = jnp.array([2, 0, 1, 1, 0, 2, 2])
    _, stats = layer(x, z, token_ids=token_ids, return_stats=True)
    np.testing.assert_array_equal(stats.topk_ids, table[token_ids])
    refuses(ValueError, "token_ids", layer, x, z)


def test_gemma4_preset_scales_by_expert():
    x, z = inputs()
    plain = make_layer(custom_routing_function="gemma4", per_expert_scale=jnp.ones(E))(x, z)
    doubled = make_layer(custom_routing_function="gemma4", per_expert_scale=jnp.full(E, 2.0))(x, z)
    np.testing.assert_allclose(doubled, 2 * plain, rtol=1e-5, atol=1e-6)


def test_unquantized_weights_and_biases_have_param_dtype():
    weights = make_layer("bf16", has_bias=True, param_dtype=jnp.float16).weights.get_value()
    assert {leaf.dtype for leaf in jax.tree.leaves(weights)} == {jnp.dtype(jnp.float16)}
    quantized = make_layer("fp8_block", has_bias=True, param_dtype=jnp.float32).weights.get_value()
    assert (
        quantized.w13_bias is not None
        and quantized.w13_bias.dtype == jnp.float32
        and quantized.w13.data.dtype == jnp.float8_e4m3fn
    )


# -- constructor ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, error, match",
    [
        (dict(scheme="fp9"), ValueError, "fp8_channel"),
        (dict(activation="swoosh"), ValueError, "silu"),
        (dict(scoring_func="cosine"), ValueError, "sigmoid"),
        (dict(use_grouped_topk=True), ValueError, "num_expert_group"),
        (dict(num_redundant_experts=2), ValueError, "enable_eplb"),
        (dict(enable_eplb=True), ValueError, "expert axis"),
        (dict(expert_axis="x"), ValueError, "expert_axis='x' without a mesh"),
        (dict(placement="round_robin"), ValueError, "no expert axis"),
        (dict(placement="zigzag"), ValueError, "linear"),
        (dict(shared_expert_gate=lambda t: t), ValueError, "shared_experts"),
        (dict(apply_router_weight_on_input=True), ValueError, "top_k"),
        (dict(implementation="fpga"), ValueError, "reference"),
        (dict(dtype=jnp.int8), ValueError, "dtype"),
        (dict(e_score_correction_bias=jnp.zeros(3)), ValueError, "e_score_correction_bias"),
        (dict(per_expert_scale=jnp.ones(E)), ValueError, "gemma4"),
        (dict(e_score_correction_bias=jnp.full(E, jnp.nan)), ValueError, "NaN"),
        (dict(e_score_correction_bias=jnp.zeros(E + 1)), ValueError, "e_score_correction_bias"),
        (dict(dispatch="replicate"), ValueError, "dispatch='replicate' without a mesh"),
        (dict(routed_output_transform=lambda y: y, reduce_results=False), ValueError, "reduce_results=False"),
        (dict(top_k=E + 1), ValueError, "top_k=7 exceeds"),
        (
            dict(hash_indices_table=jnp.zeros((9, K), jnp.int32), e_score_correction_bias=jnp.zeros(E)),
            ValueError,
            "hash_indices_table chooses the experts.*e_score_correction_bias.*drop one",
        ),
        (dict(swiglu_alpha=2.0), ValueError, "swiglu_alpha"),
        (dict(hash_indices_table=jnp.zeros((10, 3), jnp.int32)), ValueError, "hash_indices_table"),
    ],
)
def test_constructor_refuses(options, error, match):
    with pytest.raises(error, match=match) as caught:
        moe_jax.FusedMoE(E, H, I, **{"top_k": K, **options})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("sizes", [(0, H, I), (E, 0, I), (E, H, -1)])
def test_constructor_refuses_sizes(sizes):
    refuses(ValueError, "expected", moe_jax.FusedMoE, *sizes, top_k=1)


def test_mesh_must_be_a_mesh():
    config = object.__new__(ParallelConfig)
    object.__setattr__(config, "mesh", object())  # past the tests' own check of annotations
    refuses(TypeError, "mesh has type object, expected jax.sharding.Mesh", config.__post_init__)


def test_repr_and_explain():
    layer = make_layer(name="model.layers.3.mlp.experts")
    assert repr(layer) == (
        "FusedMoE(num_experts=6, hidden_size=32, intermediate_size=24, top_k=2, scheme='fp8_channel', "
        "activation='silu', dtype='float32', name='model.layers.3.mlp.experts')"
    )
    text = layer.explain(4)
    assert "xla" in text and "weights version: 0" in text


def test_call_errors_name_shapes():
    layer, (x, z) = make_layer(), inputs()
    refuses(ValueError, r"router_logits has shape \(3, 6\)", layer, x, z[:3])
    refuses(ValueError, r"x has shape \(7, 31\)", layer, x[:, 1:], z)
    refuses(ValueError, "owns no router", layer, x)
    refuses(ValueError, "token_mask", layer, x, z, token_mask=jnp.ones(3, bool))


@pytest.mark.parametrize(
    "arguments, words",
    [
        (dict(x=[[1.0] * H]), "x has type list"),
        (dict(x=np.ones((7, H), np.int32)), "x has dtype int32"),
        (dict(router_logits=[[1.0] * E]), "router_logits has type list"),
        (dict(router_logits=np.ones((7, E), np.int32)), "router_logits has dtype int32"),
        (dict(token_mask=[True] * 7), "token_mask has type list"),
        (dict(token_ids=[1] * 7), "token_ids has type list"),
        (dict(token_ids=np.ones(7, np.float32)), "token_ids has dtype float32"),
    ],
)
def test_wrong_types_of_a_call(arguments, words):
    layer = make_layer(scoring_func="sqrtsoftplus", hash_indices_table=np.zeros((9, K), np.int32))
    x, router_logits = inputs()
    with pytest.raises(TypeError, match=words):
        layer(**(dict(x=x, router_logits=router_logits, token_ids=jnp.zeros(7, jnp.int32)) | arguments))


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda layer: layer.explain(-3), ValueError, "num_tokens=-3"),
        (
            lambda layer: unwrap(moe_jax.FusedMoE.__init__)(layer, E, H, I, top_k=K, rngs=3),
            TypeError,
            "rngs has type int",
        ),
        (
            lambda layer: unwrap(moe_jax.MoEBlock.__call__)(moe_jax.MoEBlock(layer, abs), [[1.0]]),
            TypeError,
            "x has type list",
        ),
    ],
)
def test_wrong_arguments(call, error, words):
    with pytest.raises(error, match=words):
        call(make_layer())


@pytest.mark.parametrize(
    "weights, words",
    [
        (dict(checkpoint_pairs()), r"weights have type dict.*items\(\)"),
        ("weights", "weights are 'weights'"),
        (3, "weights are 3"),
        ([("a", 1, 2)], "item 0 is .'a', 1, 2."),
        ([*checkpoint_pairs(), (1, np.ones(2))], "item 18 is"),
        ([("model.layers.0.mlp.experts.0.up_proj.weight", [[1.0]])], "up_proj.weight: has type list"),
    ],
)
def test_weights_must_be_pairs(weights, words):
    with pytest.raises(TypeError, match=words):
        list(unwrap(checked_pairs)(weights))


# -- transforms -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
def test_few_leaves_and_own_variable_type(scheme):
    layer = make_layer(scheme)
    assert len(jax.tree.leaves(nnx.state(layer))) <= 5
    quantized, params, rest = nnx.state(layer, QuantizedParam, nnx.Param, ...)
    expected = (0, 2, 1) if scheme == "bf16" else (4, 0, 1)
    assert tuple(len(jax.tree.leaves(state)) for state in (quantized, params, rest)) == expected


def test_abstract_layer_holds_no_memory_and_traces():
    layer = moe_jax.FusedMoE(E, H, I, top_k=K, scheme="int8_w8a8")
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(layer.weights.get_value()))
    x, z = inputs()
    assert jax.eval_shape(lambda layer, x, z: layer(x, z), layer, x, z).shape == (7, H)
    refuses(ValueError, "load_weights", layer, x, z)


def test_abstract_weights_have_the_shapes_of_real_ones():
    for scheme in SCHEMES:
        abstract = moe_jax.FusedMoE(E, H, I, top_k=K, scheme=scheme, has_bias=True).weights.get_value()
        real = make_layer(scheme, has_bias=True).weights.get_value()
        assert jax.tree.map(lambda a: (a.shape, a.dtype), abstract) == jax.tree.map(lambda a: (a.shape, a.dtype), real)


def test_nnx_eval_shape_and_split_merge():
    layer, (x, z) = make_layer(), inputs()
    abstract = nnx.eval_shape(lambda: make_layer())
    assert abstract.weights.get_value().w13.data.shape == (E, 2, I, H)
    graphdef, state = nnx.split(layer)
    run = jax.jit(lambda state, x, z: nnx.merge(graphdef, state)(x, z))
    np.testing.assert_array_equal(run(state, x, z), call(layer, x, z))
    np.testing.assert_array_equal(nnx.jit(lambda m, x, z: m(x, z))(layer, x, z), call(layer, x, z))


def test_scan_over_layers_with_stats():
    layers = [make_layer(seed=seed) for seed in range(3)]
    graphdef, _ = nnx.split(layers[0])
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(nnx.state(layer) for layer in layers))
    x, z = inputs()

    @jax.jit
    def run(stacked, x, z):
        return jax.lax.scan(lambda x, state: nnx.merge(graphdef, state)(x, z, return_stats=True), x, stacked)

    y, stats = run(stacked, x, z)
    expected = x
    for layer in layers:
        expected = layer(expected, z)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    assert stats.load.shape == (3, E) and stats.topk_ids.shape == (3, 7, K)
    np.testing.assert_array_equal(stats.load.sum(1), 7 * K)


def test_stats_under_jit_and_shard_map():
    layer, (x, z) = make_layer(), inputs(8)
    expected, stats = jax.jit(lambda layer, x, z: layer(x, z, return_stats=True))(layer, x, z)
    np.testing.assert_array_equal(stats.load, np.bincount(np.asarray(stats.topk_ids).ravel(), minlength=E))
    graphdef, state = nnx.split(layer)
    mesh = Mesh(np.array(jax.devices()[:4]), ("data",))

    def local(state, x, z):
        y, stats = nnx.merge(graphdef, state)(x, z, return_stats=True)
        return y, jax.lax.psum(stats.load, "data")

    sharded = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=(P("data"), P())))
    y, load = sharded(state, x, z)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(load, stats.load)


def test_gradients_match_the_reference_implementation():
    x, z = inputs()
    cot = jax.random.normal(jax.random.key(5), x.shape)

    def loss(x, z, layer):
        return jnp.sum(layer(x, z) * cot)

    grads = {}
    for name in ("reference", "xla"):
        layer = make_layer("fp8_channel", implementation=name)
        grads[name] = jax.jit(jax.grad(loss, argnums=(0, 1)))(x, z, layer)
    for a, b in zip(grads["xla"], grads["reference"], strict=True):
        assert np.abs(b).max() > 0
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-3 * np.abs(b).max())


def test_linen_bridge():
    from flax.nnx import bridge

    layer, (x, z) = make_layer(), inputs()
    module: Any = bridge.to_linen(moe_jax.FusedMoE, E, H, I, top_k=K, scheme="fp8_channel", dtype=jnp.float32)
    variables = module.init(jax.random.key(0), x, z)
    y = module.apply(variables, x, z)
    assert y.shape == (7, H) and np.isfinite(y).all()
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(variables)}
    assert jnp.dtype(jnp.float8_e4m3fn) in dtypes, "parameters must stay quantized in Linen's collections"
    assert y.dtype == layer(x, z).dtype
    variables["QuantizedParam"]["weights"] = layer.weights.get_value()
    np.testing.assert_array_equal(jax.jit(module.apply)(variables, x, z), call(layer, x, z))
    unquantized = bridge.ToLinen(moe_jax.FusedMoE, (E, H, I), dict(top_k=K, dtype=jnp.float32))
    params = jax.eval_shape(unquantized.init, jax.random.key(0), x, z)["params"]["weights"]
    assert sorted(params) == ["w13", "w2"], "a Linen optimizer trains what Linen calls params"


@pytest.mark.parametrize("scheme", ["bf16", "fp8_block", "int8_w8a8"])
def test_export_round_trip(scheme):
    layer, (x, z) = make_layer(scheme), inputs()
    graphdef, state = nnx.split(layer)
    leaves, treedef = jax.tree.flatten(state)

    def run(leaves, x, z):
        return nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))(x, z)

    exported = jax.export.export(jax.jit(run))(leaves, x, z)
    again = jax.export.deserialize(exported.serialize())
    np.testing.assert_array_equal(again.call(leaves, x, z), call(layer, x, z))
