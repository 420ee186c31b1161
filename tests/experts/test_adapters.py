"""Low-rank addends of experts in every scheme: outputs against NumPy float64, gradients against torch's in float64."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax._src.ad_checkpoint import saved_residuals

from moe_jax.experts import explain, fused_experts
from moe_jax.experts._backend import Problem
from moe_jax.experts._choice import choose
from moe_jax.quantization import LowRank
from tests.support.cases import experts as cases
from tests.support.oracles.experts import Experts, experts_numpy, matrix_numpy
from tests.support.oracles.grids import grid_of
from tests.support.oracles.layer_judge import assert_layer_close
from tests.support.oracles.tolerances import assert_rows_close, tolerance

NUM_TOKENS, RANK = 17, 3
LORAS = ("w13_lora", "w2_lora")
SCHEMES = (
    *("w4a16_g32_asym", "fp8_tensor", "nvfp4", "bf16", "int8_w8a8", "mxfp4", "fp8_tensor_static", "w4a16_g8_actorder"),
    *("fp8_channel", "fp8_block", "int8_w8a16", "w4a8_fp8", "nvfp4_a16", "mxfp4_a16", "mxfp8", "w3a16_g128"),
)


def with_adapters(weights, *, shares_gate=True, targets=("w13", "w2"), dtype=jnp.float32, seed=5):
    """Addends about as large as the matrices; every expert, projection and rank has its own."""
    rng = np.random.default_rng(seed)
    (e, h, i), g = weights.shape, weights.w13.shape[1]

    def addend(lead_a, lead_b, n, k):
        a = rng.standard_normal((*lead_a, RANK, k)) / np.sqrt(k)
        b = rng.standard_normal((*lead_b, n, RANK)) * 0.7
        return LowRank(
            jnp.asarray(a, dtype), jnp.asarray(b, dtype), jnp.asarray(rng.uniform(0.5, 2, (e, RANK)), "float32")
        )

    made = dict(
        w13_lora=addend((e, 1 if shares_gate else g), (e, g), i, h),
        w2_lora=addend((e,), (e,), h, i),
    )
    return weights.adapted(**{name: made[name] if name.removesuffix("_lora") in targets else None for name in made})


def call_of(config, **options):
    x, p, ids, weights = cases.make_call(config, NUM_TOKENS)
    return x, p, ids, with_adapters(weights, **options)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.sample(8)
def test_outputs(scheme, implementation):
    config = cases.make_config(scheme, has_bias=True, implementation=(implementation,))
    x, p, ids, weights = call_of(config, shares_gate=implementation == "xla")
    y = cases.jitted(fused_experts, config)(x, p, ids, weights)
    assert_layer_close(y, x, p, ids, weights, config, kernels=False)


@pytest.mark.parametrize("target", ["w13", "w2"])
@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("is_gated", [True, False])
@pytest.mark.sample(8)
def test_one_target(target, implementation, is_gated):
    """Also of a layer that weighs its input, whose adapters take the weighted rows."""
    options: Any = dict(top_k=1, apply_router_weight_on_input=True, is_act_and_mul=is_gated)
    config = cases.make_config("int8_w8a16", implementation=(implementation,), **options)
    x, p, ids, weights = call_of(config, targets=(target,), shares_gate=False)
    y = cases.jitted(fused_experts, config)(x, p, ids, weights)
    assert_layer_close(y, x, p, ids, weights, config, kernels=False)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("adapter_dtype", ["bfloat16", "float32"])
@pytest.mark.sample(3)
def test_16_bit_layers(dtype, adapter_dtype):
    config = cases.make_config("int8_w8a16", dtype=dtype)
    x, p, ids, weights = call_of(config, dtype=adapter_dtype)
    y = cases.jitted(fused_experts, config)(x.astype(dtype), p, ids, weights)
    assert y.dtype == dtype
    want = experts_numpy(x.astype(dtype), p, ids, weights, config)
    assert_rows_close(y, want, tolerance(config.scheme, dtype), experts=ids)


# -- gradients --------------------------------------------------------------------------------------------------------


def straight_through(rows, fmt, stored):
    """Rows on the grid of the activations; the gradient passes where nothing was clipped."""
    if fmt is None or not len(rows):
        return rows
    values = torch.tensor(np.asarray(grid_of(rows.detach().numpy(), fmt, stored).values(rows.detach().numpy())))
    inside = torch.ones_like(rows)
    if not fmt.dynamic:
        inside = (rows.detach().abs() <= float(stored) * 448).double()
    return values + (rows - rows.detach()) * inside


def torch_gradients(x, p, ids, weights, config, cotangent) -> Any:
    """Of sum(cotangent * y) in x and the adapters, on dequantized weights, expert after expert."""
    tx: Any = torch.tensor(np.asarray(x), dtype=torch.float64, requires_grad=True)
    leaves: dict[str, Any] = {
        f"{name}.{part}": torch.tensor(np.asarray(getattr(getattr(weights, name), part)).astype(np.float64))
        for name in ("w13_lora", "w2_lora")
        for part in ("a", "b")
    }
    for leaf in leaves.values():
        leaf.requires_grad_()
    fmt, ids, p = weights.scheme.activations, np.asarray(ids), np.asarray(p).astype(np.float64)
    token, slot = np.nonzero((ids >= 0) & (ids < config.num_experts))
    experts = ids[token, slot]
    codes = straight_through(tx[torch.tensor(token)], fmt, weights.w13.input_scale)
    hidden: list[Any] = [None] * config.num_experts
    outputs: Any = 0.0
    for e in range(config.num_experts):
        own = torch.tensor(np.flatnonzero(experts == e))
        scale = torch.tensor(np.asarray(weights.w13_lora.scale[e]), dtype=torch.float64)
        inner = torch.einsum("rk,gnk->rgn", tx[torch.tensor(token)[own]], leaves["w13_lora.a"][e]) * scale
        sums = torch.einsum("rk,gik->rgi", codes[own], torch.tensor(matrix_numpy(weights.w13, e)))
        both = sums + torch.einsum("rgn,gin->rgi", inner.expand(-1, sums.shape[1], -1), leaves["w13_lora.b"][e])
        hidden[e] = torch.nn.functional.silu(both[:, 0]) * both[:, 1]
    rows = torch.cat(hidden)
    codes = straight_through(rows, fmt, weights.w2.input_scale).split([len(part) for part in hidden])
    for e in range(config.num_experts):
        own = np.flatnonzero(experts == e)
        scale = torch.tensor(np.asarray(weights.w2_lora.scale[e]), dtype=torch.float64)
        y = codes[e] @ torch.tensor(matrix_numpy(weights.w2, e)).T
        y = y + (hidden[e] @ leaves["w2_lora.a"][e].T * scale) @ leaves["w2_lora.b"][e].T
        weight = torch.tensor(p[token, slot][own])[:, None]
        outputs = outputs + (weight * y * torch.tensor(cotangent[token[own]])).sum()
    outputs.backward()
    return tx.grad.numpy(), {name: leaf.grad.numpy() for name, leaf in leaves.items()}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.sample(8)
def test_gradients(scheme, implementation):
    """Of x, a and b, each expert by itself; the last expert has one row, and in one case none."""
    config = cases.make_config(scheme, implementation=(implementation,))
    x, p, ids, weights = call_of(config, shares_gate=implementation == "xla")
    p = jnp.nan_to_num(p)
    if implementation == "reference":
        ids = jnp.where(ids == cases.E - 1, -1, ids)
    cotangent = np.random.default_rng(8).standard_normal(x.shape)

    def loss(x, trained):
        own = {name: dataclasses.replace(getattr(weights, name), **parts) for name, parts in trained.items()}
        return jnp.sum(
            cotangent.astype(np.float32) * fused_experts(x, p, ids, dataclasses.replace(weights, **own), config)
        )

    trained = {name: dict(a=getattr(weights, name).a, b=getattr(weights, name).b) for name in ("w13_lora", "w2_lora")}
    dx, found = jax.jit(jax.grad(loss, (0, 1)))(x, trained)
    want_x, wanted = torch_gradients(x, p, ids, weights, config, cotangent)
    tol = dataclasses.replace(tolerance("bf16", "float32"), ulps=256.0)  # x is quantized alike, no code differs
    assert_rows_close(dx, want_x, tol, row_scale=float(np.abs(want_x).max()))
    for name, want in wanted.items():
        lora, part = name.split(".")
        size = np.abs(want).max(axis=tuple(range(1, want.ndim)), keepdims=True)
        assert (size[:-1] > 0).all() and (size[-1] == 0).all() == (implementation == "reference")
        assert_rows_close(found[lora][part], want, tol, row_scale=size.reshape((-1,) + (1,) * (want.ndim - 2)))


@pytest.mark.parametrize("scheme", ["w4a16_g32_asym", "nvfp4_a16", "fp8_channel_a16", "mxfp4_a16", "bf16"])
@pytest.mark.sample(5)
def test_gradients_by_finite_differences(scheme):
    """Of x, router weights, and a and b of each expert, in a random direction: central differences of NumPy's layer."""
    config = cases.make_config(scheme)
    x, p, ids, weights = call_of(config)
    rng = np.random.default_rng(8)
    cotangent = rng.standard_normal(x.shape)
    start = dict(x=x, p=jnp.nan_to_num(p))
    start |= {f"{name}.{part}": getattr(getattr(weights, name), part) for name in LORAS for part in ("a", "b")}

    def adapted(leaves):
        own = {name: {part: leaves[f"{name}.{part}"] for part in ("a", "b")} for name in LORAS}
        changes: Any = {name: dataclasses.replace(getattr(weights, name), **own[name]) for name in LORAS}
        return dataclasses.replace(weights, **changes)

    def loss(leaves):
        y = fused_experts(leaves["x"], leaves["p"], ids, adapted(leaves), config)
        return jnp.sum(cotangent.astype(np.float32) * y)

    found = jax.jit(jax.grad(loss))(start)
    exact = {name: np.asarray(leaf).astype(np.float64) for name, leaf in start.items()}
    layer = Experts(exact["x"], exact["p"], np.asarray(ids), weights, config)

    def value(leaves):
        moved = dataclasses.replace(layer, x=leaves["x"], topk_weights=leaves["p"], weights=adapted(leaves))
        return (cotangent * moved.y).sum()

    for name, leaf in exact.items():
        for expert in range(config.num_experts) if "lora" in name else (slice(None),):
            direction = np.zeros_like(leaf)
            direction[expert] = rng.standard_normal(leaf[expert].shape)
            want = sum(sign * value(exact | {name: leaf + sign * 1e-4 * direction}) for sign in (1, -1)) / 2e-4
            terms = np.asarray(found[name], np.float64) * direction
            assert abs(terms.sum() - want) < 1e-5 * np.abs(terms).sum(), (name, expert)


