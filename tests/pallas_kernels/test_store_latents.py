"""store_latents: the reference against NumPy float64, refusals, lowering for CUDA, the kernel in lockstep and on a GPU.

Layout contract: a projected row is what queries are made of, the latent and the key, side by side; the cache has latent
and rotated key of a token in one slot, and of tokens outside [start, length) nothing.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.add_and_norm.config import QUANTIZATIONS
from pallas_kernels.common import pages_sm90, row_kernel_sm90
from pallas_kernels.quantize_and_permute import by_thread_sm90, quantize_and_permute
from pallas_kernels.store_latents import choose_config, config_error, describe, kernel_sm90, store_latents
from tests.support.kernels import warpgroups
from tests.support.kernels.in_lockstep import Memory, simt_of
from tests.support.kernels.layer_cases import store_latents_cases
from tests.support.refusals import refuses

EPS, SLOTS = 1e-5, 192
# Rows: from the middle on; padded on the left, its first token too; full; one whose last token does not fit.
STARTS, LENGTHS, FIRST = (0, 71, 0, 3), (66, 80, 192, 131), (64, 70, 189, 129)
# Of nine pages; the second and third row have none where their tokens go.
TABLE = np.array([[4, 1, 9], [7, -1, 2], [0, 3, 9], [5, -1, 8]], np.int32)


def make(queries, rank, rope, dtype, *, tokens=3, has_queries=True, is_paged=False, batch=4):
    """Operands by name; slots of the cache and rows past the tokens hold NaN."""
    rng = np.random.default_rng(0)

    def normal(*shape, dtype=dtype):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    angles = rng.uniform(-9, 9, (batch, tokens, rope // 2)).astype(np.float32)
    slots = (9, 1, 64, rank + rope) if is_paged else (batch, 1, SLOTS, rank + rope)
    places = (np.resize(np.array(each, np.int32), batch) for each in (STARTS, LENGTHS, FIRST))
    return dict(
        # The second row is so small that eps counts.
        projected=normal(batch * tokens + 4, queries + rank + rope).at[batch * tokens :].set(jnp.nan).at[1].mul(2**-8),
        cos=jnp.cos(angles),
        sin=jnp.sin(angles),
        cache=jnp.full(slots, jnp.nan, dtype),
        **dict(zip(("starts", "lengths", "first_slots"), map(jnp.asarray, places), strict=True)),
        kv_norm=normal(rank),
        q_norm=normal(queries) if has_queries else None,
        page_table=jnp.asarray(TABLE) if is_paged else None,
    )


def called(operands, **options):
    call = functools.partial(store_latents, eps=EPS, **options)
    return jax.jit(lambda given: call(**given))(operands)


def exact(operands, is_interleaved):
    """(norms of the first columns, the cache) in float64."""
    batch, tokens, half = operands["cos"].shape
    rank, columns = operands["kv_norm"].size, operands["projected"].shape[1]
    queries = columns - rank - 2 * half
    x = np.asarray(operands["projected"], np.float64)[: batch * tokens].reshape(batch, tokens, columns)

    def normed(x, weight):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * np.asarray(weight, np.float64)

    of_queries = None if operands["q_norm"] is None else normed(x[..., :queries], operands["q_norm"])
    key = x[..., queries + rank :]
    a, b = (key[..., ::2], key[..., 1::2]) if is_interleaved else (key[..., :half], key[..., half:])
    c, s = (np.asarray(operands[name], np.float64) for name in ("cos", "sin"))
    new = np.concatenate(
        [normed(x[..., queries : queries + rank], operands["kv_norm"]), a * c - b * s, b * c + a * s], -1
    )
    cache = np.array(operands["cache"], np.float64)
    for row in range(batch):
        for token in range(tokens):
            slot = int(operands["first_slots"][row]) + token
            if not operands["starts"][row] <= slot < operands["lengths"][row]:
                continue
            if operands["page_table"] is None:
                cache[row, 0, slot] = new[row, token]
            elif 0 <= (page := int(operands["page_table"][row, slot // 64])) < len(cache):
                cache[page, 0, slot % 64] = new[row, token]
    return None if of_queries is None else of_queries.reshape(batch * tokens, -1), cache


def check(operands, is_interleaved, quantization, implementation):
    found, cache = called(
        operands,
        is_interleaved=is_interleaved,
        quantization=quantization,
        scale_rows=None if quantization == "none" else 16,
        implementation=implementation,
    )
    of_queries, expected = exact(operands, is_interleaved)
    dtype = operands["cache"].dtype
    step = float(jnp.finfo(dtype).eps)
    assert cache.dtype == dtype
    np.testing.assert_allclose(np.asarray(cache, np.float64), expected, rtol=0.52 * step, atol=1e-5)
    if of_queries is None:
        assert found is None
        return found, cache
    if quantization == "none":
        assert found.dtype == dtype
        np.testing.assert_allclose(np.asarray(found, np.float64), of_queries, rtol=0.52 * step, atol=1e-6)
        return found, cache
    check_codes(*found, of_queries, dtype, quantization)
    return found, cache


def check_codes(codes, scales, of_queries, dtype, quantization):
    """Of rows rounded to dtype, and quantized as rows are; roundings of float32 and float64 differ in few of them."""
    count = len(of_queries)
    options: Any = dict(quantization=quantization, scale_rows=16, implementation="reference")
    wanted, factors = quantize_and_permute(jnp.asarray(of_queries, dtype), **options)
    own = (slice(count),) if factors.ndim == 1 else (slice(None), slice(count))
    assert codes.dtype == wanted.dtype and scales.shape == factors.shape
    np.testing.assert_allclose(np.asarray(scales)[own], np.asarray(factors)[own], rtol=2**-8)
    codes, wanted = (np.asarray(a, np.float32) for a in (codes, wanted))
    differ = codes != wanted
    assert differ.mean() < 0.01
    np.testing.assert_allclose(codes[differ], wanted[differ], rtol=0.13, atol=1)


@pytest.mark.parametrize("is_paged", [False, True])
@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_reference(dtype, is_interleaved, is_paged):
    for has_queries in (True, False):
        operands = make(24, 16, 8, dtype, has_queries=has_queries, is_paged=is_paged)
        check(operands, is_interleaved, "none", "reference")


@pytest.mark.parametrize("quantization", QUANTIZATIONS[1:])
def test_quantized_reference(quantization):
    check(make(512, 128, 64, "bfloat16"), True, quantization, "reference")


def test_wrong_calls():
    operands = make(24, 16, 8, "bfloat16")
    call = functools.partial(store_latents, eps=EPS, is_interleaved=True)

    def wrong(kind, message, **other):
        refuses(kind, message, call, **operands | other)

    shapes = r"expected \(B \* S, Q \+ R \+ D\), \(B, S, D/2\), \(B, 1, L, R \+ D\), \(Q,\) and \(R,\)"
    wrong(ValueError, shapes, projected=operands["projected"][:11])
    wrong(ValueError, shapes, projected=operands["projected"][0])
    wrong(ValueError, shapes, projected=operands["projected"][:, :20])
    wrong(ValueError, shapes, cos=operands["cos"][..., :3])
    wrong(ValueError, shapes, cache=operands["cache"][:3])
    wrong(ValueError, shapes, cache=jnp.tile(operands["cache"], (1, 2, 1, 1)))
    wrong(ValueError, shapes, q_norm=operands["q_norm"][:20])
    wrong(ValueError, shapes, kv_norm=operands["kv_norm"][None])
    wrong(TypeError, "operands are bfloat16, float16; expected one floating", kv_norm=jnp.zeros(16, jnp.float16))
    wrong(ValueError, r"expected int32 \(B, T\) and pages \(P, 1, 64", page_table=jnp.asarray(TABLE))
    wrong(ValueError, "expected float32 of one shape", sin=operands["sin"][:, :1])
    wrong(ValueError, "expected float32 of one shape", cos=operands["cos"].astype(jnp.bfloat16))
    for name in ("starts", "lengths", "first_slots"):
        wrong(ValueError, rf"{name} is int32\(1,\), expected int32\(4,\)", **{name: operands[name][:1]})
        wrong(ValueError, f"{name} is float32", **{name: operands[name].astype(jnp.float32)})
    wrong(ValueError, "quantization 'mxfp8', expected one of none, e4m3_row", quantization="mxfp8")
    wrong(ValueError, "scale_rows=11, expected 12 tokens or more", scale_rows=11)
    paged = make(24, 16, 8, "bfloat16", is_paged=True)
    refuses(ValueError, "expected int32", call, **paged | dict(page_table=jnp.asarray(TABLE, jnp.int8)))


def test_config_error():
    operands = make(1536, 512, 64, "bfloat16")
    kept = {name: operands[name] for name in ("projected", "cos", "cache", "kv_norm", "q_norm", "page_table")}
    desc = describe(**kept, eps=EPS, is_interleaved=True, quantization="e4m3_group", scale_rows=16)
    config = choose_config(desc, 132)
    assert config.num_ctas == 24 and config_error(desc, config) is None
    assert choose_config(dataclasses.replace(desc, num_tokens=2000), 132).num_ctas == 16 * 132

    def reason(**other):
        return config_error(dataclasses.replace(desc, **other), config)

    assert "float32" in reason(dtype="float32")
    assert "Q=640 with e4m3_group: a multiple of 512" in reason(queries=640)
    assert reason(queries=640, quantization="e4m3_row") is None
    assert "Q=8192" in reason(queries=8192)
    assert reason(queries=8192, has_queries=False) is None
    assert "R=5000" in reason(rank=5000) and "D=288" in reason(rope=288)
    assert "31 bits" in reason(num_slots=1 << 20) and "pages" in reason(num_pages=1 << 16)
    assert "0 tokens" in reason(num_tokens=0)
    assert "num_ctas=0" in config_error(desc, dataclasses.replace(config, num_ctas=0))


@pytest.mark.parametrize("case", store_latents_cases(), ids=lambda case: case.name)
@pytest.mark.sample(3)
def test_lowers_for_cuda(case):
    assert case.launches() == 1


@pytest.mark.parametrize("quantization", ["none", "int8_row", "e4m3_group_ue8m0"])
@pytest.mark.parametrize("is_paged", [False, True])
def test_in_lockstep(monkeypatch, quantization, is_paged):
    """The kernel's indices and masks: every row and slot, what is dropped, columns that 128 threads do not divide."""
    operands = make(512, 192, 40, "bfloat16", is_paged=is_paged)
    kept = {name: operands[name] for name in ("projected", "cos", "cache", "kv_norm", "q_norm", "page_table")}
    kind: Any = dict(eps=EPS, is_interleaved=not is_paged, quantization=quantization, scale_rows=16)
    desc = describe(**kept, **kind)
    assert config_error(desc, choose_config(desc, 132)) is None

    def memory(name):
        values = np.asarray(operands[name], np.float32).reshape(-1)
        return Memory(values.size, values.view(np.int32))

    cache, rows = memory("cache"), Memory(12 * 512)
    outputs = [rows] if quantization == "none" else [rows, Memory(int(np.prod(desc.rows.scale_shape)))]
    refs = [cache, *map(memory, ("projected", "q_norm", "kv_norm", "cos", "sin"))]
    refs += [np.asarray(operands[name]) for name in ("starts", "lengths", "first_slots", "page_table")[: 3 + is_paged]]
    simt = simt_of(128)
    simt.float_bits = lambda value, dtype: value.astype(dtype).astype(jnp.float32).view(jnp.int32)
    stand_ins = warpgroups.stand_ins() | dict(simt=simt)
    for module, names in (
        (kernel_sm90, ("lax", "pl", "mosaic", "simt")),
        (pages_sm90, ("lax",)),
        (row_kernel_sm90, ("lax",)),
        (by_thread_sm90, ("simt",)),
    ):
        for name in names:
            monkeypatch.setattr(module, name, stand_ins[name])
    body = functools.partial(kernel_sm90._kernel, desc, len(outputs), 5, *refs, *outputs)
    warpgroups.run(body, 5, 1, dict)

    of_queries, expected = exact(operands, desc.is_interleaved)
    found = cache.values.view(np.float32).reshape(expected.shape)
    np.testing.assert_allclose(found, expected, rtol=2**-8, atol=1e-6)
    assert rows.is_written.all()
    if quantization == "none":
        np.testing.assert_allclose(rows.values.view(np.float32), of_queries.reshape(-1), rtol=2**-8, atol=1e-6)
        return
    codes = rows.values.astype(np.uint8).view(np.dtype(desc.rows.out_dtype)).reshape(12, 512)
    scales = outputs[1].values.view(np.float32).reshape(desc.rows.scale_shape)
    check_codes(jnp.asarray(codes), scales, of_queries, jnp.bfloat16, quantization)


