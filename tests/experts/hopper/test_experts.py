"""The hopper backend: its plumbing on kernel references anywhere, its lowering for CUDA, its values on a GPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moe_jax
from moe_jax.experts import explain
from moe_jax.experts._choice import BACKENDS
from moe_jax.experts.hopper import _experts as hopper_experts
from moe_jax.experts.hopper import _kernel_backend as kernel_backend
from moe_jax.experts.hopper import _plan as hopper_plan
from moe_jax.experts.hopper._kernel_layout import kernel_format, to_kernel_layout
from moe_jax.experts.hopper._rows import row_kind
from moe_jax.quantization import Scheme, method_for
from moe_jax.routing import route
from pallas_kernels.grouped_gemm import GemmConfig
from pallas_kernels.tuning import Entry, LayerConfig, Table, table_for
from tests.support.cases.experts import make_config, make_routing, make_stored_weights, make_tokens
from tests.support.cases.hopper_layers import E, H, I, K, inputs, make_layer, on_hopper
from tests.support.kernels.case import launches
from tests.support.oracles.layer_judge import assert_layer_close
from tests.support.refusals import refuses

BLOCKS = ("fp8_block", "fp8_block_ue8m0")
SCHEMES = ("bf16", "fp8_tensor", "fp8_tensor_token", "fp8_channel", "fp8_block", "int8_w8a8")


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("scheme", "intermediate"),
    [(name, I) for name in (*SCHEMES, "fp8_block_ue8m0")] + [(name, n) for name in BLOCKS for n in (160, 192)],
)
@pytest.mark.sample(14)
def test_plumbing_on_kernel_references(scheme, intermediate, has_bias):
    """In small-M tiles another launch requantizes groups of a row, the last one of 128 or 64 columns, but not of 32."""
    layer = make_layer(scheme, intermediate, has_bias=has_bias, implementation="reference")
    x, z = inputs(37)
    ids = np.asarray(jax.lax.top_k(z, K)[1]).copy()
    ids[3] = -1
    ids[:, 0][20:] = 2  # one expert takes most
    p = jax.nn.softmax(z)[:, :K]
    weights, config = layer.weights.get_value(), layer.config
    if scheme.startswith("fp8_block"):
        first = hopper_plan.make_plan(config, weights, 37, "reference").products[0]
        assert first.requantize == ("group" if intermediate == 160 else "none")
    run = jax.jit(lambda x, p, ids, w: hopper_experts.forward(config, x, p, ids, w, kernels="reference"))
    actual = run(x, jnp.where(ids >= 0, p, 0.0), jnp.asarray(ids), weights)
    np.testing.assert_array_equal(actual[3], 0.0)
    assert_layer_close(actual, x, p, ids, weights, config)


ROUTERS = {
    "sigmoid, bias, groups, scale": dict(
        scoring_func="sigmoid",
        e_score_correction_bias=np.linspace(-1, 1, E, dtype=np.float32),
        use_grouped_topk=True,
        num_expert_group=3,
        topk_group=2,
        routed_scaling_factor=2.5,
        router_logits_dtype="bfloat16",
    ),
    "scale on output": dict(renormalize=False, routed_scaling_factor=2.5, apply_routed_scale_to_output=True),
}


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.sample(2)
def test_whole_layer_on_kernel_references(router):
    """From the logits on: the kernels' routing, padding masked, shared output added before the one rounding."""
    layer = make_layer("fp8_channel", implementation="reference", **ROUTERS[router])
    x, z = inputs(37)
    mask = jnp.arange(37) % 5 != 3
    shared = jax.random.normal(jax.random.key(5), x.shape, jnp.float32)
    weights, config, params = layer.weights.get_value(), layer.config, layer._routing_params()
    routed = route(z, config, params=params, token_mask=mask)
    run = jax.jit(
        lambda *arguments: hopper_experts.forward_layer(config, *arguments, kernels="reference"),
    )
    actual, ids, load = run(x, z, weights, params, mask, shared)
    assert actual.dtype == x.dtype
    np.testing.assert_array_equal(ids, routed.topk_ids)
    np.testing.assert_array_equal(load, np.bincount(ids[ids >= 0], minlength=E))
    on_output = 2.5 if config.apply_routed_scale_to_output else 1.0
    assert_layer_close(actual, x, on_output * routed.topk_weights, ids, weights, config, added=shared)
    np.testing.assert_array_equal(actual[~mask], shared.astype(x.dtype)[~mask])


