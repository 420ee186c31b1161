"""Training beside transformers: the same start, data and AdamW on both sides, and losses that fall alike."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx
from torch.nn.utils import parametrize

import moe_jax
from moe_jax.quantization import dequantize_tensor
from tests.support.checkpoints import writers

SIZES = dict(vocab_size=64, hidden_size=64, moe_intermediate_size=32, intermediate_size=48, num_experts=8, head_dim=16)
DECAY, ROWS, LENGTH, RANK, ALPHA = 0.01, 4, 24, 4, 8
# At higher rates a rounding sends a token to other experts some time, and from there on losses part, torch's own too.
RATES = {nnx.Param: 3e-3, moe_jax.LoRAParam: 5e-3}
EPSILON = 1e-5  # of AdamW: gradients that are rounding alone move nothing
TARGETS = ("w13", "w2", "attention")


@pytest.fixture
def start(tmp_path):
    """start(dtype) -> (directory of a random Qwen3-MoE checkpoint, transformers' model of it)."""

    def make(dtype):
        writers.write_model("qwen3_moe", tmp_path, getattr(torch, dtype), **SIZES)
        config = writers.transformers.Qwen3MoeConfig.from_pretrained(tmp_path, dtype=dtype)
        return tmp_path, writers.transformers.Qwen3MoeForCausalLM.from_pretrained(tmp_path, config=config).train()

    return make


def batches(steps):
    """(ROWS, LENGTH) int32 each: a token is one of three that may follow the last, which can be learned."""
    rng = np.random.default_rng(5)
    follows = rng.integers(0, SIZES["vocab_size"], (SIZES["vocab_size"], 3))
    for _ in range(steps):
        ids = np.zeros((ROWS, LENGTH), np.int32)
        ids[:, 0] = rng.integers(0, SIZES["vocab_size"], ROWS)
        for column in range(1, LENGTH):
            ids[:, column] = follows[ids[:, column - 1], rng.integers(0, 3, ROWS)]
        yield ids


def losses_here(model, kind, steps, balance=0.0):
    optimizer = nnx.Optimizer(model, optax.adamw(RATES[kind], eps=EPSILON, weight_decay=DECAY), wrt=kind)

    @nnx.jit
    def step(model, optimizer, ids):
        def loss(model):
            logits, stats = model(ids, return_stats=True)
            entropy = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], ids[:, 1:]).mean()
            return entropy + balance * moe_jax.load_balancing_loss(stats)

        value, grads = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, kind))(model)
        optimizer.update(model, grads)
        return value

    with jax.numpy_dtype_promotion("standard"):  # for Adam, which divides floats by integers
        return np.array([float(step(model, optimizer, ids)) for ids in batches(steps)])


