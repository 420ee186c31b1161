"""Layers at true sizes with the configurations of the tuning table, on a GPU: every token as with other tiles."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moe_jax
from moe_jax.benchmarking import MODELS, random_weights
from moe_jax.quantization import Scheme
from moe_jax.routing import route
from tests.support.oracles.layer_judge import LayerJudge

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

OTHER = 64  # tokens for which the tiles it is compared with are chosen
# Those of 16 tokens do not split K, and have the same bits: with parts of K another sum of an FP8 tensor core moves the
# largest hidden value of one row in fourteen, and its scale with it (docs/engineering/numerics.md).
SAME_BITS = {"mxfp4_a16_approximate_fp8": 16}
JUDGED = (1, 16, 300, 1000)
JUDGED_WEIGHTS = 400_000_000
TOKENS = (1, 16, 300, 1000, 2048, 4096, 8192)
SCHEMES = (
    "bf16", "fp8_channel", "fp8_tensor", "fp8_tensor_static", "fp8_block", "int8_w8a8", "w4a16_g128", "nvfp4_a16",
    "mxfp4_a16", "w4a8_int8",
)  # fmt: skip
MORE_SCHEMES = (
    "w4a16_channel", "w4a16_channel_asym", "fp8_block_a16", "w4a8_int8_channel", "mxfp4_a16_approximate_fp8"
)  # fmt: skip
GROUPED = (
    "w4a16_g32", "w4a16_g64", "w4a16_g32_asym", "w4a16_g64_asym", "w4a16_g128_asym", "w8a16_g128"
)  # fmt: skip
CELLS = [
    pytest.param(model, scheme, "float32", id=f"{model}-{scheme}")
    for model, sizes in MODELS.items()
    for scheme in SCHEMES
    if scheme != "fp8_block" or sizes[2] % 128 == 0
]
CELLS += [
    pytest.param("qwen3-30b-a3b", scheme, dtype, id=f"qwen3-30b-a3b-{scheme}-{dtype}")
    for dtype, schemes in (("float32", (*MORE_SCHEMES, *GROUPED)), ("bfloat16", ("w4a16_g128", *GROUPED)))
    for scheme in schemes
]


def rows_apart(found, expected):
    """(RMS difference, largest difference) of each row over the RMS of the expected one."""
    found, expected = (rows.astype(np.float64) for rows in (found, expected))
    size = np.sqrt((expected**2).mean(axis=1))
    assert (size > 0).all()
    return np.sqrt(((found - expected) ** 2).mean(axis=1)) / size, np.abs(found - expected).max(axis=1) / size


def without_ties(x):
    """x (T, H) with the same largest value in each row, of which no other is half, nor any odd multiple of 1/254.

    Its significand is 131, a prime; a value of 8 bits is a tie between two codes of int8, or of e4m3's normal range,
    only if it has that significand too. XLA's quotients on a GPU are 2 ulp off, so that ties fall to either side.
    """
    return jnp.clip(x, -4.0, 4.0).at[:, 0].set(131 / 16)


def configured(model, scheme, group_scale_dtype, implementation="hopper"):
    parsed = Scheme.parse(scheme)
    if group_scale_dtype != "float32":
        parsed = dataclasses.replace(
            parsed, weights=dataclasses.replace(parsed.weights, group_scale_dtype=group_scale_dtype)
        )
    return moe_jax.MoEConfig(*MODELS[model], scheme=parsed, implementation=(implementation,))


def call(config, tokens):
    """(x, router logits) of a call."""
    kx, kz = jax.random.split(jax.random.key(tokens))
    x = without_ties(jax.random.normal(kx, (tokens, config.hidden_size), jnp.bfloat16))
    return x, jax.random.normal(kz, (tokens, config.num_experts), jnp.float32)


def run(config, x, logits, weights):
    return np.asarray(jax.jit(moe_jax.fused_moe, static_argnums=3)(x, logits, weights, config))


@pytest.mark.parametrize(("model", "scheme", "group_scale_dtype"), CELLS)
def test_tuned_tiles_give_what_others_give(model, scheme, group_scale_dtype):
    """Sums in another order move roundings: of the output by half a step of bfloat16, of hidden values by one code."""
    config = configured(model, scheme, group_scale_dtype)
    other = dataclasses.replace(config, pinned_tokens=SAME_BITS.get(scheme, OTHER))
    weights = random_weights(config)
    for tokens in TOKENS:
        found, expected = (run(one, *call(config, tokens), weights) for one in (config, other))
        if scheme not in SAME_BITS:
            rows, values = rows_apart(found, expected)
            assert rows.max() <= 0.02, (tokens, np.sort(rows)[-5:])
            assert values.max() <= 0.15, (tokens, np.sort(values)[-5:])
        elif tokens > 1:  # one token's own tiles split K
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(("model", "scheme", "group_scale_dtype"), CELLS)
def test_some_tokens_beside_numpy(model, scheme, group_scale_dtype):
    """Evenly spaced tokens, as many as some JUDGED_WEIGHTS values serve. A scale of the whole call needs all its
    tokens: a call with more of them is left to the comparison of tiles.
    """
    config = configured(model, scheme, group_scale_dtype)
    weights, stored = (random_weights(configured(model, scheme, group_scale_dtype, name)) for name in ("hopper", "xla"))
    most = max(JUDGED_WEIGHTS // (3 * config.top_k * config.hidden_size * config.intermediate_size), 1)
    for tokens in JUDGED:
        if config.has_call_scale and tokens > most:
            continue
        x, logits = call(config, tokens)
        rows = np.unique(np.linspace(0, tokens - 1, min(most, tokens)).astype(int))
        routing = jax.tree.map(np.asarray, route(logits, config))
        judge = LayerJudge(
            np.asarray(x)[rows], routing.topk_weights[rows], routing.topk_ids[rows], stored, config, on_gpu=True
        )
        judge.check(run(config, x, logits, weights)[rows])
