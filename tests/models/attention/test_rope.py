"""Frequencies, amplitude and rotation against transformers, type by type."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import Qwen3MoeConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRotaryEmbedding, apply_rotary_pos_emb

from moe_jax.models.attention._rope import RopeConfig, rotary_angles, rotate

D = 32
HALF = D // 2
SHORT, LONG = [1 + 0.05 * i for i in range(HALF)], [2 + 0.5 * i for i in range(HALF)]
VARIANTS = {
    "default": dict(rope_type="default"),
    "linear": dict(rope_type="linear", factor=4.0),
    "dynamic": dict(rope_type="dynamic", factor=2.0),
    "yarn": dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=1024),
    "yarn_exact_range": dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=1024, truncate=False),
    "yarn_betas": dict(
        rope_type="yarn", factor=8.0, original_max_position_embeddings=512, beta_fast=16.0, beta_slow=2.0
    ),
    "yarn_mscale": dict(
        rope_type="yarn", factor=40.0, original_max_position_embeddings=512, mscale=1.0, mscale_all_dim=0.7
    ),
    "yarn_attention_factor": dict(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=1024, attention_factor=0.8
    ),
    "llama3": dict(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=1024
    ),
    "longrope": dict(rope_type="longrope", short_factor=SHORT, long_factor=LONG, original_max_position_embeddings=1024),
    "longrope_factor": dict(
        rope_type="longrope", short_factor=SHORT, long_factor=LONG, factor=8.0, original_max_position_embeddings=1024
    ),
}
MAX_POSITIONS = 4096


def torch_config(parameters, theta=1e6):
    return Qwen3MoeConfig(
        hidden_size=64,
        num_attention_heads=4,
        head_dim=D,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters=dict(parameters, rope_theta=theta),
    )


def our_config(parameters, theta=1e6):
    config = dict(max_position_embeddings=MAX_POSITIONS, rope_parameters=dict(parameters, rope_theta=theta))
    return RopeConfig.from_config(config, head_dim=D, max_position_embeddings=MAX_POSITIONS)


@pytest.mark.parametrize("length", [16, 1024, 1025, 4097, 9000])
@pytest.mark.parametrize("name", sorted(VARIANTS.keys() - {"default"}))
def test_frequencies(name, length):
    parameters = VARIANTS[name]
    expected, amplitude = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](torch_config(parameters), "cpu", seq_len=length)
    ours = our_config(parameters)
    np.testing.assert_allclose(np.asarray(ours.frequencies(jnp.array([length])))[0], expected.numpy(), rtol=1e-6)
    assert ours.amplitude == pytest.approx(amplitude, rel=1e-12)


@pytest.mark.parametrize("length", [20, 1030, 5000])
@pytest.mark.parametrize("name", VARIANTS)
def test_angles(name, length):
    """cos and sin of the module that transformers' models call, over a prompt; the factor on both included."""
    positions = np.arange(length - 12, length)[None]
    cos, sin = Qwen3MoeRotaryEmbedding(torch_config(VARIANTS[name]))(torch.zeros(1), torch.tensor(positions))
    ours = rotary_angles(our_config(VARIANTS[name]), jnp.asarray(positions), jnp.array([length]))
    # An angle of 5000 has a float32 spacing of 5e-4.
    for actual, expected in zip(ours, (cos, sin), strict=True):
        np.testing.assert_allclose(actual, expected.numpy()[..., :HALF], atol=2e-7 * length + 1e-6)


def test_rows_have_their_own_length():
    config = our_config(VARIANTS["dynamic"])
    both = np.asarray(config.frequencies(jnp.array([10, 9000])))
    np.testing.assert_array_equal(both[0], np.asarray(config.frequencies(jnp.array([10])))[0])
    np.testing.assert_array_equal(both[1], np.asarray(config.frequencies(jnp.array([9000])))[0])
    assert not np.allclose(both[0], both[1])


def test_rotate():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 5, 3, D)).astype(np.float32)
    angles = rng.standard_normal((2, 5, HALF)).astype(np.float32)
    full = torch.tensor(np.concatenate([angles, angles], -1))
    expected, _ = apply_rotary_pos_emb(torch.tensor(x), torch.tensor(x), full.cos(), full.sin(), unsqueeze_dim=2)
    actual = rotate(jnp.asarray(x), jnp.cos(angles), jnp.sin(angles))
    np.testing.assert_allclose(actual, expected.numpy(), atol=1e-6)
    low = rotate(jnp.asarray(x).astype(jnp.bfloat16), jnp.cos(angles), jnp.sin(angles))
    assert low.dtype == jnp.bfloat16


def hub(**config):
    return RopeConfig.from_config(config, head_dim=D, max_position_embeddings=MAX_POSITIONS)