def test_gradients_in_bfloat16_are_those_of_float32_rounded():
    config = cases.make_config("fp8_channel_a16", dtype="bfloat16")
    x, p, ids, weights = call_of(config, dtype=jnp.bfloat16)
    p = jnp.nan_to_num(p)

    def gradient(lora, x, config):
        def of(lora):
            return jnp.sum(fused_experts(x, p, ids, weights.adapted(None, lora), config) ** 2)

        return jax.jit(jax.grad(of))(lora)

    found = gradient(weights.w2_lora, x.astype(jnp.bfloat16), config)
    wide = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), weights.w2_lora)
    x = x.astype(jnp.bfloat16).astype(jnp.float32)
    want = gradient(wide, x, dataclasses.replace(config, dtype=jnp.dtype("float32")))
    assert found.a.dtype == found.b.dtype == jnp.bfloat16
    for name in ("a", "b"):
        one = np.asarray(getattr(want, name))
        size = np.abs(one).max(axis=(1, 2))[:, None]
        assert_rows_close(
            getattr(found, name), one, dataclasses.replace(tolerance("bf16", "bfloat16"), ulps=8.0), row_scale=size
        )


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint])
@pytest.mark.sample(2)
def test_remat_and_scan_over_layers(wrap):
    config = cases.make_config("w4a16_g32")
    x, p, ids, weights = call_of(config)
    p = jnp.nan_to_num(p)
    inner = wrap(lambda x, w: fused_experts(x, p, ids, w, config) * 0.5)

    def one(x, a):
        lora = dataclasses.replace(weights.w13_lora, a=a)
        return inner(x, dataclasses.replace(weights, w13_lora=lora))

    stacked = jnp.stack([weights.w13_lora.a, -weights.w13_lora.a])

    def scanned(stacked):
        return jnp.sum(jax.lax.scan(lambda x, a: (one(x, a), None), x, stacked)[0])

    def unrolled(stacked):
        return jnp.sum(one(one(x, stacked[0]), stacked[1]))

    found, want = (np.asarray(jax.jit(jax.grad(f))(stacked)) for f in (scanned, unrolled))
    assert_rows_close(found, want, tolerance("bf16", "float32"), row_scale=np.abs(want).max())


