"""What a grouped GEMM is asked (``GemmDesc``), how it is run (``GemmConfig``), and whether the two fit."""

import dataclasses
from typing import Literal

import jax.numpy as jnp

from pallas_kernels.common.activations import Activation
from pallas_kernels.common.rows import unpermuted_rows_error
from pallas_kernels.common.sm90 import SMEM_BYTES, TMA_ALIGN, TMA_BOX, smem_bytes, swizzle_bytes

SCALE_GROUP = 128  # K per activation group, and both sides of a weight block
_OPERANDS = {"bfloat16": "float32", "float16": "float32", "float8_e4m3fn": "float32", "int8": "int32"}
_OUTPUTS = ("bfloat16", "float16", "float32")
ROW_BYTES = 32  # a row of K is a multiple of: the narrowest swizzle of a bulk copy
BLOCK_MS = (64, 128)  # rows of a tile with operands in their order: one or two warpgroups of 64
SWAPPED_BLOCK_MS = (8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192)
# At most, with block scales: each row's is loaded and multiplied in every step.
SWAPPED_BLOCK_ROWS = 96
# Sums a thread has room for with swapped operands, by number of consumers: with what all warpgroups enter with, and
# with what remains for a consumer when the producer gives registers away.
_SWAPPED_SUMS = {1: 192, 2: 96, 3: 64, 4: 40}
_SWAPPED_SUMS_REASSIGNED = {1: 192, 2: 192, 3: 104, 4: 40}


@dataclasses.dataclass(frozen=True)
class GemmDesc:
    """Static description of one call; the shape letters are those of ``grouped_gemm``.

    rows: Mp. n: output columns (weight rows of one projection). projections: G, 2 when the product feeds a gated
    activation.
    dtype: element type of both operands. out_dtype: of the result before requantization, which rounds to bfloat16
    first, as a launch of its own finds its rows, but not to float16, which would overflow.
    lhs_scale: "none", "tensor", "row" or "group" (1 x 128 of K). rhs_scale: "none", "tensor" (one per half), "channel"
    or "block" (128 x 128). requantize: "none", "group" (e4m3 with a scale per row and 128 columns) or "tensor" (e4m3,
    given scale). has_tile_rows: the number of rows in use is known for each tile. has_power_of_two_scales: those of
    requantize "group" are rounded up to powers of two. unpermuted_rows: of x, which every tile starts with; 0 where
    x has a
    row for each of a tile.
    """

    rows: int
    n: int
    k: int
    num_experts: int
    dtype: str
    out_dtype: str = "bfloat16"
    projections: int = 1
    lhs_scale: Literal["none", "tensor", "row", "group"] = "none"
    rhs_scale: Literal["none", "tensor", "channel", "block"] = "none"
    bias_dtype: str | None = None
    activation: Activation | None = None
    requantize: Literal["none", "group", "tensor"] = "none"
    has_tile_rows: bool = False
    has_power_of_two_scales: bool = False
    unpermuted_rows: int = 0

    @property
    def is_block_scaled(self) -> bool:
        return self.rhs_scale == "block"

    @property
    def itemsize(self) -> int:
        return jnp.dtype(self.dtype).itemsize

    @property
    def accumulator(self) -> str:
        return _OPERANDS[self.dtype]

    @property
    def is_rounded_first(self) -> bool:
        """Whether values are rounded to bfloat16 before they are requantized."""
        return self.requantize != "none" and self.out_dtype == "bfloat16"

    @property
    def stored_dtype(self) -> str:
        """Element type of the array the kernel writes."""
        return self.out_dtype if self.requantize == "none" else "float8_e4m3fn"

    def unsupported(self) -> str | None:
        """Why no configuration of the Hopper kernels can run this, or None."""
        if self.dtype not in _OPERANDS:
            return f"operands of {self.dtype} have no Hopper matrix instruction here; there are {', '.join(_OPERANDS)}"
        if self.out_dtype not in _OUTPUTS:
            return f"out_dtype {self.out_dtype} is not one of {', '.join(_OUTPUTS)}"
        if (self.lhs_scale == "group") != (self.rhs_scale == "block"):
            return f"lhs_scale {self.lhs_scale!r} with rhs_scale {self.rhs_scale!r}: 1x128 goes with 128x128"
        if self.is_block_scaled and self.dtype != "float8_e4m3fn":
            return f"block scales of {self.dtype}; only float8_e4m3fn is promoted every 128 of K"
        if self.k * self.itemsize % ROW_BYTES:
            return f"K={self.k} of {self.dtype}: a row of K must be a multiple of {ROW_BYTES} bytes"
        if self.n % 8 or self.n * jnp.dtype(self.stored_dtype).itemsize % 32:
            return f"N={self.n}: a row of the {self.stored_dtype} output must be a multiple of 32 bytes and N of 8"
        if (
            self.activation is not None
            and self.activation.name.startswith("gelu")
            and "tanh" not in self.activation.name
        ):
            return f"activation {self.activation.name}: erf has no layout rule in Mosaic GPU (jax 0.10.2 and 0.11.2)"
        return None


