"""``dequantize_packed``: packed weights as matrices of 16 bits, for products that no dequant main loop has."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.common.device import hopper_sms
from pallas_kernels.common.implementations import first_that_runs
from pallas_kernels.grouped_gemm.packed.format import BLOCK_N, PackedFormat
from pallas_kernels.grouped_gemm.packed.layout import PackedWeights
from pallas_kernels.grouped_gemm.packed.reference import dequantized

STEP_BLOCKS = 4  # blocks of K that a CTA converts at a time
STAGES = 2
CTAS_PER_SM = 4  # by shared memory, so that while one waits for its copies others convert


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseDesc:
    """What a call converts; the letters are those of ``PackedWeights``.

    groups: of K, in the arrays beside the blocks. scale_dtype, has_channel_scale: as ``PackedDesc`` has them.
    """

    num_experts: int
    channel_blocks: int
    projections: int
    depth_blocks: int
    n: int
    k: int
    groups: int
    fmt: PackedFormat
    out_dtype: str
    scale_dtype: str = "float32"
    has_channel_scale: bool = False

    @property
    def num_blocks(self) -> int:
        """Blocks of channels of all experts and projections, each as deep as K."""
        return self.num_experts * self.channel_blocks * self.projections

    @property
    def steps(self) -> int:
        """Parts of K that are converted at a time."""
        return -(-self.depth_blocks // STEP_BLOCKS)

    @property
    def step_k(self) -> int:
        return STEP_BLOCKS * self.fmt.block_k

    @property
    def width(self) -> int:
        """Columns with one row of scales."""
        return min(self.fmt.block_k, self.fmt.group_size or self.fmt.block_k) if self.has_groups else self.fmt.block_k

    @property
    def has_groups(self) -> bool:
        """Whether scales of groups lie beside the blocks."""
        return self.fmt.scale == "group"

    @property
    def step_groups(self) -> int:
        """Rows of scales, or of zero points, of a step."""
        group = self.fmt.group_size
        return 1 if group is None else max(1, self.step_k // group)

    def unsupported(self) -> str | None:
        """Why the Hopper kernel cannot convert this, or None."""
        fmt, group = self.fmt, self.fmt.group_size
        if fmt.is_8bit:
            return f"words for {fmt.operand} operands: converted by XLA"
        if self.out_dtype not in ("bfloat16", "float16"):
            return f"out_dtype {self.out_dtype} is not one of bfloat16, float16"
        if self.n % BLOCK_N or self.k % fmt.block_k or self.depth_blocks < STEP_BLOCKS:
            depth = STEP_BLOCKS * fmt.block_k
            return f"N={self.n} and K={self.k}: whole blocks of {BLOCK_N} and {fmt.block_k}, and K at least {depth}"
        if (self.has_groups or fmt.has_zero_point) and group and self.step_k % group and group % self.step_k:
            return f"groups of {group}: they divide {self.step_k} or are multiples of it"
        if self.has_groups and self.width not in (32, 64):
            return f"groups of {group}: at least 32"
        return None


def dequantize_packed(
    w: PackedWeights, out_dtype: DTypeLike = jnp.bfloat16, *, implementation: str | Sequence[str] | None = None
) -> jax.Array:
    """(E, G, N, K), every scale applied in float32 and rounded once to ``out_dtype``.

    implementation: "hopper" or "reference", or several in the order to try; None tries them in this order. Raises
    NotImplementedError, with a reason for each, when none can.
    """
    desc = describe_dense(w, out_dtype)

    def hopper():
        if reason := desc.unsupported():
            raise NotImplementedError(reason)

        from pallas_kernels.grouped_gemm.packed.dense_sm90 import dequantize_sm90  # here: importing it loads Pallas

        leaves = dict(w=w.words, scale=w.scale, zero=w.zero, channel_scale=w.channel_scale)
        flat = [leaf.reshape(-1, *leaf.shape[3:]) for leaf in leaves.values() if leaf is not None]
        rows = dequantize_sm90(desc, hopper_sms())(*flat)
        return rows.reshape(desc.num_experts, desc.projections, desc.n, desc.k)

    runs = dict(hopper=hopper, reference=lambda: dequantized(w).astype(out_dtype))
    return first_that_runs("dequantize_packed", runs, implementation)


def describe_dense(w: PackedWeights, out_dtype: DTypeLike) -> DenseDesc:
    """The description of a call; leaves may be ShapeDtypeStructs."""
    beside = w.scale if w.scale is not None else w.zero
    return DenseDesc(
        num_experts=w.num_experts,
        channel_blocks=w.words.shape[1],
        projections=w.projections,
        depth_blocks=w.words.shape[3],
        n=w.n,
        k=w.k,
        groups=1 if beside is None else beside.shape[3],
        fmt=w.fmt,
        out_dtype=jnp.dtype(out_dtype).name,
        scale_dtype="float32" if w.scale is None else jnp.dtype(w.scale.dtype).name,
        has_channel_scale=w.channel_scale is not None,
    )
