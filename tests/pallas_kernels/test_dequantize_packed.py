"""dequantize_packed beside stored numbers: the reference, and the kernel run in NumPy, thread by thread where words
become numbers. On a GPU the kernel runs in test_dequantize_packed_gpu.py.
"""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_gemm.packed import dense_sm90, dequantize_sm90, to_kernel_layout
from pallas_kernels.grouped_gemm.packed.dense import dequantize_packed, describe_dense
from pallas_kernels.grouped_gemm.packed.dense_config import STAGES
from tests.pallas_kernels.test_packed_operands import as_matrix, on_numpy, on_threads  # noqa: F401  two fixtures
from tests.pallas_kernels.test_packed_pipeline import Ref, in_turn
from tests.support.kernels.cases import dense_cases
from tests.support.kernels.packed_problem import KINDS, make_stored

E, N, K = 3, 128, 704  # K: eleven blocks, the last step has three


def packed_weights(kind, k=K, projections=2):
    """(weights in the kernel layout, the real numbers (E, G, N, K) float64)."""
    stored, expected = make_stored(kind, (E, projections), N, k, np.random.default_rng(0))
    return to_kernel_layout(KINDS[kind][0], **stored), expected


USED = [kind for kind, (fmt, *_) in KINDS.items() if not fmt.is_8bit]


class Barriers:
    """Phases of barriers, one a slot: nobody waits for what has not been counted."""

    def __init__(self):
        self.arrived, self.waited = [0] * STAGES, [0] * STAGES

    @property
    def at(self):
        return {slot: (self, slot) for slot in range(STAGES)}


def arrive(barrier):
    barriers, slot = barrier
    barriers.arrived[slot] += 1


