"""What a grouped GEMM with packed weights is asked (``PackedDesc``), how it is run (``PackedConfig``), and whether the
two fit.
"""

import dataclasses
import math
from typing import Literal

import jax.numpy as jnp

from pallas_kernels.common.activations import Activation
from pallas_kernels.common.rows import unpermuted_rows_error
from pallas_kernels.common.sm90 import SMEM_BYTES, smem_bytes
from pallas_kernels.grouped_gemm.packed.format import BLOCK_N, PackedFormat

_OUTPUTS = ("bfloat16", "float16", "float32")
BLOCK_MS = (8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 256)
# Heights that fit around an expert's rows where powers of two do not. Two or three consumers take them; of group scales
# in float32 sums two, which have a whole tile's partial sums in flight: with them in pieces ptxas spills.
LARGE_M = (112, 144, 160, 176, 192)
# Warpgroups that enter with 65,536 registers between them, and what (consumers, producer) then ask for.
_REGISTERS: dict[int, tuple[int, int] | None] = {1: None, 2: (232, 40), 3: (152, 56), 4: (104, 40)}
_TALL_REGISTERS = {2: (240, 24), 3: (152, 56)}


@dataclasses.dataclass(frozen=True)
class PackedDesc:
    """Static description of one call; the shape letters are those of ``grouped_gemm_packed``.

    rows: Mp. n: output columns (channels of one half). k: columns of x, whole blocks of K. fmt: of the weights.
    scale_dtype: of group scales. has_channel_scale: a float32 factor per channel follows the sum. projections: 2
    when the
    product feeds a gated activation. lhs_scale: "none", "tensor" or "row" factors of x, applied to the sum.
    unpermuted_rows:
    of x, which every tile starts with; 0 where x has a row for each of a tile.
    """

    rows: int
    n: int
    k: int
    num_experts: int
    fmt: PackedFormat
    out_dtype: str = "bfloat16"
    projections: int = 1
    scale_dtype: str = "float32"
    has_channel_scale: bool = False
    lhs_scale: Literal["none", "tensor", "row"] = "none"
    bias_dtype: str | None = None
    activation: Activation | None = None
    unpermuted_rows: int = 0

    @property
    def accumulator(self) -> str:
        return "int32" if self.fmt.operand == "int8" else "float32"

    @property
    def channel_blocks(self) -> int:
        """Blocks of 64 channels in one half of an expert."""
        return -(-self.n // BLOCK_N)

    def unsupported(self) -> str | None:
        """Why no configuration of the Hopper kernels can run this, or None."""
        if self.out_dtype not in _OUTPUTS:
            return f"out_dtype {self.out_dtype} is not one of {', '.join(_OUTPUTS)}"
        if self.k % self.fmt.block_k:
            return f"K={self.k}: x must come in whole blocks of {self.fmt.block_k} columns"
        if self.n % 8 or self.n * jnp.dtype(self.out_dtype).itemsize % 32:
            return f"N={self.n}: a row of the {self.out_dtype} output must be a multiple of 32 bytes and N of 8"
        is_folded = (self.fmt.element, self.fmt.operand, self.fmt.scale) == ("e2m1", "float8_e4m3fn", "e8m0")
        if self.fmt.element == "e2m1" and self.fmt.operand == "float8_e4m3fn" and not is_folded:
            return (
                f"float8_e4m3fn activations with e2m1 weights and {self.fmt.scale} scales: one step of that matrix "
                f"instruction takes 32 of K, groups have {self.fmt.group_size}, and e4m3 does not hold e2m1 times e4m3"
            )
        if self.fmt.is_8bit and self.fmt.element != "int4" and not is_folded:
            return f"{self.fmt.operand} activations go with int4 weights, found {self.fmt.element}"
        if self.fmt.operand == "float8_e4m3fn" and self.fmt.has_zero_point:
            return "float8_e4m3fn activations go with symmetric int4 weights; zero points with int8 and 16 bits"
        if self.fmt.operand == "int8" and self.k > 1 << 17:
            return f"K={self.k}: sums of int8 by 16 times int4 stay in 32 bits up to 131072"
        if self.fmt.is_8bit and self.fmt.scale == "group" and (self.fmt.group_size or 0) % 64:
            return f"groups of {self.fmt.group_size} with {self.fmt.operand} operands; a multiple of 64"
        if self.fmt.element == "e2m1" and self.fmt.operand != "bfloat16" and not is_folded:
            return f"e2m1 weights with {self.fmt.operand} activations; only bfloat16 holds their scales"
        if self.fmt.scale == "e8m0" and self.fmt.operand != "bfloat16" and not is_folded:
            return f"powers of two as scales with {self.fmt.operand} activations; only bfloat16 holds them"
        if self.fmt.scale == "group" and self.fmt.group_size not in (32, 64) and (self.fmt.group_size or 0) % 128:
            return f"groups of {self.fmt.group_size}; 32, 64 or a multiple of 128"
        name = "" if self.activation is None else self.activation.name
        if name.startswith("gelu") and "tanh" not in name:
            return f"activation {name}: erf has no layout rule in Mosaic GPU (jax 0.10.2 and 0.11.2)"
        return None


@dataclasses.dataclass(frozen=True)
class PackedConfig:
    """One way to run a ``PackedDesc`` on sm_90.

    block_m: rows of a tile, all of one expert; they are the columns of the matrix instruction. num_consumers: 1 to 4
    warpgroups, each with 64 channels of every half. k_split: of these, how many share their channels, each with its
    part of every K step; their sums are added in the order of the parts, so that the bits depend on nothing else.
    splits_projections: of a gated product, two consumers share 64 channels: one multiplies the gate, the other the
    up half,
    whose sums pass through shared memory. Each has registers for tiles twice as tall.
    step_blocks: blocks of K per slot of the ring; a last step past K multiplies zeros. num_stages: slots.
    folds_scales: group scales are multiplied into the operands, rounded once, instead of into float32 partial sums.
    raster_group_m: row tiles walked together. num_sms: persistent blocks, one per multiprocessor.
    """

    block_m: int
    num_consumers: int
    step_blocks: int
    num_stages: int
    folds_scales: bool = False
    raster_group_m: int = 8
    num_sms: int = 132
    k_split: int = 1
    splits_projections: bool = False

    @property
    def channel_groups(self) -> int:
        """Groups of 64 channels (of each half) in a tile."""
        return self.num_consumers // self.sharers

    @property
    def sharers(self) -> int:
        """Consumers that share 64 channels."""
        return self.k_split * (2 if self.splits_projections else 1)

    @property
    def part_blocks(self) -> int:
        """Blocks of K that one consumer multiplies in a step."""
        return self.step_blocks // self.k_split


def registers(config: PackedConfig) -> tuple[int, int] | None:
    """Registers that a thread of a consumer and one of the producer ask for, None where they keep what they have."""
    return (_TALL_REGISTERS if config.block_m in LARGE_M else _REGISTERS)[config.num_consumers]


def is_promoted(desc: PackedDesc, config: PackedConfig) -> bool:
    """Whether partial sums of groups are scaled and added in float32."""
    return desc.fmt.scale == "group" and not config.folds_scales


def own_projections(desc: PackedDesc, config: PackedConfig) -> int:
    """Halves that one consumer multiplies."""
    return 1 if config.splits_projections else desc.projections


def block_k(desc: PackedDesc, config: PackedConfig) -> int:
    """K per slot."""
    return desc.fmt.block_k * config.step_blocks


def promoted_k(desc: PackedDesc, config: PackedConfig) -> int:
    """K of one partial sum."""
    return min(desc.fmt.group_size or 0, desc.fmt.block_k * config.part_blocks)


def fragment_k(desc: PackedDesc, config: PackedConfig) -> int:
    """K of one register operand, and of the swizzled rows of x: 128 bytes, less where groups are shorter."""
    group = desc.fmt.group_size if is_promoted(desc, config) else None
    return min(group or desc.fmt.block_k, desc.fmt.block_k)


def scale_rows(desc: PackedDesc, config: PackedConfig) -> int:
    """Groups that a slot touches."""
    return max(block_k(desc, config) // (desc.fmt.group_size or desc.k), 1)


def shared_memory(desc: PackedDesc, config: PackedConfig) -> int:
    """Bytes of shared memory a block uses: the ring, the output staging, barriers."""
    blocks, stages = config.channel_groups * desc.projections, config.num_stages
    total = smem_bytes((stages, blocks, config.step_blocks, math.prod(desc.fmt.block_shape)), "int32")
    total += smem_bytes((stages, config.block_m, block_k(desc, config)), desc.fmt.operand)
    if desc.fmt.scale == "group":
        total += smem_bytes((stages, blocks, scale_rows(desc, config), BLOCK_N), desc.scale_dtype)
    if desc.fmt.has_zero_point:
        total += smem_bytes((stages, blocks, scale_rows(desc, config), BLOCK_N), desc.fmt.operand)
    total += smem_bytes((config.channel_groups, config.block_m, BLOCK_N), desc.out_dtype)
    if config.sharers > 1:
        total += smem_bytes(partial_shape(desc, config), "float32")
    return total + 8 * 2 * (stages + config.channel_groups)


def partial_shape(desc: PackedDesc, config: PackedConfig) -> tuple[int, ...]:
    """Shared memory for the sums of all sharers but the first: (groups, sharers - 1, projections, pieces, 64,
    rows)."""
    rows = promoted_rows(config) if is_promoted(desc, config) else config.block_m
    others = (config.channel_groups, config.sharers - 1)
    return (*others, own_projections(desc, config), config.block_m // rows, BLOCK_N, rows)


def promoted_rows(config: PackedConfig) -> int:
    """Rows of x whose partial sums are in flight at a time; those of a whole tile may not fit beside its sums."""
    if config.block_m in LARGE_M:
        return config.block_m
    if config.block_m == 64 and config.num_consumers == 4:
        return 32
    return {80: 40, 96: 32}.get(config.block_m, min(config.block_m, 64))


def are_projections_together(desc: PackedDesc, config: PackedConfig) -> bool:
    """whether both projections of a gated product are in flight together. With four consumers a thread has 104
    registers,
    the operands of one half take 32 of them, and ptxas would serialize.
    """
    return config.num_consumers < 4 and own_projections(desc, config) * config.block_m <= 64


def are_groups_together(desc: PackedDesc, config: PackedConfig) -> bool:
    """Whether the partial sums of all groups of a step are in flight together, with one wait for all. Then the operands
    of a whole step are, 16 registers a block.
    """
    if not is_promoted(desc, config) or config.num_consumers > 2 or not are_projections_together(desc, config):
        return False
    projections, groups = (
        own_projections(desc, config),
        desc.fmt.block_k * config.part_blocks // promoted_k(desc, config),
    )
    return projections * groups * promoted_rows(config) <= 64 and 16 * projections * config.part_blocks <= 128


def unpacks_late(desc: PackedDesc, config: PackedConfig) -> bool:
    """Whether a group-scaled block is unpacked right before it is multiplied, behind products in flight: where one
    product takes all of it, and sums leave registers for that: late, ptxas spills some.
    """
    is_whole = config.block_m == promoted_rows(config) and promoted_k(desc, config) >= desc.fmt.block_k
    is_tight = config.num_consumers == 4 and own_projections(desc, config) > 1 and sum_registers(desc, config) > 32
    is_tight |= desc.fmt.is_8bit and config.block_m >= 176 and config.part_blocks > 1
    return is_whole and not is_tight


def converts_sums(desc: PackedDesc) -> bool:
    """Whether integer sums of groups are converted by the instruction for it, whose results ptxas spills beside zero
    points.
    """
    return not desc.fmt.has_zero_point


def products_in_flight(config: PackedConfig) -> int:
    """Blocks whose products may be in flight, each holding 16 registers of operands; with more ptxas serializes where
    four consumers share the registers.
    """
    return 4 if config.num_consumers == 4 else config.part_blocks * 2


def sum_registers(desc: PackedDesc, config: PackedConfig) -> int:
    """32-bit registers a thread of a consumer needs for sums alone."""
    registers = own_projections(desc, config) * config.block_m // 2
    if is_promoted(desc, config):
        together = own_projections(desc, config) if are_projections_together(desc, config) else 1
        registers += promoted_rows(config) // 2 * together
    return registers


def _room_in_tall_tile(desc: PackedDesc, config: PackedConfig) -> int:
    """``_room_for_sums`` where operands count too: 16 registers for every block of K multiplied together."""
    room = {2: 208, 3: 120}[config.num_consumers] - 16 * config.part_blocks
    if not is_promoted(desc, config):
        return room
    has_int8_zeros = desc.fmt.has_zero_point and "int8" in (desc.fmt.element, desc.fmt.operand)
    if fragment_k(desc, config) < desc.fmt.block_k or has_int8_zeros:
        return min(room, 144 if config.part_blocks == 1 else 96)  # more scales, or zero points, beside them
    if desc.fmt.has_zero_point or desc.fmt.operand == "float8_e4m3fn":
        return min(room, 176 if config.part_blocks == 1 else 144)
    return room


def _room_for_sums(desc: PackedDesc, config: PackedConfig) -> int:
    """Registers a thread of a consumer has for sums; with more of them ptxas spills."""
    if config.block_m in LARGE_M:
        return _room_in_tall_tile(desc, config)
    room = {1: 128, 2: 128, 3: 80, 4: 40}[config.num_consumers]
    if config.k_split > 1 and own_projections(desc, config) > 1 and is_promoted(desc, config):
        return 32  # 36 spill
    if fragment_k(desc, config) == 32:
        # twice as many scales and addresses beside them: 96 spill, and with four consumers 36 of two projections
        return 32 if config.num_consumers == 4 and own_projections(desc, config) > 1 else min(room, 80)
    if not is_promoted(desc, config):
        return room
    is_lean = desc.fmt.bits == 4 and not desc.fmt.has_zero_point and (desc.fmt.group_size or 0) >= 128
    if config.num_consumers == 4 and own_projections(desc, config) == 1 and is_lean:
        if desc.fmt.is_8bit:
            return 48
        return 60 if desc.projections == 1 or config.part_blocks == 1 else 48 if config.block_m <= 48 else 40
    if desc.fmt.is_8bit and desc.fmt.has_zero_point and config.splits_projections:
        return min(room, 80)
    if desc.fmt.is_8bit or desc.fmt.has_zero_point:
        return min(room, 60 if config.num_consumers == 3 and desc.fmt.is_8bit else 96)
    most = 104 if (desc.fmt.group_size or 0) >= 128 else 96  # with twice the scales 100 spill
    return {3: 96, 4: 40}.get(config.num_consumers, most)


def _long_step_error(desc: PackedDesc, config: PackedConfig, sums: int) -> str | None:
    """Why a consumer cannot multiply more than two blocks of K a step: their operands take registers."""
    if desc.fmt.is_8bit:
        return "over two blocks of 128 a warpgroup spill"
    if fragment_k(desc, config) == 32:
        return "over two blocks a warpgroup with groups of 32 spill"
    if is_promoted(desc, config) and sums > (64 if (desc.fmt.group_size or 0) >= 128 else 48):
        return f"over two blocks a warpgroup beside {sums} registers of sums spill"
    if config.num_consumers == 3 and sums > 64:
        return f"with {sums} registers of sums and 3 consumers ptxas serializes"
    if config.num_consumers == 4 and (sums > (12 if desc.fmt.scale == "e4m3" else 16) or desc.fmt.bits == 8):
        return f"with {sums} registers of sums and 4 consumers ptxas serializes"
    return None


def config_error(desc: PackedDesc, config: PackedConfig) -> str | None:
    """Why ``config`` cannot run ``desc``, or None when it can."""
    if reason := desc.unsupported():
        return reason
    if config.block_m not in BLOCK_MS:
        return f"block_m={config.block_m} is not one of {BLOCK_MS}"
    if desc.rows % config.block_m:
        return f"rows={desc.rows} is not a multiple of block_m={config.block_m}"
    if reason := unpermuted_rows_error(desc.unpermuted_rows, config.block_m):
        return reason
    allowed = tuple(_TALL_REGISTERS if config.block_m in LARGE_M else _REGISTERS)
    if config.num_consumers not in allowed:
        return f"block_m={config.block_m}: num_consumers={config.num_consumers} is not one of {allowed}"
    step = block_k(desc, config)
    if step > desc.k:
        return f"step_blocks={config.step_blocks}: steps of {step} are longer than K={desc.k}"
    if config.k_split not in (1, 2, 4) or config.num_consumers % config.k_split or config.step_blocks % config.k_split:
        return f"k_split={config.k_split}: 1, 2 or 4, which divides {config.num_consumers} consumers and the K step"
    if config.k_split > 1 and (config.folds_scales or desc.fmt.has_zero_point):
        return f"k_split={config.k_split}: with folded scales or zero points it is not built"
    if config.splits_projections and (desc.projections != 2 or config.num_consumers % 2 or config.k_split > 1):
        return (
            f"splits_projections: {desc.projections} projections, {config.num_consumers} consumers, "
            f"k_split={config.k_split}; two projections, an even number of consumers and k_split=1"
        )
    group = desc.fmt.group_size if desc.fmt.scale == "group" else None
    part = step // config.k_split
    if group and part % group and group % part:
        whose = "steps" if config.k_split == 1 else "a warpgroup's parts of steps"
        return f"step_blocks={config.step_blocks}: {whose} of {part} and groups of {group} do not fit each other"
    if desc.fmt.operand == "int8" and is_promoted(desc, config) and promoted_rows(config) == 40:
        return f"block_m={config.block_m}: sums of 40 rows, which the integer matrix instruction does not take"
    if config.folds_scales and (desc.fmt.scale != "group" or desc.scale_dtype != desc.fmt.operand):
        return f"folds_scales: needs group scales in {desc.fmt.operand}, found {desc.fmt.scale} in {desc.scale_dtype}"
    if config.folds_scales and desc.fmt.element == "e4m3":
        return "folds_scales: e4m3 weights spend the one multiplication on their exponents"
    if config.block_m in LARGE_M and is_promoted(desc, config) and own_projections(desc, config) > 1:
        return f"block_m={config.block_m}: partial sums of groups of both projections spill; splits_projections"
    needed, room = sum_registers(desc, config), _room_for_sums(desc, config)
    if needed > room:
        return f"block_m={config.block_m}: {needed} registers of sums, {room} with {config.num_consumers} consumers"
    if config.part_blocks > 2 and (reason := _long_step_error(desc, config, needed)):
        return f"step_blocks={config.step_blocks}: {reason}"
    if config.num_stages < 2:
        return f"num_stages={config.num_stages}: at least 2, one loading while one is multiplied"
    if (needed := shared_memory(desc, config)) > SMEM_BYTES:
        return f"needs {needed} bytes of shared memory with {config.num_stages} stages, a block has {SMEM_BYTES}"
    return None
