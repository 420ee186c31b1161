"""What one call asks (``DgradDesc``), how the Hopper kernel runs it (``DgradConfig``), and whether that fits."""

import dataclasses

from pallas_kernels.common.activations import Activation, slopes_refusal
from pallas_kernels.common.sm90 import REDUCTION_BYTES, SMEM_BYTES, smem_bytes
from pallas_kernels.grouped_gemm.packed.format import BLOCK_N, PackedFormat

UNIT = 64  # elements of 16 bits in the widest swizzle; rows of one warpgroup; columns of one store
MAX_STAGES = 6
MATRICES = 2  # dequantized steps in shared memory
PAIR_COLUMNS = 128  # of a tile of two neighbours: two accumulators of 64 x 128 take the registers of one of 64 x 256
FULL_PAIR = 192  # mean rows of an expert from which pairs of tiles of 128 rows are filled well enough
COPIES_OF_SCALE = 32  # of a block of plain weights, side by side: the 128 bytes that TMA copies of boxes start at
# (consumers, the converter) registers a thread, by number of consumers; None where they keep those they enter with.
_REGISTERS = {1: None, 2: (216, 72)}

SharedArray = tuple[tuple[int, ...], str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DgradDesc:
    """Static description of one call; the letters are those of ``grouped_dgrad``.

    Args:
        rows: Mp.
        n: rows of a matrix, in whole blocks of 64.
        k: columns of a matrix.
        groups: of K, in the arrays beside the blocks.
        fmt, scale_dtype, has_channel_scale: as ``PackedDesc`` has them.
        is_plain: weights are bytes as they are stored, (E * N, K), instead of blocks of words; scales are float32.
        contracts_k: the product is that of the forward pass, rows (Mp, K) times W[e]^T; plain weights only.
        activation: whose derivative follows; None for the product alone.
        has_tile_rows: the number of rows in use is known for each tile.
    """

    rows: int
    n: int
    k: int
    num_experts: int
    groups: int
    fmt: PackedFormat
    scale_dtype: str = "float32"
    has_channel_scale: bool = False
    is_plain: bool = False
    contracts_k: bool = False
    activation: Activation | None = None
    has_tile_rows: bool = False

    @property
    def dtype(self) -> str:
        """Of dy and of the result."""
        return self.fmt.operand

    @property
    def depth(self) -> int:
        """Columns of dy, which are contracted."""
        return self.k if self.contracts_k else self.n

    @property
    def width(self) -> int:
        """Columns of the product."""
        return self.n if self.contracts_k else self.k

    @property
    def unit(self) -> float:
        """What a 1 of the weights is in shared memory."""
        if self.is_plain:
            return 1.0
        return self.fmt.folded_unit if self.folds_scales else self.fmt.unit

    @property
    def stored_dtype(self) -> str:
        """Of the array of weights."""
        if not self.is_plain:
            return "int32"
        return "int8" if self.fmt.element == "int8" else "float8_e4m3fn"

    @property
    def projections(self) -> int:
        """G of the activation."""
        return 2 if self.activation is not None and self.activation.is_gated else 1

    @property
    def has_groups(self) -> bool:
        """Whether scales of groups lie beside the blocks."""
        return self.fmt.scale == "group"

    @property
    def folds_scales(self) -> bool:
        """Whether scales multiply the operands as they are: the product of two exact numbers, rounded once."""
        is_narrow = self.scale_dtype == self.dtype and self.fmt.element != "e4m3"
        return self.has_groups and is_narrow and not self.is_plain

    @property
    def splits_scales(self) -> bool:
        """Whether float32 scales multiply the operands in two parts: two instructions for two numbers, not five."""
        is_wide = self.has_channel_scale or (self.has_groups and self.scale_dtype == "float32")
        return is_wide and self.dtype == "bfloat16" and not self.is_plain

    def unsupported(self) -> str | None:
        """Why no configuration of the Hopper kernel can run this, or None."""
        fmt, group = self.fmt, self.fmt.group_size
        if fmt.is_8bit:
            return f"words for {fmt.operand} operands: wgmma takes operands of 8 bits with K contiguous only"
        if self.is_plain and (fmt.element not in ("e4m3", "int8") or fmt.has_zero_point or fmt.scale_words):
            return f"plain weights of {fmt}: e4m3 or int8 with float32 scales"
        if self.contracts_k and not (self.is_plain and self.activation is None):
            return "the forward product: of plain weights, without an activation's derivative"
        if self.n % BLOCK_N or self.k % fmt.block_k:
            return f"N={self.n} and K={self.k}: both must be multiples of {BLOCK_N}"
        is_in_operands = self.folds_scales or self.splits_scales
        if self.has_groups and not is_in_operands and group and group % UNIT:
            return f"groups of {group} with scales of {self.scale_dtype}: a multiple of {UNIT}, or other scales"
        if (self.has_groups or fmt.has_zero_point) and group and group % 16:
            return f"groups of {group}: a multiple of 16"
        return None if self.activation is None else slopes_refusal(self.activation)


@dataclasses.dataclass(frozen=True)
class DgradConfig:
    """One way to run a ``DgradDesc`` on sm_90.

    Args:
        block_m: rows of a tile of the call, 64 for each warpgroup that multiplies; 64 or 128.
        block_n: output columns of a CTA's tile.
        num_stages: slots of the ring of copies, each 64 columns of dy and the weights that they multiply. Copies are
            made num_stages - MATRICES steps ahead.
        raster_group_m: CTAs' tiles of rows walked together, so that CTAs running at the same time share operands in L2.
        num_sms: persistent CTAs, one per SM.
        neighbours: tiles of one expert in a CTA's tile; 2 multiplies each converted number with up to 2 x block_m rows.
    """

    block_m: int
    block_n: int
    num_stages: int
    raster_group_m: int = 16
    num_sms: int = 132
    neighbours: int = 1

    @property
    def rows(self) -> int:
        """Of a CTA's tile."""
        return self.block_m * self.neighbours

    @property
    def num_consumers(self) -> int:
        return self.block_m // UNIT

    @property
    def pieces(self) -> int:
        """Parts of the columns of a tile: a block of words, and one store."""
        return self.block_n // UNIT

    @property
    def registers(self) -> tuple[int, int] | None:
        """Of a thread, (consumers, converter)."""
        return _REGISTERS[self.num_consumers]


def operand_names(desc: DgradDesc, config: DgradConfig) -> list[str]:
    """Names of the arrays the kernel takes, in order; B = E * N / 64 counts blocks of channels.

    dy (rows, depth); w (B, K / 64, *block_shape) i32, plain (E * N, K); tile_expert (tiles,) i32; num_tiles (1,) i32;
    scale, zero (B, groups, 64), of plain weights scale (B, groups, COPIES_OF_SCALE); channel_scale (B, 64) f32;
    tile_rows (tiles,) i32; first_tile (tiles,) i32; before (rows, G * K). With pairs of neighbours these tiles are
    ``pairs.tile_pairs``, and num_tiles is (tiles,).
    """
    is_paired = config.neighbours > 1
    names = ["dy", "w", "tile_expert", "num_tiles"]
    names += ["scale"] if desc.has_groups else []
    names += ["zero"] if desc.fmt.has_zero_point else []
    names += ["channel_scale"] if desc.has_channel_scale else []
    names += ["tile_rows"] if desc.has_tile_rows or is_paired else []
    names += ["first_tile"] if is_paired else []
    names += ["before"] if desc.activation is not None else []
    return names


def tile_groups(desc: DgradDesc, config: DgradConfig) -> int:
    """Rows of scales, or of zero points, that a tile touches."""
    group = desc.fmt.group_size
    return 1 if group is None or desc.groups == 1 else max(1, config.block_n // group)


def shared_arrays(desc: DgradDesc, config: DgradConfig) -> dict[str, SharedArray]:
    """(shape, dtype) of what a CTA keeps in shared memory.

    matrix: dequantized steps, (64 of N, columns), or (columns, 64 of K) of the forward product. before: what the
    activation was given. staging: output on its way.
    """
    stages, consumers = config.num_stages, config.num_consumers
    step = (config.block_n, UNIT) if desc.contracts_k else (UNIT, config.block_n)
    of_channels = (config.pieces, BLOCK_N) if desc.contracts_k else (BLOCK_N,)
    groups = config.pieces if desc.contracts_k else tile_groups(desc, config)
    beside = (stages, groups, COPIES_OF_SCALE if desc.is_plain else BLOCK_N)
    w = step if desc.is_plain else (config.pieces, *desc.fmt.block_shape)
    arrays: dict[str, SharedArray] = dict(
        dy=((stages, config.rows, BLOCK_N), desc.dtype),
        w=((stages, *w), desc.stored_dtype),
        matrix=((MATRICES, *step), desc.dtype),
        staging=((consumers, max(2, desc.projections), UNIT, UNIT), desc.dtype),
    )
    if desc.has_groups:
        arrays["scale"] = (beside, desc.scale_dtype)
    if desc.fmt.has_zero_point:
        arrays["zero"] = (beside, desc.fmt.operand)
    if desc.has_channel_scale:
        arrays["channel_scale"] = ((stages, *of_channels), "float32")
    if desc.activation is not None:
        arrays["before"] = ((consumers, desc.projections, UNIT, UNIT), desc.dtype)
    return arrays


def config_error(desc: DgradDesc, config: DgradConfig) -> str | None:
    """Why ``config`` cannot run ``desc``, or None when it can."""
    if reason := desc.unsupported():
        return reason
    if config.block_m not in (64, 128) or desc.rows % config.block_m:
        return f"block_m={config.block_m} of {desc.rows} rows: one or two warpgroups of 64 rows, in whole tiles"
    if config.block_n % UNIT or not UNIT <= config.block_n <= 256:
        return f"block_n={config.block_n}: a multiple of {UNIT}, at most 256"
    if config.neighbours not in (1, 2):
        return f"neighbours={config.neighbours}: tiles alone or in pairs"
    if config.neighbours == 2 and (config.block_m, config.block_n) != (128, PAIR_COLUMNS):
        return f"pairs of tiles of {config.block_m} x {config.block_n}: of 128 x {PAIR_COLUMNS} alone"
    if desc.rows < config.rows:
        return f"pairs of tiles of {config.block_m} rows: dy has {desc.rows} rows"
    group = desc.fmt.group_size
    if (desc.has_groups or desc.fmt.has_zero_point) and group and desc.groups > 1 and not desc.contracts_k:
        if config.block_n % group and group % config.block_n:
            return f"block_n={config.block_n} and groups of {group}: one must be a multiple of the other"
    steps = desc.depth // BLOCK_N
    if not MATRICES < config.num_stages <= MATRICES + steps:
        axis = "K" if desc.contracts_k else "N"
        return f"num_stages={config.num_stages}: {MATRICES} and at least one more, at most the {steps} steps of {axis}"
    needed = sum(smem_bytes(*array) for array in shared_arrays(desc, config).values()) + 16 * (config.num_stages + 4)
    needed += smem_bytes((REDUCTION_BYTES,), "int8")
    if needed > SMEM_BYTES:
        return f"needs {needed} bytes of shared memory with {config.num_stages} stages, a CTA has {SMEM_BYTES}"
    return None


def candidates(desc: DgradDesc, block_m: int, num_sms: int) -> list[DgradConfig]:
    """Configurations that can run ``desc`` in tiles of ``block_m`` rows, preferred ones first, each with the most
    stages. Each dequantized number should be multiplied often, so pairs of tiles are first where experts fill them,
    then wide tiles, which read rows less often, too.
    """
    found = []
    for neighbours, block_n in ((2, PAIR_COLUMNS), (1, 256), (1, 192), (1, 128), (1, 64)):
        if block_n > UNIT and block_n >= desc.width + UNIT:  # wider than the output
            continue
        rings = (
            DgradConfig(block_m, block_n, stages, num_sms=num_sms, neighbours=neighbours)
            for stages in range(MAX_STAGES, MATRICES, -1)
        )
        deepest = next((config for config in rings if config_error(desc, config) is None), None)
        found += [] if deepest is None else [deepest]
    # Each expert pads by less than a tile, so at least so many rows are in use where Mp is ``row_capacity``.
    if desc.rows - desc.num_experts * (block_m - 1) < FULL_PAIR * desc.num_experts:
        found.sort(key=lambda config: config.neighbours)
    return found


def choose_config(desc: DgradDesc, block_m: int, num_sms: int) -> DgradConfig:
    """The first candidate. Raises NotImplementedError with the reason where there is none."""
    found = candidates(desc, block_m, num_sms)
    if not found:
        smallest = DgradConfig(block_m, UNIT, MATRICES + 1, num_sms=num_sms)
        raise NotImplementedError(config_error(desc, smallest) or f"nothing fits {desc}")
    return found[0]
