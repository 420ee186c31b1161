"""What one conversion of packed weights to matrices asks (``DenseDesc``), and how much the kernel takes at a time."""

import dataclasses

from pallas_kernels.grouped_gemm.packed.format import BLOCK_N, PackedFormat

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
