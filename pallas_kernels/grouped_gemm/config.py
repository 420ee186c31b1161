"""How ``grouped_gemm`` is run on Hopper (``GemmConfig``), and whether that fits a call."""

import dataclasses

import jax.numpy as jnp

from pallas_kernels.common.rows import unpermuted_rows_error
from pallas_kernels.common.sm90 import REDUCTION_BYTES, SMEM_BYTES, TMA_ALIGN, TMA_BOX, smem_bytes, swizzle_bytes
from pallas_kernels.grouped_gemm.few_rows import FewRowsConfig, few_rows_error
from pallas_kernels.grouped_gemm.problem import SCALE_GROUP, TRANSPOSED_UNIT, GemmDesc, GroupedGemm
from pallas_kernels.grouped_gemm.vector import VectorConfig, vector_error

BLOCK_MS = (64, 128)  # Rows of a tile of the plain main loop: one or two warpgroups of 64.
SWAP_AB_BLOCK_MS = (8, 16, 24, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192)
HANDED_OVER = 8  # Rows that a consumer requantizes at a time: those of a swizzle tile.
SMALL_M = 96  # At most so many rows make a small-M tile; with block scales each row's scale costs in every step.
# Accumulators (registers) that a thread has room for with swap_ab, by number of consumers: with what all warpgroups
# enter with, and with what remains for a consumer when the producer gives registers away.
_ROOM = {1: 192, 2: 96, 3: 64, 4: 40}
_ROOM_REASSIGNED = {1: 192, 2: 192, 3: 104, 4: 40}
# (consumer, producer) registers a thread, by number of consumers. Asking for more together than all enter with never
# returns. One consumer enters with up to 255 and keeps them; four have no large-M tiles.
_REGISTERS = {1: None, 2: (240, 24), 3: (160, 32), 4: None}

SharedArray = tuple[tuple[int, ...], str]  # shape and dtype


@dataclasses.dataclass(frozen=True)
class GemmConfig:
    """One way to run a ``GemmDesc`` on sm_90.

    Args:
        block_m: rows of a tile, all of one expert; 64 or 128, with swap_ab one of SWAP_AB_BLOCK_MS.
        block_n: output columns of a tile, which multiplies with G * block_n weight rows.
        num_stages: slots of the shared-memory ring, each one K step.
        raster_group_m: row tiles walked together, so that CTAs running at the same time share operands in L2.
        row_chunk: rows of one activation load and of one output store. Chunks without a row in use are left out, which
            needs ``has_tile_rows``. None moves whole tiles.
        num_sms: persistent CTAs, one per SM.
        swap_ab: weights are the left operand of wgmma. One to four warpgroups then multiply 64 channels (of each
            projection) each, together block_n; in large-M tiles of 256 columns two multiply 128 each.
        step_blocks: blocks of 128 bytes of K in a step. Rows of K that are no multiple of 128 bytes come in boxes 64 or
            32 bytes wide, in larger batches.
        cluster: CTAs of a cluster, 1 or 2. Two work on neighbouring column tiles of one row tile, and each loads half
            of its rows for both (multicast).
        shares_weights: the CTAs of a cluster work on neighbouring row tiles instead, and share the weights where both
            tiles have one expert.
        sharers: with swap_ab, consumers that multiply the same 64 channels. They take the K steps in turn, and the
            first one adds up their sums. 1: each has channels of its own.
        inline_ptx: sigmoid and rounding in PTX; False for JAX's GPU interpreter, which cannot run it.
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
    sharers: int = 1
    inline_ptx: bool = True

    @property
    def num_consumers(self) -> int:
        return self.sharers * self.block_n // self.consumer_channels if self.swap_ab else self.block_m // 64

    @property
    def is_large_m(self) -> bool:
        """With swap_ab, more rows than are stored at once."""
        return self.swap_ab and self.block_m > SMALL_M

    @property
    def consumer_channels(self) -> int:
        """Output columns of one warpgroup with swap_ab. Accumulators of large-M tiles leave no room for a fourth
        one."""
        return 128 if self.is_large_m and self.block_n == 256 else 64

    @property
    def rows_moved(self) -> int:
        """Rows of one activation load."""
        return self.block_m if self.row_chunk is None else self.row_chunk

    def block_k(self, desc: GemmDesc) -> int:
        """Elements of K per step. A block of 128 bytes is one scale group where operands are 8 bit wide."""
        return self.step_blocks * 128 // desc.itemsize


def piece_n(desc: GemmDesc, config: GemmConfig) -> int:
    """Weight rows multiplied at a time: all of a tile, or 128 when each product is promoted at once.

    Promotion needs the running sums and the product of the current K step in registers together: 128 + 64 a thread for
    tiles of 256 weight rows in pieces of 128, where pieces of 256 spill.
    """
    rows = desc.projections * config.block_n
    return min(rows, SCALE_GROUP) if desc.is_block_scaled and not config.swap_ab else rows


def num_pieces(desc: GemmDesc, config: GemmConfig) -> int:
    """Pieces of a tile's weight rows."""
    return desc.projections * config.block_n // piece_n(desc, config)


