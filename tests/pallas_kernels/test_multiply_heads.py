"""multiply_heads: the reference against NumPy float64, refusals, lowering for CUDA, and the kernel on a GPU."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.common.sm90 import SMEM_BYTES
from pallas_kernels.multiply_heads import (
    HeadsConfig,
    HeadsDesc,
    api,
    choose_config,
    config_error,
    describe,
    kernel_sm90,
    multiply_heads,
)
from pallas_kernels.multiply_heads.config import shared_bytes
from tests.support.kernels import warpgroups
from tests.support.kernels.case import launches
from tests.support.kernels.layer_cases import multiply_heads_cases
from tests.support.refusals import refuses

DTYPES = ["bfloat16", "float16"]
UP_K = HeadsDesc(16, 128, 0, 128, 256, 512, "bfloat16", transposes_w=False, x_columns=192)  # DeepSeek-V3's
UP_V = HeadsDesc(16, 128, 128, 128, 256, 512, "bfloat16", transposes_w=True, x_columns=512)


def make(tokens, heads, rows, of, columns, dtype, transposes_w, more=0):
    """(x, w, the product in float64); what is not multiplied is NaN. of: rows of a matrix; more: columns of x."""
    rng = np.random.default_rng(0)
    depth = columns if transposes_w else rows[1] - rows[0]
    x, w = rng.standard_normal((tokens, heads, depth + more)), rng.standard_normal((heads, of, columns)) / depth**0.5
    x[..., depth:], w[:, : rows[0]], w[:, rows[1] :] = np.nan, np.nan, np.nan
    x, w = jnp.asarray(x, dtype), jnp.asarray(w, dtype)
    wide, part = np.asarray(x, np.float64)[..., :depth], np.asarray(w, np.float64)[:, slice(*rows)]
    return x, w, np.einsum("tnc,nrc->tnr" if transposes_w else "tnr,nrc->tnc", wide, part)


def check(tokens, heads, rows, of, columns, dtype, transposes_w, implementation, **options):
    x, w, expected = make(tokens, heads, rows, of, columns, dtype, transposes_w, more=64)
    call = functools.partial(multiply_heads, rows=rows, transposes_w=transposes_w, implementation=implementation)
    y = jax.jit(functools.partial(call, **options))(x, w)
    assert y.dtype == x.dtype and y.shape == expected.shape
    step = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.asarray(y, np.float64), expected, rtol=0.6 * step, atol=1e-5)
    return y


@pytest.mark.parametrize("transposes_w", [False, True])
@pytest.mark.parametrize("dtype", [*DTYPES, "float32"])
def test_reference(dtype, transposes_w):
    for tokens, rows in ((1, (0, 24)), (5, (8, 40))):
        check(tokens, 3, rows, 40, 16, dtype, transposes_w, "reference")


def test_no_tokens():
    y = multiply_heads(jnp.zeros((0, 3, 24)), jnp.zeros((3, 40, 16)), rows=(8, 32))
    assert y.shape == (0, 3, 16)


def test_wrong_calls():
    x, w, _ = make(2, 3, (8, 32), 40, 16, "bfloat16", False)
    call = functools.partial(multiply_heads, rows=(8, 32))
    for rows in ((-1, 8), (8, 8), (8, 41)):
        refuses(ValueError, r"w \(3, 40, 16\), rows .*; expected \(N, R, C\)", call, x, w, rows=rows)
    refuses(ValueError, r"expected \(N, R, C\)", call, x, w[0])
    refuses(ValueError, r"expected x \(T, 3, 24 or more\)", call, x[:, :2], w)
    refuses(ValueError, r"expected x \(T, 3, 24 or more\)", call, x[..., :23], w)
    refuses(ValueError, r"expected x \(T, 3, 16 or more\)", call, x[..., :15], w, transposes_w=True)
    refuses(TypeError, "x is float16 and w is bfloat16", call, x.astype(jnp.float16), w)
    refuses(TypeError, "x is int8", call, x.astype(jnp.int8), w.astype(jnp.int8))


def test_config_error():
    for desc in (UP_K, UP_V):
        config = choose_config(desc)
        assert config_error(desc, config) is None
        assert config.num_stages == desc.depth // 64, "a load waits"
        more = HeadsConfig(config.num_stages + 4)
        assert shared_bytes(desc, more) > SMEM_BYTES and "shared memory" in config_error(desc, more)
        assert "0 tokens of 128 heads" in config_error(dataclasses.replace(desc, num_tokens=0), config)
        assert "16 tokens of 0 heads" in config_error(dataclasses.replace(desc, num_heads=0), config)
        for sizes in (dict(x_columns=160), dict(all_rows=258), dict(first_row=100)):
            assert "multiples of 64, 8 and 8" in config_error(dataclasses.replace(desc, **sizes), config)
        assert "float32" in config_error(dataclasses.replace(desc, dtype="float32"), config)
        assert "at least one stage" in config_error(desc, HeadsConfig(0))
    assert "K=96" in config_error(dataclasses.replace(UP_K, num_rows=96), HeadsConfig(2))
    assert "192 outputs" in config_error(dataclasses.replace(UP_K, columns=192), HeadsConfig(2))
    assert "640 outputs" in config_error(dataclasses.replace(UP_K, columns=640), HeadsConfig(1))
    assert "320 rows" in config_error(dataclasses.replace(UP_K, num_rows=320), HeadsConfig(1))
    assert choose_config(dataclasses.replace(UP_V, num_rows=256)).num_stages == 4


def test_describe():
    x, w, _ = make(16, 128, (128, 256), 256, 512, "bfloat16", True)
    assert describe(x, w, rows=(128, 256), transposes_w=True) == UP_V


@pytest.mark.parametrize("case", multiply_heads_cases(), ids=lambda case: case.name)
@pytest.mark.sample(4)
def test_lowers_for_cuda(case):
    assert case.launches() == 1


@pytest.mark.parametrize("tokens", [7, 12, 65])
def test_any_number_of_tokens_lowers(monkeypatch, tokens):
    monkeypatch.setattr(api, "hopper_sms", lambda: 132)
    x, w, _ = make(tokens, 4, (0, 128), 128, 128, "bfloat16", False)
    assert launches(functools.partial(multiply_heads, rows=(0, 128), implementation="hopper"), x, w) == 1


def test_other_sizes_are_xlas(monkeypatch):
    """Parts of rows or matrices that no TMA copy takes."""
    monkeypatch.setattr(api, "hopper_sms", lambda: 132)
    for of, rows, more in ((128, (0, 128), 32), (132, (0, 128), 64), (264, (100, 228), 64)):
        x, w, _ = make(16, 4, rows, of, 256, "bfloat16", False, more=more)
        assert launches(functools.partial(multiply_heads, rows=rows), x, w) == 0
        refuses(
            NotImplementedError, "multiples of 64, 8 and 8", multiply_heads, x, w, rows=rows, implementation="hopper"
        )


@pytest.mark.parametrize("transposes_w", [False, True])
def test_in_threads(monkeypatch, transposes_w):
    """The kernel's body by a thread for each warpgroup: two tiles of tokens, more steps than stages, a part of each."""
    for name, stand_in in warpgroups.stand_ins().items():
        monkeypatch.setattr(kernel_sm90, name, stand_in, raising=False)
    rows, columns = ((64, 192), 256) if transposes_w else ((64, 256), 128)
    x, w, expected = make(70, 2, rows, 264, columns, "float32", transposes_w, more=64)
    desc, config = describe(x, w, rows=rows, transposes_w=transposes_w), HeadsConfig(2)
    weights = (desc.num_rows, 64) if transposes_w else (64, desc.columns)
    y = np.full(expected.shape, np.nan, np.float32)
    for head, tile in itertools.product(range(2), range(2)):

        def scratch():
            shapes = dict(x=(2, 64, 64), w=(2, *weights), out=(2, 64, desc.width // 2))
            memory = {name: warpgroups.Memory(np.full(shape, np.nan, np.float32)) for name, shape in shapes.items()}
            return memory | {name: warpgroups.Barriers(2, num_arrivals=2) for name in ("full", "empty")}

        kernel_sm90.lax.axis_index = lambda name, at=dict(head=head, tile=tile): jnp.int32(
            warpgroups._here.warpgroup if name == "warpgroup" else at[name]
        )
        refs = [warpgroups.Memory(np.array(array)) for array in (x, w)] + [warpgroups.Memory(y)]
        warpgroups.run(functools.partial(kernel_sm90._kernel, desc, config, *refs), 1, 3, scratch)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 7, 12, 16, 64, 65, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gpu(dtype, tokens):
    """DeepSeek-V3's sizes, and others; again the same bits; a token's bits are those of fewer tokens."""
    for rows, of, columns, transposes_w in (
        ((0, 128), 256, 512, False),
        ((128, 256), 256, 512, True),
        ((192, 448), 448, 512, True),
        ((64, 256), 256, 128, False),
    ):
        call = tokens, 20, rows, of, columns, dtype, transposes_w, "hopper"
        y = check(*call)
        np.testing.assert_array_equal(check(*call), y)
        np.testing.assert_array_equal(check(*call, config=HeadsConfig(1)), y)
        x, w, _ = make(*call[:-1], more=64)
        alone = multiply_heads(x[-1:], w, rows=rows, transposes_w=transposes_w, implementation="hopper")
        np.testing.assert_array_equal(alone[0], y[-1])
