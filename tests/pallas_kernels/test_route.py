"""route and route_and_align: the reference and the Hopper kernels against NumPy in float64, refusals, lowering.

Contract: experts best first, of equals the lower one; weights are the unbiased scores of the chosen. A row whose
softmax does not exist scores 0 everywhere.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.align.api import describe
from pallas_kernels.align.kernel_sm90 import align_outputs
from pallas_kernels.quantize_and_permute import quantize_and_permute
from pallas_kernels.route import RouteConfig, RouteDesc, config_error, kernel_sm90, route, route_and_align
from tests.support.kernels.in_lockstep import Memory, simt_of
from tests.support.kernels.router_cases import ROUTERS, quantizing_route_cases, route_cases
from tests.support.kernels.tile_checks import check_tiles, check_unpermuted_tiles
from tests.support.refusals import refuses

# Weights: exponentials of 2 ulp on the GPU, XLA's on the CPU, sums of up to 512 terms.
RTOL, ATOL = 2e-5, 1e-7


def expected(z, top_k, scoring="softmax", renormalize=True, scale=1.0, bias=None, num_groups=0, groups_kept=0):
    z = z.astype(np.float64)
    if scoring == "softmax":
        with np.errstate(invalid="ignore", over="ignore"):
            powers = np.exp(z - z.max(-1, keepdims=True))
            score = powers / powers.sum(-1, keepdims=True)
        score[~np.isfinite(score).all(-1)] = 0.0
    else:
        score = np.nan_to_num(1 / (1 + np.exp(-z)), nan=0.0)
    choice = score if bias is None else score + bias
    if num_groups:
        grouped = choice.reshape(len(z), num_groups, -1)
        worth = np.sort(grouped, -1)[..., -2:].sum(-1) if bias is not None else grouped.max(-1)
        kept = np.argsort(-worth, -1, kind="stable")[:, :groups_kept]
        is_kept = np.zeros(worth.shape, bool)
        np.put_along_axis(is_kept, kept, True, -1)
        choice = np.where(is_kept[..., None], grouped, -np.inf).reshape(z.shape)
    ids = np.argsort(-choice, -1, kind="stable")[:, :top_k]
    weights = np.take_along_axis(score, ids, -1)
    if renormalize:
        total = weights.sum(-1, keepdims=True)
        weights = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
    return weights * scale, ids


def make(name, tokens, seed=0):
    """Arguments of ``route`` for one of ROUTERS: logits with ties, and rows that have no softmax."""
    options = dict(ROUTERS[name])
    rng = np.random.default_rng(seed)
    experts, dtype = options.pop("num_experts"), options.pop("dtype", "float32")
    z = rng.standard_normal((tokens, experts)) * 2
    z[::5] = np.round(z[::5])  # ties
    z = np.array(jnp.asarray(z, dtype), np.float32)
    if tokens > 4:
        z[1], z[2, experts // 2], z[3, 0] = -np.inf, np.nan, np.inf
        z[4, :-1] = -np.inf
    has_bias, has_mask = options.pop("has_bias", False), options.pop("has_mask", False)
    bias = np.float32(rng.standard_normal(experts)) if has_bias else None
    mask = rng.random(tokens) < 0.7 if has_mask else None
    return jnp.asarray(z, dtype), options.pop("top_k"), bias, mask, options


def judge(z, top_k, bias, mask, options, weights, ids):
    z = np.asarray(z, np.float32)
    want_weights, want_ids = expected(z, top_k, bias=bias, **options)
    weights, ids = np.asarray(weights), np.asarray(ids)
    assert weights.dtype == np.float32 and ids.dtype == np.int32
    if options.get("scoring", "softmax") == "sigmoid":
        # sigmoid(inf) is 1 and sigmoid(-inf) 0: all rows are ordinary but for the NaN
        odd = np.zeros(len(z), bool)
    else:
        odd = ~np.isfinite(z.max(-1))
        np.testing.assert_array_equal(weights[odd], 0.0)
    if mask is not None:
        np.testing.assert_array_equal(ids[~mask], -1)
        np.testing.assert_array_equal(weights[~mask], 0.0)
        odd |= ~mask
    np.testing.assert_array_equal(ids[~odd], want_ids[~odd])
    np.testing.assert_allclose(weights[~odd], want_weights[~odd], RTOL, ATOL)


def run(name, tokens, implementation, seed=0):
    z, top_k, bias, mask, options = make(name, tokens, seed)
    arrays = jax.tree.map(jnp.asarray, dict(bias=bias, token_mask=mask))
    call = jax.jit(lambda z, arrays: route(z, top_k, implementation=implementation, **arrays, **options))
    judge(z, top_k, bias, mask, options, *call(z, arrays))


def run_aligned(name, tokens, implementation, block_m=16, shard=None):
    """shard: (number of experts, first of them) whose rows are wanted, or None for all."""
    z, top_k, bias, mask, options = make(name, tokens, seed=1)
    arrays = jax.tree.map(jnp.asarray, dict(bias=bias, token_mask=mask))
    num_local, offset = shard or (None, None)
    arrays |= dict(group_offset=None if offset is None else jnp.int32(offset))
    static = dict(options, implementation=implementation, num_local_experts=num_local)
    routed = jax.jit(lambda z, arrays: route_and_align(z, top_k, block_m, **arrays, **static))(z, arrays)
    judge(z, top_k, bias, mask, options, routed.weights, routed.ids)
    ids = np.asarray(routed.ids)
    if shard is not None:
        ids = np.where((ids >= offset) & (ids < offset + num_local), ids - offset, -1)
        assert (ids >= 0).any()
    check_tiles(ids, num_local or z.shape[1], block_m, routed.tiles)


def run_quantizing(name, tokens, quantization, width, implementation, *, dtype="bfloat16", shard=None):
    """Routed by token, and quantized: each has the bits that it has alone."""
    z, top_k, bias, mask, options = make(name, tokens, seed=tokens)
    arrays = jax.tree.map(jnp.asarray, dict(bias=bias, token_mask=mask))
    num_local, offset = shard or (None, None)
    arrays |= dict(group_offset=None if offset is None else jnp.int32(offset))
    static = dict(options, implementation=implementation, num_local_experts=num_local, unpermuted=True)
    rng = np.random.default_rng(tokens)
    x = rng.standard_normal((tokens, width)) * np.exp2(rng.integers(-8, 8, (tokens, 1)))
    if tokens > 4:
        x[0, width - 1], x[1], x[2], x[3] = np.nan, 0.0, 3e38, -np.inf
    rows = dict(x=jnp.asarray(x, dtype), scale=jnp.float32(0.03) if quantization == "e4m3_tensor" else None)
    room = dict(quantization=quantization, scale_rows=16)

    def together(z, arrays, rows):
        return route_and_align(z, top_k, 16, tokens=rows | room, **arrays, **static)

    found = jax.jit(together)(z, arrays, rows)
    judge(z, top_k, bias, mask, options, found.weights, found.ids)
    ids = np.asarray(found.ids)
    if shard is not None:
        ids = np.where((ids >= offset) & (ids < offset + num_local), ids - offset, -1)
    check_unpermuted_tiles(ids, num_local or z.shape[1], 16, found.tiles)
    codes, scales = jax.jit(lambda rows: quantize_and_permute(**rows, **room, implementation=implementation))(rows)
    assert found.codes.shape == (tokens, width) and found.codes.dtype == codes.dtype
    assert np.asarray(found.codes).tobytes() == np.asarray(codes).tobytes()
    assert (scales is None) == (found.scales is None) == (quantization == "e4m3_tensor")
    if scales is not None:
        assert found.scales.shape == scales.shape == ((16,) if scales.ndim == 1 else (-(-width // 128), 16))
        assert np.asarray(found.scales)[..., :tokens].tobytes() == np.asarray(scales)[..., :tokens].tobytes()


@pytest.mark.parametrize("name", ROUTERS)
def test_reference(name):
    run(name, 37, "reference")


def test_reference_aligned():
    run_aligned("softmax 512, top 16, masked", 9, "reference")
    run_aligned("softmax 128", 9, "reference", shard=(32, 64))


def test_reference_quantizing():
    run_quantizing("softmax 512, top 16, masked", 5, "e4m3_group", 320, "reference", shard=(32, 64))
    run_quantizing("sigmoid 32, top 1", 16, "e4m3_tensor", 128, "reference")


def run_parts(tokens, implementation):
    """Partial sums whose sum the whole logits are nowhere near."""
    z, top_k, *_ = make("softmax 128", tokens)
    rng = np.random.default_rng(1)
    parts = (
        np.asarray(z) * rng.dirichlet(np.ones(3), z.shape).transpose(2, 0, 1)
        + 100 * np.array([1, -3, 2])[:, None, None]
    )
    parts = jnp.asarray(parts, jnp.float32)
    whole = np.asarray(parts[0] + parts[1] + parts[2])  # in the order in which they are added
    for found in (
        jax.jit(lambda parts: route(parts, top_k, implementation=implementation))(parts),
        jax.jit(lambda parts: route_and_align(parts, top_k, 16, implementation=implementation))(parts),
    ):
        weights, ids = found if isinstance(found, tuple) else (found.weights, found.ids)
        judge(whole, top_k, None, None, {}, weights, ids)


def test_reference_of_parts():
    run_parts(9, "reference")


def test_parts_in_lockstep(monkeypatch):
    """Four tokens, of whose logits each warp adds three parts; experts that do not fill the last column."""
    rng, desc = np.random.default_rng(0), RouteDesc(5, 40, 3, "float32", "softmax", True, num_parts=3)
    parts = rng.standard_normal((3, 5, 40)).astype(np.float32)
    seen = []
    choice = kernel_sm90._Choice
    monkeypatch.setattr(
        kernel_sm90, "_choose", lambda desc, row, z, shift: (seen.append(z), choice(z[0], row.lane, []))[1]
    )
    monkeypatch.setattr(kernel_sm90, "simt", simt_of(128))
    weights, ids = Memory(15), Memory(15)
    with jax.disable_jit():
        for cta in range(2):
            refs = Memory(parts.size, parts.reshape(-1).view(np.int32)), weights, ids
            kernel_sm90.route_tokens(desc, RouteConfig(2, 1), refs, jnp.int32(cta))
    found = np.stack([np.stack(z, -1).reshape(4, 32, 2).swapaxes(1, 2).reshape(4, 64) for z in seen]).reshape(-1, 64)
    np.testing.assert_allclose(found[:5, :40], parts.sum(0), rtol=1e-6, atol=1e-6)
    assert np.all(found[:, 40:] == -np.inf) and np.all(found[5:] == -np.inf)


@pytest.mark.parametrize("quarter", [None, 0, 2])
@pytest.mark.parametrize("name", ROUTERS)
@pytest.mark.sample(5)
def test_one_token_in_lockstep(monkeypatch, name, quarter):
    """Routed and aligned by a warp, masked or not: what the references make of it. quarter: of the experts, that get
    rows; some of these have no expert of the token."""
    z, top_k, bias, _, options = make(name, 1, seed=3)
    num_experts = z.shape[1]
    num_local, offset = (num_experts, None) if quarter is None else (num_experts // 4, quarter * num_experts // 4)
    monkeypatch.setattr(kernel_sm90, "simt", simt_of(128))
    monkeypatch.setattr(kernel_sm90.mosaic, "begin", lambda: None)
    for block_m, mask in ((1, None), (16, None), (1, np.array([True])), (1, np.array([False]))):
        arrays = jax.tree.map(jnp.asarray, dict(bias=bias, token_mask=mask))
        at = {} if offset is None else dict(num_local_experts=num_local, group_offset=offset)
        at |= dict(unpermuted=block_m == 1)
        want = route_and_align(z, top_k, block_m, **arrays, **at, **options, implementation="reference")
        desc = RouteDesc(
            num_tokens=1,
            num_experts=num_experts,
            top_k=top_k,
            dtype="float32",
            **(dict(scoring="softmax", renormalize=True) | options),
            has_bias=bias is not None,
            has_mask=mask is not None,
        )
        tiles = describe(1, top_k, num_local, block_m, has_offset=offset is not None, unpermuted=block_m == 1)
        logits = Memory(num_experts, np.asarray(z, np.float32).reshape(-1).view(np.int32))
        refs = [logits, *([] if bias is None else [Memory(num_experts, bias.view(np.int32))])]
        refs += [] if mask is None else [Memory(1, mask.astype(np.int32))]
        refs += [] if offset is None else [Memory(1, [offset])]
        weights, ids = Memory(top_k), Memory(top_k)
        outputs = [Memory(out.shape[0]) for out in align_outputs(tiles)]
        with jax.disable_jit():
            kernel_sm90._fused_kernel(desc, RouteConfig(1, 1), tiles, None, *refs, weights, ids, *outputs)
        assert all(out.is_written.all() for out in (weights, ids, *outputs))
        np.testing.assert_array_equal(ids.values, want.ids[0])
        np.testing.assert_allclose(weights.values.view(np.float32), want.weights[0], rtol=1e-5)
        for field, out in zip(tiles.outputs, outputs, strict=True):
            np.testing.assert_array_equal(out.values, np.asarray(getattr(want.tiles, field)).reshape(-1), field)


def test_wrong_calls():
    z = jnp.zeros((4, 8))
    refuses(ValueError, r"logits is bfloat16\(2, 4, 8\)", route, jnp.zeros((2, 4, 8), jnp.bfloat16), 2)
    refuses(ValueError, r"logits is int32\(4, 8\)", route, z.astype(jnp.int32), 2)
    refuses(ValueError, "top_k=9, expected 1 to 8", route, z, 9)
    refuses(ValueError, "scoring='tanh'", route, z, 2, scoring="tanh")
    refuses(ValueError, r"bias is float32\(7,\)", route, z, 2, bias=jnp.zeros(7))
    refuses(ValueError, "token_mask is int32", route, z, 2, token_mask=jnp.zeros(4, jnp.int32))
    refuses(ValueError, "no equal groups", route, z, 2, num_groups=3, groups_kept=1)
    refuses(ValueError, "num_local_experts and group_offset go together", route_and_align, z, 2, 8, num_local_experts=4)
    with pytest.raises(ValueError, match=r"x\(3, 128\), logits are of 4 tokens"):
        route_and_align(z, 2, 8, tokens=dict(x=jnp.zeros((3, 128)), quantization="int8_row"))
    with pytest.raises(ValueError, match="groups_kept=1 of 4 groups hold 2 experts, top_k is 3"):
        route(z, 3, num_groups=4, groups_kept=1)
    for call in (
        lambda: route(z, 2, implementation="hopper"),
        lambda: route_and_align(z, 2, 8, implementation="hopper"),
    ):
        refuses(NotImplementedError, "hopper: needs a Hopper GPU", call)


def test_config_error():
    desc, one = RouteDesc(4, 128, 8, "float32", "softmax", True), RouteConfig(1, 1)
    assert config_error(desc, one) is None
    assert "at most 512" in config_error(RouteDesc(4, 513, 8, "float32", "softmax", True), one)
    assert "at most 16" in config_error(RouteDesc(4, 128, 17, "float32", "softmax", True), one)
    assert "logits are float64" in config_error(RouteDesc(4, 128, 8, "float64", "softmax", True), one)
    assert "nothing to route" in config_error(RouteDesc(0, 128, 8, "float32", "softmax", True), one)
    assert "1 to 8 warpgroups" in config_error(desc, RouteConfig(1, 9))


LOWERED = (
    *("route softmax 8, bf16", "route sigmoid 256, bias, 8 groups", "route_and_align softmax 128"),
    "route_and_align of 5 tokens, int8_row 2880",
)
CASES = [case for case in (*route_cases(), *quantizing_route_cases()) if case.name in LOWERED]


# The rest is lowered by the SASS tests: a second and more each.
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.sample(2)
def test_lowers_for_cuda(case):
    assert case.launches() == 1


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 5, 64, 1001])
def test_parts_gpu(tokens):
    run_parts(tokens, "hopper")


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 5, 64, 1001])
@pytest.mark.parametrize("name", ROUTERS)
def test_gpu(name, tokens):
    run(name, tokens, "hopper", seed=tokens)
    run_aligned(name, tokens, "hopper")


@pytest.mark.gpu
def test_gpu_many_tokens():
    run("softmax 512, top 16, masked", 16383, "hopper")


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [9, 1001])
def test_gpu_shard_of_experts(tokens):
    run_aligned("softmax 128", tokens, "hopper", shard=(32, 64))
    run_aligned("softmax 512, top 16, masked", tokens, "hopper", shard=(128, 384))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 3, 5, 8, 16])
@pytest.mark.parametrize(
    "quantization", ["e4m3_row", "int8_row", "e4m3_tensor", "e4m3_tensor_row", "e4m3_group", "e4m3_group_ue8m0"]
)
def test_gpu_quantizing(quantization, tokens):
    run_quantizing("softmax 128", tokens, quantization, 2048, "hopper")
    run_quantizing("softmax 128", tokens, quantization, 2880, "hopper")
    run_quantizing("softmax 512, top 16, masked", tokens, quantization, 7168, "hopper", dtype="float16")
    run_quantizing("sigmoid 256, bias, 8 groups", tokens, quantization, 640, "hopper", dtype="float32", shard=(32, 64))


@pytest.mark.gpu
def test_gpu_quantizing_in_a_launch_of_its_own():
    """More tokens than one launch routes, rows too wide for it, a format that it has not."""
    run_quantizing("softmax 128", 16, "int8_row", 16384, "hopper")
    z, x = jnp.zeros((60, 8)), jnp.asarray(np.random.default_rng(0).standard_normal((60, 512)), jnp.bfloat16)
    for quantization in ("mxfp8", "e4m3_row"):
        tokens = dict(x=x, quantization=quantization)
        found = jax.jit(lambda z, tokens=tokens: route_and_align(z, 2, 64, tokens=tokens, implementation="hopper"))(z)
        codes, _ = quantize_and_permute(x, quantization=quantization, implementation="hopper")
        assert np.asarray(found.codes).tobytes() == np.asarray(codes).tobytes()