# -- memory -----------------------------------------------------------------------------------------------------------


def adapted_loss(config, tokens):
    """(loss of x, router weights and one adapter's factors, these)."""
    x, p, ids, weights = cases.make_call(config, tokens)

    def loss(x, p, a, b):
        lora = dataclasses.replace(weights.w13_lora, a=a, b=b)
        return jnp.sum(fused_experts(x, p, ids, dataclasses.replace(weights, w13_lora=lora), config) ** 2)

    weights = with_adapters(weights)
    return loss, (x, jnp.nan_to_num(p), weights.w13_lora.a, weights.w13_lora.b)


def test_memory_of_a_gradient():
    """Of a compiled step beside what its math holds at once: inputs, router logits, gate and up, hidden and output rows
    with the cotangents of these rows (``needed_activations`` in benchmarks/train_lora.py).
    """
    tokens, h, i, k, e = 1024, 256, 64, 4, 8
    sizes = dict(hidden_size=h, intermediate_size=i, top_k=k, num_experts=e)
    loss, arguments = adapted_loss(cases.make_config("w4a16_g32", implementation=("xla",), **sizes), tokens)
    compiled = jax.jit(jax.grad(loss, (0, 1, 2, 3))).lower(*arguments).compile()
    needed = 4 * tokens * (2 * h + e + k * 2 * (3 * i + h))
    assert compiled.memory_analysis().temp_size_in_bytes <= 1.3 * needed


