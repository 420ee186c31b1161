"""Adapters of whole models: experts and attention, quantized and not, on one device and over a mesh."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import moe_jax
from moe_jax.models._layers import Linear, LinearLoRA, keep_quantized
from moe_jax.quantization import QuantizedMatrix, Scheme, method_for
from tests.support.cases.models import assert_logits_close
from tests.support.oracles.tolerances import assert_rows_close, tolerance
from tests.support.refusals import refuses

ADAPTERS = nnx.DiffState(0, moe_jax.LoRAParam)
ALL = ("w13", "w2", "attention")


def adapted(model, targets: Any = ALL, **options) -> Any:
    return moe_jax.lora(model, rank=4, alpha=8, targets=targets, rngs=nnx.Rngs(7), **options)


def filled(model, seed=9, size=0.2):
    """Every B drawn by its path, the same over every mesh."""
    for path, variable in nnx.to_flat_state(nnx.state(model, moe_jax.LoRAParam)):
        if path[-1] in ("b", "w13_b", "w2_b"):
            value = variable.get_value()
            rng = np.random.default_rng([seed, *map(ord, "".join(map(str, path)))])
            variable.set_value(
                jax.device_put(rng.standard_normal(value.shape).astype("float32") * size, value.sharding)
            )
    return model


def load(directory, **options):
    return moe_jax.load_pretrained(directory, dtype=jnp.float32, **options)


def projections(model) -> Any:
    for layer in model.layers:
        for name, module in layer.self_attn.dense_modules().items():
            if isinstance(module, Linear) and module.lora is not None:
                yield name, module


@pytest.mark.parametrize("name", ["qwen3", "deepseek_v2"])
@pytest.mark.sample(2)
def test_attention_is_its_sum_with_the_weights(case, prompt, name):
    model, merged, ids = load(case(name).directory), load(case(name).directory), prompt(2, 40)
    before = model.score(ids)
    adapted(model, "attention")
    np.testing.assert_array_equal(model.score(ids), before)
    filled(model)
    found = list(projections(model))
    expected = dict(qwen3={"q_proj", "k_proj", "v_proj", "o_proj"})
    expected["deepseek_v2"] = {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"}
    assert {name for name, _ in found} == expected[name] and len(found) == 8
    plain = [module for layer in merged.layers for module in layer.self_attn.dense_modules().values()]
    targets = [module for module in plain if isinstance(module, Linear) and not module.is_dequantized]
    for (_, module), target in zip(found, targets, strict=True):
        product = np.asarray(module.lora.b[...], np.float64) @ np.asarray(module.lora.a[...], np.float64)
        target.weight.set_value(jnp.asarray(np.asarray(target.weight[...]) + 2 * product, jnp.float32))
    y = model.score(ids)
    assert_logits_close(y, np.asarray(merged.score(ids)), 3e-5)
    assert np.abs(y - before).max() > 0.05 * np.ptp(before)


@pytest.mark.parametrize("scheme", ["fp8_channel", "w4a16_g32", "int8_w8a8", "mxfp4_a16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.sample(4)
def test_quantized_matrices(scheme, dtype):
    """The adapter takes rows that are not quantized, beside a product whose rows are."""
    n, k, rng = 48, 64, np.random.default_rng(0)
    scheme = Scheme.parse(scheme)
    module: Any = Linear(k, n, use_bias=True, dtype=dtype, rngs=nnx.Rngs(0))
    weight = module.weight.get_value()
    keep_quantized(module, scheme, dtype, None)
    module.weight.set_value(QuantizedMatrix(method_for(scheme).quantize_matrix(weight.astype(jnp.float32)), scheme))
    x = jnp.asarray(rng.standard_normal((3, 5, k)), dtype)
    plain = np.asarray(module(x)).astype(np.float64)
    a, b = rng.standard_normal((4, k)) * k**-0.5, rng.standard_normal((n, 4))
    a, b = (np.asarray(jnp.asarray(part, dtype)).astype(np.float64) for part in (a, b))
    module.lora = LinearLoRA(jnp.asarray(a, dtype), jnp.asarray(b, dtype), ranks=(4,), alphas=(8.0,))
    want = plain + 2 * (np.asarray(x).astype(np.float64) @ a.T) @ b.T
    y = module(x)
    assert y.dtype == dtype
    assert_rows_close(y, want, tolerance("bf16", dtype))

    def loss(module):
        return jnp.sum(module(x).astype(jnp.float32) * cotangent)

    cotangent = jnp.asarray(rng.standard_normal((3, 5, n)), jnp.float32)
    da, db = jax.tree.leaves(nnx.grad(loss, argnums=ADAPTERS)(module))
    rows, bars = np.asarray(x).astype(np.float64).reshape(-1, k), np.asarray(cotangent).reshape(-1, n)
    loose = tolerance("bf16", dtype)
    assert_rows_close(da, 2 * (bars @ b).T @ rows, loose, row_scale=float(np.abs(da).max()))
    assert_rows_close(db, 2 * bars.T @ (rows @ a.T), loose, row_scale=float(np.abs(db).max()))


@pytest.mark.slow
def test_a_model_trains_its_adapters(case, prompt):
    """4-bit experts, adapters on everything, under jit and remat; greedy text changes with them."""
    model = adapted(load(case("qwen3").directory, quantize="w4a16_g32"))
    ids = jnp.asarray(prompt(2, 16))
    before = {path: np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.state(model))}
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=moe_jax.LoRAParam)

    @nnx.jit
    def step(model, optimizer):
        def loss(model):
            logits = nnx.remat(lambda model: model(ids))(model)
            return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], ids[:, 1:]).mean()

        value, grads = nnx.value_and_grad(loss, argnums=ADAPTERS)(model)
        optimizer.update(model, grads)
        return value

    with jax.numpy_dtype_promotion("standard"):
        losses = [float(step(model, optimizer)) for _ in range(12)]
    assert losses[-1] < 0.6 * losses[0]
    adapters = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.state(model)):
        is_adapter = "lora" in jax.tree_util.keystr(path)
        assert (not np.array_equal(before[path], leaf)) == is_adapter, path
        adapters += is_adapter
    assert adapters == 2 * (4 + 8)
    assert "adapters: rank 4" in model.moe_blocks()[0].experts.explain(4)
    assert (moe_jax.generate(model, ids[:, :4], max_new_tokens=12) == ids).mean() > 0.8


@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
@pytest.mark.sample(2)
def test_models_over_a_mesh(case, prompt, axis_type):
    """Attention's adapters are split as their weights; values and gradients are those of one device."""
    kind = jax.sharding.AxisType[axis_type]
    mesh = jax.make_mesh((2, 2), ("expert", "tensor"), axis_types=(kind, kind))
    directory, ids = case("qwen3").directory, jnp.asarray(prompt(2, 16))
    one, many = (filled(adapted(load(directory, mesh=mesh))) for mesh in (None, mesh))
    attention = many.layers[0].self_attn
    specs = {n: [tuple(v.get_value().sharding.spec) for v in (p.lora.a, p.lora.b)] for n, p in projections(many)}
    assert specs["q_proj"] == [(), ("tensor", None)] and specs["o_proj"] == [(None, "tensor"), ()]
    assert attention.q_proj.lora.a.shape == (4, 64)
    for name in ("w13_b", "w2_b"):  # in slots and with padding, but for this model there is none
        for ours, theirs in zip(one.moe_blocks(), many.moe_blocks(), strict=True):
            value = getattr(theirs.experts.lora, name).get_value()
            getattr(theirs.experts.lora, name).set_value(
                jax.device_put(np.asarray(getattr(ours.experts.lora, name)[...]), value.sharding)
            )

    def gradients(model):
        def loss(model):
            logits = model(ids)
            return jnp.sum(logits**2), logits

        (_, logits), grads = nnx.value_and_grad(loss, argnums=ADAPTERS, has_aux=True)(model)
        return logits, grads

    (want, wanted), (found, grads) = (nnx.jit(gradients)(model) for model in (one, many))
    assert_logits_close(found, np.asarray(want), 3e-5)
    for (path, ours), (_, theirs) in zip(nnx.to_flat_state(wanted), nnx.to_flat_state(grads), strict=True):
        expected = np.asarray(ours.get_value())
        assert np.abs(expected).max() > 0, path
        np.testing.assert_allclose(np.asarray(theirs.get_value()), expected, rtol=0, atol=3e-4 * np.abs(expected).max())


def test_targets_that_a_model_has(case):
    model = load(case("deepseek_v2").directory)
    names = "'w13', 'w2', 'attention', 'kv_a_proj_with_mqa', 'o_proj', 'q_a_proj', 'q_b_proj', which a DeepseekV2"
    for wrong in ("kv_b_proj", "k_proj", "router"):
        refuses(ValueError, f"targets has '{wrong}', expected some of {names}", adapted, model, wrong)
    adapted(model, ("o_proj",))
    assert [name for name, _ in projections(model)] == ["o_proj"] * 2
    refuses(ValueError, "layers.0.self_attn.o_proj has an adapter already", adapted, model, "attention")
    adapted(model, ("w2", "q_a_proj"))
