"""Gradients through the experts: unquantized against torch's autograd, quantized against the reference, refusals."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from moe_jax.experts import fused_experts, fused_moe
from tests.support.cases import experts as cases
from tests.support.oracles.tolerances import assert_rows_close, tolerance

NUM_TOKENS = 13


def loss(y):
    return jnp.sum(jnp.sin(y.astype(jnp.float32)))


def grads(config, implementation, args):
    """Gradients of ``loss`` in x, topk_weights and, when unquantized, weights; the biases otherwise."""
    config = dataclasses.replace(config, implementation=(implementation,))
    x, p, ids, weights = args

    def of(x, p, trained):
        replaced = trained if config.scheme.weights is None else dataclasses.replace(weights, **trained)
        return loss(fused_experts(x, p, ids, replaced, config))

    trained = weights if config.scheme.weights is None else {"w13_bias": weights.w13_bias, "w2_bias": weights.w2_bias}
    return jax.jit(jax.grad(of, (0, 1, 2)))(x, p, trained)


def make_args(config, num_tokens=NUM_TOKENS):
    p, ids = cases.make_routing(num_tokens, config.top_k)
    return cases.make_tokens(num_tokens, config), jnp.nan_to_num(p), ids, cases.make_weights(config)


@pytest.mark.parametrize(
    ("is_gated", "on_input", "has_bias"), [(True, False, True), (False, False, False), (True, True, True)]
)
@pytest.mark.sample(3)
def test_unquantized_against_torch(is_gated, on_input, has_bias):
    config = cases.make_config(
        is_act_and_mul=is_gated,
        has_bias=has_bias,
        apply_router_weight_on_input=on_input,
        top_k=1 if on_input else cases.K,
    )
    args = make_args(config)
    x, p, ids, weights = args
    leaves = {k: v for k, v in (("w13", weights.w13.data), ("w2", weights.w2.data)) if v is not None}
    leaves |= {"b13": weights.w13_bias, "b2": weights.w2_bias} if has_bias else {}
    t = {k: torch.tensor(np.asarray(v), dtype=torch.float64, requires_grad=True) for k, v in leaves.items()}
    tx, tp = (torch.tensor(np.asarray(v), dtype=torch.float64, requires_grad=True) for v in (x, p))
    total = torch.zeros((), dtype=torch.float64)
    for token in range(x.shape[0]):
        y = torch.zeros(cases.H, dtype=torch.float64)
        for slot in range(ids.shape[1]):
            e = int(ids[token, slot])
            if not 0 <= e < cases.E:
                continue
            h = t["w13"][e] @ (tx[token] * tp[token, slot] if on_input else tx[token])
            h = h + t["b13"][e] if has_bias else h
            h = torch.nn.functional.silu(h[0]) * (h[1] if is_gated else 1)
            out = t["w2"][e] @ h
            out = out + t["b2"][e] if has_bias else out
            y = y + (out if on_input else tp[token, slot] * out)
        total = total + torch.sin(y).sum()
    total.backward()
    for implementation in ("reference", "xla"):
        dx, dp, dw = grads(config, implementation, args)
        tol = dataclasses.replace(tolerance("bf16", "float32"), ulps=256.0)
        assert_rows_close(dx, tx.grad.numpy(), tol, experts=ids)
        assert_rows_close(dp, tp.grad.numpy(), tol, row_scale=float(tp.grad.abs().max()))
        found = {"w13": dw.w13.data, "w2": dw.w2.data, "b13": dw.w13_bias, "b2": dw.w2_bias}
        for name, tensor in t.items():
            # Rows are judged by the largest entry of their expert: single rows of a gradient cancel.
            size = np.abs(tensor.grad.numpy()).max(axis=tuple(range(1, tensor.ndim)), keepdims=True)
            assert_rows_close(
                found[name], tensor.grad.numpy(), tol, row_scale=size.reshape((-1,) + (1,) * (tensor.ndim - 2))
            )


@pytest.mark.parametrize("scheme", ["fp8_tensor", "fp8_tensor_static", "fp8_block", "int8_w8a8", "int8_w8a16"])
@pytest.mark.sample(5)
def test_quantized_against_reference(scheme):
    config = cases.make_config(scheme, has_bias=True)
    args = make_args(config)
    expected, found = (jax.tree.leaves(grads(config, name, args)) for name in ("reference", "xla"))
    for want, got in zip(expected, found, strict=True):
        assert float(jnp.abs(want).max()) > 1e-3
        # The forward values that enter sin and the activation may differ by a flipped code, hence the scheme's bound.
        assert_rows_close(got, want, tolerance(config.scheme, "float32"), row_scale=float(jnp.abs(want).max()))


def test_clipped_activations_pass_no_gradient():
    config = cases.make_config("fp8_tensor_static")
    x, p, ids, weights = make_args(config)
    x = x.at[0].set(100.0)
    for implementation in ("reference", "xla"):
        dx, _, _ = grads(config, implementation, (x, p, ids, weights))
        assert not dx[0].any()
        assert np.asarray(dx[1]).any()


def test_router_logits_and_16_bit_inputs():
    config = cases.make_config("int8_w8a8", dtype="bfloat16")
    weights = cases.make_weights(config)
    x = cases.make_tokens(NUM_TOKENS, config, dtype="bfloat16")
    logits = jnp.asarray(np.random.default_rng(4).standard_normal((NUM_TOKENS, cases.E)), jnp.bfloat16)
    found = []
    for name in ("reference", "xla"):
        one = dataclasses.replace(config, implementation=(name,))
        found.append(jax.jit(jax.grad(lambda x, z, c=one: loss(fused_moe(x, z, weights, c)), (0, 1)))(x, logits))
    for want, got, source in zip(*found, (x, logits), strict=True):
        assert got.dtype == source.dtype and np.asarray(want).any()
        assert_rows_close(got, want, tolerance("int8_w8a8", "bfloat16"), row_scale=float(jnp.abs(want).max()))


def test_masked_nan_tokens_poison_no_gradient():
    config = cases.make_config("bf16", has_bias=True)
    x, p, ids, weights = make_args(config)
    mask = jnp.arange(NUM_TOKENS) % 3 != 0
    x = jnp.where(mask[:, None], x, jnp.nan)
    for name in ("reference", "xla"):
        one = dataclasses.replace(config, implementation=(name,))
        dx, dw = jax.jit(jax.grad(lambda x, w, c=one: loss(fused_experts(x, p, ids, w, c, token_mask=mask)), (0, 1)))(
            x, weights
        )
        assert not np.asarray(dx)[~np.asarray(mask)].any()
        assert all(bool(jnp.isfinite(leaf).all()) for leaf in jax.tree.leaves((dx, dw)))


@pytest.mark.parametrize("name", ["w13", "w2"])
@pytest.mark.parametrize("scheme", ["fp8_tensor", "fp8_channel"])
def test_a_weight_that_is_nan_reaches_the_gradients_of_its_tokens(scheme, name):
    """The scale of "fp8_tensor" belongs to all rows: a hidden value that is NaN reaches every token, as in y."""
    config = cases.make_config(scheme, implementation=("xla",))
    x, p, ids, weights = make_args(config)
    weights = cases.with_nan(weights, name)

    def of(x, p):
        y = fused_experts(x, p, ids, weights, config)
        return jnp.sum(y), y

    (dx, dp), y = jax.jit(jax.grad(of, (0, 1), has_aux=True))(x, p)
    own = np.asarray(ids) == 0
    is_routed = (np.asarray(ids) >= 0) & (np.asarray(ids) < cases.E)
    reached = is_routed if (scheme, name) == ("fp8_tensor", "w13") else own
    assert 0 < own.any(axis=1).sum() < NUM_TOKENS
    np.testing.assert_array_equal(np.isnan(y).any(axis=1), reached.any(axis=1))
    np.testing.assert_array_equal(np.isnan(dp), reached)
    np.testing.assert_array_equal(np.isnan(dx).any(axis=1), own.any(axis=1))


# -- quantized leaves have no gradient --------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize(
    ("scheme", "leaf"), [("fp8_channel", "w13.data"), ("fp8_tensor_static", "w13.data"), ("int8_w8a8", "w13.scale")]
)
def test_gradient_of_all_weights_is_refused(scheme, leaf, implementation):
    config = cases.make_config(scheme, implementation=(implementation,))
    x, p, ids, weights = make_args(config)
    with pytest.raises(TypeError, match=rf"gradient requested for weights\.{leaf} "):
        jax.grad(lambda w: loss(fused_experts(x, p, ids, w, config)), allow_int=True)(weights)


@pytest.mark.parametrize("tensor", ["w13", "w2"])
@pytest.mark.parametrize("leaf", ["data", "scale", "input_scale"])
def test_gradient_of_one_leaf_is_refused_by_name(tensor, leaf):
    config = cases.make_config("fp8_tensor_static")
    x, p, ids, weights = make_args(config)

    def of(value):
        replaced = dataclasses.replace(getattr(weights, tensor), **{leaf: value})
        return loss(fused_experts(x, p, ids, dataclasses.replace(weights, **{tensor: replaced}), config))

    with pytest.raises(TypeError, match=rf"weights\.{tensor}\.{leaf} \(float"):
        jax.jit(jax.grad(of))(getattr(getattr(weights, tensor), leaf))


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint])
@pytest.mark.sample(2)
def test_gradient_in_x_alone_is_not_mistaken_for_one_in_the_weights(wrap):
    # Through the transformations that see the weights as arguments: jit, remat, a scan over layers.
    config = cases.make_config("fp8_channel")
    x, p, ids, weights = make_args(config)
    inner = wrap(lambda x, w: fused_experts(x, p, ids, w, config))
    layers = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), weights)

    def scanned(x):
        return loss(jax.lax.scan(lambda x, w: (inner(x, w) * 0.5, None), x, layers)[0])

    def unrolled(x):
        return loss(inner(inner(x, weights) * 0.5, weights) * 0.5)

    want = jax.jit(jax.grad(unrolled))(x)
    assert_rows_close(
        jax.jit(jax.grad(scanned))(x), want, tolerance(config.scheme, "float32"), row_scale=np.abs(want).max()
    )


def test_no_memory_for_weight_gradients_nobody_asked_for():
    config = cases.make_config("bf16", num_experts=64, hidden_size=256, intermediate_size=128)
    weights = cases.make_weights(config)
    x = cases.make_tokens(4, config)
    p, ids = cases.make_routing(4, 2, 64)
    step = jax.jit(jax.grad(lambda x, p, w: loss(fused_experts(x, p, ids, w, config)), (0, 1)))
    memory = step.lower(x, p, weights).compile().memory_analysis()
    assert memory.temp_size_in_bytes + memory.output_size_in_bytes < weights.nbytes() / 8
