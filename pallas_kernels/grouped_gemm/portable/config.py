"""How a grouped GEMM is run by ``mma.sync`` (``MmaConfig``), and whether that fits a call."""

import dataclasses

import jax.numpy as jnp

from pallas_kernels.common.targets import Target
from pallas_kernels.grouped_gemm.packed.format import BLOCK_N
from pallas_kernels.grouped_gemm.packed.problem import PackedDesc
from pallas_kernels.grouped_gemm.problem import GemmDesc

AnyDesc = GemmDesc | PackedDesc
BLOCK_MS = (16, 32, 64, 128)
STEP_BYTES = 128  # of a row of K in a step
ALIGNMENT = 16  # bytes of a cp.async
_OUTPUTS = ("bfloat16", "float16", "float32")


@dataclasses.dataclass(frozen=True)
class MmaConfig:
    """One way to run a call on ``target``.

    Args:
        block_m: rows of a tile, all of one expert; one of BLOCK_MS.
        block_n: output columns of a tile, which multiplies with G * block_n weight rows; 64 or 128.
        num_stages: slots of the shared-memory ring, each one K step.
        step_blocks: blocks of packed weights in a step; 1 for plain ones, whose step is 128 bytes of a row.
        raster_group_m: row tiles walked together, so that CTAs running at the same time share operands in L2.
        target: what it is compiled for.
    """

    block_m: int
    block_n: int
    num_stages: int
    step_blocks: int = 1
    raster_group_m: int = 8
    target: Target = Target(8, 0)

    @property
    def m_warps(self) -> int:
        """Warps that share a tile's rows; the others share its columns. With plain weights alone."""
        return 1 if self.block_m < 64 else 2


def step_k(desc: AnyDesc, config: MmaConfig) -> int:
    """Elements of K of a step."""
    if isinstance(desc, PackedDesc):
        return desc.fmt.block_k * config.step_blocks
    return STEP_BYTES // desc.itemsize


def piece_m(desc: AnyDesc, config: MmaConfig) -> int:
    """Rows that one product takes; more at once spill. Operands of e4m3 may be unpacked to float16 by ptxas."""
    if isinstance(desc, PackedDesc):
        return min(config.block_m, 16 if desc.fmt.element == "e2m1" or desc.fmt.operand == "float8_e4m3fn" else 32)
    if desc.dtype != "float8_e4m3fn" or config.m_warps == 1:
        return config.block_m
    return min(config.block_m, 32 if desc.is_block_scaled else 64)


def unpacks_late(desc: PackedDesc) -> bool:
    """Whether a block is unpacked when it is multiplied, rows loaded anew for each: all blocks at once spill."""
    return desc.fmt.element == "e2m1" or desc.fmt.operand == "float8_e4m3fn"


def folds_scales(desc: PackedDesc) -> bool:
    """Whether group scales are multiplied into the operands, rounded once, instead of into the float32 partial sums."""
    # Operands made of e4m3 spend the one multiplication on their exponents.
    return (
        desc.fmt.scale == "group" and desc.fmt.operand == desc.scale_dtype == "bfloat16" and desc.fmt.element != "e4m3"
    )


def is_promoted(desc: AnyDesc) -> bool:
    """Whether the partial sum of every group of K is scaled and added in float32."""
    if isinstance(desc, GemmDesc):
        return desc.is_block_scaled
    return desc.fmt.scale == "group" and not folds_scales(desc)