def run_on_numpy(monkeypatch, desc, num_ctas, operands):
    """The kernel's output, every copy made at once; asserts that no slot is filled before it was released."""
    copies = 1 + desc.has_groups + desc.fmt.has_zero_point
    names = [name for name in ("w", "scale", "zero", "channel_scale") if operands[name] is not None]
    out = Ref(np.full((desc.num_experts * desc.projections * desc.n, desc.k), np.nan, desc.out_dtype))
    now, stored = dict(cta=0), []

    def load(source, target, barrier):
        barriers, slot = barrier
        assert barriers.arrived[slot] // copies == now["empty"].arrived[slot], "the slot is still read"
        target.array[...] = 0  # as TMA fills what lies past an array
        target.array[tuple(slice(size) for size in source.shape)] = source.array
        arrive(barrier)

    def store(source, target, predicate=None):
        if predicate is None or predicate:
            stored.append((source, target))

    def flush(*_, **__):
        for source, target in stored:
            target.array[...] = source.array
        stored.clear()

    def wait(barrier):
        barriers, slot = barrier
        barriers.waited[slot] += 1
        needed = barriers.waited[slot] * (copies if barriers is now["full"] else 1)
        assert barriers.arrived[slot] >= needed, "nobody would arrive"

    def load_block(fmt, block, width, rows, zeros):
        beside = None if zeros is None else zeros.array.view(f"u{zeros.dtype.itemsize}")
        words = np.ascontiguousarray(block.array).view(np.uint32)
        whole = as_matrix(fmt, dequantize_sm90.load_block(fmt, words, width, rows, beside))
        return [whole[:, first : first + width] for first in range(0, fmt.block_k, width)]

    for name, stub in {
        "lax": types.SimpleNamespace(
            rem=lambda a, b: int(a) % int(b),
            div=lambda a, b: int(a) // int(b),
            max=max,
            fori_loop=in_turn,
            axis_index=lambda _: now["cta"],
            broadcast_in_dim=lambda a, shape, _: np.broadcast_to(np.asarray(a)[:, None], shape),
        ),
        "pl": types.SimpleNamespace(
            ds=lambda first, size: slice(int(first), int(first) + size),
            multiple_of=lambda value, _: value,
            when=lambda condition: lambda function: function() if condition else None,
        ),
        "plgpu": types.SimpleNamespace(
            copy_gmem_to_smem=load,
            copy_smem_to_gmem=store,
            wait_smem_to_gmem=flush,
            commit_smem=lambda: None,
            barrier_wait=wait,
        ),
        "mosaic": types.SimpleNamespace(
            begin=lambda: None,
            ROWS=None,
            release=arrive,
            load=lambda ref, **_: ref.array,
            column_predicate=lambda n, tile, start: None if n % tile == 0 else start < n,
        ),
        "load_block": load_block,
        "tiles_of_cta": lambda cta, total, ctas: max(0, -(-(total - cta) // ctas)),
    }.items():
        monkeypatch.setattr(dense_sm90, name, stub)
    shapes = dict(w=((4, *desc.fmt.block_shape), np.int32))
    shapes |= dict(
        scale=((desc.step_groups, 64), desc.scale_dtype),
        zero=((desc.step_groups, 64), desc.fmt.operand),
    )
    for cta in range(num_ctas):
        full, empty = Barriers(), Barriers()
        now |= dict(cta=cta, full=full, empty=empty)
        scratch = {name: Ref(np.zeros((STAGES, *shape), dtype)) for name, (shape, dtype) in shapes.items()}
        staging = Ref(np.zeros((4, desc.fmt.block_k // desc.width, 64, desc.width), desc.out_dtype))
        refs = [*(operands[name] for name in names), out]
        dense_sm90._kernel(desc, names, num_ctas, *refs, **scratch, staging=staging, full=full, empty=empty)
        assert empty.arrived == empty.waited, "a completed phase that nobody has seen"
    return out.array.reshape(desc.num_experts, desc.projections, desc.n, desc.k)


@pytest.mark.parametrize("num_ctas", [5, 40])
@pytest.mark.parametrize("kind", USED)
@pytest.mark.sample(7)
def test_kernel_in_numpy(kind, num_ctas, on_threads, monkeypatch):  # noqa: F811
    """Every number in its place, scaled by its own group and channel; 40 CTAs are more than there are steps for two."""
    packed, expected = packed_weights(kind)
    desc = describe_dense(packed, packed.fmt.operand)
    assert desc.unsupported() is None
    leaves = dict(w=packed.words, scale=packed.scale, zero=packed.zero, channel_scale=packed.channel_scale)
    operands = {
        name: None if leaf is None else Ref(np.asarray(leaf).reshape(-1, *leaf.shape[3:]))
        for name, leaf in leaves.items()
    }
    found = run_on_numpy(monkeypatch, desc, num_ctas, operands)
    assert_rounded_once(found, expected, desc.out_dtype)


def assert_rounded_once(found, expected, dtype):
    """And by the last bit of a float32 before it."""
    step, least = (2.0**-8, 0.0) if jnp.dtype(dtype) == jnp.bfloat16 else (2.0**-11, 2.0**-25)
    bound = np.abs(expected) * (step + 2.0**-22) + least
    assert (np.abs(found.astype(np.float64) - expected) <= bound).all()


@pytest.mark.parametrize("kind", USED)
@pytest.mark.sample(5)
def test_reference(kind):
    packed, expected = packed_weights(kind, projections=1)
    packed = jax.tree.map(jnp.asarray, packed)
    found = jax.jit(lambda w: dequantize_packed(w, w.fmt.operand))(packed)
    assert_rounded_once(np.asarray(found), expected, packed.fmt.operand)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(n=96), "N=96"),
        (dict(depth_blocks=2), "K at least 256"),
        (dict(out_dtype="float32"), "out_dtype float32"),
        (dict(fmt=KINDS[next(k for k, (f, *_) in KINDS.items() if f.is_8bit)][0]), "converted by XLA"),
    ],
)
def test_refusals(change, reason):
    packed, _ = packed_weights(USED[0])
    assert reason in str(dataclasses.replace(describe_dense(packed, "bfloat16"), **change).unsupported())


@pytest.mark.parametrize("case", list(dense_cases())[::5], ids=lambda case: case.name)
def test_lowers(case):
    assert case.launches() == 1
