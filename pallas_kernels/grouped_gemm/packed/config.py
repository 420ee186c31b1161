"""How ``grouped_gemm_packed`` is run on Hopper (``PackedConfig``), and whether that fits a call.

Much of what is here says which tiles ptxas compiles without spilling: a consumer holds accumulators, unpacked operands,
and scales in registers at the same time.
"""

import dataclasses

from pallas_kernels.common.sm90 import smem_bytes
from pallas_kernels.grouped_gemm.config import SharedArray, ring_error, rows_error, widths_error
from pallas_kernels.grouped_gemm.packed.format import BLOCK_N
from pallas_kernels.grouped_gemm.packed.problem import PackedDesc
from pallas_kernels.grouped_gemm.packed.vector import PackedVectorConfig, vector_error

BLOCK_MS = (8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 256)
# Heights that fit around an expert's rows where powers of two do not. Two or three consumers take them; of group scales
# in float32 sums two, which have a whole tile's partial sums in flight: with them in pieces ptxas spills.
LARGE_M = (112, 144, 160, 176, 192)
# Warpgroups that enter with 65,536 registers between them, and what (consumers, producer) then ask for.
_REGISTERS: dict[int, tuple[int, int] | None] = {1: None, 2: (232, 40), 3: (152, 56), 4: (104, 40)}
_LARGE_M_REGISTERS = {2: (240, 24), 3: (152, 56)}
# Lower heights that a tile with fewer rows in use is multiplied at: near the tile's for what is left of an expert under
# even routing, far below it for the experts that uneven routing leaves with few rows. Each is a loop of its own, which
# takes time to compile, and in tiles of 176 rows and more two of them spill.
_LOWER = {
    16: (8,),
    24: (16,),
    32: (16, 24),
    48: (32, 40),
    64: (32, 48),
    80: (32, 64),
    96: (64, 80),
    112: (48, 80),
    128: (48, 96),
    144: (48, 112),
    160: (48, 112),
    176: (96,),
    192: (96,),
    256: (96, 176),
}


