"""Which of several weights a column tile is copied from, and by which its scales are chosen."""

from typing import Any

import jax.numpy as jnp
import pytest

from pallas_kernels.grouped_gemm import side_by_side_sm90
from pallas_kernels.grouped_gemm.config import GemmConfig
from pallas_kernels.grouped_gemm.pipeline_sm90 import CtaContext, Scratch
from pallas_kernels.grouped_gemm.problem import GemmDesc
from pallas_kernels.grouped_gemm.scheduler_sm90 import Tile


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