@pytest.mark.gpu
@pytest.mark.parametrize("is_paged", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_gpu(quantization, dtype, is_paged):
    """Right, the same bits again, and those that a row has alone."""
    for is_interleaved, has_queries, rank in ((True, True, 512), (False, False, 192)):
        for tokens, batch in ((1, 4), (3, 4), (3, 400 if not is_paged else 4)):
            sizes: Any = dict(tokens=tokens, batch=batch, has_queries=has_queries, is_paged=is_paged)
            operands = make(1536, rank, 64, dtype, **sizes)
            found = check(operands, is_interleaved, quantization, "hopper") if batch == 4 else None
            options: Any = dict(is_interleaved=is_interleaved, quantization=quantization)
            again = called(operands, implementation="hopper", **options)
            judged = called(operands, implementation="reference", **options)
            for at, (one, other) in enumerate(zip(*map(jax.tree.leaves, (again, judged)), strict=True)):
                is_code = quantization != "none" and has_queries and at == 0
                one, other = (np.asarray(a, np.float64) for a in (one, other))
                np.testing.assert_allclose(one, other, rtol=0.13, atol=1 if is_code else 0.02)
            if found is not None:
                caches = (np.asarray(cache, np.float32) for cache in (again[1], found[1]))
                np.testing.assert_array_equal(*caches)
