"""What one call asks (``WgradDesc``), how the Hopper kernel runs it (``WgradConfig``), and whether that fits."""

import dataclasses

import jax.numpy as jnp

from pallas_kernels.common.sm90 import SMEM_BYTES, smem_bytes

STEP = 64  # rows of one step of the ring
UNIT = 64  # elements of 16 bits in the widest swizzle: both operands lie in such columns
MAX_STAGES = 8
# (consumers, producer) registers a thread, by number of consumers; None where they keep those they enter with.
_REGISTERS = {1: None, 2: (240, 24)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class WgradDesc:
    """Static description of one call; the letters are those of ``grouped_wgrad``.

    rows: Mp. dtype: of both operands.
    """

    rows: int
    n: int
    k: int
    num_experts: int
    dtype: str = "bfloat16"
    out_dtype: str = "bfloat16"


@dataclasses.dataclass(frozen=True)
class WgradConfig:
    """One way to run a ``WgradDesc`` on sm_90.

    Args:
        block_n: rows of an output tile, 64 for each warpgroup that multiplies; 64 or 128.
        block_k: columns of an output tile.
        num_stages: slots of the shared-memory ring, 64 rows of both operands each.
        raster_group_n: row tiles of the output walked together, so that CTAs running at the same time share both
            operands in L2: 132 CTAs on 16 row tiles of 128 read about as much of each.
        num_sms: persistent CTAs, one per SM.
    """

    block_n: int
    block_k: int
    num_stages: int
    raster_group_n: int = 16
    num_sms: int = 132

    @property
    def num_consumers(self) -> int:
        return self.block_n // UNIT

    @property
    def registers(self) -> tuple[int, int] | None:
        """Of a thread, (consumer, producer)."""
        return _REGISTERS[self.num_consumers]


def store_columns(desc: WgradDesc) -> int:
    """Columns of one staged output store: 128 bytes."""
    return 128 // jnp.dtype(desc.out_dtype).itemsize


def overlaps(desc: WgradDesc) -> bool:
    """Whether a tile is stored while the next one is multiplied: beside accumulators of 64 x 256 a thread has room for
    values of 16 bits.
    """
    return jnp.dtype(desc.out_dtype).itemsize == 2


def shared_arrays(desc: WgradDesc, config: WgradConfig) -> dict[str, tuple[tuple[int, ...], str]]:
    """(shape, dtype) of what a CTA keeps in shared memory."""
    stages, consumers = config.num_stages, config.num_consumers
    return dict(
        dy=((stages, consumers, STEP, UNIT), desc.dtype),
        x=((stages, STEP, config.block_k), desc.dtype),
        staging=((consumers, 2, UNIT, store_columns(desc)), desc.out_dtype),
    )


def config_error(desc: WgradDesc, config: WgradConfig) -> str | None:
    """Why ``config`` cannot run ``desc``, or None when it can."""
    if desc.dtype not in ("bfloat16", "float16"):
        return f"operands of {desc.dtype}: wgmma contracts over rows in bfloat16 and float16 alone"
    if desc.out_dtype not in ("bfloat16", "float16", "float32"):
        return f"out_dtype {desc.out_dtype} is not one of bfloat16, float16, float32"
    if desc.n % UNIT or desc.k % UNIT:
        return f"N={desc.n} and K={desc.k}: both must be multiples of {UNIT}"
    if desc.rows % STEP:
        return f"rows={desc.rows} is not a multiple of {STEP}"
    if config.block_n not in (64, 128):
        return f"block_n={config.block_n}: one or two warpgroups of 64 rows, so 64 or 128"
    if config.block_k % UNIT or not UNIT <= config.block_k <= 256:
        return f"block_k={config.block_k}: a multiple of {UNIT}, at most 256"
    needed = sum(smem_bytes(*array) for array in shared_arrays(desc, config).values()) + 16 * config.num_stages
    if config.num_stages < 2:
        return f"num_stages={config.num_stages}: at least 2, one loading while one is multiplied"
    if needed > SMEM_BYTES:
        return f"needs {needed} bytes of shared memory with {config.num_stages} stages, a CTA has {SMEM_BYTES}"
    return None


def candidates(desc: WgradDesc, num_sms: int) -> list[WgradConfig]:
    """Configurations that can run ``desc`` and are worth timing, preferred ones first, each with the most stages."""
    found = []
    for block_n in (128, 64) if desc.n > UNIT else (64,):
        for block_k in (256, 192, 128, 64):
            if block_k > UNIT and block_k >= desc.k + UNIT:  # wider than the output
                continue
            rings = (WgradConfig(block_n, block_k, stages, num_sms=num_sms) for stages in range(MAX_STAGES, 1, -1))
            deepest = next((config for config in rings if config_error(desc, config) is None), None)
            found += [] if deepest is None else [deepest]
    return found


def choose_config(desc: WgradDesc, num_sms: int) -> WgradConfig:
    """The first candidate. Raises NotImplementedError with the reason where there is none."""
    found = candidates(desc, num_sms)
    if not found:
        raise NotImplementedError(config_error(desc, WgradConfig(64, 64, 2, num_sms=num_sms)) or f"nothing fits {desc}")
    return found[0]
