"""Layers whose kernels overlap at their ends, on a GPU: the same bits as layers whose kernels do not.

Two dozen layers one behind the other, as they are and in a loop whose rounds wait for one another, launched by XLA one
by one and from command buffers. XLA reuses the memory between kernels, so that a kernel which reads or writes too early
shows in the sums of a neighbour.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moe_jax
from moe_jax.benchmarking import random_weights
from moe_jax.quantization import Scheme
from pallas_kernels.align import align
from pallas_kernels.align.config import row_capacity
from pallas_kernels.common import mosaic
from pallas_kernels.grouped_gemm import GemmConfig, grouped_gemm

pytestmark = pytest.mark.gpu

LAYERS = 24
APART: dict[str, str | bool] = {"xla_gpu_enable_command_buffer": ""}
WAIT = "griddepcontrol.wait"
# Routing and alignment apart and in one launch; requantization in place, in the epilogue and none.
CELLS = (("fp8_channel", 1), ("w4a16_g128", 16), ("bf16", 64), ("fp8_block", 300), ("int8_w8a8", 300))


@functools.cache
def operands(scheme, tokens):
    config = moe_jax.MoEConfig(16, 4, 1024, 512, scheme=Scheme.parse(scheme), implementation=("hopper",))
    kx, kz = jax.random.split(jax.random.key(tokens))
    x = jax.random.normal(kx, (tokens, 1024), jnp.bfloat16)
    return config, random_weights(config), x, jax.random.normal(kz, (LAYERS, tokens, 16), jnp.float32)


def results(scheme, tokens, in_loop, options):
    """(what ten runs give, whether kernels wait for one another inside)."""
    config, *args = operands(scheme, tokens)
    layer = jax.jit(lambda w, x, z: moe_jax.fused_moe(x, z, w, config))

    def loop(w, x, z):
        # Experts are quadratic in large x, so rounds must keep it small.
        return jax.lax.fori_loop(0, LAYERS, lambda i, x: jnp.tanh(x + layer(w, x, z[i])), x)

    def chain(w, x, z):
        return jnp.stack([layer(w, x, one) for one in z])

    lowered = jax.jit(loop if in_loop else chain).lower(*args)
    run = lowered.compile(compiler_options=options)
    return [np.asarray(y.astype(jnp.float32)) for y in [run(*args) for _ in range(10)]], WAIT in lowered.as_text()


@pytest.mark.parametrize(("scheme", "tokens"), CELLS)
def test_layers_give_the_bits_of_layers_that_do_not_overlap(scheme, tokens, monkeypatch):
    found = {}
    for is_on in (True, False):
        monkeypatch.setattr(mosaic, "USES_PDL", is_on)
        jax.clear_caches()
        for in_loop in (False, True):
            for name, options in (("one by one", APART), ("buffers", {})):
                found[is_on, in_loop, name], waits = results(scheme, tokens, in_loop, options)
                assert waits == is_on
    for in_loop in (False, True):
        expected = found[False, in_loop, "one by one"][0]
        assert np.isfinite(expected).all() and np.abs(expected).max(axis=-1).min() > 0
        for (is_on, other, name), many in found.items():
            if other == in_loop:
                for y in many:
                    np.testing.assert_array_equal(y, expected, err_msg=f"on: {is_on}, in a loop: {in_loop}, {name}")


def test_a_product_right_behind_the_alignment_that_lists_its_tiles(monkeypatch):
    """Which tiles there are changes from call to call, and nothing stands between who writes it and who reads it."""
    kx, kw, kz = jax.random.split(jax.random.key(0), 3)
    ids = jax.lax.top_k(jax.random.normal(kz, (LAYERS, 40, 16)), 4)[1]
    ids = jnp.where(jnp.arange(40)[:, None] < 5 + jnp.arange(LAYERS)[:, None, None] % 35, ids, -1)
    w = jax.random.normal(kw, (16, 512, 512), jnp.bfloat16)
    config = GemmConfig(16, 128, 6, swap_ab=True)

    def run(x, w, ids):
        products = []
        for one in ids:
            tiles = align(one, 16, 16, implementation="hopper")
            product = grouped_gemm(x, w, tiles.tile_expert, tiles.num_tiles, config=config, implementation="hopper")
            products.append((product, tiles.num_tiles))
        in_use = [jnp.arange(len(x)) < count.reshape(()) * 16 for _, count in products]
        return jnp.stack([jnp.where(rows[:, None], y, 0) for rows, (y, _) in zip(in_use, products, strict=True)])

    x = jax.random.normal(kx, (row_capacity(160, 16, 16), 512), jnp.bfloat16)
    found = {}
    for is_on in (True, False):
        monkeypatch.setattr(mosaic, "USES_PDL", is_on)
        jax.clear_caches()
        compiled = jax.jit(run).lower(x, w, ids).compile(compiler_options=APART)
        found[is_on] = [np.asarray(compiled(x, w, ids).astype(jnp.float32)) for _ in range(20)]
    assert np.abs(found[False][0]).max() > 0
    for y in (*found[True], *found[False]):
        np.testing.assert_array_equal(y, found[False][0])