@dataclasses.dataclass(frozen=True)
class GemmConfig:
    """One way to run a ``GemmDesc`` on sm_90.

    block_m: rows of a tile, all of one expert (64 or 128: one or two multiplying warpgroups of 64 rows). block_n:
    output columns of a tile; a tile multiplies with projections * block_n weight rows. num_stages: slots of the
    shared-memory ring, each one K step. raster_group_m: row tiles walked together, so that blocks running at the
    same time share
    weights and activations in L2. row_chunk: rows of one activation load and of one output store; chunks without a row
    in use are left out, which needs ``has_tile_rows``. None moves whole tiles. num_sms: persistent blocks, one per
    multiprocessor. swap_ab: weights are the left operand of the product: block_m is one of SWAPPED_BLOCK_MS, and one
    to four warpgroups multiply 64 channels (of each half) each, together block_n; of tall tiles of 256 columns two
    multiply 128 each.
    step_blocks: blocks of 128 bytes of K in a step. Rows of K that are no multiple of 128 bytes are brought in boxes 64
    or 32 bytes wide, which then come in larger batches. cluster: blocks of a thread block cluster, 1 or 2. Two work on
    neighbouring column tiles of one row tile, and each loads half of its rows for both (multicast). shares_weights: two
    work on neighbouring row tiles instead, and share the weights where both tiles are of one expert.
    """

    block_m: int
    block_n: int
    num_stages: int
    raster_group_m: int = 8
    row_chunk: int | None = None
    num_sms: int = 132
    swap_ab: bool = False
    step_blocks: int = 1
    cluster: int = 1
    shares_weights: bool = False

    @property
    def num_consumers(self) -> int:
        return self.block_n // self.consumer_channels if self.swap_ab else self.block_m // 64

    @property
    def is_large_m(self) -> bool:
        """Swapped operands with more rows than their kernel stores at once."""
        return self.swap_ab and self.block_m > 96

    @property
    def consumer_channels(self) -> int:
        """Output columns of one warpgroup with swapped operands. Sums of tall tiles leave no room for a fourth one."""
        return 128 if self.is_large_m and self.block_n == 256 else 64

    @property
    def rows_moved(self) -> int:
        """Rows of one activation load."""
        return self.block_m if self.row_chunk is None else self.row_chunk


def block_k(desc: GemmDesc, config: GemmConfig) -> int:
    """Elements of K per step. A block of 128 bytes is one scale group where operands are 8 bit wide."""
    return config.step_blocks * 128 // desc.itemsize


def piece_n(desc: GemmDesc, config: GemmConfig) -> int:
    """Weight rows multiplied at a time: all of a tile, or 128 when each product is promoted at once.

    Promotion needs the running sums and the product of the current K step in registers together: 128 + 64 a thread for
    tiles of 256 weight rows in pieces of 128, where pieces of 256 spill.
    """
    rows = desc.projections * config.block_n
    return min(rows, SCALE_GROUP) if desc.is_block_scaled and not config.swap_ab else rows


def swapped_sums(desc: GemmDesc, config: GemmConfig) -> int:
    """Sums of a tile that each thread of a consumer holds with swapped operands; with block scales as many again are
    products of the current K step.
    """
    sums = desc.projections * config.consumer_channels * config.block_m // 128
    return 2 * sums if desc.is_block_scaled else sums


def reassigns_registers(desc: GemmDesc, config: GemmConfig) -> bool:
    """Whether the sums of swapped operands need registers of the producer."""
    return swapped_sums(desc, config) > _SWAPPED_SUMS[config.num_consumers]


