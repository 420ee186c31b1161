"""Which of several weights a column tile is copied from, and by which its scales are chosen: of each tile the copies
that the producer issues, and the vectors and scales that consumers read."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.grouped_gemm import mainloop_dequant_sm90, side_by_side_sm90, smem_operands_sm90
from pallas_kernels.grouped_gemm.config import GemmConfig
from pallas_kernels.grouped_gemm.packed.config import PackedConfig
from pallas_kernels.grouped_gemm.packed.format import PackedFormat
from pallas_kernels.grouped_gemm.packed.problem import PackedDesc
from pallas_kernels.grouped_gemm.pipeline_sm90 import CtaContext, Scratch
from pallas_kernels.grouped_gemm.problem import GemmDesc
from pallas_kernels.grouped_gemm.scheduler_sm90 import Tile
from tests.support.kernels import warpgroups


@pytest.mark.parametrize(("block_n", "widths"), [(64, (1024, 256, 192)), (128, (256, 128))])
def test_every_tile_has_one_weight(monkeypatch, block_n, widths):
    """Each tile is copied once, the first and the last of a weight, too: with another number a GPU waits for ever."""
    monkeypatch.setattr(side_by_side_sm90.pl, "when", lambda holds: lambda branch: branch() if holds else None)
    desc = GemmDesc(rows=64, n=sum(widths), k=256, num_experts=1, dtype="bfloat16", widths=widths)
    operands = {name: index for index, name in enumerate(desc.of_each_weight("w"))}
    unused: Any = dict(outputs=(), scratch=Scratch(*[None] * 5), warpgroup=0, steps=0)
    cta = CtaContext(desc=desc, config=GemmConfig(64, block_n, 3), operands=operands, **unused)
    for column in range(desc.n // block_n):
        index = sum(column * block_n >= start for start in desc.starts) - 1
        expected = [index, column - desc.starts[index] // block_n]
        tile = Tile(row=0, column=jnp.int32(column), expert=0, first_step=0)
        copied: list[list[int]] = []
        side_by_side_sm90.at_own(cta, tile, "w", lambda own, place, to=copied: to.append([own, int(place)]))
        assert copied == [expected]
        numbers = side_by_side_sm90.of_own(cta, tile, "w", lambda *found: jnp.stack([jnp.int32(n) for n in found]))
        assert numbers.tolist() == [*expected, widths[index]]


@pytest.fixture
def on_arrays(monkeypatch):
    """Copies are done at once, on NumPy arrays."""
    for module in (mainloop_dequant_sm90, smem_operands_sm90, side_by_side_sm90):
        for name, stand_in in warpgroups.stand_ins().items():
            monkeypatch.setattr(module, name, stand_in, raising=False)


def numbered(*shape):
    """An array of float32 whose elements all differ, and differ from those of other shapes' ones."""
    return (np.arange(np.prod(shape)).reshape(shape) + 1000 * len(shape) + shape[0]).astype(np.float32)