def test_rows_left_to_others():
    """Their sum has the bits of the layer; shared experts of the layer itself are in it."""
    layer, (x, z) = make_layer("fp8_channel"), inputs(3)
    shared = jax.random.normal(jax.random.key(5), x.shape, jnp.float32)
    run = functools.partial(hopper_experts.forward_layer, layer.config, x, z, layer.weights.get_value(), None, None)
    for own in (None, shared):
        y, *others = run(own, kernels="reference")
        rows, *same = run(own, kernels="reference", is_combined=False)
        assert rows.shape == x.shape and len(rows.rows) > 3
        np.testing.assert_array_equal(rows.whole(x.dtype, "reference"), y)
        for one, other in zip(same, others, strict=True):
            np.testing.assert_array_equal(one, other)


def test_who_leaves_rows_to_others():
    """The Hopper kernels, where nothing but the sum follows them."""
    x, z = inputs(3)

    def made(scheme="fp8_channel", **options):
        return make_layer(scheme, **(dict(implementation="hopper") | options))

    def left(layer, x=x, mask=None):
        with on_hopper():
            found = jax.eval_shape(layer.routed_rows, x, z, mask)
        return None if found is None else found[0]

    plain = made()
    assert left(plain).shape == x.shape and left(plain).shared is None
    assert left(made(shared_experts=lambda t: t)).shared.shape == x.shape
    mask = jnp.array([True, False, True])
    assert left(plain, mask=mask).shape == x.shape
    assert left(made(shared_experts=lambda t: t), mask=mask) is None  # whose output of masked tokens is zeroed
    assert left(made("fp8_tensor"), mask=mask) is None  # whose one scale masked tokens must not raise
    assert left(plain, x.astype(jnp.float32)) is None and plain.routed_rows(x, z) is None  # not on a CPU
    for options in (
        *(dict(implementation=name) for name in ("portable", "xla")),
        dict(routed_input_transform=lambda t: t),
        dict(routed_output_transform=lambda t: t),
        dict(custom_routing_function="llama4", top_k=1),
        dict(zero_expert_type="identity", e_score_correction_bias=jnp.zeros(E + 2)),
    ):
        assert left(made(**options)) is None, options
    plain.lora = object()
    assert left(plain) is None


@pytest.mark.parametrize(
    "options, has_mask, reason",
    [
        (dict(), True, None),
        (dict(custom_routing_function="llama4", top_k=1), False, "custom_routing_function"),
        (dict(scoring_func="sqrtsoftplus"), False, "sqrtsoftplus"),
        (dict(zero_expert_type="identity", e_score_correction_bias=True), False, "zero experts"),
        (dict(apply_router_weight_on_input=True, top_k=1), False, "apply_router_weight_on_input"),
        (dict(scheme="fp8_tensor"), True, "masked tokens"),
    ],
)
@pytest.mark.sample(2)
def test_routing_left_to_xla(options, has_mask, reason):
    layer = moe_jax.FusedMoE(E, H, I, **{"top_k": K, "scheme": "fp8_channel", **options})
    weights = layer.weights.get_value()
    found = BACKENDS["hopper"].routing_refusal(layer.config, weights, None, has_mask=has_mask)
    assert found is None if reason is None else reason in found
    if reason and not has_mask:
        with on_hopper():
            text = explain(layer.config, weights, 8, "gpu")
        assert f"routing: by XLA, since the kernel has no {found}" in text


@pytest.mark.parametrize("tokens", [1, 300])
@pytest.mark.sample(2)
def test_whole_layer_lowers_for_hopper(tokens):
    """Two launches less for one token, which is aligned and quantized in that of routing; the caller's path, not the
    module's.
    """
    layer, (x, z) = make_layer("fp8_block", implementation="hopper"), inputs(tokens)
    graphdef, state = nnx.split(layer)
    with on_hopper():
        found = launches(lambda state, x, z: nnx.merge(graphdef, state)(x, z), state, x, z)
        assert "routing: by the kernel" in layer.explain(tokens)
    assert found == (4 if tokens == 1 else 6)


