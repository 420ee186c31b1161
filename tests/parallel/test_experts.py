"""A layer over a mesh gives the answer of one device: every layout, dispatch, scheme, both kinds of axes.

Bit for bit where I is not split and top_k is 2, since the sum of two numbers has one order (and where there are few
tokens: XLA fuses product and sum over experts differently for many; with its fusion emitters, which these tests leave
out, for some of few tokens too). Else within the tolerance of float32 sums in
another order, for quantized schemes too: activations are rounded by the same scales, those of a whole row or call.
"""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moe_jax import MoEConfig
from moe_jax import fused_moe as on_one_device
from moe_jax.experts._backend import Problem
from moe_jax.experts._choice import BACKENDS, route_by
from moe_jax.experts.hopper._experts import forward as hopper_forward
from moe_jax.parallel import ParallelConfig, Placement, fused_moe, place_weights
from moe_jax.parallel._choice import FEW_TOKENS, choose_dispatch
from moe_jax.parallel._weights import abstract_share, share_config
from moe_jax.quantization import SCHEMES, Scheme
from moe_jax.routing import RoutingParams
from tests.support.cases.experts import make_stored_weights
from tests.support.cases.hopper_layers import on_hopper
from tests.support.cases.meshes import EXPERTS, HIDDEN, LAYOUTS, case_config, make_parallel, marked, reference, run
from tests.support.oracles.tolerances import assert_rows_close, tolerance

DISPATCHES = ("replicate", "all_gather", "all_to_all")
ROUTINGS = ("random", "one", "last", "ties", "skewed")


def check(scheme, layout, dispatch, axis_type, num_tokens, routing, placement="linear", redundant=0):
    config, parallel = case_config(scheme), make_parallel(layout, axis_type, dispatch=dispatch)
    y, stats, placement = run(parallel, config, num_tokens, routing, placement=placement, redundant=redundant)
    _, _, expected, expected_stats = reference(config, num_tokens, routing)
    if parallel.tensor_axis is None and num_tokens < 32:
        np.testing.assert_array_equal(y, expected)
    else:
        assert_rows_close(y, expected, tolerance("bf16", np.float32))
    np.testing.assert_array_equal(stats.topk_ids, expected_stats.topk_ids)
    slots = placement.physical_to_logical
    by_expert = np.bincount(slots[slots >= 0], weights=stats.load[slots >= 0], minlength=EXPERTS)
    np.testing.assert_array_equal(by_expert, expected_stats.load)
    assert (stats.load[slots < 0] == 0).all()


# Every two of (scheme kind, layout, dispatch, axis type, routing) that could meet in an error meet once.
COVER = [
    ("bf16", "ep2", "replicate", "Auto", 13, "random"),
    ("fp8_tensor", "ep4-tp2", "all_gather", "Explicit", 13, "skewed"),
    ("fp8_tensor", "dp2-ep4", "all_to_all", "Auto", 9, "one"),
    ("fp8_tensor_static", "tp4", "replicate", "Explicit", 5, "ties"),
    ("fp8_channel", "sp=tp2-ep2-dp2", "all_to_all", "Explicit", 13, "last"),
    ("fp8_channel", "tp2", "replicate", "Auto", 1, "one"),
    ("fp8_block", "ep2-tp2", "all_to_all", "Auto", 7, "random"),
    ("int8_w8a8", "sp2-ep2-tp2", "all_gather", "Auto", 13, "one"),
    ("int8_w8a16", "ep8", "all_gather", "Explicit", 3, "last"),
    ("w4a16_g32_asym", "ep4-tp2", "all_to_all", "Auto", 6, "ties"),
    ("w4a8_int8", "sp=tp2-ep2-dp2", "replicate", "Auto", 13, "skewed"),
    ("nvfp4", "ep2-tp2", "all_gather", "Explicit", 8, "last"),
    ("mxfp4_a16", "dp=ep4", "all_to_all", "Explicit", 13, "skewed"),
    ("bf16", "dp4", "replicate", "Explicit", 2, "random"),
]


QUICK = {1, 2, 4, 10}  # every dispatch, axis type and kind of axis; scales of calls and of rows


