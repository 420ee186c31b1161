"""Small layers of the decoder."""

import jax.numpy as jnp
import numpy as np
from flax import nnx

from moe_jax.models._layers import Linear


def test_router_logits_are_not_rounded():
    """M249: products of bfloat16 are summed, and with out_dtype kept, in float32."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((5, 64)), jnp.bfloat16)
    router, rounded = (Linear(64, 8, out_dtype=out, rngs=nnx.Rngs(0)) for out in (jnp.float32, None))
    exact = np.asarray(x, np.float64) @ np.asarray(router.weight.get_value(), np.float64).T
    assert router(x).dtype == jnp.float32 and rounded(x).dtype == jnp.bfloat16
    np.testing.assert_allclose(router(x), exact, rtol=1e-5, atol=1e-6)
    assert np.abs(np.asarray(rounded(x), np.float64) - exact).max() > 1e-3
