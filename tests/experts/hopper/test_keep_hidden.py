"""``MoEConfig.keep_hidden`` on the Hopper kernels, their references run here: outputs and gradients against float64,
what is kept, and what is not computed again.

The kernels themselves are compared on a GPU in test_backward_gpu.py.
"""

import dataclasses
import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moe_jax
from moe_jax.experts import explain
from moe_jax.experts._choice import BACKENDS
from moe_jax.experts.hopper import Hopper, _aligned_call
from moe_jax.experts.hopper._backward import Static, differentiable
from moe_jax.experts.hopper._gradient_products import packed_block_m, packed_operands
from moe_jax.experts.hopper._kernel_backend import shared_config
from moe_jax.experts.hopper._kernel_layout import to_kernel_layout
from moe_jax.parallel import Placement, fused_moe, place_weights
from moe_jax.quantization import dequantize_tensor, method_for
from pallas_kernels.align import align
from pallas_kernels.grouped_gemm.packed import candidates, describe_call
from pallas_kernels.quantize_and_permute import quantize_and_permute
from tests.experts.hopper.test_adapters import assert_same, float32_call
from tests.experts.hopper.test_adapters import gradients as adapter_gradients
from tests.experts.hopper.test_backward import (
    ROUTINGS,
    arguments,
    by_references,
    expected_of,
    frozen_call,
    frozen_gradients,
    gradients,
    quick,
)
from tests.experts.test_adapters import torch_gradients
from tests.support.cases.experts import make_config, make_stored_weights
from tests.support.cases.hopper_layers import E, K, inputs, make_layer, on_hopper
from tests.support.cases.meshes import make_parallel
from tests.support.oracles.expert_gradients import assert_gradients_close, expert_gradients

kept_call = functools.partial(arguments, keep_hidden=True)


def with_random_biases(weights):
    keys = jax.random.split(jax.random.key(3))
    biases = {
        name: jax.random.normal(key, getattr(weights, name).shape, weights.w13_bias.dtype)
        for key, name in zip(keys, ("w13_bias", "w2_bias"), strict=True)
    }
    return dataclasses.replace(weights, **biases)