def group_rows(desc: PackedDesc, config: MmaConfig) -> int:
    """Rows (of 64 channels) of group scales, or zero points, that a step takes."""
    group = desc.fmt.group_size
    return 1 if group is None else max(1, step_k(desc, config) // group)


def stage_bytes(desc: AnyDesc, config: MmaConfig) -> int:
    """Shared memory of one slot of the ring."""
    if isinstance(desc, GemmDesc):
        return STEP_BYTES * (config.block_m + desc.projections * config.block_n)
    rows, columns = desc.fmt.block_shape
    blocks = desc.projections * config.block_n // BLOCK_N
    itemsize = jnp.dtype(desc.fmt.operand).itemsize
    total = config.block_m * step_k(desc, config) * itemsize + 4 * rows * columns * blocks * config.step_blocks
    vectors = group_rows(desc, config) * BLOCK_N * blocks
    if desc.fmt.scale == "group":
        total += vectors * jnp.dtype(desc.scale_dtype).itemsize
    if desc.fmt.has_zero_point:
        total += vectors * itemsize
    return total


def shared_memory(desc: AnyDesc, config: MmaConfig) -> int:
    """Bytes of shared memory a CTA uses: the ring, and in its place the staged output. Arrays start at 1 KiB."""
    staged = config.block_m * config.block_n * jnp.dtype(desc.out_dtype).itemsize
    return max(config.num_stages * stage_bytes(desc, config), staged) + 1024


def config_error(desc: AnyDesc, config: MmaConfig) -> str | None:
    """Why ``config`` cannot run ``desc``, or None."""
    if (reason := unsupported(desc, config.target)) is not None:
        return reason
    if config.block_m not in BLOCK_MS:
        return f"tiles of {config.block_m} rows; there are {', '.join(map(str, BLOCK_MS))}"
    if config.block_n not in (64, 128):
        return f"tiles of {config.block_n} columns; there are 64 and 128"
    if isinstance(desc, PackedDesc) and desc.k // desc.fmt.block_k % config.step_blocks:
        return f"steps of {config.step_blocks} blocks: K has {desc.k // desc.fmt.block_k}"
    if desc.rows % config.block_m:
        return f"rows={desc.rows} is not a multiple of block_m={config.block_m}"
    if desc.unpermuted_rows > config.block_m:
        return f"the same {desc.unpermuted_rows} rows in every tile: a tile has {config.block_m}"
    if config.block_m * config.block_n < 2048:
        return f"tiles of {config.block_m} x {config.block_n}: a staged store takes 2048 elements"
    if config.num_stages < 2:
        return f"num_stages={config.num_stages}: at least 2, one loading while one is multiplied"
    needed, room = shared_memory(desc, config), config.target.smem_bytes
    return f"{needed} bytes of shared memory, {config.target} has {room}" if needed > room else None


def unsupported(desc: AnyDesc, target: Target) -> str | None:
    """Why no configuration can run ``desc`` on ``target``, or None."""
    if desc.out_dtype not in _OUTPUTS:
        return f"out_dtype {desc.out_dtype} is not one of {', '.join(_OUTPUTS)}"
    name = "" if desc.activation is None else desc.activation.name
    if name.startswith("gelu") and "tanh" not in name:
        return f"activation {name}: erf has no layout rule in Mosaic GPU (jax 0.11.2)"
    if isinstance(desc, PackedDesc):
        return _unsupported_packed(desc, target)
    if desc.dtype not in ("bfloat16", "float16", "float8_e4m3fn", "int8"):
        return f"operands of {desc.dtype}"
    if desc.dtype == "float8_e4m3fn" and not target.multiplies_e4m3:
        return f"e4m3 operands: {target} multiplies and converts none"
    if desc.requantize != "none":
        return f"requantize={desc.requantize!r}: rows are requantized by another launch"
    if (desc.lhs_scale == "group") != (desc.rhs_scale == "block"):
        return f"lhs_scale {desc.lhs_scale!r} with rhs_scale {desc.rhs_scale!r}: 1x128 goes with 128x128"
    if desc.is_block_scaled and desc.dtype != "float8_e4m3fn":
        return f"block scales of {desc.dtype}"
    if desc.k * desc.itemsize % ALIGNMENT:
        return f"K={desc.k} of {desc.dtype}: a row of K must be a multiple of {ALIGNMENT} bytes"
    return None


def _unsupported_packed(desc: PackedDesc, target: Target) -> str | None:
    fmt = desc.fmt
    if desc.out_dtype == "float32":
        return "out_dtype float32 with packed weights"
    if fmt.operand == "float8_e4m3fn" and not target.multiplies_e4m3:
        return f"e4m3 operands: {target} multiplies and converts none"
    # What the packed format itself excludes, whoever unpacks it.
    reason = desc.unsupported()
    if reason is not None and "row of the" not in reason and "erf" not in reason:
        return reason
    return None


def largest_block_m(desc: AnyDesc, target: Target) -> int:
    """Rows of the highest tile that ptxas compiles without spills."""
    is_gated = desc.projections > 1
    if isinstance(desc, GemmDesc):
        if desc.dtype != "float8_e4m3fn":
            return 128
        if desc.is_block_scaled:
            return 32 if is_gated else 64
        return 32 if target.unpacks_e4m3 else 128
    if desc.fmt.operand == "float8_e4m3fn":
        return 32 if is_gated or not is_promoted(desc) else 64
    if desc.fmt.element == "e2m1":
        return 64
    if is_promoted(desc):
        return 32 if is_gated and (desc.fmt.group_size or 128) < 64 else 64
    if desc.fmt.element == "int4" and not desc.fmt.is_8bit:
        return 128 if folds_scales(desc) and target == Target(9, 0) else 64
    return 128


def choose_block_m(rows: float, most: int = BLOCK_MS[-1]) -> int:
    """Rows of a tile, ``most`` at most, for ``rows`` expected rows of an expert that is hit."""
    return next(block_m for block_m in BLOCK_MS if rows <= block_m or block_m == most)


def choose_config(desc: AnyDesc, block_m: int, target: Target) -> MmaConfig:
    """The configuration for tiles of ``block_m`` rows. Raises NotImplementedError where none can run."""
    if (reason := unsupported(desc, target)) is not None:
        raise NotImplementedError(reason)
    block_n = _block_n(desc, block_m)
    stages = {16: 6, 32: 6, 64: 4, 128: 3}[block_m]
    configs = [MmaConfig(block_m, block_n, count, target=target) for count in range(stages, 1, -1)]
    fitting = [config for config in configs if config_error(desc, config) is None]
    if not fitting:
        raise NotImplementedError(config_error(desc, configs[-1]))
    # Two CTAs of an SM hide each other's epilogues; the highest tiles take the registers of two.
    half = (target.smem_bytes + 1024) // 2 - 1024
    in_pairs = [c for c in fitting if block_m < 128 and c.num_stages > 2 and shared_memory(desc, c) <= half]
    return (in_pairs or fitting)[0]


def _block_n(desc: AnyDesc, block_m: int) -> int:
    if block_m == 16:  # where weights are read, not multiplied: many bytes under way
        return 128
    # 128 weight rows, or 64 of each projection; with promotion as many sums again hold the step's product.
    if desc.projections > 1 or is_promoted(desc) or (desc.n % 128 and desc.n % 64 == 0):
        return 64
    return 128


def describe(desc: AnyDesc, config: MmaConfig) -> str:
    """What ``explain`` says."""
    weights = "unpacked in registers" if isinstance(desc, PackedDesc) else f"{desc.dtype}"
    tile = (
        f"{config.block_m} x {desc.projections} x {config.block_n}"
        if desc.projections > 1
        else (f"{config.block_m} x {config.block_n}")
    )
    kib = shared_memory(desc, config) >> 10
    return f"{tile} tiles by mma.sync, {weights}, {config.num_stages} stages ({kib} KiB shared memory), {config.target}"
