"""The kernels between a layer's products, with references in their places: the answers of XLA's way."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moe_jax
from moe_jax.experts import _choice, _matrix
from moe_jax.experts._choice import BACKENDS
from moe_jax.experts._matrix import multiply
from moe_jax.experts.hopper import _experts as hopper_experts
from moe_jax.experts.hopper import _matrix as hopper_matrix
from moe_jax.models import KVCache, _fused
from moe_jax.models._layers import (
    GatedMLP,
    LayerNorm,
    Linear,
    LinearLoRA,
    PartialSums,
    RMSNorm,
    keep_quantized,
    partial_sums,
    side_by_side,
    split_product,
)
from moe_jax.models.attention import _attention, _hopper
from moe_jax.models.attention._attention import AttentionInputs, attended_and_projected
from moe_jax.models.families.deepseek_v3 import DeepseekV3ForCausalLM
from moe_jax.models.families.qwen3_moe import Qwen3MoeForCausalLM
from moe_jax.nn import FusedMoE, QuantizedParam
from moe_jax.quantization import QuantizedMatrix, Scheme, method_for
from pallas_kernels.combine import RoutedRows
from pallas_kernels.decode_attention import decode_attention
from tests.support.cases.hopper_layers import E, H, make_layer, on_hopper
from tests.support.cases.models import VOCAB, assert_logits_close, run
from tests.support.kernels.case import launches

_Hopper: Any = type(BACKENDS["hopper"])


@functools.cache
def _quantize(scheme):
    return jax.jit(method_for(scheme).quantize_matrix)


def quantize(scheme, weight):
    """What a scheme makes of a matrix, by one program for each shape."""
    return _quantize(scheme)(weight)


@pytest.fixture
def calls(monkeypatch):
    """Names of the kernels in all traced calls, one for equal layers, "router" behind one that multiplies with it and
    "experts" behind one that adds up their rows; any dtype and size is taken as on Hopper."""
    found = []

    def stand_in(kernel, *arguments, implementation, **options):
        found.append(kernel.__name__)
        found.extend(["router"] * (options.get("router") is not None))
        found.extend(["experts"] * any(isinstance(argument, RoutedRows) for argument in arguments))
        return kernel(*arguments, implementation="reference", **options)

    kernels = ((_fused.norm_kernel, "add_and_norm"), (_fused.rotate_kernel, "rotate_and_store"))
    kernels += ((_fused.heads_kernel, "multiply_heads"), (_fused.latents_kernel, "store_latents"))
    for module, name in (*kernels, (_fused.product_kernel, "norm_and_multiply"), (_fused, "grouped_gemm")):
        monkeypatch.setattr(module, name, functools.partial(stand_in, getattr(module, name)))
    modules = (_fused.norm_kernel, _fused.rotate_kernel, _fused.product_kernel, _fused.heads_kernel)
    for module in (*modules, _fused.latents_kernel):
        monkeypatch.setattr(module, "config_error", lambda desc, config: None)
    monkeypatch.setattr(_fused, "hopper_sms", lambda: 132)
    monkeypatch.setattr(_hopper, "OLDEST_JAX", (0, 10))
    jax.clear_caches()  # a part that was traced without the stand-ins would not call them
    yield found
    jax.clear_caches()


# Norms of heads; biases; sinks and windows; a latent cache; post-norms and norms of whole projections; LayerNorms;
# zero-centred norms, output gates and linear attention, which no kernel may take.
NAMES = ["qwen3", "gpt_oss", "qwen3_next", "deepseek_v3"]
SLOW = ["deepseek_v32", "qwen3_dense_bias", "mixtral", "flex_olmo", "phimoe", "granite", "llama4"]


@pytest.mark.parametrize("name", [*NAMES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
@pytest.mark.sample(2)
def test_models(case, calls, name):
    """A prompt padded on the left, then on its cache four tokens and one, beside XLA's answer to all at once."""
    one, rng = case(name), np.random.default_rng(0)
    ids = rng.integers(0, VOCAB, (2, 15)).astype(np.int32)
    mask = np.arange(15) >= [[0], [6]]
    expected = moe_jax.load_pretrained(one.directory, dtype="float32", attention="xla").score(ids, mask)
    assert not calls
    model = moe_jax.load_pretrained(one.directory, dtype="float32")
    first, cache = run(model, ids[:, :10], attention_mask=mask[:, :10], cache=model.init_cache(2, 16))
    parts = [first]
    for begin, end in ((10, 14), (14, 15)):
        part, cache = run(model, ids[:, begin:end], cache=cache)
        parts.append(part)
    assert_logits_close(np.concatenate(parts, axis=1)[mask], np.asarray(expected)[mask])
    config = model.config
    assert ("add_and_norm" in calls) == (config.norm == "rms")
    is_plain = config.mla is None and config.qk_norm in (None, "head") and not config.is_rope_interleaved
    is_plain &= config.clip_qkv is None and not config.has_output_gate
    assert ("rotate_and_store" in calls) == is_plain
    assert ("multiply_heads" in calls) == (config.mla is not None)


