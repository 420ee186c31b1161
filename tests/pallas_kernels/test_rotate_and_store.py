"""rotate_and_store: the reference against NumPy float64, refusals, lowering for CUDA, the Hopper kernel on a GPU."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.common import row_kernel_sm90
from pallas_kernels.rotate_and_store import RotateConfig, RotateDesc, config_error, kernel_sm90, rotate_and_store
from tests.support.kernels import warpgroups
from tests.support.kernels.layer_cases import rotate_and_store_cases
from tests.support.refusals import refuses

SCALES = np.float32(0.0061), np.float32(0.0013)  # of keys and values in e4m3; some numbers are above 448 of them
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
EPS = 1e-5


def make(batch, tokens, heads, kv_heads, width, slots, dtype="bfloat16", *, is_packed, has_norm, biases=None):
    """Rows with padding before, behind, and none; the last has no room for its last token. What caches hold is NaN.
    Values are those with the biases, if some are given."""
    rng, kind = np.random.default_rng(0), DTYPES[dtype]
    parts = [rng.standard_normal((batch, tokens, n * width)).astype(kind) for n in (heads, kv_heads, kv_heads)]
    angles = rng.uniform(0, 6, (batch, tokens, width // 2))
    cos, sin = (f(angles).astype(np.float32) for f in (np.cos, np.sin))
    norms = tuple(rng.standard_normal(width).astype(kind) for _ in range(2 * has_norm))
    caches = tuple(np.full((batch, kv_heads, slots, width), np.nan, kind) for _ in range(2))
    first = rng.integers(0, slots - tokens, batch).astype(np.int32)
    first[-1] = slots - tokens + 1 if tokens > 1 else 0
    starts, lengths = first.copy(), first + tokens
    starts[0] += tokens // 3
    lengths[batch // 2] -= tokens // 4
    lengths = np.minimum(lengths, slots).astype(np.int32)
    projected = (np.concatenate(parts, axis=-1),) if is_packed else tuple(parts)
    if biases is not None:
        parts = [part.astype(np.float64) + bias.astype(np.float64) for part, bias in zip(parts, biases, strict=True)]
    arguments = (projected, cos, sin, caches, starts, lengths, first)

    def wide(part, weight):
        x = part.reshape(batch, tokens, -1, width).astype(np.float64)
        if weight is not None:
            x = x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * weight.astype(np.float64)
        a, b, c, s = x[..., : width // 2], x[..., width // 2 :], cos[:, :, None], sin[:, :, None]
        return np.concatenate([a * c - b * s, b * c + a * s], axis=-1)

    q, k = (wide(part, norms[i] if norms else None) for i, part in enumerate(parts[:2]))
    v = parts[2].reshape(batch, tokens, -1, width)
    expected = [np.full(caches[0].shape, np.nan) for _ in range(2)]
    for b in range(batch):
        for t in range(tokens):
            if starts[b] <= first[b] + t < lengths[b]:
                expected[0][b, :, first[b] + t], expected[1][b, :, first[b] + t] = k[b, t], v[b, t]
    return arguments, norms, (q, *expected)


def in_parts(projected):
    """The same values as three float32 partial sums, exact, of two rows more, which hold NaN."""
    rng, rows = np.random.default_rng(1), projected.shape[0] * projected.shape[1]
    split = np.full((3, rows + 2, projected.shape[2]), np.nan, np.float32)
    split[:2, :rows] = rng.integers(-8, 9, split[:2, :rows].shape)
    split[2, :rows] = projected.reshape(rows, -1).astype(np.float32) - split[:2, :rows].sum(0)
    return split


def biases_of(heads, kv_heads, width, dtype="bfloat16"):
    rng = np.random.default_rng(3)
    return tuple(rng.standard_normal(count * width).astype(DTYPES[dtype]) for count in (heads, kv_heads, kv_heads))


def check(implementation, *sizes, has_parts=False, has_bias=False, **options):
    biases = biases_of(*sizes[2:5], *sizes[6:]) if has_bias else ()
    arguments, norms, expected = make(*sizes, **options, biases=biases or None)
    if has_parts:
        arguments = (tuple(map(in_parts, arguments[0])), *arguments[1:])
    eps = EPS if norms else 0.0
    call = functools.partial(rotate_and_store, eps=eps, has_parts=has_parts, implementation=implementation)
    run = jax.jit(lambda arguments, norms, biases: call(*arguments, norms=norms, biases=biases))
    found = run(*jax.tree.map(jnp.asarray, (arguments, norms, biases)))
    step = float(ml_dtypes.finfo(arguments[3][0].dtype).eps)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.asarray(one).astype(np.float64), other, rtol=0.52 * step, atol=1e-5)
    if not has_parts and not has_bias:  # whose sums may be rounded in float32
        np.testing.assert_array_equal(np.asarray(found[2]).astype(np.float64), expected[2])


def check_codes(implementation, *sizes, **options):
    """The codes of what is written to a cache of numbers; a code beside where that was rounded to another number."""
    (projected, cos, sin, caches, *places), norms, expected = make(*sizes, **options)
    caches = [cache.astype(ml_dtypes.float8_e4m3fn) for cache in caches]
    call = jax.jit(functools.partial(rotate_and_store, eps=EPS if norms else 0.0, implementation=implementation))
    arrays = jax.tree.map(jnp.asarray, (projected, cos, sin, tuple(caches), *places))
    q, *codes = call(*arrays, norms=jax.tree.map(jnp.asarray, norms), scales=tuple(map(jnp.float32, SCALES)))
    step = float(ml_dtypes.finfo(q.dtype).eps)
    np.testing.assert_allclose(np.asarray(q).astype(np.float64), expected[0], rtol=0.52 * step, atol=1e-5)
    for found, numbers, scale, is_exact in zip(codes, expected[1:], SCALES, (False, True), strict=True):
        assert found.dtype == jnp.float8_e4m3fn
        found, wanted = np.asarray(found).astype(np.float64), np.clip(numbers / np.float64(scale), -448, 448)
        # Half a step of e4m3, of 2**-9 below 2**-6, and what the rounding to the dtype of projections moves.
        atol, rtol = 2.0**-10, 2.0**-4 + (step if not is_exact else 1e-6)
        np.testing.assert_allclose(found, wanted, rtol=rtol, atol=atol + 1e-5 / scale)
        assert (np.abs(found) == 448).any()


@pytest.mark.parametrize("is_packed", [True, False])
def test_codes(is_packed):
    check_codes("reference", 3, 8, 4, 2, 8, 24, is_packed=is_packed, has_norm=True)


@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize("has_norm", [True, False])
def test_reference(is_packed, has_norm):
    check("reference", 3, 8, 4, 2, 8, 24, is_packed=is_packed, has_norm=has_norm, has_parts=True)
    check("reference", 3, 8, 4, 2, 8, 24, is_packed=is_packed, has_norm=has_norm)
    check("reference", 3, 1, 4, 2, 8, 24, is_packed=is_packed, has_norm=has_norm)
    check("reference", 3, 8, 4, 2, 8, 24, is_packed=is_packed, has_norm=has_norm, has_parts=True, has_bias=True)


def check_pages(implementation, *sizes, is_e4m3, dtype="bfloat16"):
    """The slots that rows of their own get, to the bit; all else, pages of nobody too, keeps what it holds. An entry
    that names no page drops its tokens."""
    (projected, cos, sin, caches, *places), norms, _ = make(*sizes, dtype, is_packed=True, has_norm=True)
    if is_e4m3:
        caches = [cache.astype(ml_dtypes.float8_e4m3fn) for cache in caches]
    batch, heads, slots, width = caches[0].shape
    count = slots // 64
    table = np.random.default_rng(1).permutation(batch * count + 3)[: batch * count].reshape(batch, count)
    pools = tuple(np.full((batch * count + 3, heads, 64, width), np.nan, caches[0].dtype) for _ in range(2))
    call = jax.jit(functools.partial(rotate_and_store, eps=EPS, implementation=implementation))
    options = dict(norms=norms, scales=SCALES if is_e4m3 else None)
    expected = call(*jax.tree.map(jnp.asarray, (projected, cos, sin, tuple(caches), *places)), **options)
    for wrong in (None, -1, len(pools[0])):
        named, kept = table.astype(np.int32), np.ones(table.shape, bool)
        if wrong is not None:
            named[0], kept[0] = wrong, False
        arguments = jax.tree.map(jnp.asarray, (projected, cos, sin, pools, *places))
        found = call(*arguments, **options, page_table=jnp.asarray(named))
        np.testing.assert_array_equal(np.asarray(found[0]), np.asarray(expected[0]))
        for pool, rows in zip(found[1:], expected[1:], strict=True):
            pages = np.asarray(rows).reshape(batch, heads, count, 64, width).swapaxes(1, 2)
            held = np.full(pool.shape, np.nan, pages.dtype)
            held[table[kept]] = pages[kept]
            np.testing.assert_array_equal(np.asarray(pool).astype(np.float32), held.astype(np.float32))


@pytest.mark.parametrize("is_e4m3", [False, True])
def test_pages(is_e4m3):
    check_pages("reference", 3, 8, 4, 2, 8, 192, is_e4m3=is_e4m3)


def test_body_on_pages(monkeypatch):
    """The kernel's body itself, on arrays: tokens that go on in a second page, before a row's start and behind its end,
    in a row's first and last slot, and with entries that name no page, the first number that is none too."""
    rng, width, pages = np.random.default_rng(0), 64, 5
    places = [np.array(at, np.int32) for at in ([1, 64, 0, 0], [65, 128, 64, 128], [62, 126, 0, 126])]
    starts, lengths, first_slots = places
    starts[2] = 1
    table = np.array([[3, 0], [-1, 4], [1, -1], [2, pages]], np.int32)
    form: Any = dict(is_packed=True, has_norm=False, eps=0.0, num_pages=pages, has_bias=True)
    desc = RotateDesc(4, 3, 4, 4, width, 128, "float32", **form)
    projected = rng.standard_normal((1, 12, 12, width)).astype(np.float32)
    biases = [rng.standard_normal((4, width)).astype(np.float32) for _ in range(3)]
    values = projected[0] + np.concatenate(biases)
    cos, sin = (rng.standard_normal((12, width // 2)).astype(np.float32) for _ in range(2))
    caches = [np.full((pages, 4, 64, width), np.nan, np.float32) for _ in range(2)]
    expected = [cache.copy() for cache in caches]
    first, second = np.split(values, 2, axis=-1)
    rotated = np.concatenate(
        [first * cos[:, None] - second * sin[:, None], second * cos[:, None] + first * sin[:, None]], -1
    )
    for token in range(12):
        row, slot = token // 3, first_slots[token // 3] + token % 3
        page = table[row, min(slot // 64, 1)]
        if starts[row] <= slot < lengths[row] and 0 <= page < pages:
            expected[0][page, :, slot % 64], expected[1][page, :, slot % 64] = (
                rotated[token, 4:8],
                values[token, 8:],
            )
    assert sum(np.isfinite(expected[0][:, 0, :, 0]).ravel()) == 7
    for module in (kernel_sm90, row_kernel_sm90):
        for name in ("lax", "pl", "mosaic"):
            monkeypatch.setattr(module, name, warpgroups.stand_ins()[name])
    queries = np.full((12, 4, width), np.nan, np.float32)
    refs = [warpgroups.Memory(a) for a in (*caches, projected, *biases, cos, sin, *places, table, queries)]
    warpgroups.run(functools.partial(kernel_sm90._kernel, desc, 3, *refs), 3, 1, dict)
    for found, wanted in zip((queries, *caches), (rotated[:, :4], *expected), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_wrong_calls():
    arguments, norms, _ = make(2, 3, 4, 2, 8, 16, is_packed=False, has_norm=True)
    biases = (jnp.zeros(32), jnp.zeros(16), jnp.zeros(32))
    words = r"biases are float32\(32,\), .*; expected float dtypes and shapes \[\(32,\), \(16,\), \(16,\)\], or none"
    refuses(ValueError, words, rotate_and_store, *jax.tree.map(jnp.asarray, arguments), biases=biases)
    (projected, *rest), norms = jax.tree.map(jnp.asarray, (arguments, norms))
    refuses(ValueError, "two .B, M, L, D.", rotate_and_store, projected[:2], *rest)
    refuses(ValueError, "two .D,. or none", rotate_and_store, projected, *rest, norms=norms[:1])
    refuses(ValueError, "expected .B, S, N", rotate_and_store, (projected[1], projected[0], projected[2]), *rest)
    words = r"page_table is int32\(2, 1\), caches \(2, 2, 16, 8\); expected int32 .B, T. and pages .P, M, 64, D."
    refuses(ValueError, words, rotate_and_store, projected, *rest, page_table=jnp.zeros((2, 1), jnp.int32))
    mixed = (projected[0].astype(jnp.float32), *projected[1:])
    refuses(TypeError, "bfloat16, float32", rotate_and_store, mixed, *rest)
    refuses(ValueError, "R >= B . S with S=3", rotate_and_store, tuple(a[:1] for a in projected), *rest, has_parts=True)
    refuses(NotImplementedError, "needs a Hopper GPU", rotate_and_store, projected, *rest, implementation="hopper")
    short = [*rest[:-1], rest[-1][:1]]
    refuses(ValueError, r"first_slots is int32\(1,\), expected int32\(2,\)", rotate_and_store, projected, *short)
    scales = (jnp.float32(1), jnp.float32(1))
    refuses(TypeError, "bfloat16 and bfloat16 with scales", rotate_and_store, projected, *rest, scales=scales)
    rest[2] = tuple(cache.astype(jnp.float8_e4m3fn) for cache in rest[2])
    refuses(TypeError, "float8_e4m3fn with no scales", rotate_and_store, projected, *rest)
    refuses(ValueError, "two float32 of shape", rotate_and_store, projected, *rest, scales=(scales[0], jnp.ones(1)))


def test_config_error():
    def reason(num_ctas=1, **changes):
        sizes = dict(batch=2, num_tokens=1, num_heads=32, num_kv_heads=4, width=128, num_slots=64, dtype="bfloat16")
        return config_error(
            RotateDesc(**sizes | changes, is_packed=True, has_norm=True, eps=EPS), RotateConfig(num_ctas)
        )

    assert reason() is None
    assert "multiples of 4" in reason(num_kv_heads=2)
    assert "width=96" in reason(width=96)
    assert "float32" in reason(dtype="float32")
    assert "31 bits" in reason(num_slots=1 << 22)
    assert "at least 1" in reason(0)
    assert "65536 pages of 64 slots is counted in 31 bits" in reason(num_pages=1 << 16)


@pytest.mark.parametrize("case", rotate_and_store_cases(), ids=lambda case: case.name)
@pytest.mark.sample(5)
def test_lowers_for_cuda(case):
    """One launch, which writes into the caches it is given."""
    text = case.lowered()
    assert text.count("mosaic_gpu_v2") == 1
    assert text.count("#stablehlo.output_operand_alias<") == 3  # queries, too, are written to memory that is given


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_packed", [True, False])
@pytest.mark.parametrize(
    "sizes", [(1, 1, 32, 4, 128, 64), (64, 1, 32, 4, 128, 256), (3, 40, 64, 8, 64, 128), (2, 700, 8, 8, 256, 1024)]
)
def test_gpu(sizes, is_packed, dtype):
    for has_norm in (True, False):
        check("hopper", *sizes, dtype, is_packed=is_packed, has_norm=has_norm)
        check("hopper", *sizes, dtype, is_packed=is_packed, has_norm=has_norm, has_parts=True)
        check("hopper", *sizes, dtype, is_packed=is_packed, has_norm=has_norm, has_parts=True, has_bias=True)
        check_codes("hopper", *sizes, dtype, is_packed=is_packed, has_norm=has_norm)


@pytest.mark.gpu
@pytest.mark.parametrize("is_e4m3", [False, True])
@pytest.mark.parametrize("sizes", [(64, 1, 32, 4, 128, 256), (3, 40, 64, 8, 64, 128), (2, 700, 8, 8, 256, 1024)])
def test_pages_gpu(sizes, is_e4m3):
    check_pages("hopper", *sizes, is_e4m3=is_e4m3)
