"""The arithmetic of the packed kernel's consumers, run in NumPy: which products are added up, in what order, with which
scale. Barriers, copies and layouts are stubs; the kernel itself runs in test_grouped_gemm_packed_gpu.py.
"""

import dataclasses
import types

import numpy as np
import pytest

from pallas_kernels.common.activations import Activation
from pallas_kernels.grouped_gemm import mainloop_dequant_sm90 as dequant
from pallas_kernels.grouped_gemm import pipeline_sm90
from pallas_kernels.grouped_gemm.packed import BLOCK_MS, PackedConfig, PackedDesc, PackedFormat, config_error
from pallas_kernels.grouped_gemm.packed.config import (
    are_groups_together,
    heights,
    is_promoted,
    own_projections,
    products_in_flight,
    promoted_k,
    promoted_rows,
    scale_rows,
)
from pallas_kernels.grouped_gemm.packed.format import BLOCK_N
from pallas_kernels.grouped_gemm.scheduler_sm90 import Tile


class Ref:
    """An array with the indexing of a reference."""

    def __init__(self, array):
        self.array = np.asarray(array)
        self.shape, self.dtype = self.array.shape, self.array.dtype

    @property
    def at(self):
        return self

    def __getitem__(self, index):
        return self.array if index is Ellipsis else Ref(self.array[index])

    def __setitem__(self, index, value):
        self.array[index] = value

    def transpose(self, order):
        return Ref(self.array.transpose(order))


class Flight:
    """Products in flight, the most there were, and how often all were waited for."""

    now = most = waits = 0

    @classmethod
    def wait(cls, left):
        cls.now = min(cls.now, left)
        cls.waits += left == 0


def run_scoped(function, *shapes):
    found = function(*[Ref(np.zeros(shape, dtype)) for shape, dtype in shapes])
    Flight.wait(0)
    return found


def wgmma(accumulator, weights, x):
    accumulator.array += (weights.astype(np.float64) @ x.array.astype(np.float64)).astype(accumulator.array.dtype)
    Flight.now += 1
    Flight.most = max(Flight.most, Flight.now)


def in_turn(first, last, body, carry):
    for index in range(first, last):
        carry = body(index, carry)
    return carry


@pytest.fixture
def on_numpy(monkeypatch):
    nothing = lambda *_, **__: None  # noqa: E731
    for name, stub in {
        "lax": types.SimpleNamespace(
            rem=lambda a, b: int(a) % int(b),
            div=lambda a, b: int(a) // int(b),
            fori_loop=in_turn,
            broadcast_in_dim=lambda a, shape, axes: np.broadcast_to(a[:, None] if list(axes) == [0] else a, shape),
        ),
        "pl": types.SimpleNamespace(ds=lambda first, size: slice(int(first), int(first) + size), run_scoped=run_scoped),
        "plgpu": types.SimpleNamespace(
            barrier_wait=nothing,
            wgmma_wait=Flight.wait,
            wgmma=wgmma,
            layout_cast=lambda value, layout: np.asarray(value),
        ),
        "mosaic": types.SimpleNamespace(
            Accumulator=lambda shape, dtype: (shape, dtype),
            WGMMA=None,
            ROWS=None,
            release=nothing,
            load=lambda ref, **_: ref.array,
        ),
    }.items():
        for module in (dequant, pipeline_sm90):
            monkeypatch.setattr(module, name, stub)
    return monkeypatch


SILU = Activation("silu")
G = {g: PackedFormat("int4", scale="group", group_size=g) for g in (32, 64, 128, 256)}
INT8 = PackedFormat("int4", "int8", "group", 128)
# format, projections, block_m, consumers, step_blocks, and of the configuration what is not the default
CASES = [
    (G[128], 2, 16, 2, 4, {}),
    (G[128], 1, 16, 4, 4, {}),
    (G[128], 1, 8, 2, 8, {}),
    (G[128], 2, 24, 2, 4, {}),
    (G[128], 2, 16, 4, 4, dict(splits_projections=True)),
    (G[128], 2, 16, 4, 4, dict(k_split=2)),
    (G[128], 1, 24, 4, 4, dict(k_split=2)),
    (G[128], 1, 16, 4, 4, dict(k_split=4)),
    (G[128], 1, 128, 2, 2, {}),
    (G[128], 1, 80, 3, 2, {}),
    (G[128], 2, 144, 2, 1, dict(splits_projections=True)),
    (G[256], 2, 16, 2, 2, {}),
    (G[64], 2, 16, 2, 2, {}),
    (G[64], 1, 128, 2, 2, {}),
    (G[32], 2, 16, 2, 2, {}),
    (G[128], 2, 16, 2, 2, dict(folds_scales=True)),
    (INT8, 2, 16, 2, 2, {}),
    (INT8, 1, 64, 2, 2, {}),
    (PackedFormat("int4"), 2, 16, 4, 2, {}),
    (PackedFormat("e2m1", scale="e4m3", group_size=16), 2, 16, 2, 4, {}),
    (PackedFormat("e2m1", scale="e8m0", group_size=32), 1, 16, 4, 5, {}),
    (PackedFormat("e2m1", scale="e8m0", group_size=32), 2, 16, 4, 5, dict(splits_projections=True)),
]


# Lower heights of the cases above, in pieces whose last one has fewer rows, or of a tile in one piece.
LOWER = {80: (32, 64), 128: (96, 112), 144: (48, 112), 16: (8,), 24: (16,)}
CASES = [(*case, height) for case in CASES for height in (case[2], *LOWER.get(case[2], ()))]