def test_generate_and_gradients(case, calls):
    directory = case("qwen3").directory
    models = [moe_jax.load_pretrained(directory, dtype="float32", attention=name) for name in ("auto", "xla")]
    made = [moe_jax.generate(model, [[1, 2, 3, 4, 5], [6, 7]], max_new_tokens=4) for model in models]
    assert made[0] == made[1] and "rotate_and_store" in calls
    assert "router" in calls
    del calls[:]
    one_row = moe_jax.generate(models[0], [[1, 2, 3, 4, 5]], max_new_tokens=4)
    np.testing.assert_array_equal(one_row, made[1][:1])
    assert "router" in calls

    def loss(model):
        return model(jnp.arange(12)[None] % VOCAB)[0, -1, :7].sum()

    del calls[:]
    for ours, theirs in zip(*(jax.tree.leaves(jax.jit(nnx.grad(loss))(model)) for model in models), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    assert "add_and_norm" in calls


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss", pytest.param("flex_olmo", marks=pytest.mark.slow)])
def test_a_router_with_the_norm(case, calls, monkeypatch, name):
    """Logits and statistics are XLA's, also of masked tokens, which are zeros to a router, and the router multiplies
    nowhere else; behind post-norms there is no norm in front of it."""
    directory, ids = case(name).directory, jnp.arange(8).reshape(2, 4) % VOCAB
    ours, theirs = (moe_jax.load_pretrained(directory, dtype="float32", attention=one) for one in ("auto", "xla"))
    score = jax.jit(lambda model, mask: model(ids, attention_mask=mask, return_stats=True))
    (expected, wanted), routed, multiply = score(theirs, None), [], Linear.__call__

    def recorded(self, x):
        routed.extend([self] * (self.out_dtype == jnp.float32))
        return multiply(self, x)

    monkeypatch.setattr(Linear, "__call__", recorded)
    found, stats = score(ours, None)
    is_taken = not ours.config.is_post_norm
    assert ("router" in calls) == is_taken and len(routed) == (0 if is_taken else len(ours.moe_blocks()))
    assert_logits_close(np.asarray(found), np.asarray(expected))
    np.testing.assert_array_equal(stats.topk_ids, wanted.topk_ids)
    np.testing.assert_allclose(stats.router_logits, wanted.router_logits, rtol=1e-4, atol=1e-5)
    del routed[:]
    mask = np.arange(4) >= [[0], [2]]
    found, stats = score(ours, mask)
    assert len(routed) == (0 if is_taken else len(ours.moe_blocks()))
    expected, wanted = score(theirs, mask)
    assert_logits_close(np.asarray(found)[mask], np.asarray(expected)[mask])
    np.testing.assert_allclose(stats.router_logits, wanted.router_logits, rtol=1e-4, atol=1e-5)


class _Leaving(_Hopper):
    """The Hopper backend with the kernels' references in whole layers."""

    run_layer = staticmethod(functools.partial(hopper_experts.forward_layer, kernels="reference"))

    def layer_refusal(self, config, arguments):
        return None


OTHERS = ["granite", "deepseek_v3", "flex_olmo"]  # a multiplier, shared experts and a norm come behind the sum


@pytest.mark.parametrize("name", ["qwen3", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_rows_of_experts_added_with_the_norm(case, calls, monkeypatch, name):
    """Logits, statistics and gradients are XLA's, with and without ``remat``."""
    directory, ids = case(name).directory, jnp.arange(8).reshape(2, 4) % VOCAB
    ours, theirs = (moe_jax.load_pretrained(directory, dtype="float32", attention=one) for one in ("auto", "xla"))
    score = jax.jit(lambda model, ids, **inputs: model(ids, return_stats=True, **inputs))
    expected, wanted = score(theirs, ids)

    def loss(model, **options):
        return model(ids, **options)[0, -1, :7].sum()

    mask = np.arange(4) >= [[1], [4]]
    masked, wanted_masked = score(theirs, ids, attention_mask=mask)
    gradients, of_masked = (
        jax.tree.leaves(jax.jit(nnx.grad(functools.partial(loss, **options)))(theirs))
        for options in ({}, dict(attention_mask=mask))
    )
    monkeypatch.setattr(_choice, "choose", lambda problem: (_Leaving(), []))
    found, stats = score(ours, ids)
    assert ("experts" in calls) == (name not in OTHERS)
    assert_logits_close(np.asarray(found), np.asarray(expected))
    for name in ("topk_ids", "load"):
        np.testing.assert_array_equal(getattr(stats, name), getattr(wanted, name))
    np.testing.assert_allclose(stats.router_logits, wanted.router_logits, rtol=1e-4, atol=1e-5)
    for options, wanted in (({}, gradients), (dict(remat=True), gradients), (dict(attention_mask=mask), of_masked)):
        found = jax.tree.leaves(jax.jit(nnx.grad(functools.partial(loss, **options)))(ours))
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    found, stats = score(ours, ids, attention_mask=mask)
    assert_logits_close(np.asarray(found)[mask], np.asarray(masked)[mask])
    for name in ("topk_ids", "load"):
        np.testing.assert_array_equal(getattr(stats, name), getattr(wanted_masked, name))
    np.testing.assert_allclose(stats.router_logits, wanted_masked.router_logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("most", [8, 7])
@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.sample(3)
def test_tokens_of_many_rows(case, calls, monkeypatch, is_masked, most):
    """A router of its own, in front of kernels that run a whole layer: nothing zeroes masked tokens, and the next norm
    adds up the rows of at most so many. Logits, statistics and gradients are XLA's."""
    directory, config = case("qwen3").directory, case("qwen3").model.config
    of_rows = {(config.top_k, config.hidden_size): most}
    monkeypatch.setattr(moe_jax.models._decoder, "most_routed", lambda top_k, width: of_rows[top_k, width])
    mask = np.arange(4) >= ([[1], [3]] if is_masked else [[0], [0]])
    given = dict(attention_mask=mask) if is_masked else {}
    ids = jnp.arange(8).reshape(2, 4)
    ours, theirs = (moe_jax.load_pretrained(directory, dtype="float32", attention=one) for one in ("auto", "xla"))
    score = jax.jit(lambda model: model(ids, return_stats=True, **given))

    def gradients(model):
        loss = lambda model: jnp.where(mask, model(ids, **given)[..., 3], 0).sum()  # noqa: E731
        return jax.tree.leaves(jax.jit(nnx.grad(loss))(model))

    (expected, wanted), of_theirs = score(theirs), gradients(theirs)
    monkeypatch.setattr(_choice, "choose", lambda problem: (_Leaving(), []))
    monkeypatch.setattr(
        _fused.norm_kernel, "config_error", lambda desc, config: "no router" * bool(desc.num_experts) or None
    )
    asked = []
    block = moe_jax.models._decoder.MoEBlock.__call__
    monkeypatch.setattr(
        moe_jax.models._decoder.MoEBlock, "__call__", lambda *a, **b: asked.append("the whole block") or block(*a, **b)
    )
    found, stats = score(ours)
    assert bool(asked) == (most == 7 and not is_masked) and "router" not in calls
    assert ("experts" in calls) == (most == 8)
    assert_logits_close(np.asarray(found)[mask], np.asarray(expected)[mask])
    for name in ("topk_ids", "load"):
        np.testing.assert_array_equal(getattr(stats, name), getattr(wanted, name))
    np.testing.assert_allclose(stats.router_logits, wanted.router_logits, rtol=1e-4, atol=1e-5)
    for one, other in zip(gradients(ours), of_theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("scheme", "is_added_up"), [("bf16", True), ("fp8_channel", False)])
def test_rows_of_one_token(case, calls, monkeypatch, scheme, is_added_up):
    """Its rows are added up by their last product, or with the next norm where that product quantizes them."""
    sizes: Any = dict(num_layers=2, moe_layers=(0, 1), hidden_size=512, moe_intermediate_size=256)
    config, ids = dataclasses.replace(case("qwen3").model.config, **sizes), jnp.asarray([[3]])
    schemes = dict.fromkeys((0, 1), Scheme.parse(scheme))
    model = Qwen3MoeForCausalLM(config, schemes=schemes, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    score = jax.jit(lambda model, mask: model(ids, attention_mask=mask, return_stats=True))
    masks = [None, jnp.zeros((1, 1), bool)]

    def gradients():
        loss = lambda model: model(ids)[0, -1, :7].astype(jnp.float32).sum()  # noqa: E731
        return jax.tree.leaves(jax.jit(nnx.grad(loss))(model)) if is_added_up else []

    expected, wanted_gradients = [score(model, mask) for mask in masks], gradients()
    left = []

    def routed_rows(*arguments, **options):
        left.append(plain_routed_rows(*arguments, **options))
        return left[-1]

    plain_routed_rows = FusedMoE.routed_rows
    monkeypatch.setattr(FusedMoE, "routed_rows", routed_rows)
    monkeypatch.setattr(_choice, "choose", lambda problem: (_Leaving(), []))
    jax.clear_caches()
    for mask, (logits, stats) in zip(masks, expected, strict=True):
        found, found_stats = score(model, mask)
        np.testing.assert_allclose(found, logits, atol=0.02 * np.abs(logits).max())
        for name in ("topk_ids", "load"):
            np.testing.assert_array_equal(getattr(found_stats, name), getattr(stats, name))
    assert [isinstance(rows, RoutedRows) for rows, _ in left] == [not is_added_up] * 4
    assert ("experts" in calls) == (not is_added_up)
    for one, other in zip(gradients(), wanted_gradients, strict=True):
        difference, other = (np.asarray(leaf, np.float64) for leaf in (one - other, other))
        assert np.linalg.norm(difference) <= 0.02 * np.linalg.norm(other)


def test_what_is_not_routed_with_the_norm():
    """Many tokens, and routers that are more than a product with a plain weight."""

    class Scaled(Linear):
        def __call__(self, x):
            return 2 * super().__call__(x)

    rngs, norm = nnx.Rngs(0), RMSNorm(512, eps=1e-6, rngs=nnx.Rngs(0))

    def is_taken(router, tokens=4, norm=norm, sms: int | None = 132):
        arguments = norm, jnp.ones((tokens, 1, 512), jnp.bfloat16), None, router, None, sms
        try:
            return _fused.added_normed_and_routed(*arguments) is not None
        except NotImplementedError:  # of the kernel, which this machine does not run
            return True

    def router(kind=Linear, **options):
        return kind(512, 6, **(dict(out_dtype=jnp.float32, rngs=rngs) | options))

    assert is_taken(router()) and is_taken(router(use_bias=True)) and is_taken(router(), 1)
    assert not is_taken(router(), 5) and not is_taken(router(), sms=None)
    assert not is_taken(router(), norm=LayerNorm(512, eps=1e-6, rngs=rngs))
    assert not is_taken(lambda x: x[..., :6]) and not is_taken(router(Scaled))
    assert not is_taken(router(out_dtype=None)) and not is_taken(router(dtype=jnp.float32))
    adapted, quantized = router(), router()
    adapted.lora = object()
    scheme = Scheme.parse("fp8_channel")
    matrix = QuantizedMatrix(quantize(scheme, jnp.ones((6, 512))), scheme)
    quantized.weight = QuantizedParam(matrix, eager_sharding=False)
    assert not is_taken(adapted) and not is_taken(quantized)


def test_a_cache_in_fp8(case, calls):
    """The codes that both ways write, to the bit."""
    caches = []
    for name in ("auto", "xla"):
        options = dict(dtype="float32", attention=name, kv_cache_dtype="fp8")
        model = moe_jax.load_pretrained(case("qwen3").directory, **options)
        for layer in model.layers:
            layer.self_attn.k_scale.set_value(jnp.float32(0.017))
            layer.self_attn.v_scale.set_value(jnp.float32(0.0003))  # of which some are above 448
        caches.append(run(model, jnp.arange(6)[None], cache=model.init_cache(1, 8))[1])
    assert "rotate_and_store" in calls
    for found, wanted in zip(*(cache.layers[0].arrays for cache in caches), strict=True):
        assert found.dtype == jnp.float8_e4m3fn
        np.testing.assert_array_equal(found.astype(np.float32), wanted.astype(np.float32))


class _Rows(_Hopper):
    """The Hopper backend with the kernels' references in products with a matrix."""

    multiply = staticmethod(functools.partial(hopper_matrix.multiply, kernels="reference"))
    multiply_rows = staticmethod(functools.partial(hopper_matrix.multiply_rows, kernels="reference"))
    multiply_in_parts = staticmethod(functools.partial(hopper_matrix.multiply_in_parts, kernels="reference"))


class _Joining(_Rows):
    """As on a GPU that takes all tiles."""

    def matrix_refusal(self, problem):
        return hopper_matrix.refusal(problem.matrix, problem.dtype)


@pytest.mark.parametrize(
    ("name", "is_joined"), [("fp8_block", False), ("fp8_block", True), ("fp8_channel", True), ("int8_w8a8", False)]
)
@pytest.mark.sample(2)
def test_projections_of_a_quantized_norm(calls, monkeypatch, name, is_joined):
    """Codes from the launch of the norm give the products of a norm that is quantized by itself, bit by bit, in one
    product or in two; and these are near the exact ones. Gradients pass the rounding straight through."""
    scheme, rng, hidden = Scheme.parse(name), np.random.default_rng(0), 512
    norm = RMSNorm(hidden, eps=1e-6, rngs=nnx.Rngs(0))
    x = jnp.asarray(rng.standard_normal((3, 1, hidden)), jnp.bfloat16)
    addend = PartialSums(jnp.asarray(rng.standard_normal((2, 8, hidden)), jnp.float32), (3, 1))
    modules, weights = [], []
    for size in (256, 128):
        modules.append(Linear(hidden, size))
        weights.append(rng.standard_normal((size, hidden)).astype(np.float32) * hidden**-0.5)
        matrix = QuantizedMatrix(quantize(scheme, jnp.asarray(weights[-1])), scheme)
        modules[-1].weight = QuantizedParam(matrix, eager_sharding=False)
    backends = {("reference",): BACKENDS["reference"], None: _Joining() if is_joined else _Rows()}
    monkeypatch.setattr(_matrix, "_chosen", lambda problem, implementation: backends[implementation])
    total, products = _fused.added_and_projected(norm, x, addend, tuple(modules), 132)
    assert calls == ["add_and_norm"] and len(products) == (1 if is_joined else 2)
    if is_joined:
        y = products[0].parts
        products = [PartialSums(y[..., :256], (3, 1)), PartialSums(y[..., 256:], (3, 1))]
    apart, normal = _fused.added_and_normed(norm, x, addend, 132)
    np.testing.assert_array_equal(total, apart)
    wide = np.asarray(x, np.float64) + np.asarray(addend.parts, np.float64).sum(0)[:3, None]
    exact = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6)
    for product, module, weight in zip(products, modules, weights, strict=True):
        y = product.whole(jnp.bfloat16)
        np.testing.assert_array_equal(y, partial_sums(module, normal).whole(jnp.bfloat16))
        assert np.abs(np.asarray(y, np.float64) - exact @ weight.T).max() < 0.25  # of values of about 1

    def loss(x):
        y = _fused.added_and_projected(norm, x, addend, tuple(modules), 132)[1][0].whole(jnp.float32)
        return y[..., :256].sum()

    def plain_loss(x):
        normal = norm((x.astype(jnp.float32) + addend.whole(jnp.float32)).astype(x.dtype))
        return multiply(normal, modules[0].weight.get_value(), out_dtype=x.dtype, implementation=("reference",)).sum()

    ours, theirs = (np.asarray(jax.jit(jax.grad(f))(x), np.float64) for f in (loss, plain_loss))
    np.testing.assert_allclose(ours, theirs, atol=0.05 * np.abs(theirs).max())


@pytest.mark.parametrize("name", ["fp8_block", "fp8_channel"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_parts_of_a_quantized_product(monkeypatch, name, has_bias):
    """Partial sums and a bias that nobody has added yet are the product, and so are their gradients."""
    scheme, rng, x = Scheme.parse(name), np.random.default_rng(0), jax.random.normal(jax.random.key(0), (3, 1, 1024))
    module, x = Linear(1024, 192, use_bias=has_bias, rngs=nnx.Rngs(0)), x.astype(jnp.bfloat16)
    weight = jnp.asarray(rng.standard_normal((192, 1024)) / 32, jnp.float32)
    module.weight = QuantizedParam(QuantizedMatrix(quantize(scheme, weight), scheme), eager_sharding=False)
    if has_bias:
        module.bias[...] = jnp.asarray(rng.standard_normal(192), jnp.bfloat16)
    monkeypatch.setattr(_matrix, "_chosen", lambda problem, implementation: _Joining())
    found, whole = (partial_sums(module, x, splits_quantized=is_split) for is_split in (True, False))
    assert found.parts.shape == (2, 64, 192) and found.parts.dtype == jnp.float32 and whole.parts.shape[0] == 1
    assert len(found.biases) == has_bias and not whole.biases
    np.testing.assert_allclose(found.whole(jnp.float32), whole.whole(jnp.float32), rtol=2**-7, atol=2**-7)
    cotangent = rng.standard_normal((3, 1, 192)).astype(np.float32)

    def loss(x, is_split):
        return (partial_sums(module, x, splits_quantized=is_split).whole(jnp.float32) * cotangent).sum()

    ours, theirs = (np.asarray(jax.jit(jax.grad(loss), static_argnums=1)(x, own), np.float64) for own in (True, False))
    np.testing.assert_allclose(ours, theirs, atol=0.02 * np.abs(theirs).max())


def test_parts_behind_attention(monkeypatch):
    """Codes of attention's last launch times a matrix in parts: XLA's answer, each part that of its own heads, and the
    gradients."""
    scheme, rng = Scheme.parse("int8_w8a8"), np.random.default_rng(0)
    module, weight = Linear(1024, 192, rngs=nnx.Rngs(0)), rng.standard_normal((192, 1024)) / 32
    matrix = QuantizedMatrix(quantize(scheme, jnp.asarray(weight, jnp.float32)), scheme)
    module.weight = QuantizedParam(matrix, eager_sharding=False)
    q, k, v = (
        jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)
        for shape in ((3, 1, 2, 4, 128), (3, 2, 24, 128), (3, 2, 24, 128))
    )
    ends = jnp.asarray([24, 9, 1], jnp.int32)
    inputs = AttentionInputs(ends, ends, jnp.zeros_like(ends), ends, ends - 1, (ends - 1)[:, None], None)

    def by_reference(name, scale, window, rows, q, k, v, places, sinks, scales):
        options = dict(scale=scale, window=window, sinks=sinks, scales=scales, implementation="reference")
        return decode_attention(q, k, v, **places, quantization=rows[0], scale_rows=rows[1], **options)

    for name, stand_in in (
        ("choose", lambda *_, **__: ("hopper", None)),
        ("quantizes", lambda *_: True),
        ("attend_and_quantize", by_reference),
    ):
        monkeypatch.setattr(_attention, name, stand_in)
    backends = {("reference",): BACKENDS["reference"], None: _Joining()}
    monkeypatch.setattr(_matrix, "_chosen", lambda problem, implementation: backends[implementation])
    options: Any = dict(scale=0.1, window=None, sinks=None, scales=None)

    def fused(q, k, v):
        own: Any = options | dict(chunk=None, implementation="hopper")
        found = attended_and_projected(q, k, v, inputs, module, **own)
        assert found is not None and found.parts.shape == (2, 64, 192)
        return found

    def apart(q, k, v):
        return _attention.attend_xla(q, k, v, inputs, **options).reshape(3, 1, 1024)

    y = apart(q, k, v)
    found, expected = fused(q, k, v), np.asarray(y, np.float64) @ weight.T
    np.testing.assert_allclose(found.whole(jnp.float32), expected, atol=0.03 * np.abs(expected).max())
    halves = [
        half @ own.T
        for half, own in zip(np.split(np.asarray(y, np.float64), 2, -1), np.split(weight, 2, 1), strict=True)
    ]
    np.testing.assert_allclose(found.parts[:, :3, None], np.stack(halves), atol=0.03 * np.abs(expected).max())
    cotangent = rng.standard_normal(expected.shape).astype(np.float32)
    ours, theirs = (
        jax.grad(lambda *a, run=run: (run(*a) * cotangent).sum(), (0, 1, 2))(q, k, v)
        for run in (
            lambda *a: fused(*a).whole(jnp.float32),
            lambda *a: multiply(apart(*a), matrix, out_dtype=jnp.float32, implementation=("reference",)),
        )
    )
    for one, other in zip(ours, theirs, strict=True):
        difference, other = (np.asarray(leaf, np.float64) for leaf in (one - other, other))
        assert np.abs(difference).max() <= 0.02 * np.abs(other).max()


@pytest.mark.parametrize("has_bias", [False, True])
def test_parts_of_what_attention_quantizes(monkeypatch, has_bias):
    """A step for CUDA: the codes of attention's last launch have room for a tile, whose products stay apart."""
    monkeypatch.setattr(_hopper, "OLDEST_JAX", (0, 10))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    scheme, module = Scheme.parse("fp8_block"), Linear(2048, 256, use_bias=has_bias, rngs=nnx.Rngs(0))
    matrix = QuantizedMatrix(method_for(scheme).abstract_matrix(256, 2048), scheme)
    module.weight = QuantizedParam(matrix, eager_sharding=False)
    q = jax.ShapeDtypeStruct((8, 1, 4, 4, 128), jnp.bfloat16)
    kv = jax.ShapeDtypeStruct((8, 4, 256, 128), jnp.bfloat16)
    options: Any = dict(scale=1.0, window=None, chunk=None, sinks=None, scales=None, implementation="hopper")

    def step(module, q, k, v, places):
        inputs = AttentionInputs(places, places, places, places, places, places[:, None], None)
        found = attended_and_projected(q, k, v, inputs, module, **options)
        assert found is not None and found.lead == (8, 1) and len(found.biases) == has_bias
        return found.parts

    with on_hopper():
        places = jax.ShapeDtypeStruct((8,), jnp.int32)
        assert jax.eval_shape(step, module, q, kv, kv, places) == jax.ShapeDtypeStruct((4, 64, 256), jnp.float32)


@pytest.mark.parametrize("has_biases", [False, True])
def test_projections_of_one_token(calls, has_biases):
    """Sum, norm and three products in one call, with the bits of the steps apart; and their gradients."""
    rng, hidden, sizes = np.random.default_rng(0), 512, (256, 128, 128)
    norm, dtype = RMSNorm(hidden, eps=1e-6, rngs=nnx.Rngs(0)), jnp.bfloat16
    x = jnp.asarray(rng.standard_normal((1, 1, hidden)), dtype)
    addend = PartialSums(jnp.asarray(rng.standard_normal((2, 8, hidden)), jnp.float32), (1, 1))
    modules = tuple(Linear(hidden, size, use_bias=has_biases, rngs=nnx.Rngs(1)) for size in sizes)
    for module in modules if has_biases else ():
        module.bias[...] = jnp.asarray(rng.standard_normal(module.bias.shape), dtype)
    total, products = _fused.added_and_projected(norm, x, addend, modules, 132)
    assert calls == ["norm_and_multiply"] and len(products) == 1
    apart, normal = _fused.added_and_normed(norm, x, addend, 132)
    np.testing.assert_array_equal(total, apart)
    expected = np.concatenate([module(normal) for module in modules], axis=-1).astype(np.float32)
    np.testing.assert_allclose(products[0].whole(jnp.float32), expected, rtol=2**-7, atol=1e-2)

    def loss(x, is_fused):
        if is_fused:
            return _fused.added_and_projected(norm, x, addend, modules, 132)[1][0].whole(jnp.float32).sum()
        normal = norm((x.astype(jnp.float32) + addend.whole(jnp.float32)).astype(dtype))
        return sum(module(normal).astype(jnp.float32).sum() for module in modules)

    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    ours, theirs = (np.asarray(gradient(x, is_fused), np.float64) for is_fused in (True, False))
    np.testing.assert_allclose(ours, theirs, atol=0.05 * np.abs(theirs).max())
    rows = RoutedRows(x[0], jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1)))
    for more in (rows, None):  # rows of experts are added by a launch of the norm
        found = _fused.added_and_projected(norm, x, more, modules, 132)
        assert (found is None) == (more is rows)


def test_products_of_one_token(calls):
    """One token's products with plain weights side by side; those of more tokens, adapters and float32 are XLA's."""
    x = jax.random.normal(jax.random.key(0), (1, 1, 512), jnp.bfloat16)
    modules = tuple(Linear(512, size, use_bias=True, rngs=nnx.Rngs(size)) for size in (256, 64))
    for module in modules:
        module.bias[...] = jnp.arange(module.bias.size, dtype=jnp.bfloat16) / 8
    found = _fused.product_by_kernel(modules, x, 132)
    assert calls == ["grouped_gemm"] and found.parts.shape == (1, 1, 320)
    expected = np.concatenate([module(x) for module in modules], axis=-1).astype(np.float32)
    np.testing.assert_allclose(found.whole(jnp.float32), expected, rtol=2**-7, atol=1e-2)

    def loss(x, is_fused):
        y = _fused.product_by_kernel(modules, x, 132).parts if is_fused else [module(x) for module in modules]
        return sum(one.astype(jnp.float32).sum() for one in y)

    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    np.testing.assert_allclose(*(np.asarray(gradient(x, own), np.float32) for own in (True, False)), atol=1e-2)
    for sms, tokens in ((None, x), (132, jnp.ones((2, 1, 512), x.dtype)), (132, x.astype(jnp.float32))):
        assert _fused.product_by_kernel(modules, tokens, sms) is None
    assert _fused.product_by_kernel(modules, x[:0], 132) is None
    for size in (62, 72):  # no multiple of a CTA's columns, or of 32 bytes a row
        assert _fused.product_by_kernel((Linear(512, size, rngs=nnx.Rngs(0)),), x, 132) is None
    norm = RMSNorm(512, eps=1e-6, rngs=nnx.Rngs(0))
    assert _fused.added_and_projected(norm, x, None, modules, 132) is not None
    modules[1].bias = nnx.data(nnx.Param(modules[1].bias[...].astype(jnp.float32)))  # biases of two dtypes
    assert _fused.product_by_kernel(modules, x, 132) is None
    assert _fused.added_and_projected(norm, x, None, modules, 132) is None
    modules[1].bias = None
    assert _fused.product_by_kernel(modules, x, 132) is None  # one bias of two
    modules[0].lora = object()
    assert _fused.product_by_kernel(modules[:1], x, 132) is None


@pytest.mark.parametrize("num_tokens", [300, *(pytest.param(n, marks=pytest.mark.slow) for n in (256, 1024))])
def test_products_of_many_rows(calls, num_tokens):
    """Those with several plain weights side by side, in tiles of 128 rows; one weight's, and those of more or fewer
    rows, are XLA's."""
    x = jax.random.normal(jax.random.key(0), (1, num_tokens, 128), jnp.bfloat16)
    modules = tuple(Linear(128, size, use_bias=True, rngs=nnx.Rngs(size)) for size in (256, 64, 64))
    for module in modules:
        module.bias[...] = jnp.arange(module.bias.size, dtype=jnp.bfloat16) / 8
    found = _fused.product_by_kernel(modules, x, 132)
    assert calls == ["grouped_gemm"] and found.parts.shape == (1, -(-num_tokens // 128) * 128, 384)
    whole = found.whole(jnp.float32)
    expected = np.concatenate([module(x) for module in modules], axis=-1).astype(np.float32)
    assert whole.shape == expected.shape
    np.testing.assert_allclose(whole, expected, rtol=2**-7, atol=1e-2)

    def loss(x, is_fused):
        if is_fused:
            return _fused.product_by_kernel(modules, x, 132).whole(jnp.float32).sum()
        return sum(module(x).astype(jnp.float32).sum() for module in modules)

    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    np.testing.assert_allclose(*(np.asarray(gradient(x, own), np.float32) for own in (True, False)), atol=1e-2)
    for count in (1, 255, 1025):
        rows = jnp.ones((1, count, 128), x.dtype)
        assert (_fused.product_by_kernel(modules, rows, 132) is None) == (count > 1)
    assert _fused.product_by_kernel(modules[:1], x, 132) is None
    narrow = (*modules[:2], Linear(128, 72, use_bias=True, rngs=nnx.Rngs(0)), modules[2])
    assert _fused.product_by_kernel(narrow, x, 132) is None  # which share a tile


def test_what_is_not_projected_with_the_norm(calls, monkeypatch):
    """Weights that are not quantized, adapters, and matrices whose backend quantizes rows itself."""
    norm, x = RMSNorm(512, eps=1e-6, rngs=nnx.Rngs(0)), jnp.ones((2, 1, 512), jnp.bfloat16)
    plain = Linear(512, 128, rngs=nnx.Rngs(0))
    assert _fused.added_and_projected(norm, x, None, (plain,), 132) is None
    scheme = Scheme.parse("fp8_block")
    plain.weight = QuantizedParam(QuantizedMatrix(quantize(scheme, jnp.ones((128, 512))), scheme))
    assert _fused.added_and_projected(norm, x, None, (plain,), 132) is None  # XLA's, on a CPU
    monkeypatch.setattr(_matrix, "_chosen", lambda problem, implementation: _Rows())
    assert _fused.added_and_projected(norm, x, None, (plain,), None) is None
    assert _fused.added_and_projected(norm, x, None, (plain,), 132) is not None
    plain.bias = nnx.data(nnx.Param(jnp.ones(128)))
    _, (product,) = _fused.added_and_projected(norm, x, None, (plain,), 132)
    np.testing.assert_allclose(product.whole(jnp.float32), 513, rtol=0.01)
    other = Linear(512, 128, rngs=nnx.Rngs(0))
    other.weight = plain.weight
    assert _fused.added_and_projected(norm, x, None, (plain, other), 132) is None  # one bias of two
    other.lora = object()
    assert _fused.added_and_projected(norm, x, None, (other,), 132) is None


@pytest.mark.parametrize("name", ["w4a16_g128", "int8_w8a8", "nvfp4_a16"])
def test_side_by_side(monkeypatch, name):
    """One product has the bits of three; what cannot be joined is not."""
    scheme, rng, modules = Scheme.parse(name), np.random.default_rng(0), []
    for index, size in enumerate((256, 64, 192)):
        modules.append(Linear(256, size))
        weight = rng.standard_normal((size, 256)).astype(np.float32) * 10**index
        matrix = QuantizedMatrix(quantize(scheme, jnp.asarray(weight)), scheme)
        held = hopper_matrix.to_kernel_layout(matrix, jnp.bfloat16)
        modules[-1].weight = QuantizedParam(held, eager_sharding=False)
        modules[-1].bias = nnx.data(nnx.Param(jnp.asarray(rng.standard_normal(size), jnp.bfloat16)))
    x = jnp.asarray(rng.standard_normal((2, 3, 256)), jnp.bfloat16)
    assert side_by_side(modules, x, x.dtype) is None  # XLA's, on a CPU
    backend = _Joining()
    monkeypatch.setattr(_matrix, "_chosen", lambda problem, implementation: backend)
    found = side_by_side(modules, x, x.dtype).whole(x.dtype)
    apart = [partial_sums(module, x).whole(x.dtype) for module in modules]
    np.testing.assert_array_equal(found, np.concatenate(apart, axis=-1))
    assert side_by_side(modules, x[:0], x.dtype) is None
    modules[1].bias = None
    assert side_by_side(modules, x, x.dtype) is None
    del modules[1]
    modules[0].lora = object()
    assert side_by_side(modules, x, x.dtype) is None


def test_what_is_not_joined():
    """Matrices of two schemes or depths, with orders of columns or scales for rows of their own."""

    def matrix(name, n=128, k=256):
        scheme = Scheme.parse(name)
        return QuantizedMatrix(quantize(scheme, jnp.ones((n, k))), scheme)

    one = matrix("fp8_block")
    assert hopper_matrix.refusal((one, matrix("fp8_block", 64)), jnp.bfloat16) is None
    for other in (matrix("fp8_channel"), matrix("fp8_block", 128, 512)):
        assert "differ in scheme" in hopper_matrix.refusal((one, other), jnp.bfloat16)
    static = dataclasses.replace(one, tensor=dataclasses.replace(one.tensor, input_scale=jnp.float32(1)))
    assert "a scale for rows" in hopper_matrix.refusal((static, static), jnp.bfloat16)
    ordered = dataclasses.replace(one, tensor=dataclasses.replace(one.tensor, g_idx=jnp.zeros((1, 256), jnp.int32)))
    assert "order of columns" in hopper_matrix.refusal((ordered, ordered), jnp.bfloat16)


def test_gate_and_up_in_one_product(monkeypatch):
    """The bits of two products, in a dense feed-forward layer of quantized weights."""
    scheme, rng, mlp = Scheme.parse("fp8_block"), np.random.default_rng(0), GatedMLP(256, 384, rngs=nnx.Rngs(0))
    for module in (mlp.gate_proj, mlp.up_proj, mlp.down_proj):
        matrix = quantize(scheme, module.weight[...].astype(jnp.float32))
        module.weight = QuantizedParam(QuantizedMatrix(matrix, scheme), eager_sharding=False)
    x, found = jnp.asarray(rng.standard_normal((5, 256)), jnp.bfloat16), []
    for backend in (_Rows(), _Joining()):
        monkeypatch.setattr(_matrix, "_chosen", lambda problem, implementation, backend=backend: backend)
        both = side_by_side((mlp.gate_proj, mlp.up_proj), x, jnp.float32)
        assert (both is not None) == isinstance(backend, _Joining)
        found.append(np.asarray(mlp(x)))
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("rank", [128, None])
def test_projections_of_latent_attention(case, calls, monkeypatch, rank):
    """What latents and queries are made of: one product has the bits of two, of codes from the norm's launch too."""
    config = case("deepseek_v3").model.config
    mla = dataclasses.replace(config.mla, q_lora_rank=rank, kv_lora_rank=64, qk_rope_head_dim=64, qk_nope_head_dim=64)
    sizes: Any = dict(
        hidden_size=256, head_dim=128, num_layers=1, moe_layers=(), rope=dataclasses.replace(config.rope, dim=64)
    )
    found, scheme = [], Scheme.parse("fp8_block")
    for backend, attention in ((_Rows(), "xla"), (_Joining(), "xla"), (_Joining(), "auto")):
        monkeypatch.setattr(_matrix, "_chosen", lambda problem, implementation, backend=backend: backend)
        config = dataclasses.replace(config, mla=mla, **sizes)
        model = DeepseekV3ForCausalLM(config, attention=attention, rngs=nnx.Rngs(0))
        for module in model.layers[0].self_attn._into():
            matrix = quantize(scheme, module.weight[...].astype(jnp.float32))
            module.weight = QuantizedParam(QuantizedMatrix(matrix, scheme), eager_sharding=False)
        if (to_heads := model.layers[0].self_attn.q_b_proj) is not None:  # quantized, with an adapter
            matrix = quantize(scheme, to_heads.weight[...].astype(jnp.float32))
            to_heads.weight = QuantizedParam(QuantizedMatrix(matrix, scheme), eager_sharding=False)
            _, n, k = to_heads.weight.get_value().tensor.data.shape
            a, b = jnp.ones((2, k), jnp.bfloat16), jnp.ones((n, 2), jnp.bfloat16)
            to_heads.lora = LinearLoRA(a, b, ranks=[2], alphas=[0.1])
        del calls[:]
        answer = jax.jit(lambda model, ids, cache: model(ids, cache=cache)[0])  # a new one, traced with this backend
        found.append(np.asarray(answer(model, jnp.arange(12).reshape(2, 6) % VOCAB, model.init_cache(2, 8))))
        assert {"add_and_norm", "store_latents"} <= set(calls) if attention == "auto" else not calls
        into = side_by_side(model.layers[0].self_attn._into(), jnp.ones((2, 256), jnp.bfloat16), jnp.bfloat16)
        assert (into is not None) == isinstance(backend, _Joining)
    np.testing.assert_array_equal(found[1], found[0])
    np.testing.assert_allclose(found[2], found[0], atol=0.02 * np.abs(found[0]).max())


def test_launches_of_a_latent_layer(case, monkeypatch):
    """A decode step for CUDA with DeepSeek-V3's widths: the launches of its attention."""
    config = case("deepseek_v3").model.config
    monkeypatch.setattr(_hopper, "OLDEST_JAX", (0, 10))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    widths: Any = dict(q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
    sizes: Any = dict(hidden_size=7168, head_dim=192, num_heads=8, num_kv_heads=8, num_layers=1, moe_layers=())
    sizes |= dict(mla=dataclasses.replace(config.mla, **widths), rope=dataclasses.replace(config.rope, dim=64))
    config = dataclasses.replace(config, **sizes)
    model = nnx.eval_shape(lambda: DeepseekV3ForCausalLM(config, implementation="xla", rngs=nnx.Rngs(0)))
    with on_hopper():
        for module in model.layers[0].self_attn.dense_modules().values():
            if isinstance(module, Linear) and not module.is_dequantized:
                keep_quantized(module, Scheme.parse("fp8_block"), jnp.bfloat16, None)
        cache = jax.eval_shape(lambda: KVCache.zeros(config, 4, 64, jnp.bfloat16))
        graphdef, state = nnx.split(model)

        def step(state, ids, cache):
            return nnx.merge(graphdef, state).hidden_states(ids, cache=cache)

        traced = jax.jit(step).trace(state, jax.ShapeDtypeStruct((4, 1), jnp.int32), cache)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    main = text[text.index("func.func public @main") :].split("func.func private")[0]
    calls = re.findall(
        r"call @(_added_and_normed|multiply_rows|multiply|_multiplied_by_head|_latents_stored|_attend)", main
    )
    assert {name: calls.count(name) for name in set(calls)} == {
        "_added_and_normed": 3,
        "_latents_stored": 1,
        "multiply_rows": 2,  # into attention and up to all heads, of codes that the two above write
        "multiply": 1,  # out of attention
        "_multiplied_by_head": 2,  # queries into the space of latents, and what they attended to out of it
        "_attend": 1,
    }
    by_head = [part for part in text.split("func.func private ") if part.startswith("@_multiplied_by_head")]
    assert len(by_head) == 2 and all("mosaic_gpu" in part and "dot_general" not in part for part in by_head)


def test_products_by_head_of_many_tokens(monkeypatch):
    """XLA's from a number of tokens on."""
    monkeypatch.setattr(_fused.heads_kernel.api, "hopper_sms", lambda: 132)
    w = jax.ShapeDtypeStruct((4, 256, 128), jnp.bfloat16)
    for tokens, kernels in ((256, 1), (257, 0)):
        x = jax.ShapeDtypeStruct((1, tokens, 4, 192), jnp.bfloat16)
        assert launches(lambda x, w: _fused.multiplied_by_head(x, w, (0, 128), False, 132), x, w) == kernels


def test_where_they_do_not_run(case, monkeypatch):
    assert _fused.num_sms("auto") is None
    monkeypatch.setattr(_fused, "hopper_sms", lambda: 132)
    monkeypatch.setattr(_hopper, "OLDEST_JAX", (99,))
    assert _fused.num_sms("auto") is None
    monkeypatch.setattr(_hopper, "OLDEST_JAX", (0, 10))
    assert [_fused.num_sms(name) for name in ("auto", "hopper", "cudnn", "xla")] == [132, 132, None, None]
    mesh = jax.sharding.AbstractMesh((2,), ("expert",))
    with jax.sharding.use_abstract_mesh(mesh):
        assert _fused.num_sms("auto") is None


def test_launches_of_a_router(monkeypatch):
    """The routing kernel is given partial sums of a few rows, which nothing else adds up; of one row it is not."""
    layer = make_layer("fp8_block")
    block = moe_jax.MoEBlock(layer, Linear(H, E, out_dtype=jnp.float32, rngs=nnx.Rngs(0)))

    router, rows = block.router, jnp.ones((64, 1, H), jnp.bfloat16)
    assert router.partial_sums(rows) is None  # on a CPU
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert router.partial_sums(rows[:1]) is router.partial_sums(jnp.ones((1025, H), jnp.bfloat16)) is None
    assert router.partial_sums(jnp.ones((1024, H), jnp.bfloat16)).shape == (4, 1024, E)
    with on_hopper():
        text = jax.jit(lambda block, x: block(x)).trace(block, rows).lower(lowering_platforms=("cuda",)).as_text()
    main = text[text.index("func.func public @main") :].split("func.func private")[0]
    assert "stablehlo.reduce" not in main and f"tensor<4x64x{E}xf32>" in main.split("call @forward_layer")[1]
    monkeypatch.undo()
    x = jax.random.normal(jax.random.key(0), (6, H), jnp.float32)
    parts = split_product(x, block.router.weight[...].astype(jnp.float32), 128)
    assert parts.shape == (4, 6, E)
    expected, stats = layer(x, parts.sum(0), return_stats=True)
    found, others = layer(x, parts.sum(0), router_parts=parts, return_stats=True)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(stats.topk_ids, others.topk_ids)
    with pytest.raises(ValueError, match=r"router_parts has shape \(4, 5, 6\), expected"):
        layer(x, parts.sum(0), router_parts=parts[:, :5])


def lowered_step(case, monkeypatch, rows, projections, has_biases):
    """(layers, their experts, text for CUDA of a decode step, its main function)."""
    monkeypatch.setattr(_hopper, "OLDEST_JAX", (0, 10))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    layers = 3
    sizes = dict(num_layers=layers, moe_layers=tuple(range(layers)), num_heads=8, num_kv_heads=4, head_dim=64)
    rope = dataclasses.replace(case("qwen3").model.config.rope, dim=64)
    sizes |= dict(use_attention_bias=True, use_output_bias=True, has_sinks=True) if has_biases else {}
    config = dataclasses.replace(case("qwen3").model.config, hidden_size=256, rope=rope, **sizes)
    model = nnx.eval_shape(lambda: Qwen3MoeForCausalLM(config, implementation="xla", rngs=nnx.Rngs(0)))
    if projections is not None:
        with on_hopper():
            for module in [m for layer in model.layers for m in layer.self_attn.dense_modules().values()]:
                if isinstance(module, Linear):
                    keep_quantized(module, Scheme.parse(projections), jnp.bfloat16, None)
    cache = jax.eval_shape(lambda: KVCache.zeros(config, rows, 64, jnp.bfloat16))
    graphdef, state = nnx.split(model)

    def step(state, ids, cache):
        model = nnx.merge(graphdef, state)
        hidden, cache = model.hidden_states(ids, cache=cache)
        return model.logits(hidden[:, -1]), cache

    with on_hopper():
        traced = jax.jit(step).trace(state, jax.ShapeDtypeStruct((rows, 1), jnp.int32), cache)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    main = text[text.index("func.func public @main") :].split("func.func private")[0]
    return layers, config.num_experts, text, main


@pytest.mark.parametrize("has_biases", [False, True])
def test_launches_of_one_token(case, monkeypatch, has_biases):
    """A decode step of one row for CUDA, its projections in 16 bits: all products are matrix times vector."""
    layers, _, _, main = lowered_step(case, monkeypatch, 1, None, has_biases)
    names = ("_normed_and_multiplied", "_multiplied_alone", "_rotated_and_stored", "_attend", "_added_and_normed")
    calls = re.findall(rf"call @({'|'.join(names)})", main)
    # Into attention with the sum and norm in front of it; out of it; with the router; the last norm.
    assert [calls.count(name) for name in names] == [layers, layers, layers, layers, layers + 1]
    products = [line for line in main.splitlines() if "stablehlo.dot_general" in line]
    assert not any("tensor<1x1024x" in line or "1024xf32>" in line for line in products)


def test_launches_of_many_rows(case, monkeypatch):
    """A step of 256 rows for CUDA: queries, keys and values are one launch; XLA multiplies out of attention alone, and
    the router in parts."""
    layers, num_experts, _, main = lowered_step(case, monkeypatch, 256, None, True)
    assert len(re.findall(r"call @_multiplied_alone", main)) == layers
    *tokens, _ = re.findall(r"stablehlo.dot_general .* : \(tensor<256x.*\) -> (\S+)", main)  # the last is the head's
    assert tokens == ["tensor<256x256xf32>", f"tensor<2x256x{num_experts}xf32>"] * layers


@pytest.mark.parametrize(("projections", "has_biases"), [(None, False), (None, True), ("fp8_channel", False)])
def test_launches_of_a_layer(case, monkeypatch, projections, has_biases):
    """A decode step of few rows for CUDA: six steps a layer outside the experts, also with quantized projections, or
    with biases and sinks in 16 bits."""
    layers, num_experts, text, main = lowered_step(case, monkeypatch, 4, projections, has_biases)
    calls = re.findall(r"call @(_added_and_normed|_rotated_and_stored|attend_and_quantize|_attend)", main)
    assert {name: calls.count(name) for name in set(calls)} == {
        "_added_and_normed": 2 * layers + 1,
        "_rotated_and_stored": layers,
        "_attend" if projections is None else "attend_and_quantize": layers,
    }
    products = [line for line in main.splitlines() if "stablehlo.dot_general" in line]
    assert not any(line.endswith(f"x{num_experts}xf32>") for line in products)  # the norm's launch makes them
    if projections is not None:
        calls = re.findall(r"call @(multiply_rows|multiply)", main)
        assert {name: calls.count(name) for name in set(calls)} == {"multiply_rows": 2 * layers}
        # Norms of the first and of other layers, of experts, and the last; the rotation; attention and its codes, which
        # have one scale a row; one product with the norm's codes, and one with those of attention.
        assert text.count("mosaic_gpu_v2") == 4 + 1 + 2 + 2
        return
    for parts in ("tensor<4x4x1024xf32>", "tensor<8x4x256xf32>"):  # into attention, of all heads, and out of it
        assert sum(line.endswith(f"-> {parts}") for line in products) == layers
        assert not any("stablehlo.reduce" in line and parts in line for line in main.splitlines())  # kernels add them
    assert not any("stablehlo.add" in line and "4x1024x" in line for line in main.splitlines())
    assert not any("stablehlo.convert" in line and "tensor<8xbf16>" in line for line in text.splitlines())
    written = [line for line in main.splitlines() if line.endswith("-> tensor<4x4x64x64xbf16>")]
    assert not any("}) :" in line or "dynamic_update_slice" in line for line in written)  # no scatter into a cache
    # Equal layers share the text of a kernel: norms without a sum, with attention's parts, with what experts give, and
    # with a sum that nobody reads at the end; the rotation; attention, of so few slots that CTAs have whole tiles.
    assert text.count("mosaic_gpu_v2") == 6


@pytest.mark.parametrize(("rows", "kernels"), [(1, 3), (4, 4), (5, 4), (64, 5), (65, 7)])
@pytest.mark.sample(3)
def test_launches_of_experts(case, monkeypatch, rows, kernels):
    """A decode step for CUDA: few rows of experts are added up by the next norm, more by a launch of the layer; one
    token's are quantized by their last product. Masked tokens cost no launch."""
    monkeypatch.setattr(_hopper, "OLDEST_JAX", (0, 10))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    sizes: Any = dict(num_layers=2, moe_layers=(0, 1), num_heads=8, num_kv_heads=4, head_dim=64, hidden_size=512)
    sizes |= dict(rope=dataclasses.replace(case("qwen3").model.config.rope, dim=64), moe_intermediate_size=256)
    config = dataclasses.replace(case("qwen3").model.config, **sizes)
    schemes = dict.fromkeys((0, 1), Scheme.parse("fp8_channel"))
    with on_hopper():
        model = nnx.eval_shape(lambda: Qwen3MoeForCausalLM(config, schemes=schemes, rngs=nnx.Rngs(0)))
        cache = jax.eval_shape(lambda: KVCache.zeros(config, rows, 64, jnp.bfloat16))
        graphdef, state = nnx.split(model)

        def step(state, ids, cache, mask):
            return nnx.merge(graphdef, state).hidden_states(ids, cache=cache, attention_mask=mask)

        ids, mask = (jax.ShapeDtypeStruct((rows, 1), dtype) for dtype in (jnp.int32, jnp.bool))
        plain, text = (
            jax.jit(step).trace(state, ids, cache, own).lower(lowering_platforms=("cuda",)).as_text()
            for own in (None, mask)
        )
    selected = re.compile(rf"call @_where\w*\(.*tensor<{rows}x(?:1x)?512xbf16>|select .*tensor<{rows}x(?:1x)?512xbf16>")
    assert len(selected.findall(text)) == len(selected.findall(plain))
    functions = {part.split("(")[0]: part for part in re.split(r"func\.func (?:public|private) @", text)[1:]}
    assert functions["main"].count("call @forward_layer") == 2

    def launches(name):
        """Of a function and of those that it calls."""
        called = re.findall(r" call @(\w+)", functions[name])
        return functions[name].count("mosaic_gpu_v2") + sum(map(launches, called))

    assert launches("forward_layer") == kernels
