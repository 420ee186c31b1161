"""What one prefill asks (``PrefillDesc``), how the Hopper kernel runs it (``PrefillConfig``), what it cannot run."""

import dataclasses

from pallas_kernels.common.pages import PAGE_SLOTS
from pallas_kernels.common.sm90 import SMEM_BYTES, TMA_BOX, smem_bytes

BLOCK_Q = 128  # queries of a tile: 64 for each of two consumer warpgroups
ROWS = BLOCK_Q // 2  # queries of a consumer
STORE_COLUMNS = 64  # of the output, stored at a time: one row of the swizzle
DTYPES = ("bfloat16", "float16")
_BARRIERS = 2048  # bytes, more than the barriers take


@dataclasses.dataclass(frozen=True)
class PrefillDesc:
    """Static description of one call: S queries of each of B rows over L slots of keys and values.

    Args:
        batch, num_queries, num_slots: B, S, L.
        num_heads, num_kv_heads: N query heads; each of M key heads serves N / M of them.
        width, value_width: of a query or key, and of a value.
        dtype: of all of them and of the output.
        scale: of the scores, above 0.
        window: how many slots up to its own a query sees; None for all.
        is_causal: a query sees no slot behind its own.
        has_sinks: each query head has a logit more.
        has_sequences: a row holds several sequences, which without a window may share the row's first slots.
        has_scales: scores and outputs are multiplied with a scale each that the device knows: those of codes that keys
            and values are.
        num_pages: of PAGE_SLOTS slots each, in which a table says where rows have theirs; 0 where rows have their own.
    """

    batch: int
    num_queries: int
    num_slots: int
    num_heads: int
    num_kv_heads: int
    width: int
    value_width: int
    dtype: str
    scale: float
    window: int | None = None
    is_causal: bool = True
    has_sinks: bool = False
    has_sequences: bool = False
    num_pages: int = 0
    has_scales: bool = False

    @property
    def group(self) -> int:
        """Query heads of one key head."""
        return self.num_heads // self.num_kv_heads

    @property
    def query_tiles(self) -> int:
        return -(-self.num_queries // BLOCK_Q)

    @property
    def num_tiles(self) -> int:
        """Tiles of the whole call: (rows of the batch, heads, queries)."""
        return self.batch * self.num_heads * self.query_tiles


@dataclasses.dataclass(frozen=True)
class PrefillConfig:
    """How the kernel runs.

    Args:
        block_kv: keys of one step.
        num_stages: steps of keys and values in shared memory.
        num_sms: persistent CTAs.
        query_stages: tiles of queries in shared memory.
    """

    block_kv: int
    num_stages: int
    num_sms: int
    query_stages: int = 1


def shared_bytes(desc: PrefillDesc, config: PrefillConfig) -> int:
    """Shared memory of a CTA."""
    shapes = [
        (config.query_stages, BLOCK_Q, desc.width),
        (config.num_stages, config.block_kv, desc.width),
        (config.num_stages, config.block_kv, desc.value_width),
        (2, ROWS, STORE_COLUMNS),
    ]
    return sum(smem_bytes(shape, desc.dtype) for shape in shapes) + _BARRIERS


def config_error(desc: PrefillDesc, config: PrefillConfig) -> str | None:
    """Why the Hopper kernel cannot run ``desc``, or None when it can."""
    if desc.dtype not in DTYPES:
        return f"{desc.dtype}; there are {' and '.join(DTYPES)}"
    for what, width in (("width", desc.width), ("value_width", desc.value_width)):
        if width % 64 or not 64 <= width <= 256:
            return f"{what}={width}: 64, 128, 192 or 256"
    if desc.num_pages and desc.has_sequences:
        return "rows of several sequences in pages: gather them"  # with 256 columns ptxas spills
    if desc.has_scales and desc.width != desc.value_width:
        return f"codes with width={desc.width}, value_width={desc.value_width}: equal"  # with a window ptxas spills
    if config.block_kv % 64 or not 64 <= config.block_kv <= TMA_BOX:
        return f"block_kv={config.block_kv}: a multiple of 64, at most {TMA_BOX}"
    if desc.num_pages and BLOCK_Q % (config.block_kv // PAGE_SLOTS):
        return f"block_kv={config.block_kv} in pages: queries come in as many copies, so 64, 128 or 256"
    if config.num_stages < 2 or config.query_stages < 1:
        return f"num_stages={config.num_stages}, query_stages={config.query_stages}: at least 2 and 1"
    if (size := shared_bytes(desc, config)) > SMEM_BYTES:
        return f"{size} bytes of shared memory, there are {SMEM_BYTES}"
    return None


def choose_config(desc: PrefillDesc, num_sms: int) -> PrefillConfig:
    """Steps of 128 keys where two of them fit, and as many stages as fit, at most four. Then queries of the next tile
    come while this one's are in use, if there is room for both.
    """
    sms = max(1, min(num_sms, desc.num_tiles))
    for block_kv in (128, 64):
        for num_stages in (4, 3, 2):
            config = PrefillConfig(block_kv, num_stages, sms)
            if desc.value_width * block_kv <= 128 * 128 and config_error(desc, config) is None:
                ahead = dataclasses.replace(config, query_stages=2)
                return config if config_error(desc, ahead) else ahead
    return PrefillConfig(64, 2, sms)