def test_what_a_forward_pass_keeps():
    """Arguments, and x with zeros for tokens without experts: no rows of experts, not even for router weights."""
    loss, arguments = adapted_loss(cases.make_config("w4a16_g32", implementation=("xla",)), 64)
    of_tokens = [aval.size for aval, _ in saved_residuals(loss, *arguments) if aval.shape[:1] == (64,)]
    assert max(of_tokens) == arguments[0].size


# -- which backend ----------------------------------------------------------------------------------------------------


def test_backends_without_adapters_are_passed_over_by_name():
    config = cases.make_config("fp8_channel", dtype="bfloat16", implementation=("portable", "xla"))
    weights = with_adapters(cases.make_weights(config))
    chosen, skipped = choose(Problem(config, weights, NUM_TOKENS, "gpu"))
    assert chosen is not None and chosen.name == "xla" and skipped == [("portable", "takes no adapters (LoRA)")]
    text = explain(config, weights, NUM_TOKENS, platform="gpu")
    assert "adapters: rank 3 on w13 and rank 3 on w2" in text and "skipped: portable: takes no adapters (LoRA)" in text


def test_a_backend_that_drops_adapters_never_runs():
    config = cases.make_config("fp8_channel", dtype="bfloat16", implementation=("portable",))
    x, p, ids, weights = call_of(config)
    with pytest.raises(NotImplementedError, match=r"portable: takes no adapters \(LoRA\).*'xla', 'reference'"):
        fused_experts(x, p, ids, weights, config)