def test_dialects_mean_the_same():
    new = our_config(VARIANTS["yarn"])
    assert hub(rope_theta=1e6, rope_scaling=VARIANTS["yarn"]) == new
    old = {("type" if key == "rope_type" else key): value for key, value in VARIANTS["yarn"].items()}
    assert hub(rope_theta=1e6, rope_scaling=old) == new
    assert hub(rope_theta=1e6) == hub(rope_theta=1e6, rope_scaling=None) == our_config({})
    longrope = dict(VARIANTS["longrope"], rope_type="su")
    assert hub(rope_theta=1e6, rope_scaling=longrope) == our_config(VARIANTS["longrope"])


def test_top_level_original_length_has_priority():
    scaling = {k: v for k, v in VARIANTS["longrope"].items() if k != "original_max_position_embeddings"}
    assert hub(rope_theta=1e6, rope_scaling=scaling, original_max_position_embeddings=1024) == our_config(
        VARIANTS["longrope"]
    )
    assert hub(rope_theta=1e6, rope_scaling=scaling).original_max_position_embeddings == MAX_POSITIONS


@pytest.mark.parametrize(
    "name, length",
    [
        ("default", 4096),
        ("linear", 16384),
        ("dynamic", 8192),
        ("yarn", 4096),
        ("yarn_mscale", 20480),
        ("longrope", 4096),
    ],
)
def test_max_seq_len(name, length):
    assert our_config(VARIANTS[name]).max_seq_len == length


@pytest.mark.parametrize(
    "config, words",
    [
        (dict(rope_theta=1e6, rope_scaling=dict(rope_type="spiral")), ["spiral", "yarn"]),
        (dict(rope_theta=1e6, rope_scaling=dict(rope_type="linear")), ["linear", "factor"]),
        (dict(rope_theta=1e6, rope_scaling=dict(rope_type="linear", factor=2.0, beta_fast=3.0)), ["beta_fast"]),
        (dict(rope_theta=1e6, rope_scaling=dict(rope_type="linear", factor="2")), ["factor", "'2'"]),
        (dict(rope_theta=1e6, rope_scaling=dict(rope_type="linear", factor=-1.0)), ["factor", "-1.0"]),
        (dict(rope_theta=1e6, rope_scaling=[1]), ["[1]", "object"]),
        (dict(rope_theta=1e6, rope_scaling=dict(rope_type=["yarn"])), ["['yarn']", "supported"]),
        (dict(rope_theta=1e6, rope_scaling=dict(rope_type="linear", factor=1e308)), ["factor is 1e+308"]),
        (dict(rope_theta=1e6, rope_scaling=dict(rope_type="yarn", factor=1e308)), ["factor is 1e+308"]),
        (dict(rope_theta=1e6, rope_scaling=dict(rope_type="dynamic", factor=1e-9)), ["factor=1e-09", "no position"]),
        (dict(rope_theta=1, rope_scaling=dict(rope_type="yarn", factor=2.0)), ["rope_theta=1.0", "exceed 1"]),
        (dict(rope_theta=10**400), ["rope_theta is 1000", "1e+18"]),
        (
            dict(rope_theta=1e6, rope_scaling=dict(VARIANTS["longrope"], original_max_position_embeddings=1)),
            ["original_max_position_embeddings=1", "exceed 1"],
        ),
        (
            dict(rope_theta=1e6, rope_scaling=dict(VARIANTS["yarn"], original_max_position_embeddings=0.5)),
            ["original_max_position_embeddings is 0.5", "integer"],
        ),
        (dict(rope_scaling=None), ["rope_theta", "missing"]),
        (dict(rope_theta=True), ["rope_theta", "True"]),
        (dict(rope_theta=1e6, rope_parameters=dict(rope_theta=1e4)), ["1000000.0", "10000.0", "disagree"]),
        (dict(rope_theta=1e6, rope_parameters={}, rope_scaling={}), ["rope_parameters", "rope_scaling"]),
        (dict(rope_parameters=dict(rope_theta=1e6, partial_rotary_factor=0.5)), ["partial_rotary_factor"]),
        (dict(rope_parameters=dict(full_attention=dict(rope_theta=1e6))), ["per layer type"]),
        (
            dict(rope_theta=1e6, rope_scaling=dict(rope_type="longrope", short_factor=SHORT, long_factor=LONG[1:])),
            ["long_factor", "15", "16"],
        ),
        (
            dict(
                rope_theta=1e6,
                rope_scaling=dict(rope_type="llama3", factor=8.0, low_freq_factor=4.0, high_freq_factor=1.0),
            ),
            ["high_freq_factor", "low_freq_factor"],
        ),
    ],
)
def test_refusals(config, words):
    with pytest.raises(ValueError) as caught:
        hub(**config)
    assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value)


def test_odd_head():
    with pytest.raises(ValueError, match="head_dim=15 is odd"):
        RopeConfig.from_config(dict(rope_theta=1e4), head_dim=15, max_position_embeddings=64)