def row_scales_shape(config: GemmConfig) -> tuple[int, int]:
    """Shared memory for one K step's activation scales of each slot: each slot's where a bulk copy may start."""
    multiple = TMA_ALIGN // 4
    return config.num_stages, -(-config.block_m // multiple) * multiple


def store_rows(config: GemmConfig) -> int:
    """Rows of one staged output store with swapped operands: the tile, or pieces of tall ones, 12 KiB with both slots
    of all consumers. What staging takes the ring lacks: with 16 KiB, 160 rows with scales and bias get three stages.
    """
    return 48 // config.num_consumers if config.is_large_m else config.block_m


def staging_shape(desc: GemmDesc, config: GemmConfig) -> tuple[int, ...]:
    """Shared memory in which the output is staged: (consumers, slots, 64, columns), swapped (consumers, slots, rows,
    64).
    """
    if config.swap_ab:
        return (config.num_consumers, 2 if config.is_large_m else 1, store_rows(config), 64)
    columns = store_columns(desc, config)
    return (config.num_consumers, 1 if columns == config.block_n else 2, 64, columns)


def store_columns(desc: GemmDesc, config: GemmConfig) -> int:
    """Columns of one staged output store: 128 bytes of the output row where they divide block_n."""
    columns = 128 // jnp.dtype(desc.stored_dtype).itemsize
    if config.swap_ab:
        return min(columns, 64)
    while config.block_n % columns:
        columns //= 2
    return columns


def store_swizzle(desc: GemmDesc, config: GemmConfig) -> int | None:
    """Swizzle of the staging buffer: must divide a staged row and, since the store clips at N, a row of the output."""
    itemsize = jnp.dtype(desc.stored_dtype).itemsize
    staged, row = (swizzle_bytes(columns * itemsize) for columns in (store_columns(desc, config), desc.n))
    return None if staged is None or row is None else min(staged, row)


def shared_memory(desc: GemmDesc, config: GemmConfig) -> int:
    """Bytes of shared memory a block uses: the ring, the output staging, per-tile vectors, barriers."""
    tile_rows = desc.projections * config.block_n
    step = block_k(desc, config)
    total = smem_bytes((config.num_stages, config.block_m, step), desc.dtype)
    total += smem_bytes((config.num_stages, tile_rows, step), desc.dtype)
    total += smem_bytes(staging_shape(desc, config), desc.stored_dtype)
    if desc.is_block_scaled:
        total += smem_bytes(row_scales_shape(config), "float32")
    if desc.lhs_scale == "row":
        total += smem_bytes((config.block_m,), "float32")
    if desc.rhs_scale == "channel":
        total += smem_bytes(vector_shape(desc, config, "float32"), "float32")
    if desc.bias_dtype is not None:
        total += smem_bytes(vector_shape(desc, config, desc.bias_dtype), desc.bias_dtype)
    pieces = tile_rows // piece_n(desc, config)
    return total + 8 * (config.num_stages * (1 + pieces) + 2)


def vector_shape(desc: GemmDesc, config: GemmConfig, dtype: str) -> tuple[int, int]:
    """Shared memory for numbers of columns: (projections, columns of a tile), each half where a bulk copy may
    start."""
    multiple = TMA_ALIGN // jnp.dtype(dtype).itemsize if desc.projections > 1 else 1
    return desc.projections, -(-config.block_n // multiple) * multiple


def config_error(desc: GemmDesc, config: GemmConfig) -> str | None:
    """Why ``config`` cannot run ``desc``, or None when it can."""
    if reason := desc.unsupported():
        return reason
    tile_rows = desc.projections * config.block_n
    if config.swap_ab:
        if reason := _swapped_error(desc, config):
            return reason
    elif config.block_m not in BLOCK_MS:
        return f"block_m={config.block_m}: one or two warpgroups of 64 rows multiply, so 64 or 128"
    if desc.rows % config.block_m:
        return f"rows={desc.rows} is not a multiple of block_m={config.block_m}"
    if reason := unpermuted_rows_error(desc.unpermuted_rows, config.block_m):
        return reason
    if config.block_n % 16 or (config.block_n if config.swap_ab else tile_rows) > TMA_BOX:
        stacked = f"{desc.projections} projections"
        return f"block_n={config.block_n} with {stacked}: a multiple of 16, at most {TMA_BOX} weight rows"
    if desc.is_block_scaled and config.block_n not in (64, 128, 256):
        return f"block_n={config.block_n}: with 128x128 weight blocks 64, 128 or 256, so that a tile's blocks are whole"
    if desc.requantize == "group" and config.block_n != SCALE_GROUP:
        return f"block_n={config.block_n}: requantization in groups of {SCALE_GROUP} columns needs one group per tile"
    if store_swizzle(desc, config) is None:
        return (
            f"block_n={config.block_n}: {store_columns(desc, config)} columns of {desc.stored_dtype} are under 32 bytes"
        )
    if config.row_chunk is not None:
        if not desc.has_tile_rows:
            return f"row_chunk={config.row_chunk} needs tile_rows"
        if config.row_chunk not in (8, 16, 32, 64):
            return f"row_chunk={config.row_chunk}: 8, 16, 32 or 64, so that chunks start on rows of a swizzle tile"
        if config.row_chunk < least_chunk(desc, config.block_m, config.block_n):
            return f"row_chunk={config.row_chunk}: that many stores of 2 x 128 columns of 16 bits spill; 32 or 64"
    if config.step_blocks not in (1, 2, 4) or (config.step_blocks > 1 and desc.is_block_scaled):
        return f"step_blocks={config.step_blocks}: 1, 2 or 4, and 1 where every 128 of K are scaled"
    if reason := _cluster_error(config):
        return reason
    if config.num_stages < 2:
        return f"num_stages={config.num_stages}: at least 2, one loading while one is multiplied"
    if (needed := shared_memory(desc, config)) > SMEM_BYTES:
        return f"needs {needed} bytes of shared memory with {config.num_stages} stages, a block has {SMEM_BYTES}"
    return None


def least_chunk(desc: GemmDesc, block_m: int, block_n: int) -> int:
    """The least ``row_chunk``: beside 128 sums a thread what eight stores of 16 rows ask spills, with operands of
    16 bits.
    """
    return 32 if block_m == 128 and desc.projections == 2 and block_n == 128 and desc.itemsize == 2 else 8


def _cluster_error(config: GemmConfig) -> str | None:
    if config.cluster not in (1, 2):
        return f"cluster={config.cluster}: 1 or 2 blocks"
    if config.shares_weights and config.cluster == 1:
        return "shares_weights with cluster=1: it takes two blocks to share; cluster=2"
    if config.cluster == 2 and config.num_sms % 2:
        return f"num_sms={config.num_sms} blocks do not pair up; cluster=2 needs an even number"
    if config.cluster == 2 and config.row_chunk is not None:
        return f"cluster=2 with row_chunk={config.row_chunk}: both blocks load whole tiles"
    if config.cluster == 2 and not config.shares_weights and config.block_m % 16:
        return f"cluster=2 with block_m={config.block_m}: each block loads half of the rows, a multiple of 8"
    return None


def _swapped_error(desc: GemmDesc, config: GemmConfig) -> str | None:
    if config.block_m not in SWAPPED_BLOCK_MS:
        return f"block_m={config.block_m} is not one of {SWAPPED_BLOCK_MS}, the heights with swapped operands"
    if config.block_n not in (64, 128, 192, 256):
        return f"block_n={config.block_n}: one to four warpgroups of 64 channels with swapped operands"
    room = _SWAPPED_SUMS_REASSIGNED[config.num_consumers]
    if (sums := swapped_sums(desc, config)) > room:
        return f"block_m={config.block_m}: {sums} registers of sums, {room} with {config.num_consumers} consumers"
    if config.row_chunk is not None:
        return f"row_chunk={config.row_chunk}: a tile of swapped operands is moved whole"
    if desc.requantize != "none":
        return f"swapped operands with requantize {desc.requantize!r}: not built, rows are requantized apart"
    if desc.is_block_scaled and config.block_m > SWAPPED_BLOCK_ROWS:
        return f"block_m={config.block_m}: with 128x128 weight blocks at most {SWAPPED_BLOCK_ROWS} where swapped"
    if desc.is_block_scaled and config.cluster > 1:
        return "cluster=2 with swapped operands and 128x128 weight blocks: not built"
    if jnp.dtype(desc.stored_dtype).itemsize != 2:
        return f"swapped operands store 16-bit rows, not {desc.stored_dtype}"
    return None