@dataclasses.dataclass(frozen=True)
class PackedConfig:
    """One way to run a ``PackedDesc`` on sm_90.

    Args:
        block_m: rows of a tile, all of one expert; they are the columns of wgmma.
        num_consumers: 1 to 4 warpgroups, each with 64 channels of every projection.
        step_blocks: blocks of K per slot of the ring; a last step past K multiplies zeros.
        num_stages: slots of the ring.
        folds_scales: group scales are multiplied into the operands, rounded once, instead of into float32 partial sums.
        raster_group_m: row tiles walked together, so that CTAs running at the same time share operands in L2.
        num_sms: persistent CTAs, one per SM.
        k_split: how many consumers share their channels, each with its part of every K step. Their sums are added in
            the order of the parts, so that the bits depend on nothing else.
        splits_projections: of a gated product, two consumers share 64 channels: one multiplies the gate, the other the
            up projection, whose sums pass through shared memory. Each has registers for tiles of twice the height.
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
    def cluster(self) -> int:
        """CTAs of a cluster: none are built here."""
        return 1

    @property
    def shares_weights(self) -> bool:
        return False

    @property
    def channel_groups(self) -> int:
        """Groups of 64 channels (of each projection) in a tile."""
        return self.num_consumers // self.sharers

    @property
    def block_n(self) -> int:
        """Output columns of a tile."""
        return BLOCK_N * self.channel_groups

    @property
    def sharers(self) -> int:
        """Consumers that share 64 channels."""
        return self.k_split * (2 if self.splits_projections else 1)

    @property
    def part_blocks(self) -> int:
        """Blocks of K that one consumer multiplies in a step."""
        return self.step_blocks // self.k_split

    def block_k(self, desc: PackedDesc) -> int:
        """Elements of K per step."""
        return desc.fmt.block_k * self.step_blocks


def heights(desc: PackedDesc, config: PackedConfig) -> tuple[int, ...]:
    """Rows that tiles are multiplied with, ascending: the first that holds those in use, the last being all.

    All alone where those in use are not known, or not the first of a tile.
    """
    if not desc.has_tile_rows or desc.unpermuted_rows:
        return (config.block_m,)
    if is_promoted(desc, config) and config.num_consumers == 4:
        # Registers are short: lower pieces beside whole ones spill, and so do lower heights of other formats.
        piece = promoted_rows(config)
        if not _is_lean(desc) or desc.fmt.is_8bit:
            return (config.block_m,)
        if piece < config.block_m:
            return tuple(range(piece, config.block_m + 1, piece))
    is_int8 = desc.fmt.operand == "int8"  # above 32 the integer wgmma takes multiples of 16 alone
    lower = [rows for rows in _LOWER.get(config.block_m, ()) if not is_int8 or rows <= 32 or rows % 16 == 0]
    return (*lower, config.block_m)


def registers(config: PackedConfig) -> tuple[int, int] | None:
    """Registers a thread that (consumers, producer) ask for, None where they keep those they enter with."""
    return (_LARGE_M_REGISTERS if config.block_m in LARGE_M else _REGISTERS)[config.num_consumers]


def is_promoted(desc: PackedDesc, config: PackedConfig) -> bool:
    """Whether partial sums of groups are scaled and added in float32."""
    return desc.fmt.scale == "group" and not config.folds_scales


def own_projections(desc: PackedDesc, config: PackedConfig) -> int:
    """Projections that one consumer multiplies."""
    return 1 if config.splits_projections else desc.projections


def promoted_k(desc: PackedDesc, config: PackedConfig) -> int:
    """K of one partial sum."""
    return min(desc.fmt.group_size or 0, desc.fmt.block_k * config.part_blocks)


def fragment_k(desc: PackedDesc, config: PackedConfig) -> int:
    """K of one register operand, and of the swizzled rows of x: 128 bytes, less where groups are shorter."""
    group = desc.fmt.group_size if is_promoted(desc, config) else None
    return min(group or desc.fmt.block_k, desc.fmt.block_k)


def scale_rows(desc: PackedDesc, config: PackedConfig) -> int:
    """Groups that a slot touches."""
    return max(config.block_k(desc) // (desc.fmt.group_size or desc.k), 1)


def shared_arrays(desc: PackedDesc, config: PackedConfig) -> dict[str, SharedArray]:
    """(shape, dtype) of what a CTA keeps in shared memory, by field of ``Scratch``.

    w: (stages, blocks, step_blocks, *block_shape), the blocks of a channel group side by side, gate then up. x:
    (stages, k_split, block_m, columns of a part). scale, zero: (stages, blocks, groups, 64). staging: (channel groups,
    block_m, 64). partial: sums of all sharers but the first, (groups, sharers - 1, projections, pieces, 64, rows).
    """
    fmt, stages, blocks = desc.fmt, config.num_stages, config.channel_groups * desc.projections
    grouped = (stages, blocks, scale_rows(desc, config), BLOCK_N)
    arrays: dict[str, SharedArray] = dict(
        w=((stages, blocks, config.step_blocks, *fmt.block_shape), "int32"),
        x=((stages, config.k_split, config.block_m, config.part_blocks * fmt.block_k), fmt.operand),
        staging=((config.channel_groups, config.block_m, BLOCK_N), desc.out_dtype),
    )
    if fmt.scale == "group":
        arrays["scale"] = (grouped, desc.scale_dtype)
    if fmt.has_zero_point:
        arrays["zero"] = (grouped, fmt.operand)
    if config.sharers > 1:
        rows = promoted_rows(config) if is_promoted(desc, config) else config.block_m
        lead = (config.channel_groups, config.sharers - 1, own_projections(desc, config))
        arrays["partial"] = ((*lead, config.block_m // rows, BLOCK_N, rows), "float32")
    return arrays


def shared_memory(desc: PackedDesc, config: PackedConfig) -> int:
    """Bytes of shared memory a CTA uses: the ring, the output staging, barriers."""
    total = sum(smem_bytes(*array) for array in shared_arrays(desc, config).values())
    return total + 8 * 2 * (config.num_stages + config.channel_groups)


def promoted_rows(config: PackedConfig) -> int:
    """Rows of x whose partial sums are in flight at a time; those of a whole tile may not fit beside its sums."""
    if config.block_m in LARGE_M:
        return config.block_m
    if config.block_m == 64 and config.num_consumers == 4:
        return 32
    return {80: 40, 96: 32}.get(config.block_m, min(config.block_m, 64))


def are_projections_together(desc: PackedDesc, config: PackedConfig) -> bool:
    """Whether both projections of a gated product are in flight together. With four consumers a thread has 104
    registers, the operands of one projection take 32 of them, and ptxas would serialize.
    """
    return config.num_consumers < 4 and own_projections(desc, config) * config.block_m <= 64


def are_groups_together(desc: PackedDesc, config: PackedConfig) -> bool:
    """Whether the partial sums of all groups of a step are in flight together, with one wait for all. Then the operands
    of a whole step are, 16 registers a block.
    """
    if not is_promoted(desc, config) or config.num_consumers > 2 or not are_projections_together(desc, config):
        return False
    own, groups = own_projections(desc, config), desc.fmt.block_k * config.part_blocks // promoted_k(desc, config)
    return own * groups * promoted_rows(config) <= 64 and 16 * own * config.part_blocks <= 128


def unpacks_late(desc: PackedDesc, config: PackedConfig) -> bool:
    """Whether a group-scaled block is unpacked right before it is multiplied, behind products in flight: where one
    product takes all of it, and accumulators leave registers for that.
    """
    is_whole = config.block_m == promoted_rows(config) and promoted_k(desc, config) >= desc.fmt.block_k
    is_tight = config.num_consumers == 4 and own_projections(desc, config) > 1 and accumulators(desc, config) > 32
    is_tight |= desc.fmt.is_8bit and config.block_m >= 176 and config.part_blocks > 1
    return is_whole and not is_tight


def products_in_flight(config: PackedConfig) -> int:
    """Blocks whose products may be in flight, each holding 16 registers of operands; with more ptxas serializes where
    four consumers share the registers.
    """
    return 4 if config.num_consumers == 4 else config.part_blocks * 2


def accumulators(desc: PackedDesc, config: PackedConfig) -> int:
    """Registers of accumulators that each thread of a consumer holds."""
    own = own_projections(desc, config)
    count = own * config.block_m // 2
    if is_promoted(desc, config):
        count += promoted_rows(config) // 2 * (own if are_projections_together(desc, config) else 1)
    return count


def _is_lean(desc: PackedDesc) -> bool:
    """Whether group scales come with few numbers beside them: one a group of 128 or more, without a zero point."""
    return desc.fmt.bits == 4 and not desc.fmt.has_zero_point and (desc.fmt.group_size or 0) >= 128


def _room(desc: PackedDesc, config: PackedConfig) -> int:
    """Registers that a thread of a consumer has for accumulators; with more of them ptxas spills."""
    fmt, own, group = desc.fmt, own_projections(desc, config), desc.fmt.group_size or 0
    if config.block_m in LARGE_M:
        return _room_in_large_m(desc, config)
    room = {1: 128, 2: 128, 3: 80, 4: 40}[config.num_consumers]
    if config.k_split > 1 and own > 1 and is_promoted(desc, config):
        return 32  # 36 spill
    if fragment_k(desc, config) == 32:
        # Twice as many scales and addresses beside them: 96 spill, and with four consumers 36 of two projections.
        return 32 if config.num_consumers == 4 and own > 1 else min(room, 80)
    if not is_promoted(desc, config):
        return room
    if config.num_consumers == 4 and own == 1 and _is_lean(desc):
        if fmt.is_8bit:
            return 48
        return 60 if desc.projections == 1 or config.part_blocks == 1 else 48 if config.block_m <= 48 else 40
    if fmt.is_8bit and fmt.has_zero_point and config.splits_projections:
        return min(room, 80)
    if fmt.is_8bit or fmt.has_zero_point:
        return min(room, 60 if config.num_consumers == 3 and fmt.is_8bit else 96)
    most = 104 if group >= 128 else 96  # with twice the scales 100 spill
    return {3: 96, 4: 40}.get(config.num_consumers, most)


def _room_in_large_m(desc: PackedDesc, config: PackedConfig) -> int:
    """``_room`` where operands count too: 16 registers for every block of K multiplied together."""
    fmt, room = desc.fmt, {2: 208, 3: 120}[config.num_consumers] - 16 * config.part_blocks
    if not is_promoted(desc, config):
        return room
    has_int8_zeros = fmt.has_zero_point and "int8" in (fmt.element, fmt.operand)
    if fragment_k(desc, config) < fmt.block_k or has_int8_zeros:
        return min(room, 144 if config.part_blocks == 1 else 96)  # more scales, or zero points, beside them
    if fmt.has_zero_point or fmt.operand == "float8_e4m3fn":
        return min(room, 176 if config.part_blocks == 1 else 144)
    return room


def _long_step_error(desc: PackedDesc, config: PackedConfig, needed: int) -> str | None:
    """Why a consumer cannot multiply more than two blocks of K a step: their operands take registers."""
    if desc.fmt.is_8bit:
        return "over two blocks of 128 a warpgroup spill"
    if fragment_k(desc, config) == 32:
        return "over two blocks a warpgroup with groups of 32 spill"
    if is_promoted(desc, config) and needed > (64 if (desc.fmt.group_size or 0) >= 128 else 48):
        return f"over two blocks a warpgroup beside {needed} accumulators a thread spill"
    if config.num_consumers == 3 and needed > 64:
        return f"with {needed} accumulators a thread and 3 consumers ptxas serializes"
    if config.num_consumers == 4 and (needed > (12 if desc.fmt.scale == "e4m3" else 16) or desc.fmt.bits == 8):
        return f"with {needed} accumulators a thread and 4 consumers ptxas serializes"
    return None


def config_error(desc: PackedDesc, config: PackedConfig | PackedVectorConfig) -> str | None:
    """Why ``config`` cannot run ``desc``, or None when it can."""
    if isinstance(config, PackedVectorConfig):
        return vector_error(desc, config)
    if reason := desc.unsupported():
        return reason
    if desc.top_k:
        return "the sum of a token's rows: tiles of one row alone add them up"
    if config.block_m not in BLOCK_MS:
        return f"block_m={config.block_m} is not one of {BLOCK_MS}"
    if reason := rows_error(desc, config.block_m) or widths_error(desc, config.block_n):
        return reason
    allowed = tuple(_LARGE_M_REGISTERS if config.block_m in LARGE_M else _REGISTERS)
    if config.num_consumers not in allowed:
        return f"block_m={config.block_m}: num_consumers={config.num_consumers} is not one of {allowed}"
    step = config.block_k(desc)
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
        return f"block_m={config.block_m}: 40 rows, which the integer wgmma does not take"
    if config.folds_scales and (desc.fmt.scale != "group" or desc.scale_dtype != desc.fmt.operand):
        return f"folds_scales: needs group scales in {desc.fmt.operand}, found {desc.fmt.scale} in {desc.scale_dtype}"
    if config.folds_scales and desc.fmt.element == "e4m3":
        return "folds_scales: e4m3 weights spend the one multiplication on their exponents"
    if config.block_m in LARGE_M and is_promoted(desc, config) and own_projections(desc, config) > 1:
        return f"block_m={config.block_m}: partial sums of groups of both projections spill; splits_projections"
    needed, room = accumulators(desc, config), _room(desc, config)
    if needed > room:
        with_consumers = f"room for {room} with {config.num_consumers} consumers"
        return f"block_m={config.block_m}: {needed} accumulators a thread, {with_consumers}"
    if config.part_blocks > 2 and (reason := _long_step_error(desc, config, needed)):
        return f"step_blocks={config.step_blocks}: {reason}"
    return ring_error(config.num_stages, shared_memory(desc, config))