@pytest.mark.parametrize("scheme", ["fp8_channel", "w4a16_g128"])
def test_equal_layers_of_a_model_are_lowered_once(scheme):
    """Whatever they are called: the kernels of 48 layers lowered one by one would take minutes."""
    configs = [
        moe_jax.MoEConfig(
            E, K, H, I, scheme=Scheme.parse(scheme), implementation=("hopper",), dtype="bfloat16", name=name
        )
        for name in ("layers.0.mlp", "layers.1.mlp")
    ]
    weights = method_for(configs[0].scheme).abstract_weights(configs[0])
    if kernel_format(configs[0].scheme, "bfloat16") is not None:
        weights = jax.eval_shape(lambda weights: to_kernel_layout(weights, configs[0]), weights)

    def run(configs, weights, x, z):
        for config, own in zip(configs, weights, strict=True):
            x = moe_jax.fused_moe(x, z, own, config)
        return x

    counts = []
    for number in (1, 2):
        with on_hopper():
            counts.append(launches(functools.partial(run, configs[:number]), [weights] * number, *inputs(300)))
    assert counts[0] == counts[1] > 4


def test_layers_with_routers_of_their_own_are_traced_once(monkeypatch):
    """XLA runs those, and no cache keeps them."""
    plans = []
    monkeypatch.setattr(hopper_experts, "make_plan", lambda *args: plans.append(args) or hopper_plan.make_plan(*args))
    layer, (x, z) = make_layer("bf16", implementation="hopper"), inputs(11)

    def own_router():
        return lambda hidden_states, gating_output, topk, renormalize: jax.lax.top_k(gating_output, topk)

    counts = []
    for _ in range(2):
        config = dataclasses.replace(layer.config, custom_routing_function=own_router())
        with on_hopper():
            jax.eval_shape(lambda x, z, c=config: moe_jax.fused_moe(x, z, layer.weights.get_value(), c), x, z)
        counts.append(len(plans))
    assert counts[0] == counts[1] == 2  # asked whether the kernels take it, and traced
    assert all(config.custom_routing_function is None for config, *_ in plans)


@pytest.mark.parametrize("tokens", [1, 300])
@pytest.mark.parametrize(("scheme", "intermediate"), [(name, I) for name in SCHEMES] + [("fp8_block", 192)])
@pytest.mark.sample(12)
def test_lowers_for_hopper(scheme, intermediate, tokens):
    layer, (x, z) = make_layer(scheme, intermediate), inputs(tokens)
    graphdef, state = nnx.split(layer)

    def run(state, x, z):
        layer = nnx.merge(graphdef, state)
        _, ids = jax.lax.top_k(z, K)
        return BACKENDS["hopper"].run(x, z[:, :K], ids.astype(jnp.int32), layer.weights.get_value(), layer.config)

    with on_hopper():
        found = launches(run, state, x, z)
    requantizes_apart = scheme in ("fp8_tensor", "fp8_tensor_token", "fp8_channel", "int8_w8a8")
    # One token: align, but in bf16 one that quantizes or moves it, two products, and combine or requantization.
    of_one = 3 if scheme == "bf16" else 5
    assert found == (of_one if tokens == 1 else 6 if requantizes_apart else 5)