@pytest.mark.parametrize("case", marked(COVER, QUICK), ids=lambda case: "-".join(map(str, case)))
@pytest.mark.sample(2)
def test_equals_one_device(case):
    number = COVER.index(case)
    placement = ("linear", "round_robin")[number % 2]
    has_expert_axis = "expert_axis" in LAYOUTS[case[1]][1]
    redundant = 3 if placement == "linear" and has_expert_axis and number % 4 == 0 else 0
    check(*case, placement=placement, redundant=redundant)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_scheme_in_every_layout(scheme, layout):
    """Dispatches, axis types, routings, placements and token counts in turn, so that each meets each of the others."""
    number = 7 * list(SCHEMES).index(scheme) + list(LAYOUTS).index(layout)
    axis_type, placement = ("Auto", "Explicit")[number % 2], ("linear", "round_robin")[number // 2 % 2]
    check(scheme, layout, DISPATCHES[number % 3], axis_type, (13, 5)[number // 3 % 2], ROUTINGS[number % 5], placement)


@pytest.mark.parametrize(("scheme", "placement"), [("fp8_channel", "linear"), ("fp8_block", "round_robin")])
def test_each_expert_gets_its_own_tokens(scheme, placement):
    """vLLM #13784 (FP8 with expert parallelism took another expert) and #25798 (round robin was refused).

    Six experts lie on four devices, and every expert is the first choice of one token.
    """
    check(scheme, "ep4", "all_gather", "Auto", EXPERTS, "each", placement)


@pytest.mark.parametrize(("layout", "dispatch"), [("sp=tp2-ep2-dp2", "replicate"), ("sp2-ep2-tp2", "all_gather")])
def test_sums_are_over_experts_and_columns_alone(layout, dispatch):
    """vllm-project/tpu-inference #2248: a sum over devices with different tokens, and one that was left out.

    Tokens, experts and columns of I are split at once, so that each mistake changes every row.
    """
    check("bf16", layout, dispatch, "Auto", 13, "random")


@pytest.mark.parametrize(("scheme", "columns"), [("bf16", 24), ("fp8_channel", 32), ("int8_w8a8", 32)])
def test_shares_hold_whole_rows_of_the_kernels(scheme, columns, monkeypatch):
    """Where the Hopper kernels are tried first, I is padded to what they read; the padding adds nothing."""
    config, parallel, placement = case_config(scheme), make_parallel("ep2-tp2"), Placement.create(EXPERTS, 2)
    assert share_config(config, placement, parallel).intermediate_size == 20
    monkeypatch.setattr(ParallelConfig, "platform", "gpu")
    assert share_config(config, placement, parallel).intermediate_size == columns
    without = dataclasses.replace(config, implementation=("xla",))
    assert share_config(without, placement, parallel).intermediate_size == 20
    y, _, _ = run(parallel, config, 13, "random")
    assert_rows_close(y, reference(config, 13, "random")[2], tolerance(scheme, config.dtype))


@pytest.mark.parametrize("scheme", ["fp8_channel", "fp8_tensor", "int8_w8a8", "bf16"])
def test_shares_of_gpt_oss_are_taken_by_the_kernels(scheme, monkeypatch):
    """I = 2880 over four devices: 720 columns are no multiple of 32 bytes, 736 are."""
    monkeypatch.setattr(ParallelConfig, "platform", "gpu")
    sizes = dict(num_experts=128, top_k=4, hidden_size=2880, intermediate_size=2880, dtype="bfloat16")
    config, parallel = MoEConfig(scheme=Scheme.parse(scheme), has_bias=True, **sizes), make_parallel("tp4")
    placement = Placement.create(128, 1)
    own, share = share_config(config, placement, parallel), abstract_share(config, placement, parallel)
    assert share.w2.shape == (128, 2880, 720 if scheme == "bf16" else 736)
    with on_hopper():
        for tokens in (1, 64, 8192):
            assert BACKENDS["hopper"].refusal(Problem(own, share, tokens, "gpu")) is None


def test_no_tokens():
    config, parallel = case_config("fp8_channel"), make_parallel("ep4-tp2")
    y, stats, _ = run(parallel, config, 0, "random")
    assert y.shape == (0, config.hidden_size) and stats.load.sum() == 0 and stats.topk_ids.shape == (0, 2)


def test_many_rounds():
    """More rows for one device than a round takes: none is dropped, whichever device gets them all."""
    config = case_config("bf16")
    check("bf16", "dp2-ep4", "all_to_all", "Auto", 301, "one")
    parallel = make_parallel("ep4", dispatch="all_to_all")
    weights = place_weights(reference(config, 301, "one")[1], config, Placement.create(EXPERTS, 4), parallel)
    (x, logits), *_ = reference(config, 301, "one")
    text = (
        jax.jit(fused_moe).lower(x, logits, weights, config, parallel, placement=Placement.create(EXPERTS, 4)).as_text()
    )
    assert "while" in text and text.count("all_to_all") >= 2


@pytest.mark.parametrize("dispatch", marked(DISPATCHES, ()))
def test_masked_tokens_cost_nothing(dispatch):
    config, parallel = case_config("fp8_tensor"), make_parallel("dp2-ep4", dispatch=dispatch)
    (x, logits), weights, _, _ = reference(config, 11, "random")
    mask = jnp.asarray(np.arange(11) % 3 != 1)
    spoiled = jnp.where(mask[:, None], x, jnp.nan)
    kept = np.flatnonzero(mask)
    expected = np.asarray(on_one_device(x[kept], logits[kept], weights, config))
    placement = Placement.create(EXPERTS, 4)
    placed = place_weights(weights, config, placement, parallel)
    y, stats = fused_moe(
        spoiled, logits, placed, config, parallel, placement=placement, token_mask=mask, return_stats=True
    )
    np.testing.assert_array_equal(np.asarray(y)[kept], expected)
    assert (np.asarray(y)[~np.asarray(mask)] == 0).all() and int(stats.load.sum()) == 2 * kept.size


def test_partial_sums():
    config = dataclasses.replace(case_config("bf16", has_bias=True), apply_routed_scale_to_output=True)
    config = dataclasses.replace(config, routed_scaling_factor=2.5)
    (x, logits), weights, expected, _ = reference(config, 7, "random")
    shared = jnp.asarray(np.random.default_rng(5).standard_normal(x.shape), jnp.float32)
    placement = Placement.create(EXPERTS, 2)
    parallel = make_parallel("ep2-tp2", reduce_results=False)
    placed = place_weights(weights, config, placement, parallel)
    parts = fused_moe(x, logits, placed, config, parallel, placement=placement, shared_output=shared)
    assert parts.shape == (4, *x.shape) and parts.dtype == jnp.float32
    assert all(np.abs(np.asarray(part)).max() > 0 for part in parts)
    assert_rows_close(parts.sum(axis=0), expected + np.asarray(shared), tolerance("bf16", np.float32))
    whole = make_parallel("ep2-tp2")
    y = fused_moe(x, logits, placed, config, whole, placement=placement, shared_output=shared)
    assert_rows_close(y, expected + np.asarray(shared), tolerance("bf16", np.float32))


GRADIENTS = [
    ("ep2-tp2", "replicate", "Auto"),
    ("ep2-tp2", "all_gather", "Explicit"),
    ("dp2-ep4", "all_gather", "Auto"),
    ("sp=tp2-ep2-dp2", "all_gather", "Explicit"),
    ("ep4-tp2", "all_to_all", "Auto"),
    ("dp4", "replicate", "Explicit"),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", GRADIENTS, ids=str)
def test_gradients(case):
    """Of tokens, logits and experts, with the forward pass computed anew (``jax.checkpoint``)."""
    layout, dispatch, axis_type = case
    config = case_config("bf16", has_bias=True)
    (x, logits), weights, _, _ = reference(config, 12, "random")
    parallel = make_parallel(layout, axis_type, dispatch=dispatch)
    placement = Placement.create(EXPERTS, parallel.expert_size)
    placed = place_weights(weights, config, placement, parallel)
    target = jnp.asarray(np.random.default_rng(7).standard_normal(x.shape), jnp.float32)

    def gradients(function, *arguments):
        return jax.jit(jax.grad(lambda *a: (jax.checkpoint(function)(*a) * target).sum(), (0, 1, 2)))(*arguments)

    expected = gradients(lambda x, z, w: on_one_device(x, z, w, config), x, logits, weights)
    dx, dz, placed_dw = gradients(
        lambda x, z, w: fused_moe(x, z, w, config, parallel, placement=placement), x, logits, placed
    )
    slots = placement.logical_to_physical[:, 0]
    dw = jax.tree.map(
        lambda found, wanted: np.asarray(found)[slots][tuple(slice(0, n) for n in wanted.shape)],
        jax.tree.leaves(placed_dw),
        jax.tree.leaves(expected[2]),
    )
    for one, other in zip((dx, dz, *dw), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-4)


def per_layer(dispatch, axis_type):
    """(layer over a mesh, layer of one device), functions of x and logits, and arguments with an axis in front."""
    config, placement = case_config("bf16"), Placement.create(EXPERTS, 2)
    (x, logits), weights, _, _ = reference(config, 12, "random")
    parallel = make_parallel("ep2-tp2", axis_type, dispatch=dispatch)
    placed = place_weights(weights, config, placement, parallel)
    batches = x.reshape(3, 4, -1), logits.reshape(3, 4, -1)
    return (
        lambda x, z: fused_moe(x, z, placed, config, parallel, placement=placement),
        lambda x, z: on_one_device(x, z, weights, config),
        batches,
    )


@pytest.mark.parametrize("case", marked([("all_gather", "Auto"), ("all_to_all", "Explicit")], {0}), ids=str)
def test_vmap(case):
    """Batches, each with routing and exchange of its own, inside ``jax.jit`` and outside."""
    spread, alone, batches = per_layer(*case)
    expected = np.stack([alone(*batch) for batch in zip(*batches, strict=True)])
    for function in (jax.vmap(spread), jax.jit(jax.vmap(spread))):
        assert_rows_close(function(*batches), expected, tolerance("bf16", np.float32))


@pytest.mark.slow
@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
def test_gradients_outside_jit(axis_type):
    """JAX wants the mesh of Explicit axes to be set there, whatever the function."""
    spread, alone, batches = per_layer("all_gather", axis_type)

    def gradients(function):
        return jax.vmap(jax.grad(lambda x, z: (function(x, z) ** 2).sum(), (0, 1)))

    expected = jax.jit(gradients(alone))(*batches)
    with contextlib.nullcontext() if axis_type == "Auto" else jax.set_mesh(make_parallel("ep2-tp2", axis_type).mesh):
        found = gradients(spread)(*batches)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-4)


def test_rounds_have_no_gradient():
    """Of x, of logits and of weights; few tokens, which travel at once, have one."""
    config, placement = case_config("bf16"), Placement.create(EXPERTS, 4)
    parallel = make_parallel("ep4", dispatch="all_to_all")
    (x, logits), weights, *_ = reference(config, 301, "one")
    placed = place_weights(weights, config, placement, parallel)

    def total(x, z, w, num_tokens=301):
        return fused_moe(x[:num_tokens], z[:num_tokens], w, config, parallel, placement=placement).sum()

    for argument in (0, 1, 2):
        gradient = jax.grad(total, argument)
        with pytest.raises(NotImplementedError, match="'all_to_all' has no gradient .* dispatch='all_gather'"):
            jax.eval_shape(gradient, x, logits, placed)
        jax.eval_shape(functools.partial(gradient, num_tokens=9), x, logits, placed)


@pytest.mark.slow
def test_a_dispatch_that_nobody_named_has_a_gradient():
    config, placement, parallel = case_config("bf16"), Placement.create(EXPERTS, 4), make_parallel("ep4")
    (x, logits), weights, *_ = reference(config, FEW_TOKENS + 4, "random")
    assert choose_dispatch(parallel, config, len(x)) == "all_to_all"
    placed = place_weights(weights, config, placement, parallel)

    def total(parallel, x):
        return fused_moe(x, logits, placed, config, parallel, placement=placement).sum()

    def twice(parallel, x):
        layer = jax.checkpoint(lambda x: fused_moe(x, logits, placed, config, parallel, placement=placement))
        return jax.lax.scan(lambda x, _: (layer(x), None), x, length=2)[0].sum()

    def batch(parallel, x):
        return jax.vmap(functools.partial(total, parallel))(jnp.stack([x, 2 * x])).sum()

    for loss in (total, twice, batch):
        mine = functools.partial(loss, parallel)
        wanted = jax.jit(jax.grad(functools.partial(loss, dataclasses.replace(parallel, dispatch="all_gather"))))(x)
        for gradient in (jax.jit(jax.grad(mine)), jax.grad(jax.jit(mine))):
            np.testing.assert_array_equal(gradient(x), wanted)


@pytest.mark.slow
def test_router_weight_on_input():
    config = case_config("fp8_channel", top_k=1, apply_router_weight_on_input=True, renormalize=False)
    for dispatch in ("replicate", "all_to_all"):
        y, _, _ = run(make_parallel("ep2", dispatch=dispatch), config, 5, "random")
        np.testing.assert_array_equal(y, reference(config, 5, "random")[2])


@pytest.mark.parametrize("layout", ["ep2-tp2", "dp2-ep4", "sp=tp2-ep2-dp2"])
@pytest.mark.parametrize("is_scaled_last", [False, True])
@pytest.mark.sample(2)
def test_router_weight_on_input_beside_what_is_added_once(layout, is_scaled_last):
    """Biases of chosen experts, x for zero experts, the factor and the shared output, whole and as partial sums."""
    options = dict(top_k=1, has_bias=True, renormalize=False, zero_expert_type="identity", routed_scaling_factor=2.5)
    options |= dict(apply_router_weight_on_input=True, apply_routed_scale_to_output=is_scaled_last)
    config, rng = case_config("bf16", **options), np.random.default_rng(6)
    weights, placement = make_stored_weights(config), Placement.create(EXPERTS, 4 if "ep4" in layout else 2)
    x, shared, logits = (
        jnp.asarray(rng.standard_normal((9, width)), jnp.float32) for width in (HIDDEN, HIDDEN, EXPERTS + 2)
    )
    given = dict(routing=RoutingParams(jnp.zeros(EXPERTS + 2)), shared_output=shared, return_stats=True)
    expected, stats = on_one_device(x, logits, weights, config, **given)
    assert 0 < (stats.topk_ids < 0).sum() < 9
    for reduces in (True,) if "sp=" in layout else (True, False):  # tokens of a split sequence have no partial sums
        parallel = make_parallel(layout, reduce_results=reduces)
        placed = place_weights(weights, config, placement, parallel)
        y, _ = fused_moe(x, logits, placed, config, parallel, placement=placement, **given)
        assert_rows_close(y if reduces else y.sum(axis=0), expected, tolerance("bf16", np.float32))


@pytest.mark.parametrize(
    "options",
    [
        dict(routed_scaling_factor=2.5),
        dict(routed_scaling_factor=2.5, apply_routed_scale_to_output=True, renormalize=False),
        dict(scoring_func="sigmoid", use_grouped_topk=True, num_expert_group=3, topk_group=2),
    ],
)
@pytest.mark.sample(2)
def test_routing_by_the_kernel_is_routing(options):
    """Where the Hopper kernels run a share, its tokens are routed by one too, here by its reference."""
    config = case_config("bf16", **options)
    (x, logits), weights, _, _ = reference(config, 13, "random")
    params = RoutingParams(jnp.linspace(-0.2, 0.2, EXPERTS)) if "scoring_func" in options else None
    mask = jnp.arange(13) != 4
    by_kernel, by_xla = (
        route_by(BACKENDS[name], x, logits, config, weights, params, mask, None, None) for name in ("hopper", "xla")
    )
    np.testing.assert_array_equal(by_kernel.topk_ids, by_xla.topk_ids)
    np.testing.assert_allclose(by_kernel.topk_weights, by_xla.topk_weights, rtol=1e-6)


@pytest.mark.slow
def test_kernels_take_the_scale_of_the_whole_call():
    """The Hopper path, by the references of its kernels: one activation scale for tokens on two devices."""
    config = case_config("fp8_tensor", dtype="bfloat16", pinned_tokens=None)
    weights, rng = make_stored_weights(config), np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((16, config.hidden_size)) * np.repeat([0.05, 3.0], 8)[:, None], jnp.bfloat16)
    ids = jnp.asarray(rng.integers(0, EXPERTS, (16, 2)), jnp.int32)
    expected = hopper_forward(config, x, jnp.ones((16, 2)), ids, weights, kernels="reference")
    mesh = make_parallel("dp2-ep4").mesh
    own = dataclasses.replace(config, call_axes=("d",))
    run = jax.shard_map(
        lambda x, w, ids: hopper_forward(own, x, w, ids, weights, kernels="reference"),
        mesh=mesh,
        in_specs=jax.P("d"),
        out_specs=jax.P("d"),
        check_vma=False,
    )
    assert_rows_close(jax.jit(run)(x, jnp.ones((16, 2)), ids), expected, tolerance("bf16", jnp.bfloat16))
