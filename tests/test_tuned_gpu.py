"""Layers at true sizes with the configurations of the tuning table, on a GPU: every token as with other tiles."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moe_jax
from moe_jax.benchmarking import MODELS, random_weights
from moe_jax.quantization import Scheme, Strategy

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

OTHER = 64  # tokens for which the tiles it is compared with are chosen
TOKENS = (1, 16, 300, 1000, 2048, 4096, 8192)
SCHEMES = (
    "bf16", "fp8_channel", "fp8_tensor", "fp8_block", "int8_w8a8", "w4a16_g128", "nvfp4_a16", "mxfp4_a16", "w4a8_int8"
)  # fmt: skip
MORE_SCHEMES = (
    "w4a16_g32", "w4a16_g64_asym", "w4a16_channel", "w8a16_g128", "fp8_block_a16", "w4a8_int8_channel",
    "mxfp4_a16_approximate_fp8",
)  # fmt: skip
CELLS = [
    (model, scheme)
    for model, sizes in MODELS.items()
    for scheme in SCHEMES
    if scheme != "fp8_block" or sizes[2] % 128 == 0
]
CELLS += [("qwen3-30b-a3b", scheme) for scheme in MORE_SCHEMES]


@pytest.mark.parametrize(("model", "scheme"), CELLS)
def test_tuned_tiles_give_what_others_give(model, scheme):
    """Sums in another order move roundings: of the output by half a step of bfloat16, of hidden values by one code."""
    parsed = Scheme.parse(scheme)
    # Group scales in bfloat16, as the table has most of these.
    if scheme in MORE_SCHEMES and parsed.weights.strategy is Strategy.GROUP and parsed.weights.scale == "float32":
        parsed = dataclasses.replace(parsed, weights=dataclasses.replace(parsed.weights, group_scale_dtype="bfloat16"))
    sizes = dict(scheme=parsed, implementation=("mosaic",))
    config = moe_jax.MoEConfig(*MODELS[model], **sizes)
    other = moe_jax.MoEConfig(*MODELS[model], pinned_tokens=OTHER, **sizes)
    weights = random_weights(config)
    for tokens in TOKENS:
        kx, kz = jax.random.split(jax.random.key(tokens))
        x = jax.random.normal(kx, (tokens, config.hidden_size), jnp.bfloat16)
        logits = jax.random.normal(kz, (tokens, config.num_experts), jnp.float32)
        found, expected = (
            np.asarray(jax.jit(moe_jax.fused_moe, static_argnums=3)(x, logits, weights, one).astype(jnp.float32))
            for one in (config, other)
        )
        size = np.sqrt((expected**2).mean(axis=1))
        assert (size > 0).all()
        assert (np.sqrt(((found - expected) ** 2).mean(axis=1)) <= 0.02 * size).all(), tokens
        assert (np.abs(found - expected).max(axis=1) <= 0.15 * size).all(), tokens