FORMATS = {
    "w8a8_int8_channel_asym": lambda: Scheme.parse("w8a8_int8_channel_asym"),
    "w8a8_int8_channel_asym_inputs_packed": lambda: Scheme.parse("w8a8_int8_channel_asym_inputs_packed"),
    "fp8_channel_ub3": lambda: with_formats("fp8_channel", activations=dict(amax_bound=3.0)),
    "fp8_block_64x64": lambda: with_formats(
        "fp8_block", weights=dict(block_shape=(64, 64)), activations=dict(group_size=64)
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_formats_close_to_those_of_a_kernel(name):
    """Zero points, containers, bounds and blocks that the kernels of plain weights do not know: other kernels take
    them, or xla, and explain says so.
    """
    config = moe_jax.MoEConfig(E, K, H, I, scheme=FORMATS[name](), dtype="bfloat16", implementation=("hopper", "xla"))
    assert config.scheme.name == name and row_kind(config.scheme) is None
    with on_hopper():
        text = explain(config, method_for(config.scheme).abstract_weights(config), 8, "gpu")
    expected = f"there is no kernel for scheme '{name}' yet" if name == "fp8_block_64x64" else "in layout 'plain'"
    assert expected in text and "implementation: xla" in text


def with_formats(scheme, **changes):
    parsed = Scheme.parse(scheme)
    formats = {name: dataclasses.replace(getattr(parsed, name), **change) for name, change in changes.items()}
    return Scheme.parse(dataclasses.replace(parsed, **formats))


@pytest.mark.parametrize(
    "options, reason",
    [
        (dict(dtype=jnp.float32), "float32"),
        (dict(scheme="int8_w8a16"), "int8_w8a16"),
        (dict(scheme="bf16", param_dtype=jnp.float32), "unquantized weights are float32"),
        (dict(), "Hopper"),
    ],
)
def test_explain_says_why_not(options, reason):
    layer = make_layer(**{"scheme": "fp8_channel", "implementation": ("hopper", "xla"), **options})
    text = layer.explain(8)
    assert "skipped: hopper" in text and reason in text and "implementation: xla" in text


def test_explain_names_the_kernels_and_their_limits():
    with on_hopper():
        layer = make_layer("fp8_block", implementation=("hopper", "xla"))
        text = layer.explain(64)
        assert "implementation: hopper" in text and "GEMM 1: 32 x 2 x 64 tiles with swap_ab" in text
        odd = moe_jax.FusedMoE(4, 264, 128, top_k=2, scheme="fp8_block", implementation=("hopper", "xla"))
        assert "K=264" in odd.explain(64) and "implementation: xla" in odd.explain(64)


@pytest.mark.parametrize(("hidden", "count"), [(2880, 6), (2848, 5)])
def test_rows_that_the_row_kernel_refuses_are_quantized_by_xla(hidden, count):
    """gpt-oss' H of 22.5 groups is the kernel's; with 22.25 groups there is one launch less, and explain says so."""
    layer = moe_jax.FusedMoE(4, hidden, 128, top_k=2, scheme="fp8_block", implementation="hopper", rngs=nnx.Rngs(0))
    graphdef, state = nnx.split(layer)
    x, z = (jax.ShapeDtypeStruct((9, n), dtype) for n, dtype in ((hidden, jnp.bfloat16), (4, jnp.float32)))
    with on_hopper():
        by_xla = f"input rows: quantized and moved by XLA, since the kernel refuses H={hidden}"
        assert (by_xla in layer.explain(9)) == (hidden == 2848)
        assert launches(lambda state, x, z: nnx.merge(graphdef, state)(x, z), state, x, z) == count


def test_measured_configurations_come_first(monkeypatch):
    """Unless the table is of another layer, or its configuration cannot run this one."""
    layer = make_layer("int8_w8a8", implementation="hopper")
    config, weights = layer.config, layer.weights.get_value()
    pair = LayerConfig(32, *[GemmConfig(32, 64, 5, swap_ab=True)] * 2)
    table = Table("NVIDIA H200", (Entry(hopper_plan.layer_key(config, weights), 16, pair, 1.0),))
    monkeypatch.setattr(hopper_plan, "table_for", lambda device: table)
    with on_hopper():
        text = layer.explain(9)
        assert text.count("measured for 16 tokens") == 2 and "32 x 2 x 64 tiles with swap_ab, 5 stages" in text
        assert "by the heuristic" in make_layer("bf16", implementation="hopper").explain(9)
        assert launches(layer, *inputs(9)) == 6


def test_measurements_for_far_more_or_fewer_tokens_are_left_alone(monkeypatch):
    """Tiles chosen for 48 tokens stay nearly empty at five, and at 97 experts may take several."""
    layer = make_layer("int8_w8a8", implementation="hopper")
    key = hopper_plan.layer_key(layer.config, layer.weights.get_value())
    pair = LayerConfig(48, *[GemmConfig(48, 64, 5, swap_ab=True)] * 2)
    monkeypatch.setattr(hopper_plan, "table_for", lambda device: Table("NVIDIA H200", (Entry(key, 48, pair, 1.0),)))
    with on_hopper():
        assert "GEMM 2: matrix times vector" in layer.explain(1)
        for tokens, is_near in ((5, False), (6, True), (48, True), (96, True), (97, False)):
            text = layer.explain(tokens)
            assert ("by the heuristic, since the nearest measurement is for 48 tokens" in text) != is_near
            assert ("measured for 48 tokens" in text) == is_near


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (GemmConfig(32, 64, 15, swap_ab=True), "measured for 16 tokens, with fewer stages"),
        (GemmConfig(32, 64, 5), "by the heuristic, since what was measured for 16 tokens cannot run it: block_m=32"),
    ],
)
def test_measured_configurations_that_do_not_fit(config, words, monkeypatch):
    layer = make_layer("int8_w8a8", implementation="hopper")
    key = hopper_plan.layer_key(layer.config, layer.weights.get_value())
    table = Table("NVIDIA H200", (Entry(key, 16, LayerConfig(32, config, config), 1.0),))
    monkeypatch.setattr(hopper_plan, "table_for", lambda device: table)
    with on_hopper():
        assert words in layer.explain(9)