def losses_of_transformers(model, kind, steps, balance=0.0):
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATES[kind], eps=EPSILON, weight_decay=DECAY)
    losses = []
    for ids in batches(steps):
        tokens = torch.tensor(ids, dtype=torch.long)
        out = model(tokens, output_router_logits=balance > 0)
        flat = out.logits[:, :-1].float().reshape(-1, SIZES["vocab_size"])
        loss = torch.nn.functional.cross_entropy(flat, tokens[:, 1:].reshape(-1))
        loss = loss + (balance * out.aux_loss if balance else 0.0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return np.array(losses)


def assert_fall_alike(found, wanted, first=1e-5):
    """The first step within ``first``, means of ten steps within 2%, and both learn; few steps each within 0.01%."""
    assert np.isfinite(found).all() and abs(found[0] / wanted[0] - 1) < first
    means = found.reshape(-1, 10).mean(axis=1), wanted.reshape(-1, 10).mean(axis=1)
    assert np.abs(means[0] / means[1] - 1).max() < 0.02, (means[0] / means[1] - 1).round(4)
    if len(wanted) < 200:
        np.testing.assert_allclose(found, wanted, rtol=max(1e-4, first))
    else:
        assert means[1][-1] < 0.85 * means[1][0], means[1].round(2)


@pytest.mark.parametrize("steps", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_all_weights(start, steps):
    """Experts, routers, attention, norms, embedding, head; with the load-balancing loss."""
    directory, theirs = start("float32")
    found = losses_here(moe_jax.load_pretrained(directory, dtype="float32"), nnx.Param, steps, balance=0.02)
    assert_fall_alike(found, losses_of_transformers(theirs, nnx.Param, steps, balance=0.02))


@pytest.mark.slow
def test_all_weights_in_bfloat16(start):
    """From the same weights, losses lie as far from transformers' in float32 as its own in bfloat16 do, up to twice:
    rounding sends tokens to other experts on both sides."""
    directory, theirs = start("bfloat16")
    exact = writers.transformers.Qwen3MoeForCausalLM.from_pretrained(directory, dtype=torch.float32).train()
    model, means = moe_jax.load_pretrained(directory, dtype="bfloat16"), {}
    means["ours"] = losses_here(model, nnx.Param, 200, balance=0.02)
    for name, other in (("theirs", theirs), ("exact", exact)):
        means[name] = losses_of_transformers(other, nnx.Param, 200, balance=0.02)
    assert abs(means["ours"][0] / means["theirs"][0] - 1) < 5e-3
    means = {name: losses.reshape(-1, 10).mean(axis=1) for name, losses in means.items()}
    away = {name: np.abs(means[name] / means["exact"] - 1).mean() for name in ("ours", "theirs")}
    assert away["ours"] < 2 * away["theirs"] and means["ours"][-1] < 0.85 * means["ours"][0], away


class Sum(torch.nn.Module):
    """A parametrization W + alpha / rank * B A, over experts where these are (E, ., .)."""

    def __init__(self, a, b):
        super().__init__()
        self.a, self.b = (torch.nn.Parameter(torch.tensor(np.asarray(part))) for part in (a, b))

    def forward(self, weight):
        return weight + ALPHA / RANK * self.b @ self.a


def dequantized(model, theirs):
    """transformers' model with the experts that a quantized model has, and no gradients."""
    theirs.requires_grad_(False)
    for block, layer in zip(model.moe_blocks(), theirs.model.layers, strict=True):
        weights = block.experts.weights.get_value()
        for name, tensor in (("gate_up_proj", weights.w13), ("down_proj", weights.w2)):
            parameter = getattr(layer.mlp.experts, name)
            parameter.copy_(torch.tensor(np.asarray(dequantize_tensor(tensor))).reshape(parameter.shape))
    return theirs


def with_sums(model, theirs):
    """The adapters of the model, as they are, in transformers' by hand."""
    for own, layer in zip(model.layers, theirs.model.layers, strict=True):
        lora: Any = own.mlp.experts.lora
        b = np.asarray(lora.w13_b[...])
        e, g, i, r = b.shape
        experts = layer.mlp.experts
        sums = dict(gate_up_proj=Sum(lora.w13_a[...][:, 0], b.reshape(e, g * i, r)))
        sums["down_proj"] = Sum(lora.w2_a[...], lora.w2_b[...])
        for name, parametrization in sums.items():
            parametrize.register_parametrization(experts, name, parametrization)
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            pair = getattr(own.self_attn, name).lora
            linear = getattr(layer.self_attn, name)
            parametrize.register_parametrization(linear, "weight", Sum(pair.a[...], pair.b[...]))
    return theirs


def adapted(directory, scheme):
    model = moe_jax.load_pretrained(directory, quantize=scheme, dtype=jnp.float32)
    return moe_jax.lora(model, RANK, ALPHA, TARGETS, rngs=nnx.Rngs(1))


@pytest.mark.parametrize("steps", [10, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("scheme", ["w4a16_g32", pytest.param("nvfp4_a16", marks=pytest.mark.slow)])
def test_adapters_beside_quantized_experts(start, scheme, steps):
    directory, theirs = start("float32")
    model = adapted(directory, scheme)
    theirs = with_sums(model, dequantized(model, theirs))
    found = losses_here(model, moe_jax.LoRAParam, steps)
    assert_fall_alike(found, losses_of_transformers(theirs, moe_jax.LoRAParam, steps))


@pytest.mark.slow
def test_adapters_of_peft(start, tmp_path):
    """peft starts from what ``save_lora`` wrote before the first step."""
    peft = pytest.importorskip("peft")
    directory, theirs = start("float32")
    model = adapted(directory, "w4a16_g32")
    moe_jax.save_lora(model, tmp_path / "adapter")
    theirs = peft.PeftModel.from_pretrained(dequantized(model, theirs), tmp_path / "adapter", is_trainable=True)
    found = losses_here(model, moe_jax.LoRAParam, 200)
    assert_fall_alike(found, losses_of_transformers(theirs, moe_jax.LoRAParam, 200))