@pytest.mark.parametrize(
    "case",
    CASES,
    ids=lambda c: f"{c[0].operand} g{c[0].group_size} x{c[1]} rows {c[6]} of {c[2]} wg {c[3]} steps {c[4]} {c[5]}",
)
def test_products_and_scales(case, on_numpy):
    fmt, projections, block_m, consumers, step_blocks, options, height = case
    config = PackedConfig(block_m, consumers, step_blocks, num_stages=3, **options)
    k = 3 * fmt.block_k * step_blocks
    desc = PackedDesc(
        rows=block_m,
        n=1024,
        k=k,
        num_experts=1,
        fmt=fmt,
        projections=projections,
        activation=SILU if projections == 2 else None,
        scale_dtype="bfloat16" if config.folds_scales else "float32",
        has_channel_scale=fmt.scale != "group",
        lhs_scale="row" if fmt.is_8bit else "none",
    )
    assert config_error(desc, config) is None
    rng = np.random.default_rng(0)
    blocks, step = config.channel_groups * projections, config.block_k(desc)
    w = rng.integers(-8, 8, (blocks, BLOCK_N, k)).astype(np.float64)
    x = rng.integers(-100, 101, (block_m, k)).astype(np.float64)
    group = fmt.group_size or k
    scale = rng.integers(1, 64, (blocks, -(-k // group), BLOCK_N)) / 64.0  # products of all are exact
    grouped = np.repeat(scale, group, 1)[:, :k].transpose(0, 2, 1) if is_promoted(desc, config) else 1.0

    names = {index: number for number, index in enumerate(np.ndindex(3, blocks, step_blocks))}
    places = {number: index for index, number in names.items()}

    def load_block(fmt, ref, width, *_):
        slot, block, depth = places[int(ref.array)]
        first = slot * step + depth * fmt.block_k
        return [w[block, :, first + i : first + i + width] for i in range(0, fmt.block_k, width)]

    on_numpy.setattr(dequant, "load_block", load_block)
    rows_of_scale = scale_rows(desc, config)
    slots = [[(slot * step // group) + r for r in range(rows_of_scale)] for slot in range(3)]
    parts = x.reshape(block_m, 3, config.k_split, -1).transpose(1, 2, 0, 3)
    scratch = pipeline_sm90.Scratch(
        w=Ref(np.array(list(names.values())).reshape(3, blocks, step_blocks)),
        x=Ref(parts),
        full=Ref(np.zeros(3)),
        empty=Ref(np.zeros(3)),
        staging=Ref([]),
        scale=Ref(np.stack([scale[:, r] for r in slots])) if fmt.scale == "group" else None,
    )
    multiply = dequant.multiply_promoted if is_promoted(desc, config) else dequant.multiply
    total = np.zeros((config.channel_groups, projections, BLOCK_N, height))
    for warpgroup in range(consumers):
        channels, first_half, _ = (int(v) for v in dequant.place(config, warpgroup))
        Flight.now = Flight.most = Flight.waits = 0
        cta = pipeline_sm90.CtaContext(desc, config, {}, (), scratch, warpgroup, steps=3)
        sums = multiply(cta, Tile(0, 0, 0, first_step=0), height)
        assert len(sums) == own_projections(desc, config)
        for half, pieces in enumerate(sums):
            total[channels, first_half + half] += np.concatenate([np.asarray(p, np.float64) for p in pieces], axis=1)
        if is_promoted(desc, config):
            groups = fmt.block_k * config.part_blocks // promoted_k(desc, config)
            batches = len(dequant._batches(desc, config))
            pieces = -(-height // promoted_rows(config))
            each = 1 if are_groups_together(desc, config) else groups * pieces * batches
            assert Flight.waits == 3 * each
        else:
            assert Flight.most <= products_in_flight(config)
        assert Flight.now == 0
    expected = ((w * grouped) @ x[:height].T).reshape(config.channel_groups, projections, BLOCK_N, height)
    np.testing.assert_array_equal(total, expected)


@pytest.mark.parametrize("operand", ["bfloat16", "int8"])
@pytest.mark.parametrize("block_m", BLOCK_MS)
def test_heights_of_a_tile(block_m, operand, on_numpy):
    """A tile is multiplied at the least height that holds its rows, and at one alone; the integer wgmma takes it."""
    desc = PackedDesc(rows=block_m, n=64, k=128, num_experts=2, fmt=PackedFormat("int4", operand), has_tile_rows=True)
    config = PackedConfig(block_m, 2, 1, 2)
    found = heights(desc, config)
    assert found[-1] == block_m and sorted(set(found)) == list(found)
    assert all(rows % 8 == 0 and (operand != "int8" or rows <= 32 or rows % 16 == 0) for rows in found)
    on_numpy.setattr(dequant.pl, "when", lambda condition: lambda body: body() if condition else None, raising=False)
    scratch = pipeline_sm90.Scratch(*[Ref([])] * 5)
    cta = pipeline_sm90.CtaContext(desc, config, {}, (), scratch, warpgroup=0, steps=1)
    for in_use in range(block_m + 1):
        called: list[int] = []
        dequant._at_height(cta, in_use, called.append)
        assert called == [next(rows for rows in found if rows >= in_use)]
    for changes in (dict(has_tile_rows=False), dict(unpermuted_rows=8)):
        assert heights(dataclasses.replace(desc, **changes), config) == (block_m,)