@pytest.mark.parametrize("bias_dtype", [None, "bfloat16", "float32"])
def test_every_shipped_entry_runs_layers_with_biases(bias_dtype):
    for entry in table_for("NVIDIA H200").entries:
        config = entry.config
        products = entry.key.products(entry.tokens, config.block_m, bias_dtype=bias_dtype)
        for desc, measured in zip(products, (config.gemm1, config.gemm2), strict=True):
            found = hopper_plan._fitting(entry.key, desc, measured)
            assert not isinstance(found, str), (entry, found)
            assert measured.num_stages - found.num_stages <= (bias_dtype is not None)


def test_pinned_configurations_do_not_follow_the_call():
    """All but whether rows are moved, which no bit depends on."""
    layer = make_layer("fp8_channel", implementation="hopper", pinned_tokens=64)
    with on_hopper():
        found = [layer.explain(tokens).splitlines() for tokens in (1, 64, 4096)]
    assert [sum("none are moved" in line for line in lines) for lines in found] == [1, 0, 0]
    plans = {tuple(line for line in lines if "none are moved" not in line)[-4:-1] for lines in found}
    assert len(plans) == 1 and "pinned to 64 tokens" in str(plans)


@pytest.mark.parametrize("scheme", ["bf16", "fp8_block", "int8_w8a8"])
@pytest.mark.sample(3)
def test_pinned_outputs_do_not_depend_on_the_batch(scheme):
    """The xla implementation, bit for bit; the kernels' turn is test_pinned_outputs_on_gpu."""
    pinned_outputs_agree(make_layer(scheme, implementation="xla", pinned_tokens=16))


def pinned_outputs_agree(layer):
    x, z = inputs(33)
    run = jax.jit(lambda layer, x, z: layer(x, z))
    expected = np.asarray(run(layer, x, z))
    for tokens in (1, 2, 7, 16):
        np.testing.assert_array_equal(run(layer, x[:tokens], z[:tokens]), expected[:tokens])


def test_pinned_tokens_are_checked():
    with pytest.raises(ValueError, match="pinned_tokens is 0, expected None or an integer of at least 1"):
        make_layer("bf16", pinned_tokens=0)


PINNED = ("bf16", "fp8_channel", "fp8_block", "int8_w8a8", "w4a16_g128", "nvfp4_dynamic", "mxfp4_a16", "w4a8_int8")


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", PINNED)
def test_pinned_outputs_on_gpu(scheme):
    pinned_outputs_agree(make_layer(scheme, implementation="hopper", pinned_tokens=16))


def test_alone_it_refuses_with_its_reason():
    layer, (x, z) = make_layer("fp8_channel", implementation="hopper"), inputs(3)
    refuses(NotImplementedError, "Hopper", layer, x, z)


@pytest.mark.parametrize("scheme", [*BLOCKS, "fp8_tensor_static"])
def test_float16_is_requantized_before_it_overflows(scheme):
    sizes = dict(num_experts=E, top_k=K, hidden_size=H, intermediate_size=512, dtype="float16")
    config = make_config(scheme, **sizes)
    weights = method_for(config.scheme).abstract_weights(config)
    for tokens in (1, 3, 40, 700):
        with on_hopper():
            for kernels in ("hopper", "reference"):
                plan = hopper_plan.make_plan(config, weights, tokens, kernels)
                if tokens <= 3:  # without wgmma: by the given scale, or left in float32 for the next product
                    assert plan.block_m == (1 if tokens == 1 else 4)
                    assert plan.requantize == "tensor" or plan.hidden_dtype == "float32"
                    continue
                assert plan.products[0].requantize != "none" and plan.block_m in (64, 128)
    # Entries of the table are for bfloat16 as well, whose small-M tiles do not take it then.
    qwen = make_config(scheme, **sizes | dict(num_experts=128, top_k=8, hidden_size=2048, intermediate_size=768))
    weights = method_for(qwen.scheme).abstract_weights(qwen)
    with on_hopper():
        plan = hopper_plan.make_plan(qwen, weights, 16)
    assert plan.products[0].requantize != "none" and "float16 is not built" in plan.source


