"""Searched scales: no tensor, channel, block or group is worse than with the scale of its largest value."""

import jax.numpy as jnp
import numpy as np
import pytest

import moe_jax
from moe_jax.quantization import SCHEMES, ScaleSearchMoEMethod, Strategy, dequantize_tensor, method_for
from moe_jax.writing._matrices import quantized
from tests.fuzz import bases

# by how much the sum of squared errors of all extents has to fall; MX only chooses among exponents
GAINS = {"w4a16_g32": 0.95, "w4a16_channel_asym": 0.9, "fp8_block": 0.99, "nvfp4_a16": 0.9, "mxfp4": 0.99}
SLOW = {"w3a16_g128": 0.95, "int8_w8a8": 1.0, "fp8_tensor": 0.999, "fp8_channel": 0.99, "mxfp8": 1.0}


def errors(w, tensor):
    """Sums of squared errors per extent, in float64."""
    fmt = tensor.fmt
    difference = (np.asarray(dequantize_tensor(tensor), np.float64) - w.astype(np.float64)) ** 2
    rows, columns = {
        Strategy.TENSOR: w.shape,
        Strategy.CHANNEL: (1, w.shape[1]),
        Strategy.GROUP: (1, fmt.group_size),
        Strategy.BLOCK: fmt.block_shape,
    }[fmt.strategy]
    starts = (np.arange(0, w.shape[0], rows), np.arange(0, w.shape[1], columns))
    return np.add.reduceat(np.add.reduceat(difference, starts[0], axis=0), starts[1], axis=1)


@pytest.mark.parametrize("name", [*GAINS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
@pytest.mark.sample(4)
def test_never_worse(name):
    """Normal weights, outliers, a row of zeros, a tiny and a large one; 144 x 160 leaves ragged blocks."""
    rng = np.random.default_rng(7)
    w = rng.standard_normal((144, 160 if "g128" not in name else 256)).astype(np.float32)
    w[:, ::37] *= 5
    w[3], w[5], w[6] = 0, w[5] * 1e-20, w[6] * 100
    scheme = SCHEMES[name]
    plain = errors(w, quantized(jnp.asarray(w), method_for(scheme)))
    searched = errors(w, quantized(jnp.asarray(w), ScaleSearchMoEMethod(scheme)))
    assert (searched <= plain).all()
    live = plain > 0
    assert np.exp(np.log(np.maximum(searched[live] / plain[live], 1e-9)).mean()) <= (GAINS | SLOW)[name]


def test_a_written_checkpoint_is_nearer_to_the_weights(tmp_path):
    bases.write(tmp_path / "source", bases.plain(np.random.default_rng(0)))
    dense = moe_jax.load_moe(tmp_path / "source", layer=0, dtype=jnp.float32).experts.weights.get_value().w2.data
    error = {}
    for search in (None, "mse"):
        out = tmp_path / str(search)
        moe_jax.quantize_checkpoint(tmp_path / "source", out, scheme="w4a16_g32", scale_search=search)
        weights = moe_jax.load_moe(out, layer=0, dtype=jnp.float32).experts.weights.get_value()
        difference = np.asarray(dequantize_tensor(weights.w2)) - np.asarray(dense, np.float32)
        error[search] = (difference**2).sum((1, 2))
    assert (error["mse"] < error[None]).all()
