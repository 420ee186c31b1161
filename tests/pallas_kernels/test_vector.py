"""Matrix times vector with 8- and 16-bit weights, run in NumPy on the threads of a CTA: which lane has which columns,
the diagonal of ``mma.sync``, narrow last pieces of K, sums over lanes.

The kernel itself runs in test_grouped_gemm_gpu.py.
"""

import types
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.common.activations import Activation
from pallas_kernels.grouped_gemm import VectorConfig, api, grouped_gemm, vector_sm90
from tests.support.kernels.gemm_problem import gemm_tolerance, make_problem
from tests.support.kernels.simt_machine import THREADS, Machine

LANE, WARP = THREADS % 32, THREADS // 32


class Vectors:
    """What threads hold of an array: (128, vector)."""

    def __init__(self, values: Any):
        self.dtype = jnp.dtype(values.dtype)
        self.registers = np.empty(1, object)
        self.registers[0] = values

    def astype(self, dtype):
        return Vectors(self.registers[0].astype(jnp.dtype(dtype)))


class RowAWarp:
    """``mosaic.row_a_warp``; reduced, every warp has the one row."""

    def __init__(self, vector: int, is_one_row: bool = False):
        self.vector, self.is_one_row = vector, is_one_row

    def reduce(self, axis):
        assert axis == 0
        return RowAWarp(self.vector, True)


def load(ref, *, layout, optimized):
    assert not optimized
    columns = LANE[:, None] * layout.vector + np.arange(layout.vector)
    width = 32 * layout.vector
    assert ref.shape == ((width,) if layout.is_one_row else (4, width))
    return Vectors(ref.array[columns] if layout.is_one_row else ref.array[WARP[:, None], columns])


def words(register):
    """In place of ``_words``, which takes MLIR's vectors."""
    stored = np.ascontiguousarray(register).view(np.uint8)
    if stored.shape[1] == 2:
        return [stored.view(np.uint16)[:, 0].astype(np.uint32)]
    return [*stored.view(np.uint32).T]


@pytest.fixture
def machine(monkeypatch):
    found = Machine(late=True)
    pl = types.SimpleNamespace(
        when=lambda condition: lambda run: run() if bool(condition) else None,
        ds=lambda start, size: slice(int(start), int(start) + size),
    )
    mosaic = types.SimpleNamespace(begin=lambda: None, row_a_warp=RowAWarp, load=load)
    stubs = dict(simt=found.namespace(), lax=found.lax(), pl=pl, mosaic=mosaic, row_kernel=found.row_kernel)
    for name, stub in dict(stubs, _words=words).items():
        monkeypatch.setattr(vector_sm90, name, stub)
    monkeypatch.setattr(api, "hopper_sms", lambda: 132)


def run(problem, channels, *args, **options):
    options = dict(config=VectorConfig(channels), implementation="hopper") | options
    return np.asarray(grouped_gemm(*(args or problem.args), **problem.kwargs | options))


@pytest.mark.parametrize("k", [64, 192, 448, 960, 1088])
@pytest.mark.parametrize("kind", ["bf16", "f16", "fp8_tensor", "fp8_row", "fp8_block", "int8_row"])
def test_last_pieces(kind, k, machine):
    """Loads of 16, 8, 4 and 2 bytes a lane, whose words are many, two, one and half of one; a tile out of use."""
    problem = make_problem(kind, [1, 0, 2], k=k, n=16, block_m=1, bias="float32", out_dtype=jnp.float32)
    for channels in (1, 2):
        problem.assert_close(run(problem, channels), gemm_tolerance(kind, jnp.float32, tensor_core=True))


@pytest.mark.parametrize("channels", [1, 2, 4])
@pytest.mark.parametrize("kind", ["bf16", "fp8_block", "int8_row"])
def test_gated(kind, channels, machine):
    """Pairs of weights for one product: of both projections, and of channels of one."""
    gated: dict[str, Any] = dict(projections=2, activation=Activation("silu"))
    problem = make_problem(kind, [1, 1], k=320, n=16, block_m=1, spare_tiles=0, out_dtype=jnp.float32, **gated)
    problem.assert_close(run(problem, channels), gemm_tolerance(kind, jnp.float32, tensor_core=True))


@pytest.mark.parametrize("kind", ["bf16", "fp8_row"])
def test_long_rows(kind, machine):
    """Eleven loads, eight of them in the loop."""
    k = 2912 if kind == "bf16" else 5824
    problem = make_problem(kind, [1, 1], k=k, n=8, block_m=1, spare_tiles=0, out_dtype=jnp.float32)
    problem.assert_close(run(problem, 2), gemm_tolerance(kind, jnp.float32, tensor_core=True))


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_its_column(bad, channels, machine):
    """Off the diagonal a column of weights meets the row's other runs, and the other weight of a product."""
    problem = make_problem("bf16", [1, 1], k=96, n=8, block_m=1, spare_tiles=0, out_dtype=jnp.float32)
    x, w, *tiles = problem.args
    clean = run(problem, channels)
    for place in (0, 1, 48, 95):
        found = run(problem, channels, x, w.at[1, 5, place].set(bad), *tiles)
        is_own = np.arange(16).reshape(2, 8) == 13
        np.testing.assert_array_equal(found[~is_own], clean[~is_own])
        np.testing.assert_array_equal(found[is_own], bad * np.sign(np.float32(x[1, place])))


@pytest.mark.parametrize("kind", ["bf16", "fp8_row", "fp8_block", "int8_row"])
def test_added_up(kind, machine):
    """Slots in another order than tiles, one expert in two of them, and a tile that nobody chose."""
    problem = make_problem(kind, [1, 1, 1], k=320, n=16, block_m=1, spare_tiles=1, out_dtype=jnp.float32)
    row_of, slot_weights = jnp.asarray([[2, 0, 1, 0]], jnp.int32), jnp.asarray([[0.5, 0.25, 2.0, 1.0]])
    found = run(problem, 1, row_of=row_of, slot_weights=slot_weights, shared=jnp.full((1, 16), 3.0))
    expected = np.asarray([1.25, 2.0, 0.5]) @ problem.expected[:3] + 3.0
    magnitude = np.asarray([1.25, 2.0, 0.5]) @ np.abs(problem.expected[:3]).max(axis=1) + 3.0
    bound = gemm_tolerance(kind, jnp.float32, tensor_core=True).bound(magnitude)
    assert np.abs(found[0] - expected).max() <= bound