def tiles_of(widths, block_n):
    """(column tile of the output, index of its weight, column tile of that weight)."""
    first = 0
    for index, width in enumerate(widths):
        for own in range(-(-width // block_n)):
            yield first + own, index, own
        first += width // block_n


def context(desc, config, operands, shapes, **barriers):
    """A CTA over these operands by name, with shared memory of these shapes, which holds -1."""
    held = {name: warpgroups.Memory(np.full(shape, -1, np.float32)) for name, shape in shapes.items()}
    memory = Scratch(**dict.fromkeys(("x", "w", "full", "empty", "staging")) | held | barriers)
    refs = {name: warpgroups.Memory(array) for name, array in operands.items()}
    return CtaContext(desc=desc, config=config, operands=refs, outputs=(), scratch=memory, warpgroup=0, steps=1)


@pytest.mark.parametrize(("consumers", "widths"), [(1, (192, 64, 128)), (2, (256, 128, 192))])
def test_packed_weights(on_arrays, consumers, widths):
    """Words and scales of a step, channel scales and biases, of every tile; the last has a block too few."""
    fmt = PackedFormat("int4", "bfloat16", "group", 128)
    sizes: Any = dict(rows=16, n=sum(widths), k=512, num_experts=1, bias_dtype="float32", has_channel_scale=True)
    desc = PackedDesc(fmt=fmt, widths=widths, **sizes)
    config = PackedConfig(16, consumers, 4, 3)
    operands = dict(x=numbered(16, 512))
    shapes = dict(w=(8, 1), scale=(4, 64), bias=(64,), channel_scale=(64,))
    for name, shape in shapes.items():
        names = desc.of_each_weight(name)
        operands |= {own: numbered(width // 64, *shape) for own, width in zip(names, widths, strict=True)}
    for column, index, own in tiles_of(widths, config.block_n):
        full = warpgroups.Barriers(3, num_arrivals=3)
        memory = dict(x=(3, 1, 16, 256), w=(3, consumers, 4, 1), scale=(3, consumers, 2, 64))
        cta = context(desc, config, operands, memory, full=full)
        tile = Tile(row=0, column=jnp.int32(column), expert=0, first_step=0)
        mainloop_dequant_sm90._load_tile(cta, tile)(jnp.int32(1))(jnp.int32(2))
        assert full.completed.tolist() == [0, 0, 1]
        own_names = {name: desc.of_each_weight(name)[index] for name in shapes}
        blocks = slice(own * consumers, (own + 1) * consumers)
        for name, along_k in (("w", slice(4, 8)), ("scale", slice(2, 4))):
            expected = operands[own_names[name]][blocks, along_k]
            found = getattr(cta.scratch, name).array[2]
            np.testing.assert_array_equal(found[: len(expected)], expected)
            assert not found[len(expected) :].any()
        np.testing.assert_array_equal(cta.scratch.x.array[2, 0], operands["x"][:, 256:])
        for group in range(consumers):
            (vectors,) = mainloop_dequant_sm90._vectors(cta, tile, jnp.int32(group))
            block = min(own * consumers + group, widths[index] // 64 - 1)
            for name in ("channel_scale", "bias"):
                np.testing.assert_array_equal(vectors[name], operands[own_names[name]][block])


@pytest.mark.parametrize(("block_n", "widths"), [(64, (192, 64, 128)), (128, (256, 128, 192))])
def test_weights_in_shared_memory(on_arrays, block_n, widths):
    """Weights of a step, scales of columns, biases, and scales of blocks, of every tile."""
    sizes: Any = dict(rows=64, n=sum(widths), k=256, num_experts=1, bias_dtype="float32", widths=widths)
    desc = GemmDesc(dtype="bfloat16", rhs_scale="channel", **sizes)
    config = GemmConfig(64, block_n, 3)
    operands = dict(x=numbered(64, 256))
    for name, shape in (("w", (256,)), ("w_scale", ()), ("bias", ())):
        names = desc.of_each_weight(name)
        operands |= {own: numbered(1, width, *shape) for own, width in zip(names, widths, strict=True)}
    blocks = [numbered(1, -(-width // 128), 2) for width in widths]
    of_blocks = context(desc, config, dict(zip(desc.of_each_weight("w_scale"), blocks, strict=True)), {})
    step = config.block_k(desc)
    for column, index, own in tiles_of(widths, block_n):
        full, vectors = warpgroups.Barriers(3, num_arrivals=2), warpgroups.Barriers(1, num_arrivals=2)
        memory = dict(x=(3, 64, step), w=(3, block_n, step), columns=(1, block_n), bias=(1, block_n))
        cta = context(desc, config, operands, memory, full=full, vectors_full=vectors.at[0])
        tile = Tile(row=0, column=jnp.int32(column), expert=0, first_step=0)
        smem_operands_sm90.load_tile(cta, tile)(jnp.int32(1))(jnp.int32(2))
        smem_operands_sm90.load_vectors(cta, tile)
        assert full.completed.tolist() == [0, 0, 1] and vectors.completed.tolist() == [1]
        columns = slice(own * block_n, (own + 1) * block_n)
        found = dict(w=cta.scratch.w.array[2], w_scale=cta.scratch.columns.array[0], bias=cta.scratch.bias.array[0])
        for name, array in found.items():
            expected = operands[desc.of_each_weight(name)[index]][0, columns]
            expected = expected[:, step : 2 * step] if name == "w" else expected
            np.testing.assert_array_equal(array[: len(expected)], expected)
        for inside in range(0, min(block_n, widths[index] - own * block_n), 64):
            scale = smem_operands_sm90._block_scale(of_blocks, tile, 0, inside, 1)
            assert scale == blocks[index][0, (own * block_n + inside) // 128, 1]
