"""align_and_permute: the rows of ``align(stable=True)``, and what ``quantize_and_permute`` writes to them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.align import AlignDesc, TileMap, align, kernel_sm90, row_capacity
from pallas_kernels.align_and_permute import align_and_permute, config_error
from pallas_kernels.align_and_permute import kernel_sm90 as own_kernel
from pallas_kernels.quantize_and_permute import PermuteDesc, quantize_and_permute
from pallas_kernels.quantize_and_permute.config import QUANTIZATIONS, TAKES_SCALE
from tests.support.kernels.in_lockstep import Memory, simt_of
from tests.support.kernels.router_cases import align_and_permute_cases
from tests.support.kernels.tile_checks import ROUTINGS, check_tiles
from tests.support.refusals import refuses

SCALE = 37.3
ROUTINGS = ROUTINGS | {
    "one expert takes all": (np.full((90, 2), 3), 5),
    "as many pairs as one launch takes": (np.random.default_rng(1).integers(-1, 130, (128, 8)), 128),
    "as many experts": (np.random.default_rng(2).integers(-9, 1100, (113, 9)), 1024),
    "skewed": (np.random.default_rng(3).integers(0, 12, (64, 8)) ** 2, 128),
}


def together(ids, num_experts, block_m, x, quantization, implementation):
    scale = jnp.float32(SCALE) if quantization in TAKES_SCALE else None
    call = functools.partial(align_and_permute, num_experts=num_experts, block_m=block_m, quantization=quantization)
    run = jax.jit(lambda ids, x, scale: call(ids, x=x, scale=scale, implementation=implementation))
    return run(jnp.asarray(ids, jnp.int32), x, scale)


def check(ids, num_experts, block_m, x, quantization, implementation):
    """Against both by themselves, to the bit."""
    tiles, rows, scales = together(ids, num_experts, block_m, x, quantization, implementation)
    check_tiles(ids, num_experts, block_m, tiles)
    stable = align(jnp.asarray(ids, jnp.int32), num_experts, block_m, stable=True)
    np.testing.assert_array_equal(tiles.row_of, stable.row_of)
    scale = jnp.float32(SCALE) if quantization in TAKES_SCALE else None
    options = dict(quantization=quantization, scale=scale, implementation=implementation)
    want, want_scales = quantize_and_permute(x, stable.row_of, rows.shape[0], **options)
    used = np.asarray(stable.row_of)[np.asarray(stable.row_of) >= 0]
    np.testing.assert_array_equal(_bytes(rows)[used], _bytes(want)[used])
    if quantization == "none":  # whoever moves them: each row is its token
        token = np.broadcast_to(np.arange(len(ids))[:, None], np.shape(ids))[np.asarray(stable.row_of) >= 0]
        np.testing.assert_array_equal(_bytes(rows)[used], _bytes(x)[token])
    assert (scales is None) == (want_scales is None)
    if scales is not None:  # rows last
        np.testing.assert_array_equal(np.asarray(scales)[..., used], np.asarray(want_scales)[..., used])


def _bytes(rows):
    return np.asarray(rows).view(np.uint8)


def tokens(num_tokens, width, dtype="bfloat16"):
    x = np.random.default_rng(0).standard_normal((num_tokens, width)) * np.arange(1, num_tokens + 1)[:, None]
    return jnp.asarray(x, dtype).at[num_tokens // 2].set(0)


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.sample(4)
def test_reference(quantization):
    ids, num_experts = ROUTINGS["invalid mixed in"]
    check(ids, num_experts, 16, tokens(len(ids), 256), quantization, "reference")


@pytest.mark.parametrize("block_m", [1, 16])
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.sample(6)
def test_in_lockstep(monkeypatch, routing, block_m):
    """The kernel's own statements, one CTA after the other, but for how a token is quantized: the first CTA describes
    all tiles, and each other one writes its token to each of its rows and nowhere else."""
    ids, num_experts = ROUTINGS[routing]
    ids, (num_tokens, top_k) = np.asarray(ids, np.int32), ids.shape
    num_rows = row_capacity(ids.size, num_experts, block_m)
    tiles = AlignDesc(ids.size, num_experts, block_m, num_rows)
    written = {}

    class Quantizer:
        def __init__(self, rows, x, given, *outputs):
            assert (x, given, outputs) == ("x", "scale", ("codes",))

        def stores(self, token):
            for piece in range(2):
                yield lambda row, piece=piece: written.setdefault((int(row), piece), []).append(int(token))

    for module in (kernel_sm90, own_kernel):
        monkeypatch.setattr(module, "simt", simt_of(128))
    monkeypatch.setattr(own_kernel.mosaic, "begin", lambda: None)
    monkeypatch.setattr(own_kernel, "RowQuantizer", Quantizer)
    outputs = [Memory(out.shape[0]) for out in kernel_sm90.align_outputs(tiles)]
    rows = PermuteDesc(num_tokens, 128, top_k, num_rows, "bfloat16", "e4m3_tensor")
    assert config_error(tiles, rows) is None
    with jax.disable_jit():
        for index in range(1 + num_tokens):
            monkeypatch.setattr(own_kernel.lax, "axis_index", lambda name, index=index: jnp.int32(index))
            scratch = {name: Memory(1024) for name in ("counts", "ends", "sums", "before")}
            own_kernel._kernel(
                tiles, rows, Memory(ids.size, ids.reshape(-1)), "x", "scale", *outputs, "codes", **scratch
            )
    assert all(out.is_written.all() for out in outputs)
    found = {name: out.values for name, out in zip(tiles.outputs, outputs, strict=True)}
    found = TileMap(**found | dict(row_of=found["row_of"].reshape(ids.shape)))
    check_tiles(ids, num_experts, block_m, found)
    stable = align(jnp.asarray(ids), num_experts, block_m, stable=True, implementation="reference")
    np.testing.assert_array_equal(found.row_of, stable.row_of)
    want = {(int(row), piece): [t] for (t, _), row in np.ndenumerate(found.row_of) if row >= 0 for piece in range(2)}
    assert written == want


def test_wrong_calls():
    ids, x = jnp.zeros((4, 2), jnp.int32), tokens(4, 256)
    call = functools.partial(align_and_permute, num_experts=3, block_m=16, quantization="none")
    refuses(ValueError, r"topk_ids is int32\(4,\), expected int32 \(T, top_k\) of the T=4", call, ids[:, 0], x=x)
    refuses(ValueError, "T=3 rows of x", call, ids, x=x[:3])
    refuses(ValueError, "topk_ids is int16", call, ids.astype(jnp.int16), x=x)
    refuses(NotImplementedError, "hopper: needs a Hopper GPU", call, ids, x=x, implementation="hopper")


def test_config_error():
    def error(num_tokens=64, top_k=8, width=2048, quantization="e4m3_row", unpermuted=0, are_wide=False):
        pairs = num_tokens * top_k
        tiles = AlignDesc(pairs, 128, 64, row_capacity(pairs, 128, 64), top_k=unpermuted, are_wide=are_wide)
        return config_error(tiles, PermuteDesc(num_tokens, width, top_k, tiles.num_rows, "bfloat16", quantization))

    assert error() is None and error(128, width=8192) is None
    assert "1032 pairs" in error(129)
    assert "T=129, top_k=4: at most 128 and 16" in error(129, 4) and error(60, 17) and error(60, 16) is None
    assert "unpermuted" in error(unpermuted=8) and "64 bits" in error(are_wide=True)
    assert "H=8320: at most 8192" in error(width=8320)
    assert "no pairs" in error(0)
    assert "multiple of 64" in error(width=96, quantization="e4m3_group")


@pytest.mark.parametrize("case", align_and_permute_cases(), ids=lambda case: case.name)
@pytest.mark.sample(3)
def test_lowers_for_cuda(case):
    assert case.launches() == 1


@pytest.mark.gpu
@pytest.mark.parametrize("block_m", [1, 16])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_gpu(routing, block_m):
    ids, num_experts = ROUTINGS[routing]
    for width, quantization in ((2048, "e4m3_row"), (2880, "none"), (7168, "e4m3_group")):
        check(ids, num_experts, block_m, tokens(len(ids), width), quantization, "hopper")


@pytest.mark.gpu
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_gpu_kinds(quantization):
    ids, num_experts = ROUTINGS["skewed"]
    for width in (1024, 8192):
        check(ids, num_experts, 16, tokens(len(ids), width), quantization, "hopper")
    if quantization in ("none", "e4m3_row"):
        check(ids, num_experts, 16, tokens(len(ids), 1024, "float32"), quantization, "hopper")
