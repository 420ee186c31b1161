"""Calls padded to buckets: one program a bucket over a stream of T, the values of unpadded calls; the compile cache."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import moe_jax
from moe_jax import in_token_buckets, token_bucket
from tests.support.refusals import refuses

STREAM = (1, 3, 2, 7, 8, 5, 17, 1, 16, 12, 31, 9, 0)


def test_token_bucket():
    assert [token_bucket(t) for t in (0, 1, 3, 4, 1000, 16384, 16385, 40000)] == [1, 1, 4, 4, 1024, 16384, 32768, 49152]
    assert token_bucket(5, (16, 64)) == 16
    for arguments in ((-1,), (3, ()), (3, (0, 4))):
        refuses(ValueError, "sizes of at least 1", token_bucket, *arguments)


@pytest.mark.parametrize("as_array", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
@pytest.mark.sample(2)
def test_a_stream_compiles_once_a_bucket(as_array):
    layer = moe_jax.FusedMoE(6, 32, 16, top_k=2, scheme="fp8_channel", rngs=nnx.Rngs(0), dtype=jnp.float32)
    graphdef, state = nnx.split(layer)
    run = in_token_buckets(lambda state, x, z, token_mask: nnx.merge(graphdef, state)(x, z, token_mask=token_mask))
    rng = np.random.default_rng(0)
    x, z = np.float32(rng.standard_normal((31, 32))), np.float32(rng.standard_normal((31, 6)))
    expected = np.asarray(jax.jit(lambda layer, x, z: layer(x, z))(layer, x, z))
    for tokens in STREAM:
        y = run(state, as_array(x[:tokens]), as_array(z[:tokens]))
        assert y.shape == (tokens, 32)
        np.testing.assert_allclose(y, expected[:tokens], rtol=1e-5, atol=1e-5)
    assert run.num_programs() == len({token_bucket(tokens) for tokens in STREAM}) == 6


def test_wrong_calls():
    run = in_token_buckets(lambda w, x, z, token_mask: x)
    refuses(ValueError, r"router_logits \(2, 4\)", run, 0, np.zeros((3, 8)), np.zeros((2, 4)))
    with pytest.raises(ValueError, match="outside"):
        jax.jit(run)(0, jnp.zeros((3, 8)), jnp.zeros((3, 4)))


PROGRAM = """
import jax, jax.numpy as jnp, moe_jax
from flax import nnx
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name))
layer = moe_jax.FusedMoE(4, 32, 16, top_k=2, scheme="int8_w8a8", rngs=nnx.Rngs(0))
jax.jit(lambda layer, x, z: layer(x, z))(layer, jnp.ones((3, 32)), jnp.zeros((3, 4))).block_until_ready()
print(hits.count("/jax/compilation_cache/cache_hits"), hits.count("/jax/compilation_cache/cache_misses"))
"""


@pytest.mark.slow
def test_a_second_process_takes_its_programs_from_the_cache(tmp_path):
    """As docs/performance.md tells: two environment variables, and nothing is compiled twice."""
    settings = dict(
        JAX_COMPILATION_CACHE_DIR=str(tmp_path),
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
        JAX_PLATFORMS="cpu",
        XLA_FLAGS="",
    )

    def counts():
        run = subprocess.run(
            [sys.executable, "-c", PROGRAM], env={**os.environ, **settings}, capture_output=True, text=True
        )
        assert run.returncode == 0, run.stderr
        return [int(count) for count in run.stdout.split()]

    _, misses = counts()
    assert misses > 0
    hits, misses = counts()
    assert hits > 0 and misses == 0