def copies_per_piece(desc: GemmDesc, config: GemmConfig) -> int:
    """TMA copies that bring one piece of a weight tile; a copy stays inside one projection."""
    return -(-piece_n(desc, config) // config.block_n)


def accumulators(desc: GemmDesc, config: GemmConfig) -> int:
    """Value of accumulators that each thread of a consumer holds with swap_ab; with block scales as many again hold
    the products of the current K step.
    """
    count = desc.projections * config.consumer_channels * config.block_m // 128
    return 2 * count if desc.is_block_scaled else count


def registers(desc: GemmDesc, config: GemmConfig) -> tuple[int, int] | None:
    """Value a thread that (consumers, producer) ask for, None where they keep those they enter with."""
    if config.swap_ab and accumulators(desc, config) <= _ROOM[config.num_consumers]:
        return None
    return _REGISTERS[config.num_consumers]


def store_rows(config: GemmConfig) -> int:
    """Rows of one staged output store with swap_ab: the tile, or pieces of large-M ones, 12 KiB with both slots of all
    consumers. What staging takes the ring lacks: with 16 KiB, 160 rows with scales and bias get three stages.
    """
    return 48 // config.num_consumers if config.is_large_m else config.block_m


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


def hands_over(desc: GemmDesc, config: GemmConfig) -> bool:
    """Whether consumers requantize rows whose columns they made together, which pass through shared memory."""
    return config.swap_ab and desc.requantize != "none"


def shared_arrays(desc: GemmDesc, config: GemmConfig) -> dict[str, SharedArray]:
    """(shape, dtype) of what a CTA keeps in shared memory, by field of ``Scratch``.

    x, w: (stages, rows, K of a step), transposed weights (stages, K of a step, columns). staging: (consumers, slots,
    64, columns), with swap_ab (consumers, slots, rows, 64), one for those that share channels. handed_over: in its
    place, (pieces, rows of a piece, columns), where rows are requantized with swap_ab. partial: as
    ``pipeline_sm90.gather_sums`` has it. Scales of a step and vectors of a projection each start where a TMA copy may
    start.
    """
    stages, step, columns = config.num_stages, config.block_k(desc), store_columns(desc, config)

    def padded(count: int, dtype: str) -> int:
        multiple = TMA_ALIGN // jnp.dtype(dtype).itemsize
        return -(-count // multiple) * multiple

    def of_columns(dtype: str) -> SharedArray:
        width = padded(config.block_n, dtype) if desc.projections > 1 else config.block_n
        return (desc.projections, width), dtype

    weight_rows = desc.projections * config.block_n
    slots = (2 if config.is_large_m else 1, store_rows(config), 64)
    if not config.swap_ab:
        slots = (1 if columns == config.block_n else 2, 64, columns)
    arrays: dict[str, SharedArray] = dict(
        x=((stages, config.block_m, step), desc.dtype),
        w=((stages, *((step, config.block_n) if desc.transposes_w else (weight_rows, step))), desc.dtype),
        staging=((config.num_consumers // config.sharers, *slots), desc.stored_dtype),
    )
    if hands_over(desc, config):
        del arrays["staging"]
        arrays["handed_over"] = ((config.block_m // HANDED_OVER, HANDED_OVER, config.block_n), desc.out_dtype)
    if config.sharers > 1:
        arrays["partial"] = ((1, config.sharers - 1, 1, 1, 64, config.block_m), desc.accumulator)
    if desc.is_block_scaled:
        arrays["x_scale"] = ((stages, config.step_blocks, padded(config.block_m, "float32")), "float32")
    if desc.lhs_scale == "row":
        arrays["rows"] = ((config.block_m,), "float32")
    if desc.rhs_scale == "channel":
        arrays["columns"] = of_columns("float32")
    if desc.bias_dtype is not None:
        arrays["bias"] = of_columns(desc.bias_dtype)
    return arrays


def shared_memory(desc: GemmDesc, config: GemmConfig) -> int:
    """Bytes of shared memory a CTA uses: the ring, the output staging, per-tile vectors, what Mosaic keeps for the
    largest value of a row, or its sum, barriers.
    """
    total = sum(smem_bytes(*array) for array in shared_arrays(desc, config).values())
    total += smem_bytes((REDUCTION_BYTES,), "int8") * (desc.requantize == "group" or desc.pulls is not None)
    return total + 8 * (config.num_stages * (1 + num_pieces(desc, config)) + 4)


def rows_error(desc: GroupedGemm, block_m: int) -> str | None:
    """Why tiles of ``block_m`` rows do not fit the rows of a call, or None."""
    if desc.rows % block_m:
        return f"rows={desc.rows} is not a multiple of block_m={block_m}"
    return unpermuted_rows_error(desc.unpermuted_rows, block_m)


def widths_error(desc: GroupedGemm, block_n: int) -> str | None:
    """Why a tile of ``block_n`` columns would lie in two of several weights, or None."""
    if any(start % block_n for start in desc.starts):
        return f"block_n={block_n}: weights of {', '.join(map(str, desc.widths))} columns side by side share a tile"
    return None


def ring_error(num_stages: int, needed: int) -> str | None:
    """Why a ring cannot be had whose CTA needs so many bytes of shared memory, or None."""
    if num_stages < 2:
        return f"num_stages={num_stages}: at least 2, one loading while one is multiplied"
    if needed > SMEM_BYTES:
        return f"needs {needed} bytes of shared memory with {num_stages} stages, a CTA has {SMEM_BYTES}"
    return None


def config_error(desc: GemmDesc, config: GemmConfig | VectorConfig | FewRowsConfig) -> str | None:
    """Why ``config`` cannot run ``desc``, or None when it can."""
    if isinstance(config, VectorConfig):
        return vector_error(desc, config)
    if isinstance(config, FewRowsConfig):
        return few_rows_error(desc, config)
    if reason := desc.unsupported():
        return reason
    if desc.quantization != "none":
        return f"quantization {desc.quantization!r} of x: tiles of one row alone quantize it"
    if desc.top_k:
        return "the sum of a token's rows: tiles of one row alone add them up"
    if desc.k_parts > 1 and desc.k % (desc.k_parts * config.block_k(desc)):
        return f"k_parts={desc.k_parts}: K={desc.k} has to be whole steps of {config.block_k(desc)} for each"
    if desc.k_parts > 1 and config.cluster > 1:
        return f"k_parts={desc.k_parts} in clusters: not built"
    if reason := _sharers_error(desc, config):
        return reason
    if config.swap_ab:
        if reason := _swap_ab_error(desc, config):
            return reason
    elif config.block_m not in BLOCK_MS:
        return f"block_m={config.block_m}: one or two warpgroups of 64 rows multiply, so 64 or 128"
    if reason := rows_error(desc, config.block_m) or widths_error(desc, config.block_n):
        return reason
    box = config.block_n if config.swap_ab else desc.projections * config.block_n
    if config.block_n % 16 or box > TMA_BOX:
        stacked = f"{desc.projections} projections"
        return f"block_n={config.block_n} with {stacked}: a multiple of 16, at most {TMA_BOX} weight rows"
    if desc.is_block_scaled and config.block_n not in (64, 128, 256):
        return f"block_n={config.block_n}: with 128x128 weight blocks 64, 128 or 256, so that a tile's blocks are whole"
    if desc.transposes_w and (reason := _transposed_error(config)):
        return reason
    if desc.has_outputs_beside and config.row_chunk is not None:
        return f"row_chunk={config.row_chunk} with several outputs: not built, tiles are moved whole"
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
    if config.step_blocks not in (1, 2, 4):
        return f"step_blocks={config.step_blocks}: 1, 2 or 4"
    if config.step_blocks > 1 and desc.is_block_scaled:
        if not config.swap_ab:
            return f"step_blocks={config.step_blocks} where every 128 of K are scaled: built with swap_ab alone"
        if desc.k % config.block_k(desc):
            return (
                f"step_blocks={config.step_blocks}: K={desc.k} has to be whole steps where every 128 of it are scaled"
            )
    return _cluster_error(config) or ring_error(config.num_stages, shared_memory(desc, config))


def least_chunk(desc: GemmDesc, block_m: int, block_n: int) -> int:
    """The least ``row_chunk``: with operands of 16 bits, eight stores of 16 rows spill beside 128 accumulators."""
    return 32 if block_m == 128 and desc.projections == 2 and block_n == 128 and desc.itemsize == 2 else 8


def _transposed_error(config: GemmConfig) -> str | None:
    if config.swap_ab:
        return "swap_ab with transposed weights: not built"
    if config.cluster > 1 or config.step_blocks > 1:
        return "transposed weights in clusters, or in steps of several blocks: not built"
    if config.block_n % TRANSPOSED_UNIT:
        return f"block_n={config.block_n}: with transposed weights a multiple of {TRANSPOSED_UNIT}"
    return None


def _cluster_error(config: GemmConfig) -> str | None:
    if config.cluster not in (1, 2):
        return f"cluster={config.cluster}: 1 or 2 CTAs"
    if config.shares_weights and config.cluster == 1:
        return "shares_weights with cluster=1: it takes two CTAs to share; cluster=2"
    if config.cluster == 2 and config.num_sms % 2:
        return f"num_sms={config.num_sms} CTAs do not pair up; cluster=2 needs an even number"
    if config.cluster == 2 and config.row_chunk is not None:
        return f"cluster=2 with row_chunk={config.row_chunk}: both CTAs load whole tiles"
    if config.cluster == 2 and not config.shares_weights and config.block_m % 16:
        return f"cluster=2 with block_m={config.block_m}: each CTA loads half of the rows, a multiple of 8"
    return None


def _sharers_error(desc: GemmDesc, config: GemmConfig) -> str | None:
    if config.sharers == 1:
        return None
    if config.sharers not in (2, 3, 4):
        return f"sharers={config.sharers}: 1 to 4 consumers"
    if not config.swap_ab or config.block_n != 64 or config.is_large_m or config.cluster > 1 or desc.projections > 1:
        return f"sharers={config.sharers}: swap_ab in small-M tiles of 64 columns, one projection, no clusters"
    steps = -(-desc.k // (desc.k_parts * config.block_k(desc)))
    if steps % config.sharers or config.num_stages % config.sharers:
        return f"sharers={config.sharers}: {steps} K steps and {config.num_stages} stages, each has to have as many"
    return None


def _swap_ab_error(desc: GemmDesc, config: GemmConfig) -> str | None:
    if config.block_m not in SWAP_AB_BLOCK_MS:
        return f"block_m={config.block_m} is not one of {SWAP_AB_BLOCK_MS}, the heights with swap_ab"
    if config.block_n not in (64, 128, 192, 256):
        return f"block_n={config.block_n}: one to four warpgroups of 64 channels with swap_ab"
    room, needed = _ROOM_REASSIGNED[config.num_consumers], accumulators(desc, config)
    if needed > room:
        with_consumers = f"room for {room} with {config.num_consumers} consumers"
        return f"block_m={config.block_m}: {needed} accumulators a thread, {with_consumers}"
    if config.row_chunk is not None:
        return f"row_chunk={config.row_chunk}: with swap_ab a tile is moved whole"
    if desc.keeps_before:
        return "swap_ab with keeps_before: not built"
    if desc.requantize != "none" and (reason := _hand_over_error(desc, config)):
        return f"swap_ab with requantize {desc.requantize!r}: {reason}"
    if desc.is_block_scaled and config.is_large_m:
        return f"block_m={config.block_m}: swap_ab with 128x128 weight blocks takes at most {SMALL_M}"
    if desc.is_block_scaled and config.cluster > 1:
        return "cluster=2 with swap_ab and 128x128 weight blocks: not built"
    if jnp.dtype(desc.out_dtype).itemsize != 2:
        return f"swap_ab stores 16-bit rows, not {desc.out_dtype}"
    return None


def _hand_over_error(desc: GemmDesc, config: GemmConfig) -> str | None:
    if desc.out_dtype != "bfloat16":
        return f"rows pass through shared memory in bfloat16; {desc.out_dtype} is not built"
    if config.block_n != SCALE_GROUP or desc.n % SCALE_GROUP:
        return f"block_n={config.block_n} and N={desc.n}: {SCALE_GROUP} columns a tile, and N a multiple of them"
    if config.is_large_m or config.cluster > 1 or config.sharers > 1:
        return "large-M tiles, clusters and consumers that share channels: not built"
    return None