def another_order(ids, num_experts, block_m, **options):
    """``align`` of a call in which threads reached the counters the other way round."""
    tiles = align(ids, num_experts, block_m, **options)
    expert = jnp.maximum(ids, 0)
    first = tiles.row_of - tiles.row_of % block_m  # of its tile
    before = jnp.cumsum(-(-tiles.group_sizes // block_m)) - -(-tiles.group_sizes // block_m)
    first = before[expert] * block_m
    backwards = first + tiles.group_sizes[expert] - 1 - (tiles.row_of - first)
    return dataclasses.replace(tiles, row_of=jnp.where(ids < 0, -1, backwards).astype(jnp.int32))


@pytest.fixture
def orders_differ(monkeypatch):
    """Every second alignment has the rows of each expert in another order, as threads at a counter may."""
    made = []

    def next_align(*given, **options):
        made.append(None)
        return (align, another_order)[len(made) % 2](*given, **options)

    monkeypatch.setattr(_aligned_call, "align", next_align)
    return made


@pytest.fixture
def memory_holds_nan(monkeypatch):
    """Rows to which nothing was moved hold what memory held, which is not a number."""

    def move(tokens, row_of, num_rows, **options):
        rows, scale = quantize_and_permute(tokens, row_of, num_rows, **options)
        is_moved = jnp.zeros(num_rows, bool).at[jnp.where(row_of < 0, num_rows, row_of)].set(True, mode="drop")
        return jnp.where(is_moved[:, None], rows, jnp.nan), scale

    monkeypatch.setattr(_aligned_call, "quantize_and_permute", move)


# -- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("routing", quick(ROUTINGS, ("ragged, one expert empty",)))
def test_every_gradient_and_the_output(routing, orders_differ, memory_holds_nan):
    """Also by biases, with a clamp; rows stay with the tiles that they were made in, and sums take no others."""
    # A name of its own, so that its functions are traced, and alignments made, here.
    layer, *rest = kept_call(45, routing, has_bias=True, activation="swigluoai", name=routing)
    layer.weights.set_value(with_random_biases(layer.weights.get_value()))
    assert_gradients_close(gradients(by_references(layer), layer, *rest), expected_of(layer, *rest))
    assert len(orders_differ) == 1, "the backward pass aligned again"


@pytest.mark.slow
@pytest.mark.parametrize("options", [dict(activation="gelu_tanh"), dict(activation="relu2", is_act_and_mul=False)])
def test_activations(options):
    call = kept_call(45, "some tokens nowhere", **options)
    assert_gradients_close(gradients(by_references(call[0]), *call), expected_of(*call))


@pytest.mark.parametrize(
    "options",
    quick((dict(), dict(shares_gate=False), dict(with_choice=True)), (dict(shares_gate=False),)),
    ids=str,
)
def test_adapters(options):
    """In float32, where nothing is rounded, so that one wrong product of many shows: beside torch in float64, or where
    each token chooses beside the gradient that computes rows again. Outputs are those of the forward pass without.
    """
    config, *rest = call = float32_call(**options)
    kept = dataclasses.replace(config, keep_hidden=True)

    def run(config, *given):
        return differentiable(Static(config, jnp.dtype("float32"), "reference"), *given)

    found = adapter_gradients(run, kept, *rest)
    x, p, ids, weights, g = rest
    if options.get("with_choice"):
        assert_same(found, adapter_gradients(run, *call))
    else:
        want_x, want_leaves = torch_gradients(x, p, ids, weights, config, np.asarray(g, np.float64))
        assert_same({name: found[name] for name in ("x", *want_leaves)}, dict(want_leaves, x=want_x))
    y, _ = jax.vjp(lambda x: run(kept, x, p, ids, weights), x)
    np.testing.assert_allclose(y, run(config, x, p, ids, weights), rtol=1e-5, atol=1e-5 * np.abs(y).max())


PACKED = ("w4a16_g128", "w4a16_g32", "w4a16_g128_asym", "w8a16_channel", "nvfp4_a16", "mxfp4_a16")


@pytest.mark.parametrize("scheme", quick(PACKED, ("w4a16_g128",)))
def test_packed_weights(scheme):
    """Words are read as they are, forward and backward; the activation's derivative follows g W2 in its kernel."""
    weights, expected, call = frozen_call(scheme)
    kept = dataclasses.replace(call[0].config, keep_hidden=True)
    run = functools.partial(differentiable, Static(kept, jnp.dtype("float32"), "reference"))
    assert_gradients_close(frozen_gradients(run, weights, call), expected)
    _, x, p, ids, _ = call
    assert kept_rows(lambda x: run(x, p, ids, weights), x, beside=(p, ids, weights))


@pytest.mark.slow
@pytest.mark.parametrize("wants_biases", [False, True])
def test_biases_of_packed_weights(wants_biases):
    """Columns in kernel layout, biases among them; their gradients sum over whole tiles, gaps included."""
    sizes = dict(num_experts=E, hidden_size=256, intermediate_size=192)
    config = make_config("w4a16_g64", dtype="bfloat16", has_bias=True, keep_hidden=True, **sizes)
    plain = make_stored_weights(config)
    weights = to_kernel_layout(plain, config)
    x, z = inputs(45)
    x, (p, ids) = x[:, :256] / 4, jax.lax.top_k(jax.nn.softmax(z), K)
    g = jax.random.normal(jax.random.key(7), x.shape).astype(jnp.bfloat16)
    static = Static(config, jnp.dtype("float32"), "reference")

    def loss(x, p, w13_bias, w2_bias):
        given = dataclasses.replace(weights, w13_bias=w13_bias, w2_bias=w2_bias)
        y = differentiable(static, x, p, ids.astype(jnp.int32), given)
        return (y * g.astype(y.dtype)).sum(), y

    names = ("x", "topk_weights", "w13_bias", "w2_bias")[: 4 if wants_biases else 2]
    by = tuple(range(len(names)))
    found, y = jax.jit(jax.grad(loss, by, has_aux=True))(x, p, weights.w13_bias, weights.w2_bias)
    dense = (dequantize_tensor(tensor) for tensor in (plain.w13, plain.w2))
    expected = expert_gradients(g, x, p, ids, *dense, w13_bias=plain.w13_bias, w2_bias=plain.w2_bias)
    assert_gradients_close(dict(zip(names, found, strict=True), y=y), expected)


@pytest.mark.slow
def test_a_batch_of_calls_and_remat():
    layer, x, p, ids, g = kept_call(45, "some tokens nowhere")
    run, weights = by_references(layer), layer.weights.get_value()

    def loss(x, g):
        return (run(x, p, ids, weights) * g.astype(jnp.float32)).sum()

    one = jax.jit(jax.grad(loss))
    apart = np.stack([np.asarray(one(sign * x, g), np.float32) for sign in (1, -1)])
    together = jax.jit(jax.vmap(jax.grad(loss), (0, None)))(jnp.stack([x, -x]), g)
    again = jax.jit(jax.grad(jax.checkpoint(loss)))(x, g)
    for found, wanted in ((together, apart), (again, apart[0])):
        np.testing.assert_allclose(np.asarray(found, np.float32), wanted, rtol=2**-7, atol=2**-8)


class ByReferences(Hopper):
    """The backend with the references of its kernels."""

    def refusal(self, problem):
        return None

    def layer_refusal(self, config, arguments):
        return "runs in steps here"

    def run(self, x, topk_weights, topk_ids, weights, config, out_dtype=jnp.float32):
        static = Static(shared_config(config), jnp.dtype(out_dtype), "reference")
        return differentiable(static, x, topk_weights, topk_ids, weights)


@pytest.mark.parametrize("layout", quick(("ep2", "tp2", "ep2-tp2", "dp2-ep4"), ("ep2-tp2",)))
def test_over_a_mesh(layout, monkeypatch):
    """Each device keeps its own rows. In float32, beside torch in float64."""
    monkeypatch.setitem(BACKENDS, "hopper", ByReferences())
    config = make_config(
        num_experts=E,
        hidden_size=128,
        intermediate_size=128,
        has_bias=True,
        implementation=("hopper",),
        keep_hidden=True,
    )
    weights = with_random_biases(make_stored_weights(config))
    x, z = inputs(12)
    x, g = x[:, :128].astype(jnp.float32), jax.random.normal(jax.random.key(7), (12, 128))
    parallel = make_parallel(layout, dispatch="all_gather" if "e" in layout else None)
    placement = Placement.create(E, parallel.expert_size)
    placed = place_weights(weights, config, placement, parallel)

    def loss(x, weights):
        y = fused_moe(x, z, weights, config, parallel, placement=placement)
        return (y * g.astype(y.dtype)).sum(), y

    step = jax.jit(jax.grad(loss, (0, 1), has_aux=True))
    assert "name=_forward_kept" in str(jax.make_jaxpr(step)(x, placed))
    (x_bar, weights_bar), y = step(x, placed)
    p, ids = jax.lax.top_k(jax.nn.softmax(z), config.top_k)
    p = p / p.sum(axis=1, keepdims=True)
    names = dict(w13=weights.w13.data, w2=weights.w2.data, w13_bias=weights.w13_bias, w2_bias=weights.w2_bias)
    slots = placement.logical_to_physical[:, 0]
    found = dict(
        w13=weights_bar.w13.data, w2=weights_bar.w2.data, w13_bias=weights_bar.w13_bias, w2_bias=weights_bar.w2_bias
    )
    found = {name: np.asarray(bar)[slots] for name, bar in found.items()}
    expected = expert_gradients(g, x, p, ids, **names)
    wanted = {name: expected[name] for name in ("x", "y", *found)}
    for name, own in dict(found, x=x_bar, y=y).items():
        np.testing.assert_allclose(own, wanted[name], rtol=1e-4, atol=1e-5 * np.abs(wanted[name]).max(), err_msg=name)


# -- what is kept, and what runs --------------------------------------------------------------------------------------


def kept_rows(function, *given, beside):
    """What a pullback holds beside arguments, those that are differentiated and others, as (shape, dtype)."""
    _, pull = jax.eval_shape(functools.partial(jax.vjp, function), *given)

    def shapes(tree):
        return Counter((leaf.shape, jnp.dtype(leaf.dtype).name) for leaf in jax.tree.leaves(tree))

    return shapes(pull) - shapes((given, beside))


@pytest.mark.parametrize("keeps", [False, True])
def test_what_is_kept(keeps):
    """The arguments alone, or with gate and up of each row and the map of their tiles; as large as explain says."""
    layer, x, p, ids, _ = arguments(45, "ragged, one expert empty", keep_hidden=keeps)
    weights = layer.weights.get_value()
    run = by_references(layer)
    found = kept_rows(lambda x, p, w: run(x, p, ids, w), x, p, weights, beside=ids)
    rows = 64 * (-(-(45 * K + E * 63) // 64))
    of_tiles = {(rows // 64,): 2, (E,): 1, (1,): 1}
    expected = Counter({(shape, "int32"): count for shape, count in of_tiles.items()})
    expected += Counter({(ids.shape, "int32"): 1, ((rows, 512), "bfloat16"): 1})  # the rows of pairs; gate and up
    assert found == (expected if keeps else Counter())
    with on_hopper():
        text = layer.explain(45)
    size = f"and gate and up of each row ({rows * 512 * 2 / 2**20:.1f} MiB)"
    assert (size in text) == keeps and ("keep_hidden" in text) == keeps


def products_and_others(jaxpr, name="_gradient"):
    """Kernels that multiply, and others, in the jitted function ``name`` of a program."""

    def inner(eqn):
        for value in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda v: hasattr(v, "eqns") or hasattr(v, "jaxpr")
        ):
            if hasattr(value := getattr(value, "jaxpr", value), "eqns"):
                yield value

    counts = [0, 0]

    def walk(jaxpr, is_inside):
        for eqn in jaxpr.eqns:
            if is_inside and eqn.primitive.name == "custom_vmap_call":
                counts["wgmma" not in str(eqn)] += 1
                continue
            for part in inner(eqn):
                walk(part, is_inside or eqn.params.get("name") == name)

    walk(jaxpr.jaxpr, False)
    return tuple(counts)


@pytest.mark.parametrize("scheme", ["bf16", "w4a16_g128"])
def test_nothing_is_computed_again(scheme):
    """One product less than without, no second alignment, and no rows of x where no gradient of weights needs them."""
    layer, x, p, ids, g = arguments(300, "ragged, one expert empty", scheme=scheme)
    weights = layer.weights.get_value()
    if scheme != "bf16":
        weights = to_kernel_layout(weights, layer.config)

    def step(keeps, x, p, weights):
        config = dataclasses.replace(layer.config, keep_hidden=keeps)
        run = functools.partial(differentiable, Static(config, jnp.dtype("float32")))
        if scheme == "bf16":
            y, pull = jax.vjp(lambda x, p, w: run(x, p, ids, w), x, p, weights)
        else:
            y, pull = jax.vjp(lambda x, p: run(x, p, ids, weights), x, p)
        return y, pull(g.astype(jnp.float32))

    with on_hopper():
        plain, kept = (
            products_and_others(jax.make_jaxpr(functools.partial(step, keeps))(x, p, weights))
            for keeps in (False, True)
        )
    # Beside gradients of weights XLA aligns, and no kernel does.
    assert (plain, kept) == (((5, 3), (4, 3)) if scheme == "bf16" else ((3, 4), (2, 2)))


def test_without_differentiation_nothing_changes():
    layer, x, p, ids, _ = arguments(45, "ragged, one expert empty")
    weights = layer.weights.get_value()

    def text(keeps):
        config = dataclasses.replace(layer.config, keep_hidden=keeps)
        static = Static(config, jnp.dtype("float32"), "reference")
        return jax.jit(functools.partial(differentiable, static)).lower(x, p, ids, weights).as_text()

    assert text(False) == text(True)


def test_w2_has_a_tile_where_gate_and_up_have_one():
    """Of every scheme whose words the gradient reads: both matrices have one format."""
    read = set()
    for scheme in ("w4a16_g32", "w4a16_g128", "w4a16_channel", "w8a16_g32", "w8a16_channel", "nvfp4_a16", "mxfp4_a16"):
        for hidden, intermediate in ((2880, 2880), (128, 320)):
            config = moe_jax.MoEConfig(E, K, hidden, intermediate, scheme=moe_jax.Scheme.parse(scheme))
            abstract = method_for(config.scheme).abstract_weights(config)
            held = jax.eval_shape(functools.partial(to_kernel_layout, config=config), abstract)
            if (operands := packed_operands(config, held)) is None:
                continue
            read.add(scheme)
            for rows in (64, 128):
                block_m = packed_block_m(config, operands[0], rows)
                desc = describe_call(block_m, operands[1], config.dtype, "none", None, None)
                assert next(candidates(desc, block_m, 132), None) is not None, (scheme, hidden, intermediate, rows)
    assert len(read) == 7


# -- who keeps nothing ------------------------------------------------------------------------------------------------


def test_schemes_with_quantized_activations_are_refused():
    for scheme in ("fp8_channel", "int8_w8a8", "w4a8_int8", "nvfp4_dynamic"):
        with pytest.raises(ValueError, match=f"keep_hidden=True with scheme '{scheme}'.*unquantized, or keep_hidden=F"):
            make_config(scheme, keep_hidden=True)
        with pytest.raises(ValueError, match="mlp.3: keep_hidden=True"):
            make_layer(scheme, keep_hidden=True, name="mlp.3")
    with pytest.raises(TypeError, match="keep_hidden"):
        make_layer("bf16", keep_hidden="yes")


def explained(config, weights, platform="gpu"):
    (line,) = (line for line in explain(config, weights, 45, platform).splitlines() if "keep_hidden" in line)
    return line.strip()


def test_explain_says_who_keeps_what():
    """Backends with a gradient of their own, and packed weights whose gradient dequantizes them first (act-order)."""
    again = "the call's arguments (0.0 MiB beside the weights), gate and up are computed again"
    sizes = dict(num_experts=E, hidden_size=128, intermediate_size=192, dtype="bfloat16", param_dtype="bfloat16")
    for names, text in {
        ("xla",): f"xla keeps {again}",
        ("portable", "xla"): f"xla keeps {again}",
        ("reference",): "reference keeps the call's arguments (0.0 MiB beside the weights) and what JAX keeps",
        ("hopper",): "no implementation computes the gradient",
    }.items():
        config = make_config(implementation=names, keep_hidden=True, **sizes)
        if names == ("hopper",):
            config = dataclasses.replace(config, intermediate_size=80)
        with on_hopper():
            line = explained(config, method_for(config.scheme).abstract_weights(config))
        assert line.startswith(f"kept for the gradient (keep_hidden): {text}"), line
    config = make_config("w4a16_g32_asym_actorder", implementation=("hopper",), keep_hidden=True, **sizes)
    weights = to_kernel_layout(make_stored_weights(config), config)
    with on_hopper():
        assert explained(config, weights).endswith(f"hopper keeps {again}")
    x, p, ids = jnp.ones((3, 128), jnp.bfloat16), jnp.ones((3, K)), jnp.zeros((3, K), jnp.int32)
    static = Static(config, jnp.dtype("float32"), "reference")
    assert not kept_rows(lambda x: differentiable(static, x, p, ids, weights), x, beside=(p, ids, weights))