@pytest.mark.parametrize("scheme", [*BLOCKS, "fp8_tensor_static"])
def test_small_m_tiles_of_128_columns_requantize(scheme):
    """With an entry of the table and without, also pinned; not where a tile has part of a group, or is narrower."""
    sizes = dict(top_k=8, hidden_size=2048, dtype="bfloat16")
    for options, requantizes in (
        (dict(num_experts=128, intermediate_size=768), True),
        (dict(num_experts=96, intermediate_size=768), True),
        (dict(num_experts=96, intermediate_size=768, pinned_tokens=64), True),
        (dict(num_experts=96, intermediate_size=704), False),
        (dict(num_experts=8, intermediate_size=768), False),
    ):
        config = make_config(scheme, **sizes | options)
        weights = method_for(config.scheme).abstract_weights(config)
        with on_hopper():
            plan = hopper_plan.make_plan(config, weights, 64 if options["num_experts"] > 8 else 16)
        assert plan.block_m < 64
        assert (plan.requantize != "none") == (plan.products[0].requantize != "none") == requantizes
        assert not requantizes or plan.configs[0].block_n == 128
        with on_hopper():
            first, _ = hopper_plan.describe_products(plan, weights)
        assert ("which requantize their rows" in first) == requantizes


@pytest.mark.parametrize(("tokens", "requantize"), [(3, "tensor"), (7, "none"), (37, "none")])
def test_static_rows_are_requantized_apart(tokens, requantize):
    """By a launch of its own, but for tiles of a few rows."""
    config = make_config(
        "fp8_tensor_static", num_experts=E, top_k=K, hidden_size=H, intermediate_size=I, dtype="bfloat16"
    )
    weights, x = make_stored_weights(config), make_tokens(tokens, config, dtype="bfloat16")
    assert hopper_plan.make_plan(config, weights, tokens, "reference").products[0].requantize == requantize
    p, ids = make_routing(tokens, K, E)
    actual = hopper_experts.forward(config, x, jnp.where(ids >= 0, p, 0.0), ids, weights, kernels="reference")
    assert_layer_close(actual, x, p, ids, weights, config)


def test_a_whole_layer_is_refused_beforehand_or_loudly(monkeypatch):
    """A kernel's reason is asked for before the layer runs; what is raised while it runs reaches the caller."""
    layer, (x, z) = make_layer("bf16", implementation=("hopper", "xla")), inputs(3)

    def refuse(*args, **kwargs):
        raise NotImplementedError("broken")

    monkeypatch.setattr(kernel_backend, "_forward_layer", refuse)
    monkeypatch.setattr(kernel_backend, "traced_refusal", lambda *args, **options: None)
    with on_hopper(), pytest.raises(NotImplementedError, match="broken"):
        jax.eval_shape(lambda x, z: layer(x, z), x, z)
    monkeypatch.undo()
    monkeypatch.setattr(kernel_backend, "forward_layer", refuse)
    monkeypatch.setattr(kernel_backend.KernelBackend, "run_layer", lambda *args: pytest.fail("it was not asked"))
    with on_hopper():
        assert jax.eval_shape(lambda x, z: layer(x, z), x, z).shape == x.shape
        arguments = (x, z, layer.weights.get_value(), None, None, None)
        assert BACKENDS["hopper"].layer_refusal(layer.config, arguments) == "broken"


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 7, 16, 63, 129, 700, 2048])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_values_on_gpu(scheme, tokens):
    """Every row; hostile routing in the second call."""
    layer = make_layer(scheme, has_bias=True, implementation="hopper")
    x, z = inputs(tokens, seed=tokens)
    for logits in (z, z.at[:, 3].add(50.0)):
        actual = jax.jit(lambda layer, x, z: layer(x, z))(layer, x, logits)
        routed = route(logits, layer.config)
        slots = routed.topk_weights, routed.topk_ids
        assert_layer_close(actual, x, *slots, layer.weights.get_value(), layer.config, on_gpu=True)
        again = jax.jit(lambda layer, x, z: layer(x, z))(layer, x, logits)
        np.testing.assert_array_equal(actual, again)
